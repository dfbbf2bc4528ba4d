#include <cuda_runtime.h>

#include "common/runtime.h"

namespace domino {

const char* cuda_error_name(int status) {
  return cudaGetErrorName(static_cast<cudaError_t>(status));
}

const char* cuda_error_text(int status) {
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}

void forget_cuda_error() { cudaGetLastError(); }

DeviceGuard::DeviceGuard(int device) {
  status_ = cudaGetDevice(&previous_);
  if (status_ == cudaSuccess && previous_ != device) {
    status_ = cudaSetDevice(device);
    switched_ = status_ == cudaSuccess;
  }
}

DeviceGuard::~DeviceGuard() {
  if (switched_) cudaSetDevice(previous_);
}

}  // namespace domino
