// W_ih E[y] for the block form of draft_chain where there is no input table, more than 8 rows: made
// by all blocks of two groups together in each step, for up to 64 rows (sm_90a).
//
// A task is the three gates of 32 units by a quarter of the inputs, for all rows: 1024 units make
// 128 of them, a block each; of the four that need the sums of these units a block makes one
// quarter, so that a quarter of its words stays with it. Four warpgroups take one of the quarter's
// four parts each (chain_input.cuh), in two pairs that wait for one another only in the end. A pair
// has rings of its own: of E[y] in the place of the gates' sums; of W_ih behind it and in the place
// of some of W2's rows (lent_rows), which the scores have just read: its slots are filled while
// keys travel, and W2's rows come back behind the states. The parts meet in shared memory in the
// order of sum_of_parts and go out in words as those of servers do.
//
// A block takes in 196 KB of W_ih and 128 KB of E a step (4096 inputs), all of it from L2.
#pragma once

#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "head/chain_exchange.cuh"
#include "head/chain_input.cuh"
#include "head/chain_layout.cuh"

namespace domino {

// Kept from step to step.
struct JointMemory {
  uint2 choices[2 * kGroupRows];               // y_j, or kNoToken, and the upper half of its key
  int starts[2 * kGroupRows];                  // the draft that a row begins with
  uint64_t full[2 * 3];                        // slots of the rings of W_ih
  uint64_t returned;                           // W2's rows are back in their place
  float from_hidden[kGroupRows * kBlockRank];  // W1h H of the block's rows of u
  float states[512];                           // a thread's unit of S
};
static_assert(sizeof(JointMemory) <= kJointBytes);

// 16 bytes, or zeros.
__device__ __forceinline__ void copy_async16_where(bool inside, uint32_t shared, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from),
               "r"(inside ? 16 : 0)
               : "memory");
}

template <class T>
class JointProduct {
  static constexpr int kThreads = 512, kRows = 2 * kGroupRows;
  static constexpr int kStride = kStateParts * 32;  // inputs from a 32 to the next of a part
  static constexpr int kRowBytes = kTileWidth * 2;  // of a stage: 64 inputs, two parts
  static constexpr int kColumnSlots = 4, kColumnSlot = kRows * kRowBytes;  // of a pair's ring of E
  static constexpr int kSwapped = 6 * kThreads * 16;  // sums of 16 units that warpgroups swap
  static constexpr int kPitch = 40,
                       kPlane = kRows * kPitch;  // f32 [rows, units] of a pair and gate

 public:
  static constexpr int kTaskUnits = 32;
  static constexpr int kWeightSlot = 3 * kTaskUnits * kRowBytes, kMostSlots = 3;  // of a pair
  static constexpr int kBytes = 2 * kColumnSlots * kColumnSlot;                   // at `memory`
  static_assert(kSwapped <= kBytes && 6 * kPlane * 4 <= kBytes);

  __device__ __forceinline__ JointProduct(const ChainBlockArgs& p, const CUtensorMap& w_ih,
                                          const ChainExchange& exchange, char* memory, char* kept)
      : p(p),
        w_ih(w_ih),
        exchange(exchange),
        kept(*reinterpret_cast<JointMemory*>(kept)),
        memory(memory),
        pair(threadIdx.x / (kThreads / 2)),
        ring(shared_address(memory) + kBytes + pair * p.weight_slots * kWeightSlot),
        stages((static_cast<int>(p.inputs) + kStride - 1) / kStride),
        quarter(blockIdx.x / kGroup * 2 + blockIdx.x % 2),
        unit0(blockIdx.x % kGroup / 2 * kTaskUnits),
        input0((quarter * 2 + pair) * kTileWidth) {}

  // The first draft of any row; by all threads.
  __device__ __forceinline__ int begin() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (threadIdx.x == 0) {
      for (uint64_t& full : kept.full) init_barrier(&full, 3);
      init_barrier(&kept.returned, 1);
      fence_barriers();
    }
#endif
    if (threadIdx.x < kRows) {
      const int64_t b = batch_row(threadIdx.x);
      kept.starts[threadIdx.x] =
          b < 0 ? static_cast<int>(p.drafts) : begin_row(p, p.restart, b, false);
    }
    __syncthreads();
    const int lane = threadIdx.x % kWarpSize;
    return __reduce_min_sync(kFullMask, min(kept.starts[lane], kept.starts[lane + kGroupRows]));
  }

  // What there is room for of W_ih, on its way to where W2's rows were; by all threads.
  __device__ __forceinline__ void fetch() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    fence_async_proxy();
    __syncthreads();
    if (unit0 >= exchange.units) return;
