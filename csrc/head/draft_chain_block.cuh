// draft_chain, block form: the chain of a whole block on pools of ids, in one persistent launch;
// formula, rounding points and score bits stand in draft_chain.h.
//
// A group of kGroup blocks, all resident (the launch is cooperative), owns up to 32 batch rows.
// Block c of a group holds for the whole launch, in registers as MMA fragments, the rows of W_hh of
// units 16c .. 16c + 15 and rows 4c .. 4c + 3 of W1s, its warps a part of the k each (with 16 warps
// W1s comes anew in each step); and in shared memory the rows of W2 of its part of every pool. In a
// step the blocks tell each other three times what they have, each of them all the others
// (chain_exchange.cuh):
//
//   keys of y_j   -> its argmax; the block's 48 values of row y_j of the input table, or without
//                    one what is made of E[y_j] by servers (chain_input.cuh) or by all blocks
//                    (chain_product.cuh), and W_hh S_{j-1} from the step before: 16 units of S_j
//   S_j           -> its 4 rows of u = SiLU(W1h H + W1s S_j); then, while u is on its way, W_hh S_j
//   u             -> scores of its part of the pool, its best key
//
// The MMA shape and the order of every sum do not depend on the number of rows, and a row is a
// column of the MMAs: its bits are those it has alone. Bound by the latency of the exchanges.
#pragma once

#include "head/chain_exchange.cuh"
#include "head/chain_input.cuh"
#include "head/chain_layout.cuh"
#include "head/chain_math.cuh"
#include "head/chain_product.cuh"
#include "head/draft_draw.h"

namespace domino {

// By all threads of every block of a launch: the rows of round 1 become rows of round 2, once all
// blocks have seen them. pending: row p.row0 + threadIdx.x is one. cut: so do all others.
__device__ __forceinline__ void leave_to_finish(const ChainBlockArgs& p, bool pending, bool cut,
                                                int* last) {
  if (threadIdx.x == 0) *last = atomicAdd(&p.control->left, 1u) == gridDim.x - 1;
  __syncthreads();
  if (!*last) return;
  if (threadIdx.x == 0) p.control->left = 0;
  if (!pending) return;
  const int64_t b = p.row0 + threadIdx.x;
  p.first_of(2)[b] = p.first_of(cut ? 0 : 1)[b];
  p.first_of(1)[b] = p.row_done();
}

// kSteps: MMAs that a part of the units takes; kTiles: eights of batch rows in a group; kRank: 0,
// or the rank in the plain case: 1024 units, greedy, one pool a row, W2's rows in shared memory,
// base logits of the weights' dtype without edits; kInputs: kServed with one group, whose servers
// are the blocks behind chain_blocks, kJoint with two, kTiles = 4 and w_ih in tiles of 32 rows.
template <class T, int kSteps, int kTiles, int kRank, ChainInputs kInputs>
__global__ void __launch_bounds__(BlockMemory<kTiles>::kThreads, 1)
    chain_block(const __grid_constant__ ChainBlockArgs p,
                const __grid_constant__ CUtensorMap w_ih) {
  using Memory = BlockMemory<kTiles>;
  constexpr bool kTable = kInputs == ChainInputs::kTable, kServed = kInputs == ChainInputs::kServed;
  constexpr bool kJoint = kInputs == ChainInputs::kJoint;
  // W_ih may be on its way while sums of gates are added up.
  static_assert(!kJoint || Memory::low_sums + JointProduct<T>::kBytes >= Memory::low_rank);
  constexpr int kThreads = Memory::kThreads;
  constexpr int kParts = kStateParts / Memory::kWarps;  // of a warp
  constexpr int kMost = kTiles * kColumns;              // rows of a group
  extern __shared__ __align__(1024) char memory[];
  float* const low_sums = reinterpret_cast<float*>(memory + Memory::low_sums);
  float* const gate_sums = reinterpret_cast<float*>(memory + Memory::gate_sums);
  float* const gate_totals = reinterpret_cast<float*>(memory + Memory::gate_totals);
  int* const start = reinterpret_cast<int*>(memory + Memory::start);
  volatile float* const last = reinterpret_cast<float*>(memory + Memory::last);
  int* const ids = reinterpret_cast<int*>(memory + p.ids_at);

  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int g = lane / 4, t = lane % 4;
  const int group = blockIdx.x / kGroup, block = blockIdx.x % kGroup;
  constexpr bool kPlain = kRank != 0;
  const int units = kPlain ? kSteps * 256 : static_cast<int>(p.units);
  const int rank = kPlain ? kRank : static_cast<int>(p.rank);
  const uint32_t last_id = static_cast<uint32_t>(p.vocab - 1);
  const int drafts = static_cast<int>(p.drafts), prefix = static_cast<int>(p.prefix);
  const int unit0 = block * kBlockUnits, low0 = block * kBlockRank;
  const bool has_units = unit0 < units, has_rank = low0 < rank;
  const int64_t first_row = p.row0 + static_cast<int64_t>(group) * p.group_rows;
  const int rows = static_cast<int>(min(static_cast<int64_t>(p.group_rows), p.batch - first_row));
  const int part = 1 << p.part_log;
  const int all_ids = (p.group_rows * part + 15) / 16 * 16;
  const int tiles = (rows * part + 15) / 16, tile0 = warp << p.tiles_log;
  const int tile_end = min(tile0 + (1 << p.tiles_log), tiles);
  char* const w2_rows = memory + Memory::w2_rows;

  if (p.restart) {
    previous_launch_done();
    const int all_rows = static_cast<int>(
        min(static_cast<int64_t>(p.chain_blocks / kGroup * p.group_rows), p.batch - p.row0));
    const int64_t b = p.row0 + threadIdx.x;
    const bool cut = p.control->cut != 0;
    const bool pending = threadIdx.x < all_rows && p.first_of(cut ? 0 : 1)[b] < p.row_done();
    const int count = __syncthreads_count(pending);
    if (count == 0) return;  // nothing to do in any group: leave all as it is
    if (cut || restart_is_vain(count, all_rows))
      return leave_to_finish(p, pending, cut, reinterpret_cast<int*>(memory));
  }
  if constexpr (kServed) {
    if (blockIdx.x >= p.chain_blocks) {
      InputServer<T, kTiles>::run(p, memory);
      return leave_chain(p.control);
    }
  }

  // W_hh and W1s, before the launch in front has ended
  uint4 w_gate[3][kParts * kSteps];
  uint2 w_low[kParts * kSteps];
  const auto load_low = [&](int i) -> uint2 {
    const int k = (warp * kParts * kSteps + i) * 16 + 4 * t;
    uint2 w{0, 0};
    if (has_rank && g < kBlockRank && k < units)
      asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];"
                   : "=r"(w.x), "=r"(w.y)
                   : "l"(static_cast<const T*>(p.w1) + p.hidden_width +
                         static_cast<int64_t>(low0 + g) * (p.hidden_width + units) + k));
    return w;
  };
