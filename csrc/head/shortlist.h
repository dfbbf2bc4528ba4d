// shortlist: the `size` largest base logits of a draft block, exactly.
//
//   value(b, s, v) = base_logits[b, s, v] + bias[b, v], -inf where the mask or vocab_valid exclude
//   v pools == 1:      the ids of the largest max over s of value(b, s, v), for each b pools ==
//   slots:  the ids of the largest value(b, s, v), for each b and s
//
// Equal values: the lowest id first; NaN counts as -inf. Ids come in ascending order.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace domino {

constexpr int kKeyTile = 128;  // ids: rows of keys are padded to it and cut at its multiples

struct ShortlistParams {
  int32_t* ids;               // [batch, pools, size], contiguous
  float* scores;              // optional, as ids: the value of each
  void* workspace;            // shortlist_workspace() bytes, 16-byte aligned; CUDA only
  const void* base_logits;    // [batch, slots, vocab]
  const uint32_t* mask;       // optional [batch, mask_stride]: bit v % 32 of word v / 32: allowed
  const float* bias;          // optional [batch, bias_stride]
  const int32_t* num_active;  // optional [1]: rows from it on are left alone
  int64_t batch;
  int64_t slots;
  int64_t vocab;
  int64_t vocab_valid;  // ids from it on are excluded
  int64_t pools;
  int64_t size;               // <= vocab_valid
  int64_t base_batch_stride;  // strides in elements
  int64_t base_slot_stride;
  int64_t mask_stride;
  int64_t bias_stride;
  DType dtype;
  bool portable;  // nothing above sm_80, on any GPU
};

int64_t shortlist_workspace(int64_t batch, int64_t pools, int64_t vocab);
int shortlist_cuda(const ShortlistParams& p, void* stream);
int shortlist_cpu(const ShortlistParams& p);

}  // namespace domino
