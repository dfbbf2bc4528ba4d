// draft_chain, plain form: three launches a draft, each spread over the chip; the formula and the
// rounding points stand in draft_chain.h.
//
//   chain_hidden      W1h H for all corrected slots       once    block: 16 of W1's rows
//   chain_base        argmax of the uncorrected slots     once    block: a part of the vocabulary
//   chain_state       S_j = GRU(E[y_j], S_{j-1})          a draft block: 8 units
//   chain_low_rank    u = SiLU(W1h H + W1s S_j)           a draft block: 16 of W1's rows
//   chain_score       argmax of base + W2 u               a draft block: a part of the vocabulary
//   chain_finish      ids and scores from the keys        once
//
// A launch overlaps the one before it (launch_kernel): it loads its first weights, then waits, then
// reads what the chain has written. Winners meet in atomicMax on argmax keys, whose result does not
// depend on the order. A launch reads every weight once for 8 batch rows (kTiles = 1), 16 (state)
// or 32 (score). Bytes a draft: W2
// + W_ih + W_hh + W1s + the base rows; the score is bound by that stream, the two small launches at
// small sizes by latency.
#pragma once

#include "common/argmax_key.h"
#include "common/row_tile.cuh"
#include "head/draft_chain.h"
#include "head/gru_cell.h"

namespace domino {

constexpr int kChainWarps = 8;
constexpr int kChainThreads = kChainWarps * kWarpSize;

struct DraftChainArgs : DraftChainParams {
  unsigned long long* keys;
  float* from_hidden;
  void* state_memory[2];
  void* low_rank_memory;

  explicit DraftChainArgs(const DraftChainParams& p) : DraftChainParams(p) {
    const DraftChainWorkspace at(p.batch, p.drafts, p.units, p.rank);
    char* bytes = static_cast<char*>(p.workspace);
    keys = reinterpret_cast<unsigned long long*>(bytes + at.keys);
    from_hidden = reinterpret_cast<float*>(bytes + at.from_hidden);
    for (int i = 0; i < 2; ++i) state_memory[i] = bytes + at.state[i];
    low_rank_memory = bytes + at.low_rank;
  }

  __host__ __device__ int64_t corrected() const { return drafts > prefix ? drafts - prefix : 0; }

  // S_j, from the batch tile `tile` on.
  template <class T>
  __device__ BlockedColumns<T> state(int64_t j, int64_t tile) const {
    const int chunks = ceil_div<int>(units, kChunk);
    T* base = static_cast<T*>(state_memory[j & 1]);
    return {base + tile * chunks * kTileColumns * kChunk, chunks};
  }

  template <class T>
  __device__ BlockedColumns<T> low_rank(int64_t tile) const {
    const int chunks = ceil_div<int>(rank, kChunk);
    T* base = static_cast<T*>(low_rank_memory);
    return {base + tile * chunks * kTileColumns * kChunk, chunks};
  }

  // y_j
  __device__ int64_t token(int64_t b, int64_t j) const {
    return j == 0 ? clamp_id(anchor[b], vocab) : key_id(keys[b * drafts + j - 1]);
  }

