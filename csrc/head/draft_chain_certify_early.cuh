// draft_chain_certify for one batch row of up to 16 columns (sm_90a): the bits of chain_certify,
// which see, by the screen of chain_certify_screen over W2 in 4 bits.
//
// The processors that the chain leaves free hold W2 in 4 bits, in shared memory and a tile or two
// in registers, before the chain has ended: its copies begin once the chain says that it has what
// it loads at first. u and keys come as words with tags (chain_words.cuh), so that a block begins
// when the last key is there and not when the launch in front has ended. Forms of the chain that
// send no words are waited for as a launch.
//
// The first eight columns are looked at while the chain goes on. An id that passes the screen with
// the largest base logit of its 16, which a warp finds by itself, is screened again with its own;
// what passes that as well is scored from W2 itself, behind the end of the launch in front, since
// keys and first drafts are that launch's to write until then.
//
// Likewise the second certificate, beside the chain of a restart.
//
// A vocabulary of more than 15 tiles of 128 ids for each free processor goes to chain_certify_few.
// Bytes: W2 in 4 bits once; bound by the instructions that unpack them.
#pragma once

#include "head/chain_words.cuh"
#include "head/draft_chain_certify_screen.cuh"

namespace domino {

constexpr int kEarlyColumns = 16;
constexpr int kTileWarps = kPoolTile / kTileRows;
constexpr int kEarlyHalves = 2;  // of the warps that multiply, which take turns at tiles
constexpr int kEarlyWarps = kEarlyHalves * kTileWarps;
constexpr int kEarlyMultipliers = kEarlyWarps * kWarpSize;
constexpr int kEarlyThreads = kEarlyMultipliers + 2 * kWarpSize;  // one feeds, one waits
constexpr int kEarlyStages = 13;                                  // at most
constexpr int kEarlyTiles = kEarlyStages + kEarlyHalves;          // of a block
constexpr int kOwnTiles = ceil_div(kEarlyTiles, kEarlyHalves);    // of a warp
constexpr int kEarlyTileBytes = kPoolTile * kNibbleRow;
constexpr uint32_t kUndecided = 1 << 13;  // cycles in which a restart without rows has left

struct EarlyMemory {
  uint4 u[kEarlyColumns][256 / 16 + 1];  // int8, a row each: no bank conflicts
  alignas(16) int limits[kEarlyWarps][kOwnTiles][kTileColumns];
  CertifyColumn columns[kEarlyColumns];
  ScreenColumn quantised[kEarlyColumns];
  int offsets[kEarlyColumns];  // of sums of what the nibbles are to those of what they stand for
  uint64_t full[kEarlyStages];
  uint32_t epoch;  // of the words; 0: none will come
  int first;       // the first column to look at
  int seen;        // columns of u that have come, or that no one looks at
  bool over;       // the launch in front has ended
};

// The one row of the batch and eight of its columns, as certify_marked() wants them.
struct OnlyRow {
  static constexpr const int* list = nullptr;
};
struct EightColumns {
  int eight;
  __device__ __forceinline__ int operator()(int i) const { return eight * kTileColumns + i; }
};

// This lane's words of a warp's 16 rows in 4 bits, as ldmatrix has them: those of 64 k are the
// fragments of an MMA twice, by their lower and their upper halves.
struct NibbleRows {
  uint4 four[4];

