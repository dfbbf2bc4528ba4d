// Second launch of verify_chain behind verify_cut.cuh, verify_listed.cuh or, by other rules than
// kToken, verify_row.cuh: a cluster owns a request. It takes the first slot that does not accept
// from what was found of the rows, and races for the last token (race_draw.cuh), unless that has
// been done. With dense q it sums up the row of q of that token where nobody has and the token
// depends on it. Bytes: 64 a row, and one row or two; bound by latency.
#pragma once

#include "verify/draw_block.cuh"
#include "verify/judged_rows.cuh"

namespace domino {

// Grid: a cluster for each request. kRule: of all requests that are not greedy; kToken with coins
// of slots, kMatch with draws of positions.
// kResident: blocks of a processor at least. kDense: by rows of q. kCounted: a request is drawn for
// once its rows have been judged (judged_rows.cuh), otherwise behind the launch in front.
template <VerifyRule kRule, int kResident = 2, bool kDense = false, bool kCounted = false>
__global__ void __launch_bounds__(kDrawThreads, kResident)
    verify_draw_kernel(const __grid_constant__ VerifyChainParams p) {
  __shared__ uint4 shared_slots[kWarpSize * sizeof(SlotVerdict) / sizeof(uint4)];
  SlotVerdict* slots = reinterpret_cast<SlotVerdict*>(shared_slots);  // from base on
  const RowCluster cluster;
  const int64_t b = blockIdx.x / cluster.size;
  const ChainRequest r(p, b);
  const ChainWorkspace chunks(p.workspace, p.batch, p.drafts, p.vocab, kDense);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const BlockNoise noise = r.noise();  // its own trip to memory, while the rows are read
  if constexpr (kCounted) {
    if (threadIdx.x == kDrawThreads - 1)
      wait_for_judges(judged_count(p, b), static_cast<int>(p.drafts) + 1);
    __syncthreads();
  } else {
    previous_launch_done();
  }
  const auto leave = [&] {
    if constexpr (kCounted) {
      if (threadIdx.x == kDrawThreads - 1) leave_count(judged_count(p, b), cluster.size);
      previous_launch_done();
    }
  };
  if (cluster.rank == 0 && threadIdx.x == 0 && b < kGreedyWords)
    static_cast<unsigned long long*>(p.workspace)[b] = 0;  // chain_end() of verify_cut.cuh
  if (r.rows == 0) {
    leave();
    if (cluster.rank == 0) emit_end(r, 0, -1, r.faults);
    return;
  }
  if constexpr (kRule == VerifyRule::kBlock) {
    if (r.by_block()) return draw_block<kDense>(cluster, r, chunks);
  }
  uint32_t bits = r.faults;
  int stop = 0, base = -kWarpSize;
  int64_t last = -1;
#pragma unroll 1
  for (;;) {
    if (stop >= base + kWarpSize) {
      base += kWarpSize;
      __syncthreads();
      constexpr int kWords = sizeof(SlotVerdict) / sizeof(uint4);
      const uint4* from =
          reinterpret_cast<const uint4*>(slot_verdicts(chunks) + b * (p.drafts + 1) + base);
      const int words = min(kWarpSize, r.rows - base) * kWords;
      for (int n = threadIdx.x; n < words; n += kDrawThreads) shared_slots[n] = __ldcg(from + n);
      __syncthreads();
    }
    // the first slot from `stop` on that does not accept; the last row never does
    const int i = base + lane;
    const bool has = i >= stop && i < r.rows;
    const unsigned stops = __ballot_sync(kFullMask, has && slots[lane].outcome != Outcome::kAccept);
    const int next = stops != 0 ? base + __ffs(stops) - 1 : base + kWarpSize;
    bits |= __reduce_or_sync(kFullMask, has && i <= next ? slots[lane].status & 0xffu : 0u);
    if (warp == 0 && cluster.rank == 0 && has && i < next)
      emit_token(r, i, r.draft_token(i), slots[lane].logprob);
    stop = next;
    if (stops == 0) continue;

    SlotVerdict& slot = slots[stop - base];
    Outcome outcome = slot.outcome;
    if (outcome == Outcome::kFail) break;
    if (outcome == Outcome::kArgmax) {
      last = slot.argmax;
      break;
    }
    if (outcome == Outcome::kUndecided) {  // the draft ties with the cut
      const RowSource<bf16> source(r.target_row(stop), RowEdits{}, static_cast<int>(p.vocab));
      const int64_t x = r.draft_token(stop);
      if (count_ties(cluster, source, slot.filter.cut_logit, x) <= -slot.filter.cut_id) {
        if (threadIdx.x == 0 && cluster.rank == 0) emit_token(r, stop, x, slot.logprob);
        ++stop;
        continue;
      }
      outcome = Outcome::kResidual;
    }
    if (outcome == Outcome::kResidual && r.q == DraftLaw::kScalar &&
        (slot.status & kTakenAsOneHot) == 0) {
      bits |= kNeedsResidual;
      break;
    }
    last = slot.winner;
    if (last >= 0) break;
    if constexpr (kDense) {
      if (outcome == Outcome::kResidual && has_draft_row(r, stop) && slot.draft_sum == 0 &&
          (slot.status & kTakenAsOneHot) == 0) {
        if (slot.outcome == Outcome::kResidual && slot.status >> kKeptShift != 0)
          last = race_kept_about(r, stop, slot, kept_tokens(chunks, p, b, stop), noise);
        if (last >= 0) break;
        sum_draft_by_cluster(cluster, r, stop, chunks, &slot);
      }
    }
#pragma unroll 1
    for (;;) {
      RaceNoise race{noise, kPositionDraw, 0};
      if constexpr (kRule == VerifyRule::kMatch)
        race.noise = r.position_noise(stop);
      else
        race = {noise, race_noise(r, stop, outcome).purpose, stop};
      if (kDense && slot.status >> kKeptShift != 0)
        last = race_kept(r, stop, outcome, slot, kept_tokens(chunks, p, b, stop), race);
      else
        last = draw_token<(kResident > 2 || kCounted)>(cluster, r, stop, outcome, slot, race);
      if (last >= 0 || outcome == Outcome::kDraw) break;
      bits |= kZeroResidual;  // nothing was left to replace the draft
      outcome = Outcome::kDraw;
    }
    if constexpr (kRule == VerifyRule::kMatch) {
      if (stop < r.rows - 1 && last == r.draft_token(stop)) {
        if (threadIdx.x == 0 && cluster.rank == 0) emit_token(r, stop, last, slot.logprob);
        last = -1;
        ++stop;
        continue;
      }
    }
    break;
  }
  if (cluster.rank != 0) return leave();
  if (last >= 0 && threadIdx.x == 0 && p.chosen_logprob == nullptr) {
    emit_token(r, stop, last, 0.0f);
  } else if (last >= 0 && threadIdx.x == 0) {
    const RowSource<bf16> source(r.target_row(stop), RowEdits{}, static_cast<int>(p.vocab));
    const SlotVerdict& slot = slots[stop - base];
    const RowLaw law(slot.top, slot.sum, law_scale(r.temperature));
    emit_token(r, stop, last, law.log_probability(source.at(last)));
  }
  emit_end(r, stop, last, bits);
  leave();
}

}  // namespace domino
