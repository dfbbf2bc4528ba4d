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

// 128 registers: with 80 the race spills, 28 us of it in place of 16.
void (*dense_counted_draw())(VerifyChainParams) {
  return verify_draw_kernel<VerifyRule::kToken, 2, true, true>;
}

}  // namespace domino
