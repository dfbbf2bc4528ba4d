// shortlist: one read of the logits, then a radix select on integer keys; contract in shortlist.h.
//
//   shortlist_keys    a block has 2048 ids, a thread eight of them in all slots at once: the
//   maximum
//                     over the slots as an ordered integer, 16 bits wide where that holds it
//                     (16-bit logits, no bias), the maxima of tiles, the winners of slots below the
//                     prefix. Neighbouring blocks read neighbouring logits: at that HBM runs at its
//                     speed.
//   shortlist_select  a cluster (portable: one block) has a row, a block a slice of its keys, in
//                     shared memory where they fit: 8 bits a pass, where in the counts of the whole
//                     row does the size-th key lie? Then the keys above it and the lowest ids equal
//                     to it, in ascending order of ids. Blocks read each other's counts.
//
// Bytes: the logits once; bound by that from a few rows on, by latency below.
#pragma once

#include "common/argmax_key.h"
#include "common/cluster.cuh"
#include "common/mma.cuh"
#include "head/shortlist.h"

namespace domino {

constexpr int kKeysThreads = 256, kSelectThreads = 512;
constexpr int kKeysWarps = kKeysThreads / kWarpSize, kSelectWarps = kSelectThreads / kWarpSize;
constexpr int kEight = 8;                        // ids of a thread at a time
constexpr int kWarpIds = kEight * kWarpSize;     // 256, two tiles
constexpr int kKeysIds = kKeysThreads * kEight;  // of a block of shortlist_keys
constexpr int kDigits = 256;
constexpr int kMaxWinners = 16;
constexpr int kMaxCluster = 16;  // not portable over 8, but every sm_90 has it

// Eight neighbouring logits: kPacked two to a word, as they are; otherwise widened, with the bias.
template <class Base, bool kPacked>
struct Eight;

template <class T>
__device__ __forceinline__ uint32_t max_pair(uint32_t a, uint32_t b);
template <>
__device__ __forceinline__ uint32_t max_pair<bf16>(uint32_t a, uint32_t b) {
  uint32_t most;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}
template <>
__device__ __forceinline__ uint32_t max_pair<f16>(uint32_t a, uint32_t b) {
  uint32_t most;
  asm("max.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}

template <class T>
constexpr uint32_t kMinusInfinityPair = 0;
template <>
constexpr uint32_t kMinusInfinityPair<bf16> = 0xff80ff80u;
template <>
constexpr uint32_t kMinusInfinityPair<f16> = 0xfc00fc00u;

template <class T>
struct Eight<T, true> {
  using Key = uint16_t;
  uint32_t pair[4];

  static __device__ __forceinline__ Eight none() {
    Eight value;
    for (uint32_t& x : value.pair) x = kMinusInfinityPair<T>;
    return value;
  }
  __device__ __forceinline__ void set(const uint4 (&raw)[1], const float*) {
    pair[0] = raw[0].x, pair[1] = raw[0].y, pair[2] = raw[0].z, pair[3] = raw[0].w;
  }
  // bit i of `keep`: value i stays, the others become -inf
  __device__ __forceinline__ void allow(uint32_t keep) {
    if (keep == 0xff) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t mask =
          (keep >> (2 * i) & 1 ? 0xffffu : 0u) | (keep >> (2 * i + 1) & 1 ? 0xffff0000u : 0u);
      pair[i] = (pair[i] & mask) | (kMinusInfinityPair<T> & ~mask);
    }
  }
  __device__ __forceinline__ void raise(const Eight& other) {
#pragma unroll
    for (int i = 0; i < 4; ++i) pair[i] = max_pair<T>(pair[i], other.pair[i]);
  }
  // The largest of these values, as a word that may be compared and passed between lanes.
  using Most = uint32_t;
  __device__ __forceinline__ Most most() const {
    return max_pair<T>(max_pair<T>(pair[0], pair[1]), max_pair<T>(pair[2], pair[3]));
  }
  static __device__ __forceinline__ Most larger(Most a, Most b) { return max_pair<T>(a, b); }
  static __device__ __forceinline__ float value_of_most(Most most) {
    const float low = to_float(T{static_cast<uint16_t>(most)});
    return fmaxf(fmaxf(low, to_float(T{static_cast<uint16_t>(most >> 16)})), -INFINITY);
  }
  __device__ __forceinline__ float at(int i) const {
    return to_float(T{static_cast<uint16_t>(pair[i / 2] >> (16 * (i % 2)))});
  }
  __device__ __forceinline__ Key key(int i) const {
    const uint32_t bits = pair[i / 2] >> (16 * (i % 2)) & 0xffff;
    return bits == 0x8000 ? 0x8000 : bits ^ (bits & 0x8000 ? 0xffff : 0x8000);  // -0 becomes +0
  }
  static __device__ __forceinline__ float value_of(Key key) {
    return to_float(T{static_cast<uint16_t>(key ^ (key & 0x8000 ? 0x8000 : 0xffff))});
  }
};

template <class Base>
struct Eight<Base, false> {
  using Key = uint32_t;
  float value[kEight];

  static __device__ __forceinline__ Eight none() {
    Eight result;
    for (float& x : result.value) x = -INFINITY;
    return result;
  }
  __device__ __forceinline__ void set(const uint4 (&raw)[sizeof(Base) / 2], const float* bias) {
    Base element[kEight];
    memcpy(element, raw, sizeof(element));
#pragma unroll
    for (int i = 0; i < kEight; ++i) value[i] = to_float(element[i]) + bias[i];
  }
  __device__ __forceinline__ void allow(uint32_t keep) {
    if (keep == 0xff) return;
#pragma unroll
    for (int i = 0; i < kEight; ++i) value[i] = keep >> i & 1 ? value[i] : -INFINITY;
  }
  __device__ __forceinline__ void raise(const Eight& other) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) value[i] = fmaxf(value[i], other.value[i]);
  }
  using Most = float;
  __device__ __forceinline__ Most most() const {
    float most = value[0];
#pragma unroll
    for (int i = 1; i < kEight; ++i) most = fmaxf(most, value[i]);
    return most;
  }
  static __device__ __forceinline__ Most larger(Most a, Most b) { return fmaxf(a, b); }
  static __device__ __forceinline__ float value_of_most(Most most) {
    return fmaxf(most, -INFINITY);
  }
  __device__ __forceinline__ float at(int i) const { return value[i]; }
  __device__ __forceinline__ Key key(int i) const {
    return static_cast<Key>(argmax_key(value[i], 0) >> 32);
  }
  static __device__ __forceinline__ float value_of(Key key) {
    return key_value(static_cast<uint64_t>(key) << 32);
  }
};

