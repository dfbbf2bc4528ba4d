// verify_chain where every request is greedy and nobody asks for log-probabilities: one launch.
//
// A block owns a part of a row, and leaves the greatest logit in it and the lowest id that has it
// as one word. The block of a request's last part walks: it waits for the request's words, which
// say by themselves that they are there (they are never 0), and leaves them at 0 for the next call.
// Blocks start in the order of their numbers, so it only waits for blocks that run. CUDA does not
// promise that order: where words do not come (kMostPolls), the launch fails
// (cudaErrorLaunchFailure) instead of hanging.
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
// those that pass it by (load_words_if) take 0.6 us longer at batch 8. Volatile, so that they are
// asked for before what comes behind in the code is worked out.
__device__ __forceinline__ uint4 load_words_through_l1(bool exists, const void* pointer,
                                                       uint32_t other) {
  uint4 out{other, other, other, other};
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(out.x), "+r"(out.y), "+r"(out.z), "+r"(out.w)
      : "l"(pointer), "r"(static_cast<uint32_t>(exists)));
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

// How a launch divides its rows: parts of `share` groups, the last of which may be smaller. Where
// all rows are aligned `rows` is the first of them and strides are in groups: the first loads need
// nothing else. First of the parameters, which are fetched in lines of 64 bytes.
struct GreedyGrid {
  const void* rows;
  uint32_t batch_groups;
  uint32_t row_groups;
  int share;
  int whole;      // groups of a row that are whole
  int64_t first;  // request
};

// A request of a batch that is neither ragged nor edited, has nobody inactive, and whose rows are
// aligned: as ChainRequest, with nothing to wait for.
struct AlignedRequest {
  const VerifyChainParams& p;
  int64_t b;
  int rows;

  __device__ __forceinline__ AlignedRequest(const VerifyChainParams& params, int64_t request)
      : p(params), b(request), rows(static_cast<int>(p.drafts) + 1) {}

  __device__ __forceinline__ int64_t draft_token(int i) const {
    return p.draft_tokens[b * p.draft_tokens_stride + i];
  }
};

// What a thread has met of a row, in the order of ids.
template <class T>
struct GreatestLogit {
  Group<T> best;
  int token = 0;  // of the group
  float top = -INFINITY;

  __device__ __forceinline__ GreatestLogit() { best.load_if(false, nullptr); }
  __device__ __forceinline__ void take(const Group<T>& group, int first) {
    const float value = group_top(group);
    if (value <= top) return;  // not if one is NaN
    best = group;
    token = first;
    top = max_nan(top, value);
  }
  // The greatest of a warp's and the lowest id that has it: its key, and the id's complement.
  __device__ __forceinline__ unsigned long long of_warp() const {
    const uint32_t own = logit_key(top);
    uint32_t id = ~0u;  // worked out by all lanes while the greatest is found
#pragma unroll
    for (int j = kGroup - 1; j >= 0; --j)
      if (best.at(j) == top) id = token + j;
    const uint32_t key = __reduce_max_sync(kFullMask, own);
    id = __reduce_min_sync(kFullMask, own == key ? id : ~0u);
    return static_cast<unsigned long long>(key) << 32 | ~id;
  }
};

// A warp's way through groups [begin, end) of an aligned row, which its block reads: units of
// kAhead loads, the first by the warp's number, the others by tickets. With a share of its own for
// each warp some ask late for their last loads, and a tenth of the time a tenth of the bandwidth
// is used.
template <class T>
struct UnitReader {
  static constexpr int kAhead = 5;
  const T* row;
  int begin, end;
  int at;  // this lane's first group of the unit that is on its way
  Group<T> ahead[kAhead];

