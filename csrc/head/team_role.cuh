// The blocks of the team form that draft: 8 or 16 of them, a cluster, a batch row. Each of 8 has an
// eighth of the units, 32 rows of W1s (fragments in registers) and an eighth of the ids of the
// row's pool.
//
// What a block makes it sends into the shared memory of all, where a barrier for each kind (keys,
// S_j, u) counts the bytes of a step. Warp 0 has the gates, the last warp u; all share the k of
// W1s S_j, and then the ids.
#pragma once

#include "common/cluster.cuh"
#include "head/chain_words.cuh"
#include "head/draft_draw.h"
#include "head/team_layout.cuh"

namespace domino {

// kRank: 0, or the rank in the plain case: 1024 units, greedy, one pool a row, W2's rows in shared
// memory, 32 ids of a warp at most, base logits of the weights' dtype without edits. Then the first
// 16 rows of W2 of a warp stay in registers, and base logits and W1h H come to shared memory by
// cp.async: loads to registers were waited for at the end of the step that issued them, where their
// registers are used again. kTeam = kWideTeam: plain, and half as many ids.
template <class T, int kSteps, int kRank, int kTeam>
struct TeamRole {
  using Memory = TeamMemory;
  static constexpr int kMmas = kTeamParts * kSteps;  // of a warp, for 16 rows of W1s
  static constexpr int kPairs = kMmas / 2;           // of 32 units
  static constexpr bool kPlain = kRank != 0;
  static constexpr bool kWide = kTeam == kWideTeam;
  static_assert(kPlain || !kWide);
  static constexpr int kTiles = kPlain && !kWide ? 2 : 1;  // of 16 ids, at once
  static constexpr int kLowTiles = 256 / (16 * kTeam);     // of 16 rows of W1s
  using Stages = WeightStages<T, kMmas, kLowTiles>;

  const TeamArgs& p;
  char* const memory;
  const uint32_t own;  // memory, as this block addresses it
  const int units, rank, member, team, warp, lane;
  const int64_t b;  // batch row
  const int part;   // ids of a pool in a block
  const Memory layout;
  // The units: warp 0 has this block's, a lane 4 of them; in a wide team two lanes the same ones,
  // which they send to half of the blocks each.
  const int unit;
  const bool makes_state, has_units;
  float state[4] = {};
  uint4 w_low[kLowTiles][kMmas];  // rows 16 (member + kTeam i) .. of W1s

  __device__ __forceinline__ TeamRole(const TeamArgs& p, char* memory)
      : p(p),
        memory(memory),
        own(shared_address(memory)),
        units(kPlain ? kSteps * 256 : static_cast<int>(p.units)),
        rank(kPlain ? kRank : static_cast<int>(p.rank)),
        member(blockIdx.x % kTeam),
        team(blockIdx.x / kTeam),
        warp(threadIdx.x / kWarpSize),
        lane(threadIdx.x % kWarpSize),
        b(p.row0 + team),
        part(1 << p.part_log),
        layout{!kPlain && p.pools > 1 ? 2 * part : part},
        unit(member * block_units() + 4 * (kWide ? lane % 16 : lane)),
        makes_state(warp == 0 && member * block_units() < units),
        has_units(kWide || (4 * lane < block_units() && unit < units)) {}

  // What needs nothing of the launch in front: barriers, W1s and, where the draft begins at the
  // anchor and its first id is known beforehand, S_0.
  __device__ __forceinline__ void load(const ChainExchange& exchange, bool first_state) {
    if (threadIdx.x < Memory::kBarriers) make_barrier(own + threadIdx.x * 8);
    const int k0 = warp * kMmas * 16;
    const auto rows = [&](int i) {
      const int row = (member + kTeam * i) * 16;
      const int64_t stride = p.hidden_width + units;
      const T* const from = static_cast<const T*>(p.w1) + row * stride + p.hidden_width + k0;
      return WeightRows<T>{row < rank ? from : nullptr, stride};
    };
    const Stages stages{own + layout.w2(), min(p.stages, Stages::kSixteens)};
    stages.fetch(0, units - k0, rows);
    if (first_state && makes_state) {
      uint2 x[3];
      load_inputs(x, anchor());
      publish(exchange, 0, next_state(x, {}), false);
    }
    stages.take(w_low, units - k0, rows);
  }