  // row: of the tile at `tile` in shared memory that this lane addresses. Words i are 32 bytes from
  // those before but for the swizzle, which exchanges halves of 128 bytes, or of 64.
  static __device__ __forceinline__ uint32_t place(int row) {
    return row * kNibbleRow + (lane_id() / 16 ^ row % 8) * 16;
  }
  __device__ __forceinline__ void take(uint32_t tile, uint32_t place) {
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] = load_matrices(tile + (place ^ i * 32));
  }
  // first: of the 16 rows in `rows`
  __device__ __forceinline__ void load(const char* rows, int64_t first, int64_t vocab, int pitch) {
    const auto word = [&](int i, int half) {
      const int at = (i * 16) + lane_id() % 4 * 4;
      const int64_t row = min(first + half * 8 + lane_id() / 4, vocab - 1);
      return at < pitch ? *reinterpret_cast<const uint32_t*>(rows + row * pitch + at) : 0u;
    };
#pragma unroll
    for (int i = 0; i < 4; ++i)
      four[i] = {word(2 * i, 0), word(2 * i, 1), word(2 * i + 1, 0), word(2 * i + 1, 1)};
  }
  // u: fragments of 32 k each
  __device__ __forceinline__ void times(const uint2 (&u)[8], int (&sums)[4]) const {
    int low[4] = {}, high[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto half = [&](uint32_t mask) -> uint4 {
        return {four[i].x & mask, four[i].y & mask, four[i].z & mask, four[i].w & mask};
      };
      mma_16x8x32(low, half(0x0f0f0f0fu), u[2 * i]);
      mma_16x8x32(high, half(0xf0f0f0f0u), u[2 * i + 1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = low[i] * 16 + high[i];
  }
};

__device__ __forceinline__ void load_column_fragments(uint2 (&u)[8], const EarlyMemory& memory,
                                                      int eight) {
#pragma unroll
  for (int step = 0; step < 8; step += 2) {
    const uint4 two = load_matrices(
        shared_address(&memory.u[eight * kTileColumns + lane_id() % 8][step * 2 + lane_id() / 8]));
    u[step] = {two.x, two.y}, u[step + 1] = {two.z, two.w};
  }
}

// Of 16 ids; of the last ones where there are none.
__device__ __forceinline__ ScreenTile scale_of(const ChainBlockParams& p, int64_t first) {
  return nibble_tiles(p.screen, p.vocab, p.rank)[min(first, p.vocab - 1) / kNibbleIds];
}

// Whether id v may win column n by W2 itself and u in int8: |W2[v]| E is all that is lost, and
// 2^-11 of |W2[v]| U for what is rounded here and in a score. By a warp.
template <class T>
__device__ __forceinline__ bool may_win(const ChainBlockParams& p, const EarlyMemory& memory, int v,
                                        int n, float base) {
  const int rank = static_cast<int>(p.rank), k = lane_id() * 8;
  const uint4 row =
      load_where(k < rank, static_cast<const T*>(p.w2) + static_cast<int64_t>(v) * rank + k);
  const uint2 u = reinterpret_cast<const uint2*>(memory.u[n])[lane_id()];
  float product = 0.0f, squares = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t two = i < 2 ? row.x : i < 4 ? row.y : i < 6 ? row.z : row.w;
    const float w = to_float(T{static_cast<uint16_t>(two >> i % 2 * 16)});
    product += w * static_cast<float>(static_cast<int8_t>((i < 4 ? u.x : u.y) >> i % 4 * 8));
    squares += w * w;
  }
#pragma unroll
  for (int other = 1; other < kWarpSize; other *= 2) {
    product += __shfl_xor_sync(kFullMask, product, other);
    squares += __shfl_xor_sync(kFullMask, squares, other);
  }
  const ScreenColumn& column = memory.quantised[n];
  const float winner = memory.columns[n].winner;
  // 1e-20: squares below what a float holds
  const float bound = (sqrtf(squares) + 1e-20f) * (column.residue + column.norm * 0x1p-11f);
  const float slack = (fabsf(winner) + fabsf(base) + bound) * 0x1p-20f + 1e-30f;
  return !(base + product / column.inverse + bound + slack < winner);
}

// Of 16 rows of which one has reached its limit: whether one may win by its own base logit, and by
// its row of W2.
// tile: theirs in shared memory, 0 where they are in registers. own: this warp's tile.
template <class T>
__device__ __noinline__ bool look_closer(const ChainBlockParams& p, const EarlyMemory& memory,
                                         uint32_t tile, int row0, int own, int eight) {
  const int lane = lane_id(), warp = warp_id(), column = lane % 4 * 2;
  NibbleRows rows;
  if (tile != 0) {
    rows.take(tile, NibbleRows::place(warp % kTileWarps * kTileRows + lane % 16));
  } else {
    rows.load(static_cast<const char*>(nibble_rows(p.screen, p.vocab, p.rank)), row0, p.vocab,
              nibble_row(p.rank));
  }
  uint2 u[8];
  load_column_fragments(u, memory, eight);
  int sums[4];
  rows.times(u, sums);
  const ScreenTile scale = scale_of(p, row0);
  float base[4];
  bool asks[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const CertifyColumn& of = memory.columns[eight * kTileColumns + column + i % 2];
    const int v = row0 + lane / 4 + i / 2 * 8;
    const bool real = of.id >= 0 && v < p.vocab;
    asks[i] = sums[i] >= memory.limits[warp][own][column + i % 2] && real && v != of.id;
    base[i] = real ? base_at(p, 0, of.key, v) : 0.0f;  // all on their way together
  }
  bool passes = false;
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    if (!__any_sync(kFullMask, asks[i])) continue;
    const int n = eight * kTileColumns + column + i % 2;
    const int limit =
        screen_limit(screen_winner(memory.columns[n]), base[i], memory.quantised[n], scale);
    unsigned votes = __ballot_sync(
        kFullMask, asks[i] && (limit == INT32_MIN || sums[i] >= limit - memory.offsets[n]));
    for (; votes != 0 && !passes; votes &= votes - 1) {
      const int from = __ffs(votes) - 1;
      passes = may_win<T>(p, memory, row0 + from / 4 + i / 2 * 8, __shfl_sync(kFullMask, n, from),
                          __shfl_sync(kFullMask, base[i], from));
    }
  }
  if (passes) prefetch_rows<T>(p, row0);
  return passes;
}

// The largest base logit of draft j among 16 ids, as far as they are ids. raw: as they stand in
// memory, 16 bytes at a time.
template <class T>
__device__ __noinline__ float most_base(const ChainBlockParams& p, int j, int64_t first, bool raw) {
  float most = -INFINITY;  // a NaN is none: fmaxf
  if (raw && first + kNibbleIds <= p.vocab) {
    const auto* const eights = reinterpret_cast<const uint4*>(
        static_cast<const T*>(p.base_logits) + (p.first_slot + j) * p.base_slot_stride + first);
    const uint4 low = eights[0], high = eights[1];
    for (const uint32_t two : {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w})
      for (const uint32_t bits : {two & 0xffffu, two >> 16})
        most = fmaxf(most, to_float(T{static_cast<uint16_t>(bits)}));
    return most;
  }
  for (int k = 0; k < kNibbleIds && first + k < p.vocab; ++k)
    most = fmaxf(most, base_at(p, 0, j, first + k));
  return most;
}

// Grid: blocks with kEarlyTiles tiles of 128 ids each at most. map: the rows in 4 bits, in those
// tiles. round: of p.first_of(). stages: tiles in shared memory. raw: see most_base().
template <class T>
__global__ void __launch_bounds__(kEarlyThreads, 1)
    chain_certify_early(const __grid_constant__ ChainBlockParams p,
                        const __grid_constant__ CUtensorMap map, int round, int stages, bool raw) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char unaligned[];
  char* const ring = unaligned + (-shared_address(unaligned) & 1023);
  EarlyMemory& memory = *reinterpret_cast<EarlyMemory*>(ring + stages * kEarlyTileBytes);
  const int rank = static_cast<int>(p.rank), columns = static_cast<int>(p.corrected());
  const int last = (columns - 1) / kTileColumns;  // of the eights of columns
  const int blocks = static_cast<int>(gridDim.x), block = blockIdx.x;
  const int count = (ceil_div(static_cast<int>(p.vocab), kPoolTile) - block + blocks - 1) / blocks;
  const int warp = warp_id(), lane = lane_id();
  const auto tile_of = [&](int n) { return block + n * blocks; };
  // The next launch waits for this one, and mostly leaves at once.
  allow_next_launch();
  const bool active = p.num_active == nullptr || *p.num_active > 0;
  if (!active || count <= 0) return previous_launch_done();

