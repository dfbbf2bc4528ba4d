// How all blocks of a request, a team, race together for the token behind its walk
// (verify_nucleus.cuh, verify_plain.cuh): what a row's verdict tells them, who waits for whom, and
// a block's part of it.
//
// The warps that judge leave the verdicts of the team's rows as words that say by themselves that
// they are there (they are never 0). A warp of each block waits for those up to the first row that
// stops; then each block races over a part of that row and leaves its best as a word. A warp of the
// team's last row collects these, and leaves all words at 0 for the next call.
//
// Rows start in the order of their numbers (row_words.cuh), so the last row may wait for all
// others. These only wait a while for later ones, which may have no processor yet: a block that has
// waited in vain says so, and the last row's cluster settles the row by itself. So it does where
// the words leave a token open.
#pragma once

#include "verify/draft_row.cuh"
#include "verify/row_blocks.cuh"

namespace domino {

constexpr int kPatience = 128;  // polls: more than 50 us

// Row words of four: as row_word(), but where the stop's token is to be raced for the upper half of
// the first is the row's greatest logit and the cut's, and its lower half says how. Then one over
// the mass that is kept, one over that of q, and the greatest logit of q: divisions that the warp
// that judges has behind it.
constexpr uint32_t kWordRaces = 0x400, kWordOpen = 0x800;         // open: to be settled by value
constexpr uint32_t kWordReplaces = 0x1000, kWordOneHot = 0x2000;  // a residual; of a one-hot draft
constexpr uint32_t kWordTies = 0x4000;  // of the tokens that tie with the cut some are not kept

// Words of the blocks: the complement of a key, or that there is none, or that it was not looked
// for. A key is the bits of a time, an id, and whether the token ties with the cut.
constexpr unsigned long long kNoKey = 1, kNotRaced = ~0ull;

struct RaceTeam {
  int rows, part, parts;
  int share;                     // of a part, in quads of tokens
  unsigned long long* verdicts;  // [rows, kVerdictWords]
  unsigned long long* keys;      // [parts], and one more if that is odd: they are read in pairs

  static __device__ __forceinline__ RaceTeam of(const ChainRequest& r, int i,
                                                const RowCluster& cluster) {
    RaceTeam team;
    team.rows = r.rows;
    team.part = i * cluster.size + cluster.rank;
    team.parts = team.rows * cluster.size;
    team.share = ceil_div(static_cast<int>(r.p.vocab) / 4, team.parts);
    const int64_t row = r.b * (r.p.drafts + 1);
    unsigned long long* words = static_cast<unsigned long long*>(r.p.workspace);
    team.verdicts = words + row * kVerdictWords;
    team.keys = words + r.p.batch * (r.p.drafts + 1) * kVerdictWords +
                r.b * round_up<int64_t>((r.p.drafts + 1) * cluster.size, 2);
    return team;
  }
  __device__ __forceinline__ void leave_key(unsigned long long word) const {
    store_word(keys + part, word);
    if (parts % 2 != 0 && part == parts - 1) store_word(keys + parts, kNoKey);
  }
  // Quads of this block's part.
  __device__ __forceinline__ int count(int vocab) const {
    return max(0, min(share, vocab / 4 - part * share));
  }
};

__device__ __forceinline__ float one_over(uint64_t mass) {
  return div_rn(kFixedOne, static_cast<float>(mass));
}

// By a warp.
__device__ __forceinline__ void store_verdict(unsigned long long* words, unsigned long long first,
                                              float inverse_mass, float draft_inverse,
                                              float draft_top) {
  const int lane = threadIdx.x % kWarpSize;
  const float value = lane == 1 ? inverse_mass : lane == 2 ? draft_inverse : draft_top;
  if (lane < kVerdictWords)
    store_word(words + lane, lane == 0 ? first : kThere | __float_as_uint(value));
}

// The words of a team's rows: of lane n half n % 2 of those of row n / 2.
struct TeamWords {
  ulonglong2 found;

