// The blocks of the team form that draft: 8 of them, a cluster, a batch row. Each has an eighth of
// the units, 32 rows of W1s (fragments in registers) and an eighth of the ids of the row's pool.
//
// What a block makes it sends into the shared memory of all 8, where a barrier for each kind (keys,
// S_j, u) counts the bytes of a step. Warp 0 has the gates, the last warp u; all share the k of
// W1s S_j, and then the ids.
#pragma once

#include "common/cluster.cuh"
#include "head/draft_draw.h"
#include "head/team_layout.cuh"

namespace domino {

// kRank: 0, or the rank in the plain case: 1024 units, greedy, one pool a row, W2's rows in shared
// memory, 32 ids of a warp at most, base logits of the weights' dtype without edits. Then the first
// 16 rows of W2 of a warp stay in registers.
template <class T, int kSteps, int kRank>
struct TeamRole {
  using Memory = TeamMemory;
  static constexpr int kMmas = kTeamParts * kSteps;  // of a warp, for 16 rows of W1s
  static constexpr int kPairs = kMmas / 2;           // of 32 units
  static constexpr bool kPlain = kRank != 0;
  static constexpr int kTiles = kPlain ? 2 : 1;  // of 16 ids, at once

  uint4 w_low[2][kMmas];  // rows 16 member .. of W1s, and 128 further on

  __device__ __forceinline__ void load(const TeamArgs& p, int member) {
    const int units = static_cast<int>(p.units), rank = static_cast<int>(p.rank);
    const int warp = threadIdx.x / kWarpSize, g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int row = (member + kTeam * m) * 16 + g, k0 = warp * kMmas * 16 + 4 * t;
      const int64_t stride = p.hidden_width + units;
      const T* const from = static_cast<const T*>(p.w1) + row * stride + p.hidden_width + k0;
#pragma unroll
      for (int i = 0; i < kMmas; ++i) {
        uint2 low{0, 0}, high{0, 0};
        if (row < rank && k0 + i * 16 < units) {
          low = *reinterpret_cast<const uint2*>(from + i * 16);
          high = *reinterpret_cast<const uint2*>(from + 8 * stride + i * 16);
        }
        w_low[m][i] = {low.x, high.x, low.y, high.y};
      }
    }
  }

