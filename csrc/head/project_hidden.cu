// One block owns 16 rows of W1 and 8 or 16 hidden rows; its warps share the columns. Bytes: W1h
// once for every 16 hidden rows; bound by latency at the sizes of a head.
#include "head/head_tile.cuh"
#include "head/project_hidden.h"

namespace domino {

namespace {

constexpr int64_t kMaxGridY = 65535;

template <class T, bool kMma, int kTiles>
__global__ void __launch_bounds__(kHeadThreads, 2)
    project_hidden_kernel(const __grid_constant__ ProjectHiddenParams p) {
  __shared__ int64_t offset[kTiles * kTileColumns];
  const int64_t rows = p.batch * p.slots;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kTiles * kTileColumns;
  const auto ready = [&] {
    previous_launch_done();
    if (threadIdx.x < kTiles * kTileColumns) {
      const int64_t n = min(first + threadIdx.x, rows - 1);
      offset[threadIdx.x] =
          n / p.slots * p.hidden_batch_stride + n % p.slots * p.hidden_slot_stride;
    }
    __syncthreads();
  };
  const auto store = [&](int tile, int64_t row, int column, float sum) {
    const int64_t n = first + tile * kTileColumns + column;
    if (n < rows) p.out[n * p.rank + row] = sum;
  };
  project<T, kMma, kTiles>(static_cast<const T*>(p.w1), p.w1_stride, p.rank, p.width,
                           GatheredColumns<T>{static_cast<const T*>(p.hidden), offset}, ready,
                           store);
}

template <class T, bool kMma, int kTiles>
int launch(const ProjectHiddenParams& p, cudaStream_t stream) {
  const int64_t columns = ceil_div<int64_t>(p.batch * p.slots, kTiles * kTileColumns);
  if (columns > kMaxGridY) return kBadArgument;
  const dim3 grid(ceil_div<int64_t>(p.rank, kTileRows), columns);
  launch_kernel(false, grid, kHeadThreads, stream, project_hidden_kernel<T, kMma, kTiles>, p);
  return launched();
}

}  // namespace

int project_hidden_cuda(const ProjectHiddenParams& p, void* stream) {
  if (p.batch * p.slots == 0) return kOk;
  const bool fits_mma = is_aligned(p.hidden, 16) && is_aligned(p.w1, 16) && p.width % 8 == 0 &&
                        p.w1_stride % 8 == 0 && p.hidden_batch_stride % 8 == 0 &&
                        p.hidden_slot_stride % 8 == 0;
  return dispatch_dtype(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    if constexpr (!std::is_same_v<T, float>) {
      if (fits_mma && p.batch * p.slots > kTileColumns)
        return launch<T, true, 2>(p, as_stream(stream));
      if (fits_mma) return launch<T, true, 1>(p, as_stream(stream));
    }
    return launch<T, false, 1>(p, as_stream(stream));
  });
}

}  // namespace domino
