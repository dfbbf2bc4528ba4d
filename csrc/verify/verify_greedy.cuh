// verify_chain where every request is greedy and nobody asks for log-probabilities: one launch.
//
// A block owns a part of a row. It leaves the part's greatest logit and the lowest id that has it
// as one word and counts itself; the last block of a request to do so puts its words together and
// walks. A word says by itself that it is there (it is never 0), and a block counts itself behind
// its word: so the last block waits for nothing but stores that are on their way, and what is
// counted on need not be fenced. It leaves words and counter at 0 for the next call.
//
// Bytes: every row once. Bound by HBM; at small batches by three trips to the L2 behind it.
#pragma once

#include "verify/chain_judge.cuh"

namespace domino {

constexpr int kGreedyWarps = 8, kGreedyThreads = kGreedyWarps * kWarpSize;
constexpr int kGreedyBlocks = 4;                                     // on an SM
constexpr int kFewestGreedyParts = 4, kMostGreedyParts = kWarpSize;  // of a row: a lane a part

__device__ __forceinline__ void store_word(unsigned long long* word, unsigned long long value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ __forceinline__ unsigned long long load_word(const unsigned long long* word) {
  unsigned long long value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
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
    const uint32_t top = max_nan(max_nan(group.words.x, group.words.y, T{}),
                                 max_nan(group.words.z, group.words.w, T{}), T{});
    return max_nan(low_half(top, T{}), high_half(top, T{}));
  }
}

// Grid: (row parts of a request, requests from `first` on). T: the dtype of the rows, none of them
// edited; void: any.
template <class T, int kWarps = kGreedyWarps, int kAhead = 8, int kBlocks = kGreedyBlocks>
__global__ void __launch_bounds__(kWarps* kWarpSize, kBlocks)
    verify_greedy_kernel(const __grid_constant__ VerifyChainParams p, int64_t first, int parts) {
  constexpr int kThreads = kWarps * kWarpSize;
  __shared__ uint32_t keys[kWarps], ids[kWarps];
  __shared__ int shared_stop;
  __shared__ bool shared_last;
  const int i = blockIdx.x / parts, part = blockIdx.x - i * parts;
  const int64_t b = first + blockIdx.y;
  const ChainRequest r(p, b);
  const int64_t out = b * (p.drafts + 1);
  if (r.rows == 0) {
    if (blockIdx.x != 0) return;
    if (threadIdx.x == 0) emit_counts(r, 0, -1, r.faults);
    for (int64_t n = threadIdx.x; n <= p.drafts; n += kThreads) p.tokens[out + n] = -1;
    return;
  }
  if (i >= r.rows) return;

  using Stored = typename RowSource<T>::Stored;
  const RowSource<T> source(r.target_row(i), r.edits(i), static_cast<int>(p.vocab));
  const int vocab = static_cast<int>(p.vocab), groups = (vocab + kGroup - 1) / kGroup;
  const int share = (groups + parts - 1) / parts, thread = static_cast<int>(threadIdx.x);
  int begin = part * share;
  const int end = min(begin + share, groups);
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
      const int whole = min(end, vocab / kGroup);
#pragma unroll 1
      for (int n = begin + thread; n < whole; n += kAhead * kThreads) {
        Group<T> ahead[kAhead];
#pragma unroll
        for (int a = 0; a < kAhead; ++a)
          ahead[a].load_if(n + a * kThreads < whole, source.data + (n + a * kThreads) * kGroup);
#pragma unroll
        for (int a = 0; a < kAhead; ++a) take(ahead[a], (n + a * kThreads) * kGroup);
      }
      begin = max(begin, whole);
    }
  }
