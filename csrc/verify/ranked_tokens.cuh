// The likeliest tokens of a row of bf16 logits that a cluster holds in its registers, and what
// follows from them: cut, verdict and race. The steps of verify_ranked.cuh.
#pragma once

#include "common/cluster.cuh"
#include "common/copy_async.cuh"
#include "verify/race_draw.cuh"
#include "verify/row_words.cuh"
#include "verify/slot_ahead.cuh"
#include "verify/value_bins.cuh"

namespace domino {

constexpr int kMostRanked = 4 * kWarpSize;  // tokens: four to a lane of the judge
constexpr int kAllSent = 360;               // that the blocks of a row may send
// Warps of the leader: ten find places, two see to the race's noise, three to its q, one judges.
constexpr int kPlaceParts = 5, kPlaceWarps = 2 * kPlaceParts, kNoiseWarps = 2, kMinusWarps = 3;
constexpr int kJudge = kCutWarps - 1;
static_assert(kJudge == kPlaceWarps + kNoiseWarps + kMinusWarps && kAllSent <= kJudge * kWarpSize);
constexpr int kRaceThreads = (kNoiseWarps + kMinusWarps + 1) * kWarpSize;  // and the judge's

enum class RowWay : uint32_t { kRanked, kUnusable, kByValue };

struct alignas(16) RankedToken {
  uint64_t word;  // rises with the place: falling logit, then rising id
  uint64_t mass;

  static __device__ __forceinline__ uint64_t word_of(float logit, int token) {
    return static_cast<uint64_t>(~logit_key(logit)) << 32 | static_cast<uint32_t>(token);
  }
  __device__ __forceinline__ float logit() const {
    return key_logit(~static_cast<uint32_t>(word >> 32));
  }
  __device__ __forceinline__ uint32_t id() const { return static_cast<uint32_t>(word); }
};
// Of some of the tokens, those that come before one.
struct alignas(16) RankedPart {
  uint64_t mass;
  uint32_t before;  // how many, and times 2^16 those of greater logits
};

template <class Row>
struct RankedShared {
  static_assert(Row::kAllSets <= 256);           // find_bound() counts in bf16
  alignas(16) uint32_t tops[Row::kAllSets / 2];  // of all sets, two bf16 a word
  alignas(16) uint32_t set_top[Row::kSets];      // of this block's: upper halves of their logit_key
  uint32_t top, bound;                           // of the row, the same
  uint32_t listed;                               // tokens from the bound up, of this block
  RowWay way;
  uint64_t go;  // RowWay, to the other blocks
  // of the leader
  uint32_t count;
  uint64_t crowded;         // a token for which a block had no room
  uint64_t sent[kAllSent];  // 0: none
  RankedToken token[kAllSent];
  float weight[kAllSent];
  RankedPart part[kPlaceParts][kMostRanked];
  float time[kMostRanked];   // E
  float minus[kMostRanked];  // -q
  SlotAhead slot;
  PoolAhead pool;
};

__device__ __forceinline__ float half_logit(uint32_t key) {
  return key_logit(key << 16 | (key & 0x8000u ? 0u : 0xffffu));
}
__device__ __forceinline__ uint32_t key_half(uint32_t key) {  // bf16
  return key & 0x8000u ? key & 0x7fffu : ~key & 0xffffu;
}

// 1 in each half where a is greater than b, or with kOrEqual at least b, otherwise 0; bf16.
template <bool kOrEqual>
__device__ __forceinline__ uint32_t greater_halves(uint32_t a, uint32_t b) {
  uint32_t out = 0;
#if __CUDA_ARCH__ >= 900
  if constexpr (kOrEqual)
    asm("set.ge.bf16x2.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  else
    asm("set.gt.bf16x2.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
#endif
  return out;
}
__device__ __forceinline__ uint32_t add_halves(uint32_t a, uint32_t b) {
  uint32_t out = 0;
#if __CUDA_ARCH__ >= 900
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
#endif
  return out;
}

// For a barrier of another block: one of its arrivals, and `bytes` more that it waits for.
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier),
      "r"(bytes)
      : "memory");
#endif
}
__device__ __forceinline__ void make_barrier_of(uint64_t* barrier, int arrivals) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
#endif
}
__device__ __forceinline__ void wait_for(uint64_t* barrier) {
  while (!phase_ended(shared_address(barrier), 0)) continue;
}
template <int kBarrier>
__device__ __forceinline__ void sync_some(int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"n"(kBarrier), "r"(threads) : "memory");
}

