#include "head/draft_chain_markov.cuh"

namespace domino {

namespace {

constexpr int kStaticMemory = 1024;  // of the kernel, and what a cluster reserves

MarkovMemory memory_of(const DraftChainParams& p) {
  const int64_t part = ceil_div<int64_t>(p.pool_size, kMarkovBlocks);
  return {static_cast<int>(p.rank) * 2 + 16, static_cast<int>(round_up<int64_t>(part, 16))};
}

template <class T, int kRank>
int launch(const MarkovArgs& p, cudaStream_t stream) {
  const auto kernel = chain_markov<T, kRank>;
  LaunchShape shape{dim3(static_cast<unsigned>(p.batch) * kMarkovBlocks), kMarkovThreads};
  shape.shared = memory_of(p).bytes();
  shape.cluster = kMarkovBlocks;
  shape.overlap = true;
  if (const int status = allow_shared_memory(kernel, shape.shared); status != kOk) return status;
  launch_kernel(shape, stream, kernel, p);
  return launched();
}

template <class T>
int launch(const MarkovArgs& p, cudaStream_t stream) {
  return p.rank == 256 ? launch<T, 256>(p, stream) : launch<T, 0>(p, stream);
}

}  // namespace

bool draft_chain_markov_fits(const DraftChainParams& p, int major, int shared_memory) {
  return major >= 9 && !p.portable && p.w_hh == nullptr && p.pools == 1 && p.pool_size <= 1 << 16 &&
         p.batch <= 1 << 20 && memory_of(p).bytes() <= shared_memory - kStaticMemory;
}

int draft_chain_markov_cuda(const ChainBlockParams& params, bool restart, void* stream) {
  MarkovArgs p{};
  static_cast<ChainBlockParams&>(p) = params;
  const MarkovMemory memory = memory_of(p);
  p.part = memory.part;
  p.pitch = memory.pitch;
  p.restart = restart;
  return p.dtype == DType::kBF16 ? launch<bf16>(p, as_stream(stream))
                                 : launch<f16>(p, as_stream(stream));
}

}  // namespace domino
