// The race for one token of a row of which nothing but its law is known, by a cluster: as race.cuh,
// with steps of 256 tokens and a bound that lets fewer tokens through. Bytes: the row.
#pragma once

#include "verify/race.cuh"

namespace domino {

// The least E / weight of a law is beyond kSoonTime over its mass once in 160,000 races, which then
// are run again. What is drawn does not depend on it.
constexpr float kSoonTime = 12.0f;
// Mass of relu(p - q): 0.1 misses in one race in 400.
constexpr float kLikelyResidual = 0.2f;

// The first tokens of a slot's pool, in shared memory.
struct PoolAhead {
  static constexpr int kCount = 128;

  alignas(16) int32_t id[kCount];  // behind the pool's -1
  float logit[kCount];

  // The place of a token, -1 if it is not among them.
  __device__ __forceinline__ int find(int32_t token, int pool) const {
    int at = -1;
#pragma unroll 4
    for (int m = min(pool, kCount) - 1 & ~3; m >= 0; m -= 4) {
      const int4 four = *reinterpret_cast<const int4*>(id + m);
      if (four.w == token) at = m + 3;
      if (four.z == token) at = m + 2;
      if (four.y == token) at = m + 1;
      if (four.x == token) at = m;
    }
    return at;
  }
};

// As DrawWeights::exact.
__device__ __forceinline__ float exact_weight(const DrawWeights& weights, const PoolAhead& pool,
                                              float upper, int32_t token) {
  if (weights.q != DraftLaw::kPool) return weights.exact(upper, token);
  int at = pool.find(token, weights.pool);
  float logit = at >= 0 ? pool.logit[at] : 0.0f;
#pragma unroll 1
  for (int m = PoolAhead::kCount; m < weights.pool && at < 0; ++m)
    if (weights.ids[m] == token) logit = weights.draft_row.at(at = m);
  return at < 0 ? upper : add_rn(upper, -weights.draft.probability(logit));
}

// fn(token, group) for this lane's groups of a row, dealt out by 256 tokens to all warps of the
// cluster: 1024 at a time leave some warps twice what others have.
template <class T, class Fn>
__device__ __forceinline__ void for_each_step(const RowCluster& cluster, const RowSource<T>& source,
                                              Fn fn) {
  constexpr int kAhead = 5;  // steps: those of a warp of 128 at 151,936 tokens
  const int lane = threadIdx.x % kWarpSize, block_warps = blockDim.x / kWarpSize;
  const int warps = cluster.size * block_warps, steps = ceil_div(source.vocab, kGroupStep);
#pragma unroll 1
  for (int from = cluster.rank * block_warps + threadIdx.x / kWarpSize; from < steps;
       from += kAhead * warps) {
    Group<T> groups[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n)
      if (from + n * warps < steps)
        groups[n] = source.group((from + n * warps) * kGroupStep + lane * kGroup);
#pragma unroll 1
    for (int step = from; step < min(steps, from + kAhead * warps); step += warps) {
      fn(step * kGroupStep + lane * kGroup, groups[0]);
#pragma unroll
      for (int n = 1; n < kAhead; ++n) groups[n - 1] = groups[n];
    }
  }
}

__device__ __forceinline__ unsigned long long least_of_warp(unsigned long long key) {
  const uint32_t high = static_cast<uint32_t>(key >> 32);
  const uint32_t least = __reduce_min_sync(kFullMask, high);
  const uint32_t low =
      __reduce_min_sync(kFullMask, high == least ? static_cast<uint32_t>(key) : ~uint32_t{0});
  return static_cast<unsigned long long>(least) << 32 | low;
}

__device__ __forceinline__ unsigned long long least_of_block(unsigned long long key) {
  unsigned long long* slots = race_shared().slots;
  const int lane = threadIdx.x % kWarpSize;
  key = least_of_warp(key);
  __syncthreads();  // the slots may still be read by the call before
  if (lane == 0) slots[threadIdx.x / kWarpSize] = key;
  __syncthreads();
  return least_of_warp(lane < blockDim.x / kWarpSize ? slots[lane] : kNoWinner);
}

template <class T>
__device__ __forceinline__ float top_of_group(const HalfGroup<T>& group) {
  const uint32_t top = group.most();
  return fmaxf(low_half(top, T{}), high_half(top, T{}));
}

// The winner so far, `key`, met by this lane's eight tokens as far as their time can be within
// `soonest`, as bits, which are in the order of the times. By a whole warp. words_of_weight: how
// far a word reaches in a unit of time for a weight of 1; kShared: soonest is the block's
template <bool kShared, class Group, class Weights>
__device__ __forceinline__ unsigned long long draw_group(
    int token, const Group& group, const Weights& weights, const PoolAhead& pool,
    const RaceNoise& noise, float words_of_weight, uint32_t* soonest, unsigned long long key) {
  const float bound =
      __uint_as_float(kShared ? *const_cast<volatile uint32_t*>(soonest) : *soonest);
  const float top = top_of_group(group);
  // a weight that is off by less than words_of_weight has to spare: the exact one is 20
  // instructions
  float weight;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(weight) : "f"(weights.p.exponent(top)));
  // in units of a word; half of one is the least that there is
  const float reach = top >= weights.filter.cut_logit ? weight * (words_of_weight * bound) : 0.0f;
  if (!__any_sync(kFullMask, reach >= 0.5f)) return key;
  const uint32_t limit = __float2uint_rz(reach);
  uint32_t words[kGroup], least = ~0u;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const NoiseWords four = noise.words(static_cast<uint32_t>(token / 4 + half));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      words[4 * half + j] = four.word[j];
      least = min(least, four.word[j]);
    }
  }
  if (reach < 0.5f || least > limit) return key;
  uint32_t chance = 0;
