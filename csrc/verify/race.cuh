// The race for one token of a row, run by a cluster: least E / weight (chain_walk.h).
//
// The least E / weight of a law is an exponential over its mass: with probability 1 - e^-24 it is
// below 24 / mass. A token's E is at least its v = (word + 1/2) 2^-32, so E / weight is only worked
// out where v is below that times the greatest weight of the token's group: some dozen times a row.
// Where nothing was found (or the mass was guessed too high) the race is run again without the
// bound. What the filter drops is skipped by chunks first. Bytes: the row's kept chunks.
#pragma once

#include "common/reduce.cuh"
#include "verify/chain_judge.cuh"
#include "verify/row_cluster.cuh"

namespace domino {

constexpr int kWalkWarps = 16;
constexpr int kWalkThreads = kWalkWarps * kWarpSize;

struct RaceShared {
  unsigned long long best;
  unsigned long long slots[kWarpSize];
};
__device__ __forceinline__ RaceShared& race_shared() {
  __shared__ RaceShared shared;
  return shared;
}

// fn(token, group) for this lane's groups of those of a row's `count` chunks that this block of the
// cluster has and whose key, where they have one, is at least `least`; every lane of a warp calls
// it as often. One copy of fn.
template <class Source, class Fn>
__device__ __forceinline__ void for_each_group(const RowCluster& cluster, const Source& source,
                                               const ChunkStats* chunks, int count, uint32_t least,
                                               Fn fn) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int warps = blockDim.x / kWarpSize, share = ceil_div(count, cluster.size);
  const int first = cluster.rank * share, last = min(count, first + share);
#pragma unroll 1
  for (int chunk = first + warp; chunk < last; chunk += warps) {
    if (chunks != nullptr && __ldcg(&chunks[chunk].key) < least) continue;
    const int token = chunk * kChunk + lane * kGroup;
    Group<typename Source::Stored> groups[kLaneGroups];
    if constexpr (!std::is_same_v<Source, RowSource<void>>) {
#pragma unroll
      for (int g = 0; g < kLaneGroups; ++g) groups[g] = source.group(token + g * kGroupStep);
    }
#pragma unroll 1
    for (int g = 0; g < kLaneGroups; ++g) {
      if constexpr (std::is_same_v<Source, RowSource<void>>) {
        fn(token + g * kGroupStep, source.group(token + g * kGroupStep));
      } else {
        fn(token + g * kGroupStep, groups[0]);
#pragma unroll
        for (int n = 1; n < kLaneGroups; ++n) groups[n - 1] = groups[n];
      }
    }
  }
}

// Weights of a draw from a row.
struct DrawWeights {
  const RowLaw& p;
  const RowFilter& filter;  // -inf, INT32_MAX: all are kept
  float inverse_mass;       // 1 over the mass that is kept
  float reach;              // of p, in the block rule
  int64_t without;          // a one-hot draft that was rejected, or -1
  DraftLaw q;               // not one-hot: it is subtracted, so p has to be a probability
  RowLaw draft;
  LogitRow draft_row;
  const int32_t* ids;
  int pool;

  // Of any token with this logit, if it is kept and q is nothing.
  __device__ __forceinline__ float scaled(float logit) const {
    const float weight = p.weight(logit);
    return q != DraftLaw::kOneHot ? mul_rn(reach, mul_rn(weight, inverse_mass)) : weight;
  }
  // Not below the weight.
  __device__ __forceinline__ float upper(float logit, int64_t token) const {
    return token == without || !filter.keeps(logit, token) ? 0.0f : scaled(logit);
  }
  __device__ __forceinline__ float exact(float upper, int64_t token) const {
    if (q == DraftLaw::kDense) return add_rn(upper, -draft.probability(draft_row.at(token)));
    if (q == DraftLaw::kPool) {
#pragma unroll 1
      for (int m = 0; m < pool; ++m)
        if (ids[m] == token) return add_rn(upper, -draft.probability(draft_row.at(m)));
    }
    return upper;
  }
};

constexpr float kSureTime = 24.0f;
constexpr float kResidualGuess = 0.05f;  // mass of relu(p - q) that is surely enough

__device__ __forceinline__ unsigned long long least_key_of_warp(unsigned long long key) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const unsigned long long other = __shfl_xor_sync(kFullMask, key, offset);
    key = other < key ? other : key;
  }
  return key;
}