  // Row `team` of the launch, from draft `start` on.
  __device__ __forceinline__ void run(const TeamArgs& p, const ChainExchange& exchange,
                                      char* memory, int team, int start, uint32_t epoch) const {
    __shared__ float shared_likely;
    const int member = blockIdx.x % kTeam, warp = threadIdx.x / kWarpSize;
    const int lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
    uint32_t* const aborted = &p.control->aborted;
    const int units = kPlain ? kSteps * 256 : static_cast<int>(p.units);
    const int rank = kPlain ? kRank : static_cast<int>(p.rank);
    const int drafts = static_cast<int>(p.drafts), prefix = static_cast<int>(p.prefix);
    const int64_t b = p.row0 + team;
    const bool draws = !kPlain && p.temperature != nullptr, slot_pools = !kPlain && p.pools > 1;
    const bool resident = kPlain || p.resident;
    const int scored_from = draws ? 0 : prefix;  // drafts before it are known
    const int first_scored = max(start, scored_from), first_corrected = max(start, prefix);
    const int part = 1 << p.part_log;
    const Memory layout{slot_pools ? 2 * part : part};
    const uint32_t own = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
    const uint32_t peer = shared_address_of(memory, lane % kTeam);  // 8 lanes reach all
    const auto await_phase = [&](int barrier, int phase) {
      await([&] { return phase_ended(own + barrier, phase & 1); }, aborted);
    };
    // above it an id may well win: unknown at first
    volatile float* const likely = &shared_likely;
    if (threadIdx.x == 0) *likely = INFINITY;

    // ---- the pool: this warp's tiles, of which it alone knows ----
    int* const ids = reinterpret_cast<int*>(memory + Memory::ids);
    const auto ids_of = [&](int j) { return ids + (slot_pools ? (j & 1) * part : 0); };
    const int tile0 = warp << p.tiles_log;
    const int tile_end = min(tile0 + (1 << p.tiles_log), part / 16);
    const auto load_ids = [&](int j) {  // of draft j
      const int32_t* const pool =
          p.pool + (b * p.pools + (slot_pools ? j : 0)) * p.pool_size + member * part;
#pragma unroll 1
      for (int i = tile0 * 16 + lane; i < tile_end * 16; i += kWarpSize)
        ids_of(j)[i] = member * part + i < p.pool_size ? pool[i] : -1;
      __syncwarp();
    };
    const uint32_t w2_rows = own + layout.w2();
    const auto load_rows = [&](int j) {  // of W2, in flight until cp.async.wait_all
      const T* const w2 = static_cast<const T*>(p.w2) + lane * 8;
#pragma unroll 4
      for (int i = tile0 * 16; i < tile_end * 16; ++i)
        if (lane * 8 < rank)
          asm volatile(
              "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(w2_rows + i * p.pitch + lane * 16),
              "l"(w2 + static_cast<int64_t>(max(ids_of(j)[i], 0)) * rank)
              : "memory");
    };
    load_ids(first_scored);
    if (resident) load_rows(first_scored);
    const uint32_t w2_lane = w2_rows + (tile0 * 16 + lane % 16) * p.pitch + lane / 16 * 16;
    uint4 held[kPlain ? kRank / 16 : 1] = {};

    // The ids that lane 4g + h (h < 2) scores as rows 8h + g of the next tiles, and what it needs
    // besides u: as loaded, so that nobody waits for it here.
    int id[kTiles];
    RawBase base[kTiles];
    float bonus[kTiles];
    const auto draw_of = [&](int j) -> DraftDraw {
      const float temperature = p.temperature[b];
      return {{p.seed[b], p.block_start[b]}, temperature > 0.0f ? 1.0f / temperature : 0.0f, j};
    };
    const auto prepare = [&](int j, int first) {
#pragma unroll
      for (int h = 0; h < kTiles; ++h) {
        id[h] = t < 2 && first + h < tile_end ? ids_of(j)[(first + h) * 16 + 8 * t + g] : -1;
        if (id[h] < 0) continue;
        base[h].template load<kPlain>(p, b, j, id[h]);
        if (draws) bonus[h] = draw_of(j).bonus(id[h]);
      }
    };
    // The row of the input table that y_{j+1} = this key's id needs, where it may well win: its
    // score is near that of the last winner.
    const auto fetch_ahead = [&](unsigned long long key) {
      if (!(key_value(key) >= *likely)) return;
      const char* const table = static_cast<const char*>(p.table) +
                                static_cast<int64_t>(key_id(key)) * (units * 6) + lane * 128;
#pragma unroll
      for (int line = 0; line < kSteps * 256 * 6 / 128; line += kWarpSize)
        if (line + lane < units * 6 / 128)
          asm volatile("prefetch.global.L2 [%0];" ::"l"(table + line * 128));
    };

    // ---- the units: warp 0 has this block's, a lane 4 of them ----
    const int block_units = round_up(ceil_div(units, kTeam), 32);
    const int unit = member * block_units + 4 * lane;
    const bool makes_state = warp == 0 && member * block_units < units;
    const bool has_units = 4 * lane < block_units && unit < units;
    float state[4] = {};
    const int half = lane / 4 % 2 * 8;  // where the lane's word of S_j stands
    const int words_at = StateWords{p.teams, round_up(units, 32)}.at(team, unit, lane % 4) + half;
    const int own_words_at = Memory::states + StateWords{1, 0}.at(0, unit, lane % 4) + half;
    uint32_t members[kTeam];
#pragma unroll
    for (int i = 0; i < kTeam; ++i) members[i] = shared_address_of(memory, i);
    const auto winner = [&](int j) -> unsigned long long {  // y_{j+1}, as a key
      if (j < start || j < scored_from) return p.keys[b * drafts + j];
      await_phase(Memory::keys_barrier, j - first_scored);
      const int pairs = kTeam / 2 * p.key_words;
      const ulonglong2 two =
          reinterpret_cast<const ulonglong2*>(memory + Memory::keys)[min(lane, pairs - 1)];
      return warp_best(max(two.x, two.y));
    };
    const auto report = [&](int j, unsigned long long key) {
      if (member != 0 || j < start || lane != 0) return;
      const int64_t at = b * drafts + j;
      p.tokens[at] = min(static_cast<int64_t>(key_id(key)), p.vocab - 1);
      p.scores[at] = key_value(key);
      if (j >= scored_from) p.keys[at] = key;
    };

    // ---- u: the last warp has this block's 32 elements ----
    float* const low_sums = reinterpret_cast<float*>(memory + Memory::low_sums);
    const int element = (member + lane / 16 * kTeam) * 16 + lane % 16;
    const bool makes_low_rank = warp == kTeamWarps - 1;
    const int k0 = warp * kMmas * 16;

    prepare(first_scored, tile0);
#pragma unroll 1
    for (int j = start; j < drafts; ++j) {
      const bool scored = j >= scored_from, corrects = j >= prefix;
      const int64_t low_at = (b * (drafts - prefix) + j - prefix) * rank + element;
      float z = 0.0f;
      if (makes_low_rank && corrects && element < rank) z = p.from_hidden[low_at];
      if (warp == kTeamWarps / 2 && scored) {  // what comes in this step
        if (j > first_scored) await_phase(Memory::keys_barrier, j - 1 - first_scored);
        if (lane == 0) {
          expect_bytes(own + Memory::keys_barrier, kTeam * p.key_words * 8);
          expect_bytes(own + Memory::states_barrier, units * 2);
          if (corrects) expect_bytes(own + Memory::low_rank_barrier, rank * 2);
        }
      }

      // y_j, then S_j
      if (makes_state) {
        InputWord of_state[4] = {};
        const InputWord* const gates = exchange.inputs(0, team, 0) + (has_units ? unit : 0);
        const auto look_at_gates = [&] {
#pragma unroll
          for (int i = 0; i < 4; ++i) of_state[i] = look(gates + i);
        };
        unsigned long long best = 0;
        uint32_t y;
        if (j > 0) {
          best = winner(j - 1);
          look_at_gates();
          y = static_cast<uint32_t>(min(static_cast<int64_t>(key_id(best)), p.vocab - 1));
        } else {
          y = static_cast<uint32_t>(clamp_id(p.anchor[b], p.vocab));
        }
        const T* const from = static_cast<const T*>(p.table) +
                              static_cast<uint64_t>(y) * (units * 3u) +
                              (has_units ? unit / 16 * 48 + unit % 16 : 0);
        uint2 x[3];
#pragma unroll
        for (int gate = 0; gate < 3; ++gate)
          x[gate] = *reinterpret_cast<const uint2*>(from + gate * 16);
        if (j > 0) {
          const auto here = [&] {
            return of_state[0].tag == epoch + j - 1 && of_state[1].tag == epoch + j - 1 &&
                   of_state[2].tag == epoch + j - 1 && of_state[3].tag == epoch + j - 1;
          };
          if (!__all_sync(kFullMask, here())) {
            await(
                [&] {
                  look_at_gates();
                  return here();
                },
                aborted);
          }
        }
        if (p.restart && j == start && has_units) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            state[i] =
                to_float(static_cast<const T*>(p.states)[(b * drafts + j - 1) * units + unit + i]);
        }
        uint64_t word = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const auto of_input = [&](int gate) {
            T value;
            value.bits = static_cast<uint16_t>((i < 2 ? x[gate].x : x[gate].y) >> i % 2 * 16);
            return to_float(value);
          };
          const T next = gru_unit<T>(of_input(0), of_input(1), of_input(2), of_state[i].r,
                                     of_state[i].z, of_state[i].n, state[i]);
          state[i] = to_float(next);
          word |= static_cast<uint64_t>(next.bits) << 16 * i;
        }
        if (has_units) {
          if (scored) {
#pragma unroll
            for (int i = 0; i < kTeam; ++i)
              send_shared(members[i] + own_words_at, word, members[i] + Memory::states_barrier);
          }
          send(reinterpret_cast<char*>(exchange.states<T>(0, j)) + words_at, word | state_tag(j));
          if (p.exact)
            *reinterpret_cast<uint64_t*>(static_cast<T*>(p.states) + (b * drafts + j) * units +
                                         unit) = word;
        }
        if (j > 0) {
          report(j - 1, best);
          if (lane == 0) *likely = 0.8f * key_value(best);
        }
      }
      if (!scored) continue;