  volatile bool& over = memory.over;
  if (threadIdx.x == 0) {
    over = false;
    for (int stage = 0; stage < stages; ++stage) init_barrier(&memory.full[stage], 1);
    fence_barriers();
  }
  __syncthreads();
  const auto join = [] {  // of those that multiply and the feeding warp
    asm volatile("bar.sync 1, %0;" ::"n"(kEarlyMultipliers + kWarpSize) : "memory");
  };
  if (warp == kEarlyWarps + 1) {
    previous_launch_done();
    over = true;
    return;
  }
  if (warp == kEarlyWarps) {
    if (lane == 0) {
      // A restart mostly leaves at once: without a look at memory, which would still be on its way.
      if (round > 0)
        for (const uint32_t since = cycles(); !over && cycles() - since < kUndecided;) {
        }
      // not among the loads that the chain's first steps wait for; the chain takes longer than this
      uint32_t begun = 0;
      for (int i = 0; (round > 0 || i < 64) && !over && begun == 0; ++i) {
        begun = *const_cast<const volatile uint32_t*>(&p.control->begun[round]);
        if (begun == 0) __nanosleep(250);
      }
      const bool told = !over && begun != 0;
      int first = 0;  // column
      if (round > 0) {
        if (!told) previous_launch_done();
        first =
            (told ? begun_draft(begun) : __ldcg(p.first_of(round))) - static_cast<int>(p.prefix);
      }
      memory.epoch = told ? begun_epoch(begun) : 0;
      memory.first = memory.seen = first;
      for (int n = 0; first < columns && n < min(stages, count); ++n) {
        arrive_with_bytes(&memory.full[n], kEarlyTileBytes);
        copy_tile_once(shared_address(ring) + n * kEarlyTileBytes, map, tile_of(n) * kPoolTile, 0,
                       &memory.full[n]);
      }
    }
    __syncwarp();
    join();
    const uint32_t epoch = memory.epoch;
    const int first = memory.first;
    if (first >= columns) return previous_launch_done();
    for (int eight = first / kTileColumns; eight <= last; ++eight) {
      const int column = eight * kTileColumns + lane;
      if (lane < kTileColumns) {
        CertifyColumn of{INFINITY, -1, 0, 0};
        if (column >= first && column < columns) {
          const ChainWords words(ChainExchange(p.exchange, static_cast<int>(p.units), rank, epoch));
          const int draft = column + static_cast<int>(p.prefix);
          unsigned long long key = 0;
          bool there = false;
          while (!there && epoch != 0 && !over) there = words.take_key(draft, epoch, &key);
          if (there) {
            of = {key_value(key), static_cast<int>(key_id(key)), draft, column};
          } else {
            previous_launch_done();
            of = certify_column(p, round, OnlyRow(), column);
          }
        }
        memory.columns[column] = of;
      }
      __syncwarp();
      join();
    }
    return previous_launch_done();
  }
  join();
  const uint32_t epoch = memory.epoch;
  const int first = memory.first;
  if (epoch == 0) previous_launch_done();
  if (first >= columns) return previous_launch_done();