__device__ __forceinline__ unsigned long long least_key_of_block(unsigned long long key) {
  unsigned long long* slots = race_shared().slots;
  const int lane = threadIdx.x % kWarpSize;
  key = least_key_of_warp(key);
  __syncthreads();  // the slots may still be read by the call before
  if (lane == 0) slots[threadIdx.x / kWarpSize] = key;
  __syncthreads();
  return least_key_of_warp(lane < blockDim.x / kWarpSize ? slots[lane] : kNoWinner);
}

// Logit and word of token `which` of a lane's. Not by an index: they would be in local memory.
template <int kTokens, class Group>
__device__ __forceinline__ void pick_token(const Group& group, const uint32_t (&words)[kTokens],
                                           int which, float& logit, uint32_t& word) {
  logit = group.at(0);
  word = words[0];
#pragma unroll
  for (int j = 1; j < kTokens; ++j) {
    logit = which == j ? group.at(j) : logit;
    word = which == j ? words[j] : word;
  }
}

// The winner so far, `key`, met by this lane's eight tokens as far as their time can be within
// `bound`. winning: of the winner, where it is wanted. By a whole warp.
template <class Group, class Weights>
__device__ __forceinline__ unsigned long long race_group(int token, const Group& group,
                                                         const Weights& weights,
                                                         const RaceNoise& noise, float bound,
                                                         unsigned long long key,
                                                         float* winning = nullptr) {
  float top = group.at(0);
#pragma unroll
  for (int j = 1; j < kGroup; ++j) top = fmaxf(top, group.at(j));
  // in units of a word; half of one is the least that there is
  const float reach =
      top >= weights.filter.cut_logit ? weights.scaled(top) * bound * (1.001f * 0x1p32f) : 0.0f;
  if (!__any_sync(kFullMask, reach >= 0.5f)) return key;
  const uint32_t limit = __float2uint_rz(reach);
  uint32_t words[kGroup], chance = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const NoiseWords four = noise.words(static_cast<uint32_t>(token / 4 + half));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      words[4 * half + j] = four.word[j];
      if (four.word[j] <= limit) chance |= 1u << (4 * half + j);
    }
  }
  if (reach < 0.5f || chance == 0) return key;
  // by the group's greatest weight; by its own hardly any of them
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
    const float own = weights.upper(group.at(j), token + j) * bound * (1.001f * 0x1p32f);
    if (!(static_cast<float>(words[j]) <= own)) chance &= ~(1u << j);
  }
  while (chance != 0) {
    const int which = __ffs(chance) - 1;
    chance &= chance - 1;
    float logit;
    uint32_t word;
    pick_token(group, words, which, logit, word);
    const float upper = weights.upper(logit, token + which);
    if (!(upper > 0.0f)) continue;
    const unsigned long long mine =
        race_key(weights.exact(upper, token + which), word, token + which);
    if (winning != nullptr && mine < key) *winning = logit;
    key = mine < key ? mine : key;
  }
  return key;
}

// All blocks of the cluster call it, and all threads get the result. mass: of the weights, about.
template <class Source>
__device__ __forceinline__ unsigned long long race_row(const RowCluster& cluster,
                                                       const Source& source,
                                                       const ChunkStats* chunks, int count,
                                                       const DrawWeights& weights,
                                                       const RaceNoise& noise, float mass) {
  RaceShared& shared = race_shared();
  const uint32_t least = max(logit_key(weights.filter.cut_logit), kEmptyKey + 1);
  float bound = mass > 0.0f ? kSureTime / mass : INFINITY;
#pragma unroll 1
  for (;;) {
    unsigned long long key = kNoWinner;
    for_each_group(cluster, source, chunks, count, least, [&](int token, const auto& group) {
      key = race_group(token, group, weights, noise, bound, key);
    });
    key = least_key_of_block(key);
    if (threadIdx.x == 0) shared.best = key;
    cluster.sync();
    key = threadIdx.x % kWarpSize < cluster.size ? cluster.of_lane(&shared.best) : kNoWinner;
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      const unsigned long long other = __shfl_xor_sync(kFullMask, key, offset);
      key = other < key ? other : key;
    }
    cluster.sync();  // nobody starts the next race, or ends, before all have read
    if (key != kNoWinner && __uint_as_float(static_cast<uint32_t>(key >> 32)) <= bound) return key;
    if (bound == INFINITY) return key;
    bound = INFINITY;
  }
}

}  // namespace domino
