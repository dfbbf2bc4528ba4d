// Where the filters cut a row: the last token that they keep, and the mass up to there, found by a
// cluster without sorting the row.
//
// Tokens are ordered by their place: falling logit, then rising id. The greatest logits of the
// chunks bound the cut from below; if few tokens lie above the bound they are listed, sorted and
// summed, and that is all (peaked rows, top-k up to the number of chunks). Otherwise passes over
// the row count the tokens of 1024 bins, from which the cut's bin is known for ranks, and up to a
// few bins for masses (a bin's mass lies between its count times the weights at its ends); each
// pass also sums what lies before the bins, exactly. The bins of the first pass are 1/32 of an
// exponent.
#pragma once

#include "verify/row_places.cuh"

namespace domino {

template <class Source>
class CutFinder {
 public:
  __device__ CutFinder(const RowCluster& cluster, const Source& source, const ChunkStats* chunks,
                       int count, const RowStats& stats, const RowLaw& law,
                       const FilterParams& filters)
      : cluster_(cluster),
        source_(source),
        chunks_(chunks),
        count_(count),
        stats_(stats),
        law_(law),
        filters_(filters),
        id_bits_(source.vocab == 1 ? 1 : 32 - __clz(source.vocab - 1)) {}

  // The cut. With `head` instead the list is left holding, in order, the top_k likeliest tokens or
  // as many as are not -inf: their number is the cut's id.
  __device__ RowFilter find(bool head = false) {
    CutShared& s = cut_shared();
    const bool ranked = head || filters_.by_rank(source_.vocab), massed = filters_.by_mass();
    const bool weighed = filters_.by_weight();
    bound_by_chunks(ranked, massed);
    const uint32_t weight_key = weighed ? lightest_key() : kEmptyKey + 1;
    // the list has to hold all that top_p is a share of, unless that is the whole row
    const bool from_rank = ranked && filters_.order != FilterOrder::kJoint;
    const bool from_weight = weighed && filters_.order == FilterOrder::kVllm;
    uint32_t bound = max(s.rank_key, weight_key);
    if (!from_rank && !from_weight) bound = max(bound, s.mass_key);
    if (massed && from_rank && !from_weight) bound = s.rank_key;
    const bool bounded = bound > kEmptyKey + 1 && (!ranked || s.rank_key != 0);

    const Places with_ids{Source::kSameBits, id_bits_}, without_ids{Source::kSameBits, 0};
    Places places = with_ids;
    Aim aim = bounded ? Aim::kAll : ranked ? Aim::kRank : Aim::kPrefix;
    Pass pass = bounded ? Pass::kList : Pass::kExponentBins;
    uint64_t low = 0, high = with_ids.last_of_key(bounded ? bound : kEmptyKey + 1), limit = high;
    uint64_t target =
        ranked ? static_cast<uint64_t>(min(filters_.top_k, static_cast<int64_t>(source_.vocab)))
               : 0;
    uint64_t base = stats_.sum, prefix_mass = 0, halving_low = 0;
    uint32_t prefix_key = weight_key;
    if (aim == Aim::kRank && !head) places = without_ids, high = limit = places.of_key(high_key());
    if (aim == Aim::kPrefix)
      pass = start_prefix(weighed, massed, with_ids, prefix_key, &low, &high);

#pragma unroll 1
    for (;;) {
      if (pass != Pass::kNone) survey(places, low, high, pass);
      if (aim == Aim::kAll) {
        if (in_range_ <= kListed) {
          sum_list(places, in_range_);
          if (head) return {0.0f, static_cast<int32_t>(min(target, uint64_t(in_range_))), 0};
          return solve_list(places, in_range_, ranked, weight_key, from_rank, from_weight);
        }
        aim = ranked ? Aim::kRank : Aim::kPrefix;
        low = 0;
        if (aim == Aim::kRank) {
          pass = Pass::kExponentBins;
          places = head ? with_ids : without_ids;
          high = limit = places.last_of_key(kEmptyKey + 1);
        } else {
          pass = start_prefix(weighed, massed, with_ids, prefix_key, &low, &high);
        }
        continue;
      }
      if (aim == Aim::kPrefix) {  // the mass up to prefix_key, if it was asked for
        if (pass == Pass::kSum) {
          prefix_mass = mass_before_;
          if (from_weight) base = prefix_mass;
        }
        if (!massed) return {key_logit(prefix_key), INT32_MAX, prefix_mass};
        aim = Aim::kMass;
        pass = Pass::kExponentBins;
        places = with_ids;
        target = nucleus_cut(base, filters_.top_p);
        low = 0;
        high = limit = places.last_of_key(max(prefix_key, s.mass_key));
        continue;
      }
      // a search: bins until few tokens are left, then a list of them
      const bool by_mass = aim == Aim::kMass;
      if (pass == Pass::kSum) {  // half way
        if ((by_mass ? mass_before_ : count_before_) >= target) {
          high = low - 1;
          low = halving_low;
        }
        pass = Pass::kBins;
        continue;
      }
      if (pass != Pass::kList) {
        pass = narrow(places, target, by_mass, limit, pass, &low, &high, &halving_low);
        continue;
      }
      if (in_range_ > kListed && low < high) {
        pass = Pass::kBins;
        continue;
      }
      uint64_t place = low, mass = mass_before_;
      if (low == high) {
        mass += in_range_ * to_fixed(law_.weight(places.logit(low)));
      } else {
        const int count = in_range_;
        sum_list(places, count);
        int n;
        if (by_mass) {
          n = max(1, count_below(s.before, count, target - mass));
        } else {
          n = min(count, static_cast<int>(target - count_before_));
          if (n > 0) n = count_below(s.sorted, count, s.sorted[n - 1] + 1);
        }
        place = n > 0 ? s.sorted[n - 1] : limit;
        mass += s.before[n];
      }
      if (by_mass) return {places.logit(place), static_cast<int32_t>(places.id_of(place)), mass};
      if (head) {  // once more, now that the last token is known
        aim = Aim::kAll;
        pass = Pass::kList;
        low = 0;
        high = place;
        continue;
      }
      if (filters_.order != FilterOrder::kJoint) base = mass;
      prefix_mass = mass;
      const uint32_t rank_key = places.least_key(place);
      aim = Aim::kPrefix;
      low = 0;
      pass = Pass::kNone;
      if (rank_key >= prefix_key)
        prefix_key = rank_key;
      else
        pass = start_prefix(weighed, massed, with_ids, prefix_key, &low, &high);
      places = with_ids;
    }
  }

