// Where the filters cut a row of bf16 logits, from one read of it.
//
// bf16 has few values: those of one sign from 2^-23 to 2^9 are 4096. So a block counts its share of
// the row by value, in shared memory (8192 bins, greatest value first), and the blocks of a cluster
// add their bins up. A value weighs the same wherever it stands, so counts give all masses exactly,
// at any temperature, and ranks and ties: the cut needs no other look at the row.
//
//   top-k first   what lies below a bound is not counted: the k-th greatest of the threads' first
//                 tops, which are different tokens. The rest is listed with its ids.
//   0             -0 is +0, and the few tokens below 2^-23 that are not 0 are weighed one by one
//   else          from 510 up, from -510 down if that has weight, and where the cut lies below
//                 2^-23: value_search.cuh, about 40 reads of the row
//
// A warp's 32 counts cost 3.5 cycles of shared memory (3.5 lanes meet in the busiest bank).
#pragma once

#include "common/cluster.cuh"
#include "verify/value_search.cuh"

namespace domino {

class RowHistogram {
 public:
  __device__ RowHistogram(HistogramShared& shared, const RowCluster& cluster,
                          const RowSource<bf16>& source)
      : s_(shared), cluster_(cluster), source_(source) {}

  // Before any count; a barrier of the block has to follow.
  __device__ __forceinline__ void clear() {
    uint4* bins = reinterpret_cast<uint4*>(s_.count);
#pragma unroll
    for (int n = threadIdx.x; n < kValueBins / 4; n += kCutThreads) bins[n] = {0, 0, 0, 0};
    if (threadIdx.x == 0) {
      s_.top[cluster_.rank] = 0;  // the others' are theirs to write, perhaps already
      s_.listed = s_.near_zero = s_.unclear = s_.bounded = 0;
      s_.near_mass = 0;
    }
  }

  // From here on only logits of at least the k-th greatest of the readers' `top`s are counted, and
  // listed. The first kReadThreads of the block call it.
  __device__ __forceinline__ void bound_by(float top, uint32_t k) {
    const uint32_t own = logit_key(top) >> 16;
    uint32_t key = 0;
#pragma unroll 1
    for (uint32_t bit = 0x8000; bit != 0; bit /= 2)
      if (count_readers(own >= (key | bit)) >= k) key |= bit;
    bounded_ = key > kEmptyKey >> 16;
    bound_ = key_logit(key << 16 | (key & 0x8000u ? 0u : 0xffffu));
    if (threadIdx.x == 0) {
      s_.bounded = bounded_;
      s_.bound = bound_;
    }
  }

  // Counts eight logits, those of the tokens from `token` on.
  __device__ __forceinline__ void add(const Group<bf16>& group, int token) {
    const uint32_t words[4] = {group.words.x, group.words.y, group.words.z, group.words.w};
    const uint32_t most =
        max_nan(max_nan(words[0], words[1], bf16{}), max_nan(words[2], words[3], bf16{}), bf16{});
    most_ = max_nan(most_, most, bf16{});
    if (!bounded_) {
      uint32_t nearest = 0;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        // 2^15 less the magnitude, 0 for 0
        nearest = __viaddmax_s16x2(~words[n] & 0x7fff7fffu, 0x00010001u, nearest);
        const uint32_t bins = value_bins(words[n]);
        atomicAdd(&s_.count[bins & 0xffffu], 1u);
        atomicAdd(&s_.count[bins >> 16], 1u);
      }
      if (((nearest + kLeastBits * 0x10001u) & 0x80008000u) != 0) {
#pragma unroll
        for (int n = 0; n < 2 * 4; ++n) note_near(s_, words[n / 2] >> (n % 2 * 16));
      }
      return;
    }
    if (!(fmaxf(low_half(most, bf16{}), high_half(most, bf16{})) >= bound_)) return;
    const uint32_t at = atomicAdd(&s_.listed, 1u);
    if (at < kListedGroups) {
      s_.list[at] = group.words;
      s_.list_token[at] = token;
    } else {
      count_above(s_, group.words, bound_);
    }
  }

