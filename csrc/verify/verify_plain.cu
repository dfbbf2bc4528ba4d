#include <algorithm>

#include "verify/few_rows.cuh"
#include "verify/verify_plain.cuh"

namespace domino {

// verify_plain_draws.cu, verify_plain_dense.cu: the same for rules that draw every row's token, and
// with rows of q.
bool launch_plain_draws(const DeviceInfo& device, const VerifyChainParams& p, void* stream,
                        int* status);
bool launch_plain_dense(const DeviceInfo& device, const VerifyChainParams& p, void* stream,
                        int* status);

bool launch_plain(const VerifyChainParams& p, void* stream, int* status) {
  if (p.top_k != nullptr || p.top_p != nullptr || p.min_p != nullptr || has_edits(p)) return false;
  if (p.temperature == nullptr || p.rules != nullptr || p.rule == VerifyRule::kGreedy ||
      p.residual_slot != nullptr || p.top_logprobs != 0 || p.all_stats ||
      p.target_dtype != DType::kBF16)
    return false;
  DeviceInfo device;
  *status = current_device(&device);
  if (*status != kOk) return true;
  if (draws_every_row(p)) return launch_plain_draws(device, p, stream, status);
  if (is_dense(p)) return launch_plain_dense(device, p, stream, status);
  return with_row_blocks(p, [&](auto row) {
    using Row = decltype(row);
    return launch_few_rows<Row>(verify_plain_kernel<false, Row::kBlocks>,
                                std::max(sizeof(PlainBlock<Row>), sizeof(ListedBlock)), device, p,
                                stream, status);
  });
}

}  // namespace domino
