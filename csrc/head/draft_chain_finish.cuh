// draft_chain_finish: the exact chain for rows that two certificates have not settled, with the
// sums and bits of chain_block and a pass over the whole of W2 for every draft. It leaves at once
// where no row is pending.
//
// A cooperative launch over the chip; a draft is three phases with a barrier behind each:
//   state    S_j, 16 units a block
//   u        16 rows of W1s a block
//   score    W2, a share of its rows for each block, all pending rows of the batch at once
// Bytes a draft: W2 once, the base logits of the pending rows, W_hh and W1s; bound by W2's stream.
#pragma once

#include "head/chain_math.cuh"
#include "head/draft_chain_certify.cuh"
#include "head/vocab_sweep.cuh"

namespace domino {

constexpr int kFinishThreads = kStateParts * kWarpSize;
constexpr uint32_t kFinishPatience = 1 << 22;  // cycles at a barrier, about 2 ms
constexpr int kFinishColumns = 64;             // batch rows that are scored together

struct FinishMemory {
  float parts[kStateParts * 3 * 128];  // [warps, gates, lanes, 4]: sums over a warp's k
  unsigned long long best[kFinishColumns];
  int slots[kStateParts];
  bool leave;
};

// All blocks have come here and see what the others wrote; false: one of them does not come.
__device__ __forceinline__ bool grid_barrier(ChainControl* control, uint32_t count,
                                             FinishMemory& memory) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    atomicAdd(&control->arrived, 1u);
    const volatile uint32_t* aborted = &control->aborted;
    const long long since = clock64();
    uint32_t here = 0;
    bool leave = false;
    while (!leave) {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                   : "=r"(here)
                   : "l"(&control->arrived)
                   : "memory");
      if (here >= count) break;
      if (clock64() - since > kFinishPatience) control->aborted = 1;
      leave = *aborted != 0;
    }
    memory.leave = leave;
  }
  __syncthreads();
  return !memory.leave;
}

// 16 rows of w (stride in elements), of 3 gates or 1, times 8 columns of states: this warp's part
// of k to memory.parts. kSteps: MMAs of a warp's part.
template <class T, int kSteps, int kGates>
struct StateProduct {
  uint4 a[kGates][kSteps];

  __device__ __forceinline__ StateProduct(const T* w, int64_t stride, int64_t gate_stride,
                                          int units) {
    const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int k = (warp_id() * kSteps + i) * 16 + 4 * t;
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        const T* row = w + gate * gate_stride + g * stride + k;
        const uint2 low = k < units ? *reinterpret_cast<const uint2*>(row) : uint2{0, 0};
        const uint2 high =
            k < units ? *reinterpret_cast<const uint2*>(row + 8 * stride) : uint2{0, 0};
        a[gate][i] = {low.x, high.x, low.y, high.y};
      }
    }
  }

  // state: of column lane / 4; null: zero
  __device__ __forceinline__ void times(const T* state, int units, FinishMemory& memory) const {
    constexpr bool kApart = kGates == 1;  // u: each MMA by itself (sum_of_steps)
    float sums[kApart ? kSteps : kGates][4] = {};
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int k = (warp_id() * kSteps + i) * 16 + 4 * (lane_id() % 4);
      uint2 s{0, 0};
      if (state && k < units) s = __ldcg(reinterpret_cast<const uint2*>(state + k));
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate)
        mma_16x8x16<T>(sums[kApart ? i : gate], a[gate][i].x, a[gate][i].y, a[gate][i].z,
                       a[gate][i].w, s.x, s.y);
    }
    if constexpr (kApart) {
      for (int element = 0; element < 4; ++element) sums[0][element] = sum_of_steps(sums, element);
    }
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate)
      *reinterpret_cast<float4*>(memory.parts + (warp_id() * kGates + gate) * 128 +
                                 lane_id() * 4) = {sums[gate][0], sums[gate][1], sums[gate][2],
                                                   sums[gate][3]};
    __syncthreads();
  }

  static __device__ __forceinline__ float total(const FinishMemory& memory, int gate, int row,
                                                int column) {
    const int at = (row % 8 * 4 + column / 2) * 4 + row / 8 * 2 + column % 2;
    return sum_of_parts<kGates * 128>(memory.parts + gate * 128 + at);
  }
};

