// The token of one row behind verify_cut.cuh, verify_row.cuh or verify_listed.cuh: where ties with
// the filters' cut end, and the race (race_draw.cuh), by a cluster. Bytes: the row.
#pragma once

#include "common/copy_async.cuh"
#include "verify/draft_row.cuh"

namespace domino {

constexpr int kDrawWarps = 8;  // 128 registers a thread: beside a block of verify_cut_kernel
constexpr int kDrawThreads = kDrawWarps * kWarpSize;

// Tokens of this logit up to an id. All threads of the cluster call it and get the same.
static __device__ __noinline__ int count_ties(const RowCluster& cluster,
                                              const RowSource<bf16>& source, float logit,
                                              int64_t last_id) {
  __shared__ uint32_t shared_count;
  unsigned long long own = 0;
  for_each_step(cluster, source, [&](int token, const auto& group) {
#pragma unroll
    for (int j = 0; j < kGroup; ++j) own += group.at(j) == logit && token + j <= last_id;
  });
  own = block_reduce(
      own, [](unsigned long long a, unsigned long long b) { return a + b; }, race_shared().slots);
  if (threadIdx.x == 0) shared_count = static_cast<uint32_t>(own);
  cluster.sync();
  const uint32_t count = __reduce_add_sync(kFullMask, cluster.of_lane(&shared_count));
  cluster.sync();
  return static_cast<int>(count);
}

// The last of the first `ties` tokens of this logit: warps count those of equal stretches of the
// row, then the warp that has it looks through its own. All threads of the cluster call it.
static __device__ __noinline__ int32_t last_tie(const RowCluster& cluster,
                                                const RowSource<bf16>& source, float logit,
                                                int ties) {
  __shared__ int counts[kWalkWarps];
  __shared__ int32_t found;
  constexpr int kStep = kWarpSize * kGroup;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int block_warps = blockDim.x / kWarpSize;
  const int warps = cluster.size * block_warps, own_warp = cluster.rank * block_warps + warp;
  const int stretch = ceil_div(ceil_div(source.vocab, kStep), warps) * kStep;
  const int first = min(own_warp * stretch, source.vocab);
  const int last = min(first + stretch, source.vocab);
  const auto equal = [&](int token) {  // of eight tokens
    uint32_t bits = 0;
    const Group<bf16> group = source.group(token + lane * kGroup);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) bits |= (group.at(j) == logit ? 1u : 0u) << j;
    return bits;
  };
  int count = 0;
  for (int token = first; token < last; token += kStep) count += __popc(equal(token));
  count = __reduce_add_sync(kFullMask, count);
  if (lane == 0) counts[warp] = count;
  cluster.sync();
  int before = 0;
  for (int from = lane; from < own_warp; from += kWarpSize)
    before += cluster.map(counts, from / block_warps)[from % block_warps];
  before = __reduce_add_sync(kFullMask, before);
  if (before < ties && before + count >= ties) {
    for (int token = first; token < last; token += kStep) {
      uint32_t bits = equal(token);
      int up_to = __popc(bits);
#pragma unroll
      for (int step = 1; step < kWarpSize; step *= 2) {
        const int left = __shfl_up_sync(kFullMask, up_to, step);
        if (lane >= step) up_to += left;
      }
      if (before + up_to >= ties && before + up_to - __popc(bits) < ties) {
        for (int skip = ties - before - (up_to - __popc(bits)); skip > 1; --skip) bits &= bits - 1;
        for (int block = 0; block < cluster.size; ++block)
          *cluster.map(&found, block) = token + lane * kGroup + __ffs(bits) - 1;
      }
      before += __shfl_sync(kFullMask, up_to, kWarpSize - 1);
      if (before >= ties) break;
    }
  }
  cluster.sync();
  return found;
}

// The token that the race of row i draws, -1 where nothing has weight. filter: of its ties with the
// cut all or, where cut_id is negative, the first -cut_id. noise: of the race; rest: what
// relu(reach p - q) comes to, about; kShared: as draw_row
template <bool kShared = false>
__device__ __forceinline__ int64_t draw_token(const RowCluster& cluster, const ChainRequest& r,
                                              int i, Outcome outcome, const SlotVerdict& slot,
                                              const RaceNoise& noise, float reach = 1.0f,
                                              float rest = kLikelyResidual) {
  const RowFilter& filter = slot.filter;
  const RowSource<bf16> source(r.target_row(i), RowEdits{}, static_cast<int>(r.p.vocab));
  const RowLaw law(slot.top, slot.sum, law_scale(r.temperature));
  RowFilter kept = filter;
  if (kept.cut_id < 0) kept.cut_id = INT32_MAX;
  const SlotQ q{(slot.status & kTakenAsOneHot) != 0, slot.draft_top, slot.draft_sum};
  const DrawWeights weights = draw_weights(r, i, outcome, q, law, kept, reach);
  const float about = weights.q != DraftLaw::kOneHot ? rest
                      : outcome == slot.outcome      ? slot.race_mass
                                                     : 0.0f;
  __shared__ PoolAhead pool;
  if (weights.q == DraftLaw::kPool) {
    const int m = threadIdx.x;
    __syncthreads();  // the pool of a race before
    if (m < PoolAhead::kCount) {
      pool.id[m] = m < weights.pool ? weights.ids[m] : -1;
      pool.logit[m] = m < weights.pool ? weights.draft_row.at(m) : 0.0f;
    }
    __syncthreads();
  }
#pragma unroll 1
  for (;;) {
    const unsigned long long key = draw_row<kShared>(cluster, source, weights, pool, noise, about);
    if (key == kNoWinner) return -1;
    const int32_t token = static_cast<int32_t>(key & 0xffffffffu);
    // ties that are not kept matter only where one of the ties wins
    if (filter.cut_id >= 0 || kept.cut_id != INT32_MAX || source.at(token) != filter.cut_logit)
      return token;
    kept.cut_id = last_tie(cluster, source, filter.cut_logit, -filter.cut_id);
    if (token <= kept.cut_id) return token;
  }
}

