// Top-k, top-p and min-p of one row: which tokens are left, and what they weigh.
//
// With tokens ordered by logit, greatest first, ties by id, every filter keeps a prefix:
//   top-k  the k-th greatest logit and all that tie with it
//   min-p  weights of at least min_p times that of the greatest logit
//   top-p  tokens before which less than top_p of `base` lies; base is the mass of
//            transformers  the top-k tokens                  (temperature, top-k, top-p, min-p)
//            vllm          the tokens of both top-k and min-p    (min-p, top-k, top-p)
//            joint         the whole row                      (FlashInfer's joint form)
// The first token stays in any case. So a filtered row is the last token that it keeps and the mass
// up to there. All masses are the fixed-point sums of row_law.h: exact in any order of summation.
#pragma once

#include "verify/row_law.h"

namespace domino {

enum class FilterOrder : int { kTransformers = 0, kVllm = 1, kJoint = 2 };

struct FilterParams {
  int64_t top_k = 0;   // <= 0: all
  float top_p = 1.0f;  // >= 1: all
  float min_p = 0.0f;  // <= 0: all
  FilterOrder order = FilterOrder::kTransformers;

  DOMINO_HD bool by_rank(int64_t vocab) const { return top_k > 0 && top_k < vocab; }
  DOMINO_HD bool by_mass() const { return !(top_p >= 1.0f); }  // NaN too: nucleus_cut
  DOMINO_HD bool by_weight() const { return min_p > 0.0f; }
  // Of the tokens that min-p keeps, as RowLaw::exponent.
  DOMINO_HD float lowest_exponent(const RowLaw& law) const {
    if (!by_weight()) return -INFINITY;
    const float share = min_p < 1.0f ? min_p : 1.0f;
    return fma_rn(log_positive(share), kLog2e, law.exponent(law.top));
  }
  DOMINO_HD bool any(int64_t vocab) const { return by_rank(vocab) || by_mass() || by_weight(); }
};

// Those of request b, of VerifyChainParams or VerifyTreeParams.
template <class Params>
DOMINO_HD FilterParams read_filters(const Params& p, int64_t b) {
  FilterParams out;
  if (p.top_k != nullptr) out.top_k = p.top_k[b];
  if (p.top_p != nullptr) out.top_p = p.top_p[b];
  if (p.min_p != nullptr) out.min_p = p.min_p[b];
  out.order = static_cast<FilterOrder>(p.filter_order);
  return out;
}

// Floor of top_p * base, at least 1: a token stays if the mass before it is below this. top_p
// counts in units of 2^-32. NaN and what is not positive keep the first token only.
DOMINO_HD uint64_t nucleus_cut(uint64_t base, float top_p) {
  if (top_p >= 1.0f) return ~uint64_t{0};
  if (!(top_p > 0.0f)) return 1;
  const uint64_t share = static_cast<uint64_t>(mul_rn(top_p, 0x1p32f));
  const uint64_t high = (base >> 32) * share, low = ((base & 0xffffffffu) * share) >> 32;
  return high + low > 1 ? high + low : 1;
}

// The prefix that is left: every token above cut_logit, and those equal to it up to cut_id.
struct RowFilter {
  float cut_logit = -INFINITY;
  int32_t cut_id = INT32_MAX;
  uint64_t mass = 0;

  DOMINO_HD float probability(const RowLaw& law, float logit) const {
    return mul_rn(law.weight(logit), div_rn(kFixedOne, static_cast<float>(mass)));
  }
  DOMINO_HD bool keeps(float logit, int64_t token) const {
    return logit > cut_logit || (logit == cut_logit && token <= cut_id);
  }
};

}  // namespace domino