// As Group::load_if, but not to be moved behind what follows in the program.
__device__ __forceinline__ void load_here(Group<bf16>& group, bool exists, const bf16* logits) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
      "mov.b32 %0, %6;\nmov.b32 %1, %6;\nmov.b32 %2, %6;\nmov.b32 %3, %6;\n"
      "@p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(group.words.x), "=&r"(group.words.y), "=&r"(group.words.z), "=&r"(group.words.w)
      : "l"(logits), "r"(static_cast<uint32_t>(exists)), "n"(0xff80ff80u)
      : "memory");
}

__device__ __forceinline__ float greater_half(uint32_t pair) {
  return max_nan(low_half(pair, bf16{}), high_half(pair, bf16{}));
}

__device__ __forceinline__ uint64_t greatest_of_warp(uint64_t value) {
  return ~least_of_warp(~value);
}

__device__ __forceinline__ uint32_t noise_of(const RaceNoise& noise, uint32_t token) {
  const NoiseWords four = noise.words(token / 4);
  return token % 4 == 0   ? four.word[0]
         : token % 4 == 1 ? four.word[1]
         : token % 4 == 2 ? four.word[2]
                          : four.word[3];
}

// The tops of this block's sets, to all blocks. By a warp.
template <class Row>
__device__ __forceinline__ void send_tops(RankedShared<Row>& s, int rank, const uint64_t* arrived) {
  constexpr int kParts = Row::kSets / 8;  // of 16 bytes
  const int to = threadIdx.x % kWarpSize / kParts, part = threadIdx.x % kParts;
  if (to >= Row::kBlocks) return;
  const uint4* keys = reinterpret_cast<const uint4*>(s.set_top) + part * 2;
  const uint4 four = keys[0], more = keys[1];
  const auto pair = [](uint32_t low, uint32_t high) {
    return key_half(low) | key_half(high) << 16;
  };
  const auto both = [](uint32_t low, uint32_t high) {
    return static_cast<uint64_t>(high) << 32 | low;
  };
  send_shared(shared_address_of(s.tops + rank * (Row::kSets / 2) + part * 4, to),
              both(pair(four.x, four.y), pair(four.z, four.w)),
              both(pair(more.x, more.y), pair(more.z, more.w)), shared_address_of(arrived, to));
}

// The row's greatest logit and the k-th greatest of the sets' tops, as keys. Two threads a set; a
// barrier has to follow. By whole warps.
template <class Row>
__device__ __forceinline__ void find_bound(RankedShared<Row>& s, uint32_t k) {
  uint32_t key = 0, least = ~0u;
  if (threadIdx.x < 2 * Row::kAllSets) {
    const uint32_t set = threadIdx.x / 2, word = s.tops[set / 2];
    const uint32_t half = set % 2 == 0 ? word & 0xffffu : word >> 16, twice = half * 0x10001u;
    constexpr int kHalf = Row::kAllSets / 16;
    const uint4* others = reinterpret_cast<const uint4*>(s.tops) + threadIdx.x % 2 * kHalf;
    uint32_t above = 0, more = 0;  // counts are exact
#pragma unroll
    for (int n = 0; n < kHalf; ++n) {
      const uint4 four = others[n];
      above = add_halves(above, greater_halves<false>(four.x, twice));
      more = add_halves(more, greater_halves<false>(four.y, twice));
      above = add_halves(above, greater_halves<false>(four.z, twice));
      more = add_halves(more, greater_halves<false>(four.w, twice));
    }
    above = add_halves(above, more);
    float number = low_half(above, bf16{}) + high_half(above, bf16{});
    number += __shfl_xor_sync(kFullMask, number, 1);
    key = logit_key(low_half(half, bf16{})) >> 16;
    if (number < static_cast<float>(k)) least = key;
  }
  key = __reduce_max_sync(kFullMask, key);
  least = __reduce_min_sync(kFullMask, least);
  if (threadIdx.x % kWarpSize != 0) return;
  atomicMax(&s.top, key);
  atomicMin(&s.bound, least);
}

