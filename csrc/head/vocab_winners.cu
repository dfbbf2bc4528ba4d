#include <algorithm>

#include "head/vocab_winners.cuh"

namespace domino {

namespace {

template <class T>
int launch(const VocabWinnersParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const auto kernel = vocab_winners<T>;
  using Sweep = VocabSweep<T, 0>;
  constexpr int kStage = sizeof(typename Sweep::Stage) + sizeof(typename Sweep::Base);
  constexpr int kFixed = sizeof(SweepColumns);
  const int warps = std::min(kWinnersWarps, (device.shared_memory - kFixed) / kStage);
  if (warps < 1) return kBadArgument;
  LaunchShape shape{dim3(device.processors), kWinnersWarps * kWarpSize};
  shape.shared = warps * kStage + kFixed;
  if (const int status = allow_shared_memory(kernel, shape.shared); status != kOk) return status;
  const bool raw = raw_base_logits(p.base_logits, p.vocab, p.base_batch_stride, p.base_slot_stride,
                                   p.base_dtype == p.dtype, p.bias || p.mask);
  constexpr int kThreads = 256;
  vocab_winners_start<<<ceil_div<int64_t>(p.batch * p.slots, kThreads), kThreads, 0, stream>>>(p);
  launch_kernel(shape, stream, kernel, p, warps, raw);
  return launched();
}

}  // namespace

int vocab_winners_cuda(const VocabWinnersParams& p, void* stream) {
  if (p.batch * p.slots == 0) return kOk;
  if (p.rank % 16 != 0 || p.rank > 256 || !is_aligned(p.w2, 16)) return kBadArgument;
  DeviceInfo device;
  if (const int status = current_device(&device); status != kOk) return status;
  return dispatch_dtype(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    if constexpr (std::is_same_v<T, float>) {
      return static_cast<int>(kBadDtype);
    } else {
      return launch<T>(p, device, as_stream(stream));
    }
  });
}

}  // namespace domino
