// A row of which few tokens come near the top-k: their list, put in order by one block, is all that
// cut, verdict and race need (verify_cut.cuh).
#pragma once

#include "verify/listed_histogram.cuh"
#include "verify/race_draw.cuh"
#include "verify/walk_records.cuh"

namespace domino {

constexpr int kListedTokens = kCutThreads;

struct ListedToken {
  int32_t id;
  float logit;
};

struct ListedTokens {
  uint32_t count;  // more than there is room for, perhaps
  uint32_t top_k;  // of those, and some more
  alignas(KeyBins) ListedToken at[kListedTokens];
};

// The top-k and some that follow, unordered and in order.
struct ListedOrder {
  KeyBins bins;                  // of zeros
  uint64_t word[kListedTokens];  // rises with the place: falling logit, then rising id
  uint64_t mass[kListedTokens];
  uint64_t sorted[kListedTokens];
  uint64_t up_to[kListedTokens];  // mass of those up to here

  static __device__ __forceinline__ float logit(uint64_t word) {
    return key_logit(~static_cast<uint32_t>(word >> 32));
  }
};
static_assert(sizeof(ListedOrder) <= sizeof(ListedShared::count));

// Gathers the lists of the cluster's blocks from their common bound up. All threads of the block
// call it; a barrier has to follow.
__device__ __forceinline__ void gather_listed(const RowCluster& cluster, ListedShared& s,
                                              const ListedHistogram& histogram,
                                              ListedTokens* listed) {
  const float bound = histogram.list_bound();
  int total = 0;
  for (int block = 0; block < cluster.size; ++block) total += histogram.listed(block);
#pragma unroll 1
  for (int first = 0; first < total; first += kCutThreads) {
    int at = first + static_cast<int>(threadIdx.x), block = -1;  // the blocks follow each other
    for (int other = 0; other < cluster.size; ++other) {
      const int count = histogram.listed(other);
      if (block < 0 && at < count) block = other;
      if (block < 0) at -= count;
    }
    if (block < 0) continue;
    Group<bf16> group;
    group.words = cluster.map(s.list, block)[at];
    const int token = cluster.map(s.list_token, block)[at];
    uint32_t stay = 0;
#pragma unroll
    for (int j = 0; j < kGroup; ++j) stay |= (group.at(j) >= bound ? 1u : 0u) << j;
    if (stay == 0) continue;
    uint32_t to = atomicAdd(&listed->count, static_cast<uint32_t>(__popc(stay)));
#pragma unroll 1
    for (; stay != 0; stay &= stay - 1, ++to) {
      const int which = __ffs(stay) - 1;
      float logit = group.at(0);
#pragma unroll
      for (int j = 1; j < kGroup; ++j) logit = which == j ? group.at(j) : logit;
      if (to < kListedTokens) listed->at[to] = {token + which, logit};
    }
  }
}

// The cut of the filters, and how many tokens are kept: the first of order->sorted. All threads of
// the block call it and get the same.
__device__ __forceinline__ RowFilter cut_listed(ListedTokens& listed, const RowLaw& law,
                                                const FilterParams& filters, ListedOrder* order,
                                                int* kept) {
  const int lane = threadIdx.x % kWarpSize;
  const bool listed_here = threadIdx.x < listed.count;
  const ListedToken own = listed_here ? listed.at[threadIdx.x] : ListedToken{-1, 0.0f};
  const float weight = law.weight(own.logit);
  const bool has = listed_here && weight > 0.0f;
  // the k-th greatest logit, or a little less
  const uint32_t below = (logit_key(law.top) >> 16) - (logit_key(own.logit) >> 16);
  if (has) order->bins.add(below);
  __syncthreads();
  const uint32_t reach = order->bins.reach(static_cast<uint32_t>(filters.top_k));
  const bool near = has && below <= reach;
  const unsigned stay = __ballot_sync(kFullMask, near);
  uint32_t at = 0;
  if (lane == 0 && stay != 0) at = atomicAdd(&listed.top_k, static_cast<uint32_t>(__popc(stay)));
  at = __shfl_sync(kFullMask, at, 0) + __popc(stay & ((1u << lane) - 1));
  if (near) {
    order->word[at] =
        static_cast<uint64_t>(~logit_key(own.logit)) << 32 | static_cast<uint32_t>(own.id);
    order->mass[at] = to_fixed(weight);
  }
  __syncthreads();
  int count = static_cast<int>(listed.top_k);
  // eight lanes a token: how many come before it, and what they weigh
#pragma unroll 1
  for (int first = threadIdx.x / kWarpSize * 4; first < count; first += kCutThreads / 8) {
    const int n = min(first + lane / 8, count - 1);
    const uint64_t word = order->word[n];
    uint64_t mass = lane % 8 == 0 ? order->mass[n] : 0;
    int place = 0;
#pragma unroll 4
    for (int other = lane % 8; other < count; other += 8) {
      const bool before = order->word[other] < word;
      place += before;
      mass += before ? order->mass[other] : 0;
    }
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
      place += __shfl_xor_sync(kFullMask, place, step);
      mass += __shfl_xor_sync(kFullMask, mass, step);
    }
    if (lane % 8 == 0) {
      order->sorted[place] = word;
      order->up_to[place] = mass;
    }
  }
  __syncthreads();
  const int n = threadIdx.x;
  if (count > filters.top_k) {  // what ties with the k-th stays
    const uint64_t last = order->sorted[filters.top_k - 1] | 0xffffffffu;
    count = __syncthreads_count(n < count && order->sorted[n] <= last);
  }
  int heavy = count;
  if (filters.by_weight())
    heavy = __syncthreads_count(n < count && law.exponent(ListedOrder::logit(order->sorted[n])) >=
                                                 filters.lowest_exponent(law));
  int left = heavy;
  if (filters.by_mass()) {
    const int of = filters.order == FilterOrder::kVllm ? heavy : count;
    const uint64_t target = nucleus_cut(order->up_to[of - 1], filters.top_p);
    left = __syncthreads_count(n < heavy && (n == 0 || order->up_to[n - 1] < target));
  }
  *kept = left;
  const uint64_t cut = order->sorted[left - 1];
  return {ListedOrder::logit(cut), static_cast<int32_t>(cut), order->up_to[left - 1]};
}

