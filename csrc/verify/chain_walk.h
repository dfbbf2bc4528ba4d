// The rules of verify_chain: one slot's decision and the weights of the final draw. The kernel
// decides all slots at once and takes the first that stops, the CPU twin goes slot by slot.
//
//   greedy (temperature 0)  accept draft x if x == argmax p; otherwise emit the argmax
//   token, one-hot draft    accept with probability p(x); otherwise draw from p without x
//   token, q                accept if u q(x) <= p(x) (Leviathan et al. 2211.17192); otherwise draw
//                           from relu(p - q)
//   match, gumbel           draw y from p with the noise of the position; accept x if x == y;
//                           otherwise emit y
//   block                   block_walk.h
//   last row, or no draft   draw from p
//
// p is the filtered law. Its normaliser costs a search (filter.h), so a slot is first judged by
// bounds: q(x) u at or below the unfiltered p(x) of a token that any filter keeps accepts, q(x) u
// above p(x) over a lower bound of the kept mass rejects, and only what is left is undecided.
//
// What is not a law degrades to something that is lossless for any draft, never to a guess:
//   draft -1 (pad) or outside the vocabulary   the chain ends here: draw from p
//   draft row unusable, or q(x) = 0            the slot is judged as a one-hot draft
//   nothing left of relu(p - q)                p = q up to rounding: draw from p
//   target row unusable                        stop; the accepted drafts are all that is emitted
// Only slots that the walk reaches set status bits.
#pragma once

#include "verify/chain_request.h"

namespace domino {

enum class Outcome : int {
  kAccept,
  kArgmax,
  kDraw,
  kResidual,
  kFail,
  kUndecided,  // a filter's cut has to be found
  kPosition    // match and gumbel: the position's draw decides
};

struct Slot {
  Outcome outcome;
  uint32_t status;
  bool one_hot;  // q is, or is taken to be, all on the draft
  float q;       // of the draft
};

constexpr float kFilterMargin = 0x1p-18f;  // more than rounding can move a mass or a probability
constexpr float kMassMargin = 0x1p-20f;    // the same, of the mass of a row: top_p's share of it

// What holds of a row's filter before its cut is known.
struct FilterBounds {
  bool active = false;
  float kept_mass = 1.0f;    // a lower bound of the mass that is kept, over that of the row
  float surely_kept = 0.0f;  // a token of a probability above this is kept ...
  float lowest_exponent = -INFINITY;  // ... if its exponent is not below this