  // Polls until the words up to the first row that stops are there, or with kAll all; the row,
  // or -1 where they do not come.
  template <bool kAll>
  __device__ __forceinline__ int wait(const RaceTeam& team, int polls) {
    const int lane = threadIdx.x % kWarpSize;
    const bool has = lane < 2 * team.rows;
#pragma unroll 1
    for (; polls > 0; --polls) {
      found = load_pair_if(has, team.verdicts + lane * 2);
      const unsigned there = __ballot_sync(kFullMask, !has || (found.x != 0 && found.y != 0));
      const unsigned stops = __ballot_sync(
          kFullMask, lane % 2 == 0 && (static_cast<uint32_t>(found.x) & kWordStops) != 0);
      const int last = __ffs(stops);  // lane of the stop's second half
      const unsigned needed = kAll ? kFullMask : (2u << last) - 1;
      if (stops != 0 && (there & needed) == needed) return last / 2;
    }
    return -1;
  }
  __device__ __forceinline__ unsigned long long word(int row, int n) const {
    return __shfl_sync(kFullMask, n % 2 == 0 ? found.x : found.y, 2 * row + n / 2);
  }
};

// What the warps of a block that race are told.
struct EndOfWalk {
  int row;       // in which the walk ends; -1: not known
  uint32_t how;  // lower half of its first word
  uint32_t logits;
  int32_t draft;  // its token
  float inverse_mass, draft_inverse, draft_top;

  __device__ __forceinline__ bool races() const { return row >= 0 && (how & kWordRaces) != 0; }
  // Is q subtracted?
  __device__ __forceinline__ bool by_law() const {
    return (how & kWordReplaces) != 0 && (how & kWordOneHot) == 0;
  }
  // That of a pool?
  __device__ __forceinline__ bool takes_pool(const ChainRequest& r) const {
    return races() && by_law() && r.q == DraftLaw::kPool;
  }
  __device__ __forceinline__ RowLaw draft_law(float scale) const {
    RowLaw law(draft_top, 1, scale);
    law.inverse_sum = draft_inverse;
    return law;
  }
};

constexpr int kMostPooled = 256;

// The tokens of a block's part of the row that are in the slot's pool, in the order of the pool,
// and what q is of them.
struct PooledTokens {
  uint64_t here;  // a barrier: they are listed
  int count;
  int32_t token[kMostPooled];
  float q[kMostPooled];

  // Are there more than can be listed?
  __device__ __forceinline__ bool crowded() {
    wait_for(&here);
    return count > kMostPooled;
  }

  // Lists those among `tokens` tokens from `from` on. By a warp.
  __device__ __forceinline__ void list(const ChainRequest& r, int row, const RowLaw& draft,
                                       int from, int tokens) {
    constexpr int kHeld = PoolAhead::kCount / kWarpSize;  // of a lane on their way at once
    const int lane = threadIdx.x % kWarpSize, pool = static_cast<int>(r.p.pool);
    const int32_t* ids = r.draft_ids(row);
    const LogitRow logits = r.draft_row(row);
    int listed = 0;
#pragma unroll 1
    for (int base = lane; base - lane < pool; base += kHeld * kWarpSize) {
      int32_t id[kHeld];
      float logit[kHeld];
#pragma unroll
      for (int n = 0; n < kHeld; ++n) {
        const int m = base + n * kWarpSize;
        id[n] = m < pool ? ids[m] : -1;
        logit[n] = m < pool ? logits.at(m) : 0.0f;
      }
#pragma unroll 1
      for (int m = base - lane; m < min(pool, base - lane + kHeld * kWarpSize); m += kWarpSize) {
        const bool is_here = static_cast<uint32_t>(id[0] - from) < static_cast<uint32_t>(tokens);
        const unsigned hits = __ballot_sync(kFullMask, is_here);
        const int at = listed + __popc(hits & ((1u << lane) - 1));
        if (is_here && at < kMostPooled) {
          token[at] = id[0];
          q[at] = draft.probability(logit[0]);
        }
        listed += __popc(hits);
#pragma unroll
        for (int n = 1; n < kHeld; ++n) {
          id[n - 1] = id[n];
          logit[n - 1] = logit[n];
        }
      }
    }
    if (lane == 0) count = listed;
    __syncwarp();
    if (lane == 0) expect_bytes(shared_address(&here), 0);
  }

