#include <algorithm>

#include "verify/verify_shard.h"

namespace domino {

namespace {

RowStats pool_stats(const ChainRequest& r, int i, int64_t x, float* logit_of_x) {
  const LogitRow logits = r.draft_row(i);
  const int32_t* ids = r.draft_ids(i);
  const auto used = [&](int64_t m) { return ids[m] >= 0 && ids[m] < r.p.vocab; };
  RowStats out{0, -INFINITY, -1, 0, 0};
  *logit_of_x = -INFINITY;
  bool has_nan = false;
  for (int64_t m = 0; m < r.p.pool; ++m) {
    if (!used(m)) continue;
    const float logit = logits.at(m);
    has_nan |= logit != logit;
    out.top = std::max(out.top, logit);
    if (ids[m] == x) *logit_of_x = logit;
  }
  out.faults = has_nan ? kNonFinite : row_faults(out.top);
  if (out.faults != 0) return out;
  const RowLaw law(out.top, 1, law_scale(r.draft_temperature));
  for (int64_t m = 0; m < r.p.pool; ++m)
    if (used(m)) out.sum += to_fixed(law.weight(logits.at(m)));
  return out;
}

uint64_t race(const VerifyShardParams& p, const LogitRow& row, const ShardWeights& weights,
              const RaceNoise& noise) {
  uint64_t best = kNoWinner;
  for (int64_t first = 0; first < p.vocab; first += 4) {
    const NoiseWords four = noise.words(static_cast<uint32_t>((p.vocab_start + first) / 4));
    for (int64_t local = first; local < std::min(first + 4, p.vocab); ++local) {
      const int64_t token = p.vocab_start + local;
      const float upper = weights.upper(row.at(local), token);
      if (!(upper > 0.0f)) continue;
      best = std::min(best, race_key(weights.exact(upper, token), four.word[local - first], token));
    }
  }
  return best;
}

}  // namespace

int verify_shard_cpu(const VerifyShardParams& p) {
  const VerifyChainParams whole = whole_call(p);
  for (int64_t b = 0; b < p.batch; ++b) {
    const ChainRequest r(whole, b);
    bool over = false;
    for (int i = 0; i <= p.drafts; ++i) {
      uint64_t keys[2] = {kNoWinner, kNoWinner};
      ShardSlot s{};
      s.slot.outcome = Outcome::kFail;
      s.status = r.faults;
      s.target.faults = 1;
      if (i < r.rows) {
        s = judge_shard_slot(p, r, i,
                             [&](int64_t x, float* logit) { return pool_stats(r, i, x, logit); });
        const Outcome outcome = s.slot.outcome;
        const bool scalar = r.q == DraftLaw::kScalar && !s.slot.one_hot;
        if (outcome == Outcome::kPosition || (!over && outcome == Outcome::kDraw) ||
            (!over && outcome == Outcome::kResidual && !scalar))
          keys[0] = race(p, r.target_row(i), ShardWeights(r, i, s, outcome == Outcome::kResidual),
                         race_noise(r, i, outcome));
        if (!over && outcome == Outcome::kResidual && !scalar && keys[0] == kNoWinner)
          keys[1] = race(p, r.target_row(i), ShardWeights(r, i, s, false),
                         race_noise(r, i, Outcome::kDraw));
        over |= !s.accepts();
      }
      write_shard_slot(p, r, i, s, keys);
    }
  }
  return kOk;
}

}  // namespace domino
