#include "verify/verify_launch.cuh"
#include "verify/verify_listed.cuh"

namespace domino {

void launch_listed(const LaunchShape& shape, const VerifyChainParams& p, void* stream) {
  launch_kernel(shape, as_stream(stream), verify_listed_kernel, p);
}

}  // namespace domino
