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

// The nodes from the root to where the steps end; returns the index of the last. By one thread.
__device__ __forceinline__ int follow(const int32_t* steps, int16_t* path, uint32_t* status) {
  int n = 0, last = 0;
  for (;; ++last) {
    const int step = steps[n];
    path[last] = static_cast<int16_t>(n);
    *status |= static_cast<uint32_t>(step) >> 16 & 0xffu;
    if ((step & kNoStep) == kNoStep) return last;
    n = step & kNoStep;
  }
}

// Everything but the token at the end. logprobs: of the tokens of nodes. By one block.
__device__ __forceinline__ void emit_path(const TreeRequest& r, const SharedTree& tree,
                                          const int16_t* path, const float* logprobs, int last) {
  const VerifyTreeParams& p = r.p;
  const int64_t first = r.b * p.width;
  for (int i = threadIdx.x; i < p.width; i += blockDim.x) {
    const int next = i < last ? path[i + 1] : 0;
    p.path[first + i] = i <= last ? path[i] : -1;
    if (i == last) continue;
    p.out_tokens[first + i] = i < last ? tree.token[next] : -1;
    if (p.chosen_logprob != nullptr) p.chosen_logprob[first + i] = i < last ? logprobs[next] : 0.0f;
  }
}

// The token at the end, or -1. By one thread.
__device__ __forceinline__ void emit_last(const TreeRequest& r, int last, int64_t token,
                                          float logprob, uint32_t status) {
  const VerifyTreeParams& p = r.p;
  if (last >= 0) p.out_tokens[r.b * p.width + last] = token;
  if (last >= 0 && p.chosen_logprob != nullptr) p.chosen_logprob[r.b * p.width + last] = logprob;
  p.num_accepted[r.b] = max(last, 0);
  p.num_emitted[r.b] = max(last, 0) + (token >= 0 ? 1 : 0);
  p.status[r.b] = static_cast<uint8_t>(status);
}

}  // namespace domino
