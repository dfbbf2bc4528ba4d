// Messages between the blocks of a cluster (sm_90), or within a single block elsewhere: words that
// go to shared memory, and a barrier there that counts their bytes. A trip to another block costs a
// third of a cluster barrier, whose fence also waits for what was written to global memory.
#pragma once

#include "common/cluster.cuh"
#include "verify/row_cluster.cuh"

namespace domino {

// Barriers of a block, one for each exchange of messages.
struct Mailbox {
  uint64_t barrier;

  // By one thread, before the first barrier of the cluster.
  __device__ __forceinline__ void open() { make_barrier(address()); }

  // `words` to all blocks of the cluster, or to the first `blocks`, to `to`, a variable in shared
  // memory. By a whole warp, all of whose lanes have the same words.
  template <int kWords>
  __device__ __forceinline__ void send(const RowCluster& cluster, void* to,
                                       const uint64_t (&words)[kWords], int blocks = 16) {
    static_assert(kWords == 1 || kWords % 2 == 0);
    const int lane = threadIdx.x % kWarpSize;
    if (lane >= min(cluster.size, blocks)) return;
    if (alone(cluster)) {
#pragma unroll
      for (int n = 0; n < kWords; ++n) static_cast<uint64_t*>(to)[n] = words[n];
      return;
    }
    const uint32_t at = shared_address_of(to, lane), arrived = shared_address_of(&barrier, lane);
    if constexpr (kWords == 1) {
      send_shared(at, words[0], arrived);
    } else {
#pragma unroll
      for (int n = 0; n < kWords; n += 2) send_shared(at + 8 * n, words[n], words[n + 1], arrived);
    }
  }

  // Until all messages of the exchange, of `bytes` in all, are there. By all threads of a block; of
  // a mailbox that is used again, `turn` counts the exchanges.
  __device__ __forceinline__ void wait(const RowCluster& cluster, int bytes, int turn = 0) {
    wait_as(cluster, threadIdx.x == 0, bytes, turn);
  }

  // The same by some warps of a block, where the others call pass(): `tells` in one thread.
  __device__ __forceinline__ void wait_as(const RowCluster& cluster, bool tells, int bytes,
                                          int turn = 0) {
    if (alone(cluster)) return __syncthreads();
    if (tells) expect_bytes(address(), bytes);
    while (!phase_ended(address(), turn & 1)) continue;
  }
  static __device__ __forceinline__ void pass(const RowCluster& cluster) {
    if (alone(cluster)) __syncthreads();
  }

 private:
  // A launch that is not one of clusters cannot send.
  static __device__ __forceinline__ bool alone(const RowCluster& cluster) {
#if __CUDA_ARCH__ >= 900
    return cluster.size == 1;
#else
    return true;
#endif
  }
  __device__ __forceinline__ uint32_t address() const {
    return static_cast<uint32_t>(__cvta_generic_to_shared(&barrier));
  }
};

}  // namespace domino
