// First launch of verify_tree: the rows of the nodes that have children.
//
// A row is read in chunks of 1024 tokens, one warp a chunk, once (row_chunks.cuh). Which rows are
// read is known from the parents alone: a row judges the children of its node, and a leaf's is only
// needed if the walk ends there, which the last launch knows. Bytes: the rows of inner nodes, once.
// Bound by HBM for large batches, by latency for small ones.
#pragma once

#include "common/copy_async.cuh"
#include "verify/tree_workspace.cuh"

namespace domino {

constexpr int kTreeRowBlocks = 2;  // on an SM, so that a block of the last launch fits beside them

// Warps of a block. A single request's rows are so few that most warps of the wide form have one
// chunk; it has the registers of one, where the other reads one chunk ahead.
template <bool kWide>
constexpr int kTreeRowWarps = kWide ? 10 : 8;

// A group of a row that is not aligned, or the row's last. A copy of it at every load would be half
// of the code.
template <class T>
__device__ __noinline__ Group<T> load_slowly(const T* row, int token, int vocab) {
  Group<T> out;
  out.load(row, token, vocab, false);
  return out;
}

// A lane's groups of the chunk of which `token` is its first. Without branches where that can be,
// so that all of them are on their way at once.
template <class T>
__device__ __forceinline__ void load_chunk(const RowSource<T>& source, int token,
                                           Group<T> (&groups)[kLaneGroups]) {
  if (source.aligned && (source.vocab % kGroup == 0 || token / kChunk < source.vocab / kChunk)) {
#pragma unroll
    for (int g = 0; g < kLaneGroups; ++g)
      groups[g].load_if(token + g * kGroupStep < source.vocab,
                        source.data + token + g * kGroupStep);
  } else {
#pragma unroll
    for (int g = 0; g < kLaneGroups; ++g)
      groups[g] = load_slowly(source.data, token + g * kGroupStep, source.vocab);
  }
}

// What the walk has to know of a chunk, in all lanes of a warp. first: the lowest id that has its
// greatest logit.
template <bool kArgmaxOnly, class T>
__device__ __forceinline__ ChunkStats chunk_stats(const Group<T> (&groups)[kLaneGroups], int token,
                                                  bool wants_first, bool wants_sum, float scale,
                                                  uint32_t& first) {
  const uint32_t own = logit_key(lane_top(groups));
  ChunkStats out{__reduce_max_sync(kFullMask, own), {0, 0, 0}};
  const float top = key_logit(out.key);
  if (kArgmaxOnly || wants_first) first = first_of(groups, token, top, own == out.key);
  if (!kArgmaxOnly && wants_sum && out.key < kInfinityKey && out.key > kEmptyKey)
    chunk_digits(groups, top, scale, out.digits);
  return out;
}

// The same to the workspace. kArgmaxOnly: as (key, first) pairs.
template <bool kArgmaxOnly, class T>
__device__ __forceinline__ void store_chunk(const Group<T> (&groups)[kLaneGroups], int token,
                                            bool wants_first, bool wants_sum, float scale,
                                            int64_t at, const TreeWorkspace& workspace) {
  const bool leader = threadIdx.x % kWarpSize == 0;
  uint32_t first = 0;
  const ChunkStats out =
      chunk_stats<kArgmaxOnly>(groups, token, wants_first, wants_sum, scale, first);
  if (!leader) return;
  if (kArgmaxOnly) {
    reinterpret_cast<uint2*>(workspace.chunks)[at] = {out.key, first};
  } else {
    if (wants_first) workspace.first[at] = first;
    *reinterpret_cast<uint4*>(workspace.chunks + at) = reinterpret_cast<const uint4&>(out);
  }
}

// Asks L2 for what the last launch reads first, pools of all nodes too, since it is not known yet
// which have children: asked for behind the rows it would come behind them. By all threads of the
// `blocks` of a request.
__device__ __forceinline__ void ask_for_request(const VerifyTreeParams& p, int64_t b, int block,
                                                int blocks) {
  if (p.cu_nodes != nullptr) return;
  constexpr int kLine = 128, kTokens = kLine / sizeof(int64_t), kEntries = kLine / sizeof(int32_t);
  const int width = static_cast<int>(p.width), lines = ceil_div(static_cast<int>(p.pool), kEntries);
  const int tokens = ceil_div(width, kTokens), all = tokens + 3 + width * lines;
#pragma unroll 1
  for (int i = block + blocks * threadIdx.x; i < all; i += blocks * blockDim.x) {
    if (i < tokens) {
      prefetch_l2(p.tokens + b * p.tokens_stride + i * kTokens);
    } else if (i < tokens + 3) {
      if (p.temperature == nullptr) continue;
      prefetch_l2(i == tokens       ? static_cast<const void*>(p.temperature + b)
                  : i == tokens + 1 ? static_cast<const void*>(p.seed + b)
                                    : p.block_start + b);
    } else {
      const int n = (i - tokens - 3) / lines, m = (i - tokens - 3 - n * lines) * kEntries;
      prefetch_l2(p.pool_ids + b * p.ids_batch_stride + n * p.ids_node_stride + m);
      prefetch_l2(LogitRow{p.pool_logits, p.draft_dtype}
                      .plus(b * p.pool_batch_stride + n * p.pool_node_stride + m)
                      .data);
    }
  }
}

// Grid: `blocks` to a request, which share its chunks. Rows of the target, or those of a dense q.
// kArgmaxOnly: all requests are greedy and nobody wants log-probabilities; then chunks are
// (key, first) pairs.
template <class T, bool kArgmaxOnly, bool kWide>
__global__ void __launch_bounds__(kTreeRowWarps<kWide>* kWarpSize, sizeof(T) == 4 ? 2 : 4)
    tree_rows_kernel(const __grid_constant__ VerifyTreeParams p, int blocks, bool of_target) {
  __shared__ InnerNodes inner;
  allow_next_launch();
  const int64_t b = blockIdx.x / blocks;
  const int block = static_cast<int>(blockIdx.x - b * blocks), warp = threadIdx.x / kWarpSize;
  const EarlyLoads early(p, b, false);
  if (of_target) ask_for_request(p, b, block, blocks);
  const TreeRequest r(p, b);
  const TreeWorkspace workspace(p);
  if (r.nodes < 2 || (!of_target && !r.uses_draft())) return;
  inner.load(r, early, blockDim.x, sync_block, [](int, int) {});
  const float scale = law_scale(of_target ? r.temperature : r.draft_temperature);
  const bool wants_first = r.rule == TreeRule::kGreedy;
  const bool wants_sum = !wants_first || p.chosen_logprob != nullptr;
  const int64_t row_of_request = (of_target ? b : p.batch + b) * p.width;
  const int lane = threadIdx.x % kWarpSize, row_chunks = workspace.row_chunks;
  const int count = inner.count * row_chunks, stride = blocks * kTreeRowWarps<kWide>;
  // of the wide form all blocks have as many chunks, up to one
  int item = kWide ? warp * blocks + block : block * kTreeRowWarps<kWide> + warp;
  if (item >= count) return;
  Group<T> groups[kLaneGroups], ahead[kLaneGroups];
  int chunk = 0, next_chunk = 0;
  int64_t at = 0, next_at = 0;
  const auto load = [&] {
    const int row = item / row_chunks, n = inner.at[row];
    next_chunk = item - row * row_chunks;
    next_at = (row_of_request + n) * row_chunks + next_chunk;
    const RowSource<T> source(of_target ? r.target_row(n) : r.draft_row(n), RowEdits{},
                              static_cast<int>(p.vocab));
    load_chunk(source, next_chunk * kChunk + lane * kGroup, ahead);
  };
  load();
#pragma unroll 1
  for (;;) {
#pragma unroll
    for (int g = 0; g < kLaneGroups; ++g) groups[g] = ahead[g];
    chunk = next_chunk;
    at = next_at;
    item += stride;
    const bool more = item < count;
    if (more && !kWide) load();
    store_chunk<kArgmaxOnly>(groups, chunk * kChunk + lane * kGroup, wants_first, wants_sum, scale,
                             at, workspace);
    if (!more) break;
    if (kWide) load();
  }
}

}  // namespace domino