  // All has been read, and all blocks run. The row's greatest logit.
  __device__ __forceinline__ float finish() {
    const int lane = threadIdx.x % kWarpSize;
    const float top = max_nan(low_half(most_, bf16{}), high_half(most_, bf16{}));
    const uint32_t key = __reduce_max_sync(kFullMask, logit_key(top));
    if (lane == 0) atomicMax(&s_.top[cluster_.rank], key);
    __syncthreads();
    if (s_.bounded != 0) {
      const int listed = min(s_.listed, kListedGroups);
      for (int n = threadIdx.x; n < listed; n += kCutThreads) count_above(s_, s_.list[n], s_.bound);
      __syncthreads();
    }
    if (threadIdx.x == 0) {  // -0 is +0
      s_.count[kZeroBin] += s_.count[kZeroBin + 1];
      s_.count[kZeroBin + 1] = 0;
    }
    if (threadIdx.x < cluster_.size) {
      cluster_.map(s_.top, threadIdx.x)[cluster_.rank] = s_.top[cluster_.rank];
      cluster_.map(s_.listed_of, threadIdx.x)[cluster_.rank] =
          s_.bounded != 0 ? s_.listed : kListedGroups + 1;
      cluster_.map(s_.near_of, threadIdx.x)[cluster_.rank] = s_.near_zero;
    }
    cluster_.sync();
    const uint32_t seen = lane < cluster_.size ? s_.top[lane] : 0u;
    return key_logit(__reduce_max_sync(kFullMask, seen));
  }

  // Finds the cut; it is in s.cut of the block for which this is true, behind its next barrier. All
  // threads of the cluster call it.
  __device__ __forceinline__ bool find(const RowLaw& law, const FilterParams& filters) {
    const float lowest = filters.lowest_exponent(law);
    const int lane = threadIdx.x % kWarpSize;
    const uint32_t most_near =
        __reduce_max_sync(kFullMask, lane < cluster_.size ? s_.near_of[lane] : 0u);
    const bool too_great = law.top >= bin_logit(0) || law.top <= bin_logit(kValueBins - 1) ||
                           law.weight(bin_logit(kValueBins - 1)) > 0.0f;
    // do those near 0 differ in what min-p does, or much in weight?
    const bool splits_near =
        most_near != 0 && (law.scale * 0x1p-23f > 1.0f || (law.exponent(0x1p-23f) >= lowest) !=
                                                              (law.exponent(-0x1p-23f) >= lowest));
    const bool mine = !too_great && !splits_near && most_near <= kNearTokens &&
                      find_bin(law, filters, lowest, most_near != 0);
    if (!too_great && !splits_near && most_near <= kNearTokens) {
      if (most_near == 0) return mine;
      cluster_.sync();
      if (s_.unclear == 0) return mine;
    }
    ValueSearch<HistogramShared>{s_, cluster_, source_, law, filters}.find();
    return cluster_.rank == 0;
  }

  // Do the lists hold all tokens that are kept?
  __device__ __forceinline__ bool has_list() const {
    const int lane = threadIdx.x % kWarpSize;
    return __all_sync(kFullMask, lane >= cluster_.size || s_.listed_of[lane] <= kListedGroups);
  }

