// Where a nucleus cuts a row of bf16 logits whose values a cluster has counted. The steps of
// verify_nucleus.cuh and verify_nucleus_draws.cuh.
#pragma once

#include "verify/bin_rows.cuh"
#include "verify/cluster_sums.cuh"
#include "verify/draft_row.cuh"
#include "verify/ranked_tokens.cuh"
#include "verify/row_counter.cuh"

namespace domino {

constexpr int kSlotParts = 3;  // of 16 bytes, of a SlotAhead
struct alignas(16) SentSlot : SlotAhead {
  float draft_inverse;  // one over draft_sum
};
static_assert(sizeof(SentSlot) == 16 * kSlotParts);
// What a block has counted.
struct NucleusCounts {
  alignas(16) uint32_t count[kValueBins];
  alignas(8) uint32_t top;           // logit_key
  uint32_t near;                     // tokens in the bins around 0 that are not 0
  uint16_t near_token[kNearTokens];  // bf16
};

template <class Row>
struct NucleusShared : NucleusCounts {
  alignas(16) uint64_t row_mass[kOctaves];
  SentSlot slot;
  PartSums<Row> draft_sums;  // of the row of q
  // of the leader
  SentSlot out;
  PoolAhead pool;
};

// The rows of bins that a warp sums up over all blocks.
template <class Row>
struct OwnRows {
  static constexpr int kCount = ceil_div(kOctaves, Row::kBlocks* kJudge);

  // Number n of this warp's; none where that is not below kOctaves.
  static __device__ __forceinline__ int at(int n, int rank) {
    const int warp = threadIdx.x / kWarpSize;
    return warp < kJudge ? (n * kJudge + warp) * Row::kBlocks + rank : kOctaves;
  }
};

// The cluster's counts of a lane's bins of a row. -0 is +0.
template <class Row>
__device__ __forceinline__ uint4 cluster_bins(const RowCluster& cluster, NucleusCounts& s,
                                              int row) {
  const int lane = threadIdx.x % kWarpSize;
  uint4* own = reinterpret_cast<uint4*>(s.count) + row * kWarpSize + lane;
  uint4 theirs[Row::kBlocks], sum{0, 0, 0, 0};
#pragma unroll
  for (int block = 0; block < Row::kBlocks; ++block) theirs[block] = *cluster.map(own, block);
#pragma unroll
  for (int block = 0; block < Row::kBlocks; ++block)
    sum = {sum.x + theirs[block].x, sum.y + theirs[block].y, sum.z + theirs[block].z,
           sum.w + theirs[block].w};
  if (row == kZeroBin / kRowBins) {
    const uint32_t minus = lane < Row::kBlocks ? *cluster.map(s.count + kZeroBin + 1, lane) : 0;
    sum = join_zeros(row, sum, __reduce_add_sync(kFullMask, minus));
  }
  return join_zeros(row, sum, 0);
}

// What lies in a lane's bins of a row. near: what the tokens near 0 weigh more than 0 does
__device__ __forceinline__ void weigh_bins(const RowLaw& law, int row, const uint4& bins,
                                           uint64_t near, uint64_t (&mass)[4]) {
  const int bin = row * kRowBins + threadIdx.x % kWarpSize * 4;
  const uint32_t counts[4] = {bins.x, bins.y, bins.z, bins.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) mass[j] = counts[j] * to_fixed(law.weight(bin_logit(bin + j)));
  if (bin + 3 == kZeroBin) mass[3] += near;
}

// As note_near() and near_mass() of row_counter.cuh.
static __device__ __noinline__ void note_near(NucleusCounts& s, uint4 words) {
  const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int n = 0; n < kGroup; ++n) {
    const uint32_t half = pairs[n / 2] >> (n % 2 * 16) & 0xffffu;
    if ((half & 0x7fffu) - 1 >= kLeastBits) continue;
    const uint32_t at = atomicAdd(&s.near, 1u);
    if (at < kNearTokens) s.near_token[at] = static_cast<uint16_t>(half);
  }
}
static __device__ __noinline__ uint64_t near_mass(NucleusCounts& s, RowCluster cluster,
                                                  RowLaw law) {
  uint64_t sum = 0;
  for (int block = 0; block < cluster.size; ++block)
    for (uint32_t n = 0; n < *cluster.map(&s.near, block); ++n) {
      const uint32_t half = cluster.map(s.near_token, block)[n];
      sum += to_fixed(law.weight(__uint_as_float(half << 16))) - to_fixed(law.weight(0.0f));
    }
  return sum;
}

// In three sums of 32 bits, which take a third of a shuffle's five steps.
__device__ __forceinline__ uint64_t mass_of_warp(uint64_t own) {
  constexpr uint32_t kLow = (1u << 27) - 1;
  const uint64_t low = __reduce_add_sync(kFullMask, static_cast<uint32_t>(own) & kLow);
  const uint64_t middle = __reduce_add_sync(kFullMask, static_cast<uint32_t>(own >> 27) & kLow);
  const uint64_t high = __reduce_add_sync(kFullMask, static_cast<uint32_t>(own >> 54));
  return low + (middle << 27) + (high << 54);
}

// What lies in the rows of bins in front of one, and in all. By a warp.
struct RowsBefore {
  uint64_t before, all;

  __device__ __forceinline__ RowsBefore(const uint64_t* row_mass, int row) {
    const int lane = threadIdx.x % kWarpSize;
    const ulonglong2 two = reinterpret_cast<const ulonglong2*>(row_mass)[lane];
    before = mass_of_warp((2 * lane < row ? two.x : 0) + (2 * lane + 1 < row ? two.y : 0));
    all = mass_of_warp(two.x + two.y);
  }
};

// The cut in a row of bins, whose lanes come to `up_to` with all that lies before them. By a warp.
__device__ __forceinline__ ValueCut find_cut(int row, const uint4& bins, const uint64_t (&mass)[4],
                                             uint64_t up_to, uint64_t target, const RowLaw& law) {
  const int from = __ffs(__ballot_sync(kFullMask, up_to >= target)) - 1;
  uint64_t before = up_to - (mass[0] + mass[1] + mass[2] + mass[3]);
  const uint32_t counts[4] = {bins.x, bins.y, bins.z, bins.w};
  uint32_t count = counts[0];
  int at = 0;
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    if (at != j || before + mass[j] >= target) continue;
    before += mass[j];
    at = j + 1;
    count = counts[at];
  }
  const int bin = row * kRowBins + from * 4 + __shfl_sync(kFullMask, at, from);
  return cut_ties(bin_logit(bin), __shfl_sync(kFullMask, before, from),
                  __shfl_sync(kFullMask, count, from), target, law);
}

}  // namespace domino
