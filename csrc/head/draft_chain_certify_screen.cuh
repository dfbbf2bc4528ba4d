// draft_chain_certify by a screen over W2 in int8 (sm_90a): the bits of chain_certify, which see.
//
// For an id v of a tile of 128 ids and a column u, with w ~ s_w q_w and u ~ s_u q_u in int8,
//   W2[v] u <= s_w s_u q_w q_u + A U + B E
//   A >= |w - s_w q_w| + |w| 2^-12 and B >= |s_w q_w| of the tile's rows   (ScreenTile)
//   U >= |u|, E >= |u - s_u q_u|                                          (ScreenColumn)
// by Cauchy and Schwarz; 2^-12 covers what the score's MMAs round (16 of them and 17 summands each,
// 22 bits at least: below 2^-13). q_w q_u is exact in int32, so that base + W2[v] u < winner
// follows from q_w q_u < a limit of the tile and the column. What reaches its limit, or is NaN or
// huge, is scored from W2 itself, in the order of draft_chain.h.
//
// A block keeps its part of the columns in shared memory as operand B, 112 to a tile, quantised by
// itself; tiles of 128 rows of int8 go through a ring of stages. A warpgroup feeds the ring: rows
// by the copy engine and limits by all its threads. Two or three multiply, 64 rows each, and
// compare one tile of columns while the tensor cores have the next. What passes they write down, a
// bit for 16 rows and a column, and score behind the last tile. Of one tile of columns they first
// ask about each id that passes with its own base logit.
//
// Bytes: W2 in int8 once for 448 columns, tile_max once; bound by that stream up to 448 columns, by
// tensor cores from there on.
#pragma once

#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "head/chain_screen.h"
#include "head/draft_chain_certify.cuh"

namespace domino {

constexpr int kScreenGroup = 4 * kWarpSize;
// Warpgroups that multiply, by tiles of columns. One tile has no other to be compared with while it
// is multiplied: three groups take half tiles of rows in turn.
DOMINO_HD constexpr int screen_groups(int tiles) { return tiles == 1 ? 3 : 2; }
DOMINO_HD constexpr int screen_warps(int tiles) { return screen_groups(tiles) * 4; }
// 128 or 168 registers each, then:
DOMINO_HD constexpr int screen_threads(int tiles) {
  return (screen_groups(tiles) + 1) * kScreenGroup;
}
constexpr int kScreenFeedRegisters = 56;
constexpr int64_t kScreenMemory = 227 << 10;  // bytes, of a block of a processor of its own
constexpr int kScreenStages = 6;              // at most
constexpr int kMostScreenTiles = 4;           // of columns in a block
constexpr int kPieceWidth = 128;              // int8 of a row in a piece
constexpr int kEights = kWgmmaColumns / 8;    // of columns in a tile: bits of a mark
constexpr int kMostAsked = 2;                 // of 16 ids, one by one

struct ScreenColumn {
  float inverse;        // 1 / s_u
  float norm, residue;  // U, E; infinite where u does not fit
};

struct ScreenRing {
  uint64_t full[kScreenStages], empty[kScreenStages];
  int slots[screen_threads(1) / kWarpSize];
};

// Shared memory of a block, in bytes from a multiple of 1024.
struct ScreenMemory {
  int stage_bytes, tile_bytes, u, limits, ids, marks, ring, list, bytes;
  // tiles: of columns; rounds: tiles of rows of a block at most
  DOMINO_HD ScreenMemory(int64_t rank, int64_t batch, int tiles, int rounds, int stages) {
    const int pieces = ceil_div(static_cast<int>(rank), kPieceWidth), most = tiles * kWgmmaColumns;
    stage_bytes = pieces * kPoolTile * kPieceWidth;
    tile_bytes = pieces * kWgmmaColumns * kPieceWidth;
    u = stages * stage_bytes;
    limits = u + tiles * tile_bytes;                      // i32 [stages, most]; first ScreenColumn
    ids = limits + (stages > 3 ? stages : 3) * most * 4;  // i32 [most]
    ring = ids + most * 4;
    list = ring + static_cast<int>(sizeof(ScreenRing));
    marks = list + static_cast<int>(batch) * 4;  // a bit a column: [warps, rounds, mark_bytes]
    bytes = marks + screen_warps(tiles) * rounds * mark_bytes(tiles);
  }
  static DOMINO_HD constexpr int mark_bytes(int tiles) { return (tiles * kEights + 3) / 4 * 4; }
};

// copy_tile() of rows that one block reads, once: they leave L2 first, where otherwise the code,
// tables and pages of the launches behind would go.
__device__ __forceinline__ void copy_tile_once(uint32_t shared, const CUtensorMap& map, int row,
                                               int column, uint64_t* barrier) {
  asm volatile(
      "{ .reg .b64 once; createpolicy.fractional.L2::evict_first.b64 once, 1.0;\n"
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], once; }" ::"r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ float fast_sqrt(float x) {
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A column of u on its way to int8, kLanes lanes each: lane t has k = 8 (kLanes i + t) ..
template <class T, int kLanes = 4>
struct Quantiser {
  static constexpr int kChunks = 32 / kLanes;
  uint4 own[kChunks];

  static __device__ __forceinline__ int k(int chunk) {
    return (kLanes * chunk + lane_id() % kLanes) * 8;
  }

  __device__ __forceinline__ void load(const T* u, int rank) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) own[i] = load_where(k(i) < rank, u + k(i));
  }

