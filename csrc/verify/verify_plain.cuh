// verify_chain without filters over rows of bf16 logits, where a few rows are all that there is:
// one launch. A cluster reads one row once.
//
//   sums     a warp adds up the weights of its tokens (cluster_sums.cuh); one warp puts those of
//            the cluster together
//   verdict  that warp judges the draft
//   race     all blocks of the request, over the row in which the walk ends (race_together.cuh)
//
// With rows of q their sums go the same way. Greedy requests, a residual of which nothing is left,
// and what blocks have waited for in vain, go by end_by_value.cuh. Bytes: every row once, and the
// last one again from L2; bound by latency.
#pragma once

#include "verify/cluster_sums.cuh"
#include "verify/race_together.cuh"

namespace domino {

template <class Row>
struct PlainBlock {
  PartSums<Row> sums, draft_sums;  // draft_sums: of the row of q
  PoolAhead pool;
};

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
template <bool kDense, int kBlocks>
__global__ void __launch_bounds__(kCutThreads, 1)
    verify_plain_kernel(const __grid_constant__ VerifyChainParams p) {
  extern __shared__ uint4 dynamic_shared[];  // PlainBlock, or ListedBlock
  __shared__ TeamShared t;
  using Row = RowBlocks<kBlocks>;
  PlainBlock<Row>& s = *reinterpret_cast<PlainBlock<Row>*>(dynamic_shared);
  const RowCluster cluster;
  const int i = blockIdx.y, rank = cluster.rank;
  const int64_t b = blockIdx.z;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const bool leads = rank == kBlocks - 1, judges = leads && warp == kJudge;
  const int first = Row::first(rank), vocab = static_cast<int>(p.vocab);
  int end = judges ? 0 : vocab;  // of what this thread reads
  const bf16* const row = row_of_few(p, b, i, end);
  RowParts<Row> tokens(row, first, end), of_draft;
  if constexpr (kDense)
    of_draft = RowParts<Row>(static_cast<const bf16*>(p.draft_logits) + b * p.draft_batch_stride +
                                 i * p.draft_row_stride,
                             first, judges || i >= p.drafts ? 0 : vocab);
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
  const auto team = RaceTeam::of(r, i, cluster);
  ListedBlock& by_value = *reinterpret_cast<ListedBlock*>(dynamic_shared);
  if (r.greedy()) return end_by_value<false, kDense>(p, cluster, b, i, team.verdicts, by_value);

  unsigned long long* verdict_words = team.verdicts + i * kVerdictWords;
  const float scale = law_scale(r.temperature);
  SlotAhead slot;
  float draft_inverse = 0.0f;
  if (judges) {
    s.sums.leave_none();
    if constexpr (kDense) s.draft_sums.leave_none();
    cluster.arrive_shared();  // nobody waits for what this warp works out
    if (lane == 0) prefetch_l2(verdict_words);
    const RowSource<bf16> source(r.target_row(i), RowEdits{}, vocab);
    slot = dense_slot_ahead<kDense>(r, i, source, &s.pool);
    // behind the barrier others wait for it, and a division by 0 takes as long as all else
    if (slot.draft_sum != 0) draft_inverse = one_over(slot.draft_sum);
  } else {
    const float draft_scale = law_scale(r.draft_temperature);
#pragma unroll
    for (int part = 0; part < Row::kParts; ++part) {
      const ChunkStats sum = sum_groups(tokens.part(part), scale);
      if (lane == 0) s.sums.of[warp * Row::kParts + part] = sum;
      tokens.go_on(part);
      if constexpr (kDense) {
        if (has_draft_row(r, i)) {
          const ChunkStats of_q = sum_groups(of_draft.part(part), draft_scale);
          if (lane == 0) s.draft_sums.of[warp * Row::kParts + part] = of_q;
          of_draft.go_on(part);
        }
      }
    }
    if (threadIdx.x == 0) prefetch_l2(team.keys + team.part);
    cluster.arrive_shared();
  }
  cluster.wait_shared();
  if (judges) {
    const RowStats stats = join_sums(cluster, s.sums, scale);
    if constexpr (kDense) {
      if (has_draft_row(r, i) && slot.x >= 0)
        slot = with_draft_row(r, join_sums(cluster, s.draft_sums, law_scale(r.draft_temperature)),
                              slot);
      if (slot.draft_sum != 0) draft_inverse = one_over(slot.draft_sum);
    }
    store_verdict(verdict_words,
                  verdict_word(r, judge_plain(r, slot, stats), stats.top, -INFINITY, false, false),
                  one_over(stats.sum), draft_inverse, slot.draft_top);
  }
  race_together<kDense>(p, r, cluster, team, i, noise, t, by_value);
}

}  // namespace domino
