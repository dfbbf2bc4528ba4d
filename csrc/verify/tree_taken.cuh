// What the last token of a walk may no longer be, or less often.
#pragma once

#include "verify/tree_workspace.cuh"

namespace domino {

// Tokens with what is taken off their weight.
struct SharedTaken {
  static constexpr int kSlots = kMaxPool / 2 * 3, kNone = -1;
  int32_t ids[kSlots];
  float amounts[kSlots];

  static_assert(kMaxTreeNodes <= kMaxPool);
  static __device__ __forceinline__ int slot_of(int id) {
    return static_cast<int>(__umulhi(static_cast<uint32_t>(id) * 0x9e3779b1u, kSlots));
  }

  // By `threads` threads, of which this is number `thread`.
  __device__ __forceinline__ void clear(int thread, int threads) {
#pragma unroll 1
    for (int i = thread; i < kSlots; i += threads) ids[i] = kNone;
  }
  // Tokens are distinct, or all amounts are infinite; at most two thirds of the slots are taken.
  __device__ void put(int id, float amount) {
    int i = slot_of(id);
    for (;; i = (i + 1) % kSlots) {
      const int found = atomicCAS(&ids[i], kNone, id);
      if (found == kNone || found == id) break;
    }
    amounts[i] = amount;
  }
  __device__ __forceinline__ float of(int id) const {
    for (int i = slot_of(id);; i = (i + 1) % kSlots) {
      const int found = ids[i];
      if (found == id) return amounts[i];
      if (found == kNone) return 0.0f;
    }
  }

  // The children of node n, whole. All threads of a block.
  __device__ __forceinline__ void put_children(const SharedTree& tree, int n) {
#pragma unroll 1
    for (int c = n + 1 + threadIdx.x; c < tree.nodes; c += blockDim.x)
      if (tree.parent[c] == n && tree.token[c] >= 0) put(tree.token[c], INFINITY);
  }
};

}  // namespace domino
