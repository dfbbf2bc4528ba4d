// First launch of verify_chain with filters over rows of bf16 logits, where there are more rows
// than the device has room for at once (otherwise verify_row.cuh, verify_listed.cuh or
// few_rows.cuh): a block goes through rows one after the other. Most of its warps read, and go on
// to the next row; the others find where the filters cut the row that has been read, and judge its
// draft. So no block's loads stop while it judges. Rows are taken slot by slot over the batch, and
// what lies behind a draft that has been rejected by then is left out, without a top-k the rest of
// a row on its way as well. Where a row has a top-k, cut, verdict and race need no more than the
// tokens above a bound (listed_tokens.cuh); otherwise values are counted (row_counter.cuh).
// Requests without a filter take the row's statistics instead, chunk by chunk as in row_chunks.cuh.
// With dense q the row of q follows its target row (draft_row.cuh). Bytes: every row once; bound by
// HBM, without a top-k as much by shared memory.
#pragma once

#include "verify/draft_row.cuh"
#include "verify/judged_rows.cuh"
#include "verify/nucleus_histogram.cuh"
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
  template <bool kRanks>
  __device__ __forceinline__ void clear() {
    RowCounter<kRowReaders>::clear(shared, Judges::rank(), Judges::kThreads);
    if constexpr (kRanks) {
      uint32_t* bins = reinterpret_cast<KeyBins*>(listed.at)->count;
      for (int n = Judges::rank(); n < KeyBins::kCount; n += Judges::kThreads) bins[n] = 0;
      if (Judges::rank() == 0) listed.count = listed.top_k = 0;
    }
  }
};
// What is known of a row before it has been read.
struct RowAhead {
  SlotAhead slot;
  bool behind_end;  // of its request's chain, by the time its target row has been read
  bool draft_left;  // and by the time its row of q has been, which warps may have left unread
  union {
    PoolAhead pool;
    AboutPart draft[kRowReadWarps];  // where q has rows, once they are read
  };
  SharedRequest request;
};
constexpr int kRowBuffers = 2, kRowsAhead = kRowBuffers + 1;
struct RowsShared {
  RowBuffer buffers[kRowBuffers];
  RowAhead ahead[kRowsAhead];
};
// Two blocks of a processor have 196 KB with what the runtime takes. With 198 it gave room to one.
static_assert(sizeof(RowsShared) + sizeof(RaceShared) + 1024 <= 98 * 1024);

// Named barriers of the block, of each buffer: it is clear and the request known; its row is read;
// and its row of q.
enum class Stage : int { kClear = 3, kRead = 5, kDraftRead = 7 };
template <Stage kStage>
__device__ __forceinline__ void arrive_at(int buffer) {
  __syncwarp();
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(buffer + static_cast<int>(kStage)),
               "n"(kCutThreads)
               : "memory");
}
template <Stage kStage>
__device__ __forceinline__ void wait_at(int buffer) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(buffer + static_cast<int>(kStage)), "n"(kCutThreads)
               : "memory");
}

// Where chains end, as far as judges know, in front of the workspace, [batch]: rows of the request
// from that one on, 0 while nothing is known and between calls. What lies behind is not read.
__device__ __forceinline__ unsigned long long* chain_end(const VerifyChainParams& p, int64_t b) {
  return b < kGreedyWords ? static_cast<unsigned long long*>(p.workspace) + b : nullptr;
}
__device__ __forceinline__ unsigned long long load_end(const VerifyChainParams& p, int64_t b) {
  unsigned long long word = 0;
  if (const unsigned long long* at = chain_end(p, b); at != nullptr)
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
  return word;
}
// By one thread: row i does not accept.
__device__ __forceinline__ void leave_end(const VerifyChainParams& p, int64_t b, int i) {
  if (unsigned long long* at = chain_end(p, b); at != nullptr)
    atomicMax(at, static_cast<unsigned long long>(p.drafts + 1 - i));
}

// Whether row i of request b has come to lie behind its chain's end while it is read.
template <bool kWatches>
class EndWatch {
 public:
  __device__ __forceinline__ EndWatch(const VerifyChainParams& p, int64_t b, int i)
      : at_(reinterpret_cast<const uint32_t*>(chain_end(p, b))),
        rows_(static_cast<uint32_t>(p.drafts + 1 - i)) {}

