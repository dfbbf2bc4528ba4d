// Second launch of verify_chain, first step: a warp puts the chunks of a row together and judges
// its draft.
#pragma once

#include "common/reduce.cuh"
#include "verify/chain_walk.h"
#include "verify/row_chunks.cuh"

namespace domino {

struct alignas(16) JudgedRow {
  RowStats target;
  RowStats draft;  // of the dense row or the pool
  float logprob;   // of the draft
  float q;         // of the draft, 1 where it is taken as one-hot
  Outcome outcome;
  uint32_t status;
};
constexpr uint32_t kTakenAsOneHot = 1u << 16;  // in JudgedRow::status, above the status bits

__device__ __forceinline__ ChunkStats load_chunk(const ChunkStats* chunk) {
  const uint4 words = __ldcg(reinterpret_cast<const uint4*>(chunk));
  return {words.x, {words.y, words.z, words.w}};
}

// The statistics of a row from its chunks. lane_key: the greatest of this lane's keys; each is that
// of another token.
__device__ __forceinline__ RowStats combine_chunks(const ChunkStats* chunks, const uint32_t* first,
                                                   int count, float scale, bool wants_first,
                                                   uint32_t* lane_key,
                                                   DigitSums* digits = nullptr) {
  constexpr int kHeld = 5;  // of 32 lanes: 163,840 tokens are read once
  const int lane = threadIdx.x % kWarpSize;
  ChunkStats held[kHeld];
  uint32_t key = 0;
#pragma unroll
  for (int n = 0; n < kHeld; ++n) {
    const int c = lane + n * kWarpSize;
    held[n] = c < count ? load_chunk(chunks + c) : ChunkStats{0, {0, 0, 0}};
    key = max(key, held[n].key);
  }
#pragma unroll 1
  for (int c = lane + kHeld * kWarpSize; c < count; c += kWarpSize)
    key = max(key, load_chunk(chunks + c).key);
  *lane_key = key;
  const uint32_t top_key = __reduce_max_sync(kFullMask, key);
  RowStats stats{0, key_logit(top_key), 0, 0, 0};
  stats.faults = row_faults(stats.top);
  if (stats.faults != 0) return stats;

  if (wants_first) {
    uint32_t best = ~0u;
#pragma unroll
    for (int n = 0; n < kHeld; ++n) {
      const int c = lane + n * kWarpSize;
      if (c < count && held[n].key == top_key) best = min(best, __ldcg(first + c));
    }
#pragma unroll 1
    for (int c = lane + kHeld * kWarpSize; c < count; c += kWarpSize)
      if (__ldcg(&chunks[c].key) == top_key) best = min(best, __ldcg(first + c));
    stats.argmax = static_cast<int32_t>(__reduce_min_sync(kFullMask, best));
  }

  const RowExponent exponent(stats.top, scale);
  DigitSums sums;
  const auto add = [&](const ChunkStats& chunk) {
    if (chunk.key <= kEmptyKey) return;
    if (exponent.huge) {
      if (chunk.key == top_key) sums.at[0] += chunk.digits[0];
      return;
    }
    const RowExponent part(key_logit(chunk.key), scale);
    if (!part.huge) sums.add(chunk.digits, exponent.grid() - part.grid());
  };
#pragma unroll
  for (int n = 0; n < kHeld; ++n) add(held[n]);
#pragma unroll 1
  for (int c = lane + kHeld * kWarpSize; c < count; c += kWarpSize) add(load_chunk(chunks + c));
#pragma unroll
  for (int n = 0; n < 3; ++n) sums.at[n] = warp_sum(sums.at[n]);
  stats.sum = exponent.huge ? sums.at[0] << 40 : sums.fixed(exponent);
  if (digits != nullptr) *digits = sums;
  return stats;
}

// Mass of some tokens that top-k and min-p keep: the greatest of up to k disjoint parts of the row.
__device__ __forceinline__ float head_mass(const FilterParams& filters, const RowLaw& law,
                                           uint32_t lane_key) {
  const int lane = threadIdx.x % kWarpSize;
  int lanes = 1;  // to a part
  while (filters.by_rank(INT64_MAX) && filters.top_k * lanes < kWarpSize) {
    lane_key = max(lane_key, __shfl_xor_sync(kFullMask, lane_key, lanes));
    lanes *= 2;
  }
  const float logit = key_logit(lane_key);
  const bool counts = lane % lanes == 0 && lane_key > kEmptyKey &&
                      law.exponent(logit) >= filters.lowest_exponent(law);
  return warp_sum(counts ? law.probability(logit) : 0.0f);
}

// The law of a pool, and the logit of x in it (-inf where it is not there).
__device__ __forceinline__ RowStats pool_stats(const ChainRequest& r, int i, int64_t x,
                                               float* logit_of_x) {
  const int lane = threadIdx.x % kWarpSize;
  const LogitRow logits = r.draft_row(i);
  const int32_t* ids = r.draft_ids(i);
  uint32_t key = 0;
  float found = -INFINITY;
  for (int m = lane; m < r.p.pool; m += kWarpSize) {
    const int32_t id = ids[m];
    if (id < 0 || id >= r.p.vocab) continue;
    const float logit = logits.at(m);
    key = max(key, logit_key(logit));
    if (id == x) found = logit;
  }
  RowStats stats{0, 0.0f, -1, 0, 0};
  key = __reduce_max_sync(kFullMask, key);
  stats.top = key == 0 ? -INFINITY : key_logit(key);
  stats.faults = row_faults(stats.top);
  const unsigned has = __ballot_sync(kFullMask, found != -INFINITY);
  *logit_of_x = has != 0 ? __shfl_sync(kFullMask, found, __ffs(has) - 1) : -INFINITY;
  if (stats.faults != 0) return stats;
  const RowLaw law(stats.top, 1, law_scale(r.draft_temperature));
  for (int m = lane; m < r.p.pool; m += kWarpSize)
    if (ids[m] >= 0 && ids[m] < r.p.vocab) stats.sum += to_fixed(law.weight(logits.at(m)));
  stats.sum = warp_sum(stats.sum);
  return stats;
}

// The draft of slot i and its logit, which do not take the launch in front.
struct SlotDraft {
  int64_t x = -1;
  uint32_t status = 0;
  float logit = -INFINITY;

