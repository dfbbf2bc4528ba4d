// draft_chain_hoist: from_hidden = W1h H for the corrected drafts, the part of W1 that needs no
// token, in one launch beside the shortlist's.
//
// A block owns 16 * kRowTiles rows of W1 and 8 * kColumnTiles columns (b, draft). k goes by chunks
// of 32 to 32 partial sums, chunk c to partial c % 32; four partials in a row make a group, and the
// total is the sum of the groups, both added in ascending order. Warps share the partials, so tile
// sizes and warps may differ from batch to batch: the bits do not. Bytes: W1h and H once each;
// bound by latency up to about 100 columns, by L2 from there on.
#pragma once

#include "common/row_tile.cuh"
#include "head/draft_chain.h"

namespace domino {

constexpr int kHoistPartials = 32;
constexpr int kHoistGroups = 8;

template <class T, int kRowTiles, int kColumnTiles, int kWarps, int kAhead>
__global__ void __launch_bounds__(kWarps* kWarpSize, 1)
    chain_hoist(const __grid_constant__ ChainBlockParams p) {
  constexpr int kRows = kRowTiles * kTileRows, kColumns = kColumnTiles * kTileColumns;
  constexpr int kOfWarp = kHoistPartials / kWarps;  // partials: one, or a whole group
  static_assert(kOfWarp == 1 || kOfWarp == kHoistPartials / kHoistGroups);
  using Tile = RowTile<T, true>;
  __shared__ int64_t offset[kColumns];
  __shared__ float4 parts[kWarps][kRowTiles * kColumnTiles][kWarpSize];
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");  // the shortlist needs none of it
#endif
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) p.control->aborted = 0;
  const int64_t corrected = p.corrected(), first = static_cast<int64_t>(blockIdx.y) * kColumns;
  const int64_t active = p.num_active ? min(static_cast<int64_t>(*p.num_active), p.batch) : p.batch;
  const int64_t columns = active * corrected;
  if (first >= columns) return;
  if (threadIdx.x < kColumns) {
    const int64_t n = min(first + threadIdx.x, columns - 1);
    offset[threadIdx.x] = n / corrected * p.hidden_batch_stride +
                          (p.first_slot + p.prefix + n % corrected) * p.hidden_slot_stride;
  }
  __syncthreads();
  const GatheredColumns<T> hidden{static_cast<const T*>(p.hidden), offset};
  const int64_t stride = p.hidden_width + p.units, row0 = static_cast<int64_t>(blockIdx.x) * kRows;
  const T* rows[kRowTiles][2];
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = min(row0 + r * kTileRows + half * 8 + lane_id() / 4, p.rank - 1);
      rows[r][half] = static_cast<const T*>(p.w1) + row * stride;
    }

  const int length = static_cast<int>(p.hidden_width);
  float sums[kRowTiles][kColumnTiles][4] = {};
#pragma unroll 1
  for (int partial = warp_id() * kOfWarp; partial < (warp_id() + 1) * kOfWarp; ++partial) {
    float part[kRowTiles][kColumnTiles][4] = {};
    for (int k0 = partial * kChunk; k0 < length; k0 += kAhead * kHoistPartials * kChunk) {
      typename Tile::Row low[kAhead][kRowTiles], high[kAhead][kRowTiles];
      typename Tile::Column values[kAhead][kColumnTiles];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int k = k0 + i * kHoistPartials * kChunk;
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          low[i][r] = Tile::row(rows[r][0], k, length);
          high[i][r] = Tile::row(rows[r][1], k, length);
        }
#pragma unroll
        for (int c = 0; c < kColumnTiles; ++c) values[i][c] = Tile::column(hidden, c, k, length);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
          for (int c = 0; c < kColumnTiles; ++c)
            Tile::add(part[r][c], low[i][r], high[i][r], values[i][c]);
    }
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          sums[r][c][i] = partial % kOfWarp == 0 ? part[r][c][i] : sums[r][c][i] + part[r][c][i];
  }
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c)
      parts[warp_id()][r * kColumnTiles + c][lane_id()] = {sums[r][c][0], sums[r][c][1],
                                                           sums[r][c][2], sums[r][c][3]};
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * kColumns; i += kWarps * kWarpSize) {
    const int row = i % kRows, column = i / kRows;
    if (row0 + row >= p.rank || first + column >= columns) continue;
    const int tile = row / kTileRows * kColumnTiles + column / kTileColumns;
    const int at =
        (row % 8 * 4 + column % kTileColumns / 2) * 4 + row % kTileRows / 8 * 2 + column % 2;
    float total = 0.0f;
    for (int group = 0; group < kHoistGroups; ++group) {
      constexpr int kWarpsOfGroup = kWarps / kHoistGroups;
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarpsOfGroup; ++w) {
        const float x = reinterpret_cast<const float*>(parts[group * kWarpsOfGroup + w][tile])[at];
        sum = w == 0 ? x : sum + x;
      }
      total = group == 0 ? sum : total + sum;
    }
    p.from_hidden[(first + column) * p.rank + row0 + row] = total;
  }
}

}  // namespace domino
