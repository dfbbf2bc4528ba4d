// draft_chain_certify on warpgroup tensor cores (sm_90a): the same screen and bits as
// chain_certify, which see.
//
// A block keeps its part of the columns in shared memory as operand B, 112 to a tile, and tiles of
// 64 rows of W2 go through a ring of stages as operand A, as the copy engine puts them there. One
// warp feeds the ring: rows, and the maxima of their base logits. Two warpgroups share what is to
// be multiplied, so that one compares while the other multiplies: one tile of columns each, or,
// where there is only one, every second stage. Both see each stage come and let go of it, because a
// phase of its barrier is known by parity alone: who skips stages may take the last lap for this
// one. Where every block has all columns, the first rows are on their way while the launch in front
// ends.
//
// Bytes: W2 once for 224 columns, tile_max once; bound by that stream up to 224 columns, by tensor
// cores from there on.
#pragma once

#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "head/draft_chain_certify.cuh"

namespace domino {

constexpr int kWarpgroup = 4 * kWarpSize, kWarpgroups = 2;
constexpr int kWideThreads = (kWarpgroups + 1) * kWarpgroup;  // 168 registers each, then these:
constexpr int kFeedRegisters = 40, kMultiplyRegisters = 232;
constexpr int kMaxStages = 8;
constexpr int kMostWideTiles = 2;  // of columns in a block

struct WideTile {
  uint4 u[kScoreChains][kWgmmaColumns][kTileWidth / 8];  // 64 k, swizzled as W2's (tma.cuh)
};

struct WideRing {
  uint64_t full[kMaxStages], empty[kMaxStages];
  int slots[kWideThreads / kWarpSize];
};

// Shared memory of a block, in bytes from a multiple of 1024.
struct WideMemory {
  int stage_bytes, u, maxima, winners, columns, list, ring, bytes;
  DOMINO_HD WideMemory(int64_t rank, int64_t batch, int most, int stages) {
    stage_bytes = ceil_div(static_cast<int>(rank), kTileWidth) * kWgmmaRows * kTileWidth * 2;
    u = stages * stage_bytes;
    maxima = u + most / kWgmmaColumns * static_cast<int>(sizeof(WideTile));  // f32 [stages, most]
    winners = maxima + stages * most * 4;                                    // f32 [most]
    columns = winners + most * 4;
    ring = columns + most * static_cast<int>(sizeof(CertifyColumn));
    list = ring + static_cast<int>(sizeof(WideRing));
    bytes = list + static_cast<int>(batch) * 4;
  }
};

// Chain q of a score (draft_chain.h), of kChain steps: d = its sums. a, b: of the rows and of the
// columns; past the rank both are zero.
template <class T, int kChain>
__device__ __forceinline__ void multiply_chain(float (&d)[kWgmmaColumns / 2], int q, uint32_t a,
                                               uint32_t b) {
#pragma unroll
  for (int i = 0; i < kChain; ++i) {
    const int k = (q * kChain + i) * 16;
    wgmma_64x112x16<T>(
        d, wgmma_swizzled(a + k / kTileWidth * (kWgmmaRows * 128) + k % kTileWidth * 2),
        wgmma_swizzled(b + k / kTileWidth * (kWgmmaColumns * 128) + k % kTileWidth * 2), i > 0);
  }
  wgmma_commit();
}

// sums[4j ..]: W2 u of rows g and g + 8 of the warp with columns 8j + 2t and the next.
template <class T, int kChain>
__device__ __forceinline__ void multiply(float (&sums)[kWgmmaColumns / 2], uint32_t a, uint32_t b) {
  float second[kWgmmaColumns / 2], third[kWgmmaColumns / 2];
  wgmma_pin(sums), wgmma_pin(second), wgmma_pin(third);
  wgmma_begin();
  multiply_chain<T, kChain>(sums, 0, a, b);
  multiply_chain<T, kChain>(second, 1, a, b);
  multiply_chain<T, kChain>(third, 2, a, b);
  wgmma_wait<1>();
  wgmma_pin(sums), wgmma_pin(second);
#pragma unroll
  for (int i = 0; i < kWgmmaColumns / 2; ++i) sums[i] += second[i];
  wgmma_pin(second);
  wgmma_begin();
  multiply_chain<T, kChain>(second, 3, a, b);
  wgmma_wait<0>();
  wgmma_pin(second), wgmma_pin(third);
#pragma unroll
  for (int i = 0; i < kWgmmaColumns / 2; ++i) sums[i] += third[i] + second[i];
}

// Grid: any number of blocks. map: W2 in tiles of 64 rows. round: of p.first_of(). most: columns
// of a block, a multiple of 112.
template <class T, int kChain>
__global__ void __launch_bounds__(kWideThreads, 1)
    chain_certify_wide(const __grid_constant__ ChainBlockParams p,
                       const __grid_constant__ CUtensorMap map, int round, int most, int stages) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char unaligned[];
  char* const memory = unaligned + (-shared_address(unaligned) & 1023);
  const WideMemory at(p.rank, p.batch, most, stages);
  WideRing& ring = *reinterpret_cast<WideRing*>(memory + at.ring);
  CertifyColumn* const columns = reinterpret_cast<CertifyColumn*>(memory + at.columns);
  float* const maxima = reinterpret_cast<float*>(memory + at.maxima);
  float* const winners = reinterpret_cast<float*>(memory + at.winners);
  const int rank = static_cast<int>(p.rank);
  const int tiles = ceil_div(static_cast<int>(p.vocab), kWgmmaRows);
  const int64_t all_columns = p.batch * p.corrected();
  const int warp = warp_id(), lane = lane_id(), warpgroup = warp / 4;
  const bool feeds = warp == kWarpgroups * 4;
  // which waits for this one; mostly both leave at once
  if (round > 0 && p.batch <= kEarlyRows) allow_next_launch();

