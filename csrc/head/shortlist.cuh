// shortlist: one read of the logits, then a radix select on integer keys; contract in shortlist.h.
//
//   shortlist_keys    a block has 2048 ids, a thread eight of them in all slots at once: the
//                     maximum over the slots as an ordered integer, 16 bits wide where that holds
//                     it (16-bit logits, no bias), the maxima of tiles, the winners of slots below
//                     the prefix. Neighbouring blocks read neighbouring logits: at that HBM runs at
//                     its speed.
//   shortlist_select  a cluster (portable: one block) has a row, a block a slice of its keys, in
//                     shared memory where they fit: 8 bits a pass, where in the counts of the whole
//                     row does the size-th key lie? Then the keys above it and the lowest ids equal
//                     to it, in ascending order of ids. Blocks read each other's counts.
//
// Bytes: the logits once; bound by that from a few rows on, by latency below.
#pragma once

#include "common/cluster.cuh"
#include "head/eight_logits.cuh"
#include "head/shortlist.h"

namespace domino {

constexpr int kKeysThreads = 256, kSelectThreads = 512;
constexpr int kSelectWarps = kSelectThreads / kWarpSize;
constexpr int kWarpIds = kEight * kWarpSize;     // 256, two tiles
constexpr int kKeysIds = kKeysThreads * kEight;  // of a block of shortlist_keys
constexpr int kDigits = 256;
constexpr int kMaxCluster = 16;  // not portable over 8, but every sm_90 has it

template <class Key>
struct alignas(16) EightKeys {
  Key at[kEight];
};

// Rows of the output: (b, pool). Which slots each maximum runs over.
struct ShortlistRow {
  int64_t b, first, end;  // slots [first, end)
  __device__ ShortlistRow(const ShortlistParams& p, int64_t row)
      : b(row / p.pools),
        first(p.pools == 1 ? 0 : row % p.pools),
        end(p.pools == 1 ? p.slots : first + 1) {}
};

constexpr int kCopies = 16;  // of a count, for lanes to add to without conflict

struct ShortlistMemory {
  uint32_t counts[4][kDigits];
  uint32_t copies[kDigits][kCopies];  // of the pass that is being counted
  uint64_t scan[kDigits / kWarpSize];
  uint64_t found[3];  // totals before the digit, at the digit (total, in blocks before); the digit
  uint64_t warp_counts[kSelectWarps];

  __device__ void clear() {
    for (int i = threadIdx.x; i < kDigits * kCopies; i += kSelectThreads) copies[0][i] = 0;
    __syncthreads();
  }

  __device__ __forceinline__ void count(uint32_t digit) {
    atomicAdd(&copies[digit][threadIdx.x % kCopies], 1);
  }

  // counts[pass] from the copies, which are zero again. All threads call.
  __device__ void join_counts(int pass) {
    __syncthreads();
    for (int digit = threadIdx.x; digit < kDigits; digit += kSelectThreads) {
      uint32_t sum = 0;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        uint32_t& copy = copies[digit][(i + digit / 2) % kCopies];  // lanes on different banks
        sum += copy;
        copy = 0;
      }
      counts[pass][digit] = sum;
    }
  }
};

// Scratch: keys [rows, vocab to a tile].
template <class Key>
__device__ __forceinline__ Key* workspace_keys(const ShortlistParams& p, int64_t row) {
  return static_cast<Key*>(p.workspace) + row * round_up<int64_t>(p.vocab, kKeyTile);
}

// Raises `most` by `count` <= kCount slots; row: this lane's eight in the first of them.
template <bool kVector, int kCount, class Values, class Base>
__device__ __forceinline__ void raise_by_slots(Values& most, const Base* row, int64_t slot_stride,
                                               int count, const EightIds& ids, const float* bias) {
  uint4 raw[kCount][sizeof(Base) / 2];
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (i < count) load_logits<kVector>(raw[i], row + i * slot_stride, ids.inside);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i >= count) continue;
    Values values;
    values.set(raw[i], bias);
    most.raise(values);
  }
}