 private:
  // Of the cluster, with bins of one value each: the bins of a warp are next to each other.
  __device__ __forceinline__ bool find_bin(const RowLaw& law, const FilterParams& filters,
                                           float lowest, bool has_near) {
    const bool ranked = filters.by_rank(source_.vocab), massed = filters.by_mass();
    const int lane = threadIdx.x % kWarpSize;
    const int share = kValueBins / (cluster_.size * kCutThreads);  // bins of a lane
    const int first = (cluster_.rank * kCutThreads + threadIdx.x) * share;

    CountAndMass own{};
    uint64_t heavy = 0;
#pragma unroll 2
    for (int n = 0; n < share; ++n) {
      const int bin = first + ((n + lane) & (share - 1));  // two lanes to a bank
      uint32_t count = s_.count[bin];
      if (cluster_.size > 1) {
        count = 0;
#pragma unroll
        for (int block = 0; block < kMostCutBlocks; ++block)
          if (block < cluster_.size) count += load_shared_of(&s_.count[bin], block);
      }
      if (!__any_sync(kFullMask, count != 0)) continue;
      const float logit = bin_logit(bin), weight = law.weight(logit);
      if (!(weight > 0.0f)) count = 0;
      if (cluster_.size > 1 || count == 0) s_.count[bin] = count;  // nobody else reads this one
      uint64_t mass = count * to_fixed(weight);
      if (has_near && bin == kZeroBin) mass += s_.near_mass = near_mass(s_, cluster_, law);
      own.count += count;
      own.mass += mass;
      heavy += law.exponent(logit) >= lowest ? mass : 0;
    }
    const CountAndMass up_to = warp_prefix(own);
    const CountAndMass of_warp{__shfl_sync(kFullMask, up_to.mass, kWarpSize - 1),
                               __shfl_sync(kFullMask, up_to.count, kWarpSize - 1)};
    CountAndMass total;
    CountAndMass before = sum_warps(s_, of_warp, &total);
    CountAndMass block_before{}, block_total = total;
    uint64_t heavy_mass = total.mass;
    if (filters.by_weight()) {
      CountAndMass sum;
      sum_warps(s_, {warp_sum(heavy), 0}, &sum);
      heavy_mass = sum.mass;
    }
    if (cluster_.size > 1) {
      if (threadIdx.x < cluster_.size) {
        cluster_.map(s_.mass, threadIdx.x)[cluster_.rank] = total.mass;
        cluster_.map(s_.heavy_mass, threadIdx.x)[cluster_.rank] = heavy_mass;
        cluster_.map(s_.tokens, threadIdx.x)[cluster_.rank] = total.count;
      }
      cluster_.sync();
      total = {};
      heavy_mass = 0;
#pragma unroll
      for (int block = 0; block < kMostCutBlocks; ++block) {
        if (block == cluster_.rank) block_before = total;
        const bool has = block < cluster_.size;
        total.count += has ? s_.tokens[block] : 0;
        total.mass += has ? s_.mass[block] : 0;
        heavy_mass += has ? s_.heavy_mass[block] : 0;
      }
      before = {before.mass + block_before.mass, before.count + block_before.count};
    }

    uint64_t rank_mass = total.mass;
    float rank_logit = -INFINITY;
    if (ranked && total.count >= filters.top_k) {
      const uint32_t k = static_cast<uint32_t>(filters.top_k);
      if (before.count < k && before.count + of_warp.count >= k) {
        CountAndMass at = before;
        const int bin = crossing(law, first, share, own, up_to, &at,
                                 [&](const CountAndMass& sums) { return sums.count >= k; });
        if (lane < cluster_.size) {
          *cluster_.map(&s_.rank_mass, lane) = at.mass + mass_in(law, bin);
          *cluster_.map(&s_.rank_bin, lane) = bin;
          if (has_near && bin == kZeroBin) *cluster_.map(&s_.unclear, lane) = 1;
        }
      }
      cluster_.sync();
      rank_mass = s_.rank_mass;
      rank_logit = bin_logit(s_.rank_bin);
    }
    const uint64_t kept = min(rank_mass, heavy_mass);
    uint64_t base = total.mass;
    if (filters.order == FilterOrder::kTransformers) base = rank_mass;
    if (filters.order == FilterOrder::kVllm) base = kept;
    const uint64_t target = nucleus_cut(base, filters.top_p);
    if (!massed || target > kept) {
      if (cluster_.rank == 0 && threadIdx.x == 0) {
        float logit = rank_logit;
        if (filters.by_weight()) {
          const int last =
              last_place(kValueBins, [&](int n) { return law.exponent(bin_logit(n)) >= lowest; });
          // with 0 stay those near it
          logit = fmaxf(logit, last == kZeroBin + 1 ? -0x1p-23f : bin_logit(last));
        }
        s_.cut = {logit, -1, kept};
      }
      return cluster_.rank == 0;
    }
    if (before.mass < target && before.mass + of_warp.mass >= target) {
      const int bin = crossing(law, first, share, own, up_to, &before,
                               [&](const CountAndMass& sums) { return sums.mass >= target; });
      if (lane == 0) s_.cut = cut_ties(bin_logit(bin), before.mass, s_.count[bin], target, law);
      if (has_near && bin == kZeroBin && lane < cluster_.size) *cluster_.map(&s_.unclear, lane) = 1;
    }
    return block_before.mass < target && block_before.mass + block_total.mass >= target;
  }