  const auto copy_rows = [&](int stage, int tile) {
    arrive_with_bytes(&ring.full[stage], at.stage_bytes);
#pragma unroll
    for (int i = 0; i < kChain; ++i)
      copy_tile(shared_address(memory) + stage * at.stage_bytes + i * (kWgmmaRows * 128), map,
                tile * kWgmmaRows, i * kTileWidth, &ring.full[stage]);
  };
  // Weights do not depend on the launch in front; in the first round there is surely work for all.
  int early = 0;
  if (round == 0 && all_columns <= most)
    early =
        min(stages, ceil_div(tiles - static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)));
  if (feeds && lane == 0) {
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      init_barrier(&ring.full[stage], 1 + kWarpSize);  // rows, and a lane's maxima
      init_barrier(&ring.empty[stage], kWarpgroups * kWarpgroup / kWarpSize);
    }
    fence_barriers();
#pragma unroll 1
    for (int i = 0; i < early; ++i) copy_rows(i, blockIdx.x + i * gridDim.x);
  }
  previous_launch_done();
  // Where the launch in front has given up, this one's work is in vain, and does no harm.
  const PendingRows<kWideThreads> pending(p, round, reinterpret_cast<int*>(memory + at.list),
                                          ring.slots);
  if (pending.count == 0) {
    if (feeds && lane == 0)
      for (int i = 0; i < early; ++i) {
        for (int other = 0; other < kWarpSize; ++other) arrive(&ring.full[i]);
        wait_for_phase(&ring.full[i], 0);
      }
    return;
  }
  const int corrected = static_cast<int>(p.corrected());
  const CertifyShare share(pending.count * corrected, kWgmmaColumns, most);
  constexpr int kEights = kChain * kTileWidth / 8;
  for (int i = threadIdx.x; i < share.tiles * kWgmmaColumns * kEights; i += kWideThreads) {
    const int n = i / kEights, k8 = i % kEights;
    uint4* to = &reinterpret_cast<WideTile*>(memory + at.u)[n / kWgmmaColumns]
                     .u[k8 / 8][n % kWgmmaColumns][k8 % 8 ^ n % 8];
    if (n < share.columns && k8 * 8 < rank) {
      copy_async16(
          shared_address(to),
          static_cast<const T*>(p.low_rank) +
              static_cast<int64_t>(pending_column(pending, share.first + n, corrected)) * rank +
              k8 * 8);
    } else {
      *to = {0, 0, 0, 0};
    }
  }
  copy_async_commit();
  for (int n = threadIdx.x; n < share.tiles * kWgmmaColumns; n += kWideThreads) {
    CertifyColumn column{INFINITY, -1, 0, 0};
    if (n < share.columns) {
      column = certify_column(p, round, pending, share.first + n);
    } else {
      for (int stage = 0; stage < stages; ++stage) maxima[stage * most + n] = -INFINITY;
    }
    columns[n] = column;
    winners[n] = column.winner;
  }
  copy_async_wait<0>();
  fence_async_proxy();
  __syncthreads();

  const int count = max(0, ceil_div(tiles - share.turn, share.turns));  // of this block
  const auto tile_of = [&](int n) {  // backward the second time: L2 holds the end of W2
    const int tile = share.turn + n * share.turns;
    return round == 0 ? tile : tiles - 1 - tile;
  };
  if (warpgroup == kWarpgroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kFeedRegisters));
    if (!feeds) return;
    for (int n = 0, stage = 0, phase = 1; n < count; ++n) {
      const int tile = tile_of(n);
      if (n >= stages) wait_for_phase(&ring.empty[stage], phase);
      if (n >= early && lane == 0) copy_rows(stage, tile);
      const float* from = p.tile_max + tile * kWgmmaRows / kPoolTile * all_columns;
      for (int i = lane; i < share.columns; i += kWarpSize)
        copy_async4(shared_address(&maxima[stage * most + i]), from + columns[i].index);
      arrive_behind_copies(&ring.full[stage]);
      if (++stage == stages) stage = 0, phase ^= 1;
    }
    copy_async_wait<0>();
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kMultiplyRegisters));
  static_assert(kMostWideTiles == kWarpgroups);
  const bool together = share.tiles == kWarpgroups;  // on each stage
  const int part = together ? warpgroup : 0;
  for (int n = 0, stage = 0, phase = 0; n < count; ++n) {
    wait_for_phase(&ring.full[stage], phase);
    if (together || n % kWarpgroups == warpgroup) {
      float sums[kWgmmaColumns / 2];
      multiply<T, kChain>(
          sums, shared_address(memory) + stage * at.stage_bytes,
          shared_address(memory) + at.u + part * static_cast<int>(sizeof(WideTile)));
      // fl(base + sum) <= fl(maximum + sum): fp32 addition is monotone
      const int first = part * kWgmmaColumns + lane % 4 * 2;
      const float* const most_base = maxima + stage * most + first;
      bool may[4] = {};
#pragma unroll
      for (int j = 0; j < kWgmmaColumns / 8; ++j) {
        const float2 base = *reinterpret_cast<const float2*>(most_base + j * 8);
        const float2 winner = *reinterpret_cast<const float2*>(winners + first + j * 8);
        may[j % 2] |= !(fmaxf(sums[4 * j], sums[4 * j + 2]) + base.x < winner.x);
        may[2 + j % 2] |= !(fmaxf(sums[4 * j + 1], sums[4 * j + 3]) + base.y < winner.y);
      }
      if (may[0] | may[1] | may[2] | may[3]) {
        const int row = tile_of(n) * kWgmmaRows + warp % 4 * kTileRows + lane / 4;
#pragma unroll
        for (int i = 0; i < kWgmmaColumns / 4; ++i) {
          const int column = i / 2 * 8 + i % 2;
          const float of_column[2] = {sums[i / 2 * 4 + i % 2], sums[i / 2 * 4 + 2 + i % 2]};
          if (!(fmaxf(of_column[0], of_column[1]) + most_base[column] < winners[first + column]))
            certify_ids(p, round, columns[first + column], row, of_column);
        }
      }
    }
    __syncwarp();
    if (lane == 0) arrive(&ring.empty[stage]);
    if (++stage == stages) stage = 0, phase ^= 1;
  }
#endif
}

}  // namespace domino