// This thread's tokens from the bound up, to the leader; tells how many bytes. tops: the greatest
// logits of its groups; first: its first token, step: from one of its groups to the next
template <class Row>
__device__ __forceinline__ uint32_t send_tokens(RankedShared<Row>& s, int rank,
                                                const uint64_t* arrived,
                                                const Group<bf16> (&groups)[Row::kSteps],
                                                const float (&tops)[Row::kSteps], float bound,
                                                int first, int step) {
  constexpr uint32_t kOwnSent = kAllSent / Row::kBlocks;
  const uint32_t sent = shared_address_of(s.sent + rank * kOwnSent, Row::kBlocks - 1);
  const uint32_t crowded = shared_address_of(&s.crowded, Row::kBlocks - 1);
  const uint32_t barrier = shared_address_of(arrived, Row::kBlocks - 1);
  const uint32_t bound_twice = (__float_as_uint(bound) >> 16) * 0x10001u;
  uint32_t hits = 0, bytes = 0;
#pragma unroll
  for (int n = 0; n < Row::kSteps; ++n) hits |= (tops[n] >= bound ? 1u : 0u) << n;
#pragma unroll 1
  for (; hits != 0; hits &= hits - 1) {
    const int turn = __ffs(hits) - 1;
    uint4 words = groups[0].words;
#pragma unroll
    for (int n = 1; n < Row::kSteps; ++n)
      if (turn == n) words = groups[n].words;
    const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
    uint32_t stay = 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const uint32_t ones = greater_halves<true>(pairs[n], bound_twice);  // 0x3f80 each
      stay |= ((ones >> 7 & 1u) | (ones >> 22 & 2u)) << 2 * n;
    }
#pragma unroll 1
    for (; stay != 0; stay &= stay - 1) {
      const uint32_t at = atomicAdd(&s.listed, 1u);
      // one token a block may say that there are too many: a barrier counts up to 2^20 bytes
      if (at > kOwnSent) return bytes;
      const int which = __ffs(stay) - 1;
      const uint32_t pair =
          which < 4 ? (which < 2 ? words.x : words.y) : (which < 6 ? words.z : words.w);
      const float logit = which % 2 == 0 ? low_half(pair, bf16{}) : high_half(pair, bf16{});
      send_shared(at < kOwnSent ? sent + 8 * at : crowded,
                  RankedToken::word_of(logit, first + turn * step + which), barrier);
      bytes += 8;
    }
  }
  return bytes;
}

// The tokens that have been sent and have weight, next to each other. By the leader's readers; a
// barrier has to follow.
template <class Row>
__device__ __forceinline__ void collect_tokens(RankedShared<Row>& s, const RowLaw& law) {
  const int lane = threadIdx.x % kWarpSize;
  RankedToken token{0, 0};
  if (threadIdx.x < kAllSent) token.word = s.sent[threadIdx.x];
  const float weight = token.word != 0 ? law.weight(token.logit()) : 0.0f;
  token.mass = to_fixed(weight);
  const unsigned stays = __ballot_sync(kFullMask, weight > 0.0f);
  if (stays == 0) return;
  uint32_t at = 0;
  if (lane == 0) at = atomicAdd(&s.count, static_cast<uint32_t>(__popc(stays)));
  at = __shfl_sync(kFullMask, at, 0) + __popc(stays & ((1u << lane) - 1));
  if (weight > 0.0f) {
    s.token[at] = token;
    s.weight[at] = weight;
  }
}

// How many tokens come before each, and what they weigh: a lane a token, a warp a part of those
// that may. warp: of kPlaceWarps
template <class Row>
__device__ __forceinline__ void find_places(RankedShared<Row>& s, int count, int warp) {
  const int part = warp / 2;
#pragma unroll 1
  for (int n = warp % 2 * kWarpSize + threadIdx.x % kWarpSize; n < round_up(count, kWarpSize);
       n += 2 * kWarpSize) {
    const uint64_t own = s.token[min(n, count - 1)].word;
    RankedPart out{0, 0};
#pragma unroll 4
    for (int other = part; other < count; other += kPlaceParts) {
      const RankedToken met = s.token[other];
      if (met.word < own) {
        out.mass += met.mass;
        out.before += met.word >> 32 < own >> 32 ? 0x10001u : 1u;
      }
    }
    s.part[part][n] = out;
  }
}

