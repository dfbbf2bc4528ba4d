// The few CUDA runtime calls that host C++ needs, without CUDA headers. Only in CUDA builds.
#pragma once

namespace domino {

const char* cuda_error_name(int status);
const char* cuda_error_text(int status);
// Takes back the error that a call has left behind, so that the next op does not report it.
void forget_cuda_error();

// Makes `device` current for this thread and restores the previous one. Check status() first.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  int status() const { return status_; }

 private:
  int previous_ = -1;
  bool switched_ = false;
  int status_ = 0;
};

}  // namespace domino