  // store(k, 8 int8). One scale for all. The residue is taken as half a unit a value.
  template <class Store>
  __device__ __forceinline__ ScreenColumn store(int rank, Store store) const {
    uint32_t most = 0;  // magnitudes as integers: NaN and infinity are above all others
#pragma unroll
    for (const uint4& x : own)
      for (const uint32_t word : {x.x, x.y, x.z, x.w}) most = __vmaxu2(most, word & 0x7fff7fffu);
    most = max(most & 0xffffu, most >> 16);
#pragma unroll
    for (int other = 1; other < kLanes; other *= 2)
      most = max(most, __shfl_xor_sync(kFullMask, most, other));
    T value;
    value.bits = static_cast<uint16_t>(most);
    const float largest = to_float(value);
    const bool fits = largest >= kScreenSmallest && largest <= kScreenLargest;
    const float inverse = fits ? 127.0f * fast_inverse(largest) : 0.0f;
    int squares = 0;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const uint32_t words[4] = {own[i].x, own[i].y, own[i].z, own[i].w};
      uint32_t q[8];  // the low bits of a value plus 1.5 * 2^23: the integer
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        value.bits = static_cast<uint16_t>(words[j / 2] >> (j % 2 * 16));
        q[j] = __float_as_uint(fmaf(to_float(value), inverse, 0x1.8p23f));
      }
      const auto four = [&](int j) {
        return __byte_perm(__byte_perm(q[j], q[j + 1], 0x0040),
                           __byte_perm(q[j + 2], q[j + 3], 0x0040), 0x5410);
      };
      const uint2 eight{four(0), four(4)};
      squares = __dp4a(static_cast<int>(eight.x), static_cast<int>(eight.x), squares);
      squares = __dp4a(static_cast<int>(eight.y), static_cast<int>(eight.y), squares);
      store(k(i), eight);
    }
#pragma unroll
    for (int other = 1; other < kLanes; other *= 2)
      squares += __shfl_xor_sync(kFullMask, squares, other);
    if (!fits) {
      const float bound = largest < kScreenSmallest ? 16.0f * kScreenSmallest : INFINITY;
      return {127.0f / kScreenSmallest, bound, bound};
    }
    // 1 + 2^-10 is more than what is rounded here
    const float scale = largest * ((1.0f + 0x1p-10f) / 127.0f);
    const float half = 0.5f * fast_sqrt(static_cast<float>(rank));
    return {inverse, scale * (fast_sqrt(static_cast<float>(squares)) + half), scale * half};
  }
};

// What screen_limit() takes as the score to reach: +inf where nothing is to be checked, NaN where
// everything is.
__device__ __forceinline__ float screen_winner(const CertifyColumn& column) {
  if (column.id < 0) return INFINITY;
  return column.winner < INFINITY ? column.winner : NAN;
}

// The least sum of products of int8 that an id with a chance may have. most_base: of its tile.
__device__ __forceinline__ int screen_limit(float winner, float most_base, const ScreenColumn& u,
                                            const ScreenTile& w) {
  const auto size = [](float x) { return fminf(fabsf(x), 1e38f); };
  const float bound = w.residue * u.norm + w.norm * u.residue;
  const float slack = (size(winner) + size(most_base) + bound) * 0x1p-20f + 1e-30f;
  const float limit = (winner - most_base - bound - slack) * (u.inverse * w.inverse);
  return limit > -5e6f ? static_cast<int>(fminf(limit, 5e6f)) - 8 : INT32_MIN;  // NaN: passes
}

