// draft_chain_pool: all that a draft needs before its chain starts, in one launch whose blocks have
// four kinds of work, side by side:
//
//   hoist    from_hidden (draft_chain_hoist.cuh)
//   winners  argmax of the drafts below the prefix: `winner_parts` blocks a draft, the last of all
//            blocks joins their keys
//   tiles    tile_max where the pass cannot: 256 ids in all slots a warp
//   pass     the pools (chain_pool.h), reading each base logit once
//
// A block of the pass owns a few groups of a row, whose runs are neighbours in every period; a
// thread half a run at a time, in all slots. It keeps the group's best as integers that also order
// ids; at the end the threads of a group merge theirs. Where 16 threads side by side have a tile,
// it has the maxima of tiles on the way. Bytes: the base logits once, W1h and the hidden rows;
// bound by them from about 8 rows on, by latency below.
#pragma once

#include "common/reduce.cuh"
#include "head/chain_math.cuh"
#include "head/chain_pool.h"
#include "head/draft_chain_hoist.cuh"
#include "head/eight_logits.cuh"

namespace domino {

constexpr int kPoolThreads = kHoistWarps * kWarpSize;
constexpr int kPoolWarps = kPoolThreads / kWarpSize;
constexpr int kPoolMemory = 16384;  // bytes
constexpr int kTileLanes = kPoolTile / kEight;
constexpr int kMaxColumns = 32;  // of a block: the lanes of a warp read 512 bytes in a row

struct PoolLaunch {
  int pass_blocks, hoist_blocks, winner_blocks, tile_blocks;
  bool pass_first;   // in the order of blocks, and so in time where not all are resident
  int hoist_tile;    // by the number of columns: 0, 1, 2
  int winner_parts;  // of a row of base logits
  int columns_log;   // of the eights that a block of the pass owns in a period
  int parts;         // of a row's groups, a block each
  bool pass_tiles;   // the pass finds tile_max
  bool aligned;      // slots start at 16 bytes
};

template <class Key>
__device__ __forceinline__ void order(Key& a, Key& b) {
  const Key larger = max(a, b);
  b = min(a, b);
  a = larger;
}

// Largest first; Batcher's odd-even merges. Written out: a loop that ptxas does not unroll would
// put the keys into local memory.
template <class Key>
__device__ __forceinline__ void sort(Key (&k)[kEight]) {
  order(k[0], k[1]), order(k[2], k[3]), order(k[4], k[5]), order(k[6], k[7]);
  order(k[0], k[2]), order(k[1], k[3]), order(k[4], k[6]), order(k[5], k[7]);
  order(k[1], k[2]), order(k[5], k[6]);
  order(k[0], k[4]), order(k[1], k[5]), order(k[2], k[6]), order(k[3], k[7]);
  order(k[2], k[4]), order(k[3], k[5]);
  order(k[1], k[2]), order(k[3], k[4]), order(k[5], k[6]);
}

// The best of a group, the largest key first.
template <class Key>
struct GroupBest {
  Key key[kGroupBest];

  // With up to as many others, the largest first.
  template <int kCount>
  __device__ __forceinline__ void merge(const Key (&other)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      Key& mine = key[kGroupBest - 1 - i];
      mine = max(mine, other[i]);
    }
#pragma unroll
    for (int distance = kGroupBest / 2; distance > 0; distance /= 2)  // it was a bitonic sequence
#pragma unroll
      for (int i = 0; i < kGroupBest; ++i)
        if ((i & distance) == 0) order(key[i], key[i + distance]);
  }

  __device__ __forceinline__ void merge_lane(int offset) {  // the lane that many further on
    Key other[kGroupBest];
#pragma unroll
    for (int i = 0; i < kGroupBest; ++i) other[i] = __shfl_xor_sync(kFullMask, key[i], offset);
    merge(other);
  }
};

// Keys of ids that are counted by an index: larger is better, ties to the lowest, 0 is none. Of
// packed values 32 bits, the lower half counting down; otherwise argmax_key of the id itself.
template <class Base, bool kPacked>
struct PoolKeys {
  using Values = EightLogits<Base, kPacked>;
  using Key = std::conditional_t<kPacked, uint32_t, unsigned long long>;

