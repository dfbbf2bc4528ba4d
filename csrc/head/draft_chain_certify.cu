#include <algorithm>

#include "head/draft_chain_certify_few.cuh"
#include "head/draft_chain_certify_wide.cuh"

namespace domino {

namespace {

constexpr int64_t kMemory = 226 << 10;  // bytes of shared memory of a processor that blocks may use

template <class... Args>
int launch(void (*kernel)(ChainBlockParams, Args...), const ChainBlockParams& p, LaunchShape shape,
           cudaStream_t stream, const Args&... args) {
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared));
  if (error != cudaSuccess) return error;
  launch_kernel(shape, stream, kernel, p, args...);
  return launched();
}

// Columns come in units; a block has all of them, or a part where they do not fit: equal parts.
int64_t units_of_block(int64_t units, int64_t fit) { return ceil_div(units, ceil_div(units, fit)); }

template <class T, int kChain>
int launch_wide(const ChainBlockParams& p, int round, int processors, cudaStream_t stream) {
  const int64_t units = ceil_div<int64_t>(p.batch * p.corrected(), kWgmmaColumns);
  const int most = static_cast<int>(units_of_block(units, kMostWideTiles)) * kWgmmaColumns;
  if (units * kWgmmaColumns > static_cast<int64_t>(most) * processors) return kBadArgument;
  constexpr int kAlign = 1024;
  int stages = kMaxStages;
  while (WideMemory(p.rank, p.batch, most, stages).bytes + kAlign > kMemory)
    if (--stages < 2) return kBadArgument;
  CUtensorMap map;
  if (const int status = make_tile_map(&map, p.w2, p.dtype, p.vocab, p.rank, kWgmmaRows);
      status != kOk)
    return status;
  LaunchShape shape{dim3(processors), kWideThreads};
  shape.shared = WideMemory(p.rank, p.batch, most, stages).bytes + kAlign;
  shape.overlap = true;
  return launch(chain_certify_wide<T, kChain>, p, shape, stream, map, round, most, stages);
}

// One batch row of up to 16 columns.
template <class T, int kChain>
int launch_few(const ChainBlockParams& p, int round, int processors, cudaStream_t stream) {
  constexpr int kAlign = 1024, kStage = kChain * kFewRows * kTileWidth * 2;
  const int stages = std::min<int>(kFewStages, (kMemory - kAlign - sizeof(FewMemory)) / kStage);
  CUtensorMap map;
  if (const int status = make_tile_map(&map, p.w2, p.dtype, p.vocab, p.rank, kFewRows);
      status != kOk)
    return status;
  LaunchShape shape{dim3(processors), kFewThreads};
  shape.shared = kAlign + stages * kStage + sizeof(FewMemory);
  shape.overlap = true;
  return launch(chain_certify_few<T, kChain>, p, shape, stream, map, round, stages);
}

// blocks: of a processor
template <class T, int kRowTiles, int kRank>
int launch_portable(const ChainBlockParams& p, int round, const DeviceInfo& device, int blocks,
                    bool overlap, cudaStream_t stream) {
  const int64_t of_unit = sizeof(CertifyTile) + kTileColumns * sizeof(CertifyColumn);
  const int64_t fixed =
      kCertifyWarps * sizeof(typename CertifyRows<T, kRowTiles, 0>::Stage) + p.batch * sizeof(int);
  const int64_t memory = std::min<int64_t>(kMemory / blocks, device.shared_memory);
  const int64_t fit = (memory - fixed) / of_unit;
  if (fit < 1) return kBadArgument;
  const int64_t units = ceil_div<int64_t>(p.batch * p.corrected(), kTileColumns);
  const int64_t tiles = units_of_block(units, fit);
  if (units > tiles * blocks * device.processors) return kBadArgument;
  LaunchShape shape{dim3(blocks * device.processors), kCertifyThreads};
  shape.shared = fixed + tiles * of_unit;
  shape.overlap = overlap;
  return launch(chain_certify<T, kRowTiles, kRank>, p, shape, stream, round,
                static_cast<int>(tiles) * kTileColumns);
}

template <class T>
int launch(const ChainBlockParams& p, int round, cudaStream_t stream) {
  DeviceInfo device;
  if (const int status = current_device(&device); status != kOk) return status;
  const bool overlap = device.major >= 9 && !p.portable;
  if (overlap && device.major == 9) {
    constexpr decltype(&launch_wide<T, 1>) kLaunch[] = {launch_wide<T, 1>, launch_wide<T, 2>,
                                                        launch_wide<T, 3>, launch_wide<T, 4>};
    constexpr decltype(&launch_few<T, 1>) kFew[] = {launch_few<T, 1>, launch_few<T, 2>,
                                                    launch_few<T, 3>, launch_few<T, 4>};
    if (p.batch == 1 && p.corrected() <= kFewColumns)
      return kFew[ceil_div<int64_t>(p.rank, 64) - 1](p, round, device.processors, stream);
    return kLaunch[ceil_div<int64_t>(p.rank, 64) - 1](p, round, device.processors, stream);
  }
  const auto run = [&](auto known) {
    constexpr int kRank = decltype(known)::value;
    // where their stages have room: not in the 99 KB of sm_86, 89 and 120
    const bool two_row_tiles =
        p.batch * p.corrected() > 4 * kTileColumns && device.shared_memory > kMemory / 2;
    return two_row_tiles ? launch_portable<T, 2, kRank>(p, round, device, 1, overlap, stream)
                         : launch_portable<T, 1, kRank>(p, round, device, 2, overlap, stream);
  };
  return p.rank == 256 ? run(std::integral_constant<int, 256>{})
                       : run(std::integral_constant<int, 0>{});
}

}  // namespace

int draft_chain_certify_cuda(const ChainBlockParams& p, int round, void* stream) {
  if (p.batch * p.corrected() == 0) return kOk;
  return p.dtype == DType::kBF16 ? launch<bf16>(p, round, as_stream(stream))
                                 : launch<f16>(p, round, as_stream(stream));
}

}  // namespace domino
