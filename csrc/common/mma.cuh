// Tensor-core step m16n8k16 with fp32 sums, and the load that feeds it.
#pragma once

#include "common/dtype.h"

namespace domino {

// d += a b. With g = lane / 4 and t = lane % 4 a lane holds, two elements of T a register,
//   a[0..3]: rows g, g + 8, g, g + 8;  k = 2t, 2t + 1 (first two) and 2t + 8, 2t + 9 (last two)
//   b[0..1]: column g;                 k likewise
//   d[0..3]: (row g, columns 2t and 2t + 1), (row g + 8, the same columns)
template <class T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                            uint32_t a3, uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma_16x8x16<bf16>(float (&d)[4], uint32_t a0, uint32_t a1,
                                                  uint32_t a2, uint32_t a3, uint32_t b0,
                                                  uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_16x8x16<f16>(float (&d)[4], uint32_t a0, uint32_t a1,
                                                 uint32_t a2, uint32_t a3, uint32_t b0,
                                                 uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same with d = a b: the first of a sum.
template <class T>
__device__ __forceinline__ void mma_first_16x8x16(float (&d)[4], uint32_t a0, uint32_t a1,
                                                  uint32_t a2, uint32_t a3, uint32_t b0,
                                                  uint32_t b1);

template <>
__device__ __forceinline__ void mma_first_16x8x16<bf16>(float (&d)[4], uint32_t a0, uint32_t a1,
                                                        uint32_t a2, uint32_t a3, uint32_t b0,
                                                        uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
}

template <>
__device__ __forceinline__ void mma_first_16x8x16<f16>(float (&d)[4], uint32_t a0, uint32_t a1,
                                                       uint32_t a2, uint32_t a3, uint32_t b0,
                                                       uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
}

// The same of int8 with int32 sums, m16n8k32: a and b hold 4 elements a register,
//   a: rows g, g + 8, g, g + 8;  k = 4t .. 4t + 3 (first two) and 4t + 16 .. (last two)
//   b: column g;                 k likewise
__device__ __forceinline__ void mma_16x8x32(int (&d)[4], const uint4& a, const uint2& b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}

// Fragment a of 16 rows and 16 k from shared memory: `at` is for lane l the 16 bytes of row l % 16,
// of k from 8 (l / 16) on. The compiler may move it wherever `at` and `when` are known: only for
// memory that changes no more.
__device__ __forceinline__ uint4 load_fragment(uint32_t at, int when) {
  uint4 a;
  asm("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];  // %5"
      : "=r"(a.x), "=r"(a.y), "=r"(a.z), "=r"(a.w)
      : "r"(at), "r"(when));
  return a;
}

// The same in its place among other accesses.
__device__ __forceinline__ uint4 load_fragment(uint32_t at) {
  uint4 a;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a.x), "=r"(a.y), "=r"(a.z), "=r"(a.w)
               : "r"(at)
               : "memory");
  return a;
}

// 16 bytes of global memory that this SM does not read again soon. Neither .nc nor without
// volatile: the compiler would move the load behind previous_launch_done().
__device__ __forceinline__ uint4 load_stream(const void* pointer) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(pointer));
  return value;
}

}  // namespace domino
