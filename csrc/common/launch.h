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

// Bit n: the build has code for GPUs of compute capability n.x (CMakeLists.txt).
#ifndef DOMINO_GENERATIONS
#define DOMINO_GENERATIONS 0xffffffffu
#endif

// What a GPU of this major compute capability is to launchers. Without code of its own it runs that
// of sm_80, in which there are no clusters, no previous_launch_done() and no copy engine.
constexpr int generation(int major) { return (DOMINO_GENERATIONS >> major & 1u) != 0 ? major : 8; }

// What launchers ask of a device.
struct DeviceInfo {
  int index = 0;
  int processors = 0;
  int major = 0;          // compute capability, as generation() has it
  int shared_memory = 0;  // bytes that a block may have
};

// Of the current device. A thread asks the runtime once for as long as it stays on one device.
inline int current_device(DeviceInfo* out) {
  thread_local int known = -1;
  thread_local DeviceInfo device;
  int index = 0;
  if (const int status = cudaGetDevice(&index); status != kOk) return status;
  if (index != known) {
    known = -1;
    const auto ask = [&](cudaDeviceAttr attribute, int* value) {
      return static_cast<int>(cudaDeviceGetAttribute(value, attribute, index));
    };
    int status = ask(cudaDevAttrMultiProcessorCount, &device.processors);
    if (status == kOk) status = ask(cudaDevAttrComputeCapabilityMajor, &device.major);
    if (status == kOk) status = ask(cudaDevAttrMaxSharedMemoryPerBlockOptin, &device.shared_memory);
    if (status != kOk) return status;
    device.major = generation(device.major);
    device.index = known = index;
  }
  *out = device;
  return kOk;
}

// What this thread has set of a kernel on the current device: each call into the runtime for it
// takes half a microsecond of a launch's five.
struct KernelState {
  const void* kernel = nullptr;
  int device = 0;
  uint32_t set = 0;        // bits of cudaFuncAttribute
  int dynamic_shared = 0;  // bytes that a block may have, once that is set
};

inline KernelState& kernel_state(const void* kernel, const DeviceInfo& device) {
  thread_local KernelState states[128];  // of a kernel in another's place it asks again
  KernelState& state = states[reinterpret_cast<uintptr_t>(kernel) / 16 % 128];
  if (state.kernel != kernel || state.device != device.index)
    state = KernelState{kernel, device.index};
  return state;
}

// Sets an attribute of a kernel that has the same value in all launches.
template <class Kernel>
int set_attribute(Kernel kernel, cudaFuncAttribute attribute, int value) {
  DeviceInfo device;
  if (const int status = current_device(&device); status != kOk) return status;
  KernelState& state = kernel_state(reinterpret_cast<const void*>(kernel), device);
  if ((state.set >> attribute & 1u) != 0) return kOk;
  if (const int status = cudaFuncSetAttribute(kernel, attribute, value); status != kOk)
    return status;
  state.set |= 1u << attribute;
  return kOk;
}

// Lets a kernel have all the dynamic shared memory that a block of the current device may: not only
// the `bytes` of this call, because threads with calls of other sizes set it at the same time.
template <class Kernel>
int allow_shared_memory(Kernel kernel, int64_t bytes) {
  DeviceInfo device;
  if (const int status = current_device(&device); status != kOk) return status;
  KernelState& state = kernel_state(reinterpret_cast<const void*>(kernel), device);
  if ((state.set >> cudaFuncAttributeMaxDynamicSharedMemorySize & 1u) == 0) {
    cudaFuncAttributes of_kernel;
    if (const int status = cudaFuncGetAttributes(&of_kernel, kernel); status != kOk) return status;
    state.dynamic_shared = device.shared_memory - static_cast<int>(of_kernel.sharedSizeBytes);
    const int status =
        set_attribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, state.dynamic_shared);
    if (status != kOk) return status;
  }
  return bytes > state.dynamic_shared ? kNoMemory : kOk;
}

struct LaunchShape {
  dim3 grid;
  int threads;
  size_t shared = 0;  // bytes of dynamic shared memory
  int cluster = 1;    // blocks of a cluster, along x; above 1 (sm_90 and later)
  bool overlap = false;
  bool cooperative = false;  // all blocks resident at once, or an error
};

// Launches kernel(args...). With `overlap` (sm_90 and later) its blocks may start before the launch
// in front of it on the stream has ended, as far as previous_launch_done(): what another launch
// writes may only be touched behind that call.
template <class... Params, class... Args>
void launch_kernel(const LaunchShape& shape, cudaStream_t stream, void (*kernel)(Params...),
                   const Args&... args) {
  cudaLaunchAttribute attributes[3] = {};
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared;
  config.stream = stream;
  config.attrs = attributes;
  if (shape.overlap) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = shape.cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  if (shape.cooperative) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  cudaLaunchKernelEx(&config, kernel, args...);  // launched() reports an error
}

template <class... Params, class... Args>
void launch_kernel(bool overlap, dim3 grid, int threads, cudaStream_t stream,
                   void (*kernel)(Params...), const Args&... args) {
  launch_kernel(LaunchShape{grid, threads, 0, 1, overlap}, stream, kernel, args...);
}

// Returns when the launches in front have ended and what they wrote is visible; from then on the
// next one may start, if it was not let start before (allow_next_launch). Each waits before it
// ends, so one that has ended has seen all before it end.
__device__ __forceinline__ void previous_launch_done() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Lets the next launch, if it may overlap, start its blocks as soon as there is room for them.
__device__ __forceinline__ void allow_next_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <class T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

template <class T>
__host__ __device__ constexpr T round_up(T n, T to) {
  return ceil_div(n, to) * to;
}

inline bool is_aligned(const void* pointer, size_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

}  // namespace domino
