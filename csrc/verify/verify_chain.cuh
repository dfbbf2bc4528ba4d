// verify_chain in two launches, plain form.
//
// 1. verify_rows_kernel: one block owns one row of logits of one request. It reads the row twice
//    (greatest logit, then the fixed-point sum of weights; the second read hits L2) and writes its
//    RowStats. Bytes: every target row once, with dense q every draft row once; bound by HBM.
// 2. verify_walk_kernel: `splits` blocks own one request. Each decides all slots (one gather a
//    slot), finds where the walk stops, and races its share of the vocabulary for the last token;
//    the block that arrives last writes the request. Bytes: one row, or two with dense q.
//
// Everything that is combined across threads and blocks is an integer maximum, minimum, sum or or:
// the bits do not depend on the launch shape, the batch or the device.
#pragma once

#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "verify/chain_walk.h"

namespace domino {

constexpr int kRowThreads = 1024;
constexpr int kWalkThreads = 256;
constexpr int64_t kWalkTokens = 8192;  // of one block of the second launch

struct DrawState {
  unsigned long long best;  // least race key so far
  unsigned int arrived;     // blocks that have put theirs in
  unsigned int unused;
};
static_assert(sizeof(RowStats) == kRowStatsBytes && sizeof(DrawState) == kDrawStateBytes);

// Row statistics of all requests, [batch][drafts + 1 target rows, then the draft rows], and the
// state of the draws behind them.
struct ChainWorkspace {
  RowStats* rows;
  DrawState* draws;
  int64_t rows_per_request;
  int64_t drafts;

  __device__ explicit ChainWorkspace(const VerifyChainParams& p)
      : rows(static_cast<RowStats*>(p.workspace)),
        rows_per_request(p.drafts + 1 + (p.draft_logits != nullptr ? p.drafts : 0)),
        drafts(p.drafts) {
    draws = reinterpret_cast<DrawState*>(rows + p.batch * rows_per_request);
  }
};

struct StoredStats {
  const RowStats* target_rows;
  const RowStats* draft_rows;

  __device__ StoredStats(const ChainWorkspace& workspace, int64_t b)
      : target_rows(workspace.rows + b * workspace.rows_per_request),
        draft_rows(target_rows + workspace.drafts + 1) {}
  __device__ RowStats target(int i) const { return target_rows[i]; }
  __device__ RowStats draft(int i) const { return draft_rows[i]; }
};

// fn(token, logit) for this thread's share of a row, in rising order of tokens: one by one up to
// the first 16-byte boundary, then in vectors, then the tail.
template <class T, class Fn>
__device__ __forceinline__ void for_each_logit(const T* row, int vocab, Fn fn) {
  constexpr int kWidth = kVecWidth<T>;
  const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
  const int head = min(vocab, (kWidth - skew) % kWidth);
  const int vectors = (vocab - head) / kWidth;
  for (int x = threadIdx.x; x < head; x += blockDim.x) fn(x, to_float(row[x]));
#pragma unroll 4
  for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
    const auto logits = load<kWidth>(row + head + v * kWidth);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) fn(head + v * kWidth + j, to_float(logits.at[j]));
  }
  for (int x = head + vectors * kWidth + threadIdx.x; x < vocab; x += blockDim.x)
    fn(x, to_float(row[x]));
}

// Orders by logit, then by falling id. NaN never gets here; -0 counts as 0.
__device__ __forceinline__ unsigned long long top_key(float logit, int token) {
  const uint32_t bits = __float_as_uint(add_rn(logit, 0.0f));
  const uint32_t order = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<unsigned long long>(order) << 32 | static_cast<uint32_t>(~token);
}

template <class T>
__device__ __forceinline__ RowStats row_stats(const T* row, int vocab, float scale) {
  __shared__ unsigned long long slots[kWarpSize];
  float top = -INFINITY;
  int argmax = vocab;
  bool non_finite = false;
  for_each_logit(row, vocab, [&](int token, float logit) {
    non_finite |= !(logit < INFINITY);
    if (logit > top) {
      top = logit;
      argmax = token;
    }
  });
  const auto larger = [](unsigned long long a, unsigned long long b) { return a > b ? a : b; };
  const auto add = [](unsigned long long a, unsigned long long b) { return a + b; };
  const unsigned long long best = block_reduce(top_key(top, argmax), larger, slots);
  const uint32_t order = static_cast<uint32_t>(best >> 32);
  RowStats stats{0, __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order),
                 static_cast<int32_t>(~static_cast<uint32_t>(best)), 0, 0};
  stats.faults = row_faults(__syncthreads_or(non_finite), stats.top);
  if (stats.faults != 0) return stats;
  unsigned long long sum = 0;
  for_each_logit(row, vocab,
                 [&](int, float logit) { sum += to_fixed(token_weight(logit, stats.top, scale)); });
  stats.sum = block_reduce(sum, add, slots);
  return stats;
}