#pragma unroll
  for (int i = 0; i < kParts * kSteps; ++i) {
    const int k = (warp * kParts * kSteps + i) * 16 + 4 * t;
    const auto load = [&](const T* row) {
      return k < units ? *reinterpret_cast<const uint2*>(row + k) : uint2{0, 0};
    };
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
      const T* row = static_cast<const T*>(p.w_hh) +
                     (static_cast<int64_t>(gate) * units + (has_units ? unit0 + g : 0)) * units;
      const uint2 low = load(row), high = load(row + (has_units ? 8 : 0) * units);
      w_gate[gate][i] = {low.x, high.x, low.y, high.y};
    }
    if (kTiles == 1) w_low[i] = load_low(i);
  }
  for (int i = threadIdx.x; i < kMost * 48; i += kThreads) gate_totals[i] = 0.0f;

  previous_launch_done();
  const uint32_t epoch = p.control->epoch + 1;
  uint32_t* const aborted = &p.control->aborted;
  const ChainExchange exchange(p.exchange, units, rank, epoch);
  uint4* const low_words = exchange.low_rank(group);
  exchange.clear_other(blockIdx.x * kThreads + threadIdx.x, gridDim.x * kThreads);
  JointProduct<T> product(p, w_ih, exchange, memory + Memory::low_sums, memory + Memory::joint);
  if (threadIdx.x < 32) {
    int first = drafts;
    if (threadIdx.x < rows) first = begin_row(p, p.restart, first_row + threadIdx.x, block == 0);
    start[threadIdx.x] = first;
  }
  const bool draws = !kPlain && p.temperature != nullptr, slot_pools = !kPlain && p.pools > 1;
  const bool resident = kPlain || p.resident;
  const auto load_ids = [&](int j) {  // of draft j
#pragma unroll 1
    for (int i = threadIdx.x; i < all_ids; i += kThreads) {
      const int64_t pool = (first_row + (i >> p.part_log)) * p.pools + (slot_pools ? j : 0);
      const int m = block * part + (i & (part - 1));
      // a row that drafts nothing here may have no pool: one from num_active on has none
      const bool drafted = i < rows * part && start[i >> p.part_log] < drafts;
      ids[(j & 1) * all_ids + i] = drafted && m < p.pool_size ? p.pool[pool * p.pool_size + m] : -1;
    }
  };
  // A row of W2 by a warp, in flight until cp.async.wait_all.
  const auto load_row = [&](int j, int row) {
    const T* from = static_cast<const T*>(p.w2) +
                    static_cast<int64_t>(max(ids[(j & 1) * all_ids + row], 0)) * rank;
    if (lane * 8 < rank) {
      const uint32_t to =
          static_cast<uint32_t>(__cvta_generic_to_shared(w2_rows + row * p.pitch + lane * 16));
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from + lane * 8)
                   : "memory");
    }
  };
  const auto load_rows = [&](int j, int first) {
#pragma unroll 1
    for (int row = first + warp; row < tiles * 16; row += Memory::kWarps) load_row(j, row);
  };
  // by the whole block alike, however late it comes
  const bool leave = __syncthreads_or(*reinterpret_cast<volatile uint32_t*>(aborted) != 0 ||
                                      p.control->mute == blockIdx.x + 1);
  const int begin = kJoint ? product.begin() : __reduce_min_sync(kFullMask, start[lane]);
  const bool run = !leave && begin < drafts;
  const int scored_from = draws ? 0 : prefix;  // drafts before it are known
  if (run) {
    load_ids(max(begin, scored_from));
    // the other place: of the next draft; after a restart of the one that prepare() begins with
    load_ids(slot_pools ? max(begin - 1, scored_from) : max(begin, scored_from) + 1);
    __syncthreads();
    if (kJoint && begin == 0) product.fetch();
    if (resident && !(kJoint && slot_pools)) {
      load_rows(max(begin, scored_from), kJoint ? p.lent_rows : 0);
      asm volatile("cp.async.wait_all;" ::: "memory");
      __syncthreads();
    }
  }

  // This warp's batch rows: their ids, gates and state. One for the whole warp, or for kTiles = 4
  // one for each half of it.
  constexpr int kLanes = kTiles == 4 ? 16 : 32;    // of a row
  const int row_warp = Memory::kWarps - 1 - warp;  // the first warps have tiles to score
  const int my_row = row_warp + lane / kLanes * Memory::kWarps, sub = lane % kLanes;
  const bool mine = my_row < rows;
  const int64_t my_at = (first_row + my_row) * drafts;
  // Beside a product the first draft is read anew in each step, and the state is in shared memory:
  // what spills is on the way from one exchange to the next, and comes back late.
  const int held_start = start[mine ? my_row : 31];
  const auto my_start = [&] { return kJoint ? start[mine ? my_row : 31] : held_start; };
  float held_state = 0.0f;
  float& state = kJoint ? product.state() : held_state;
  state = 0.0f;

  // The id of draft j of this lane's row, and the upper half of its key.
  struct Winner {
    uint32_t id, order;
  };
  const auto winner = [&](int j) -> Winner {
    const int first = my_start();
    if (!__any_sync(kFullMask, mine && j >= first && j >= scored_from)) {
      const uint64_t key = mine ? p.keys[my_at + j] : 0;
      return {key_id(key), static_cast<uint32_t>(key >> 32)};
    }
    const bool exchanged = mine && j >= first;
    unsigned long long word = 0;
    const int pairs = kGroup / 2 * p.words;
    const uint64_t* const from = exchange.keys(group) + my_row * pairs * 2;
#pragma unroll 1
    for (int i = sub; i - sub < pairs; i += 2 * kLanes) {
      ulonglong2 first{}, second{};
      const auto poll = [&] {
        if (!exchanged) return true;
        first = look_twice(from + 2 * min(i, pairs - 1));
        second = look_twice(from + 2 * min(i + kLanes, pairs - 1));
        return is_key_of(first.x, j) && is_key_of(first.y, j) && is_key_of(second.x, j) &&
               is_key_of(second.y, j);
      };
      await(poll, aborted);
      word = max(max(word, max(first.x, first.y)), max(second.x, second.y));
    }
    if constexpr (kLanes == 32) {
      word = warp_best(word);
    } else {
      const unsigned long long first = warp_best(lane < 16 ? word : 0);
      const unsigned long long second = warp_best(lane < 16 ? 0 : word);
      word = lane < 16 ? first : second;
    }
    if (mine && !exchanged) {  // a row that starts later
      const uint64_t key = p.keys[my_at + j];
      return {key_id(key), static_cast<uint32_t>(key >> 32)};
    }
    return {key_word_id(static_cast<uint32_t>(word)), static_cast<uint32_t>(word >> 32)};
  };
  const auto report = [&](int j, Winner best) {
    if (block != 0 || !mine || sub != 0 || j < my_start()) return;
    const uint64_t key = static_cast<uint64_t>(best.order) << 32 | (0xffffffffu - best.id);
    p.tokens[my_at + j] = min(best.id, last_id);
    p.scores[my_at + j] = key_value(key);
    if (j >= scored_from) p.keys[my_at + j] = key;
  };

  // The id that lane 4g + h (h < 2) scores as row 8h + g of a tile, and what it needs besides u:
  // as loaded, so that nobody waits for it here.
  int id = -1;
  RawBase base{};
  float bonus = 0.0f;
  const auto draw_of = [&](int64_t b, int j) -> DraftDraw {
    const float temperature = p.temperature[b];
    return {{p.seed[b], p.block_start[b]}, temperature > 0.0f ? 1.0f / temperature : 0.0f, j};
  };
  const auto prepare = [&](int j, int tile) {
    const int at = tile * 16 + 8 * t + g;
    id = t < 2 && tile < tiles ? ids[(j & 1) * all_ids + at] : -1;
    if (id < 0) return;
    const int64_t b = first_row + (at >> p.part_log);
    base.load<kPlain>(p, b, j, id);
    if (draws) bonus = draw_of(b, j).bonus(id);
  };
  // The row of the input table, or of E, that y_{j+1} = this key's id needs, where it may well win:
  // its score is near that of the last winner.
  const auto fetch_ahead = [&](unsigned long long key, int row) {
    if (!(key_value(key) >= 0.8f * last[row])) return;
    const int bytes = kTable ? units * 6 : static_cast<int>(p.inputs) * 2;
    const char* from = static_cast<const char*>(kTable ? p.table : p.embedding) +
                       static_cast<int64_t>(key_id(key)) * bytes;
    for (int at = lane * 128; at < bytes; at += kWarpSize * 128) prefetch_l2(from + at);
  };

  // Threads that make u, element r of a row by thread 4 row + r behind these: not the gates' warps
  // of a small batch, nor those of its tiles.
  constexpr int kLowFrom = kTiles == 1 ? kThreads / 2 : 0;
  const auto low_thread = [&] {
    return (kJoint ? thread_anew() : static_cast<int>(threadIdx.x)) - kLowFrom;
  };
  const auto makes_low = [&](int thread) {
    return has_rank && thread >= 0 && thread < kMost * kBlockRank;
  };
  const auto low_turn = [&](int thread, int j) {
    const int row = thread / kBlockRank;
    return makes_low(thread) && row < rows && j >= prefix && j >= start[row];
  };
  const auto low_at = [&](int thread, int j) {
    return ((first_row + thread / kBlockRank) * (drafts - prefix) + j - prefix) * rank + low0 +
           thread % kBlockRank;
  };
  // A warp takes its part of the k of S for all rows, several of them a load, and turns them around
  // in shared memory; where a word is not there yet it asks for that again.
  constexpr int kWords = kTiles > 1 ? 2 : 1,
                kRowWords = kParts * kSteps * 4;  // of a load; of a row
  constexpr int kRowsAtOnce = kWarpSize * kWords / kRowWords, kLoads = kMost / kRowsAtOnce;
  constexpr int kTurnTiles = kTiles > 1 ? 2 : 1, kPitch = kRowWords * 8 + 32;
  static_assert(Memory::kWarps * kTurnTiles * kColumns * kPitch <=
                Memory::low_rank - Memory::gate_sums);
  char* const turn_around = memory + Memory::gate_sums + warp * (kTurnTiles * kColumns * kPitch);
  const int lane_row = lane * kWords / kRowWords, lane_word = lane * kWords % kRowWords;
  const int lane_k = (warp * kRowWords + lane_word) * 4;
  const auto await_all = [&] {  // the loads of this lane that it waits for, without a restart
    const uint32_t drafting = __ballot_sync(kFullMask, lane < rows && start[lane] == 0);
    uint32_t loads = 0;
    if (lane_k < units) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) loads |= (drafting >> (i * kRowsAtOnce + lane_row) & 1) << i;
    }
    return loads;
  };
  const uint32_t held_awaited = kJoint ? 0 : await_all();
  const int from_step = max(begin - 1, 0);
  if (!kJoint && run) prepare(max(from_step, scored_from), tile0);

