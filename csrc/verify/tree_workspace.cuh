// What the launches of verify_tree leave for each other, and a request's tree in shared memory.
#pragma once

#include "common/copy_async.cuh"
#include "verify/chain_judge.cuh"
#include "verify/row_cluster.cuh"
#include "verify/tree_walk.h"

namespace domino {

static_assert(sizeof(NodeRecord) == 48 && sizeof(RowStats) == 24 && sizeof(RowFilter) == 16 &&
              sizeof(ChunkStats) == 16 && kChunk == 1024);  // verify_tree_workspace() counts on it

struct TreeWorkspace {
  NodeRecord* records;  // [batch, width], of nodes with children
  RowStats* drafts;     // [batch, width]: of the draft row or the pool
  RowFilter* filters;   // [batch, width], with filters
  int32_t* drawn;       // [batch, width], match: the token that follows
  float* pool_p;        // [batch, width, pool], of traversal with more nodes than pairs of warps
  float* pool_q;
  ChunkStats* chunks;  // [batch, rows, row_chunks]: target rows, then the rows of a dense q
  uint32_t* first;     // the same: the lowest id that has the chunk's greatest logit
  int row_chunks;

  __host__ __device__ explicit TreeWorkspace(const VerifyTreeParams& p)
      : row_chunks(static_cast<int>((p.vocab + kChunk - 1) / kChunk)) {
    char* at = static_cast<char*>(p.workspace);
    const int64_t count = p.batch * p.width;
    const bool dense = p.draft_logits != nullptr;
    const auto take = [&](int64_t size) {
      char* taken = at;
      at += (size + 15) / 16 * 16;
      return static_cast<void*>(taken);
    };
    records = static_cast<NodeRecord*>(take(count * sizeof(NodeRecord)));
    drafts = static_cast<RowStats*>(take(dense || p.pool > 0 ? count * sizeof(RowStats) : 0));
    filters = static_cast<RowFilter*>(take(p.has_filters() ? count * sizeof(RowFilter) : 0));
    drawn = static_cast<int32_t*>(take(count * sizeof(int32_t)));
    pool_p = static_cast<float*>(take(count * p.pool * sizeof(float)));
    pool_q = static_cast<float*>(take(count * p.pool * sizeof(float)));
    const int64_t parts = count * (dense ? 2 : 1) * row_chunks;
    chunks = static_cast<ChunkStats*>(take(parts * sizeof(ChunkStats)));
    first = static_cast<uint32_t*>(take(parts * sizeof(uint32_t)));
  }
};

__device__ __forceinline__ NodeRecord load_record(const NodeRecord* record) {
  NodeRecord out;
  uint4* to = reinterpret_cast<uint4*>(&out);
#pragma unroll
  for (int n = 0; n < 3; ++n) to[n] = __ldcg(reinterpret_cast<const uint4*>(record) + n);
  return out;
}

// What threads ask for before anything else, all of it at once: it comes from memory, and each wait
// would be one more trip.
struct EarlyLoads {
  bool there = false;  // not of ragged batches
  int64_t token = -1;  // of node threadIdx.x
  int32_t parent = -1;
  BlockNoise noise{0, 0};

  __device__ __forceinline__ EarlyLoads(const VerifyTreeParams& p, int64_t b, bool wants_all) {
    there = p.cu_nodes == nullptr;
    const int n = threadIdx.x;
    if (there && n > 0 && n < p.width) {
      parent = p.parents[b * p.parents_stride + n];
      if (wants_all) token = p.tokens[b * p.tokens_stride + n];
    }
    if (wants_all && p.temperature != nullptr) noise = {p.seed[b], p.block_start[b]};
  }
};

// An SM's first access to a page takes longer than others: asks for a line of each page of the
// rows, and of what is left of them. By a warp, before anything is known of the tree.
__device__ __forceinline__ void touch_pages(const VerifyTreeParams& p, int64_t b) {
  if (p.cu_nodes != nullptr) return;
  const TreeWorkspace workspace(p);
  const LogitRow rows{p.target_logits, p.target_dtype};
#pragma unroll 1
  for (int n = threadIdx.x % kWarpSize; n < p.width; n += kWarpSize) {
    prefetch_l2(rows.plus(b * p.target_batch_stride + n * p.target_node_stride).data);
    prefetch_l2(workspace.chunks + (b * p.width + n) * workspace.row_chunks);
  }
}

// The nodes that have children. Rows of others are read where the walk ends, and nowhere else.
struct InnerNodes {
  static constexpr int kWords = kMaxTreeNodes / 32;
  int count;
  uint32_t bits[kWords];
  int16_t at[kMaxTreeNodes];  // in order

