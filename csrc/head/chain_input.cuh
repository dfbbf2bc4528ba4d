// W_ih E[y] for the block form of draft_chain where there is no input table: made by servers,
// blocks of the same launch beside the chain's that do nothing else.
//
// W_ih is cut into slabs: the three gates of 64 units by a quarter of the inputs. A server keeps
// its slab for the whole launch, nearly half of it in registers as MMA fragments and the rest in
// shared memory, both filled before the launch in front has ended. In a step it waits for the keys
// of y_j as the chain's blocks do, reads its quarter of the rows E[y_j] and sends the products on
// in words of 16 bytes: the sums of the three gates of a unit, and a tag. Who owns the unit adds
// the words of the four quarters. What a server does not keep (of more than 4096 inputs, and slabs
// without a server of their own) it reads from L2 in each step.
//
// Most of a step a server is idle. Up to 8 rows it spends that on a guess of y_j, the id of the
// best base logit in the pool, and sends what it makes of it ahead of y_j, in words of its own:
// only rows that are guessed wrong then wait for a product.
//
// The inputs are summed in 16 parts (kStateParts): part q takes the 32s q, q + 16, .. one after the
// other, each in two MMAs of 16 side by side; then sum_of_parts. Bound by the latency of a row
// of E, then by 213 KB from shared memory.
#pragma once

#include "common/copy_async.cuh"
#include "head/chain_exchange.cuh"
#include "head/chain_layout.cuh"
#include "head/chain_math.cuh"

namespace domino {

constexpr int kSlabUnits = 64, kQuarterParts = kStateParts / 4;
constexpr uint32_t kNoToken = 0xffffffffu;

DOMINO_HD int input_slabs(int64_t units) {
  return static_cast<int>((units + kSlabUnits - 1) / kSlabUnits) * 4;
}

// The id that row `row` of group 0 has chosen as draft j, from the keys of all its blocks; by a
// warp. Where the id was guessed the chain may go on before these keys have been read: a key of a
// later draft in their place says that the guess was right.
__device__ __forceinline__ uint32_t await_choice(const ChainExchange& exchange, int row, int words,
                                                 int j, uint32_t guess, uint32_t* aborted) {
  const int lane = threadIdx.x % kWarpSize, pairs = kGroup / 2 * words;
  const uint64_t* const from = exchange.keys(0) + row * pairs * 2;
  unsigned long long best = 0;
  int latest = 0;
#pragma unroll 1
  for (int i = lane; i - lane < pairs; i += 2 * kWarpSize) {
    ulonglong2 first{}, second{};
    await(
        [&] {
          first = look_twice(from + 2 * min(i, pairs - 1));
          second = look_twice(from + 2 * min(i + kWarpSize, pairs - 1));
          return min(min(key_tag(first.x), key_tag(first.y)),
                     min(key_tag(second.x), key_tag(second.y))) > j;
        },
        aborted);
    best = max(max(best, max(first.x, first.y)), max(second.x, second.y));
    latest = max(latest, max(max(key_tag(first.x), key_tag(first.y)),
                             max(key_tag(second.x), key_tag(second.y))));
  }
  const uint32_t chosen = key_word_id(static_cast<uint32_t>(warp_best(best)));
  return __any_sync(kFullMask, latest > j + 1) ? guess : chosen;
}

// The guess of y_j that the servers have made for a batch row, where `wanted` in this lane.
__device__ __forceinline__ uint32_t await_guess(const ChainExchange& exchange, int row, int j,
                                                uint32_t epoch, bool wanted, uint32_t* aborted) {
  uint64_t word = 0;
  await(
      [&] {
        if (wanted) word = look(exchange.guess(row, j));
        return !wanted || static_cast<uint32_t>(word) == epoch + j;
      },
      aborted);
  return wanted ? static_cast<uint32_t>(word >> 32) : kNoToken;
}

// Until the whole of row `row`'s S_j is there; by a warp.
template <class T>
__device__ __forceinline__ void await_state(const ChainExchange& exchange, int row, int j,
                                            uint32_t* aborted) {
  const T* const state = exchange.states<T>(0, j) + row * exchange.units;
  const uint64_t tag = state_tag(j);
#pragma unroll 1
  for (int first = 0; first < exchange.units; first += 4 * kWarpSize) {
    const int unit = min(first + static_cast<int>(threadIdx.x) % kWarpSize * 4, exchange.units - 4);
    await([&] { return has_state_tag(look(state + unit), tag); }, aborted);
  }
}

// W_ih E[y] of 16 units, of which a lane has unit lane % 16. Their words [4, units] start at
// `words`: of one batch row for the whole warp, whose upper lanes help (kLanes = 32), or of one for
// each half. Those of quarter `kept` are here already: `own`.
template <int kLanes>
__device__ __forceinline__ float3 take_inputs(const InputWord* words, int units, bool wanted,
                                              uint32_t tag, int kept, float3 own,
                                              uint32_t* aborted) {
  constexpr int kMine = kLanes / 32 == 1 ? 2 : 4;  // words
  const int lane = threadIdx.x % kWarpSize;
  const InputWord* const from = words + lane % 16 + (kMine == 2 ? lane / 16 * 2 * units : 0);
  InputWord word[kMine] = {};
  await(
      [&] {
        bool here = true;
        if (wanted) {
#pragma unroll
          for (int i = 0; i < kMine; ++i)
            if (i != kept) word[i] = look(from + i * units);
#pragma unroll
          for (int i = 0; i < kMine; ++i) here &= i == kept || word[i].tag == tag;
        }
        return here;
      },
      aborted);
  if constexpr (kMine == 4) {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      word[i].r = i == kept ? own.x : word[i].r;
      word[i].z = i == kept ? own.y : word[i].z;
      word[i].n = i == kept ? own.z : word[i].n;
    }
  }
  float3 sum{word[0].r + word[1].r, word[0].z + word[1].z, word[0].n + word[1].n}, more;
  if constexpr (kMine == 4) {
    more = {word[2].r + word[3].r, word[2].z + word[3].z, word[2].n + word[3].n};
  } else {
    more = {__shfl_down_sync(kFullMask, sum.x, 16), __shfl_down_sync(kFullMask, sum.y, 16),
            __shfl_down_sync(kFullMask, sum.z, 16)};
  }
  return {sum.x + more.x, sum.y + more.y, sum.z + more.z};
}

