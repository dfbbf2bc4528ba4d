#include <algorithm>
#include <vector>

#include "verify/row_cut_cpu.h"
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

uint64_t race(const VerifyShardParams& p, const ShardRow& row, const ShardWeights& weights,
              const RaceNoise& noise) {
  uint64_t best = kNoWinner;
  const int64_t end = p.vocab_start + p.shard_vocab;
  for (int64_t first = p.vocab_start; first < end; first += 4) {
    const NoiseWords four = noise.words(static_cast<uint32_t>(first / 4));
    for (int64_t token = first; token < std::min(first + 4, end); ++token) {
      const float upper = weights.upper(row.at(token), token);
      if (!(upper > 0.0f)) continue;
      best = std::min(best, race_key(weights.exact(upper, token), four.word[token - first], token));
    }
  }
  return best;
}

}  // namespace

int verify_shard_rows_cpu(const VerifyShardParams& p) {
  if (p.shard_vocab < 1 || p.shard_vocab > kMaxVocab) return kBadArgument;
  const VerifyChainParams rows = rows_of_shard(p);
  for (int64_t b = 0; b < p.batch; ++b) {
    const ChainRequest r(rows, b);
    for (int64_t n = 0; n < p.rows_per_request(); ++n) {
      const ShardRowIndex index(p, n);
      RowPartial out = no_partial();
      if (index.exists(r)) {
        const std::vector<float> edited =
            index.of_draft ? std::vector<float>() : edited_row(r, index.i);
        const LogitRow row = !edited.empty()  ? LogitRow{edited.data(), DType::kF32}
                             : index.of_draft ? r.draft_row(index.i)
                                              : r.target_row(index.i);
        const RowStats stats = row_stats_cpu(row, p.shard_vocab, index.scale(r), &out.sums);
        out.top = stats.faults == kNonFinite ? NAN : stats.top;
        out.argmax = static_cast<int32_t>(stats.argmax + p.vocab_start);
        out.chosen = index.chosen(r);
      }
      p.partials[b * p.rows_per_request() + n] = out;
    }
  }
  return kOk;
}

int verify_shard_cpu(const VerifyShardParams& params) {
  const VerifyShardParams p = in_whole_ids(params);
  for (int64_t b = 0; b < p.batch; ++b) {
    const ChainRequest r(p, b);
    bool over = false;
    for (int i = 0; i <= p.drafts; ++i) {
      uint64_t keys[2] = {kNoWinner, kNoWinner};
      const ShardSlot s = judge_shard_slot(
          p, r, i, [&](int64_t x, float* logit) { return pool_stats(r, i, x, logit); });
      if (has_shard_race(r, s, over)) {
        const Outcome outcome = s.slot.outcome;
        const bool replaces = outcome == Outcome::kResidual;
        const ShardRow row(r, i);
        keys[0] = race(p, row, ShardWeights(r, i, s, replaces), race_noise(r, i, outcome));
        if (replaces && keys[0] == kNoWinner)
          keys[1] = race(p, row, ShardWeights(r, i, s, false), race_noise(r, i, Outcome::kDraw));
      }
      over |= !s.accepts();
      write_shard_slot(p, r, i, s, keys);
    }
  }
  return kOk;
}

}  // namespace domino
