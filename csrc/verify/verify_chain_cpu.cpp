#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "verify/block_walk.h"
#include "verify/chain_walk.h"
#include "verify/row_cut_cpu.h"
#include "verify/row_stats.h"

// The loops over tokens are worth a second compilation with AVX2 and FMA; the bits are the same in
// both.
#if defined(__x86_64__) && defined(__GLIBC__) && __GNUC__ >= 12 && !defined(__clang__)
#define DOMINO_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define DOMINO_CLONES
#endif

namespace domino {

namespace {

// A target row as the walk sees it: edited, with its law and what the filters leave.
struct TargetRow {
  std::vector<float> edited;
  LogitRow logits;
  RowStats stats;
  RowLaw law;
  bool filtered;
  RowFilter filter;

  TargetRow(const ChainRequest& r, int i)
      : edited(edited_row(r, i)),
        logits(edited.empty() ? r.target_row(i) : LogitRow{edited.data(), DType::kF32}),
        stats(row_stats_cpu(logits, r.p.vocab, law_scale(r.temperature))),
        law(stats, r.temperature),
        filtered(stats.faults == 0 && r.filters().any(r.p.vocab)) {
    if (filtered) filter = find_cut(logits, r.p.vocab, stats, law, r.filters(), counts_values(r.p));
  }

  uint64_t mass() const { return filtered ? filter.mass : stats.sum; }
  bool keeps(float logit, int64_t token) const { return !filtered || filter.keeps(logit, token); }
  // One over the mass, so that p = weight * inverse.
  float inverse() const {
    return filtered ? div_rn(kFixedOne, static_cast<float>(filter.mass)) : law.inverse_sum;
  }
  float probability(int64_t token) const {
    const float logit = logits.at(token);
    return keeps(logit, token) ? mul_rn(law.weight(logit), inverse()) : 0.0f;
  }
};

// The law that draft i was sampled from.
struct DraftRow {
  DraftLaw kind;
  LogitRow logits;
  const int32_t* ids;
  int64_t count;  // of logits: the vocabulary, or the pool
  RowStats stats;

  DraftRow(const ChainRequest& r, int i)
      : kind(r.q),
        logits(r.draft_row(i)),
        ids(kind == DraftLaw::kPool ? r.draft_ids(i) : nullptr),
        count(kind == DraftLaw::kPool ? r.p.pool : r.p.vocab) {
    const float scale = law_scale(r.draft_temperature);
    stats = kind == DraftLaw::kPool ? pool_stats(r.p.vocab, scale)
                                    : row_stats_cpu(logits, count, scale);
  }

  // q in all of the vocabulary.
  std::vector<float> dense(int64_t vocab, float temperature) const {
    std::vector<float> out(static_cast<size_t>(vocab), 0.0f);
    const RowLaw law(stats, temperature);
    for (int64_t n = 0; n < count; ++n) {
      const int64_t x = ids != nullptr ? ids[n] : n;
      if (x >= 0 && x < vocab) out[static_cast<size_t>(x)] = law.probability(logits.at(n));
    }
    return out;
  }

  // Of token x; 0 where it has none, or where the row is no law.
  float mass(int64_t x, float temperature) const {
    if (stats.faults != 0) return 0.0f;
    int64_t at = x;
    if (ids != nullptr) {
      at = std::find(ids, ids + count, static_cast<int32_t>(x)) - ids;
      if (at == count) return 0.0f;
    }
    return draft_mass(stats, temperature, logits.at(at));
  }