#pragma unroll 1
  for (int j = from_step; run && j < drafts; ++j) {
    const bool scored = j >= scored_from && (!kJoint || j >= begin), corrects = j >= prefix;
    // what u needs besides S
    float z = 0.0f;
    if (const int thread = low_thread(); low_turn(thread, j)) {
      const float* const from = p.from_hidden + low_at(thread, j);
      if constexpr (kJoint) {
        product.fetch_from_hidden(from);
      } else {
        z = *from;
      }
    }
    float3 own{};
    if constexpr (kJoint) {
      if (j >= begin) {
        product.choose(j, scored_from, aborted);
        own = product.multiply(epoch + j, my_row, sub);
      }
    }

    // y_j, then S_j
    T* const states = exchange.states<T>(group, j);
    const uint64_t tag = state_tag(j);
    const int started = my_start();
    const bool turn = mine && j >= started && sub < kBlockUnits;
    const bool chooses = has_units && row_warp < rows;
    T* const to = states + my_row * units + unit0 + sub;
    float from_state[3] = {};
    Winner best{};
    uint32_t y = 0, guess = kNoToken;
    if (chooses) {
      if (turn) {
#pragma unroll
        for (int gate = 0; gate < 3; ++gate)
          from_state[gate] = gate_totals[my_row * 48 + gate * 16 + sub];
      }
      if constexpr (kServed && InputServer<T, kTiles>::kGuesses)
        guess =
            await_guess(exchange, my_row, j, epoch, mine && j > max(started, scored_from), aborted);
      if constexpr (kJoint) {
        if (mine && j >= begin) {
          const uint2 choice = product.choice(group, my_row);
          best = {choice.x, choice.y};
        }
      } else if (j > 0) {
        best = winner(j - 1);
      }
      if (!kJoint && mine)
        y = j > 0 ? min(best.id, last_id)
                  : static_cast<uint32_t>(clamp_id(p.anchor[first_row + my_row], p.vocab));
    }
    if (chooses) {
      float3 made{};
      if constexpr (!kTable)
        made = take_inputs<kLanes>(exchange.inputs(guess == y && guess != kNoToken ? 1 + j % 2 : 0,
                                                   (kJoint ? group * kGroupRows : 0) + my_row, 0) +
                                       unit0,
                                   units, mine && j >= started, epoch + j,
                                   kJoint ? product.own_quarter() : -1, own, aborted);
      uint32_t bits = 0;
      if (turn) {
        float x_r, x_z, x_n;
        if constexpr (kTable) {
          const char* const lane_row =
              static_cast<const char*>(p.table) + (block * 3 * kBlockUnits + sub) * 2;
          const T* x =
              reinterpret_cast<const T*>(lane_row + static_cast<uint64_t>(y) * (units * 6u));
          const T x_0 = x[0], x_1 = x[16], x_2 = x[32];
          x_r = to_float(x_0), x_z = to_float(x_1), x_n = to_float(x_2);
        } else {
          x_r = made.x, x_z = made.y, x_n = made.z;
        }
        if (j == started && j > 0)
          state = to_float(static_cast<const T*>(p.states)[(my_at + j - 1) * units + unit0 + sub]);
        const T next =
            gru_unit<T>(x_r, x_z, x_n, from_state[0], from_state[1], from_state[2], state);
        state = to_float(next);
        bits = next.bits;
      }
      bits |= __shfl_down_sync(kFullMask, bits, 1) << 16;
      const uint32_t more = __shfl_down_sync(kFullMask, bits, 2);
      if (turn && sub % 4 == 0) {
        send(to, (static_cast<uint64_t>(more) << 32 | bits) | tag);
        if (p.exact)
          *reinterpret_cast<uint2*>(static_cast<T*>(p.states) + (my_at + j) * units + unit0 +
                                    sub) = {bits, more};
      }
      if (j > 0) {
        report(j - 1, best);
        if (mine && sub == 0) last[my_row] = key_value(static_cast<uint64_t>(best.order) << 32 | 1);
      }
    }

    if constexpr (kJoint) {  // of this warp's tiles: what the product has taken the place of
      if (scored && resident) {
        product.return_rows(w2_rows, ids + (j & 1) * all_ids,
                            min(slot_pools ? all_ids : p.lent_rows, tiles * 16));
      }
      if (scored && tile0 < tile_end) prepare(j, tile0);
    }
    // Through a product there is no room for W1s: what spills comes back later than it does.
    if constexpr (kTiles > 1) {
#pragma unroll
      for (int i = 0; i < kParts * kSteps; ++i) w_low[i] = load_low(i);
    }
    // S_j (or, where a row starts behind this step, the state that it starts from)
    uint64_t word[kLoads][kWords] = {};
    {
      // Who does not need S_j waits for it all the same where it sends keys: they stand where those
      // of y_j do, which whoever made S_j has read.
      uint32_t missing = kJoint ? await_all() : held_awaited;
      if (!scored && !has_units) missing = 0;
      if (p.restart) {
        missing = 0;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const int row = i * kRowsAtOnce + lane_row;
          if (row >= rows || lane_k >= units) continue;
          const int starts = start[row];
          if ((scored || has_units) && j >= starts) missing |= 1u << i;
          if (starts == j + 1 && starts < drafts) {
            const uint64_t* const from = reinterpret_cast<const uint64_t*>(
                static_cast<const T*>(p.states) + ((first_row + row) * drafts + j) * units +
                lane_k);
#pragma unroll
            for (int n = 0; n < kWords; ++n) word[i][n] = from[n];
          }
        }
      }
      const T* const from = states + lane_row * units + lane_k;
      await(
          [&] {
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
              if (i * kRowsAtOnce >= rows) break;
              if constexpr (kWords == 2) {
                look_twice_if(word[i], from + i * kRowsAtOnce * units, missing & 1u << i);
              } else {
                look_if(word[i][0], from + i * kRowsAtOnce * units, missing & 1u << i);
              }
            }
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
              if (i * kRowsAtOnce >= rows) break;
              if (has_state_tag(word[i][0], tag) && has_state_tag(word[i][kWords - 1], tag))
                missing &= ~(1u << i);
            }
            return missing == 0;
          },
          aborted);
    }
    uint32_t s[kTiles][kParts * kSteps][2];
