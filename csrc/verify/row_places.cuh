// What row_cut.cuh finds a cut with: the places of tokens in a row's order, the block's shared
// memory, and sums and sorting over a block.
#pragma once

#include "verify/race.cuh"

namespace domino {

constexpr int kBins = 1024;
constexpr int kListed = 1024;
constexpr float kBinsPerExponent = 32.0f;

struct CutShared {
  uint32_t own[kBins];    // of this block
  uint32_t sums[kBins];   // of the cluster, of the bins that this block adds up
  uint32_t total[kBins];  // of the cluster
  unsigned long long list[kListed];
  unsigned long long sorted[kListed];
  unsigned long long before[kListed + 1];  // mass of the entries in front
  unsigned long long scan[kWalkWarps];
  unsigned long long mass;  // of this block's tokens before the pass's first place
  uint32_t count;           // and their number
  uint32_t listed;          // tokens of this block in the pass's places
  uint32_t rank_key, mass_key;
  int first_bin, last_bin;
};
__device__ __forceinline__ CutShared& cut_shared() {
  __shared__ CutShared shared;
  return shared;
}

// Places are 64 bits. Dropped: the low bits of a key that are the same in all logits of a dtype.
struct Places {
  int drop;
  int id_bits;

  __device__ uint64_t of_key(uint32_t key) const {
    return static_cast<uint64_t>(~key >> drop) << id_bits;
  }
  __device__ uint64_t at(float logit, int id) const {
    return of_key(logit_key(logit)) | (id_bits == 0 ? 0u : static_cast<uint32_t>(id));
  }
  __device__ uint64_t last_of_key(uint32_t key) const {
    return of_key(key) | ((uint64_t{1} << id_bits) - 1);
  }
  __device__ uint64_t id_of(uint64_t place) const { return place & ((uint64_t{1} << id_bits) - 1); }
  __device__ uint32_t greatest_key(uint64_t place) const {
    return ~(static_cast<uint32_t>(place >> id_bits) << drop);
  }
  __device__ uint32_t least_key(uint64_t place) const {
    return greatest_key(place) & ~((1u << drop) - 1);
  }
  // The place's logit. The dropped bits of its key are 0 in logits from 0 up, 1 in those below.
  __device__ float logit(uint64_t place) const {
    const uint32_t least = least_key(place);
    return key_logit(least & 0x80000000u ? least : least | ((1u << drop) - 1));
  }
};

// Sum of the values of the threads before this one.
static __device__ __noinline__ unsigned long long scan_block(unsigned long long value) {
  CutShared& s = cut_shared();
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  unsigned long long sum = value;
#pragma unroll 1
  for (int step = 1; step < kWarpSize; step *= 2) {
    const unsigned long long left = __shfl_up_sync(kFullMask, sum, step);
    if (lane >= step) sum += left;
  }
  __syncthreads();
  if (lane == kWarpSize - 1) s.scan[warp] = sum;
  __syncthreads();
#pragma unroll 1
  for (int n = 0; n < warp; ++n) sum += s.scan[n];
  return sum - value;
}

// Sorts the first `count` entries of s.sorted: by counting what is smaller where each thread has
// one entry, otherwise bitonic.
static __device__ __noinline__ void sort_list(int count) {
  CutShared& s = cut_shared();
  const int t = threadIdx.x;
  __syncthreads();
  if (count <= kWalkThreads) {
    const unsigned long long own = t < count ? s.sorted[t] : 0;
    int place = 0;
    if (t < (count + kWarpSize - 1) / kWarpSize * kWarpSize) {
#pragma unroll 4
      for (int n = 0; n < count; ++n) {
        const unsigned long long other = s.sorted[n];
        place += other < own || (other == own && n < t);
      }
    }
    __syncthreads();
    if (t < count) s.sorted[place] = own;
    __syncthreads();
    return;
  }
  for (int n = count + t; n < kListed; n += kWalkThreads) s.sorted[n] = ~0ull;
#pragma unroll 1
  for (int run = 2; run <= kListed; run *= 2) {
#pragma unroll 1
    for (int gap = run / 2; gap > 0; gap /= 2) {
      __syncthreads();
      const int low = 2 * t - (t & (gap - 1)), high = low + gap;
      const unsigned long long a = s.sorted[low], b = s.sorted[high];
      if ((a > b) == ((low & run) == 0)) {
        s.sorted[low] = b;
        s.sorted[high] = a;
      }
    }
  }
  __syncthreads();
}
static_assert(kListed == 2 * kWalkThreads);

// Sorts the first `count` entries of s.sorted; s.before is then what lies before each, and at the
// end all, of the masses mass(entry).
template <class Mass>
__device__ __forceinline__ void sum_sorted(int count, Mass mass) {
  CutShared& s = cut_shared();
  sort_list(count);
  const int share = ceil_div(count, kWalkThreads), first = threadIdx.x * share;
  const int last = min(count, first + share);
  unsigned long long own = 0;
#pragma unroll 1
  for (int n = first; n < last; ++n) own += mass(s.sorted[n]);
  unsigned long long before = scan_block(own);
#pragma unroll 1
  for (int n = first; n < last; ++n) {
    s.before[n] = before;
    before += mass(s.sorted[n]);
  }
  if (first < count && last == count) s.before[count] = before;
  __syncthreads();
}

// How many of the first `count` entries, which rise, are below `value`.
static __device__ __noinline__ int count_below(const unsigned long long* entries, int count,
                                               unsigned long long value) {
  int low = 0;
#pragma unroll 1
  while (count > 0) {
    const int half = count / 2;
    if (entries[low + half] < value) {
      low += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  return low;
}

}  // namespace domino
