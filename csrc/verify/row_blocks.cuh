// How a row is dealt out to the blocks of its cluster where a few rows are all that there is: by
// steps of 256 tokens, the next one to the next block, since likely tokens often are neighbours.
// The last warp of the last block reads nothing and judges.
#pragma once

#include "verify/ranked_tokens.cuh"

namespace domino {

constexpr int kMostTeamRows = kWarpSize / 2;  // of a request

template <int kBlockCount>
struct RowBlocks {
  static constexpr int kBlocks = kBlockCount;
  static constexpr int kReaders = kBlocks * kCutWarps - 1;                  // warps
  static constexpr int kSteps = kBlocks == 6 ? 7 : kBlocks == 3 ? 13 : 20;  // of a warp
  static constexpr int kParts = ceil_div(kSteps, kLaneGroups);
  static constexpr int kStride = kReaders * kGroupStep;  // from one of a warp's steps to the next
  // of tokens, whose greatest logits bound a top-k (verify_ranked.cuh)
  static constexpr int kSets = kBlocks == 6 ? kWarpSize : 2 * kWarpSize;  // of a block
  static constexpr int kAllSets = kBlocks * kSets;
  static constexpr int64_t kMostVocab = kSteps * kStride;
  static_assert(kMostVocab >= 151'936);

  // The first token of this thread.
  static __device__ __forceinline__ int first(int rank) {
    return (static_cast<int>(threadIdx.x) / kWarpSize * kBlocks + rank) * kGroupStep +
           static_cast<int>(threadIdx.x) % kWarpSize * kGroup;
  }
};

// The tokens of a thread as they come in: two parts of four steps each are on their way.
template <class Row>
class RowParts {
 public:
  // end: of what it reads
  __device__ __forceinline__ RowParts(const bf16* row, int first, int end)
      : row_(row), first_(first), end_(end) {
#pragma unroll
    for (int part = 0; part < kAhead; ++part) load(part);
  }
  RowParts() = default;

  // Steps of a part.
  static __device__ __forceinline__ constexpr int steps(int part) {
    return min(kLaneGroups, Row::kSteps - part * kLaneGroups);
  }
  __device__ __forceinline__ const Group<bf16> (&part(int n) const)[kLaneGroups] {
    return groups_[n % kAhead];
  }
  // What takes the place of a part.
  __device__ __forceinline__ void go_on(int part) {
    if (part + kAhead < Row::kParts) load(part + kAhead);
  }

 private:
  static constexpr int kAhead = 2;

  __device__ __forceinline__ void load(int part) {
#pragma unroll
    for (int g = 0; g < kLaneGroups; ++g) {
      const int n = part * kLaneGroups + g, at = first_ + n * Row::kStride;
      load_here(groups_[part % kAhead][g], n < Row::kSteps && at < end_, row_ + at);
    }
  }

  const bf16* row_;
  int first_, end_;
  Group<bf16> groups_[kAhead][kLaneGroups];
};

}  // namespace domino
