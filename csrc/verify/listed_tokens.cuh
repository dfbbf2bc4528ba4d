// A row of which few tokens come near the top-k: their list, put in order by one block, is all that
// cut, verdict and race need.
#pragma once

#include "verify/listed_histogram.cuh"
#include "verify/race_draw.cuh"
#include "verify/slot_ahead.cuh"

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

// The tokens from a bound up of the lanes' groups, if a lane has one. By a whole warp.
__device__ __forceinline__ void gather_groups(bool has, const Group<bf16>& group, int token,
                                              float bound, ListedTokens* listed) {
  const int lane = threadIdx.x % kWarpSize;
  uint32_t stay = 0;
#pragma unroll
  for (int j = 0; j < kGroup; ++j) stay |= (has && group.at(j) >= bound ? 1u : 0u) << j;
  const uint32_t own = __popc(stay);
  uint32_t to = own;
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const uint32_t left = __shfl_up_sync(kFullMask, to, step);
    if (lane >= step) to += left;
  }
  uint32_t first = 0;
  if (lane == kWarpSize - 1 && to != 0) first = atomicAdd(&listed->count, to);
  to += __shfl_sync(kFullMask, first, kWarpSize - 1) - own;
#pragma unroll 1
  for (; stay != 0; stay &= stay - 1, ++to) {
    const int which = __ffs(stay) - 1;
    float logit = group.at(0);
#pragma unroll
    for (int j = 1; j < kGroup; ++j) logit = which == j ? group.at(j) : logit;
    if (to < kListedTokens) listed->at[to] = {token + which, logit};
  }
}

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
    Group<bf16> group{};
    int token = 0;
    if (block >= 0) {
      group.words = cluster.map(s.list, block)[at];
      token = cluster.map(s.list_token, block)[at];
    }
    gather_groups(block >= 0, group, token, bound, listed);
  }
}

// How many of the first `count` tokens in order have a property that the first ones have, if any.
// By whole warps.
template <class Holds>
__device__ __forceinline__ int count_first(int count, Holds holds) {
  int first = 0;
#pragma unroll 1
  for (; first < count; first += kWarpSize) {
    const int n = first + static_cast<int>(threadIdx.x % kWarpSize);
    const unsigned yes = __ballot_sync(kFullMask, n < count && holds(n));
    if (yes != kFullMask) return first + __popc(yes);
  }
  return count;
}

// The cut of the filters, and how many tokens are kept: the first of order->sorted. All threads of
// the team call it and get the same.
template <class Team>
__device__ __forceinline__ RowFilter cut_listed(ListedTokens& listed, const RowLaw& law,
                                                const FilterParams& filters, ListedOrder* order,
                                                int* kept) {
  constexpr int kOwn = kListedTokens / Team::kThreads;  // tokens of a thread
  const int lane = threadIdx.x % kWarpSize, tokens = static_cast<int>(listed.count);
  const uint32_t greatest = logit_key(law.top) >> 16;
  uint32_t key[kOwn];
  float weight[kOwn];  // 0: none
  // the k-th greatest logit, or a little less
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const int n = j * Team::kThreads + Team::rank();
    const float logit = n < tokens ? listed.at[n].logit : 0.0f;
    key[j] = logit_key(logit);
    weight[j] = n < tokens ? law.weight(logit) : 0.0f;
    if (weight[j] > 0.0f) order->bins.add(greatest - (key[j] >> 16));
  }
  Team::sync();
  const uint32_t reach = order->bins.reach(static_cast<uint32_t>(filters.top_k));
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const bool near = weight[j] > 0.0f && greatest - (key[j] >> 16) <= reach;
    const unsigned stay = __ballot_sync(kFullMask, near);
    uint32_t at = 0;
    if (lane == 0 && stay != 0) at = atomicAdd(&listed.top_k, static_cast<uint32_t>(__popc(stay)));
    at = __shfl_sync(kFullMask, at, 0) + __popc(stay & ((1u << lane) - 1));
    if (near) {
      const int32_t id = listed.at[j * Team::kThreads + Team::rank()].id;
      order->word[at] = static_cast<uint64_t>(~key[j]) << 32 | static_cast<uint32_t>(id);
      order->mass[at] = to_fixed(weight[j]);
    }
  }
  Team::sync();
  int count = static_cast<int>(listed.top_k);
  // eight lanes a token: how many come before it, and what they weigh
#pragma unroll 1
  for (int first = Team::rank() / kWarpSize * 4; first < count; first += Team::kThreads / 8) {
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
  Team::sync();
  if (count > filters.top_k) {  // what ties with the k-th stays
    const uint64_t last = order->sorted[filters.top_k - 1] | 0xffffffffu;
    count = count_first(count, [&](int n) { return order->sorted[n] <= last; });
  }
  int heavy = count;
  if (filters.by_weight()) {
    const float lowest = filters.lowest_exponent(law);
    heavy = count_first(
        count, [&](int n) { return law.exponent(ListedOrder::logit(order->sorted[n])) >= lowest; });
  }
  int left = heavy;
  if (filters.by_mass()) {
    const int of = filters.order == FilterOrder::kVllm ? heavy : count;
    const uint64_t target = nucleus_cut(order->up_to[of - 1], filters.top_p);
    left = count_first(heavy, [&](int n) { return n == 0 || order->up_to[n - 1] < target; });
  }
  *kept = left;
  const uint64_t cut = order->sorted[left - 1];
  return {ListedOrder::logit(cut), static_cast<int32_t>(cut), order->up_to[left - 1]};
}

// The race of row i among the tokens that are kept; -1 where none has weight, or it is not to be
// run here. All threads of the team call it and get the same.
template <class Team, bool kByPosition>
__device__ __forceinline__ int32_t race_listed(const ChainRequest& r, int i, const Slot& verdict,
                                               const SlotQ& q, const RowLaw& law,
                                               const RowFilter& filter, const PoolAhead& pool,
                                               int kept, const ListedOrder& order) {
  if (!kByPosition && verdict.outcome != Outcome::kDraw &&
      (verdict.outcome != Outcome::kResidual || (!q.one_hot && r.q == DraftLaw::kScalar)))
    return -1;
  const DrawWeights weights = draw_weights(r, i, verdict.outcome, q, law, filter, 1.0f);
  unsigned long long key = kNoWinner;
#pragma unroll 1
  for (int n = Team::rank(); n < kept; n += Team::kThreads) {
    const uint64_t word = order.sorted[n];
    const uint32_t token = static_cast<uint32_t>(word);
    const NoiseWords four = race_noise(r, i, verdict.outcome).words(token / 4);
    const uint32_t random = token % 4 == 0   ? four.word[0]
                            : token % 4 == 1 ? four.word[1]
                            : token % 4 == 2 ? four.word[2]
                                             : four.word[3];
    const float upper = weights.scaled(ListedOrder::logit(word));
    const float weight = exact_weight(weights, pool, upper, static_cast<int32_t>(token));
    if (token == weights.without) continue;
    const unsigned long long mine = race_key(weight, random, token);
    key = mine < key ? mine : key;
  }
  unsigned long long* slots = race_shared().slots;
  key = least_of_warp(key);
  if (threadIdx.x % kWarpSize == 0) slots[Team::rank() / kWarpSize] = key;
  Team::sync();
  const int lane = threadIdx.x % kWarpSize;
  key = least_of_warp(lane < Team::kWarps ? slots[lane] : kNoWinner);
  return key == kNoWinner ? -1 : static_cast<int32_t>(key & 0xffffffffu);
}

}  // namespace domino
