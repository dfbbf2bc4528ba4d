// What a drawn draft returns of its law, from pool_logits: the score of the id that was drawn, its
// log-probability under softmax(pool_logits / temperature) and, where wanted, the logits of the
// whole vocabulary, -inf outside the pool. Grid: drafts x batch.
#pragma once

#include "common/reduce.cuh"
#include "head/draft_chain.h"

namespace domino {

constexpr int kLawThreads = 256;

__global__ void __launch_bounds__(kLawThreads)
    chain_law(const __grid_constant__ ChainBlockParams p) {
  __shared__ float slots[32];
  const int64_t b = blockIdx.y, n = b * p.drafts + blockIdx.x;
  const bool active = p.num_active == nullptr || b < *p.num_active;
  float* const dense = p.dense_logits ? p.dense_logits + n * p.vocab : nullptr;
  if (dense && active)  // nothing in front of this launch knows of it
    for (int64_t v = threadIdx.x; v < p.vocab; v += kLawThreads) dense[v] = -INFINITY;
  previous_launch_done();
  if (!active) return;
  const int32_t* ids = p.pool_ids + n * p.pool_size;
  const float* logits = p.pool_logits + n * p.pool_size;
  const float inverse = p.temperature[b] > 0.0f ? 1.0f / p.temperature[b] : 1.0f;
  const auto largest = [](float x, float y) { return fmaxf(x, y); };
  const auto plus = [](float x, float y) { return x + y; };
  float top = -INFINITY, score = -INFINITY;
  for (int64_t m = threadIdx.x; m < p.pool_size; m += kLawThreads) {
    top = fmaxf(top, logits[m]);
    if (ids[m] == p.tokens[n]) score = logits[m];
  }
  __syncthreads();  // dense is filled
  for (int64_t m = threadIdx.x; dense && m < p.pool_size; m += kLawThreads)
    if (ids[m] >= 0) dense[ids[m]] = logits[m];
  top = block_reduce(top, largest, slots);
  score = block_reduce(score, largest, slots);
  float sum = 0.0f;
  for (int64_t m = threadIdx.x; m < p.pool_size; m += kLawThreads)
    sum += expf((logits[m] - top) * inverse);
  sum = block_reduce(sum, plus, slots);
  if (threadIdx.x != 0) return;
  p.scores[n] = score;
  p.log_probs[n] = (score - top) * inverse - logf(sum);
}

}  // namespace domino