  // index: of the first of the eight, a multiple of 8
  static __device__ __forceinline__ void make(Key (&key)[kEight], const Values& values,
                                              const EightIds& ids, int index) {
    if constexpr (kPacked) {
#pragma unroll
      for (int i = 0; i < kEight; i += 2) {
        const uint32_t pair = values.ordered(i / 2), down = 0xffffu - index - i;
        key[i] = __byte_perm(down, pair, 0x5410);
        key[i + 1] = __byte_perm(down - 1, pair, 0x7610);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kEight; ++i)
        key[i] = argmax_key(values.at(i), static_cast<uint32_t>(ids.v + i));
    }
    if (ids.valid == 0xff) return;
#pragma unroll
    for (int i = 0; i < kEight; ++i)
      if ((ids.valid >> i & 1) == 0) key[i] = 0;
  }

  // id_of(index): the id that was counted by it
  template <class IdOf>
  static __device__ __forceinline__ uint32_t id(Key key, IdOf id_of) {
    if constexpr (kPacked) {
      return static_cast<uint32_t>(id_of(0xffff - static_cast<int>(key & 0xffff)));
    } else {
      return key_id(key);
    }
  }

  template <class IdOf>
  static __device__ __forceinline__ unsigned long long argmax(Key key, IdOf id_of) {
    if constexpr (kPacked) {
      return key == 0
                 ? 0
                 : argmax_key(Values::value_of(static_cast<uint16_t>(key >> 16)), id(key, id_of));
    } else {
      return key;
    }
  }
};

// Rows of pools: (b, pool), and the drafts that each is the maximum over.
struct PoolRow {
  int64_t b;
  int first, end;
  bool only_winner;  // a draft below the prefix that needs no pool
  __device__ PoolRow(const ChainBlockParams& p, int64_t row)
      : b(row / p.pools),
        // drawn drafts come from the pool in front of the prefix's end too
        first(p.pools > 1     ? static_cast<int>(row % p.pools)
              : p.temperature ? 0
                              : static_cast<int>(p.prefix)),
        end(p.pools > 1 ? first + 1 : static_cast<int>(p.drafts)),
        only_winner(!p.temperature && first < p.prefix) {}
};

template <class Base>
__device__ __forceinline__ const Base* base_row(const ChainBlockParams& p, int64_t b, int draft) {
  return static_cast<const Base*>(p.base_logits) + b * p.base_batch_stride +
         (p.first_slot + draft) * p.base_slot_stride;
}

// How a warp reads its eights: all of them whole and without edits; 16 bytes at a time; any.
enum class Reading { kWhole, kVector, kScalar };

// The logits of `count` <= kCount slots from `row` on raise `most`. kTileMax: the maxima of both
// tiles of a warp's 256 ids in these slots go to tile_max.
template <Reading kReading, int kCount, bool kTileMax, class Values, class Base>
__device__ __forceinline__ void raise_by_slots(Values& most, const Base* row, int64_t slot_stride,
                                               int count, const EightIds& ids, const float* bias,
                                               float* tile_max) {
  uint4 raw[kCount][sizeof(Base) / 2];
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (i < count)
      load_logits<kReading != Reading::kScalar>(raw[i], row + i * slot_stride,
                                                kReading == Reading::kWhole ? kEight : ids.inside);
  constexpr int kGroup = kCount < 8 ? kCount : 8;  // slots whose maxima are found together
#pragma unroll
  for (int first = 0; first < kCount; first += kGroup) {
    typename Values::Most of_slot[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (first + i >= count) continue;  // of_slot is not looked at
      Values values;
      values.set(raw[first + i], bias);
      if constexpr (kReading != Reading::kWhole) values.allow(ids.keep);
      most.raise(values);
      if constexpr (kTileMax) of_slot[i] = values.most();
    }
    if constexpr (kTileMax) {
      // Lanes trade halves of the slots until each has one slot's maximum over kGroup lanes.
      const int lane = lane_id();
#pragma unroll
      for (int distance = kGroup / 2; distance > 0; distance /= 2) {
        const bool upper = (lane & distance) != 0;
#pragma unroll
        for (int i = 0; i < distance; ++i) {
          const auto given = upper ? of_slot[i] : of_slot[i + distance];
          const auto kept = upper ? of_slot[i + distance] : of_slot[i];
          of_slot[i] = Values::larger(kept, __shfl_xor_sync(kFullMask, given, distance));
        }
      }
#pragma unroll
      for (int distance = kGroup; distance < kTileLanes; distance *= 2)
        of_slot[0] = Values::larger(of_slot[0], __shfl_xor_sync(kFullMask, of_slot[0], distance));
      // lane 16h + i: slot i of the h-th tile, which exists where its first lane has ids
      const bool tile_exists =
          kReading == Reading::kWhole || __shfl_sync(kFullMask, ids.inside, lane & kTileLanes) > 0;
      const int slot = first + lane % kTileLanes;
      if (lane % kTileLanes < kGroup && slot < count && tile_exists)
        tile_max[slot] = Values::value_of_most(of_slot[0]);
    }
  }
}