  // From draft `start` on, of which the states up to S_{from-1} are made.
  __device__ __forceinline__ void run(const ChainExchange& exchange, int start, int from,
                                      uint32_t epoch) {
    __shared__ float shared_likely;
    const int g = lane / 4, t = lane % 4;
    uint32_t* const aborted = &p.control->aborted;
    const int drafts = static_cast<int>(p.drafts), prefix = static_cast<int>(p.prefix);
    const bool draws = !kPlain && p.temperature != nullptr, slot_pools = !kPlain && p.pools > 1;
    const bool resident = kPlain || p.resident;
    const int scored_from = draws ? 0 : prefix;  // drafts before it are known
    const int first_scored = max(start, scored_from), first_corrected = max(start, prefix);
    const uint32_t peer = shared_address_of(memory, lane % kTeam);  // kTeam lanes reach all
    const auto await_phase = [&](int barrier, int phase) {
      return await([&] { return phase_ended(own + barrier, phase & 1); }, aborted);
    };
    // above it an id may well win: unknown at first
    volatile float* const likely = &shared_likely;
    if (threadIdx.x == 0) *likely = INFINITY;

    // ---- the last id that is known beforehand, and its inputs ----
    const int known_at = first_scored - 1;  // of the draft
    unsigned long long known = 0;
    if (makes_state && known_at >= 0) known = p.keys[b * drafts + known_at];
    const uint32_t known_inputs = own + Memory::inputs + lane * 24;

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
    // Base logits of draft j: of this lane's id the 4 bytes around its own.
    const int base_words = layout.w2() + part * p.pitch;  // u32 [2, part]: of even and odd drafts
    const T* lane_base = nullptr;                         // of draft 0
    const auto load_base = [&](int j) {
      if (lane_base != nullptr && j < drafts) {
        const T* const from = lane_base + j * p.base_slot_stride;
        copy_async4(own + base_words + ((j & 1) * part + tile0 * 16 + lane) * 4,
                    reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(from) & ~3ull));
      }
      copy_async_commit();
    };
    // ---- u: the last warp has this block's 32 elements ----
    float* const low_sums = reinterpret_cast<float*>(memory + Memory::low_sums);
    const int element = (member + lane / 16 * kTeam) * 16 + lane % 16;
    const bool makes_low_rank = warp == kTeamWarps - 1;
    const int k0 = warp * kMmas * 16;
    const auto low_at = [&](int j) {
      return (b * (drafts - prefix) + j - prefix) * rank + element;
    };
    float* const from_hidden =  // [drafts, 32], of this block's elements
        reinterpret_cast<float*>(memory + base_words + 2 * part * 4) + lane;

    // In flight, the sooner it is needed the earlier.
    load_ids(first_scored);
    if (makes_state && known_at >= 0 && has_units) {
      const T* const row =
          inputs_of(static_cast<uint32_t>(min(static_cast<int64_t>(key_id(known)), p.vocab - 1)));
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) copy_async8(known_inputs + gate * 8, row + gate * 16);
    }
    if (kPlain && makes_low_rank && element < rank) {
#pragma unroll 4
      for (int j = first_corrected; j < drafts; ++j)
        copy_async4(shared_address(from_hidden + j * kWarpSize), p.from_hidden + low_at(j));
    }
    copy_async_commit();
    if (resident) load_rows(first_scored);
    if constexpr (kPlain) {
      if (tile0 * 16 + lane < tile_end * 16)
        lane_base = static_cast<const T*>(p.base_logits) + b * p.base_batch_stride +
                    p.first_slot * p.base_slot_stride + max(ids[tile0 * 16 + lane], 0);
      load_base(first_scored);  // with the rows
      load_base(first_scored + 1);
    }
    const uint32_t w2_lane = w2_rows + (tile0 * 16 + lane % 16) * p.pitch + lane / 16 * 16;
    uint4 held[kPlain ? kRank / 16 : 1] = {};

