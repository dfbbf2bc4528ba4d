#include <algorithm>

#include "head/expand.cuh"

namespace domino {

namespace {

constexpr int64_t kMaxGridY = 65535;
constexpr int64_t kWideBytes = 98 << 10;  // shared memory that a block has on every GPU from sm_80

bool fits_mma(const ExpandParams& p) {
  const auto rows = [](const void* pointer, int64_t length) {
    return is_aligned(pointer, 16) && length % 8 == 0;
  };
  return p.dtype != DType::kF32 && rows(p.w_ih, p.inputs) && rows(p.w_hh, p.units) &&
         rows(p.w1, p.hidden_width + p.units) && p.hidden_width % 8 == 0 && rows(p.w2, p.rank) &&
         rows(p.embedding, p.inputs) && rows(p.states, p.states_batch_stride) &&
         p.states_stride % 8 == 0 && rows(p.parent_states, p.parent_batch_stride) &&
         p.parent_stride % 8 == 0 &&
         (p.hidden == nullptr ||
          (rows(p.hidden, p.hidden_batch_stride) && p.hidden_slot_stride % 8 == 0));
}

// kWide: more than 8 columns, so that the weights are read once for several tiles of them.
template <class T, class Base, bool kMma, bool kWide>
int launch(const ExpandArgs& p, bool overlap, cudaStream_t stream) {
  constexpr int kTiles = kWide ? 2 : 1, kScoreTiles = kWide ? 4 : 1;
  const int64_t columns = kScoreTiles * kTileColumns;
  const auto grid = [&](int64_t rows, int rows_a_block) {
    return dim3(ceil_div<int64_t>(rows, rows_a_block),
                ceil_div<int64_t>(p.batch * p.paths, kTiles * kTileColumns));
  };
  const dim3 score_grid(p.at.parts, ceil_div<int64_t>(p.layout.tiles, kScoreTiles));
  if (score_grid.y > kMaxGridY || grid(1, 1).y > kMaxGridY) return kBadArgument;
  const int64_t scores = columns * p.at.part_size * 4 * (p.drawn != 0 ? 2 : 1);
  const int64_t merging = merge_bytes(p.children, p.at.parts) * (p.children > 16 ? 4 : 8);
  const int64_t ids = p.pool != nullptr ? p.at.part_size * 4 : 0;
  const int shared = static_cast<int>(std::max(scores + ids, merging));

  const auto run = [&](dim3 blocks, int bytes, auto kernel, auto... arguments) {
    launch_kernel({blocks, kHeadThreads, static_cast<size_t>(bytes), 1, overlap}, stream, kernel, p,
                  arguments...);
  };
  const bool corrected = p.path_depth != nullptr || p.depth >= p.prefix;
  const auto score = expand_score<T, Base, kMma, kScoreTiles>;
  if (shared > 40 << 10) {  // with the kernel's static arrays at most 48 KB need no attribute
    const cudaError_t error =
        cudaFuncSetAttribute(score, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error != cudaSuccess) return error;
  }
  if (corrected && p.hidden != nullptr)
    run(grid(p.rank, kTileRows), 0, expand_hidden<T, kMma, kTiles>);
  if (p.recurrent()) run(grid(p.units, kGruTileUnits), 0, expand_state<T, kMma, kTiles>);
  if (corrected) run(grid(p.rank, kTileRows), 0, expand_low_rank<T, kMma, kTiles>);
  if (!corrected && !p.recurrent()) {  // no launch in front has done it
    void* arrived = static_cast<char*>(p.workspace) + p.at.arrived;
    const cudaError_t error = cudaMemsetAsync(arrived, 0, p.layout.tiles * 4, stream);
    if (error != cudaSuccess) return error;
    overlap = false;
  }
  run(score_grid, shared, score, corrected ? 1 : 0);
  return launched();
}

template <class T, class Base>
int launch(const ExpandParams& p, cudaStream_t stream) {
  int index = 0, major = 0;
  cudaError_t error = cudaGetDevice(&index);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
  if (error != cudaSuccess) return error;
  const ExpandArgs args(p);
  const bool overlap = major >= 9;
  const int64_t wide = 4 * kTileColumns * args.at.part_size * 4 * (p.drawn != 0 ? 2 : 1);
  const int64_t columns = p.pool != nullptr ? p.paths : p.batch * p.paths;
  const bool tiles_fit = p.pool == nullptr || args.layout.tiles_a_batch % 4 == 0;
  if constexpr (!std::is_same_v<T, float>) {
    if (fits_mma(p) && columns > kTileColumns && wide <= kWideBytes && tiles_fit)
      return launch<T, Base, true, true>(args, overlap, stream);
    if (fits_mma(p)) return launch<T, Base, true, false>(args, overlap, stream);
  }
  return launch<T, Base, false, false>(args, overlap, stream);
}

}  // namespace

int expand_cuda(const ExpandParams& p, void* stream) {
  if (p.batch == 0 || p.paths == 0) return kOk;
  if (p.children > kMaxChildren) return kBadArgument;
  return dispatch_dtype(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    if (p.base_dtype == p.dtype) return launch<T, T>(p, as_stream(stream));
    if (p.base_dtype == DType::kF32) return launch<T, float>(p, as_stream(stream));
    return static_cast<int>(kBadDtype);
  });
}

}  // namespace domino
