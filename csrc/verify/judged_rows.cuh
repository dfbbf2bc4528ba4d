// How verify_cut_kernel tells the clusters of verify_draw_kernel that a request's rows have all
// been judged: the race for its last token then runs while rows of other requests are still read,
// on processors that have read theirs. A counter a request, in front of the workspace, 0 between
// calls.
#pragma once

#include "verify/slot_verdict.cuh"

namespace domino {

// Is it done in a call without a top-k? Of verify_draw_kernel one form waits for counters.
__host__ __device__ inline bool counts_judged(const VerifyChainParams& p) {
  return p.rule != VerifyRule::kMatch && p.rule != VerifyRule::kGumbel &&
         p.rule != VerifyRule::kBlock && p.batch > 16 && p.batch <= kGreedyWords / 2 &&
         p.drafts < 1024;
}
__device__ __forceinline__ uint32_t* judged_count(const VerifyChainParams& p, int64_t b) {
  return reinterpret_cast<uint32_t*>(static_cast<unsigned long long*>(p.workspace) +
                                     kGreedyWords / 2 + b);
}

constexpr uint32_t kLeft = 1u << 16;  // in a counter, above the rows: a block that waits no more

// Behind the verdict that this thread has written. Where launches do not overlap nobody waits.
__device__ __forceinline__ void count_judged(uint32_t* count) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
#endif
}

// Returns when all rows have been counted, or the launch that counts them is over. It cannot be
// kept from going on: this launch starts when all blocks of that one run. By one thread; a barrier
// has to follow.
__device__ __forceinline__ void wait_for_judges(const uint32_t* count, int rows) {
  constexpr int kMostPolls = 1000;
  uint32_t judged;
  int polls = 0;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(judged) : "l"(count) : "memory");
    if (judged % kLeft == static_cast<uint32_t>(rows)) return;
    __nanosleep(100);
  } while (++polls < kMostPolls);
  previous_launch_done();
}

// By one thread of each of `blocks` that have waited: the last one leaves the counter at 0.
__device__ __forceinline__ void leave_count(uint32_t* count, int blocks) {
  if (atomicAdd(count, kLeft) / kLeft + 1 == static_cast<uint32_t>(blocks)) *count = 0;
}

}  // namespace domino
