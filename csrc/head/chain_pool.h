// The pool of a draft: the ids that draft_chain scores in place of the whole vocabulary.
//
// A pool of M ids takes the best 16 of each of G = ceil(M / 16) groups, of the last one as many as
// are left. Runs of 16 neighbouring ids go to the groups in turn:
//
//   group g = {v < vocab_valid : v / 16 % G == g}        16G ids, a period, hold one run of each
//   pool[16g .. 16g + 15] = its ids of the largest base logits (of several slots: of their maxima),
//                           largest first, ties to the lowest id
//
// base logits as adjusted_base() has them, NaN as -inf. A pool of M = vocab_valid ids holds them
// all, one of M <= 16 the best M. One pass finds it, without a threshold or a second look; the
// winners of a trained drafter are in it as often as in the exact top M (bench/NOTES.md).
#pragma once

#include <cstdint>

#include "common/hd.h"

namespace domino {

constexpr int kGroupBest = 16;  // ids that a group sends to the pool
constexpr int kGroupRun = 16;   // neighbouring ids that belong to one group

struct PoolGroups {
  int64_t groups;
  DOMINO_HD explicit PoolGroups(int64_t pool_size)
      : groups((pool_size + kGroupBest - 1) / kGroupBest) {}
  DOMINO_HD int64_t period() const { return groups * kGroupRun; }
  DOMINO_HD int64_t group_of(int64_t v) const { return v / kGroupRun % groups; }
};

}  // namespace domino
