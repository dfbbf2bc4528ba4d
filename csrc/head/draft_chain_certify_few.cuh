// draft_chain_certify for up to 16 columns, one batch row (sm_90): the same bits as chain_certify,
// and its screen or that of chain_certify_screen, which see.
//
// On the processors that the chain leaves free the stages of the ring, tiles of 64 rows, fill while
// it still runs. The first tiles of each block are its own, the others go to who asks first,
// because the chain's processors start late and with nothing. A warp holds 8 columns as MMA
// fragments in registers and takes 16 rows of every tile.
//
// Bytes: W2 once, or its int8 copy; bound by that stream.
#pragma once

#include "head/draft_chain_certify_screen.cuh"

namespace domino {

constexpr int kFewColumns = 16, kFewRows = 64;
constexpr int kFewWarps = kFewRows / kTileRows * (kFewColumns / kTileColumns);  // that multiply
constexpr int kFewThreads = (kFewWarps + 2) * kWarpSize;  // one feeds, both fetch columns
constexpr int kFewStages = 13;                            // at most

struct FewMemory {
  uint4 u[kFewColumns][kChainSteps * kScoreChains * 2 + 1];  // a row each: no bank conflicts
  float maxima[kFewStages][kFewColumns];                     // of the base logits of a stage's ids
  CertifyColumn columns[kFewColumns];
  ScreenColumn quantised[kFewColumns];
  alignas(16) ScreenTile scales[kFewStages];
  uint64_t full[kFewStages], empty[kFewStages];
  int tile[kFewStages];  // of W2, by ticket; negative: no more
  int slots[kFewThreads / kWarpSize];
  int list;
  bool over;  // the launch in front has ended
};

// Grid: any number of blocks. map: W2, or p.screen (kScreen), in tiles of 64 rows. kPieces: of 128
// bytes, of a row. round: of p.first_of(). stages: of the ring, as many as fit behind FewMemory.
template <class T, int kPieces, bool kScreen>
__global__ void __launch_bounds__(kFewThreads, 1)
    chain_certify_few(const __grid_constant__ ChainBlockParams p,
                      const __grid_constant__ CUtensorMap map, int round, int stages) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char unaligned[];
  constexpr int kStageBytes = kPieces * kFewRows * kTileWidth * 2;
  char* const ring = unaligned + (-shared_address(unaligned) & 1023);
  FewMemory& memory = *reinterpret_cast<FewMemory*>(ring + stages * kStageBytes);
  const int rank = static_cast<int>(p.rank), blocks = static_cast<int>(gridDim.x);
  const int tiles = ceil_div(static_cast<int>(p.vocab), kFewRows), block = blockIdx.x;
  const int warp = warp_id(), lane = lane_id();
  const bool feeds = warp == kFewWarps;
  if (round > 0) allow_next_launch();  // which waits for this one; mostly both leave at once

