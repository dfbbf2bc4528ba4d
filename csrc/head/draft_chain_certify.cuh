// draft_chain_certify: are the drafted ids the winners of the whole vocabulary? One pass over W2
// for all drafts of all rows; contract and order of the sums in draft_chain.h.
//
// A warp owns 16 * kRowTiles rows of W2 at a time: they come by cp.async, whole rows at once, into
// a part of shared memory of its own, from there as MMA fragments into registers, and while they
// are multiplied with all low-rank columns (which the block keeps in shared memory as fragments),
// the next ones are on their way. No warp waits for another. An id can only win where the largest
// correction of the warp's rows plus the largest base logit of the tile of 128 ids reaches the
// drafted winner's score (fp32 addition is monotone, so this loses nothing); only there base logits
// are read.
//
// Columns: the corrected drafts of the rows that are not certified yet, 8 to a tile. Where their
// fragments do not fit in shared memory, blocks take turns: block i owns part i % parts of them.
// Bytes: W2 once, the screen's tile_max; bound by that stream up to about 100 columns, by tensor
// cores from there on.
#pragma once

#include "common/argmax_key.h"
#include "common/copy_async.cuh"
#include "common/row_tile.cuh"
#include "head/draft_chain.h"

namespace domino {

constexpr int kCertifyWarps = 8;
constexpr int kCertifyThreads = kCertifyWarps * kWarpSize;
constexpr int kScoreChains = 4;  // of MMAs that a score is summed in
constexpr int kChainSteps = 4;   // MMAs of a chain: rank <= 256
constexpr int kScoreSteps = kScoreChains * kChainSteps;

// Of the k that MMA `step` takes the first; k past the rank count as zero.
struct ScoreSteps {
  int rank, chain;  // chain: MMAs of a chain in use
  __device__ explicit ScoreSteps(int rank) : rank(rank), chain(ceil_div(rank, 64)) {}
  __device__ __forceinline__ bool used(int step) const { return step % kChainSteps < chain; }
  __device__ __forceinline__ int k(int step) const {
    return (step / kChainSteps * chain + step % kChainSteps) * 16;
  }
};

// A tile of 8 columns in shared memory, a row each, zero past the rank.
struct CertifyTile {
  static constexpr int kPitch = 33;  // 16 bytes each: no bank conflicts
  uint4 row[kTileColumns][kPitch];
};

// Starts the copies of u to `tiles` tiles of columns; at(column) is a column's u, null: zero.
template <class At>
__device__ __forceinline__ void fill_columns(CertifyTile* u, int tiles, ScoreSteps steps, At at) {
  for (int n = warp_id(); n < tiles * kTileColumns; n += blockDim.x / kWarpSize) {
    const auto* column = at(n);
    uint4* to = &u[n / kTileColumns].row[n % kTileColumns][lane_id()];
    if (column && lane_id() * 8 < steps.rank) {
      copy_async16(shared_address(to), column + lane_id() * 8);
    } else {
      *to = {0, 0, 0, 0};
    }
  }
  copy_async_commit();
}

struct CertifyColumn {
  float winner;  // the score to reach; +inf: nothing to check
  int key;       // b * drafts + draft
  int index;     // b * corrected + draft - prefix
};

// 16 * kRowTiles rows of W2 on their way and as A fragments. kRank: the rank where it is known, or
// 0.
template <class T, int kRowTiles, int kRank>
struct CertifyRows {
  static constexpr int kRows = kRowTiles * kTileRows;
  static constexpr int kPitch = 33;  // of a row in 16 bytes: rank <= 256, no bank conflicts
  struct Stage {
    uint4 row[kRows][kPitch];
  };

  uint4 a[kRowTiles][kScoreSteps];

