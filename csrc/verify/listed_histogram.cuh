// Where the filters cut a row of bf16 logits that the blocks of a cluster have counted
// (row_counter.cuh): blocks sum up rows of 32 bins, and one warp of each goes on to the cut.
//
// Blocks leave what others have to know in their own shared memory, and the others fetch it: then
// the cluster's barrier need not wait for global memory.
#pragma once

#include "common/cluster.cuh"
#include "verify/row_counter.cuh"
#include "verify/value_search.cuh"

namespace domino {

class ListedHistogram : public RowCounter<kReadThreads> {
 public:
  __device__ ListedHistogram(ListedShared& shared, const RowCluster& cluster,
                             const RowSource<bf16>& source)
      : RowCounter(shared), cluster_(cluster), source_(source) {}

  // All has been read, and all blocks run. The row's greatest logit. No block may end before all
  // have come back. stores: does a block read what others have written to global memory?
  __device__ __forceinline__ float finish(bool stores) {
    leave_top();
    if (stores)
      cluster_.sync();
    else
      cluster_.sync_shared();
    look_around();
    return key_logit(__reduce_max_sync(kFullMask, seen_.top));
  }

  // Do the blocks' lists hold all of their tokens from their bounds up?
  __device__ __forceinline__ bool has_list() const {
    const bool has = seen_.listed <= kListedGroups && seen_.bound != -INFINITY;
    return __all_sync(kFullMask, threadIdx.x % kWarpSize >= cluster_.size || has);
  }

  // Groups that a block has listed.
  __device__ __forceinline__ uint32_t listed(int block) const {
    return __shfl_sync(kFullMask, seen_.listed, block);
  }

  // Of a row that has_list(): no token below is among the top-k.
  __device__ __forceinline__ float list_bound() const {
    const uint32_t key = threadIdx.x % kWarpSize < cluster_.size ? logit_key(seen_.bound) : 0u;
    return key_logit(__reduce_max_sync(kFullMask, key));
  }

  // Behind finish(), where bound_by() was called and find() is to follow.
  __device__ __forceinline__ void count_list() {
    if (s_.found.bound != -INFINITY) {
      const int listed = min(s_.found.listed, kListedGroups);
      for (int n = threadIdx.x; n < listed; n += kCutThreads)
        count_above(s_, s_.list[n], s_.found.bound);
    }
    cluster_.sync_shared();
    look_around();
  }

  // Finds the cut of a row of several blocks (of one: RowHistogram): the last warp of the one block
  // for which this is true then has it. All threads of the cluster call it, and no block may end
  // before all have come back from it.
  __device__ __forceinline__ bool find(const RowLaw& law, const FilterParams& filters,
                                       ValueCut* cut) {
    const float lowest = filters.lowest_exponent(law);
    const uint32_t most_near = __reduce_max_sync(kFullMask, seen_.near_zero);
    if (tells_apart(law, lowest, most_near)) {
      const bool mine = find_bin(law, filters, lowest, most_near != 0, cut);
      if (most_near == 0) return mine;
      cluster_.sync_shared();
      const uint32_t unclear = __reduce_or_sync(kFullMask, cluster_.of_lane(&s_.unclear));
      cluster_.sync_shared();  // nobody ends before all have looked
      if (unclear == 0) return mine;
    }
    ValueSearch<WholeBlock, ListedShared>{s_, cluster_, source_, law, filters}.find();
    __syncthreads();
    *cut = s_.cut;
    return cluster_.rank == 0;
  }

 private:
  // Lane n gets what block n has found.
  __device__ __forceinline__ void look_around() {
    seen_ = {0, 0, 0, -INFINITY};
    if (threadIdx.x % kWarpSize < cluster_.size)
      seen_ = *cluster_.map(&s_.found, threadIdx.x % kWarpSize);
  }

