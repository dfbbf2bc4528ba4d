#include <algorithm>
#include <optional>
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

// The first tokens of a filtered row, and where the filters cut it.
struct ListedTokens {
  std::vector<uint64_t> words;
  ListedCut cut;

  ListedTokens(const VerifyShardParams& p, const ChainRequest& r, int i, const RowStats& stats) {
    const uint64_t last = last_listed(p, r.b, i);
    for (int64_t part = 0; part < p.parts; ++part) {
      const uint64_t* list = p.list(part, r.b, i);
      for (int64_t n = 0; n < p.listed && list[n] <= last && list[n] != kNoToken; ++n)
        words.push_back(list[n]);
    }
    std::sort(words.begin(), words.end());
    const RowLaw law(stats, r.temperature);
    std::vector<uint64_t> before{0};
    for (const uint64_t word : words)
      before.push_back(before.back() + to_fixed(law.weight(word_logit(word))));
    cut = cut_listed(words.data(), before.data(), static_cast<int>(words.size()), last == kNoToken,
                     stats, law, r.filters(), p.vocab, counts_values(p));
  }

  // fn(token, logit) for the shard's own that are kept.
  template <class Fn>
  void for_each(const VerifyShardParams& p, Fn fn) const {
    for (int n = 0; n < cut.kept; ++n) {
      const int64_t token = word_token(words[static_cast<size_t>(n)]);
      if (token >= p.vocab_start && token < p.vocab_start + p.shard_vocab)
        fn(token, word_logit(words[static_cast<size_t>(n)]));
    }
  }

  uint64_t race(const VerifyShardParams& p, const ShardWeights& weights,
                const RaceNoise& noise) const {
    uint64_t best = kNoWinner;
    for (int n = 0; n < cut.kept; ++n)
      best = std::min(best, listed_key(p, weights, noise, words[static_cast<size_t>(n)]));
    return best;
  }
};

// The likeliest tokens of a row of the shard, in order.
void write_list(const VerifyShardParams& p, const ChainRequest& r, const LogitRow& row,
                uint64_t* list) {
  if (!r.filters().any(p.vocab)) return;
  std::vector<uint64_t> words;
  for (int64_t x = 0; x < p.shard_vocab; ++x)
    if (row.at(x) > -INFINITY) words.push_back(token_word(row.at(x), p.vocab_start + x));
  const int64_t count = std::min<int64_t>(p.listed, static_cast<int64_t>(words.size()));
  std::partial_sort_copy(words.begin(), words.end(), list, list + count);
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
      std::fill_n(p.list(0, b, n), p.listed, kNoToken);
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
        if (!index.of_draft && stats.faults == 0) write_list(p, r, row, p.list(0, b, n));
      }
      p.partial(0, b, n) = out;
    }
  }
  return kOk;
}

int verify_shard_cpu(const VerifyShardParams& params) {
  const VerifyShardParams p = in_whole_ids(params);
  for (int64_t b = 0; b < p.batch; ++b) {
    const ChainRequest r(p, b);
    const bool filtered = r.filters().any(p.vocab);
    bool over = false;  // as the kernel has it, never of a filtered request
    for (int i = 0; i <= p.drafts; ++i) {
      uint64_t keys[2] = {kNoWinner, kNoWinner};
      ShardSlot s = judge_shard_slot(
          p, r, i, [&](int64_t x, float* logit) { return pool_stats(r, i, x, logit); });
      std::optional<ListedTokens> tokens;
      if (filtered && s.target.faults == 0) {
        tokens.emplace(p, r, i, s.target);
        filter_slot(r, i, tokens->cut, &s);
      }
      const auto race_for = [&](bool replaces, Outcome outcome) {
        const RaceNoise noise = race_noise(r, i, outcome);
        if (!tokens) return race(p, ShardRow(r, i), ShardWeights(r, i, s, replaces), noise);
        return tokens->race(p, ShardWeights(r, i, s, replaces, &tokens->cut.filter), noise);
      };
      if (has_shard_race(r, s, over)) {
        const bool replaces = s.slot.outcome == Outcome::kResidual;
        keys[0] = race_for(replaces, s.slot.outcome);
        if (replaces && keys[0] == kNoWinner) keys[1] = race_for(false, Outcome::kDraw);
      }
      over |= !filtered && !s.accepts();
      const RowFilter* filter = tokens ? &tokens->cut.filter : nullptr;
      write_shard_slot(p, r, i, s, filter, keys);
      const float reach = shard_reach(p, b, i);
      if (reach < 0.0f) continue;
      const ShardRow row(r, i);
      const ShardWeights weights(r, i, s, true, filter, reach);
      const bool dense = weights.q == DraftLaw::kDense;
      ShardRest rest = rest_of_pool(p, row, s, weights, filter, 0, 1);
      const auto add = [&](int64_t token, float logit) {
        rest.add(weights, logit, true, weights.draft.probability(weights.draft_row.at(token)));
      };
      if (dense && tokens) tokens->for_each(p, add);
      for (int64_t x = 0; dense && !tokens && x < p.shard_vocab; ++x)
        add(p.vocab_start + x, row.at(p.vocab_start + x));
      write_shard_rest(p, b, i, rest, dense);
      const auto race_with = [&](const ShardWeights& of, Outcome outcome) {
        const RaceNoise noise = race_noise(r, i, outcome);
        return tokens ? tokens->race(p, of, noise) : race(p, row, of, noise);
      };
      keys[0] = race_with(weights, Outcome::kResidual);
      if (keys[0] == kNoWinner)
        keys[1] = race_with(ShardWeights(r, i, s, false, filter), Outcome::kDraw);
      write_shard_keys(p, r, i, s, keys);
    }
  }
  return kOk;
}

}  // namespace domino