template <class T, int kSteps>
__global__ void __launch_bounds__(kFinishThreads, 1)
    chain_finish(const __grid_constant__ ChainBlockParams p) {
  extern __shared__ uint4 shared[];
  __shared__ FinishMemory memory;
  auto* const stages = reinterpret_cast<typename CertifyRows<T, 1, 0>::Stage*>(shared);
  CertifyTile* const u = reinterpret_cast<CertifyTile*>(stages + kStateParts);
  int* const list = reinterpret_cast<int*>(u + kFinishColumns / kTileColumns);

  previous_launch_done();
  if (p.control->aborted) return;
  const PendingRows<kFinishThreads> pending(p, list, memory.slots);
  if (pending.count == 0) return;
  const int units = static_cast<int>(p.units), rank = static_cast<int>(p.rank);
  const int drafts = static_cast<int>(p.drafts), corrected = static_cast<int>(p.corrected());
  const int vocab = static_cast<int>(p.vocab);
  const ScoreSteps steps(p.rank);
  const int g = lane_id() / 4;
  const T* const w2 = static_cast<const T*>(p.w2);
  T* const states = static_cast<T*>(p.states);
  int begin = drafts;
  for (int i = 0; i < pending.count; ++i) begin = min(begin, p.first[list[i]]);
  const auto pends = [&](int n, int j) { return n < pending.count && p.first[list[n]] <= j; };
  const auto key_at = [&](int64_t b, int j) {
    return reinterpret_cast<unsigned long long*>(p.keys) + b * drafts + j;
  };
  if (blockIdx.x == 0)
    for (int i = threadIdx.x; i < pending.count * drafts; i += kFinishThreads) {
      const int b = list[i / drafts], j = i % drafts;
      if (j >= p.first[b]) *key_at(b, j) = 0;
    }

  uint32_t barriers = 0;
  bool together = true;
  for (int j = begin; j < drafts && together; ++j) {
    // S_j, a tile of 16 units a block
    for (int tile = blockIdx.x; tile < units / 16; tile += gridDim.x) {
      const StateProduct<T, kSteps, 3> product(
          static_cast<const T*>(p.w_hh) + static_cast<int64_t>(tile) * 16 * units, units,
          static_cast<int64_t>(units) * units, units);
      for (int first = 0; first < pending.count; first += kTileColumns) {
        const bool column = pends(first + g, j);
        const int row = threadIdx.x % 16, n = first + threadIdx.x / 16;
        const bool mine = threadIdx.x < 16 * kTileColumns && pends(n, j);
        const auto token = [&](int n) {
          return clamp_id(key_id(__ldcg(key_at(list[n], j - 1))), p.vocab);
        };
        float x[3] = {};
        if (p.table == nullptr) {
          input_product<T, 1>(p, memory.parts, column ? token(first + g) : 0, tile * 16);
          __syncthreads();
          for (int gate = 0; mine && gate < 3; ++gate)
            x[gate] = product.total(memory, gate, row, n - first);
          __syncthreads();
        } else if (mine) {
          const T* from =
              static_cast<const T*>(p.table) + (token(n) * (units / 16) + tile) * 48 + row;
          for (int gate = 0; gate < 3; ++gate) x[gate] = to_float(from[gate * 16]);
        }
        product.times(
            column ? states + (static_cast<int64_t>(list[first + g]) * drafts + j - 1) * units
                   : nullptr,
            units, memory);
        if (mine) {
          const int64_t at = (static_cast<int64_t>(list[n]) * drafts + j) * units + tile * 16 + row;
          T before;
          before.bits = __ldcg(&states[at - units].bits);
          states[at] = gru_unit<T>(x[0], x[1], x[2], product.total(memory, 0, row, n - first),
                                   product.total(memory, 1, row, n - first),
                                   product.total(memory, 2, row, n - first), to_float(before));
        }
        __syncthreads();
      }
    }
    together = grid_barrier(p.control, ++barriers * gridDim.x, memory);

    // u, a tile of 16 rows of W1s a block
    for (int tile = blockIdx.x; together && tile < rank / 16; tile += gridDim.x) {
      const int64_t stride = p.hidden_width + p.units;
      const StateProduct<T, kSteps, 1> product(
          static_cast<const T*>(p.w1) + p.hidden_width + tile * 16 * stride, stride, 0, units);
      for (int first = 0; first < pending.count; first += kTileColumns) {
        const bool column = pends(first + g, j);
        product.times(column ? states + (static_cast<int64_t>(list[first + g]) * drafts + j) * units
                             : nullptr,
                      units, memory);
        const int row = threadIdx.x % 16, n = first + threadIdx.x / 16;
        if (threadIdx.x < 16 * kTileColumns && pends(n, j)) {
          const int64_t at =
              (static_cast<int64_t>(list[n]) * corrected + j - p.prefix) * rank + tile * 16 + row;
          const float mixed = p.from_hidden[at] + product.total(memory, 0, row, n - first);
          static_cast<T*>(p.low_rank)[at] = from_float<T>(chain_low_rank_input(p.kind, mixed));
        }
        __syncthreads();
      }
    }
    together = together && grid_barrier(p.control, ++barriers * gridDim.x, memory);

    // y_{j+1}: this block's share of W2, 16 rows a warp at a time
    for (int first = 0; together && first < pending.count; first += kFinishColumns) {
      const int here = min(pending.count - first, kFinishColumns);
      const int tiles = ceil_div(here, kTileColumns);
      if (threadIdx.x < kFinishColumns) memory.best[threadIdx.x] = 0;
      fill_columns(u, tiles, steps, [&](int column) -> const T* {
        const int n = first + column;
        if (!pends(n, j)) return nullptr;
        const int64_t row = static_cast<int64_t>(list[n]) * corrected + j - p.prefix;
        return static_cast<const T*>(p.low_rank) + row * rank;
      });
      copy_async_wait<0>();
      __syncthreads();
      sweep_vocabulary<kStateParts>(w2, vocab, 0, steps, u, tiles, stages[warp_id()], memory.best,
                                    [&](int column, int v) {
                                      const int n = first + column;
                                      if (!pends(n, j)) return -INFINITY;
                                      return base_at(p, list[n], j, v);
                                    });
      __syncthreads();
      const int n = first + static_cast<int>(threadIdx.x);
      if (threadIdx.x < here && pends(n, j) && memory.best[threadIdx.x] != 0)
        atomicMax(key_at(list[n], j), memory.best[threadIdx.x]);
      __syncthreads();
    }
    together = together && grid_barrier(p.control, ++barriers * gridDim.x, memory);
  }

  // The last block to leave writes the ids and puts the control words back.
  if (threadIdx.x == 0) memory.leave = atomicAdd(&p.control->left, 1u) == gridDim.x - 1;
  __syncthreads();
  if (!memory.leave) return;
  for (int i = threadIdx.x; together && i < pending.count * drafts; i += kFinishThreads) {
    const int64_t b = list[i / drafts];
    const int j = i % drafts;
    if (j < p.first[b]) continue;
    const unsigned long long key = __ldcg(key_at(b, j));
    p.tokens[b * drafts + j] = key_id(key);
    p.scores[b * drafts + j] = key_value(key);
  }
  __syncthreads();
  for (int i = threadIdx.x; together && i < pending.count; i += kFinishThreads)
    p.first[list[i]] = drafts;
  if (threadIdx.x == 0) p.control->left = p.control->arrived = 0;
}

}  // namespace domino
