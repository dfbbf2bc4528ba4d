// The block rule (block_walk.h) over pools, behind verify_cut.cuh or verify_listed.cuh: a cluster
// owns a request. Every block works out the reaches and each row's Z for itself, a warp a row: that
// takes the row's logits at the pool's ids alone. Then all race for the token. Bytes: a pool and as
// many logits a row, and one row; bound by latency.
#pragma once

#include "verify/block_walk.h"
#include "verify/draw_token.cuh"

namespace domino {

struct BlockShared {
  SlotVerdict slots[kBlockSlots];
  float p[kBlockSlots];  // of the drafts
  float q[kBlockSlots];
  float rest[kBlockSlots];  // Z
  float threshold[kBlockSlots];
};

// By a warp: p and q of the row's draft.
__device__ __forceinline__ void draft_laws(const ChainRequest& r, int i, BlockShared& s) {
  const SlotVerdict& slot = s.slots[i];
  const int lane = threadIdx.x % kWarpSize;
  const RowSource<bf16> source(r.target_row(i), RowEdits{}, static_cast<int>(r.p.vocab));
  const RowLaw law(slot.top, 1, law_scale(r.temperature));
  const int64_t x = r.draft_token(i);
  const float logit = source.at(x);
  float q = 1.0f;
  if ((slot.status & kTakenAsOneHot) == 0) {
    const LogitRow logits = r.draft_row(i);
    int at = INT32_MAX;  // the first that is x
    for (int64_t m = lane; m < r.p.pool; m += kWarpSize)
      if (r.draft_ids(i)[m] == x) at = min(at, static_cast<int>(m));
    at = __reduce_min_sync(kFullMask, at);
    q = RowLaw(slot.draft_top, slot.draft_sum, law_scale(r.draft_temperature))
            .probability(logits.at(at));
  }
  if (lane != 0) return;
  s.p[i] = slot.filter.keeps(logit, x) ? slot.filter.probability(law, logit) : 0.0f;
  s.q[i] = q;
}

__device__ __forceinline__ float reach_of(const BlockShared& s, int i) {
  float reach = 1.0f;
  for (int j = 0; j < i; ++j) reach = next_reach(reach, s.p[j], s.q[j]);
  return reach;
}

// By a warp: Z of a row with a draft, in fixed point.
__device__ __forceinline__ uint64_t pool_rest(const ChainRequest& r, int i, const SlotVerdict& slot,
                                              float reach) {
  const RowFilter& filter = slot.filter;
  const RowSource<bf16> source(r.target_row(i), RowEdits{}, static_cast<int>(r.p.vocab));
  const RowLaw law(slot.top, 1, law_scale(r.temperature));
  if (slot.status & kTakenAsOneHot) {
    const int64_t x = r.draft_token(i);
    const float logit = source.at(x);
    const uint64_t inside = filter.keeps(logit, x) ? to_fixed(law.weight(logit)) : 0;
    return block_rest_outside(reach, inside, filter.mass);
  }
  const RowLaw draft(slot.draft_top, slot.draft_sum, law_scale(r.draft_temperature));
  const float inverse = div_rn(kFixedOne, static_cast<float>(filter.mass));
  const LogitRow logits = r.draft_row(i);
  uint64_t sum = 0, covered = 0;
#pragma unroll 2
  for (int64_t m = threadIdx.x % kWarpSize; m < r.p.pool; m += kWarpSize) {
    const int64_t token = r.draft_ids(i)[m];
    if (token < 0 || token >= r.p.vocab) continue;
    const float logit = source.at(token);
    const float weight = filter.keeps(logit, token) ? law.weight(logit) : 0.0f;
    sum += block_rest_fixed(reach, mul_rn(weight, inverse), draft.probability(logits.at(m)));
    covered += to_fixed(weight);
  }
  return warp_sum(sum) + block_rest_outside(reach, warp_sum(covered), filter.mass);
}

// All threads of the cluster call it. slots: of the request
__device__ __noinline__ void draw_block(const RowCluster cluster, const ChainRequest& r,
                                        const SlotVerdict* slots) {
  __shared__ BlockShared s;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  constexpr int kWords = sizeof(SlotVerdict) / sizeof(uint4);
  for (int n = threadIdx.x; n < r.rows * kWords; n += kDrawThreads)
    reinterpret_cast<uint4*>(s.slots)[n] = __ldcg(reinterpret_cast<const uint4*>(slots) + n);
  __syncthreads();
  int end =
      INT32_MAX;  // of the chain; a loop from 0 on came out of ptxas 13.0 looking two slots ahead
  for (int i = lane; i < r.rows; i += kWarpSize)
    if (ends_chain(s.slots[i].outcome)) end = min(end, i);
  end = __reduce_min_sync(kFullMask, end);
#pragma unroll 1
  for (int i = 0; i <= end; ++i) {
    const RowFilter filter = s.slots[i].filter;
    if (filter.cut_id >= 0) continue;
    const RowSource<bf16> source(r.target_row(i), RowEdits{}, static_cast<int>(r.p.vocab));
    const int32_t last = last_tie(cluster, source, filter.cut_logit, -filter.cut_id);
    __syncthreads();
    if (threadIdx.x == 0) s.slots[i].filter.cut_id = last;
  }
  if (threadIdx.x < r.rows && s.slots[threadIdx.x].filter.mass == 0)  // without filters
    s.slots[threadIdx.x].filter.mass = s.slots[threadIdx.x].sum;
  __syncthreads();
  for (int i = warp; i < end; i += kDrawWarps) draft_laws(r, i, s);
  __syncthreads();
  for (int i = warp; i <= end; i += kDrawWarps) {
    const float reach = reach_of(s, i);
    const uint64_t rest = i < end ? pool_rest(r, i, s.slots[i], reach) : 0;
    if (lane != 0) continue;
    s.rest[i] = static_cast<float>(rest) * (1.0f / kFixedOne);
    s.threshold[i] = i < end ? block_threshold(rest, reach) : reach;
  }
  __syncthreads();

  int stop = 0;  // the last prefix that its coin keeps
#pragma unroll 1
  for (int base = 1; base <= end; base += kWarpSize) {
    const int i = base + lane;
    const unsigned keeps =
        __ballot_sync(kFullMask, i <= end && verify_coin(r, i - 1) <= s.threshold[i]);
    if (keeps != 0) stop = base + 31 - __clz(keeps);
  }
  uint32_t bits = r.faults;
  for (int i = lane; i <= stop; i += kWarpSize) bits |= s.slots[i].status & 0xffu;
  bits = __reduce_or_sync(kFullMask, bits);
  const SlotVerdict& slot = s.slots[stop];
  int64_t last = -1;
  if (slot.outcome != Outcome::kFail) {
    Outcome outcome = stop < end ? Outcome::kResidual : Outcome::kDraw;
    if (outcome == Outcome::kDraw) last = slot.winner;
#pragma unroll 1
    while (last < 0) {
      last = draw_token(cluster, r, stop, outcome, slot, race_noise(r, stop, outcome),
                        reach_of(s, stop), s.rest[stop]);
      if (last >= 0 || outcome == Outcome::kDraw) break;
      bits |= kZeroResidual;
      outcome = Outcome::kDraw;
    }
  }
  if (cluster.rank != 0) return;
  for (int i = threadIdx.x; i < stop; i += kDrawThreads)
    emit_token(r, i, r.draft_token(i), s.slots[i].logprob);
  if (last >= 0 && threadIdx.x == 0) {
    const RowSource<bf16> source(r.target_row(stop), RowEdits{}, static_cast<int>(r.p.vocab));
    const RowLaw law(slot.top, slot.sum, law_scale(r.temperature));
    emit_token(r, stop, last, law.log_probability(source.at(last)));
  }
  emit_end(r, stop, last, bits);
}

}  // namespace domino
