// First launch of verify_chain with filters over rows of bf16 logits, where there are more rows
// than the device has room for at once (otherwise verify_listed.cuh): a block goes through rows one
// after the other. Most of its warps read, and go on to the next row; the others find where the
// filters cut the row that has been read, and judge its draft. So no block's loads stop while it
// judges. Where a row has a top-k, cut, verdict and race need no more than the tokens above a bound
// (listed_tokens.cuh); otherwise values are counted (row_counter.cuh). Requests without a filter
// take the row's statistics instead, chunk by chunk as in row_chunks.cuh. With dense q the row of q
// follows its target row (draft_row.cuh). Bytes: every row once; bound by HBM, without a top-k as
// much by shared memory.
#pragma once

#include "verify/draft_row.cuh"
#include "verify/row_histogram.cuh"
#include "verify/slot_ahead.cuh"

namespace domino {

constexpr int kJudgeWarps = 4;
constexpr int kRowReadWarps = kCutWarps - kJudgeWarps;
constexpr int kRowReaders = kRowReadWarps * kWarpSize;
using Judges = LastWarps<kJudgeWarps, 2>;

// A row on its way from the readers to the judges.
struct RowBuffer {
  ListedShared shared;
  ListedTokens listed;

  // All zeros again. By the judges.
  __device__ __forceinline__ void clear() {
    RowCounter<kRowReaders>::clear(shared, Judges::rank(), Judges::kThreads);
    uint32_t* bins = reinterpret_cast<KeyBins*>(listed.at)->count;
    for (int n = Judges::rank(); n < KeyBins::kCount; n += Judges::kThreads) bins[n] = 0;
    if (Judges::rank() == 0) listed.count = listed.top_k = 0;
  }
};
// What is known of a row before it has been read.
struct RowAhead {
  SlotAhead slot;
  PoolAhead pool;
  SharedRequest request;
};
constexpr int kRowBuffers = 2, kRowsAhead = kRowBuffers + 1;
struct RowsShared {
  RowBuffer buffers[kRowBuffers];
  RowAhead ahead[kRowsAhead];
};
// Two blocks of a processor have 196 KB with what the runtime takes. With 198 it gave room to one.
static_assert(sizeof(RowsShared) + sizeof(RaceShared) + 1024 <= 98 * 1024);

// Named barriers of the block, two a buffer: it is clear and the request known; its row is read.
template <bool kRead>
__device__ __forceinline__ void arrive_at(int buffer) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(buffer + (kRead ? 5 : 3)), "n"(kCutThreads)
               : "memory");
}
template <bool kRead>
__device__ __forceinline__ void wait_at(int buffer) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(buffer + (kRead ? 5 : 3)), "n"(kCutThreads)
               : "memory");
}

// Reads row i of request b into a buffer, and its row of q. By the readers.
template <bool kDense>
__device__ __forceinline__ void read_row(const VerifyChainParams& p, const ChainWorkspace& chunks,
                                         int64_t b, int i, RowBuffer& buffer, const RowAhead& known,
                                         int at) {
  const int vocab = static_cast<int>(p.vocab), last = static_cast<int>(chunks.row_chunks);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  Group<bf16> ahead[kLaneGroups], later[kLaneGroups];
  const auto load_first = [&](const RowSource<bf16>& from) {
    if (warp < last) load_tokens(from, warp, ahead);
    if (warp + kRowReadWarps < last) load_tokens(from, warp + kRowReadWarps, later);
  };
  LogitRow row{p.target_logits, DType::kBF16};
  if (p.cu_rows == nullptr) {
    row = row.plus(b * p.target_batch_stride + i * p.target_row_stride);
    load_first(RowSource<bf16>(row, RowEdits{}, vocab));
  }
  wait_at<false>(at);
  if (i >= known.request.get().rows) return;
  if (p.cu_rows != nullptr) {
    row = ChainRequest(p, known.request.get()).target_row(i);
    load_first(RowSource<bf16>(row, RowEdits{}, vocab));
  }
  const RowSource<bf16> source(row, RowEdits{}, vocab);
  const FilterParams& filters = known.request.filters();
  const bool filtered = filters.any(p.vocab);
  if (!filtered) {
    const ChainRequest& r = known.request.get();
    sum_chunks(source, r.greedy(), law_scale(r.temperature), chunks,
               chunks.row(b, i) - chunks.chunks, warp, last, kRowReadWarps);
  } else {
    const ChainRequest r(p, known.request.get());
    // the first chunk of the row of q is on its way before the last of this one is through
    const bool about = kDense && has_draft_row(r, i) && !needs_draft_sum(r, true);
    const bf16* draft_data = about ? draft_source(r, i).data : nullptr;
    RowCounter<kRowReaders> counter(buffer.shared);
    if (ranks_first(filters, p.vocab, kRowReaders)) {
      float top = -INFINITY;  // of two chunks, where there are
      if (warp < last) top = lane_top(ahead);
      if (warp + kRowReadWarps < last) top = fmaxf(top, lane_top(later));
      counter.bound_by(top, static_cast<uint32_t>(filters.top_k),
                       reinterpret_cast<KeyBins*>(buffer.listed.at));
    }
#pragma unroll 1
    for (int chunk = warp; chunk < last; chunk += kRowReadWarps) {
#pragma unroll
      for (int g = 0; g < kLaneGroups; ++g)
        counter.add(ahead[g], chunk * kChunk + g * kGroupStep + lane * kGroup);
#pragma unroll
      for (int g = 0; g < kLaneGroups; ++g) ahead[g] = later[g];
      if (chunk + 2 * kRowReadWarps < last) {
        load_tokens(source, chunk + 2 * kRowReadWarps, later);
      } else if (kDense && about && chunk + kRowReadWarps < last) {
        load_tokens(RowSource<bf16>({draft_data, DType::kBF16}, RowEdits{}, vocab), warp, later);
      }
    }
    counter.leave_top();
  }
  if constexpr (kDense) {
    const ChainRequest r(p, known.request.get());
    if (!has_draft_row(r, i)) return;
    if (needs_draft_sum(r, filtered)) return sum_draft_row(r, i, chunks, warp, last, kRowReadWarps);
    const RowSource<bf16> draft = draft_source(r, i);
    if (warp < last && warp + kRowReadWarps >= last) load_tokens(draft, warp, ahead);
    AboutSum about(law_scale(r.draft_temperature));
#pragma unroll 1
    for (int chunk = warp; chunk < last; chunk += kRowReadWarps) {
      const int next = chunk + kRowReadWarps, token = next * kChunk + lane * kGroup;
      const bool whole = draft.aligned && (next + 1) * kChunk <= vocab;
#pragma unroll
      for (int g = 0; g < kLaneGroups; ++g) {
        about.add(ahead[g]);
        if (whole) ahead[g].words = load_words(draft.data + token + g * kGroupStep);
      }
      if (!whole && next < last) load_tokens(draft, next, ahead);
    }
    about.leave(reinterpret_cast<AboutPart*>(buffer.shared.warps) + warp);
  }
}

