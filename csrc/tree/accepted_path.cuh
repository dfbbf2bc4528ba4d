// compact_accepted and kv_move, each in one launch. Copies: bound by HBM where the rows are large,
// by latency otherwise.
#pragma once

#include "common/launch.h"
#include "tree/accepted_path.h"

namespace domino {

constexpr int kCompactThreads = 256;
constexpr int kMoveThreads = 256;
constexpr int kMoveSlots = 64;  // slots whose places are found at a time
// Slots read before the first of them is written.
template <class Unit>
constexpr int kMoveAhead = sizeof(Unit) < 4 ? 4 : 8;

// AcceptedPath::length by the first warp; `length` is shared. The caller synchronises.
__device__ __forceinline__ void path_length(const AcceptedPath& p, int64_t b, int* length) {
  if (threadIdx.x >= kWarpSize) return;
  const int64_t limit = min(p.num_accepted[b] + int64_t{1}, p.width);
  const int32_t* path = p.path + b * p.width;
  int good = 0;
  for (int64_t base = 0; base < limit; base += kWarpSize) {
    const int64_t i = base + threadIdx.x;
    const int node = i < limit ? path[i] : -1, before = i < limit && i > 0 ? path[i - 1] : -1;
    const unsigned bad = __ballot_sync(kFullMask, i >= limit || node <= before || node >= p.nodes);
    good += bad == 0 ? kWarpSize : __ffs(bad) - 1;
    if (bad != 0) break;
  }
  if (threadIdx.x == 0) *length = good;
}

// Grid: (rows of a request, requests, tensors).
template <class Unit>
__global__ void __launch_bounds__(kCompactThreads)
    compact_kernel(const __grid_constant__ CompactParams p) {
  __shared__ int length;
  const int64_t b = blockIdx.y, i = blockIdx.x;
  path_length(p.path, b, &length);
  __syncthreads();
  const CompactRows& rows = p.tensors[blockIdx.z];
  const int64_t count = rows.bytes / static_cast<int64_t>(sizeof(Unit));
  Unit* out = reinterpret_cast<Unit*>(rows.out + (b * p.path.width + i) * rows.bytes);
  if (i >= length) {
    for (int64_t x = threadIdx.x; x < count; x += blockDim.x) out[x] = Unit{};
    return;
  }
  const int64_t node = p.path.path[b * p.path.width + i];
  const Unit* in = reinterpret_cast<const Unit*>(rows.in + b * rows.in_batch_stride +
                                                 node * rows.in_node_stride);
  for (int64_t x = threadIdx.x; x < count; x += blockDim.x) out[x] = in[x];
}

// Grid: (blocks over the units of one slot, requests, caches). A thread owns one unit of all slots
// of a path. A slot moves down or stays, and later ones come from farther up: in rising order,
// reading ahead of writing, nothing is overwritten before it is read.
template <class Unit>
__global__ void __launch_bounds__(kMoveThreads)
    kv_move_kernel(const __grid_constant__ MoveParams p) {
  __shared__ int length, stop;
  __shared__ int64_t from[kMoveSlots], to[kMoveSlots];
  const int64_t b = blockIdx.y;
  path_length(p.path, b, &length);
  __syncthreads();
  const int64_t per_head = p.bytes / static_cast<int64_t>(sizeof(Unit));
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const bool mine = unit < per_head * p.heads;
  char* cache = p.caches[blockIdx.z] + unit / per_head * p.head_stride +
                unit % per_head * static_cast<int64_t>(sizeof(Unit));
  const int32_t* path = p.path.path + b * p.path.width;
  for (int first = 1; first < length; first += kMoveSlots) {
    const int count = min(kMoveSlots, length - first);
    if (threadIdx.x == 0) stop = count;
    __syncthreads();
    for (int k = threadIdx.x; k < count; k += blockDim.x) {
      from[k] = p.slot_offset(b, p.start[b] + path[first + k]);
      to[k] = p.slot_offset(b, p.start[b] + first + k);
      if (from[k] < 0 || to[k] < 0) atomicMin(&stop, k);
    }
    __syncthreads();
    const int good = stop;
    constexpr int kAhead = kMoveAhead<Unit>;
    for (int base = 0; mine && base < good; base += kAhead) {
      Unit values[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k)
        if (base + k < good) values[k] = *reinterpret_cast<const Unit*>(cache + from[base + k]);
#pragma unroll
      for (int k = 0; k < kAhead; ++k)
        if (base + k < good) *reinterpret_cast<Unit*>(cache + to[base + k]) = values[k];
    }
    __syncthreads();
    if (good < count) return;
  }
}

}  // namespace domino
