// First launch of verify_chain by top-p, min-p, both or none of them, over rows of bf16 logits,
// where each row has a processor to itself, without a top-k, dense q or log-probabilities: a block
// reads a row once and counts its values (row_counter.cuh). Its last warp sees to the slot
// meanwhile. Then each warp sums up rows of bins, all of them find the row in which the nucleus
// ends, and the warp that has it goes on to the cut and judges the draft. Requests with min-p,
// values that the counts do not tell apart: by row_histogram.cuh. Requests without a filter take
// the row's statistics instead, chunk by chunk as in row_chunks.cuh. Bytes: every row once; bound
// by HBM and by shared memory, and by latency behind them.
#pragma once

#include "verify/bin_rows.cuh"
#include "verify/draft_row.cuh"
#include "verify/row_histogram.cuh"
#include "verify/slot_ahead.cuh"
#include "verify/verdict_words.cuh"

namespace domino {

struct RowShared {
  RowLaw law;  // but for what its top decides
  float top_p;
  uint32_t by_top_p;                 // is that all that the row's request filters by?
  float of_pool[PoolAhead::kCount];  // the row's logits of the pool's tokens
  ListedShared shared;
  SlotAhead slot;
  PoolAhead pool;
  SharedRequest request;
  SlotVerdict verdict;
};

// Reads a row, aligned and of a multiple of eight tokens, for a block's readers, dealt out by 1024
// tokens that a warp asks for one after the other: with loads apart from each other it would wait
// for later ones too, since it has six scoreboards.
class RowPieces {
 public:
  __device__ __forceinline__ RowPieces(const bf16* row, int vocab)
      : tokens_(row + warp() * kChunk + lane() * kGroup), left_(vocab - warp() * kChunk) {
#pragma unroll
    for (int g = 0; g < kLaneGroups; ++g) load(g, 0);
  }

  // A piece, and asks for the next one; false behind the row's end.
  template <class Count>
  __device__ __forceinline__ bool take(Count count) {
    if (left_ <= 0) return false;
#pragma unroll
    for (int g = 0; g < kLaneGroups; ++g) {
      count(groups_[g]);
      load(g, kStep);
    }
    tokens_ += kStep;
    left_ -= kStep;
    return true;
  }

 private:
  static constexpr int kStep = kReadWarps * kChunk;

  static __device__ __forceinline__ int warp() { return threadIdx.x / kWarpSize; }
  static __device__ __forceinline__ int lane() { return threadIdx.x % kWarpSize; }

  // Group g, `ahead` tokens from here.
  __device__ __forceinline__ void load(int g, int ahead) {
    ahead += g * kGroupStep;
    groups_[g].load_if(left_ > ahead + lane() * kGroup, tokens_ + ahead);
  }

