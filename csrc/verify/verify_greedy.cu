#include <algorithm>

#include "verify/verify_greedy.cuh"
#include "verify/verify_launch.cuh"

namespace domino {

namespace {

int launch_alone(const VerifyChainParams& p, void* stream) {
  DeviceInfo device;
  if (const int status = current_device(&device); status != kOk) return status;
  const int64_t rows = p.drafts + 1, groups = ceil_div<int64_t>(p.vocab, kGroup);
  // As many parts of a row as are resident at once, each with work for all threads.
  const int64_t resident = device.processors * kGreedyBlocks / (p.batch * rows);
  int64_t parts = std::clamp<int64_t>(resident, 1, kMostGreedyParts);
  parts = std::min(parts, ceil_div<int64_t>(groups, kGreedyThreads));
  const int64_t words = rows * kGreedyWarps;
  parts = std::min(parts, kGreedyWords / words);
  const int64_t most = kGreedyWords / (words * parts);  // requests of a launch
  const int share = static_cast<int>(ceil_div(groups, parts));
  const bool whole = p.cu_rows == nullptr && p.num_active == nullptr && p.residual_slot == nullptr;
  return dispatch_rows(p, !has_edits(p), [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    using Whole = std::conditional_t<std::is_void_v<T>, ChainRequest, WholeRequest>;
    const auto kernel =
        whole ? verify_greedy_kernel<T, Whole> : verify_greedy_kernel<T, ChainRequest>;
    for (int64_t first = 0; first < p.batch; first += most) {
      const dim3 grid(parts, rows, std::min(most, p.batch - first));
      kernel<<<grid, kGreedyThreads, 0, as_stream(stream)>>>(first, share, p);
    }
    return launched();
  });
}

}  // namespace

int verify_greedy_cuda(const VerifyChainParams& p, void* stream) {
  const bool fits = (p.drafts + 1) * kGreedyWarps <= kGreedyWords;
  if (p.chosen_logprob == nullptr && fits) return launch_alone(p, stream);
  if (const int status = launch_rows(p, stream); status != kOk) return status;
  return dispatch_rows(p, !has_edits(p), [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    return launch_behind(greedy_walk_kernel<T>, p, p.batch, false, kGreedyWalkThreads, stream);
  });
}

}  // namespace domino
