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

#include "common/copy_async.cuh"
#include "common/row_tile.cuh"
#include "head/chain_math.cuh"

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
  int id;        // of the winner; -1: nothing to check
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

// The rows of the batch that a round has drafts of to look at. All threads call.
template <int kThreads>
struct PendingRows {
  const int* list;  // [batch], shared memory; null: all up to `count`
  int count;

  __device__ PendingRows(const ChainBlockParams& p, int round, int* memory, int* slots)
      : list(round == 0 ? nullptr : memory), count(0) {
    if (round == 0) {  // nothing to wait for
      count =
          static_cast<int>(p.num_active ? min(p.batch, int64_t{max(*p.num_active, 0)}) : p.batch);
      return;
    }
    for (int64_t first = 0; first < p.batch; first += kThreads) {
      const int64_t b = first + threadIdx.x;
      const bool pending = b < p.batch && p.first_of(round)[b] < p.row_done();
      const unsigned votes = __ballot_sync(kFullMask, pending);
      if (lane_id() == 0) slots[warp_id()] = __popc(votes);
      __syncthreads();
      int at = count + __popc(votes & ((1u << lane_id()) - 1));
      for (int warp = 0; warp < kThreads / kWarpSize; ++warp) {
        if (warp < warp_id()) at += slots[warp];
        count += slots[warp];
      }
      if (pending) memory[at] = static_cast<int>(b);
      __syncthreads();
    }
  }
};

// What a block works on: a part of the columns, and its turn in W2's rows. Parts have whole tiles
// of kUnit columns, as equal as may be, `most` columns at most, and blocks by their tiles.
struct CertifyShare {
  int first, columns, tiles;
  int turn, turns;  // of the blocks of this part, in groups of W2 rows

  __device__ __forceinline__ CertifyShare(int all, int unit, int most) {
    const int units = ceil_div(all, unit), parts = ceil_div(units, most / unit);
    const int blocks = gridDim.x;
    const auto end_of = [&](int part) { return (part + 1) * units / parts; };
    // every part has a block, the others go by its tiles
    const auto blocks_to = [&](int part) {
      return part < 0 ? 0 : part + 1 + (blocks - parts) * end_of(part) / units;
    };
    int part = 0;
    while (blocks_to(part) <= static_cast<int>(blockIdx.x)) ++part;
    const int begin = end_of(part - 1);
    first = begin * unit;
    tiles = end_of(part) - begin;
    columns = min(all - first, tiles * unit);
    turn = blockIdx.x - blocks_to(part - 1);
    turns = blocks_to(part) - blocks_to(part - 1);
  }
};

// Column n of those pending: b * corrected + draft - prefix.
template <class Pending>
__device__ __forceinline__ int pending_column(const Pending& pending, int n, int corrected) {
  return pending.list ? pending.list[n / corrected] * corrected + n % corrected : n;
}

template <class Pending>
__device__ __forceinline__ CertifyColumn certify_column(const ChainBlockParams& p, int round,
                                                        const Pending& pending, int n) {
  const int corrected = static_cast<int>(p.corrected());
  const int index = pending_column(pending, n, corrected), b = index / corrected;
  const int draft = static_cast<int>(p.prefix) + index - b * corrected;
  CertifyColumn column{INFINITY, -1, b * static_cast<int>(p.drafts) + draft, index};
  // not from this processor's cache, which may hold what stood there while the chain still ran
  const unsigned long long key =
      __ldcg(reinterpret_cast<const unsigned long long*>(p.keys) + column.key);
  if (draft >= __ldcg(p.first_of(round) + b)) {
    column.winner = key_value(key);
    column.id = static_cast<int>(key_id(key));
  }
  return column;
}

// Scores id `row` (and row + 8, ..: sums[i] belongs to row + 8i) for a column that passed the
// screen. An id that beats the winner takes its place, and the row starts again behind that draft.
// vain: nothing is written; what the next call needs is at hand.
template <int kRows>
__device__ __noinline__ void certify_ids(const ChainBlockParams& p, int round,
                                         const CertifyColumn& column, int row,
                                         const float (&sums)[kRows], bool vain = false) {
  if (column.id < 0) return;
  const int64_t b = column.index / p.corrected(), draft = column.key - b * p.drafts;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int v = row + 8 * i;
    if (v >= p.vocab || v == column.id) continue;
    const float score = base_at(p, b, draft, v) + sums[i];
    if (score < column.winner) continue;  // not so where the winner is NaN
    const unsigned long long key = argmax_key(score, v);
    if (vain || atomicMax(reinterpret_cast<unsigned long long*>(p.keys) + column.key, key) >= key)
      continue;
    const int before = atomicMin(p.first_of(round + 1) + b, static_cast<int>(draft) + 1);
    if (round == 0 && p.batch > kCertainRows && before == p.row_done())
      atomicAdd(&p.control->missed, 1u);
  }
}

// Grid: any number of blocks. round: of p.first_of(). most: columns that a block's shared memory
// holds.
template <class T, int kRowTiles, int kRank>
__global__ void __launch_bounds__(kCertifyThreads, kRowTiles == 1 ? 2 : 1)
    chain_certify(const __grid_constant__ ChainBlockParams p, int round, int most) {
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
  // One part: every block knows its rows; and in the first round there is surely something to do.
  int group = blockIdx.x * kCertifyWarps + warp_id();
  const bool early = round == 0 && all_columns <= most && group < groups;
  if (early) Rows::fetch(stage, w2, group * Rows::kRows, vocab, steps);
  previous_launch_done();
  // Where the launch in front has given up, this one's work is in vain, and does no harm.
  const PendingRows<kCertifyThreads> pending(p, round, list, slots);
  if (pending.count == 0) {
    copy_async_wait<0>();
    return;
  }
  const int corrected = static_cast<int>(p.corrected());
  const CertifyShare share(pending.count * corrected, kTileColumns, most);
  for (int n = threadIdx.x; n < share.tiles * kTileColumns; n += kCertifyThreads)
    columns[n] = n < share.columns ? certify_column(p, round, pending, share.first + n)
                                   : CertifyColumn{INFINITY, -1, 0, 0};
  // Neighbouring blocks take neighbouring rows: what is read at one time stands in one place.
  group = share.turn * kCertifyWarps + warp_id();
  const int step = share.turns * kCertifyWarps;
  if (!early && group < groups) Rows::fetch(stage, w2, group * Rows::kRows, vocab, steps);
  fill_columns(u, share.tiles, steps, [&](int n) -> const T* {
    if (n >= share.columns) return nullptr;
    return static_cast<const T*>(p.low_rank) +
           static_cast<int64_t>(pending_column(pending, share.first + n, corrected)) * p.rank;
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
        if (!(most_of_column + most_base[i] < columns[n + i].winner))
          certify_ids(p, round, columns[n + i], group * Rows::kRows + lane_id() / 4, of_column);
      }
    }
  }
}

}  // namespace domino