  FilterBounds() = default;
  // head_mass: mass of some tokens that top-k and min-p keep, over that of the row.
  DOMINO_HD FilterBounds(const FilterParams& f, const RowLaw& law, int64_t vocab, float head_mass) {
    active = f.any(vocab);
    if (!active) return;
    kept_mass = f.by_rank(vocab) || f.by_weight() ? head_mass : 1.0f;
    if (f.by_mass()) {
      const float share = f.top_p > 0.0f ? f.top_p : 0.0f;
      kept_mass = mul_rn(kept_mass, share);
      surely_kept = 1.0f - share;
    }
    if (f.by_rank(vocab)) {
      const float rank = 1.0f / static_cast<float>(f.top_k);
      surely_kept = surely_kept > rank ? surely_kept : rank;
    }
    if (f.by_weight()) lowest_exponent = f.lowest_exponent(law);
    kept_mass = mul_rn(kept_mass, 1.0f - kFilterMargin);
    surely_kept = fma_rn(surely_kept, 1.0f + kFilterMargin, kMassMargin);
  }
};

// Draft x of slot i is in the vocabulary: does its coin accept it? `logit` is its edited logit.
DOMINO_HD Outcome token_outcome(const RowLaw& p, const FilterBounds& bounds, float logit, float q,
                                float u) {
  const float probability = p.probability(logit), share = mul_rn(u, q);
  // u * q can underflow to 0 <= 0: a token without mass is never accepted
  if (!bounds.active)
    return probability > 0.0f && share <= probability ? Outcome::kAccept : Outcome::kResidual;
  if (probability == 0.0f) return Outcome::kResidual;
  if (mul_rn(share, bounds.kept_mass) > mul_rn(probability, 1.0f + kFilterMargin))
    return Outcome::kResidual;
  const bool kept = probability > bounds.surely_kept && p.exponent(logit) >= bounds.lowest_exponent;
  if (kept && share <= mul_rn(probability, 1.0f - kFilterMargin)) return Outcome::kAccept;
  return Outcome::kUndecided;
}

// The same once the cut is known: what the bounds say, and what they leave open.
DOMINO_HD Outcome filtered_outcome(const RowLaw& p, const RowFilter& filter, float logit, int64_t x,
                                   float q, float u) {
  const float probability = filter.probability(p, logit);
  return filter.keeps(logit, x) && probability > 0.0f && mul_rn(u, q) <= probability
             ? Outcome::kAccept
             : Outcome::kResidual;
}

DOMINO_HD float verify_coin(const ChainRequest& r, int i) {
  return uniform(r.noise().words(kVerifyCoin, i, 0).word[0]);
}

// q(x) from a draft row's law and the draft's logit in it, or from a scalar; 0 where it is no law.
DOMINO_HD float draft_mass(const RowStats& draft, float temperature, float logit) {
  return draft.faults != 0 ? 0.0f : RowLaw(draft, temperature).probability(logit);
}
DOMINO_HD float scalar_mass(float logprob) {
  if (!(logprob <= 0.0f && logprob >= -69.0f)) return 0.0f;
  return exp2_product(logprob, kLog2e, kRoundMagic);
}

// Slot i, whose row is usable and whose draft x is in the vocabulary or -1 (none), before its coin:
// kUndecided where that decides.
//   argmax: of a greedy request's row
//   q: of x; < 0 where the request has no q
DOMINO_HD Slot slot_before_coin(const ChainRequest& r, int32_t argmax, int64_t x, float q) {
  const bool replaces = r.p.residual_slot != nullptr;
  if (r.greedy())
    return {x == argmax && !replaces ? Outcome::kAccept : Outcome::kArgmax, 0, true, 1.0f};
  if (r.rule == VerifyRule::kMatch || r.rule == VerifyRule::kGumbel)
    return {Outcome::kPosition, 0, true, 1.0f};
  if (x < 0) return {Outcome::kDraw, 0, true, 1.0f};
  const bool one_hot = !(q > 0.0f);
  return {replaces ? Outcome::kResidual : Outcome::kUndecided, q == 0.0f ? kBadDraftLaw : 0u,
          one_hot, one_hot ? 1.0f : q};
}

// The same with the coin. logit: of x
DOMINO_HD Slot decide_slot(const ChainRequest& r, int i, const RowStats& target, int64_t x,
                           float logit, float q, const FilterBounds& bounds) {
  Slot slot = slot_before_coin(r, target.argmax, x, q);
  if (slot.outcome != Outcome::kUndecided) return slot;
  const RowLaw law(target, r.temperature);
  slot.outcome = token_outcome(law, bounds, logit, slot.q, verify_coin(r, i));
  return slot;
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

// Whose words decide a race.
struct RaceNoise {
  BlockNoise noise;
  Purpose purpose;
  int i;

  DOMINO_HD NoiseWords words(uint32_t group) const { return noise.words(purpose, i, group); }
};

DOMINO_HD RaceNoise race_noise(const ChainRequest& r, int i, Outcome outcome) {
  if (outcome == Outcome::kPosition) return {r.position_noise(i), kPositionDraw, 0};
  const Purpose purpose = outcome == Outcome::kResidual ? kResidualDraw : kBonusDraw;
  return {r.noise(), purpose, r.first_slot + i};
}

template <class Request>
DOMINO_HD void emit_counts(const Request& r, int stop, int64_t last, uint32_t status) {
  r.p.num_accepted[r.b] = stop;
  r.p.num_emitted[r.b] = stop + (last >= 0 ? 1 : 0);
  r.p.status[r.b] = static_cast<uint8_t>(status);
}

}  // namespace domino