  const auto tile_of = [&](int i) {  // backward the second time: L2 holds the end of W2
    return i >= tiles ? -1 : round == 0 ? i : tiles - 1 - i;
  };
  const auto copy_rows = [&](int stage, int tile) {
    arrive_with_bytes(&memory.full[stage], kStageBytes);
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      copy_tile(shared_address(ring) + stage * kStageBytes + i * (kFewRows * kTileWidth * 2), map,
                tile * kFewRows, i * kTileWidth, &memory.full[stage]);
  };
  const volatile uint32_t* const begun = &p.control->begun[0];
  volatile bool& over = memory.over;
  const int own = max(stages, 3 * tiles / (4 * blocks));  // without a ticket
  // Weights do not depend on the launch in front, and in the first round there is surely work.
  const int early = round == 0 ? min(stages, ceil_div(tiles - block, blocks)) : 0;
  if (feeds && lane == 0) {
    over = false;
    for (int stage = 0; stage < stages; ++stage) {
      init_barrier(&memory.full[stage], 1 + kWarpSize);  // rows, and a lane's maxima
      init_barrier(&memory.empty[stage], kFewWarps);
    }
    fence_barriers();
  }
  __syncthreads();
  if (early > 0 && feeds && lane == 0) {
    // not among the loads that the chain's first steps wait for; the chain takes longer than this
    for (int i = 0; i < 32 && !over && *begun == 0; ++i) __nanosleep(500);
    for (int i = 0; i < early; ++i) copy_rows(i, block + i * blocks);
  }
  __syncwarp();
  previous_launch_done();
  if (threadIdx.x == 0) over = true;
  // Where the launch in front has given up, this one's work is in vain, and does no harm.
  const PendingRows<kFewThreads> pending(p, round, &memory.list, memory.slots);
  if (pending.count == 0) {
    if (feeds && lane == 0)
      for (int i = 0; i < early; ++i) {
        for (int other = 0; other < kWarpSize; ++other) arrive(&memory.full[i]);
        wait_for_phase(&memory.full[i], 0);
      }
    return;
  }
  const int count = pending.count * static_cast<int>(p.corrected());
  const T* const low_rank = static_cast<const T*>(p.low_rank);
  if constexpr (kScreen) {
    if (const int n = warp * 8 + lane / 4; warp < kFewColumns / 8) {
      Quantiser<T> column;
      column.load(low_rank + static_cast<int64_t>(min(n, count - 1)) * rank, rank);
      const ScreenColumn quantised = column.store(rank, [&](int k, const uint2& eight) {
        reinterpret_cast<uint2*>(memory.u[n])[k / 8] = eight;
      });
      if (lane % 4 == 0) memory.quantised[n] = quantised;
    }
  } else {
    constexpr int kChunks = kPieces * kTileWidth / 8;
    for (int i = threadIdx.x; i < kFewColumns * kChunks; i += kFewThreads) {
      const int n = i / kChunks, k8 = i % kChunks;
      uint4* const to = &memory.u[n][k8];
      if (n < count && k8 * 8 < rank) {
        copy_async16(shared_address(to), low_rank + static_cast<int64_t>(n) * rank + k8 * 8);
      } else {
        *to = {0, 0, 0, 0};
      }
    }
  }
  copy_async_commit();
  if (threadIdx.x < kFewColumns) {
    const int n = threadIdx.x;
    memory.columns[n] =
        n < count ? certify_column(p, round, pending, n) : CertifyColumn{INFINITY, -1, 0, 0};
    for (int stage = 0; n >= count && stage < stages; ++stage) memory.maxima[stage][n] = -INFINITY;
  }
  copy_async_wait<0>();
  __syncthreads();

  if (warp >= kFewWarps) {
    if (!feeds) return;
    constexpr int kAsked = 3;  // tickets on their way, a lane each
    int ticket = 0;
    for (int n = 0, stage = 0, phase = 1, tile = 0; tile >= 0; ++n) {
      tile = tile_of(n < own ? block + n * blocks
                             : own * blocks + __shfl_sync(kFullMask, ticket, n % kAsked));
      if (n + kAsked >= own && lane == n % kAsked)
        ticket = static_cast<int>(atomicAdd(&p.control->tickets[round], 1u));
      if (n >= stages) wait_for_phase(&memory.empty[stage], phase);
      if (lane == 0) {
        memory.tile[stage] = tile;
        if (tile < 0) {
          arrive(&memory.full[stage]);
        } else if (n >= early) {
          copy_rows(stage, tile);
        }
      }
      if (tile >= 0 && lane < count)
        copy_async4(shared_address(&memory.maxima[stage][lane]),
                    p.tile_max + static_cast<int64_t>(tile * kFewRows / kPoolTile) * count + lane);
      if (kScreen && tile >= 0 && lane == kFewColumns)
        copy_async16(shared_address(&memory.scales[stage]),
                     screen_tiles(p.screen, p.vocab, rank) + tile * kFewRows / kPoolTile);
      __syncwarp();
      arrive_behind_copies(&memory.full[stage]);
      if (++stage == stages) stage = 0, phase ^= 1;
    }
    copy_async_wait<0>();
    return;
  }