#pragma unroll 1
    for (int stage = 0; stage < min(p.weight_slots, stages); ++stage) fetch(stage);
#endif
  }

  // y_j of all rows, from the keys of draft j - 1 or as they are known before; by all threads.
  __device__ __forceinline__ void choose(int j, int scored_from, uint32_t* aborted) {
    constexpr int kMine = kRows / (kThreads / kWarpSize);
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int row0 = warp * kMine, group = row0 / kGroupRows;  // all of one group
    // A block without a task is not waited for by the other group, whose keys would pass it by.
    const bool wanted = unit0 < exchange.units || group == blockIdx.x / kGroup;
    const int pairs = kGroup / 2 * p.words;
    const uint64_t* const keys = exchange.keys(group) + row0 % kGroupRows * pairs * 2;
    unsigned long long best[kMine] = {};
    bool exchanged[kMine];
#pragma unroll
    for (int n = 0; n < kMine; ++n)
      exchanged[n] = wanted && j > max(kept.starts[row0 + n], scored_from);
#pragma unroll 1
    for (int i = lane; i - lane < pairs; i += kWarpSize) {
      ulonglong2 pair[kMine] = {};
      await(
          [&] {
            bool here = true;
#pragma unroll
            for (int n = 0; n < kMine; ++n)
              if (exchanged[n]) pair[n] = look_twice(keys + (n * pairs + min(i, pairs - 1)) * 2);
#pragma unroll
            for (int n = 0; n < kMine; ++n)
              here &= !exchanged[n] || (is_key_of(pair[n].x, j - 1) && is_key_of(pair[n].y, j - 1));
            return here;
          },
          aborted);
#pragma unroll
      for (int n = 0; n < kMine; ++n) best[n] = max(best[n], max(pair[n].x, pair[n].y));
    }
    // Lanes 8n .. 8n + 7 get the best of row n.
    static_assert(kMine == 4);
    const auto trade = [&](unsigned long long low, unsigned long long high, int distance) {
      const bool upper = lane & distance;
      return max(upper ? high : low, __shfl_xor_sync(kFullMask, upper ? low : high, distance));
    };
    unsigned long long word = trade(trade(best[0], best[2], 16), trade(best[1], best[3], 16), 8);
#pragma unroll
    for (int distance = 4; distance > 0; distance /= 2)
      word = max(word, __shfl_xor_sync(kFullMask, word, distance));
    // A key that was known before does not tell that the words of the draft before have been read.
    if (wanted && j <= scored_from) {
#pragma unroll 1
      for (int n = 0; n < kMine; ++n) {
        const int start = kept.starts[row0 + n];
        if (j > start && start < p.drafts)
          await_readers(group, (row0 + n) % kGroupRows, j - 1, aborted);
      }
    }
    const int row = row0 + lane / 8, start = kept.starts[row];
    const uint32_t last_id = static_cast<uint32_t>(p.vocab - 1);
    uint2 choice{kNoToken, 0};
    if (j > max(start, scored_from)) {
      choice = {min(key_word_id(static_cast<uint32_t>(word)), last_id),
                static_cast<uint32_t>(word >> 32)};
    } else if (j >= start && start < p.drafts) {
      const int64_t b = batch_row(row);
      if (j == 0) {
        choice.x = static_cast<uint32_t>(clamp_id(p.anchor[b], p.vocab));
      } else {
        const uint64_t key = p.keys[b * p.drafts + j - 1];
        choice = {min(key_id(key), last_id), static_cast<uint32_t>(key >> 32)};
      }
    }
    if (lane % 8 == 0) kept.choices[row] = choice;
    __syncthreads();
  }

  // An element of W1h H, for the same thread later.
  __device__ __forceinline__ void fetch_from_hidden(const float* from) {
    copy_async4(shared_address(&kept.from_hidden[threadIdx.x]), from);
    copy_async_commit();
  }
  __device__ __forceinline__ float from_hidden() const {
    copy_async_wait<0>();
    return kept.from_hidden[threadIdx.x];
  }

  // Rows 0 .. end - 1 of W2 to where scores read them, by the copy engine: row r is that of id
  // ids[r]. By all threads, once in each phase of await_rows().
  __device__ __forceinline__ void return_rows(char* rows, const int* ids, int end) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    const int bytes = exchange.rank * 2;
    if (threadIdx.x == 0) arrive_with_bytes(&kept.returned, end * bytes);
    // a few of each warp: a warp issues its copies one after the other
    constexpr int kWarps = kThreads / kWarpSize;
