#include <algorithm>

#include "head/gru_step.cuh"

namespace domino {

namespace {

constexpr int64_t kMaxGridY = 65535;

template <class T>
bool rows_aligned(const GruStepParams& p) {
  constexpr int64_t kWidth = kVecWidth<T>;
  return is_aligned(p.x, 16) && is_aligned(p.state, 16) && is_aligned(p.w_ih, 16) &&
         is_aligned(p.w_hh, 16) && p.inputs % kWidth == 0 && p.units % kWidth == 0 &&
         p.x_stride % kWidth == 0 && p.state_stride % kWidth == 0;
}

template <class T>
int launch(const GruStepParams& p, void* stream) {
  const dim3 grid(ceil_div<int64_t>(p.units, kGruWarps),
                  std::min(ceil_div<int64_t>(p.batch, kGruRows), kMaxGridY));
  constexpr int kThreads = kGruWarps * kWarpSize;
  if (rows_aligned<T>(p)) {
    gru_step_kernel<T, kVecWidth<T>><<<grid, kThreads, 0, as_stream(stream)>>>(p);
  } else {
    gru_step_kernel<T, 1><<<grid, kThreads, 0, as_stream(stream)>>>(p);
  }
  return launched();
}

}  // namespace

int gru_step_cuda(const GruStepParams& p, void* stream) {
  if (p.batch == 0 || p.units == 0) return kOk;
  return dispatch_dtype(p.dtype, [&](auto tag) { return launch<decltype(tag)>(p, stream); });
}

}  // namespace domino