// Grid: x = ids / kKeysIds, y = rows of the output (looped).
template <class Base, bool kPacked, int kCount>
__global__ void __launch_bounds__(kKeysThreads, kCount > 1 ? 2 : 4)
    shortlist_keys(const __grid_constant__ ShortlistParams p, bool aligned) {
  using Values = EightLogits<Base, kPacked>;
  using Key = typename Values::Key;
  allow_next_launch();
  for (int64_t index = blockIdx.y; index < p.batch * p.pools; index += gridDim.y) {
    const ShortlistRow row(p, index);
    if (p.num_active && row.b >= *p.num_active) break;
    const EightIds ids(p, row.b, static_cast<int>(blockIdx.x) * kKeysIds + threadIdx.x * kEight);
    if (ids.inside == 0) continue;
    const Base* base = static_cast<const Base*>(p.base_logits) + row.b * p.base_batch_stride +
                       row.first * p.base_slot_stride + ids.v;
    float bias[kEight] = {};
    if (!kPacked && p.bias)
      for (int i = 0; i < ids.inside; ++i) bias[i] = p.bias[row.b * p.bias_stride + ids.v + i];
    const bool vector = aligned && ids.inside == kEight;
    Values most = Values::none();
    for (int64_t slot = row.first; slot < row.end;
         slot += kCount, base += kCount * p.base_slot_stride) {
      const int count = static_cast<int>(min(int64_t{kCount}, row.end - slot));
      if (vector) {
        raise_by_slots<true, kCount>(most, base, p.base_slot_stride, count, ids, bias);
      } else {
        for (int i = 0; i < count; ++i)
          raise_by_slots<false, 1>(most, base + i * p.base_slot_stride, 0, 1, ids, bias);
      }
    }
    most.allow(ids.keep);  // alike in all slots
    EightKeys<Key> eight;
#pragma unroll
    for (int k = 0; k < kEight; ++k) eight.at[k] = k < ids.inside ? most.key(k) : 0;
    *reinterpret_cast<EightKeys<Key>*>(workspace_keys<Key>(p, index) + ids.v) = eight;
  }
}

// Where the remaining-th largest of the keys counted in counts[pass] of all blocks lies.
struct Digit {
  uint32_t digit;
  uint32_t above;         // keys with a larger digit,
  uint32_t above_before;  // those of them in blocks of a lower rank,
  uint32_t equal_before;  // and with this digit there
};

__device__ __forceinline__ Digit find_digit(ShortlistMemory& memory, int pass, uint32_t remaining) {
  const int t = threadIdx.x;
  uint64_t mine = 0, sum = 0;  // all blocks, in the upper half those of a lower rank
  if (t < kDigits) {
    const unsigned blocks = cluster_size(), rank = cluster_rank();
#pragma unroll
    for (unsigned block = 0; block < kMaxCluster; ++block) {
      if (block >= blocks) break;
      const uint64_t count = load_shared_of(&memory.counts[pass][kDigits - 1 - t], block);
      mine += block < rank ? count << 32 | count : count;
    }
    sum = mine;
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const uint64_t below = __shfl_up_sync(kFullMask, sum, offset);
      if (t % kWarpSize >= offset) sum += below;
    }
    if (t % kWarpSize == kWarpSize - 1) memory.scan[t / kWarpSize] = sum;
  }
  __syncthreads();
  if (t < kDigits) {
    for (int warp = 0; warp < t / kWarpSize; ++warp) sum += memory.scan[warp];
    const uint32_t up_to = static_cast<uint32_t>(sum), before = static_cast<uint32_t>(sum - mine);
    if (before < remaining && remaining <= up_to) {
      memory.found[0] = sum - mine;
      memory.found[1] = mine;
      memory.found[2] = kDigits - 1 - t;
    }
  }
  __syncthreads();
  return {static_cast<uint32_t>(memory.found[2]), static_cast<uint32_t>(memory.found[0]),
          static_cast<uint32_t>(memory.found[0] >> 32),
          static_cast<uint32_t>(memory.found[1] >> 32)};
}

template <class Key>
__device__ __forceinline__ EightKeys<Key> load_eight(const Key* keys) {
  return *reinterpret_cast<const EightKeys<Key>*>(keys);
}

