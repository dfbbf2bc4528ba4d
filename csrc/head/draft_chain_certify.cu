#include <algorithm>

#include "head/draft_chain_certify_wide.cuh"

namespace domino {

namespace {

constexpr int64_t kWideFrom = 32;              // columns
constexpr int64_t kCertifyMemory = 224 << 10;  // bytes of shared memory of a processor

// blocks: of a processor. stages: bytes for the rows on their way. Columns of a block: all, or
// equal parts of them where they do not fit.
template <class Tile>
int launch(void (*kernel)(ChainBlockParams, int, bool), const ChainBlockParams& p, int64_t unit,
           int64_t stages, int blocks, int processors, bool overlap, bool early,
           cudaStream_t stream) {
  // columns, and (wide) four limits for each
  const int64_t of_unit = sizeof(Tile) + unit * (sizeof(CertifyColumn) + 4 * sizeof(float));
  const int64_t fixed = stages + p.batch * sizeof(int);
  const int64_t units = ceil_div(p.batch * p.corrected(), unit);
  const int64_t fit = (kCertifyMemory / blocks - fixed) / of_unit;
  if (fit < 1) return kBadArgument;
  const int64_t tiles = ceil_div(units, ceil_div(units, fit));
  const int64_t bytes = fixed + tiles * of_unit;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) return error;
  LaunchShape shape{dim3(blocks * processors), kCertifyThreads, static_cast<size_t>(bytes)};
  shape.overlap = overlap;
  launch_kernel(shape, stream, kernel, p, static_cast<int>(tiles * unit), early);
  return launched();
}

}  // namespace

int draft_chain_certify_cuda(const ChainBlockParams& p, bool restart, void* stream) {
  const int64_t columns = p.batch * p.corrected();
  if (columns == 0) return kOk;
  int index = 0, processors = 0, major = 0;
  cudaError_t error = cudaGetDevice(&index);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, index);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
  if (error != cudaSuccess) return error;
  return dispatch_dtype(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto run = [&](auto base) {
      using Base = decltype(base);
      const bool overlap = major >= 9 && !p.portable;
      const auto run_rank = [&](auto known) {
        constexpr int kRank = decltype(known)::value;
        constexpr int64_t kStage = kCertifyWarps * sizeof(typename CertifyRows<T, 1, 0>::Stage);
        const auto go = [&](auto kernel, auto tile, int64_t unit, int64_t stages, int blocks) {
          return launch<decltype(tile)>(kernel, p, unit, stages, blocks, processors, overlap,
                                        !restart, as_stream(stream));
        };
        if (overlap && major == 9 && columns > kWideFrom)
          return go(chain_certify_wide<T, Base, kRank>, WideTile{}, kWgmmaColumns, kStage, 1);
        if (columns > 4 * kTileColumns)
          return go(chain_certify<T, Base, 2, kRank>, CertifyTile{}, kTileColumns, 2 * kStage, 1);
        return go(chain_certify<T, Base, 1, kRank>, CertifyTile{}, kTileColumns, kStage, 2);
      };
      if (p.rank == 256) return run_rank(std::integral_constant<int, 256>{});
      return run_rank(std::integral_constant<int, 0>{});
    };
    if constexpr (std::is_same_v<T, float>) {
      return static_cast<int>(kBadDtype);
    } else {
      if (p.base_dtype == p.dtype) return run(T{});
      if (p.base_dtype == DType::kF32) return run(float{});
      return static_cast<int>(kBadDtype);
    }
  });
}

}  // namespace domino