  const auto score = [&](int row0, int eight, bool vain) {
    certify_marked<T, true, false>(p, round, OnlyRow(), row0, EightColumns{eight},
                                   min(kTileColumns, columns - eight * kTileColumns), vain);
  };
  // While there is time: the code is at hand at the end.
  if (round == 0 && warp == kEarlyWarps - 1) score(0, 0, true);

  // Rows 16 (warp % 8) .. of a half of the tiles; the last of them in registers.
  const int half = warp / kTileWarps, row = warp % kTileWarps * kTileRows;
  const int staged = (min(stages, count) - half + 1) / kEarlyHalves;
  const int own = staged + (count > stages + half);
  const auto row_of = [&](int i) {
    return tile_of(i < staged ? i * kEarlyHalves + half : stages + half) * kPoolTile + row;
  };
  NibbleRows kept{};
  if (own > staged)
    kept.load(static_cast<const char*>(nibble_rows(p.screen, p.vocab, p.rank)), row_of(staged),
              p.vocab, nibble_row(p.rank));
  // What limits come from: of tile lane / 8 + 4i, column lane % 8 of either eight.
  constexpr int kOwn = ceil_div(kOwnTiles, 4);
  float base[kOwn][2];
  ScreenTile scale[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int n = lane / kTileColumns + 4 * i;
    if (n < own) scale[i] = scale_of(p, row_of(n));
#pragma unroll
    for (int eight = 0; eight < 2; ++eight) {
      const int column = eight * kTileColumns + lane % kTileColumns;
      base[i][eight] = n < own && column >= first && column < columns
                           ? most_base<T>(p, column + static_cast<int>(p.prefix), row_of(n), raw)
                           : 0.0f;
    }
  }
  // u of this warp's column, in int8 to shared memory.
  const auto take_column = [&] {
    static_assert(kEarlyWarps == kEarlyColumns);
    using Column = Quantiser<T, kWarpSize>;
    const int column = warp;
    Column u{};
    if (column >= first && column < columns) {
      const ChainWords words(ChainExchange(p.exchange, static_cast<int>(p.units), rank, epoch));
      const uint32_t tag = epoch + static_cast<uint32_t>(column + p.prefix);
      volatile int& seen = memory.seen;  // one column after the other: few words are looked at
      const int k = Column::k(0);
      bool there = epoch != 0;  // the same in all lanes
      while (there && __any_sync(kFullMask, seen < column)) {
        there = !__any_sync(kFullMask, over);
        __nanosleep(100);
      }
      while (there && !__all_sync(kFullMask, k >= rank || words.take_low_rank(column, rank, k, tag,
                                                                              &u.own[0])))
        there = !__any_sync(kFullMask, over);
      if (lane == 0) seen = column + 1;
      if (!there) {
        previous_launch_done();
        u.load(static_cast<const T*>(p.low_rank) + column * rank, rank);
      }
    }
    int offset = 0;  // 16 n + 8 is 16 (n + 8) - 120
    const ScreenColumn quantised = u.store(rank, [&](int k, const uint2& eight) {
      reinterpret_cast<uint2*>(memory.u[column])[k / 8] = eight;
      const int sum = __dp4a(static_cast<int>(eight.x), 0x01010101,
                             __dp4a(static_cast<int>(eight.y), 0x01010101, 0));
      offset = sum * (k / 32 % 2 ? 8 : -120);
    });
    offset = __reduce_add_sync(kFullMask, offset);
    if (lane == 0) memory.quantised[column] = quantised, memory.offsets[column] = offset;
  };