  __device__ __forceinline__ bool has(int n) const { return (bits[n / 32] >> n % 32 & 1) != 0; }

  // By the first `threads` threads of a block, who meet at sync(); synchronises. visit(n, parent)
  // is called once a node, parent as it is stored.
  template <class Sync, class Visit>
  __device__ __forceinline__ void load(const TreeRequest& r, const EarlyLoads& early, int threads,
                                       Sync sync, Visit visit) {
    if (threadIdx.x < kWords) bits[threadIdx.x] = 0;
    sync();
#pragma unroll 1
    for (int n = threadIdx.x; n < r.nodes; n += threads) {
      const bool own = early.there && n < threads;
      const int parent = n == 0 ? -1 : own ? early.parent : r.stored_parent(n);
      if (parent >= 0 && parent < n) atomicOr(&bits[parent / 32], 1u << parent % 32);
      visit(n, parent);
    }
    sync();
#pragma unroll 1
    for (int n = threadIdx.x; n < r.nodes; n += threads) {
      int before = __popc(bits[n / 32] & ((1u << n % 32) - 1));
#pragma unroll 1
      for (int word = 0; word < n / 32; ++word) before += __popc(bits[word]);
      if (has(n)) at[before] = static_cast<int16_t>(n);
      if (n == r.nodes - 1) count = before + has(n);
    }
    sync();
  }
};

struct SharedTree {
  static constexpr int kPad = -1, kBad = -2;
  int nodes;
  uint32_t faults;  // kBadTree
  InnerNodes inner;
  int16_t parent[kMaxTreeNodes];  // -1: root, pad or orphan
  int32_t token[kMaxTreeNodes];   // kPad and kBad: not a token

  // As InnerNodes::load; visit(n, parent, token), once a node.
  template <class Sync, class Visit>
  __device__ __forceinline__ void load(const TreeRequest& r, const EarlyLoads& early, int threads,
                                       Sync sync, Visit visit) {
    if (threadIdx.x == 0) {
      nodes = r.nodes;
      faults = 0;
    }
    inner.load(r, early, threads, sync, [&](int n, int stored) {
      const int above = stored >= 0 && stored < n ? stored : -1;
      int64_t x = kPad;
      if (n > 0) x = early.there && n < threads ? early.token : r.token(n);
      const int id = x >= 0 && x < r.p.vocab ? static_cast<int>(x) : x == -1 ? kPad : kBad;
      parent[n] = static_cast<int16_t>(above);
      token[n] = id;
      if (n > 0 && r.parent_fault(n, stored) != 0) faults = kBadTree;
      visit(n, above, id);
    });
  }

  // fn(c, mask) for the children of n, in order, 32 nodes at a time: a lane has node c, the mask
  // is of the lanes whose node is a child. By a whole warp, until fn returns false.
  template <class Fn>
  __device__ __forceinline__ void for_each_window(int n, Fn fn) const {
    for (int base = (n + 1) / kWarpSize * kWarpSize; base < nodes; base += kWarpSize) {
      const int c = base + static_cast<int>(threadIdx.x % kWarpSize);
      const unsigned mask = __ballot_sync(kFullMask, c > n && c < nodes && parent[c] == n);
      if (mask != 0 && !fn(c, mask)) return;
    }
  }

  // Does an earlier child of n have the token of this lane's child? By a whole warp. others: are
  // there children in front of this window?
  __device__ __forceinline__ bool repeats(int n, int c, bool child, bool others) const {
    const int lane = threadIdx.x % kWarpSize;
    const int x = child && token[c] >= 0 ? token[c] : -1 - lane;
    bool found = (__match_any_sync(kFullMask, x) & ((1u << lane) - 1)) != 0;
    for (int m = n + 1; others && m < c - lane; ++m) found |= parent[m] == n && token[m] == x;
    return found;
  }
};

// Is one of the children in this warp's window, whose tokens x are, the token? Then it is the step.
__device__ __forceinline__ bool find_child(int c, int x, uint32_t token, int* step,
                                           uint32_t* status) {
  const unsigned hit = __ballot_sync(kFullMask, x >= 0 && static_cast<uint32_t>(x) == token);
  const unsigned bad = __ballot_sync(kFullMask, x == SharedTree::kBad);
  if ((hit != 0 ? bad & ((hit & (0u - hit)) - 1) : bad) != 0) *status |= kBadId;
  if (hit != 0) *step = c - static_cast<int>(threadIdx.x % kWarpSize) + __ffs(hit) - 1;
  return hit != 0;
}

}  // namespace domino
