// verify_plain.cuh for rules that draw a token from every row (match, gumbel): a cluster races for
// that of its own row, which it reads once. Its threads keep what they have read.
//
//   top    the row's greatest logit, to all blocks, and what a block's tokens weigh, about
//   race   the tokens are listed that are within what their block's weigh (nucleus_candidates.cuh);
//          their times go to the last block
//
// Then the walk (row_words.cuh). Greedy requests and races that nobody on the lists is sure to win
// go by end_by_value(). Bytes: every row once; bound by latency and the noise of all tokens.
#pragma once

#include "verify/end_by_value.cuh"
#include "verify/nucleus_candidates.cuh"

namespace domino {

struct PlainDrawsShared : Candidates {
  uint32_t top;      // logit_key
  uint64_t settled;  // is it sure who wins?
  // of the leader
  alignas(16) WarpTime times[kMostReaders + 1];
};

// Grid: (blocks of a cluster, drafts + 1, batch). Rows are aligned, and their vocabulary is a
// multiple of 8.
template <int kBlocks>
__global__ void __launch_bounds__(kCutThreads, 1)
    verify_plain_draws_kernel(const __grid_constant__ VerifyChainParams p) {
  extern __shared__ uint4 dynamic_shared[];  // PlainDrawsShared, or ListedBlock
  using Row = RowBlocks<kBlocks>;
  __shared__ uint64_t times_here, settled_here;
  PlainDrawsShared& s = *reinterpret_cast<PlainDrawsShared*>(dynamic_shared);
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
  const ChainRequest r(p, b);
  const RaceNoise race{r.position_noise(i), kPositionDraw, 0};
  if (threadIdx.x == 0) {
    make_barrier(shared_address(&times_here));
    make_barrier(shared_address(&settled_here));
    expect_bytes(shared_address(&times_here), Row::kReaders * sizeof(WarpTime));
    expect_bytes(shared_address(&settled_here), sizeof(s.settled));
    s.top = s.candidates = 0;
  }
  __syncthreads();
  if (r.rows == 0) {
    if (i == 0 && leads) emit_end(r, 0, -1, r.faults);
    return;
  }
  if (i >= r.rows) return;
  unsigned long long* words = static_cast<unsigned long long*>(p.workspace) + b * (p.drafts + 1);
  ListedBlock& by_value = *reinterpret_cast<ListedBlock*>(dynamic_shared);
  if (r.greedy()) return end_by_value<true>(p, cluster, b, i, words, by_value);

  const float scale = law_scale(r.temperature);
  SlotDraft draft;
  if (judges) {
    if (lane == 0) prefetch_l2(words + i);
    draft = SlotDraft(r, i, RowSource<bf16>(r.target_row(i), RowEdits{}, vocab));
  } else {
    float tops[Row::kSteps], most = -INFINITY;
#pragma unroll
    for (int n = 0; n < Row::kSteps; ++n) {
      tops[n] = greater_half(groups[n].most());
      most = max_nan(most, tops[n]);
    }
    const uint32_t key = __reduce_max_sync(kFullMask, logit_key(most));
    const float warp_top = key_logit(key);
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
  const float top = key_logit(__reduce_max_sync(kFullMask, cluster.of_lane(&s.top)));
  const RowLaw law(top, 1, scale);
  if (row_faults(top) != 0) {
    if (judges && lane == 0) store_word(words + i, row_word(true, -1, row_faults(top)));
    cluster.sync();  // all have read what they wanted of others
    if (judges && i == r.rows - 1) walk_words(r, words);
    return;
  }
  if (law.shift == 0.0f) return end_by_value<true>(p, cluster, b, i, words, by_value);

  bool settled;
  if (judges) {
    wait_for(&times_here);
    const int32_t winner = sure_winner<Row>(s.times);
    settled = winner >= 0;
    if (lane < kBlocks)
      send_shared(shared_address_of(&s.settled, lane), settled ? 1 : 0,
                  shared_address_of(&settled_here, lane));
    const bool accepts = winner == draft.x;
    if (settled && lane == 0)
      store_word(words + i, row_word(!accepts, accepts ? -1 : winner, draft.status));
    if (settled && i == r.rows - 1) walk_words(r, words);
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
    unsigned long long key = kNoWinner;
    if (!crowded && threadIdx.x < s.candidates)
      key = race_key(law.weight(s.logit[threadIdx.x]), s.word[threadIdx.x], s.token[threadIdx.x]);
    key = least_of_warp(key);
    if (lane == 0)
      send_shared(shared_address_of(s.times + warp * kBlocks + rank, kBlocks - 1), key,
                  crowded ? 0u : __float_as_uint(bound),
                  shared_address_of(&times_here, kBlocks - 1));
    wait_for(&settled_here);
    settled = s.settled != 0;
  }
  // the leader has heard of every warp that it is through with the other blocks
  if (!settled) end_by_value<true>(p, cluster, b, i, words, by_value);
}

}  // namespace domino