// The ids of the keys [0, count) of this block that belong to the p.size largest of the cluster, to
// their place in output row `row`. The first digits are counted already. All threads call.
template <class Values>
__device__ __forceinline__ void select(const ShortlistParams& p, int64_t row,
                                       const typename Values::Key* keys, int first, int count,
                                       ShortlistMemory& memory) {
  using Key = typename Values::Key;
  int32_t* const ids = p.ids + row * p.size;
  float* const scores = p.scores ? p.scores + row * p.size : nullptr;
  constexpr int kPasses = sizeof(Key);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  uint32_t remaining = static_cast<uint32_t>(p.size), above_before = 0, equal_before = 0;
  uint32_t threshold = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    const int shift = 8 * (kPasses - 1 - pass);
    if (pass > 0) {
      for (int i = threadIdx.x * kEight; i < count; i += kSelectThreads * kEight) {
        const EightKeys<Key> eight = load_eight(keys + i);
#pragma unroll
        for (int k = 0; k < kEight; ++k)
          if (eight.at[k] >> (shift + 8) == threshold) memory.count(eight.at[k] >> shift & 0xff);
      }
    }
    memory.join_counts(pass);
    cluster_sync();
    const Digit found = find_digit(memory, pass, remaining);
    remaining -= found.above;
    above_before += found.above_before;
    equal_before = found.equal_before;
    threshold = threshold << 8 | found.digit;
  }
  cluster_arrive();  // this block reads no other's memory from here on

  // Each warp owns a run of ids: counts them, learns what stands before it, writes.
  const int groups = ceil_div(count, kWarpIds);
  const int begin = groups * warp / kSelectWarps, end = groups * (warp + 1) / kSelectWarps;
  uint64_t mine = 0;  // above; equal in the upper half
  for (int group = begin; group < end; ++group) {
    const int i = group * kWarpIds + lane * kEight;
    if (i >= count) continue;
    const EightKeys<Key> eight = load_eight(keys + i);
#pragma unroll
    for (int k = 0; k < kEight; ++k)
      mine += eight.at[k] > threshold ? 1 : eight.at[k] == threshold ? uint64_t{1} << 32 : 0;
  }
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    mine += __shfl_xor_sync(kFullMask, mine, offset);
  if (lane == 0) memory.warp_counts[warp] = mine;
  __syncthreads();
  uint32_t above = above_before, equal = equal_before;
  for (int w = 0; w < warp; ++w) {
    above += static_cast<uint32_t>(memory.warp_counts[w]);
    equal += static_cast<uint32_t>(memory.warp_counts[w] >> 32);
  }
  for (int group = begin; group < end; ++group) {
    const int i = group * kWarpIds + lane * kEight;
    EightKeys<Key> eight{};
    uint32_t here = 0;
    if (i < count) {
      eight = load_eight(keys + i);
#pragma unroll
      for (int k = 0; k < kEight; ++k)
        here += (eight.at[k] > threshold) + ((eight.at[k] == threshold) << 16);
    }
    if (!__any_sync(kFullMask, here != 0)) continue;
    uint32_t sum = here;
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const uint32_t below = __shfl_up_sync(kFullMask, sum, offset);
      if (lane >= offset) sum += below;
    }
    if (here != 0) {
      uint32_t to_above = above + ((sum - here) & 0xffff), to_equal = equal + ((sum - here) >> 16);
#pragma unroll
      for (int k = 0; k < kEight; ++k) {
        const bool is_equal = eight.at[k] == threshold && to_equal < remaining;
        if (eight.at[k] > threshold || is_equal) {
          const uint32_t at = to_above + min(to_equal, remaining);
          ids[at] = first + i + k;
          if (scores) scores[at] = Values::value_of(eight.at[k]);
        }
        to_above += eight.at[k] > threshold;
        to_equal += eight.at[k] == threshold;
      }
    }
    sum = __shfl_sync(kFullMask, sum, kWarpSize - 1);
    above += sum & 0xffff;
    equal += sum >> 16;
  }
  cluster_wait();
}

__device__ __forceinline__ int slice_begin(int64_t vocab, int64_t slice, int64_t slices) {
  return ceil_div<int64_t>(vocab, kKeyTile) * slice / slices * kKeyTile;
}

// Grid: rows of the output, a cluster each. in_memory: the keys of a slice fit in shared memory.
template <class Values>
__global__ void __launch_bounds__(kSelectThreads, 1)
    shortlist_select(const __grid_constant__ ShortlistParams p, bool in_memory) {
  using Key = typename Values::Key;
  extern __shared__ uint4 shared[];
  __shared__ ShortlistMemory memory;
  const int blocks = cluster_size(), rank = cluster_rank();
  const int64_t row_index = blockIdx.x / blocks;
  const ShortlistRow row(p, row_index);
  const int begin = slice_begin(p.vocab, rank, blocks);
  const int end = min(p.vocab, static_cast<int64_t>(slice_begin(p.vocab, rank + 1, blocks)));
  memory.clear();
  previous_launch_done();
  if (p.num_active && row.b >= *p.num_active) return;
  const Key* keys = workspace_keys<Key>(p, row_index) + begin;
  Key* const kept = reinterpret_cast<Key*>(shared);
#pragma unroll 4
  for (int i = threadIdx.x * kEight; i < end - begin; i += kSelectThreads * kEight) {
    const EightKeys<Key> eight = load_eight(keys + i);
    if (in_memory) *reinterpret_cast<EightKeys<Key>*>(kept + i) = eight;
#pragma unroll
    for (int k = 0; k < kEight; ++k) memory.count(eight.at[k] >> (8 * sizeof(Key) - 8));
  }
  if (in_memory) keys = kept;
  select<Values>(p, row_index, keys, begin, end - begin, memory);
}

}  // namespace domino
