// The one large product of CPU twins: weight rows times a small batch of fp32 vectors.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace domino {

// out[n * out_stride + m] = sum_k w[m * w_stride + k] * x[n * x_stride + k], summed in fp32, for
// m < rows, n < batch, k < length. The bits of out[n, m] depend on row m and vector n only.
template <class T>
void rows_times(const T* w, int64_t w_stride, int64_t rows, int64_t length, const float* x,
                int64_t x_stride, int64_t batch, float* out, int64_t out_stride);

}  // namespace domino
