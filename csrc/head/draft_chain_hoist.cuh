// from_hidden = W1h H for the corrected drafts: the part of W1 that needs no token.
//
// A block owns 16 * kColumnTiles columns (b, draft) and 8 * kRowTiles rows of W1. Warp w takes the
// chunks w, w + 8, .. of 32 k, in order, and the total is the sum over the warps in their order:
// tile sizes may differ from batch to batch, the bits do not. Bytes: W1h once for each block of
// columns, H once for each block of rows; bound by the latency of these reads from L2.
#pragma once

#include "common/row_tile.cuh"
#include "head/draft_chain.h"

namespace domino {

constexpr int kHoistWarps = 8;

constexpr int kMaxRowTiles = 4;

struct HoistMemory {
  float4 part[kHoistWarps][kMaxRowTiles][kWarpSize];
};

template <class T, int kColumnTiles, int kRowTiles, int kAhead>
__device__ __forceinline__ void chain_hoist(const ChainBlockParams& p, int block,
                                            HoistMemory& memory) {
  constexpr int kColumns = 16 * kColumnTiles, kRows = 8 * kRowTiles;
  static_assert(kRowTiles <= kMaxRowTiles);
  const int64_t corrected = p.corrected(), row_blocks = ceil_div<int64_t>(p.rank, kRows);
  const int64_t row0 = block % row_blocks * kRows, column0 = block / row_blocks * kColumns;
  const int64_t active = p.num_active ? min(static_cast<int64_t>(*p.num_active), p.batch) : p.batch;
  const int64_t columns = active * corrected;
  if (column0 >= columns) return;
  const int g = lane_id() / 4, k_of_lane = lane_id() % 4 * 8;
  const T* column[kColumnTiles][2];
#pragma unroll
  for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t n = min(column0 + c * 16 + half * 8 + g, columns - 1);
      column[c][half] = static_cast<const T*>(p.hidden) + n / corrected * p.hidden_batch_stride +
                        (p.first_slot + p.prefix + n % corrected) * p.hidden_slot_stride +
                        k_of_lane;
    }
  const T* row[kRowTiles];
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r)
    row[r] = static_cast<const T*>(p.w1) +
             min(row0 + r * 8 + g, p.rank - 1) * (p.hidden_width + p.units) + k_of_lane;

  const int length = static_cast<int>(p.hidden_width);
  float sums[kColumnTiles][kRowTiles][4] = {};
#pragma unroll 1
  for (int k0 = warp_id() * kChunk; k0 < length; k0 += kAhead * kHoistWarps * kChunk) {
    uint4 a[kAhead][kColumnTiles][2], x[kAhead][kRowTiles];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int k = k0 + i * kHoistWarps * kChunk;
      const bool inside = k + k_of_lane < length;
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) x[i][r] = inside ? load_stream(row[r] + k) : uint4{};
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          a[i][c][half] = inside ? load_stream(column[c][half] + k) : uint4{};
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
          RowTile<T, true>::add(sums[c][r], a[i][c][0], a[i][c][1], x[i][r]);
  }
#pragma unroll
  for (int c = 0; c < kColumnTiles; ++c) {
    if (c > 0) __syncthreads();
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
      memory.part[warp_id()][r][lane_id()] = {sums[c][r][0], sums[c][r][1], sums[c][r][2],
                                              sums[c][r][3]};
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * kRows; i += blockDim.x) {
      const int r = i % kRows, n = i / kRows;
      if (row0 + r >= p.rank || column0 + c * 16 + n >= columns) continue;
      const int at = (n % 8 * 4 + r % 8 / 2) * 4 + n / 8 * 2 + r % 2;
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < kHoistWarps; ++w)
        total += reinterpret_cast<const float*>(memory.part[w][r / 8])[at];
      p.from_hidden[(column0 + c * 16 + n) * p.rank + row0 + r] = total;
    }
  }
}

}  // namespace domino
