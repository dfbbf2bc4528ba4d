// What the first launches of verify_chain by value (verify_cut.cuh, verify_row.cuh,
// verify_listed.cuh) and those of a few rows (few_rows.cuh) have in common: a slot's draft and
// coin, which do not take its row, and the sums of its chunks.
#pragma once

#include <new>

#include "verify/race_draw.cuh"
#include "verify/slot_verdict.cuh"

namespace domino {

// What one warp of a block tells the others of the request.
struct SharedRequest {
  alignas(ChainRequest) unsigned char own[sizeof(ChainRequest)];
  alignas(FilterParams) unsigned char wanted[sizeof(FilterParams)];

  __device__ __forceinline__ void set(const ChainRequest& r, const FilterParams& filters) {
    new (own) ChainRequest(r);
    new (wanted) FilterParams(r.greedy() ? FilterParams{} : filters);
  }
  __device__ __forceinline__ const ChainRequest& get() const {
    return *reinterpret_cast<const ChainRequest*>(own);
  }
  __device__ __forceinline__ const FilterParams& filters() const {
    return *reinterpret_cast<const FilterParams*>(wanted);
  }
};

// Is all that is wanted of a row what its top-k leaves? most: that the reader can bound
__device__ __forceinline__ bool ranks_first(const FilterParams& filters, int64_t vocab, int most) {
  return filters.by_rank(vocab) && filters.top_k <= most &&
         (filters.order != FilterOrder::kJoint || !filters.by_mass());
}

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
                                                 float* logit_of_x, PoolAhead* ahead) {
  const int lane = threadIdx.x % kWarpSize;
  const LogitRow logits = r.draft_row(i);
  const int32_t* ids = r.draft_ids(i);
  constexpr int kHeld = PoolAhead::kCount / kWarpSize;  // all loads are on their way at once
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
    for (int n = 0; n < kHeld; ++n) {
      ahead->id[lane + n * kWarpSize] = held_ids[n];
      ahead->logit[lane + n * kWarpSize] = held[n];
      if (!meet(held_ids[n], held[n])) held[n] = -INFINITY;
    }
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
                                                const RowSource<bf16>& source, PoolAhead* pool) {
  const SlotDraft draft(r, i, source);
  SlotAhead out{draft.x, 0, 0.0f, draft.logit, -1.0f, 0.0f, draft.status};
  if (out.x < 0) return out;
  if (r.q == DraftLaw::kPool) {
    float logit;
    const RowStats stats = pool_at_once(r, i, out.x, &logit, pool);
    out.draft_sum = stats.sum;
    out.draft_top = stats.top;
    out.q = draft_mass(stats, r.draft_temperature, logit);
  } else if (r.q == DraftLaw::kScalar) {
    out.q = scalar_mass(r.p.draft_logprob[r.b * r.p.drafts + i]);
  }
  if (!r.greedy()) out.share = mul_rn(verify_coin(r, i), out.q > 0.0f ? out.q : 1.0f);
  return out;
}

// A lane's share of a chunk.
__device__ __forceinline__ void load_tokens(const RowSource<bf16>& from, int chunk,
                                            Group<bf16> (&to)[kLaneGroups]) {
  const int token = chunk * kChunk + threadIdx.x % kWarpSize * kGroup;
  if (from.aligned && (chunk + 1) * kChunk <= from.vocab) {  // one look for all four
#pragma unroll
    for (int g = 0; g < kLaneGroups; ++g)
      to[g].words = load_words(from.data + token + g * kGroupStep);
  } else if (from.aligned && from.vocab % kGroup == 0) {  // token by token takes 2 us
#pragma unroll
    for (int g = 0; g < kLaneGroups; ++g)
      to[g].load_if(token + g * kGroupStep < from.vocab, from.data + token + g * kGroupStep);
  } else {
#pragma unroll
    for (int g = 0; g < kLaneGroups; ++g) to[g] = from.group(token + g * kGroupStep);
  }
}

// sum_chunk() of chunks `first`, `first` + `step` and so on of a row, of which chunk 0 is that at
// `at`.
__device__ __forceinline__ void sum_chunks(const RowSource<bf16>& source, bool greedy, float scale,
                                           const ChainWorkspace& chunks, int64_t at, int first,
                                           int last, int step) {
#pragma unroll 1
  for (int chunk = first; chunk < last; chunk += step) {
    Group<bf16> groups[kLaneGroups];
    load_tokens(source, chunk, groups);
    const int token = chunk * kChunk + threadIdx.x % kWarpSize * kGroup;
    sum_chunk(groups, token, greedy, true, scale, chunks, at + chunk);
  }
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
  out->race_mass = verdict.outcome == Outcome::kResidual && !verdict.one_hot
                       ? verdict.q
                       : race_mass(verdict, law, filter, slot, stats.sum);
}

// What becomes of a slot whose row has a cut.
__device__ __forceinline__ Slot judge_cut(const ChainRequest& r, const SlotAhead& slot,
                                          const RowLaw& law, const RowFilter& filter) {
  Slot verdict = slot_before_coin(r, -1, slot.x, slot.q);
  verdict.status |= slot.status;
  if (verdict.outcome == Outcome::kUndecided) verdict.outcome = cut_outcome(law, filter, slot);
  return verdict;
}

// The same of a row without filters, or one that is unusable.
static __device__ __noinline__ Slot judge_whole(const ChainRequest& r, int i, const SlotAhead& slot,
                                                const RowStats& stats) {
  if (stats.faults != 0) return {Outcome::kFail, stats.faults, true, 1.0f};
  Slot verdict = slot_before_coin(r, stats.argmax, slot.x, slot.q);
  verdict.status |= slot.status;
  if (verdict.outcome == Outcome::kUndecided)
    verdict.outcome = token_outcome(RowLaw(stats, r.temperature), FilterBounds(), slot.logit,
                                    verdict.q, verify_coin(r, i));
  return verdict;
}

// The statistics of a row whose chunks have been summed up, and of its draft what takes them. By
// one warp.
__device__ __forceinline__ RowStats sum_row(const ChainRequest& r, int i, const SlotAhead& slot,
                                            const ChainWorkspace& chunks, SlotVerdict* out) {
  uint32_t unused;
  const ChunkStats* row = chunks.row(r.b, i);
  const RowStats sums =
      combine_chunks(row, chunks.first + (row - chunks.chunks), static_cast<int>(chunks.row_chunks),
                     law_scale(r.temperature), r.greedy(), &unused);
  const bool usable = sums.faults == 0 && slot.x >= 0;
  if (threadIdx.x % kWarpSize == 0) {
    out->sum = sums.sum;
    out->logprob = usable ? RowLaw(sums, r.temperature).log_probability(slot.logit) : 0.0f;
  }
  return sums;
}

}  // namespace domino
