#include "verify/verify_cut.cuh"
#include "verify/verify_draw.cuh"
#include "verify/verify_launch.cuh"
#include "verify/verify_listed.cuh"

namespace domino {

DenseKernels dense_kernels(const VerifyChainParams& p) {
  return {
      p.chosen_logprob != nullptr ? verify_listed_kernel<false, true, true>
                                  : verify_listed_kernel<false, false, true>,
      p.top_k == nullptr ? verify_cut_kernel<false, true, false> : verify_cut_kernel<false, true>,
      p.rule == VerifyRule::kBlock ? verify_draw_kernel<VerifyRule::kBlock, 2, true>
      : p.batch > 16               ? verify_draw_kernel<VerifyRule::kToken, 3, true>
                                   : verify_draw_kernel<VerifyRule::kToken, 2, true>};
}

}  // namespace domino
