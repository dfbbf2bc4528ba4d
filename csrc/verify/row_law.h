// The law softmax(logits / temperature) of one row, from a row's statistics.
//
// A token weighs 2^(logit * scale - E), scale = log2(e) / temperature, E the even integer at or
// just above the greatest exponent of the row, so the greatest weight lies in [2^-1.5, 2^0.5].
//
// Sums must not depend on how many threads, blocks or vocabulary shards read a row. So the weights
// of each 128 tokens (aligned by token id) are added in fp32 as a balanced binary tree, whose bits
// are the same under any integer exponent; what it gives is cut to a grid that only the row's
// greatest logit decides, and integers add up to the same bits in any order.
#pragma once

#include <cfloat>
#include <cstdint>

#include "common/exact_math.cuh"

namespace domino {

enum VerifyStatus : uint32_t {
  kNonFinite = 1,       // a target row that was needed holds NaN or +inf
  kEmptyRow = 2,        // a target row that was needed is all -inf
  kBadId = 4,           // a draft id outside [0, vocab) other than the pad -1
  kZeroResidual = 8,    // nothing was left to replace a rejected draft
  kBadDraftLaw = 16,    // a draft row with NaN, +inf or all -inf, or that gives its token no mass
  kBadParameter = 32,   // a temperature that is negative or not finite, an unknown rule
  kBadRows = 64,        // cu_rows: a count above drafts + 1 or below 0, or rows that do not exist
  kNeedsResidual = 128  // scalar q: the draft was rejected, its replacement is for residual_sample
};

constexpr int kSegment = 128;  // tokens of one tree
constexpr float kFixedOne = 0x1p40f;
constexpr float kHugeExponent = 0x1p21f;  // from here on a temperature counts as 0
constexpr float kMinScale = 1e-30f;       // so that any logit above -1e32 has its exponent
constexpr float kMinExponent = -100.0f;   // a weight below 2 to this is zero

DOMINO_HD uint64_t to_fixed(float weight) {
  return static_cast<uint64_t>(static_cast<int64_t>(mul_rn(weight, kFixedOne)));
}

struct RowStats {
  uint64_t sum;     // of the weights, in units of 2^-40
  float top;        // greatest logit
  int32_t argmax;   // lowest id that has it
  uint32_t faults;  // kNonFinite or kEmptyRow
  uint32_t unused;
};

DOMINO_HD uint32_t row_faults(float top) {
  return !(top < INFINITY) ? kNonFinite : top == -INFINITY ? kEmptyRow : 0u;
}

// Temperature 0 means argmax; its log-probabilities are those of temperature 1.
DOMINO_HD float law_scale(float temperature) {
  const float scale = div_rn(kLog2e, temperature == 0.0f ? 1.0f : temperature);
  return scale > FLT_MAX ? FLT_MAX : scale > kMinScale ? scale : kMinScale;
}

// 2^((logit - top) * scale), 1 for the greatest logit: what a drafter that has the whole row, or
// its pool, at hand weighs by.
DOMINO_HD float token_weight(float logit, float top, float scale) {
  const float exponent = mul_rn(add_rn(logit, -top), scale);
  return exponent >= kMinExponent ? exp2_product(exponent, 1.0f, kRoundMagic) : 0.0f;
}

// The exponents of rows or parts of a row with a given greatest logit.
struct RowExponent {
  bool huge;  // all weight is on the tokens that equal the top
  int32_t top;

  DOMINO_HD RowExponent(float top_logit, float scale)
      : huge(!(mul_rn(top_logit, scale) < kHugeExponent &&
               mul_rn(top_logit, scale) > -kHugeExponent)),
        top(huge ? 0 : round_product(top_logit, scale)) {}

  // E of the weights.
  DOMINO_HD int32_t unit() const { return top + (top & 1); }
  // Segments are summed relative to 2^(20 * grid), below 1, and cut at 2^(20 * grid - 60).
  DOMINO_HD int32_t grid() const {
    const int32_t above = top + 27;
    return (above >= 0 ? above : above - 19) / 20;
  }
};

// What a segment adds to a sum: its 60 bits as three digits of 20 bits, the highest first.
struct Digits {
  uint32_t at[3];

