// fp32 arithmetic whose bits are the same in a kernel and in its CPU twin: every operation is
// rounded to nearest and none is left for a compiler to contract (the host is built with
// -ffp-contract=off). exp2 and log are polynomials of these operations, within 2 ulp.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/dtype.h"
#include "common/hd.h"

namespace domino {

DOMINO_HD float mul_rn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

DOMINO_HD float add_rn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

DOMINO_HD float div_rn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

DOMINO_HD float fma_rn(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

constexpr float kLog2e = 1.44269504f;
constexpr float kLn2 = 0.693147181f;

// 1.5 * 2^23: adding it to a number below 2^22 rounds that to an integer in the low bits.
constexpr float kRoundMagic = 12582912.0f;

// rint(a * b) for |a * b| < 2^22, from the exact product.
DOMINO_HD int32_t round_product(float a, float b) {
  return detail::bit_cast<int32_t>(fma_rn(a, b, kRoundMagic)) - 0x4b400000;
}

// 2^(z * scale - e) for e = kRoundMagic - shift an even integer below 2^22 in size and
// z * scale - e in [-126, 126]. The product is never rounded, and the fraction that the polynomial
// sees does not depend on e: another e gives the same bits but for the power of two.
DOMINO_HD float exp2_product(float z, float scale, float shift) {
  const float shifted = fma_rn(z, scale, shift);
  const float f = fma_rn(z, scale, -add_rn(shifted, -shift));
  float poly = 1.32647272e-3f;  // minimax of 2^f on [-1/2, 1/2], relative error 9.2e-8
  poly = fma_rn(poly, f, 9.67151269e-3f);
  poly = fma_rn(poly, f, 5.55073374e-2f);
  poly = fma_rn(poly, f, 2.40222421e-1f);
  poly = fma_rn(poly, f, 6.93146978e-1f);
  poly = fma_rn(poly, f, 1.0f);
  // The low bits of `shifted` are the integer; 2^23 times it moves the exponent.
  return detail::bit_cast<float>(detail::bit_cast<uint32_t>(poly) +
                                 (detail::bit_cast<uint32_t>(shifted) << 23));
}

// log(2^e * (1 + f)) for f in [sqrt(1/2) - 1, sqrt(2) - 1]; relative accuracy also near zero.
DOMINO_HD float log_reduced(float f, float e) {
  float poly = -7.63449296e-2f;  // minimax of (log1p(f) - f + f^2/2) / f^3, 5.9e-9 of log1p
  poly = fma_rn(poly, f, 1.27615750e-1f);
  poly = fma_rn(poly, f, -1.31601825e-1f);
  poly = fma_rn(poly, f, 1.42017588e-1f);
  poly = fma_rn(poly, f, -1.66233569e-1f);
  poly = fma_rn(poly, f, 2.00012267e-1f);
  poly = fma_rn(poly, f, -2.50008196e-1f);
  poly = fma_rn(poly, f, 3.33333313e-1f);
  const float square = mul_rn(f, f);
  const float tail = fma_rn(mul_rn(square, f), poly, mul_rn(-0.5f, square));
  const float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  return fma_rn(e, ln2_high, add_rn(f, fma_rn(e, ln2_low, tail)));
}

struct SplitFloat {
  float mantissa;  // in [sqrt(1/2), sqrt(2))
  float power;     // of two, an integer
};

DOMINO_HD SplitFloat split_exponent(float x) {
  const int32_t bits = detail::bit_cast<int32_t>(x);
  const int32_t power = (bits - 0x3f3504f3) >> 23;
  return {detail::bit_cast<float>(bits - power * (1 << 23)), static_cast<float>(power)};
}

// log(x) for normal x > 0.
DOMINO_HD float log_positive(float x) {
  const SplitFloat split = split_exponent(x);
  return log_reduced(add_rn(split.mantissa, -1.0f), split.power);
}

// Standard exponential -log1p(-v) of v = (word + 1/2) * 2^-32, for races: v never reaches 0 or 1,
// so no token gets E = 0 (it would win at any weight) or E = inf.
DOMINO_HD float exponential(uint32_t word) {
  // Below v = 1 - sqrt(1/2) keep the relative accuracy of v, above it that of 1 - v.
  const bool small = word < 0x4afb0cccu;
  const float x = mul_rn(add_rn(static_cast<float>(small ? word : ~word), 0.5f), 0x1p-32f);
  const float power = split_exponent(x).power;
  const float f = small ? -x : add_rn(split_exponent(x).mantissa, -1.0f);
  return -log_reduced(f, small ? 0.0f : power);
}

}  // namespace domino