  // Which of this lane's four are in the pool, and what q is of them where they come first. By a
  // whole warp, whose tokens follow one another.
  __device__ __forceinline__ void find(int own, uint32_t& pooled, float (&minus)[4]) {
    wait_for(&here);
    const int lane = threadIdx.x % kWarpSize, from = own - 4 * lane;
    const int all = min(count, kMostPooled);
#pragma unroll 1
    for (int n = lane; n - lane < all; n += kWarpSize) {
      const int32_t id = n < all ? token[n] : -1;
      const bool is_here = static_cast<uint32_t>(id - from) < 4 * kWarpSize;
      unsigned hits = __ballot_sync(kFullMask, is_here);
      if (hits == 0) continue;
      const float q_of_id = is_here ? q[n] : 0.0f;
#pragma unroll 1
      for (; hits != 0; hits &= hits - 1) {
        const int hit = __ffs(hits) - 1, at = __shfl_sync(kFullMask, id, hit) - from;
        const float less = __shfl_sync(kFullMask, q_of_id, hit);
        if (at / 4 == lane && (pooled >> at % 4 & 1u) == 0) {
          pooled |= 1u << at % 4;
#pragma unroll
          for (int j = 0; j < 4; ++j) minus[j] = at % 4 == j ? less : minus[j];
        }
        __syncwarp();
      }
    }
  }
};

// The race among four tokens a lane, of a row whose cut is known.
class TeamRace {
 public:
  // scale, draft_scale: of its laws; noise: of its race; pooled: where q is that of a pool
  __device__ __forceinline__ TeamRace(const EndOfWalk& end, float scale, float draft_scale,
                                      const RaceNoise& noise, PooledTokens* pooled)
      : law_(high_half(end.logits, bf16{}), 1, scale),
        cut_(low_half(end.logits, bf16{})),
        ties_((end.how & kWordTies) != 0),
        by_law_(end.by_law()),
        inverse_mass_(end.inverse_mass),
        draft_(end.draft_law(draft_scale)),
        noise_(noise),
        pooled_(pooled) {
    without_ = (end.how & kWordReplaces) != 0 && !by_law_ ? end.draft : -1;
  }

