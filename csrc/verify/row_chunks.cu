#include <algorithm>

#include "verify/row_chunks.cuh"
#include "verify/verify_launch.cuh"

namespace domino {

int launch_rows(const VerifyChainParams& p, void* stream) {
  const ChainWorkspace chunks(p.workspace, p.batch, p.drafts, p.vocab, is_dense(p));
  DeviceInfo device;
  if (const int status = current_device(&device); status != kOk) return status;
  const int64_t rows = p.batch * chunks.rows_per_request;
  // as many blocks a row as are resident at once: a wave of blocks that is not full costs a whole
  // one
  const int64_t most = ceil_div<int64_t>(chunks.row_chunks, kRowWarps);
  const int64_t wanted =
      std::clamp<int64_t>(device.processors * 4 / rows, std::min<int64_t>(2, most), most);
  const int steps = static_cast<int>(ceil_div<int64_t>(chunks.row_chunks, wanted * kRowWarps));
  const int64_t row_blocks = ceil_div<int64_t>(chunks.row_chunks, steps * kRowWarps);
  if (rows * row_blocks > INT32_MAX) return kBadArgument;
  const bool plain = !has_edits(p) && (!is_dense(p) || p.draft_dtype == p.target_dtype);
  return dispatch_rows(p, plain, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    verify_rows_kernel<T>
        <<<static_cast<unsigned>(rows * row_blocks), kRowWarps * kWarpSize, 0, as_stream(stream)>>>(
            p, static_cast<int>(row_blocks), steps);
    return launched();
  });
}

}  // namespace domino
