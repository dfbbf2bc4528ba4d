// expand in three launches; formulas and rounding points stand in expand.h.
//
//   expand_hidden    W1h H of each path, where it does not come hoisted   block: 16 of W1's rows
//   expand_state     S = GRU(E[token], parent state)                      block: 8 units
//   expand_low_rank  u from W1h H and W1s S                               block: 16 of W1's rows
//   expand_score     scores, children and their law (expand_score.cuh)    block: a part of the
//                                                                         candidates, 8-32 paths
//
// A launch overlaps the one before it (launch_kernel), and the first the one before the call: the
// loads in front of previous_launch_done() are of weights only.
#pragma once

#include "head/expand.h"
#include "head/head_tile.cuh"

namespace domino {

constexpr int kPartTile = kHeadWarps * kTileRows;  // candidates a block scores at a time
constexpr int kMaxParts = 264;                     // 2 blocks on each of 132 processors

struct ExpandPart {
  float top;   // greatest score
  float rest;  // sum of weights relative to it, without the part's k best
  float sum;   // with them
  float unused;
};

// Columns of the MMA tiles: paths of one request fill whole tiles where they share a pool.
struct ExpandLayout {
  int64_t tiles;          // of 8 columns
  int64_t tiles_a_batch;  // 0: column n is path n

  DOMINO_HD explicit ExpandLayout(const ExpandParams& p) {
    tiles_a_batch = p.pool != nullptr ? (p.paths + kTileColumns - 1) / kTileColumns : 0;
    tiles = p.pool != nullptr ? p.batch * tiles_a_batch
                              : (p.batch * p.paths + kTileColumns - 1) / kTileColumns;
  }
  DOMINO_HD int64_t column(const ExpandParams& p, int64_t n) const {
    return tiles_a_batch == 0 ? n : n / p.paths * tiles_a_batch * kTileColumns + n % p.paths;
  }
  // -1 where the column holds no path
  DOMINO_HD int64_t path(const ExpandParams& p, int64_t column) const {
    if (tiles_a_batch == 0) return column < p.batch * p.paths ? column : -1;
    const int64_t width = tiles_a_batch * kTileColumns;
    return column % width < p.paths ? column / width * p.paths + column % width : -1;
  }
};

// What the launches hand on, and how the candidates are cut into parts. Elements of u are counted
// as 4 bytes, so that one workspace serves every dtype.
struct ExpandWorkspace {
  int64_t part_size, parts;
  int64_t from_hidden;  // f32 [batch * paths, rank]
  int64_t low_rank;     // blocked [columns, rank]: u
  int64_t part;         // ExpandPart [columns, parts]
  int64_t keys;         // u64 [columns, children, parts]: the parts' best, in falling order
  int64_t scores;       // f32 [columns, children, parts]
  int64_t arrived;      // u32 [tiles]: blocks that have put their part in
  int64_t bytes;

  DOMINO_HD explicit ExpandWorkspace(const ExpandParams& p) {
    const auto up = [](int64_t n, int64_t to) { return (n + to - 1) / to * to; };
    const int64_t tiles_a_part =
        (p.candidates + int64_t{kMaxParts} * kPartTile - 1) / (int64_t{kMaxParts} * kPartTile);
    part_size = kPartTile * tiles_a_part;
    parts = (p.candidates + part_size - 1) / part_size;
    const int64_t columns = up(ExpandLayout(p).tiles, 4) * kTileColumns, rows = columns * parts;
    int64_t at = 0;
    const auto take = [&](int64_t size) {
      const int64_t here = at;
      at += up(size, 256);
      return here;
    };
    from_hidden = take(p.batch * p.paths * p.rank * 4);
    low_rank = take(columns * up(p.rank, kChunk) * 4);
    part = take(rows * sizeof(ExpandPart));
    keys = take(rows * p.children * 8);
    scores = take(rows * p.children * 4);
    arrived = take(columns / kTileColumns * 4);
    bytes = at;
  }
};

struct ExpandArgs : ExpandParams {
  ExpandLayout layout;
  ExpandWorkspace at;

  explicit ExpandArgs(const ExpandParams& p) : ExpandParams(p), layout(p), at(p) {}

  template <class T>
  __device__ T* scratch(int64_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(workspace) + offset);
  }
  template <class T>
  __device__ BlockedColumns<T> low_rank_columns(int64_t tile) const {
    const int chunks = ceil_div<int>(rank, kChunk);
    return {scratch<T>(at.low_rank) + tile * chunks * kTileColumns * kChunk, chunks};
  }
  template <class Base>
  __device__ const Base* base_row(const ExpandPath& path) const {
    return static_cast<const Base*>(base_logits) + path.b * base_batch_stride +
           path.slot * base_slot_stride;
  }
  __device__ int64_t hidden_offset(const ExpandPath& path) const {
    return path.b * hidden_batch_stride + path.slot * hidden_slot_stride;
  }
};

// fill(column, n) for the block's columns, the last path's past the end.
template <int kTiles, class Fill>
__device__ __forceinline__ void fill_columns(const ExpandArgs& p, Fill fill) {
  if (threadIdx.x < kTiles * kTileColumns) {
    const int64_t n = static_cast<int64_t>(blockIdx.y) * kTiles * kTileColumns + threadIdx.x;
    fill(threadIdx.x, min(n, p.batch * p.paths - 1));
  }
  __syncthreads();
}

