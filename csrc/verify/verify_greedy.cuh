// verify_chain where every request is greedy and nobody asks for log-probabilities: one launch.
//
// A block owns a part of a row, and each of its warps leaves the greatest logit that it has seen
// and the lowest id that has it as one word. The block of a request's last part walks: it waits for
// the request's words, which say by themselves that they are there (they are never 0), and leaves
// them at 0 for the next call. Blocks start in the order of their numbers, so it only waits for
// blocks that run. CUDA does not promise that order: where words do not come (kMostPolls), the
// launch fails (cudaErrorLaunchFailure) instead of hanging.
//
// Bytes: every row once. Bound by HBM; at small batches by what comes before the first load and
// behind the last: a trip to the L2 and back, some hundred instructions that run for the first time
// in a launch. So no loop is unrolled there, and addresses are worked out ahead.
#pragma once

#include "common/copy_async.cuh"
#include "verify/chain_judge.cuh"

namespace domino {

constexpr int kGreedyWarps = 16, kGreedyThreads = kGreedyWarps * kWarpSize;
constexpr int kGreedyBlocks = 2;     // on an SM
constexpr int kMostGreedyParts = 8;  // of a row

// Verdicts that take four words (verdict_words.cuh, team_race.cuh), and the bit by which those say
// that they are there whose value may be 0.
constexpr int kVerdictWords = 4;
constexpr unsigned long long kThere = 1ull << 63;

__device__ __forceinline__ void store_word(unsigned long long* word, unsigned long long value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
// Two words where `exists`, otherwise 0 twice. No branch, so that all loads of a lane are on their
// way at once.
__device__ __forceinline__ ulonglong2 load_pair_if(bool exists, const unsigned long long* words) {
  ulonglong2 out;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\nmov.b64 %0, 0;\nmov.b64 %1, 0;\n"
      "@p ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];\n}"
      : "=&l"(out.x), "=&l"(out.y)
      : "l"(words), "r"(static_cast<uint32_t>(exists))
      : "memory");
  return out;
}

__device__ __forceinline__ void keep_one(uint32_t& value) { asm volatile("" : "+r"(value)); }
template <class T>
__device__ __forceinline__ void keep_one(T*& pointer) {
  asm volatile("" : "+l"(pointer));
}
// Worked out here, and not again further on, where they are needed at once.
template <class... Values>
__device__ __forceinline__ void keep_at_hand(Values&... values) {
  (keep_one(values), ...);
}

constexpr int kMostPolls = 1 << 24;  // of a word: ten seconds and more

// The greatest of this lane's words of a row, each waited for and then cleared. *missing: one of
// the row's did not come. A warp calls it.
__device__ __forceinline__ unsigned long long collect_words(unsigned long long* words, int count,
                                                            bool* missing) {
  constexpr int kPairs = kMostGreedyParts * kGreedyWarps / (2 * kWarpSize);  // of a lane
  words += threadIdx.x % kWarpSize * 2;
  count -= threadIdx.x % kWarpSize * 2;
  ulonglong2 found[kPairs];
  int polls = 0;
#pragma unroll 1
  do {
    *missing = false;
#pragma unroll
    for (int n = 0; n < kPairs; ++n)
      found[n] = load_pair_if(n * 2 * kWarpSize < count, words + n * 2 * kWarpSize);
#pragma unroll
    for (int n = 0; n < kPairs; ++n)
      *missing |= n * 2 * kWarpSize < count && (found[n].x == 0 || found[n].y == 0);
    *missing = __any_sync(kFullMask, *missing);
  } while (*missing && ++polls < kMostPolls);
  unsigned long long most = 0;
#pragma unroll
  for (int n = 0; n < kPairs; ++n) {
    if (n * 2 * kWarpSize < count)
      *reinterpret_cast<ulonglong2*>(words + n * 2 * kWarpSize) = ulonglong2{0, 0};
    most = max(most, max(found[n].x, found[n].y));
  }
  return most;
}

// Eight logits of an aligned row where `exists`, otherwise eight of -inf. Into L1 like any load:
// those that pass it by (load_words_if) take 0.6 us longer at batch 8.
__device__ __forceinline__ uint4 load_words_through_l1(bool exists, const void* pointer,
                                                       uint32_t other) {
  uint4 out;
  asm("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
      "mov.b32 %0, %6;\nmov.b32 %1, %6;\nmov.b32 %2, %6;\nmov.b32 %3, %6;\n"
      "@p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(out.x), "=&r"(out.y), "=&r"(out.z), "=&r"(out.w)
      : "l"(pointer), "r"(static_cast<uint32_t>(exists)), "r"(other));
  return out;
}
template <class T>
__device__ __forceinline__ Group<T> load_group_if(bool exists, const T* logits) {
  Group<T> out;
  if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 words = load_words_through_l1(exists, logits + 4 * half, 0xff800000u);
      memcpy(out.values + 4 * half, &words, sizeof(words));
    }
  } else {
    out.words = load_words_through_l1(exists, logits, Group<T>::kPad * 0x10001u);
  }
  return out;
}