// The maxima over all slots of `row` at this lane's ids; base: id 0 of the first of them.
template <bool kTileMax, class Values, class Base>
__device__ __forceinline__ Values most_of_slots(const ChainBlockParams& p, const PoolRow& row,
                                                const Base* base, const EightIds& ids,
                                                bool aligned) {
  Values most = Values::none();
  if (!__any_sync(kFullMask, ids.inside)) return most;
  float* tile_max = nullptr;
  if constexpr (kTileMax)
    tile_max =
        p.tile_max + (ids.v / kPoolTile * p.batch + row.b) * p.corrected() + row.first - p.prefix;
  const Base* from = base + ids.v;
  float bias[kEight] = {};
  const auto read = [&](auto reading, auto count_of) {
    constexpr int kCount = decltype(count_of)::value;
    for (int slot = row.first; slot < row.end; slot += kCount) {
      raise_by_slots<decltype(reading)::value, kCount, kTileMax>(
          most, from, p.base_slot_stride, min(kCount, row.end - slot), ids, bias, tile_max);
      from += kCount * p.base_slot_stride;
      if constexpr (kTileMax) tile_max += kCount;
    }
  };
  // slots in flight; registers bound them
  using Many = std::integral_constant<int, Values::kTakesBias ? 16 / sizeof(Base)
                                           : kTileMax         ? 8
                                                              : 16>;
  if (!Values::kTakesBias && aligned && __all_sync(kFullMask, ids.keep == 0xff)) {
    read(std::integral_constant<Reading, Reading::kWhole>(), Many());
    return most;
  }
  if (Values::kTakesBias && p.bias)
    for (int k = 0; k < ids.inside; ++k) bias[k] = p.bias[row.b * p.bias_stride + ids.v + k];
  if (aligned && __all_sync(kFullMask, ids.inside % kEight == 0)) {
    read(std::integral_constant<Reading, Reading::kVector>(), Many());
  } else {
    read(std::integral_constant<Reading, Reading::kScalar>(), std::integral_constant<int, 1>());
  }
  return most;
}

// tile_max of the 256 ids of each warp, in all corrected slots.
template <class Base, bool kPacked>
__device__ __forceinline__ void pool_tiles(const ChainBlockParams& p, const PoolLaunch& launch,
                                           int block) {
  const int64_t warps = ceil_div<int64_t>(p.vocab, kEight * kWarpSize);
  const int64_t index = static_cast<int64_t>(block) * kPoolWarps + warp_id();
  PoolRow row(p, 0);
  row.b = index / warps;
  row.first = static_cast<int>(p.prefix), row.end = static_cast<int>(p.drafts);
  if (row.b >= p.batch || (p.num_active && row.b >= *p.num_active)) return;
  const EightIds ids(p, row.b,
                     static_cast<int>(index % warps) * kEight * kWarpSize + lane_id() * kEight);
  most_of_slots<true, EightLogits<Base, kPacked>>(p, row, base_row<Base>(p, row.b, row.first), ids,
                                                  launch.aligned);
}

