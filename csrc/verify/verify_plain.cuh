// verify_chain without filters over rows of bf16 logits, where a few rows are all that there is:
// one launch. A cluster reads one row once.
//
//   sums     a warp adds up the weights of its tokens by segments (row_law.h), each half of them
//            relative to its own greatest; one warp puts those of the cluster together
//   verdict  that warp judges the draft
//   race     all blocks of the request, over the row in which the walk ends (race_together.cuh)
//
// With rows of q their sums go the same way. Greedy requests, a residual of which nothing is left,
// and what blocks have waited for in vain, go by end_by_value.cuh. Bytes: every row once, and the
// last one again from L2; bound by latency.
#pragma once

#include "verify/race_together.cuh"

namespace domino {

constexpr int kHalves = 2;  // of a warp's tokens
static_assert(kRankedSteps <= kHalves * kLaneGroups && kCutWarps * kHalves == kWarpSize);

struct PlainBlock {
  alignas(16) ChunkStats sums[kCutWarps * kHalves];
  alignas(16) ChunkStats draft_sums[kCutWarps * kHalves];  // of the row of q
  PoolAhead pool;
};

// Of a warp's groups, as sum_chunk().
__device__ __forceinline__ ChunkStats sum_groups(const Group<bf16> (&groups)[kLaneGroups],
                                                 float scale) {
  const uint32_t key = __reduce_max_sync(kFullMask, logit_key(lane_top(groups)));
  ChunkStats out{key, {0, 0, 0}};
  if (key < kInfinityKey && key > kEmptyKey)
    chunk_digits(groups, key_logit(key), scale, out.digits);
  return out;
}

// The row's statistics, but for its argmax, from the sums of all warps. By a warp.
__device__ __forceinline__ RowStats join_sums(const RowCluster& cluster, ChunkStats* sums,
                                              float scale) {
  const int lane = threadIdx.x % kWarpSize;
  uint4 held[kRankedBlocks];
  uint32_t key = 0;
#pragma unroll
  for (int n = 0; n < kRankedBlocks; ++n)
    held[n] = *cluster.map(reinterpret_cast<uint4*>(sums) + lane, n);
#pragma unroll
  for (int n = 0; n < kRankedBlocks; ++n) key = max(key, held[n].x);
  key = __reduce_max_sync(kFullMask, key);
  RowStats stats{0, key_logit(key), -1, 0, 0};
  stats.faults = row_faults(stats.top);
  if (stats.faults != 0) return stats;
  const RowExponent exponent(stats.top, scale);
  DigitSums all;
#pragma unroll
  for (int n = 0; n < kRankedBlocks; ++n) {
    if (held[n].x <= kEmptyKey) continue;
    const RowExponent own(key_logit(held[n].x), scale);
    if (exponent.huge) {
      if (held[n].x == key) all.at[0] += held[n].y;
    } else if (!own.huge) {
      const uint32_t digits[3] = {held[n].y, held[n].z, held[n].w};
      all.add(digits, exponent.grid() - own.grid());
    }
  }
#pragma unroll
  for (int n = 0; n < 3; ++n)  // of some thousand segments: 2^20 each
    all.at[n] = __reduce_add_sync(kFullMask, static_cast<uint32_t>(all.at[n]));
  stats.sum = exponent.huge ? all.at[0] << 40 : all.fixed(exponent);
  return stats;
}

// What becomes of a slot whose row has these statistics, as judge_whole().
__device__ __forceinline__ Slot judge_plain(const ChainRequest& r, const SlotAhead& slot,
                                            const RowStats& stats) {
  if (stats.faults != 0) return {Outcome::kFail, stats.faults, true, 1.0f};
  Slot verdict = slot_before_coin(r, -1, slot.x, slot.q);
  verdict.status |= slot.status;
  if (verdict.outcome != Outcome::kUndecided) return verdict;
  const float probability = RowLaw(stats, r.temperature).probability(slot.logit);
  verdict.outcome =
      probability > 0.0f && slot.share <= probability ? Outcome::kAccept : Outcome::kResidual;
  return verdict;
}

// Grid: (blocks of a cluster, drafts + 1, batch). Rows are aligned, and their vocabulary is a
// multiple of 8.
template <bool kDense>
__global__ void __launch_bounds__(kCutThreads, 1)
    verify_plain_kernel(const __grid_constant__ VerifyChainParams p) {
  extern __shared__ uint4 dynamic_shared[];  // PlainBlock, or ListedBlock
  __shared__ TeamShared t;
  PlainBlock& s = *reinterpret_cast<PlainBlock*>(dynamic_shared);
  const RowCluster cluster;
  const int i = blockIdx.y, rank = cluster.rank;
  const int64_t b = blockIdx.z;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const bool leads = rank == kLeader, judges = leads && warp == kJudge;
  const int first = (warp * kRankedBlocks + rank) * kGroupStep + lane * kGroup;
  constexpr int kStep = kRankedReaders * kGroupStep;
  const int vocab = static_cast<int>(p.vocab);
  int end = judges ? 0 : vocab;  // of what this thread reads
  const bf16* const row = row_of_few(p, b, i, end);
  Group<bf16> groups[kHalves][kLaneGroups], of_draft[kHalves][kLaneGroups];
#pragma unroll
  for (int n = 0; n < kHalves * kLaneGroups; ++n)
    load_here(groups[n / kLaneGroups][n % kLaneGroups], n < kRankedSteps && first + n * kStep < end,
              row + first + n * kStep);
  if constexpr (kDense) {
    const bf16* draft = static_cast<const bf16*>(p.draft_logits) + b * p.draft_batch_stride +
                        i * p.draft_row_stride;
    const int draft_end = judges || i >= p.drafts ? 0 : vocab;
#pragma unroll
    for (int n = 0; n < kHalves * kLaneGroups; ++n)
      load_here(of_draft[n / kLaneGroups][n % kLaneGroups],
                n < kRankedSteps && first + n * kStep < draft_end, draft + first + n * kStep);
  }
  // all other trips to memory at once
  const int64_t likely = i < p.drafts ? p.draft_tokens[b * p.draft_tokens_stride + i] : -1;
  const float draft_temperature = p.draft_temperature != nullptr ? p.draft_temperature[b] : 0.0f;
  const ChainRequest r(p, b, &draft_temperature);
  const BlockNoise noise = r.noise();
  if (judges) ask_for_pool(p, b, i);
  if (threadIdx.x == 0) t.open();
  if (judges && likely >= 0 && likely < vocab && p.cu_rows == nullptr) prefetch_l2(row + likely);
  __syncthreads();
  if (r.rows == 0) {
    if (i == 0 && leads) emit_end(r, 0, -1, r.faults);
    return;
  }
  if (i >= r.rows) return;
  const auto team = RaceTeam::of(r, i, rank);
  ListedBlock& by_value = *reinterpret_cast<ListedBlock*>(dynamic_shared);
  if (r.greedy()) return end_by_value<false, kDense>(p, cluster, b, i, team.verdicts, by_value);

  unsigned long long* verdict_words = team.verdicts + i * kVerdictWords;
  const float scale = law_scale(r.temperature);
  SlotAhead slot;
  if (judges) {
    if (lane == 0) prefetch_l2(verdict_words);
    if (lane < kHalves) {
      s.sums[warp * kHalves + lane] = {0, {0, 0, 0}};
      if constexpr (kDense) s.draft_sums[warp * kHalves + lane] = {0, {0, 0, 0}};
    }
    const RowSource<bf16> source(r.target_row(i), RowEdits{}, vocab);
    slot = dense_slot_ahead<kDense>(r, i, source, &s.pool);
  } else {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const ChunkStats sum = sum_groups(groups[half], scale);
      if (lane == 0) s.sums[warp * kHalves + half] = sum;
    }
    if constexpr (kDense) {
      if (has_draft_row(r, i)) {
        const float draft_scale = law_scale(r.draft_temperature);
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          const ChunkStats sum = sum_groups(of_draft[half], draft_scale);
          if (lane == 0) s.draft_sums[warp * kHalves + half] = sum;
        }
      }
    }
    if (threadIdx.x == 0) prefetch_l2(team.keys + team.part);
  }
  cluster.sync_shared();
  if (judges) {
    const RowStats stats = join_sums(cluster, s.sums, scale);
    if constexpr (kDense) {
      if (has_draft_row(r, i) && slot.x >= 0)
        slot = with_draft_row(r, join_sums(cluster, s.draft_sums, law_scale(r.draft_temperature)),
                              slot);
    }
    store_verdict(verdict_words,
                  verdict_word(r, judge_plain(r, slot, stats), stats.top, -INFINITY, false, false),
                  stats.sum, slot.draft_sum, slot.draft_top);
  }
  race_together<kDense>(p, r, cluster, team, i, noise, t, by_value);
}

}  // namespace domino
