// A cluster of blocks that work on one thing (sm_90), or a single block elsewhere.
#pragma once

#include "common/launch.h"

namespace domino {

// How all threads of a block meet, warps at lines of their own if need be: the barrier counts
// warps, but __syncthreads() is for one line.
__device__ __forceinline__ void sync_block() { asm volatile("bar.sync 0;" ::: "memory"); }

struct RowCluster {
  int rank;
  int size;

  __device__ __forceinline__ RowCluster() {
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
#else
    rank = 0;
    size = 1;
#endif
  }

  // All threads of all blocks; what they wrote before, to shared or global memory, is visible
  // behind it. A block must not end while others may still touch its shared memory.
  __device__ __forceinline__ void sync() const {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
#else
    __syncthreads();
#endif
  }

  // The same where all that the others are to see is what blocks wrote to their own shared memory:
  // sync() waits for global memory, which takes longer than everything else in it.
  __device__ __forceinline__ void sync_shared() const {
#if __CUDA_ARCH__ >= 900
    if (size > 1) {
      asm volatile(
          "fence.release.sync_restrict::shared::cta.cluster;\n"
          "barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;\n"
          "fence.acquire.sync_restrict::shared::cluster.cluster;" ::
              : "memory");
      return;
    }
#endif
    __syncthreads();
  }

  // sync_shared() in two halves, for all threads of a block, which meet in between: what they wrote
  // to their own shared memory before the first is there for all blocks behind the second.
  __device__ __forceinline__ void arrive_shared() const {
#if __CUDA_ARCH__ >= 900
    if (size == 1) return;
    asm volatile(
        "fence.release.sync_restrict::shared::cta.cluster;\n"
        "barrier.cluster.arrive.relaxed;" ::
            : "memory");
#endif
  }
  __device__ __forceinline__ void wait_shared() const {
#if __CUDA_ARCH__ >= 900
    if (size == 1) return;
    asm volatile(
        "barrier.cluster.wait;\n"
        "fence.acquire.sync_restrict::shared::cluster.cluster;" ::
            : "memory");
#endif
  }

  // All threads of all blocks have come: a block ends when no other reads its shared memory any
  // more. Of what has been written it says nothing.
  __device__ __forceinline__ void meet() const {
#if __CUDA_ARCH__ >= 900
    if (size > 1) {
      asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
      asm volatile("barrier.cluster.wait;" ::: "memory");
    }
#endif
  }

  // For the first time that a block touches another's shared memory without a sync() before: all
  // blocks run once wait() returns. Of what they have written it says nothing.
  __device__ __forceinline__ void arrive() const {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
  }
  __device__ __forceinline__ void wait() const {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
  }

  // Sets all blocks' copies of a variable; seen behind the next meet(). By all threads.
  template <class T>
  __device__ __forceinline__ void tell_all(T* mine, T value) const {
    if (threadIdx.x < size) *map(mine, threadIdx.x) = value;
#if __CUDA_ARCH__ >= 900
    if (size > 1) asm volatile("fence.acq_rel.cluster;" ::: "memory");
#endif
  }

  // Lane r of a warp gets block r's copy of a variable in shared memory, lanes behind the last
  // block T{}: one round trip instead of one a block.
  template <class T>
  __device__ __forceinline__ T of_lane(T* mine) const {
    const int lane = threadIdx.x % kWarpSize;
    return lane < size ? *const_cast<volatile T*>(map(mine, lane)) : T{};
  }

  // The other block's copy of a variable in shared memory.
  template <class T>
  __device__ __forceinline__ T* map(T* mine, int other) const {
#if __CUDA_ARCH__ >= 900
    T* theirs;
    asm("mapa.u64 %0, %1, %2;" : "=l"(theirs) : "l"(mine), "r"(other));
    return theirs;
#else
    return mine;
#endif
  }
};

}  // namespace domino
