#include "head/expand_score.cuh"

namespace domino {

namespace {

constexpr int64_t kMaxGridY = 65535;

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

// The launches in front of expand_score, with weights read once for kTiles * 8 paths.
template <class T, bool kMma, int kTiles>
int launch_low_rank(const ExpandArgs& p, bool corrected, bool overlap, cudaStream_t stream) {
  const int64_t columns = ceil_div<int64_t>(p.batch * p.paths, kTiles * kTileColumns);
  if (columns > kMaxGridY) return kBadArgument;
  const auto run = [&](int64_t rows, int rows_a_block, auto kernel) {
    const dim3 grid(ceil_div<int64_t>(rows, rows_a_block), columns);
    launch_kernel(overlap, grid, kHeadThreads, stream, kernel, p);
  };
  if (corrected && p.hidden != nullptr) run(p.rank, kTileRows, expand_hidden<T, kMma, kTiles>);
  if (p.recurrent()) run(p.units, kGruTileUnits, expand_state<T, kMma, kTiles>);
  if (corrected) run(p.rank, kTileRows, expand_low_rank<T, kMma, kTiles>);
  return launched();
}

template <class T, class Base, bool kMma, int kTiles>
int launch_score(const ExpandArgs& p, bool corrected, bool overlap, cudaStream_t stream) {
  const dim3 grid(p.at.parts, ceil_div<int64_t>(p.layout.tiles, kTiles));
  if (grid.y > kMaxGridY) return kBadArgument;
  const size_t memory = ScoreMemory(p, p.at, kTiles * kTileColumns, sizeof(T)).bytes;
  const auto kernel = expand_score<T, Base, kMma, kTiles>;
  if (memory > 40 << 10) {  // with the kernel's static arrays at most 48 KB need no attribute
    if (const int status = allow_shared_memory(kernel, memory); status != kOk) return status;
  }
  LaunchShape shape{grid, kHeadThreads, memory, 1, overlap};
  if (!corrected && !p.recurrent()) {  // no launch in front has done it
    void* arrived = static_cast<char*>(p.workspace) + p.at.arrived;
    const cudaError_t error = cudaMemsetAsync(arrived, 0, p.layout.tiles * 4, stream);
    if (error != cudaSuccess) return error;
    shape.overlap = false;
  }
  launch_kernel(shape, stream, kernel, p, corrected ? 1 : 0);
  return launched();
}

template <class T, class Base, bool kMma>
int launch(const ExpandArgs& p, const DeviceInfo& device, cudaStream_t stream) {
  const bool corrected = p.path_depth != nullptr || p.depth >= p.prefix;
  const bool overlap = device.major >= 9;
  int status;
  if (kMma && p.batch * p.paths > kTileColumns) {
    status = launch_low_rank<T, kMma, kMma ? 2 : 1>(p, corrected, overlap, stream);
  } else {
    status = launch_low_rank<T, kMma, 1>(p, corrected, overlap, stream);
  }
  if (status != kOk) return status;
  // Two tiles of paths where two blocks with their scores fit a processor.
  const int64_t memory = ScoreMemory(p, p.at, 2 * kTileColumns, sizeof(T)).bytes;
  const int64_t tiles = p.pool != nullptr ? p.layout.tiles_a_batch : 2 * p.layout.tiles;
  if (kMma && p.layout.tiles > 1 && tiles % 2 == 0 && 2 * memory <= device.shared_memory)
    return launch_score<T, Base, kMma, kMma ? 2 : 1>(p, corrected, overlap, stream);
  return launch_score<T, Base, kMma, 1>(p, corrected, overlap, stream);
}

template <class T, class Base>
int launch(const ExpandParams& p, cudaStream_t stream) {
  DeviceInfo device;
  if (const int status = current_device(&device); status != kOk) return status;
  const ExpandArgs args(p);
  if constexpr (!std::is_same_v<T, float>)
    if (fits_mma(p)) return launch<T, Base, true>(args, device, stream);
  return launch<T, Base, false>(args, device, stream);
}

}  // namespace

int expand_cuda(const ExpandParams& p, void* stream) {
  if (p.batch == 0 || p.paths == 0) return kOk;
  if (p.children > kMaxChildren || p.batch * p.paths > INT32_MAX) return kBadArgument;
  return dispatch_dtype(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    if (p.base_dtype == p.dtype) return launch<T, T>(p, as_stream(stream));
    if (p.base_dtype == DType::kF32) return launch<T, float>(p, as_stream(stream));
    return static_cast<int>(kBadDtype);
  });
}

}  // namespace domino
