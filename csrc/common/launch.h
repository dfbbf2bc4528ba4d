// Helpers for .cu launchers. A launcher is
//   int <op>_cuda(const <Op>Params& p, void* stream)
// It runs on the current device, on `stream` only, never synchronises, never allocates, and ends
// with `return launched();`.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/status.h"

namespace domino {

constexpr int kWarpSize = 32;
constexpr unsigned kFullMask = 0xffffffffu;

inline cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

// Status of the launch just made. It also clears the error, so that it is not reported twice.
inline int launched() { return static_cast<int>(cudaGetLastError()); }

template <class T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

inline bool is_aligned(const void* pointer, size_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

}  // namespace domino
