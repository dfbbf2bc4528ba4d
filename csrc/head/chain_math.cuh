// The arithmetic of the block form: every sum in one order, whoever computes it.
#pragma once

#include <type_traits>

#include "common/argmax_key.h"
#include "common/copy_async.cuh"
#include "common/launch.h"
#include "common/mma.cuh"
#include "head/draft_chain.h"

namespace domino {

constexpr int kStateParts = 16;  // of the k of a product with the state, summed apart

__device__ __forceinline__ unsigned long long warp_best(unsigned long long key) {
  const uint32_t high = static_cast<uint32_t>(key >> 32);
  const uint32_t best = __reduce_max_sync(kFullMask, high);
  const uint32_t low = high == best ? static_cast<uint32_t>(key) : 0;
  return static_cast<unsigned long long>(best) << 32 | __reduce_max_sync(kFullMask, low);
}

// 16 bytes, or zeros.
__device__ __forceinline__ uint4 load_where(bool inside, const void* at) {
  uint4 value{0, 0, 0, 0};
  asm volatile("{.reg .pred p; setp.ne.u32 p, %4, 0; @p ld.global.v4.u32 {%0, %1, %2, %3}, [%5];}"
               : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w)
               : "r"(static_cast<uint32_t>(inside)), "l"(at));
  return value;
}

// Lane t of a quad has loaded inputs 8t .. 8t + 7 of 32; it gets what two MMAs want of it, each of
// which takes 16 inputs side by side as wgmma does. By a warp.
__device__ __forceinline__ uint4 by_sixteens(const uint4& eight) {
  const bool upper = threadIdx.x % 4 >= 2;
  const uint32_t x = __shfl_xor_sync(kFullMask, upper ? eight.x : eight.z, 2);
  const uint32_t y = __shfl_xor_sync(kFullMask, upper ? eight.y : eight.w, 2);
  return upper ? uint4{x, y, eight.z, eight.w} : uint4{eight.x, eight.y, x, y};
}

// 2^x and 1 / x of the special function unit, subnormals taken as zero.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float fast_inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float fast_sigmoid(float x) {
  return fast_inverse(1.0f + fast_exp2(x * -1.44269504f));
}
__device__ __forceinline__ float fast_tanh(float x) {
  return 1.0f - 2.0f * fast_inverse(1.0f + fast_exp2(x * 2.88539008f));
}

// An element of u from W1h H + W1s S_j, of the kinds that the block form takes.
__device__ __forceinline__ float chain_low_rank_input(LowRank kind, float mixed) {
  return kind == LowRank::kLinear ? mixed : mixed * fast_sigmoid(mixed);
}

// The same of the gated Markov head, whose s_j is the row of y_j: own is its element.
__device__ __forceinline__ float chain_gate(float mixed, float own) {
  return fast_sigmoid(mixed) * own;
}

// A unit of S_j: x and s the gates' (r, z, n) products with the input and with S_{j-1}.
template <class T>
__device__ __forceinline__ T gru_unit(float x_r, float x_z, float x_n, float s_r, float s_z,
                                      float s_n, float state) {
  const float r = fast_sigmoid(x_r + s_r), keep = fast_sigmoid(x_z + s_z);
  const float candidate = fast_tanh(x_n + r * s_n);
  T next = from_float<T>(candidate + keep * (state - candidate));
  next.bits &= 0xbfff;  // below 2 whatever comes in: NaN in the weights becomes 1.5
  return next;
}

// The sum of kCount values, kStride apart, neighbours first: the order in which the parts of k are
// added. A warp that has two neighbours may add them itself.
template <int kCount, int kStride>
__device__ __forceinline__ float sum_of(const float* at) {
  if constexpr (kCount == 1) {
    return *at;
  } else if constexpr (kCount == 4 && kStride == 1) {
    const float4 four = *reinterpret_cast<const float4*>(at);
    return (four.x + four.y) + (four.z + four.w);
  } else {
    return sum_of<kCount / 2, kStride>(at) + sum_of<kCount / 2, kStride>(at + kCount / 2 * kStride);
  }
}

template <int kStride>
__device__ __forceinline__ float sum_of_parts(const float* part) {
  return sum_of<kStateParts, kStride>(part);
}

