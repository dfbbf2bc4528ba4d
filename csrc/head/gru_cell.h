// The GRU cell of torch.nn.GRU (no bias), element by element; gate order r, z, n:
//   r = sigmoid(w_ir x + w_hr s)   z = sigmoid(w_iz x + w_hz s)
//   n = tanh(w_in x + r * (w_hn s))   s' = (1 - z) n + z s
#pragma once

#include <cmath>

#include "common/hd.h"

namespace domino {

DOMINO_HD float sigmoid(float value) { return 1.0f / (1.0f + expf(-value)); }

DOMINO_HD float silu(float value) { return value * sigmoid(value); }

// r, z: sums of the input and the state product; n_x, n_s: apart, because r scales the second.
DOMINO_HD float gru_cell(float r, float z, float n_x, float n_s, float state) {
  const float candidate = tanhf(n_x + sigmoid(r) * n_s);
  return candidate + sigmoid(z) * (state - candidate);
}

}  // namespace domino
