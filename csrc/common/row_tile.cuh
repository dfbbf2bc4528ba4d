// Weight rows times a small batch, the product that a decoder's head is made of: a warp's tile is
// 16 rows x 8 batch columns with fp32 sums, k in chunks of 32.
//
// Lane 4g + t holds the sums of rows g and g + 8 with columns 2t and 2t + 1, as mma_16x8x16 does:
//   sums[0..3] = (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
// A column's sums depend on its own values only, with the same order of k in every tile: a batch
// row has the same bits alone and among others.
//
// RowTile<T, true> runs on tensor cores and needs rows that start at 16 bytes and a length that is
// a multiple of 8. Each lane loads 8 consecutive k of its rows and of column g: which k stand side
// by side in an MMA does not matter as long as rows and columns agree, and loads of 16 bytes do.
// RowTile<T, false> takes any length and alignment, and fp32; `high` is no longer than `low`.
#pragma once

#include "common/launch.h"
#include "common/mma.cuh"

namespace domino {

constexpr int kChunk = 32;       // k in a step
constexpr int kTileRows = 16;    // weight rows of a tile
constexpr int kTileColumns = 8;  // batch columns of a tile

__device__ __forceinline__ int lane_id() { return threadIdx.x % kWarpSize; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / kWarpSize; }

// Where column values come from: at(tile, column, k) points to value k, the rest of its chunk of 32
// behind it.

// [tiles, chunks, 8 columns, 32 k]: a warp's fragment is 512 consecutive bytes.
template <class T>
struct BlockedColumns {
  T* base;
  int chunks;
  __device__ T* at(int tile, int column, int k) const {
    const int64_t chunk = static_cast<int64_t>(tile) * chunks + k / kChunk;
    return base + (chunk * kTileColumns + column) * kChunk + k % kChunk;
  }
};

// Rows of some matrix at element offsets kept in shared memory.
template <class T>
struct GatheredColumns {
  const T* base;
  const int64_t* offset;  // [tiles * 8]
  __device__ const T* at(int tile, int column, int k) const {
    return base + offset[tile * kTileColumns + column] + k;
  }
};

template <class T, bool kMma>
struct RowTile;

template <class T>
struct RowTile<T, true> {
  using Row = uint4;
  using Column = uint4;

  static __device__ __forceinline__ Row row(const T* row, int k0, int length) {
    const int k = k0 + lane_id() % 4 * 8;
    return k < length ? load_stream(row + k) : uint4{0, 0, 0, 0};
  }

  template <class Columns>
  static __device__ __forceinline__ Column column(const Columns& columns, int tile, int k0,
                                                  int length) {
    const int k = k0 + lane_id() % 4 * 8;
    const T* at = columns.at(tile, lane_id() / 4, k);
    return k < length ? *reinterpret_cast<const uint4*>(at) : uint4{0, 0, 0, 0};
  }

  static __device__ __forceinline__ void add(float (&sums)[4], const Row& low, const Row& high,
                                             const Column& x) {
    mma_16x8x16<T>(sums, low.x, high.x, low.y, high.y, x.x, x.y);
    mma_16x8x16<T>(sums, low.z, high.z, low.w, high.w, x.z, x.w);
  }
};

template <class T>
struct RowTile<T, false> {
  struct Row {
    const T* at;
    int count;
  };
  struct Column {
    const T* at[2];
  };

  static __device__ __forceinline__ Row row(const T* row, int k0, int length) {
    return {row + k0, max(0, min(kChunk, length - k0))};
  }

  template <class Columns>
  static __device__ __forceinline__ Column column(const Columns& columns, int tile, int k0, int) {
    const int first = lane_id() % 4 * 2;
    return {{columns.at(tile, first, k0), columns.at(tile, first + 1, k0)}};
  }

  static __device__ __forceinline__ void add(float (&sums)[4], const Row& low, const Row& high,
                                             const Column& x) {
    for (int k = 0; k < low.count; ++k) {
      const float row[2] = {to_float(low.at[k]), k < high.count ? to_float(high.at[k]) : 0.0f};
      const float value[2] = {to_float(x.at[0][k]), to_float(x.at[1][k])};
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] = fmaf(row[i / 2], value[i % 2], sums[i]);
    }
  }
};

// Adds the chunks first, first + step, .. of rows `low` and `high` (this lane's two) times kTiles
// tiles of columns. kAhead chunks of the rows are in flight at a time; ready() is called once,
// after the first loads of rows and before the first of columns.
template <class Tile, int kTiles, int kAhead, class T, class Columns, class Ready>
__device__ __forceinline__ void accumulate(float (&sums)[kTiles][4], const T* low, const T* high,
                                           int length, const Columns& columns, int first, int step,
                                           Ready ready) {
  typename Tile::Row lows[kAhead], highs[kAhead];
  const auto load_rows = [&](int chunk) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int k0 = (chunk + i * step) * kChunk;
      lows[i] = Tile::row(low, k0, length);
      highs[i] = Tile::row(high, k0, length);
    }
  };
  const auto add = [&](int chunk) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        Tile::add(sums[tile], lows[i], highs[i],
                  Tile::column(columns, tile, (chunk + i * step) * kChunk, length));
  };
  load_rows(first);
  ready();
  add(first);
  for (int chunk = first + kAhead * step; chunk * kChunk < length; chunk += kAhead * step) {
    load_rows(chunk);
    add(chunk);
  }
}

// The sums of kWarps warps that share a product's k, added in the order of the warps.
template <int kWarps, int kTiles>
struct SplitSums {
  float4 part[kWarps][kTiles][kWarpSize];

  __device__ __forceinline__ void store(const float (&sums)[kTiles][4]) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
      part[warp_id()][tile][lane_id()] = {sums[tile][0], sums[tile][1], sums[tile][2],
                                          sums[tile][3]};
  }

  __device__ __forceinline__ float total(int tile, int row, int column) const {
    const int at = (row % 8 * 4 + column / 2) * 4 + row / 8 * 2 + column % 2;
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp)
      sum += reinterpret_cast<const float*>(part[warp][tile])[at];
    return sum;
  }
};

}  // namespace domino
