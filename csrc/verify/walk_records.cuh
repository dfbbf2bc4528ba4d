// What the launches of verify_chain leave about each row for the walk, and what the walk emits.
#pragma once

#include "verify/race.cuh"

namespace domino {

// Behind the chunks in the workspace, [batch, drafts + 1] each.
struct WalkWorkspace {
  JudgedRow* rows;
  int64_t* drawn;      // of position rules
  RowFilter* filters;  // these three of the block rule
  float* kept;         // p(x) of the row's draft
  float* threshold;    // h

  __host__ __device__ WalkWorkspace(const ChainWorkspace& chunks, int64_t batch, int64_t drafts)
      : rows(static_cast<JudgedRow*>(chunks.rest)),
        drawn(reinterpret_cast<int64_t*>(rows + batch * (drafts + 1))),
        filters(reinterpret_cast<RowFilter*>(drawn + batch * (drafts + 1))),
        kept(reinterpret_cast<float*>(filters + batch * (drafts + 1))),
        threshold(kept + batch * (drafts + 1)) {}
};

__device__ __forceinline__ JudgedRow load_row(const JudgedRow* row) {
  JudgedRow out;
  uint4* to = reinterpret_cast<uint4*>(&out);
#pragma unroll
  for (size_t n = 0; n < sizeof(out) / sizeof(uint4); ++n)
    to[n] = __ldcg(reinterpret_cast<const uint4*>(row) + n);
  return out;
}
__device__ __forceinline__ Outcome load_outcome(const JudgedRow* row) {
  return static_cast<Outcome>(__ldcg(reinterpret_cast<const int*>(&row->outcome)));
}

// The chain ends at the first row that cannot be used or has no draft.
__device__ __forceinline__ bool ends_chain(Outcome outcome) {
  return outcome == Outcome::kFail || outcome == Outcome::kDraw;
}

// The pads of request r behind slot `stop`, and its counts. Called by the cluster's first block.
__device__ __forceinline__ void emit_end(const ChainRequest& r, int stop, int64_t last,
                                         uint32_t status) {
  for (int64_t i = stop + (last >= 0 ? 1 : 0) + threadIdx.x; i <= r.p.drafts; i += blockDim.x) {
    r.p.tokens[r.b * (r.p.drafts + 1) + i] = -1;
    if (r.p.chosen_logprob != nullptr) r.p.chosen_logprob[r.b * (r.p.drafts + 1) + i] = 0.0f;
  }
  if (threadIdx.x == 0) emit_counts(r, stop, last, status);
}

__device__ __forceinline__ void emit_token(const ChainRequest& r, int i, int64_t token,
                                           float logprob) {
  r.p.tokens[r.b * (r.p.drafts + 1) + i] = token;
  if (r.p.chosen_logprob != nullptr) r.p.chosen_logprob[r.b * (r.p.drafts + 1) + i] = logprob;
}

// The draft law of a slot: one-hot or taken to be, or that of a dense row or a pool.
struct SlotQ {
  bool one_hot;
  float top;
  uint64_t sum;
};
__device__ __forceinline__ SlotQ slot_q(const JudgedRow& row) {
  return {(row.status & kTakenAsOneHot) != 0, row.draft.top, row.draft.sum};
}

// What the race of row i weighs its tokens by.
__device__ __forceinline__ DrawWeights draw_weights(const ChainRequest& r, int i, Outcome outcome,
                                                    const SlotQ& slot, const RowLaw& law,
                                                    const RowFilter& filter, float reach) {
  const bool replaces = outcome == Outcome::kResidual;
  const DraftLaw q = replaces && !slot.one_hot ? r.q : DraftLaw::kOneHot;
  const float inverse =
      filter.mass == 0 ? law.inverse_sum : div_rn(kFixedOne, static_cast<float>(filter.mass));
  return {law,
          filter,
          inverse,
          reach,
          replaces && slot.one_hot ? r.draft_token(i) : -1,
          q,
          q == DraftLaw::kOneHot ? law : RowLaw(slot.top, slot.sum, law_scale(r.draft_temperature)),
          q == DraftLaw::kOneHot ? LogitRow{nullptr, DType::kF32} : r.draft_row(i),
          q == DraftLaw::kPool ? r.draft_ids(i) : nullptr,
          static_cast<int>(r.p.pool)};
}

}  // namespace domino