  const bf16* tokens_;  // this lane's first of the next piece
  int left_;            // tokens from that piece on
  Group<bf16> groups_[kLaneGroups];
};

// As RowCounter::count(), in a third of the code.
__device__ __forceinline__ void count_group(ListedShared& s, const Group<bf16>& group,
                                            uint32_t& most) {
  most = max_nan(most, group.most(), bf16{});
  uint32_t nearest = 0;
  count_values(s.count, group, nearest);
  if (!has_near(nearest)) return;
#pragma unroll 1
  for (int n = 0; n < kGroup; ++n) note_near(s, __float_as_uint(group.at(n)) >> 16);
}

// The cut by top-p alone, where the counts tell values apart: true in the one warp that has it. By
// all threads.
__device__ __forceinline__ bool find_nucleus(ListedShared& s, const RowLaw& law, float top_p,
                                             ValueCut* cut) {
  constexpr int kOwn = kOctaves / kCutWarps;
  static_assert(kOctaves % kCutWarps == 0);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const uint32_t minus_zeros = s.count[kZeroBin + 1];
  uint64_t near = 0;  // what the tokens near 0 weigh more than 0 does
  const int near_zero = static_cast<int>(s.found.near_zero);
  if (near_zero != 0 && warp == kZeroBin / kRowBins % kCutWarps) {
    for (int n = lane; n < near_zero; n += kWarpSize)
      near += to_fixed(law.weight(__uint_as_float(s.near[n] << 16))) - to_fixed(law.weight(0.0f));
    near = warp_sum(near);
  }
  const FixedWeights weights(law);
  uint4 bins[kOwn];
  uint64_t up_to[kOwn];
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    const int row = warp + n * kCutWarps;
    bins[n] = join_zeros(row, reinterpret_cast<const uint4*>(s.count)[row * kWarpSize + lane],
                         minus_zeros);
  }
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    const int row = warp + n * kCutWarps;
    up_to[n] = 0;
    if (__any_sync(kFullMask, (bins[n].x | bins[n].y | bins[n].z | bins[n].w) != 0)) {
      CountAndMass in[4];
      weigh_bins(weights, law, row * kRowBins + lane * 4, bins[n], near, false, in);
      up_to[n] = sum_up_to(sum_bins(in).mass);
    }
    if (lane == kWarpSize - 1) s.rows.mass[row] = up_to[n];
  }
  __syncthreads();
  const ulonglong2 two = reinterpret_cast<const ulonglong2*>(s.rows.mass)[lane];
  const uint64_t rows_up_to = sum_up_to(two.x + two.y);
  const uint64_t target = nucleus_cut(__shfl_sync(kFullMask, rows_up_to, kWarpSize - 1), top_p);
  int from = __ffs(__ballot_sync(kFullMask, rows_up_to >= target)) - 1;
  uint64_t before = rows_up_to - two.x - two.y;
  const bool first = before + two.x >= target;
  if (!first) before += two.x;
  const int row = __shfl_sync(kFullMask, 2 * lane + (first ? 0 : 1), from);
  if (row % kCutWarps != warp) return false;
  before = __shfl_sync(kFullMask, before, from);

  uint4 of_row = bins[0];  // not by an index: the arrays would be in local memory
  uint64_t row_up_to = up_to[0];
#pragma unroll
  for (int n = 1; n < kOwn; ++n) {
    if (row >= n * kCutWarps) {
      of_row = bins[n];
      row_up_to = up_to[n];
    }
  }
  from = __ffs(__ballot_sync(kFullMask, before + row_up_to >= target)) - 1;
  CountAndMass in[4];
  weigh_bins(weights, law, row * kRowBins + lane * 4, of_row, near, false, in);
  before += row_up_to - sum_bins(in).mass;
  const uint32_t counts[4] = {of_row.x, of_row.y, of_row.z, of_row.w};
  uint32_t count = counts[0];
  int at = 0;
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    if (at != j || before + in[j].mass >= target) continue;
    before += in[j].mass;
    at = j + 1;
    count = counts[at];
  }
  const int bin = __shfl_sync(kFullMask, row * kRowBins + lane * 4 + at, from);
  *cut = cut_ties(bin_logit(bin), __shfl_sync(kFullMask, before, from),
                  __shfl_sync(kFullMask, count, from), target, law);
  return true;
}

// What relu(p - q) comes to, about, q a pool. By a warp.
__device__ __forceinline__ float pool_rest(const ChainRequest& r, const RowShared& s,
                                           const RowLaw& law, const RowFilter& filter) {
  if (r.p.pool > PoolAhead::kCount) return kLikelyResidual;
  const RowLaw draft(s.slot.draft_top, s.slot.draft_sum, law_scale(r.draft_temperature));
  const float inverse = kFixedOne / static_cast<float>(filter.mass);
  float both = 0.0f;
#pragma unroll
  for (int n = 0; n < PoolAhead::kCount; n += kWarpSize) {
    if (n >= r.p.pool) break;
    const int m = n + static_cast<int>(threadIdx.x) % kWarpSize;
    const float logit = s.of_pool[m];
    if (m < r.p.pool && logit >= filter.cut_logit)
      both += fminf(exp2_about(law.exponent(logit)) * inverse,
                    exp2_about(draft.exponent(s.pool.logit[m])) * draft.inverse_sum);
  }
  return fminf(fmaxf(1.0f - warp_sum(both), 0x1p-8f), 1.0f);
}