template <class Key>
struct alignas(16) EightKeys {
  Key at[kEight];
};

// Rows of the output: (b, pool). Which slots each maximum runs over.
struct ShortlistRow {
  int64_t b, first, end;  // slots [first, end)
  bool only_winners;      // all of them below the prefix
  __device__ ShortlistRow(const ShortlistParams& p, int64_t row)
      : b(row / p.pools),
        first(p.pools == 1 ? 0 : row % p.pools),
        end(p.pools == 1 ? p.slots : first + 1),
        only_winners(end <= p.prefix) {}
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

// A thread's eight ids.
struct EightIds {
  int v, inside;  // first id; how many exist
  uint32_t keep;  // bit i: id v + i counts
  __device__ __forceinline__ EightIds(const ShortlistParams& p, int64_t b, int v)
      : v(v), inside(max(0, min(static_cast<int>(p.vocab) - v, kEight))), keep((1u << inside) - 1) {
    if (v + kEight > p.vocab_valid)
      keep &= (1u << max(0, min(static_cast<int>(p.vocab_valid) - v, kEight))) - 1;
    if (p.mask && inside > 0) keep &= p.mask[b * p.mask_stride + v / 32] >> (v % 32);
  }
};

// kVector: whole eights by 16-byte loads, or none; otherwise element by element.
template <bool kVector, class Base>
__device__ __forceinline__ void load_logits(uint4 (&raw)[sizeof(Base) / 2], const Base* at,
                                            int inside) {
  if constexpr (kVector) {
    if (inside == 0) return;
#pragma unroll
    for (int part = 0; part < static_cast<int>(sizeof(Base)) / 2; ++part)
      raw[part] = load_stream(at + part * (16 / sizeof(Base)));
  } else {
    Base element[kEight] = {};
    for (int k = 0; k < inside; ++k) element[k] = at[k];
    memcpy(raw, element, sizeof(element));
  }
}

// Raises `most` by `count` <= kCount slots from `slot` on; row: this lane's eight in the first of
// them. tile_max: where the tile's maxima of these slots go, or null.
template <class Values, class Base, bool kVector, int kCount, bool kTileMax>
__device__ __forceinline__ void raise_by_slots(Values& most, const Base* row, int64_t slot_stride,
                                               int count, const EightIds& ids, const float* bias,
                                               float* tile_max) {
  constexpr int kBits = kCount == 16 ? 4 : kCount == 8 ? 3 : kCount == 4 ? 2 : kCount - 1;
  static_assert(kCount == 1 << kBits);
  uint4 raw[kCount][sizeof(Base) / 2];
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (i < count) load_logits<kVector>(raw[i], row + i * slot_stride, ids.inside);
  typename Values::Most of_slot[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    Values values = Values::none();
    if (i < count) {
      values.set(raw[i], bias);
      values.allow(ids.keep);
      most.raise(values);
    }
    if constexpr (kTileMax) of_slot[i] = values.most();
  }
  if constexpr (!kTileMax) return;
  // Lanes trade halves of the slots until each has one slot's maximum over 2^kBits lanes.
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int bit = kBits - 1; bit >= 0; --bit) {
    const bool upper = (lane >> bit & 1) != 0;
#pragma unroll
    for (int i = 0; i < 1 << bit; ++i) {
      const auto given = upper ? of_slot[i] : of_slot[i + (1 << bit)];
      const auto kept = upper ? of_slot[i + (1 << bit)] : of_slot[i];
      of_slot[i] = Values::larger(kept, __shfl_xor_sync(kFullMask, given, 1 << bit));
    }
  }
#pragma unroll
  for (int bit = kBits; bit < 4; ++bit)
    of_slot[0] = Values::larger(of_slot[0], __shfl_xor_sync(kFullMask, of_slot[0], 1 << bit));
  // lane 16h + i: slot i of the h-th tile, which exists where its first lane has ids
  const bool tile_exists = __shfl_sync(kFullMask, ids.inside, lane / 16 * 16) > 0;
  if (lane % 16 < count && tile_exists) tile_max[lane % 16] = Values::value_of_most(of_slot[0]);
}

