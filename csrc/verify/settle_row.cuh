// What becomes of a row behind listed_row() in end_by_value.cuh: the cluster finds out what its
// verdict leaves open, where ties with the cut end and the token that the row draws.
#pragma once

#include "verify/draw_token.cuh"

namespace domino {

struct SettledRow {
  bool stops;       // the draft is not accepted
  int64_t token;    // that follows then; -1: none
  uint32_t status;  // of the row
};

// All threads of the cluster call it and get the same.
template <bool kByPosition>
__device__ __forceinline__ SettledRow settle_row(const RowCluster& cluster, const ChainRequest& r,
                                                 int i, const SlotVerdict& slot,
                                                 const BlockNoise& noise) {
  SettledRow out{slot.outcome != Outcome::kAccept, -1, slot.status & 0xffu};
  Outcome outcome = slot.outcome;
  if (!out.stops || outcome == Outcome::kFail) return out;
  if (outcome == Outcome::kArgmax) {
    out.token = slot.argmax;
    return out;
  }
  if (outcome == Outcome::kUndecided) {  // the draft ties with the cut
    const RowSource<bf16> source(r.target_row(i), RowEdits{}, static_cast<int>(r.p.vocab));
    const int64_t x = r.draft_token(i);
    out.stops = count_ties(cluster, source, slot.filter.cut_logit, x) > -slot.filter.cut_id;
    if (!out.stops) return out;
    outcome = Outcome::kResidual;
  }
  if (outcome == Outcome::kResidual && r.q == DraftLaw::kScalar &&
      (slot.status & kTakenAsOneHot) == 0) {
    out.status |= kNeedsResidual;
    return out;
  }
  out.token = slot.winner;
#pragma unroll 1
  while (out.token < 0) {
    RaceNoise race{noise, kPositionDraw, 0};
    if constexpr (kByPosition)
      race.noise = r.position_noise(i);
    else
      race = {noise, race_noise(r, i, outcome).purpose, i};
    out.token = draw_token(cluster, r, i, outcome, slot, race);
    if (out.token >= 0 || outcome == Outcome::kDraw) break;
    out.status |= kZeroResidual;  // nothing was left to replace the draft
    outcome = Outcome::kDraw;
  }
  if constexpr (kByPosition) out.stops = i == r.rows - 1 || out.token != r.draft_token(i);
  return out;
}

}  // namespace domino
