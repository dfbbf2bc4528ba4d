// The sums of a row (row_law.h) that a cluster reads once, by parts of a warp's tokens, each
// relative to its own greatest (verify_plain.cuh, verify_nucleus.cuh).
#pragma once

#include "verify/draft_row.cuh"
#include "verify/row_blocks.cuh"

namespace domino {

// Of all parts of a block.
template <class Row>
struct PartSums {
  static constexpr int kCount = kCutWarps * Row::kParts;
  alignas(16) ChunkStats of[kCount];

  // This warp has none.
  __device__ __forceinline__ void leave_none() {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    if (lane < Row::kParts) of[warp * Row::kParts + lane] = {0, {0, 0, 0}};
  }
};

// Of a warp's groups, as sum_chunk().
__device__ __forceinline__ ChunkStats sum_groups(const Group<bf16> (&groups)[kLaneGroups],
                                                 float scale) {
  const uint32_t key = __reduce_max_sync(kFullMask, logit_key(lane_top(groups)));
  ChunkStats out{key, {0, 0, 0}};
  if (key < kInfinityKey && key > kEmptyKey)
    chunk_digits(groups, key_logit(key), scale, out.digits);
  return out;
}

// The row's statistics, but for its argmax, from the sums of all warps. By a warp.
template <class Row>
__device__ __forceinline__ RowStats join_sums(const RowCluster& cluster, PartSums<Row>& sums,
                                              float scale) {
  const int lane = threadIdx.x % kWarpSize;
  constexpr int kOwn = ceil_div(PartSums<Row>::kCount, kWarpSize), kHeld = Row::kBlocks * kOwn;
  uint4 held[kHeld];
  uint32_t key = 0;
#pragma unroll
  for (int n = 0; n < kHeld; ++n) {
    const int at = n % kOwn * kWarpSize + lane;
    held[n] = {0, 0, 0, 0};
    if (at < PartSums<Row>::kCount)
      held[n] = *cluster.map(reinterpret_cast<uint4*>(sums.of) + at, n / kOwn);
  }
#pragma unroll
  for (int n = 0; n < kHeld; ++n) key = max(key, held[n].x);
  key = __reduce_max_sync(kFullMask, key);
  RowStats stats{0, key_logit(key), -1, 0, 0};
  stats.faults = row_faults(stats.top);
  if (stats.faults != 0) return stats;
  const RowExponent exponent(stats.top, scale);
  DigitSums all;
#pragma unroll
  for (int n = 0; n < kHeld; ++n) {
    if (held[n].x <= kEmptyKey) continue;
    const RowExponent own(key_logit(held[n].x), scale);
    if (exponent.huge) {
      if (held[n].x == key) all.at[0] += held[n].y;
    } else if (!own.huge) {
      const uint32_t digits[3] = {held[n].y, held[n].z, held[n].w};
      all.add(digits, exponent.grid() - own.grid());
    }
  }
#pragma unroll
  for (int n = 0; n < 3; ++n)  // of some thousand segments: 2^20 each
    all.at[n] = __reduce_add_sync(kFullMask, static_cast<uint32_t>(all.at[n]));
  stats.sum = exponent.huge ? all.at[0] << 40 : all.fixed(exponent);
  return stats;
}

}  // namespace domino
