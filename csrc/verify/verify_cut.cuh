// First launch of verify_chain with filters over rows of bf16 logits, where no request has a top-k
// and a block has a row to itself (otherwise verify_listed.cuh): it reads the row once, finds where
// the filters cut it (row_histogram.cuh) and judges its draft. Requests without a filter, and
// log-probabilities, take the row's statistics instead, or as well: chunk by chunk as in
// row_chunks.cuh. Bytes: every row once; bound by HBM.
#pragma once

#include "common/copy_async.cuh"
#include "verify/row_histogram.cuh"
#include "verify/slot_ahead.cuh"

namespace domino {

constexpr int kKeptTokens = 512;
constexpr int kLine = 64;  // tokens of a cache line

struct KeptToken {
  int32_t id;
  float logit;
};

struct KeptTokens {
  uint32_t count;  // of the lists' tokens from the cut's logit up: more than there is room for?
  KeptToken at[kKeptTokens];

  // How many of the tokens with this logit have a lower id.
  __device__ __forceinline__ int ties_before(float logit, int64_t id) const {
    int before = 0;
    for (uint32_t n = 0; n < count; ++n) before += at[n].logit == logit && at[n].id < id;
    return before;
  }
};

// Gathers the lists of the cluster's blocks from the cut's logit up. All threads of the block call
// it; a barrier has to follow.
__device__ __forceinline__ void gather_kept(const RowCluster& cluster, HistogramShared& s,
                                            KeptTokens* kept) {
  uint32_t from = 0;  // the blocks' entries follow each other over the threads
  for (int block = 0; block < cluster.size; ++block) {
    const uint32_t count = s.listed_of[block];
    const uint4* list = cluster.map(s.list, block);
    const int32_t* tokens = cluster.map(s.list_token, block);
    for (uint32_t n = (threadIdx.x - from) % kCutThreads; n < count; n += kCutThreads) {
      Group<bf16> group;
      group.words = list[n];
      const int token = tokens[n];
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        if (!(group.at(j) >= s.cut.logit)) continue;
        const uint32_t at = atomicAdd(&kept->count, 1u);
        if (at < kKeptTokens) kept->at[at] = {token + j, group.at(j)};
      }
    }
    from += count;
  }
}

// The race of row i among its kept tokens, by one warp; -1 where none has weight.
__device__ __forceinline__ int32_t race_kept(const ChainRequest& r, int i, Outcome outcome,
                                             const SlotQ& q, const RowLaw& law,
                                             const RowFilter& filter, const KeptTokens& kept) {
  const DrawWeights weights = draw_weights(r, i, outcome, q, law, filter, 1.0f);
  const RaceNoise noise = race_noise(r, i, outcome);
  unsigned long long best = kNoWinner;
#pragma unroll 1
  for (uint32_t n = threadIdx.x % kWarpSize; n < kept.count; n += kWarpSize) {
    const KeptToken token = kept.at[n];
    if (token.id == weights.without) continue;
    if (filter.cut_id < 0 && token.logit == filter.cut_logit &&
        kept.ties_before(token.logit, token.id) >= -filter.cut_id)
      continue;
    const NoiseWords four = noise.words(static_cast<uint32_t>(token.id / 4));
    const uint32_t word = token.id % 4 == 0   ? four.word[0]
                          : token.id % 4 == 1 ? four.word[1]
                          : token.id % 4 == 2 ? four.word[2]
                                              : four.word[3];
    const float weight = weights.exact(weights.scaled(token.logit), token.id);
    const unsigned long long key = race_key(weight, word, token.id);
    best = key < best ? key : best;
  }
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const unsigned long long other = __shfl_xor_sync(kFullMask, best, offset);
    best = other < best ? other : best;
  }
  return best == kNoWinner ? -1 : static_cast<int32_t>(best & 0xffffffffu);
}

// What becomes of the slot whose row has been read, by one warp. cut: null without filters; kept:
// null where they are not listed.
__device__ __noinline__ void judge_slot(const ChainRequest& r, int i, const RowStats& stats,
                                        const ValueCut* cut, const SlotAhead& slot,
                                        const KeptTokens* kept, SlotVerdict* out) {
  RowFilter filter;
  if (cut != nullptr && stats.faults == 0)
    filter = {cut->logit, cut->ties < 0 ? INT32_MAX : -cut->ties, cut->mass};
  const RowLaw law(stats, r.temperature);
  Slot verdict{Outcome::kFail, stats.faults, true, 1.0f};
  if (stats.faults == 0) {
    verdict = slot_before_coin(r, stats.argmax, slot.x, slot.q);
    verdict.status |= slot.status;
    if (verdict.outcome == Outcome::kUndecided)
      verdict.outcome = cut != nullptr ? cut_outcome(law, filter, slot)
                                       : token_outcome(law, FilterBounds(), slot.logit, verdict.q,
                                                       verify_coin(r, i));
  }
  int32_t winner = -1;
  if (kept != nullptr && kept->count <= kKeptTokens) {
    if (verdict.outcome == Outcome::kUndecided)
      verdict.outcome = kept->ties_before(slot.logit, slot.x) < -filter.cut_id ? Outcome::kAccept
                                                                               : Outcome::kResidual;
    const SlotQ q{verdict.one_hot, slot.draft_top, slot.draft_sum};
    if (verdict.outcome == Outcome::kDraw ||
        (verdict.outcome == Outcome::kResidual && (q.one_hot || r.q != DraftLaw::kScalar)))
      winner = race_kept(r, i, verdict.outcome, q, law, filter, *kept);
  }
  write_verdict(verdict, winner, stats, law, filter, slot, out);
}

