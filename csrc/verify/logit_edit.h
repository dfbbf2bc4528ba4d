// What is done to a logit before the temperature, in the order of Transformers' processors: bias,
// repetition, presence and frequency penalty, grammar mask.
#pragma once

#include "common/exact_math.cuh"

namespace domino {

struct Penalties {
  float repetition = 1.0f;  // divides positive logits of tokens seen before, multiplies the others
  float presence = 0.0f;    // taken off once for a token that was generated
  float frequency = 0.0f;   // taken off for each time that it was

  DOMINO_HD bool any() const { return repetition != 1.0f || presence != 0.0f || frequency != 0.0f; }

  // seen: the token is in the prompt; count: how often it was generated, drafts before the row
  // included.
  DOMINO_HD float apply(float logit, bool seen, int32_t count) const {
    if (seen || count > 0)
      logit = logit > 0.0f ? div_rn(logit, repetition) : mul_rn(logit, repetition);
    if (count > 0) {
      logit = add_rn(logit, -presence);
      logit = add_rn(logit, -mul_rn(frequency, static_cast<float>(count)));
    }
    return logit;
  }
};

// Bit token % 32 of word token / 32: 1 allows the token.
DOMINO_HD bool mask_allows(const uint32_t* words, int64_t token) {
  return (words[token >> 5] >> (token & 31) & 1u) != 0;
}

}  // namespace domino