  __device__ __forceinline__ UnitReader(const T* logits, int from, int to)
      : row(logits), begin(from), end(to) {
    ask(threadIdx.x / kWarpSize);
  }
  __device__ __forceinline__ void ask(int unit) {
    at = begin + unit * (kAhead * kWarpSize) + static_cast<int>(threadIdx.x % kWarpSize);
    const T* logits = row + at * kGroup;
#pragma unroll
    for (int a = 0; a < kAhead; ++a)
      ahead[a] = load_group_if(at + a * kWarpSize < end, logits + a * (kWarpSize * kGroup));
  }
  // *ticket: in shared memory, the block's warps at first.
  __device__ __forceinline__ void read(GreatestLogit<T>& greatest, int* ticket) {
#pragma unroll 1
    while (true) {
      int unit = 0;  // asked for while loads are on their way
      if (threadIdx.x % kWarpSize == 0) unit = atomicAdd(ticket, 1);
      unit = __shfl_sync(kFullMask, unit, 0);
#pragma unroll
      for (int a = 0; a < kAhead; ++a) greatest.take(ahead[a], (at + a * kWarpSize) * kGroup);
      if (begin + unit * (kAhead * kWarpSize) >= end) return;
      ask(unit);
    }
  }
};

// The greatest of a row's words, each waited for and then cleared. A lane's row, a warp's rows at
// once. *missing: a word of one of them did not come.
__device__ __forceinline__ unsigned long long collect_parts(unsigned long long* words, int parts,
                                                            bool* missing) {
  constexpr int kPairs = kMostGreedyParts / 2;
  ulonglong2 found[kPairs];
  int polls = 0;
#pragma unroll 1
  do {
    *missing = false;
#pragma unroll
    for (int n = 0; n < kPairs; ++n) found[n] = load_pair_if(2 * n < parts, words + 2 * n);
#pragma unroll
    for (int n = 0; n < kPairs; ++n)
      *missing |= (2 * n < parts && found[n].x == 0) || (2 * n + 1 < parts && found[n].y == 0);
    *missing = __any_sync(kFullMask, *missing);
  } while (*missing && ++polls < kMostPolls);
  unsigned long long most = 0;
#pragma unroll
  for (int n = 0; n < kPairs; ++n) {
    if (2 * n < parts) *reinterpret_cast<ulonglong2*>(words + 2 * n) = ulonglong2{0, 0};
    most = max(most, max(found[n].x, found[n].y));
  }
  return most;
}

// By a warp of a request's last block, a lane a row; the first slot that stops ends the request.
// words: [rows, row_words]; x: the draft of slot `lane`.
template <class Request>
__device__ __forceinline__ void walk_greedy(const Request& r, unsigned long long* words,
                                            int row_words, int64_t x) {
  const int lane = threadIdx.x % kWarpSize, parts = gridDim.x;
  const int drafts = static_cast<int>(r.p.drafts);
  int64_t* tokens = r.p.tokens + r.b * (r.p.drafts + 1) + lane;
  int32_t* num_accepted = r.p.num_accepted + r.b;
  int32_t* num_emitted = r.p.num_emitted + r.b;
  uint8_t* status = r.p.status + r.b;
  int stop = INT32_MAX;
#pragma unroll 1
  for (int row = lane; row - lane <= drafts; row += kWarpSize, tokens += kWarpSize) {
    if (row != lane) x = row < r.rows - 1 ? r.draft_token(row) : -1;
    const bool exists = row < r.rows, valid = x >= 0 && x < r.p.vocab;
    uint32_t draft = valid ? static_cast<uint32_t>(x) : ~0u;
    uint32_t bad_id = valid || x == -1 ? 0u : kBadId;
    keep_at_hand(draft, bad_id, tokens, num_accepted, num_emitted, status);
    bool missing;
    const unsigned long long most =
        collect_parts(words + row * row_words, exists ? parts : 0, &missing);
    if (missing) __trap();
    const uint32_t id = ~static_cast<uint32_t>(most);
    const uint32_t faults = row_faults(key_logit(static_cast<uint32_t>(most >> 32)));
    const unsigned stops = __ballot_sync(kFullMask, exists && (faults != 0 || id != draft));
    if (stops != 0) stop = min(stop, row - lane + __ffs(stops) - 1);
    // an accepted draft is the row's argmax
    const int64_t token = exists && row <= stop && faults == 0 ? static_cast<int64_t>(id) : -1;
    if (row <= drafts) *tokens = token;
    if (row == stop) {
      *num_accepted = stop;
      *num_emitted = stop + (token >= 0 ? 1 : 0);
      *status = static_cast<uint8_t>(faults != 0 ? faults : bad_id);
    }
  }
}