  // Rows 16 (warp % 4) .. of a tile, columns 8 (warp / 4) ..
  constexpr int kSteps = 4 * kPieces;
  const int row = warp % 4 * kTileRows, column = warp / 4 * kTileColumns;
  uint2 u[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; step += 2) {
    const uint4 two =
        load_matrices(shared_address(&memory.u[column + lane % 8][step * 2 + lane / 8]));
    u[step] = {two.x, two.y}, u[step + 1] = {two.z, two.w};
  }
  const int at_row = row + lane % 16;
  uint32_t at[4];  // of the 16 bytes of a step in a piece of 64 k
#pragma unroll
  for (int i = 0; i < 4; ++i)
    at[i] = shared_address(ring) + at_row * 128 + ((i * 2 + lane / 16) ^ (at_row % 8)) * 16;
  const int first = column + lane % 4 * 2;
  const int id[2] = {memory.columns[first].id, memory.columns[first + 1].id};
  const float winner[2] = {memory.columns[first].winner, memory.columns[first + 1].winner};
  const float screened[2] = {screen_winner(memory.columns[first]),
                             screen_winner(memory.columns[first + 1])};
  const ScreenColumn quantised[2] = {memory.quantised[first], memory.quantised[first + 1]};
  for (int n = 0, stage = 0, phase = 0;; ++n) {
    int tile = n < own ? tile_of(block + n * blocks) : 0;
    if (tile >= 0) wait_for_phase(&memory.full[stage], phase);
    if (n >= own) tile = *const_cast<volatile int*>(&memory.tile[stage]);
    if (tile < 0) break;
    const auto rows_of = [&](int step) {
      return load_matrices(at[step % 4] + stage * kStageBytes +
                           step / 4 * (kFewRows * kTileWidth * 2));
    };
    const auto release = [&] {
      __syncwarp();
      if (lane == 0) arrive(&memory.empty[stage]);
      if (++stage == stages) stage = 0, phase ^= 1;
    };
    const int row0 = tile * kFewRows + row;
    if constexpr (kScreen) {
      int products[2][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        mma_16x8x32(products[step % 2], rows_of(step), u[step]);
      const float2 base = *reinterpret_cast<const float2*>(&memory.maxima[stage][first]);
      const ScreenTile scale = memory.scales[stage];
      release();
      bool may = false;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int limit =
            screen_limit(screened[i % 2], i % 2 ? base.y : base.x, quantised[i % 2], scale);
        const int v = row0 + lane / 4 + i / 2 * 8;  // the winner itself does not count
        may |= products[0][i] + products[1][i] >= limit && v != id[i % 2];
      }
      if (__any_sync(kFullMask, may))
        certify_marked<T, true>(
            p, round, pending, row0, [column](int i) { return column + i; },
            min(kTileColumns, count - column));
    } else {
      float chain[kScoreChains][4] = {};
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
#pragma unroll
        for (int q = 0; q < kScoreChains; ++q) {
          const int step = q * kPieces + i;
          const uint4 a = rows_of(step);
          mma_16x8x16<T>(chain[q], a.x, a.y, a.z, a.w, u[step].x, u[step].y);
        }
      const float2 base = *reinterpret_cast<const float2*>(&memory.maxima[stage][first]);
      release();
      float sums[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[i] = (chain[0][i] + chain[1][i]) + (chain[2][i] + chain[3][i]);
      // fl(base + sum) <= fl(maximum + sum): fp32 addition is monotone
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float of_column[2] = {sums[i], sums[2 + i]};
        if (!(fmaxf(of_column[0], of_column[1]) + (i ? base.y : base.x) < winner[i]))
          certify_ids(p, round, memory.columns[first + i], row0 + lane / 4, of_column);
      }
    }
  }
#endif
}

}  // namespace domino