// The race of row i among the tokens that are kept; -1 where none has weight, or it is not to be
// run here. All threads of the block call it and get the same.
template <bool kByPosition>
__device__ __forceinline__ int32_t race_listed(const ChainRequest& r, int i, const Slot& verdict,
                                               const SlotQ& q, const RowLaw& law,
                                               const RowFilter& filter, int kept,
                                               const ListedOrder& order) {
  if (!kByPosition && verdict.outcome != Outcome::kDraw &&
      (verdict.outcome != Outcome::kResidual || (!q.one_hot && r.q == DraftLaw::kScalar)))
    return -1;
  const DrawWeights weights = draw_weights(r, i, verdict.outcome, q, law, filter, 1.0f);
  unsigned long long key = kNoWinner;
  if (threadIdx.x < kept) {
    const uint64_t word = order.sorted[threadIdx.x];
    const uint32_t token = static_cast<uint32_t>(word);
    const NoiseWords four = race_noise(r, i, verdict.outcome).words(token / 4);
    const uint32_t random = token % 4 == 0   ? four.word[0]
                            : token % 4 == 1 ? four.word[1]
                            : token % 4 == 2 ? four.word[2]
                                             : four.word[3];
    const float weight = exact_weight(weights, weights.scaled(ListedOrder::logit(word)), token);
    if (token != weights.without) key = race_key(weight, random, token);
  }
  key = least_of_block(key);
  return key == kNoWinner ? -1 : static_cast<int32_t>(key & 0xffffffffu);
}

}  // namespace domino