  // After find(true).
  __device__ int32_t listed(int n) const {
    return static_cast<int32_t>(Places{Source::kSameBits, id_bits_}.id_of(cut_shared().sorted[n]));
  }
  // Entries of the list that are all of the tokens that are kept; 0 where they are not listed.
  __device__ int kept_listed() const { return kept_listed_; }
  __device__ float listed_logit(int n) const {
    return Places{Source::kSameBits, id_bits_}.logit(cut_shared().sorted[n]);
  }

 private:
  enum class Aim { kAll, kRank, kPrefix, kMass };
  enum class Pass { kNone, kBins, kExponentBins, kList, kSum };

  static __device__ uint32_t high_key() { return kEmptyKey + 1; }

  // The mass that min-p keeps is only needed for itself or as what top-p is a share of.
  __device__ Pass start_prefix(bool weighed, bool massed, const Places& places, uint32_t prefix_key,
                               uint64_t* low, uint64_t* high) const {
    if (!weighed || (massed && filters_.order != FilterOrder::kVllm)) return Pass::kNone;
    *low = places.last_of_key(prefix_key) + 1;
    *high = ~uint64_t{0};
    return Pass::kSum;
  }

  // rank_key: at least top_k of the chunks' tops are not below it, mass_key: those that are not
  // below it weigh what is kept at most; 0 where the chunks' tops say nothing. The cut is not below
  // them. Both end in 16 zero bits, which is enough for a bound.
  __device__ __forceinline__ void bound_by_chunks(bool ranked, bool massed) {
    CutShared& s = cut_shared();
    constexpr int kParts = 8;  // of a lane
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    __syncthreads();
    if (warp < 2) {
      uint32_t keys[kParts], weights[kParts], wanted = 0;
#pragma unroll
      for (int n = 0; n < kParts; ++n) {
        keys[n] = 0;
        for (int c = lane + n * kWarpSize; c < count_; c += kParts * kWarpSize)
          keys[n] = max(keys[n], __ldcg(&chunks_[c].key));
        weights[n] = keys[n] > kEmptyKey ? 1 : 0;
      }
      if (warp == 0) {
        wanted = ranked ? static_cast<uint32_t>(min(filters_.top_k, int64_t{1} << 30)) : ~0u;
      } else if (massed) {
#pragma unroll
        for (int n = 0; n < kParts; ++n)  // rounded down; 256 of them fit
          if (weights[n] != 0)
            weights[n] = static_cast<uint32_t>(law_.weight(key_logit(keys[n])) * 0x1p20f);
        // a little more than the base can be: it may be a sum of rounded weights
        const uint64_t most = nucleus_cut(stats_.sum + (stats_.sum >> 16), filters_.top_p);
        wanted = static_cast<uint32_t>(min(most >> 20, uint64_t{0xfffffff0u})) + 1;
      } else {
        wanted = ~0u;
      }
      uint32_t key = 0;
#pragma unroll 1
      for (uint32_t bit = 1u << 31; bit != 1u << 15; bit >>= 1) {
        uint32_t sum = 0;
#pragma unroll
        for (int n = 0; n < kParts; ++n) sum += keys[n] >= (key | bit) ? weights[n] : 0;
        if (__reduce_add_sync(kFullMask, sum) >= wanted) key |= bit;
      }
      if (lane == 0) (warp == 0 ? s.rank_key : s.mass_key) = key;
    }
    __syncthreads();
  }

