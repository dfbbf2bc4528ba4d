// What every launcher and CPU twin returns: 0, a negative code of ours, or a positive cudaError_t.
// Python turns it into an exception that names the op (domino_kernels/torch_library.py).
#pragma once

namespace domino {

enum Status : int {
  kOk = 0,
  kBadDtype = -1,     // a dtype code that the op does not take
  kNoCuda = -2,       // a CUDA tensor, but this build has no CUDA kernels
  kBadArgument = -3,  // sizes or strides that the op does not take
  kNoMemory = -4      // more shared memory than a block of this GPU may have
};

// "cudaErrorInvalidValue: invalid argument" and the like. Static storage.
const char* status_name(int status);
const char* status_text(int status);

}  // namespace domino