// Sums up the row of q of slot i of request b exactly, by the judges. Out of line: few slots take
// it.
static __device__ __noinline__ void settle_draft(const VerifyChainParams& p, int64_t b, int i,
                                                 RowAhead& known) {
  const ChainRequest r(p, known.request.get());
  const ChainWorkspace chunks(p.workspace, p.batch, p.drafts, p.vocab, true);
  sum_draft_row(r, i, chunks, Judges::rank() / kWarpSize, static_cast<int>(chunks.row_chunks),
                kJudgeWarps);
  Judges::sync();  // and all have looked at the slot as it was
  if (Judges::rank() < kWarpSize) {
    const RowSource<bf16> source(r.target_row(i), RowEdits{}, static_cast<int>(p.vocab));
    const SlotAhead ahead = dense_slot_ahead<true>(r, i, source, &known.pool);
    const SlotAhead met = with_draft_row(r, draft_stats(r, i, chunks), ahead);
    if (Judges::rank() == 0) known.slot = met;
  }
  Judges::sync();
}

// Finds the cut of row i of request b, and judges its draft. By the judges.
template <bool kByPosition, bool kDense>
__device__ __forceinline__ void judge_row(const VerifyChainParams& p, const ChainWorkspace& chunks,
                                          int64_t b, int i, RowBuffer& buffer, RowAhead& known) {
  const ChainRequest r(p, known.request.get());
  if (i >= r.rows) return;
  const FilterParams filters = known.request.filters();
  const SlotAhead& slot = known.slot;
  ListedShared& shared = buffer.shared;
  SlotVerdict* out = slot_verdicts(chunks) + b * (p.drafts + 1) + i;
  const bool leads = Judges::rank() < kWarpSize;  // one warp
  const bool filtered = filters.any(p.vocab);
  if constexpr (kDense) {
    if (has_draft_row(r, i)) {
      if (leads && slot.x >= 0) {
        const SlotAhead met =
            needs_draft_sum(r, filtered)
                ? with_draft_row(r, draft_stats(r, i, chunks), slot)
                : about_draft_row(r, reinterpret_cast<const AboutPart*>(shared.warps),
                                  kRowReadWarps, slot);
        __syncwarp();
        if (Judges::rank() == 0) known.slot = met;
      }
      Judges::sync();
    }
  }
  const auto settle = [&](const RowLaw& law, const RowFilter& filter) {
    if constexpr (kDense) {
      if (is_close(law, filter, slot, p.vocab)) settle_draft(p, b, i, known);
    }
  };
  RowStats stats{1, key_logit(shared.found.top), -1, 0, 0};
  if (filtered) {
    stats.faults = row_faults(stats.top);
    if (Judges::rank() == 0) out->sum = 1;
  } else if (leads) {
    stats = sum_row(r, i, slot, chunks, out);
  }
  const RowLaw law(stats.top, 1, law_scale(r.temperature));
  if (!filtered || stats.faults != 0) {
    if (leads)
      write_verdict(judge_whole(r, i, slot, stats), -1, stats, law, RowFilter(), slot, out);
    return;
  }
  const RowSource<bf16> source(r.target_row(i), RowEdits{}, static_cast<int>(p.vocab));
  const RowHistogram<Judges> histogram(shared, source);
  if (shared.found.bound != -INFINITY) {
    const int listed = static_cast<int>(shared.found.listed);
    if (listed <= kListedGroups) {
      for (int first = 0; first < listed; first += Judges::kThreads) {
        const int n = min(first + Judges::rank(), listed - 1);
        Group<bf16> group;
        group.words = shared.list[n];
        gather_groups(first + Judges::rank() < listed, group, shared.list_token[n],
                      shared.found.bound, &buffer.listed);
      }
      Judges::sync();
      if (buffer.listed.count <= kListedTokens) {
        ListedOrder* order = reinterpret_cast<ListedOrder*>(shared.count);
        int kept;
        const RowFilter filter = cut_listed<Judges>(buffer.listed, law, filters, order, &kept);
        settle(law, filter);
        Slot verdict = judge_cut(r, slot, law, filter);
        const SlotQ q{verdict.one_hot, slot.draft_top, slot.draft_sum};
        int32_t winner = -1;
        if (!kDense || can_race(r, verdict, slot))
          winner = race_listed<Judges, kByPosition>(r, i, verdict, q, law, filter, known.pool, kept,
                                                    *order);
        if constexpr (kDense)
          verdict.status |= leave_kept<Judges>(*order, kept, kept_tokens(chunks, p, b, i));
        if (kByPosition && winner == slot.x) verdict.outcome = Outcome::kAccept;
        if (leads) write_verdict(verdict, winner, stats, law, filter, slot, out);
        return;
      }
    }
    histogram.count_list();
  }
  const ValueCut cut = histogram.find(law, filters);
  const RowFilter filter{cut.logit, cut.ties < 0 ? INT32_MAX : -cut.ties, cut.mass};
  settle(law, filter);
  if (leads) write_verdict(judge_cut(r, slot, law, filter), -1, stats, law, filter, slot, out);
}