// The best key that this thread finds among the strips [strip, end) of kPoolThreads eights.
template <class Base, bool kPacked>
__device__ __forceinline__ unsigned long long best_of_strips(const ChainBlockParams& p, int64_t b,
                                                             const Base* base, int strip, int end,
                                                             bool aligned) {
  using Values = EightLogits<Base, kPacked>;
  using Keys = PoolKeys<Base, kPacked>;
  constexpr int kAhead = 10 / sizeof(Base), kStrip = kPoolThreads * kEight;
  typename Keys::Key best = 0;
  if constexpr (kPacked) {     // strips that are whole and without edits
    constexpr int kWhole = 6;  // in flight
    const int whole = aligned && !p.mask ? min(end, static_cast<int>(p.vocab_valid) / kStrip) : 0;
#pragma unroll 1
    for (; strip + kWhole <= whole; strip += kWhole) {
      uint4 raw[kWhole][1];
#pragma unroll
      for (int i = 0; i < kWhole; ++i)
        load_logits<true>(raw[i], base + (strip + i) * kStrip + threadIdx.x * kEight, kEight);
#pragma unroll
      for (int i = 0; i < kWhole; ++i) {
        const EightIds ids = EightIds::all((strip + i) * kStrip + threadIdx.x * kEight);
        Values values;
        values.set(raw[i], nullptr);
        values.raise(Values::none());  // no NaN
        typename Keys::Key key[kEight];
        Keys::make(key, values, ids, (strip + i) * kEight);
#pragma unroll
        for (int k = 0; k < kEight; ++k) best = max(best, key[k]);
      }
    }
  }
#pragma unroll 1
  for (; strip < end; strip += kAhead) {
    uint4 raw[kAhead][sizeof(Base) / 2] = {};
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (strip + i >= end) continue;
      const EightIds ids(p, b, (strip + i) * kStrip + static_cast<int>(threadIdx.x) * kEight);
      if (aligned && ids.inside == kEight) {
        load_logits<true>(raw[i], base + ids.v, kEight);
      } else {
        load_logits<false>(raw[i], base + ids.v, ids.inside);
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (strip + i >= end) continue;
      const EightIds ids(p, b, (strip + i) * kStrip + static_cast<int>(threadIdx.x) * kEight);
      float bias[kEight] = {};
      if (Values::kTakesBias && p.bias)
        for (int k = 0; k < ids.inside; ++k) bias[k] = p.bias[b * p.bias_stride + ids.v + k];
      Values values;
      values.set(raw[i], bias);
      values.allow(ids.keep);
      if constexpr (kPacked) values.raise(Values::none());  // no NaN
      typename Keys::Key key[kEight];
      Keys::make(key, values, ids, (strip + i) * kEight);
#pragma unroll
      for (int k = 0; k < kEight; ++k) best = max(best, key[k]);
    }
  }
  return Keys::argmax(best, [](int index) {
    return index / kEight * kStrip + static_cast<int>(threadIdx.x) * kEight + index % kEight;
  });
}

