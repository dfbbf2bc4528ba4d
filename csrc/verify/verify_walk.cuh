// Second launch of verify_chain: a cluster owns one request. Its warps put rows together and judge
// them (chain_judge.cuh), every block then finds where the walk stops, and all of them search cuts
// (row_cut.cuh) and race for the last token (race.cuh). Bytes: the statistics, and of the rows that
// are undecided or drawn from what their filters keep; bound by latency.
//
// With rules whose every slot is a draw (match, gumbel) a cluster owns one row: it draws, and the
// cluster that is last of its request walks.
#pragma once

#include "verify/row_cut.cuh"
#include "verify/walk_records.cuh"

namespace domino {

// True in all threads of the cluster that is the last of `count` to come.
__device__ __forceinline__ bool is_last_cluster(const RowCluster& cluster, uint32_t* arrived,
                                                uint32_t count) {
  __shared__ bool shared_is_last;
  if (cluster.rank == 0 && threadIdx.x == 0) {
    __threadfence();
    shared_is_last = atomicAdd(arrived, 1u) == count - 1;
    __threadfence();
  }
  cluster.sync();
  const bool is_last = *static_cast<volatile bool*>(cluster.map(&shared_is_last, 0));
  cluster.sync();
  return is_last;
}

// The race among the first `count` entries of the list that the cut left: every block for itself.
template <class Source>
__device__ __forceinline__ unsigned long long race_list(const CutFinder<Source>& finder, int count,
                                                        const DrawWeights& weights,
                                                        const RaceNoise& noise) {
  unsigned long long key = kNoWinner;
#pragma unroll 1
  for (int n = threadIdx.x; n < count; n += kWalkThreads) {
    const int id = finder.listed(n);
    const float upper = weights.upper(finder.listed_logit(n), id);
    if (!(upper > 0.0f)) continue;
    const NoiseWords four = noise.words(static_cast<uint32_t>(id / 4));
    const uint32_t word = id % 4 == 0   ? four.word[0]
                          : id % 4 == 1 ? four.word[1]
                          : id % 4 == 2 ? four.word[2]
                                        : four.word[3];
    const unsigned long long mine = race_key(weights.exact(upper, id), word, id);
    key = mine < key ? mine : key;
  }
  return least_key_of_block(key);
}

// Grid: a cluster for each request, or with `row_clusters` one for each of its rows. T: the dtype
// of the target, whose rows are not edited; void: any.
template <class T>
__global__ void __launch_bounds__(kWalkThreads, 1)
    verify_walk_kernel(const __grid_constant__ VerifyChainParams p, bool row_clusters) {
  __shared__ JudgedRow rows[kWalkWarps];  // of slots base .. base + 15
  const RowCluster cluster;
  const int64_t index = blockIdx.x / cluster.size;
  const int64_t b = row_clusters ? index / (p.drafts + 1) : index;
  const int own_row = row_clusters ? static_cast<int>(index - b * (p.drafts + 1)) : 0;
  const ChainRequest r(p, b);
  const ChainWorkspace chunks(p.workspace, p.batch, p.drafts, p.vocab, is_dense(p));
  const WalkWorkspace work(chunks, p.batch, p.drafts);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const FilterParams filters = r.filters();
  const bool filtered = filters.any(p.vocab);
  const auto source_of = [&](int i) {
    return RowSource<T>(r.target_row(i), r.edits(i), static_cast<int>(p.vocab));
  };
  const bool draws_rows = r.rule == VerifyRule::kMatch || r.rule == VerifyRule::kGumbel;
  // the rows of a request, or the one that this cluster draws from first
  bool own = draws_rows;
  SlotDraft slot_draft;
  const int first_row = own ? own_row : warp;
  if (first_row < r.judged_rows() && (!own || warp == 0))
    slot_draft = SlotDraft(r, first_row, source_of(first_row));
  previous_launch_done();
  if (own_row > 0 && (!draws_rows || own_row >= r.rows)) return;
  if (r.by_block() && r.rows > 0) return;
  if (r.rows == 0) {
    if (cluster.rank == 0) emit_end(r, 0, -1, r.faults);
    return;
  }

  uint32_t bits = r.faults;
  int base = own ? own_row : 0, stop = base;
  int64_t last = -1;
  Outcome outcome = Outcome::kAccept;
  RowFilter filter;
  bool judged = false, prefetched = true;
#pragma unroll 1
  for (;;) {
    if (!judged) {  // a warp a row, every block of the cluster the same
      __syncthreads();
      const int i = base + warp;
      if (i < r.judged_rows() && (!own || warp == 0)) {
        if (!prefetched) slot_draft = SlotDraft(r, i, source_of(i));
        const JudgedRow row = judge_row(r, chunks, i, slot_draft);
        if (lane == 0) rows[warp] = row;
        if (lane == 0 && cluster.rank == 0 && p.top_logprobs != 0)
          work.rows[b * (p.drafts + 1) + i] = row;
      }
      __syncthreads();
      judged = true;
      prefetched = false;
    }
    if (outcome == Outcome::kAccept && !own) {
      // the first slot from `stop` on that does not accept; the last row never does
      const int i = base + lane;
      const bool has = lane < kWalkWarps && i >= stop && i < r.rows;
      const unsigned stops =
          __ballot_sync(kFullMask, has && rows[lane].outcome != Outcome::kAccept);
      const int next = stops != 0 ? base + __ffs(stops) - 1 : base + kWalkWarps;
      bits |= __reduce_or_sync(kFullMask, has && i <= next ? rows[lane].status & 0xffu : 0u);
      if (warp == 0 && cluster.rank == 0 && has && i < next)
        emit_token(r, i, r.draft_token(i), rows[lane].logprob);
      stop = next;
      if (stops == 0) {
        base = next;
        judged = false;
        continue;
      }
    }
    const JudgedRow& row = rows[stop - base];
    const bool again = outcome == Outcome::kDraw;  // nothing was left to replace the draft
    if (!again) outcome = row.outcome;
    const int64_t x = stop < r.rows - 1 ? r.draft_token(stop) : -1;
    bool kept = false;
    if (!own) {
      if (outcome == Outcome::kFail) break;
      if (outcome == Outcome::kArgmax) last = row.target.argmax;
      if (outcome == Outcome::kArgmax) break;
      if (outcome == Outcome::kPosition) {
        last = __ldcg(work.drawn + b * (p.drafts + 1) + stop);
        if (last != x) break;
        kept = true;
      }
    }
    if (outcome != Outcome::kFail && !kept) {
      const RowSource<T> source = source_of(stop);
      const RowLaw law(row.target, r.temperature);
      const ChunkStats* row_chunks = chunks.row(b, stop);
      const int count = static_cast<int>(chunks.row_chunks);
      CutFinder<RowSource<T>> finder(cluster, source, row_chunks, count, row.target, law, filters);
      if (filtered) filter = finder.find();
      if (outcome == Outcome::kUndecided) {
        outcome = filtered_outcome(law, filter, source.at(x), x, row.q, verify_coin(r, stop));
        kept = outcome == Outcome::kAccept;
      }
      const bool one_hot = (row.status & kTakenAsOneHot) != 0;
      if (outcome == Outcome::kResidual && r.q == DraftLaw::kScalar && !one_hot) {
        bits |= kNeedsResidual;
        break;
      }
      if (!kept) {
        const DrawWeights weights = draw_weights(r, stop, outcome, slot_q(row), law, filter, 1.0f);
        const RaceNoise noise = race_noise(r, stop, outcome);
        uint64_t mass = filtered ? filter.mass : row.target.sum;
        if (weights.without >= 0)
          mass -= min(mass, to_fixed(weights.upper(source.at(weights.without), -1)));
        const float about = weights.q != DraftLaw::kOneHot
                                ? kResidualGuess
                                : static_cast<float>(mass) * (1.0f / kFixedOne);
        const unsigned long long key =
            finder.kept_listed() > 0
                ? race_list(finder, finder.kept_listed(), weights, noise)
                : race_row(cluster, source, row_chunks, count, weights, noise, about);
        last = key == kNoWinner ? -1 : static_cast<int64_t>(key & 0xffffffffu);
      }
    }
    if (own) {  // this was the own row; the last cluster walks
      if (cluster.rank == 0 && threadIdx.x == 0) work.drawn[b * (p.drafts + 1) + own_row] = last;
      if (!is_last_cluster(cluster, chunks.arrived + b, static_cast<uint32_t>(r.rows))) return;
      own = judged = false;
      base = stop = 0;
      last = -1;
      outcome = Outcome::kAccept;
      continue;
    }
    if (kept) {
      if (threadIdx.x == 0 && cluster.rank == 0) emit_token(r, stop, x, row.logprob);
      last = -1;
      outcome = Outcome::kAccept;
      if (++stop == base + kWalkWarps) {
        base = stop;
        judged = false;
      }
      continue;
    }
    if (last >= 0 || again) break;
    bits |= kZeroResidual;
    outcome = Outcome::kDraw;
  }
  if (cluster.rank != 0) return;
  if (last >= 0 && threadIdx.x == 0) {
    const RowLaw law(rows[stop - base].target, r.temperature);
    emit_token(r, stop, last, law.log_probability(source_of(stop).at(last)));
  }
  emit_end(r, stop, last, bits);
}

}  // namespace domino