#pragma unroll 1
    for (int row = threadIdx.x % kWarpSize * kWarps + threadIdx.x / kWarpSize; row < end;
         row += kThreads)
      copy_bytes(shared_address(rows + row * p.pitch),
                 static_cast<const char*>(p.w2) + static_cast<int64_t>(max(ids[row], 0)) * bytes,
                 bytes, &kept.returned);
#endif
  }
  __device__ __forceinline__ void await_rows(uint32_t parity) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    wait_for_phase(&kept.returned, parity);
#endif
  }

  __device__ __forceinline__ float& state() const { return kept.states[threadIdx.x]; }
  // The quarter of the inputs whose sums of its own units and rows a block does not send.
  __device__ __forceinline__ int own_quarter() const { return quarter; }
  __device__ __forceinline__ uint2 choice(int group, int row) const {
    return kept.choices[group * kGroupRows + row];
  }

  // The words of draft j of this block's task; by all threads, behind choose(). The sums of the
  // block's own units and rows are not sent: it returns those of `own_unit` and `own_row`.
  __device__ __forceinline__ float3 multiply(uint32_t tag, int own_row, int own_unit) {
    float3 own{};
    if (unit0 >= exchange.units) return own;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, part = warp / 4;
    const uint32_t columns = shared_address(memory) + pair * kColumnSlots * kColumnSlot;
    // this thread's 16 bytes of each stage of E, in two rows
    const int row = threadIdx.x % (kThreads / 2) / 8, piece = threadIdx.x % 8;
    const uint32_t y[2] = {kept.choices[row].x, kept.choices[row + kGroupRows].x};
    const T* from[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      from[i] = static_cast<const T*>(p.embedding) +
                static_cast<int64_t>(y[i] == kNoToken ? 0 : y[i]) * p.inputs + input0 + piece * 8;
    const uint32_t place = columns + row * kRowBytes + (piece ^ row % 8) * 16;
    const auto fetch_columns = [&](int stage) {
      const int k = stage * kStride;
      const bool inside = k + input0 + piece * 8 < p.inputs;
      if (stage < stages) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          copy_async16_where(inside && y[i] != kNoToken,
                             place + stage % kColumnSlots * kColumnSlot + i * kColumnSlot / 2,
                             from[i] + (inside ? k : 0));
      }
      copy_async_commit();
    };
#pragma unroll 1
    for (int stage = 0; stage < kColumnSlots - 1; ++stage) fetch_columns(stage);
    float sums[48];
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      copy_async_wait<kColumnSlots - 2>();
      wait_for_phase(full(slot), parity);
      wgmma_wait<0>();
      fence_async_proxy();
      meet();  // the stage is here, and the pair is through with the one before
      const uint32_t a = columns + stage % kColumnSlots * kColumnSlot + part % 2 * 64;
      const uint32_t b = ring + slot * kWeightSlot + part % 2 * 64;
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < 64; k += 32)
        wgmma_64x96x16<T>(sums, wgmma_swizzled(a + k), wgmma_swizzled(b + k), true);
      wgmma_commit();
      if (stage > 0 && stage - 1 + p.weight_slots < stages) fetch(stage - 1 + p.weight_slots);
      fetch_columns(stage + kColumnSlots - 1);
      if (++slot == p.weight_slots) slot = 0, parity ^= 1;
    }
    wgmma_wait<0>();
    wgmma_pin(sums);
    __syncthreads();

    // The two of a pair swap halves of the units: sums[16 gate + 4 eight + e] is unit 8 eight + 2
    // (lane % 4) + e % 2 of row lane / 4 + 8 (e / 2).
    float4* const swapped = reinterpret_cast<float4*>(memory) + threadIdx.x % 128;
    const bool odd = part % 2 != 0;
    const auto half = [&](int i, bool upper, int e) {
      const float* const low = sums + i / 2 * 16 + i % 2 * 4;
      return upper ? low[8 + e] : low[e];
    };