  // Starts the copy of the rows from `first` on. All lanes of the warp call.
  static __device__ __forceinline__ void fetch(Stage& stage, const T* w2, int first, int vocab,
                                               ScoreSteps steps) {
    const int rank = kRank ? kRank : steps.rank;
    if (lane_id() * 8 < rank) {
      const uint32_t to = shared_address(&stage.row[0][lane_id()]);
      const T* from = w2 + static_cast<int64_t>(first) * rank + lane_id() * 8;
      if (first + kRows <= vocab) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) copy_async16(to + r * kPitch * 16, from + r * rank);
      } else {
#pragma unroll 1
        for (int r = 0; r < kRows; ++r)  // past the end: the last row again
          copy_async16(to + r * kPitch * 16, from + min(r, vocab - 1 - first) * rank);
      }
    }
    copy_async_commit();
  }

  // The fetched rows to registers; the stage is free again.
  __device__ __forceinline__ void take(const Stage& stage, ScoreSteps steps) {
    copy_async_wait<0>();
    __syncwarp();
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const uint32_t at =
          shared_address(&stage.row[tile * kTileRows + lane_id() % 16][lane_id() / 16]);
#pragma unroll
      for (int step = 0; step < kScoreSteps; ++step) {
        if constexpr (kRank == 256) {
          a[tile][step] = load_matrices(at + step * 32);
        } else {
          a[tile][step] = steps.used(step) && steps.k(step) < steps.rank
                              ? load_matrices(at + steps.k(step) * 2)
                              : uint4{0, 0, 0, 0};
        }
      }
    }
    __syncwarp();
  }

  // W2 u for the columns of one tile, summed in the order of draft_chain.h.
  __device__ __forceinline__ void times(const CertifyTile& columns, ScoreSteps steps,
                                        float (&sums)[kRowTiles][4]) const {
    float chain[kScoreChains][kRowTiles][4] = {};
    const uint32_t at = shared_address(&columns.row[lane_id() % 8][lane_id() / 8]);
#pragma unroll
    for (int i = 0; i < kChainSteps; i += 2) {
      if (kRank != 256 && i >= steps.chain) break;
      uint4 u[kScoreChains];  // (b0, b1) of two steps
#pragma unroll
      for (int q = 0; q < kScoreChains; ++q) {
        const int step = q * kChainSteps + i;
        u[q] = load_matrices(at + (kRank == 256 ? step * 32 : steps.k(step) * 2));
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (kRank != 256 && i + half >= steps.chain) break;
#pragma unroll
        for (int q = 0; q < kScoreChains; ++q)
#pragma unroll
          for (int tile = 0; tile < kRowTiles; ++tile) {
            const uint4& rows = a[tile][q * kChainSteps + i + half];
            mma_16x8x16<T>(chain[q][tile], rows.x, rows.y, rows.z, rows.w,
                           half == 0 ? u[q].x : u[q].z, half == 0 ? u[q].y : u[q].w);
          }
      }
    }
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[tile][i] =
            (chain[0][tile][i] + chain[1][tile][i]) + (chain[2][tile][i] + chain[3][tile][i]);
  }
};

// The rows of the batch that are not certified. All threads call.
template <int kThreads>
struct PendingRows {
  int* list;  // [batch], shared memory
  int count;

  __device__ PendingRows(const ChainBlockParams& p, int* list, int* slots) : list(list) {
    int before = 0;
    for (int64_t first = 0; first < p.batch; first += kThreads) {
      const int64_t b = first + threadIdx.x;
      const bool pending = b < p.batch && p.first[b] < p.drafts;
      const unsigned votes = __ballot_sync(kFullMask, pending);
      if (lane_id() == 0) slots[warp_id()] = __popc(votes);
      __syncthreads();
      int at = before + __popc(votes & ((1u << lane_id()) - 1));
      for (int warp = 0; warp < kThreads / kWarpSize; ++warp) {
        if (warp < warp_id()) at += slots[warp];
        before += slots[warp];
      }
      if (pending) list[at] = static_cast<int>(b);
      __syncthreads();
    }
    count = before;
  }
};

