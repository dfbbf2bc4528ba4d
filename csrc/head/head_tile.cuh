// The two products of a drafting head's kernels, over columns that a caller describes: rows of a
// weight times some columns (project), and a GRU step of 8 units (gru_tile). Blocks share the
// weight's rows, the warps of a block share k and meet in SplitSums.
#pragma once

#include "common/row_tile.cuh"

namespace domino {

constexpr int kHeadWarps = 8;
constexpr int kHeadThreads = kHeadWarps * kWarpSize;
constexpr int kGruTileUnits = 8;

// Blocks share the rows of W (16 each), warps the k; store(tile, row, column, sum) gets each sum.
// ready() is called once, between the first loads of W and the first of the columns.
template <class T, bool kMma, int kTiles, class Columns, class Ready, class Store>
__device__ __forceinline__ void project(const T* w, int64_t stride, int64_t rows, int length,
                                        const Columns& columns, Ready ready, Store store) {
  __shared__ SplitSums<kHeadWarps, kTiles> split;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kTileRows;
  const int64_t low = min(first + lane_id() / 4, rows - 1);  // rows past the end repeat the last
  const int64_t high = min(first + lane_id() / 4 + 8, rows - 1);
  float sums[kTiles][4] = {};
  accumulate<RowTile<T, kMma>, kTiles, 4>(sums, w + low * stride, w + high * stride, length,
                                          columns, warp_id(), kHeadWarps, ready);
  split.store(sums);
  __syncthreads();
  for (int i = threadIdx.x; i < kTiles * kTileRows * kTileColumns; i += kHeadThreads) {
    const int tile = i / (kTileRows * kTileColumns), column = i % kTileColumns;
    const int row = i / kTileColumns % kTileRows;
    if (first + row < rows) store(tile, first + row, column, split.total(tile, row, column));
  }
}

// The columns that a GRU step multiplies: all chunks of x, then those of the state.
template <class T, class State>
struct InputThenState {
  GatheredColumns<T> x;
  State state;
  int x_chunks;
  __device__ const T* at(int tile, int column, int k) const {
    const T* of_x = x.at(tile, column, k);
    const T* of_state = state.at(tile, column, k - x_chunks * kChunk);
    return k < x_chunks * kChunk ? of_x : of_state;
  }
};

// The sums of a GRU step for the 8 units that the block owns (blockIdx.x * 8 on): store(tile,
// column, unit, r, z, n_x, n_s) gets those of each unit and column (gru_cell.h says what they are).
//
// One tile holds r (rows 0-7) and z (rows 8-15), which sum the products with x and with the state;
// two tiles, one for each product, hold n in rows 0-7. x_length and s_length may be 0: then that
// product is left out.
template <class T, bool kMma, int kTiles, class State, class Ready, class Store>
__device__ __forceinline__ void gru_tile(const T* w_ih, const T* w_hh, int64_t inputs,
                                         int64_t units, int x_length, int s_length,
                                         const GatheredColumns<T>& x, const State& state,
                                         Ready ready, Store store) {
  using Tile = RowTile<T, kMma>;
  constexpr int kAhead = kTiles > 1 ? 2 : 3;
  __shared__ SplitSums<kHeadWarps, kTiles> split_rz, split_nx, split_ns;
  const int64_t first_unit = static_cast<int64_t>(blockIdx.x) * kGruTileUnits;
  const int64_t unit = min(first_unit + lane_id() / 4, units - 1);
  const T* w_x = w_ih + unit * inputs;
  const T* w_s = w_hh + unit * units;
  const int x_chunks = ceil_div(x_length, kChunk);
  const int chunks = x_chunks + ceil_div(s_length, kChunk);
  const InputThenState<T, State> columns{x, state, x_chunks};

  struct Batch {  // kAhead chunks in flight
    typename Tile::Row r[kAhead], z[kAhead], n[kAhead];
    typename Tile::Column values[kAhead][kTiles];
  };
  const auto load_rows = [&](Batch& batch, int first) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int chunk = first + i * kHeadWarps;
      const bool of_x = chunk < x_chunks;
      const T* w = of_x ? w_x : w_s;
      const int64_t gate = units * (of_x ? inputs : units);
      const int k0 = (of_x ? chunk : chunk - x_chunks) * kChunk;
      const int length = of_x ? x_length : s_length;
      batch.r[i] = Tile::row(w, k0, length);
      batch.z[i] = Tile::row(w + gate, k0, length);
      batch.n[i] = Tile::row(w + 2 * gate, k0, length);
    }
  };
  const auto load_columns = [&](Batch& batch, int first) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int chunk = first + i * kHeadWarps;
      const int length = chunk < x_chunks ? x_length : x_chunks * kChunk + s_length;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        batch.values[i][tile] = Tile::column(columns, tile, chunk * kChunk, length);
    }
  };
  float rz[kTiles][4] = {}, nx[kTiles][4] = {}, ns[kTiles][4] = {};
  const auto add = [&](const Batch& batch, int first) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const bool of_x = first + i * kHeadWarps < x_chunks;  // alike in the whole warp
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        Tile::add(rz[tile], batch.r[i], batch.z[i], batch.values[i][tile]);
        if (of_x) {
          Tile::add(nx[tile], batch.n[i], {}, batch.values[i][tile]);
        } else {
          Tile::add(ns[tile], batch.n[i], {}, batch.values[i][tile]);
        }
      }
    }
  };
  constexpr int kStep = kAhead * kHeadWarps;
  Batch even, odd;
  load_rows(even, warp_id());
  ready();
  load_columns(even, warp_id());
  for (int first = warp_id(); first < chunks; first += 2 * kStep) {
    load_rows(odd, first + kStep);
    load_columns(odd, first + kStep);
    add(even, first);
    load_rows(even, first + 2 * kStep);
    load_columns(even, first + 2 * kStep);
    add(odd, first + kStep);
  }
  split_rz.store(rz);
  split_nx.store(nx);
  split_ns.store(ns);
  __syncthreads();

  for (int i = threadIdx.x; i < kTiles * kGruTileUnits * kTileColumns; i += kHeadThreads) {
    const int tile = i / (kGruTileUnits * kTileColumns), column = i % kTileColumns;
    const int row = i / kTileColumns % kGruTileUnits;
    if (first_unit + row < units)
      store(tile, column, first_unit + row, split_rz.total(tile, row, column),
            split_rz.total(tile, row + 8, column), split_nx.total(tile, row, column),
            split_ns.total(tile, row, column));
  }
}

}  // namespace domino
