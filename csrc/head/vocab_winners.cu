#include "head/vocab_winners.cuh"

namespace domino {

namespace {

template <class T>
int launch(const VocabWinnersParams& p, int processors, cudaStream_t stream) {
  const auto kernel = vocab_winners<T>;
  LaunchShape shape{dim3(processors), kWinnersWarps * kWarpSize};
  shape.shared = kWinnersWarps * sizeof(typename CertifyRows<T, 1, 0>::Stage) +
                 kWinnersColumns / kTileColumns * sizeof(CertifyTile);
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared));
  if (error != cudaSuccess) return error;
  constexpr int kThreads = 256;
  vocab_winners_start<<<ceil_div<int64_t>(p.batch * p.slots, kThreads), kThreads, 0, stream>>>(p);
  launch_kernel(shape, stream, kernel, p);
  return launched();
}

}  // namespace

int vocab_winners_cuda(const VocabWinnersParams& p, void* stream) {
  if (p.batch * p.slots == 0) return kOk;
  if (p.rank % 16 != 0 || p.rank > 256 || !is_aligned(p.w2, 16)) return kBadArgument;
  int index = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&index);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, index);
  if (error != cudaSuccess) return error;
  return dispatch_dtype(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    if constexpr (std::is_same_v<T, float>) {
      return static_cast<int>(kBadDtype);
    } else {
      return launch<T>(p, processors, as_stream(stream));
    }
  });
}

}  // namespace domino
