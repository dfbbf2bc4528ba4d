// Where top-p and min-p cut a row of bf16 logits that one block has counted (row_counter.cuh),
// without a top-k, by a team of its threads: as RowHistogram, with less to do for each bin.
#pragma once

#include "verify/bin_rows.cuh"
#include "verify/row_counter.cuh"
#include "verify/value_search.cuh"

namespace domino {

template <class Team>
class NucleusHistogram {
 public:
  __device__ NucleusHistogram(ListedShared& shared, const RowSource<bf16>& source)
      : s_(shared), source_(source) {}

  // The cut, to all threads of the team.
  __device__ __forceinline__ ValueCut find(const RowLaw& law, const FilterParams& filters) const {
    const float lowest = filters.lowest_exponent(law);
    const uint32_t near = s_.found.near_zero;
    bool found = tells_apart(law, lowest, near);
    if (found) {
      if (near != 0) {
        if (Team::rank() == 0) s_.near_mass = near_mass(s_, RowCluster(), law);
        Team::sync();
      }
      find_bin(law, filters, lowest, near != 0);
      Team::sync();
      found = near == 0 || s_.unclear == 0;
    }
    if (!found) {
      ValueSearch<Team, ListedShared>{s_, RowCluster(), source_, law, filters}.find();
      Team::sync();
    }
    return s_.cut;
  }

 private:
  // A thread sums up bins that are next to each other, and nobody waits for anybody: while others
  // count, a trip to shared memory takes some 500 cycles.
  static constexpr int kOwnBins = kValueBins / Team::kThreads;
  static constexpr int kLaneSums = Team::kThreads / kWarpSize;  // of the warp that searches
  static_assert(Team::kThreads <= BinRows::kCount - kWarpSize && kLaneSums == 4);

  // Leaves the cut in s.cut, or says that it is unclear.
  __device__ __forceinline__ void find_bin(const RowLaw& law, const FilterParams& filters,
                                           float lowest, bool has_near) const {
    const int lane = threadIdx.x % kWarpSize;
    const bool weighed = filters.by_weight();
    const uint32_t minus_zeros = s_.count[kZeroBin + 1];
    const uint64_t near = has_near ? s_.near_mass : 0;
    const FixedWeights weights(law);
    {
      uint64_t mass = 0, heavy = 0;
#pragma unroll 4
      for (int n = 0; n < kOwnBins / 4; ++n) {
        // lanes in different banks
        const int bin = Team::rank() * kOwnBins + (n + lane) % (kOwnBins / 4) * 4;
        CountAndMass in[4];
        weigh_bins(weights, law, bin, load_bins(bin, minus_zeros), near, false, in);
        mass += sum_bins(in).mass;
        if (weighed) heavy += heavy_bins(law, bin, lowest, in);
      }
      s_.rows.mass[Team::rank()] = mass;
      if (weighed) s_.rows.heavy[Team::rank()] = heavy;
    }
    Team::sync();
    if (Team::rank() / kWarpSize != Team::kWarps - 1) return;

    CountAndMass own[kLaneSums];
#pragma unroll
    for (int n = 0; n < kLaneSums; n += 2) {
      const ulonglong2 two =
          reinterpret_cast<const ulonglong2*>(s_.rows.mass)[(kLaneSums * lane + n) / 2];
      own[n] = {two.x, 0};
      own[n + 1] = {two.y, 0};
    }
    uint64_t total, unused;
    const uint64_t before = before_lane(sum_bins(own).mass, &total);
    uint64_t kept = total;
    if (weighed) {
      uint64_t heavy = 0;
#pragma unroll
      for (int n = 0; n < kLaneSums; ++n) heavy += s_.rows.heavy[kLaneSums * lane + n];
      kept = warp_sum(heavy);
    }
    const uint64_t target =
        nucleus_cut(filters.order == FilterOrder::kVllm ? kept : total, filters.top_p);
    ValueCut cut{-INFINITY, -1, kept};
    int writer = 0;
    bool unclear = false;
    if (filters.by_mass() && target <= kept) {
      const auto reached = [&](const CountAndMass& sums) { return sums.mass >= target; };
      const Crossing sum = find_crossing(kLaneSums * lane, {before, 0}, own, reached).shared();
      // of the thread's bins four a lane, none for those behind
      const int first = sum.at * kOwnBins + 4 * lane;
      CountAndMass in[4];
      weigh_bins(weights, law, first,
                 4 * lane < kOwnBins ? load_bins(first, minus_zeros) : uint4{0, 0, 0, 0}, near,
                 true, in);
      const uint64_t in_sum = before_lane(sum_bins(in).mass, &unused);
      const Crossing bin = find_crossing(first, {sum.before.mass + in_sum, 0}, in, reached);
      writer = bin.lane;
      if (lane == writer)
        cut = cut_ties(bin_logit(bin.at), bin.before.mass, bin.in.count, target, law);
      unclear = bin.at == kZeroBin;
    } else if (weighed) {
      const int last = last_place(kValueBins, [&](int n) {
        return bin_logit(n) >= law.top || law.exponent(bin_logit(n)) >= lowest;
      });
      // with 0 stay those near it
      cut.logit = last == kZeroBin + 1 ? -0x1p-23f : bin_logit(last);
    }
    if (lane == writer) {
      s_.cut = cut;
      s_.unclear = unclear;
    }
  }

  __device__ __forceinline__ uint4 load_bins(int bin, uint32_t minus_zeros) const {
    return join_zeros_at(bin, reinterpret_cast<const uint4*>(s_.count)[bin / 4], minus_zeros);
  }

  // What the lanes before this one have, and all. Through memory: where others count meanwhile,
  // each of five shuffles would wait behind their atomics.
  __device__ __forceinline__ uint64_t before_lane(uint64_t own, uint64_t* total) const {
    const int lane = threadIdx.x % kWarpSize;
    __syncwarp();  // the lanes may still be read
    uint64_t* lanes = s_.rows.mass + Team::kThreads;
    lanes[lane] = own;
    __syncwarp();
    uint64_t before = 0;
    *total = 0;
#pragma unroll
    for (int n = 0; n < kWarpSize; n += 2) {
      const ulonglong2 two = *reinterpret_cast<const ulonglong2*>(lanes + n);
      before += (n < lane ? two.x : 0) + (n + 1 < lane ? two.y : 0);
      *total += two.x + two.y;
    }
    return before;
  }

  ListedShared& s_;
  const RowSource<bf16>& source_;
};

}  // namespace domino
