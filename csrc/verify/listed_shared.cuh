// The shared memory of a block of verify_listed.cuh, and what blocks of a cluster find in it.
#pragma once

#include "verify/value_bins.cuh"

namespace domino {

// Keys of bf16 logits (16 bits) by how far they are below the greatest: 1/32 of an octave for four
// octaves, 1/8 for eight, then eight octaves.
struct alignas(16) KeyBins {
  static constexpr int kCount = 256, kFine = 512, kMedium = 1536;

  uint32_t count[kCount];

  __device__ __forceinline__ void add(uint32_t below) {
    const uint32_t bin = below < kFine     ? below / 4
                         : below < kMedium ? 128 + (below - kFine) / 16
                                           : 192 + (below - kMedium) / 1024;
    atomicAdd(&count[bin], 1u);
  }

  // How far the k-th key is below the greatest, or a little more; 0xffff where there are fewer. By
  // a whole warp.
  __device__ __forceinline__ uint32_t reach(uint32_t k) const {
    const int lane = threadIdx.x % kWarpSize;
    const uint4* bins = reinterpret_cast<const uint4*>(count) + 2 * lane;
    const uint32_t own[8] = {bins[0].x, bins[0].y, bins[0].z, bins[0].w,
                             bins[1].x, bins[1].y, bins[1].z, bins[1].w};
    uint32_t sum = 0;
#pragma unroll
    for (int n = 0; n < 8; ++n) sum += own[n];
    uint32_t up_to = sum;
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) {
      const uint32_t left = __shfl_up_sync(kFullMask, up_to, step);
      if (lane >= step) up_to += left;
    }
    const unsigned reached = __ballot_sync(kFullMask, up_to >= k);
    if (reached == 0) return 0xffffu;
    int bin = 8 * lane;
    up_to -= sum;
#pragma unroll
    for (int n = 0; n < 8; ++n) bin += (up_to += own[n]) < k;
    const int last = bin < 128   ? 4 * bin + 3
                     : bin < 192 ? kFine + 16 * (bin - 127) - 1
                                 : kMedium + 1024 * (bin - 191) - 1;
    return __shfl_sync(kFullMask, static_cast<uint32_t>(last), __ffs(reached) - 1);
  }
};

// Sums over rows of 32 bins. A lane takes eight rows: apart so that its and others' are in
// different banks.
struct BinRows {
  static constexpr int kCount = kValueBins / kWarpSize;
  static __device__ __forceinline__ int at(int row) { return row + row / 8; }

  uint64_t mass[kCount + kCount / 8];
  uint64_t heavy[kCount + kCount / 8];  // of what min-p keeps
  uint32_t count[kCount + kCount / 8];
};

// What a block finds in its share of a row.
struct alignas(16) ShareFound {
  uint32_t top;        // logit_key of the greatest
  uint32_t listed;     // groups, more than there is room for, perhaps
  uint32_t near_zero;  // tokens, the same
  float bound;         // of the list; -inf: none
};

struct ListedShared {
  alignas(16) uint32_t count[kValueBins];
  union {
    struct {
      // groups with tokens that a bound does not leave out, and their first tokens
      uint4 list[kListedGroups];
      int32_t list_token[kListedGroups];
    };
    BinRows rows;  // once the list has been counted
  };
  uint16_t near[kNearTokens];  // bf16 of tokens in the bins around 0 that are not 0
  ShareFound found;
  uint32_t unclear;    // is the cut among those near 0?
  uint32_t first_top;  // logit_key, its upper half, of the readers' first tops
  uint32_t crowded;    // the lists hold too many tokens to go on without bins
  uint64_t rank_mass;  // of the top-k, and their last bin
  int rank_bin;
  uint32_t tokens[kMostCutBlocks];
  uint64_t mass[kMostCutBlocks];
  uint64_t near_mass;  // what those near 0 weigh more than 0 does
  CountAndMass warps[kCutWarps];
  ValueCut cut;
};

}  // namespace domino
