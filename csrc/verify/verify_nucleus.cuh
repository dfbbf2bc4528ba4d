// verify_chain by top-p alone over rows of bf16 logits, where a few rows are all that there is: one
// launch. A cluster reads one row once.
//
//   count    a block counts its tokens by value (row_counter.cuh)
//   sums     a warp a row of 128 bins, over all blocks: what they weigh goes to all of them
//   cut      that warp finds it in whose bins it lies, and judges the draft
//   race     all blocks of the request, over the row in which the walk ends (race_together.cuh)
//
// With rows of q their sums are worked out beside the counts (cluster_sums.cuh).
//
// What this does not settle goes by value (end_by_value.cuh): requests that want other filters,
// values that the counts do not tell apart, drafts and winners that tie with the cut where not all
// ties are kept, a residual of which nothing is left. Bytes: every row once, and the last one again
// from L2; bound by latency.
#pragma once

#include "verify/nucleus_row.cuh"
#include "verify/race_together.cuh"

namespace domino {

// Leaves the verdict on a row whose cut is known. near: there are tokens that are not 0 in the bins
// around it. By a warp.
__device__ __forceinline__ void judge_row(const ChainRequest& r, const RowLaw& law,
                                          const ValueCut& cut, const SentSlot& slot, bool near,
                                          unsigned long long* words) {
  const RowFilter filter = cut.filter();
  const Slot verdict = judge_cut(r, slot, law, filter);
  // is the cut among those near 0, the draft among ties that are kept?
  const bool open = (near && cut.logit == 0.0f) || verdict.outcome == Outcome::kUndecided;
  store_verdict(words, verdict_word(r, verdict, law.top, cut.logit, cut.ties >= 0, open),
                one_over(cut.mass), slot.draft_inverse, slot.draft_top);
}

// Grid: (blocks of a cluster, drafts + 1, batch). Rows are aligned, and their vocabulary is a
// multiple of 8. kDense: with rows of q, likewise.
template <bool kDense, int kBlocks>
__global__ void __launch_bounds__(kCutThreads, 1)
    verify_nucleus_kernel(const __grid_constant__ VerifyChainParams p) {
  extern __shared__ uint4 dynamic_shared[];  // NucleusShared, or ListedBlock
  __shared__ uint64_t rows_here;
  __shared__ TeamShared t;
  using Row = RowBlocks<kBlocks>;
  using Own = OwnRows<Row>;
  NucleusShared<Row>& s = *reinterpret_cast<NucleusShared<Row>*>(dynamic_shared);
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
  const FilterParams filters = read_filters(p, b);
  const ChainRequest r(p, b, &draft_temperature);
  const BlockNoise noise = r.noise();
  if (judges) ask_for_pool(p, b, i);
  uint4* bins = reinterpret_cast<uint4*>(s.count);
#pragma unroll
  for (int n = 0; n < kValueBins / 4; n += kCutThreads) bins[n + threadIdx.x] = {0, 0, 0, 0};
  if (threadIdx.x == 0) {
    make_barrier(shared_address(&rows_here));
    expect_bytes(shared_address(&rows_here), sizeof(s.row_mass) + sizeof(s.slot));
    t.open();
    s.top = s.near = 0;
  }
  if (judges && likely >= 0 && likely < vocab && p.cu_rows == nullptr) prefetch_l2(row + likely);
  __syncthreads();
  if (r.rows == 0) {
    if (i == 0 && leads) emit_end(r, 0, -1, r.faults);
    return;
  }
  if (i >= r.rows) return;
  const auto team = RaceTeam::of(r, i, cluster);
  ListedBlock& by_value = *reinterpret_cast<ListedBlock*>(dynamic_shared);
  if (r.greedy() || !filters.by_mass() || filters.by_weight() || filters.by_rank(vocab))
    return end_by_value<false, kDense>(p, cluster, b, i, team.verdicts, by_value);

  unsigned long long* verdict_words = team.verdicts + i * kVerdictWords;
  SlotAhead slot;
  if (judges) {
    if constexpr (kDense) s.draft_sums.leave_none();
    cluster.arrive_shared();  // nobody waits for what this warp works out
    if (lane == 0) prefetch_l2(verdict_words);
    slot = dense_slot_ahead<kDense>(r, i, RowSource<bf16>(r.target_row(i), RowEdits{}, vocab),
                                    &s.pool);
  } else {
    uint32_t most = 0xff80ff80u;
    const float draft_scale = law_scale(r.draft_temperature);
#pragma unroll
    for (int part = 0; part < Row::kParts; ++part) {
      const auto& groups = tokens.part(part);
      uint32_t nearest = 0;
#pragma unroll
      for (int n = 0; n < tokens.steps(part); ++n) {
        count_values(s.count, groups[n], nearest);
        most = max_nan(most, groups[n].most(), bf16{});
      }
      if (has_near(nearest)) {
#pragma unroll
        for (int n = 0; n < tokens.steps(part); ++n) note_near(s, groups[n].words);
      }
      tokens.go_on(part);
      if constexpr (kDense) {
        if (has_draft_row(r, i)) {
          const ChunkStats sum = sum_groups(of_draft.part(part), draft_scale);
          if (lane == 0) s.draft_sums.of[warp * Row::kParts + part] = sum;
          of_draft.go_on(part);
        }
      }
    }
    const uint32_t key = __reduce_max_sync(kFullMask, logit_key(greater_half(most)));
    if (lane == 0) atomicMax(&s.top, key);
    if (threadIdx.x == 0) prefetch_l2(team.keys + team.part);
    cluster.arrive_shared();
  }
  const float scale = law_scale(r.temperature);
  cluster.wait_shared();

  // the sums of this block's rows of bins
  const uint64_t found = cluster.of_lane(reinterpret_cast<uint64_t*>(&s.top));
  uint4 counts[Own::kCount];
#pragma unroll
  for (int n = 0; n < Own::kCount; ++n)
    if (Own::at(n, rank) < kOctaves) counts[n] = cluster_bins<Row>(cluster, s, Own::at(n, rank));
  const float top = key_logit(__reduce_max_sync(kFullMask, static_cast<uint32_t>(found)));
  const uint32_t near = __reduce_max_sync(kFullMask, static_cast<uint32_t>(found >> 32));
  const RowLaw law(top, 1, scale);
  if (row_faults(top) != 0) {
    if (judges) store_verdict(verdict_words, row_word(true, -1, row_faults(top)), 0.0f, 0.0f, 0.0f);
  } else {
    if (judges) {
      if constexpr (kDense) {
        if (has_draft_row(r, i) && slot.x >= 0)
          slot = with_draft_row(r, join_sums(cluster, s.draft_sums, law_scale(r.draft_temperature)),
                                slot);
      }
      if (lane == 0) s.out = {slot, one_over(slot.draft_sum)};
      __syncwarp();
    }
    if (judges && lane < kBlocks * kSlotParts) {
      const int to = lane / kSlotParts, part = lane % kSlotParts;
      const ulonglong2 two = reinterpret_cast<const ulonglong2*>(&s.out)[part];
      send_shared(shared_address_of(reinterpret_cast<char*>(&s.slot) + 16 * part, to), two.x, two.y,
                  shared_address_of(&rows_here, to));
    }
    uint64_t in[Own::kCount][4], mass[Own::kCount], up_to[Own::kCount];
#pragma unroll
    for (int n = 0; n < Own::kCount; ++n) {
      const int bins = Own::at(n, rank);
      if (bins >= kOctaves) continue;
      uint64_t more = 0;
      if (bins == kZeroBin / kRowBins && near != 0 && near <= kNearTokens)
        more = near_mass(s, cluster, law);
      weigh_bins(law, bins, counts[n], more, in[n]);
      const uint64_t of_lane = in[n][0] + in[n][1] + in[n][2] + in[n][3];
      mass[n] = mass_of_warp(of_lane);
      if (lane < kBlocks)
        send_shared(shared_address_of(s.row_mass + bins, lane), mass[n],
                    shared_address_of(&rows_here, lane));
      up_to[n] = sum_up_to(of_lane);
    }
    const bool sums = Own::at(0, rank) < kOctaves;
    const bool apart = law.shift != 0.0f && tells_apart(law, -INFINITY, near);
    if (sums || !apart) wait_for(&rows_here);
    if (!apart) return end_apart<kDense>(p, cluster, b, i, true, by_value);
#pragma unroll
    for (int n = 0; n < Own::kCount; ++n) {
      const int bins = Own::at(n, rank);
      if (bins >= kOctaves) continue;
      const RowsBefore rows(s.row_mass, bins);
      const uint64_t target = nucleus_cut(rows.all, filters.top_p);
      if (rows.before < target && rows.before + mass[n] >= target) {
        const ValueCut cut = find_cut(bins, counts[n], in[n], rows.before + up_to[n], target, law);
        judge_row(r, law, cut, s.slot, near != 0, verdict_words);
      }
    }
  }
  race_together<kDense>(p, r, cluster, team, i, noise, t, by_value);
}

}  // namespace domino
