// Where the filters cut a row of bf16 logits, by passes that halve the range of values: about 40
// reads of the row. For rows whose counts (row_counter.cuh) do not tell values apart.
#pragma once

#include "verify/value_bins.cuh"

namespace domino {

// By value, so that what it is made from can stay in registers.
template <class Team, class Shared>
struct ValueSearch {
  Shared& s;
  RowCluster cluster;
  RowSource<bf16> source;
  RowLaw law;
  FilterParams filters;

  // Leaves the cut in s.cut of the cluster's first block.
  __device__ __noinline__ void find() const {
    const ValueCut cut = search();
    if (cluster.rank == 0 && Team::rank() == 0) s.cut = cut;
  }

 private:
  __device__ __forceinline__ ValueCut search() const {
    const CountAndMass total = survey(kValues - 1);
    int kept_place = kValues - 1;
    uint64_t base = total.mass, kept = total.mass;
    if (filters.by_rank(source.vocab) && total.count >= filters.top_k) {
      kept_place =
          first_place([&](const CountAndMass& sums) { return sums.count >= filters.top_k; });
      kept = survey(kept_place).mass;
      if (filters.order == FilterOrder::kTransformers) base = kept;
    }
    if (filters.by_weight()) {
      const float lowest = filters.lowest_exponent(law);
      const int place = last_place(kValues, [&](int n) {
        return !(place_logit(n) <= law.top) || law.exponent(place_logit(n)) >= lowest;
      });
      if (place < kept_place) kept = survey(kept_place = place).mass;
    }
    if (filters.order == FilterOrder::kVllm) base = kept;
    const uint64_t target = nucleus_cut(base, filters.top_p);
    if (!filters.by_mass() || target > kept) {
      return {kept_place == kValues - 1 ? -INFINITY : place_logit(kept_place), -1, kept};
    }
    const int place = first_place([&](const CountAndMass& sums) { return sums.mass >= target; });
    const CountAndMass with = survey(place), before = survey(place - 1);
    return cut_ties(place_logit(place), before.mass, with.count - before.count, target, law);
  }

  // Number and mass of the row's tokens up to a place; all threads of the cluster get it.
  __device__ __noinline__ CountAndMass survey(int place) const {
    const int groups = ceil_div(source.vocab, kGroup);
    CountAndMass own{};
#pragma unroll 1
    for (int n = cluster.rank * Team::kThreads + Team::rank(); n < groups;
         n += cluster.size * Team::kThreads) {
      const Group<bf16> group = source.group(n * kGroup);
      const uint32_t words[4] = {group.words.x, group.words.y, group.words.z, group.words.w};
#pragma unroll 1
      for (int j = 0; j < kGroup; ++j) {
        const uint32_t half = j % 2 == 0 ? words[j / 2] & 0xffffu : words[j / 2] >> 16;
        const float weight = law.weight(__uint_as_float(half << 16));
        if (value_place(half) > place || !(weight > 0.0f)) continue;
        own.mass += to_fixed(weight);
        own.count += 1;
      }
    }
    CountAndMass total;
    sum_warps<Team>(s, {warp_sum(own.mass), __reduce_add_sync(kFullMask, own.count)}, &total);
    if (cluster.size == 1) return total;
    if (threadIdx.x < cluster.size) {
      cluster.map(s.mass, threadIdx.x)[cluster.rank] = total.mass;
      cluster.map(s.tokens, threadIdx.x)[cluster.rank] = total.count;
    }
    cluster.sync();
    total = {};
    for (int block = 0; block < cluster.size; ++block)
      total = {total.mass + s.mass[block], total.count + s.tokens[block]};
    cluster.sync();
    return total;
  }

  // The first place up to which `reached` holds; it holds up to the last.
  template <class Reached>
  __device__ __forceinline__ int first_place(Reached reached) const {
    int low = 0, high = kValues - 1;
#pragma unroll 1
    while (low < high) {
      const int middle = (low + high) / 2;
      if (reached(survey(middle)))
        high = middle;
      else
        low = middle + 1;
    }
    return low;
  }
};

}  // namespace domino
