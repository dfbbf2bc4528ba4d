// Block verification of one chain (Sun et al. 2403.10444), from the row laws p_i and draft laws
// q_i.
//
//   reach_0 = 1,  reach_{i+1} = min(1, reach_i p_i(x_i) / q_i(x_i))
//   Z_i = sum over tokens of relu(reach_i p_i - q_i)
//   h_i = Z_i / (Z_i + 1 - reach_i), 1 where that is 0 / 0;  h_n = reach_n
//   kept drafts: the LARGEST i <= n with coin u_{i-1} <= h_i, or 0. Not the first that fails.
//   then: a token of relu(reach_i p_i - q_i) for i < n, of p_n for i = n
//
// One coin a prefix, that of its last draft. All rows are judged whatever comes before them, so a
// kernel may do them side by side once the reaches are known, and those need two numbers a slot.
#pragma once

#include "verify/row_law.h"

namespace domino {

DOMINO_HD float next_reach(float reach, float p, float q) {
  const float next = mul_rn(reach, div_rn(p, q));  // p = 0 gives 0; q > 0 here
  return next < 1.0f ? next : 1.0f;
}

// A token's weight in what is left of row i.
DOMINO_HD float block_rest(float reach, float p, float q) { return add_rn(mul_rn(reach, p), -q); }

// Its term of Z_i: integers, so that the sum is the same in any order.
DOMINO_HD uint64_t block_rest_fixed(float reach, float p, float q) {
  const float rest = block_rest(reach, p, q);
  return rest > 0.0f ? to_fixed(rest) : 0;
}

// The part of Z_i outside a pool that holds all of q: reach times what p has there. `inside` is the
// fixed-point weight of p on the pool, `mass` that of all of p.
DOMINO_HD uint64_t block_rest_outside(float reach, uint64_t inside, uint64_t mass) {
  if (inside >= mass) return 0;
  const float share = div_rn(static_cast<float>(mass - inside), static_cast<float>(mass));
  return to_fixed(mul_rn(reach, share));
}

// h_i of a prefix that is not the whole chain; `rest` is Z_i in fixed point.
DOMINO_HD float block_threshold(uint64_t rest, float reach) {
  const float z = mul_rn(static_cast<float>(rest), 1.0f / kFixedOne);
  const float below = add_rn(z, add_rn(1.0f, -reach));
  return below > 0.0f ? div_rn(z, below) : 1.0f;
}

}  // namespace domino
