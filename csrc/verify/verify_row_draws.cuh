// Second launch of verify_chain behind verify_row.cuh where that hands words (verdict_words.cuh):
// some blocks own a request. Each takes the first row that does not accept its draft as soon as the
// words up to that row are there, and races for its token over a part of the row: a thread asks for
// its tokens, works out their words of noise meanwhile, and looks at what a token weighs only where
// its word is within reach of the greatest weight next to it. A block leaves its best as a word;
// the last one, which starts behind the others, collects them, and settles alone what is left open.
// Not by clusters: of those with 16 blocks an H200 has room for seven beside the rows. Bytes: 32 a
// row of the request, and one row; bound by latency.
#pragma once

#include <new>

#include "verify/draw_token.cuh"
#include "verify/row_words.cuh"
#include "verify/verdict_words.cuh"

namespace domino {

// 80 registers a thread: beside a block of verify_row_kernel
constexpr int kRowDrawThreads = 512, kRowDrawWarps = kRowDrawThreads / kWarpSize;
constexpr int kRowQuads = 5;  // of four tokens, of a thread at once: a row's of 16 blocks

// The least E / weight of a law is beyond this over its mass once in 3,000 races, which
// draw_token() then runs again.
constexpr float kVerySoonTime = 8.0f;

// The tokens of a pool by the lowest bits of their ids, in shared memory.
struct PoolTable {
  static constexpr uint32_t kPlaces = 1024, kNone = ~0u;
  static constexpr int kHeld = 512;

  uint32_t first[kPlaces];  // of the pool's tokens with these bits
  int32_t id[kHeld];
  float q[kHeld];

  // By all threads.
  __device__ __forceinline__ void clear() {
    for (uint32_t n = threadIdx.x; n < kPlaces; n += kRowDrawThreads) first[n] = kNone;
  }
  // Brings the request's pools into L1, which rows that are read pass by: beside those a trip to L2
  // takes a microsecond, and fill() makes two. Leaves something in id. By all threads.
  __device__ __forceinline__ void fetch(const ChainRequest& r) {
    constexpr int kStep = 8;  // tokens: a sector of their ids
    const int steps = ceil_div(min(static_cast<int>(r.p.pool), kHeld), kStep);
    for (int n = threadIdx.x; n < (r.rows - 1) * steps; n += kRowDrawThreads) {
      const int i = n / steps, m = n % steps * kStep;
      const float logit = r.draft_row(i).at(m);
      static_cast<volatile int32_t*>(id)[threadIdx.x] = r.draft_ids(i)[m] ^ __float_as_int(logit);
    }
  }
  // By a warp.
  __device__ __forceinline__ void fill(const ChainRequest& r, int i, const RowLaw& draft,
                                       uint64_t* here) {
    constexpr int kAhead = 2;
    const int pool = static_cast<int>(r.p.pool), lane = threadIdx.x % kWarpSize;
    const int32_t* ids = r.draft_ids(i);
    const LogitRow logits = r.draft_row(i);
#pragma unroll 1
    for (int base = lane; base - lane < pool; base += kAhead * kWarpSize) {
      int32_t token[kAhead];
      float logit[kAhead];
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        const int m = base + n * kWarpSize;
        token[n] = m < pool ? ids[m] : -1;
        logit[n] = m < pool ? logits.at(m) : 0.0f;
      }
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        const int m = base + n * kWarpSize;
        if (m < kHeld) {
          id[m] = token[n];
          q[m] = draft.probability(logit[n]);
        }
        if (token[n] >= 0)
          atomicMin(&first[static_cast<uint32_t>(token[n]) % kPlaces], static_cast<uint32_t>(m));
      }
    }
    __syncwarp();
    if (lane == 0) expect_bytes(shared_address(here), 0);
  }
  // What q is of a token.
  __device__ __forceinline__ float of(const ChainRequest& r, int i, const RowLaw& draft,
                                      int32_t token) const {
    const uint32_t place = first[static_cast<uint32_t>(token) % kPlaces];
    if (place == kNone) return 0.0f;
    const int at = static_cast<int>(place);
    if (at < kHeld && id[at] == token) return q[at];
    const int32_t* ids = r.draft_ids(i);
#pragma unroll 1
    for (int m = at; m < r.p.pool; ++m)
      if (ids[m] == token) return draft.probability(r.draft_row(i).at(m));
    return 0.0f;
  }
};

