// Second launch of verify_chain where every request is greedy: a block owns a request, a warp a row
// at a time. Bytes: the chunks' statistics; bound by latency, so the code is short.
#pragma once

#include "verify/chain_judge.cuh"

namespace domino {

constexpr int kGreedyWarps = 16;

__global__ void __launch_bounds__(kGreedyWarps* kWarpSize)
    verify_greedy_kernel(const __grid_constant__ VerifyChainParams p) {
  __shared__ int shared_stop;
  const ChainWorkspace workspace(p.workspace, p.batch, p.drafts, p.vocab, false);
  const int64_t b = blockIdx.x;
  const ChainRequest r(p, b);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int chunks = static_cast<int>(workspace.row_chunks);
  const int64_t out = b * (p.drafts + 1);
  if (threadIdx.x == 0) shared_stop = r.rows;
  int64_t x = -1;
  if (warp < r.rows - 1) x = r.draft_token(warp);
  previous_launch_done();
  __syncthreads();
  // Slots in stretches of as many as there are warps; the first that stops ends the request.
  int stop = r.rows;
  for (int base = 0; base < r.rows; base += kGreedyWarps) {
    const int i = base + warp;
    uint32_t faults = 0;
    int64_t best = -1;
    if (i < r.rows) {
      if (base > 0) x = i < r.rows - 1 ? r.draft_token(i) : -1;
      const uint2* row = reinterpret_cast<const uint2*>(workspace.chunks) +
                         (b * workspace.rows_per_request + i) * chunks;
      unsigned long long key = 0;
#pragma unroll 5
      for (int c = lane; c < chunks; c += kWarpSize) {
        const uint2 chunk = __ldcg(row + c);
        key = max(key, static_cast<unsigned long long>(chunk.x) << 32 | ~chunk.y);
      }
#pragma unroll
      for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
        key = max(key, __shfl_xor_sync(kFullMask, key, offset));
      const uint32_t top = static_cast<uint32_t>(key >> 32);
      faults = row_faults(key_logit(top));
      if (faults == 0) best = static_cast<uint32_t>(~key);
      if (lane == 0 && (best < 0 || x != best)) atomicMin(&shared_stop, i);
    }
    __syncthreads();
    stop = shared_stop;
    if (lane == 0 && i <= stop && i < r.rows) {
      p.tokens[out + i] = best;  // an accepted draft is the row's argmax
      if (i == stop) {
        const bool bad_id = i < r.rows - 1 && faults == 0 && (x < -1 || x >= p.vocab);
        p.num_accepted[b] = stop;
        p.num_emitted[b] = stop + (faults == 0 ? 1 : 0);
        p.status[b] = static_cast<uint8_t>(faults | (bad_id ? kBadId : 0u));
      }
    }
    if (stop < base + kGreedyWarps) break;
    __syncthreads();
  }
  if (r.rows == 0 && threadIdx.x == 0) emit_counts(r, 0, -1, r.faults);
  const int64_t first = r.rows == 0 ? 0 : stop + 1;
  for (int64_t i = first + threadIdx.x; i <= p.drafts; i += blockDim.x) p.tokens[out + i] = -1;
}

}  // namespace domino
