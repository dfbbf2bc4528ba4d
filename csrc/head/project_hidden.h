// project_hidden: out = W1h H, the part of the low-rank input that needs no token, for all rows of
// a block at once. W1h: the first `width` columns of W1. fp32 sums, not rounded.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace domino {

struct ProjectHiddenParams {
  float* out;          // [batch, slots, rank], contiguous
  const void* hidden;  // [batch, slots, width]
  const void* w1;      // [rank, w1_stride]: its first `width` columns
  int64_t batch;
  int64_t slots;
  int64_t rank;
  int64_t width;
  int64_t w1_stride;
  int64_t hidden_batch_stride;  // strides in elements
  int64_t hidden_slot_stride;
  DType dtype;  // of hidden and w1
};

int project_hidden_cuda(const ProjectHiddenParams& p, void* stream);
int project_hidden_cpu(const ProjectHiddenParams& p);

}  // namespace domino