// The exact sum of the row of q of slot i, for the slot's verdict in shared memory. All threads of
// the cluster call it.
static __device__ __noinline__ void sum_draft_by_cluster(const RowCluster cluster,
                                                         const ChainRequest& r, int i,
                                                         const ChainWorkspace& chunks,
                                                         SlotVerdict* slot) {
  const int first = cluster.rank * kDrawWarps + static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = threadIdx.x % kWarpSize, step = cluster.size * kDrawWarps;
  const int last = static_cast<int>(chunks.row_chunks);
  const RowSource<bf16> source = draft_source(r, i);
  for (int chunk = first + 2 * step; chunk < last; chunk += step) {  // a lane a line
    const int token = chunk * kChunk + lane * 64;
    if (lane < kChunk / 64 && token < source.vocab) prefetch_l2(source.data + token);
  }
  sum_draft_row<true>(r, i, chunks, first, last, step);
  cluster.sync();
  if (threadIdx.x < kWarpSize) {
    const RowStats stats = draft_stats(r, i, chunks);
    if (threadIdx.x == 0) {
      slot->draft_sum = stats.sum;
      slot->draft_top = stats.top;
    }
  }
  __syncthreads();
}

// draw_token() among the row's kept tokens, as they are listed: every block for itself. error: of
// the sum of q, relative; -1 says as well that it leaves open which token is drawn.
static __device__ __noinline__ int64_t race_kept(const ChainRequest& r, int i, Outcome outcome,
                                                 const SlotVerdict& slot, const uint64_t* tokens,
                                                 const RaceNoise& noise, float reach = 1.0f,
                                                 float error = 0.0f) {
  const RowLaw law(slot.top, slot.sum, law_scale(r.temperature));
  const SlotQ q{(slot.status & kTakenAsOneHot) != 0, slot.draft_top, slot.draft_sum};
  const DrawWeights weights = draw_weights(r, i, outcome, q, law, slot.filter, reach);
  // not through the weights: ptxas 13.0 then takes the row for local memory here
  const RowSource<bf16> draft = draft_source(r, i);
  const int kept = static_cast<int>(slot.status >> kKeptShift);
  static_assert(kKeptTokens <= kDrawThreads);
  unsigned long long key = kNoWinner;    // by the latest that the token's time can be
  unsigned long long early = kNoWinner;  // by the earliest
  if (static_cast<int>(threadIdx.x) < kept) {
    const uint64_t word = __ldcg(reinterpret_cast<const unsigned long long*>(tokens) + threadIdx.x);
    const uint32_t token = static_cast<uint32_t>(word);
    if (token != weights.without) {
      const NoiseWords four = noise.words(token / 4);
      const uint32_t random = token % 4 == 0   ? four.word[0]
                              : token % 4 == 1 ? four.word[1]
                              : token % 4 == 2 ? four.word[2]
                                               : four.word[3];
      const float upper = weights.scaled(ListedOrder::logit(word));
      const float of_q =
          weights.q == DraftLaw::kDense ? weights.draft.probability(draft.at(token)) : 0.0f;
      key = race_key(add_rn(upper, -fma_rn(of_q, error, of_q)), random, token);
      early = race_key(add_rn(upper, -fma_rn(of_q, -error, of_q)), random, token);
    }
  }
  const unsigned long long least = least_of_block(key);
  if (error > 0.0f) {
    const unsigned long long other = least_of_block(key == least ? kNoWinner : early);
    if (other >> 32 <= least >> 32) return -1;
  }
  return least == kNoWinner ? -1 : static_cast<int64_t>(least & 0xffffffffu);
}

// The same for the token that replaces the draft of slot i where the sum of its row of q is known
// about, from q of the draft.
static __device__ __forceinline__ int64_t race_kept_about(const ChainRequest& r, int i,
                                                          const SlotVerdict& slot,
                                                          const uint64_t* tokens,
                                                          const BlockNoise& noise) {
  const RowLaw law(slot.draft_top, 1, law_scale(r.draft_temperature));
  const float weight = law.weight(draft_source(r, i).at(r.draft_token(i)));
  const float sum = weight / slot.race_mass * kFixedOne;
  if (!(sum >= kFixedOne && sum < 0x1p63f)) return -1;
  SlotVerdict about = slot;
  about.draft_sum = static_cast<uint64_t>(sum);
  const RaceNoise race{noise, race_noise(r, i, Outcome::kResidual).purpose, i};
  return race_kept(r, i, Outcome::kResidual, about, tokens, race, 1.0f, about_error(r.p.vocab));
}

}  // namespace domino