  // How many of the readers say so.
  static __device__ __forceinline__ uint32_t count_readers(bool yes) {
    uint32_t count;
    asm volatile(
        "{\n.reg .pred yes;\nsetp.ne.u32 yes, %1, 0;\n"
        "barrier.cta.red.popc.u32 %0, 1, %2, yes;\n}"
        : "=r"(count)
        : "r"(static_cast<uint32_t>(yes)), "n"(kReadThreads)
        : "memory");
    return count;
  }

  static __device__ __noinline__ void count_above(HistogramShared& s, uint4 words, float bound) {
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

  static __device__ __forceinline__ void note_near(HistogramShared& s, uint32_t half) {
    const uint32_t magnitude = half & 0x7fffu;
    if (magnitude - 1 >= kLeastBits) return;
    const uint32_t at = atomicAdd(&s.near_zero, 1u);
    if (at < kNearTokens) s.near[at] = static_cast<uint16_t>(half);
  }

  // What the cluster's tokens near 0 weigh more than 0 does, modulo 2^64.
  static __device__ __noinline__ uint64_t near_mass(HistogramShared& s, RowCluster cluster,
                                                    RowLaw law) {
    uint64_t sum = 0;
    for (int block = 0; block < cluster.size; ++block)
      for (uint32_t n = 0; n < s.near_of[block]; ++n) {
        const uint32_t half = cluster.map(s.near, block)[n];
        sum += to_fixed(law.weight(__uint_as_float(half << 16))) - to_fixed(law.weight(0.0f));
      }
    return sum;
  }

  __device__ __forceinline__ uint64_t mass_in(const RowLaw& law, int bin) const {
    const uint64_t mass = s_.count[bin] * bin_mass(law, bin);
    return bin == kZeroBin ? mass + s_.near_mass : mass;
  }

  static __device__ __forceinline__ uint64_t bin_mass(const RowLaw& law, int bin) {
    return to_fixed(law.weight(bin_logit(bin)));
  }

  // The warp's bin in which the sums, `at` before the warp's first one, come to what is wanted;
  // `at` is then what lies before that bin. A lane has `share` bins from `first` on, in which there
  // is `own`, and `up_to` in those up to its last one. All lanes get it.
  template <class Reached>
  __device__ __forceinline__ int crossing(const RowLaw& law, int first, int share,
                                          const CountAndMass& own, const CountAndMass& up_to,
                                          CountAndMass* at, Reached reached) const {
    const int lane = threadIdx.x % kWarpSize;
    const CountAndMass with{at->mass + up_to.mass, at->count + up_to.count};
    const int found = __ffs(__ballot_sync(kFullMask, reached(with))) - 1;
    const CountAndMass from{__shfl_sync(kFullMask, with.mass - own.mass, found),
                            __shfl_sync(kFullMask, with.count - own.count, found)};
    // a lane a bin
    const int bin = __shfl_sync(kFullMask, first, found) + min(lane, share - 1);
    CountAndMass in{};
    if (lane < share) in = {mass_in(law, bin), s_.count[bin]};
    const CountAndMass up = warp_prefix(in);
    const int last =
        __ffs(__ballot_sync(kFullMask, reached({from.mass + up.mass, from.count + up.count}))) - 1;
    *at = {__shfl_sync(kFullMask, from.mass + up.mass - in.mass, last),
           __shfl_sync(kFullMask, from.count + up.count - in.count, last)};
    return __shfl_sync(kFullMask, bin, last);
  }

  HistogramShared& s_;
  const RowCluster& cluster_;
  const RowSource<bf16>& source_;
  bool bounded_ = false;
  float bound_ = -INFINITY;
  uint32_t most_ = 0xff80ff80u;  // the greatest logits of the halves
};

}  // namespace domino