  // As the call before has found: its load had until now to arrive. By whole warps.
  __device__ __forceinline__ bool ended() {
    if (!kWatches) return false;
    const bool ended = __any_sync(kFullMask, word_ > rows_);
    if (at_ != nullptr)
      asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word_) : "l"(at_) : "memory");
    return ended;
  }

 private:
  const uint32_t* at_;
  uint32_t rows_;  // of the request from this one on
  uint32_t word_ = 0;
};

__device__ __forceinline__ RowSource<bf16> source_at(const bf16* row, int vocab) {
  return RowSource<bf16>({row, DType::kBF16}, RowEdits{}, vocab);
}

// Of the row of q, warps that have a chunk more than others of the target row have one less.
__device__ __forceinline__ int draft_chunk(int chunk) {
  return chunk + kRowReadWarps - 1 - 2 * static_cast<int>(threadIdx.x / kWarpSize);
}

// Calls take(group, g) with each group of a chunk and, as soon as a group is through, asks for the
// same one of chunk `next` of a row: two buffers in turn keep eight groups of a lane on their way.
// Where a register is moved, it waits for its load.
template <class Take>
__device__ __forceinline__ void take_chunk(Group<bf16> (&groups)[kLaneGroups],
                                           const RowSource<bf16>& from, int next, int last,
                                           Take take) {
  const bool whole = from.aligned && (next + 1) * kChunk <= from.vocab;
  const bf16* tokens =
      from.data + next * kChunk + static_cast<int>(threadIdx.x) % kWarpSize * kGroup;
#pragma unroll
  for (int g = 0; g < kLaneGroups; ++g) {
    take(groups[g], g);
    if (whole) groups[g].words = load_words(tokens + g * kGroupStep);
  }
  if (!whole && next < last) load_tokens(from, next, groups);
}

// Sums up about the row of q, whose first two chunks are on their way, the first in `later` where
// `odd`. By the readers.
template <bool kWatches>
__device__ __forceinline__ void read_draft(RowAhead& known, const RowSource<bf16>& draft, int last,
                                           bool odd, Group<bf16> (&ahead)[kLaneGroups],
                                           Group<bf16> (&later)[kLaneGroups],
                                           EndWatch<kWatches>& watch) {
  const int warp = threadIdx.x / kWarpSize;
  AboutSum about(law_scale(known.request.get().draft_temperature));
  const auto take = [&](const Group<bf16>& group, int) { about.add(group); };
#pragma unroll 1
  for (int chunk = draft_chunk(warp); chunk < last; chunk += kRowReadWarps) {
    if (!odd) {
      take_chunk(ahead, draft, chunk + 2 * kRowReadWarps, last, take);
      chunk += kRowReadWarps;
      if (chunk >= last) break;
    }
    odd = false;
    take_chunk(later, draft, chunk + 2 * kRowReadWarps, last, take);
    if (watch.ended()) {
      if (threadIdx.x % kWarpSize == 0) known.draft_left = true;
      return;
    }
  }
  about.leave(known.draft + warp);
}

