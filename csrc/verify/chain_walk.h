// The rules of verify_chain: one slot's decision and the weights of the final draw. The kernel
// decides all slots at once and takes the first that stops, the CPU twin goes slot by slot.
//
//   greedy (temperature 0)  accept draft x if x == argmax p; otherwise emit the argmax
//   token, one-hot draft    accept with probability p(x); otherwise draw from p without x
//   token, dense q          accept if u q(x) <= p(x) (Leviathan et al. 2211.17192); otherwise draw
//                           from relu(p - q)
//   last row, or no draft   draw from p
//
// What is not a law degrades to something that is lossless for any draft, never to a guess:
//   draft -1 (pad) or outside the vocabulary   the chain ends here: draw from p
//   draft row unusable, or q(x) = 0            the slot is judged as a one-hot draft
//   nothing left of relu(p - q)                p = q up to rounding: draw from p
//   target row unusable                        stop; the accepted drafts are all that is emitted
// Only slots that the walk reaches set status bits.
#pragma once

#include "common/philox.cuh"
#include "verify/row_law.h"
#include "verify/verify_chain.h"

namespace domino {

enum class Outcome : int { kAccept, kArgmax, kDraw, kResidual, kFail };

struct Slot {
  Outcome outcome;
  uint32_t status;
  int64_t exclude;  // kResidual of a one-hot draft: the rejected token, otherwise -1
};

// Everything of request b but its row statistics.
struct ChainRequest {
  const VerifyChainParams& p;
  int64_t b;
  int64_t first_row = 0;
  int rows = 0;         // 0: inactive or unusable
  uint32_t faults = 0;  // kBadRows, kBadParameter
  bool greedy = true;
  bool dense = false;
  float temperature = 0.0f;
  float draft_temperature = 0.0f;

  DOMINO_HD ChainRequest(const VerifyChainParams& params, int64_t request) : p(params), b(request) {
    int64_t count = p.drafts + 1;
    if (p.cu_rows != nullptr) {
      first_row = p.cu_rows[b];
      count = static_cast<int64_t>(p.cu_rows[b + 1]) - first_row;
      if (count == 0) return;
      if (count < 0 || count > p.drafts + 1 || first_row < 0 || first_row + count > p.total_rows)
        faults |= kBadRows;
    }
    if (p.temperature != nullptr) {
      temperature = p.temperature[b];
      greedy = temperature == 0.0f;
      if (!(temperature >= 0.0f && temperature <= FLT_MAX)) faults |= kBadParameter;
      if (p.draft_logits != nullptr && !greedy) {
        draft_temperature = p.draft_temperature != nullptr ? p.draft_temperature[b] : temperature;
        if (!(draft_temperature >= 0.0f && draft_temperature <= FLT_MAX)) faults |= kBadParameter;
        dense = draft_temperature > 0.0f;
      }
    }
    rows = faults != 0 ? 0 : static_cast<int>(count);
  }

  DOMINO_HD int64_t draft_token(int i) const {
    return p.draft_tokens[b * p.draft_tokens_stride + i];
  }

  DOMINO_HD LogitRow target_row(int i) const {
    const int64_t offset = p.cu_rows != nullptr
                               ? (first_row + i) * p.target_row_stride
                               : b * p.target_batch_stride + i * p.target_row_stride;
    return LogitRow{p.target_logits, p.target_dtype}.plus(offset);
  }

  DOMINO_HD LogitRow draft_row(int i) const {
    return LogitRow{p.draft_logits, p.draft_dtype}.plus(b * p.draft_batch_stride +
                                                        i * p.draft_row_stride);
  }