// Scores 16 rows of W2 with `count` columns, the i-th at(i), and what of them beats a winner takes
// its place. kOne: 8 at most, so that all loads are on their way together: with one winner outside
// at batch 1 a loop took 6 us more. kMaxima: there is p.tile_max. vain: see certify_ids().
template <class T, bool kOne, bool kMaxima = true, class Pending, class At>
__device__ __noinline__ void certify_marked(const ChainBlockParams& p, int round,
                                            const Pending& pending, int row, At at, int count,
                                            bool vain = false) {
  const ScoreSteps steps(p.rank);
  const int g = lane_id() / 4, t = lane_id() % 4, corrected = static_cast<int>(p.corrected());
  const auto inside = [&](int step) { return steps.used(step) && steps.k(step) < steps.rank; };
  const auto row_at = [&](int r) {
    return static_cast<const T*>(p.w2) + min(int64_t{row + r}, p.vocab - 1) * p.rank + 4 * t;
  };
  const T *const low = row_at(g), *const high = row_at(g + 8);
  uint2 a[kScoreSteps][2] = {};  // all on their way together
#pragma unroll
  for (int step = 0; step < kScoreSteps; ++step)
    if (inside(step)) {
      a[step][0] = *reinterpret_cast<const uint2*>(low + steps.k(step));
      a[step][1] = *reinterpret_cast<const uint2*>(high + steps.k(step));
    }
#pragma unroll 1
  for (int eight = 0; kOne ? eight == 0 : eight < count; eight += kTileColumns) {
    const auto column = [&](int i) { return at(min(eight + i, count - 1)); };
    const T* const u = static_cast<const T*>(p.low_rank) + 4 * t +
                       pending_column(pending, column(g), corrected) * p.rank;
    uint2 b[kScoreSteps] = {};
#pragma unroll
    for (int step = 0; step < kScoreSteps; ++step)
      if (inside(step)) {
        const auto* const two = reinterpret_cast<const uint2*>(u + steps.k(step));
        b[step] = kOne ? __ldcg(two) : *two;
      }
    CertifyColumn of[2];
    float most[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      of[i] = certify_column(p, round, pending, column(2 * t + i));
      most[i] =
          kMaxima ? p.tile_max[row / kPoolTile * (p.batch * corrected) + of[i].index] : INFINITY;
    }
    float chain[kScoreChains][4] = {};
#pragma unroll
    for (int step = 0; step < kScoreSteps; ++step)
      mma_16x8x16<T>(chain[step / kChainSteps], a[step][0].x, a[step][1].x, a[step][0].y,
                     a[step][1].y, b[step].x, b[step].y);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto sum = [&](int j) {
        return (chain[0][j] + chain[1][j]) + (chain[2][j] + chain[3][j]);
      };
      const float sums[2] = {sum(i), sum(2 + i)};
      if (kOne && vain) of[i].winner = -INFINITY, of[i].id = static_cast<int>(p.vocab);
      if (eight + 2 * t + i < count && !(fmaxf(sums[0], sums[1]) + most[i] < of[i].winner))
        certify_ids(p, round, of[i], row + g, sums, kOne && vain);
    }
  }
}

// Where a tile's limit of a column stands: a lane reads those of two eights at once.
__device__ __forceinline__ int limit_place(int column) {
  const int eight = column / 8, i = column % 8;
  return eight / 2 * 16 + i / 2 * 4 + eight % 2 * 2 + i % 2;
}

// 16 rows of W2 that will be scored, to L2. By a warp.
template <class T>
__device__ __forceinline__ void prefetch_rows(const ChainBlockParams& p, int row) {
  for (int i = lane_id(); i < kTileRows * 4; i += kWarpSize)
    if (const int64_t v = row + i / 4; v < p.vocab && i % 4 * 64 < p.rank)
      prefetch_l2(static_cast<const T*>(p.w2) + v * p.rank + i % 4 * 64);
}

