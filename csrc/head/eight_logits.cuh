// Eight neighbouring base logits of a thread, as they are read, edited and raised to a maximum over
// slots: kPacked two to a word, as they are (16-bit logits without a bias); otherwise widened.
#pragma once

#include "common/argmax_key.h"
#include "common/launch.h"
#include "common/mma.cuh"

namespace domino {

constexpr int kEight = 8;

template <class Base, bool kPacked>
struct EightLogits;

// Two values a word.
template <class T>
struct Pair;

template <>
struct Pair<bf16> {
  static constexpr uint32_t kMinusInfinity = 0xff80ff80u, kOne = 0x3f803f80u;
  static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
    uint32_t most;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    return most;
  }
  static __device__ __forceinline__ uint32_t plus_zero(uint32_t x) {
    uint32_t sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(kOne), "r"(0));
    return sum;
  }
};

template <>
struct Pair<f16> {
  static constexpr uint32_t kMinusInfinity = 0xfc00fc00u, kOne = 0x3c003c00u;
  static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
    uint32_t most;
    asm("max.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    return most;
  }
  static __device__ __forceinline__ uint32_t plus_zero(uint32_t x) {
    uint32_t sum;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(kOne), "r"(0));
    return sum;
  }
};

template <class T>
struct EightLogits<T, true> {
  using Key = uint16_t;
  static constexpr bool kTakesBias = false;
  uint32_t pair[4];

  static __device__ __forceinline__ EightLogits none() {
    EightLogits value;
    for (uint32_t& x : value.pair) x = Pair<T>::kMinusInfinity;
    return value;
  }
  __device__ __forceinline__ void set(const uint4 (&raw)[1], const float*) {
    pair[0] = raw[0].x, pair[1] = raw[0].y, pair[2] = raw[0].z, pair[3] = raw[0].w;
  }
  // bit i of `keep`: value i stays, the others become -inf
  __device__ __forceinline__ void allow(uint32_t keep) {
    if (keep == 0xff) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t mask =
          (keep >> (2 * i) & 1 ? 0xffffu : 0u) | (keep >> (2 * i + 1) & 1 ? 0xffff0000u : 0u);
      pair[i] = (pair[i] & mask) | (Pair<T>::kMinusInfinity & ~mask);
    }
  }
  __device__ __forceinline__ void raise(const EightLogits& other) {
#pragma unroll
    for (int i = 0; i < 4; ++i) pair[i] = Pair<T>::larger(pair[i], other.pair[i]);
  }
  // The largest of these values, as a word that may be compared and passed between lanes.
  using Most = uint32_t;
  __device__ __forceinline__ Most most() const {
    return Pair<T>::larger(Pair<T>::larger(pair[0], pair[1]), Pair<T>::larger(pair[2], pair[3]));
  }
  static __device__ __forceinline__ Most larger(Most a, Most b) { return Pair<T>::larger(a, b); }
  static __device__ __forceinline__ float value_of_most(Most most) {
    const float low = to_float(T{static_cast<uint16_t>(most)});
    return fmaxf(fmaxf(low, to_float(T{static_cast<uint16_t>(most >> 16)})), -INFINITY);
  }
  __device__ __forceinline__ float at(int i) const {
    return to_float(T{static_cast<uint16_t>(pair[i / 2] >> (16 * (i % 2)))});
  }
  // Values 2i and 2i + 1, none of them NaN, as two unsigned integers of their order; -0 equals +0.
  __device__ __forceinline__ uint32_t ordered(int i) const {
    const uint32_t x = Pair<T>::plus_zero(pair[i]);
    uint32_t negative;  // 0xffff where it is: __byte_perm does not replicate signs
    asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(negative) : "r"(x));
    return x ^ (negative | 0x80008000u);
  }
  __device__ __forceinline__ Key key(int i) const {
    const uint32_t bits = pair[i / 2] >> (16 * (i % 2)) & 0xffff;
    return bits == 0x8000 ? 0x8000 : bits ^ (bits & 0x8000 ? 0xffff : 0x8000);  // -0 becomes +0
  }
  static __device__ __forceinline__ float value_of(Key key) {
    return to_float(T{static_cast<uint16_t>(key ^ (key & 0x8000 ? 0x8000 : 0xffff))});
  }
};

