// gru_step, plain form: one warp owns one unit for kRows rows of the batch.
//
// The warp streams the unit's three rows of w_ih and of w_hh once for its kRows rows, accumulates
// in fp32 (the input and state products of r and z share an accumulator), and narrows once at the
// store. Bytes: 3 * units * (inputs + units) weights for every kRows rows; bound by that stream.
// A row's sums do not depend on its neighbours: a row alone has the bits that it has in a batch.
#pragma once

#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "head/gru_cell.h"
#include "head/gru_step.h"

namespace domino {

constexpr int kGruWarps = 4;  // units a block
constexpr int kGruRows = 4;   // batch rows a warp

struct GruSums {
  float r = 0.0f, z = 0.0f, n_x = 0.0f, n_s = 0.0f;
};

// Adds one product (w_ih x or w_hh s) over `length` columns. kState picks the n sum.
template <class T, int kWidth, bool kState>
__device__ __forceinline__ void gru_accumulate(GruSums (&sums)[kGruRows], const T* weight,
                                               int64_t gate_stride, const T* const (&row)[kGruRows],
                                               int64_t length, int lane) {
  for (int64_t k = lane * kWidth; k < length; k += kWarpSize * kWidth) {
    const auto w_r = load<kWidth>(weight + k);
    const auto w_z = load<kWidth>(weight + gate_stride + k);
    const auto w_n = load<kWidth>(weight + 2 * gate_stride + k);
#pragma unroll
    for (int i = 0; i < kGruRows; ++i) {
      const auto value = load<kWidth>(row[i] + k);
      float& n = kState ? sums[i].n_s : sums[i].n_x;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float v = to_float(value.at[j]);
        sums[i].r = fmaf(to_float(w_r.at[j]), v, sums[i].r);
        sums[i].z = fmaf(to_float(w_z.at[j]), v, sums[i].z);
        n = fmaf(to_float(w_n.at[j]), v, n);
      }
    }
  }
}

// Grid: x = units / kGruWarps, y = row tiles (looped). kWidth > 1 needs 16-byte aligned rows.
template <class T, int kWidth>
__global__ void __launch_bounds__(kGruWarps* kWarpSize)
    gru_step_kernel(const __grid_constant__ GruStepParams p) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * kGruWarps + threadIdx.x / kWarpSize;
  if (unit >= p.units) return;
  const T* w_ih = static_cast<const T*>(p.w_ih) + unit * p.inputs;
  const T* w_hh = static_cast<const T*>(p.w_hh) + unit * p.units;
  const T* state = static_cast<const T*>(p.state);
  T* out = static_cast<T*>(p.out);

  for (int64_t first = static_cast<int64_t>(blockIdx.y) * kGruRows; first < p.batch;
       first += static_cast<int64_t>(gridDim.y) * kGruRows) {
    const T* x_row[kGruRows];
    const T* state_row[kGruRows];
#pragma unroll
    for (int i = 0; i < kGruRows; ++i) {
      const int64_t b = min(first + i, p.batch - 1);  // rows past the end repeat the last one
      x_row[i] = static_cast<const T*>(p.x) + b * p.x_stride;
      state_row[i] = state + b * p.state_stride;
    }
    GruSums sums[kGruRows];
    gru_accumulate<T, kWidth, false>(sums, w_ih, p.units * p.inputs, x_row, p.inputs, lane);
    gru_accumulate<T, kWidth, true>(sums, w_hh, p.units * p.units, state_row, p.units, lane);
#pragma unroll
    for (int i = 0; i < kGruRows; ++i) {
      const float r = warp_sum(sums[i].r), z = warp_sum(sums[i].z);
      const float n_x = warp_sum(sums[i].n_x), n_s = warp_sum(sums[i].n_s);
      if (lane == i && first + i < p.batch) {
        const float s = to_float(state_row[i][unit]);
        out[(first + i) * p.out_stride + unit] = from_float<T>(gru_cell(r, z, n_x, n_s, s));
      }
    }
  }
}

}  // namespace domino