  // A block sums up its share of the rows of bins, for all blocks; then one warp of each goes on:
  // to a row, and in the block that has it to the bin.
  __device__ __forceinline__ bool find_bin(const RowLaw& law, const FilterParams& filters,
                                           float lowest, bool has_near, ValueCut* cut) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    // whole lanes of eight rows
    const int share = round_up(ceil_div(BinRows::kCount, cluster_.size), 8);
    const int first = cluster_.rank * share;
    const bool weighed = filters.by_weight();
    const bool ranked = filters.by_rank(source_.vocab), massed = filters.by_mass();
    // two rows at a time, so that their chains of instructions overlap
#pragma unroll 1
    for (int row = first + 2 * warp; row < min(first + share, BinRows::kCount);
         row += 2 * kCutWarps) {
      uint32_t count[2];
      uint64_t mass[2] = {0, 0}, heavy[2] = {0, 0};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int bin = (row + n) * kWarpSize + lane;
        count[n] = 0;
#pragma unroll
        for (int block = 0; block < kMostCutBlocks; ++block)
          if (block < cluster_.size) count[n] += load_shared_of(&s_.count[bin], block);
      }
      // -0 is +0
      static_assert(kZeroBin % (2 * kWarpSize) == 2 * kWarpSize - 1);
      if (row == (kZeroBin + 1) / kWarpSize && lane == 0) count[0] = 0;
      if (row == kZeroBin / kWarpSize - 1) {
        const uint32_t minus =
            __reduce_add_sync(kFullMask, cluster_.of_lane(&s_.count[kZeroBin + 1]));
        if (lane == kWarpSize - 1) count[1] += minus;
      }
      if (__any_sync(kFullMask, (count[0] | count[1]) != 0)) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int bin = (row + n) * kWarpSize + lane;
          const float logit = bin_logit(bin), weight = law.weight(logit);
          if (!(weight > 0.0f)) count[n] = 0;
          mass[n] = count[n] * to_fixed(weight);
          if (has_near && bin == kZeroBin) mass[n] += s_.near_mass = near_mass(s_, cluster_, law);
          if (bin != kZeroBin + 1) s_.count[bin] = count[n];  // nobody else reads this one
          if (weighed) heavy[n] = warp_sum(law.exponent(logit) >= lowest ? mass[n] : uint64_t{0});
          mass[n] = warp_sum(mass[n]);
          count[n] = __reduce_add_sync(kFullMask, count[n]);
        }
      }
      if (lane < 2) {
        const int at = BinRows::at(row + lane);
        s_.rows.mass[at] = lane == 0 ? mass[0] : mass[1];
        s_.rows.count[at] = lane == 0 ? count[0] : count[1];
        if (weighed) s_.rows.heavy[at] = lane == 0 ? heavy[0] : heavy[1];
      }
    }
    cluster_.sync_shared();

    const bool goes_on = warp == kCutWarps - 1;
    CountAndMass total{}, of_lane{}, before{};
    uint64_t rank_mass = 0, heavy_mass = 0;
    float rank_logit = -INFINITY;
    if (goes_on) {
      const BinRows* rows = cluster_.map(&s_.rows, lane * 8 / share);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int at = BinRows::at(lane * 8 + n);
        of_lane = {of_lane.mass + rows->mass[at], of_lane.count + rows->count[at]};
        if (weighed) heavy_mass += rows->heavy[at];
      }
      const CountAndMass up_to = warp_prefix(of_lane);
      before = {up_to.mass - of_lane.mass, up_to.count - of_lane.count};
      total = {__shfl_sync(kFullMask, up_to.mass, kWarpSize - 1),
               __shfl_sync(kFullMask, up_to.count, kWarpSize - 1)};
      rank_mass = total.mass;
      heavy_mass = weighed ? warp_sum(heavy_mass) : total.mass;
    }
    if (ranked) {
      int row = -1;
      if (goes_on && total.count >= filters.top_k) {
        const uint32_t k = static_cast<uint32_t>(filters.top_k);
        const auto reached = [&](const CountAndMass& sums) { return sums.count >= k; };
        CountAndMass at;
        row = crossing_row(before, of_lane, share, reached, &at);
        if (row / share == cluster_.rank) {
          const int bin = crossing_bin(law, row, reached, &at);
          if (lane == 0) {
            s_.rank_mass = at.mass + mass_in(law, bin);
            s_.rank_bin = bin;
            if (has_near && bin == kZeroBin) s_.unclear = 1;
          }
        }
      }
      cluster_.sync_shared();
      if (row >= 0) {
        // by shuffles, so that blocks which make nothing of them have them before the owner may
        // leave
        rank_mass = __shfl_sync(kFullMask, *cluster_.map(&s_.rank_mass, row / share), 0);
        rank_logit = bin_logit(__shfl_sync(kFullMask, *cluster_.map(&s_.rank_bin, row / share), 0));
      }
    }
    if (!goes_on) return false;
    const uint64_t kept = min(rank_mass, heavy_mass);
    uint64_t base = total.mass;
    if (filters.order == FilterOrder::kTransformers) base = rank_mass;
    if (filters.order == FilterOrder::kVllm) base = kept;
    const uint64_t target = nucleus_cut(base, filters.top_p);
    if (!massed || target > kept) {
      float logit = rank_logit;
      if (weighed) {
        const int last = last_place(kValueBins, [&](int n) {
          return bin_logit(n) >= law.top || law.exponent(bin_logit(n)) >= lowest;
        });
        // with 0 stay those near it
        logit = fmaxf(logit, last == kZeroBin + 1 ? -0x1p-23f : bin_logit(last));
      }
      *cut = {logit, -1, kept};
      return cluster_.rank == 0;
    }
    const auto reached = [&](const CountAndMass& sums) { return sums.mass >= target; };
    CountAndMass at;
    const int row = crossing_row(before, of_lane, share, reached, &at);
    if (row / share != cluster_.rank) return false;
    const int bin = crossing_bin(law, row, reached, &at);
    *cut = cut_ties(bin_logit(bin), at.mass, count_in(bin), target, law);
    if (has_near && bin == kZeroBin && lane == 0) s_.unclear = 1;
    return true;
  }

  // Of the cluster, in a bin of this block's share.
  __device__ __forceinline__ uint32_t count_in(int bin) const {
    return bin == kZeroBin + 1 ? 0 : s_.count[bin];
  }
  __device__ __forceinline__ uint64_t mass_in(const RowLaw& law, int bin) const {
    const uint64_t mass = count_in(bin) * bin_mass(law, bin);
    return bin == kZeroBin ? mass + s_.near_mass : mass;
  }

  static __device__ __forceinline__ uint64_t bin_mass(const RowLaw& law, int bin) {
    return to_fixed(law.weight(bin_logit(bin)));
  }

  // The row of bins in which the sums come to what is wanted, and what lies before it. A lane has
  // eight rows, `before` them and `own` in them. All lanes of the warp get it.
  template <class Reached>
  __device__ __forceinline__ int crossing_row(const CountAndMass& before, const CountAndMass& own,
                                              int share, Reached reached, CountAndMass* at) const {
    const int lane = threadIdx.x % kWarpSize;
    const bool here = reached({before.mass + own.mass, before.count + own.count});
    const int found = __ffs(__ballot_sync(kFullMask, here)) - 1;
    *at = {__shfl_sync(kFullMask, before.mass, found), __shfl_sync(kFullMask, before.count, found)};
    CountAndMass in{};  // a lane a row
    if (lane < 8) {
      const BinRows* rows = cluster_.map(&s_.rows, found * 8 / share);
      const int row = BinRows::at(found * 8 + lane);
      in = {rows->mass[row], rows->count[row]};
    }
    return found * 8 + crossing_lane(in, reached, at);
  }

  // The same for the bin of a row that this block summed up.
  template <class Reached>
  __device__ __forceinline__ int crossing_bin(const RowLaw& law, int row, Reached reached,
                                              CountAndMass* at) const {
    const int bin = row * kWarpSize + threadIdx.x % kWarpSize;
    return row * kWarpSize + crossing_lane({mass_in(law, bin), count_in(bin)}, reached, at);
  }

  const RowCluster& cluster_;
  const RowSource<bf16>& source_;
  ShareFound seen_;  // of block n of the cluster, in lane n
};

}  // namespace domino
