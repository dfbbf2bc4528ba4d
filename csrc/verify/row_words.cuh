// The walk of a request whose rows settle their own verdicts: each leaves a word that says by
// itself that it is there (it is never 0), in front of the workspace. A warp of the request's last
// row waits for all of them, and leaves them at 0 for the next call. Rows start in the order of
// their numbers, so it only waits for rows that run. CUDA does not promise that order: where words
// do not come, the launch fails instead of hanging, as in verify_greedy.cuh.
#pragma once

#include "verify/verify_greedy.cuh"

namespace domino {

constexpr uint32_t kWordThere = 0x100, kWordStops = 0x200;  // above the status bits

// stops: the draft is not accepted, and `token` follows (-1: none).
__device__ __forceinline__ unsigned long long row_word(bool stops, int64_t token, uint32_t status) {
  return static_cast<unsigned long long>(static_cast<uint32_t>(token + 1)) << 32 |
         (stops ? kWordStops : 0u) | kWordThere | (status & 0xffu);
}

// Writes what comes of a request whose first row that stops is `stop`, by a warp: lane n has the
// draft `x` of slot n and the low half of row n's word. token: behind the accepted drafts, or -1.
__device__ __forceinline__ void write_walk(const ChainRequest& r, int stop, int64_t token,
                                           int64_t x, uint32_t low) {
  const int lane = threadIdx.x % kWarpSize;
  const uint32_t bits = r.faults | __reduce_or_sync(kFullMask, lane <= stop ? low & 0xffu : 0u);
  if (lane <= r.p.drafts)
    r.p.tokens[r.b * (r.p.drafts + 1) + lane] = lane < stop ? x : lane == stop ? token : -1;
  if (lane == stop) emit_counts(r, stop, token, bits);
}

// By a warp. words: of the request's rows, at most 32
__device__ __forceinline__ void walk_words(const ChainRequest& r, unsigned long long* words) {
  const int lane = threadIdx.x % kWarpSize;
  const bool has = lane < r.rows;
  const int64_t x = lane < r.rows - 1 ? r.draft_token(lane) : -1;
  unsigned long long word = 0;
  int polls = 0;
  do {
    if (has)
      asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];"
                   : "=l"(word)
                   : "l"(words + lane)
                   : "memory");
  } while (!__all_sync(kFullMask, !has || word != 0) && ++polls < kMostPolls);
  if (polls == kMostPolls) __trap();
  if (has) words[lane] = 0;
  const uint32_t low = static_cast<uint32_t>(word);
  const int stop = __ffs(__ballot_sync(kFullMask, (low & kWordStops) != 0)) - 1;
  write_walk(r, stop, static_cast<int64_t>(word >> 32) - 1, x, low);
}

}  // namespace domino