  DOMINO_HD BlockNoise noise() const { return {p.seed[b], p.block_start[b]}; }
};

// `stats` has target(i) and draft(i), the RowStats of slot i.
template <class Stats>
DOMINO_HD Slot decide_slot(const ChainRequest& r, int i, Stats& stats) {
  const RowStats target = stats.target(i);
  if (target.faults != 0) return {Outcome::kFail, target.faults, -1};
  const Outcome stop = r.greedy ? Outcome::kArgmax : Outcome::kDraw;
  if (i == r.rows - 1) return {stop, 0, -1};
  const int64_t x = r.draft_token(i);
  if (x < 0 || x >= r.p.vocab) return {stop, x == -1 ? 0u : kBadId, -1};
  if (r.greedy) return {x == target.argmax ? Outcome::kAccept : stop, 0, -1};

  const float p = RowLaw(target, r.temperature).probability(r.target_row(i).at(x));
  float q = 1.0f;
  uint32_t status = 0;
  bool dense = r.dense;
  if (dense) {
    const RowStats draft = stats.draft(i);
    q = draft.faults != 0 ? 0.0f
                          : RowLaw(draft, r.draft_temperature).probability(r.draft_row(i).at(x));
    if (q == 0.0f) {
      dense = false;
      q = 1.0f;
      status = kBadDraftLaw;
    }
  }
  const float u = uniform(r.noise().words(kVerifyCoin, i, 0).word[0]);
  // u * q can underflow to 0 <= 0: a token without mass is never accepted
  if (p > 0.0f && mul_rn(u, q) <= p) return {Outcome::kAccept, status, -1};
  return {Outcome::kResidual, status, dense ? -1 : x};
}

// The race for the token of the slot where the walk stopped: least E / weight, ties to the lowest
// id. Positive floats order as their bits; a token of no weight comes behind all others.
constexpr uint32_t kNoOrder = ~uint32_t{0};
constexpr uint64_t kNoWinner = ~uint64_t{0};

DOMINO_HD uint32_t race_order(float weight, uint32_t word) {
  const uint32_t order = detail::bit_cast<uint32_t>(div_rn(exponential(word), weight));
  return weight > 0.0f ? order : kNoOrder;
}

DOMINO_HD uint64_t race_key(float weight, uint32_t word, int64_t token) {
  const uint32_t order = race_order(weight, word);
  if (order == kNoOrder) return kNoWinner;
  return static_cast<uint64_t>(order) << 32 | static_cast<uint32_t>(token);
}

struct Draw {
  LogitRow target, draft;
  RowLaw p, q;
  BlockNoise noise;
  Purpose purpose;
  int i;
  bool dense;
  int64_t exclude;

  template <class Stats>
  DOMINO_HD Draw(const ChainRequest& r, int slot, Outcome outcome, int64_t without, Stats& stats)
      : target(r.target_row(slot)),
        draft(target),
        p(stats.target(slot), r.temperature),
        q(p),
        noise(r.noise()),
        purpose(outcome == Outcome::kResidual ? kResidualDraw : kBonusDraw),
        i(slot),
        dense(outcome == Outcome::kResidual && without < 0),
        exclude(without) {
    if (dense) {
      draft = r.draft_row(slot);
      q = RowLaw(stats.draft(slot), r.draft_temperature);
    }
  }

  DOMINO_HD float weight(int64_t token) const {
    if (!dense) return token == exclude ? 0.0f : p.weight(target.at(token));
    return add_rn(p.probability(target.at(token)), -q.probability(draft.at(token)));
  }

  // The best key among tokens 4 * group .. 4 * group + 3 below `vocab`.
  DOMINO_HD uint64_t group_key(int64_t group, int64_t vocab) const {
    const NoiseWords words = noise.words(purpose, i, static_cast<uint32_t>(group));
    uint64_t best = kNoWinner;
    for (int lane = 0; lane < 4; ++lane) {
      const int64_t token = 4 * group + lane;
      if (token >= vocab) break;
      const uint64_t key = race_key(weight(token), words.word[lane], token);
      best = key < best ? key : best;
    }
    return best;
  }
};

// Writes slot i of the output, given where the walk stopped and the token found there (-1: none).
template <class Stats>
DOMINO_HD void emit_slot(const ChainRequest& r, int i, int stop, int64_t last, Stats& stats) {
  const int64_t token = i < stop ? r.draft_token(i) : i == stop ? last : -1;
  float logprob = 0.0f;
  if (token >= 0)
    logprob = RowLaw(stats.target(i), r.temperature).log_probability(r.target_row(i).at(token));
  r.p.tokens[r.b * (r.p.drafts + 1) + i] = token;
  r.p.chosen_logprob[r.b * (r.p.drafts + 1) + i] = logprob;
}

DOMINO_HD void emit_counts(const ChainRequest& r, int stop, int64_t last, uint32_t status) {
  r.p.num_accepted[r.b] = stop;
  r.p.num_emitted[r.b] = stop + (last >= 0 ? 1 : 0);
  r.p.status[r.b] = static_cast<uint8_t>(status);
}

}  // namespace domino
