// The bins of a histogram of values by rows of 128, an octave each, four bins a lane: what a warp
// goes through to find where sums over all bins come to what is wanted.
#pragma once

#include "verify/listed_shared.cuh"

namespace domino {

constexpr int kRowBins = 4 * kWarpSize;
constexpr int kOctaves = kValueBins / kRowBins;
static_assert(kOctaves == 2 * kWarpSize && kOctaves + kWarpSize <= BinRows::kCount);

// to_fixed() of RowLaw::weight(), for many logits: half of the instructions, and no branch.
class FixedWeights {
 public:
  __device__ __forceinline__ explicit FixedWeights(const RowLaw& law)
      : scale_(law.scale),
        shift_(law.shift + 40.0f),
        least_((kRoundMagic - law.shift - 60.0f) / law.scale),
        huge_(law.shift == 0.0f) {}

  // Where not huge().
  __device__ __forceinline__ uint64_t of(float logit) const {
    return static_cast<uint64_t>(exp2_product(fmaxf(logit, least_), scale_, shift_));
  }
  // Is all weight on the tokens that equal the top?
  __device__ __forceinline__ bool huge() const { return huge_; }

 private:
  float scale_;
  float shift_;  // of 2^40 times the weights
  float least_;  // a logit that weighs nothing
  bool huge_;
};

// The four bins from `bin` on, where -0 is +0: its tokens, `minus_zeros`, are counted with those of
// +0.
__device__ __forceinline__ uint4 join_zeros_at(int bin, uint4 bins, uint32_t minus_zeros) {
  static_assert(kZeroBin % 4 == 3);
  if (bin == kZeroBin - 3) bins.w += minus_zeros;
  if (bin == kZeroBin + 1) bins.x = 0;
  return bins;
}
// The same of a lane's bins of a row.
__device__ __forceinline__ uint4 join_zeros(int row, uint4 bins, uint32_t minus_zeros) {
  const int lane = threadIdx.x % kWarpSize;
  static_assert(kZeroBin % kRowBins == kRowBins - 1);
  if (row == kZeroBin / kRowBins && lane == kWarpSize - 1) bins.w += minus_zeros;
  if (row == kZeroBin / kRowBins + 1 && lane == 0) bins.x = 0;
  return bins;
}

// The logits of the four bins from `bin` on; that of -0, which is empty, does not matter.
struct BinLogits {
  float of[4];

  __device__ __forceinline__ explicit BinLogits(int bin) {
    const bool negative = bin >= kHalfBins;
    const uint32_t first =
        negative ? 0x8000u + kGreatestBits - (kValueBins - 1) + bin : kGreatestBits - bin;
#pragma unroll
    for (int j = 0; j < 4; ++j) of[j] = __uint_as_float((negative ? first + j : first - j) << 16);
    if (bin == kZeroBin - 3) of[3] = 0.0f;
  }
};

// What is in the four bins from `bin` on, as far as it has weight. near_mass: what the tokens of
// the bin of 0 weigh more than 0 does
__device__ __forceinline__ void weigh_bins(const FixedWeights& weights, const RowLaw& law, int bin,
                                           const uint4& bins, uint64_t near_mass, bool counted,
                                           CountAndMass (&in)[4]) {
  const BinLogits logits(bin);
  const uint32_t counts[4] = {bins.x, bins.y, bins.z, bins.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) in[j] = {counts[j] * weights.of(logits.of[j]), 0};
  if (weights.huge()) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      in[j].mass = logits.of[j] == law.top ? counts[j] * to_fixed(1.0f) : 0;
  }
  if (counted) {
#pragma unroll
    for (int j = 0; j < 4; ++j) in[j].count = law.weight(logits.of[j]) > 0.0f ? counts[j] : 0;
  }
  if (bin == kZeroBin - 3) in[3].mass += near_mass;
}
__device__ __forceinline__ CountAndMass sum_bins(const CountAndMass (&in)[4]) {
  return {in[0].mass + in[1].mass + in[2].mass + in[3].mass,
          in[0].count + in[1].count + in[2].count + in[3].count};
}
// Of the tokens whose exponent is not below `lowest`.
__device__ __forceinline__ uint64_t heavy_bins(const RowLaw& law, int bin, float lowest,
                                               const CountAndMass (&in)[4]) {
  const BinLogits logits(bin);
  uint64_t mass = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (law.exponent(logits.of[j]) >= lowest) mass += in[j].mass;
  return mass;
}

// Of the lanes up to this one.
__device__ __forceinline__ uint64_t sum_up_to(uint64_t own) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const uint64_t left = __shfl_up_sync(kFullMask, own, step);
    if (lane >= step) own += left;
  }
  return own;
}

// Where sums come to what is wanted: entry `at`, in one lane, that of this number.
struct Crossing {
  int lane;
  int at;
  CountAndMass before, in;

  // To all lanes.
  __device__ __forceinline__ Crossing shared() const {
    return {lane,
            __shfl_sync(kFullMask, at, lane),
            {__shfl_sync(kFullMask, before.mass, lane), __shfl_sync(kFullMask, before.count, lane)},
            {__shfl_sync(kFullMask, in.mass, lane), __shfl_sync(kFullMask, in.count, lane)}};
  }
};

// Among the entries of all lanes of a warp: this one has `own` from number `first` on, and what
// lies before them.
template <int kOwn, class Reached>
__device__ __forceinline__ Crossing find_crossing(int first, CountAndMass before,
                                                  const CountAndMass (&own)[kOwn],
                                                  Reached reached) {
  Crossing out{0, first, before, own[0]};
  bool here = false;
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    if (here) continue;
    out.at = first + n;
    out.before = before;
    out.in = own[n];
    before = {before.mass + own[n].mass, before.count + own[n].count};
    here = reached(before);
  }
  out.lane = __ffs(__ballot_sync(kFullMask, here)) - 1;
  return out;
}

}  // namespace domino
