// The row where the walk ends, shared by the blocks of a cluster: its chunks, and the race over it.
#pragma once

#include "verify/cluster_mail.cuh"
#include "verify/race.cuh"
#include "verify/tree_rows.cuh"

namespace domino {

// A warp's chunks of the row, of which the first `warps` of each block have their share. The first
// can be fetched ahead, and is kept for all that goes over the row.
template <class T>
struct LastRow {
  RowSource<T> source;
  int first, stride, count;
  int held = -1;
  Group<T> groups[kLaneGroups];

  __device__ __forceinline__ LastRow(const RowCluster& cluster, const LogitRow& row, int64_t vocab,
                                     int warps)
      : source(row, RowEdits{}, static_cast<int>(vocab)),
        count(static_cast<int>((vocab + kChunk - 1) / kChunk)) {
    const int warp = threadIdx.x / kWarpSize;
    stride = cluster.size * warps;
    first = warp < warps ? warp * cluster.size + cluster.rank : count;
  }

  __device__ __forceinline__ void fetch_ahead() {
    if (first < count) fetch(first);
  }

  // fn(chunk, this lane's first token), with `groups` filled. By a whole warp. The next call goes
  // the other way, so that it starts with the chunk that is held.
  template <class Fn>
  __device__ __forceinline__ void for_each_chunk(Fn fn) {
    int chunk = held >= 0 ? held : first;
    const int step = chunk == first ? stride : -stride;
#pragma unroll 1
    for (; chunk >= first && chunk < count; chunk += step) {
      if (chunk != held) fetch(chunk);
      fn(chunk, chunk * kChunk + static_cast<int>(threadIdx.x % kWarpSize) * kGroup);
    }
  }

 private:
  __device__ __forceinline__ void fetch(int chunk) {
    load_chunk(source, chunk * kChunk + static_cast<int>(threadIdx.x % kWarpSize) * kGroup, groups);
    held = chunk;
  }
};

// The statistics of a row of `count` chunks, load(c), whose greatest logits are at first(c). By a
// whole warp.
template <class Load, class First>
__device__ __forceinline__ RowStats join_chunks(int count, float scale, bool wants_first,
                                                bool wants_sum, Load load, First first) {
  constexpr int kHeld = 5;  // of 32 lanes: 163,840 tokens are read once
  const int lane = threadIdx.x % kWarpSize;
  ChunkStats held[kHeld];
  uint32_t at[kHeld], key = 0;
#pragma unroll
  for (int n = 0; n < kHeld; ++n) {
    const int c = lane + n * kWarpSize;
    held[n] = c < count ? load(c) : ChunkStats{0, {0, 0, 0}};
    at[n] = wants_first && c < count ? first(c) : 0;
  }
#pragma unroll
  for (int n = 0; n < kHeld; ++n) key = max(key, held[n].key);
#pragma unroll 1
  for (int c = lane + kHeld * kWarpSize; c < count; c += kWarpSize) key = max(key, load(c).key);
  const uint32_t top_key = __reduce_max_sync(kFullMask, key);
  RowStats stats{0, key_logit(top_key), 0, 0, 0};
  stats.faults = row_faults(stats.top);
  if (stats.faults != 0) return stats;
  if (wants_first) {
    uint32_t best = ~0u;
#pragma unroll
    for (int n = 0; n < kHeld; ++n)
      if (held[n].key == top_key) best = min(best, at[n]);
#pragma unroll 1
    for (int c = lane + kHeld * kWarpSize; c < count; c += kWarpSize)
      if (load(c).key == top_key) best = min(best, first(c));
    stats.argmax = static_cast<int32_t>(__reduce_min_sync(kFullMask, best));
  }
  if (!wants_sum) return stats;
  const RowExponent exponent(stats.top, scale);
  // Digits of a chunk's sum are below 2^23, so those of what is held add up in 32 bits.
  uint32_t sums[3] = {0, 0, 0};
  DigitSums rest;
  const auto add = [&](const ChunkStats& chunk, auto& to) {
    const RowExponent part(key_logit(chunk.key), scale);
    const int below = exponent.grid() - part.grid();
    const bool counts = exponent.huge ? chunk.key == top_key : chunk.key > kEmptyKey && !part.huge;
    const uint32_t a = counts ? chunk.digits[0] : 0, b = counts ? chunk.digits[1] : 0;
    const uint32_t c = counts ? chunk.digits[2] : 0;
    to[0] += below == 0 ? a : 0;
    to[1] += below == 0 ? b : below == 1 ? a : 0;
    to[2] += below == 0 ? c : below == 1 ? b : below == 2 ? a : 0;
  };
#pragma unroll 1
  for (int n = 0; n < kHeld; ++n) {  // one copy of the code: it takes longer to fetch than to run
    add(held[0], sums);
#pragma unroll
    for (int m = 1; m < kHeld; ++m) held[m - 1] = held[m];
  }
#pragma unroll 1
  for (int c = lane + kHeld * kWarpSize; c < count; c += kWarpSize) add(load(c), rest.at);
#pragma unroll
  for (int n = 0; n < 3; ++n) {
    if (count > kHeld * kWarpSize) rest.at[n] = warp_sum(rest.at[n]);
    rest.at[n] += __reduce_add_sync(kFullMask, sums[n]);
  }
  stats.sum = exponent.huge ? rest.at[0] << 40 : rest.fixed(exponent);
  return stats;
}

// Writes the chunks of a row that the first launch has not read, `at` of the workspace on. By the
// whole cluster; synchronises.
template <bool kArgmaxOnly, class T>
__device__ __forceinline__ void read_row(const RowCluster& cluster, const TreeRequest& r,
                                         const TreeWorkspace& workspace, int64_t at,
                                         LastRow<T>* row) {
  const bool wants_first = r.rule == TreeRule::kGreedy;
  const bool wants_sum = !wants_first || r.p.chosen_logprob != nullptr;
  const float scale = law_scale(r.temperature);
  row->for_each_chunk([&](int chunk, int token) {
    store_chunk<kArgmaxOnly>(row->groups, token, wants_first, wants_sum, scale, at + chunk,
                             workspace);
  });
  cluster.sync();
}

__device__ __forceinline__ unsigned long long warp_least(unsigned long long key) {
  const uint32_t high = __reduce_min_sync(kFullMask, static_cast<uint32_t>(key >> 32));
  const bool has = static_cast<uint32_t>(key >> 32) == high;
  const uint32_t low = __reduce_min_sync(kFullMask, has ? static_cast<uint32_t>(key) : ~0u);
  return static_cast<unsigned long long>(high) << 32 | low;
}

// The winners of all warps of the cluster, in each of its blocks. Races take turns with the slots
// and the mailboxes.
struct SharedRace {
  Mailbox winners[2];
  unsigned long long keys[2][16 * kWalkWarps];

