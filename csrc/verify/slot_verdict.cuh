// What is found of a row (verify_cut.cuh, verify_row.cuh, verify_listed.cuh) tells the walk
// (verify_draw.cuh).
#pragma once

#include "verify/walk_records.cuh"

namespace domino {

struct alignas(16) SlotVerdict {
  Outcome outcome;
  uint32_t status;
  float logprob;     // of the draft
  int32_t winner;    // of the row's race, -1: it has not been run
  RowFilter filter;  // a negative cut_id: of the tokens that equal cut_logit the first -cut_id
  uint64_t sum;      // of the target
  float top;
  int32_t argmax;
  uint64_t draft_sum;  // of a pool
  float draft_top;
  float race_mass;  // of what a race without q draws from, about; behind a coin that q lost, q, or
                    // from verify_row with a pool what q leaves
};
static_assert(sizeof(SlotVerdict) == 64);

// Behind the chunks in the workspace: [batch, drafts + 1].
__host__ __device__ inline SlotVerdict* slot_verdicts(const ChainWorkspace& chunks) {
  return static_cast<SlotVerdict*>(chunks.rest);
}

}  // namespace domino