// What a block works on: its part of the columns, in shared memory, and its turn in W2's rows.
struct CertifyShare {
  int parts, part, columns, tiles;  // tiles of kUnit columns
  int turn, turns;                  // of the blocks of this part, in groups of W2 rows
};

// Fills `columns` with this block's part; there are `most` of them at most. All threads call.
template <int kUnit>
__device__ __forceinline__ CertifyShare certify_share(const ChainBlockParams& p,
                                                      const PendingRows<kCertifyThreads>& pending,
                                                      int most, CertifyColumn* columns) {
  const int corrected = static_cast<int>(p.corrected()), all = pending.count * corrected;
  CertifyShare share;
  share.parts = ceil_div(all, most);
  share.part = blockIdx.x % share.parts;
  const int per_part = round_up(ceil_div(all, share.parts), kUnit);
  const int first = share.part * per_part;
  share.columns = max(0, min(all - first, per_part));
  share.tiles = ceil_div(share.columns, kUnit);
  share.turns = ceil_div<int>(gridDim.x - share.part, share.parts);
  share.turn = blockIdx.x / share.parts;
  for (int n = threadIdx.x; n < share.tiles * kUnit; n += kCertifyThreads) {
    CertifyColumn column{INFINITY, 0, 0};
    if (n < share.columns) {
      const int b = pending.list[(first + n) / corrected], c = (first + n) % corrected;
      column.key = b * static_cast<int>(p.drafts) + static_cast<int>(p.prefix) + c;
      column.index = b * corrected + c;
      if (p.prefix + c >= p.first[b]) column.winner = key_value(p.keys[column.key]);
    }
    columns[n] = column;
  }
  __syncthreads();
  return share;
}

// Scores id `row` (and row + 8, ..: sums[i] belongs to row + 8i) for a column that passed the
// screen.
template <class Base, int kRows>
__device__ __noinline__ void certify_ids(const ChainBlockParams& p, const CertifyColumn& column,
                                         int row, const float (&sums)[kRows]) {
  if (column.winner == INFINITY) return;  // nothing to check
  const int64_t b = column.index / p.corrected();
  const int64_t slot = p.first_slot + column.key - b * p.drafts;
  const Base* base =
      static_cast<const Base*>(p.base_logits) + b * p.base_batch_stride + slot * p.base_slot_stride;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t v = row + 8 * i;
    if (v >= p.vocab) continue;
    const float score = adjusted_base(p, base, b, v) + sums[i];
    if (!(score < column.winner))  // also over a winner that is NaN
      atomicMax(reinterpret_cast<unsigned long long*>(p.keys) + column.key,
                static_cast<unsigned long long>(argmax_key(score, static_cast<uint32_t>(v))));
  }
}

// What the correction of an id must reach for its score to reach `winner` where base logits are at
// most `tile_max`: score = fl(base + correction). Lowered by more than the two roundings.
__device__ __forceinline__ float certify_limit(float winner, float tile_max) {
  return winner - tile_max - (fabsf(winner) + fabsf(tile_max)) * 0x1p-22f;
}

// The last block to come here compares: the first draft of a row whose winner another id took.
__device__ __forceinline__ void certify_finish(const ChainBlockParams& p,
                                               const PendingRows<kCertifyThreads>& pending) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicInc(&p.control->certified, gridDim.x - 1) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int i = threadIdx.x; i < pending.count; i += kCertifyThreads) {
    const int64_t b = pending.list[i];
    int64_t j = p.first[b];
    for (; j < p.drafts; ++j) {
      const uint64_t key = __ldcg(reinterpret_cast<unsigned long long*>(p.keys) + b * p.drafts + j);
      if (key_id(key) == p.tokens[b * p.drafts + j]) continue;
      p.tokens[b * p.drafts + j] = key_id(key);
      p.scores[b * p.drafts + j] = key_value(key);
      if (p.restarts) ++p.restarts[b];
      ++j;
      break;
    }
    p.first[b] = static_cast<int32_t>(j);
  }
}