constexpr int kAnyType = -1;
template <class T>
constexpr int kTypeOf =
    std::is_same_v<T, bf16> ? static_cast<int>(DType::kBF16) : static_cast<int>(DType::kF16);

// An adjusted base logit (draft_chain.h) on its way from memory. Where it is of a half type known
// beforehand, nothing else adjusts it.
struct RawBase {
  uint32_t bits;
  float bias;
  uint32_t mask;

  template <bool kHalf>
  __device__ __forceinline__ void load(const DraftChainParams& p, int64_t b, int64_t j,
                                       uint32_t id) {
    const int64_t at = b * p.base_batch_stride + (p.first_slot + j) * p.base_slot_stride + id;
    if (!kHalf && p.base_dtype == DType::kF32) {
      bits = static_cast<const uint32_t*>(p.base_logits)[at];
    } else {
      bits = static_cast<const uint16_t*>(p.base_logits)[at];
    }
    if constexpr (!kHalf) {
      bias = p.bias ? p.bias[b * p.bias_stride + id] : 0.0f;
      mask = p.mask ? p.mask[b * p.mask_stride + id / 32] : 0xffffffffu;
    }
  }

  template <int kType>
  __device__ __forceinline__ float value(const DraftChainParams& p, uint32_t id) const {
    const int type = kType == kAnyType ? static_cast<int>(p.base_dtype) : kType;
    float base = detail::bit_cast<float>(bits);
    if (type == static_cast<int>(DType::kBF16)) base = to_float(bf16{static_cast<uint16_t>(bits)});
    if (type == static_cast<int>(DType::kF16)) base = to_float(f16{static_cast<uint16_t>(bits)});
    if constexpr (kType != kAnyType) return base;
    if (p.bias) base += bias;
    return id >= p.vocab_valid || (mask >> id % 32 & 1) == 0 ? -INFINITY : base;
  }
};

__device__ __forceinline__ float base_at(const DraftChainParams& p, int64_t b, int64_t j,
                                         uint32_t id) {
  RawBase base;
  base.load<false>(p, b, j, id);
  return base.value<kAnyType>(p, id);
}

// Where that many rows missed their pools, few of them would be right the second time: the dense
// steps follow in any case, and a pass over W2 costs the same for all rows as for some.
constexpr int kCertainRows = 16;  // of which each starts again by itself
__device__ __forceinline__ bool restart_is_vain(int64_t pending, int64_t rows) {
  return rows > kCertainRows && 4 * pending > 3 * rows;
}

// What a certificate found in row b becomes part of the draft, before `round` goes on from there.
__device__ __forceinline__ void take_restart(const ChainBlockParams& p, int round, int64_t b) {
  const int first = p.first_of(round)[b];
  if (first == p.row_done()) return;
  const int64_t at = b * p.drafts + first - 1;
  p.tokens[at] = key_id(p.keys[at]);
  p.scores[at] = key_value(p.keys[at]);
  if (p.restarts) ++p.restarts[b];
}

// The draft that a launch of the chain begins row b with. One thread of a row writes: where the
// rounds to come begin, or what this one takes up.
__device__ __forceinline__ int begin_row(const ChainBlockParams& p, bool restart, int64_t b,
                                         bool writes) {
  const int drafts = static_cast<int>(p.drafts);
  if (restart) {
    if (writes) take_restart(p, 1, b);
    return min(p.first_of(1)[b], drafts);
  }
  const bool active = p.num_active == nullptr || b < *p.num_active;
  if (writes) {
    p.first_of(0)[b] = active ? min(static_cast<int>(p.prefix), drafts) : p.row_done();
    p.first_of(1)[b] = p.first_of(2)[b] = p.row_done();
    if (p.restarts && active) p.restarts[b] = 0;
  }
  return active ? 0 : drafts;
}

// The sum over a warp's MMAs with its part of the state.
template <int kSteps>
__device__ __forceinline__ float sum_of_steps(const float (&sums)[kSteps][4], int element) {
  if constexpr (kSteps == 1) {
    return sums[0][element];
  } else {
    static_assert(kSteps == 4);
    return (sums[0][element] + sums[1][element]) + (sums[2][element] + sums[3][element]);
  }
}

