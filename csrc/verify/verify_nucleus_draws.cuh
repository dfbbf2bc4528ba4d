// verify_nucleus.cuh for rules that draw a token from every row (match, gumbel): a cluster races
// for that of its own row. Its threads keep what they have read.
//
//   count    a block counts its tokens by value (row_counter.cuh)
//   sums     a warp a row of 128 bins, over all blocks: what they weigh goes to the last block
//   cut      one warp there finds it and judges the draft
//   race     meanwhile the tokens are listed that can win whatever the cut: those whose noise is
//            within what their block's tokens weigh (race.cuh); behind the verdict their times
//
// Then the walk (row_words.cuh). What this does not settle goes by end_by_value(): requests that
// want other filters, values that the counts do not tell apart, drafts and winners that tie with
// the cut where not all ties are kept, races that nobody on the lists is sure to win. Bytes: every
// row once; bound by latency.
#pragma once

#include "verify/end_by_value.cuh"
#include "verify/nucleus_candidates.cuh"

namespace domino {

// Grid: (blocks of a cluster, drafts + 1, batch). Rows are aligned, and their vocabulary is a
// multiple of 8.
template <int kBlocks>
__global__ void __launch_bounds__(kCutThreads, 1)
    verify_nucleus_draws_kernel(const __grid_constant__ VerifyChainParams p) {
  extern __shared__ uint4 dynamic_shared[];  // NucleusDrawsShared, or ListedBlock
  using Row = RowBlocks<kBlocks>;
  using Own = OwnRows<Row>;
  __shared__ uint64_t rows_here, verdict_here, times_here, go_here;
  NucleusDrawsShared& s = *reinterpret_cast<NucleusDrawsShared*>(dynamic_shared);
  const RowCluster cluster;
  const int i = blockIdx.y, rank = cluster.rank;
  const int64_t b = blockIdx.z;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const bool leads = rank == kBlocks - 1, judges = leads && warp == kJudge;
  const int readers = leads ? kJudge * kWarpSize : kCutThreads;  // of this block
  const int first = Row::first(rank), vocab = static_cast<int>(p.vocab);
  int end = judges ? 0 : vocab;  // of what this thread reads
  const bf16* const row = row_of_few(p, b, i, end);
  Group<bf16> groups[Row::kSteps];
#pragma unroll
  for (int n = 0; n < Row::kSteps; ++n)
    load_here(groups[n], first + n * Row::kStride < end, row + first + n * Row::kStride);
  // all other trips to memory at once
  const float draft_temperature = p.draft_temperature != nullptr ? p.draft_temperature[b] : 0.0f;
  const FilterParams filters = read_filters(p, b);
  const ChainRequest r(p, b, &draft_temperature);
  const BlockNoise noise = r.noise();
  uint4* bins = reinterpret_cast<uint4*>(s.count);
#pragma unroll
  for (int n = 0; n < kValueBins / 4; n += kCutThreads) bins[n + threadIdx.x] = {0, 0, 0, 0};
  if (threadIdx.x == 0) {
    make_barrier(shared_address(&rows_here));
    make_barrier(shared_address(&verdict_here));
    make_barrier(shared_address(&times_here));
    make_barrier(shared_address(&go_here));
    expect_bytes(shared_address(&rows_here), sizeof(s.row_mass));
    expect_bytes(shared_address(&verdict_here), sizeof(NucleusVerdict));
    expect_bytes(shared_address(&times_here), Row::kReaders * sizeof(WarpTime));
    expect_bytes(shared_address(&go_here), 8);
    s.top = s.near = s.candidates = 0;
  }
  __syncthreads();
  if (r.rows == 0) {
    if (i == 0 && leads) emit_end(r, 0, -1, r.faults);
    return;
  }
  if (i >= r.rows) return;
  unsigned long long* words = static_cast<unsigned long long*>(p.workspace) + b * (p.drafts + 1);
  ListedBlock& by_value = *reinterpret_cast<ListedBlock*>(dynamic_shared);
  if (r.greedy() || !filters.by_mass() || filters.by_weight() || filters.by_rank(vocab))
    return end_by_value<true>(p, cluster, b, i, words, by_value);

  const RaceNoise race{r.position_noise(i), kPositionDraw, 0};
  SlotAhead slot;
  if (judges) {
    if (lane == 0) prefetch_l2(words + i);
    slot = slot_ahead(r, i, RowSource<bf16>(r.target_row(i), RowEdits{}, vocab), &s.pool);
  } else {
    uint32_t nearest = 0;
    float tops[Row::kSteps], most = -INFINITY;
#pragma unroll
    for (int n = 0; n < Row::kSteps; ++n) {
      count_values(s.count, groups[n], nearest);
      tops[n] = greater_half(groups[n].most());
      most = max_nan(most, tops[n]);
    }
    const uint32_t key = __reduce_max_sync(kFullMask, logit_key(most));
    if (has_near(nearest)) {
#pragma unroll
      for (int n = 0; n < Row::kSteps; ++n) note_near(s, groups[n].words);
    }
    const float scale = law_scale(r.temperature), warp_top = key_logit(key);
    float mass = 0.0f;
#pragma unroll
    for (int n = 0; n < Row::kSteps; ++n) mass += exp2_about((tops[n] - warp_top) * scale);
    mass = warp_sum(mass);
    if (lane == 0) {
      atomicMax(&s.top, key);
      s.mass[warp] = {warp_top > -INFINITY ? mass : 0.0f, warp_top};
    }
  }
  cluster.sync_shared();

  // the sums of this block's rows of bins
  const uint64_t found = cluster.of_lane(reinterpret_cast<uint64_t*>(&s.top));
  uint4 counts[Own::kCount];
#pragma unroll
  for (int n = 0; n < Own::kCount; ++n)
    if (Own::at(n, rank) < kOctaves) counts[n] = cluster_bins<Row>(cluster, s, Own::at(n, rank));
  const float top = key_logit(__reduce_max_sync(kFullMask, static_cast<uint32_t>(found)));
  const uint32_t near = __reduce_max_sync(kFullMask, static_cast<uint32_t>(found >> 32));
  const RowLaw law(top, 1, law_scale(r.temperature));
  if (row_faults(top) != 0) {
    if (judges && lane == 0) store_word(words + i, row_word(true, -1, row_faults(top)));
    cluster.sync();  // all have read what they wanted of others
    if (judges && i == r.rows - 1) walk_words(r, words);
    return;
  }
  if (law.shift == 0.0f || !tells_apart(law, -INFINITY, near))
    return end_by_value<true>(p, cluster, b, i, words, by_value);
#pragma unroll
  for (int n = 0; n < Own::kCount; ++n) {
    const int bins = Own::at(n, rank);
    if (bins >= kOctaves) continue;
    uint64_t mass = 0;
    if (__any_sync(kFullMask, (counts[n].x | counts[n].y | counts[n].z | counts[n].w) != 0)) {
      uint64_t in[4], more = 0;
      if (bins == kZeroBin / kRowBins && near != 0) more = near_mass(s, cluster, law);
      weigh_bins(law, bins, counts[n], more, in);
      mass = warp_sum(in[0] + in[1] + in[2] + in[3]);
    }
    if (lane == 0)
      send_shared(shared_address_of(s.row_mass + bins, kBlocks - 1), mass,
                  shared_address_of(&rows_here, kBlocks - 1));
  }

  NucleusWay way;
  bool raced;
  if (judges) {
    wait_for(&rows_here);
    const uint64_t more = near != 0 ? near_mass(s, cluster, law) : 0;
    const ValueCut cut = find_row_and_cut(s.row_mass, law, filters.top_p, more, [&](int row) {
      return cluster_bins<Row>(cluster, s, row);
    });
    const RowFilter filter = cut.filter();
    const Slot verdict = judge_cut(r, slot, law, filter);
    const bool unclear = near != 0 && cut.logit == 0.0f;  // or is it among those near 0?
    way = unclear ? NucleusWay::kByValue : NucleusWay::kRace;
    if (lane == 0) s.out = {way, filter.cut_logit, filter.cut_id, 0};
    __syncwarp();
    if (lane < kBlocks * kVerdictParts) {
      const int to = lane / kVerdictParts, part = lane % kVerdictParts;
      const ulonglong2 two = reinterpret_cast<const ulonglong2*>(&s.out)[part];
      send_shared(shared_address_of(reinterpret_cast<char*>(&s.verdict) + 16 * part, to), two.x,
                  two.y, shared_address_of(&verdict_here, to));
    }
    unsigned long long word = 0;
    raced = way == NucleusWay::kRace;
    if (raced) {
      wait_for(&times_here);
      const int32_t winner = sure_winner<Row>(s.times);
      way = winner < 0 ? NucleusWay::kByValue : NucleusWay::kSettled;
      const bool accepts = winner == slot.x;
      word = row_word(!accepts, accepts ? -1 : winner, verdict.status);
      if (lane < kBlocks)
        send_shared(shared_address_of(&s.go, lane), static_cast<uint64_t>(way),
                    shared_address_of(&go_here, lane));
    }
    if (way == NucleusWay::kSettled) {
      if (lane == 0) store_word(words + i, word);
      if (i == r.rows - 1) walk_words(r, words);
    }
  } else {
    const AboutWeight about(law);
    const float bound = sure_time(s, readers / kWarpSize, about);
#pragma unroll 1
    for (int n = 0; n < Row::kSteps; ++n) {
      list_candidates(s, groups[0], first + n * Row::kStride, about, race,
                      bound * (1.002f * 0x1p32f));
#pragma unroll
      for (int j = 1; j < Row::kSteps; ++j) groups[j - 1] = groups[j];
    }
    sync_some<1>(readers);
    const bool crowded = s.candidates > kMostCandidates;
    const bool has = !crowded && threadIdx.x < s.candidates;
    const float logit = has ? s.logit[threadIdx.x] : -INFINITY;
    const int32_t token = has ? s.token[threadIdx.x] : -1;
    const float weight = law.weight(logit);
    const float exponential_time = exponential(has ? s.word[threadIdx.x] : 0);
    wait_for(&verdict_here);
    const NucleusVerdict verdict = s.verdict;
    way = verdict.way;
    raced = way == NucleusWay::kRace;
    if (raced) {
      const RowFilter filter{verdict.cut_logit, verdict.cut_id < 0 ? INT32_MAX : verdict.cut_id, 0};
      WarpTime time{kNoWinner, 0, 0};
      if (has && filter.keeps(logit, token)) {
        if (weight > 0.0f)
          time.key =
              static_cast<unsigned long long>(__float_as_uint(div_rn(exponential_time, weight)))
                  << 32 |
              static_cast<uint32_t>(token);
        time.tied = verdict.cut_id < 0 && logit == verdict.cut_logit ? 1u : 0u;
      }
      const unsigned long long least = least_of_warp(time.key);
      const unsigned tied = __ballot_sync(kFullMask, time.key == least && time.tied != 0);
      if (lane == 0) {
        const uint64_t aux = static_cast<uint64_t>(tied != 0 ? 1u : 0u) << 32 |
                             (crowded ? 0u : __float_as_uint(bound));
        send_shared(shared_address_of(s.times + warp * kBlocks + rank, kBlocks - 1), least, aux,
                    shared_address_of(&times_here, kBlocks - 1));
      }
      wait_for(&go_here);
      way = static_cast<NucleusWay>(s.go);
    }
  }
  if (way == NucleusWay::kByValue) return end_by_value<true>(p, cluster, b, i, words, by_value);
  // a race has heard of every warp that it is through with the other blocks
  if (!raced) cluster.meet();
}

}  // namespace domino