#pragma unroll
  for (int j = 0; j < kGroup; ++j) chance |= (words[j] <= limit ? 1u : 0u) << j;
  while (chance != 0) {  // by the group's greatest weight
    const int which = __ffs(chance) - 1;
    chance &= chance - 1;
    float logit;
    uint32_t word;
    pick_token(group, words, which, logit, word);
    const float upper = weights.upper(logit, token + which);
    if (!(upper > 0.0f && static_cast<float>(word) <= upper * bound * (1.001f * 0x1p32f))) continue;
    const unsigned long long mine =
        race_key(exact_weight(weights, pool, upper, token + which), word, token + which);
    if (mine >= key) continue;
    key = mine;
    if (kShared) atomicMin(soonest, static_cast<uint32_t>(key >> 32));
  }
  return key;
}

// The race among a row's tokens. All blocks of the cluster call it, and all threads get the result.
// mass: of the weights, about; kShared: the warps of a block tell each other how soon their best
// is.
template <bool kShared, class T>
__device__ __forceinline__ unsigned long long draw_row(const RowCluster& cluster,
                                                       const RowSource<T>& source,
                                                       const DrawWeights& weights,
                                                       const PoolAhead& pool,
                                                       const RaceNoise& noise, float mass) {
  RaceShared& shared = race_shared();
  const float of_weight =
      weights.q != DraftLaw::kOneHot ? weights.reach * weights.inverse_mass : 1.0f;
  float bound = mass > 0.0f ? kSoonTime / mass : INFINITY;
#pragma unroll 1
  for (;;) {
    uint32_t own = __float_as_uint(bound), *soonest = &own;
    if constexpr (kShared) {
      __shared__ uint32_t of_block;
      soonest = &of_block;
      __syncthreads();  // the race before has been read
      if (threadIdx.x == 0) of_block = own;
      __syncthreads();
    }
    unsigned long long key = kNoWinner;
    for_each_step(cluster, source, [&](int token, const auto& group) {
      key = draw_group<kShared>(token, group, weights, pool, noise, of_weight * (1.002f * 0x1p32f),
                                soonest, key);
    });
    key = least_of_block(key);
    if (threadIdx.x == 0) shared.best = key;
    cluster.sync_shared();
    key = threadIdx.x % kWarpSize < cluster.size ? cluster.of_lane(&shared.best) : kNoWinner;
    key = least_of_warp(key);
    cluster.sync_shared();  // nobody starts the next race, or ends, before all have read
    if (key != kNoWinner && __uint_as_float(static_cast<uint32_t>(key >> 32)) <= bound) return key;
    if (bound == INFINITY) return key;
    bound = INFINITY;
  }
}

}  // namespace domino
