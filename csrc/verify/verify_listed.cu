#include "verify/verify_launch.cuh"
#include "verify/verify_listed.cuh"

namespace domino {

void launch_listed(const LaunchShape& shape, const VerifyChainParams& p, void* stream) {
  const bool by_position = draws_every_row(p), logprobs = p.chosen_logprob != nullptr;
  const auto kernel =
      by_position ? logprobs ? verify_listed_kernel<true, true> : verify_listed_kernel<true, false>
      : logprobs  ? verify_listed_kernel<false, true>
                  : verify_listed_kernel<false, false>;
  launch_kernel(shape, as_stream(stream), kernel, p);
}

}  // namespace domino
