// How verify_row_kernel hands its verdicts to verify_row_draw_kernel: as words, four a row, in
// front of the workspace, that say by themselves that they are there (they are never 0), so that
// nobody waits for what a fence or the end of a launch would. Where a request's blocks have read
// them one leaves them at 0 for the next call. Of requests of at most 32 rows.
#pragma once

#include "verify/judged_rows.cuh"
#include "verify/verify_greedy.cuh"

namespace domino {

constexpr int kMostDrawBlocks = 16;        // of a request
constexpr unsigned long long kNoBest = 1;  // in the word of a block that has none

// A mass of more tokens than half of kMaxVocab may want 64 bits.
__host__ __device__ inline bool hands_words(const VerifyChainParams& p) {
  return p.vocab <= kMaxVocab / 2 && p.rule != VerifyRule::kMatch &&
         p.rule != VerifyRule::kGumbel && p.rule != VerifyRule::kBlock && p.drafts < kWarpSize &&
         p.batch * (p.drafts + 1) * kVerdictWords + p.batch * kMostDrawBlocks <= kGreedyWords;
}
// Of the blocks that race for a request: behind all verdicts.
__device__ __forceinline__ unsigned long long* race_words(const VerifyChainParams& p, int64_t b) {
  return static_cast<unsigned long long*>(p.workspace) + p.batch * (p.drafts + 1) * kVerdictWords +
         b * kMostDrawBlocks;
}
__device__ __forceinline__ unsigned long long* verdict_words(const VerifyChainParams& p, int64_t b,
                                                             int i) {
  return static_cast<unsigned long long*>(p.workspace) + (b * (p.drafts + 1) + i) * kVerdictWords;
}

// Word n of a verdict without a winner, whose logits are bf16. Where nothing is filtered, the mass
// that is kept is the row's. race_mass: with a pool, where the draft is rejected, of what q leaves
__device__ __forceinline__ unsigned long long verdict_word(const SlotVerdict& v, int n) {
  const bool one_hot = (v.status & kTakenAsOneHot) != 0;
  if (n == 0) {
    const uint32_t ties = v.filter.cut_id < 0 ? static_cast<uint32_t>(-v.filter.cut_id) : 0u;
    return kThere | static_cast<unsigned long long>(ties) << 32 |
           (__float_as_uint(v.filter.cut_logit) & 0xffff0000u) |
           static_cast<uint32_t>(v.outcome) << 12 | (one_hot ? 0x100u : 0u) | (v.status & 0xffu);
  }
  if (n == 1)
    return kThere | (v.outcome == Outcome::kArgmax ? static_cast<uint32_t>(v.argmax)
                     : v.filter.mass != 0          ? v.filter.mass
                                                   : v.sum);
  const bool has_pool = v.draft_sum != 0 && !one_hot;
  if (n == 2) return kThere | (has_pool ? v.draft_sum : __float_as_uint(v.race_mass));
  const uint32_t rest = has_pool ? __float_as_uint(v.race_mass) >> 16 : 0;
  return kThere | static_cast<unsigned long long>(rest) << 48 |
         static_cast<unsigned long long>(__float_as_uint(v.top) >> 16) << 32 |
         __float_as_uint(v.draft_top);
}
__device__ __forceinline__ Outcome outcome_of(unsigned long long first) {
  return static_cast<Outcome>(static_cast<uint32_t>(first) >> 12 & 0xfu);
}
__device__ __forceinline__ SlotVerdict
read_verdict(const unsigned long long (&words)[kVerdictWords]) {
  const uint32_t low = static_cast<uint32_t>(words[0]);
  const int32_t ties = static_cast<int32_t>(words[0] >> 32 & 0x7fffffffu);
  const uint64_t mass = words[1] & ~kThere;
  SlotVerdict v;
  v.outcome = outcome_of(words[0]);
  v.status = (low & 0xffu) | (low & 0x100u ? kTakenAsOneHot : 0u);
  v.logprob = 0.0f;
  v.winner = -1;
  v.filter = {__uint_as_float(low & 0xffff0000u), ties == 0 ? INT32_MAX : -ties, mass};
  v.sum = mass;
  v.top = __uint_as_float(static_cast<uint32_t>(words[3] >> 32) << 16);
  const uint32_t rest = static_cast<uint32_t>(words[3] >> 48) & 0x7fffu;
  v.argmax = static_cast<int32_t>(mass);
  v.draft_sum = words[2] & ~kThere;
  v.draft_top = __uint_as_float(static_cast<uint32_t>(words[3]));
  v.race_mass = __uint_as_float(rest != 0 ? rest << 16 : static_cast<uint32_t>(words[2]));
  return v;
}

// By a warp: the verdict on row `lane` of a request, where it has one. kAll: of all rows; otherwise
// at least of those up to the first that does not accept, and of all where that is open. Rows
// cannot be kept from leaving theirs: this launch starts when all blocks of that one run.
template <bool kAll>
__device__ __forceinline__ SlotVerdict wait_for_verdict(const unsigned long long* words, bool has) {
  ulonglong2 first{0, 0}, second{0, 0};
  const auto look = [&] {
    first = load_pair_if(has, words);
    second = load_pair_if(has, words + 2);
    const unsigned there = __ballot_sync(
        kFullMask, !has || (first.x != 0 && first.y != 0 && second.x != 0 && second.y != 0));
    if (kAll || there == kFullMask) return there == kFullMask;
    const Outcome outcome = outcome_of(first.x);
    const unsigned stops = __ballot_sync(kFullMask, first.x != 0 && outcome != Outcome::kAccept);
    const unsigned open = __ballot_sync(kFullMask, outcome == Outcome::kUndecided);
    const unsigned stop = stops & -stops, up_to = stop | (stop - 1);
    return stop != 0 && (there & up_to) == up_to && (open & stop) == 0;
  };
  constexpr int kManyPolls = 1 << 12;
  int polls = 0;
  while (!look()) {
    if (++polls == kManyPolls) previous_launch_done();
    if (polls > kManyPolls) __trap();
    // blocks that still count share their processors with this one
    __nanosleep(__any_sync(kFullMask, first.x != 0) ? 40 : 200);
  }
  const unsigned long long all[kVerdictWords] = {first.x, first.y, second.x, second.y};
  return read_verdict(all);
}

}  // namespace domino