  DOMINO_HD static Digits of(float segment) {
    const uint64_t cut = static_cast<uint64_t>(mul_rn(segment, 0x1p60f));
    return {{static_cast<uint32_t>(cut >> 40), static_cast<uint32_t>(cut >> 20) & 0xfffffu,
             static_cast<uint32_t>(cut) & 0xfffffu}};
  }
};

// Sums of digits on a row's grid. Parts on a grid `below` the row's lose what falls off the end.
struct DigitSums {
  uint64_t at[3] = {0, 0, 0};

  template <class T>
  DOMINO_HD void add(const T (&digits)[3], int32_t below) {
    if (below == 0) {
      at[0] += digits[0];
      at[1] += digits[1];
      at[2] += digits[2];
    } else if (below == 1) {
      at[1] += digits[0];
      at[2] += digits[1];
    } else if (below == 2) {
      at[2] += digits[0];
    }
  }

  // In units of 2^-40 relative to E.
  DOMINO_HD uint64_t fixed(const RowExponent& exponent) const {
    const int32_t shift = 20 * exponent.grid() - exponent.unit() - 20;  // in [-14, 7]
    const uint64_t low = at[2] + (at[1] << 20);
    if (shift >= 0) return (at[0] << (40 + shift)) + (low << shift);
    return (at[0] << (40 + shift)) + (low >> -shift);
  }
};

struct RowLaw {
  float top;
  float scale;
  float shift;  // kRoundMagic - E, or 0: all weight is on the tokens that equal the top
  float inverse_sum;
  float log_sum;

  DOMINO_HD RowLaw(const RowStats& stats, float temperature)
      : RowLaw(stats.top, stats.sum, law_scale(temperature)) {}

  DOMINO_HD RowLaw(float top_logit, uint64_t sum, float law_scale)
      : top(top_logit), scale(law_scale) {
    const RowExponent exponent(top, scale);
    shift = exponent.huge ? 0.0f : kRoundMagic - static_cast<float>(exponent.unit());
    inverse_sum = div_rn(kFixedOne, static_cast<float>(sum));
    log_sum = log_positive(static_cast<float>(sum) * (1.0f / kFixedOne));
  }

  // log2 of a token's weight; rises with the logit.
  DOMINO_HD float exponent(float logit) const {
    if (shift == 0.0f) return logit == top ? 0.0f : -INFINITY;
    return fma_rn(logit, scale, shift - kRoundMagic);
  }
  DOMINO_HD float weight(float logit) const {
    if (shift == 0.0f) return logit == top ? 1.0f : 0.0f;
    return exponent(logit) >= kMinExponent ? exp2_product(logit, scale, shift) : 0.0f;
  }
  // log sum exp(logit / temperature) of the row.
  DOMINO_HD float log_mass() const {
    if (shift == 0.0f) return fma_rn(mul_rn(top, scale), kLn2, log_sum);
    const float unit = kRoundMagic - shift;
    return fma_rn(unit, 0.693359375f, fma_rn(unit, -2.12194440e-4f, log_sum));
  }
  DOMINO_HD float probability(float logit) const { return mul_rn(weight(logit), inverse_sum); }
  DOMINO_HD float log_probability(float logit) const {
    return fma_rn(exponent(logit), kLn2, -log_sum);
  }
};

// A row of logits of any dtype.
struct LogitRow {
  const void* data;
  DType dtype;

  DOMINO_HD float at(int64_t token) const {
    if (dtype == DType::kF32) return static_cast<const float*>(data)[token];
    if (dtype == DType::kF16) return to_float(static_cast<const f16*>(data)[token]);
    return to_float(static_cast<const bf16*>(data)[token]);
  }

  DOMINO_HD LogitRow plus(int64_t elements) const {
    const int64_t bytes = elements * (dtype == DType::kF32 ? 4 : 2);
    return {static_cast<const char*>(data) + bytes, dtype};
  }
};

}  // namespace domino