// What a block weighs the tokens of its part by.
struct PartLaws {
  RowLaw law, draft;
  float inverse;       // 1 over the mass that is kept
  float reach_of_one;  // words, as early(), that a weight of 1 reaches
};

struct RowDrawShared {
  SlotVerdict slots[kWarpSize];
  int32_t draft[kWarpSize];
  alignas(PartLaws) unsigned char laws[sizeof(PartLaws)];
  unsigned long long of_warps[kRowDrawWarps];
  uint64_t pool_here;  // a barrier
  PoolTable pool;
  int64_t last;
};

// The least key of a block's part of the row that a walk stops at, for the first warp: a time, an
// id, and whether the token ties with the cut. from, last: quads of this thread, in steps of the
// block; bound: of the time. By all threads.
__device__ __forceinline__ unsigned long long race_part(RowDrawShared& s, const ChainRequest& r,
                                                        int i, const SlotVerdict& slot, int from,
                                                        int last, float scale, float draft_scale,
                                                        float bound, const BlockNoise& noise) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const auto* tokens = reinterpret_cast<const uint2*>(r.target_row(i).data);
  uint2 ahead[kRowQuads];
  const auto load = [&] {
#pragma unroll
    for (int n = 0; n < kRowQuads; ++n) {
      ahead[n] = {0xff80ff80u, 0xff80ff80u};  // -inf
      if (from + n * kRowDrawThreads < last) ahead[n] = __ldg(tokens + from + n * kRowDrawThreads);
    }
  };
  load();  // ahead of what is to be known about the row
  const bool replaces = slot.outcome == Outcome::kResidual;
  const bool one_hot = (slot.status & kTakenAsOneHot) != 0;
  const bool by_pool = replaces && !one_hot && r.q == DraftLaw::kPool;
  const RaceNoise race{noise, replaces ? kResidualDraw : kBonusDraw, i};
  PartLaws& laws = *reinterpret_cast<PartLaws*>(s.laws);
  if (warp == 1) {  // not by all of them: these are a third of what is done behind the verdicts
    const RowLaw law(slot.top, 1, scale), draft(slot.draft_top, slot.draft_sum, draft_scale);
    const float inverse = div_rn(kFixedOne, static_cast<float>(slot.filter.mass));
    if (lane == 0)
      new (&laws) PartLaws{law, draft, inverse, bound * (by_pool ? inverse : 1.0f) * 1.002f};
  }
  if (by_pool && warp == kRowDrawWarps - 1)
    s.pool.fill(r, i, RowLaw(slot.draft_top, slot.draft_sum, draft_scale), &s.pool_here);
  // at most the word's E
  const auto early = [](uint32_t word) { return __uint_as_float(0x3f800000u | word >> 9) - 1.0f; };
  unsigned long long key = kNoWinner;
