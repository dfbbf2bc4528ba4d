// The end of verify_tree: from the steps of the nodes to what is emitted.
#pragma once

#include "verify/tree_workspace.cuh"

namespace domino {

// A step in shared memory: the child, or kNoStep, and above it the node's status.
constexpr int kNoStep = 0xffff;

// Tells all blocks of the cluster. By a whole warp; they see it behind the next cluster.sync().
__device__ __forceinline__ void publish_step(const RowCluster& cluster, int32_t* steps, int n,
                                             int step, uint32_t status) {
  const int lane = threadIdx.x % kWarpSize;
  if (lane < cluster.size)
    *cluster.map(steps + n, lane) = (step & kNoStep) | static_cast<int32_t>(status << 16);
}

// Goes from the root to where the steps end: node *n, the *last of the path. By any threads; the
// one that gives `path` writes it.
__device__ __forceinline__ void follow(const int32_t* steps, int* n, int* last, uint32_t* status,
                                       int16_t* path) {
#pragma unroll 1
  for (int step = steps[*n];; ++*last) {
    // on its way while this one is looked at; kNoStep is no node
    const int next = steps[step & (kMaxTreeNodes - 1)];
    if (path != nullptr) path[*last] = static_cast<int16_t>(*n);
    *status |= static_cast<uint32_t>(step) >> 16 & 0xffu;
    if ((step & kNoStep) == kNoStep) return;
    *n = step & kNoStep;
    step = next;
  }
}

// Everything but the token at the end. logprob(i): of the i-th token. By `threads` threads, of
// which this is number `thread`.
template <class Logprob>
__device__ __forceinline__ void emit_path(const TreeRequest& r, const SharedTree& tree,
                                          const int16_t* path, int last, int thread, int threads,
                                          Logprob logprob) {
  const VerifyTreeParams& p = r.p;
  const int64_t first = r.b * p.width;
#pragma unroll 1
  for (int i = thread; i < p.width; i += threads) {
    p.path[first + i] = i <= last ? path[i] : -1;
    if (i == last) continue;
    p.out_tokens[first + i] = i < last ? tree.token[path[i + 1]] : -1;
    if (p.chosen_logprob != nullptr) p.chosen_logprob[first + i] = i < last ? logprob(i) : 0.0f;
  }
}

// Of a request that has no nodes. By one block.
__device__ __forceinline__ void emit_nothing(const TreeRequest& r) {
  const VerifyTreeParams& p = r.p;
#pragma unroll 1
  for (int64_t i = r.b * p.width + threadIdx.x; i < (r.b + 1) * p.width; i += blockDim.x) {
    p.path[i] = -1;
    p.out_tokens[i] = -1;
    if (p.chosen_logprob != nullptr) p.chosen_logprob[i] = 0.0f;
  }
  if (threadIdx.x != 0) return;
  p.num_accepted[r.b] = p.num_emitted[r.b] = 0;
  p.status[r.b] = static_cast<uint8_t>(r.faults);
}

// The token at the end, or -1. By one thread.
__device__ __forceinline__ void emit_last(const TreeRequest& r, int last, int64_t token,
                                          float logprob, uint32_t status) {
  const VerifyTreeParams& p = r.p;
  p.out_tokens[r.b * p.width + last] = token;
  if (p.chosen_logprob != nullptr) p.chosen_logprob[r.b * p.width + last] = logprob;
  p.num_accepted[r.b] = last;
  p.num_emitted[r.b] = last + (token >= 0 ? 1 : 0);
  p.status[r.b] = static_cast<uint8_t>(status);
}

}  // namespace domino
