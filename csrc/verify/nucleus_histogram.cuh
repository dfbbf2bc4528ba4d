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
  static constexpr int kAtOnce = 4;  // rows of a warp
  static_assert(kOctaves % (kAtOnce * Team::kWarps) == 0);

  // Leaves the cut in s.cut, or says that it is unclear.
  __device__ __forceinline__ void find_bin(const RowLaw& law, const FilterParams& filters,
                                           float lowest, bool has_near) const {
    const int warp = Team::rank() / kWarpSize, lane = threadIdx.x % kWarpSize;
    const bool weighed = filters.by_weight();
    const uint32_t minus_zeros = s_.count[kZeroBin + 1];
    const uint64_t near = has_near ? s_.near_mass : 0;
    const FixedWeights weights(law);
#pragma unroll 1
    for (int first = warp; first < kOctaves; first += kAtOnce * Team::kWarps) {
      uint4 bins[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n)
        bins[n] =
            join_zeros(first + n * Team::kWarps, load_bins(first + n * Team::kWarps), minus_zeros);
      // two rows at a time, so that their chains of instructions overlap
#pragma unroll
      for (int n = 0; n < kAtOnce; n += 2) {
        uint64_t mass[2] = {0, 0}, heavy[2] = {0, 0};
        const uint4 &a = bins[n], &b = bins[n + 1];
        if (__any_sync(kFullMask, (a.x | a.y | a.z | a.w | b.x | b.y | b.z | b.w) != 0)) {
          CountAndMass in[2][4];
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            const int row = first + (n + m) * Team::kWarps;
            weigh_bins(weights, law, row, bins[n + m], near, false, in[m]);
            mass[m] = warp_sum(sum_bins(in[m]).mass);
          }
          if (weighed) {
#pragma unroll
            for (int m = 0; m < 2; ++m)
              heavy[m] = warp_sum(heavy_bins(law, first + (n + m) * Team::kWarps, lowest, in[m]));
          }
        }
        if (lane < 2) {
          const int row = first + (n + lane) * Team::kWarps;
          s_.rows.mass[row] = lane == 0 ? mass[0] : mass[1];
          if (weighed) s_.rows.heavy[row] = lane == 0 ? heavy[0] : heavy[1];
        }
      }
    }
    Team::sync();
    if (warp != Team::kWarps - 1) return;

    const ulonglong2 two = reinterpret_cast<const ulonglong2*>(s_.rows.mass)[lane];
    uint64_t total, unused;
    const uint64_t before = before_lane(two.x + two.y, &total);
    uint64_t kept = total;
    if (weighed) kept = warp_sum(s_.rows.heavy[2 * lane] + s_.rows.heavy[2 * lane + 1]);
    const uint64_t target =
        nucleus_cut(filters.order == FilterOrder::kVllm ? kept : total, filters.top_p);
    ValueCut cut{-INFINITY, -1, kept};
    int writer = 0;
    bool unclear = false;
    if (filters.by_mass() && target <= kept) {
      const auto reached = [&](const CountAndMass& sums) { return sums.mass >= target; };
      const CountAndMass own[2] = {{two.x, 0}, {two.y, 0}};  // a lane has two rows
      const Crossing row = find_crossing(2 * lane, {before, 0}, own, reached).shared();
      CountAndMass in[4];
      weigh_bins(weights, law, row.at, join_zeros(row.at, load_bins(row.at), minus_zeros), near,
                 true, in);
      const uint64_t in_row = before_lane(sum_bins(in).mass, &unused);
      const Crossing bin =
          find_crossing(row.at * kRowBins + lane * 4, {row.before.mass + in_row, 0}, in, reached);
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

  __device__ __forceinline__ uint4 load_bins(int row) const {
    return reinterpret_cast<const uint4*>(s_.count)[row * kWarpSize + threadIdx.x % kWarpSize];
  }

  // What the lanes before this one have, and all. Through memory: where others count meanwhile,
  // each of five shuffles would wait behind their atomics.
  __device__ __forceinline__ uint64_t before_lane(uint64_t own, uint64_t* total) const {
    const int lane = threadIdx.x % kWarpSize;
    __syncwarp();  // the lanes may still be read
    uint64_t* lanes = s_.rows.mass + kOctaves;
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
