#include "common/status.h"

#ifdef DOMINO_WITH_CUDA
#include "common/runtime.h"
#endif

namespace domino {

const char* status_name(int status) {
  switch (status) {
    case kOk:
      return "ok";
    case kBadDtype:
      return "unsupported dtype";
    case kNoCuda:
      return "no CUDA kernels in this build";
    case kBadArgument:
      return "unsupported size or stride";
    case kNoMemory:
      return "more shared memory needed than a block of this GPU may have";
  }
#ifdef DOMINO_WITH_CUDA
  if (status > 0) return cuda_error_name(status);
#endif
  return "unknown status";
}

const char* status_text(int status) {
#ifdef DOMINO_WITH_CUDA
  if (status > 0) return cuda_error_text(status);
#endif
  return status_name(status);
}

}  // namespace domino
