// A block owns a slot of a request: it judges the slots up to its own, a warp each, and where the
// walk ends at its own (or every slot is a draw) races for the token among the shard's. Of a
// filtered row it first finds the cut among the tokens that all shards listed, and races for the
// token among those. Bytes: the partials, and the shard's part of the rows without filters that are
// drawn from. What the block rule wants of a row besides takes what the first launch wrote of the
// slots before it: a second launch, in which a block owns a slot again.
#include "verify/chain_judge.cuh"
#include "verify/row_places.cuh"
#include "verify/verify_shard.h"

namespace domino {

namespace {

constexpr int kShardWarps = kWalkWarps, kShardThreads = kWalkThreads;

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

// Leaves the first tokens of a filtered row in cut_shared().sorted; all threads get the cut.
__device__ __noinline__ ListedCut cut_shard_row(const VerifyShardParams& p, const ChainRequest& r,
                                                int i, const RowStats& stats) {
  CutShared& s = cut_shared();
  const RowLaw law(stats, r.temperature);
  const uint64_t last = last_listed(p, r.b, i);
  if (threadIdx.x == 0) s.listed = 0;
  __syncthreads();
  for (int n = threadIdx.x; n < p.parts * p.listed; n += kShardThreads) {
    const uint64_t word = p.list(n / p.listed, r.b, i)[n % p.listed];
    if (word <= last && word != kNoToken) s.sorted[atomicAdd(&s.listed, 1u)] = word;
  }
  __syncthreads();
  const int count = static_cast<int>(s.listed);
  sum_sorted(count, [&](uint64_t word) { return to_fixed(law.weight(word_logit(word))); });
  return cut_listed(reinterpret_cast<const uint64_t*>(s.sorted),
                    reinterpret_cast<const uint64_t*>(s.before), count, last == kNoToken, stats,
                    law, r.filters(), p.vocab, counts_values(p));
}

// The least key of the shard's tokens among the first `kept`; all threads get it.
__device__ __noinline__ uint64_t race_listed(const VerifyShardParams& p, int kept,
                                             const ShardWeights& weights, const RaceNoise& noise) {
  unsigned long long best = kNoWinner;
  for (int n = threadIdx.x; n < kept; n += kShardThreads) {
    const unsigned long long key = listed_key(p, weights, noise, cut_shared().sorted[n]);
    best = key < best ? key : best;
  }
  return least_key_of_block(best);
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
  const bool filtered = r.filters().any(p.vocab);
  // of a filtered request each slot races: whether the walk comes so far takes a cut a slot
  const int first = filtered ? i : 0;
  for (int slot = i - warp; slot >= first && i < r.rows; slot -= kShardWarps) {
    const ShardSlot s = judge_shard_slot(
        p, r, slot, [&](int64_t x, float* logit) { return pool_stats(r, slot, x, logit); });
    if (lane != 0) continue;
    if (slot == i)
      own = s;
    else if (!s.accepts())
      over = true;
  }
  __syncthreads();
  const bool cuts = filtered && own.target.faults == 0;
  ListedCut cut;
  if (cuts) {
    cut = cut_shard_row(p, r, i, own.target);
    if (threadIdx.x == 0) filter_slot(r, i, cut, &own);
    __syncthreads();
  }
  uint64_t keys[2] = {kNoWinner, kNoWinner};
  if (has_shard_race(r, own, over)) {
    const bool replaces = own.slot.outcome == Outcome::kResidual;
    const float sum = static_cast<float>(own.target.sum) * (1.0f / kFixedOne);
    const auto race = [&](bool residual, Outcome outcome) {
      const ShardWeights weights(r, i, own, residual, cuts ? &cut.filter : nullptr);
      const RaceNoise noise = race_noise(r, i, outcome);
      if (cuts) return race_listed(p, cut.kept, weights, noise);
      return race_shard(p, ShardRow(r, i), weights, noise,
                        weights.q != DraftLaw::kOneHot ? kResidualGuess : sum);
    };
    keys[0] = race(replaces, own.slot.outcome);
    if (replaces && keys[0] == kNoWinner) keys[1] = race(false, Outcome::kDraw);
  }
  if (threadIdx.x == 0) write_shard_slot(p, r, i, own, cuts ? &cut.filter : nullptr, keys);
}

__global__ void __launch_bounds__(kShardThreads, 1)
    verify_shard_block_kernel(const __grid_constant__ VerifyShardParams p) {
  __shared__ ShardSlot own;
  __shared__ uint64_t slots[kWarpSize];
  const int64_t b = blockIdx.x / (p.drafts + 1);
  const int i = static_cast<int>(blockIdx.x - b * (p.drafts + 1));
  const ChainRequest r(p, b);
  if (!r.by_block() || i >= r.rows) return;
  const float reach = shard_reach(p, b, i);
  if (reach < 0.0f) return;
  if (threadIdx.x < kWarpSize) {
    const ShardSlot s = judge_shard_slot(
        p, r, i, [&](int64_t x, float* logit) { return pool_stats(r, i, x, logit); });
    if (threadIdx.x == 0) own = s;
  }
  __syncthreads();
  const bool filtered = r.filters().any(p.vocab);
  ListedCut cut;
  if (filtered) cut = cut_shard_row(p, r, i, own.target);
  const RowFilter* filter = filtered ? &cut.filter : nullptr;
  const ShardRow row(r, i);
  const ShardWeights weights(r, i, own, true, filter, reach);
  const bool dense = weights.q == DraftLaw::kDense;
  ShardRest rest = rest_of_pool(p, row, own, weights, filter, threadIdx.x, kShardThreads);
  const int64_t end = p.vocab_start + p.shard_vocab;
  const auto add = [&](int64_t token, float logit) {
    if (token >= p.vocab_start && token < end)
      rest.add(weights, logit, true, weights.draft.probability(weights.draft_row.at(token)));
  };
  if (dense && filtered) {
    for (int n = threadIdx.x; n < cut.kept; n += kShardThreads)
      add(word_token(cut_shared().sorted[n]), word_logit(cut_shared().sorted[n]));
  } else if (dense) {
    for (int64_t x = p.vocab_start + threadIdx.x; x < end; x += kShardThreads) add(x, row.at(x));
  }
  const auto plus = [](uint64_t a, uint64_t b) { return a + b; };
  rest.sum = block_reduce(rest.sum, plus, slots);
  rest.covered = block_reduce(rest.covered, plus, slots);
  const auto race = [&](const ShardWeights& of, Outcome outcome, float mass) {
    const RaceNoise noise = race_noise(r, i, outcome);
    return filtered ? race_listed(p, cut.kept, of, noise) : race_shard(p, row, of, noise, mass);
  };
  const float sum = static_cast<float>(own.target.sum) * (1.0f / kFixedOne);
  uint64_t keys[2] = {kNoWinner, kNoWinner};
  keys[0] =
      race(weights, Outcome::kResidual, weights.q != DraftLaw::kOneHot ? kResidualGuess : sum);
  if (keys[0] == kNoWinner)
    keys[1] = race(ShardWeights(r, i, own, false, filter), Outcome::kDraw, sum);
  if (threadIdx.x != 0) return;
  write_shard_rest(p, b, i, rest, dense);
  write_shard_keys(p, r, i, own, keys);
}

}  // namespace

int verify_shard_cuda(const VerifyShardParams& p, void* stream) {
  const int64_t rows = p.batch * (p.drafts + 1);
  if (rows == 0) return kOk;
  const bool filters = p.top_k != nullptr || p.top_p != nullptr || p.min_p != nullptr;
  if (rows > INT32_MAX || (filters && (p.listed < 1 || p.parts * p.listed > kListed)))
    return kBadArgument;
  const VerifyShardParams whole = in_whole_ids(p);
  const auto launch = [&](auto kernel) {
    kernel<<<static_cast<unsigned>(rows), kShardThreads, 0, as_stream(stream)>>>(whole);
    return launched();
  };
  const int status = launch(verify_shard_kernel);
  const bool by_block = p.rules != nullptr || p.rule == VerifyRule::kBlock;
  if (status != kOk || !by_block || p.draft_logits == nullptr) return status;
  return launch(verify_shard_block_kernel);
}

}  // namespace domino