// Grid: batch * rows_per_request blocks; a row that its request does not have leaves at once.
__global__ void __launch_bounds__(kRowThreads)
    verify_rows_kernel(const __grid_constant__ VerifyChainParams p) {
  const ChainWorkspace workspace(p);
  const int64_t b = blockIdx.x / workspace.rows_per_request;
  const int slot = static_cast<int>(blockIdx.x % workspace.rows_per_request);
  if (slot == 0 && threadIdx.x == 0) workspace.draws[b] = {kNoWinner, 0, 0};
  const ChainRequest r(p, b);
  const bool of_target = slot <= p.drafts;
  const int i = of_target ? slot : static_cast<int>(slot - p.drafts - 1);
  // the last target row has no draft
  if (of_target ? i >= r.rows : !r.dense || i >= r.rows - 1) return;
  const LogitRow row = of_target ? r.target_row(i) : r.draft_row(i);
  const float scale = law_scale(of_target ? r.temperature : r.draft_temperature);
  const int vocab = static_cast<int>(p.vocab);
  RowStats stats;
  if (row.dtype == DType::kF32) {
    stats = row_stats(static_cast<const float*>(row.data), vocab, scale);
  } else if (row.dtype == DType::kF16) {
    stats = row_stats(static_cast<const f16*>(row.data), vocab, scale);
  } else {
    stats = row_stats(static_cast<const bf16*>(row.data), vocab, scale);
  }
  if (threadIdx.x == 0) workspace.rows[blockIdx.x] = stats;
}

// The block's best race key among groups of four tokens [first, last).
__device__ __forceinline__ unsigned long long block_race(const Draw& draw, int64_t first,
                                                         int64_t last, int64_t vocab,
                                                         unsigned long long* slots) {
  unsigned long long best = kNoWinner;
  for (int64_t group = first + threadIdx.x; group < last; group += blockDim.x) {
    const unsigned long long key = draw.group_key(group, vocab);
    best = key < best ? key : best;
  }
  return block_reduce(
      best, [](unsigned long long a, unsigned long long b) { return a < b ? a : b; }, slots);
}

// Grid: batch * splits blocks.
__global__ void __launch_bounds__(kWalkThreads)
    verify_walk_kernel(const __grid_constant__ VerifyChainParams p, int splits) {
  __shared__ unsigned long long slots[kWarpSize];
  __shared__ int shared_stop;
  __shared__ uint32_t shared_status;
  __shared__ Slot shared_slot;
  __shared__ bool shared_is_last;

  const int64_t b = blockIdx.x / splits;
  const int split = static_cast<int>(blockIdx.x % splits);
  const ChainRequest r(p, b);
  const ChainWorkspace workspace(p);
  StoredStats stats(workspace, b);

  // The walk, all slots of a stretch at once. The last row never accepts, so it ends.
  if (threadIdx.x == 0) {
    shared_stop = r.rows;
    shared_status = r.faults;
  }
  __syncthreads();
  for (int base = 0; base < r.rows; base += blockDim.x) {
    const int i = base + threadIdx.x;
    Slot slot{Outcome::kAccept, 0, -1};
    if (i < r.rows) slot = decide_slot(r, i, stats);
    if (slot.outcome != Outcome::kAccept) atomicMin(&shared_stop, i);
    __syncthreads();
    if (i <= shared_stop && slot.status != 0) atomicOr(&shared_status, slot.status);
    if (i == shared_stop) shared_slot = slot;
    if (shared_stop < base + static_cast<int>(blockDim.x)) break;
    __syncthreads();
  }
  __syncthreads();
  const int stop = shared_stop;
  const Outcome outcome = r.rows > 0 ? shared_slot.outcome : Outcome::kFail;
  uint32_t status = shared_status;
  int64_t last = -1;

  if (outcome == Outcome::kDraw || outcome == Outcome::kResidual) {
    const int64_t groups = (p.vocab + 3) / 4, share = kWalkTokens / 4, first = split * share;
    const Draw draw(r, stop, outcome, shared_slot.exclude, stats);
    unsigned long long best = block_race(draw, first, min(first + share, groups), p.vocab, slots);
    if (threadIdx.x == 0) {
      DrawState& state = workspace.draws[b];
      if (best != kNoWinner) atomicMin(&state.best, best);
      __threadfence();
      shared_is_last = atomicAdd(&state.arrived, 1u) == static_cast<unsigned>(splits) - 1;
    }
    __syncthreads();
    if (!shared_is_last) return;
    __threadfence();
    best = *static_cast<volatile unsigned long long*>(&workspace.draws[b].best);
    if (best == kNoWinner) {
      status |= kZeroResidual;
      const Draw plain(r, stop, Outcome::kDraw, -1, stats);
      best = block_race(plain, 0, groups, p.vocab, slots);
    }
    last = static_cast<int64_t>(best & 0xffffffffu);
  } else {
    if (split != 0) return;
    if (outcome == Outcome::kArgmax) last = stats.target(stop).argmax;
  }
  for (int64_t i = threadIdx.x; i <= p.drafts; i += blockDim.x)
    emit_slot(r, static_cast<int>(i), stop, last, stats);
  if (threadIdx.x == 0) emit_counts(r, stop, last, status);
}

}  // namespace domino