// The four chains of a tile of 16 ids: this lane's rows of W2 at `low` and `high`, u at `u`, each
// `steps` times 16 elements (kRank / 16 where that is known).
template <class T, int kRank>
__device__ __forceinline__ void score_tile(float (&sums)[4][4], const char* low, const char* high,
                                           const char* u, int steps) {
  const int chain = kRank ? kRank / 64 : (steps + 3) / 4;
  static_assert(kRank % 64 == 0);
#pragma unroll(kRank ? kRank / 64 : 1)
  for (int i = 0; i < chain; ++i) {
    uint2 a[4], b[4], x[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int at = (q * chain + i) * 32;
      const bool inside = kRank || at < steps * 32;  // zeros add nothing to a sum
      a[q] = inside ? *reinterpret_cast<const uint2*>(low + at) : uint2{0, 0};
      b[q] = inside ? *reinterpret_cast<const uint2*>(high + at) : uint2{0, 0};
      x[q] = inside ? *reinterpret_cast<const uint2*>(u + at) : uint2{0, 0};
    }
#pragma unroll
    for (int q = 0; q < 4; ++q)
      mma_16x8x16<T>(sums[q], a[q].x, b[q].x, a[q].y, b[q].y, x[q].x, x[q].y);
  }
}

// The four chains of kTiles tiles of 16 ids, `steps` times 16 elements (kRank / 16 where that is
// known): rows(tile, step) is the fragment of W2, column(step) that of u.
template <class T, int kRank, int kTiles, class Rows, class Column>
__device__ __forceinline__ void score_tiles(float (&sums)[kTiles][4][4], int steps, Rows rows,
                                            Column column) {
  const int chain = kRank ? kRank / 64 : (steps + 3) / 4;
  static_assert(kRank % 64 == 0);
  if (kRank == 0) {
    for (auto& tile : sums)
      for (auto& chain : tile)
        for (float& sum : chain) sum = 0.0f;
  }
#pragma unroll(kRank ? kRank / 64 : 1)
  for (int i = 0; i < chain; ++i)
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int step = q * chain + i;
      if (kRank == 0 && step >= steps) break;
      const uint2 x = column(step);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint4 w = rows(tile, step);
        if (kRank != 0 && i == 0) {
          mma_first_16x8x16<T>(sums[tile][q], w.x, w.y, w.z, w.w, x.x, x.y);
        } else {
          mma_16x8x16<T>(sums[tile][q], w.x, w.y, w.z, w.w, x.x, x.y);
        }
      }
    }
}

__device__ __forceinline__ float chain_sum(const float (&sums)[4][4], int element) {
  return (sums[0][element] + sums[1][element]) + (sums[2][element] + sums[3][element]);
}

// W_ih E[y] for 16 units: this lane's sums of its parts of the inputs, y the token of its column.
// Part q takes the 32s q, q + 16, .. of the inputs.
template <class T, int kParts>
__device__ __forceinline__ void input_product(const ChainBlockParams& p, float* sums_of_parts,
                                              uint32_t y, int unit0) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int g = lane / 4, inputs = static_cast<int>(p.inputs);
  const T* const x = static_cast<const T*>(p.embedding) + static_cast<int64_t>(y) * inputs;
  const T* const w = static_cast<const T*>(p.w_ih) + static_cast<int64_t>(unit0 + g) * inputs;
  const int64_t gate = p.units * p.inputs;
#pragma unroll 1
  for (int part = 0; part < kParts; ++part) {
    float sums[3][4] = {};
#pragma unroll 2
    for (int first = (warp * kParts + part) * 32; first < inputs; first += kStateParts * 32) {
      const int k = first + lane % 4 * 8;
      const uint4 column = by_sixteens(load_where(k < inputs, x + k));
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const uint4 low = by_sixteens(load_where(k < inputs, w + i * gate + k));
        const uint4 high = by_sixteens(load_where(k < inputs, w + i * gate + 8 * inputs + k));
        mma_16x8x16<T>(sums[i], low.x, high.x, low.y, high.y, column.x, column.y);
        mma_16x8x16<T>(sums[i], low.z, high.z, low.w, high.w, column.z, column.w);
      }
    }
#pragma unroll
    for (int i = 0; i < 3; ++i)
      *reinterpret_cast<float4*>(sums_of_parts + (warp * kParts + part) * 384 + i * 128 +
                                 lane * 4) = {sums[i][0], sums[i][1], sums[i][2], sums[i][3]};
  }
}

}  // namespace domino