  template <class Base>
  __device__ const Base* base_row(int64_t b, int64_t j) const {
    return static_cast<const Base*>(base_logits) + b * base_batch_stride +
           (first_slot + j) * base_slot_stride;
  }
};

// The largest of a block's keys for each of kColumns columns, into `keys` (stride in elements).
template <int kColumns>
__device__ __forceinline__ void publish(const unsigned long long (&best)[kChainWarps][kColumns],
                                        unsigned long long* keys, int64_t stride, int64_t columns) {
  __syncthreads();
  if (threadIdx.x >= kColumns || threadIdx.x >= columns) return;
  unsigned long long key = 0;
  for (int warp = 0; warp < kChainWarps; ++warp) key = max(key, best[warp][threadIdx.x]);
  if (key != 0) atomicMax(keys + threadIdx.x * stride, key);
}

// Blocks share the rows of W (16 each), warps the k; store(tile, row, column, sum) gets each sum.
template <class T, bool kMma, int kTiles, class Columns, class Ready, class Store>
__device__ __forceinline__ void project(const T* w, int64_t stride, int64_t rows, int length,
                                        const Columns& columns, Ready ready, Store store) {
  __shared__ SplitSums<kChainWarps, kTiles> split;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kTileRows;
  const int64_t low = min(first + lane_id() / 4, rows - 1);  // rows past the end repeat the last
  const int64_t high = min(first + lane_id() / 4 + 8, rows - 1);
  float sums[kTiles][4] = {};
  accumulate<RowTile<T, kMma>, kTiles, 4>(sums, w + low * stride, w + high * stride, length,
                                          columns, warp_id(), kChainWarps, ready);
  split.store(sums);
  __syncthreads();
  for (int i = threadIdx.x; i < kTiles * kTileRows * kTileColumns; i += kChainThreads) {
    const int tile = i / (kTileRows * kTileColumns), column = i % kTileColumns;
    const int row = i / kTileColumns % kTileRows;
    if (first + row < rows) store(tile, first + row, column, split.total(tile, row, column));
  }
}

// from_hidden[b, j - prefix, :] = W1h H[b, slot j]. Grid: x = W1's rows / 16, y = slots / (8 tiles)
template <class T, bool kMma, int kTiles>
__global__ void __launch_bounds__(kChainThreads, 2)
    chain_hidden(const __grid_constant__ DraftChainArgs p) {
  __shared__ int64_t offset[kTiles * kTileColumns];
  const int64_t corrected = p.corrected(), slots = p.batch * corrected;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kTiles * kTileColumns;
  if (threadIdx.x < kTiles * kTileColumns) {
    const int64_t n = min(first + threadIdx.x, slots - 1);
    offset[threadIdx.x] = n / corrected * p.hidden_batch_stride +
                          (p.first_slot + p.prefix + n % corrected) * p.hidden_slot_stride;
  }
  __syncthreads();
  const GatheredColumns<T> columns{static_cast<const T*>(p.hidden), offset};
  const auto store = [&](int tile, int64_t row, int column, float sum) {
    const int64_t n = first + tile * kTileColumns + column;
    if (n < slots) p.from_hidden[n * p.rank + row] = sum;
  };
  project<T, kMma, kTiles>(
      static_cast<const T*>(p.w1), p.inputs + p.units, p.rank, p.inputs, columns, [] {}, store);
}

// u = SiLU(from_hidden + W1s S_j), rounded. Grid: x = W1's rows / 16, y = batch / (8 tiles)
template <class T, bool kMma, int kTiles>
__global__ void __launch_bounds__(kChainThreads, 2)
    chain_low_rank(const __grid_constant__ DraftChainArgs p, int j) {
  const int64_t first_tile = static_cast<int64_t>(blockIdx.y) * kTiles;
  const BlockedColumns<T> out = p.low_rank<T>(first_tile);
  const auto store = [&](int tile, int64_t row, int column, float sum) {
    const int64_t b = (first_tile + tile) * kTileColumns + column;
    if (b >= p.batch) return;
    const int64_t n = b * p.corrected() + j - p.prefix;
    *out.at(tile, column, row) = from_float<T>(silu(p.from_hidden[n * p.rank + row] + sum));
  };
  project<T, kMma, kTiles>(static_cast<const T*>(p.w1) + p.inputs, p.inputs + p.units, p.rank,
                           p.units, p.state<T>(j, first_tile), previous_launch_done, store);
}

// The columns that a GRU step multiplies: all chunks of x, then those of the state.
template <class T>
struct InputThenState {
  GatheredColumns<T> x;
  BlockedColumns<T> state;
  int x_chunks;
  __device__ const T* at(int tile, int column, int k) const {
    const T* of_x = x.at(tile, column, k);
    const T* of_state = state.at(tile, column, k - x_chunks * kChunk);
    return k < x_chunks * kChunk ? of_x : of_state;
  }
};

// S_j = GRU(E[y_j], S_{j-1}), rounded; S_{-1} = 0. Grid: x = units / 8, y = batch / (8 tiles)
//
// One tile holds r (rows 0-7) and z (rows 8-15) of the block's 8 units, which sum the products with
// x and with the state; two tiles, one for each product, hold n in rows 0-7.
template <class T, bool kMma, int kTiles>
__global__ void __launch_bounds__(kChainThreads, 2)
    chain_state(const __grid_constant__ DraftChainArgs p, int j) {
  using Tile = RowTile<T, kMma>;
  constexpr int kAhead = kTiles > 1 ? 2 : 4, kUnits = 8;
  __shared__ int64_t offset[kTiles * kTileColumns];
  __shared__ SplitSums<kChainWarps, kTiles> split_rz, split_nx, split_ns;
  const int64_t first_tile = static_cast<int64_t>(blockIdx.y) * kTiles;
  const int64_t first_unit = static_cast<int64_t>(blockIdx.x) * kUnits;
  const int64_t unit = min(first_unit + lane_id() / 4, p.units - 1);
  const T* w_x = static_cast<const T*>(p.w_ih) + unit * p.inputs;
  const T* w_s = static_cast<const T*>(p.w_hh) + unit * p.units;
  const BlockedColumns<T> before = p.state<T>(j + 1, first_tile);  // S_{j-1}
  const int x_chunks = ceil_div<int>(p.inputs, kChunk), s_length = j > 0 ? p.units : 0;
  const int chunks = x_chunks + ceil_div(s_length, kChunk);
  const InputThenState<T> columns{{static_cast<const T*>(p.embedding), offset}, before, x_chunks};

  float rz[kTiles][4] = {}, nx[kTiles][4] = {}, ns[kTiles][4] = {};
  typename Tile::Row row_r[kAhead], row_z[kAhead], row_n[kAhead];
  const auto load_rows = [&](int first) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int chunk = first + i * kChainWarps;
      const bool of_x = chunk < x_chunks;
      const T* w = of_x ? w_x : w_s;
      const int64_t gate = p.units * (of_x ? p.inputs : p.units);
      const int k0 = (of_x ? chunk : chunk - x_chunks) * kChunk;
      const int length = of_x ? p.inputs : s_length;
      row_r[i] = Tile::row(w, k0, length);
      row_z[i] = Tile::row(w + gate, k0, length);
      row_n[i] = Tile::row(w + 2 * gate, k0, length);
    }
  };
  const auto add = [&](int first) {
    typename Tile::Column values[kAhead][kTiles];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int chunk = first + i * kChainWarps;
      const int length = chunk < x_chunks ? p.inputs : x_chunks * kChunk + s_length;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        values[i][tile] = Tile::column(columns, tile, chunk * kChunk, length);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      auto row_nx = row_n[i], row_ns = row_n[i];
      if (first + i * kChainWarps < x_chunks) {
        row_ns = {};
      } else {
        row_nx = {};
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        Tile::add(rz[tile], row_r[i], row_z[i], values[i][tile]);
        Tile::add(nx[tile], row_nx, {}, values[i][tile]);
        Tile::add(ns[tile], row_ns, {}, values[i][tile]);
      }
    }
  };
  load_rows(warp_id());
  previous_launch_done();
  if (threadIdx.x < kTiles * kTileColumns) {
    const int64_t b = min(first_tile * kTileColumns + threadIdx.x, p.batch - 1);
    offset[threadIdx.x] = p.token(b, j) * p.inputs;
  }
  __syncthreads();
  add(warp_id());
  for (int first = warp_id() + kAhead * kChainWarps; first < chunks;
       first += kAhead * kChainWarps) {
    load_rows(first);
    add(first);
  }
  split_rz.store(rz);
  split_nx.store(nx);
  split_ns.store(ns);
  __syncthreads();

  const BlockedColumns<T> after = p.state<T>(j, first_tile);
  for (int i = threadIdx.x; i < kTiles * kUnits * kTileColumns; i += kChainThreads) {
    const int tile = i / (kUnits * kTileColumns), column = i % kTileColumns;
    const int row = i / kTileColumns % kUnits;
    const int64_t mine = first_unit + row;
    if (mine >= p.units || (first_tile + tile) * kTileColumns + column >= p.batch) continue;
    const float s = j > 0 ? to_float(*before.at(tile, column, mine)) : 0.0f;
    const float next =
        gru_cell(split_rz.total(tile, row, column), split_rz.total(tile, row + 8, column),
                 split_nx.total(tile, row, column), split_ns.total(tile, row, column), s);
    *after.at(tile, column, mine) = from_float<T>(next);
  }
}

