// Second launch of verify_chain behind verify_cut.cuh or verify_listed.cuh: a cluster owns a
// request. It takes the first slot that does not accept from what the rows' clusters found, and
// races for the last token (race_draw.cuh), unless that has been done. Bytes: 64 a row, and one
// row; bound by latency.
#pragma once

#include "verify/race_draw.cuh"
#include "verify/slot_verdict.cuh"

namespace domino {

constexpr int kDrawWarps = 8;  // 128 registers a thread: beside a block of verify_cut_kernel
constexpr int kDrawThreads = kDrawWarps * kWarpSize;

// Tokens of this logit up to an id. All threads of the cluster call it and get the same.
__device__ __noinline__ int count_ties(const RowCluster& cluster, const RowSource<bf16>& source,
                                       float logit, int64_t last_id) {
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
__device__ __noinline__ int32_t last_tie(const RowCluster& cluster, const RowSource<bf16>& source,
                                         float logit, int ties) {
  __shared__ int counts[kDrawWarps];
  __shared__ int32_t found;
  constexpr int kStep = kWarpSize * kGroup;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int warps = cluster.size * kDrawWarps, own_warp = cluster.rank * kDrawWarps + warp;
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
    before += cluster.map(counts, from / kDrawWarps)[from % kDrawWarps];
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
// cut all or, where cut_id is negative, the first -cut_id.
__device__ __forceinline__ int64_t draw_token(const RowCluster& cluster, const ChainRequest& r,
                                              int i, Outcome outcome, const SlotVerdict& slot,
                                              const BlockNoise& block_noise) {
  const RowFilter& filter = slot.filter;
  const RowSource<bf16> source(r.target_row(i), RowEdits{}, static_cast<int>(r.p.vocab));
  const RowLaw law(slot.top, slot.sum, law_scale(r.temperature));
  RowFilter kept = filter;
  if (kept.cut_id < 0) kept.cut_id = INT32_MAX;
  const SlotQ q{(slot.status & kTakenAsOneHot) != 0, slot.draft_top, slot.draft_sum};
  const DrawWeights weights = draw_weights(r, i, outcome, q, law, kept, 1.0f);
  const RaceNoise noise{block_noise, race_noise(r, i, outcome).purpose, i};
  const float about = weights.q != DraftLaw::kOneHot ? kLikelyResidual
                      : outcome == slot.outcome      ? slot.race_mass
                                                     : 0.0f;
#pragma unroll 1
  for (;;) {
    const unsigned long long key = draw_row(cluster, source, weights, noise, about);
    if (key == kNoWinner) return -1;
    const int32_t token = static_cast<int32_t>(key & 0xffffffffu);
    // ties that are not kept matter only where one of the ties wins
    if (filter.cut_id >= 0 || kept.cut_id != INT32_MAX || source.at(token) != filter.cut_logit)
      return token;
    kept.cut_id = last_tie(cluster, source, filter.cut_logit, -filter.cut_id);
    if (token <= kept.cut_id) return token;
  }
}

// Grid: a cluster for each request.
__global__ void __launch_bounds__(kDrawThreads, 2)
    verify_draw_kernel(const __grid_constant__ VerifyChainParams p) {
  __shared__ uint4 shared_slots[kWarpSize * sizeof(SlotVerdict) / sizeof(uint4)];
  const SlotVerdict* slots = reinterpret_cast<const SlotVerdict*>(shared_slots);  // from base on
  const RowCluster cluster;
  const int64_t b = blockIdx.x / cluster.size;
  const ChainRequest r(p, b);
  const ChainWorkspace chunks(p.workspace, p.batch, p.drafts, p.vocab, false);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const BlockNoise noise = r.noise();  // its own trip to memory, while the rows are read
  previous_launch_done();
  if (r.rows == 0) {
    if (cluster.rank == 0) emit_end(r, 0, -1, r.faults);
    return;
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

    const SlotVerdict& slot = slots[stop - base];
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
#pragma unroll 1
    for (;;) {
      last = draw_token(cluster, r, stop, outcome, slot, noise);
      if (last >= 0 || outcome == Outcome::kDraw) break;
      bits |= kZeroResidual;  // nothing was left to replace the draft
      outcome = Outcome::kDraw;
    }
    break;
  }
  if (cluster.rank != 0) return;
  if (last >= 0 && threadIdx.x == 0 && p.chosen_logprob == nullptr) {
    emit_token(r, stop, last, 0.0f);
  } else if (last >= 0 && threadIdx.x == 0) {
    const RowSource<bf16> source(r.target_row(stop), RowEdits{}, static_cast<int>(p.vocab));
    const SlotVerdict& slot = slots[stop - base];
    const RowLaw law(slot.top, slot.sum, law_scale(r.temperature));
    emit_token(r, stop, last, law.log_probability(source.at(last)));
  }
  emit_end(r, stop, last, bits);
}

}  // namespace domino
