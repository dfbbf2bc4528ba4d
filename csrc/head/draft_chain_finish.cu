#include "head/draft_chain_finish.cuh"

namespace domino {

namespace {

template <class T, int kSteps>
int launch(const ChainBlockParams& p, int processors, bool overlap, cudaStream_t stream) {
  const auto kernel = chain_finish<T, kSteps>;
  LaunchShape shape{dim3(processors), kFinishThreads};
  shape.shared = kStateParts * sizeof(typename CertifyRows<T, 1, 0>::Stage) +
                 kFinishColumns / kTileColumns * sizeof(CertifyTile) + p.batch * sizeof(int);
  shape.overlap = overlap;
  shape.cooperative = true;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared));
  if (error != cudaSuccess) return error;
  launch_kernel(shape, stream, kernel, p);
  return launched();
}

}  // namespace

int draft_chain_finish_cuda(const ChainBlockParams& p, void* stream) {
  int index = 0, processors = 0, major = 0;
  cudaError_t error = cudaGetDevice(&index);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, index);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
  if (error != cudaSuccess) return error;
  const bool overlap = major >= 9 && !p.portable;
  return dispatch_dtype(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    if constexpr (std::is_same_v<T, float>) {
      return static_cast<int>(kBadDtype);
    } else {
      if (p.units <= 256) return launch<T, 1>(p, processors, overlap, as_stream(stream));
      return launch<T, 4>(p, processors, overlap, as_stream(stream));
    }
  });
}

}  // namespace domino