// What the race takes of each token that does not depend on the cut: its exponential, and what q
// takes away. warp: of kNoiseWarps and kMinusWarps
template <bool kByPosition, class Row>
__device__ __forceinline__ void prepare_race(const ChainRequest& r, int i, RankedShared<Row>& s,
                                             const RowLaw& law, const BlockNoise& noise, int count,
                                             int warp) {
  const SlotAhead& slot = s.slot;
  const int lane = threadIdx.x % kWarpSize;
  if (r.greedy()) return;
  if (warp < kNoiseWarps) {
    const RaceNoise race =
        kByPosition ? RaceNoise{{noise.seed, noise.block_start + 1 + i}, kPositionDraw, 0}
                    : RaceNoise{noise, slot.x >= 0 ? kResidualDraw : kBonusDraw, i};
#pragma unroll 1
    for (int n = warp * kWarpSize + lane; n < count; n += kNoiseWarps * kWarpSize)
      s.time[n] = exponential(noise_of(race, s.token[n].id()));
    return;
  }
  if (kByPosition || slot.x < 0 || !(slot.q > 0.0f) || r.q != DraftLaw::kPool) return;
  const RowFilter all{-INFINITY, INT32_MAX, 1};
  const DrawWeights weights = draw_weights(
      r, i, Outcome::kResidual, SlotQ{false, slot.draft_top, slot.draft_sum}, law, all, 1.0f);
#pragma unroll 1
  for (int n = (warp - kNoiseWarps) * kWarpSize + lane; n < count; n += kMinusWarps * kWarpSize)
    s.minus[n] = exact_weight(weights, s.pool, 0.0f, static_cast<int32_t>(s.token[n].id()));
}

// The cut, the verdict and the race of a row whose tokens have their places, as a word for the
// walk. By a warp.
template <bool kByPosition, class Row>
__device__ __forceinline__ unsigned long long judge_ranked(const ChainRequest& r, int i,
                                                           const FilterParams& filters,
                                                           const RankedShared<Row>& s,
                                                           const SlotAhead& slot,
                                                           const BlockNoise& noise) {
  constexpr int kHeld = kMostRanked / kWarpSize;
  const int lane = threadIdx.x % kWarpSize, count = static_cast<int>(s.count);
  RankedToken token[kHeld];
  RankedPart before[kHeld];
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    token[j] = {~uint64_t{0}, 0};
    before[j] = {0, 0xffff0001u};  // not the first, and never among the top-k
    const int n = j * kWarpSize + lane;
    if (j * kWarpSize >= count || n >= count) continue;
    token[j] = s.token[n];
    before[j] = {0, 0};
#pragma unroll
    for (int part = 0; part < kPlaceParts; ++part) {
      before[j].mass += s.part[part][n].mass;
      before[j].before += s.part[part][n].before;
    }
  }
  if (r.greedy()) {
    uint32_t first = 0;
#pragma unroll
    for (int j = 0; j < kHeld; ++j)
      if (before[j].before == 0) first = token[j].id() + 1;
    const int32_t argmax = static_cast<int32_t>(__reduce_max_sync(kFullMask, first)) - 1;
    const Slot verdict = slot_before_coin(r, argmax, slot.x, slot.q);
    return row_word(verdict.outcome != Outcome::kAccept, argmax, verdict.status | slot.status);
  }
  const RowLaw law(half_logit(s.top), 1, law_scale(r.temperature));
  const float lowest = filters.lowest_exponent(law);
  uint32_t stays = 0;  // first of top-k and min-p
  uint64_t base = 0;   // what top_p is a share of
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    if (before[j].before >> 16 >= filters.top_k) continue;
    const bool heavy = !filters.by_weight() || law.exponent(token[j].logit()) >= lowest;
    if (heavy) stays |= 1u << j;
    if (heavy || filters.order != FilterOrder::kVllm)
      base = max(base, before[j].mass + token[j].mass);
  }
  uint32_t last = 0;  // place + 1 of the last token that is kept, and whose it is
  const uint64_t target =
      filters.by_mass() ? nucleus_cut(greatest_of_warp(base), filters.top_p) : ~uint64_t{0};
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const uint32_t place = before[j].before & 0xffffu;
    if (place != 0 && before[j].mass >= target) stays &= ~(1u << j);
    if (stays >> j & 1) last = max(last, (place + 1) << 16 | (j * kWarpSize + lane));
  }
  const uint32_t cut = __reduce_max_sync(kFullMask, last) & 0xffffu;
  const RankedToken at_cut = s.token[cut];
  uint64_t mass = at_cut.mass;
