#include <algorithm>

#include "head/draft_chain_finish.cuh"

namespace domino {

namespace {

template <class T, int kSteps, int kRank, bool kGru = true>
int launch(const ChainBlockParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const auto kernel = chain_finish<T, kSteps, kRank, kGru>;
  using Sweep = VocabSweep<T, kRank>;
  constexpr int64_t kStage = sizeof(typename Sweep::Stage), kBase = sizeof(typename Sweep::Base);
  const int64_t memory = device.shared_memory - 1024 - 2 * p.batch * sizeof(int);
  const auto bytes = [&](int64_t warps) {
    return warps * kStage + sizeof(SweepColumns) + std::max(warps * kBase, kFinishParts);
  };
  int64_t warps = kStateParts;
  while (warps > 0 && bytes(warps) > memory) --warps;
  if (warps < 1) return kBadArgument;
  LaunchShape shape{dim3(device.processors), kFinishThreads};
  shape.shared = std::max<int64_t>(bytes(warps) + 2 * p.batch * sizeof(int), sizeof(RescueMemory));
  shape.overlap = device.major >= 9 && !p.portable;
  shape.cooperative = true;
  if (const int status = allow_shared_memory(kernel, shape.shared); status != kOk) return status;
  const bool raw = raw_base_logits(p.base_logits, p.vocab, p.base_batch_stride, p.base_slot_stride,
                                   p.base_dtype == p.dtype, p.bias || p.mask);
  launch_kernel(shape, stream, kernel, p, static_cast<int>(warps), raw);
  return launched();
}

}  // namespace

int draft_chain_finish_cuda(const ChainBlockParams& p, void* stream) {
  DeviceInfo device;
  if (const int status = current_device(&device); status != kOk) return status;
  return dispatch_dtype(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    if constexpr (std::is_same_v<T, float>) {
      return static_cast<int>(kBadDtype);
    } else {
      if (p.w_hh == nullptr) return launch<T, 1, 0, false>(p, device, as_stream(stream));
      if (p.units <= 256) return launch<T, 1, 0>(p, device, as_stream(stream));
      if (p.rank == 256) return launch<T, 4, 256>(p, device, as_stream(stream));
      return launch<T, 4, 0>(p, device, as_stream(stream));
    }
  });
}

}  // namespace domino