// Grid: any number of blocks. most: columns that a block's shared memory holds. early: rows are
// surely pending, so W2 is fetched while the launch before still runs.
template <class T, class Base, int kRowTiles, int kRank>
__global__ void __launch_bounds__(kCertifyThreads, kRowTiles == 1 ? 2 : 1)
    chain_certify(const __grid_constant__ ChainBlockParams p, int most, bool early) {
  extern __shared__ uint4 memory[];
  __shared__ int slots[kCertifyWarps];
  using Rows = CertifyRows<T, kRowTiles, kRank>;
  auto* const stages = reinterpret_cast<typename Rows::Stage*>(memory);
  CertifyTile* const u = reinterpret_cast<CertifyTile*>(stages + kCertifyWarps);
  CertifyColumn* const columns = reinterpret_cast<CertifyColumn*>(u + most / kTileColumns);
  int* const list = reinterpret_cast<int*>(columns + most);

  const ScoreSteps steps(p.rank);
  const int vocab = static_cast<int>(p.vocab), groups = ceil_div(vocab, Rows::kRows);
  const int64_t all_columns = p.batch * p.corrected();
  const T* w2 = static_cast<const T*>(p.w2);
  typename Rows::Stage& stage = stages[warp_id()];
  Rows rows;

  // Weights do not depend on the launch before: this block's rows are on their way while it ends.
  early &= all_columns <= most;  // one part: every block knows its rows
  if (early) {
    int group = blockIdx.x * kCertifyWarps + warp_id();
    early = group < groups;
    if (early) Rows::fetch(stage, w2, group * Rows::kRows, vocab, steps);
  }
  previous_launch_done();
  const uint32_t aborted = p.control->aborted;
  const PendingRows<kCertifyThreads> pending(p, list, slots);
  if (aborted || pending.count == 0) {
    copy_async_wait<0>();
    return;
  }
  const CertifyShare share = certify_share<kTileColumns>(p, pending, most, columns);
  // Neighbouring blocks take neighbouring rows: what is read at one time stands in one place.
  int group = share.turn * kCertifyWarps + warp_id();
  const int step = share.turns * kCertifyWarps;
  if (!early && group < groups) Rows::fetch(stage, w2, group * Rows::kRows, vocab, steps);
  fill_columns(u, share.tiles, steps, [&](int n) -> const T* {
    if (n >= share.columns) return nullptr;
    return static_cast<const T*>(p.low_rank) + static_cast<int64_t>(columns[n].index) * p.rank;
  });
  copy_async_wait<0>();
  __syncthreads();
  for (; group < groups; group += step) {
    rows.take(stage, steps);
    if (group + step < groups) Rows::fetch(stage, w2, (group + step) * Rows::kRows, vocab, steps);
    const float* tile_max = p.tile_max + group * Rows::kRows / kPoolTile * all_columns;
    for (int tile = 0; tile < share.tiles; ++tile) {
      const int n = tile * kTileColumns + lane_id() % 4 * 2;
      const float most_base[2] = {tile_max[columns[n].index], tile_max[columns[n + 1].index]};
      float sums[kRowTiles][4];
      rows.times(u[tile], steps, sums);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float of_column[2 * kRowTiles];  // rows g, g + 8, g + 16, ..
#pragma unroll
        for (int r = 0; r < 2 * kRowTiles; ++r) of_column[r] = sums[r / 2][r % 2 * 2 + i];
        float most_of_column = of_column[0];
#pragma unroll
        for (int r = 1; r < 2 * kRowTiles; ++r)
          most_of_column = fmaxf(most_of_column, of_column[r]);
        if (!(most_of_column < certify_limit(columns[n + i].winner, most_base[i])))
          certify_ids<Base>(p, columns[n + i], group * Rows::kRows + lane_id() / 4, of_column);
      }
    }
  }
  certify_finish(p, pending);
}

}  // namespace domino
