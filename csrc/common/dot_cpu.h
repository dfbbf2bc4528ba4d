// fp32 dot product for CPU twins. Sixteen partial sums: they vectorise without -ffast-math and keep
// the rounding error near that of a blocked GEMM.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace domino {

template <class A, class B>
float dot(const A* a, const B* b, int64_t length) {
  constexpr int kLanes = 16;
  float sums[kLanes] = {};
  int64_t k = 0;
  for (; k + kLanes <= length; k += kLanes)
    for (int lane = 0; lane < kLanes; ++lane)
      sums[lane] += to_float(a[k + lane]) * to_float(b[k + lane]);
  for (int lane = 0; k + lane < length; ++lane)
    sums[lane] += to_float(a[k + lane]) * to_float(b[k + lane]);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
  return sums[0];
}

}  // namespace domino
