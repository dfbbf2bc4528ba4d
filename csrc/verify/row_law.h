// The law softmax(logits / temperature) of one row, from a row's statistics.
//
// A token's weight is 2^((logit - top) * scale), 1 for the greatest logit, and the sum of weights
// is kept in fixed point: integers add to the same bits in any order, so a row's law does not
// depend on how many threads, blocks or vocabulary shards read it, nor on the device.
#pragma once

#include <cfloat>
#include <cstdint>

#include "common/exact_math.cuh"

namespace domino {

enum VerifyStatus : uint32_t {
  kNonFinite = 1,      // a target row that was needed holds NaN or +inf
  kEmptyRow = 2,       // a target row that was needed is all -inf
  kBadId = 4,          // a draft id outside [0, vocab) other than the pad -1
  kZeroResidual = 8,   // nothing was left to replace a rejected draft
  kBadDraftLaw = 16,   // a draft row with NaN, +inf or all -inf, or that gives its token no mass
  kBadParameter = 32,  // a temperature that is negative or not finite
  kBadRows = 64        // cu_rows: a count above drafts + 1 or below 0, or rows that do not exist
};

constexpr float kFixedOne = 0x1p40f;

DOMINO_HD uint64_t to_fixed(float weight) {
  return static_cast<uint64_t>(static_cast<int64_t>(mul_rn(weight, kFixedOne)));
}

struct RowStats {
  uint64_t sum;     // of to_fixed(weight) over the row
  float top;        // greatest logit
  int32_t argmax;   // lowest id that has it
  uint32_t faults;  // kNonFinite or kEmptyRow
  uint32_t unused;
};

DOMINO_HD uint32_t row_faults(bool non_finite, float top) {
  return non_finite ? kNonFinite : top == -INFINITY ? kEmptyRow : 0u;
}

// Temperature 0 means argmax; its log-probabilities are those of temperature 1.
DOMINO_HD float law_scale(float temperature) {
  const float scale = div_rn(kLog2e, temperature == 0.0f ? 1.0f : temperature);
  return scale > FLT_MAX ? FLT_MAX : scale;
}

DOMINO_HD float token_weight(float logit, float top, float scale) {
  return exp2_nonpositive(mul_rn(add_rn(logit, -top), scale));
}

struct RowLaw {
  float top;
  float scale;
  float inverse_sum;
  float log_sum;

  DOMINO_HD RowLaw(const RowStats& stats, float temperature)
      : top(stats.top),
        scale(law_scale(temperature)),
        inverse_sum(div_rn(kFixedOne, static_cast<float>(stats.sum))),
        log_sum(log_positive(static_cast<float>(stats.sum) * (1.0f / kFixedOne))) {}

  DOMINO_HD float weight(float logit) const { return token_weight(logit, top, scale); }
  DOMINO_HD float probability(float logit) const { return mul_rn(weight(logit), inverse_sum); }
  DOMINO_HD float log_probability(float logit) const {
    return fma_rn(mul_rn(add_rn(logit, -top), scale), kLn2, -log_sum);
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
