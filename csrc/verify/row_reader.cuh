// A row of logits as the verification kernels read it: eight tokens at a time, any alignment.
#pragma once

#include <type_traits>

#include "common/launch.h"
#include "verify/chain_request.h"

namespace domino {

constexpr int kGroup = 8;                         // tokens in a load of 16 bytes of bf16
constexpr int kLaneGroups = 4;                    // groups of a lane in a chunk
constexpr int kGroupStep = kGroup * kWarpSize;    // from one group of a lane to its next
constexpr int kChunk = kLaneGroups * kGroupStep;  // tokens that a warp takes at a time

// Orders as the logits do; -0 is +0, NaN comes above all.
__device__ __forceinline__ uint32_t logit_key(float logit) {
  const uint32_t bits = __float_as_uint(add_rn(logit, 0.0f));
  if (logit != logit) return 0xffffffffu;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float key_logit(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}
constexpr uint32_t kInfinityKey = 0xff800000u;  // from here on: +inf, NaN
constexpr uint32_t kEmptyKey = 0x007fffffu;     // -inf

__device__ __forceinline__ float low_half(uint32_t word, bf16) {
  return __uint_as_float(word << 16);
}
__device__ __forceinline__ float high_half(uint32_t word, bf16) {
  return __uint_as_float(word & 0xffff0000u);
}
__device__ __forceinline__ float low_half(uint32_t word, f16) {
  return to_float(f16{static_cast<uint16_t>(word)});
}
__device__ __forceinline__ float high_half(uint32_t word, f16) {
  return to_float(f16{static_cast<uint16_t>(word >> 16)});
}
__device__ __forceinline__ uint32_t max_nan(uint32_t a, uint32_t b, bf16) {
  uint32_t out;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
__device__ __forceinline__ uint32_t max_nan(uint32_t a, uint32_t b, f16) {
  uint32_t out;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
__device__ __forceinline__ float max_nan(float a, float b) {
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}

__device__ __forceinline__ uint4 load_words(const void* pointer) {
  uint4 out;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
      : "l"(pointer));
  return out;
}

// The words there where `exists`, otherwise `other` four times. No branch, so that several loads
// can be on their way.
__device__ __forceinline__ uint4 load_words_if(bool exists, const void* pointer, uint32_t other) {
  uint4 out;
  asm("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
      "mov.b32 %0, %6;\nmov.b32 %1, %6;\nmov.b32 %2, %6;\nmov.b32 %3, %6;\n"
      "@p ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(out.x), "=&r"(out.y), "=&r"(out.z), "=&r"(out.w)
      : "l"(pointer), "r"(static_cast<uint32_t>(exists)), "r"(other));
  return out;
}

// Eight logits as they are stored; what lies behind the vocabulary is -inf.
template <class T>
struct Group;

template <class T>
struct HalfGroup {
  static constexpr uint32_t kPad = std::is_same_v<T, bf16> ? 0xff80u : 0xfc00u;  // -inf
  uint4 words;

  // Eight logits of an aligned row where `exists`, otherwise eight of -inf.
  __device__ __forceinline__ void load_if(bool exists, const T* logits) {
    words = load_words_if(exists, logits, kPad * 0x10001u);
  }
  __device__ __forceinline__ void load(const T* row, int token, int vocab, bool aligned) {
    if (aligned && token + kGroup <= vocab)
      words = load_words(row + token);
    else
      words = load_halves(row, token, vocab);
  }
  __device__ __forceinline__ float at(int j) const {
    const uint32_t word = j < 2 ? words.x : j < 4 ? words.y : j < 6 ? words.z : words.w;
    return j % 2 == 0 ? low_half(word, T{}) : high_half(word, T{});
  }
  // The greatest of the even logits and of the odd ones, a half each.
  __device__ __forceinline__ uint32_t most() const {
    return max_nan(max_nan(words.x, words.y, T{}), max_nan(words.z, words.w, T{}), T{});
  }

 private:
  static __device__ __noinline__ uint4 load_halves(const T* row, int token, int vocab) {
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const uint32_t half = token + j < vocab ? static_cast<uint32_t>(row[token + j].bits) : kPad;
      words[j / 2] = j % 2 == 0 ? half : words[j / 2] | half << 16;
    }
    return {words[0], words[1], words[2], words[3]};
  }
};
template <>
struct Group<bf16> : HalfGroup<bf16> {};
template <>
struct Group<f16> : HalfGroup<f16> {};

template <>
struct Group<float> {
  float values[kGroup];

  __device__ __forceinline__ void load_if(bool exists, const float* logits) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 words = load_words_if(exists, logits + 4 * half, 0xff800000u);
      values[4 * half] = __uint_as_float(words.x);
      values[4 * half + 1] = __uint_as_float(words.y);
      values[4 * half + 2] = __uint_as_float(words.z);
      values[4 * half + 3] = __uint_as_float(words.w);
    }
  }
  __device__ __forceinline__ void load(const float* row, int token, int vocab, bool aligned) {
    if (aligned && token + kGroup <= vocab) return load_if(true, row + token);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) values[j] = token + j < vocab ? row[token + j] : -INFINITY;
  }
  __device__ __forceinline__ float at(int j) const { return values[j]; }
};

