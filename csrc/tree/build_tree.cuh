// build_tree in one launch.
//
// A block owns one request and kColumnWords words of its mask: 4 x 32 columns. Every block of a
// request finds the same nodes (the choice is cheap), the first writes them. Ancestors come by
// pointer doubling: after round k a node knows its 2^k nearest, so a chain of 1024 takes ten
// rounds and a tree of depth 15 four. Bytes: candidates once, outputs once; bound by latency.
#pragma once

#include "common/launch.h"
#include "common/reduce.cuh"
#include "tree/build_tree.h"

namespace domino {

constexpr int kBuildThreads = 512;
constexpr int kColumnWords = 4;

struct BuildShared {
  uint32_t keys[kMaxCandidates];
  int16_t jump[2][kMaxCandidates];  // of candidates, later of nodes
  int16_t node_of[kMaxCandidates];
  int16_t candidate[kMaxBuiltNodes];
  int16_t parent[kMaxBuiltNodes];
  int16_t depth[2][kMaxBuiltNodes];
  uint32_t histogram[256];
  uint32_t prefix, above;  // radix selection
  int scan[kBuildThreads / kWarpSize];
  int orphans;
  uint32_t sees[kMaxBuiltNodes][kColumnWords];
};

// Exclusive prefix sum of one flag a thread; `total` is that of the block.
__device__ __forceinline__ int block_count(bool flag, int* slots, int* total) {
  const unsigned mask = __ballot_sync(kFullMask, flag);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  if (lane == 0) slots[warp] = __popc(mask);
  __syncthreads();
  int before = 0, all = 0;
  for (int w = 0; w < static_cast<int>(blockDim.x) / kWarpSize; ++w) {
    before += w < warp ? slots[w] : 0;
    all += slots[w];
  }
  __syncthreads();
  *total = all;
  return before + __popc(mask & ((1u << lane) - 1));
}

// keys[c] = least key on the way from the root to c, 0 where c does not hang on it.
__device__ __forceinline__ void candidate_keys(const BuildTreeParams& p, int64_t b,
                                               BuildShared* s) {
  const int count = static_cast<int>(p.candidates);
  for (int c = threadIdx.x; c < count; c += blockDim.x) {
    const int parent = p.parents[b * p.parents_stride + c];
    const bool orphan = parent < -1 || parent >= c;
    uint32_t key = 1;
    if (p.scores != nullptr) key = max(1u, score_key(p.scores[b * p.scores_stride + c]));
    s->keys[c] = orphan ? 0 : key;
    s->jump[0][c] = static_cast<int16_t>(orphan ? -1 : parent);
    if (orphan) s->orphans = 1;
  }
  // Reading a key that this round has lowered already only sees farther up: a minimum may.
  for (int from = 0;; from ^= 1) {
    bool moving = false;
    __syncthreads();
    for (int c = threadIdx.x; c < count; c += blockDim.x) {
      const int up = s->jump[from][c];
      int next = -1;
      if (up >= 0) {
        s->keys[c] = min(s->keys[c], *const_cast<volatile uint32_t*>(&s->keys[up]));
        next = s->jump[from][up];
      }
      s->jump[from ^ 1][c] = static_cast<int16_t>(next);
      moving |= next >= 0;
    }
    if (!__syncthreads_or(moving)) return;
  }
}

// The key of the wanted-th best candidate, and how many of those that have it are taken.
__device__ __forceinline__ void select_key(const BuildTreeParams& p, int wanted, BuildShared* s,
                                           uint32_t* threshold, int* equal) {
  const int count = static_cast<int>(p.candidates);
  uint32_t prefix = 0;
  int left = wanted;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < 256; i += blockDim.x) s->histogram[i] = 0;
    __syncthreads();
    for (int c = threadIdx.x; c < count; c += blockDim.x) {
      const uint32_t key = s->keys[c];
      if (key != 0 && (shift == 24 || key >> (shift + 8) == prefix))
        atomicAdd(&s->histogram[key >> shift & 255], 1u);
    }
    __syncthreads();
    if (threadIdx.x < kWarpSize) {  // from the greatest digit down, eight to a lane
      constexpr int kEach = 256 / kWarpSize;
      const int top = 255 - kEach * static_cast<int>(threadIdx.x);
      uint32_t own = 0;
      for (int i = 0; i < kEach; ++i) own += s->histogram[top - i];
      uint32_t sum = own;
      for (int offset = 1; offset < kWarpSize; offset *= 2) {
        const uint32_t before = __shfl_up_sync(kFullMask, sum, offset);
        sum += threadIdx.x >= offset ? before : 0;
      }
      uint32_t above = sum - own;
      if (above < static_cast<uint32_t>(left) && static_cast<uint32_t>(left) <= sum) {
        int digit = top;
        while (above + s->histogram[digit] < static_cast<uint32_t>(left))
          above += s->histogram[digit--];
        s->prefix = prefix << 8 | static_cast<uint32_t>(digit);
        s->above = above;
      }
    }
    __syncthreads();
    prefix = s->prefix;
    left -= static_cast<int>(s->above);
  }
  *threshold = prefix;
  *equal = left;
}