// Whether id v may win a column of u with its own base logit, where the screen has the largest of a
// tile. 2^-11 of |W2[v]| |u| for what is rounded here and in a score. By a warp.
template <class T>
__device__ __forceinline__ bool may_win(const ChainBlockParams& p, const CertifyColumn& column,
                                        int v) {
  const int rank = static_cast<int>(p.rank), k = lane_id() * 8;
  const int b = column.key / static_cast<int>(p.drafts);
  const auto row_of = [&](const void* rows, int64_t row) {
    return load_where(k < rank, static_cast<const T*>(rows) + row * rank + k);
  };
  const uint4 of_w = row_of(p.w2, v), of_u = row_of(p.low_rank, column.index);
  const float base = base_at(p, b, column.key - b * p.drafts, v);
  float product = 0.0f, w_squares = 0.0f, u_squares = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const auto value = [i](const uint4& x) {
      const uint32_t two = i < 2 ? x.x : i < 4 ? x.y : i < 6 ? x.z : x.w;
      return to_float(T{static_cast<uint16_t>(two >> i % 2 * 16)});
    };
    const float w = value(of_w), u = value(of_u);
    product += w * u, w_squares += w * w, u_squares += u * u;
  }
#pragma unroll
  for (int other = 1; other < kWarpSize; other *= 2) {
    product += __shfl_xor_sync(kFullMask, product, other);
    w_squares += __shfl_xor_sync(kFullMask, w_squares, other);
    u_squares += __shfl_xor_sync(kFullMask, u_squares, other);
  }
  // 1e-18: squares below what a float holds
  const float bound = (sqrtf(w_squares) + 1e-18f) * (sqrtf(u_squares) + 1e-18f) * 0x1p-11f;
  const float slack = (fabsf(column.winner) + fabsf(base) + bound) * 0x1p-20f + 1e-30f;
  return !(base + product + bound + slack < column.winner);
}

// Marks the columns of the eights in `eights` in which more than a winner itself passes, and
// may_win(column, id) as well, which is asked where few do.
template <bool kAsks, class MayWin>
__device__ __forceinline__ void mark_columns(uint32_t eights, const int (&sums)[kWgmmaColumns / 2],
                                             const int* limits, const int* ids, int row,
                                             uint8_t* marks, MayWin may_win) {
  for (; eights != 0; eights &= eights - 1) {
    const int eight = __ffs(eights) - 1;
    uint32_t marked = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int sum[2] = {sums[i], sums[2 + i]};
#pragma unroll
      for (int j = 1; j < kEights; ++j)
        if (j == eight) sum[0] = sums[4 * j + i], sum[1] = sums[4 * j + 2 + i];
      const int n = eight * 8 + lane_id() % 4 * 2 + i, limit = limits[limit_place(n)], id = ids[n];
      uint32_t passes;
      if constexpr (kAsks) {
        passes = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t votes = __ballot_sync(kFullMask, sum[half] >= limit && id != row + 8 * half);
          if (__popc(votes) > kMostAsked) passes |= votes, votes = 0;
          for (; votes != 0; votes &= votes - 1) {
            const int from = __ffs(votes) - 1;
            if (may_win(__shfl_sync(kFullMask, n, from),
                        __shfl_sync(kFullMask, row + 8 * half, from)))
              passes |= 1u << from;
          }
        }
      } else {
        passes = __ballot_sync(
            kFullMask, (sum[0] >= limit && id != row) || (sum[1] >= limit && id != row + 8));
      }
      passes |= passes >> 16, passes |= passes >> 8, passes = (passes | passes >> 4) & 15;
      passes = (passes | passes << 2) & 0x33, passes = (passes | passes << 1) & 0x55;
      marked |= passes << i;  // bit 2t + i
    }
    if (lane_id() == 0) marks[eight] = static_cast<uint8_t>(marked);
  }
}

