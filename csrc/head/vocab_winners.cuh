// vocab_winners: contract in vocab_winners.h. The grid shares the rows of W2; a block goes through
// the columns 64 at a time. Bytes: base logits once, W2 once for 64 columns; bound by these
// streams.
#pragma once

#include "head/vocab_sweep.cuh"
#include "head/vocab_winners.h"

namespace domino {

constexpr int kWinnersWarps = 16;

__device__ __forceinline__ float element(const void* data, DType dtype, int64_t at) {
  if (dtype == DType::kF32) return static_cast<const float*>(data)[at];
  if (dtype == DType::kF16) return to_float(static_cast<const f16*>(data)[at]);
  return to_float(static_cast<const bf16*>(data)[at]);
}

// keys start at zero: the signed form of a key is that of the unsigned with the top bit flipped, so
// the blocks meet in a signed maximum over memory that vocab_winners_start has set to the least.
// warps: that have a stage. raw: base logits are (vocab_sweep.cuh).
template <class T>
__global__ void __launch_bounds__(kWinnersWarps* kWarpSize, 1)
    vocab_winners(const __grid_constant__ VocabWinnersParams p, int warps, bool raw) {
  extern __shared__ uint4 shared[];
  using Sweep = VocabSweep<T, 0>;
  auto* const stages = reinterpret_cast<typename Sweep::Stage*>(shared);
  auto* const bases = reinterpret_cast<typename Sweep::Base*>(stages + warps);
  SweepColumns& columns = *reinterpret_cast<SweepColumns*>(bases + warps);
  const int64_t active = p.num_active ? min(static_cast<int64_t>(*p.num_active), p.batch) : p.batch;
  const int64_t count = active * p.slots;
  const Sweep sweep(static_cast<const T*>(p.w2), p.vocab, p.vocab_valid, p.rank, raw, false, warps,
                    stages, bases);
  const auto base_begin = [&](int64_t n) {
    return n / p.slots * p.base_batch_stride + n % p.slots * p.base_slot_stride;
  };
  for (int64_t first = 0; first < count; first += kSweepColumns) {
    const int here = static_cast<int>(min(count - first, static_cast<int64_t>(kSweepColumns)));
    const int tiles = ceil_div(here, kTileColumns);
    sweep.start();
    if (threadIdx.x < kSweepColumns) {
      const bool real = threadIdx.x < here;
      columns.best[threadIdx.x] = real ? 0 : SweepColumns::kTaken;
      columns.base[threadIdx.x] =
          real ? static_cast<const T*>(p.base_logits) + base_begin(first + threadIdx.x) : nullptr;
    }
    fill_columns(columns.u, tiles, sweep.steps, [&](int column) -> const T* {
      if (column >= here || !p.low_rank) return nullptr;
      const int64_t n = first + column;
      return static_cast<const T*>(p.low_rank) + n / p.slots * p.low_rank_batch_stride +
             n % p.slots * p.low_rank_slot_stride;
    });
    copy_async_wait<0>();
    __syncthreads();
    sweep.run(columns, tiles, static_cast<uint32_t>(p.first_id), [&](int column, int v) {
      if (column >= here) return -INFINITY;
      const int64_t n = first + column, b = n / p.slots;
      float value = element(p.base_logits, p.base_dtype, base_begin(n) + v);
      if (p.bias) value += p.bias[b * p.bias_stride + v];
      const bool masked = p.mask && (p.mask[b * p.mask_stride + v / 32] >> (v % 32) & 1) == 0;
      return v >= p.vocab_valid || masked ? -INFINITY : value;
    });
    __syncthreads();
    if (threadIdx.x < here && columns.best[threadIdx.x] != 0)
      atomicMax(reinterpret_cast<long long*>(p.keys) + first + threadIdx.x,
                static_cast<long long>(columns.best[threadIdx.x] ^ kTopBit));
    __syncthreads();
  }
}

__global__ void vocab_winners_start(const __grid_constant__ VocabWinnersParams p) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t active = p.num_active ? min(static_cast<int64_t>(*p.num_active), p.batch) : p.batch;
  if (n < active * p.slots) p.keys[n] = static_cast<int64_t>(kTopBit);
}

}  // namespace domino