 private:
  RowStats pool_stats(int64_t vocab, float scale) const {
    RowStats out{0, -INFINITY, 0, 0, 0};
    const auto used = [&](int64_t n) { return ids[n] >= 0 && ids[n] < vocab; };
    for (int64_t n = 0; n < count; ++n) {
      const float logit = logits.at(n);
      if (!used(n)) continue;
      if (!(logit < INFINITY)) out.faults = kNonFinite;
      out.top = logit > out.top ? logit : out.top;
    }
    if (out.faults == 0) out.faults = row_faults(out.top);
    if (out.faults != 0) return out;
    const RowLaw law(out.top, static_cast<uint64_t>(kFixedOne), scale);
    for (int64_t n = 0; n < count; ++n)
      if (used(n)) out.sum += to_fixed(law.weight(logits.at(n)));
    return out;
  }
};

DOMINO_CLONES void tile_weights(const RowLaw& law, const float* logits, int count, float* weights) {
  for (int j = 0; j < count; ++j) weights[j] = law.weight(logits[j]);
}

DOMINO_CLONES void tile_noise(const RaceNoise& noise, int64_t first, int count, uint32_t* words) {
  for (int g = 0; 4 * g < count; ++g) {
    const NoiseWords four = noise.words(static_cast<uint32_t>(first / 4 + g));
    for (int lane = 0; lane < 4; ++lane) words[4 * g + lane] = four.word[lane];
  }
}

// race_key of each token of a tile but for its id: the least order wins.
DOMINO_CLONES uint32_t tile_race(const float* weights, const uint32_t* words, int count,
                                 uint32_t* orders) {
  uint32_t best = kNoOrder;
  for (int j = 0; j < count; ++j) {
    orders[j] = race_order(weights[j], words[j]);
    best = std::min(best, orders[j]);
  }
  return best;
}

// Races the tokens of p, or of relu(reach p - q) where there is a q; `without` does not take part.
// Returns -1 where no token has weight.
int64_t race(const TargetRow& row, int64_t vocab, const RaceNoise& noise, int64_t without,
             const std::vector<float>& q = {}, float reach = 1.0f) {
  float logits[kTile], weights[kTile];
  uint32_t words[kTile], orders[kTile], best = kNoOrder;
  int64_t winner = -1;
  for (int64_t first = 0; first < vocab; first += kTile) {
    const int count = load_tile(row.logits, first, vocab, logits);
    tile_weights(row.law, logits, count, weights);
    if (row.filtered)
      for (int j = 0; j < count; ++j)
        if (!row.filter.keeps(logits[j], first + j)) weights[j] = 0.0f;
    if (!q.empty()) {
      const float inverse = row.inverse();
      const float* q_tile = q.data() + first;
      for (int j = 0; j < count; ++j)
        weights[j] = block_rest(reach, mul_rn(weights[j], inverse), q_tile[j]);
    }
    if (without >= first && without < first + count) weights[without - first] = 0.0f;
    tile_noise(noise, first, count, words);
    const uint32_t order = tile_race(weights, words, count, orders);
    if (order < best) {
      best = order;
      winner = first + (std::find(orders, orders + count, order) - orders);
    }
  }
  return winner;
}

// One request: where its walk stops, the token that it finds there (-1: none), and the status.
class Walk {
 public:
  int stop = 0;
  int64_t last = -1;
  uint32_t status;

  explicit Walk(const ChainRequest& request) : status(request.faults), r_(request) {
    if (r_.rows == 0) return;
    if (r_.by_block())
      by_block();
    else
      by_slot();
  }

  const TargetRow& target(int i) {
    while (static_cast<int>(rows_.size()) <= i)
      rows_.push_back(std::make_unique<TargetRow>(r_, static_cast<int>(rows_.size())));
    return *rows_[static_cast<size_t>(i)];
  }

 private:
  const ChainRequest& r_;
  std::vector<std::unique_ptr<TargetRow>> rows_;

  // The draft of slot i, -1 where the chain ends there; then `bad` says whether it should not.
  int64_t draft(int i, uint32_t* bad) const {
    const int64_t x = i < r_.rows - 1 ? r_.draft_token(i) : -1;
    if (x >= 0 && x < r_.p.vocab) return x;
    *bad |= x == -1 ? 0u : kBadId;
    return -1;
  }

  // q(x) of slot i; negative where the request has no q.
  float draft_probability(int i, int64_t x) const {
    if (r_.q == DraftLaw::kOneHot) return -1.0f;
    if (r_.q == DraftLaw::kScalar) return scalar_mass(r_.p.draft_logprob[r_.b * r_.p.drafts + i]);
    return DraftRow(r_, i).mass(x, r_.draft_temperature);
  }

  void by_slot() {
    for (;; ++stop) {
      const TargetRow& row = target(stop);
      if (row.stats.faults != 0) {
        status |= row.stats.faults;
        return;
      }
      const int64_t x = draft(stop, &status);
      const float logit = x >= 0 ? row.logits.at(x) : 0.0f;
      const float q = x >= 0 && !r_.greedy() ? draft_probability(stop, x) : -1.0f;
      const Slot slot = decide_slot(r_, stop, row.stats, x, logit, q, FilterBounds());
      status |= slot.status;
      Outcome outcome = slot.outcome;
      if (row.filtered && r_.p.residual_slot == nullptr &&
          (outcome == Outcome::kAccept || outcome == Outcome::kResidual))
        outcome = filtered_outcome(row.law, row.filter, logit, x, slot.q, verify_coin(r_, stop));
      if (outcome == Outcome::kPosition) {
        last = race(row, r_.p.vocab, race_noise(r_, stop, outcome), -1);
        if (last != x) return;
        last = -1;
        continue;
      }
      if (outcome == Outcome::kAccept) continue;
      if (outcome == Outcome::kArgmax) last = row.stats.argmax;
      if (outcome == Outcome::kDraw) draw();
      if (outcome == Outcome::kResidual) replace(x, slot.one_hot, 1.0f);
      return;
    }
  }