// Keys of the drafts below the prefix, each row of base logits in winner_parts parts.
template <class Base, bool kPacked>
__device__ __forceinline__ void pool_winners(const ChainBlockParams& p, const PoolLaunch& launch,
                                             int block, char* memory) {
  const int drafts = static_cast<int>(p.prefix), part = block % launch.winner_parts;
  const int64_t index = block / launch.winner_parts, b = index / drafts;
  // Of few rows the chain waits for the table's rows of the anchor and of the last winner.
  const bool fetches = p.table != nullptr && p.batch <= kPoolWarps;
  const auto fetch_inputs = [&](int64_t y) {  // by a warp
    const int bytes = static_cast<int>(p.units) * 6;
    const char* const row = static_cast<const char*>(p.table) + clamp_id(y, p.vocab) * bytes;
    for (int at = lane_id() * 128; at < bytes; at += kWarpSize * 128) prefetch_l2(row + at);
  };
  unsigned long long best = 0;
  if (p.num_active == nullptr || b < *p.num_active) {
    const int64_t anchor = fetches ? p.anchor[b] : 0;
    const Base* const base = base_row<Base>(p, b, static_cast<int>(index % drafts));
    const int strips = ceil_div(static_cast<int>(p.vocab), kPoolThreads * kEight);
    const int first = strips * part / launch.winner_parts;
    const int end = strips * (part + 1) / launch.winner_parts;
    const auto larger = [](unsigned long long a, unsigned long long b) { return max(a, b); };
    const auto find = [&](auto packed) {
      best = best_of_strips<Base, decltype(packed)::value>(p, b, base, first, end, launch.aligned);
      best = block_reduce(best, larger, reinterpret_cast<unsigned long long*>(memory));
    };
    find(std::bool_constant<kPacked>());
    if constexpr (kPacked) {  // NaN ranks behind -inf: only now does it matter
      if (key_value(best) == -INFINITY) find(std::false_type());
    }
    if (fetches && block % (drafts * launch.winner_parts) == 0 && warp_id() == 0)
      fetch_inputs(anchor);
  }
  // The last block joins the parts of all.
  __shared__ bool last;
  if (threadIdx.x == 0) {
    p.key_parts[block] = best;
    __threadfence();
    last = atomicInc(&p.control->searched, launch.winner_blocks - 1) ==
           static_cast<unsigned>(launch.winner_blocks) - 1;
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
  const int count = launch.winner_blocks / launch.winner_parts;
  if (fetches) {  // a warp a draft
#pragma unroll 4
    for (int i = warp_id(); i < count; i += kPoolWarps) {
      if (p.num_active && i / drafts >= *p.num_active) continue;
      unsigned long long key = 0;
      if (lane_id() < launch.winner_parts)
        key = __ldcg(reinterpret_cast<const unsigned long long*>(p.key_parts) +
                     i * launch.winner_parts + lane_id());
      key = warp_best(key);
      if (lane_id() == 0) p.keys[i / drafts * p.drafts + i % drafts] = key;
      if (i % drafts == drafts - 1) fetch_inputs(key_id(key));
    }
    return;
  }
  for (int i = threadIdx.x; i < count; i += kPoolThreads) {
    if (p.num_active && i / drafts >= *p.num_active) continue;
    unsigned long long key = 0;
    for (int k = 0; k < launch.winner_parts; ++k)
      key = max(key, __ldcg(reinterpret_cast<const unsigned long long*>(p.key_parts) +
                            i * launch.winner_parts + k));
    p.keys[i / drafts * p.drafts + i % drafts] = key;
  }
}

// The pool's part of a block of the pass: the best of its threads, over the threads of a group.
template <class Base, bool kPacked, class Best>
__device__ __forceinline__ void write_pool(const ChainBlockParams& p, const PoolLaunch& launch,
                                           int block, Best& best, char* memory) {
  using Keys = PoolKeys<Base, kPacked>;
  constexpr int kHalves = kGroupRun / kEight;
  const PoolGroups groups(p.pool_size);
  const int columns = 1 << launch.columns_log, column = threadIdx.x & (columns - 1);
  const int64_t index = block / launch.parts;
  const int64_t first_group = static_cast<int64_t>(block % launch.parts) * (columns / kHalves);
  const int half = column % kHalves;
  // The lanes of a warp, then the warps, eight lanes for each group.
  best.merge_lane(1);
  for (int offset = columns; offset < kWarpSize; offset *= 2) best.merge_lane(offset);
  static_assert(sizeof(Best) * kPoolWarps * (kMaxColumns / kHalves) <= kPoolMemory);
  auto& of_warp = *reinterpret_cast<Best(*)[kPoolWarps][kMaxColumns / kHalves]>(memory);
  if (lane_id() < columns && half == 0) of_warp[warp_id()][column / kHalves] = best;
  __syncthreads();
  static_assert(kPoolWarps == 8);
  const int lane = threadIdx.x % kPoolWarps, of_block = threadIdx.x / kPoolWarps;
  if (of_block / 4 * 4 >= columns / kHalves) return;  // a whole warp
  best = of_warp[lane][min(of_block, columns / kHalves - 1)];
#pragma unroll
  for (int offset = 1; offset < kPoolWarps; offset *= 2) best.merge_lane(offset);
  if (of_block >= columns / kHalves) return;
#pragma unroll
  for (int k = 0; k < kGroupBest; ++k) {
    const int64_t place = (first_group + of_block) * kGroupBest + k;
    if (k % kPoolWarps == lane && place < p.pool_size)
      p.pool[index * p.pool_size + place] = Keys::id(best.key[k], [&](int at) {
        return at / kGroupRun * groups.period() + (first_group + of_block) * kGroupRun +
               at % kGroupRun;
      });
  }
}

template <class Base, bool kPacked, bool kTileMax>
__device__ __forceinline__ void pool_pass(const ChainBlockParams& p, const PoolLaunch& launch,
                                          int block, char* memory) {
  using Values = EightLogits<Base, kPacked>;
  using Keys = PoolKeys<Base, kPacked>;
  using Best = GroupBest<typename Keys::Key>;
  constexpr int kHalves = kGroupRun / kEight;  // of a run, a thread each
  static_assert(kHalves == 2);
  const int64_t index = block / launch.parts;
  const PoolRow row(p, index);
  if (row.only_winner || (p.num_active && row.b >= *p.num_active)) return;
  const PoolGroups groups(p.pool_size);
  const int columns = 1 << launch.columns_log, column = threadIdx.x & (columns - 1);
  const int step = kPoolThreads >> launch.columns_log;
  const int64_t first_group = static_cast<int64_t>(block % launch.parts) * (columns / kHalves);
  const int64_t group = first_group + column / kHalves;
  const int period = static_cast<int>(groups.period()), half = column % kHalves * kEight;
  const int turns = ceil_div(ceil_div(static_cast<int>(p.vocab), period), step);
  const Base* const base = base_row<Base>(p, row.b, row.first);

  Best best{};
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    const int i = turn * step + (threadIdx.x >> launch.columns_log);
    const EightIds ids(p, row.b, i * period + static_cast<int>(group) * kGroupRun + half,
                       group < groups.groups ? kEight : 0);
    const Values most = most_of_slots<kTileMax, Values>(p, row, base, ids, launch.aligned);
    typename Keys::Key key[kEight];
    Keys::make(key, most, ids, i * kGroupRun + half);
    sort(key);
    best.merge(key);
  }

  write_pool<Base, kPacked>(p, launch, block, best, memory);
}

