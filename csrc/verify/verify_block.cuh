// The block rule (block_walk.h) where values are not counted (draw_block.cuh otherwise), in two
// launches behind the rows: the filtered p(x) of every draft, then Z of every row given the
// reaches, and the cluster that is last of its request walks. A cluster owns one row. Bytes: with
// dense q every row of p and q once more.
#pragma once

#include "verify/block_walk.h"
#include "verify/verify_walk.cuh"

namespace domino {

__device__ __forceinline__ RowFilter load_filter(const RowFilter* filter) {
  return {__ldcg(&filter->cut_logit), __ldcg(&filter->cut_id),
          __ldcg(reinterpret_cast<const unsigned long long*>(&filter->mass))};
}

// Out of line: what the kernel keeps for after it is little.
static __device__ __noinline__ RowFilter filter_of_row(const RowCluster& cluster,
                                                       const RowSource<void>& source,
                                                       const ChunkStats* chunks, int count,
                                                       const RowStats& stats, const RowLaw& law,
                                                       const FilterParams& filters) {
  CutFinder<RowSource<void>> finder(cluster, source, chunks, count, stats, law, filters);
  return finder.find();
}

// Grid: a cluster for each row of each request.
__global__ void __launch_bounds__(kWalkThreads, 1)
    block_laws_kernel(const __grid_constant__ VerifyChainParams p) {
  const RowCluster cluster;
  const int64_t index = blockIdx.x / cluster.size;
  const int64_t b = index / (p.drafts + 1);
  const int i = static_cast<int>(index - b * (p.drafts + 1));
  const ChainRequest r(p, b);
  const ChainWorkspace chunks(p.workspace, p.batch, p.drafts, p.vocab, is_dense(p));
  const WalkWorkspace work(chunks, p.batch, p.drafts);
  previous_launch_done();
  if (!r.by_block() || i >= r.rows) return;
  if (threadIdx.x < kWarpSize) {  // every block the same
    const RowSource<void> source(r.target_row(i), r.edits(i), static_cast<int>(p.vocab));
    const JudgedRow row = judge_row(r, chunks, i, SlotDraft(r, i, source));
    if (threadIdx.x == 0) work.rows[index] = row;
  }
  cluster.sync();
  const JudgedRow row = load_row(work.rows + index);
  if (row.outcome == Outcome::kFail) return;
  const RowSource<void> source(r.target_row(i), r.edits(i), static_cast<int>(p.vocab));
  const RowLaw law(row.target, r.temperature);
  const FilterParams filters = r.filters();
  RowFilter filter;
  filter.mass = row.target.sum;
  if (filters.any(p.vocab)) {
    filter = filter_of_row(cluster, source, chunks.row(b, i), static_cast<int>(chunks.row_chunks),
                           row.target, law, filters);
  }
  if (cluster.rank != 0 || threadIdx.x != 0) return;
  work.filters[index] = filter;
  if (row.outcome == Outcome::kDraw) return;
  const int64_t x = r.draft_token(i);
  const float logit = source.at(x);
  work.kept[index] = filter.keeps(logit, x) ? filter.probability(law, logit) : 0.0f;
}

// Z of row i; all threads of the cluster get it.
__device__ __forceinline__ uint64_t block_rest_sum(const RowCluster& cluster, const ChainRequest& r,
                                                   const ChainWorkspace& chunks,
                                                   const JudgedRow& row, int i,
                                                   const RowFilter& filter, float reach) {
  const RowSource<void> source(r.target_row(i), r.edits(i), static_cast<int>(r.p.vocab));
  const RowLaw law(row.target, r.temperature);
  const float inverse = div_rn(kFixedOne, static_cast<float>(filter.mass));
  if (row.status & kTakenAsOneHot) {
    const int64_t x = r.draft_token(i);
    const float logit = source.at(x);
    const uint64_t inside = filter.keeps(logit, x) ? to_fixed(law.weight(logit)) : 0;
    return block_rest_outside(reach, inside, filter.mass);
  }
  const RowLaw draft(row.draft, r.draft_temperature);
  const auto add = [](unsigned long long a, unsigned long long b) { return a + b; };
  RaceShared& shared = race_shared();
  unsigned long long sum = 0, covered = 0;
  if (r.q == DraftLaw::kPool) {
    for (int64_t m = threadIdx.x; m < r.p.pool; m += kWalkThreads) {
      const int64_t token = r.draft_ids(i)[m];
      if (token < 0 || token >= r.p.vocab) continue;
      const float logit = source.at(token);
      const bool kept = filter.keeps(logit, token);
      const float weight = law.weight(logit);
      sum += block_rest_fixed(reach, kept ? mul_rn(weight, inverse) : 0.0f,
                              draft.probability(r.draft_row(i).at(m)));
      if (kept) covered += to_fixed(weight);
    }
    sum = block_reduce(sum, add, shared.slots);
    covered = block_reduce(covered, add, shared.slots);
    return sum + block_rest_outside(reach, covered, filter.mass);
  }
  const LogitRow q = r.draft_row(i);
  const uint32_t least = max(logit_key(filter.cut_logit), kEmptyKey + 1);
  for_each_group(cluster, source, chunks.row(r.b, i), static_cast<int>(chunks.row_chunks), least,
                 [&](int token, const auto& group) {
#pragma unroll
                   for (int j = 0; j < kGroup; ++j)
                     if (filter.keeps(group.at(j), token + j) && token + j < r.p.vocab)
                       sum += block_rest_fixed(reach, mul_rn(law.weight(group.at(j)), inverse),
                                               draft.probability(q.at(token + j)));
                 });
  sum = block_reduce(sum, add, shared.slots);
  if (threadIdx.x == 0) shared.best = sum;
  cluster.sync();
  sum = warp_sum(static_cast<uint64_t>(cluster.of_lane(&shared.best)));
  cluster.sync();
  return sum;
}

// Grid: a cluster for each row of each request.
__global__ void __launch_bounds__(kWalkThreads)
    block_walk_kernel(const __grid_constant__ VerifyChainParams p) {
  const RowCluster cluster;
  const int64_t index = blockIdx.x / cluster.size;
  const int64_t b = index / (p.drafts + 1);
  const int own = static_cast<int>(index - b * (p.drafts + 1));
  const ChainRequest r(p, b);
  const ChainWorkspace chunks(p.workspace, p.batch, p.drafts, p.vocab, is_dense(p));
  const WalkWorkspace work(chunks, p.batch, p.drafts);
  previous_launch_done();
  if (!r.by_block() || own >= r.rows) return;
  const int64_t at = b * (p.drafts + 1);
  JudgedRow* rows = work.rows + at;
  int n = 0;
  while (!ends_chain(load_outcome(rows + n))) ++n;
  if (own > n) return;
  const auto reach_of = [&](int row) {
    float reach = 1.0f;
    for (int j = 0; j < row; ++j)
      reach = next_reach(reach, __ldcg(work.kept + at + j), __ldcg(&rows[j].q));
    return reach;
  };
  float threshold = reach_of(own);
  if (own < n)
    threshold = block_threshold(block_rest_sum(cluster, r, chunks, load_row(rows + own), own,
                                               load_filter(work.filters + index), threshold),
                                threshold);
  if (cluster.rank == 0 && threadIdx.x == 0) work.threshold[index] = threshold;
  if (!is_last_cluster(cluster, chunks.arrived + b, static_cast<uint32_t>(n + 1))) return;

  int stop = n;
  for (; stop > 0; --stop)
    if (verify_coin(r, stop - 1) <= __ldcg(work.threshold + at + stop)) break;
  uint32_t bits = r.faults;
  for (int i = 0; i <= stop; ++i) bits |= __ldcg(&rows[i].status) & 0xffu;
  const JudgedRow row = load_row(rows + stop);
  int64_t last = -1;
  if (row.outcome != Outcome::kFail) {
    const RowSource<void> source(r.target_row(stop), r.edits(stop), static_cast<int>(p.vocab));
    const RowLaw law(row.target, r.temperature);
    const RowFilter filter = load_filter(work.filters + at + stop);
    Outcome outcome = stop < n ? Outcome::kResidual : Outcome::kDraw;
#pragma unroll 1
    for (;;) {
      const unsigned long long key =
          race_row(cluster, source, chunks.row(b, stop), static_cast<int>(chunks.row_chunks),
                   draw_weights(r, stop, outcome, slot_q(row), law, filter, reach_of(stop)),
                   race_noise(r, stop, outcome), 0.0f);
      if (key != kNoWinner) last = static_cast<int64_t>(key & 0xffffffffu);
      if (last >= 0 || outcome == Outcome::kDraw) break;
      bits |= kZeroResidual;
      outcome = Outcome::kDraw;
    }
  }
  if (cluster.rank != 0) return;
  for (int i = threadIdx.x; i < stop; i += kWalkThreads)
    emit_token(r, i, r.draft_token(i), __ldcg(&rows[i].logprob));
  if (last >= 0 && threadIdx.x == 0) {
    const RowSource<void> source(r.target_row(stop), r.edits(stop), static_cast<int>(p.vocab));
    const RowLaw law(row.target, r.temperature);
    emit_token(r, stop, last, law.log_probability(source.at(last)));
  }
  emit_end(r, stop, last, bits);
}

}  // namespace domino
