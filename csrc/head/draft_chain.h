// draft_chain: the K ids that the Domino head drafts behind an anchor, greedily, for a batch.
//
//   y_0 = anchor, S_{-1} = 0, and for j = 0 .. drafts-1:
//     S_j     = GRU(E[y_j], S_{j-1})                             state after y_0..y_j
//     slot    = first_slot + j                                   first_slot: 0 shifted, 1 not
//     score_j = base[slot]                                       j <  prefix
//             = base[slot] + W2 SiLU(W1h H[slot] + W1s S_j)      j >= prefix; W1 = [W1h | W1s]
//     y_{j+1} = argmax score_j                                   ties to the lowest id
//
// The label conventions differ by first_slot alone: slot i scores y_{i+1} (shift_label) or y_i.
//
// Arithmetic, alike in the kernel, the CPU twin and the reference: weights and hidden rows enter as
// they are, every sum is fp32, and two values are rounded to the weights' dtype: the state S_j and
// u = SiLU(..). The hoisted W1h H, W2 u and base + W2 u stay fp32. NaN: common/argmax_key.h. An id
// outside [0, vocab) (anchor) is clamped, so that nothing outside the embedding is read.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace domino {

struct DraftChainParams {
  int64_t* tokens;          // [batch, drafts], contiguous: y_1 .. y_drafts
  float* scores;            // [batch, drafts], contiguous: the score of each
  void* workspace;          // DraftChainWorkspace.bytes, 16-byte aligned; CUDA only
  const void* base_logits;  // [batch, slots, vocab] of base_dtype
  const void* hidden;       // [batch, slots, inputs]
  const int64_t* anchor;    // [batch]
  const void* w_ih;         // [3 * units, inputs], contiguous as all weights are
  const void* w_hh;         // [3 * units, units]
  const void* w1;           // [rank, inputs + units], the hidden row's columns first
  const void* w2;           // [vocab, rank]
  const void* embedding;    // [vocab, inputs]
  int64_t batch;
  int64_t drafts;
  int64_t first_slot;
  int64_t prefix;
  int64_t vocab;
  int64_t inputs;
  int64_t units;
  int64_t rank;
  int64_t base_batch_stride;  // strides in elements
  int64_t base_slot_stride;
  int64_t hidden_batch_stride;
  int64_t hidden_slot_stride;
  DType dtype;       // of hidden and the weights
  DType base_dtype;  // of base_logits: dtype or fp32
};

// What the kernels hand on from launch to launch: byte offsets into the workspace, and its size.
// Elements are counted as 4 bytes, so that one workspace serves every dtype and any prefix.
struct DraftChainWorkspace {
  int64_t keys;         // u64 [batch, drafts]: running argmax keys
  int64_t from_hidden;  // f32 [batch, drafts, rank]: W1h H
  int64_t state[2];     // blocked [batch, units]: S_j in state[j % 2]
  int64_t low_rank;     // blocked [batch, rank]: u
  int64_t bytes;

  DraftChainWorkspace(int64_t batch, int64_t drafts, int64_t units, int64_t rank) {
    const auto padded = [](int64_t n, int64_t to) { return (n + to - 1) / to * to; };
    const auto take = [&](int64_t size) {
      const int64_t at = bytes;
      bytes += padded(size, 256);
      return at;
    };
    bytes = 0;
    keys = take(batch * drafts * 8);
    from_hidden = take(batch * drafts * rank * 4);
    for (int64_t& buffer : state) buffer = take(padded(batch, 32) * padded(units, 32) * 4);
    low_rank = take(padded(batch, 32) * padded(rank, 32) * 4);
  }
};

int draft_chain_cuda(const DraftChainParams& p, void* stream);
int draft_chain_cpu(const DraftChainParams& p);

DOMINO_HD int64_t clamp_id(int64_t id, int64_t vocab) {
  return id < 0 ? 0 : id < vocab ? id : vocab - 1;
}

}  // namespace domino