#pragma unroll
    for (int i = 0; i < 6; ++i)
      swapped[(part * 6 + i) * 128] = {half(i, !odd, 0), half(i, !odd, 1), half(i, !odd, 2),
                                       half(i, !odd, 3)};
    meet();
    float of_pair[6][4];
#pragma unroll
    for (int i = 0; i < 6; ++i) {
      const float4 more = swapped[((part ^ 1) * 6 + i) * 128];
      const float add[4] = {more.x, more.y, more.z, more.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) of_pair[i][e] = half(i, odd, e) + add[e];
    }
    __syncthreads();
    float* const planes = reinterpret_cast<float*>(memory);
#pragma unroll
    for (int i = 0; i < 6; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        *reinterpret_cast<float2*>(
            planes + (pair * 3 + i / 2) * kPlane + (warp % 4 * 16 + lane / 4 + 8 * h) * kPitch +
            part % 2 * 16 + i % 2 * 8 + lane % 4 * 2) = {of_pair[i][2 * h], of_pair[i][2 * h + 1]};
    __syncthreads();
    const auto total = [&](int column, int unit) -> float3 {
      const float* const at = planes + column * kPitch + unit;
      return {at[0] + at[3 * kPlane], at[kPlane] + at[4 * kPlane], at[2 * kPlane] + at[5 * kPlane]};
    };
    // a row of words at a time
    const int group = blockIdx.x / kGroup;
    const bool of_block = lane / kBlockUnits == blockIdx.x % 2;
#pragma unroll
    for (int column = warp; column < kRows; column += kThreads / kWarpSize) {
      if (column / kGroupRows == group && of_block) continue;
      const float3 sum = total(column, lane);
      if (kept.choices[column].x != kNoToken && unit0 + lane < exchange.units)
        send(exchange.inputs(0, column, quarter) + unit0 + lane, {sum.x, sum.y, sum.z, tag});
    }
    own = total(group * kGroupRows + own_row, blockIdx.x % 2 * kBlockUnits + own_unit);
    __syncthreads();  // states come to where the sums are
#endif
    return own;
  }

 private:
  const ChainBlockArgs& p;
  const CUtensorMap& w_ih;
  const ChainExchange& exchange;
  JointMemory& kept;
  char* const memory;
  const int pair;  // of warpgroups: its stages are 64 inputs of each 512
  const uint32_t ring;
  const int stages, quarter, unit0;  // of this block's task
  const int input0;
  int slot = 0, next = 0;  // to be read; to be filled
  uint32_t parity = 0;

  // Of row `row` of both groups; -1: there is none.
  __device__ __forceinline__ int64_t batch_row(int row) const {
    const int64_t b = p.row0 + row / kGroupRows * p.group_rows + row % kGroupRows;
    return row % kGroupRows < p.group_rows && b < p.batch ? b : -1;
  }

  __device__ __forceinline__ void meet() const {  // the pair's threads
    asm volatile("bar.sync %0, %1;" ::"r"(1 + pair), "n"(kThreads / 2) : "memory");
  }

  __device__ __forceinline__ uint64_t* full(int slot) const {
    return &kept.full[pair * kMostSlots + slot];
  }

  // Until every block of a group has read row `row`'s words of draft j: it has sent its units of
  // the state. By a warp.
  __device__ __forceinline__ void await_readers(int group, int row, int j,
                                                uint32_t* aborted) const {
    const T* const state = exchange.states<T>(group, j) + row * exchange.units;
    const uint64_t tag = state_tag(j);
    const auto sent = [&](int block) {
      const int unit = min(block * kBlockUnits, exchange.units - kBlockUnits);
      return has_state_tag(look(state + unit), tag);
    };
    const int lane = threadIdx.x % kWarpSize;
    await([&] { return sent(lane) && sent(lane + kWarpSize); }, aborted);
  }

  __device__ __forceinline__ void fetch(int stage) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    const int gate = threadIdx.x % (kThreads / 2);
    if (gate < 3) {  // a barrier of 3: its bytes and its copy for each gate
      arrive_with_bytes(full(next), kTaskUnits * kRowBytes);
      copy_tile(ring + next * kWeightSlot + gate * kTaskUnits * kRowBytes, w_ih,
                gate * exchange.units + unit0, stage * kStride + input0, full(next));
    }
#endif
    if (++next == p.weight_slots) next = 0;
  }
};

}  // namespace domino
