// What the first launches of verify_chain by value (verify_cut.cuh, verify_listed.cuh) have in
// common: a slot's draft and coin, which do not take its row, and the sums of its chunks.
#pragma once

#include "verify/slot_verdict.cuh"

namespace domino {

// What is known of a slot before its row has been read.
struct SlotAhead {
  int64_t x;           // -1: none
  uint64_t draft_sum;  // of a pool
  float draft_top;
  float logit;
  float q;      // of x, below 0: the request has none
  float share;  // of the coin: u q
  uint32_t status;
};

// As pool_stats().
__device__ __forceinline__ RowStats pool_at_once(const ChainRequest& r, int i, int64_t x,
                                                 float* logit_of_x) {
  const int lane = threadIdx.x % kWarpSize;
  const LogitRow logits = r.draft_row(i);
  const int32_t* ids = r.draft_ids(i);
  constexpr int kHeld = 4;  // of 32 lanes, all loads of which are on their way at once
  float held[kHeld];
  uint32_t key = 0;
  float found = -INFINITY;
  const auto meet = [&](int32_t id, float logit) {
    if (id < 0 || id >= r.p.vocab) return false;
    key = max(key, logit_key(logit));
    if (id == x) found = logit;
    return true;
  };
  {
    int32_t held_ids[kHeld];
#pragma unroll
    for (int n = 0; n < kHeld; ++n) {
      const int m = lane + n * kWarpSize;
      held_ids[n] = m < r.p.pool ? ids[m] : -1;
      held[n] = m < r.p.pool ? logits.at(m) : 0.0f;
    }
#pragma unroll
    for (int n = 0; n < kHeld; ++n)
      if (!meet(held_ids[n], held[n])) held[n] = -INFINITY;
  }
#pragma unroll 1
  for (int m = lane + kHeld * kWarpSize; m < r.p.pool; m += kWarpSize) meet(ids[m], logits.at(m));
  RowStats stats{0, 0.0f, -1, 0, 0};
  key = __reduce_max_sync(kFullMask, key);
  stats.top = key == 0 ? -INFINITY : key_logit(key);
  stats.faults = row_faults(stats.top);
  const unsigned has = __ballot_sync(kFullMask, found != -INFINITY);
  *logit_of_x = has != 0 ? __shfl_sync(kFullMask, found, __ffs(has) - 1) : -INFINITY;
  if (stats.faults != 0) return stats;
  const RowLaw law(stats.top, 1, law_scale(r.draft_temperature));
#pragma unroll
  for (int n = 0; n < kHeld; ++n)
    if (held[n] != -INFINITY) stats.sum += to_fixed(law.weight(held[n]));
#pragma unroll 1
  for (int m = lane + kHeld * kWarpSize; m < r.p.pool; m += kWarpSize)
    if (ids[m] >= 0 && ids[m] < r.p.vocab) stats.sum += to_fixed(law.weight(logits.at(m)));
  stats.sum = warp_sum(stats.sum);
  return stats;
}

// All lanes of a warp call it.
__device__ __forceinline__ SlotAhead slot_ahead(const ChainRequest& r, int i,
                                                const RowSource<bf16>& source) {
  const SlotDraft draft(r, i, source);
  SlotAhead out{draft.x, 0, 0.0f, draft.logit, -1.0f, 0.0f, draft.status};
  if (out.x < 0) return out;
  if (r.q == DraftLaw::kPool) {
    float logit;
    const RowStats pool = pool_at_once(r, i, out.x, &logit);
    out.draft_sum = pool.sum;
    out.draft_top = pool.top;
    out.q = draft_mass(pool, r.draft_temperature, logit);
  } else if (r.q == DraftLaw::kScalar) {
    out.q = scalar_mass(r.p.draft_logprob[r.b * r.p.drafts + i]);
  }
  if (!r.greedy()) out.share = mul_rn(verify_coin(r, i), out.q > 0.0f ? out.q : 1.0f);
  return out;
}

// Does the coin accept the slot's draft, now that the cut is known? Open where it equals the cut's
// logit and only some of those are kept.
__device__ __forceinline__ Outcome cut_outcome(const RowLaw& law, const RowFilter& filter,
                                               const SlotAhead& slot) {
  const float probability = filter.probability(law, slot.logit);
  const bool ties = slot.logit == filter.cut_logit;
  if (slot.logit < filter.cut_logit || (ties && filter.cut_id >= 0 && slot.x > filter.cut_id) ||
      !(probability > 0.0f && slot.share <= probability))
    return Outcome::kResidual;
  return ties && filter.cut_id < 0 ? Outcome::kUndecided : Outcome::kAccept;
}

// What the weights of the slot's race come to where q is one-hot, about.
__device__ __forceinline__ float race_mass(const Slot& verdict, const RowLaw& law,
                                           const RowFilter& filter, const SlotAhead& slot,
                                           uint64_t sum) {
  const float mass = static_cast<float>(filter.mass != 0 ? filter.mass : sum) * (1.0f / kFixedOne);
  const bool without = verdict.outcome == Outcome::kResidual && filter.keeps(slot.logit, slot.x);
  return without ? fmaxf(mass - law.weight(slot.logit), 0.0f) : mass;
}

// By one warp. law: of weights, its sum is not looked at.
__device__ __forceinline__ void write_verdict(const Slot& verdict, int32_t winner,
                                              const RowStats& stats, const RowLaw& law,
                                              const RowFilter& filter, const SlotAhead& slot,
                                              SlotVerdict* out) {
  if (threadIdx.x % kWarpSize != 0) return;
  out->outcome = verdict.outcome;
  out->status = verdict.status | (verdict.one_hot ? kTakenAsOneHot : 0u);
  out->winner = winner;
  out->filter = filter;
  out->top = stats.top;
  out->argmax = stats.argmax;
  out->draft_sum = slot.draft_sum;
  out->draft_top = slot.draft_top;
  out->race_mass = race_mass(verdict, law, filter, slot, stats.sum);
}

// What verify_rows_kernel finds out about a chunk of a row (row_chunks.cuh).
__device__ __forceinline__ void sum_chunk(const Group<bf16> (&groups)[kLaneGroups], int token,
                                          bool greedy, float scale, const ChainWorkspace& chunks,
                                          int64_t at) {
  const int lane = threadIdx.x % kWarpSize;
  const uint32_t own = logit_key(lane_top(groups));
  const uint32_t key = __reduce_max_sync(kFullMask, own);
  const float top = key_logit(key);
  ChunkStats out{key, {0, 0, 0}};
  if (greedy) {
    const uint32_t id = first_of(groups, token, top, own == key);
    if (lane == 0) chunks.first[at] = id;
  }
  if (key < kInfinityKey && key > kEmptyKey) chunk_digits(groups, top, scale, out.digits);
  if (lane == 0) *reinterpret_cast<uint4*>(chunks.chunks + at) = reinterpret_cast<uint4&>(out);
}

}  // namespace domino