// kColumnTiles: eights of batch rows. Warp w has part w % 4 of its slab's quarter and, of the
// units, what its place w / 4 says: tiles of 16 rows, tile i gate i % 3 of 16 units. A fragment: a
// tile by 32 inputs, the operands of two MMAs. Up to 8 rows a server keeps fragments of 4096
// inputs, with more rows, more warps and less registers each those of 2048.
template <class T, int kColumnTiles>
class InputServer {
  static constexpr int kWarps = kColumnTiles == 1 ? 8 : 16;
  static constexpr int kTiles = kSlabUnits * 3 / 16 / (kWarps / 4);
  static constexpr int kChunks = kColumnTiles == 1 ? 8 : 4;  // 32s of a part that are kept
  static constexpr int kHeld = kColumnTiles == 1 ? 22 : 0;   // fragments in registers: the first
  static constexpr int kStored = kChunks * kTiles - kHeld;   // in shared memory
  static constexpr int kAhead = 6;                           // columns of E in flight, up to 8 rows
  static constexpr int kStride = kStateParts * 32;  // inputs from a 32 to the next of a part
  // shared memory: float4 [places, 3 parts, tiles, 32 lanes], u32 [rows], fragments that are kept
  static constexpr int kTokens = kWarps / 4 * 3 * kTiles * 512;
  static constexpr int kKept = kTokens + kColumnTiles * kColumns * 4;

 public:
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kBytes = kKept + kStored * kWarps * 1024;
  static constexpr int kLeastBytes = kKept;  // where nothing is kept (ChainBlockArgs::keeps_inputs)

  // With more rows one of them is guessed wrong in most steps.
  static constexpr bool kGuesses = kColumnTiles == 1;

  // Server blockIdx.x - p.chain_blocks of a launch of one group.
  static __device__ __forceinline__ void run(const ChainBlockArgs& p, char* memory) {
    InputServer server(p, memory);
    if (p.keeps_inputs) server.keep();
    previous_launch_done();
    server.serve();
  }