template <class Base>
struct EightLogits<Base, false> {
  using Key = uint32_t;
  static constexpr bool kTakesBias = true;
  float value[kEight];

  static __device__ __forceinline__ EightLogits none() {
    EightLogits result;
    for (float& x : result.value) x = -INFINITY;
    return result;
  }
  __device__ __forceinline__ void set(const uint4 (&raw)[sizeof(Base) / 2], const float* bias) {
    Base element[kEight];
    memcpy(element, raw, sizeof(element));
#pragma unroll
    for (int i = 0; i < kEight; ++i) value[i] = to_float(element[i]) + bias[i];
  }
  __device__ __forceinline__ void allow(uint32_t keep) {
    if (keep == 0xff) return;
#pragma unroll
    for (int i = 0; i < kEight; ++i) value[i] = keep >> i & 1 ? value[i] : -INFINITY;
  }
  __device__ __forceinline__ void raise(const EightLogits& other) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) value[i] = fmaxf(value[i], other.value[i]);
  }
  using Most = float;
  __device__ __forceinline__ Most most() const {
    float most = value[0];
#pragma unroll
    for (int i = 1; i < kEight; ++i) most = fmaxf(most, value[i]);
    return most;
  }
  static __device__ __forceinline__ Most larger(Most a, Most b) { return fmaxf(a, b); }
  static __device__ __forceinline__ float value_of_most(Most most) {
    return fmaxf(most, -INFINITY);
  }
  __device__ __forceinline__ float at(int i) const { return value[i]; }
  __device__ __forceinline__ Key key(int i) const {
    return static_cast<Key>(argmax_key(value[i], 0) >> 32);
  }
  static __device__ __forceinline__ float value_of(Key key) {
    return key_value(static_cast<uint64_t>(key) << 32);
  }
};

// Which of the ids v .. v + 7 exist and count; v is a multiple of 8, Params has vocab, vocab_valid
// and mask.
struct EightIds {
  int v, inside;   // first id; how many exist
  uint32_t valid;  // bit i: id v + i is below vocab_valid
  uint32_t keep;   // and is allowed
  template <class Params>
  __device__ __forceinline__ EightIds(const Params& p, int64_t b, int v, int most = kEight)
      : v(v),
        inside(max(0, min(static_cast<int>(p.vocab) - v, most))),
        valid((1u << max(0, min(static_cast<int>(p.vocab_valid) - v, inside))) - 1),
        keep(valid) {
    if (p.mask && inside > 0) keep &= p.mask[b * p.mask_stride + v / 32] >> (v % 32);
  }
  // Where it is known that all of them do.
  static __device__ __forceinline__ EightIds all(int v) { return {v, kEight, 0xffu, 0xffu}; }

 private:
  __device__ __forceinline__ EightIds(int v, int inside, uint32_t valid, uint32_t keep)
      : v(v), inside(inside), valid(valid), keep(keep) {}
};

// kVector: whole eights by 16-byte loads, or none; otherwise element by element.
template <bool kVector, class Base>
__device__ __forceinline__ void load_logits(uint4 (&raw)[sizeof(Base) / 2], const Base* at,
                                            int inside) {
  if constexpr (kVector) {
    if (inside == 0) return;
#pragma unroll
    for (int part = 0; part < static_cast<int>(sizeof(Base)) / 2; ++part)
      raw[part] = load_stream(at + part * (16 / sizeof(Base)));
  } else {
    Base element[kEight] = {};
    for (int k = 0; k < inside; ++k) element[k] = at[k];
    memcpy(raw, element, sizeof(element));
  }
}

}  // namespace domino