// Grid: batch x blocks of columns.
__global__ void __launch_bounds__(kBuildThreads)
    build_tree_kernel(const __grid_constant__ BuildTreeParams p) {
  __shared__ BuildShared shared;
  BuildShared* s = &shared;
  const int64_t b = blockIdx.x;
  const int count = static_cast<int>(p.candidates), nodes = static_cast<int>(p.nodes);
  if (threadIdx.x == 0) s->orphans = 0;
  __syncthreads();
  candidate_keys(p, b, s);

  int valid = 0;
  for (int base = 0; base < count; base += blockDim.x) {
    const int c = base + threadIdx.x;
    valid += __syncthreads_count(c < count && s->keys[c] != 0);
  }
  uint32_t threshold = 1;
  int equal = valid;
  if (valid > nodes - 1) {
    equal = 0;
    threshold = ~0u;
    if (nodes > 1) select_key(p, nodes - 1, s, &threshold, &equal);
  }
  // the chosen, in order of index
  int filled = 1, seen_equal = 0;
  for (int base = 0; base < count; base += blockDim.x) {
    const int c = base + threadIdx.x;
    const uint32_t key = c < count ? s->keys[c] : 0;
    int equals, taken;
    const int rank = seen_equal + block_count(key == threshold, s->scan, &equals);
    const bool take = key > threshold || (key == threshold && rank < equal);
    const int n = filled + block_count(take, s->scan, &taken);
    if (c < count) s->node_of[c] = static_cast<int16_t>(take ? n : -1);
    if (take) s->candidate[n] = static_cast<int16_t>(c);
    seen_equal += equals;
    filled += taken;
  }
  __syncthreads();

  const int first_word = static_cast<int>(blockIdx.y) * kColumnWords;
  for (int n = threadIdx.x; n < nodes; n += blockDim.x) {
    int parent = -1;
    if (n > 0 && n < filled) {
      parent = p.parents[b * p.parents_stride + s->candidate[n]];
      parent = parent < 0 ? 0 : s->node_of[parent];
    }
    s->parent[n] = s->jump[0][n] = static_cast<int16_t>(parent);
    s->depth[0][n] = parent >= 0 ? 1 : 0;
#pragma unroll
    for (int w = 0; w < kColumnWords; ++w)
      s->sees[n][w] = n / 32 == first_word + w ? 1u << n % 32 : 0u;
  }
  int from = 0;
  for (bool any = true; any; from ^= 1) {
    bool moving = false;
    __syncthreads();
    // Words and nodes over the threads; a word that this round has filled already only holds more.
    for (int i = threadIdx.x; i < nodes * kColumnWords; i += blockDim.x) {
      const int n = i / kColumnWords, w = i % kColumnWords, up = s->jump[from][n];
      if (up >= 0) s->sees[n][w] |= *const_cast<volatile uint32_t*>(&s->sees[up][w]);
      if (w != 0) continue;
      const int next = up >= 0 ? s->jump[from][up] : -1;
      s->jump[from ^ 1][n] = static_cast<int16_t>(next);
      s->depth[from ^ 1][n] =
          static_cast<int16_t>(s->depth[from][n] + (up >= 0 ? s->depth[from][up] : 0));
      moving |= next >= 0;
    }
    any = __syncthreads_or(moving);
  }

  const int64_t start = p.prefix[b];
  if (blockIdx.y == 0) {
    for (int n = threadIdx.x; n < nodes; n += blockDim.x) {
      const int64_t at = b * nodes + n;
      const int c = n > 0 && n < filled ? s->candidate[n] : -1;
      const int depth = s->depth[from][n];
      p.out_tokens[at] = n == 0 ? p.root[b] : c < 0 ? -1 : p.tokens[b * p.tokens_stride + c];
      p.out_parents[at] = s->parent[n];
      p.out_index[at] = c;
      p.out_depth[at] = depth;
      p.out_position[at] = start + depth;
    }
    if (threadIdx.x == 0) p.status[b] = s->orphans != 0 ? kTreeStatus : 0;
  }

  if (p.mask_kind == TreeMask::kPacked) {
    const int words = (nodes + 31) / 32, mine = min(kColumnWords, words - first_word);
    uint32_t* mask = static_cast<uint32_t*>(p.mask) + b * nodes * words + first_word;
    for (int i = threadIdx.x; i < nodes * mine; i += blockDim.x)
      mask[i / mine * words + i % mine] = s->sees[i / mine][i % mine];
  } else if (p.mask_kind != TreeMask::kNone) {
    // this block's columns; the first writes the prefix too and the last what is behind
    const int64_t shift = p.mask_kind == TreeMask::kFull ? start : 0;
    const int64_t first = blockIdx.y == 0 ? 0 : max(shift + first_word * 32, int64_t{0});
    const int64_t end =
        blockIdx.y == gridDim.y - 1 ? p.columns : shift + (first_word + kColumnWords) * 32;
    uint8_t* mask = static_cast<uint8_t*>(p.mask) + b * nodes * p.columns;
    for (int n = threadIdx.x / kWarpSize; n < nodes; n += blockDim.x / kWarpSize) {
      for (int64_t j = first + threadIdx.x % kWarpSize; j < min(end, p.columns); j += kWarpSize) {
        const int64_t m = j - shift;
        bool seen = m < 0;
        if (m >= 0 && m < nodes) {
          const int bit = static_cast<int>(m) - first_word * 32;
          seen = (s->sees[n][bit / 32] >> bit % 32 & 1) != 0;
        }
        mask[n * p.columns + j] = seen;
      }
    }
  }
}

}  // namespace domino
