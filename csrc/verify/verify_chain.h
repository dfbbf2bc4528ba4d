// verify_chain: which drafts of each request's chain are kept, and the token that follows them.
//
// Request b has rows of target logits for slots 0..n, n <= drafts. Slot i holds the law of the
// token after drafts 0..i-1, so it judges draft i; slot n has no draft and gives the bonus token.
// The walk stops at the first slot that does not accept, and that slot emits the last token.
// The rules, the noise and every degenerate case: chain_walk.h, which kernel and twin share.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace domino {

struct VerifyChainParams {
  int64_t* tokens;                 // [batch, drafts + 1] contiguous, padded with -1
  int32_t* num_accepted;           // [batch]
  int32_t* num_emitted;            // [batch]
  float* chosen_logprob;           // [batch, drafts + 1] contiguous, padded with 0
  uint8_t* status;                 // [batch] bits of VerifyStatus
  void* workspace;                 // CUDA: 8-byte aligned, see below; CPU: unused
  const void* target_logits;       // row stride target_row_stride
  const int64_t* draft_tokens;     // [batch, drafts]
  const float* temperature;        // [batch], or null: greedy
  const int64_t* seed;             // [batch], or null with temperature
  const int64_t* block_start;      // [batch], or null with temperature
  const void* draft_logits;        // [batch, drafts, vocab], or null: one-hot drafts
  const float* draft_temperature;  // [batch], or null: that of the target
  const int32_t* cu_rows;          // [batch + 1], or null: drafts + 1 rows each
  int64_t batch;
  int64_t drafts;
  int64_t vocab;
  int64_t total_rows;           // rows behind cu_rows; unused without
  int64_t target_batch_stride;  // strides in elements; unused with cu_rows
  int64_t target_row_stride;
  int64_t draft_tokens_stride;
  int64_t draft_batch_stride;
  int64_t draft_row_stride;
  DType target_dtype;
  DType draft_dtype;
};

// The fixed-point sums of a row (2^40 a token) must fit 64 bits.
constexpr int64_t kMaxVocab = int64_t{1} << 23;

// Bytes of workspace: drafts + 1 rows a request, and `drafts` more with draft_logits, of
// kRowStatsBytes, then kDrawStateBytes a request. Nothing in it outlives a call.
constexpr int64_t kRowStatsBytes = 24;
constexpr int64_t kDrawStateBytes = 16;

int verify_chain_cuda(const VerifyChainParams& p, void* stream);
int verify_chain_cpu(const VerifyChainParams& p);

}  // namespace domino
