// draft_chain, the second form of the block: one thread block a batch row, nobody waits for
// anybody.
//
// It does the whole draft of a row, on its pools or (exact) over the whole vocabulary, with the
// sums and bits of chain_block, slowly: about 0.1 ms an id on pools and 0.8 ms over 152k ids. It
// runs where chain_block's blocks cannot all be resident, and behind every chain_block that has
// given up (control->aborted): in a launch of its own, which else leaves at once, or for exact
// drafts as a part of chain_finish.
#pragma once

#include "head/chain_layout.cuh"
#include "head/draft_draw.h"

namespace domino {

constexpr int kRescueThreads = kStateParts * kWarpSize;

struct RescueMemory {
  float parts[256 * (kStateParts + 4)];  // [rows of a chunk, warps + 4]
  float totals[3 * 1024];                // W_hh S of the step before
  float inputs[3 * 1024];                // W_ih E[y], without a table
  alignas(16) uint16_t state[1024];      // T: S_j
  alignas(16) uint16_t low_rank[kMaxRank];
  unsigned long long best[kStateParts];
};

// Up to 256 rows of w (stride in elements) times the state: the sums over this warp's part of k, in
// one chain of MMAs as the gates have them, or each by itself (kApart) as u has them.
template <class T, int kSteps, bool kApart>
__device__ __forceinline__ void partial_rows(RescueMemory& memory, const T* w, int64_t stride,
                                             int rows, int units) {
  const int warp = threadIdx.x / kWarpSize, g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
  for (int tile = 0; tile * 16 < rows; ++tile) {
    float sums[kSteps][4] = {};
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int k = (warp * kSteps + i) * 16 + 4 * t;
      if (k >= units) continue;  // the same for the whole warp: units is a multiple of 16
      const uint2 low = *reinterpret_cast<const uint2*>(w + (tile * 16 + g) * stride + k);
      const uint2 high = *reinterpret_cast<const uint2*>(w + (tile * 16 + g + 8) * stride + k);
      const uint2 x = *reinterpret_cast<const uint2*>(memory.state + k);
      mma_16x8x16<T>(sums[kApart ? i : 0], low.x, high.x, low.y, high.y, x.x, x.y);
    }
    if (t == 0) {
      memory.parts[(tile * 16 + g) * (kStateParts + 4) + warp] =
          kApart ? sum_of_steps(sums, 0) : sums[0][0];
      memory.parts[(tile * 16 + g + 8) * (kStateParts + 4) + warp] =
          kApart ? sum_of_steps(sums, 2) : sums[0][2];
    }
  }
}

// The same for W_ih times E[y], as input_product has it: rows [first, first + rows).
template <class T>
__device__ __forceinline__ void partial_inputs(RescueMemory& memory, const ChainBlockParams& p,
                                               int64_t y, int first, int rows) {
  const int warp = threadIdx.x / kWarpSize, g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
  const int inputs = static_cast<int>(p.inputs);
  const T* const x = static_cast<const T*>(p.embedding) + y * inputs;
  const T* const w = static_cast<const T*>(p.w_ih) + static_cast<int64_t>(first + g) * inputs;
  for (int tile = 0; tile * 16 < rows; ++tile) {
    float sums[4] = {};
    for (int part = warp * 32; part < inputs; part += kStateParts * 32) {
      const int k = part + t * 8;
      const uint4 column = by_sixteens(load_where(k < inputs, x + k));
      const uint4 low = by_sixteens(load_where(k < inputs, w + tile * 16 * inputs + k));
      const uint4 high = by_sixteens(load_where(k < inputs, w + (tile * 16 + 8) * inputs + k));
      mma_16x8x16<T>(sums, low.x, high.x, low.y, high.y, column.x, column.y);
      mma_16x8x16<T>(sums, low.z, high.z, low.w, high.w, column.z, column.w);
    }
    if (t == 0) {
      memory.parts[(tile * 16 + g) * (kStateParts + 4) + warp] = sums[0];
      memory.parts[(tile * 16 + g + 8) * (kStateParts + 4) + warp] = sums[2];
    }
  }
}

