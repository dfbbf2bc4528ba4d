#include <algorithm>

#include "verify/verify_greedy.cuh"
#include "verify/verify_launch.cuh"

namespace domino {

namespace {

// Are all rows at multiples of a group, by strides of which so many fit 32 bits?
bool aligned(const VerifyChainParams& p, int64_t batch_groups, int64_t row_groups) {
  return reinterpret_cast<uintptr_t>(p.target_logits) % 16 == 0 &&
         p.target_batch_stride == batch_groups * kGroup &&
         p.target_row_stride == row_groups * kGroup && batch_groups >= 0 && row_groups >= 0 &&
         std::max(batch_groups, row_groups) <= UINT32_MAX &&
         batch_groups * p.batch + row_groups * p.drafts <= UINT32_MAX;
}

int launch_alone(const VerifyChainParams& p, void* stream) {
  DeviceInfo device;
  if (const int status = current_device(&device); status != kOk) return status;
  const int64_t rows = p.drafts + 1, groups = ceil_div<int64_t>(p.vocab, kGroup);
  // As many parts of a row as are resident at once, each with work for all threads.
  const int64_t resident = device.processors * kGreedyBlocks / (p.batch * rows);
  int64_t parts = std::clamp<int64_t>(resident, 1, kMostGreedyParts);
  parts = std::min(parts, ceil_div<int64_t>(groups, kGreedyThreads));
  parts = std::min(parts, kGreedyWords / rows / 2 * 2);  // a row's words are even
  const int64_t most = kGreedyWords / (rows * ceil_div<int64_t>(parts, 2) * 2);  // requests
  const int64_t batch_groups = p.target_batch_stride / kGroup;
  const int64_t row_groups = p.target_row_stride / kGroup;
  const bool whole = p.cu_rows == nullptr && p.num_active == nullptr &&
                     p.residual_slot == nullptr && aligned(p, batch_groups, row_groups);
  GreedyGrid grid{p.target_logits,
                  static_cast<uint32_t>(batch_groups),
                  static_cast<uint32_t>(row_groups),
                  static_cast<int>(ceil_div(groups, parts)),
                  static_cast<int>(p.vocab / kGroup),
                  0};
  return dispatch_rows(p, !has_edits(p), [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    using Whole = std::conditional_t<std::is_void_v<T>, ChainRequest, AlignedRequest>;
    const auto kernel =
        whole ? verify_greedy_kernel<T, Whole> : verify_greedy_kernel<T, ChainRequest>;
    for (; grid.first < p.batch; grid.first += most) {
      const LogitRow row = LogitRow{p.target_logits, p.target_dtype};
      grid.rows = row.plus(grid.first * p.target_batch_stride).data;
      const dim3 blocks(parts, rows, std::min(most, p.batch - grid.first));
      kernel<<<blocks, kGreedyThreads, 0, as_stream(stream)>>>(grid, p);
    }
    return launched();
  });
}

}  // namespace

int verify_greedy_cuda(const VerifyChainParams& p, void* stream) {
  const bool fits = (p.drafts + 1) * 2 <= kGreedyWords;
  if (p.chosen_logprob == nullptr && fits) return launch_alone(p, stream);
  if (const int status = launch_rows(p, stream); status != kOk) return status;
  return dispatch_rows(p, !has_edits(p), [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    return launch_behind(greedy_walk_kernel<T>, p, p.batch, false, kGreedyWalkThreads, stream);
  });
}

}  // namespace domino
