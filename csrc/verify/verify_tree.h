// verify_tree: which path of each request's tree of drafts is kept, and the token that follows it.
//
// A tree is a parent array in topological order: node 0 is the root (the last committed token),
// parents[n] < n, siblings in the order of their indices. Row n of the target logits holds the law
// of the token after node n, so it judges the children of n. The rules, the noise and every
// degenerate case: tree_walk.h, which kernel and twin share.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/hd.h"

namespace domino {

enum class TreeRule : int {
  kGreedy = 0,
  kMatch = 1,
  kTargetOnly = 2,
  kSiblings = 3,  // sampled siblings, without replacement (RRSw)
  kTraversal = 4
};

struct VerifyTreeParams {
  int64_t* out_tokens;             // [batch, width] contiguous, padded with -1
  int32_t* path;                   // [batch, width] contiguous: nodes from the root, then -1
  int32_t* num_accepted;           // [batch]
  int32_t* num_emitted;            // [batch]
  float* chosen_logprob;           // [batch, width] contiguous, padded with 0, or null
  uint8_t* status;                 // [batch] bits of VerifyStatus
  void* workspace;                 // CUDA: verify_tree_workspace() bytes; CPU: unused
  const void* target_logits;       // [batch, width, vocab], or [total_nodes, vocab] with cu_nodes
  const int64_t* tokens;           // [batch, width] or [total_nodes]; the root's is not read
  const int32_t* parents;          // likewise; the root's is not read
  const float* temperature;        // [batch], or null: greedy
  const int64_t* seed;             // [batch], or null with temperature
  const int64_t* block_start;      // [batch], or null with temperature
  const int32_t* pool_ids;         // [batch, width, pool] or [total_nodes, pool], or null
  const void* pool_logits;         // likewise
  const void* draft_logits;        // as target_logits, or null
  const float* draft_temperature;  // [batch], or null: that of the target
  const int32_t* top_k;            // filters (filter.h), each null or [batch]
  const float* top_p;
  const float* min_p;
  const int32_t* cu_nodes;  // [batch + 1], or null: width nodes each
  int64_t batch;
  int64_t width;  // most nodes of a request
  int64_t vocab;
  int64_t total_nodes;          // behind cu_nodes; unused without
  int64_t pool;                 // ids of a node's pool
  int64_t target_batch_stride;  // strides in elements; those of the batch are unused with cu_nodes
  int64_t target_node_stride;
  int64_t tokens_stride;
  int64_t parents_stride;
  int64_t ids_batch_stride;
  int64_t ids_node_stride;
  int64_t pool_batch_stride;
  int64_t pool_node_stride;
  int64_t draft_batch_stride;
  int64_t draft_node_stride;
  DType target_dtype;
  DType draft_dtype;  // of pool_logits or draft_logits
  TreeRule rule;
  int filter_order;  // FilterOrder

  DOMINO_HD bool has_filters() const {
    return top_k != nullptr || top_p != nullptr || min_p != nullptr;
  }
};

constexpr int64_t kMaxTreeNodes = 1024;
constexpr int64_t kMaxPool = 1024;

// Bytes of workspace of a CUDA call; tree_workspace.cuh lays it out.
inline int64_t verify_tree_workspace(int64_t batch, int64_t width, int64_t vocab, int64_t pool,
                                     bool dense, bool filtered) {
  const int64_t nodes = batch * width, chunks = nodes * (dense ? 2 : 1) * ((vocab + 1023) / 1024);
  int64_t bytes = 0;
  const auto take = [&](int64_t size) { bytes += (size + 15) / 16 * 16; };
  take(nodes * 48);                          // NodeRecord
  take(dense || pool > 0 ? nodes * 24 : 0);  // RowStats of q
  take(filtered ? nodes * 16 : 0);           // RowFilter
  take(nodes * 4);                           // drawn tokens
  take(nodes * pool * 4);                    // p and q over the pool
  take(nodes * pool * 4);
  take(chunks * 16);  // ChunkStats, and the first id of each
  take(chunks * 4);
  return bytes;
}

int verify_tree_cuda(const VerifyTreeParams& p, void* stream);
int verify_tree_cpu(const VerifyTreeParams& p);

}  // namespace domino
