#include <algorithm>

#include "verify/verify_launch.cuh"
#include "verify/verify_row.cuh"
#include "verify/verify_row_draws.cuh"

namespace domino {

bool launch_row(const DeviceInfo& device, const VerifyChainParams& p, void* stream, int* status) {
  const int64_t rows = p.batch * (p.drafts + 1);
  const bool dense = is_dense(p) && !draws_every_row(p);
  if (p.top_k != nullptr || dense || p.chosen_logprob != nullptr) return false;
  // fewer rows have several processors each
  if (device.major < 9 || rows <= 64 || rows > device.processors) return false;
  if (p.vocab % kGroup != 0 || p.target_row_stride % kGroup != 0 ||
      p.target_batch_stride % kGroup != 0 || !is_aligned(p.target_logits, 16))
    return false;
  if (device.shared_memory < static_cast<int>(sizeof(RowShared))) return false;
  *status = allow_shared_memory(verify_row_kernel, sizeof(RowShared));
  if (*status != kOk) return true;
  launch_kernel({dim3(static_cast<unsigned>(rows)), kCutThreads, sizeof(RowShared)},
                as_stream(stream), verify_row_kernel, p, hands_words(p));
  *status = launched();
  return true;
}

int launch_row_draws(const DeviceInfo& device, const VerifyChainParams& p, void* stream) {
  // one a processor: all of them run beside the rows
  const int64_t blocks = std::clamp<int64_t>(device.processors / p.batch, 1, kMostDrawBlocks);
  LaunchShape shape{dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(p.batch)),
                    kRowDrawThreads};
  shape.overlap = true;
  launch_kernel(shape, as_stream(stream), verify_row_draw_kernel, p);
  return launched();
}

bool launch_plain_rows(const VerifyChainParams& p, void* stream, int* status) {
  if (p.top_k != nullptr || p.top_p != nullptr || p.min_p != nullptr || has_edits(p)) return false;
  if (p.temperature == nullptr || p.rules != nullptr || p.rule == VerifyRule::kGreedy ||
      p.residual_slot != nullptr || p.top_logprobs != 0 || p.all_stats ||
      p.target_dtype != DType::kBF16 || !hands_words(p))
    return false;
  DeviceInfo device;
  *status = current_device(&device);
  if (*status != kOk) return true;
  if (!launch_row(device, p, stream, status)) return false;
  if (*status == kOk) *status = launch_row_draws(device, p, stream);
  return true;
}

}  // namespace domino