#pragma unroll 1
  for (int n = begin + thread; n < end; n += kThreads) take(source.group(n * kGroup), n * kGroup);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const uint32_t own = logit_key(top), key = __reduce_max_sync(kFullMask, own);
  uint32_t id = ~0u;
  if (own == key) {
#pragma unroll
    for (int j = kGroup - 1; j >= 0; --j)
      if (best.at(j) == top) id = best_token + j;
  }
  id = __reduce_min_sync(kFullMask, id);
  if (lane == 0) {
    keys[warp] = key;
    ids[warp] = id;
  }
  if (threadIdx.x == 0) shared_stop = INT32_MAX;
  __syncthreads();
  const ChainWorkspace workspace(p.workspace, p.batch, p.drafts, p.vocab, false);
  unsigned long long* words = workspace.words + blockIdx.y * gridDim.x;  // [rows, parts]
  uint32_t* counter = workspace.counters + blockIdx.y;
  if (warp == 0) {
    const uint32_t warp_key = lane < kWarps ? keys[lane] : 0;
    const uint32_t block_key = __reduce_max_sync(kFullMask, warp_key);
    const uint32_t block_id =
        __reduce_min_sync(kFullMask, warp_key == block_key && lane < kWarps ? ids[lane] : ~0u);
    if (lane == 0) {
      store_word(words + blockIdx.x, static_cast<unsigned long long>(block_key) << 32 |
                                         static_cast<uint32_t>(~block_id));
      asm volatile("" ::: "memory");
      shared_last = atomicAdd(counter, 1u) == static_cast<uint32_t>(r.rows * parts) - 1;
    }
  }
  __syncthreads();
  if (!shared_last) return;

  // A warp a row; the first slot that stops ends the request. Lane 0 writes the row's token, and
  // takes it back where the request ended in front of it.
  if (threadIdx.x == 0) *counter = 0;
#pragma unroll 2
  for (int row = warp; row < r.rows; row += kWarps) {
    const int64_t x = row < r.rows - 1 ? r.draft_token(row) : -1;
    unsigned long long* word = words + row * parts + lane;
    unsigned long long most = 0;
    if (lane < parts) {
      do {
        most = load_word(word);
      } while (most == 0);
      *word = 0;
    }
    const uint32_t row_key = static_cast<uint32_t>(most >> 32);
    const uint32_t row_top = __reduce_max_sync(kFullMask, row_key);
    const uint32_t row_id =
        ~__reduce_max_sync(kFullMask, row_key == row_top ? static_cast<uint32_t>(most) : 0u);
    const uint32_t faults = row_faults(key_logit(row_top));
    const int64_t token = faults == 0 ? static_cast<int64_t>(row_id) : -1;
    if (lane == 0) {
      p.tokens[out + row] = token;  // an accepted draft is the row's argmax
      const bool bad_id = faults == 0 && (x < -1 || x >= p.vocab);
      if (token < 0 || x != token) atomicMin(&shared_stop, row * 8 + (bad_id ? 4 : 0) + faults);
    }
  }
  __syncthreads();
  const int stop = shared_stop / 8;
  const uint32_t faults = shared_stop & 3;
  for (int row = warp; row < r.rows; row += kWarps)
    if (lane == 0 && row > stop) p.tokens[out + row] = -1;
  for (int64_t n = r.rows + threadIdx.x; n <= p.drafts; n += kThreads) p.tokens[out + n] = -1;
  if (threadIdx.x == 0)
    emit_counts(r, stop, faults == 0 ? 0 : -1, faults | ((shared_stop & 4) != 0 ? kBadId : 0u));
}

// The same with log-probabilities, behind the launch that reads the rows (row_chunks.cuh): a block
// owns a request, a warp a row at a time. Bytes: the chunks' statistics; bound by latency.
constexpr int kGreedyWalkThreads = 16 * kWarpSize;

__global__ void __launch_bounds__(kGreedyWalkThreads)
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
      const ChunkStats* chunks = workspace.row(b, i);
      uint32_t unused;
      row = combine_chunks(chunks, workspace.first + (chunks - workspace.chunks),
                           static_cast<int>(workspace.row_chunks), law_scale(0.0f), true, &unused);
      if (lane == 0 && (row.faults != 0 || x != row.argmax)) atomicMin(&shared_stop, i);
    }
    __syncthreads();
    stop = shared_stop;
    if (lane == 0 && i <= stop && i < r.rows) {  // an accepted draft is the row's argmax
      const bool usable = row.faults == 0;
      p.tokens[out + i] = usable ? row.argmax : -1;
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
    p.chosen_logprob[out + i] = 0.0f;
  }
}

}  // namespace domino
