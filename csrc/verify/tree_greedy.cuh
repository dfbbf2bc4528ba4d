// Last launch of verify_tree where every request is greedy and nobody wants log-probabilities: a
// cluster owns a request, a warp finds the winner of one node's row from its chunks and the child
// that has it. Bytes: the chunks, and a row where the walk ends at a leaf; bound by latency, so the
// code is short.
#pragma once

#include "verify/tree_last_row.cuh"
#include "verify/tree_path.cuh"

namespace domino {

constexpr int kTreeGreedyThreads = 256;

// The winner of a row: key of its logit, ~id. By a whole warp.
__device__ __forceinline__ unsigned long long row_winner(const TreeWorkspace& workspace,
                                                         int64_t row) {
  const uint2* chunks =
      reinterpret_cast<const uint2*>(workspace.chunks) + row * workspace.row_chunks;
  unsigned long long best = 0;
#pragma unroll 5
  for (int c = threadIdx.x % kWarpSize; c < workspace.row_chunks; c += kWarpSize) {
    const uint2 chunk = __ldcg(chunks + c);
    best = max(best, static_cast<unsigned long long>(chunk.x) << 32 | ~chunk.y);
  }
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    best = max(best, __shfl_xor_sync(kFullMask, best, offset));
  return best;
}

__device__ __forceinline__ uint32_t winner_faults(unsigned long long winner) {
  return row_faults(key_logit(static_cast<uint32_t>(winner >> 32)));
}

// Grid: a cluster a request.
template <class T>
__global__ void __launch_bounds__(kTreeGreedyThreads)
    tree_greedy_kernel(const __grid_constant__ VerifyTreeParams p) {
  __shared__ SharedTree tree;
  __shared__ int32_t steps[kMaxTreeNodes];
  __shared__ unsigned long long winners[kMaxTreeNodes];  // in the first block
  __shared__ int16_t path[kMaxTreeNodes];
  __shared__ uint32_t shared_status;
  __shared__ int shared_last;
  const RowCluster cluster;
  const int64_t b = blockIdx.x / cluster.size, first = b * p.width;
  const TreeRequest r(p, b);
  const TreeWorkspace workspace(p);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  if (r.nodes == 0) {
    previous_launch_done();
    if (cluster.rank != 0) return;
    emit_path(r, tree, nullptr, nullptr, -1);
    if (threadIdx.x == 0) emit_last(r, -1, -1, 0.0f, r.faults);
    return;
  }
  tree.load(r);
  for (int n = threadIdx.x; n < r.nodes; n += blockDim.x) steps[n] = kNoStep;
  cluster.sync();  // all blocks are there, and their steps
  previous_launch_done();
  constexpr int kWarps = kTreeGreedyThreads / kWarpSize;
  for (int k = cluster.rank + cluster.size * warp; k < tree.inner.count;
       k += cluster.size * kWarps) {
    const int n = tree.inner.at[k];
    const unsigned long long winner = row_winner(workspace, first + n);
    if (lane == 0) *cluster.map(winners + n, 0) = winner;
    if (winner_faults(winner) != 0) continue;
    int step = -1;
    uint32_t status = 0;
    tree.for_each_window(n, [&](int c, unsigned mask) {
      const int x = (mask >> lane & 1) != 0 ? tree.token[c] : SharedTree::kPad;
      return !find_child(c, x, static_cast<uint32_t>(~winner), &step, &status);
    });
    publish_step(cluster, steps, n, step, status);
  }
  cluster.sync();
  if (threadIdx.x == 0) {
    uint32_t status = tree.faults;
    shared_last = follow(steps, path, &status);
    shared_status = status;
  }
  __syncthreads();
  const int last = shared_last, n = path[last];
  unsigned long long winner = winners[n];
  if (!tree.inner.has(n)) {
    LastRow<T> row(cluster, r.target_row(n), p.vocab);
    row.fetch_ahead();
    read_row<true>(cluster, r, workspace, (first + n) * workspace.row_chunks, &row);
    if (cluster.rank == 0 && warp == 0) winner = row_winner(workspace, first + n);
  }
  if (cluster.rank != 0) return;
  emit_path(r, tree, path, nullptr, last);
  if (threadIdx.x != 0) return;
  const uint32_t faults = winner_faults(winner);
  emit_last(r, last, faults == 0 ? static_cast<int64_t>(static_cast<uint32_t>(~winner)) : -1, 0.0f,
            shared_status | faults);
}

}  // namespace domino
