// Where the filters cut a row of bf16 logits that one block has counted (row_counter.cuh), by a
// team of its threads: warps sum up rows of 128 bins, and one goes on to the cut.
#pragma once

#include "verify/row_counter.cuh"
#include "verify/value_search.cuh"

namespace domino {

template <class Team>
class RowHistogram {
 public:
  __device__ RowHistogram(ListedShared& shared, const RowSource<bf16>& source)
      : s_(shared), source_(source) {}

  // Where the counter was bound and the list is not enough; find() has to follow.
  __device__ __forceinline__ void count_list() const {
    const int listed = min(s_.found.listed, kListedGroups);
    for (int n = Team::rank(); n < listed; n += Team::kThreads)
      count_above(s_, s_.list[n], s_.found.bound);
    Team::sync();
  }

  // The cut, to all threads of the team.
  __device__ __forceinline__ ValueCut find(const RowLaw& law, const FilterParams& filters) const {
    const float lowest = filters.lowest_exponent(law);
    const uint32_t near = s_.found.near_zero;
    bool found = tells_apart(law, lowest, near);
    if (found) {
      if (Team::rank() == 0) {  // -0 is +0
        s_.count[kZeroBin] += s_.count[kZeroBin + 1];
        s_.count[kZeroBin + 1] = 0;
        if (near != 0) s_.near_mass = near_mass(s_, RowCluster(), law);
      }
      Team::sync();
      find_bin(law, filters, lowest);
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
  static constexpr int kRow = 4 * kWarpSize;  // bins: an octave, a load of a warp
  static constexpr int kRows = kValueBins / kRow;
  static constexpr int kLaneRows = kRows / kWarpSize;
  static_assert(kRows <= BinRows::kCount);

  // Leaves the cut in s.cut, or says that it is unclear.
  __device__ __forceinline__ void find_bin(const RowLaw& law, const FilterParams& filters,
                                           float lowest) const {
    const int warp = Team::rank() / kWarpSize, lane = threadIdx.x % kWarpSize;
    const bool weighed = filters.by_weight();
    const uint4* rows = reinterpret_cast<const uint4*>(s_.count);
    static_assert(kRows % (2 * Team::kWarps) == 0);
    // two rows at a time: where others count meanwhile, a trip to shared memory is long
#pragma unroll 1
    for (int row = warp; row < kRows; row += 2 * Team::kWarps) {
      const uint4 four[2] = {rows[row * kWarpSize + lane],
                             rows[(row + Team::kWarps) * kWarpSize + lane]};
      CountAndMass sum[2] = {};
      uint64_t heavy[2] = {0, 0};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        if (!__any_sync(kFullMask, (four[n].x | four[n].y | four[n].z | four[n].w) != 0)) continue;
        const uint32_t counts[4] = {four[n].x, four[n].y, four[n].z, four[n].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int bin = (row + n * Team::kWarps) * kRow + lane * 4 + j;
          const CountAndMass in = in_bin(law, bin, counts[j]);
          sum[n] = {sum[n].mass + in.mass, sum[n].count + in.count};
          if (weighed && law.exponent(bin_logit(bin)) >= lowest) heavy[n] += in.mass;
        }
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        sum[n] = {warp_sum(sum[n].mass), __reduce_add_sync(kFullMask, sum[n].count)};
        if (weighed) heavy[n] = warp_sum(heavy[n]);
        if (lane == 0) {
          s_.rows.mass[row + n * Team::kWarps] = sum[n].mass;
          s_.rows.count[row + n * Team::kWarps] = sum[n].count;
          s_.rows.heavy[row + n * Team::kWarps] = heavy[n];
        }
      }
    }
    Team::sync();
    if (warp != Team::kWarps - 1) return;

    CountAndMass of_lane{};
    uint64_t heavy_mass = 0;
#pragma unroll
    for (int n = 0; n < kLaneRows; ++n) {
      const int row = lane * kLaneRows + n;
      of_lane = {of_lane.mass + s_.rows.mass[row], of_lane.count + s_.rows.count[row]};
      if (weighed) heavy_mass += s_.rows.heavy[row];
    }
    const CountAndMass total{warp_sum(of_lane.mass), __reduce_add_sync(kFullMask, of_lane.count)};
    heavy_mass = weighed ? warp_sum(heavy_mass) : total.mass;
    uint64_t rank_mass = total.mass;
    float rank_logit = -INFINITY;
    bool unclear = false;
    if (filters.by_rank(source_.vocab) && total.count >= filters.top_k) {
      const uint32_t k = static_cast<uint32_t>(filters.top_k);
      CountAndMass at{};
      const int bin = crossing_bin(law, of_lane, &at,
                                   [&](const CountAndMass& sums) { return sums.count >= k; });
      rank_mass = at.mass + in_bin(law, bin, s_.count[bin]).mass;
      rank_logit = bin_logit(bin);
      unclear = bin == kZeroBin;
    }
    const uint64_t kept = min(rank_mass, heavy_mass);
    uint64_t base = total.mass;
    if (filters.order == FilterOrder::kTransformers) base = rank_mass;
    if (filters.order == FilterOrder::kVllm) base = kept;
    const uint64_t target = nucleus_cut(base, filters.top_p);
    ValueCut cut{rank_logit, -1, kept};
    if (filters.by_mass() && target <= kept) {
      CountAndMass at{};
      const int bin = crossing_bin(law, of_lane, &at,
                                   [&](const CountAndMass& sums) { return sums.mass >= target; });
      cut = cut_ties(bin_logit(bin), at.mass, s_.count[bin], target, law);
      unclear = unclear || bin == kZeroBin;
    } else if (weighed) {
      const int last = last_place(kValueBins, [&](int n) {
        return bin_logit(n) >= law.top || law.exponent(bin_logit(n)) >= lowest;
      });
      // with 0 stay those near it
      cut.logit = fmaxf(rank_logit, last == kZeroBin + 1 ? -0x1p-23f : bin_logit(last));
    }
    if (lane == 0) {
      s_.cut = cut;
      s_.unclear = unclear;
    }
  }

  // `count` tokens of a bin, as far as they have weight.
  __device__ __forceinline__ CountAndMass in_bin(const RowLaw& law, int bin, uint32_t count) const {
    const float weight = law.weight(bin_logit(bin));
    const uint64_t mass = count * to_fixed(weight);
    return {bin == kZeroBin ? mass + s_.near_mass : mass, weight > 0.0f ? count : 0};
  }

  // The bin in which the sums come to what is wanted; `at` is then what lies before it. In a lane's
  // rows there is `of_lane`. By a warp, all lanes of which get it.
  template <class Reached>
  __device__ __forceinline__ int crossing_bin(const RowLaw& law, const CountAndMass& of_lane,
                                              CountAndMass* at, Reached reached) const {
    const auto passes = [&](const CountAndMass& in) {
      const CountAndMass next{at->mass + in.mass, at->count + in.count};
      if (reached(next)) return false;
      *at = next;
      return true;
    };
    const int lane = threadIdx.x % kWarpSize;
    int row = crossing_lane(of_lane, reached, at) * kLaneRows;
#pragma unroll
    for (int n = 1; n < kLaneRows; ++n) {
      if (!passes({s_.rows.mass[row], s_.rows.count[row]})) break;
      ++row;
    }
    const uint4 four = reinterpret_cast<const uint4*>(s_.count)[row * kWarpSize + lane];
    const uint32_t counts[4] = {four.x, four.y, four.z, four.w};
    CountAndMass in{};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const CountAndMass one = in_bin(law, row * kRow + lane * 4 + n, counts[n]);
      in = {in.mass + one.mass, in.count + one.count};
    }
    int bin = row * kRow + crossing_lane(in, reached, at) * 4;
#pragma unroll 1
    for (int n = 1; n < 4; ++n) {
      if (!passes(in_bin(law, bin, s_.count[bin]))) break;
      ++bin;
    }
    return bin;
  }

  ListedShared& s_;
  const RowSource<bf16>& source_;
};

}  // namespace domino