    // The ids that lane 4g + h (h < 2) scores as rows 8h + g of the next tiles, and what it needs
    // besides u: as loaded, so that nobody waits for it here.
    int id[kTiles];
    RawBase base[kTiles];
    float bonus[kTiles];
    uint32_t odd[kTiles];  // whether the logit of draft 0 is the upper half of its 4 bytes
    const uint32_t odd_slots = p.base_slot_stride & 1;
    const auto draw_of = [&](int j) -> DraftDraw {
      const float temperature = p.temperature[b];
      return {{p.seed[b], p.block_start[b]}, temperature > 0.0f ? 1.0f / temperature : 0.0f, j};
    };
    const auto prepare = [&](int j, int first) {
#pragma unroll
      for (int h = 0; h < kTiles; ++h) {
        id[h] = t < 2 && first + h < tile_end ? ids_of(j)[(first + h) * 16 + 8 * t + g] : -1;
        if (kPlain || id[h] < 0) continue;
        base[h].template load<kPlain>(p, b, j, id[h]);
        if (draws) bonus[h] = draw_of(j).bonus(id[h]);
      }
    };
    prepare(first_scored, tile0);
    if (kPlain) {
      const int64_t row = b * p.base_batch_stride + p.first_slot * p.base_slot_stride;
      const T* const first = static_cast<const T*>(p.base_logits) + row;
#pragma unroll
      for (int h = 0; h < kTiles; ++h)
        odd[h] = reinterpret_cast<uintptr_t>(first + max(id[h], 0)) / sizeof(T) & 1;
    }
    // The row of the input table that y_{j+1} = this key's id needs, where it may well win: its
    // score is near that of the last winner.
    const auto fetch_ahead = [&](unsigned long long key) {
      if (!(key_value(key) >= *likely)) return;
      const char* const table = static_cast<const char*>(p.table) +
                                static_cast<int64_t>(key_id(key)) * (units * 6) + lane * 128;
#pragma unroll
      for (int line = 0; line < kSteps * 256 * 6 / 128; line += kWarpSize)
        if (line + lane < units * 6 / 128) prefetch_l2(table + line * 128);
    };

    const auto winner = [&](int j) -> unsigned long long {  // y_{j+1}, as a key
      if (j == known_at) return known;
      if (j < known_at) return p.keys[b * drafts + j];
      await_phase(Memory::keys_barrier, j - first_scored);
      const int pairs = kTeam / 2 * p.key_words;
      const auto* const two = reinterpret_cast<const ulonglong2*>(memory + Memory::keys);
      const ulonglong2 some = two[min(lane, pairs - 1)];
      unsigned long long best = max(some.x, some.y);
      if (kWide) {
        const ulonglong2 more = two[min(lane + kWarpSize, pairs - 1)];
        best = max(best, max(more.x, more.y));
      }
      return warp_best(best);
    };
    const bool tells = p.exact && p.teams == 1;  // the certificate
    const auto report = [&](int j, unsigned long long key) {
      if (member != 0 || j < start || lane != 0) return;
      const int64_t at = b * drafts + j;
      p.tokens[at] = min(static_cast<int64_t>(key_id(key)), p.vocab - 1);
      p.scores[at] = key_value(key);
      if (j < scored_from) return;
      p.keys[at] = key;
      if (tells) ChainWords(exchange).send_key(j, key, epoch);
    };

