// (value, id) as one unsigned integer whose maximum is the argmax: a reduction over keys gives the
// same winner in any order, so blocks, warps and atomicMax may meet as they like.
//
// Equal values: the lowest id wins; -0 equals +0. NaN ranks below -inf: it wins only where every
// value is NaN, and then the winner is the lowest id and its value NaN. No key is 0.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/dtype.h"

namespace domino {

DOMINO_HD uint64_t argmax_key(float value, uint32_t id) {
  const uint32_t bits = detail::bit_cast<uint32_t>(value + 0.0f);  // -0 becomes +0
  const uint32_t ordered = bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
  return static_cast<uint64_t>(value == value ? ordered : 0u) << 32 | (0xffffffffu - id);
}

DOMINO_HD uint32_t key_id(uint64_t key) { return 0xffffffffu - static_cast<uint32_t>(key); }

DOMINO_HD float key_value(uint64_t key) {
  const uint32_t ordered = static_cast<uint32_t>(key >> 32);
  if (ordered == 0) return NAN;
  return detail::bit_cast<float>(ordered ^ ((ordered >> 31) != 0 ? 0x80000000u : 0xffffffffu));
}

}  // namespace domino