// Grid: (parts of a row, rows, requests from `first` on). T: the dtype of the rows, none of them
// edited; void: any.
template <class T, class Request>
__global__ void __launch_bounds__(kGreedyThreads, kGreedyBlocks)
    verify_greedy_kernel(const __grid_constant__ GreedyGrid grid,
                         const __grid_constant__ VerifyChainParams p) {
  constexpr bool kAligned = std::is_same_v<Request, AlignedRequest>;
  __shared__ int shared_ticket;
  __shared__ unsigned long long shared_words[kGreedyWarps];
  const int part = blockIdx.x, i = blockIdx.y;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int64_t b = grid.first + blockIdx.z;
  const Request r(p, b);
  if constexpr (!kAligned) {
    if (r.rows == 0) {
      if (part + i != 0) return;
      if (threadIdx.x == 0) emit_counts(r, 0, -1, r.faults);
      for (int64_t n = threadIdx.x; n <= p.drafts; n += kGreedyThreads)
        p.tokens[b * (p.drafts + 1) + n] = -1;
      return;
    }
    if (i >= r.rows) return;
  }

  // what comes behind the first loads
  unsigned long long *words, *own_word;  // [rows, row_words]
  const int row_words = static_cast<int>(gridDim.x + 1) / 2 * 2;
  bool walks;
  int64_t x = -1;  // of all that is needed for the walk what lies in HBM
  const auto prepare = [&] {
    words = static_cast<unsigned long long*>(p.workspace) +
            static_cast<int64_t>(blockIdx.z) * gridDim.y * row_words;
    own_word = words + i * row_words + part;
    walks = i == r.rows - 1 && part == static_cast<int>(gridDim.x) - 1;
    if (walks && threadIdx.x < kWarpSize && lane < r.rows - 1) x = r.draft_token(lane);
    if (threadIdx.x == 0) {
      prefetch_l2(own_word);
      shared_ticket = kGreedyWarps;
    }
    keep_at_hand(own_word);
    __syncthreads();
  };
  using Stored = typename RowSource<T>::Stored;
  GreatestLogit<Stored> greatest;
  int begin = part * grid.share;
  const int end = begin + grid.share;
  const auto source = [&] {
    if constexpr (kAligned) {
      const uint32_t groups = blockIdx.z * grid.batch_groups + blockIdx.y * grid.row_groups;
      const void* row =
          static_cast<const char*>(grid.rows) + uint64_t{groups} * (kGroup * sizeof(T));
      return RowSource<T>(LogitRow{row, p.target_dtype}, RowEdits{}, static_cast<int>(p.vocab));
    } else {
      return RowSource<T>(r.target_row(i), r.edits(i), static_cast<int>(p.vocab));
    }
  }();
  if constexpr (!std::is_same_v<T, void>) {
    const int whole = min(end, kAligned || source.aligned ? grid.whole : 0);
    UnitReader<T> reader(source.data, begin, whole);
    prepare();
    reader.read(greatest, &shared_ticket);
    begin = max(begin, whole);
  } else {
    prepare();
  }
  const int groups = min(end, (source.vocab + kGroup - 1) / kGroup);
#pragma unroll 1
  for (int n = begin + static_cast<int>(threadIdx.x); n < groups; n += kGreedyThreads)
    greatest.take(source.group(n * kGroup), n * kGroup);

  unsigned long long word = greatest.of_warp();
  if (lane == 0) shared_words[warp] = word;
  __syncthreads();
  if (warp != 0) return;
  word = shared_words[lane % kGreedyWarps];
  const uint32_t key = __reduce_max_sync(kFullMask, static_cast<uint32_t>(word >> 32));
  const uint32_t id = __reduce_max_sync(
      kFullMask, static_cast<uint32_t>(word >> 32) == key ? static_cast<uint32_t>(word) : 0u);
  if (lane == 0) store_word(own_word, static_cast<unsigned long long>(key) << 32 | id);
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
