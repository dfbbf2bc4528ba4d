// from_hidden as chain_hoist (draft_chain_hoist.cuh) makes it, to the bit, for many columns: a
// block owns 32 columns (b, draft) and 64 rows of W1, which go through shared memory once for all
// warps.
//
// What a warp there sums by itself, the chunks w, w + 8, .. of 32 k, all warps sum here one w after
// the other, 16 columns by 16 rows each. Bytes: W1h for each block of columns, H for each of rows;
// bound by these reads from L2, half of what chain_hoist reads.
#pragma once

#include "common/copy_async.cuh"
#include "head/draft_chain_hoist.cuh"

namespace domino {

constexpr int kHoistColumns = 32, kHoistRows = 64, kHoistPairs = kHoistColumns + kHoistRows;
constexpr int kHoistChunks = 2, kHoistStages = 6;                     // chunks of a stage
constexpr int kHoistStage = kHoistChunks * kHoistPairs * kChunk * 2;  // bytes
constexpr int kHoistBytes = kHoistStages * kHoistStage;

inline int64_t hoist_stream_blocks(int64_t rank, int64_t columns) {
  return ceil_div<int64_t>(rank, kHoistRows) * ceil_div<int64_t>(columns, kHoistColumns);
}

template <class T>
__device__ __forceinline__ void hoist_stream(const ChainBlockParams& p, int block, char* ring) {
  constexpr int kThreads = kHoistWarps * kWarpSize;
  constexpr int kEach = kHoistChunks * kHoistPairs * 4 / kThreads;  // copies of a thread
  static_assert(kEach * kThreads == kHoistChunks * kHoistPairs * 4);
  const int64_t corrected = p.corrected(), row_blocks = ceil_div<int64_t>(p.rank, kHoistRows);
  const int64_t row0 = block % row_blocks * kHoistRows;
  const int64_t column0 = block / row_blocks * kHoistColumns;
  const int64_t active = p.num_active ? min(static_cast<int64_t>(*p.num_active), p.batch) : p.batch;
  const int64_t columns = active * corrected;
  if (column0 >= columns) return;
  const int length = static_cast<int>(p.hidden_width);
  const int turns = ceil_div(ceil_div(length, kHoistWarps * kChunk), kHoistChunks);  // of a w

  const T* from[kEach];
  int k_of[kEach];  // behind the first chunk of a stage
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int piece = threadIdx.x + i * kThreads, pair = piece / 4 % kHoistPairs;
    k_of[i] = piece / (4 * kHoistPairs) * (kHoistWarps * kChunk) + piece % 4 * 8;
    if (pair < kHoistColumns) {
      const int64_t n = min(column0 + pair, columns - 1);
      from[i] = static_cast<const T*>(p.hidden) + n / corrected * p.hidden_batch_stride +
                (p.first_slot + p.prefix + n % corrected) * p.hidden_slot_stride;
    } else {
      from[i] = static_cast<const T*>(p.w1) +
                min(row0 + pair - kHoistColumns, p.rank - 1) * (p.hidden_width + p.units);
    }
  }
  const auto copy = [&](int n) {
    if (n < kHoistWarps * turns) {
      const int k0 = (n / turns + n % turns * kHoistChunks * kHoistWarps) * kChunk;
      char* const stage = ring + n % kHoistStages * kHoistStage;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        auto* const to = reinterpret_cast<uint4*>(stage) + threadIdx.x + i * kThreads;
        if (k0 + k_of[i] < length) {
          copy_async16(shared_address(to), from[i] + k0 + k_of[i]);
        } else {
          *to = {0, 0, 0, 0};
        }
      }
    }
    copy_async_commit();
  };
  for (int n = 0; n < kHoistStages - 1; ++n) copy(n);
  const int warp = warp_id(), g = lane_id() / 4, t = lane_id() % 4;
  const int column = warp % 2 * 16, row = warp / 2 * 16;  // of this warp
  float totals[2][4] = {};
  for (int w = 0, n = 0; w < kHoistWarps; ++w) {
    float sums[2][4] = {};
    for (int turn = 0; turn < turns; ++turn, ++n) {
      copy_async_wait<kHoistStages - 2>();
      __syncthreads();  // all copies of stage n are there, and all have read the one before
      copy(n + kHoistStages - 1);
      const auto* const stage =
          reinterpret_cast<const uint4*>(ring + n % kHoistStages * kHoistStage) + t;
#pragma unroll
      for (int chunk = 0; chunk < kHoistChunks; ++chunk) {
        const auto at = [&](int pair) { return stage[(chunk * kHoistPairs + pair) * 4]; };
        const uint4 low = at(column + g), high = at(column + 8 + g);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
          RowTile<T, true>::add(sums[tile], low, high, at(kHoistColumns + row + tile * 8 + g));
      }
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) totals[tile][i] += sums[tile][i];
  }
#pragma unroll
  for (int tile = 0; tile < 2; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t n = column0 + column + half * 8 + g, r = row0 + row + tile * 8 + 2 * t;
      if (n < columns && r < p.rank)
        *reinterpret_cast<float2*>(p.from_hidden + n * p.rank + r) = {totals[tile][2 * half],
                                                                      totals[tile][2 * half + 1]};
    }
}

}  // namespace domino