// Row b, by a block of kRescueThreads. Not inlined: its registers are nobody else's.
template <class T, int kSteps>
__device__ __noinline__ void rescue_row(const ChainBlockParams& p, RescueMemory& memory,
                                        int64_t b) {
  if (p.num_active != nullptr && b >= *p.num_active) return;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int g = lane / 4, t = lane % 4;
  const int units = static_cast<int>(p.units), rank = static_cast<int>(p.rank);
  const bool drawn = p.temperature != nullptr && p.temperature[b] > 0.0f;
  for (int i = threadIdx.x; i < 3 * units; i += kRescueThreads) memory.totals[i] = 0.0f;
  for (int i = threadIdx.x; i < 1024; i += kRescueThreads) memory.state[i] = 0;
  if (threadIdx.x == 0 && p.restarts) p.restarts[b] = 0;
  int64_t y = clamp_id(p.anchor[b], p.vocab);
  __syncthreads();

  for (int j = 0; j < p.drafts; ++j) {
    const bool corrects = j >= p.prefix;
    if (p.table == nullptr) {
      for (int first = 0; first < 3 * units; first += 256) {
        const int rows = min(256, 3 * units - first);
        partial_inputs<T>(memory, p, y, first, rows);
        __syncthreads();
        if (threadIdx.x < rows)
          memory.inputs[first + threadIdx.x] =
              sum_of_parts<1>(memory.parts + threadIdx.x * (kStateParts + 4));
        __syncthreads();
      }
    }
    for (int unit = threadIdx.x; unit < units; unit += kRescueThreads) {
      float x[3];
      for (int gate = 0; gate < 3; ++gate)
        x[gate] = p.table == nullptr
                      ? memory.inputs[gate * units + unit]
                      : to_float(static_cast<const T*>(
                            p.table)[(y * (units / 16) + unit / 16) * 48 + gate * 16 + unit % 16]);
      T before;
      before.bits = memory.state[unit];
      memory.state[unit] =
          gru_unit<T>(x[0], x[1], x[2], memory.totals[unit], memory.totals[units + unit],
                      memory.totals[2 * units + unit], to_float(before))
              .bits;
    }
    __syncthreads();
    if (corrects) {
      partial_rows<T, kSteps, true>(memory, static_cast<const T*>(p.w1) + p.hidden_width,
                                    p.hidden_width + units, rank, units);
      __syncthreads();
      if (threadIdx.x < rank) {
        const int64_t n = b * p.corrected() + j - p.prefix;
        const float mixed = p.from_hidden[n * rank + threadIdx.x] +
                            sum_of_parts<1>(memory.parts + threadIdx.x * (kStateParts + 4));
        memory.low_rank[threadIdx.x] = from_float<T>(chain_low_rank_input(p.kind, mixed)).bits;
      }
      __syncthreads();
    }
    if (j + 1 < p.drafts) {
      for (int first = 0; first < 3 * units; first += 256) {
        const int rows = min(256, 3 * units - first);
        partial_rows<T, kSteps, false>(
            memory, static_cast<const T*>(p.w_hh) + static_cast<int64_t>(first) * units, units,
            rows, units);
        __syncthreads();
        if (threadIdx.x < rows)
          memory.totals[first + threadIdx.x] =
              sum_of_parts<1>(memory.parts + threadIdx.x * (kStateParts + 4));
        __syncthreads();
      }
    }

    unsigned long long best = 0;
    if (corrects || p.temperature != nullptr) {
      const int64_t pool = (b * p.pools + (p.pools > 1 ? j : 0)) * p.pool_size;
      const int64_t count = p.exact ? p.vocab_valid : p.pool_size;
      DraftDraw draw{};
      if (drawn) draw = {{p.seed[b], p.block_start[b]}, 1.0f / p.temperature[b], j};
      for (int64_t first = warp * 16; first < count; first += kStateParts * 16) {
        const auto id_at = [&](int64_t m) -> int64_t {
          return m >= count ? -1 : p.exact ? m : p.pool[pool + m];
        };
        const auto row_at = [&](int64_t m) {
          return static_cast<const char*>(p.w2) + max(id_at(m), int64_t{0}) * rank * 2 + t * 8;
        };
        float sums[4][4] = {};
        if (corrects)
          score_tile<T, 0>(sums, row_at(first + g), row_at(first + g + 8),
                           reinterpret_cast<const char*>(memory.low_rank) + t * 8, rank / 16);
        const int64_t m = first + 8 * t + g, id = t < 2 ? id_at(m) : -1;
        const float delta = t == 0 ? chain_sum(sums, 0) : chain_sum(sums, 2);
        if (t > 1 || m >= count) continue;
        const float score =
            id < 0 ? -INFINITY : base_at(p, b, j, static_cast<uint32_t>(id)) + delta;
        if (id >= 0) {
          const uint32_t v = static_cast<uint32_t>(id);
          const float order = drawn ? draw.order(score, draw.bonus(v)) : score;
          best = max(best, static_cast<unsigned long long>(argmax_key(order, v)));
        }
        if (p.temperature != nullptr) {
          const int64_t to = (b * p.drafts + j) * p.pool_size + m;
          p.pool_ids[to] = static_cast<int32_t>(id);
          p.pool_logits[to] = score;
        }
      }
      best = warp_best(best);
      if (lane == 0) memory.best[warp] = best;
      __syncthreads();
      for (int i = 0; i < kStateParts; ++i) best = max(best, memory.best[i]);
      __syncthreads();
    } else {
      best = p.keys[b * p.drafts + j];
    }
    y = clamp_id(key_id(best), p.vocab);
    if (threadIdx.x == 0) {
      p.tokens[b * p.drafts + j] = y;
      p.scores[b * p.drafts + j] = key_value(best);
    }
  }
}

template <class T, int kSteps>
__global__ void __launch_bounds__(kRescueThreads, 1)
    chain_rescue(const __grid_constant__ ChainBlockArgs p) {
  __shared__ RescueMemory memory;
  previous_launch_done();
  if (!p.always && p.control->aborted == 0) return;
  if (threadIdx.x < kRounds) p.first_of(threadIdx.x)[blockIdx.x] = p.row_done();
  rescue_row<T, kSteps>(p, memory, blockIdx.x);
}

}  // namespace domino