#pragma unroll
  for (int part = 0; part < kPlaceParts; ++part) mass += s.part[part][cut].mass;
  const RowFilter filter{at_cut.logit(), static_cast<int32_t>(at_cut.id()), mass};
  Slot verdict = judge_cut(r, slot, law, filter);
  const bool replaces = verdict.outcome == Outcome::kResidual;
  if (verdict.outcome == Outcome::kAccept) return row_word(false, -1, verdict.status);
  if (replaces && !verdict.one_hot && r.q == DraftLaw::kScalar)
    return row_word(true, -1, verdict.status | kNeedsResidual);
  // as DrawWeights: p less q where q has a law, otherwise weights without the draft
  const bool subtracts = replaces && !verdict.one_hot, without = replaces && verdict.one_hot;
  const float inverse = div_rn(kFixedOne, static_cast<float>(mass));
  unsigned long long key = kNoWinner;
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    if ((stays >> j & 1) == 0 || (without && token[j].id() == slot.x)) continue;
    const int n = j * kWarpSize + lane;
    float weight = s.weight[n];
    if (subtracts) weight = add_rn(mul_rn(weight, inverse), s.minus[n]);
    if (!(weight > 0.0f)) continue;
    const uint32_t order = __float_as_uint(div_rn(s.time[n], weight));
    key = min(key, static_cast<unsigned long long>(order) << 32 | token[j].id());
  }
  key = least_of_warp(key);
  if (replaces && key == kNoWinner) {  // nothing was left to replace the draft
    verdict.status |= kZeroResidual;
    const RaceNoise race{noise, kBonusDraw, i};
#pragma unroll 1
    for (int n = lane; n < count; n += kWarpSize) {
      const RankedToken other = s.token[n];
      if (!filter.keeps(other.logit(), other.id())) continue;
      const uint64_t mine =
          race_key(law.weight(other.logit()), noise_of(race, other.id()), other.id());
      key = min(key, static_cast<unsigned long long>(mine));
    }
    key = least_of_warp(key);
  }
  const int32_t winner = key == kNoWinner ? -1 : static_cast<int32_t>(key & 0xffffffffu);
  if (kByPosition && winner >= 0 && winner == slot.x) return row_word(false, -1, verdict.status);
  return row_word(true, winner, verdict.status);
}

// Row i of request b; `end` falls to 0 where a ragged batch has none.
__device__ __forceinline__ const bf16* row_of_few(const VerifyChainParams& p, int64_t b, int i,
                                                  int& end) {
  const bf16* row = static_cast<const bf16*>(p.target_logits);
  if (p.cu_rows == nullptr) return row + (b * p.target_batch_stride + i * p.target_row_stride);
  const int64_t at = static_cast<int64_t>(p.cu_rows[b]) + i;
  if (at < 0 || at >= p.cu_rows[b + 1] || at >= p.total_rows) end = 0;
  return row + at * p.target_row_stride;
}

// By a warp, ahead of what has to be known before it is read.
__device__ __forceinline__ void ask_for_pool(const VerifyChainParams& p, int64_t b, int i) {
  const int lane = threadIdx.x % kWarpSize;
  if (i >= p.drafts || p.draft_ids == nullptr || lane * 32 >= p.pool) return;
  prefetch_l2(p.draft_ids + b * p.ids_batch_stride + i * p.ids_row_stride + lane * 32);
  prefetch_l2(static_cast<const char*>(p.draft_logits) +
              (b * p.draft_batch_stride + i * p.draft_row_stride) *
                  (p.draft_dtype == DType::kF32 ? 4 : 2) +
              lane * 64);
}

}  // namespace domino
