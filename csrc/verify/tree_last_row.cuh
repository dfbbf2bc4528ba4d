// The row where the walk ends, shared by the blocks of a cluster: its chunks, and the race over it.
#pragma once

#include "verify/race.cuh"
#include "verify/tree_rows.cuh"

namespace domino {

// A warp's chunks of the row. The first can be fetched ahead, and is kept for all that goes over
// the row.
template <class T>
struct LastRow {
  RowSource<T> source;
  int first, stride, count;
  int held = -1;
  Group<T> groups[kLaneGroups];

  __device__ __forceinline__ LastRow(const RowCluster& cluster, const LogitRow& row, int64_t vocab)
      : source(row, RowEdits{}, static_cast<int>(vocab)),
        count(static_cast<int>((vocab + kChunk - 1) / kChunk)) {
    const int warps = blockDim.x / kWarpSize;
    stride = cluster.size * warps;
    first = static_cast<int>(threadIdx.x) / kWarpSize * cluster.size + cluster.rank;
  }

  __device__ __forceinline__ void fetch_ahead() {
    if (first < count) fetch(first);
  }

  // fn(chunk, this lane's first token), with `groups` filled. By a whole warp.
  template <class Fn>
  __device__ __forceinline__ void for_each_chunk(Fn fn) {
#pragma unroll 1
    for (int chunk = first; chunk < count; chunk += stride) {
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
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const unsigned long long other = __shfl_xor_sync(kFullMask, key, offset);
    key = other < key ? other : key;
  }
  return key;
}

// The winners of all warps of the cluster, in each of its blocks. Races take turns with the slots.
struct SharedRace {
  unsigned long long keys[2][16 * kWalkWarps];
};

// As race_row, but every warp tells every block: one synchronisation a race. All threads call it,
// and all get the result. turn: 0 at first, and as the race before has left it.
template <class T, class Weights>
__device__ __forceinline__ unsigned long long race_last(const RowCluster& cluster, LastRow<T>* row,
                                                        const Weights& weights,
                                                        const RaceNoise& noise, float mass,
                                                        int* turn, SharedRace* shared) {
  const int lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
  float bound = mass > 0.0f ? kSureTime / mass : INFINITY;
#pragma unroll 1
  for (;;) {
    unsigned long long* keys = shared->keys[*turn];
    *turn ^= 1;
    unsigned long long key = kNoWinner;
    row->for_each_chunk([&](int, int token) {
      const float top = lane_top(row->groups);
      if (!__any_sync(kFullMask, top >= weights.filter.cut_logit &&
                                     weights.scaled(top) * bound * (1.001f * 0x1p32f) >= 0.5f))
        return;
#pragma unroll 1
      for (int g = 0; g < kLaneGroups; ++g) {  // one copy of the code
        key = race_group(token + g * kGroupStep, row->groups[0], weights, noise, bound, key);
        const Group<T> first = row->groups[0];
#pragma unroll
        for (int n = 1; n < kLaneGroups; ++n) row->groups[n - 1] = row->groups[n];
        row->groups[kLaneGroups - 1] = first;
      }
    });
    key = warp_least(key);
    const int slot = cluster.rank * warps + threadIdx.x / kWarpSize;
    if (lane < cluster.size) *cluster.map(keys + slot, lane) = key;
    cluster.sync();
    key = kNoWinner;
    for (int i = lane; i < cluster.size * warps; i += kWarpSize) key = min(key, keys[i]);
    key = warp_least(key);
    if (key != kNoWinner && __uint_as_float(static_cast<uint32_t>(key >> 32)) <= bound) return key;
    if (bound == INFINITY) return key;
    bound = INFINITY;
  }
}

}  // namespace domino
