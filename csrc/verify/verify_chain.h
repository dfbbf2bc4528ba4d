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

// Temperature 0 makes any of them greedy. Values are part of the interface.
enum class VerifyRule : int {
  kGreedy = 0,
  kToken = 1,   // accept with min(1, p / q); one-hot where there is no q
  kOneHot = 2,  // the same with q as if one-hot
  kMatch = 3,   // accept what plain seeded sampling gives; noise by position
  kBlock = 4,   // block verification
  kGumbel = 5   // as match: the drafter races its q with the same noise
};
constexpr int kRules = 6;

// What every launch reads comes first: parameters are fetched in lines of 64 bytes.
struct VerifyChainParams {
  int64_t* tokens;            // [batch, drafts + 1] contiguous, padded with -1
  int32_t* num_accepted;      // [batch]
  int32_t* num_emitted;       // [batch]
  uint8_t* status;            // [batch] bits of VerifyStatus
  void* workspace;            // CUDA: 16-byte aligned, verify_chain_workspace() bytes; CPU: unused
  const void* target_logits;  // row stride target_row_stride
  const int64_t* draft_tokens;  // [batch, drafts]
  const int32_t* cu_rows;       // [batch + 1], or null: drafts + 1 rows each
  const int32_t* num_active;    // [1]: requests from there on are inactive; null: all active
  // residual_sample, otherwise null: [batch], the slot whose rejected draft is replaced, negative
  // for none. Then drafts is 1, and of each request there is one row, which is that of the slot.
  const int32_t* residual_slot;
  const float* temperature;  // [batch], or null: greedy
  int64_t batch;
  int64_t drafts;
  int64_t vocab;
  int64_t total_rows;           // rows behind cu_rows; unused without
  int64_t target_batch_stride;  // strides in elements; unused with cu_rows
  int64_t target_row_stride;
  int64_t draft_tokens_stride;
  DType target_dtype;
  DType draft_dtype;
  VerifyRule rule;
  int filter_order;  // FilterOrder

  float* chosen_logprob;       // [batch, drafts + 1] contiguous, padded with 0; null: not wanted
  int32_t* top_ids;            // [batch, drafts + 1, top_logprobs] contiguous, padded with -1
  float* top_logprob;          // the same, padded with 0; both may be null
  const uint8_t* rules;        // [batch] of VerifyRule, or null: `rule` for all
  const int64_t* seed;         // [batch], or null with temperature
  const int64_t* block_start;  // [batch], or null with temperature
  // q: none of these (one-hot), draft_logits, draft_ids and draft_logits, or draft_logprob
  const void* draft_logits;        // [batch, drafts, vocab], with draft_ids [batch, drafts, pool]
  const int32_t* draft_ids;        // [batch, drafts, pool]; outside [0, vocab): unused
  const float* draft_logprob;      // [batch, drafts]: log q of each draft, no more
  const float* draft_temperature;  // [batch], or null: that of the target
  // filters (filter.h), each null or [batch]
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  // edits (logit_edit.h), each null or
  const float* logit_bias;          // [batch, vocab]
  const float* repetition_penalty;  // [batch]
  const float* presence_penalty;    // [batch]
  const float* frequency_penalty;   // [batch]
  const uint32_t* prompt_mask;      // [batch, words]: bit set where a token is in the prompt
  const int32_t* output_counts;     // [batch, vocab]: how often a token was generated
  const uint32_t* grammar_mask;     // [batch, drafts + 1, words] or [rows, words]: bit 1 allows
  int64_t pool;
  int64_t top_logprobs;
  int64_t draft_batch_stride;
  int64_t draft_row_stride;
  int64_t ids_batch_stride;
  int64_t ids_row_stride;
  int64_t bias_stride;
  int64_t prompt_stride;
  int64_t counts_stride;
  int64_t grammar_batch_stride;  // unused with cu_rows
  int64_t grammar_row_stride;
  bool all_stats;  // row_stats: argmax and sum of every row
};

// The fixed-point sums of a row (2^40 a token, times sqrt(2)) must fit 64 bits.
constexpr int64_t kMaxVocab = int64_t{1} << 23;

// What blocks tell each other, in front of the workspace, 0 between calls: in verify_greedy, the
// kernels of a few rows and verify_row what rows have come to; in verify_cut where a chain ends,
// and from the middle on how many of its rows have been judged.
constexpr int64_t kGreedyWords = 16384;

constexpr int64_t kRowRecordBytes = 96;  // what was found of a row
constexpr int64_t kKeptTokens = 128;     // of a row with dense q: 8 bytes each

// Bytes of CUDA workspace: the words above, of each row its chunks of 1024 tokens (16 bytes and 4),
// of each request 4, of its rows what was found, and with dense q their kept tokens.
inline int64_t verify_chain_workspace(int64_t batch, int64_t drafts, int64_t vocab, bool dense) {
  const int64_t rows = batch * (drafts + 1 + (dense ? drafts : 0));
  const int64_t words = rows * ((vocab + 1023) / 1024) + batch;
  return kGreedyWords * 8 + rows * ((vocab + 1023) / 1024) * 16 + (words + 3) / 4 * 16 +
         batch * (drafts + 1) * (kRowRecordBytes + (dense ? kKeptTokens * 8 : 0));
}
int verify_chain_cuda(const VerifyChainParams& p, void* stream);
int verify_chain_cpu(const VerifyChainParams& p);

}  // namespace domino
