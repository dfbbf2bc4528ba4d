// The low-rank input u of a head's correction W2 u, for Domino's head and its cousins. With
// z = W1h H + W1s s, where s is the GRU state or, in a head without a GRU, the last token's row of
// the head's own table:
//   kSilu    u = SiLU(z)           Domino; DeLS-Spec (without H, and kLinear too)
//   kLinear  u = z
//   kGate    u = sigmoid(z) * s    DSpark's gated Markov head
//   kRow     u = s                 DSpark's Markov head; there is no W1
// u is rounded to the weights' dtype.
#pragma once

#include "head/gru_cell.h"

namespace domino {

enum class LowRank : int { kSilu = 0, kLinear = 1, kGate = 2, kRow = 3 };

DOMINO_HD float low_rank_input(LowRank kind, float z, float row) {
  switch (kind) {
    case LowRank::kSilu:
      return silu(z);
    case LowRank::kLinear:
      return z;
    case LowRank::kGate:
      return sigmoid(z) * row;
    case LowRank::kRow:
      return row;
  }
  return z;
}

}  // namespace domino
