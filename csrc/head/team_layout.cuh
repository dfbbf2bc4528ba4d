// How the team form (draft_chain_team.cuh) is laid out: what a launch is told, and the shared
// memory of its blocks.
#pragma once

#include "head/chain_exchange.cuh"
#include "head/chain_math.cuh"
#include "head/draft_chain.h"

namespace domino {

constexpr int kTeam = 8;       // blocks of a batch row: a cluster
constexpr int kTeamRows = 16;  // batch rows of a launch, at most
constexpr int kTeamWarps = 8;  // of a block
constexpr int kTeamThreads = kTeamWarps * kWarpSize;
constexpr int kTeamParts =
    kStateParts / kTeamWarps;    // of the k of a product with the state, a warp
constexpr int kStateUnits = 32;  // of a block that multiplies W_hh

struct TeamArgs : ChainBlockParams {
  int64_t row0;   // first batch row of the launch
  int teams;      // batch rows, 8 blocks each; the blocks behind them multiply W_hh
  int part_log;   // log2 of the ids of a pool in a block: 16 or more
  int tiles_log;  // log2 of the tiles of a warp, 16 ids each
  int key_words;  // of a block: warps that have ids
  int pitch;      // bytes of a W2 row in shared memory: 16 modulo 32
  bool resident;  // W2's rows are in shared memory; otherwise they are read in place
  bool restart;
};

// S_j in words of 4 units: those of k and of k + 16 side by side, for each lane of a quad, as the
// fragments of two MMAs. In shared memory (rows = 1) or for all rows of a launch, 8 in a tile.
struct StateWords {
  int rows, units;  // units: a multiple of 32
  __device__ int stride(int row) const { return min(8, rows - row / 8 * 8) * 64; }  // of 32 units
  __device__ int at(int row, int unit, int t) const {                               // bytes
    return row / 8 * 16 * units + unit / 32 * stride(row) + (row % 8 * 4 + t) * 16;
  }
};

// Shared memory of a block of a team, in bytes from its start.
struct TeamMemory {
  // a barrier for each kind of what the cluster sends
  static constexpr int keys_barrier = 0, states_barrier = 8, low_rank_barrier = 16;
  static constexpr int kSumPitch = kTeamWarps + 4;
  static constexpr int keys = 32;                                 // u64 [8 key_words], <= 64
  static constexpr int low_sums = keys + kTeam * kTeamWarps * 8;  // f32 [32 rows of W1s, 8 + 4]
  static constexpr int low_rank = low_sums + 32 * kSumPitch * 4;  // u: 256 elements at most
  static constexpr int states = low_rank + 256 * 2;               // S_j: 1024 units at most
  static constexpr int ids = states + 1024 * 2;                   // i32 [ids_count]
  int ids_count;  // of a block: an eighth of the pool, twice where pools change
  DOMINO_HD int w2() const { return ids + ids_count * 4; }
};

// Of a block that multiplies W_hh: the parts of k of each product, twice.
struct StateMemory {
  // lanes that store or sum at once meet in no bank
  static constexpr int kColumn = 3 * kStateUnits + 4, kPart = 8 * kColumn;
  static constexpr int kBuffer = kTeamWarps * kPart * 4;
  static constexpr int bytes = 2 * kBuffer;
};

}  // namespace domino
