// The arithmetic of the block form: every sum in one order, whoever computes it.
#pragma once

#include "common/argmax_key.h"
#include "common/launch.h"
#include "common/mma.cuh"
#include "head/draft_chain.h"

namespace domino {

constexpr int kBlockWarps = 16;  // they share the k of products with the state
constexpr int kBlockThreads = kBlockWarps * kWarpSize;

__device__ __forceinline__ unsigned long long warp_best(unsigned long long key) {
  const uint32_t high = static_cast<uint32_t>(key >> 32);
  const uint32_t best = __reduce_max_sync(kFullMask, high);
  const uint32_t low = high == best ? static_cast<uint32_t>(key) : 0;
  return static_cast<unsigned long long>(best) << 32 | __reduce_max_sync(kFullMask, low);
}

__device__ __forceinline__ float fast_sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
__device__ __forceinline__ float fast_tanh(float x) {
  return 1.0f - __fdividef(2.0f, 1.0f + __expf(fminf(2.0f * x, 80.0f)));
}

// A unit of S_j: x and s the gates' (r, z, n) products with the input and with S_{j-1}.
template <class T>
__device__ __forceinline__ T gru_unit(float x_r, float x_z, float x_n, float s_r, float s_z,
                                      float s_n, float state) {
  const float r = fast_sigmoid(x_r + s_r), keep = fast_sigmoid(x_z + s_z);
  const float candidate = fast_tanh(x_n + r * s_n);
  T next = from_float<T>(candidate + keep * (state - candidate));
  next.bits &= 0xbfff;  // below 2 whatever comes in: NaN in the weights becomes 1.5
  return next;
}

// The sum over the warps' parts of k, kStride apart (1: at 16 bytes).
template <int kStride>
__device__ __forceinline__ float sum_of_warps(const float* part) {
  float sum[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float4 four;
    if constexpr (kStride == 1) {
      four = reinterpret_cast<const float4*>(part)[i];
    } else {
      const float* at = part + 4 * i * kStride;
      four = {at[0], at[kStride], at[2 * kStride], at[3 * kStride]};
    }
    sum[i] = (four.x + four.y) + (four.z + four.w);
  }
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

__device__ __forceinline__ float base_at(const DraftChainParams& p, int64_t b, int64_t j, int64_t v) {
  const int64_t at = b * p.base_batch_stride + (p.first_slot + j) * p.base_slot_stride;
  if (p.base_dtype == DType::kF32)
    return adjusted_base(p, static_cast<const float*>(p.base_logits) + at, b, v);
  if (p.base_dtype == DType::kF16)
    return adjusted_base(p, static_cast<const f16*>(p.base_logits) + at, b, v);
  return adjusted_base(p, static_cast<const bf16*>(p.base_logits) + at, b, v);
}

// The four chains of a tile of 16 ids: this lane's rows of W2 at `low` and `high`, u at `u`, each
// `steps` times 16 elements (kRank / 16 where that is known).
template <class T, int kRank>
__device__ __forceinline__ void score_tile(float (&sums)[4][4], const char* low, const char* high,
                                           const char* u, int steps) {
  const int chain = kRank ? kRank / 64 : (steps + 3) / 4;
  static_assert(kRank % 64 == 0);
#pragma unroll(kRank ? kRank / 64 : 1)
  for (int i = 0; i < chain; ++i) {
    uint2 a[4], b[4], x[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int at = (q * chain + i) * 32;
      const bool inside = kRank || at < steps * 32;  // zeros add nothing to a sum
      a[q] = inside ? *reinterpret_cast<const uint2*>(low + at) : uint2{0, 0};
      b[q] = inside ? *reinterpret_cast<const uint2*>(high + at) : uint2{0, 0};
      x[q] = inside ? *reinterpret_cast<const uint2*>(u + at) : uint2{0, 0};
    }
#pragma unroll
    for (int q = 0; q < 4; ++q)
      mma_16x8x16<T>(sums[q], a[q].x, b[q].x, a[q].y, b[q].y, x[q].x, x[q].y);
  }
}

__device__ __forceinline__ float chain_sum(const float (&sums)[4][4], int element) {
  return (sums[0][element] + sums[1][element]) + (sums[2][element] + sums[3][element]);
}

}  // namespace domino
