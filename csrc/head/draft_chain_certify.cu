#include <algorithm>

#include "head/draft_chain_certify_few.cuh"
#include "head/draft_chain_certify_wide.cuh"

namespace domino {

namespace {

constexpr int64_t kMemory = 226 << 10;  // bytes of shared memory of a processor that blocks may use

template <class... Args>
int launch(void (*kernel)(ChainBlockParams, Args...), const ChainBlockParams& p, LaunchShape shape,
           cudaStream_t stream, const Args&... args) {
  if (const int status = allow_shared_memory(kernel, shape.shared); status != kOk) return status;
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

// Tiles of W2's rows of a block at most, whichever rows of the batch are pending; 0: no block left.
int screen_rounds(const ChainBlockParams& p, int64_t units, int tiles, int processors) {
  int64_t fewest = processors;  // blocks of a part
  for (int64_t n = 1; n <= units; ++n) {
    const int64_t parts = ceil_div<int64_t>(n, tiles);
    if (parts > processors) return 0;
    fewest = std::min(fewest, 1 + (processors - parts) * (n / parts) / n);
  }
  return fewest > 0 ? ceil_div<int64_t>(ceil_div<int64_t>(p.vocab, kPoolTile), fewest) : 0;
}

// Does nothing, not *done, where shared memory has no room.
template <class T, int kTiles, int kPieces>
int launch_screen(const ChainBlockParams& p, int round, int processors, bool* done,
                  cudaStream_t stream) {
  constexpr int kAlign = 1024;
  const int64_t units = ceil_div<int64_t>(p.batch * p.corrected(), kWgmmaColumns);
  const int rounds = screen_rounds(p, units, kTiles, processors);
  if (rounds == 0) return kOk;
  int stages = kScreenStages;
  while (ScreenMemory(p.rank, p.batch, kTiles, rounds, stages).bytes + kAlign > kScreenMemory)
    if (--stages < 2) return kOk;
  *done = true;
  CUtensorMap map;  // int8 as 16-bit elements
  if (const int status =
          make_tile_map(&map, p.screen, DType::kBF16, p.vocab, p.rank / 2, kPoolTile);
      status != kOk)
    return status;
  int chain_blocks = 0;  // of the team form; with others no difference is known
  if (const int status = p.w_hh && kTiles == 1 ? draft_chain_team_blocks(p, &chain_blocks) : kOk;
      status != kOk)
    return status;
  LaunchShape shape{dim3(processors), screen_threads(kTiles)};
  shape.shared = ScreenMemory(p.rank, p.batch, kTiles, rounds, stages).bytes + kAlign;
  shape.overlap = true;
  return launch(chain_certify_screen<T, kTiles, kPieces>, p, shape, stream, map, round, rounds,
                stages, processors - chain_blocks);
}

template <class T>
int launch_screen(const ChainBlockParams& p, int round, int processors, bool* done,
                  cudaStream_t stream) {
  const int64_t units = ceil_div<int64_t>(p.batch * p.corrected(), kWgmmaColumns);
  const auto run = [&](auto pieces) {
    constexpr int kPieces = decltype(pieces)::value;
    const auto kernel = units == 1   ? launch_screen<T, 1, kPieces>
                        : units == 2 ? launch_screen<T, 2, kPieces>
                                     : launch_screen<T, kMostScreenTiles, kPieces>;
    return kernel(p, round, processors, done, stream);
  };
  return p.rank <= kPieceWidth ? run(std::integral_constant<int, 1>{})
                               : run(std::integral_constant<int, 2>{});
}

// One batch row of up to 16 columns.
template <class T, int kPieces, bool kScreen>
int launch_few(const ChainBlockParams& p, int round, int processors, cudaStream_t stream) {
  constexpr int kAlign = 1024, kStage = kPieces * kFewRows * kTileWidth * 2;
  const int stages = std::min<int>(kFewStages, (kMemory - kAlign - sizeof(FewMemory)) / kStage);
  CUtensorMap map;
  const int status =
      kScreen ? make_tile_map(&map, p.screen, DType::kBF16, p.vocab, p.rank / 2, kFewRows)
              : make_tile_map(&map, p.w2, p.dtype, p.vocab, p.rank, kFewRows);
  if (status != kOk) return status;
  LaunchShape shape{dim3(processors), kFewThreads};
  shape.shared = kAlign + stages * kStage + sizeof(FewMemory);
  shape.overlap = true;
  return launch(chain_certify_few<T, kPieces, kScreen>, p, shape, stream, map, round, stages);
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
    const bool few = p.batch == 1 && p.corrected() <= kFewColumns;
    const bool screen = p.screen != nullptr && is_aligned(p.screen, 16);
    if (few) {
      bool done = false;
      const int status = draft_chain_certify_early_cuda(p, round, &done, stream);
      if (done || status != kOk) return status;
    }
    if (screen && few)
      return p.rank <= kPieceWidth ? launch_few<T, 1, true>(p, round, device.processors, stream)
                                   : launch_few<T, 2, true>(p, round, device.processors, stream);
    if (screen) {
      bool done = false;
      const int status = launch_screen<T>(p, round, device.processors, &done, stream);
      if (done || status != kOk) return status;
    }
    constexpr decltype(&launch_wide<T, 1>) kLaunch[] = {launch_wide<T, 1>, launch_wide<T, 2>,
                                                        launch_wide<T, 3>, launch_wide<T, 4>};
    constexpr decltype(&launch_wide<T, 1>) kFew[] = {
        launch_few<T, 1, false>, launch_few<T, 2, false>, launch_few<T, 3, false>,
        launch_few<T, 4, false>};
    return (few ? kFew : kLaunch)[ceil_div<int64_t>(p.rank, 64) - 1](p, round, device.processors,
                                                                     stream);
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
