// vocab_winners: the argmax over a vocabulary, or over a shard of one, of corrected logits.
//
//   key(b, s) = max over v in [0, vocab) of argmax_key(base[b, s, v] + W2[v] u[b, s], first_id + v)
//
// with the bias added to base first, and -inf where the mask or vocab_valid exclude v. Keys of the
// shards of a vocabulary are joined by their maximum: the result is that of the whole, bit for bit.
// Order of a score's sum on CUDA: draft_chain.h; the CPU twin's is its own, the same for any shard.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace domino {

struct VocabWinnersParams {
  int64_t* keys;              // [batch, slots], contiguous: argmax_key with the top bit flipped
  const void* base_logits;    // [batch, slots, vocab] of base_dtype
  const void* low_rank;       // [batch, slots, rank]; null: no correction
  const void* w2;             // [vocab, rank], contiguous
  const uint32_t* mask;       // optional [batch, mask_stride]: bit v % 32 of word v / 32: allowed
  const float* bias;          // optional [batch, bias_stride]
  const int32_t* num_active;  // optional [1]: rows from it on are left alone
  int64_t batch;
  int64_t slots;
  int64_t vocab;
  int64_t vocab_valid;  // ids from it on are excluded; may be 0
  int64_t rank;
  int64_t first_id;
  int64_t base_batch_stride;  // strides in elements
  int64_t base_slot_stride;
  int64_t low_rank_batch_stride;
  int64_t low_rank_slot_stride;
  int64_t mask_stride;
  int64_t bias_stride;
  DType dtype;       // of low_rank and w2
  DType base_dtype;  // dtype or fp32
};

constexpr uint64_t kTopBit = uint64_t{1} << 63;  // so that the order of keys is that of int64

int vocab_winners_cuda(const VocabWinnersParams& p, void* stream);
int vocab_winners_cpu(const VocabWinnersParams& p);

}  // namespace domino