 private:
  const ChainBlockArgs& p;
  char* const memory;
  const int warp, lane, part, inputs, units, slabs, servers;
  int slab;  // the one that is kept
  uint4 held[kHeld ? kHeld : 1][2];

  __device__ __forceinline__ InputServer(const ChainBlockArgs& p, char* memory)
      : p(p),
        memory(memory),
        warp(threadIdx.x / kWarpSize),
        lane(threadIdx.x % kWarpSize),
        part(warp % 4),
        inputs(static_cast<int>(p.inputs)),
        units(static_cast<int>(p.units)),
        slabs(input_slabs(units)),
        servers(gridDim.x - p.chain_blocks),
        slab(blockIdx.x - p.chain_blocks) {}

  // The first input of this lane, and the unit of its upper row in the tiles of 16 units.
  __device__ __forceinline__ int input_of(int slab) const {
    return (slab % 4 * kQuarterParts + part) * 32 + lane % 4 * 8;
  }
  __device__ __forceinline__ int unit_of(int slab, int tile) const {
    return slab / 4 * kSlabUnits + (warp / 4 * kTiles + tile) / 3 * 16 + lane / 4;
  }

  __device__ __forceinline__ void load(int slab, int chunk, int tile, uint4 (&w)[2]) const {
    const int k = input_of(slab) + chunk * kStride, unit = unit_of(slab, tile);
    const bool inside = slab < slabs && k < inputs && unit < units;
    const T* const from = static_cast<const T*>(p.w_ih) +
                          (static_cast<int64_t>(tile % 3) * units + unit) * inputs + k;
    const uint4 low = by_sixteens(load_where(inside, from)),
                high = by_sixteens(load_where(inside, from + 8 * inputs));
    w[0] = {low.x, high.x, low.y, high.y};
    w[1] = {low.z, high.z, low.w, high.w};
  }

  __device__ __forceinline__ uint4* stored(int i) const {  // fragment i of this warp, of this lane
    return reinterpret_cast<uint4*>(memory + kKept) + ((i - kHeld) * kWarps + warp) * 64 + lane;
  }

  __device__ __forceinline__ void keep() {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) load(slab, i / kTiles, i % kTiles, held[i]);
#pragma unroll 2
    for (int i = kHeld; i < kChunks * kTiles; ++i) {
      uint4 w[2];
      load(slab, i / kTiles, i % kTiles, w);
      stored(i)[0] = w[0], stored(i)[32] = w[1];
    }
  }

  using Sums = float[kColumnTiles][kTiles][4];

  // E[y] from this lane's inputs in `of` on, for the token of a column, as loaded.
  __device__ __forceinline__ uint4 load_column(int of, uint32_t y, int chunk) const {
    const int k = input_of(of) + chunk * kStride;
    const T* const row =
        static_cast<const T*>(p.embedding) + static_cast<int64_t>(y == kNoToken ? 0 : y) * inputs;
    return load_where(y != kNoToken && k < inputs, row + k);
  }

  __device__ __forceinline__ void multiply(Sums& sums, int tile, const uint4& first,
                                           const uint4& second,
                                           const uint4 (&column)[kColumnTiles]) const {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n)
      mma_16x8x16<T>(sums[n][tile], first.x, first.y, first.z, first.w, column[n].x, column[n].y);
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n)
      mma_16x8x16<T>(sums[n][tile], second.x, second.y, second.z, second.w, column[n].z,
                     column[n].w);
  }

  // This warp's part of a slab, for the tokens of columns lane / 4.
  __device__ __forceinline__ void multiply(int of, const uint32_t (&y)[kColumnTiles],
                                           Sums& sums) const {
    const bool kept = p.keeps_inputs && of == slab;
    int from = 0;
    if constexpr (kColumnTiles == 1) {
      if (kept) {
        uint4 column[kAhead][1];
#pragma unroll
        for (int c = 0; c < kAhead; ++c) column[c][0] = load_column(of, y[0], c);
        uint4 next = by_sixteens(column[0][0]);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          const uint4 b = next;
          if (c + kAhead < kChunks) column[c % kAhead][0] = load_column(of, y[0], c + kAhead);
          if (c + 1 < kChunks) next = by_sixteens(column[(c + 1) % kAhead][0]);
#pragma unroll
          for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
              const int at = c * kTiles + tile;
              const uint4 w = at < kHeld ? held[at < kHeld ? at : 0][half] : stored(at)[32 * half];
              mma_16x8x16<T>(sums[0][tile], w.x, w.y, w.z, w.w, half ? b.z : b.x, half ? b.w : b.y);
            }
        }
        from = kChunks;
      }
    }
