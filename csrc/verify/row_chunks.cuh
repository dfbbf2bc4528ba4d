// First launch of verify_chain: every row in chunks of 1024 tokens, one warp a chunk, read once.
//
//   key     the chunk's greatest logit (logit_key)
//   first   the lowest id that has it; only of greedy requests, and not where all of them are and
//           no row is edited: then the walk looks it up
//   digits  the sum of the weights of the chunk's segments (row_law.h); not of greedy requests
//           whose log-probabilities nobody wants
//
// Nothing in here knows the row's greatest logit: the sums are relative to the chunk's own grid,
// and combine exactly. Bytes: every row once. Bound by HBM; about 14 instructions a token.
#pragma once

#include "verify/row_reader.cuh"

namespace domino {

constexpr int kRowWarps = 8;

struct alignas(16) ChunkStats {
  uint32_t key;
  uint32_t digits[3];
};

// What blocks and launches leave for each other. Words and counters are 0 between calls, the rest
// is written anew by each call.
struct ChainWorkspace {
  ChunkStats* chunks;  // [batch, rows_per_request, row_chunks]: target rows, then draft rows
  uint32_t* first;     // the same
  uint32_t* arrived;   // [batch]: clusters that are done with their row, 0 before the second launch
  void* rest;
  int64_t rows_per_request;
  int64_t row_chunks;

