// The int8 copy of W2 that draft_chain's certificate screens with: int8 [vocab, rank], then a
// ScreenTile for each tile of 128 ids. HeadWeights.with_screen() makes it.
#pragma once

#include <cstdint>

#include "common/hd.h"

namespace domino {

struct ScreenTile {
  float inverse;        // 1 / s_w
  float residue, norm;  // A and B of draft_chain_certify_screen.cuh; infinite: all ids pass
  float unused;
};

// Largest magnitudes of a tile's rows, and of a column, between which they are quantised. Below,
// q = 0; above, all ids pass. Norms of 256 values stay below 2^64, their products finite.
constexpr float kScreenSmallest = 1e-12f, kScreenLargest = 1e17f;

DOMINO_HD const ScreenTile* screen_tiles(const void* screen, int64_t vocab, int64_t rank) {
  return reinterpret_cast<const ScreenTile*>(static_cast<const int8_t*>(screen) + vocab * rank);
}

}  // namespace domino
