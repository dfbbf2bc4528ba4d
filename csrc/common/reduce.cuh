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

}  // namespace domino