  uint32_t marked = 0;  // tiles with ids to score, of the first eight and of the last
#pragma unroll 1
  for (int eight = first / kTileColumns; eight <= last; ++eight) {
    if (warp / kTileColumns == eight) take_column();
    join();
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int n = lane / kTileColumns + 4 * i;
      const int of = lane % kTileColumns, column = eight * kTileColumns + of;
      const int limit =
          screen_limit(screen_winner(memory.columns[column]), eight ? base[i][1] : base[i][0],
                       memory.quantised[column], scale[i]);
      if (n < own)
        memory.limits[warp][n][of] = limit == INT32_MIN ? limit : limit - memory.offsets[column];
    }
    __syncwarp();
    uint2 u[8];
    load_column_fragments(u, memory, eight);
    const uint32_t place = NibbleRows::place(row + lane % 16);
    // Tiles in which a limit is. While there is time a block looks closer once, so that the code
    // for it is at hand at the end.
    uint32_t reached = eight < last && warp == 0 ? 1 : 0;
    const auto look = [&](const NibbleRows& rows, int n) {
      int sums[4];
      rows.times(u, sums);
      const int2 limit = *reinterpret_cast<const int2*>(&memory.limits[warp][n][lane % 4 * 2]);
      if (max(sums[0], sums[2]) >= limit.x || max(sums[1], sums[3]) >= limit.y) reached |= 1u << n;
    };
    if (own > staged) look(kept, staged);
#pragma unroll 1
    for (int n = 0; n < staged; ++n) {
      const int stage = n * kEarlyHalves + half;
      wait_for_phase(&memory.full[stage], 0);
      NibbleRows rows;
      rows.take(shared_address(ring) + stage * kEarlyTileBytes, place);
      look(rows, n);
    }
    for (reached = __reduce_or_sync(kFullMask, reached); reached != 0; reached &= reached - 1) {
      const int n = __ffs(reached) - 1;
      const uint32_t tile =
          n < staged ? shared_address(ring) + (n * kEarlyHalves + half) * kEarlyTileBytes : 0;
      if (!look_closer<T>(p, memory, tile, row_of(n), n, eight)) continue;
      marked |= 1u << (eight * kOwnTiles + n);
      if (eight == last) continue;
      // so that the restart's chain loads its weights meanwhile
      if (lane == 0) *const_cast<volatile uint32_t*>(&p.control->found) = 1;
    }
  }
  previous_launch_done();
  for (; marked != 0; marked &= marked - 1) {
    const int eight = (__ffs(marked) - 1) / kOwnTiles, n = (__ffs(marked) - 1) % kOwnTiles;
    score(row_of(n), eight, false);
  }
#endif
}

}  // namespace domino
