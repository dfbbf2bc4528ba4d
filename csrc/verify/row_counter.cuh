// Counts or lists the tokens of a row of bf16 logits, as the row goes by.
//
// bf16 has few values: those of one sign from 2^-23 to 2^9 are 4096. So a block counts its share of
// the row by value, in shared memory (8192 bins, greatest value first). A value weighs the same
// wherever it stands, so counts give all masses exactly, at any temperature, and ranks and ties:
// the cut needs no other look at the row.
//
//   top-k first   what lies below a bound is not counted: about the k-th greatest of the threads'
//                 first tops, which are different tokens. The rest is listed with its ids, and
//                 mostly the list is enough (listed_tokens.cuh).
//   0             -0 is +0, and the few tokens below 2^-23 that are not 0 are noted one by one
//   else          from 510 up, from -510 down if that has weight, and where the cut lies below
//                 2^-23: value_search.cuh, about 40 reads of the row
//
// A warp's 32 counts cost 3.5 cycles of shared memory (3.5 lanes meet in the busiest bank).
#pragma once

#include "verify/listed_shared.cuh"

namespace domino {

// Counts eight tokens by value. nearest: of the halves 2^15 less the least magnitude, 0 for 0
__device__ __forceinline__ void count_values(uint32_t* bins, const Group<bf16>& group,
                                             uint32_t& nearest) {
  const uint32_t words[4] = {group.words.x, group.words.y, group.words.z, group.words.w};
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    nearest = __viaddmax_s16x2(~words[n] & 0x7fff7fffu, 0x00010001u, nearest);
    const uint32_t both = value_bins(words[n]);
    atomicAdd(&bins[both & 0xffffu], 1u);
    atomicAdd(&bins[both >> 16], 1u);
  }
}
// Is a token near 0 that is not 0?
__device__ __forceinline__ bool has_near(uint32_t nearest) {
  return ((nearest + kLeastBits * 0x10001u) & 0x80008000u) != 0;
}

__device__ __forceinline__ void note_near(ListedShared& s, uint32_t half) {
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude - 1 >= kLeastBits) return;
  const uint32_t at = atomicAdd(&s.found.near_zero, 1u);
  if (at < kNearTokens) s.near[at] = static_cast<uint16_t>(half);
}

// What the cluster's tokens near 0 weigh more than 0 does, modulo 2^64.
static __device__ __noinline__ uint64_t near_mass(ListedShared& s, RowCluster cluster, RowLaw law) {
  uint64_t sum = 0;
  for (int block = 0; block < cluster.size; ++block)
    for (uint32_t n = 0; n < cluster.map(&s.found, block)->near_zero; ++n) {
      const uint32_t half = cluster.map(s.near, block)[n];
      sum += to_fixed(law.weight(__uint_as_float(half << 16))) - to_fixed(law.weight(0.0f));
    }
  return sum;
}

// Counts a group's tokens from a bound up.
static __device__ __noinline__ void count_above(ListedShared& s, uint4 words, float bound) {
  Group<bf16> group;
  group.words = words;
#pragma unroll
  for (int n = 0; n < kGroup; ++n) {
    const float logit = group.at(n);
    if (!(logit >= bound)) continue;
    const uint32_t half = __float_as_uint(logit) >> 16;
    atomicAdd(&s.count[value_bins(half) & 0xffffu], 1u);
    note_near(s, half);
  }
}

// Do the counts tell apart all values that matter to the cut?
__device__ __forceinline__ bool tells_apart(const RowLaw& law, float lowest, uint32_t near) {
  const bool too_great = law.top >= bin_logit(0) || law.top <= bin_logit(kValueBins - 1) ||
                         law.weight(bin_logit(kValueBins - 1)) > 0.0f;
  // do those near 0 differ in what min-p does, or much in weight?
  const bool splits_near =
      near != 0 && (law.scale * 0x1p-23f > 1.0f ||
                    (law.exponent(0x1p-23f) >= lowest) != (law.exponent(-0x1p-23f) >= lowest));
  return !too_great && !splits_near && near <= kNearTokens;
}

