// Thread block clusters (sm_90). A launch without the attribute, or on an older GPU, is a cluster
// of one block, and the same code runs there.
#pragma once

#include "common/launch.h"

namespace domino {

__device__ __forceinline__ unsigned cluster_size() {
  unsigned size = 1;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
#endif
  return size;
}

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

// All threads of all blocks; what they wrote to shared memory is visible behind it.
__device__ __forceinline__ void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The same where nothing but barriers made (make_barrier) has to be visible behind it: memory
// accesses on their way are not waited for.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// *pointer in the shared memory of block `rank` of the cluster.
template <class T>
__device__ __forceinline__ T load_shared_of(const T* pointer, unsigned rank) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const unsigned local = static_cast<unsigned>(__cvta_generic_to_shared(pointer));
  unsigned remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  T value;
  if constexpr (sizeof(T) == 4) {
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(remote));
  } else {
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(value) : "r"(remote));
  }
  return value;
#else
  return *pointer;
#endif
}

// Where `pointer` of block `rank` of the cluster is, in the window of the cluster's shared memory.
__device__ __forceinline__ uint32_t shared_address_of(const void* pointer, unsigned rank) {
  uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(address), "r"(rank));
#endif
  return address;
}

// To such an address; barrier `barrier` of the same block counts the bytes (mbarrier).
__device__ __forceinline__ void send_shared(uint32_t at, uint64_t word, uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(at),
      "l"(word), "r"(barrier)
      : "memory");
#endif
}

__device__ __forceinline__ void send_shared(uint32_t at, uint64_t first, uint64_t second,
                                            uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [%0], {%1, %2}, [%3];" ::
          "r"(at),
      "l"(first), "l"(second), "r"(barrier)
      : "memory");
#endif
}

// Barriers in shared memory whose phases end when one thread has said how many bytes come, and they
// have come. Made by one thread, before cluster_sync().
__device__ __forceinline__ void make_barrier(uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void expect_bytes(uint32_t barrier, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

// Whether the barrier's phase of this parity has ended: all bytes can be read. The answer may take
// a microsecond, during which the thread sleeps; it wakes sooner than a loop would look again.
__device__ __forceinline__ bool phase_ended(uint32_t barrier, uint32_t parity) {
  uint32_t ended = 1;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
#endif
  return ended != 0;
}

}  // namespace domino