#pragma unroll 1
  for (bool first = true;; first = false) {
    // of four words only the least is kept: few quads are looked at closer
    uint32_t least[kRowQuads];
#pragma unroll 1
    for (int n = 0; n < kRowQuads; ++n) {
#pragma unroll
      for (int k = 1; k < kRowQuads; ++k) least[k - 1] = least[k];
      const NoiseWords random = race.words(static_cast<uint32_t>(from + n * kRowDrawThreads));
      least[kRowQuads - 1] =
          min(min(random.word[0], random.word[1]), min(random.word[2], random.word[3]));
    }
    if (first) __syncthreads();  // the laws are there
    const RowLaw law = laws.law;
    const float reach_of_one = laws.reach_of_one, cut = slot.filter.cut_logit;
    const int32_t without = replaces && one_hot ? s.draft[i] : -1;
#pragma unroll 1
    for (int n = 0; n < kRowQuads; ++n) {
      const uint2 four = ahead[0];
      const float soonest = early(least[0]);
#pragma unroll
      for (int k = 1; k < kRowQuads; ++k) {
        ahead[k - 1] = ahead[k];
        least[k - 1] = least[k];
      }
      const int token = (from + n * kRowDrawThreads) * 4;
      const uint32_t tops = max_nan(four.x, four.y, bf16{});
      const float top = fmaxf(low_half(tops, bf16{}), high_half(tops, bf16{}));
      const float reach = top >= cut ? exp2_about(law.exponent(top)) * reach_of_one : -1.0f;
      if (!(soonest <= reach)) continue;
      const NoiseWords random = race.words(static_cast<uint32_t>(token / 4));
      const float logit[4] = {low_half(four.x, bf16{}), high_half(four.x, bf16{}),
                              low_half(four.y, bf16{}), high_half(four.y, bf16{})};
      uint32_t chance = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (logit[j] >= cut && token + j != without &&
            early(random.word[j]) <= exp2_about(law.exponent(logit[j])) * reach_of_one)
          chance |= 1u << j;
#pragma unroll 1
      for (; chance != 0; chance &= chance - 1) {
        const int which = __ffs(chance) - 1;
        float own = logit[0];
        uint32_t word = random.word[0];
#pragma unroll
        for (int j = 1; j < 4; ++j) {
          own = which == j ? logit[j] : own;
          word = which == j ? random.word[j] : word;
        }
        float weight = law.weight(own);
        if (by_pool) {
          while (!phase_ended(shared_address(&s.pool_here), 0)) continue;
          weight =
              add_rn(mul_rn(weight, laws.inverse), -s.pool.of(r, i, laws.draft, token + which));
        }
        const uint32_t order = race_order(weight, word);
        if (order == kNoOrder) continue;
        const uint32_t low = static_cast<uint32_t>(token + which) << 1 |
                             (slot.filter.cut_id < 0 && own == cut ? 1u : 0u);
        const unsigned long long mine = static_cast<unsigned long long>(order) << 32 | low;
        key = mine < key ? mine : key;
      }
    }
    from += kRowQuads * kRowDrawThreads;
    if (from - static_cast<int>(threadIdx.x) >= last) break;
    load();
  }
  key = least_of_warp(key);
  if (lane == 0) s.of_warps[warp] = key;
  __syncthreads();
  if (warp == 0) key = least_of_warp(lane < kRowDrawWarps ? s.of_warps[lane] : kNoWinner);
  return key;
}

struct Drawn {
  int64_t token;  // -1: none
  uint32_t bits;
};

// By draw_token(), by a block alone, also where nothing is left to replace the draft.
static __device__ __noinline__ Drawn race_again(const VerifyChainParams& p, int64_t b, int i,
                                                Outcome outcome, const SlotVerdict& slot) {
  const RowCluster alone;
  const ChainRequest r(p, b);
  Drawn out{-1, 0};
#pragma unroll 1
  for (;;) {
    out.token =
        draw_token(alone, r, i, outcome, slot, race_noise(r, i, outcome), 1.0f, slot.race_mass);
    if (out.token >= 0 || outcome == Outcome::kDraw) return out;
    out.bits = kZeroResidual;
    outcome = Outcome::kDraw;
  }
}

// Does the draft, which ties with the row's cut, come behind those that are kept?
static __device__ __noinline__ bool is_cut(const VerifyChainParams& p, int64_t b, int i,
                                           const SlotVerdict& slot) {
  const RowCluster alone;
  const ChainRequest r(p, b);
  const RowSource<bf16> source(r.target_row(i), RowEdits{}, static_cast<int>(p.vocab));
  return count_ties(alone, source, slot.filter.cut_logit, r.draft_token(i)) > -slot.filter.cut_id;
}

// Does the race alone tell what becomes of a row that does not accept its draft?
__device__ __forceinline__ bool races(const ChainRequest& r, const SlotVerdict& slot) {
  return slot.outcome == Outcome::kDraw ||
         (slot.outcome == Outcome::kResidual &&
          (r.q != DraftLaw::kScalar || (slot.status & kTakenAsOneHot) != 0));
}

// By a warp: the word of block `lane`, waited for and then cleared; 0 where there is none.
__device__ __forceinline__ unsigned long long collect_best(unsigned long long* word, bool has) {
  unsigned long long best = 0;
  int polls = 0;
  do {
    if (has)
      asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(best) : "l"(word) : "memory");
    if (++polls > kMostPolls) __trap();
  } while (__any_sync(kFullMask, has && best == 0));
  if (has) *word = 0;
  return best;
}