// The greatest of eight logits, NaN if one is.
template <class T>
__device__ __forceinline__ float group_top(const Group<T>& group) {
  if constexpr (std::is_same_v<T, float>) {
    float top = group.at(0);
#pragma unroll
    for (int j = 1; j < kGroup; ++j) top = max_nan(top, group.at(j));
    return top;
  } else {
    const uint32_t top = group.most();
    return max_nan(low_half(top, T{}), high_half(top, T{}));
  }
}

// A request of a batch that is neither ragged nor edited and has nobody inactive: as ChainRequest,
// in a third of the instructions, which come before the first load.
struct WholeRequest {
  const VerifyChainParams& p;
  int64_t b;
  int rows;
  static constexpr uint32_t faults = 0;

  __device__ __forceinline__ WholeRequest(const VerifyChainParams& params, int64_t request)
      : p(params), b(request), rows(static_cast<int>(p.drafts) + 1) {}

  __device__ __forceinline__ int64_t draft_token(int i) const {
    return p.draft_tokens[b * p.draft_tokens_stride + i];
  }
  __device__ __forceinline__ LogitRow target_row(int i) const {
    return LogitRow{p.target_logits, p.target_dtype}.plus(b * p.target_batch_stride +
                                                          i * p.target_row_stride);
  }
  __device__ __forceinline__ RowEdits edits(int) const { return {}; }
};

// Groups [begin, end) of a row, by a block: the greatest logit that a warp has met and
// the lowest id that has it, as a word: its key, and the complement of the id.
template <class T>
__device__ __forceinline__ unsigned long long greatest_of(const RowSource<T>& source, int begin,
                                                          int end) {
  constexpr int kAhead = 5;  // groups of a thread that are on their way
  using Stored = typename RowSource<T>::Stored;
  const int thread = static_cast<int>(threadIdx.x);
  Group<Stored> best;
  best.load_if(false, nullptr);
  int best_token = 0;
  float top = -INFINITY;
  const auto take = [&](const Group<Stored>& group, int token) {
    const float value = group_top(group);
    if (value <= top) return;  // not if one is NaN
    best = group;
    best_token = token;
    top = max_nan(top, value);
  };
  if constexpr (!std::is_same_v<T, void>) {
    if (source.aligned) {
      const int whole = min(end, source.vocab / kGroup);
#pragma unroll 1
      for (int n = begin + thread; n - thread < whole; n += kAhead * kGreedyThreads) {
        Group<T> ahead[kAhead];
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          const int at = n + a * kGreedyThreads;
          ahead[a] = load_group_if(at < whole, source.data + at * kGroup);
        }
#pragma unroll
        for (int a = 0; a < kAhead; ++a) take(ahead[a], (n + a * kGreedyThreads) * kGroup);
      }
      begin = max(begin, whole);
    }
  }
#pragma unroll 1
  for (int n = begin + thread; n < end; n += kGreedyThreads)
    take(source.group(n * kGroup), n * kGroup);

  const uint32_t own = logit_key(top);
  uint32_t id = ~0u;  // worked out by all lanes while the greatest is found
#pragma unroll
  for (int j = kGroup - 1; j >= 0; --j)
    if (best.at(j) == top) id = best_token + j;
  const uint32_t key = __reduce_max_sync(kFullMask, own);
  id = __reduce_min_sync(kFullMask, own == key ? id : ~0u);
  return static_cast<unsigned long long>(key) << 32 | ~id;
}

// What the walk keeps of a row: its token + 1 (0: none), its status bits, whether the chain ends.
constexpr uint32_t kRowToken = 0xffffff, kRowMissing = 1u << 30, kRowStops = 1u << 31;
constexpr int kRowStatus = 24;
static_assert(kMaxVocab <= kRowToken);

