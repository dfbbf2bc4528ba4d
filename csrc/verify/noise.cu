#include "common/launch.h"
#include "verify/noise.h"

namespace domino {

namespace {

constexpr int kThreads = 256;

// One thread a group of four words.
__global__ void __launch_bounds__(kThreads)
    noise_kernel(const __grid_constant__ NoiseParams p, int64_t groups) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at < p.batch * groups) write_noise(p, at / groups, at % groups);
}

}  // namespace

int noise_cuda(const NoiseParams& p, void* stream) {
  const int64_t groups = ceil_div<int64_t>(p.count, 4);
  const int64_t blocks = ceil_div<int64_t>(p.batch * groups, kThreads);
  if (blocks == 0) return kOk;
  if (blocks > INT32_MAX) return kBadArgument;
  noise_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, as_stream(stream)>>>(p, groups);
  return launched();
}

}  // namespace domino
