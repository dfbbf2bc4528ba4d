// Warp reductions. Every lane gets the same bits: the butterfly adds the same pairs in all lanes.
#pragma once

#include "common/launch.h"

namespace domino {

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    value += __shfl_xor_sync(kFullMask, value, offset);
  return value;
}

// Modulo 2^64: by digits of 20 bits, whose sums are one instruction each.
__device__ __forceinline__ uint64_t warp_sum(uint64_t value) {
  const uint64_t low = __reduce_add_sync(kFullMask, static_cast<uint32_t>(value) & 0xfffffu);
  const uint64_t mid = __reduce_add_sync(kFullMask, static_cast<uint32_t>(value >> 20) & 0xfffffu);
  const uint64_t high = __reduce_add_sync(kFullMask, static_cast<uint32_t>(value >> 40));
  return low + (mid << 20) + (high << 40);
}

// Combines one value a thread; every thread gets the result. `combine` is associative and
// commutative, `slots` holds 32 values of shared memory, blockDim.x is a multiple of 32. All
// threads call it.
template <class T, class Combine>
__device__ __forceinline__ T block_reduce(T value, Combine combine, T* slots) {
  const int warps = blockDim.x / kWarpSize, lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    value = combine(value, __shfl_xor_sync(kFullMask, value, offset));
  if (warps == 1) return value;
  __syncthreads();  // the slots may still be read by the call before
  if (lane == 0) slots[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  T total = slots[0];
  for (int warp = 1; warp < warps; ++warp) total = combine(total, slots[warp]);
  return total;
}

}  // namespace domino