// Reads row i of request b into a buffer, and its row of q. By the readers.
template <bool kDense, bool kRanks>
__device__ __forceinline__ void read_row(const VerifyChainParams& p, const ChainWorkspace& chunks,
                                         int64_t b, int i, RowBuffer& buffer, RowAhead& known,
                                         int at) {
  const int vocab = static_cast<int>(p.vocab), last = static_cast<int>(chunks.row_chunks);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  Group<bf16> ahead[kLaneGroups], later[kLaneGroups];
  const auto load_first = [&](const RowSource<bf16>& from) {
    if (warp < last) load_tokens(from, warp, ahead);
    if (warp + kRowReadWarps < last) load_tokens(from, warp + kRowReadWarps, later);
  };
  LogitRow row{p.target_logits, DType::kBF16};
  const unsigned long long end = threadIdx.x == 0 ? load_end(p, b) : 0;
  if (p.cu_rows == nullptr) {
    row = row.plus(b * p.target_batch_stride + i * p.target_row_stride);
    load_first(RowSource<bf16>(row, RowEdits{}, vocab));
  }
  if (threadIdx.x == 0) {
    known.behind_end = end > static_cast<unsigned>(p.drafts + 1 - i);
    known.draft_left = false;
  }
  wait_at<Stage::kClear>(at);
  if (i >= known.request.get().rows || known.behind_end) return arrive_at<Stage::kRead>(at);
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
    arrive_at<Stage::kRead>(at);
  } else {
    RowCounter<kRowReaders> counter(buffer.shared);
    EndWatch<!kRanks> watch(p, b, i);
    // the row of q follows without a pause
    const int own = ceil_div(max(last - warp, 0), kRowReadWarps) * kRowReadWarps;
    const bf16* draft = nullptr;
    if constexpr (kDense) {
      const ChainRequest r(p, known.request.get());
      if (has_draft_row(r, i) && !needs_draft_sum(r, true)) draft = draft_source(r, i).data;
    }
    if (kRanks && ranks_first(filters, p.vocab, kRowReaders)) {
      float top = -INFINITY;  // of two chunks, where there are
      if (warp < last) top = lane_top(ahead);
      if (warp + kRowReadWarps < last) top = fmaxf(top, lane_top(later));
      counter.bound_by(top, static_cast<uint32_t>(filters.top_k),
                       reinterpret_cast<KeyBins*>(buffer.listed.at));
    }
    const auto take = [&](Group<bf16>(&groups)[kLaneGroups], int chunk, auto add) {
      const int token = chunk * kChunk + lane * kGroup;
      int next = chunk + 2 * kRowReadWarps;
      const bf16* from = source.data;
      if (kDense && next >= last && draft != nullptr) {
        from = draft;
        next = draft_chunk(next - own);
      }
      take_chunk(groups, source_at(from, vocab), next, last,
                 [&](const Group<bf16>& group, int g) { add(group, token + g * kGroupStep); });
    };
    bool left = false;  // since nobody wants the rest
    const auto take_all = [&](auto add) {
#pragma unroll 1
      for (int chunk = warp; chunk < last; chunk += 2 * kRowReadWarps) {
        take(ahead, chunk, add);
        if (chunk + kRowReadWarps < last) take(later, chunk + kRowReadWarps, add);
        if ((left = watch.ended())) break;
      }
    };
    // a loop each: what is listed takes a tenth of the code
    if (kRanks && counter.bounded())
      take_all([&](const Group<bf16>& group, int token) { counter.list(group, token); });
    else
      take_all([&](const Group<bf16>& group, int) { counter.count(group); });
    counter.leave_top();
    if (left && lane == 0) known.behind_end = true;
    arrive_at<Stage::kRead>(at);
    if (left) return;
    if constexpr (kDense) {
      if (draft != nullptr) {
        const RowSource<bf16> from = source_at(draft, vocab);
        const int first = draft_chunk(warp);
        const bool odd = own / kRowReadWarps % 2 != 0;
        if (own == kRowReadWarps && first < last) load_tokens(from, first, later);
        if (own == 0 && first < last) load_tokens(from, first, ahead);
        if (own == 0 && first + kRowReadWarps < last)
          load_tokens(from, first + kRowReadWarps, later);
        return read_draft(known, from, last, odd, ahead, later, watch);
      }
    }
  }
  if constexpr (kDense) {
    const ChainRequest r(p, known.request.get());
    if (has_draft_row(r, i)) sum_draft_row<false>(r, i, chunks, warp, last, kRowReadWarps);
  }
}

// Sums up the row of q of slot i of request b exactly, by the judges. Out of line: few slots take
// it.
static __device__ __noinline__ void settle_draft(const VerifyChainParams& p, int64_t b, int i,
                                                 RowAhead& known) {
  const ChainRequest r(p, known.request.get());
  const ChainWorkspace chunks(p.workspace, p.batch, p.drafts, p.vocab, true);
  sum_draft_row<false>(r, i, chunks, Judges::rank() / kWarpSize,
                       static_cast<int>(chunks.row_chunks), kJudgeWarps);
  Judges::sync();  // and all have looked at the slot as it was
  if (Judges::rank() < kWarpSize) {
    const RowSource<bf16> source(r.target_row(i), RowEdits{}, static_cast<int>(p.vocab));
    const SlotAhead ahead = dense_slot_ahead<true>(r, i, source, &known.pool);
    const SlotAhead met = with_draft_row(r, draft_stats(r, i, chunks), ahead);
    if (Judges::rank() == 0) known.slot = met;
  }
  Judges::sync();
}

