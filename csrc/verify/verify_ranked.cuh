// verify_chain with a top-k over rows of bf16 logits, where a few rows are all that there is: one
// launch. A cluster reads one row once, and its threads keep what they have read.
//
//   bound    the greatest logits of 32 or 64 sets of tokens of each block: the k-th greatest of
//            them all is one that k tokens reach
//   list     the tokens from there on, mostly a few more than k, go to the cluster's last block
//   places   how many of them come before each, and what those weigh; beside it what their race
//            takes that does not depend on the cut
//   verdict  one warp finds the cut, judges the draft and runs the race
//
// Then the walk (row_words.cuh). Rows of which the list does not hold enough, or whose request has
// no top-k, go by end_by_value(). Bytes: every row once; bound by latency.
#pragma once

#include "verify/end_by_value.cuh"
#include "verify/row_blocks.cuh"

namespace domino {

// Grid: (blocks of a cluster, drafts + 1, batch). kByPosition: all requests that are not greedy go
// by match or gumbel. Rows are aligned, and their vocabulary is a multiple of 8.
template <bool kByPosition, int kBlocks>
__global__ void __launch_bounds__(kCutThreads, 1)
    verify_ranked_kernel(const __grid_constant__ VerifyChainParams p) {
  extern __shared__ uint4 dynamic_shared[];  // RankedShared, or ListedBlock
  __shared__ uint64_t tops_here, list_here, go_here;
  using Row = RowBlocks<kBlocks>;
  RankedShared<Row>& s = *reinterpret_cast<RankedShared<Row>*>(dynamic_shared);
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
  // the judge's own trips to memory, ahead of what they depend on
  const int64_t likely =
      judges && i < p.drafts ? p.draft_tokens[b * p.draft_tokens_stride + i] : -1;
  if (judges) ask_for_pool(p, b, i);
  if (threadIdx.x == 0) {
    make_barrier_of(&tops_here, 1);
    make_barrier_of(&list_here, Row::kReaders);
    make_barrier(shared_address(&go_here));
    expect_bytes(shared_address(&tops_here), Row::kAllSets * 2);
    expect_bytes(shared_address(&go_here), 8);
    s.top = s.listed = s.count = 0;
    s.bound = ~0u;
    s.crowded = 0;
  }
  if (threadIdx.x < Row::kSets) s.set_top[threadIdx.x] = 0;
  if (threadIdx.x < kAllSent) s.sent[threadIdx.x] = 0;
  cluster.arrive_shared();
  // all trips to memory at once
  const float draft_temperature = p.draft_temperature != nullptr ? p.draft_temperature[b] : 0.0f;
  const FilterParams wanted = read_filters(p, b);
  const ChainRequest r(p, b, &draft_temperature);
  const FilterParams filters = r.greedy() ? FilterParams{} : wanted;
  const BlockNoise noise = r.noise();
  if (likely >= 0 && likely < vocab && p.cu_rows == nullptr) prefetch_l2(row + likely);
  cluster.wait_shared();
  if (r.rows == 0) {
    if (i == 0 && leads) emit_end(r, 0, -1, r.faults);
    return;
  }
  if (i >= r.rows) return;
  unsigned long long* words = static_cast<unsigned long long*>(p.workspace) + b * (p.drafts + 1);
  const uint32_t k = r.greedy() ? 1u : static_cast<uint32_t>(filters.top_k);
  const bool ranked = r.greedy() || ranks_first(filters, vocab, min(Row::kAllSets, kMostRanked));
  RowWay way = ranked ? RowWay::kRanked : RowWay::kByValue;
  if (ranked && judges) {
    if (lane == 0) prefetch_l2(words + i);
    const RowSource<bf16> source(r.target_row(i), RowEdits{}, vocab);
    const SlotAhead slot = slot_ahead(r, i, source, &s.pool);
    if (lane == 0) s.slot = slot;
    // left open where the row is not ranked: barrier 3 is not for end_by_value()
    asm volatile("barrier.cta.arrive 3, %0;" ::"n"(kRaceThreads) : "memory");
    sync_block();  // with the readers, below
    way = s.way;
    if (way == RowWay::kRanked) {
      const unsigned long long word = judge_ranked<kByPosition>(r, i, filters, s, slot, noise);
      if (lane == 0) store_word(words + i, word);
    } else if (way == RowWay::kUnusable && lane == 0) {
      store_word(words + i, row_word(true, -1, row_faults(half_logit(s.top))));
    }
  } else if (ranked) {
    uint32_t mosts[Row::kSteps], most = 0xff80ff80u;
#pragma unroll
    for (int n = 0; n < Row::kSteps; ++n) most = max_nan(most, mosts[n] = groups[n].most(), bf16{});
    const float own = greater_half(most);
    atomicMax(&s.set_top[threadIdx.x % Row::kSets], logit_key(own) >> 16);
    sync_some<1>(readers);
    if (warp == 0) send_tops(s, rank, &tops_here);
    float tops[Row::kSteps];
#pragma unroll
    for (int n = 0; n < Row::kSteps; ++n) tops[n] = greater_half(mosts[n]);
    wait_for(&tops_here);
    find_bound(s, k);
    sync_some<1>(readers);
    const float top = half_logit(s.top), bound = half_logit(s.bound);
    if (row_faults(top) != 0)
      way = RowWay::kUnusable;
    else if (bound == -INFINITY)
      way = RowWay::kByValue;
    if (way == RowWay::kRanked) {
      uint32_t bytes = 0;
      if (own >= bound)
        bytes = send_tokens(s, rank, &list_here, groups, tops, bound, first, Row::kStride);
      bytes = __reduce_add_sync(kFullMask, bytes);
      if (lane == 0) arrive_expecting(shared_address_of(&list_here, kBlocks - 1), bytes);
      if (!leads) {
        wait_for(&go_here);
        way = static_cast<RowWay>(s.go);
      } else {
        const RowLaw law(top, 1, law_scale(r.temperature));
        wait_for(&list_here);
        collect_tokens(s, law);
        sync_some<1>(readers);
        const int count = static_cast<int>(s.count);
        if (s.crowded != 0 || count > kMostRanked) way = RowWay::kByValue;
        if (warp == 0 && lane < kBlocks - 1)
          send_shared(shared_address_of(&s.go, lane), static_cast<uint64_t>(way),
                      shared_address_of(&go_here, lane));
        if (way != RowWay::kRanked) {
          // the whole cluster goes on below
        } else if (warp < kPlaceWarps) {
          find_places(s, count, warp);
        } else {
          sync_some<3>(kRaceThreads);
          prepare_race<kByPosition>(r, i, s, law, noise, count, warp - kPlaceWarps);
        }
      }
    }
    if (leads) {
      if (threadIdx.x == 0) s.way = way;
      sync_block();
    }
  }
  if (way == RowWay::kByValue)
    return end_by_value<kByPosition>(p, cluster, b, i, words,
                                     *reinterpret_cast<ListedBlock*>(dynamic_shared));
  if (leads && warp == 0 && i == r.rows - 1) {
    walk_words(r, words);
  }
}

}  // namespace domino
