// draft_chain_pool for many rows of 16-bit base logits without edits (sm_90a): its bits, with the
// pass by the copy engine.
//
// A warp of the pass takes turns of 2 periods, 128 ids of each; their logits of up to 8 slots at a
// time come through a ring of the warp's own. The blocks of the other kinds are in front: behind
// the pass they would be by themselves, and beside it the hoist waits for L2.
#pragma once

#include "common/tma.cuh"
#include "head/draft_chain_hoist_stream.cuh"
#include "head/draft_chain_pool.cuh"

namespace domino {

constexpr int kStreamPeriods = kWarpSize / kTileLanes;  // of a warp's turn
constexpr int kStreamStages = 3;                        // of a warp
constexpr int kMostStreamSlots = 8;                     // of a stage, of which a turn has two
constexpr int kStreamSlotBytes = kStreamPeriods * kPoolTile * 2;

// slots: of a stage
inline int stream_bytes(int slots) {
  return kPoolWarps * kStreamStages *
         (slots * kStreamSlotBytes + static_cast<int>(sizeof(uint64_t)));
}

// The tile of base logits to `shared`; one thread calls. They leave L2 first: nobody else reads
// them.
__device__ __forceinline__ void copy_stage(uint32_t shared, const CUtensorMap& map, int id,
                                           int period, int slot, int row, uint64_t* barrier) {
  asm volatile(
      "{ .reg .b64 once; createpolicy.fractional.L2::evict_first.b64 once, 1.0;\n"
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], once; }" ::"r"(shared),
      "l"(&map), "r"(id), "r"(period), "r"(slot), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

// map: base logits as [batch, slots, whole periods, ids of a period], in tiles of `of_stage` slots
template <class Base, bool kTileMax>
__device__ __forceinline__ void stream_pass(const ChainBlockParams& p, const CUtensorMap& map,
                                            const PoolLaunch& launch, int of_stage, int block,
                                            char* ring, char* memory) {
  using Values = EightLogits<Base, true>;
  using Most = typename Values::Most;
  using Keys = PoolKeys<Base, true>;
  const PoolRow row(p, block / launch.parts);
  if (row.only_winner || (p.num_active && row.b >= *p.num_active)) return;
  const int period = static_cast<int>(PoolGroups(p.pool_size).period());
  const int warp = warp_id(), lane = lane_id(), column = lane % kTileLanes;
  constexpr int kStep = kPoolWarps * kStreamPeriods;  // periods of a turn of all warps
  const int own = warp * kStreamPeriods + lane / kTileLanes;
  const int first_id = block % launch.parts * kPoolTile, half = column % 2 * kEight;
  const int whole = static_cast<int>(p.vocab) / (period * kStep);  // turns
  const int turns = ceil_div(ceil_div(static_cast<int>(p.vocab), period), kStep);
  const int slots = row.end - row.first, bytes = of_stage * kStreamSlotBytes;

  uint64_t* const full =
      reinterpret_cast<uint64_t*>(ring + kPoolWarps * kStreamStages * bytes) + warp * kStreamStages;
  ring += warp * kStreamStages * bytes;
  const auto copy = [&](int turn, int part, int stage) {
    arrive_with_bytes(&full[stage], bytes);
    copy_stage(shared_address(ring) + stage * bytes, map, first_id,
               turn * kStep + warp * kStreamPeriods,
               static_cast<int>(p.first_slot) + row.first + part * of_stage,
               static_cast<int>(row.b), &full[stage]);
  };
  if (lane == 0) {
    for (int stage = 0; stage < kStreamStages; ++stage) init_barrier(&full[stage], 1);
    fence_barriers();
    for (int n = 0; n < min(2 * whole, kStreamStages); ++n) copy(n / 2, n % 2, n);
  }
  __syncwarp();

  GroupBest<typename Keys::Key> best{};
  const auto take = [&](int turn, const Values& most, const EightIds& ids) {
    typename Keys::Key key[kEight];
    Keys::make(key, most, ids, (turn * kStep + own) * kGroupRun + half);
    sort(key);
    best.merge(key);
  };
  const auto id_of = [&](int turn) {
    return (turn * kStep + own) * period + first_id + column * kEight;
  };
  // What is left behind whole turns, while the first stages are on their way.
  const Base* const base = base_row<Base>(p, row.b, row.first);
  for (int turn = whole; turn < turns; ++turn) {
    const EightIds ids(p, row.b, id_of(turn));
    take(turn, most_of_slots<kTileMax, Values>(p, row, base, ids, launch.aligned), ids);
  }
  int stage = 0, ahead = kStreamStages;  // ahead: the next copy, two a turn
  uint32_t phase = 0;
#pragma unroll 1
  for (int turn = 0; turn < whole; ++turn) {
    Values most = Values::none();
    Most of_slot[2 * kMostStreamSlots];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      wait_for_phase(&full[stage], phase);
      const char* const from = ring + stage * bytes + lane * 16;
#pragma unroll
      for (int i = 0; i < kMostStreamSlots; ++i) {
        Values values = Values::none();
        if (i < of_stage && part * of_stage + i < slots) {
          const uint4 raw[1] = {*reinterpret_cast<const uint4*>(from + i * kStreamSlotBytes)};
          values.set(raw, nullptr);
        }
        most.raise(values);
        if constexpr (kTileMax) of_slot[part * kMostStreamSlots + i] = values.most();
      }
      __syncwarp();  // all have read the stage
      if (lane == 0 && ahead < 2 * whole) copy(ahead / 2, ahead % 2, stage);
      ++ahead;
      if (++stage == kStreamStages) stage = 0, phase ^= 1;
    }
    if constexpr (kTileMax) {
      // Lanes trade halves of the slots until each has one slot's maximum over its tile. Written
      // out: a loop that ptxas does not unroll would put them into local memory.
      const auto trade = [&](auto distance_of) {
        constexpr int kDistance = decltype(distance_of)::value;
        const bool upper = (lane & kDistance) != 0;
#pragma unroll
        for (int i = 0; i < kDistance; ++i) {
          const Most given = upper ? of_slot[i] : of_slot[i + kDistance];
          const Most kept = upper ? of_slot[i + kDistance] : of_slot[i];
          of_slot[i] = Values::larger(kept, __shfl_xor_sync(kFullMask, given, kDistance));
        }
      };
      trade(std::integral_constant<int, 8>{}), trade(std::integral_constant<int, 4>{});
      trade(std::integral_constant<int, 2>{}), trade(std::integral_constant<int, 1>{});
      static_assert(2 * kMostStreamSlots == kTileLanes);
      const int slot = column / kMostStreamSlots * of_stage + column % kMostStreamSlots;
      if (column % kMostStreamSlots < of_stage && slot < slots)
        p.tile_max[(id_of(turn) / kPoolTile * p.batch + row.b) * p.corrected() + row.first -
                   p.prefix + slot] = Values::value_of_most(of_slot[0]);
    }
    take(turn, most, EightIds::all(id_of(turn)));
  }
  write_pool<Base, true>(p, launch, block, best, memory);
}

// Grid: all blocks of `launch`. of_stage: slots.
template <class T>
__global__ void __launch_bounds__(kPoolThreads, 2)
    chain_pool_stream(const __grid_constant__ ChainBlockParams p,
                      const __grid_constant__ CUtensorMap map, const PoolLaunch launch,
                      int of_stage) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(128) char ring[];
  __shared__ __align__(16) char memory[kPoolMemory];
  allow_next_launch();
  int block = blockIdx.x;
  if (block == 0 && threadIdx.x == 0) clear_control(p);
  const int others = launch.hoist_blocks + launch.winner_blocks;
  if (block >= others) {
    block -= others;
    return launch.pass_tiles ? stream_pass<T, true>(p, map, launch, of_stage, block, ring, memory)
                             : stream_pass<T, false>(p, map, launch, of_stage, block, ring, memory);
  }
  if (block < launch.hoist_blocks) return hoist_stream<T>(p, block, ring);
  pool_winners<T, true>(p, launch, block - launch.hoist_blocks, memory);
#endif
}

}  // namespace domino