// keys[b, j] = max over v of (base + W2 u, v). Grid: x = vocabulary (looped), y = batch / (8 tiles)
template <class T, class Base, bool kMma, int kTiles>
__global__ void __launch_bounds__(kChainThreads, 2)
    chain_score(const __grid_constant__ DraftChainArgs p, int j) {
  constexpr int kAhead = kTiles > 1 ? 2 : 4;  // what 128 registers hold
  __shared__ unsigned long long block_best[kChainWarps][kTiles * kTileColumns];
  const int64_t first_tile = static_cast<int64_t>(blockIdx.y) * kTiles;
  const int64_t first_b = first_tile * kTileColumns;
  const BlockedColumns<T> columns = p.low_rank<T>(first_tile);
  const int g = lane_id() / 4, t = lane_id() % 4;
  const T* w2 = static_cast<const T*>(p.w2);

  bool waiting = true;
  const auto ready = [&] {
    if (waiting) previous_launch_done();
    waiting = false;
  };
  unsigned long long best[kTiles][2] = {};
  const int vocab = static_cast<int>(p.vocab), step = gridDim.x * kChainWarps * kTileRows;
  for (int64_t v0 = (blockIdx.x * kChainWarps + warp_id()) * kTileRows; v0 < vocab; v0 += step) {
    const int v[2] = {static_cast<int>(v0) + g, static_cast<int>(v0) + g + 8};
    float base[kTiles][4] = {}, sums[kTiles][4] = {};
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t b = first_b + tile * kTileColumns + 2 * t + i % 2;
        if (b < p.batch && v[i / 2] < vocab)
          base[tile][i] = to_float(p.base_row<Base>(b, j)[v[i / 2]]);
      }
    accumulate<RowTile<T, kMma>, kTiles, kAhead>(sums, w2 + min(v[0], vocab - 1) * p.rank,
                                                 w2 + min(v[1], vocab - 1) * p.rank, p.rank,
                                                 columns, 0, 1, ready);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (v[i / 2] < vocab) {
          const unsigned long long key = argmax_key(base[tile][i] + sums[tile][i], v[i / 2]);
          best[tile][i % 2] = max(best[tile][i % 2], key);
        }
  }
  ready();  // a warp without rows
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int offset = 4; offset < kWarpSize; offset *= 2)  // the lanes of a column
        best[tile][i] = max(best[tile][i], __shfl_xor_sync(kFullMask, best[tile][i], offset));
      if (g == 0) block_best[warp_id()][tile * kTileColumns + 2 * t + i] = best[tile][i];
    }
  publish(block_best, p.keys + first_b * p.drafts + j, p.drafts, p.batch - first_b);
}