// Scratch of both kernels: keys [rows, vocab to a tile], then what the blocks of shortlist_keys
// found to be the winners of slots below the prefix, [batch, kMaxWinners, blocks].
template <class Key>
__device__ __forceinline__ Key* workspace_keys(const ShortlistParams& p, int64_t row) {
  return static_cast<Key*>(p.workspace) + row * round_up<int64_t>(p.vocab, kPoolTile);
}

__device__ __forceinline__ uint64_t* workspace_winners(const ShortlistParams& p, int64_t b,
                                                       int64_t slot) {
  char* after_keys = static_cast<char*>(p.workspace) +
                     p.batch * p.pools * round_up<int64_t>(p.vocab, kPoolTile) * sizeof(uint32_t);
  return reinterpret_cast<uint64_t*>(after_keys) +
         (b * kMaxWinners + slot) * ceil_div<int64_t>(p.vocab, kKeysIds);
}

// Grid: x = ids / kKeysIds, y = rows of the output (looped).
template <class Base, bool kPacked, int kCount, bool kTileMax>
__global__ void __launch_bounds__(kKeysThreads, kCount > 1 ? 2 : 4)
    shortlist_keys(const __grid_constant__ ShortlistParams p, bool aligned) {
  using Values = Eight<Base, kPacked>;
  __shared__ uint64_t best_of_warp[kMaxWinners][kKeysWarps];
  allow_next_launch();
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  for (int64_t index = blockIdx.y; index < p.batch * p.pools; index += gridDim.y) {
    const ShortlistRow row(p, index);
    if (p.num_active && row.b >= *p.num_active) break;
    const EightIds ids(p, row.b, static_cast<int>(blockIdx.x) * kKeysIds + threadIdx.x * kEight);
    const Base* base = static_cast<const Base*>(p.base_logits) + row.b * p.base_batch_stride +
                       row.first * p.base_slot_stride + ids.v;
    float bias[kEight] = {};
    if (!kPacked && p.bias)
      for (int i = 0; i < ids.inside; ++i) bias[i] = p.bias[row.b * p.bias_stride + ids.v + i];
    const bool vector = aligned && __all_sync(kFullMask, ids.inside % kEight == 0);
    int slot = static_cast<int>(row.first);
    const int end = static_cast<int>(row.end), prefix = min(static_cast<int>(p.prefix), end);
    for (; slot < prefix; ++slot, base += p.base_slot_stride) {
      if (!p.winners) continue;
      uint4 raw[sizeof(Base) / 2] = {};
      if (vector) {
        load_logits<true>(raw, base, ids.inside);
      } else {
        load_logits<false>(raw, base, ids.inside);
      }
      Values values;
      values.set(raw, bias);
      values.allow(ids.keep);
      uint64_t best = 0;
#pragma unroll
      for (int k = 0; k < kEight; ++k)
        if (k < ids.inside) best = max(best, argmax_key(values.at(k), ids.v + k));
#pragma unroll
      for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
        best = max(best, __shfl_xor_sync(kFullMask, best, offset));
      if (lane == 0) best_of_warp[slot][warp] = best;
    }
    if (row.first < prefix && p.winners) {
      __syncthreads();
      if (static_cast<int>(threadIdx.x) >= row.first && static_cast<int>(threadIdx.x) < prefix) {
        uint64_t best = 0;
        for (int w = 0; w < kKeysWarps; ++w) best = max(best, best_of_warp[threadIdx.x][w]);
        workspace_winners(p, row.b, threadIdx.x)[blockIdx.x] = best;
      }
      __syncthreads();
    }
    if (slot >= end) continue;
    const int64_t tile = ids.v / kPoolTile;
    float* tile_max =
        p.tile_max + (tile * p.batch + row.b) * (p.slots - p.prefix) + slot - p.prefix;
    Values most = Values::none();
    while (slot < end) {
      const int count = vector ? min(kCount, end - slot) : 1;
      if (vector) {
        raise_by_slots<Values, Base, true, kCount, kTileMax>(most, base, p.base_slot_stride, count,
                                                             ids, bias, tile_max);
      } else {
        raise_by_slots<Values, Base, false, 1, kTileMax>(most, base, p.base_slot_stride, 1, ids,
                                                         bias, tile_max);
      }
      slot += count;
      base += count * p.base_slot_stride;
      tile_max += count;
    }
    if (ids.inside == 0) continue;
    using Key = typename Values::Key;
    EightKeys<Key> eight;
#pragma unroll
    for (int k = 0; k < kEight; ++k) eight.at[k] = k < ids.inside ? most.key(k) : 0;
    *reinterpret_cast<EightKeys<Key>*>(workspace_keys<Key>(p, index) + ids.v) = eight;
  }
  if (p.overlap) previous_launch_done();  // so that who waits for this launch waits for both
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
  return ceil_div<int64_t>(vocab, kPoolTile) * slice / slices * kPoolTile;
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
  if (rank == 0 && p.winners) {
    const int64_t keys_blocks = ceil_div<int64_t>(p.vocab, kKeysIds);
    for (int64_t slot = row.first + threadIdx.x / kWarpSize; slot < min(row.end, p.prefix);
         slot += kSelectWarps) {
      const uint64_t* from = workspace_winners(p, row.b, slot);
      uint64_t best = 0;
      for (int64_t i = threadIdx.x % kWarpSize; i < keys_blocks; i += kWarpSize)
        best = max(best, from[i]);
#pragma unroll
      for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
        best = max(best, __shfl_xor_sync(kFullMask, best, offset));
      if (threadIdx.x % kWarpSize == 0) p.winners[row.b * p.winners_stride + slot] = best;
    }
  }
  if (row.only_winners) return;
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
