// How the block form is laid out: what a launch is told, and a block's shared memory.
#pragma once

#include "head/chain_math.cuh"
#include "head/draft_chain.h"

namespace domino {

constexpr int kGroup = 64;
constexpr int kBlockUnits = 16;
constexpr int kBlockRank = 4;
constexpr int kMaxRank = kGroup * kBlockRank;
constexpr int kColumns = 8;  // batch rows of an MMA

struct ChainBlockArgs : ChainBlockParams {
  int64_t row0;       // first batch row of the launch
  int chain_blocks;   // the first ones; those behind them serve inputs
  int group_rows;     // batch rows of a group
  int part_log;       // log2 of the ids of a pool in a block: 8 or more
  int tiles_log;      // log2 of the tiles of a warp, 16 ids each
  int words;          // key words of a batch row in a block
  int pitch;          // bytes of a W2 row in shared memory: 32 modulo 128
  bool resident;      // W2's rows are in shared memory; otherwise they are read in place
  bool keeps_inputs;  // servers of inputs have room for what they may keep of W_ih
  int weight_slots;   // of the rings of W_ih in shared memory (JointProduct)
  int lent_rows;      // rows of W2 in whose place they stand
  int ids_at;         // of shared memory
  bool restart;
  bool always;  // chain_rescue: whether or not control->aborted
};

// Where W_ih E[y] comes from: rows of the input table; servers, blocks of the launch that do
// nothing else (chain_input.cuh); all blocks together (chain_product.cuh).
enum class ChainInputs { kTable, kServed, kJoint };

// threadIdx.x, read again: what is made of it is not kept from one phase of a step to the next.
__device__ __forceinline__ int thread_anew() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

constexpr int kJointBytes = 3840;  // of JointProduct, kept in every step

// Shared memory, in bytes from its start.
template <int kTiles>
struct BlockMemory {
  // Few rows: few warps, with twice the registers. What is summed over the state comes in
  // kStateParts parts in any case.
  static constexpr int kWarps = kTiles == 1 ? 8 : 16, kThreads = kWarps * kWarpSize;
  static constexpr int kSumPitch = kStateParts + 4;
  static constexpr int kBuffers = kTiles > 1 ? 2 : 1;
  static constexpr int gate_totals = 0;
  static constexpr int start = gate_totals + kTiles * kColumns * 48 * 4;  // i32 [32]
  static constexpr int last = start + 32 * 4;  // f32 [32]: the score of a row's last winner
  static constexpr int joint = last + 32 * 4;
  // f32 [8 kTiles columns, 4 rows, 16 parts + 4]; rings of JointProduct from here on
  static constexpr int low_sums = joint + (kTiles > 1 ? kJointBytes : 0);
  static constexpr int gate_sums = low_sums + kTiles * kColumns * kBlockRank * kSumPitch * 4;
  static constexpr int low_rank = gate_sums + kBuffers * kStateParts * 3 * 128 * 4;
  // a warp's u of two batch rows; the second 32 bytes further modulo 128
  static constexpr int kStage = kMaxRank * 2 + 32;
  static constexpr int w2_rows = low_rank + kWarps * 2 * kStage;
  // behind W2's rows: i32 [2, all_ids], of even and odd drafts
};

}  // namespace domino