#pragma unroll
    for (int some = 0; some < kTiles; some += kTurnTiles) {
      constexpr int kTurnLoads = kTurnTiles * kColumns / kRowsAtOnce;
#pragma unroll
      for (int i = 0; i < kTurnLoads; ++i) {
        const auto& words = word[some * kColumns / kRowsAtOnce + i];
        char* const to = turn_around + (i * kRowsAtOnce + lane_row) * kPitch + lane_word * 8;
        if constexpr (kWords == 2) {
          *reinterpret_cast<ulonglong2*>(to) = {words[0] & ~kStateTagBits,
                                                words[1] & ~kStateTagBits};
        } else {
          *reinterpret_cast<uint64_t*>(to) = words[0] & ~kStateTagBits;
        }
      }
      __syncwarp();
#pragma unroll
      for (int tile = 0; tile < kTurnTiles; ++tile)
#pragma unroll
        for (int i = 0; i < kParts * kSteps; ++i) {
          const uint2 pair = *reinterpret_cast<const uint2*>(
              turn_around + (tile * kColumns + g) * kPitch + (4 * i + t) * 8);
          s[some + tile][i][0] = pair.x, s[some + tile][i][1] = pair.y;
        }
      __syncwarp();
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        float sums[kSteps][4] = {};
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          const int at = part * kSteps + i;
          mma_16x8x16<T>(sums[i], w_low[at].x, 0, w_low[at].y, 0, s[tile][at][0], s[tile][at][1]);
        }
        if (g < kBlockRank) {
          float* to = low_sums + ((tile * kColumns + 2 * t) * kBlockRank + g) * Memory::kSumPitch +
                      warp * kParts + part;
          to[0] = sum_of_steps(sums, 0);
          to[kBlockRank * Memory::kSumPitch] = sum_of_steps(sums, 1);
        }
      }
    }
    if (slot_pools) {
      if (!kJoint) asm volatile("cp.async.wait_all;" ::: "memory");
      if (j + 1 < drafts && j + 1 > scored_from) load_ids(j + 1);
    }
    __syncthreads();

    // u
    if (const int thread = low_thread(); corrects && makes_low(thread)) {
      if (kJoint) z = product.from_hidden();
      const float mixed = z + sum_of_parts<1>(low_sums + thread * Memory::kSumPitch);
      uint32_t bits = from_float<T>(chain_low_rank_input(p.kind, mixed)).bits;
      bits |= __shfl_down_sync(kFullMask, bits, 1) << 16;
      const uint32_t more = __shfl_down_sync(kFullMask, bits, 2);
      if (thread % kBlockRank == 0 && low_turn(thread, j)) {
        const uint64_t high = static_cast<uint64_t>(epoch + j) << 32;
        send(low_words + (thread / kBlockRank * rank + low0) / 4, high | bits, high | more);
        if (p.exact)
          *reinterpret_cast<uint2*>(static_cast<T*>(p.low_rank) + low_at(thread, j)) = {bits, more};
      }
    }

    // W_hh S_j for the next step, the eights of rows from kFirst on: most of it while u travels,
    // the rest while the keys do.
    const auto add_gates = [&](auto first_of, auto count_of) {
      constexpr int kFirst = decltype(first_of)::value, kCount = decltype(count_of)::value;
      static_assert(kCount <= Memory::kBuffers);
      if (!has_units || j + 1 == drafts || kFirst * kColumns >= rows) return;
      float sums[kCount][kParts][3][4] = {};
#pragma unroll
      for (int tile = 0; tile < kCount; ++tile)
#pragma unroll
        for (int part = 0; part < kParts; ++part)
#pragma unroll
          for (int gate = 0; gate < 3; ++gate)
#pragma unroll
            for (int i = part * kSteps; i < (part + 1) * kSteps; ++i) {
              const uint4 w = w_gate[gate][i];
              const auto& x = s[kFirst + tile][i];
              mma_16x8x16<T>(sums[tile][part][gate], w.x, w.y, w.z, w.w, x[0], x[1]);
            }
      if (kFirst > 0) __syncthreads();  // all have taken what the eights before left here
#pragma unroll
      for (int tile = 0; tile < kCount; ++tile)
#pragma unroll
        for (int part = 0; part < kParts; ++part)
#pragma unroll
          for (int gate = 0; gate < 3; ++gate) {
            const auto& sum = sums[tile][part][gate];
            *reinterpret_cast<float4*>(gate_sums + tile * kStateParts * 384 +
                                       (warp * kParts + part) * 384 + gate * 128 +
                                       lane * 4) = {sum[0], sum[1], sum[2], sum[3]};
          }
      __syncthreads();
#pragma unroll
      for (int n = threadIdx.x; n < kCount * 384; n += kThreads) {
        const int i = n % 384, gate = i / 128, from = i % 128 / 4, e = i % 4;
        const int column = (kFirst + n / 384) * kColumns + 2 * (from % 4) + e % 2;
        gate_totals[column * 48 + gate * 16 + from / 4 + 8 * (e / 2)] =
            sum_of_parts<384>(gate_sums + n / 384 * kStateParts * 384 + i);
      }
    };
    using One = std::integral_constant<int, 1>;
    using Two = std::integral_constant<int, 2>;
    if constexpr (kTiles == 1) {
      add_gates(std::integral_constant<int, 0>{}, One{});
    } else {
      add_gates(std::integral_constant<int, 0>{}, Two{});
      if constexpr (!kJoint) add_gates(Two{}, One{});
    }

    // scores of this warp's tiles
    if (scored) {
      char* const stage = memory + Memory::low_rank + warp * 2 * Memory::kStage;
      if constexpr (kJoint) {
        if (resident) product.await_rows((j - max(begin, scored_from)) & 1);
      }
      unsigned long long best = 0;
      int staged = -1;
#pragma unroll 1
      for (int tile = tile0; tile < tile_end; ++tile) {
        const int row0 = tile * 16 >> p.part_log;
        const int row1 = min((tile * 16 + 8) >> p.part_log, rows - 1);
        const bool turn0 = j >= start[row0], turn1 = j >= start[row1];
        const bool two = row1 != row0;  // the halves of the tile are of two rows
        if (corrects && row0 != staged) {
          const int count = rank / 4;
          ulonglong2 u[2][2] = {};
          await(
              [&] {
                bool here = true;
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                  if (h == 1 && !two) break;
#pragma unroll
                  for (int i = 0; i < 2; ++i)
                    u[h][i] = look_twice(low_words + (h == 0 ? row0 : row1) * count +
                                         min(lane + 32 * i, count - 1));
                }
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                  for (int i = 0; i < 2; ++i)
                    if ((h == 0 || two) && (h == 0 ? turn0 : turn1))
                      here &= u[h][i].x >> 32 == epoch + j && u[h][i].y >> 32 == epoch + j;
                return here;
              },
              aborted);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if (h == 1 && !two) break;
#pragma unroll
            for (int i = 0; i < 2; ++i)
              if (lane + 32 * i < count)
                *reinterpret_cast<uint2*>(stage + h * Memory::kStage + (lane + 32 * i) * 8) = {
                    static_cast<uint32_t>(u[h][i].x), static_cast<uint32_t>(u[h][i].y)};
          }
          staged = row0;
          __syncwarp();
        }
        float sums[4][4] = {};
        if (corrects) {
          const char* u = stage + (g >= 2 && two ? Memory::kStage : 0) + t * 8;
          if (resident) {
            const char* w = w2_rows + (tile * 16 + g) * p.pitch + t * 8;
            score_tile<T, kRank>(sums, w, w + 8 * p.pitch, u, rank / 16);
          } else {
            const auto row = [&](int i) {
              return static_cast<const char*>(p.w2) + t * 8 +
                     max(ids[(j & 1) * all_ids + tile * 16 + i], 0) * (rank * 2LL);
            };
            score_tile<T, kRank>(sums, row(g), row(g + 8), u, rank / 16);
          }
        }
        // column 0 (lane 4g) for rows g, column 2 (lane 4g + 1) for rows g + 8
        const bool turn = t == 0 ? turn0 : turn1;
        const float score = base.value<kPlain ? kTypeOf<T> : kAnyType>(p, id) +
                            (t == 0 ? chain_sum(sums, 0) : chain_sum(sums, 2));
        unsigned long long key = 0;
        if (id >= 0 && turn) key = argmax_key(score, id);
        if (draws) {
          const int at = tile * 16 + 8 * t + g;
          const int m = block * part + (at & (part - 1));
          if (t < 2 && at < rows * part && m < p.pool_size && turn) {
            const int64_t b = first_row + (at >> p.part_log);
            const DraftDraw draw = draw_of(b, j);
            if (key != 0 && draw.inverse_temperature > 0.0f)
              key = argmax_key(draw.order(score, bonus), id);
            const int64_t to = (b * drafts + j) * p.pool_size + m;
            p.pool_ids[to] = id;
            p.pool_logits[to] = id < 0 ? -INFINITY : score;
          }
        }
        const bool last_tile = tile + 1 == tile_end;
        if (part > 8) {
          best = max(best, key);
          if (last_tile || ((tile + 1) * 16 & (part - 1)) == 0) {
            best = warp_best(best);
            if (lane == 0)
              send(exchange.keys(group) + (row0 * kGroup + block) * p.words +
                       ((tile * 16 & (part - 1)) >> (4 + p.tiles_log)),
                   key_word(best, j));
            fetch_ahead(best, row0);
            best = 0;
          }
        } else {
          const unsigned long long first = warp_best(t == 0 ? key : 0);
          const unsigned long long second = warp_best(t == 0 ? 0 : key);
          const unsigned long long mine = lane == 0 ? first : second;
          if (lane == 0 ? turn0 : lane == 1 && turn1 && two)
            send(exchange.keys(group) + (lane == 0 ? row0 : row1) * kGroup + block,
                 key_word(mine, j));
          fetch_ahead(first, row0);
          if (two) fetch_ahead(second, row1);
        }
        if (tile + 1 < tile_end) {
          prepare(j, tile + 1);
        } else if (kTiles == 1 && j + 1 < drafts) {
          prepare(j + 1, tile0);
        }
      }
    }
    if constexpr (kJoint) {
      if (j + 1 < drafts) product.fetch();
      add_gates(Two{}, Two{});
    } else if constexpr (kTiles > 1) {
      add_gates(std::integral_constant<int, 3>{}, One{});
      // only now: of what is loaded here nothing may be spilled, which would wait for it
      if (scored && j + 1 < drafts && tile0 < tile_end) prepare(j + 1, tile0);
    }
    __syncthreads();
    if (!kJoint && resident && slot_pools && j + 1 < drafts && j + 1 > scored_from)
      load_rows(j + 1, 0);
  }
  if (run && block == 0 && row_warp < rows) report(drafts - 1, winner(drafts - 1));

  leave_chain(p.control);
}

}  // namespace domino