  __device__ __forceinline__ void open() {
    winners[0].open();
    winners[1].open();
  }
};

struct RaceResult {
  unsigned long long key;  // in all threads
  bool own;                // of the one lane of the cluster that met the winner,
  float logit;             // and the winner's logit there
};

// The winner among a warp's chunks, in the lane that met it; `logit` is its logit there.
template <class T, class Weights>
__device__ __forceinline__ unsigned long long race_chunks(LastRow<T>* row, const Weights& weights,
                                                          const RaceNoise& noise, float bound,
                                                          float* logit) {
  unsigned long long own = kNoWinner;
  row->for_each_chunk([&](int, int token) {
    const float top = lane_top(row->groups);
    if (!__any_sync(kFullMask, top >= weights.filter.cut_logit &&
                                   weights.scaled(top) * bound * (1.001f * 0x1p32f) >= 0.5f))
      return;
#pragma unroll 1
    for (int g = 0; g < kLaneGroups; ++g) {  // one copy of the code
      own = race_group(token + g * kGroupStep, row->groups[0], weights, noise, bound, own, logit);
      const Group<T> first = row->groups[0];
#pragma unroll
      for (int n = 1; n < kLaneGroups; ++n) row->groups[n - 1] = row->groups[n];
      row->groups[kLaneGroups - 1] = first;
      // who is later than another of the warp needs no look; kNoWinner is NaN here
      const uint32_t least = __reduce_min_sync(kFullMask, static_cast<uint32_t>(own >> 32));
      bound = fminf(bound, __uint_as_float(least));
    }
  });
  return own;
}

// As race_row, but every warp tells every block: one trip a race. All threads call it. turn: 0 at
// first, and as the race before has left it.
template <class T, class Weights>
__device__ __forceinline__ RaceResult race_last(const RowCluster& cluster, LastRow<T>* row,
                                                const Weights& weights, const RaceNoise& noise,
                                                float mass, int* turn, SharedRace* shared) {
  const int lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
  float bound = mass > 0.0f ? __fdividef(kSureTime, mass) : INFINITY;
#pragma unroll 1
  for (;;) {
    unsigned long long* keys = shared->keys[*turn & 1];
    Mailbox& winners = shared->winners[*turn & 1];
    float logit = 0.0f;
    const unsigned long long own = race_chunks(row, weights, noise, bound, &logit);
    const uint64_t sent[1] = {warp_least(own)};
    winners.send(cluster, keys + cluster.rank * warps + threadIdx.x / kWarpSize, sent);
    winners.wait(cluster, cluster.size * warps * static_cast<int>(sizeof(*keys)), *turn / 2);
    *turn += 1;
    unsigned long long key = kNoWinner;
#pragma unroll 1
    for (int i = lane; i < cluster.size * warps; i += kWarpSize) key = min(key, keys[i]);
    key = warp_least(key);
    const bool found = __uint_as_float(static_cast<uint32_t>(key >> 32)) <= bound;
    if ((key != kNoWinner && found) || bound == INFINITY) return {key, own == key, logit};
    bound = INFINITY;
  }
}

}  // namespace domino