      // S_j, and this warp's part of W1s S_j: the same in every column
      if (slot_pools && j + 1 < drafts) load_ids(j + 1);
      await_phase(Memory::states_barrier, j - first_scored);
      if (corrects) {
        uint4 s[kPairs];
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          s[i] =
              *reinterpret_cast<const uint4*>(memory + Memory::states + k0 * 2 + i * 64 + t * 16);
          if (!kPlain) {  // units that there are not have not been sent
            if (k0 + i * 32 >= units) s[i].x = s[i].y = 0;
            if (k0 + i * 32 + 16 >= units) s[i].z = s[i].w = 0;
          }
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          float sums[kTeamParts][kSteps][4];
#pragma unroll
          for (int at = 0; at < kMmas; ++at) {
            const uint4 w = w_low[m][at], x = s[at / 2];
            mma_first_16x8x16<T>(sums[at / kSteps][at % kSteps], w.x, w.y, w.z, w.w,
                                 at % 2 ? x.z : x.x, at % 2 ? x.w : x.y);
          }
          if (t == 0) {
            float* const to = low_sums + (m * 16 + g) * Memory::kSumPitch + warp;
            to[0] = sum_of_steps(sums[0], 0) + sum_of_steps(sums[1], 0);
            to[8 * Memory::kSumPitch] = sum_of_steps(sums[0], 2) + sum_of_steps(sums[1], 2);
          }
        }
      }
      __syncthreads();

      // u, its elements 2t, 2t + 1, 2t + 8 and 2t + 9 of 16 side by side, as a fragment
      if (corrects && makes_low_rank) {
        const float mixed = z + sum_of<kTeamWarps, 1>(low_sums + lane * Memory::kSumPitch);
        uint32_t bits = from_float<T>(chain_low_rank_input(p.kind, mixed)).bits;
        bits |= __shfl_down_sync(kFullMask, bits, 1) << 16;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const int q = lane / kTeam, to = (member + m * kTeam) * 16;
          const uint32_t low = __shfl_sync(kFullMask, bits, m * 16 + 2 * q);
          const uint32_t high = __shfl_sync(kFullMask, bits, m * 16 + 8 + 2 * q);
          if (to < rank)
            send_shared(peer + Memory::low_rank + (to + 4 * q) * 2,
                        static_cast<uint64_t>(high) << 32 | low, peer + Memory::low_rank_barrier);
        }
        if (p.exact && lane % 2 == 0 && element < rank)
          *reinterpret_cast<uint32_t*>(static_cast<T*>(p.low_rank) + low_at) = bits;
      }

      // scores of this warp's tiles
      if (resident && (slot_pools || j == first_scored)) {
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncwarp();
        if (kPlain && tile0 < tile_end) {
#pragma unroll
          for (int i = 0; i < kRank / 16; ++i)
            held[kPlain ? i : 0] = load_fragment(w2_lane + i * 32);
        }
      }
      if (tile0 >= tile_end) continue;
      if (corrects) await_phase(Memory::low_rank_barrier, j - first_corrected);
      unsigned long long key = 0;
