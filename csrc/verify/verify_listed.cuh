// First launch of verify_chain with filters over rows of bf16 logits, where the device has room for
// all rows at once and neither few_rows.cuh nor verify_row.cuh takes them, or log-probabilities are
// wanted: a cluster reads one row once. With a top-k the tokens above a bound are listed, and
// mostly the list is all that cut, verdict and race need (listed_tokens.cuh); otherwise values are
// counted (listed_histogram.cuh). Requests without a filter, and log-probabilities, take the row's
// statistics instead, or as well: chunk by chunk as in row_chunks.cuh. Bytes: every row once; bound
// by HBM, at small batches by latency.
#pragma once

#include "verify/draft_row.cuh"
#include "verify/row_histogram.cuh"
#include "verify/slot_ahead.cuh"

namespace domino {

// What a block keeps in shared memory.
struct ListedBlock {
  ListedShared shared;
  ListedTokens listed;
  SlotAhead slot;
  PoolAhead pool;
  SharedRequest request;
};

// The verdict on row i of request b, by a cluster of up to 8 blocks. kByPosition: all requests that
// are not greedy go by match or gumbel; kLogprobs: chosen_logprob is wanted; kDense: by rows of q.
template <bool kByPosition, bool kLogprobs, bool kDense = false>
__device__ __forceinline__ void listed_row(const VerifyChainParams& p, const RowCluster& cluster,
                                           int64_t b, int i, ListedBlock& block) {
  auto& [shared, listed, slot, pool, request] = block;
  const int64_t index = b * (p.drafts + 1) + i;
  const ChainWorkspace chunks(p.workspace, p.batch, p.drafts, p.vocab, kDense);
  const int row_chunks = static_cast<int>(chunks.row_chunks);
  const int64_t row_at = kDense ? chunks.row(b, i) - chunks.chunks : index * row_chunks;
  const int share = ceil_div(row_chunks, cluster.size);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int last = min(row_chunks, (cluster.rank + 1) * share);
  const int first = warp == kReadWarps ? last : cluster.rank * share + warp;
  const int vocab = static_cast<int>(p.vocab);
  Group<bf16> ahead[kLaneGroups], later[kLaneGroups];
  const auto load_first = [&](const RowSource<bf16>& from) {
    if (first < last) load_tokens(from, first, ahead);
    if (first + kReadWarps < last) load_tokens(from, first + kReadWarps, later);
  };
  // One warp works out what the request wants: 16 that do take longer. The others ask for the first
  // tokens meanwhile.
  LogitRow row{p.target_logits, DType::kBF16};
  if (warp == kReadWarps) {
    const FilterParams wanted = read_filters(p, b);
    const float draft_temperature = p.draft_temperature != nullptr ? p.draft_temperature[b] : 0.0f;
    const ChainRequest own(p, b, &draft_temperature);
    if (lane == 0) request.set(own, wanted);
  } else {
    if (p.cu_rows == nullptr) {
      row = row.plus(b * p.target_batch_stride + i * p.target_row_stride);
      load_first(RowSource<bf16>(row, RowEdits{}, vocab));
    }
    for (int n = threadIdx.x; n < KeyBins::kCount; n += kReadThreads)
      reinterpret_cast<KeyBins*>(listed.at)->count[n] = 0;
    if (threadIdx.x == 0) listed.count = listed.top_k = 0;
    ListedHistogram::clear(shared, threadIdx.x, kReadThreads);
  }
  __syncthreads();
  const ChainRequest r(p, request.get());
  if (i >= r.rows) return;
  const FilterParams filters = request.filters();
  const bool filtered = filters.any(p.vocab), summed = !filtered || kLogprobs;
  const bool ranked_first = ranks_first(filters, p.vocab, kReadThreads);
  row = r.target_row(i);
  const RowSource<bf16> source(row, RowEdits{}, vocab);
  if (p.cu_rows != nullptr) load_first(source);
  const float scale = law_scale(r.temperature);

  ListedHistogram histogram(shared, cluster, source);
  if (warp == kReadWarps) {
    const SlotAhead known = dense_slot_ahead<kDense>(r, i, source, &pool);
    if (lane == 0) slot = known;
  } else {
    if (filtered) {
      if (ranked_first) {
        float top = -INFINITY;  // of two chunks, where there are
        if (first < last) top = lane_top(ahead);
        if (first + kReadWarps < last) top = fmaxf(top, lane_top(later));
        histogram.bound_by(top, static_cast<uint32_t>(filters.top_k),
                           reinterpret_cast<KeyBins*>(listed.at));
      }
#pragma unroll 1
      for (int chunk = first; chunk < last; chunk += kReadWarps) {
#pragma unroll
        for (int g = 0; g < kLaneGroups; ++g)
          histogram.add(ahead[g], chunk * kChunk + g * kGroupStep + lane * kGroup);
        if constexpr (kLogprobs)
          sum_chunk(ahead, chunk * kChunk + lane * kGroup, false, true, scale, chunks,
                    row_at + chunk);
#pragma unroll
        for (int g = 0; g < kLaneGroups; ++g) ahead[g] = later[g];
        if (chunk + 2 * kReadWarps < last) load_tokens(source, chunk + 2 * kReadWarps, later);
      }
    } else {
      sum_chunks(source, r.greedy(), scale, chunks, row_at, first, last, kReadWarps);
    }
    if constexpr (kDense) {
      if (has_draft_row(r, i)) sum_draft_row<true>(r, i, chunks, first, last, kReadWarps);
    }
  }

  SlotVerdict* out = slot_verdicts(chunks) + index;
  RowStats stats{1, 0.0f, -1, 0, 0};
  if (filtered) {
    stats.top = histogram.finish(summed || kDense);
    stats.faults = row_faults(stats.top);
  } else {
    cluster.sync();
  }
  const bool leads = cluster.rank == 0 && warp == kReadWarps;
  if constexpr (kDense) {
    if (has_draft_row(r, i)) {  // any block may judge
      if (warp == kReadWarps && slot.x >= 0) {
        const SlotAhead met = with_draft_row(r, draft_stats(r, i, chunks), slot);
        __syncwarp();
        if (lane == 0) slot = met;
      }
      __syncthreads();
    }
  }
  if (leads && summed) {
    const RowStats sums = sum_row(r, i, slot, chunks, out);
    if (!filtered) stats = sums;
  }
  if (leads && lane == 0 && !summed) out->sum = 1;
  const RowLaw law(stats.top, 1, scale);
  if (!filtered || stats.faults != 0) {
    if (leads)
      write_verdict(judge_whole(r, i, slot, stats), -1, stats, law, RowFilter(), slot, out);
    cluster.meet();
    return;
  }
  if (ranked_first) {
    if (histogram.has_list()) {
      if (cluster.rank == 0) {
        gather_listed(cluster, shared, histogram, &listed);
        __syncthreads();
        if (listed.count > kListedTokens) cluster.tell_all(&shared.crowded, 1u);
      }
      cluster.meet();  // nobody ends before its list has been read
      if (cluster.size == 1) __syncthreads();
      if (shared.crowded == 0) {
        if (cluster.rank != 0) return;
        ListedOrder* order = reinterpret_cast<ListedOrder*>(shared.count);
        int kept;
        const RowFilter filter = cut_listed<WholeBlock>(listed, law, filters, order, &kept);
        Slot verdict = judge_cut(r, slot, law, filter);
        const SlotQ q{verdict.one_hot, slot.draft_top, slot.draft_sum};
        const int32_t winner =
            race_listed<WholeBlock, kByPosition>(r, i, verdict, q, law, filter, pool, kept, *order);
        if (kByPosition && winner == slot.x) verdict.outcome = Outcome::kAccept;
        if constexpr (kDense)
          verdict.status |= leave_kept<WholeBlock>(*order, kept, kept_tokens(chunks, p, b, i));
        if (leads) write_verdict(verdict, winner, stats, law, filter, slot, out);
        return;
      }
    }
    histogram.count_list();
  }
  ValueCut cut;
  if (cluster.size == 1) {
    cut = RowHistogram<WholeBlock>(shared, source).find(law, filters);
    if (warp == kReadWarps) {
      const RowFilter filter = cut.filter();
      write_verdict(judge_cut(r, slot, law, filter), -1, stats, law, filter, slot, out);
    }
    return;
  }
  if (histogram.find(law, filters, &cut) && warp == kReadWarps) {
    const RowFilter filter = cut.filter();
    write_verdict(judge_cut(r, slot, law, filter), -1, stats, law, filter, slot, out);
  }
  cluster.meet();
}

// Grid: a cluster for each row of each request.
template <bool kByPosition, bool kLogprobs, bool kDense = false>
__global__ void __launch_bounds__(kCutThreads, 2)
    verify_listed_kernel(const __grid_constant__ VerifyChainParams p) {
  __shared__ ListedBlock block;
  allow_next_launch();
  const RowCluster cluster;
  // in 32 bits: a division by 64 is 100 instructions in front of the first load
  const unsigned row = blockIdx.x / static_cast<unsigned>(cluster.size);
  const unsigned slots = static_cast<unsigned>(p.drafts) + 1;
  listed_row<kByPosition, kLogprobs, kDense>(p, cluster, row / slots, static_cast<int>(row % slots),
                                             block);
}

}  // namespace domino