// Finds the cut of row i of request b, and judges its draft: where there is a row of q, once that
// has been read as well. By the judges.
template <bool kByPosition, bool kDense, bool kRanks>
__device__ __forceinline__ void judge_row(const VerifyChainParams& p, const ChainWorkspace& chunks,
                                          int64_t b, int i, RowBuffer& buffer, RowAhead& known,
                                          int at) {
  const ChainRequest r(p, known.request.get());
  const auto wait_for_draft = [&] {
    if constexpr (kDense) wait_at<Stage::kDraftRead>(at);
  };
  if (i >= r.rows || known.behind_end) return wait_for_draft();
  FilterParams filters = known.request.filters();
  if (!kRanks) filters.top_k = 0;
  const SlotAhead& slot = known.slot;
  ListedShared& shared = buffer.shared;
  SlotVerdict* out = slot_verdicts(chunks) + b * (p.drafts + 1) + i;
  const bool leads = Judges::rank() < kWarpSize;  // one warp
  const bool filtered = filters.any(p.vocab);
  const auto meet_draft = [&] {
    wait_for_draft();
    if constexpr (kDense) {
      if (!has_draft_row(r, i)) return;
      if (leads && slot.x >= 0) {
        const SlotAhead met = needs_draft_sum(r, filtered)
                                  ? with_draft_row(r, draft_stats(r, i, chunks), slot)
                                  : about_draft_row(r, known.draft, kRowReadWarps, slot);
        __syncwarp();
        if (Judges::rank() == 0) known.slot = met;
      }
      Judges::sync();
    }
  };
  // the verdict, and where the chain ends by it
  const auto leave = [&](const Slot& verdict, int32_t winner, const RowStats& stats,
                         const RowLaw& law, const RowFilter& filter) {
    if (!leads) return;
    write_verdict(verdict, winner, stats, law, filter, slot, out);
    const bool ends = r.by_block() ? ends_chain(verdict.outcome)
                                   : verdict.outcome != Outcome::kAccept &&
                                         verdict.outcome != Outcome::kUndecided &&
                                         (verdict.outcome != Outcome::kPosition || winner >= 0);
    if (Judges::rank() == 0 && ends) leave_end(p, b, i);
  };
  const auto settle = [&](const RowLaw& law, const RowFilter& filter) {
    if constexpr (kDense) {
      // a draft that the filters remove is rejected whatever q is
      if (Judges::rank() == 0 && has_draft_row(r, i) && !r.by_block() && slot.x >= 0 &&
          slot.logit < filter.cut_logit)
        leave_end(p, b, i);
      meet_draft();
      if ((kRanks || !known.draft_left) && is_close(law, filter, slot, p.vocab))
        settle_draft(p, b, i, known);
    }
  };
  RowStats stats{1, key_logit(shared.found.top), -1, 0, 0};
  if (filtered) {
    stats.faults = row_faults(stats.top);
    if (Judges::rank() == 0) out->sum = 1;
  } else {
    meet_draft();
    if (leads) stats = sum_row(r, i, slot, chunks, out);
  }
  const RowLaw law(stats.top, 1, law_scale(r.temperature));
  if (!filtered || stats.faults != 0) {
    if (filtered) meet_draft();
    if (leads) leave(judge_whole(r, i, slot, stats), -1, stats, law, RowFilter());
    return;
  }
  const RowSource<bf16> source(r.target_row(i), RowEdits{}, static_cast<int>(p.vocab));
  const std::conditional_t<kRanks, RowHistogram<Judges>, NucleusHistogram<Judges>> histogram(
      shared, source);
  if constexpr (kRanks) {
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
            winner = race_listed<Judges, kByPosition>(r, i, verdict, q, law, filter, known.pool,
                                                      kept, *order);
          if constexpr (kDense)
            verdict.status |= leave_kept<Judges>(*order, kept, kept_tokens(chunks, p, b, i));
          if (kByPosition && winner == slot.x) verdict.outcome = Outcome::kAccept;
          return leave(verdict, winner, stats, law, filter);
        }
      }
      histogram.count_list();
    }
  }
  const ValueCut cut = histogram.find(law, filters);
  const RowFilter filter = cut.filter();
  settle(law, filter);
  if (leads) leave(judge_cut(r, slot, law, filter), -1, stats, law, filter);
}

