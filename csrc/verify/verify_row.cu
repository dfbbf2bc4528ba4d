#include "verify/verify_launch.cuh"
#include "verify/verify_row.cuh"

namespace domino {

bool launch_row(const DeviceInfo& device, const VerifyChainParams& p, bool by_words, void* stream,
                int* status) {
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
                as_stream(stream), verify_row_kernel, p, by_words);
  *status = launched();
  return true;
}

}  // namespace domino
