// Warpgroup tensor-core step m64n56k16 (sm_90a) with fp32 sums: A in registers, B in shared memory.
//
// Warp w of the group holds rows 16w .. 16w + 15 of A and of the sums, as mma_16x8x16 does; d[4j]
// .. d[4j + 3] are its sums with columns 8j .. 8j + 7. 56 columns: the 14 corrected drafts of 4
// rows.
#pragma once

#include "common/copy_async.cuh"
#include "common/dtype.h"

namespace domino {

constexpr int kWgmmaColumns = 56;

// B of one step: k by 8, then columns: [2][56][8 k], 16-byte aligned.
__device__ __forceinline__ uint64_t wgmma_operand(const void* shared) {
  constexpr uint64_t kNextK = kWgmmaColumns * 16, kNextColumns = 128;  // bytes, from 8 to 8
  return static_cast<uint64_t>((shared_address(shared) & 0x3ffff) >> 4) | (kNextK >> 4) << 16 |
         (kNextColumns >> 4) << 32;
}

// d = a b + (add ? d : 0), in flight until wgmma_wait. All warps of the group call it.
template <class T>
__device__ __forceinline__ void wgmma_64x56x16(float (&d)[28], uint4 a, uint64_t b, bool add);

template <>
__device__ __forceinline__ void wgmma_64x56x16<bf16>(float (&d)[28], uint4 a, uint64_t b,
                                                     bool add) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %33, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n56k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
      "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27}, "
      "{%28, %29, %30, %31}, %32, add, 1, 1, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(static_cast<int>(add)));
}

template <>
__device__ __forceinline__ void wgmma_64x56x16<f16>(float (&d)[28], uint4 a, uint64_t b, bool add) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %33, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n56k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
      "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27}, "
      "{%28, %29, %30, %31}, %32, add, 1, 1, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(static_cast<int>(add)));
}

// Before the first step: what registers hold is visible to the tensor cores.
__device__ __forceinline__ void wgmma_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kInFlight>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kInFlight) : "memory");
}

// Stores to shared memory by this thread are visible to wgmma behind the next barrier.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

}  // namespace domino
