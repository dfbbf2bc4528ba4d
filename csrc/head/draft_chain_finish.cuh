// draft_chain_finish: the exact chain for rows that two certificates have not settled, and for all
// rows where the first one was cut, with the sums and bits of chain_block and a pass over the whole
// of W2 for every draft; and all rows where the launches in front have given up
// (draft_chain_rescue.cuh). It leaves at once where no row is
// pending.
//
// A cooperative launch over the chip; a draft is three phases with a barrier behind each (draft
// `prefix`, whose u is there, the last one alone):
//   state    S_j, 16 units a block
//   u        16 rows of W1s a block
//   score    W2, a share of its rows for each block, all pending rows of the batch at once
// Bytes a draft: W2 once, the base logits of the pending rows, W_hh and W1s; bound by W2's stream.
#pragma once

#include "head/chain_math.cuh"
#include "head/chain_pool.h"
#include "head/draft_chain_certify.cuh"
#include "head/draft_chain_rescue.cuh"
#include "head/vocab_sweep.cuh"

namespace domino {

constexpr int kFinishThreads = kRescueThreads;
constexpr uint32_t kFinishPatience = 1 << 22;  // cycles at a barrier, about 2 ms
constexpr uint32_t kFinishAborts = 2;          // control->aborted by this launch: others set 1
constexpr int kStateTiles = 2;                 // eights of rows whose products are made together

// Bytes of a block's parts of sums, f32 [warps, tiles, gates, lanes, 4]: where the base logits of
// its sweep come later.
constexpr int64_t kFinishParts = kStateParts * kStateTiles * 3 * 128 * sizeof(float);

// All blocks have come here and see what the others wrote; false: one of them does not come. Not
// kBounded: no second form stands in for this one, and it waits as cooperative launches may.
template <bool kBounded>
__device__ __forceinline__ bool grid_barrier(ChainControl* control, uint32_t count) {
  __shared__ bool leave;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(&control->arrived, 1u);
    const volatile uint32_t* aborted = &control->aborted;
    const long long since = clock64();
    uint32_t here = 0;
    bool gives_up = false;
    while (!gives_up) {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                   : "=r"(here)
                   : "l"(&control->arrived)
                   : "memory");
      if (here >= count) break;
      if (kBounded && clock64() - since > kFinishPatience) control->aborted = kFinishAborts;
      gives_up = kBounded && *aborted != 0;
    }
    leave = gives_up;
  }
  __syncthreads();
  return !leave;
}

__device__ __forceinline__ bool in_pool(const ChainBlockParams& p, int64_t b, int j, int id) {
  const int32_t* const pool = p.pool + (b * p.pools + (p.pools > 1 ? j : 0)) * p.pool_size;
  const int64_t first = PoolGroups(p.pool_size).group_of(id) * kGroupBest;
  bool found = false;
  for (int64_t m = first; m < min(first + kGroupBest, p.pool_size); ++m) found |= pool[m] == id;
  return found;
}

// 16 rows of w (stride in elements), of 3 gates or 1, times kTiles eights of states: this warp's
// part of k. kSteps: MMAs of a warp's part.
template <class T, int kSteps, int kGates, int kTiles>
struct StateProduct {
  uint4 a[kGates][kSteps];
  uint2 x[kTiles][kSteps];

  __device__ __forceinline__ static int k(int step) {
    return (warp_id() * kSteps + step) * 16 + lane_id() % 4 * 4;
  }

  __device__ __forceinline__ void load_weights(const T* w, int64_t stride, int64_t gate_stride,
                                               int units) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        const T* row = w + gate * gate_stride + lane_id() / 4 * stride + k(i);
        const uint2 low = k(i) < units ? *reinterpret_cast<const uint2*>(row) : uint2{0, 0};
        const uint2 high =
            k(i) < units ? *reinterpret_cast<const uint2*>(row + 8 * stride) : uint2{0, 0};
        a[gate][i] = {low.x, high.x, low.y, high.y};
      }
  }

  // state: of column lane / 4 of a tile; null: zero
  __device__ __forceinline__ void load_states(int tile, const T* state, int units) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      x[tile][i] = state && k(i) < units ? __ldcg(reinterpret_cast<const uint2*>(state + k(i)))
                                         : uint2{0, 0};
  }

  // To parts. All threads call.
  __device__ __forceinline__ void multiply(float* parts) const {
    constexpr bool kApart = kGates == 1;  // u: each MMA by itself (sum_of_steps)
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float sums[kApart ? kSteps : kGates][4] = {};
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
#pragma unroll
        for (int gate = 0; gate < kGates; ++gate)
          mma_16x8x16<T>(sums[kApart ? i : gate], a[gate][i].x, a[gate][i].y, a[gate][i].z,
                         a[gate][i].w, x[tile][i].x, x[tile][i].y);
      if constexpr (kApart) {
        for (int element = 0; element < 4; ++element)
          sums[0][element] = sum_of_steps(sums, element);
      }
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate)
        *reinterpret_cast<float4*>(parts + ((warp_id() * kTiles + tile) * kGates + gate) * 128 +
                                   lane_id() * 4) = {sums[gate][0], sums[gate][1], sums[gate][2],
                                                     sums[gate][3]};
    }
    __syncthreads();
  }

  // column: of all tiles
  static __device__ __forceinline__ float total(const float* parts, int gate, int row, int column) {
    const int at = (row % 8 * 4 + column % 8 / 2) * 4 + row / 8 * 2 + column % 2;
    return sum_of_parts<kTiles * kGates * 128>(parts + (column / 8 * kGates + gate) * 128 + at);
  }
};

