// rows_times for the instruction set at hand: SSE2 everywhere (a wheel must run anywhere), AVX2 +
// FMA where the CPU has it. Loops alone do not get there: GCC does not vectorise a float sum
// without -ffast-math, and target_clones lowers vector types before it clones.
#include <cstring>

#include "common/rows_times.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // no vector crosses a call: everything is inlined

namespace domino {

namespace {

using F4 = float __attribute__((vector_size(16)));
using F8 = float __attribute__((vector_size(32)));
using U8 = uint32_t __attribute__((vector_size(32)));
using H8 = uint16_t __attribute__((vector_size(16)));

namespace plain {
#define DOMINO_TARGET
#include "common/rows_times.inl"
#undef DOMINO_TARGET
}  // namespace plain

#ifdef __x86_64__
namespace avx2 {
#define DOMINO_TARGET __attribute__((target("avx2,fma")))
#include "common/rows_times.inl"
#undef DOMINO_TARGET
}  // namespace avx2
#endif

}  // namespace

template <class T>
void rows_times(const T* w, int64_t w_stride, int64_t rows, int64_t length, const float* x,
                int64_t x_stride, int64_t batch, float* out, int64_t out_stride) {
#ifdef __x86_64__
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_avx2)
    return avx2::rows_times(w, w_stride, rows, length, x, x_stride, batch, out, out_stride);
#endif
  plain::rows_times(w, w_stride, rows, length, x, x_stride, batch, out, out_stride);
}

#define DOMINO_INSTANTIATE(T)                                                                   \
  template void rows_times(const T*, int64_t, int64_t, int64_t, const float*, int64_t, int64_t, \
                           float*, int64_t)
DOMINO_INSTANTIATE(float);
DOMINO_INSTANTIATE(f16);
DOMINO_INSTANTIATE(bf16);

}  // namespace domino
