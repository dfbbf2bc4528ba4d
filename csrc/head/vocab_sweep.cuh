// The argmax of base + W2 u over a vocabulary, for columns in shared memory: the whole grid shares
// the rows of W2, 16 a warp at a time, which come and are multiplied as in draft_chain_certify.cuh.
#pragma once

#include "head/draft_chain_certify.cuh"

namespace domino {

// Raises best[column] (shared memory) to the largest argmax_key of base(column, v) + W2 u with id
// first_id + v over this block's share of the vocabulary.
template <int kWarps, class T, class BaseAt>
__device__ __forceinline__ void sweep_vocabulary(const T* w2, int vocab, uint32_t first_id,
                                                 ScoreSteps steps, const CertifyTile* u, int tiles,
                                                 typename CertifyRows<T, 1, 0>::Stage& stage,
                                                 unsigned long long* best, BaseAt base_at) {
  using Rows = CertifyRows<T, 1, 0>;
  const int64_t groups = ceil_div(vocab, kTileRows);
  const int end = static_cast<int>(groups * (blockIdx.x + 1) / gridDim.x);
  int group = static_cast<int>(groups * blockIdx.x / gridDim.x) + warp_id();
  if (group < end) Rows::fetch(stage, w2, group * kTileRows, vocab, steps);
  for (; group < end; group += kWarps) {
    Rows rows;
    rows.take(stage, steps);
    if (group + kWarps < end) Rows::fetch(stage, w2, (group + kWarps) * kTileRows, vocab, steps);
    const int v[2] = {group * kTileRows + lane_id() / 4, group * kTileRows + lane_id() / 4 + 8};
    for (int tile = 0; tile < tiles; ++tile) {
      const int column = tile * kTileColumns + lane_id() % 4 * 2;
      float base[4], sums[1][4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        base[i] = v[i / 2] < vocab ? base_at(column + i % 2, v[i / 2]) : -INFINITY;
      rows.times(u[tile], steps, sums);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        unsigned long long most = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (v[half] < vocab) {
            const float score = base[2 * half + i] + sums[0][2 * half + i];
            most =
                max(most, static_cast<unsigned long long>(argmax_key(score, first_id + v[half])));
          }
#pragma unroll
        for (int offset = 4; offset < kWarpSize; offset *= 2)  // the lanes of a column
          most = max(most, __shfl_xor_sync(kFullMask, most, offset));
        if (lane_id() / 4 == 0 &&
            most > *static_cast<volatile unsigned long long*>(best + column + i))
          atomicMax(best + column + i, most);
      }
    }
  }
}

}  // namespace domino