// The greatest of a lane's logits, NaN if one is.
template <class T>
__device__ __forceinline__ float lane_top(const Group<T> (&groups)[kLaneGroups]) {
  if constexpr (std::is_same_v<T, float>) {
    float top = groups[0].at(0);
#pragma unroll
    for (int n = 1; n < kLaneGroups * kGroup; ++n)
      top = max_nan(top, groups[n / kGroup].at(n % kGroup));
    return top;
  } else {
    uint32_t top = groups[0].words.x;
#pragma unroll
    for (int g = 0; g < kLaneGroups; ++g) {
      top = max_nan(top, groups[g].words.x, T{});
      top = max_nan(top, groups[g].words.y, T{});
      top = max_nan(top, groups[g].words.z, T{});
      top = max_nan(top, groups[g].words.w, T{});
    }
    return max_nan(low_half(top, T{}), high_half(top, T{}));
  }
}

// A row of one dtype, without edits.
template <class T>
struct RowSource {
  using Stored = T;
  const T* data;
  int vocab;
  bool aligned;

  __device__ RowSource(const LogitRow& row, const RowEdits&, int row_vocab)
      : data(static_cast<const T*>(row.data)),
        vocab(row_vocab),
        aligned(reinterpret_cast<uintptr_t>(row.data) % 16 == 0) {}
  __device__ __forceinline__ Group<T> group(int token) const {
    Group<T> out;
    out.load(data, token, vocab, aligned);
    return out;
  }
  __device__ __forceinline__ float at(int64_t token) const { return to_float(data[token]); }
  // Low bits that are the same in the keys of all logits, but for the sign.
  static constexpr int kSameBits = std::is_same_v<T, float> ? 0 : std::is_same_v<T, bf16> ? 16 : 13;
};

// Any dtype, with edits: the logits that the law is of. Small code, not fast code.
template <>
struct RowSource<void> {
  using Stored = float;
  LogitRow row;
  RowEdits edits;
  int vocab;

  __device__ RowSource(const LogitRow& logits, const RowEdits& row_edits, int row_vocab)
      : row(logits), edits(row_edits), vocab(row_vocab) {}
  __device__ __noinline__ float at(int64_t token) const {
    return edits.apply(row.at(token), token);
  }
  __device__ __forceinline__ Group<float> group(int token) const {
    Group<float> out;
#pragma unroll
    for (int j = 0; j < kGroup; ++j) out.values[j] = token + j < vocab ? at(token + j) : -INFINITY;
    return out;
  }
  static constexpr int kSameBits = 0;
};

}  // namespace domino
