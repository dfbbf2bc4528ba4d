// Element types of tensors, by code (as Python passes them) and as C++ types for host and device.
//
// bf16 and f16 are storage types: load, widen with to_float(), compute in fp32, narrow once at the
// store with from_float<T>() (round to nearest even, NaN kept). Device code that needs the CUDA
// types (MMA, packed math) may reinterpret the bits: the layouts are the same.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/hd.h"
#include "common/status.h"
#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace domino {

enum class DType : int { kF32 = 0, kF16 = 1, kBF16 = 2 };

struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

namespace detail {
template <class To, class From>
DOMINO_HD To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}
}  // namespace detail

DOMINO_HD float to_float(float value) { return value; }

DOMINO_HD float to_float(bf16 value) {
  return detail::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

DOMINO_HD float to_float(f16 value) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(value.bits));
#else
  // Shift the fields into place and rescale by 2^112: exact for subnormals too. Inf and NaN then
  // sit at 2^16 and above and get the all-ones exponent back.
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t rest = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  const float scaled = detail::bit_cast<float>(rest) * 0x1p112f;
  uint32_t bits = detail::bit_cast<uint32_t>(scaled);
  bits = scaled >= 65536.0f ? bits | 0x7f800000u : bits;
  return detail::bit_cast<float>(bits | sign);
#endif
}

template <class T>
DOMINO_HD T from_float(float value);

template <>
DOMINO_HD float from_float<float>(float value) {
  return value;
}

template <>
DOMINO_HD bf16 from_float<bf16>(float value) {
#ifdef __CUDA_ARCH__
  return bf16{__bfloat16_as_ushort(__float2bfloat16_rn(value))};
#else
  const uint32_t bits = detail::bit_cast<uint32_t>(value);
  if (value != value) return bf16{static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return bf16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
#endif
}

template <>
DOMINO_HD f16 from_float<f16>(float value) {
#ifdef __CUDA_ARCH__
  return f16{__half_as_ushort(__float2half_rn(value))};
#else
  const uint32_t bits = detail::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const float magnitude = detail::bit_cast<float>(bits & 0x7fffffffu);
  if (value != value) return f16{static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 65520.0f) return f16{static_cast<uint16_t>(sign | 0x7c00u)};
  // Adding a power of two whose ulp is the target's ulp makes the FPU round for us.
  if (magnitude < 0x1p-14f) {
    const float sum = magnitude + 0.5f;  // ulp(0.5) = 2^-24 = the half subnormal step
    return f16{static_cast<uint16_t>(sign | (detail::bit_cast<uint32_t>(sum) - 0x3f000000u))};
  }
  uint32_t rounded = detail::bit_cast<uint32_t>(magnitude);
  rounded += 0xfffu + ((rounded >> 13) & 1u);
  return f16{static_cast<uint16_t>(sign | ((rounded >> 13) - (112u << 10)))};
#endif
}

// Calls fn(T{}) with the C++ type of `dtype` and returns its status:
//   return dispatch_dtype(p.dtype, [&](auto tag) { return launch<decltype(tag)>(p, stream); });
template <class Fn>
int dispatch_dtype(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kF32:
      return fn(float{});
    case DType::kF16:
      return fn(f16{});
    case DType::kBF16:
      return fn(bf16{});
  }
  return kBadDtype;
}

}  // namespace domino