  SlotDraft() = default;
  template <class Source>
  __device__ __forceinline__ SlotDraft(const ChainRequest& r, int i, const Source& source) {
    x = i < r.rows - 1 ? r.draft_token(i) : -1;
    if (x < 0 || x >= r.p.vocab) {
      status = x == -1 ? 0u : kBadId;
      x = -1;
    }
    if (x >= 0) logit = source.at(x);
  }
};

// All lanes of a warp call it and get the same.
__device__ __forceinline__ JudgedRow judge_row(const ChainRequest& r,
                                               const ChainWorkspace& workspace, int i,
                                               const SlotDraft& slot_draft) {
  JudgedRow out{};
  const int64_t x = slot_draft.x;
  const float logit = slot_draft.logit;
  out.status = slot_draft.status;
  const int chunks = static_cast<int>(workspace.row_chunks);
  const ChunkStats* row = workspace.row(r.b, i);
  float draft_logit = -INFINITY, q = -1.0f;
  uint32_t lane_key = 0, unused;
  // one copy of the code for the row of p and, where q is dense, that of q
  const bool dense = x >= 0 && r.q == DraftLaw::kDense;
#pragma unroll 1
  for (int of_draft = dense ? 1 : 0; of_draft >= 0; --of_draft) {
    const ChunkStats* from = of_draft ? workspace.row(r.b, r.p.drafts + 1 + i) : row;
    const float scale = law_scale(of_draft ? r.draft_temperature : r.temperature);
    out.target = combine_chunks(from, workspace.first + (row - workspace.chunks), chunks, scale,
                                !of_draft && r.greedy(), of_draft ? &unused : &lane_key);
    if (of_draft) out.draft = out.target;
  }
  if (out.target.faults != 0) {
    out.outcome = Outcome::kFail;
    out.status = out.target.faults;
    return out;
  }
  if (dense) {
    draft_logit = r.draft_row(i).at(x);
    q = draft_mass(out.draft, r.draft_temperature, draft_logit);
  } else if (x >= 0 && r.q == DraftLaw::kPool) {
    out.draft = pool_stats(r, i, x, &draft_logit);
    q = draft_mass(out.draft, r.draft_temperature, draft_logit);
  } else if (x >= 0 && r.q == DraftLaw::kScalar) {
    q = scalar_mass(r.p.draft_logprob[r.b * r.p.drafts + i]);
  }
  const RowLaw law(out.target, r.temperature);
  FilterBounds bounds;
  const FilterParams filters = r.filters();
  if (filters.any(r.p.vocab))
    bounds = FilterBounds(filters, law, r.p.vocab, head_mass(filters, law, lane_key));
  const Slot slot = decide_slot(r, i, out.target, x, logit, q, bounds);
  out.outcome = slot.outcome;
  out.status |= slot.status | (slot.one_hot ? kTakenAsOneHot : 0u);
  out.q = slot.q;
  out.logprob = x >= 0 ? law.log_probability(logit) : 0.0f;
  return out;
}

}  // namespace domino