#pragma unroll 1
    for (int c = from; c * kStride < inputs; ++c) {
      uint4 column[kColumnTiles];
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) column[n] = by_sixteens(load_column(of, y[n], c));
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        uint4 w[2];
        if (kept && c < kChunks) {
          const uint4* const at = stored(kHeld) + (c * kTiles + tile - kHeld) * kWarps * 64;
          w[0] = at[0], w[1] = at[32];
        } else {
          load(of, c, tile, w);
        }
        multiply(sums, tile, w[0], w[1], column);
      }
    }
  }

  // The sums of the four parts, in the warps of part 0, to the words of this draft's rows.
  __device__ __forceinline__ void send_sums(const ChainExchange& exchange, int kind, int of,
                                            Sums& sums, uint32_t tag) const {
    float4* const others = reinterpret_cast<float4*>(memory) + warp / 4 * 3 * kTiles * 32 + lane;
    const uint32_t* const tokens = reinterpret_cast<const uint32_t*>(memory + kTokens);
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      if (part > 0) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          const auto& sum = sums[n][i];
          others[((part - 1) * kTiles + i) * 32] = {sum[0], sum[1], sum[2], sum[3]};
        }
      }
      __syncthreads();
      if (part == 0) {
        const int column = n * kColumns + lane % 4 * 2;
        const uint2 y = *reinterpret_cast<const uint2*>(tokens + column);
#pragma unroll
        for (int some = 0; some < kTiles; some += 3) {
          float total[3][4];
#pragma unroll
          for (int i = 0; i < 3; ++i) {
            const float4* const of_tile = others + (some + i) * 32;
            const auto& sum = sums[n][some + i];
            const float4 a = of_tile[0], b = of_tile[kTiles * 32], c = of_tile[2 * kTiles * 32];
            total[i][0] = (sum[0] + a.x) + (b.x + c.x);
            total[i][1] = (sum[1] + a.y) + (b.y + c.y);
            total[i][2] = (sum[2] + a.z) + (b.z + c.z);
            total[i][3] = (sum[3] + a.w) + (b.w + c.w);
          }
          const int unit = unit_of(of, some);
          if (unit >= units) continue;
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if ((e % 2 ? y.y : y.x) != kNoToken)
              send(exchange.inputs(kind, column + e % 2, of % 4) + unit + e / 2 * 8,
                   {total[0][e], total[1][e], total[2][e], tag});
        }
      }
      if (n + 1 < kColumnTiles) __syncthreads();
    }
  }

  // Guesses of the drafts that are chosen from pools: the best base logit, mostly right. This
  // server's share of them, to all.
  template <class FirstGuess>
  __device__ __forceinline__ void guess(const ChainExchange& exchange, int rows, uint32_t epoch,
                                        const FirstGuess& first_guess) const {
    unsigned long long* const best = reinterpret_cast<unsigned long long*>(memory);
    const int drafts = static_cast<int>(p.drafts);
#pragma unroll 1
    for (int i = slab; i < rows * drafts; i += servers) {
      const int row = i % rows, j = i / rows;
      if (j < first_guess(row)) continue;
      const int64_t b = p.row0 + row;
      const int32_t* const pool = p.pool + (b * p.pools + (p.pools > 1 ? j - 1 : 0)) * p.pool_size;
      unsigned long long key = 0;
#pragma unroll 4
      for (int m = threadIdx.x; m < p.pool_size; m += kThreads) {
        const int id = pool[m];
        if (id >= 0)
          key = max(key, static_cast<unsigned long long>(argmax_key(base_at(p, b, j - 1, id), id)));
      }
      key = warp_best(key);
      if (lane == 0) best[warp] = key;
      __syncthreads();
      if (threadIdx.x == 0) {
        for (int w = 1; w < kWarps; ++w) key = max(key, best[w]);
        send(exchange.guess(row, j), static_cast<uint64_t>(key_id(key)) << 32 | (epoch + j));
      }
      __syncthreads();
    }
  }

  // The products for the tokens in shared memory, to words of this kind; by all threads.
  __device__ __forceinline__ void products(const ChainExchange& exchange, int kind, uint32_t tag) {
    const uint32_t* const tokens = reinterpret_cast<const uint32_t*>(memory + kTokens);
    uint32_t y[kColumnTiles];
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) y[n] = tokens[n * kColumns + lane / 4];
#pragma unroll 1
    for (int of = slab; of < slabs; of += servers) {
      Sums sums = {};
      multiply(of, y, sums);
      send_sums(exchange, kind, of, sums, tag);
      __syncthreads();
    }
  }

  __device__ __forceinline__ void serve() {
    const uint32_t epoch = p.control->epoch + 1;
    uint32_t* const aborted = &p.control->aborted;
    const ChainExchange exchange(p.exchange, units, static_cast<int>(p.rank), epoch);
    exchange.clear_other(blockIdx.x * kThreads + threadIdx.x, gridDim.x * kThreads);
    const int drafts = static_cast<int>(p.drafts);
    const int rows = static_cast<int>(min(static_cast<int64_t>(p.group_rows), p.batch - p.row0));
    const auto start_of = [&](int row) -> int {
      const int64_t b = p.row0 + row;
      if (row >= rows) return drafts;
      if (p.restart) return min(p.first_of(1)[b], drafts);
      return p.num_active == nullptr || b < *p.num_active ? 0 : drafts;
    };
    const int begin = __reduce_min_sync(kFullMask, start_of(lane));
    const auto token = [&](int row, int j, uint32_t guess) -> uint32_t {  // y_j
      const int64_t b = p.row0 + row;
      const int start = start_of(row);
      if (start == drafts || j < start) return kNoToken;
      if (j == 0) return static_cast<uint32_t>(clamp_id(p.anchor[b], p.vocab));
      const uint32_t last_id = static_cast<uint32_t>(p.vocab - 1);
      // keys of drafts before this one are in p.keys
      if (j > max(start, p.temperature ? 0 : static_cast<int>(p.prefix)))
        return min(await_choice(exchange, row, p.words, j - 1, guess, aborted), last_id);
      // Who needs not wait for a key must see that the words of the step before have been read.
      if (j > start) await_state<T>(exchange, row, j - 1, aborted);
      return min(key_id(p.keys[b * drafts + j - 1]), last_id);
    };
    const auto first_guess = [&](int row) {
      return kGuesses ? 1 + max(start_of(row), p.temperature ? 0 : static_cast<int>(p.prefix))
                      : drafts;
    };
    uint32_t* const tokens = reinterpret_cast<uint32_t*>(memory + kTokens);
    const bool run = !__syncthreads_or(*reinterpret_cast<volatile uint32_t*>(aborted) != 0 ||
                                       p.control->mute == blockIdx.x + 1);
    if (kGuesses && run) guess(exchange, rows, epoch, first_guess);
    constexpr int kRows = kColumnTiles * kColumns / kWarps;  // of a warp
#pragma unroll 1
    for (int j = max(begin - 1, 0); run && j < drafts; ++j) {
      uint32_t guessed[kRows];
      bool any = false;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = warp + i * kWarps;
        guessed[i] =
            await_guess(exchange, row, j, epoch, row < rows && j >= first_guess(row), aborted);
        if (lane == 0) tokens[row] = guessed[i];
        any |= guessed[i] != kNoToken;
      }
      if (__syncthreads_or(any)) products(exchange, 1 + j % 2, epoch + j);
      any = false;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = warp + i * kWarps;
        const uint32_t y = token(row, j, guessed[i]);
        if (lane == 0) tokens[row] = y == guessed[i] ? kNoToken : y;
        any |= y != guessed[i];
      }
      if (__syncthreads_or(any)) products(exchange, 0, epoch + j);
    }
  }
};

}  // namespace domino