// Grid: a cluster of up to 8 blocks for each row of each request.
__global__ void __launch_bounds__(kCutThreads, 2)
    verify_cut_kernel(const __grid_constant__ VerifyChainParams p) {
  __shared__ HistogramShared shared;
  __shared__ KeptTokens kept;
  __shared__ SlotAhead slot;
  allow_next_launch();
  const RowCluster cluster;
  const int64_t index = blockIdx.x / cluster.size;
  const int64_t b = index / (p.drafts + 1);
  const int i = static_cast<int>(index - b * (p.drafts + 1));
  const ChainWorkspace chunks(p.workspace, p.batch, p.drafts, p.vocab, false);
  const int row_chunks = static_cast<int>(chunks.row_chunks);
  const int share = ceil_div(row_chunks, cluster.size);
  if (p.cu_rows == nullptr) {  // while it is worked out what the request wants
    const int token = cluster.rank * share * kChunk + threadIdx.x * kLine;
    if (token < p.vocab)
      prefetch_l2(static_cast<const bf16*>(p.target_logits) + b * p.target_batch_stride +
                  i * p.target_row_stride + token);
  }
  const FilterParams wanted = read_filters(p, b);
  const ChainRequest r(p, b);
  if (i >= r.rows) return;
  const FilterParams filters = r.greedy() ? FilterParams{} : wanted;
  const bool filtered = filters.any(p.vocab), summed = !filtered || p.chosen_logprob != nullptr;
  // is all that is wanted of the row what top-k leaves?
  const bool ranked_first = filtered && filters.by_rank(p.vocab) && filters.top_k <= kReadThreads &&
                            (filters.order != FilterOrder::kJoint || !filters.by_mass());
  const RowSource<bf16> source(r.target_row(i), RowEdits{}, static_cast<int>(p.vocab));
  const float scale = law_scale(r.temperature);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;

  RowHistogram histogram(shared, cluster, source);
  histogram.clear();
  if (threadIdx.x == 0) kept.count = 0;
  cluster.arrive();
  __syncthreads();
  if (warp == kReadWarps) {
    const SlotAhead ahead = slot_ahead(r, i, source);
    if (lane == 0) slot = ahead;
  } else {
    const int last = min(row_chunks, (cluster.rank + 1) * share);
    const int first = cluster.rank * share + warp;
    Group<bf16> groups[kLaneGroups];
    const auto load = [&](Group<bf16>(&to)[kLaneGroups], int chunk) {
#pragma unroll
      for (int g = 0; g < kLaneGroups; ++g)
        to[g] = source.group(chunk * kChunk + g * kGroupStep + lane * kGroup);
    };
    if (filtered) {
      Group<bf16> ahead[kLaneGroups];
      if (first < last) load(ahead, first);
      if (ranked_first) {
        float top = -INFINITY;  // of two chunks, where there are
        if (first + kReadWarps < last) {
          load(groups, first + kReadWarps);
          top = lane_top(groups);
        }
        if (first < last) top = fmaxf(top, lane_top(ahead));
        histogram.bound_by(top, static_cast<uint32_t>(filters.top_k));
      }
#pragma unroll 1
      for (int chunk = first; chunk < last; chunk += kReadWarps) {
#pragma unroll
        for (int g = 0; g < kLaneGroups; ++g) groups[g] = ahead[g];
        if (chunk + kReadWarps < last) load(ahead, chunk + kReadWarps);
#pragma unroll
        for (int g = 0; g < kLaneGroups; ++g)
          histogram.add(groups[g], chunk * kChunk + g * kGroupStep + lane * kGroup);
      }
    }
    if (summed) {
#pragma unroll 1
      for (int chunk = first; chunk < last; chunk += kReadWarps) {
        load(groups, chunk);
        sum_chunk(groups, chunk * kChunk + lane * kGroup, r.greedy(), scale, chunks,
                  index * row_chunks + chunk);
      }
    }
  }

  SlotVerdict* out = slot_verdicts(chunks) + index;
  RowStats stats{1, 0.0f, -1, 0, 0};
  bool mine = cluster.rank == 0;  // is it this block that judges?
  cluster.wait();
  if (filtered) {
    stats.top = histogram.finish();
    stats.faults = row_faults(stats.top);
    if (stats.faults == 0) mine = histogram.find(RowLaw(stats.top, 1, scale), filters);
  } else {
    cluster.sync();
  }
  if (cluster.rank == 0 && warp == kReadWarps && summed) {
    uint32_t unused;
    const RowStats sums = combine_chunks(chunks.row(b, i), chunks.first + index * row_chunks,
                                         row_chunks, scale, r.greedy(), &unused);
    if (!filtered) stats = sums;
    const bool usable = sums.faults == 0 && slot.x >= 0;
    if (lane == 0) {
      out->sum = sums.sum;
      out->logprob = usable ? RowLaw(sums, r.temperature).log_probability(slot.logit) : 0.0f;
    }
  }
  if (mine && threadIdx.x == 0 && !summed) out->sum = 1;
  const bool listed = ranked_first && stats.faults == 0 && histogram.has_list();
  if (mine) {
    __syncthreads();
    if (listed) {
      gather_kept(cluster, shared, &kept);
      __syncthreads();
    }
    if (warp == kReadWarps) {
      judge_slot(r, i, stats, filtered ? &shared.cut : nullptr, slot, listed ? &kept : nullptr,
                 out);
    }
  }
  if (listed) cluster.sync();  // nobody ends before its list has been read
}

}  // namespace domino
