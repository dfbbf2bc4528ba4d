// A row of dense q beside its target row in the launches of verify_chain by value.
//
// A coin asks whether u q(x) <= p(x), and q(x) takes the sum of the whole row of q. Its bits
// (row_law.h) cost three times what reading a row does in verify_cut.cuh. So that kernel sums up
// about, with the hardware's exp2: whether a coin accepts is then certain unless both sides agree
// to about_error(), and only in such a slot, once in some ten thousand, the judges sum up exactly.
// Where the walk ends, verify_draw.cuh does if what is known about leaves the token open, or the
// kept tokens are not listed. The block rule takes the exact sum of every row, and
// so do rows without filters and verify_listed.cuh.
#pragma once

#include "verify/listed_tokens.cuh"

namespace domino {

// More than the relative error of q from a sum of `vocab` weights: in all of it at most 2^-16.7 (of
// that by arguments of exp2 2^-17.5, where weights below 2^-32 do not count, by other references
// 2^-20, by the exact sum 2^-20.5), and of a lane's sum a rounding for each of its groups.
__device__ __forceinline__ float about_error(int64_t vocab) {
  return 0x1p-16f + 0x1p-35f * static_cast<float>(vocab);
}
constexpr float kNoReference = -3e38f;
constexpr float kReferenceStep = 16.0f;

__device__ __forceinline__ float exp2_about(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

// The kept tokens of a row in order, for the walk.
constexpr int kKeptShift = 20;  // in SlotVerdict::status: how many are listed, 0: they are not

// Behind all else in the workspace of a dense q, [batch, drafts + 1, kKeptTokens], as
// ListedOrder::word.
__device__ __forceinline__ uint64_t* kept_tokens(const ChainWorkspace& chunks,
                                                 const VerifyChainParams& p, int64_t b, int i) {
  char* lists = static_cast<char*>(chunks.rest) + p.batch * (p.drafts + 1) * kRowRecordBytes;
  return reinterpret_cast<uint64_t*>(lists) + (b * (p.drafts + 1) + i) * kKeptTokens;
}

// What to add to the row's status. By a team.
template <class Team>
__device__ __forceinline__ uint32_t leave_kept(const ListedOrder& order, int kept, uint64_t* to) {
  if (kept > kKeptTokens) return 0;
  for (int n = Team::rank(); n < kept; n += Team::kThreads) to[n] = order.sorted[n];
  return static_cast<uint32_t>(kept) << kKeptShift;
}

// What a warp knows of its part of a row.
struct AboutPart {
  float reference;
  float sum;     // of 2^(logit * scale - reference), about
  uint32_t top;  // logit_key
};
static_assert(sizeof(AboutPart) <= sizeof(CountAndMass));

// A lane's part of a row as it goes by.
class AboutSum {
 public:
  __device__ __forceinline__ explicit AboutSum(float scale) : scale_(scale) {}

  __device__ __forceinline__ void add(const Group<bf16>& group) {
    const uint32_t most = group.most();
    most_ = max_nan(most_, most, bf16{});
    const float top = mul_rn(fmaxf(low_half(most, bf16{}), high_half(most, bf16{})), scale_);
    if (top > limit_) {  // not each time that it grows: then errors would add up
      sum_ *= exp2_about(reference_ - top);
      reference_ = top;
      limit_ = top + kReferenceStep;
    }
    float w[kGroup];
#pragma unroll
    for (int j = 0; j < kGroup; ++j) w[j] = exp2_about(fma_rn(group.at(j), scale_, -reference_));
    sum_ += ((w[0] + w[1]) + (w[2] + w[3])) + ((w[4] + w[5]) + (w[6] + w[7]));
  }

  // By whole warps.
  __device__ __forceinline__ void leave(AboutPart* part) const {
    const float top = max_nan(low_half(most_, bf16{}), high_half(most_, bf16{}));
    const float reference = key_logit(__reduce_max_sync(kFullMask, logit_key(reference_)));
    const float sum = warp_sum(sum_ * exp2_about(reference_ - reference));
    const uint32_t key = __reduce_max_sync(kFullMask, logit_key(top));
    if (threadIdx.x % kWarpSize == 0) *part = {reference, sum, key};
  }

 private:
  float scale_;
  float reference_ = kNoReference, limit_ = kNoReference;
  float sum_ = 0.0f;
  uint32_t most_ = 0xff80ff80u;  // the greatest logits of the halves
};

// Is slot i judged by a row of q?
__device__ __forceinline__ bool has_draft_row(const ChainRequest& r, int i) {
  return r.q == DraftLaw::kDense && i < r.rows - 1;
}
__device__ __forceinline__ RowSource<bf16> draft_source(const ChainRequest& r, int i) {
  return RowSource<bf16>(r.draft_row(i), RowEdits{}, static_cast<int>(r.p.vocab));
}

// Sums up chunks `first`, `first` + `step` and so on, up to `last`, of the row of q of slot i.
// kAhead: a chunk is on its way while one is summed up; in verify_cut.cuh that would not fit the
// registers.
template <bool kAhead>
static __device__ __noinline__ void sum_draft_row(const ChainRequest& r, int i,
                                                  const ChainWorkspace& chunks, int first, int last,
                                                  int step) {
  const RowSource<bf16> source = draft_source(r, i);
  const float scale = law_scale(r.draft_temperature);
  const int64_t at = chunks.row(r.b, r.p.drafts + 1 + i) - chunks.chunks;
  if constexpr (!kAhead) return sum_chunks(source, false, scale, chunks, at, first, last, step);
  Group<bf16> groups[kLaneGroups], ahead[kLaneGroups];
  if (first < last) load_tokens(source, first, ahead);
#pragma unroll 1
  for (int chunk = first; chunk < last; chunk += step) {
#pragma unroll
    for (int g = 0; g < kLaneGroups; ++g) groups[g] = ahead[g];
    if (chunk + step < last) load_tokens(source, chunk + step, ahead);
    const int token = chunk * kChunk + threadIdx.x % kWarpSize * kGroup;
    sum_chunk(groups, token, false, true, scale, chunks, at + chunk);
  }
}
// The statistics of that row. By whole warps.
static __device__ __noinline__ RowStats draft_stats(const ChainRequest& r, int i,
                                                    const ChainWorkspace& chunks) {
  uint32_t unused;
  return combine_chunks(chunks.row(r.b, r.p.drafts + 1 + i), nullptr,
                        static_cast<int>(chunks.row_chunks), law_scale(r.draft_temperature), false,
                        &unused);
}

// Does a slot's verdict take the exact sum of its row of q?
__device__ __forceinline__ bool needs_draft_sum(const ChainRequest& r, bool filtered) {
  return !filtered || r.rule == VerifyRule::kBlock;
}

// slot_ahead() with the draft's logit in its row of q, until that has been read, as draft_top.
template <bool kDense>
__device__ __forceinline__ SlotAhead dense_slot_ahead(const ChainRequest& r, int i,
                                                      const RowSource<bf16>& source,
                                                      PoolAhead* pool) {
  SlotAhead out = slot_ahead(r, i, source, pool);
  if (kDense && out.x >= 0 && has_draft_row(r, i)) out.draft_top = draft_source(r, i).at(out.x);
  return out;
}

// What is known of a slot once its row of q has been summed up.
__device__ __forceinline__ SlotAhead with_draft_row(const ChainRequest& r, const RowStats& stats,
                                                    const SlotAhead& ahead) {
  SlotAhead out = ahead;
  out.draft_sum = stats.sum;
  out.draft_top = stats.top;
  out.q = draft_mass(stats, r.draft_temperature, ahead.draft_top);
  out.share = mul_rn(ahead.share, out.q > 0.0f ? out.q : 1.0f);  // so far the coin
  return out;
}

// The same about, where draft_sum stays 0, from what warps know of parts. A share of NaN: nothing
// is known of q, but that it is some. All lanes of a warp call it.
__device__ __forceinline__ SlotAhead about_draft_row(const ChainRequest& r, const AboutPart* parts,
                                                     int count, const SlotAhead& ahead) {
  const int lane = threadIdx.x % kWarpSize;
  const AboutPart part = lane < count ? parts[lane] : AboutPart{kNoReference, 0.0f, 0};
  const float reference = key_logit(__reduce_max_sync(kFullMask, logit_key(part.reference)));
  const float sum = warp_sum(part.sum * exp2_about(part.reference - reference));
  SlotAhead out = ahead;
  out.draft_top = key_logit(__reduce_max_sync(kFullMask, part.top));
  const RowLaw law(out.draft_top, 1, law_scale(r.draft_temperature));
  const float weight = law.weight(ahead.draft_top);
  if (row_faults(out.draft_top) != 0 || weight == 0.0f) {
    out.q = 0.0f;
  } else if (law.shift == 0.0f) {
    out.q = 1.0f;
    out.share = __int_as_float(0x7fffffff);
  } else {
    out.q = weight / (sum * exp2_about(reference - (kRoundMagic - law.shift)));
    out.share = mul_rn(ahead.share, out.q);
  }
  return out;
}

// Does the coin need more than is known about the sum of q?
__device__ __forceinline__ bool is_close(const RowLaw& law, const RowFilter& filter,
                                         const SlotAhead& slot, int64_t vocab) {
  if (slot.draft_sum != 0 || !(slot.q > 0.0f)) return false;
  const float probability = filter.probability(law, slot.logit);
  return !(fabsf(slot.share - probability) > about_error(vocab) * slot.share);
}

// Is what the race of a slot weighs by known?
__device__ __forceinline__ bool can_race(const ChainRequest& r, const Slot& verdict,
                                         const SlotAhead& slot) {
  return verdict.outcome != Outcome::kResidual || verdict.one_hot || slot.draft_sum != 0;
}

}  // namespace domino