// Grid: any number of blocks, which take `rows` rows in turn. kByPosition: all requests that are
// not greedy go by match or gumbel; kDense: by rows of q; kRanks: there may be a top-k.
template <bool kByPosition, bool kDense = false, bool kRanks = true>
__global__ void __launch_bounds__(kCutThreads, 2)
    verify_cut_kernel(const __grid_constant__ VerifyChainParams p, int rows) {
  extern __shared__ uint4 dynamic_shared[];
  RowsShared& shared = *reinterpret_cast<RowsShared*>(dynamic_shared);
  allow_next_launch();
  const ChainWorkspace chunks(p.workspace, p.batch, p.drafts, p.vocab, kDense);
  const unsigned batch = static_cast<unsigned>(p.batch);  // slot by slot of all requests
  const int step = static_cast<int>(gridDim.x), first = static_cast<int>(blockIdx.x);
  if (threadIdx.x < kRowReaders) {
#pragma unroll 1
    for (int row = first, turn = 0; row < rows; row += step, ++turn) {
      const unsigned i = row / batch, b = row - i * batch;
      const int at = turn % kRowBuffers;
      read_row<kDense, kRanks>(p, chunks, b, static_cast<int>(i), shared.buffers[at],
                               shared.ahead[turn % kRowsAhead], at);
      if constexpr (kDense) arrive_at<Stage::kDraftRead>(at);
    }
    return;
  }
  // what the request of a row wants, and what is known of its slot: that takes up to four trips to
  // memory, so that without a top-k another warp does it, once the row is on its way
  constexpr bool kSlotLater = !kRanks;
  const auto look = [&](const ChainRequest& r, int row, RowAhead& ahead) {
    const int i = static_cast<int>(row / batch);
    if (i >= r.rows) return;
    const RowSource<bf16> source(r.target_row(i), RowEdits{}, static_cast<int>(p.vocab));
    const SlotAhead known = dense_slot_ahead<kDense>(r, i, source, &ahead.pool);
    if (threadIdx.x % kWarpSize == 0) ahead.slot = known;
  };
  const auto prepare = [&](int row, int turn) {
    if (kSlotLater && Judges::rank() / kWarpSize == 1 && turn > 0 && row - step < rows) {
      RowAhead& before = shared.ahead[(turn - 1) % kRowsAhead];
      look(ChainRequest(p, before.request.get()), row - step, before);
    }
    if (Judges::rank() >= kWarpSize || row >= rows) return;
    RowAhead& ahead = shared.ahead[turn % kRowsAhead];
    const unsigned b = row % batch;
    const FilterParams filters = read_filters(p, b);
    const float draft_temperature =
        kDense && p.draft_temperature != nullptr ? p.draft_temperature[b] : 0.0f;
    const ChainRequest r(p, b, kDense ? &draft_temperature : nullptr);
    if (Judges::rank() == 0) ahead.request.set(r, filters);
    if (!kSlotLater) look(r, row, ahead);
  };
  // the row `kRowBuffers` turns on is prepared while this one is read
#pragma unroll 1
  for (int row = first - kRowBuffers * step, turn = -kRowBuffers; row < rows; row += step, ++turn) {
    const int next = row + kRowBuffers * step, at = turn & (kRowBuffers - 1);
    prepare(next, turn + kRowBuffers);
    if (turn >= 0) {
      wait_at<Stage::kRead>(at);
      const unsigned i = row / batch, b = row - i * batch;
      judge_row<kByPosition, kDense, kRanks>(p, chunks, b, static_cast<int>(i), shared.buffers[at],
                                             shared.ahead[turn % kRowsAhead], at);
      if (!kRanks && counts_judged(p) && Judges::rank() == 0) count_judged(judged_count(p, b));
      Judges::sync();
    }
    if (next >= rows) continue;
    shared.buffers[at].template clear<kRanks>();
    arrive_at<Stage::kClear>(at);
    if (kSlotLater && turn < 0) Judges::sync();  // the other warp goes by the request
  }
}

}  // namespace domino
