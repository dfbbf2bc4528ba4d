// The argmax of base + W2 u over a vocabulary, for columns in shared memory: the whole grid shares
// the rows of W2, 16 a warp at a time, which come and are multiplied as in draft_chain_certify.cuh.
// The base logits of those ids come the same way where they can be copied as they are.
#pragma once

#include "head/draft_chain_certify.cuh"

namespace domino {

constexpr int kSweepColumns = 64;

// Of a block, in shared memory.
struct SweepColumns {
  CertifyTile u[kSweepColumns / kTileColumns];
  alignas(16) unsigned long long best[kSweepColumns];  // argmax_key; kTaken: takes no part
  const void* base[kSweepColumns];                     // where its base logits begin, if raw

  static constexpr unsigned long long kTaken = ~0ull << 32;  // NaN, above all keys
};

// kRank: the rank where it is known, or 0.
template <class T, int kRank>
struct VocabSweep {
  using Rows = CertifyRows<T, 1, kRank>;
  // Of a warp, in shared memory: rows of W2, and base logits of two groups of ids.
  using Stage = typename Rows::Stage;
  struct Base {
    uint4 of[2][kSweepColumns][2];
  };

  const T* w2;
  int vocab, valid;  // valid: ids from it on score -inf
  ScoreSteps steps;
  bool raw;  // base logits: as copied from base, 16 bits each, where rows and vocab are in 16 bytes
  Stage& stage;
  Base& base;
  int first, step, count;  // groups of 16 ids of this warp

  // warps: of the block that take part, the first ones, with a stage and a base each. backward:
  // from the end of its share, of which L2 holds most if the sweep before went forward.
  __device__ __forceinline__ VocabSweep(const T* w2, int64_t vocab, int64_t valid, int64_t rank,
                                        bool raw, bool backward, int warps, Stage* stages,
                                        Base* bases)
      : w2(w2),
        vocab(static_cast<int>(vocab)),
        valid(static_cast<int>(valid)),
        steps(static_cast<int>(rank)),
        raw(raw),
        stage(stages[min(warp_id(), warps - 1)]),
        base(bases[min(warp_id(), warps - 1)]) {
    const int64_t groups = ceil_div<int64_t>(vocab, kTileRows);
    const int begin = static_cast<int>(groups * blockIdx.x / gridDim.x);
    const int end = static_cast<int>(groups * (blockIdx.x + 1) / gridDim.x);
    first = backward ? end - 1 - warp_id() : begin + warp_id();
    step = backward ? -warps : warps;
    count = warp_id() < warps ? max(0, ceil_div(end - begin - warp_id(), warps)) : 0;
  }

  // Starts the copy of this warp's first rows: before run(), whenever that is.
  __device__ __forceinline__ void start() const {
    if (count > 0) fetch(first);
  }

  // Raises best of the first `tiles` tiles of columns to the largest argmax_key, with first_id + v
  // for id v, over this block's share. base_at(column, v): where base logits are not raw.
  template <class BaseAt>
  __device__ __forceinline__ void run(SweepColumns& columns, int tiles, uint32_t first_id,
                                      BaseAt base_at) const {
    if (count > 0) fetch_base(columns, tiles, first, 0);
    for (int i = 0, group = first; i < count; ++i, group += step) {
      const int turn = i % 2;
      Rows rows;
      rows.take(stage, steps);
      if (i + 1 < count) {
        fetch(group + step);
        fetch_base(columns, tiles, group + step, (i + 1) % 2);
      }
      const int v[2] = {group * kTileRows + lane_id() / 4, group * kTileRows + lane_id() / 4 + 8};
#pragma unroll 1
      for (int tile = 0; tile < tiles; ++tile) {
        const int column = tile * kTileColumns + lane_id() % 4 * 2;
        float scores[1][4];
        rows.times(columns.u[tile], steps, scores);
        const volatile unsigned long long* const best = columns.best + column;
        bool raises = false;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int id = v[i / 2];
          float logit = -INFINITY;
          if (raw) {
            const T* values = reinterpret_cast<const T*>(base.of[turn][column + i % 2]);
            if (id < valid) logit = to_float(values[lane_id() / 4 + i / 2 * 8]);
          } else if (id < vocab) {
            logit = base_at(column + i % 2, id);
          }
          scores[0][i] += logit;
          const unsigned long long of_column = best[i % 2];
          // also where either is NaN; not so where the column takes no part
          raises |= id < vocab && of_column < SweepColumns::kTaken &&
                    !(scores[0][i] < key_value(of_column));
        }
        if (!__any_sync(kFullMask, raises)) continue;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          unsigned long long most = 0;
#pragma unroll
          for (int half = 0; half < 2; ++half)
            if (v[half] < vocab)
              most = max(most, static_cast<unsigned long long>(
                                   argmax_key(scores[0][2 * half + i], first_id + v[half])));
#pragma unroll
          for (int offset = 4; offset < kWarpSize; offset *= 2)  // the lanes of a column
            most = max(most, __shfl_xor_sync(kFullMask, most, offset));
          if (lane_id() / 4 == 0 && most > best[i]) atomicMax(columns.best + column + i, most);
        }
      }
      __syncwarp();
    }
  }

 private:
  __device__ __forceinline__ void fetch(int group) const {
    Rows::fetch(stage, w2, group * kTileRows, vocab, steps);
  }

  __device__ __forceinline__ void fetch_base(const SweepColumns& columns, int tiles, int group,
                                             int turn) const {
    if (!raw) return;
    for (int i = lane_id(); i < tiles * kTileColumns * 2; i += kWarpSize) {
      const void* from = columns.base[i / 2];
      const int v = group * kTileRows + i % 2 * 8;
      if (from && v < vocab)
        copy_async16(shared_address(&base.of[turn][i / 2][i % 2]), static_cast<const T*>(from) + v);
    }
    copy_async_commit();
  }
};

// Whether base logits can be copied in 16 bytes: of the weights' dtype, in rows that begin there.
inline bool raw_base_logits(const void* base, int64_t vocab, int64_t batch_stride,
                            int64_t slot_stride, bool same_dtype, bool adjusted) {
  return same_dtype && !adjusted && is_aligned(base, 16) && vocab % 8 == 0 &&
         batch_stride % 8 == 0 && slot_stride % 8 == 0;
}

}  // namespace domino
