#include "verify/row_chunks.cuh"
#include "verify/verify_launch.cuh"

namespace domino {

int launch_rows(const VerifyChainParams& p, void* stream) {
  const ChainWorkspace chunks(p.workspace, p.batch, p.drafts, p.vocab, is_dense(p));
  const int64_t rows = p.batch * chunks.rows_per_request;
  // one chunk a warp while that fits the device at once, then several
  const int steps = rows * chunks.row_chunks > 132 * 48 * 2 ? 4 : 1;
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