// Grid: (blocks of a request, batch), no clusters.
__global__ void __maxnreg__(80)
    verify_row_draw_kernel(const __grid_constant__ VerifyChainParams p) {
  __shared__ alignas(RowDrawShared) unsigned char storage[sizeof(RowDrawShared)];
  RowDrawShared& s = *reinterpret_cast<RowDrawShared*>(storage);
  const int rank = blockIdx.x, blocks = gridDim.x;
  const int64_t b = blockIdx.y;
  const bool collects = rank == blocks - 1;
  if (threadIdx.x == 0) make_barrier(shared_address(&s.pool_here));
  s.pool.clear();
  const ChainRequest r(p, b);
  const BlockNoise noise = r.noise();
  if (r.q == DraftLaw::kPool) s.pool.fetch(r);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  int64_t x = -1;  // a lane a draft
  if (warp == 0 && lane < r.rows - 1) x = r.draft_token(lane);
  if (warp == 0) s.draft[lane] = static_cast<int32_t>(x);
  float scale = law_scale(r.temperature), draft_scale = law_scale(r.draft_temperature);
  const int quads = static_cast<int>(p.vocab) / 4, share = ceil_div(quads, blocks);
  int last_quad = min((rank + 1) * share, quads);
  int from = rank * share + static_cast<int>(threadIdx.x);  // quads of this thread
  // worked out here, while rows are read, and not where they are used
  asm volatile("" : "+f"(scale), "+f"(draft_scale), "+r"(from), "+r"(last_quad));
  unsigned long long* words = verdict_words(p, b, lane);
  const bool has = lane < r.rows;
  if (warp == 0 && r.rows > 0) {
    const SlotVerdict verdict = wait_for_verdict<false>(words, has);
    if (has) s.slots[lane] = verdict;
  }
  __syncthreads();

  // the first row from `stop` on that does not accept; the last one never does
  const auto next_stop = [&](int stop) {
    const bool stops = has && lane >= stop && s.slots[lane].outcome != Outcome::kAccept;
    return __ffs(__ballot_sync(kFullMask, stops)) - 1;
  };
  int stop = r.rows > 0 ? next_stop(0) : 0;
  const bool raced = r.rows > 0 && races(r, s.slots[stop]);
  const float mass = s.slots[stop].race_mass;
  const float bound = raced && mass > 0.0f ? kVerySoonTime / mass : INFINITY;
  unsigned long long key = kNoWinner;
  if (raced)
    key = race_part(s, r, stop, s.slots[stop], from, last_quad, scale, draft_scale, bound, noise);
  unsigned long long* keys = race_words(p, b);
  if (!collects) {
    if (threadIdx.x == 0) store_word(keys + rank, key == kNoWinner ? kNoBest : ~key);
    return previous_launch_done();
  }

  if (warp == 0) {
    const unsigned long long best = collect_best(keys + lane, lane < blocks - 1);
    if (best > kNoBest && ~best < key) key = ~best;
    key = least_of_warp(key);
    const float time = __uint_as_float(static_cast<uint32_t>(key >> 32));
    const bool open = key == kNoWinner || !(time <= bound) || (key & 1) != 0;
    if (lane == 0) s.last = open ? -1 : static_cast<int64_t>(static_cast<uint32_t>(key) >> 1);
  } else if (warp == 1 && r.rows > 0) {
    wait_for_verdict<true>(words, has);
  }
  __syncthreads();  // all blocks have read the request's words, which all are there
  int64_t last = s.last;
  uint32_t bits = r.faults;
#pragma unroll 1
  while (last < 0 && r.rows > 0) {
    const SlotVerdict& slot = s.slots[stop];
    Outcome outcome = slot.outcome;
    if (outcome == Outcome::kFail) break;
    if (outcome == Outcome::kArgmax) {
      last = slot.argmax;
      break;
    }
    if (outcome == Outcome::kUndecided) {  // the draft ties with the cut
      if (!is_cut(p, b, stop, slot)) {
        stop = next_stop(stop + 1);
        continue;
      }
      outcome = Outcome::kResidual;
    }
    if (outcome == Outcome::kResidual && r.q == DraftLaw::kScalar &&
        (slot.status & kTakenAsOneHot) == 0) {
      bits |= kNeedsResidual;
      break;
    }
    const Drawn drawn = race_again(p, b, stop, outcome, slot);
    last = drawn.token;
    bits |= drawn.bits;
    break;
  }
  if (warp == 0) {
    bits |= __reduce_or_sync(kFullMask, has && lane <= stop ? s.slots[lane].status & 0xffu : 0u);
    write_walk(r, stop, last, x, bits);
  } else if (warp == 1 && has) {
    *reinterpret_cast<ulonglong2*>(words) = ulonglong2{0, 0};
    *reinterpret_cast<ulonglong2*>(words + 2) = ulonglong2{0, 0};
  }
  previous_launch_done();
}

}  // namespace domino
