// How a draft is drawn: of the ids of its pool the one with the greatest
//   logit / temperature - log E(id),   E the noise of (seed, block_start, draft j, kDraftToken,
//   id),
// ties to the lowest id. E is a standard exponential, so this is the id of the least E / weight, a
// draw from softmax(logit / temperature) on the pool, whatever the order and however it is split.
#pragma once

#include "common/exact_math.cuh"
#include "common/philox.cuh"

namespace domino {

struct DraftDraw {
  BlockNoise noise;
  float inverse_temperature;
  int draft;  // j of y_{j+1}

  // What is added to logit / temperature.
  DOMINO_HD float bonus(uint32_t id) const {
    const NoiseWords words = noise.words(kDraftToken, draft, id / 4);
    const uint32_t low = id % 2 ? words.word[1] : words.word[0];
    const uint32_t high = id % 2 ? words.word[3] : words.word[2];
    return -log_positive(exponential(id % 4 < 2 ? low : high));
  }

  DOMINO_HD float order(float logit, float bonus) const {
    return fma_rn(logit, inverse_temperature, bonus);
  }
};

}  // namespace domino
