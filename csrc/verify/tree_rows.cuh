// First launch of verify_tree: the rows, and what the walk does at their nodes.
//
// A row is read in chunks of 1024 tokens, one warp a chunk, once (row_chunks.cuh). The block that
// finishes a row puts its chunks together and judges the node, so a verdict is known while later
// rows are still to come. Blocks start in the order of the nodes: one whose node is cut off by then
// (an ancestor stepped elsewhere) leaves without reading. That only saves time: a verdict that
// comes late costs a row, never another result. For traversal nothing is cut off, and the block
// that finishes a request's last row judges all of its nodes, parents first.
//
// Bytes: rows of nodes that may be reached, once. Bound by HBM for large batches.
#pragma once

#include "verify/tree_judge.cuh"

namespace domino {

constexpr int kTreeRowWarps = 8;
constexpr int kTreeRowBlocks = 3;  // on an SM

// What the walk has to know of a chunk, by one warp.
template <class T>
__device__ __forceinline__ void chunk_stats(const Group<T> (&groups)[kLaneGroups], int token,
                                            bool wants_first, float scale, ChunkStats* stats,
                                            uint32_t* first) {
  const uint32_t own = logit_key(lane_top(groups));
  ChunkStats out{__reduce_max_sync(kFullMask, own), {0, 0, 0}};
  const float top = key_logit(out.key);
  if (wants_first) {
    const uint32_t id = first_of(groups, token, top, own == out.key);
    if (threadIdx.x % kWarpSize == 0) *first = id;
  }
  if (out.key < kInfinityKey && out.key > kEmptyKey) chunk_digits(groups, top, scale, out.digits);
  if (threadIdx.x % kWarpSize == 0) *stats = out;
}

struct TreeRowsShared {
  SharedTree tree;
  SharedPool pool;
  uint32_t start[kMaxTreeNodes];
  uint32_t inner[kMaxTreeNodes / 32];  // a bit a node: has children
  unsigned long long slots[kWarpSize];
  int ticket;
  bool flag;
};

// Does a verdict say that the walk does not come to node n? By one thread.
__device__ __forceinline__ bool cut_off(const TreeRequest& r, const NodeControl* nodes, int n) {
  constexpr int kGenerations = 4;
  for (int k = 0; k < kGenerations && n > 0; ++k) {
    const int parent = r.parent(n);
    if (parent < 0) return true;
    const int verdict = *const_cast<volatile int32_t*>(&nodes[parent].verdict);
    if (verdict == kDead || (verdict > kDead && verdict != kKnown + n)) return true;
    n = parent;
  }
  return false;
}

// After the row's statistics: judges the node, or with the last of a request all of its nodes.
__device__ __noinline__ void finish_node(const TreeRequest& r, const TreeWorkspace& workspace,
                                         int n, const RowFilter* cut, NodeRecord* record,
                                         TreeRowsShared* shared) {
  const int64_t at = r.b * r.p.width + n;
  if (record->stats.faults == 0)
    judge_node(r, workspace, shared->tree, &shared->pool, shared->slots, n, cut, record);
  if (threadIdx.x == 0) workspace.records[at] = *record;
  if (r.rule != TreeRule::kTraversal || r.p.draft_logits != nullptr) {
    if (threadIdx.x == 0)
      *const_cast<volatile int32_t*>(&workspace.nodes[at].verdict) = kKnown + record->step;
    return;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t* judged = &workspace.requests[r.b].judged;
    shared->flag = arrive(judged, 1) == r.nodes - 1u;
    if (shared->flag) *judged = 0;
  }
  __syncthreads();
  if (!shared->flag) return;
  judge_all(r, workspace, shared->tree, &shared->pool, shared->start, shared->inner,
            &shared->ticket);
}

// A row of target or draft logits.
template <class T>
struct Row {
  const T* data;
  bool aligned;

  __device__ Row(const VerifyTreeParams& p, int64_t b, int n, bool of_target) {
    const int64_t offset = of_target ? b * p.target_batch_stride + n * p.target_node_stride
                                     : b * p.draft_batch_stride + n * p.draft_node_stride;
    set(static_cast<const T*>(of_target ? p.target_logits : p.draft_logits) + offset);
  }
  __device__ Row(const VerifyTreeParams& p, const TreeRequest& r, int n, bool of_target) {
    set(static_cast<const T*>((of_target ? r.target_row(n) : r.draft_row(n)).data));
  }

