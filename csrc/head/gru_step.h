// gru_step: out = GRU(x, state), one step for a batch of rows. See gru_cell.h for the formula.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace domino {

struct GruStepParams {
  void* out;          // [batch, units], row stride out_stride; overlaps no input
  const void* x;      // [batch, inputs], row stride x_stride
  const void* state;  // [batch, units], row stride state_stride
  const void* w_ih;   // [3 * units, inputs], contiguous
  const void* w_hh;   // [3 * units, units], contiguous
  int64_t batch;
  int64_t inputs;
  int64_t units;
  int64_t out_stride;  // strides in elements
  int64_t x_stride;
  int64_t state_stride;
  DType dtype;  // of every tensor
};

int gru_step_cuda(const GruStepParams& p, void* stream);
int gru_step_cpu(const GruStepParams& p);

}  // namespace domino