__device__ __forceinline__ void clear_control(const ChainBlockParams& p) {
  p.control->aborted = p.control->found = p.control->missed = p.control->cut = 0;
  for (int round = 0; round < 2; ++round) p.control->begun[round] = p.control->tickets[round] = 0;
}

template <class T, class Base, bool kPacked>
__global__ void __launch_bounds__(kPoolThreads, 2)
    chain_pool(const __grid_constant__ ChainBlockParams p, const PoolLaunch launch) {
  __shared__ __align__(16) char memory[kPoolMemory];
  allow_next_launch();
  int block = blockIdx.x;
  if (block == 0 && threadIdx.x == 0) clear_control(p);
  const int others = launch.hoist_blocks + launch.winner_blocks + launch.tile_blocks;
  const int first = launch.pass_first ? 0 : others;
  if (block >= first && block < first + launch.pass_blocks) {
    return launch.pass_tiles ? pool_pass<Base, kPacked, true>(p, launch, block - first, memory)
                             : pool_pass<Base, kPacked, false>(p, launch, block - first, memory);
  }
  if (launch.pass_first) block -= launch.pass_blocks;
  if (block < launch.hoist_blocks) {
    HoistMemory& of_hoist = *reinterpret_cast<HoistMemory*>(memory);
    if (launch.hoist_tile == 0) return chain_hoist<T, 1, 1, 8>(p, block, of_hoist);
    if (launch.hoist_tile == 1) return chain_hoist<T, 1, 2, 4>(p, block, of_hoist);
    return chain_hoist<T, 2, 4, 2>(p, block, of_hoist);
  }
  block -= launch.hoist_blocks;
  if (block < launch.winner_blocks) return pool_winners<Base, kPacked>(p, launch, block, memory);
  pool_tiles<Base, kPacked>(p, launch, block - launch.winner_blocks);
}

}  // namespace domino