// Grid: a block for each row of each request. Rows are aligned, and their vocabulary is a multiple
// of 8. by_words: as verdict_words.cuh.
__global__ void __maxnreg__(48)
    verify_row_kernel(const __grid_constant__ VerifyChainParams p, bool by_words) {
  extern __shared__ uint4 dynamic_shared[];
  RowShared& s = *reinterpret_cast<RowShared*>(dynamic_shared);
  allow_next_launch();
  const unsigned slots = static_cast<unsigned>(p.drafts) + 1;
  const int64_t b = blockIdx.x / slots;
  const int i = static_cast<int>(blockIdx.x % slots);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int vocab = static_cast<int>(p.vocab);
  const ChainWorkspace chunks(p.workspace, p.batch, p.drafts, p.vocab, false);
  if (warp == kReadWarps) {
    const FilterParams wanted = read_filters(p, b);
    const float draft_temperature = p.draft_temperature != nullptr ? p.draft_temperature[b] : 0.0f;
    const ChainRequest own(p, b, &draft_temperature);
    if (lane == 0) s.request.set(own, wanted);
    __syncthreads();
    const ChainRequest r(p, s.request.get());
    if (i < r.rows) {
      const RowSource<bf16> source(r.target_row(i), RowEdits{}, vocab);
      const SlotAhead known = slot_ahead(r, i, source, &s.pool);
      const FilterParams& filters = s.request.filters();
      if (lane == 0) {
        s.slot = known;
        s.law = RowLaw(0.0f, 1, law_scale(r.temperature));
        s.top_p = filters.top_p;
        s.by_top_p = filters.by_mass() && !filters.by_weight() ? 1 : 0;
      }
      if (known.x >= 0 && r.q == DraftLaw::kPool) {
        __syncwarp();
#pragma unroll
        for (int n = 0; n < PoolAhead::kCount; n += kWarpSize) {
          const int32_t token = s.pool.id[n + lane];
          s.of_pool[n + lane] = token >= 0 && token < vocab ? source.at(token) : -INFINITY;
        }
      }
    } else if (lane == 0) {
      s.by_top_p = 0;
    }
  } else {
    // the first piece is counted before the request is known
    const bool known = p.cu_rows == nullptr;
    RowPieces pieces(static_cast<const bf16*>(p.target_logits) + b * p.target_batch_stride +
                         i * p.target_row_stride,
                     known ? vocab : 0);
    RowCounter<kReadThreads>::clear(s.shared, threadIdx.x, kReadThreads);
    asm volatile("barrier.cta.sync 1, %0;" ::"n"(kReadThreads) : "memory");
    uint32_t most = 0xff80ff80u;  // the greatest logits of the halves
    const auto count = [&](const Group<bf16>& group) { count_group(s.shared, group, most); };
    pieces.take(count);
    __syncthreads();
    const ChainRequest r(p, s.request.get());
    if (i < r.rows) {
      const RowSource<bf16> source(r.target_row(i), RowEdits{}, vocab);
      if (s.request.filters().any(p.vocab)) {
        if (!known) pieces = RowPieces(source.data, vocab);
#pragma unroll 1
        while (pieces.take(count)) {
        }
        const float top = max_nan(low_half(most, bf16{}), high_half(most, bf16{}));
        const uint32_t key = __reduce_max_sync(kFullMask, logit_key(top));
        if (lane == 0) atomicMax(&s.shared.found.top, key);
      } else {
        sum_chunks(source, r.greedy(), law_scale(r.temperature), chunks,
                   chunks.row(b, i) - chunks.chunks, warp, static_cast<int>(chunks.row_chunks),
                   kReadWarps);
      }
    }
  }
  __syncthreads();
  const auto leave = [&](auto write) {  // by one warp
    write(&s.verdict);
    __syncwarp();
    constexpr int kParts = sizeof(SlotVerdict) / sizeof(uint4);
    static_assert(kParts == kVerdictWords);
    if (lane >= kParts) return;
    if (by_words)
      store_word(verdict_words(p, b, i) + lane, verdict_word(s.verdict, lane));
    else
      reinterpret_cast<uint4*>(slot_verdicts(chunks) + b * slots + i)[lane] =
          reinterpret_cast<const uint4*>(&s.verdict)[lane];
  };
  const auto tell_rest = [&](const ChainRequest& r, const Slot& verdict, const RowLaw& law,
                             const RowFilter& filter, SlotVerdict* to) {
    if (verdict.outcome == Outcome::kAccept || s.slot.x < 0 || verdict.one_hot ||
        r.q != DraftLaw::kPool)
      return;
    const float rest = pool_rest(r, s, law, filter);
    if (lane == 0) to->race_mass = rest;
  };
  const auto judge_by = [&](const ChainRequest& r, const RowLaw& law, const ValueCut& cut) {
    leave([&](SlotVerdict* to) {
      const RowFilter filter = cut.filter();
      const Slot verdict = judge_cut(r, s.slot, law, filter);
      if (lane == 0) to->sum = 1;
      write_verdict(verdict, -1, RowStats{1, law.top, -1, 0, 0}, law, filter, s.slot, to);
      tell_rest(r, verdict, law, filter, to);
    });
  };
  const uint32_t near = s.shared.found.near_zero;
  const float top = key_logit(s.shared.found.top);
  if (s.by_top_p != 0 && row_faults(top) == 0) {
    RowLaw law = s.law;  // a division less for each warp
    law.top = top;
    const RowExponent exponent(top, law.scale);
    law.shift = exponent.huge ? 0.0f : kRoundMagic - static_cast<float>(exponent.unit());
    if (!exponent.huge && tells_apart(law, -INFINITY, near)) {
      ValueCut cut;
      const bool mine = find_nucleus(s.shared, law, s.top_p, &cut);
      const bool unclear = mine && near != 0 && cut.logit == 0.0f;  // or among those near 0?
      if (mine && !unclear) judge_by(ChainRequest(p, s.request.get()), law, cut);
      if (near == 0) return;
      if (unclear && lane == 0) s.shared.unclear = 1;
      __syncthreads();
      if (s.shared.unclear == 0) return;
    }
  }
  const ChainRequest r(p, s.request.get());
  if (i >= r.rows) return;
  const FilterParams filters = s.request.filters();
  const bool filtered = filters.any(p.vocab);
  RowStats stats{1, top, -1, filtered ? row_faults(top) : 0, 0};
  if (!filtered || stats.faults != 0) {
    if (warp == 0)
      leave([&](SlotVerdict* to) {
        if (!filtered) stats = sum_row(r, i, s.slot, chunks, to);
        if (filtered && lane == 0) to->sum = 1;
        const Slot verdict = judge_whole(r, i, s.slot, stats);
        const RowLaw law(stats.top, 1, law_scale(r.temperature));
        write_verdict(verdict, -1, stats, law, RowFilter(), s.slot, to);
        tell_rest(r, verdict, law, RowFilter{-INFINITY, INT32_MAX, stats.sum}, to);
      });
    return;
  }
  const RowLaw law(top, 1, law_scale(r.temperature));
  const RowSource<bf16> source(r.target_row(i), RowEdits{}, vocab);
  const ValueCut cut = RowHistogram<WholeBlock>(s.shared, source).find(law, filters);
  if (warp == 0) judge_by(r, law, cut);
}

}  // namespace domino
