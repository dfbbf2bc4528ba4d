// The values of bf16 logits: their order, their bins in a histogram, and the sums of tokens that
// blocks of a cluster add up.
#pragma once

#include "verify/chain_judge.cuh"
#include "verify/row_cluster.cuh"

namespace domino {

constexpr int kCutWarps = 16;
constexpr int kCutThreads = kCutWarps * kWarpSize;
constexpr int kReadWarps = kCutWarps - 1;  // the last one sees to the slot
constexpr int kReadThreads = kReadWarps * kWarpSize;
constexpr int kHalfBins = 4096;
constexpr int kValueBins = 2 * kHalfBins;
constexpr uint32_t kGreatestBits = 0x43ff;                        // bf16: 510, in bin 0
constexpr uint32_t kLeastBits = kGreatestBits - (kHalfBins - 1);  // 2^-23, in the bins around 0
constexpr int kZeroBin = kHalfBins - 1;
constexpr int kMostCutBlocks = 8;
constexpr int kListedGroups = 512;
constexpr int kNearTokens = 64;

// The threads of a block that go through a cut together: all of them ...
struct WholeBlock {
  static constexpr int kWarps = kCutWarps, kThreads = kCutThreads;
  static __device__ __forceinline__ int rank() { return threadIdx.x; }
  static __device__ __forceinline__ void sync() { __syncthreads(); }
};
// ... or its last warps, while the others read on.
template <int kTeamWarps, int kBarrier>
struct LastWarps {
  static constexpr int kWarps = kTeamWarps, kThreads = kTeamWarps * kWarpSize;
  static __device__ __forceinline__ int rank() {
    return static_cast<int>(threadIdx.x) - (kCutThreads - kThreads);
  }
  static __device__ __forceinline__ void sync() {
    asm volatile("barrier.cta.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
  }
};

// The prefix of the row that is kept (filter.h), as far as counts show it: of the tokens that equal
// `logit` the first `ties` by id, all where it is negative.
struct ValueCut {
  float logit;
  int32_t ties;
  uint64_t mass;

  // As SlotVerdict's, where ties count from the first on.
  __device__ __forceinline__ RowFilter filter() const {
    return {logit, ties < 0 ? INT32_MAX : -ties, mass};
  }
};

struct CountAndMass {
  uint64_t mass;
  uint32_t count;
};

// The bins of a word's two logits.
__device__ __forceinline__ uint32_t value_bins(uint32_t word) {
  const uint32_t inverted = ~word & 0x7fff7fffu;
  constexpr uint32_t kOffset = 0x7fff - kGreatestBits, kMinus = (0x10000 - kOffset) * 0x10001u;
  const uint32_t below = __viaddmin_s16x2_relu(inverted, kMinus, (kHalfBins - 1) * 0x10001u);
  uint32_t sign;  // of each half, in all of its bits
  asm("prmt.b32 %0, %1, %1, 0xbb99;" : "=r"(sign) : "r"(word));
  return (below ^ sign) & (kValueBins - 1) * 0x10001u;
}

// The logit of a bin that holds one value.
__device__ __forceinline__ float bin_logit(int bin) {
  const bool negative = bin >= kHalfBins;
  const uint32_t bits = kGreatestBits - (negative ? kValueBins - 1 - bin : bin);
  if (bits == kLeastBits) return 0.0f;
  return __uint_as_float((bits | (negative ? 0x8000u : 0u)) << 16);
}

// Values in falling order, one after the other: 0 is NaN. -0 is +0.
constexpr int kValues = 1 << 16;
__device__ __forceinline__ int value_place(uint32_t half) {
  const uint32_t place = half & 0x8000u ? half : ~half & 0x7fffu;
  return static_cast<int>(half == 0x8000u ? 0x7fffu : place);
}
__device__ __forceinline__ float place_logit(int place) {
  const uint32_t half = place & 0x8000 ? place : ~place & 0x7fff;
  return __uint_as_float(half << 16);
}

// The last of the places from 0 on at which a property holds; it holds at 0.
template <class Holds>
__device__ __forceinline__ int last_place(int count, Holds holds) {
  int low = 0, high = count - 1;
#pragma unroll 1
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (holds(middle))
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

// The first of the `count` tokens of this logit that bring `mass` up to the target.
__device__ __forceinline__ ValueCut cut_ties(float logit, uint64_t mass, uint32_t count,
                                             uint64_t target, const RowLaw& law) {
  const uint64_t one = to_fixed(law.weight(logit)), missing = target - mass;
  // fewer than 2^23 tokens: off by some at most
  uint32_t ties = static_cast<uint32_t>(static_cast<float>(missing) / static_cast<float>(one));
  while (ties * one < missing) ++ties;
  while ((ties - 1) * one >= missing) --ties;
  return {logit, ties < count ? static_cast<int32_t>(ties) : -1, mass + ties * one};
}

// Sum of the values of the lanes up to this one.
__device__ __forceinline__ CountAndMass warp_prefix(CountAndMass sum) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const uint32_t count = __shfl_up_sync(kFullMask, sum.count, step);
    const uint64_t mass = __shfl_up_sync(kFullMask, sum.mass, step);
    if (lane >= step) sum = {sum.mass + mass, sum.count + count};
  }
  return sum;
}
// The first lane up to which `at` and the lanes' sums come to what is wanted; `at` is then what
// lies before that lane.
template <class Reached>
__device__ __forceinline__ int crossing_lane(const CountAndMass& in, Reached reached,
                                             CountAndMass* at) {
  const CountAndMass up = warp_prefix(in);
  const CountAndMass from = *at;
  const bool here = reached({from.mass + up.mass, from.count + up.count});
  const int lane = __ffs(__ballot_sync(kFullMask, here)) - 1;
  *at = {__shfl_sync(kFullMask, from.mass + up.mass - in.mass, lane),
         __shfl_sync(kFullMask, from.count + up.count - in.count, lane)};
  return lane;
}
// Sum of the values of the warps before this one, and of all; each is the same in its warp.
template <class Team, class Shared>
__device__ __forceinline__ CountAndMass sum_warps(Shared& s, CountAndMass own,
                                                  CountAndMass* total) {
  const int warp = Team::rank() / kWarpSize;
  Team::sync();
  if (threadIdx.x % kWarpSize == 0) s.warps[warp] = own;
  Team::sync();
  CountAndMass before{};
  *total = {};
#pragma unroll
  for (int n = 0; n < Team::kWarps; ++n) {
    const CountAndMass other = s.warps[n];
    if (n < warp) before = {before.mass + other.mass, before.count + other.count};
    *total = {total->mass + other.mass, total->count + other.count};
  }
  return before;
}

}  // namespace domino