// keys[b, j] = max over v of (base, v) for j < prefix. Grid: x = vocabulary, y = rows (both looped)
template <class Base>
__global__ void __launch_bounds__(kChainThreads)
    chain_base(const __grid_constant__ DraftChainArgs p, int prefix) {
  __shared__ unsigned long long block_best[kChainWarps][1];
  for (int64_t row = blockIdx.y; row < p.batch * prefix; row += gridDim.y) {
    const int64_t b = row / prefix, j = row % prefix;
    const Base* base = p.base_row<Base>(b, j);
    unsigned long long best = 0;
#pragma unroll 4
    for (int64_t v = blockIdx.x * kChainThreads + threadIdx.x; v < p.vocab;
         v += gridDim.x * kChainThreads)
      best = max(best, static_cast<unsigned long long>(argmax_key(to_float(base[v]), v)));
    for (int offset = 1; offset < kWarpSize; offset *= 2)
      best = max(best, __shfl_xor_sync(kFullMask, best, offset));
    if (lane_id() == 0) block_best[warp_id()][0] = best;
    publish(block_best, p.keys + b * p.drafts + j, 0, 1);
    __syncthreads();  // before the next row reuses block_best
  }
}

__global__ void chain_finish(const __grid_constant__ DraftChainArgs p) {
  previous_launch_done();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= p.batch * p.drafts) return;
  p.tokens[i] = key_id(p.keys[i]);
  p.scores[i] = key_value(p.keys[i]);
}

}  // namespace domino