#pragma unroll 1
      for (int first = tile0; first < tile_end; first += kTiles) {
        float sums[kTiles][4][4] = {};
        if (corrects) {
          const auto column = [&](int step) {
            return *reinterpret_cast<const uint2*>(memory + Memory::low_rank + step * 32 + t * 8);
          };
          const uint32_t tile = w2_lane + (first - tile0) * 16 * p.pitch;
          if (kPlain) {
            score_tiles<T, kRank, kTiles>(
                sums, rank / 16,
                [&](int h, int step) {
                  return h == 0 ? held[kPlain ? step : 0]
                                : load_fragment(tile + 16 * p.pitch + step * 32, j);
                },
                column);
          } else if (resident) {
            score_tiles<T, kRank, kTiles>(
                sums, rank / 16, [&](int, int step) { return load_fragment(tile + step * 32); },
                column);
          } else {
            const auto row_at = [&](int i) {
              return static_cast<const char*>(p.w2) + t * 4 +
                     max(ids_of(j)[first * 16 + i], 0) * (rank * 2LL);
            };
            const char *const low = row_at(g), *const high = row_at(g + 8);
            const auto two = [](const char* at) { return *reinterpret_cast<const uint32_t*>(at); };
            score_tiles<T, kRank, kTiles>(
                sums, rank / 16,
                [&](int, int step) -> uint4 {
                  const int at = step * 32;
                  return {two(low + at), two(high + at), two(low + at + 16), two(high + at + 16)};
                },
                column);
          }
        }
#pragma unroll
        for (int h = 0; h < kTiles; ++h) {
          // column 0 (lane 4g) for rows g, column 2 (lane 4g + 1) for rows g + 8
          const float score = base[h].template value<kPlain ? kTypeOf<T> : kAnyType>(p, id[h]) +
                              (t == 0 ? chain_sum(sums[h], 0) : chain_sum(sums[h], 2));
          unsigned long long one = id[h] >= 0 ? argmax_key(score, id[h]) : 0;
          const int m = member * part + (first + h) * 16 + 8 * t + g;
          if (draws && t < 2 && m < p.pool_size) {
            const DraftDraw draw = draw_of(j);
            if (one != 0 && draw.inverse_temperature > 0.0f)
              one = argmax_key(draw.order(score, bonus[h]), id[h]);
            const int64_t to = (b * drafts + j) * p.pool_size + m;
            p.pool_ids[to] = id[h];
            p.pool_logits[to] = id[h] < 0 ? -INFINITY : score;
          }
          key = max(key, one);
        }
        if (first + kTiles < tile_end) prepare(j, first + kTiles);
      }
      key = warp_best(key);
      if (lane < kTeam)
        send_shared(peer + Memory::keys + (member * p.key_words + warp) * 8, key,
                    peer + Memory::keys_barrier);
      fetch_ahead(key);
      if (j + 1 < drafts) prepare(j + 1, tile0);
      if (resident && slot_pools && j + 1 < drafts) load_rows(j + 1);
    }
    // in every member: the last keys are on their way to all, and must not meet a block that left
    if (makes_state) report(drafts - 1, winner(drafts - 1));
  }
};

}  // namespace domino
