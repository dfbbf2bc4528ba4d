// A block owns a slot of a request: it judges the slots up to its own, a warp each, and where the
// walk ends at its own (or every slot is a draw) races for the token among the shard's. Bytes: the
// partials, and the shard's part of the rows that are drawn from.
#include "verify/chain_judge.cuh"
#include "verify/race.cuh"
#include "verify/verify_shard.h"

namespace domino {

namespace {

constexpr int kShardWarps = 16, kShardThreads = kShardWarps * kWarpSize;

// The least key of the shard's tokens; all threads get it. What is not below `bound` by its noise
// alone (race.cuh) is passed over, and looked at again where nothing else is found.
__device__ __noinline__ uint64_t race_shard(const VerifyShardParams& p, const ShardRow& row,
                                            const ShardWeights& weights, const RaceNoise& noise,
                                            float mass) {
  __shared__ uint64_t slots[kWarpSize];
  const auto least = [](uint64_t a, uint64_t b) { return a < b ? a : b; };
  for (float bound = kSureTime / mass;; bound = INFINITY) {
    uint64_t best = kNoWinner;
    const int64_t end = p.vocab_start + p.shard_vocab;
    for (int64_t first = p.vocab_start + 4 * threadIdx.x; first < end; first += 4 * kShardThreads) {
      const NoiseWords four = noise.words(static_cast<uint32_t>(first / 4));
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int64_t token = first + n;
        if (token >= end) break;
        const float upper = weights.upper(row.at(token), token);
        if (!(upper > 0.0f)) continue;
        if (static_cast<float>(four.word[n]) * 0x1p-32f > upper * bound * 1.001f) continue;
        best = least(best, race_key(weights.exact(upper, token), four.word[n], token));
      }
    }
    best = block_reduce(best, least, slots);
    if (best != kNoWinner && __uint_as_float(static_cast<uint32_t>(best >> 32)) <= bound)
      return best;
    if (bound == INFINITY) return best;
  }
}

__global__ void __launch_bounds__(kShardThreads, 1)
    verify_shard_kernel(const __grid_constant__ VerifyShardParams p) {
  __shared__ ShardSlot own;
  __shared__ bool over;
  const int64_t b = blockIdx.x / (p.drafts + 1);
  const int i = static_cast<int>(blockIdx.x - b * (p.drafts + 1));
  const ChainRequest r(p, b);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  if (threadIdx.x == 0) {
    own = no_shard_slot(r);
    over = false;
  }
  __syncthreads();
  for (int slot = i - warp; slot >= 0 && i < r.rows; slot -= kShardWarps) {
    const ShardSlot s = judge_shard_slot(
        p, r, slot, [&](int64_t x, float* logit) { return pool_stats(r, slot, x, logit); });
    if (lane != 0) continue;
    if (slot == i)
      own = s;
    else if (!s.accepts())
      over = true;
  }
  __syncthreads();
  uint64_t keys[2] = {kNoWinner, kNoWinner};
  if (has_shard_race(r, own, over)) {
    const Outcome outcome = own.slot.outcome;
    const bool replaces = outcome == Outcome::kResidual;
    const ShardRow row(r, i);
    const float sum = static_cast<float>(own.target.sum) * (1.0f / kFixedOne);
    const ShardWeights weights(r, i, own, replaces);
    keys[0] = race_shard(p, row, weights, race_noise(r, i, outcome),
                         weights.q != DraftLaw::kOneHot ? kResidualGuess : sum);
    if (replaces && keys[0] == kNoWinner)
      keys[1] =
          race_shard(p, row, ShardWeights(r, i, own, false), race_noise(r, i, Outcome::kDraw), sum);
  }
  if (threadIdx.x == 0) write_shard_slot(p, r, i, own, keys);
}

}  // namespace

int verify_shard_cuda(const VerifyShardParams& p, void* stream) {
  const int64_t rows = p.batch * (p.drafts + 1);
  if (rows == 0) return kOk;
  if (rows > INT32_MAX) return kBadArgument;
  verify_shard_kernel<<<static_cast<unsigned>(rows), kShardThreads, 0, as_stream(stream)>>>(
      in_whole_ids(p));
  return launched();
}

}  // namespace domino
