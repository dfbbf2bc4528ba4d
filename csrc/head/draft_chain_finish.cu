#include <algorithm>

#include "head/draft_chain_finish.cuh"

namespace domino {

namespace {

template <class T, int kSteps>
int launch(const ChainBlockParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const auto kernel = chain_finish<T, kSteps>;
  constexpr int64_t kStage = sizeof(typename VocabSweep<T>::Stage);
  const int64_t fixed = sizeof(FinishMemory) + 2 * p.batch * sizeof(int);
  const int64_t warps =
      std::min<int64_t>(kStateParts, (device.shared_memory - 1024 - fixed) / kStage);
  if (warps < 1) return kBadArgument;
  LaunchShape shape{dim3(device.processors), kFinishThreads};
  shape.shared = warps * kStage + fixed;
  shape.overlap = device.major >= 9 && !p.portable;
  shape.cooperative = true;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared));
  if (error != cudaSuccess) return error;
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
      if (p.units <= 256) return launch<T, 1>(p, device, as_stream(stream));
      return launch<T, 4>(p, device, as_stream(stream));
    }
  });
}

}  // namespace domino