// By a request's last block, a warp a row; the first slot that stops ends the request. words:
// [rows, count]; x: the draft of slot `warp`.
template <class Request>
__device__ __forceinline__ void walk_greedy(const Request& r, unsigned long long* words, int count,
                                            int64_t x) {
  __shared__ uint32_t shared_rows[kGreedyWords / kGreedyWarps];
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int drafts = static_cast<int>(r.p.drafts);
  int64_t* tokens = r.p.tokens + r.b * (r.p.drafts + 1) + lane;
  int32_t* num_accepted = r.p.num_accepted + r.b;
  int32_t* num_emitted = r.p.num_emitted + r.b;
  uint8_t* status = r.p.status + r.b;
  keep_at_hand(tokens, num_accepted, num_emitted, status);
  __syncthreads();  // before that, polls would be in the way of other warps' loads
#pragma unroll 1
  for (int row = warp; row < r.rows; row += kGreedyWarps) {
    if (row != warp) x = row < r.rows - 1 ? r.draft_token(row) : -1;
    const bool exists = x >= 0 && x < r.p.vocab;
    uint32_t draft = exists ? static_cast<uint32_t>(x) : ~0u;
    uint32_t bad_id = exists || x == -1 ? 0u : kBadId << kRowStatus;
    keep_at_hand(draft, bad_id);
    bool missing;
    const unsigned long long most = collect_words(words + row * count, count, &missing);
    const uint32_t key = static_cast<uint32_t>(most >> 32);
    const uint32_t top = __reduce_max_sync(kFullMask, key);
    const uint32_t id =
        ~__reduce_max_sync(kFullMask, key == top ? static_cast<uint32_t>(most) : 0u);
    const uint32_t faults = row_faults(key_logit(top));
    if (lane == 0)
      shared_rows[row] = missing       ? kRowMissing
                         : faults != 0 ? faults << kRowStatus | kRowStops
                                       : (id + 1) | bad_id | (id != draft ? kRowStops : 0u);
  }
  __syncthreads();
  if (warp != 0) return;
  int stop = INT32_MAX;
#pragma unroll 1
  for (int row = lane; row - lane <= drafts; row += kWarpSize, tokens += kWarpSize) {
    const uint32_t found = row < r.rows ? shared_rows[row] : 0u;
    if (__any_sync(kFullMask, found == kRowMissing)) __trap();
    const unsigned stops = __ballot_sync(kFullMask, (found & kRowStops) != 0);
    if (stops != 0) stop = min(stop, row - lane + __ffs(stops) - 1);
    // an accepted draft is the row's argmax
    const int64_t token = row <= stop ? static_cast<int64_t>(found & kRowToken) - 1 : -1;
    if (row <= drafts) *tokens = token;
    if (row == stop) {
      *num_accepted = stop;
      *num_emitted = stop + (token >= 0 ? 1 : 0);
      *status = static_cast<uint8_t>(found >> kRowStatus & (kNonFinite | kEmptyRow | kBadId));
    }
  }
}

// Grid: (parts of a row, rows, requests from `first` on). share: groups of a part. T: the dtype of
// the rows, none of them edited; void: any.
template <class T, class Request>
__global__ void __launch_bounds__(kGreedyThreads, kGreedyBlocks)
    verify_greedy_kernel(int64_t first, int share, const __grid_constant__ VerifyChainParams p) {
  const int part = blockIdx.x, parts = gridDim.x, i = blockIdx.y;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int64_t b = first + blockIdx.z;
  const Request r(p, b);
  if (r.rows == 0) {
    if (part + i != 0) return;
    if (threadIdx.x == 0) emit_counts(r, 0, -1, r.faults);
    for (int64_t n = threadIdx.x; n <= p.drafts; n += kGreedyThreads)
      p.tokens[b * (p.drafts + 1) + n] = -1;
    return;
  }
  if (i >= r.rows) return;
  const bool walks = i == r.rows - 1 && part == parts - 1;
  const int row_words = parts * kGreedyWarps;
  unsigned long long* words =  // [rows, row_words]
      static_cast<unsigned long long*>(p.workspace) +
      static_cast<int64_t>(blockIdx.z) * gridDim.y * row_words;
  unsigned long long* own_word = words + i * row_words + part * kGreedyWarps + warp;

  const RowSource<T> source(r.target_row(i), r.edits(i), static_cast<int>(p.vocab));
  const int begin = part * share;
  const int end = min(begin + share, (source.vocab + kGroup - 1) / kGroup);
  // what lies in HBM of all that is needed behind the loads
  const int64_t x = walks && warp < r.rows - 1 ? r.draft_token(warp) : -1;
  if (lane == 0) prefetch_l2(own_word);
  keep_at_hand(own_word);
  const unsigned long long word = greatest_of(source, begin, end);
  if (lane == 0) store_word(own_word, word);
  if (walks) walk_greedy(r, words, row_words, x);
}

