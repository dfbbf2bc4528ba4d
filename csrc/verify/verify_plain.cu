#include <algorithm>

#include "verify/few_rows.cuh"
#include "verify/verify_plain.cuh"

namespace domino {

bool launch_plain(const VerifyChainParams& p, void* stream, int* status) {
  if (p.top_k != nullptr || p.top_p != nullptr || p.min_p != nullptr || has_edits(p)) return false;
  if (p.temperature == nullptr || p.rules != nullptr || p.rule == VerifyRule::kGreedy ||
      draws_every_row(p) || p.residual_slot != nullptr || p.top_logprobs != 0 || p.all_stats ||
      p.target_dtype != DType::kBF16)
    return false;
  DeviceInfo device;
  *status = current_device(&device);
  if (*status != kOk) return true;
  const bool dense = is_dense(p);
  if (dense && (p.draft_dtype != DType::kBF16 || p.draft_row_stride % kGroup != 0 ||
                p.draft_batch_stride % kGroup != 0 || !is_aligned(p.draft_logits, 16)))
    return false;
  const auto kernel = dense ? verify_plain_kernel<true> : verify_plain_kernel<false>;
  return launch_few_rows(kernel, std::max(sizeof(PlainBlock), sizeof(ListedBlock)), device, p,
                         stream, status, true);
}

}  // namespace domino