  // Of the tokens from `token` on, this lane's four. By a whole warp, whose tokens follow one
  // another. draft: with rows of q, the same of q
  template <bool kDense>
  __device__ __forceinline__ void meet(int token, uint2 words, uint2 draft) {
    // ahead of the logits, which are on their way
    const NoiseWords noise = noise_.words(static_cast<uint32_t>(token / 4));
    float logit[4] = {low_half(words.x, bf16{}), high_half(words.x, bf16{}),
                      low_half(words.y, bf16{}), high_half(words.y, bf16{})};
    uint32_t chance = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (logit[j] >= cut_ && law_.exponent(logit[j]) >= kMinExponent && token + j != without_)
        chance |= 1u << j;
    if (!__any_sync(kFullMask, chance != 0)) return;
    uint32_t pooled = 0;
    float minus[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if constexpr (kDense) {
      const float of_q[4] = {low_half(draft.x, bf16{}), high_half(draft.x, bf16{}),
                             low_half(draft.y, bf16{}), high_half(draft.y, bf16{})};
      if (by_law_) {
        pooled = 15;
#pragma unroll
        for (int j = 0; j < 4; ++j) minus[j] = draft_.probability(of_q[j]);
      }
    } else {
      if (by_law_) pooled_->find(token, pooled, minus);
    }
    // E lies between v and v / (1 - v)
    float early[4];
    uint32_t late = __float_as_uint(INFINITY);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float v = (static_cast<float>(noise.word[j]) + 0.5f) * 0x1p-32f;
      float time = v * exp2_about(-law_.exponent(logit[j]));
      if (kDense && by_law_) {  // by the weight itself
        const float left = mul_rn(law_.weight(logit[j]), inverse_mass_) - minus[j];
        if (!(left > 0.0f)) chance &= ~(1u << j);
        time = __fdividef(v, left);
      }
      early[j] = time * (1.0f - 0x1p-10f);
      if ((kDense ? chance : chance & ~pooled) >> j & 1u)
        late = min(late, __float_as_uint(__fdividef(time, 1.0f - v) * (1.0f + 0x1p-10f)));
    }
    bound_ = min(bound_, __reduce_min_sync(kFullMask, late));
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (!(early[j] <= __uint_as_float(bound_))) chance &= ~(1u << j);
#pragma unroll 1
    for (; chance != 0; chance &= chance - 1) {
      const int which = __ffs(chance) - 1;
      float own = logit[0], less = minus[0];
      uint32_t word = noise.word[0];
#pragma unroll
      for (int j = 1; j < 4; ++j) {
        own = which == j ? logit[j] : own;
        less = which == j ? minus[j] : less;
        word = which == j ? noise.word[j] : word;
      }
      float weight = law_.weight(own);
      if (by_law_) weight = mul_rn(weight, inverse_mass_);
      if (pooled >> which & 1u) weight = add_rn(weight, -less);
      const uint32_t order = race_order(weight, word);
      if (order == kNoOrder) continue;
      const bool tied = ties_ && own == cut_;
      const uint32_t low = static_cast<uint32_t>(token + which) << 1 | (tied ? 1u : 0u);
      key_ = min(key_, static_cast<unsigned long long>(order) << 32 | low);
    }
  }

  // Of the warp.
  __device__ __forceinline__ unsigned long long least() const { return least_of_warp(key_); }

 private:
  RowLaw law_;
  float cut_;
  bool ties_, by_law_;
  float inverse_mass_;
  RowLaw draft_;
  RaceNoise noise_;
  int32_t without_;
  PooledTokens* pooled_;
  uint32_t bound_ = 0x7f800000u;  // +inf
  unsigned long long key_ = kNoWinner;
};

// What a block of a team keeps in shared memory.
struct TeamShared {
  uint64_t go_here, go;  // a barrier, and what it is for
  EndOfWalk end;
  PooledTokens pooled;
  unsigned long long keys[kJudge];  // of its warps

  // By one thread, before the first barrier of the cluster.
  __device__ __forceinline__ void open() {
    make_barrier(shared_address(&go_here));
    make_barrier(shared_address(&pooled.here));
    expect_bytes(shared_address(&go_here), sizeof(go));
  }
};

// The first word of a row that is to be raced for where it stops. cut: its logit, -inf: all are
// kept; ties: of those that tie with it only some are; open: to be settled by value
__device__ __forceinline__ unsigned long long verdict_word(const ChainRequest& r,
                                                           const Slot& verdict, float top,
                                                           float cut, bool ties, bool open) {
  const bool replaces = verdict.outcome == Outcome::kResidual;
  const bool needs = replaces && !verdict.one_hot && r.q == DraftLaw::kScalar;
  const bool stops = verdict.outcome != Outcome::kAccept;
  unsigned long long word =
      row_word(open || stops, -1, verdict.status | (needs ? kNeedsResidual : 0u));
  if (open) return word | kWordOpen;
  if (!stops || needs || verdict.outcome == Outcome::kFail) return word;
  const uint32_t logits = __float_as_uint(top) | __float_as_uint(cut) >> 16;
  return word | static_cast<unsigned long long>(logits) << 32 | kWordRaces |
         (replaces ? kWordReplaces : 0u) | (verdict.one_hot ? kWordOneHot : 0u) |
         (ties ? kWordTies : 0u);
}

}  // namespace domino