  __host__ __device__ ChainWorkspace(void* base, int64_t batch, int64_t drafts, int64_t vocab,
                                     bool dense)
      : rows_per_request(drafts + 1 + (dense ? drafts : 0)),
        row_chunks((vocab + kChunk - 1) / kChunk) {
    const int64_t count = batch * rows_per_request * row_chunks;
    chunks = reinterpret_cast<ChunkStats*>(static_cast<uint64_t*>(base) + kGreedyWords);
    first = reinterpret_cast<uint32_t*>(chunks + count);
    arrived = first + count;
    rest = first + (count + batch + 3) / 4 * 4;
  }
  __device__ const ChunkStats* row(int64_t b, int64_t slot) const {
    return chunks + (b * rows_per_request + slot) * row_chunks;
  }
};

// Is the second launch greedy_walk_kernel?
__host__ __device__ inline bool is_greedy_walk(const VerifyChainParams& p) {
  return p.temperature == nullptr && p.top_logprobs == 0;
}
__host__ __device__ inline bool is_dense(const VerifyChainParams& p) {
  return p.draft_logits != nullptr && p.draft_ids == nullptr;
}

// Sum of a lane's four groups in their segments: a group is 8 tokens of a segment of 16 lanes. Lane
// l gets the segment of group (l % 2) * 2 + l / 2 % 2 of its half of the warp.
__device__ __forceinline__ float segment_sum(const float (&sums)[kLaneGroups]) {
  const int lane = threadIdx.x % kWarpSize;
  const bool odd = lane & 1, second = lane & 2;
  const float a = odd ? sums[2] : sums[0], b = odd ? sums[3] : sums[1];
  const float give_a = odd ? sums[0] : sums[2], give_b = odd ? sums[1] : sums[3];
  const float both_a = add_rn(a, __shfl_xor_sync(kFullMask, give_a, 1));
  const float both_b = add_rn(b, __shfl_xor_sync(kFullMask, give_b, 1));
  float sum = second ? both_b : both_a;
  sum = add_rn(sum, __shfl_xor_sync(kFullMask, second ? both_a : both_b, 2));
  sum = add_rn(sum, __shfl_xor_sync(kFullMask, sum, 4));
  return add_rn(sum, __shfl_xor_sync(kFullMask, sum, 8));
}

// The digits of a chunk whose greatest logit is `top`, the same in every lane.
template <class T>
__device__ __forceinline__ void chunk_digits(const Group<T> (&groups)[kLaneGroups], float top,
                                             float scale, uint32_t (&digits)[3]) {
  const RowExponent exponent(top, scale);
  if (exponent.huge) {  // all weight is on the tokens that equal the top: count them
    uint32_t equal = 0;
#pragma unroll
    for (int n = 0; n < kLaneGroups * kGroup; ++n)
      equal += groups[n / kGroup].at(n % kGroup) == top;
    digits[0] = __reduce_add_sync(kFullMask, equal);
    digits[1] = digits[2] = 0;
    return;
  }
  const float reference = 20.0f * static_cast<float>(exponent.grid());
  const float shift = kRoundMagic - reference;
  const float lowest = (reference - 120.0f) * __frcp_rn(scale);
  float sums[kLaneGroups];
#pragma unroll
  for (int g = 0; g < kLaneGroups; ++g) {
    float w[kGroup];
#pragma unroll
    for (int j = 0; j < kGroup; ++j)
      w[j] = exp2_product(fmaxf(groups[g].at(j), lowest), scale, shift);
    sums[g] = add_rn(add_rn(add_rn(w[0], w[1]), add_rn(w[2], w[3])),
                     add_rn(add_rn(w[4], w[5]), add_rn(w[6], w[7])));
  }
  const Digits cut = Digits::of(segment_sum(sums));
  const bool own = (threadIdx.x & 12) == 0;  // of the four lanes that have the same segment
#pragma unroll
  for (int n = 0; n < 3; ++n) digits[n] = __reduce_add_sync(kFullMask, own ? cut.at[n] : 0u);
}

// The lowest id of a chunk's logits that equal its top.
template <class T>
__device__ __forceinline__ uint32_t first_of(const Group<T> (&groups)[kLaneGroups], int token,
                                             float top, bool has) {
  uint32_t id = ~0u;
  if (has) {
#pragma unroll
    for (int n = kLaneGroups * kGroup - 1; n >= 0; --n)
      if (groups[n / kGroup].at(n % kGroup) == top)
        id = token + n / kGroup * kGroupStep + n % kGroup;
  }
  return __reduce_min_sync(kFullMask, id);
}

// What a row's law needs of the chunk in `groups`, to place `at`: its top, the lowest id of it
// where `first`, the weights' sum where `sum`.
template <class T>
__device__ __forceinline__ void sum_chunk(const Group<T> (&groups)[kLaneGroups], int token,
                                          bool first, bool sum, float scale,
                                          const ChainWorkspace& workspace, int64_t at) {
  const int lane = threadIdx.x % kWarpSize;
  const uint32_t own = logit_key(lane_top(groups));
  const uint32_t key = __reduce_max_sync(kFullMask, own);
  const float top = key_logit(key);
  ChunkStats out{key, {0, 0, 0}};
  if (first) {
    const uint32_t id = first_of(groups, token, top, own == key);
    if (lane == 0) workspace.first[at] = id;
  }
  if (sum && key < kInfinityKey && key > kEmptyKey) chunk_digits(groups, top, scale, out.digits);
  if (lane == 0) *reinterpret_cast<uint4*>(workspace.chunks + at) = reinterpret_cast<uint4&>(out);
}

// Grid: blocks of `row_blocks` to a row, `steps` chunks to a warp. T: the dtype of all rows, none
// of them edited; void: any.
template <class T>
__global__ void __launch_bounds__(kRowWarps* kWarpSize)
    verify_rows_kernel(const __grid_constant__ VerifyChainParams p, int row_blocks, int steps) {
  allow_next_launch();
  const ChainWorkspace workspace(p.workspace, p.batch, p.drafts, p.vocab, is_dense(p));
  const int64_t row_index = blockIdx.x / row_blocks;
  const int row_block = static_cast<int>(blockIdx.x - row_index * row_blocks);
  const int64_t b = row_index / workspace.rows_per_request;
  const int slot = static_cast<int>(row_index - b * workspace.rows_per_request);
  const bool of_target = slot <= p.drafts;
  const int i = of_target ? slot : static_cast<int>(slot - p.drafts - 1);
  const ChainRequest r(p, b);
  if (slot == 0 && row_block == 0 && threadIdx.x == 0) workspace.arrived[b] = 0;
  // the last target row has no draft
  if (of_target ? i >= r.judged_rows() : r.q != DraftLaw::kDense || i >= r.rows - 1) return;
  const RowSource<T> source(of_target ? r.target_row(i) : r.draft_row(i),
                            of_target ? r.edits(i) : RowEdits{}, static_cast<int>(p.vocab));
  const float scale = law_scale(of_target ? r.temperature : r.draft_temperature);
  const bool looked_up = !std::is_same_v<T, void> && is_greedy_walk(p);
  const bool wants_first = p.all_stats || (r.greedy() && !looked_up);
  const bool wants_sum = !r.greedy() || p.chosen_logprob != nullptr || p.all_stats;

  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int chunks = static_cast<int>(workspace.row_chunks);
  int chunk = row_block * steps * kRowWarps + warp;
  const int last = min(chunk + steps * kRowWarps, chunks);
  if (chunk >= last) return;
  Group<typename RowSource<T>::Stored> groups[kLaneGroups], ahead[kLaneGroups];
  const auto load = [&](int from) {
#pragma unroll
    for (int g = 0; g < kLaneGroups; ++g)
      ahead[g] = source.group(from * kChunk + g * kGroupStep + lane * kGroup);
  };
  load(chunk);
#pragma unroll 1
  for (; chunk < last; chunk += kRowWarps) {
#pragma unroll
    for (int g = 0; g < kLaneGroups; ++g) groups[g] = ahead[g];
    if (chunk + kRowWarps < last) load(chunk + kRowWarps);
    sum_chunk(groups, chunk * kChunk + lane * kGroup, wants_first, wants_sum, scale, workspace,
              row_index * chunks + chunk);
  }
}

// The launch of it for all rows of p.
int launch_rows(const VerifyChainParams& p, void* stream);

}  // namespace domino
