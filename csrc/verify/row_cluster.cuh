// A cluster of blocks that work on one thing (sm_90), or a single block elsewhere.
#pragma once

#include "common/launch.h"

namespace domino {

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
