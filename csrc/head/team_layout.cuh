// How the team form (draft_chain_team.cuh) is laid out: what a launch is told, and the shared
// memory of its blocks.
#pragma once

#include "common/copy_async.cuh"
#include "head/chain_exchange.cuh"
#include "head/chain_math.cuh"
#include "head/draft_chain.h"

namespace domino {

constexpr int kTeam = 8;       // blocks of a batch row: a cluster,
constexpr int kWideTeam = 16;  // of this size where there are few rows
constexpr int kTeamRows = 16;  // batch rows of a launch, at most
constexpr int kTeamWarps = 8;  // of a block
constexpr int kTeamThreads = kTeamWarps * kWarpSize;
constexpr int kTeamParts =
    kStateParts / kTeamWarps;    // of the k of a product with the state, a warp
constexpr int kStateUnits = 32;  // of a block that multiplies W_hh

struct TeamArgs : ChainBlockParams {
  int64_t row0;   // first batch row of the launch
  int teams;      // batch rows, a cluster each; the blocks behind them multiply W_hh
  int part_log;   // log2 of the ids of a pool in a block: 16 or more
  int tiles_log;  // log2 of the tiles of a warp, 16 ids each
  int key_words;  // of a block: warps that have ids
  int pitch;      // bytes of a W2 row in shared memory: 16 modulo 32
  int stages;     // sixteens of weight rows that a warp has under way at once
  bool resident;  // W2's rows are in shared memory; otherwise they are read in place
  bool restart;
};

// S_j in words of 4 units: those of k and of k + 16 side by side, for each lane of a quad, as the
// fragments of two MMAs. In shared memory (rows = 1) or for all rows of a launch, 8 in a tile.
struct StateWords {
  int rows, units;  // units: a multiple of 32
  __device__ int stride(int row) const { return min(8, rows - row / 8 * 8) * 64; }  // of 32 units
  __device__ int at(int row, int unit, int t) const {                               // bytes
    return row / 8 * 16 * units + unit / 32 * stride(row) + (row % 8 * 4 + t) * 16;
  }
};

// Shared memory of a block of a team, in bytes from its start.
struct TeamMemory {
  // a barrier for each kind of what the cluster sends
  static constexpr int keys_barrier = 0, states_barrier = 8, low_rank_barrier = 16;
  static constexpr int kBarriers = 3;
  static constexpr int kSumPitch = kTeamWarps + 4;
  static constexpr int keys = 32;                                     // u64 [members, key_words]
  static constexpr int low_sums = keys + kWideTeam * kTeamWarps * 8;  // f32 [32 W1s rows, 8 + 4]
  static constexpr int low_rank = low_sums + 32 * kSumPitch * 4;      // u: 256 elements at most
  static constexpr int states = low_rank + 256 * 2;                   // S_j: 1024 units at most
  static constexpr int inputs = states + 1024 * 2;                    // of a known id, warp 0's
  static constexpr int ids = inputs + kWarpSize * 24;                 // i32 [ids_count]
  int ids_count;  // of a block: an eighth of the pool, twice where pools change
  DOMINO_HD int w2() const { return ids + ids_count * 4; }
};

// Of a block that multiplies W_hh: the parts of k of each product, twice.
struct StateMemory {
  // lanes that store or sum at once meet in no bank
  static constexpr int kColumn = 3 * kStateUnits + 4, kPart = 8 * kColumn;
  static constexpr int kBuffer = kTeamWarps * kPart * 4;
  static constexpr int bytes = 2 * kBuffer;
};

__device__ __forceinline__ uint2 load_shared(uint32_t at) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "r"(at)
               : "memory");
  return value;
}

// The last `left` groups of copies of this thread may be in flight; left: known when compiled.
__device__ __forceinline__ void wait_for_all_but(int left) {
  if (left == 0) return copy_async_wait<0>();
  if (left == 1) return copy_async_wait<1>();
  if (left == 2) return copy_async_wait<2>();
  if (left == 3) return copy_async_wait<3>();
  if (left == 4) return copy_async_wait<4>();
  copy_async_wait<5>();
}

template <class T>
struct WeightRows {
  const T* first;
  int64_t stride;
};

// Sixteens of weight rows on their way to a warp's MMA fragments, its part of k alone, through
// shared memory: as many are in flight as there is room for. Loads to registers were waited for six
// at a time, each a trip to HBM, for want of other registers.
template <class T, int kMmas, int kCount>
struct WeightStages {
  static constexpr int kSixteens = kCount;
  static_assert(kCount <= 6);
  static constexpr int kPitch = kMmas * 32 + 32;  // bytes of a row: no bank conflicts
  static constexpr int kWarp = 16 * kPitch, kBytes = kTeamWarps * kWarp;

  uint32_t memory;  // kBytes for each of `stages`
  int stages;

  // of this warp
  __device__ __forceinline__ uint32_t at(int place) const {
    return memory + place * kBytes + threadIdx.x / kWarpSize * kWarp;
  }
  // The sixteens from `first` on; rows(i): this warp's part of the i-th, null where there is
  // none. elements: of the part, a multiple of 16.
  template <class Rows>
  __device__ __forceinline__ void fetch(int first, int elements, Rows rows) const {
    constexpr int kPieces = kMmas * 2;  // 16 bytes each
#pragma unroll 1
    for (int i = first; i < min(first + stages, kSixteens); ++i) {
      const WeightRows<T> of = rows(i);
#pragma unroll
      for (int k = 0; k < kPieces / 2; ++k) {
        const int n = k * kWarpSize + threadIdx.x % kWarpSize;
        if (of.first != nullptr && n % kPieces * 8 < elements)
          copy_async16(at(i - first) + n / kPieces * kPitch + n % kPieces * 16,
                       of.first + n / kPieces * of.stride + n % kPieces * 8);
      }
      copy_async_commit();
    }
  }
  // All of them as fragments; what is not there is zero. fetch(0, ..) has been called.
  template <class Rows>
  __device__ __forceinline__ void take(uint4 (&w)[kSixteens][kMmas], int elements,
                                       Rows rows) const {
    const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
    int first = 0;  // of those that are there
#pragma unroll
    for (int i = 0; i < kSixteens; ++i) {
      if (i == 0 || i == first + stages) {
        __syncwarp();
        if (i > 0) fetch(i, elements, rows);
        if (stages < kSixteens) copy_async_wait<0>();
        first = i;
      }
      if (stages == kSixteens) wait_for_all_but(kSixteens - 1 - i);  // those that are needed
      __syncwarp();
      const bool real = rows(i).first != nullptr;
#pragma unroll
      for (int m = 0; m < kMmas; ++m) {
        uint2 low{0, 0}, high{0, 0};
        if (real && m * 16 < elements) {
          const uint32_t from = at(i - first) + g * kPitch + m * 32 + t * 8;
          low = load_shared(from), high = load_shared(from + 8 * kPitch);
        }
        w[i][m] = {low.x, high.x, low.y, high.y};
      }
    }
  }
};

}  // namespace domino
