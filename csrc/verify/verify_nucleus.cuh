// verify_chain by top-p alone over rows of bf16 logits, where a few rows are all that there is: one
// launch. A cluster reads one row once.
//
//   count    a block counts its tokens by value (row_counter.cuh)
//   sums     a warp a row of 128 bins, over all blocks: what they weigh goes to all of them
//   cut      that warp finds it in whose bins it lies, and judges the draft
//   race     all blocks of the request, over the row in which the walk ends (race_together.cuh)
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
                                          const ValueCut& cut, const SlotAhead& slot, bool near,
                                          unsigned long long* words) {
  const RowFilter filter = cut.filter();
  const Slot verdict = judge_cut(r, slot, law, filter);
  // is the cut among those near 0, the draft among ties that are kept?
  const bool open = (near && cut.logit == 0.0f) || verdict.outcome == Outcome::kUndecided;
  store_verdict(words, verdict_word(r, verdict, law.top, cut.logit, cut.ties >= 0, open), cut.mass,
                slot.draft_sum, slot.draft_top);
}

// Grid: (blocks of a cluster, drafts + 1, batch). Rows are aligned, and their vocabulary is a
// multiple of 8.
__global__ void __launch_bounds__(kCutThreads, 1)
    verify_nucleus_kernel(const __grid_constant__ VerifyChainParams p) {
  extern __shared__ uint4 dynamic_shared[];  // NucleusShared, or ListedBlock
  __shared__ uint64_t rows_here;
  __shared__ TeamShared t;
  NucleusShared& s = *reinterpret_cast<NucleusShared*>(dynamic_shared);
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
  Group<bf16> groups[kRankedSteps];
#pragma unroll
  for (int n = 0; n < kRankedSteps; ++n)
    load_here(groups[n], first + n * kStep < end, row + first + n * kStep);
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
  const auto team = RaceTeam::of(r, i, rank);
  ListedBlock& by_value = *reinterpret_cast<ListedBlock*>(dynamic_shared);
  if (r.greedy() || !filters.by_mass() || filters.by_weight() || filters.by_rank(vocab))
    return end_by_value<false>(p, cluster, b, i, team.verdicts, by_value);

  unsigned long long* verdict_words = team.verdicts + i * kVerdictWords;
  if (judges) {
    if (lane == 0) prefetch_l2(verdict_words);
    const SlotAhead slot =
        slot_ahead(r, i, RowSource<bf16>(r.target_row(i), RowEdits{}, vocab), &s.pool);
    if (lane == 0) static_cast<SlotAhead&>(s.out) = slot;
    __syncwarp();
  } else {
    uint32_t nearest = 0, most = 0xff80ff80u;
#pragma unroll
    for (int n = 0; n < kRankedSteps; ++n) {
      count_values(s.count, groups[n], nearest);
      most = max_nan(most, groups[n].most(), bf16{});
    }
    const uint32_t key = __reduce_max_sync(kFullMask, logit_key(greater_half(most)));
    if (has_near(nearest)) {
#pragma unroll
      for (int n = 0; n < kRankedSteps; ++n) note_near(s, groups[n].words);
    }
    if (lane == 0) atomicMax(&s.top, key);
    if (threadIdx.x == 0) prefetch_l2(team.keys + team.part);
  }
  const float scale = law_scale(r.temperature);
  cluster.sync_shared();

  // the sums of this block's rows of bins
  const uint64_t found = cluster.of_lane(reinterpret_cast<uint64_t*>(&s.top));
  const int own_row = warp * kRankedBlocks + rank;
  const bool sums = warp < kOwnRows && own_row < kOctaves;
  uint4 counts{0, 0, 0, 0};
  if (sums) counts = cluster_bins(cluster, s, own_row);
  const float top = key_logit(__reduce_max_sync(kFullMask, static_cast<uint32_t>(found)));
  const uint32_t near = __reduce_max_sync(kFullMask, static_cast<uint32_t>(found >> 32));
  const RowLaw law(top, 1, scale);
  if (row_faults(top) != 0) {
    if (judges) store_verdict(verdict_words, row_word(true, -1, row_faults(top)), 0, 0, 0.0f);
  } else {
    if (judges && lane < kRankedBlocks * kSlotParts) {
      const int to = lane / kSlotParts, part = lane % kSlotParts;
      const ulonglong2 two = reinterpret_cast<const ulonglong2*>(&s.out)[part];
      send_shared(shared_address_of(reinterpret_cast<char*>(&s.slot) + 16 * part, to), two.x, two.y,
                  shared_address_of(&rows_here, to));
    }
    uint64_t in[4], mass = 0, up_to = 0;
    if (sums) {
      uint64_t more = 0;
      if (own_row == kZeroBin / kRowBins && near != 0 && near <= kNearTokens)
        more = near_mass(s, cluster, law);
      weigh_bins(law, own_row, counts, more, in);
      const uint64_t of_lane = in[0] + in[1] + in[2] + in[3];
      mass = mass_of_warp(of_lane);
      if (lane < kRankedBlocks)
        send_shared(shared_address_of(s.row_mass + own_row, lane), mass,
                    shared_address_of(&rows_here, lane));
      up_to = sum_up_to(of_lane);
    }
    const bool apart = law.shift != 0.0f && tells_apart(law, -INFINITY, near);
    if (sums || !apart) wait_for(&rows_here);
    if (!apart) return end_apart<false>(p, cluster, b, i, true, by_value);
    if (sums) {
      const RowsBefore rows(s.row_mass, own_row);
      const uint64_t target = nucleus_cut(rows.all, filters.top_p);
      if (rows.before < target && rows.before + mass >= target) {
        const ValueCut cut = find_cut(own_row, counts, in, rows.before + up_to, target, law);
        judge_row(r, law, cut, s.slot, near != 0, verdict_words);
      }
    }
  }
  race_together<false>(p, r, cluster, team, i, noise, t, by_value);
}

}  // namespace domino
