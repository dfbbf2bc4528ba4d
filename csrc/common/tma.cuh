// Tiles of a matrix from global to shared memory by the copy engine (sm_90), and the barriers in
// shared memory that tell when they are there.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "common/copy_async.cuh"
#include "common/dtype.h"
#include "common/status.h"

namespace domino {

constexpr int kTileWidth = 64;  // elements of 16 bits: the 128 bytes over which a tile is swizzled

// The driver's cuTensorMapEncodeTiled, which the extension does not link.
inline int find_tile_encoder(decltype(&cuTensorMapEncodeTiled)* encode) {
  static std::atomic<void*> known{nullptr};
  void* found = known.load(std::memory_order_relaxed);
  if (found == nullptr) {
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                               12000, cudaEnableDefault, &result);
    if (error != cudaSuccess) return error;
    known.store(found, std::memory_order_relaxed);
  }
  *encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  return kOk;
}

// A contiguous [rows, width] matrix of 16-bit elements, in tiles of kTileWidth columns and
// `tile_rows` (at most 256) rows: row r of a tile has its 16 bytes number i at place i ^ (r % 8) of
// 128 bytes, as wgmma_swizzled() and load_matrices() want them. What is outside the matrix comes as
// zeros. data, and a row in bytes: multiples of 16.
inline int make_tile_map(CUtensorMap* map, const void* data, DType dtype, int64_t rows,
                         int64_t width, int tile_rows) {
  decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  if (const int status = find_tile_encoder(&encode); status != kOk) return status;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(rows)};
  const cuuint64_t row_bytes = static_cast<cuuint64_t>(width) * 2;
  const cuuint32_t tile[2] = {kTileWidth, static_cast<cuuint32_t>(tile_rows)}, step[2] = {1, 1};
  const CUresult result = encode(
      map,
      dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
      const_cast<void*>(data), sizes, &row_bytes, tile, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? kOk : kBadArgument;
}

// A barrier in shared memory for `arrivals` a phase. Others may use it behind fence_barriers() and
// a barrier of the block.
__device__ __forceinline__ void init_barrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

__device__ __forceinline__ void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and the phase waits for `bytes` of copies as well.
__device__ __forceinline__ void arrive_with_bytes(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

// Arrives once this thread's copies so far (copy_async.cuh) are there, without waiting for them.
__device__ __forceinline__ void arrive_behind_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Until the phase of this parity (0 for the first, then 1, 0, ..) is over.
__device__ __forceinline__ void wait_for_phase(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{ .reg .pred over;\n"
      "again: mbarrier.try_wait.parity.shared.b64 over, [%0], %1;\n"
      "@!over bra again; }" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// The tile that begins at (row, column) to `shared` (1024-byte aligned); one thread calls.
__device__ __forceinline__ void copy_tile(uint32_t shared, const CUtensorMap& map, int row,
                                          int column, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

// `bytes` side by side, a multiple of 16 as both addresses are; one thread calls.
__device__ __forceinline__ void copy_bytes(uint32_t shared, const void* from, int bytes,
                                           uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

}  // namespace domino