  // Smallest key at which a property holds that rises with the key; it holds at the row's top.
  template <class Holds>
  __device__ __forceinline__ uint32_t first_key(Holds holds) const {
    const int lane = threadIdx.x % kWarpSize;
    uint64_t low = kEmptyKey + 1, high = logit_key(law_.top);  // the answer is in [low, high]
#pragma unroll 1
    while (low < high) {
      const uint64_t step = (high - low + kWarpSize) / kWarpSize;
      const uint64_t mine = min(low + step * lane + step - 1, high);
      const unsigned found = __ballot_sync(kFullMask, holds(static_cast<uint32_t>(mine)));
      const uint64_t from = low + step * (__ffs(found) - 1);  // the last lane is at `high`
      high = min(from + step - 1, high);
      low = from;
    }
    return static_cast<uint32_t>(low);
  }

  // The least key of a stored logit that min-p keeps.
  __device__ uint32_t lightest_key() const {
    const float lowest = filters_.lowest_exponent(law_);
    const uint32_t key =
        first_key([&](uint32_t k) { return law_.exponent(key_logit(k)) >= lowest; });
    constexpr uint32_t kMask = (1u << Source::kSameBits) - 1;
    return (key & 0x80000000u) != 0 && (key & kMask) != 0 ? (key | kMask) + 1 : key;
  }

  __device__ __forceinline__ int exponent_bin(float logit) const {
    const float below = law_.exponent(law_.top) - law_.exponent(logit);
    return static_cast<int>(fminf(below * kBinsPerExponent, static_cast<float>(kBins - 1)));
  }