// What the first kReaders threads of a block do.
template <int kReaders>
class RowCounter {
 public:
  __device__ __forceinline__ RowCounter(ListedShared& shared) : s_(shared) {}

  // Before any count, by `threads` threads; a barrier has to follow.
  static __device__ __forceinline__ void clear(ListedShared& s, int thread, int threads) {
    uint4* bins = reinterpret_cast<uint4*>(s.count);
#pragma unroll
    for (int n = thread; n < kValueBins / 4; n += threads) bins[n] = {0, 0, 0, 0};
    if (thread == 0) {
      s.found = {0, 0, 0, -INFINITY};
      s.unclear = s.crowded = s.first_top = 0;
      s.near_mass = 0;
    }
  }

  // From here on only logits of at least the k-th greatest of the readers' `top`s, or a little
  // less, are counted, and listed. bins: of zeros
  __device__ __forceinline__ void bound_by(float top, uint32_t k, KeyBins* bins) {
    const uint32_t own = logit_key(top) >> 16;
    const uint32_t greatest_of_warp = __reduce_max_sync(kFullMask, own);
    if (threadIdx.x % kWarpSize == 0) atomicMax(&s_.first_top, greatest_of_warp);
    sync_readers();
    const uint32_t greatest = s_.first_top;
    bins->add(greatest - own);
    sync_readers();
    const uint32_t reach = bins->reach(k);
    const uint32_t key = greatest - min(reach, greatest);
    bounded_ = key > kEmptyKey >> 16;
    bound_ = key_logit(key << 16 | (key & 0x8000u ? 0u : 0xffffu));
    if (threadIdx.x == 0 && bounded_) s_.found.bound = bound_;
  }

  __device__ __forceinline__ bool bounded() const { return bounded_; }

  // Eight logits, those of the tokens from `token` on.
  __device__ __forceinline__ void add(const Group<bf16>& group, int token) {
    if (bounded_)
      list(group, token);
    else
      count(group);
  }
  // The same where the counter is not bounded().
  __device__ __forceinline__ void count(const Group<bf16>& group) {
    const uint32_t words[4] = {group.words.x, group.words.y, group.words.z, group.words.w};
    meet(group);
    uint32_t nearest = 0;
    count_values(s_.count, group, nearest);
    if (has_near(nearest)) {
#pragma unroll
      for (int n = 0; n < 2 * 4; ++n) note_near(s_, words[n / 2] >> (n % 2 * 16));
    }
  }
  // And where it is.
  __device__ __forceinline__ void list(const Group<bf16>& group, int token) {
    const uint32_t most = meet(group);
    if (!(fmaxf(low_half(most, bf16{}), high_half(most, bf16{})) >= bound_)) return;
    const uint32_t at = atomicAdd(&s_.found.listed, 1u);
    if (at < kListedGroups) {
      s_.list[at] = group.words;
      s_.list_token[at] = token;
    } else {
      count_above(s_, group.words, bound_);
    }
  }

  // All that this thread reads has been added; a barrier has to follow. By whole warps.
  __device__ __forceinline__ void leave_top() const {
    const float top = max_nan(low_half(most_, bf16{}), high_half(most_, bf16{}));
    const uint32_t key = __reduce_max_sync(kFullMask, logit_key(top));
    if (threadIdx.x % kWarpSize == 0) atomicMax(&s_.found.top, key);
  }

 protected:
  ListedShared& s_;

 private:
  // The greatest logits of a group's halves.
  __device__ __forceinline__ uint32_t meet(const Group<bf16>& group) {
    const uint32_t most = group.most();
    most_ = max_nan(most_, most, bf16{});
    return most;
  }
  static __device__ __forceinline__ void sync_readers() {
    asm volatile("barrier.cta.sync 1, %0;" ::"n"(kReaders) : "memory");
  }

  bool bounded_ = false;
  float bound_ = -INFINITY;
  uint32_t most_ = 0xff80ff80u;  // the greatest logits of the halves
};

}  // namespace domino