 private:
  __device__ void set(const T* row) {
    data = row;
    aligned = reinterpret_cast<uintptr_t>(row) % 16 == 0;
  }
};

// Grid: (nodes, requests, row_blocks), the last fastest; rows of the target, or of a dense q, which
// only get their chunks. A block owns `steps` chunks a warp. Blocks before `prune_from` run in the
// first wave.
template <class T>
__global__ void __launch_bounds__(kTreeRowWarps* kWarpSize, sizeof(T) == 4 ? 2 : kTreeRowBlocks)
    tree_rows_kernel(const __grid_constant__ VerifyTreeParams p, int row_blocks, int steps,
                     int prune_from, bool of_target) {
  __shared__ TreeRowsShared shared;
  allow_next_launch();
  const TreeWorkspace workspace(p);
  const int row_block = blockIdx.x % row_blocks;
  const int64_t b = blockIdx.x / row_blocks % p.batch;
  const int n = static_cast<int>(blockIdx.x / row_blocks / p.batch);
  const int row_chunks = static_cast<int>((p.vocab + kChunk - 1) / kChunk);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const bool prunes = static_cast<int>(blockIdx.x) >= prune_from;

  // The first chunk is on its way before the request is known, where its place does not depend on
  // it and nothing may be cut off.
  Row<T> row(p, b, n, of_target);
  Group<T> groups[kLaneGroups];
  int chunk = row_block * steps * kTreeRowWarps + warp;
  const int last_chunk = min(chunk + (steps - 1) * kTreeRowWarps, row_chunks - 1);
  const auto load = [&](int which, Group<T>(&into)[kLaneGroups]) {
#pragma unroll
    for (int g = 0; g < kLaneGroups; ++g)
      into[g].load(row.data, which * kChunk + (g * kWarpSize + lane) * kGroup,
                   static_cast<int>(p.vocab), row.aligned);
  };
  const bool early = p.cu_nodes == nullptr && !prunes && chunk <= last_chunk;
  if (early) load(chunk, groups);

  const TreeRequest r(p, b);
  if (n >= r.nodes || (!of_target && !r.uses_draft())) return;
  const int64_t at = b * p.width + n;
  const bool filtered = r.filters().any(p.vocab);
  bool dead = false;
  if (prunes && of_target && r.rule != TreeRule::kTraversal && p.draft_logits == nullptr &&
      !filtered) {
    if (threadIdx.x == 0) shared.flag = cut_off(r, workspace.nodes + b * p.width, n);
    __syncthreads();
    dead = shared.flag;
  }

  const int64_t row_at = at + (of_target ? 0 : p.batch * p.width);
  ChunkStats* chunks = workspace.chunks + row_at * row_chunks;
  uint32_t* first = workspace.first + row_at * row_chunks;
  const float scale = law_scale(of_target ? r.temperature : r.draft_temperature);
  const bool greedy = r.rule == TreeRule::kGreedy;
  if (!dead && chunk <= last_chunk) {
    if (!early) {
      row = Row<T>(p, r, n, of_target);
      load(chunk, groups);
    }
    for (;; chunk += kTreeRowWarps) {
      const bool more = chunk + kTreeRowWarps <= last_chunk;
      Group<T> next[kLaneGroups];
      if (more) load(chunk + kTreeRowWarps, next);
      chunk_stats(groups, chunk * kChunk + lane * kGroup, greedy, scale, chunks + chunk,
                  first + chunk);
      if (!more) break;
#pragma unroll
      for (int g = 0; g < kLaneGroups; ++g) groups[g] = next[g];
    }
  }
  if (!of_target) return;  // a later launch puts draft rows together
  __syncthreads();
  if (threadIdx.x == 0) {
    NodeControl* control = workspace.nodes + at;
    const uint32_t before = arrive(&control->arrived, dead ? 0x10001u : 1u);
    shared.flag = (before & 0xffffu) == static_cast<uint32_t>(row_blocks) - 1;
    if (shared.flag) {
      control->arrived = 0;
      if (dead || before >> 16 != 0) {
        *const_cast<volatile int32_t*>(&control->verdict) = kDead;
        shared.flag = false;
      }
    }
  }
  __syncthreads();
  if (!shared.flag) return;

  const bool pooled = r.uses_draft() && p.draft_logits == nullptr && !filtered;
  if (warp == 1 && pooled) load_pool(r, n, &shared.pool);
  NodeRecord record;
  if (warp == 0 || r.rule == TreeRule::kMatch) {
    uint32_t lane_key;
    record =
        fresh_record(combine_chunks(chunks, first, row_chunks, scale, greedy, &lane_key), 1.0f);
  }
  shared.tree.load(r);  // synchronises
  if (filtered || (p.draft_logits != nullptr && r.uses_draft())) {
    if (threadIdx.x == 0) workspace.records[at] = record;
    return;
  }
  finish_node(r, workspace, n, nullptr, &record, &shared);
}

}  // namespace domino