  // One pass: number and mass of the tokens before place `low`, number of those in [low, high], and
  // what the pass is for: their bins or their list. All threads of the cluster get the same.
  __device__ __forceinline__ void survey(const Places& places, uint64_t low, uint64_t high,
                                         Pass pass) {
    CutShared& s = cut_shared();
    const bool bins = pass == Pass::kBins || pass == Pass::kExponentBins;
    shift_ = max(0, 64 - __clzll(high - low) - 10);
    high_ = high;
    __syncthreads();
    if (bins)
      for (int n = threadIdx.x; n < kBins; n += kWalkThreads) s.own[n] = s.sums[n] = 0;
    if (threadIdx.x == 0) s.listed = 0;
    __syncthreads();
    uint64_t mass = 0;
    uint32_t before = 0, inside = 0;
    const uint32_t least = places.least_key(pass == Pass::kSum ? low : high);
    for_each_group(
        cluster_, source_, chunks_, count_, max(least, kEmptyKey + 1),
        [&](int token, const auto& group) {
#pragma unroll
          for (int j = 0; j < kGroup; ++j) {
            const float logit = group.at(j);
            const uint32_t key = logit_key(logit);
            if (key < least || key <= kEmptyKey) continue;
            const uint64_t place =
                places.of_key(key) | (places.id_bits == 0 ? 0u : static_cast<uint32_t>(token + j));
            if (place < low) {
              ++before;
              mass += to_fixed(law_.weight(logit));
            } else if (pass != Pass::kSum && place <= high) {
              if (pass == Pass::kList) {
                const uint32_t n = atomicAdd(&s.listed, 1u);
                if (n < kListed) s.list[n] = place;
              } else {
                ++inside;
                const int bin = pass == Pass::kBins ? static_cast<int>((place - low) >> shift_)
                                                    : exponent_bin(logit);
                atomicAdd(&s.own[bin], 1u);
              }
            }
          }
        });
    const auto add = [](unsigned long long a, unsigned long long b) { return a + b; };
    const unsigned long long both =
        block_reduce(static_cast<unsigned long long>(before) << 32 | inside, add, s.scan);
    const unsigned long long own_mass =
        block_reduce(static_cast<unsigned long long>(mass), add, s.scan);
    if (threadIdx.x == 0) {
      s.count = static_cast<uint32_t>(both >> 32);
      s.mass = own_mass;
      if (bins) s.listed = static_cast<uint32_t>(both);
    }
    cluster_.sync();
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const uint32_t listed = cluster_.of_lane(&s.listed);
    count_before_ = __reduce_add_sync(kFullMask, cluster_.of_lane(&s.count));
    mass_before_ = warp_sum(static_cast<uint64_t>(cluster_.of_lane(&s.mass)));
    in_range_ = static_cast<int>(__reduce_add_sync(kFullMask, listed));
    if (bins) {
      // each block adds up its share of the bins, and gives all blocks the result
      const int share = kBins / cluster_.size, first = cluster_.rank * share;
#pragma unroll 1
      for (int n = threadIdx.x; n < kBins; n += kWalkThreads)
        atomicAdd(&s.sums[n % share], cluster_.map(s.own, n / share)[first + n % share]);
      __syncthreads();
#pragma unroll 1
      for (int n = threadIdx.x; n < kBins; n += kWalkThreads)
        cluster_.map(s.total, n / share)[first + n % share] = s.sums[n % share];
    } else if (pass == Pass::kList && in_range_ <= kListed && warp < cluster_.size) {
      // a warp copies the list of one block
      const uint32_t to = __reduce_add_sync(kFullMask, lane < warp ? listed : 0u);
      const uint32_t theirs = __shfl_sync(kFullMask, listed, warp);
      const unsigned long long* list = cluster_.map(s.list, warp);
      for (uint32_t n = lane; n < theirs; n += kWarpSize) s.sorted[to + n] = list[n];
    }
    cluster_.sync();
  }

  // Sorts the list of the last survey, and sums it up.
  __device__ __forceinline__ void sum_list(const Places& places, int count) {
    sum_sorted(count, [&](uint64_t place) { return to_fixed(law_.weight(places.logit(place))); });
  }

  // The list holds every token from the first on down to a bound that is not above the cut.
  __device__ __forceinline__ RowFilter solve_list(const Places& places, int count, bool ranked,
                                                  uint32_t weight_key, bool from_rank,
                                                  bool from_weight) {
    const CutShared& s = cut_shared();
    int by_rank = count;  // where min-p, or a share of the whole row, leaves fewer than top_k
    if (ranked && filters_.top_k <= count)
      by_rank =
          count_below(s.sorted, count,
                      places.last_of_key(places.greatest_key(s.sorted[filters_.top_k - 1])) + 1);
    const int by_weight = count_below(s.sorted, count, places.last_of_key(weight_key) + 1);
    int kept = min(by_rank, by_weight);
    if (filters_.by_mass()) {
      const uint64_t base = from_weight ? s.before[kept]
                            : from_rank ? s.before[by_rank]
                                        : stats_.sum;
      kept = min(kept, count_below(s.before, count, nucleus_cut(base, filters_.top_p)));
    }
    kept_listed_ = kept;
    const uint64_t place = s.sorted[kept - 1];
    return {places.logit(place), static_cast<int32_t>(places.id_of(place)), s.before[kept]};
  }