// No block of expand_score has arrived. By each launch in front of it, in one block.
__device__ __forceinline__ void expand_begin(const ExpandArgs& p) {
  if (blockIdx.x != 0 || blockIdx.y != 0) return;
  for (int64_t i = threadIdx.x; i < p.layout.tiles; i += kHeadThreads)
    p.scratch<unsigned int>(p.at.arrived)[i] = 0;
}

// from_hidden[n, :] = W1h H[slot of n]. Grid: x = W1's rows / 16, y = paths / (8 tiles)
template <class T, bool kMma, int kTiles>
__global__ void __launch_bounds__(kHeadThreads, 2)
    expand_hidden(const __grid_constant__ ExpandArgs p) {
  __shared__ int64_t offset[kTiles * kTileColumns];
  const GatheredColumns<T> columns{static_cast<const T*>(p.hidden), offset};
  const auto ready = [&] {
    previous_launch_done();
    expand_begin(p);
    fill_columns<kTiles>(p,
                         [&](int c, int64_t n) { offset[c] = p.hidden_offset(ExpandPath(p, n)); });
  };
  const auto store = [&](int tile, int64_t row, int column, float sum) {
    const int64_t n = (blockIdx.y * int64_t{kTiles} + tile) * kTileColumns + column;
    if (n < p.batch * p.paths) p.scratch<float>(p.at.from_hidden)[n * p.rank + row] = sum;
  };
  project<T, kMma, kTiles>(static_cast<const T*>(p.w1), p.hidden_width + p.units, p.rank,
                           p.hidden_width, columns, ready, store);
}

// S of each path. Grid: x = units / 8, y = paths / (8 tiles)
template <class T, bool kMma, int kTiles>
__global__ void __launch_bounds__(kHeadThreads, 1)
    expand_state(const __grid_constant__ ExpandArgs p) {
  __shared__ int64_t token[kTiles * kTileColumns], of_x[kTiles * kTileColumns],
      of_state[kTiles * kTileColumns];
  const T* before = static_cast<const T*>(p.parent_states);
  T* after = static_cast<T*>(p.states);
  const auto ready = [&] {
    previous_launch_done();
    expand_begin(p);
    fill_columns<kTiles>(p, [&](int c, int64_t n) {
      token[c] = ExpandPath(p, n).token;
      of_x[c] = max(token[c], int64_t{0}) * p.inputs;
      of_state[c] = before != nullptr ? parent_offset(p, n) : 0;
    });
  };
  const auto store = [&](int tile, int column, int64_t unit, float r, float z, float n_x,
                         float n_s) {
    const int c = tile * kTileColumns + column;
    const int64_t n = static_cast<int64_t>(blockIdx.y) * kTiles * kTileColumns + c;
    if (n >= p.batch * p.paths || token[c] < 0) return;
    if (p.table != nullptr) {
      const T* row = static_cast<const T*>(p.table) + token[c] * 3 * p.units;
      r += to_float(row[table_offset(unit, 0)]);
      z += to_float(row[table_offset(unit, 1)]);
      n_x += to_float(row[table_offset(unit, 2)]);
    }
    const float s = before != nullptr ? to_float(before[of_state[c] + unit]) : 0.0f;
    after[states_offset(p, n) + unit] = from_float<T>(gru_cell(r, z, n_x, n_s, s));
  };
  gru_tile<T, kMma, kTiles>(static_cast<const T*>(p.w_ih), static_cast<const T*>(p.w_hh), p.inputs,
                            p.units, p.table != nullptr ? 0 : p.inputs,
                            before != nullptr ? p.units : 0,
                            GatheredColumns<T>{static_cast<const T*>(p.embedding), of_x},
                            GatheredColumns<T>{before, of_state}, ready, store);
}

// u of each path. Grid: x = W1's rows / 16, y = paths / (8 tiles)
template <class T, bool kMma, int kTiles>
__global__ void __launch_bounds__(kHeadThreads, 2)
    expand_low_rank(const __grid_constant__ ExpandArgs p) {
  __shared__ int64_t offset[kTiles * kTileColumns];
  const bool recurrent = p.recurrent();
  const GatheredColumns<T> columns{static_cast<const T*>(recurrent ? p.states : p.embedding),
                                   offset};
  const auto ready = [&] {
    previous_launch_done();
    expand_begin(p);
    fill_columns<kTiles>(p, [&](int c, int64_t n) {
      offset[c] =
          recurrent ? states_offset(p, n) : max(ExpandPath(p, n).token, int64_t{0}) * p.inputs;
    });
  };
  const BlockedColumns<T> out = p.low_rank_columns<T>(0);
  const auto store = [&](int tile, int64_t row, int column, float sum) {
    const int c = tile * kTileColumns + column;
    const int64_t n = static_cast<int64_t>(blockIdx.y) * kTiles * kTileColumns + c;
    if (n >= p.batch * p.paths) return;
    float z = sum;
    if (p.from_hidden != nullptr) {
      z = p.from_hidden[p.hidden_offset(ExpandPath(p, n)) + row] + sum;
    } else if (p.hidden != nullptr) {
      z = p.scratch<float>(p.at.from_hidden)[n * p.rank + row] + sum;
    }
    const float own = recurrent ? 0.0f : to_float(*columns.at(tile, column, row));
    const int64_t at = p.layout.column(p, n);
    *out.at(at / kTileColumns, at % kTileColumns, row) =
        from_float<T>(low_rank_input(p.kind, z, own));
  };
  const int length = p.kind == LowRank::kRow ? 0 : static_cast<int>(p.units);
  project<T, kMma, kTiles>(static_cast<const T*>(p.w1) + p.hidden_width, p.hidden_width + p.units,
                           p.rank, length, columns, ready, store);
}

}  // namespace domino
