// draft_chain, the chain of heads without a GRU (DSpark's Markov heads): what chain_block does
// where S_j is a row of the head's own table; formula, rounding points and score bits stand in
// draft_chain.h. For sm_90.
//
// A cluster a batch row; a block has an eighth of the pool, with its rows of W2 in shared memory. A
// step goes round inside the cluster, where barriers count the bytes that come:
//
//   keys of y_j  -> its argmax, and s, the row of y_j: u itself (kRow), or
//   s            -> u = sigmoid(W1h H + W1s s) * s, 32 rows of W1s a block
//   u            -> scores of the block's ids, the best key of each warp
//
// A cluster is scheduled whole and waits for itself alone: nothing has to be given up. Bound by
// latency: a row from L2 (asked for there beforehand, for all ids of the pool) and one exchange in
// the cluster, or two.
//
// Keys of step j + 1 may come before a block has all of step j, so even and odd steps have barriers
// and places of their own; those of j + 2 may not: who sends them has the keys of j + 1 from all
// warps, which had those of j. Who sends u of step j + 1 has the keys of step j from all warps,
// which had u of step j.
#pragma once

#include "common/cluster.cuh"
#include "head/chain_math.cuh"
#include "head/draft_draw.h"

namespace domino {

constexpr int kMarkovBlocks = 8;  // of a batch row: a cluster
constexpr int kMarkovWarps = 8;   // of a block
constexpr int kMarkovThreads = kMarkovWarps * kWarpSize;
constexpr int kMarkovAhead = 2;  // tiles of a warp whose base logits are asked for a step ahead

struct MarkovArgs : ChainBlockParams {
  int part;   // ids of a pool in a block: a multiple of 16
  int pitch;  // bytes of a row in shared memory: 16 modulo 32
  bool restart;
};

// Shared memory of a block, in bytes from its start.
struct MarkovMemory {
  static constexpr int keys_barrier = 0, low_rank_barrier = 16;  // two, one
  static constexpr int kBarriers = 3;
  static constexpr int keys = 32;  // u64 [2, blocks, warps]
  static constexpr int token = keys + 2 * kMarkovBlocks * kMarkovWarps * 8;  // s: 256 elements
  static constexpr int low_rank = token + 256 * 2;                           // u
  static constexpr int w1 = low_rank + 256 * 2;                              // [32, pitch]
  int pitch, part;
  DOMINO_HD int w2() const { return w1 + 32 * pitch; }
  DOMINO_HD int ids() const { return w2() + part * pitch; }  // i32 [part]
  DOMINO_HD int bytes() const { return ids() + part * 4; }
};

// kRank: the rank where it is known, or 0.
template <class T, int kRank>
__global__ void __launch_bounds__(kMarkovThreads, 2)
    chain_markov(const __grid_constant__ MarkovArgs p) {
  extern __shared__ __align__(128) char memory[];
  __shared__ int shared_start;
  using Memory = MarkovMemory;
  const Memory layout{p.pitch, p.part};
  const uint32_t own = shared_address(memory);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarpSize;
  const int lane = thread % kWarpSize, g = lane / 4, t = lane % 4;
  const int member = blockIdx.x % kMarkovBlocks;
  const int64_t b = blockIdx.x / kMarkovBlocks;
  const int rank = kRank ? kRank : static_cast<int>(p.rank);
  const int drafts = static_cast<int>(p.drafts), prefix = static_cast<int>(p.prefix);
  const bool gated = p.kind == LowRank::kGate, draws = p.temperature != nullptr;
  const T* const table = static_cast<const T*>(p.embedding);

  if (p.restart) {
    allow_next_launch();  // which waits for this one, and mostly leaves at once as well
    previous_launch_done();
    if (p.first_of(1)[b] == p.row_done()) return;
  }
  if (thread < Memory::kBarriers) make_barrier(own + thread * 8);
  const int low_tile = member * 2 + warp;  // of 16 rows of W1s, for warps 0 and 1
  const bool makes_low_rank = gated && warp < 2 && low_tile * 16 < rank;
  const uint32_t w1_rows = own + Memory::w1 + warp * 16 * p.pitch;
  if (makes_low_rank && lane * 8 < rank) {
    const int64_t stride = p.hidden_width + rank;
    const T* const from =
        static_cast<const T*>(p.w1) + low_tile * 16 * stride + p.hidden_width + lane * 8;
#pragma unroll 4
    for (int i = 0; i < 16; ++i) copy_async16(w1_rows + i * p.pitch + lane * 16, from + i * stride);
  }
  if (!p.restart) previous_launch_done();
  if (thread == 0) shared_start = begin_row(p, p.restart, b, member == 0);
  int* const ids = reinterpret_cast<int*>(memory + layout.ids());
  const int tiles = p.part / 16;
  for (int i = thread; i < p.part; i += kMarkovThreads) {
    const int m = member * p.part + i;
    ids[i] = m < p.pool_size ? p.pool[b * p.pool_size + m] : -1;
  }
  __syncthreads();
  const int start = shared_start;
  cluster_sync();  // barriers are made
  if (start >= drafts) return;

  const uint32_t w2_rows = own + layout.w2();
#pragma unroll 4
  for (int i = warp; i < p.part; i += kMarkovWarps)
    if (lane * 8 < rank)
      copy_async16(
          w2_rows + i * p.pitch + lane * 16,
          static_cast<const T*>(p.w2) + static_cast<int64_t>(max(ids[i], 0)) * rank + lane * 8);
  copy_async_commit();
  const int lines = ceil_div(rank * 2, 128);
  for (int i = thread; i < p.part * lines; i += kMarkovThreads) {
    const int64_t at = static_cast<int64_t>(max(ids[i / lines], 0)) * rank * 2 + i % lines * 128;
    prefetch_l2(reinterpret_cast<const char*>(table) + at);
  }

  const int first = max(start, draws ? 0 : prefix);  // the drafts before it are known
  const auto report = [&](int j, unsigned long long key) {
    const int64_t at = b * drafts + j;
    p.tokens[at] = min(static_cast<int64_t>(key_id(key)), p.vocab - 1);
    p.scores[at] = key_value(key);
  };
  if (member == 0)
    for (int j = start + thread; j < first; j += kMarkovThreads) report(j, p.keys[b * drafts + j]);
  int64_t y = first == 0 ? p.anchor[b] : key_id(p.keys[b * drafts + first - 1]);

  const uint32_t peer = shared_address_of(memory, lane % kMarkovBlocks);
  const int senders = min(tiles, kMarkovWarps);
  const auto await_phase = [&](int barrier, int phase) {
    while (!phase_ended(own + barrier, phase & 1)) {
    }
  };
  const auto draw_of = [&](int j) -> DraftDraw {
    const float temperature = p.temperature[b];
    return {{p.seed[b], p.block_start[b]}, temperature > 0.0f ? 1.0f / temperature : 0.0f, j};
  };
  // What lane 4g + h (h < 2) needs of its id, row 8h + g of a tile, besides u.
  struct Scored {
    int id = -1;
    RawBase base;
    float bonus;
  };
  const auto prepare = [&](int j, int tile) {
    Scored one;
    if (t < 2 && tile < tiles) one.id = ids[tile * 16 + 8 * t + g];
    if (one.id < 0) return one;
    one.base.template load<false>(p, b, j, one.id);
    if (draws) one.bonus = draw_of(j).bonus(one.id);
    return one;
  };
  Scored ahead[kMarkovAhead];
#pragma unroll
  for (int i = 0; i < kMarkovAhead; ++i) ahead[i] = prepare(first, warp + i * kMarkovWarps);
  // Of 16 elements, 2t, 2t + 1, 2t + 8 and 2t + 9 stand side by side, as a fragment.
  const auto column = [&](int at, int step) {
    return *reinterpret_cast<const uint2*>(memory + at + step * 32 + t * 8);
  };

#pragma unroll 1
  for (int j = first; j < drafts; ++j) {
    const int step = j - first;
    const bool corrects = j >= prefix;
    const int keys_barrier = Memory::keys_barrier + step % 2 * 8;
    if (thread == kMarkovThreads - 1) {  // what comes in this step
      expect_bytes(own + keys_barrier, kMarkovBlocks * senders * 8);
      if (gated && corrects) expect_bytes(own + Memory::low_rank_barrier, rank * 2);
    }
    int u_at = Memory::token;
    if (corrects) {
      const int64_t low_at = (b * (drafts - prefix) + j - prefix) * rank;
      float z[2] = {};
      if (makes_low_rank && t == 0)
        for (int h = 0; h < 2; ++h) z[h] = p.from_hidden[low_at + low_tile * 16 + h * 8 + g];
      if (thread < rank / 8) {
        const uint4 row =
            *reinterpret_cast<const uint4*>(table + clamp_id(y, p.vocab) * rank + thread * 8);
        auto* const to =
            reinterpret_cast<uint32_t*>(memory + Memory::token + thread / 2 * 32) + thread % 2;
        to[0] = row.x, to[2] = row.y, to[4] = row.z, to[6] = row.w;
        if (!gated && p.exact && member == 0)
          *reinterpret_cast<uint4*>(static_cast<T*>(p.low_rank) + low_at + thread * 8) = row;
      }
      if (step == 0) copy_async_wait<0>();
      __syncthreads();
      if (gated) {
        if (makes_low_rank) {
          float sums[kStateParts][4] = {};  // one MMA each, as chain_finish has them
          const uint32_t rows = w1_rows + lane % 16 * p.pitch + lane / 16 * 16;
#pragma unroll
          for (int k = 0; k < kStateParts; ++k) {
            if (k * 16 >= rank) continue;
            const uint4 w = load_fragment(rows + k * 32);
            const uint2 s = column(Memory::token, k);
            mma_16x8x16<T>(sums[k], w.x, w.y, w.z, w.w, s.x, s.y);
          }
          uint32_t bits[2];  // of rows g and g + 8, in column 0
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            alignas(16) float parts[kStateParts];
#pragma unroll
            for (int k = 0; k < kStateParts; ++k) parts[k] = sums[k][2 * h];
            const int at = low_tile * 32 + (g / 2 * 4 + h * 2 + g % 2) * 2;
            const T mine = *reinterpret_cast<const T*>(memory + Memory::token + at);
            const float mixed = z[h] + sum_of<kStateParts, 1>(parts);
            bits[h] = from_float<T>(chain_gate(mixed, to_float(mine))).bits;
            if (p.exact && t == 0)
              static_cast<T*>(p.low_rank)[low_at + low_tile * 16 + h * 8 + g].bits = bits[h];
          }
          const int q = lane / kMarkovBlocks;  // of the four quarters of the tile
          uint32_t pair[2];
#pragma unroll
          for (int h = 0; h < 2; ++h)
            pair[h] = __shfl_sync(kFullMask, bits[h], 8 * q) |
                      __shfl_sync(kFullMask, bits[h], 8 * q + 4) << 16;
          send_shared(peer + Memory::low_rank + (low_tile * 16 + 4 * q) * 2,
                      static_cast<uint64_t>(pair[1]) << 32 | pair[0],
                      peer + Memory::low_rank_barrier);
        }
        // a warp without tiles has no use for u, and might sleep past a phase
        if (warp < senders) await_phase(Memory::low_rank_barrier, j - max(first, prefix));
        u_at = Memory::low_rank;
      }
    } else {
      if (step == 0) copy_async_wait<0>();
      __syncthreads();  // no warp is a whole turn of the keys' barriers behind
    }

    if (warp < senders) {
      unsigned long long key = 0;
      const auto score = [&](int tile, const Scored& one) {
        float sums[1][4][4] = {};
        if (corrects) {
          const uint32_t rows = w2_rows + (tile * 16 + lane % 16) * p.pitch + lane / 16 * 16;
          score_tiles<T, kRank, 1>(
              sums, rank / 16, [&](int, int k) { return load_fragment(rows + k * 32); },
              [&](int k) { return column(u_at, k); });
        }
        // column 0 (lane 4g) for rows g, column 2 (lane 4g + 1) for rows g + 8
        const float sum = t == 0 ? chain_sum(sums[0], 0) : chain_sum(sums[0], 2);
        const int m = member * p.part + tile * 16 + 8 * t + g;
        const float score =
            one.id < 0 ? -INFINITY : one.base.template value<kAnyType>(p, one.id) + sum;
        unsigned long long best = one.id >= 0 ? argmax_key(score, one.id) : 0;
        if (draws && t < 2 && m < p.pool_size) {
          const DraftDraw draw = draw_of(j);
          if (best != 0 && draw.inverse_temperature > 0.0f)
            best = argmax_key(draw.order(score, one.bonus), one.id);
          const int64_t to = (b * drafts + j) * p.pool_size + m;
          p.pool_ids[to] = one.id;
          p.pool_logits[to] = score;
        }
        key = max(key, best);
      };
#pragma unroll
      for (int i = 0; i < kMarkovAhead; ++i)
        if (warp + i * kMarkovWarps < tiles) score(warp + i * kMarkovWarps, ahead[i]);
#pragma unroll 1
      for (int tile = warp + kMarkovAhead * kMarkovWarps; tile < tiles; tile += kMarkovWarps)
        score(tile, prepare(j, tile));
      key = warp_best(key);
      if (lane < kMarkovBlocks)
        send_shared(
            peer + Memory::keys + ((step % 2 * kMarkovBlocks + member) * kMarkovWarps + warp) * 8,
            key, peer + keys_barrier);
      if (j + 1 < drafts) {
#pragma unroll
        for (int i = 0; i < kMarkovAhead; ++i) ahead[i] = prepare(j + 1, warp + i * kMarkovWarps);
      }
    }

    // y_{j+1}; in every block, whose last keys are on their way to it, also behind the last step
    await_phase(keys_barrier, step / 2);
    const auto* const words = reinterpret_cast<const unsigned long long*>(memory + Memory::keys) +
                              step % 2 * kMarkovBlocks * kMarkovWarps + lane;
    const bool sent = lane % kMarkovWarps < senders;
    const unsigned long long best = warp_best(sent ? max(words[0], words[kWarpSize]) : 0);
    y = key_id(best);
    if (member == 0 && thread == 0) {
      report(j, best);
      p.keys[b * drafts + j] = best;
      if (b == 0 && step == 1) p.control->begun[0] = 2;  // no epoch: sends no words
    }
  }
}

}  // namespace domino