// kRank: the rank where it is known, or 0. kGru: without one S_j is the row of y_j, and u where
// there is no gate. sweep_warps: that have a stage. raw: base logits are (vocab_sweep.cuh).
template <class T, int kSteps, int kRank, bool kGru>
__global__ void __launch_bounds__(kFinishThreads, 1)
    chain_finish(const __grid_constant__ ChainBlockParams p, int sweep_warps, bool raw) {
  extern __shared__ uint4 shared[];
  __shared__ int slots[kStateParts];
  __shared__ bool last;
  using Sweep = VocabSweep<T, kRank>;
  auto* const stages = reinterpret_cast<typename Sweep::Stage*>(shared);
  SweepColumns& columns = *reinterpret_cast<SweepColumns*>(stages + sweep_warps);
  auto* const bases = reinterpret_cast<typename Sweep::Base*>(&columns + 1);
  float* const parts = reinterpret_cast<float*>(bases);
  int* const list =
      reinterpret_cast<int*>(reinterpret_cast<char*>(bases) +
                             max(sweep_warps * static_cast<int64_t>(sizeof(*bases)), kFinishParts));
  int* const starts = list + p.batch;  // of the rows of the list

  previous_launch_done();
  const auto aborted = [&] {
    return static_cast<int>(*reinterpret_cast<const volatile uint32_t*>(&p.control->aborted));
  };
  RescueMemory& of_rescue = *reinterpret_cast<RescueMemory*>(shared);
  const int before = kGru ? aborted() : 0;  // on its way with what says which rows are pending
  constexpr int kRound = 2;
  bool any = false;  // mostly none: one look and one barrier
  for (int64_t b = threadIdx.x; b < p.batch; b += kFinishThreads)
    any |= p.first_of(kRound)[b] < p.row_done();
  if (!__syncthreads_or(any || before != 0)) return;
  const PendingRows<kFinishThreads> pending(p, kRound, list, slots);
  if (kGru && __syncthreads_or(before == 1)) {  // in every block alike
    for (int64_t b = blockIdx.x; b < p.batch; b += gridDim.x) {
      rescue_row<T, kSteps>(p, of_rescue, b);
      __syncthreads();
    }
    return;
  }
  if (pending.count == 0) return;
  // Blocks of this launch have waited in vain for this one: it takes no step, but is counted among
  // those that leave.
  bool together = !__syncthreads_or(before != 0);
  int sweeps = 0;                      // one forward, one backward
  const auto sweep = [&]() -> Sweep {  // made anew where it is used: registers are short
    return {static_cast<const T*>(p.w2),
            p.vocab,
            p.vocab_valid,
            p.rank,
            raw,
            sweeps % 2 == 0,
            sweep_warps,
            stages,
            bases};
  };
  sweep().start();
  const int units = static_cast<int>(p.units), rank = static_cast<int>(p.rank);
  const int drafts = static_cast<int>(p.drafts), corrected = static_cast<int>(p.corrected());
  const int g = lane_id() / 4;
  T* const states = static_cast<T*>(p.states);
  for (int n = threadIdx.x; n < pending.count; n += kFinishThreads) {
    starts[n] = min(p.first_of(kRound)[list[n]], drafts);
    if (blockIdx.x == 0 && starts[n] > p.prefix) take_restart(p, kRound, list[n]);
  }
  __syncthreads();
  int begin = drafts;
  for (int n = 0; n < pending.count; ++n) begin = min(begin, starts[n]);
  const auto pends = [&](int n, int j) { return n < pending.count && starts[n] <= j; };
  const auto key_at = [&](int n, int j) {
    return reinterpret_cast<unsigned long long*>(p.keys) + static_cast<int64_t>(list[n]) * drafts +
           j;
  };
  const auto state_at = [&](int n, int j) {
    return states + (static_cast<int64_t>(list[n]) * drafts + j) * units;
  };
  const auto low_rank_at = [&](int n, int j) {
    return (static_cast<int64_t>(list[n]) * corrected + j - p.prefix) * rank;
  };
  if (blockIdx.x == 0)
    for (int i = threadIdx.x; i < pending.count * drafts; i += kFinishThreads)
      if (pends(i / drafts, i % drafts)) *key_at(i / drafts, i % drafts) = 0;

  // Of a turn in either phase: 16 units and 32 rows of the batch, 16 rows of W1s and 8 of the
  // batch. The weights of a block's first turn are on their way while it waits at the barrier in
  // front.
  constexpr int kRows = kFinishThreads / 16, kTurnRows = kStateTiles * kTileColumns;
  const int state_turns = kGru ? units / 16 * ceil_div(pending.count, kRows) : 0;
  const int low_turns =
      kGru || p.w1 != nullptr ? rank / 16 * ceil_div(pending.count, kTileColumns) : 0;
  StateProduct<T, kSteps, 3, kStateTiles> product;
  StateProduct<T, kSteps, 1, 1> low_product;
  const auto load_weights = [&](int turn) {
    product.load_weights(
        static_cast<const T*>(p.w_hh) + static_cast<int64_t>(turn % (units / 16)) * 16 * units,
        units, static_cast<int64_t>(units) * units, units);
  };
  const auto load_low_weights = [&](int turn) {
    if (!kGru && p.w1 == nullptr) return;
    const int64_t stride = p.hidden_width + p.units;
    low_product.load_weights(
        static_cast<const T*>(p.w1) + p.hidden_width + turn % (rank / 16) * 16 * stride, stride, 0,
        units);
  };
  uint32_t barriers = 0;
  const auto barrier = [&] {
    return together && grid_barrier<kGru>(p.control, ++barriers * gridDim.x);
  };
  const int row = threadIdx.x % 16, column = threadIdx.x / 16;
  for (int j = begin; j < drafts && together; ++j) {
    // S_j
    if constexpr (!kGru) {
      const int pieces = rank / 8;
      for (int i = blockIdx.x * kFinishThreads + threadIdx.x; i < pending.count * pieces;
           i += gridDim.x * kFinishThreads) {
        const int n = i / pieces, k = i % pieces * 8;
        if (!pends(n, j)) continue;
        const int64_t y = clamp_id(key_id(__ldcg(key_at(n, j - 1))), p.vocab);
        T* const to =
            p.w1 != nullptr ? state_at(n, j) : static_cast<T*>(p.low_rank) + low_rank_at(n, j);
        *reinterpret_cast<uint4*>(to + k) =
            *reinterpret_cast<const uint4*>(static_cast<const T*>(p.embedding) + y * rank + k);
      }
    }
    for (int turn = blockIdx.x; j > p.prefix && turn < state_turns; turn += gridDim.x) {
      const int tile = turn % (units / 16), first = turn / (units / 16) * kRows, n = first + column;
      const bool mine = pends(n, j);
      const auto token = [&](int n) { return clamp_id(key_id(__ldcg(key_at(n, j - 1))), p.vocab); };
      float x[3] = {};
      T before{};
      if (mine) before.bits = __ldcg(&state_at(n, j - 1)[tile * 16 + row].bits);
      if (mine && p.table != nullptr) {
        const T* from = static_cast<const T*>(p.table) + (token(n) * (units / 16) + tile) * 48;
        for (int gate = 0; gate < 3; ++gate) x[gate] = to_float(from[gate * 16 + row]);
      }
      if (p.table == nullptr) {
        for (int eight = 0; eight < kRows && first + eight < pending.count; eight += kTileColumns) {
          const bool real = pends(first + eight + g, j);
          input_product<T, 1>(p, parts, real ? token(first + eight + g) : 0, tile * 16);
          __syncthreads();
          for (int gate = 0; mine && column / 8 == eight / 8 && gate < 3; ++gate)
            x[gate] = StateProduct<T, kSteps, 3, 1>::total(parts, gate, row, column % 8);
          __syncthreads();
        }
      }
      load_weights(turn);
      for (int some = 0; some < kRows && first + some < pending.count; some += kTurnRows) {
#pragma unroll
        for (int eight = 0; eight < kStateTiles; ++eight) {
          const int of = first + some + eight * kTileColumns + g;
          product.load_states(eight, pends(of, j) ? state_at(of, j - 1) : nullptr, units);
        }
        product.multiply(parts);
        if (mine && column / kTurnRows == some / kTurnRows) {
          const auto total = [&](int gate) {
            return product.total(parts, gate, row, column % kTurnRows);
          };
          state_at(n, j)[tile * 16 + row] =
              gru_unit<T>(x[0], x[1], x[2], total(0), total(1), total(2), to_float(before));
        }
        __syncthreads();
      }
    }
    load_low_weights(blockIdx.x);
    together = barrier();

    // u
    for (int turn = blockIdx.x; j > p.prefix && together && turn < low_turns; turn += gridDim.x) {
      const int tile = turn % (rank / 16), first = turn / (rank / 16) * kTileColumns;
      if (turn != blockIdx.x) load_low_weights(turn);
      low_product.load_states(0, pends(first + g, j) ? state_at(first + g, j) : nullptr, units);
      const int n = first + column;
      const bool mine = column < kTileColumns && pends(n, j);
      const int64_t at = mine ? low_rank_at(n, j) + tile * 16 + row : 0;
      const float from_hidden = mine ? p.from_hidden[at] : 0.0f;
      low_product.multiply(parts);
      if (mine) {
        const float mixed = from_hidden + low_product.total(parts, 0, row, column);
        T own{};
        if (!kGru) own.bits = __ldcg(&state_at(n, j)[tile * 16 + row].bits);
        static_cast<T*>(p.low_rank)[at] = from_float<T>(kGru ? chain_low_rank_input(p.kind, mixed)
                                                             : chain_gate(mixed, to_float(own)));
      }
      __syncthreads();
    }
    together = barrier();

    // y_{j+1}: this block's share of W2
    for (int first = 0; together && first < pending.count; first += kSweepColumns) {
      const int here = min(pending.count - first, kSweepColumns);
      const int tiles = ceil_div(here, kTileColumns);
      if (threadIdx.x < kSweepColumns) {
        const int n = first + static_cast<int>(threadIdx.x);
        const bool real = threadIdx.x < here && pends(n, j);
        columns.best[threadIdx.x] = real ? 0 : SweepColumns::kTaken;
        columns.base[threadIdx.x] = real ? static_cast<const T*>(p.base_logits) +
                                               list[n] * p.base_batch_stride +
                                               (p.first_slot + j) * p.base_slot_stride
                                         : nullptr;
      }
      fill_columns(columns.u, tiles, ScoreSteps(rank), [&](int column) -> const T* {
        const int n = first + column;
        return pends(n, j) && column < here ? static_cast<const T*>(p.low_rank) + low_rank_at(n, j)
                                            : nullptr;
      });
      copy_async_wait<0>();
      __syncthreads();
      sweep().run(columns, tiles, 0, [&](int column, int v) {
        const int n = first + column;
        return pends(n, j) ? base_at(p, list[n], j, v) : -INFINITY;
      });
      ++sweeps;
      sweep().start();  // of the next columns or draft
      __syncthreads();
      if (threadIdx.x < here) {
        const unsigned long long best = columns.best[threadIdx.x];
        if (best != 0 && best < SweepColumns::kTaken)
          atomicMax(key_at(first + threadIdx.x, j), best);
      }
      __syncthreads();
    }
    together = barrier();
  }
  copy_async_wait<0>();

  // The last block to leave writes the ids and puts the control words back. Where blocks have given
  // up it drafts the pending rows by itself: no other block writes any more.
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(&p.control->left, 1u) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
  for (int i = threadIdx.x; together && i < pending.count * drafts; i += kFinishThreads) {
    const int n = i / drafts, j = i % drafts;
    if (!pends(n, j)) continue;
    const unsigned long long key = __ldcg(key_at(n, j));
    const int64_t at = static_cast<int64_t>(list[n]) * drafts + j;
    p.tokens[at] = key_id(key);
    p.scores[at] = key_value(key);
    // A row that left out round 1 would have started again behind a winner that its pool lacks.
    if (p.restarts && p.first_of(1)[list[n]] == p.row_done() &&
        !in_pool(p, list[n], j, static_cast<int>(key_id(key))))
      atomicAdd(p.restarts + list[n], 1);
  }
  __syncthreads();  // this block alone counts them
  for (int n = threadIdx.x; together && p.restarts && n < pending.count; n += kFinishThreads)
    atomicMin(p.restarts + list[n], 2);
  if (threadIdx.x == 0) p.control->left = p.control->arrived = 0;
  if constexpr (kGru) {
    if (!__syncthreads_or(aborted() != 0)) return;
    for (int n = 0; n < pending.count; ++n) {
      const int64_t b = list[n];
      rescue_row<T, kSteps>(p, of_rescue, b);
      __syncthreads();
    }
  }
}

}  // namespace domino