// The lowest id of a row whose logit is `top`, the greatest: it is in the first chunk with that
// top. By a warp.
template <class T>
__device__ __forceinline__ int first_in_row(const RowSource<T>& source, const ChunkStats* chunks,
                                            int count, float top) {
  const uint32_t key = logit_key(top);
  const int lane = threadIdx.x % kWarpSize;
  int chunk = count;
#pragma unroll 5
  for (int c = lane; c < count; c += kWarpSize)
    if (__ldcg(&chunks[c].key) == key) chunk = min(chunk, c);
  const int token = __reduce_min_sync(kFullMask, chunk) * kChunk + lane * kGroup;
  Group<T> groups[kLaneGroups];
#pragma unroll
  for (int g = 0; g < kLaneGroups; ++g) groups[g] = source.group(token + g * kGroupStep);
  return static_cast<int>(first_of(groups, token, top, true));
}

// The same with log-probabilities, behind the launch that reads the rows (row_chunks.cuh): a block
// owns a request, a warp a row at a time. Bytes: the chunks' statistics; bound by latency.
constexpr int kGreedyWalkThreads = 16 * kWarpSize;

template <class T>
__global__ void __launch_bounds__(kGreedyWalkThreads, 1)
    greedy_walk_kernel(const __grid_constant__ VerifyChainParams p) {
  constexpr int kWarps = kGreedyWalkThreads / kWarpSize;
  __shared__ int shared_stop;
  const int64_t b = blockIdx.x, out = b * (p.drafts + 1);
  const ChainRequest r(p, b);
  const ChainWorkspace workspace(p.workspace, p.batch, p.drafts, p.vocab, false);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  if (threadIdx.x == 0) shared_stop = r.rows;
  int64_t x = warp < r.rows - 1 ? r.draft_token(warp) : -1;
  previous_launch_done();
  __syncthreads();
  // Slots in stretches of as many as there are warps; the first that stops ends the request.
  int stop = r.rows;
#pragma unroll 1
  for (int base = 0; base < r.rows; base += kWarps) {
    const int i = base + warp;
    RowStats row{};
    if (i < r.rows) {
      if (base > 0) x = i < r.rows - 1 ? r.draft_token(i) : -1;
      const int count = static_cast<int>(workspace.row_chunks);
      uint32_t unused;
      const ChunkStats* chunks = workspace.row(b, i);
      row = combine_chunks(chunks, workspace.first + (chunks - workspace.chunks), count,
                           law_scale(0.0f), std::is_same_v<T, void>, &unused);
      if constexpr (!std::is_same_v<T, void>) {
        const RowSource<T> source(r.target_row(i), r.edits(i), static_cast<int>(p.vocab));
        if (row.faults == 0) row.argmax = first_in_row(source, chunks, count, row.top);
      }
      if (lane == 0 && (row.faults != 0 || x != row.argmax)) atomicMin(&shared_stop, i);
    }
    __syncthreads();
    stop = shared_stop;
    if (lane == 0 && i <= stop && i < r.rows) {  // an accepted draft is the row's argmax
      const bool usable = row.faults == 0;
      p.tokens[out + i] = usable ? row.argmax : -1;
      if (p.chosen_logprob != nullptr)
        p.chosen_logprob[out + i] = usable ? RowLaw(row, 0.0f).log_probability(row.top) : 0.0f;
      if (i == stop) {
        const bool bad_id = i < r.rows - 1 && usable && (x < -1 || x >= p.vocab);
        emit_counts(r, stop, usable ? 0 : -1, row.faults | (bad_id ? kBadId : 0u));
      }
    }
    if (stop < base + kWarps) break;
    __syncthreads();
  }
  if (r.rows == 0 && threadIdx.x == 0) emit_counts(r, 0, -1, r.faults);
  const int64_t first = r.rows == 0 ? 0 : stop + 1;
  for (int64_t i = first + threadIdx.x; i <= p.drafts; i += kGreedyWalkThreads) {
    p.tokens[out + i] = -1;
    if (p.chosen_logprob != nullptr) p.chosen_logprob[out + i] = 0.0f;
  }
}

}  // namespace domino
