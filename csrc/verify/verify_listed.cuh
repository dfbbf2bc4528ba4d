// First launch of verify_chain with filters over rows of bf16 logits, where requests have a top-k
// or a row has several blocks: a cluster reads one row once. With a top-k the tokens above a bound
// are listed, and mostly the list is all that cut, verdict and race need (listed_tokens.cuh);
// otherwise values are counted (listed_histogram.cuh). Requests without a filter, and
// log-probabilities, take the row's statistics instead, or as well: chunk by chunk as in
// row_chunks.cuh. Bytes: every row once; bound by HBM, at small batches by latency.
#pragma once

#include <new>

#include "common/copy_async.cuh"
#include "verify/listed_tokens.cuh"
#include "verify/slot_ahead.cuh"

namespace domino {

// What becomes of a slot whose row has a cut.
__device__ __forceinline__ Slot judge_cut(const ChainRequest& r, const SlotAhead& slot,
                                          const RowLaw& law, const RowFilter& filter) {
  Slot verdict = slot_before_coin(r, -1, slot.x, slot.q);
  verdict.status |= slot.status;
  if (verdict.outcome == Outcome::kUndecided) verdict.outcome = cut_outcome(law, filter, slot);
  return verdict;
}

// The same of a row without filters, or one that is unusable.
__device__ __noinline__ Slot judge_whole(const ChainRequest& r, int i, const SlotAhead& slot,
                                         const RowStats& stats) {
  if (stats.faults != 0) return {Outcome::kFail, stats.faults, true, 1.0f};
  Slot verdict = slot_before_coin(r, stats.argmax, slot.x, slot.q);
  verdict.status |= slot.status;
  if (verdict.outcome == Outcome::kUndecided)
    verdict.outcome = token_outcome(RowLaw(stats, r.temperature), FilterBounds(), slot.logit,
                                    verdict.q, verify_coin(r, i));
  return verdict;
}

// What one warp of a block tells the others of the request.
struct SharedRequest {
  alignas(ChainRequest) unsigned char own[sizeof(ChainRequest)];
  alignas(FilterParams) unsigned char filters[sizeof(FilterParams)];
};

// Grid: a cluster of up to 8 blocks for each row of each request. kByPosition: all requests that
// are not greedy go by match or gumbel; kLogprobs: chosen_logprob is wanted.
template <bool kByPosition, bool kLogprobs>
__global__ void __launch_bounds__(kCutThreads, 2)
    verify_listed_kernel(const __grid_constant__ VerifyChainParams p) {
  __shared__ ListedShared shared;
  __shared__ ListedTokens listed;
  __shared__ SlotAhead slot;
  __shared__ SharedRequest request;
  allow_next_launch();
  const RowCluster cluster;
  // in 32 bits: a division by 64 is 100 instructions in front of the first load
  const unsigned row_of = blockIdx.x / static_cast<unsigned>(cluster.size);
  const unsigned slots = static_cast<unsigned>(p.drafts) + 1;
  const int64_t index = row_of, b = row_of / slots;
  const int i = static_cast<int>(row_of % slots);
  const ChainWorkspace chunks(p.workspace, p.batch, p.drafts, p.vocab, false);
  const int row_chunks = static_cast<int>(chunks.row_chunks);
  const int share = ceil_div(row_chunks, cluster.size);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int last = min(row_chunks, (cluster.rank + 1) * share);
  const int first = warp == kReadWarps ? last : cluster.rank * share + warp;
  const int vocab = static_cast<int>(p.vocab);
  Group<bf16> ahead[kLaneGroups], later[kLaneGroups];
  const auto load = [&](const RowSource<bf16>& from, Group<bf16>(&to)[kLaneGroups], int chunk) {
    const int token = chunk * kChunk + lane * kGroup;
    if (from.aligned && (chunk + 1) * kChunk <= vocab) {  // one look for all four
#pragma unroll
      for (int g = 0; g < kLaneGroups; ++g)
        to[g].words = load_words(from.data + token + g * kGroupStep);
    } else {
#pragma unroll
      for (int g = 0; g < kLaneGroups; ++g) to[g] = from.group(token + g * kGroupStep);
    }
  };
  const auto prefetch = [&](const RowSource<bf16>& from, int chunk) {  // a lane a line of 128 bytes
    const int token = chunk * kChunk + lane * 64;
    if (lane < kChunk / 64 && chunk < last && token < vocab) prefetch_l2(from.data + token);
  };
  const auto load_first = [&](const RowSource<bf16>& from) {
    if (first < last) load(from, ahead, first);
    if (first + kReadWarps < last) load(from, later, first + kReadWarps);
    prefetch(from, first + 2 * kReadWarps);
    prefetch(from, first + 3 * kReadWarps);
  };
  // One warp works out what the request wants: 16 that do take longer. The others ask for the first
  // tokens meanwhile.
  LogitRow row{p.target_logits, DType::kBF16};
  if (warp == kReadWarps) {
    const FilterParams wanted = read_filters(p, b);
    const ChainRequest own(p, b);
    if (lane == 0) new (request.own) ChainRequest(own);
    if (lane == 0) new (request.filters) FilterParams(own.greedy() ? FilterParams{} : wanted);
  } else {
    if (p.cu_rows == nullptr) {
      row = row.plus(b * p.target_batch_stride + i * p.target_row_stride);
      load_first(RowSource<bf16>(row, RowEdits{}, vocab));
    }
    for (int n = threadIdx.x; n < KeyBins::kCount; n += kReadThreads)
      reinterpret_cast<KeyBins*>(listed.at)->count[n] = 0;
    if (threadIdx.x == 0) listed.count = listed.top_k = 0;
    ListedHistogram::clear(shared);
  }
  __syncthreads();
  const ChainRequest r(p, *reinterpret_cast<const ChainRequest*>(request.own));
  if (i >= r.rows) return;
  const FilterParams filters = *reinterpret_cast<const FilterParams*>(request.filters);
  const bool filtered = filters.any(p.vocab), summed = !filtered || kLogprobs;
  // is all that is wanted of the row what top-k leaves?
  const bool ranked_first = filtered && filters.by_rank(p.vocab) && filters.top_k <= kReadThreads &&
                            (filters.order != FilterOrder::kJoint || !filters.by_mass());
  row = r.target_row(i);
  const RowSource<bf16> source(row, RowEdits{}, vocab);
  if (p.cu_rows != nullptr) load_first(source);
  const float scale = law_scale(r.temperature);

  ListedHistogram histogram(shared, cluster, source);
  if (warp == kReadWarps) {
    const SlotAhead known = slot_ahead(r, i, source);
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
          sum_chunk(ahead, chunk * kChunk + lane * kGroup, false, scale, chunks,
                    index * row_chunks + chunk);
#pragma unroll
        for (int g = 0; g < kLaneGroups; ++g) ahead[g] = later[g];
        if (chunk + 2 * kReadWarps < last) load(source, later, chunk + 2 * kReadWarps);
        prefetch(source, chunk + 4 * kReadWarps);
      }
    } else {
#pragma unroll 1
      for (int chunk = first; chunk < last; chunk += kReadWarps) {
        load(source, ahead, chunk);
        sum_chunk(ahead, chunk * kChunk + lane * kGroup, r.greedy(), scale, chunks,
                  index * row_chunks + chunk);
      }
    }
  }

  SlotVerdict* out = slot_verdicts(chunks) + index;
  RowStats stats{1, 0.0f, -1, 0, 0};
  if (filtered) {
    stats.top = histogram.finish(summed);
    stats.faults = row_faults(stats.top);
  } else {
    cluster.sync();
  }
  const bool leads = cluster.rank == 0 && warp == kReadWarps;
  if (leads && summed) {
    uint32_t unused;
    const RowStats sums = combine_chunks(chunks.row(b, i), chunks.first + index * row_chunks,
                                         row_chunks, scale, r.greedy(), &unused);
    if (!filtered) stats = sums;
    const bool usable = sums.faults == 0 && slot.x >= 0;
    if (lane == 0) {
      out->sum = sums.sum;
      out->logprob = usable ? RowLaw(sums, r.temperature).log_probability(slot.logit) : 0.0f;
    }
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
        const RowFilter filter = cut_listed(listed, law, filters, order, &kept);
        Slot verdict = judge_cut(r, slot, law, filter);
        const SlotQ q{verdict.one_hot, slot.draft_top, slot.draft_sum};
        const int32_t winner =
            race_listed<kByPosition>(r, i, verdict, q, law, filter, kept, *order);
        if (kByPosition && winner == slot.x) verdict.outcome = Outcome::kAccept;
        if (leads) write_verdict(verdict, winner, stats, law, filter, slot, out);
        return;
      }
    }
    histogram.count_list();
  }
  ValueCut cut;
  if (histogram.find(law, filters, &cut) && warp == kReadWarps) {
    const RowFilter filter{cut.logit, cut.ties < 0 ? INT32_MAX : -cut.ties, cut.mass};
    write_verdict(judge_cut(r, slot, law, filter), -1, stats, law, filter, slot, out);
  }
  cluster.meet();
}

}  // namespace domino
