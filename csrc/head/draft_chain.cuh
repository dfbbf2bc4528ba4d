// draft_chain, plain form: three launches a draft, each spread over the chip; the formula and the
// rounding points stand in draft_chain.h.
//
//   chain_hidden      W1h H for all corrected slots       once    block: 16 of W1's rows
//   chain_base        argmax of the uncorrected slots     once    block: a part of the vocabulary
//   chain_state       S_j = GRU(E[y_j], S_{j-1})          a draft block: 8 units
//   chain_low_rank    u from W1h H and W1s S_j            a draft block: 16 of W1's rows
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
#include "head/draft_chain.h"
#include "head/gru_cell.h"
#include "head/head_tile.cuh"

namespace domino {

struct DraftChainArgs : DraftChainParams {
  unsigned long long* keys;
  float* from_hidden;
  void* state_memory[2];
  void* low_rank_memory;

  explicit DraftChainArgs(const DraftChainParams& p) : DraftChainParams(p) {
    const DraftChainWorkspace at(p.batch, p.drafts, p.units, p.rank);
    char* bytes =
        static_cast<char*>(p.workspace) + ChainBlockWorkspace::kept_bytes(p.units, p.rank);
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
  __device__ BlockedColumns<T> low_rank_columns(int64_t tile) const {
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
__device__ __forceinline__ void publish(const unsigned long long (&best)[kHeadWarps][kColumns],
                                        unsigned long long* keys, int64_t stride, int64_t columns) {
  __syncthreads();
  if (threadIdx.x >= kColumns || threadIdx.x >= columns) return;
  unsigned long long key = 0;
  for (int warp = 0; warp < kHeadWarps; ++warp) key = max(key, best[warp][threadIdx.x]);
  if (key != 0) atomicMax(keys + threadIdx.x * stride, key);
}

// from_hidden[b, j - prefix, :] = W1h H[b, slot j]. Grid: x = W1's rows / 16, y = slots / (8 tiles)
template <class T, bool kMma, int kTiles>
__global__ void __launch_bounds__(kHeadThreads, 2)
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
      static_cast<const T*>(p.w1), p.hidden_width + p.units, p.rank, p.hidden_width, columns, [] {},
      store);
}

// u from z = from_hidden + W1s S_j, rounded. Grid: x = W1's rows / 16, y = batch / (8 tiles)
// kGru: S_j is a state, otherwise the row of y_j.
template <class T, bool kMma, int kTiles, bool kGru>
__global__ void __launch_bounds__(kHeadThreads, 2)
    chain_low_rank(const __grid_constant__ DraftChainArgs p, int j) {
  __shared__ int64_t offset[kTiles * kTileColumns];
  const int64_t first_tile = static_cast<int64_t>(blockIdx.y) * kTiles;
  const BlockedColumns<T> out = p.low_rank_columns<T>(first_tile);
  const GatheredColumns<T> rows{static_cast<const T*>(p.embedding), offset};
  const auto ready = [&] {
    previous_launch_done();
    if constexpr (!kGru) {
      if (threadIdx.x < kTiles * kTileColumns) {
        const int64_t b = min(first_tile * kTileColumns + threadIdx.x, p.batch - 1);
        offset[threadIdx.x] = p.token(b, j) * p.inputs;
      }
      __syncthreads();
    }
  };
  const auto store = [&](int tile, int64_t row, int column, float sum) {
    const int64_t b = (first_tile + tile) * kTileColumns + column;
    if (b >= p.batch) return;
    const int64_t n = b * p.corrected() + j - p.prefix;
    const float z = (p.hidden_width > 0 ? p.from_hidden[n * p.rank + row] : 0.0f) + sum;
    const float own = kGru ? 0.0f : to_float(*rows.at(tile, column, row));
    *out.at(tile, column, row) = from_float<T>(low_rank_input(p.kind, z, own));
  };
  const T* w = static_cast<const T*>(p.w1) + p.hidden_width;
  const int64_t stride = p.hidden_width + p.units;
  if constexpr (kGru) {
    project<T, kMma, kTiles>(w, stride, p.rank, p.units, p.state<T>(j, first_tile), ready, store);
  } else {
    const int length = p.kind == LowRank::kRow ? 0 : static_cast<int>(p.units);
    project<T, kMma, kTiles>(w, stride, p.rank, length, rows, ready, store);
  }
}

// S_j = GRU(E[y_j], S_{j-1}), rounded; S_{-1} = 0. Grid: x = units / 8, y = batch / (8 tiles)
template <class T, bool kMma, int kTiles>
__global__ void __launch_bounds__(kHeadThreads, 1)
    chain_state(const __grid_constant__ DraftChainArgs p, int j) {
  __shared__ int64_t offset[kTiles * kTileColumns];
  const int64_t first_tile = static_cast<int64_t>(blockIdx.y) * kTiles;
  const BlockedColumns<T> before = p.state<T>(j + 1, first_tile);  // S_{j-1}
  const BlockedColumns<T> after = p.state<T>(j, first_tile);
  const GatheredColumns<T> x{static_cast<const T*>(p.embedding), offset};
  const auto ready = [&] {
    previous_launch_done();
    if (threadIdx.x < kTiles * kTileColumns) {
      const int64_t b = min(first_tile * kTileColumns + threadIdx.x, p.batch - 1);
      offset[threadIdx.x] = p.token(b, j) * p.inputs;
    }
    __syncthreads();
  };
  const auto store = [&](int tile, int column, int64_t unit, float r, float z, float n_x,
                         float n_s) {
    if ((first_tile + tile) * kTileColumns + column >= p.batch) return;
    const float s = j > 0 ? to_float(*before.at(tile, column, unit)) : 0.0f;
    *after.at(tile, column, unit) = from_float<T>(gru_cell(r, z, n_x, n_s, s));
  };
  gru_tile<T, kMma, kTiles>(static_cast<const T*>(p.w_ih), static_cast<const T*>(p.w_hh), p.inputs,
                            p.units, p.inputs, j > 0 ? p.units : 0, x, before, ready, store);
}

// keys[b, j] = max over v of (base + W2 u, v). Grid: x = vocabulary (looped), y = batch / (8 tiles)
template <class T, class Base, bool kMma, int kTiles>
__global__ void __launch_bounds__(kHeadThreads, 2)
    chain_score(const __grid_constant__ DraftChainArgs p, int j) {
  constexpr int kAhead = kTiles > 1 ? 2 : 4;  // what 128 registers hold
  __shared__ unsigned long long block_best[kHeadWarps][kTiles * kTileColumns];
  const int64_t first_tile = static_cast<int64_t>(blockIdx.y) * kTiles;
  const int64_t first_b = first_tile * kTileColumns;
  const BlockedColumns<T> columns = p.low_rank_columns<T>(first_tile);
  const int g = lane_id() / 4, t = lane_id() % 4;
  const T* w2 = static_cast<const T*>(p.w2);

  bool waiting = true;
  const auto ready = [&] {
    if (waiting) previous_launch_done();
    waiting = false;
  };
  unsigned long long best[kTiles][2] = {};
  const int vocab = static_cast<int>(p.vocab), step = gridDim.x * kHeadWarps * kTileRows;
  for (int64_t v0 = (blockIdx.x * kHeadWarps + warp_id()) * kTileRows; v0 < vocab; v0 += step) {
    const int v[2] = {static_cast<int>(v0) + g, static_cast<int>(v0) + g + 8};
    float base[kTiles][4] = {}, sums[kTiles][4] = {};
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t b = first_b + tile * kTileColumns + 2 * t + i % 2;
        if (b < p.batch && v[i / 2] < vocab)
          base[tile][i] = adjusted_base(p, p.base_row<Base>(b, j), b, v[i / 2]);
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
__global__ void __launch_bounds__(kHeadThreads)
    chain_base(const __grid_constant__ DraftChainArgs p, int prefix) {
  __shared__ unsigned long long block_best[kHeadWarps][1];
  for (int64_t row = blockIdx.y; row < p.batch * prefix; row += gridDim.y) {
    const int64_t b = row / prefix, j = row % prefix;
    const Base* base = p.base_row<Base>(b, j);
    unsigned long long best = 0;
#pragma unroll 4
    for (int64_t v = blockIdx.x * kHeadThreads + threadIdx.x; v < p.vocab;
         v += gridDim.x * kHeadThreads)
      best =
          max(best, static_cast<unsigned long long>(argmax_key(adjusted_base(p, base, b, v), v)));
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
  const int64_t b = i / p.drafts;
  if (i >= p.batch * p.drafts || (p.num_active != nullptr && b >= *p.num_active)) return;
  if (i % p.drafts == 0) p.restarts[b] = 0;
  p.tokens[i] = key_id(p.keys[i]);
  p.scores[i] = key_value(p.keys[i]);
}

}  // namespace domino
