// The copies of W2 that draft_chain's certificate screens with: int8 [vocab, rank], then a
// ScreenTile for each tile of 128 ids; then the same in 4 bits, a ScreenTile for each 16 ids.
// HeadWeights.with_screen() makes it.
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
// rows are taken as if theirs were this and a column is q = 0; above, all ids pass. Norms of 256
// values stay below 2^64, their products finite.
constexpr float kScreenSmallest = 1e-12f, kScreenLargest = 1e17f;

// A row in 4 bits, 32 bytes for 64 k: n, from -8 to 7, stands for 16 n + 8. The lower half of byte
// i is n + 8 of k = i, the upper half n of k = 32 + i. k past the rank count as any.
constexpr int kNibbleRow = 128;  // bytes of a row of rank 256
constexpr int kNibbleIds = 16;

DOMINO_HD int nibble_row(int64_t rank) { return static_cast<int>((rank + 63) / 64 * 32); }

DOMINO_HD const ScreenTile* screen_tiles(const void* screen, int64_t vocab, int64_t rank) {
  return reinterpret_cast<const ScreenTile*>(static_cast<const int8_t*>(screen) + vocab * rank);
}

DOMINO_HD int64_t screen_tile_count(int64_t vocab) { return (vocab + 127) / 128; }

DOMINO_HD const void* nibble_rows(const void* screen, int64_t vocab, int64_t rank) {
  return screen_tiles(screen, vocab, rank) + screen_tile_count(vocab);
}

DOMINO_HD const ScreenTile* nibble_tiles(const void* screen, int64_t vocab, int64_t rank) {
  return reinterpret_cast<const ScreenTile*>(
      static_cast<const char*>(nibble_rows(screen, vocab, rank)) + vocab * nibble_row(rank));
}

}  // namespace domino