  // From the bins of [low, high] to the part of it where the target is reached, and to what the
  // next pass is for.
  __device__ __forceinline__ Pass narrow(const Places& places, uint64_t target, bool by_mass,
                                         uint64_t limit, Pass pass, uint64_t* low, uint64_t* high,
                                         uint64_t* halving_low) {
    const bool exponents = pass == Pass::kExponentBins;
    const int total = in_range_;
    pick_bins(places, *low, target, by_mass, exponents);
    const int first = cut_shared().first_bin, last = cut_shared().last_bin;
    uint64_t new_low = *low, new_high = *high;
    if (first == kBins) {  // not reached
      new_low = new_high = limit;
    } else if (exponents) {
      // the keys at which the bins begin: below `first` for one end, up to `last` for the other
#pragma unroll 1
      for (int end = 0; end < 2; ++end) {
        const int most = end == 0 ? first - 1 : last;
        if (most < 0 || most >= kBins - 1) continue;
        const uint32_t key =
            first_key([&](uint32_t k) { return exponent_bin(key_logit(k)) <= most; });
        if (end == 0)
          new_low = max(*low, places.of_key(key - 1));
        else
          new_high = min(*high, places.last_of_key(key));
      }
    } else {
      new_low = *low + (static_cast<uint64_t>(first) << shift_);
      new_high = min(*high, *low + (static_cast<uint64_t>(last + 1) << shift_) - 1);
    }
    const bool same = !exponents && new_low == *low && new_high == *high;
    if (same && *low < *high && total > kListed) {
      // the bounds of masses say nothing here: halve
      *halving_low = *low;
      *low += (*high - *low) / 2 + 1;
      return Pass::kSum;
    }
    *low = new_low;
    *high = new_high;
    return picked_ <= kListed || new_low == new_high ? Pass::kList : Pass::kBins;
  }

  // first_bin .. last_bin of the last survey hold the place where the target is reached; first_bin
  // is kBins where it is not.
  __device__ __forceinline__ void pick_bins(const Places& places, uint64_t low, uint64_t target,
                                            bool by_mass, bool exponents) {
    constexpr int kShare = kBins / kWalkThreads;
    CutShared& s = cut_shared();
    const int first = threadIdx.x * kShare;
    unsigned long long least[kShare], most[kShare], least_sum = 0, most_sum = 0;
#pragma unroll
    for (int n = 0; n < kShare; ++n) {
      const unsigned long long count = s.total[first + n];
      least[n] = most[n] = count;
      if (by_mass && count != 0) {
        float light, heavy;
        bin_weights(places, low, first + n, exponents, &light, &heavy);
        const uint64_t light_fixed = to_fixed(light), heavy_fixed = to_fixed(heavy);
        least[n] *= light_fixed - (light_fixed >> 20);
        most[n] *= heavy_fixed + (heavy_fixed >> 20) + 1;
      }
      least_sum += least[n];
      most_sum += most[n];
    }
    const uint64_t before = by_mass ? mass_before_ : count_before_;
    unsigned long long least_at = before + scan_block(least_sum);
    unsigned long long most_at = before + scan_block(most_sum);
    if (threadIdx.x == 0) {
      s.first_bin = kBins;
      s.last_bin = kBins - 1;
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kShare; ++n) {
      if (most_at < target && most_at + most[n] >= target) atomicMin(&s.first_bin, first + n);
      if (least_at < target && least_at + least[n] >= target) atomicMin(&s.last_bin, first + n);
      least_at += least[n];
      most_at += most[n];
    }
    __syncthreads();
    unsigned long long inside = 0;
#pragma unroll
    for (int n = 0; n < kShare; ++n)
      if (first + n >= s.first_bin && first + n <= s.last_bin) inside += s.total[first + n];
    picked_ = block_reduce(
        inside, [](unsigned long long a, unsigned long long b) { return a + b; }, s.scan);
  }

  __device__ __forceinline__ void bin_weights(const Places& places, uint64_t low, int bin,
                                              bool exponents, float* light, float* heavy) const {
    if (exponents) {
      const float top = law_.exponent(law_.top);
      *heavy = exp2f(top - static_cast<float>(bin) / kBinsPerExponent) * (1.0f + 0x1p-18f);
      *light = bin == kBins - 1 ? 0.0f
                                : exp2f(top - static_cast<float>(bin + 1) / kBinsPerExponent) *
                                      (1.0f - 0x1p-18f);
      return;
    }
    const uint64_t from = low + (static_cast<uint64_t>(bin) << shift_);
    const uint64_t to = min(from + (uint64_t{1} << shift_) - 1, high_);
    *heavy = law_.weight(key_logit(min(places.greatest_key(from), logit_key(law_.top))));
    *light = law_.weight(key_logit(max(places.least_key(to), kEmptyKey)));
  }

  const RowCluster& cluster_;
  const Source& source_;
  const ChunkStats* chunks_;
  int count_;
  const RowStats& stats_;
  const RowLaw& law_;
  const FilterParams& filters_;
  int id_bits_;
  // of the last survey
  int shift_ = 0;
  uint64_t high_ = 0;
  int in_range_ = 0;
  uint64_t count_before_ = 0;
  uint64_t mass_before_ = 0;
  int kept_listed_ = 0;
  unsigned long long picked_ = 0;  // tokens in the bins that pick_bins chose
};

}  // namespace domino