  void by_block() {
    std::vector<float> reach{1.0f}, threshold;
    std::vector<uint32_t> found;
    std::vector<bool> one_hot;
    int n = 0;
    for (;; ++n) {
      const TargetRow& row = target(n);
      found.push_back(row.stats.faults);
      if (found.back() != 0) break;
      const int64_t x = draft(n, &found.back());
      if (x < 0) break;
      const float q = draft_probability(n, x);
      one_hot.push_back(!(q > 0.0f));
      if (one_hot.back()) found.back() |= kBadDraftLaw;
      threshold.push_back(
          block_threshold(rest(row, n, x, one_hot.back(), reach.back()), reach.back()));
      reach.push_back(next_reach(reach.back(), row.probability(x), one_hot.back() ? 1.0f : q));
    }
    threshold.push_back(reach.back());
    for (stop = n; stop > 0; --stop)
      if (verify_coin(r_, stop - 1) <= threshold[static_cast<size_t>(stop)]) break;
    for (int i = 0; i <= stop; ++i) status |= found[static_cast<size_t>(i)];
    if (stop < n)
      replace(r_.draft_token(stop), one_hot[static_cast<size_t>(stop)],
              reach[static_cast<size_t>(stop)]);
    else if (target(n).stats.faults == 0)
      draw();
  }

  // Sum of relu(reach p - q) over row i, in fixed point.
  uint64_t rest(const TargetRow& row, int i, int64_t x, bool one_hot, float reach) const {
    if (one_hot) return block_rest_outside(reach, inside(row, x), row.mass());
    const DraftRow draft(r_, i);
    const RowLaw q(draft.stats, r_.draft_temperature);
    uint64_t sum = 0, covered = 0;
    for (int64_t n = 0; n < draft.count; ++n) {
      const int64_t token = draft.ids != nullptr ? draft.ids[n] : n;
      if (token < 0 || token >= r_.p.vocab) continue;
      sum += block_rest_fixed(reach, row.probability(token), q.probability(draft.logits.at(n)));
      covered += inside(row, token);
    }
    if (draft.ids == nullptr) return sum;
    return sum + block_rest_outside(reach, covered, row.mass());
  }

  static uint64_t inside(const TargetRow& row, int64_t token) {
    const float logit = row.logits.at(token);
    return row.keeps(logit, token) ? to_fixed(row.law.weight(logit)) : 0;
  }

  void draw() { last = race(target(stop), r_.p.vocab, race_noise(r_, stop, Outcome::kDraw), -1); }

  void replace(int64_t x, bool one_hot, float reach) {
    if (!one_hot && r_.q == DraftLaw::kScalar) {
      status |= kNeedsResidual;
      return;
    }
    const RaceNoise noise = race_noise(r_, stop, Outcome::kResidual);
    std::vector<float> q;
    if (!one_hot) q = DraftRow(r_, stop).dense(r_.p.vocab, r_.draft_temperature);
    last = race(target(stop), r_.p.vocab, noise, one_hot ? x : -1, q, reach);
    if (last < 0) {
      status |= kZeroResidual;
      draw();
    }
  }
};

// The likeliest tokens of a row, ties by id.
void write_top(const VerifyChainParams& p, const TargetRow& row, int32_t* ids, float* logprobs) {
  const int64_t count = std::min(p.top_logprobs, p.vocab);
  std::vector<int32_t> order(static_cast<size_t>(p.vocab));
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](int32_t a, int32_t b) {
    const float x = row.logits.at(a), y = row.logits.at(b);
    return x > y || (x == y && a < b);
  });
  for (int64_t n = 0; n < count; ++n) {
    if (row.logits.at(order[static_cast<size_t>(n)]) == -INFINITY) break;
    ids[n] = order[static_cast<size_t>(n)];
    logprobs[n] = row.law.log_probability(row.logits.at(ids[n]));
  }
}

void verify_request(const VerifyChainParams& p, int64_t b) {
  const ChainRequest r(p, b);
  Walk walk(r);
  for (int i = 0; i <= p.drafts; ++i) {
    const int64_t at = b * (p.drafts + 1) + i;
    const int64_t token = i < walk.stop ? r.draft_token(i) : i == walk.stop ? walk.last : -1;
    p.tokens[at] = token;
    if (p.chosen_logprob != nullptr) {
      p.chosen_logprob[at] = 0.0f;
      if (token >= 0) {
        const TargetRow& row = walk.target(i);
        p.chosen_logprob[at] = row.law.log_probability(row.logits.at(token));
      }
    }
    if (p.top_ids == nullptr) continue;
    std::fill_n(p.top_ids + at * p.top_logprobs, p.top_logprobs, -1);
    std::fill_n(p.top_logprob + at * p.top_logprobs, p.top_logprobs, 0.0f);
    if (token >= 0)
      write_top(p, walk.target(i), p.top_ids + at * p.top_logprobs,
                p.top_logprob + at * p.top_logprobs);
  }
  emit_counts(r, walk.stop, walk.last, walk.status);
}

}  // namespace

int verify_chain_cpu(const VerifyChainParams& p) {
  if (p.vocab < 1 || p.vocab > kMaxVocab) return kBadArgument;
  for (int64_t b = 0; b < p.batch; ++b) verify_request(p, b);
  return kOk;
}

}  // namespace domino