// Grid: any number of blocks, which take `rows` rows in turn. kByPosition: all requests that are
// not greedy go by match or gumbel; kDense: by rows of q.
template <bool kByPosition, bool kDense = false>
__global__ void __launch_bounds__(kCutThreads, 2)
    verify_cut_kernel(const __grid_constant__ VerifyChainParams p, int rows) {
  extern __shared__ uint4 dynamic_shared[];
  RowsShared& shared = *reinterpret_cast<RowsShared*>(dynamic_shared);
  allow_next_launch();
  const ChainWorkspace chunks(p.workspace, p.batch, p.drafts, p.vocab, kDense);
  const unsigned slots = static_cast<unsigned>(p.drafts) + 1;
  const int step = static_cast<int>(gridDim.x), first = static_cast<int>(blockIdx.x);
  if (threadIdx.x < kRowReaders) {
#pragma unroll 1
    for (int row = first, turn = 0; row < rows; row += step, ++turn) {
      const unsigned b = row / slots, i = row - b * slots;
      const int at = turn % kRowBuffers;
      read_row<kDense>(p, chunks, b, static_cast<int>(i), shared.buffers[at],
                       shared.ahead[turn % kRowsAhead], at);
      arrive_at<true>(at);
    }
    return;
  }
  // what the request of a row wants, and what is known of its slot
  const auto prepare = [&](int row, int turn) {
    if (row >= rows || Judges::rank() >= kWarpSize) return;
    RowAhead& ahead = shared.ahead[turn % kRowsAhead];
    const unsigned b = row / slots, i = row - b * slots;
    const FilterParams filters = read_filters(p, b);
    const ChainRequest r(p, b);
    if (Judges::rank() == 0) ahead.request.set(r, filters);
    if (static_cast<int>(i) >= r.rows) return;
    const RowSource<bf16> source(r.target_row(i), RowEdits{}, static_cast<int>(p.vocab));
    const SlotAhead known = dense_slot_ahead<kDense>(r, static_cast<int>(i), source, &ahead.pool);
    if (Judges::rank() == 0) ahead.slot = known;
  };
  // the row `kRowBuffers` turns on is prepared while this one is read
#pragma unroll 1
  for (int row = first - kRowBuffers * step, turn = -kRowBuffers; row < rows; row += step, ++turn) {
    const int next = row + kRowBuffers * step, at = turn & (kRowBuffers - 1);
    prepare(next, turn + kRowBuffers);
    if (turn >= 0) {
      wait_at<true>(at);
      const unsigned b = row / slots, i = row - b * slots;
      judge_row<kByPosition, kDense>(p, chunks, b, static_cast<int>(i), shared.buffers[at],
                                     shared.ahead[turn % kRowsAhead]);
      Judges::sync();
    }
    if (next >= rows) continue;
    shared.buffers[at].clear();
    arrive_at<false>(at);
  }
}

}  // namespace domino