// Grid: any number of blocks. map: the int8 rows as 16-bit elements, in tiles of 128. tiles: kTiles
// at most. rounds: tiles of rows of a block, at most. beside: blocks that may start while the chain
// still runs; the others would have u wait behind their tiles.
template <class T, int kTiles, int kPieces>
__global__ void __launch_bounds__(screen_threads(kTiles), 1)
    chain_certify_screen(const __grid_constant__ ChainBlockParams p,
                         const __grid_constant__ CUtensorMap map, int round, int rounds, int stages,
                         int beside) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char unaligned[];
  char* const memory = unaligned + (-shared_address(unaligned) & 1023);
  constexpr int kMost = kTiles * kWgmmaColumns, kGroups = screen_groups(kTiles);
  constexpr int kScreenWarps = screen_warps(kTiles), kScreenThreads = screen_threads(kTiles);
  constexpr int kScreenRegisters = kGroups == 3 ? 152 : 224;
  const ScreenMemory at(p.rank, p.batch, kTiles, rounds, stages);
  ScreenRing& ring = *reinterpret_cast<ScreenRing*>(memory + at.ring);
  int* const limits = reinterpret_cast<int*>(memory + at.limits);
  int* const ids = reinterpret_cast<int*>(memory + at.ids);
  const int rank = static_cast<int>(p.rank);
  const int tiles = ceil_div(static_cast<int>(p.vocab), kPoolTile);
  const int64_t all_columns = p.batch * p.corrected();
  const int warp = warp_id(), lane = lane_id();
  // which waits for this one; mostly both leave at once
  if (round > 0 && p.batch <= kEarlyRows) allow_next_launch();

  const auto tile_of = [&](const CertifyShare& share, int n) {
    const int tile = share.turn + n * share.turns;
    return round == 0 ? tile : tiles - 1 - tile;  // backward the second time: L2 holds the end
  };
  const auto copy_rows = [&](int stage, int tile) {
    arrive_with_bytes(&ring.full[stage], at.stage_bytes);
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      copy_tile_once(
          shared_address(memory) + stage * at.stage_bytes + i * (kPoolTile * kPieceWidth), map,
          tile * kPoolTile, i * kPieceWidth / 2, &ring.full[stage]);
  };
  const int corrected = static_cast<int>(p.corrected());
  // Weights do not depend on the launch in front; in the first round there is surely work for all.
  int early = 0;
  if (round == 0 && p.num_active == nullptr) {
    const CertifyShare share(static_cast<int>(all_columns), kWgmmaColumns, kMost);
    early = min(static_cast<int>(blockIdx.x) < beside ? stages : 1,
                ceil_div(tiles - share.turn, share.turns));
    if (threadIdx.x == kScreenWarps * kWarpSize) {
      for (int stage = 0; stage < stages; ++stage) {
        init_barrier(&ring.full[stage], 1 + kScreenGroup / kWarpSize);  // rows, and limits
        init_barrier(&ring.empty[stage], kScreenWarps);
      }
      fence_barriers();
      for (int i = 0; i < early; ++i) copy_rows(i, tile_of(share, i));
    }
  } else if (threadIdx.x == kScreenWarps * kWarpSize) {
    for (int stage = 0; stage < stages; ++stage) {
      init_barrier(&ring.full[stage], 1 + kScreenGroup / kWarpSize);
      init_barrier(&ring.empty[stage], kScreenWarps);
    }
    fence_barriers();
  }
  constexpr int kMarkBytes = ScreenMemory::mark_bytes(kTiles);
  for (int i = threadIdx.x; i < kScreenWarps * rounds * kMarkBytes / 4; i += kScreenThreads)
    reinterpret_cast<uint32_t*>(memory + at.marks)[i] = 0;
  previous_launch_done();
  // Where the launch in front has given up, this one's work is in vain, and does no harm.
  const PendingRows<kScreenThreads> pending(p, round, reinterpret_cast<int*>(memory + at.list),
                                            ring.slots);
  if (pending.count == 0) {
    if (threadIdx.x == kScreenWarps * kWarpSize)
      for (int i = 0; i < early; ++i) {
        for (int other = 0; other < kScreenGroup / kWarpSize; ++other) arrive(&ring.full[i]);
        wait_for_phase(&ring.full[i], 0);
      }
    return;
  }
  const CertifyShare share(pending.count * corrected, kWgmmaColumns, kMost);
  const int count = max(0, ceil_div(tiles - share.turn, share.turns));  // of this block

  const bool feeds = warp >= kScreenWarps;
  constexpr int kOwn = ceil_div(kMost, kScreenGroup);  // columns of a feeding thread
  const int thread = threadIdx.x % kScreenGroup;
  int index[kOwn];
  float winner[kOwn], base[kOwn];
  ScreenTile scale;
  const ScreenTile* const scales = screen_tiles(p.screen, p.vocab, p.rank);
  const auto look = [&](int n) {  // at what limits come from
    const int tile = tile_of(share, n);
    scale = scales[tile];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) base[i] = __ldcg(p.tile_max + tile * all_columns + index[i]);
  };
  if (feeds) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int n = thread + i * kScreenGroup;
      CertifyColumn column{INFINITY, -1, 0, 0};
      if (n < share.columns) column = certify_column(p, round, pending, share.first + n);
      winner[i] = screen_winner(column), index[i] = column.index;
      if (n < kMost) ids[n] = column.id;
    }
    if (count > 0) look(0);
  }
  ScreenColumn* const quantised = reinterpret_cast<ScreenColumn*>(limits);
  static_assert(sizeof(ScreenColumn) == 3 * sizeof(int));
  {
    constexpr int kEach = 8,
                  kStep = kScreenThreads / kWarpSize * kEach;  // columns of a warp, of all
#pragma unroll 1
    for (int first = warp * kEach; first < share.tiles * kWgmmaColumns; first += kStep) {
      const int n = first + lane / 4, of_tile = n % kWgmmaColumns;
      const int from = pending_column(pending, share.first + min(n, share.columns - 1), corrected);
      Quantiser<T> column;
      column.load(static_cast<const T*>(p.low_rank) + static_cast<int64_t>(from) * rank, rank);
      char* const to = memory + at.u + n / kWgmmaColumns * at.tile_bytes + of_tile * kPieceWidth;
      const ScreenColumn of =
          column.store(rank, [&](int k, const uint2& eight) {  // swizzled (tma.cuh)
            if (k / kPieceWidth < kPieces)
              *reinterpret_cast<uint2*>(to + k / kPieceWidth * (kWgmmaColumns * kPieceWidth) +
                                        (k % kPieceWidth / 16 ^ of_tile % 8) * 16 + k % 16) = eight;
          });
      if (lane % 4 == 0) quantised[n] = of;
    }
  }
  fence_async_proxy();
  __syncthreads();

  if (feeds) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kScreenFeedRegisters));
    ScreenColumn of[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int n = thread + i * kScreenGroup;
      of[i] = n < share.columns ? quantised[n] : ScreenColumn{1.0f, 0.0f, 0.0f};
    }
    asm volatile("bar.sync 1, %0;" ::"n"(kScreenGroup) : "memory");  // limits take its place
    for (int n = 0, stage = 0, phase = 1; n < count; ++n) {
      if (n >= stages) wait_for_phase(&ring.empty[stage], phase);
      if (n >= early && thread == 0) copy_rows(stage, tile_of(share, n));
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int c = thread + i * kScreenGroup;
        if (c < kMost)
          limits[stage * kMost + c / kWgmmaColumns * kWgmmaColumns +
                 limit_place(c % kWgmmaColumns)] =
              c < share.columns ? screen_limit(winner[i], base[i], of[i], scale) : INT32_MAX;
      }
      if (n + 1 < count) look(n + 1);
      __syncwarp();
      if (lane == 0) arrive(&ring.full[stage]);
      if (++stage == stages) stage = 0, phase ^= 1;
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kScreenRegisters));
  // Of tile n: the rows of this warp; -1: none.
  const int group = __shfl_sync(kFullMask, warp / 4, 0);
  const auto own_row = [&](int n) {
    const int half = kGroups == 2 ? group : (group + n) % 3;
    return half < 2 ? half * kWgmmaRows + warp % 4 * kTileRows : -1;
  };
  uint8_t* const marks = reinterpret_cast<uint8_t*>(memory + at.marks) + warp * rounds * kMarkBytes;
  int sums[2][kWgmmaColumns / 2];
  uint4 a[kPieces * 4];  // a step of 32 k each
  const auto take = [&](int stage, int row) {
    const int at_row = row + lane % 16;
#pragma unroll
    for (int step = 0; step < kPieces * 4; ++step)
      a[step] = load_matrices(shared_address(memory) + stage * at.stage_bytes +
                              step / 4 * (kPoolTile * kPieceWidth) + at_row * kPieceWidth +
                              ((step % 4 * 2 + lane / 16) ^ (at_row % 8)) * 16);
  };
  const auto multiply = [&](int (&d)[kWgmmaColumns / 2], int c) {
    wgmma_pin(d);
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < kPieces * 4; ++step)
      wgmma_64x112x32(d, a[step],
                      wgmma_swizzled(shared_address(memory) + at.u + c * at.tile_bytes +
                                     step / 4 * (kWgmmaColumns * kPieceWidth) + step % 4 * 32),
                      step > 0);
    wgmma_commit();
  };
  const auto compare = [&](int (&of)[kWgmmaColumns / 2], int n, int stage, int c) {
    wgmma_pin(of);
    const int* const limit = limits + stage * kMost + c * kWgmmaColumns;
    uint32_t eights = 0;
#pragma unroll
    for (int j = 0; j < kEights; j += 2) {
      const int4 four = *reinterpret_cast<const int4*>(limit + j * 8 + lane % 4 * 4);
      if (max(of[4 * j], of[4 * j + 2]) >= four.x | max(of[4 * j + 1], of[4 * j + 3]) >= four.y)
        eights |= 1u << j;
      if (max(of[4 * j + 4], of[4 * j + 6]) >= four.z | max(of[4 * j + 5], of[4 * j + 7]) >= four.w)
        eights |= 2u << j;
    }
    // One tile of columns alone: what asks would be in the way of products on their way. At batch 8
    // one id a call passed by the largest base logit of its tile, and to score it took 6 us.
    mark_columns<kTiles == 1>(
        __reduce_or_sync(kFullMask, eights), of, limit, ids + c * kWgmmaColumns,
        tile_of(share, n) * kPoolTile + own_row(n) + lane / 4, marks + n * kMarkBytes + c * kEights,
        [&](int column, int v) {
          if (v >= p.vocab ||
              !may_win<T>(p, certify_column(p, round, pending, share.first + column), v))
            return false;
          prefetch_rows<T>(p, tile_of(share, n) * kPoolTile + own_row(n));
          // so that the restart's chain loads its weights meanwhile
          if (round == 0 && lane == 0) *const_cast<volatile uint32_t*>(&p.control->found) = 1;
          return true;
        });
  };
  for (int n = 0, stage = 0, phase = 0; n < count; ++n) {
    wait_for_phase(&ring.full[stage], phase);  // all do: nobody is two phases behind
    if (const int row = own_row(n); row >= 0) {
      take(stage, row);
      multiply(sums[0], 0);
#pragma unroll
      for (int c = 0; c < kTiles; ++c) {
        if (c + 1 < kTiles) {
          multiply(sums[(c + 1) % 2], c + 1);
          wgmma_wait<1>();
        } else {
          wgmma_wait<0>();
        }
        compare(sums[c % 2], n, stage, c);
      }
    }
    __syncwarp();
    if (lane == 0) arrive(&ring.empty[stage]);
    if (++stage == stages) stage = 0, phase ^= 1;
  }
  // Is anything marked? Behind this barrier the ring's memory is free.
  __syncwarp();
  uint32_t some = 0;
  for (int i = lane; i < count * kMarkBytes / 4; i += kWarpSize)
    some |= reinterpret_cast<const uint32_t*>(marks)[i];
  asm volatile(
      "{ .reg .pred own, any; setp.ne.u32 own, %0, 0;\n"
      "barrier.cta.red.or.pred any, 2, %1, own;\n"
      "selp.u32 %0, 1, 0, any; }"
      : "+r"(some)
      : "n"(kScreenWarps * kWarpSize)
      : "memory");
  if (some == 0) return;
  uint16_t* const columns = reinterpret_cast<uint16_t*>(memory) + warp * kMost;  // the ring's place
  for (int n = 0; n < count; ++n) {
    uint32_t mark = 0;
    if (lane < kMarkBytes / 4)
      mark = reinterpret_cast<const uint32_t*>(marks + n * kMarkBytes)[lane];
    if (!__any_sync(kFullMask, mark != 0)) continue;
    // Then all rows go to the dense steps, which come to the same ids and restarts wherever a row
    // begins. Heads without a GRU start again in any case.
    if (round == 0 && p.w_hh != nullptr && p.batch > kCertainRows &&
        restart_is_vain(*const_cast<const volatile uint32_t*>(&p.control->missed), p.batch)) {
      if (lane == 0) p.control->cut = 1;
      return;
    }
    int end = __popc(mark);  // of this lane's columns in the list
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) {
      const int before = __shfl_up_sync(kFullMask, end, step);
      if (lane >= step) end += before;
    }
    for (int to = end - __popc(mark); mark != 0; mark &= mark - 1)
      columns[to++] = static_cast<uint16_t>(lane * 32 + __ffs(mark) - 1);
    __syncwarp();
    certify_marked<T, false>(
        p, round, pending, tile_of(share, n) * kPoolTile + own_row(n),
        [base = share.first, columns](int i) { return base + columns[i]; },
        __shfl_sync(kFullMask, end, kWarpSize - 1));
    __syncwarp();
  }
#endif
}

}  // namespace domino