    bool arms = true;
#pragma unroll 1
    for (int j = from; j < drafts; ++j) {
      const bool scored = j >= scored_from, corrects = j >= prefix;
      float z = 0.0f;
      if (!kPlain && makes_low_rank && corrects && element < rank) z = p.from_hidden[low_at(j)];
      if (warp == kTeamWarps / 2 && scored) {  // what comes in this step
        // A barrier whose phase has not ended may not be arrived at again. Of a launch that gave up
        // one phase may end by the bytes of later steps, and another never.
        if (j > first_scored)
          arms = arms && await_phase(Memory::keys_barrier, j - 1 - first_scored) &&
                 await_phase(Memory::states_barrier, j - 1 - first_scored) &&
                 (j <= first_corrected ||
                  await_phase(Memory::low_rank_barrier, j - 1 - first_corrected));
        if (arms && lane == 0) {
          expect_bytes(own + Memory::keys_barrier, kTeam * p.key_words * 8);
          expect_bytes(own + Memory::states_barrier, units * 2);
          if (corrects) expect_bytes(own + Memory::low_rank_barrier, rank * 2);
        }
      }

      // y_j, then S_j
      if (makes_state) {
        unsigned long long best = 0;
        uint2 x[3];
        if (j == 0) {
          load_inputs(x, anchor());
        } else {
          best = winner(j - 1);
          if (j - 1 == known_at) {
            copy_async_wait<kPlain ? 2 : 0>();
#pragma unroll
            for (int gate = 0; gate < 3; ++gate) x[gate] = load_shared(known_inputs + gate * 8);
          } else {
            load_inputs(
                x, static_cast<uint32_t>(min(static_cast<int64_t>(key_id(best)), p.vocab - 1)));
          }
        }
        InputWord of_state[4] = {};
        if (j > 0) {
          // asked for behind the row: what that waits for must not wait for these
          const InputWord* const gates = exchange.inputs(0, team, 0) + (has_units ? unit : 0);
          await(
              [&] {
#pragma unroll
                for (int i = 0; i < 4; ++i) of_state[i] = look(gates + i);
                const uint32_t tag = epoch + j - 1;
                return of_state[0].tag == tag && of_state[1].tag == tag && of_state[2].tag == tag &&
                       of_state[3].tag == tag;
              },
              aborted);
        }
        if (p.restart && j == start && has_units) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            state[i] =
                to_float(static_cast<const T*>(p.states)[(b * drafts + j - 1) * units + unit + i]);
        }
        publish(exchange, j, next_state(x, of_state), scored);
        // Its second state needs the weights of all; behind a restart so does the first. The next
        // launch does not start before that: beside the first step it took 1 us of batch 1.
        if (j == first_scored + !p.restart) {
          allow_next_launch();
          if (blockIdx.x == 0 && lane == 0)
            *const_cast<volatile uint32_t*>(&p.control->begun[p.restart]) =
                begun_word(epoch, start);
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
        for (int m = 0; m < kLowTiles; ++m) {
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
        if (kPlain) {
          copy_async_wait<2>();
          z = from_hidden[j * kWarpSize];
        }
        const float mixed = z + sum_of<kTeamWarps, 1>(low_sums + lane * Memory::kSumPitch);
        uint32_t bits = from_float<T>(chain_low_rank_input(p.kind, mixed)).bits;
        bits |= __shfl_down_sync(kFullMask, bits, 1) << 16;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          // the four quarters of two tiles, or the two halves of one
          const int m = kWide ? 0 : i, q = lane / kTeam + (kWide ? 2 * i : 0);
          const int to = (member + m * kTeam) * 16;
          const uint32_t low = __shfl_sync(kFullMask, bits, m * 16 + 2 * q);
          const uint32_t high = __shfl_sync(kFullMask, bits, m * 16 + 8 + 2 * q);
          if (to < rank)
            send_shared(peer + Memory::low_rank + (to + 4 * q) * 2,
                        static_cast<uint64_t>(high) << 32 | low, peer + Memory::low_rank_barrier);
        }
        if (p.exact && lane % 2 == 0 && element < rank) {
          *reinterpret_cast<uint32_t*>(static_cast<T*>(p.low_rank) + low_at(j)) = bits;
          if (tells)
            ChainWords(exchange).send_low_rank(j - prefix, rank, element / 2, bits, epoch + j);
        }
      }

      // Here, where most warps wait and none of them for a load: those of the row of the table
      // would wait for these.
      if (kPlain && j > first_scored) load_base(j + 1);

      // scores of this warp's tiles
      if (kPlain) {
        copy_async_wait<1>();  // all but the next draft's base logits
        __syncwarp();
      }
      if (resident && (slot_pools || j == first_scored)) {
        if (!kPlain) {
          asm volatile("cp.async.wait_all;" ::: "memory");
          __syncwarp();
        }
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
          float of_base;
          if constexpr (kPlain) {
            const int at = (j & 1) * part + (first + h) * 16 + t % 2 * 8 + g;
            const uint32_t two = *reinterpret_cast<const uint32_t*>(memory + base_words + at * 4);
            const bool upper = (odd[h] ^ (j & odd_slots)) != 0;
            of_base = to_float(T{static_cast<uint16_t>(upper ? two >> 16 : two)});
          } else {
            of_base = base[h].template value<kAnyType>(p, id[h]);
          }
          // column 0 (lane 4g) for rows g, column 2 (lane 4g + 1) for rows g + 8
          const float score = of_base + (t == 0 ? chain_sum(sums[h], 0) : chain_sum(sums[h], 2));
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
        if (kPlain) break;
        if (first + kTiles < tile_end) prepare(j, first + kTiles);
      }
      key = warp_best(key);
      if (lane < kTeam)
        send_shared(peer + Memory::keys + (member * p.key_words + warp) * 8, key,
                    peer + Memory::keys_barrier);
      fetch_ahead(key);
      if (!kPlain && j + 1 < drafts) prepare(j + 1, tile0);
      if (resident && slot_pools && j + 1 < drafts) load_rows(j + 1);
    }
    // in every member: the last keys are on their way to all, and must not meet a block that left
    if (warp == 0) report(drafts - 1, winner(drafts - 1));
  }

 private:
  __device__ __forceinline__ int block_units() const {
    return round_up(ceil_div(units, kTeam), 32);
  }
  __device__ __forceinline__ uint32_t anchor() const {
    return static_cast<uint32_t>(clamp_id(p.anchor[b], p.vocab));
  }

  // Of the input table, the row of y: this lane's units, 16 from gate to gate.
  __device__ __forceinline__ const T* inputs_of(uint32_t y) const {
    return static_cast<const T*>(p.table) + static_cast<uint64_t>(y) * (units * 3u) +
           (has_units ? unit / 16 * 48 + unit % 16 : 0);
  }
  __device__ __forceinline__ void load_inputs(uint2 (&x)[3], uint32_t y) const {
    const T* const from = inputs_of(y);
#pragma unroll
    for (int gate = 0; gate < 3; ++gate)
      x[gate] = *reinterpret_cast<const uint2*>(from + gate * 16);
  }

  // Moves this lane's units on: W_ih E[y] and W_hh S of the step before. The new ones, as a word.
  __device__ __forceinline__ uint64_t next_state(const uint2 (&x)[3],
                                                 const InputWord (&of_state)[4]) {
    uint64_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto of_input = [&](int gate) {
        return to_float(T{static_cast<uint16_t>((i < 2 ? x[gate].x : x[gate].y) >> i % 2 * 16)});
      };
      const T next = gru_unit<T>(of_input(0), of_input(1), of_input(2), of_state[i].r,
                                 of_state[i].z, of_state[i].n, state[i]);
      state[i] = to_float(next);
      word |= static_cast<uint64_t>(next.bits) << 16 * i;
    }
    return word;
  }

  // S_j of this lane's units to the team, to the blocks with W_hh, to the certificate.
  __device__ __forceinline__ void publish(const ChainExchange& exchange, int j, uint64_t word,
                                          bool scored) const {
    if (!has_units) return;
    const int half = lane / 4 % 2 * 8;  // where the lane's word stands
    if (scored) {
      const int at = Memory::states + StateWords{1, 0}.at(0, unit, lane % 4) + half;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t other = shared_address_of(memory, kWide ? lane / 16 * 8 + i : i);
        send_shared(other + at, word, other + Memory::states_barrier);
      }
    }
    if (kWide && lane >= 16) return;
    const int at = StateWords{p.teams, round_up(units, 32)}.at(team, unit, lane % 4) + half;
    send(reinterpret_cast<char*>(exchange.states<T>(0, j)) + at, word | state_tag(j));
    if (p.exact)
      *reinterpret_cast<uint64_t*>(static_cast<T*>(p.states) + (b * p.drafts + j) * units + unit) =
          word;
  }
};

}  // namespace domino
