// The block rule (block_walk.h) behind verify_cut.cuh, verify_row.cuh or verify_listed.cuh: a
// cluster owns a request. Every block works out the reaches and each row's Z for itself, a warp a
// row: that takes the row's logits at the pool's ids alone, or with dense q its kept tokens, where
// they are listed. Where they are not a block looks through a row for them. Then all race for the
// token. Bytes: a pool and as many logits a row, and one row; bound by latency.
#pragma once

#include "verify/block_walk.h"
#include "verify/draw_token.cuh"

namespace domino {

struct BlockShared {
  SlotVerdict slots[kBlockSlots];
  float p[kBlockSlots];  // of the drafts
  float q[kBlockSlots];
  float rest[kBlockSlots];      // Z
  uint64_t fixed[kBlockSlots];  // the same, of rows that this block looked through
  float threshold[kBlockSlots];
  bool tied[kBlockSlots];  // is a token of which p is looked up among those that tie with the cut?
};

// By a warp: BlockShared::tied of a row with a draft.
__device__ __forceinline__ bool ties_matter(const ChainRequest& r, int i, const SlotVerdict& slot) {
  const RowSource<bf16> source(r.target_row(i), RowEdits{}, static_cast<int>(r.p.vocab));
  const float cut = slot.filter.cut_logit;
  bool ties = source.at(r.draft_token(i)) == cut;
  if ((slot.status & kTakenAsOneHot) == 0) {
#pragma unroll 2
    for (int64_t m = threadIdx.x % kWarpSize; m < r.p.pool; m += kWarpSize) {
      const int64_t token = r.draft_ids(i)[m];
      if (token >= 0 && token < r.p.vocab) ties = ties || source.at(token) == cut;
    }
  }
  return __any_sync(kFullMask, ties);
}

// By a warp: p and q of the row's draft.
template <bool kDense>
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
    int64_t at = x;
    if (!kDense) {
      int first = INT32_MAX;  // that is x
      for (int64_t m = lane; m < r.p.pool; m += kWarpSize)
        if (r.draft_ids(i)[m] == x) first = min(first, static_cast<int>(m));
      at = __reduce_min_sync(kFullMask, first);
    }
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

// By a warp: Z of a row with a draft, in fixed point. tokens: that are kept, with dense q
template <bool kDense>
__device__ __forceinline__ uint64_t row_rest(const ChainRequest& r, int i, const SlotVerdict& slot,
                                             const uint64_t* tokens, float reach) {
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
  uint64_t sum = 0;
  if constexpr (kDense) {
    const int kept = static_cast<int>(slot.status >> kKeptShift);
#pragma unroll 2
    for (int n = threadIdx.x % kWarpSize; n < kept; n += kWarpSize) {
      const uint64_t word = __ldcg(reinterpret_cast<const unsigned long long*>(tokens) + n);
      sum += block_rest_fixed(reach, mul_rn(law.weight(ListedOrder::logit(word)), inverse),
                              draft.probability(logits.at(static_cast<uint32_t>(word))));
    }
    return warp_sum(sum);
  } else {
    uint64_t covered = 0;
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
}

// By a block: the same of a row with dense q, of whose kept tokens nothing is listed.
static __device__ __noinline__ uint64_t look_for_rest(const RowCluster& cluster,
                                                      const ChainRequest& r, int i,
                                                      const SlotVerdict& slot, float reach) {
  const RowFilter filter = slot.filter;
  const RowSource<bf16> source(r.target_row(i), RowEdits{}, static_cast<int>(r.p.vocab));
  const RowLaw law(slot.top, 1, law_scale(r.temperature));
  const RowLaw draft(slot.draft_top, slot.draft_sum, law_scale(r.draft_temperature));
  const float inverse = div_rn(kFixedOne, static_cast<float>(filter.mass));
  const LogitRow logits = r.draft_row(i);
  RowCluster alone = cluster;
  alone.rank = 0;
  alone.size = 1;
  unsigned long long sum = 0;
  for_each_step(alone, source, [&](int token, const auto& group) {
#pragma unroll
    for (int j = 0; j < kGroup; ++j)
      if (filter.keeps(group.at(j), token + j) && token + j < source.vocab)
        sum += block_rest_fixed(reach, mul_rn(law.weight(group.at(j)), inverse),
                                draft.probability(logits.at(token + j)));
  });
  return block_reduce(
      sum, [](unsigned long long a, unsigned long long b) { return a + b; }, race_shared().slots);
}

// All threads of the cluster call it.
template <bool kDense>
__device__ __noinline__ void draw_block(const RowCluster cluster, const ChainRequest& r,
                                        const ChainWorkspace& chunks) {
  __shared__ alignas(BlockShared) unsigned char storage[sizeof(BlockShared)];
  BlockShared& s = *reinterpret_cast<BlockShared*>(storage);
  const SlotVerdict* slots = slot_verdicts(chunks) + r.b * (r.p.drafts + 1);
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
  for (int i = warp; i <= end; i += kDrawWarps) {
    const bool tied =
        s.slots[i].filter.cut_id < 0 && (kDense || (i < end && ties_matter(r, i, s.slots[i])));
    if (lane == 0) s.tied[i] = tied;
  }
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i <= end; ++i) {  // a look at the row each; draw_token() does without
    if (!s.tied[i]) continue;
    const RowFilter filter = s.slots[i].filter;
    const RowSource<bf16> source(r.target_row(i), RowEdits{}, static_cast<int>(r.p.vocab));
    const int32_t last = last_tie(cluster, source, filter.cut_logit, -filter.cut_id);
    __syncthreads();
    if (threadIdx.x == 0) s.slots[i].filter.cut_id = last;
  }
  if (threadIdx.x < r.rows && s.slots[threadIdx.x].filter.mass == 0)  // without filters
    s.slots[threadIdx.x].filter.mass = s.slots[threadIdx.x].sum;
  __syncthreads();
  for (int i = warp; i < end; i += kDrawWarps) draft_laws<kDense>(r, i, s);
  __syncthreads();
  // is row i looked through?
  const auto unlisted = [&](int i) {
    return kDense && i < end && s.slots[i].status >> kKeptShift == 0 &&
           (s.slots[i].status & kTakenAsOneHot) == 0;
  };
  if constexpr (kDense) {
#pragma unroll 1
    for (int i = cluster.rank; i < end; i += cluster.size) {
      if (!unlisted(i)) continue;
      const uint64_t rest = look_for_rest(cluster, r, i, s.slots[i], reach_of(s, i));
      if (threadIdx.x == 0) s.fixed[i] = rest;
    }
    cluster.sync();
  }
  for (int i = warp; i <= end; i += kDrawWarps) {
    const float reach = reach_of(s, i);
    uint64_t rest = 0;
    if (unlisted(i))
      rest = *cluster.map(&s.fixed[i], i % cluster.size);
    else if (i < end)
      rest = row_rest<kDense>(r, i, s.slots[i], kDense ? kept_tokens(chunks, r.p, r.b, i) : nullptr,
                              reach);
    if (lane != 0) continue;
    s.rest[i] = static_cast<float>(rest) * (1.0f / kFixedOne);
    s.threshold[i] = i < end ? block_threshold(rest, reach) : reach;
  }
  if constexpr (kDense)
    cluster.sync();  // nobody ends before all have read
  else
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
      const RaceNoise race = race_noise(r, stop, outcome);
      if (kDense && slot.status >> kKeptShift != 0)
        last = race_kept(r, stop, outcome, slot, kept_tokens(chunks, r.p, r.b, stop), race,
                         reach_of(s, stop));
      else
        last = draw_token(cluster, r, stop, outcome, slot, race, reach_of(s, stop), s.rest[stop]);
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
