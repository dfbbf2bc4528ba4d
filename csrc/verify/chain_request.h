// What verify_chain is told of one request: rows, rule, laws, filters, edits. Kernel and twin read
// the same tensors through it.
#pragma once

#include "common/philox.cuh"
#include "verify/filter.h"
#include "verify/logit_edit.h"
#include "verify/row_law.h"
#include "verify/verify_chain.h"

namespace domino {

// Edits of one target row.
struct RowEdits {
  const float* bias = nullptr;
  const uint32_t* prompt = nullptr;
  const int32_t* counts = nullptr;
  const uint32_t* grammar = nullptr;
  const int64_t* drafts = nullptr;  // those before the row count as generated
  int before = 0;
  Penalties penalties;
  bool any = false;

  DOMINO_HD float apply(float logit, int64_t token) const {
    if (!any) return logit;
    if (bias != nullptr) logit = add_rn(logit, bias[token]);
    if (penalties.any()) {
      int32_t count = counts != nullptr ? counts[token] : 0;
      for (int i = 0; i < before; ++i) count += drafts[i] == token ? 1 : 0;
      logit = penalties.apply(logit, prompt != nullptr && mask_allows(prompt, token), count);
    }
    return grammar != nullptr && !mask_allows(grammar, token) ? -INFINITY : logit;
  }
};

constexpr int kBlockSlots = 64;  // of a request whose Z one cluster works out (draw_block.cuh)

// Does a call's kernel count the values of its rows (verify_cut.cuh, verify_listed.cuh)? Then the
// whole row's mass, where top_p is a share of that, is the sum of to_fixed of its weights,
// otherwise RowStats::sum.
DOMINO_HD bool counts_values(const VerifyChainParams& p) {
  const bool filtered = p.top_k != nullptr || p.top_p != nullptr || p.min_p != nullptr;
  const bool one_rule = p.rules == nullptr && p.residual_slot == nullptr &&
                        p.rule != VerifyRule::kGreedy &&
                        (p.rule != VerifyRule::kBlock || p.drafts < kBlockSlots);
  const bool edited = p.logit_bias != nullptr || p.repetition_penalty != nullptr ||
                      p.presence_penalty != nullptr || p.frequency_penalty != nullptr ||
                      p.grammar_mask != nullptr;
  // Z of the block rule takes all kept tokens, and without a top-k those can be most of a row
  const bool dense = (p.rule == VerifyRule::kToken || p.rule == VerifyRule::kBlock) &&
                     p.draft_logits != nullptr && p.draft_ids == nullptr;
  const bool few =
      p.draft_dtype == DType::kBF16 && (p.rule == VerifyRule::kToken || p.top_k != nullptr);
  return filtered && one_rule && p.temperature != nullptr && p.target_dtype == DType::kBF16 &&
         !edited && (!dense || few) && p.top_logprobs == 0 && !p.all_stats;
}

// Where q comes from.
enum class DraftLaw : int { kOneHot, kDense, kPool, kScalar };

struct ChainRequest {
  const VerifyChainParams& p;
  int64_t b;
  int64_t first_row = 0;
  int rows = 0;         // 0: inactive or unusable
  uint32_t faults = 0;  // kBadRows, kBadParameter
  VerifyRule rule = VerifyRule::kGreedy;
  DraftLaw q = DraftLaw::kOneHot;
  float temperature = 0.0f;
  float draft_temperature = 0.0f;
  int first_slot = 0;  // of row 0: residual_sample's slot, otherwise 0

  // draft_temperature_ahead: where it has been read; here that takes a trip to memory of its own.
  DOMINO_HD ChainRequest(const VerifyChainParams& params, int64_t request,
                         const float* draft_temperature_ahead = nullptr)
      : p(params), b(request) {
    if (p.num_active != nullptr && b >= *p.num_active) return;
    if (p.residual_slot != nullptr) {
      first_slot = p.residual_slot[b];
      if (first_slot < 0) return;
    }
    int64_t count = p.drafts + 1;
    if (p.cu_rows != nullptr) {
      first_row = p.cu_rows[b];
      count = static_cast<int64_t>(p.cu_rows[b + 1]) - first_row;
      if (count == 0) return;
      if (count < 0 || count > p.drafts + 1 || first_row < 0 || first_row + count > p.total_rows)
        faults |= kBadRows;
    }
    if (p.temperature != nullptr) {
      temperature = p.temperature[b];
      if (!(temperature >= 0.0f && temperature <= FLT_MAX)) faults |= kBadParameter;
      rule = p.rule;
      if (p.rules != nullptr) {
        if (p.rules[b] >= kRules) faults |= kBadParameter;
        rule = static_cast<VerifyRule>(p.rules[b]);
      }
      if (temperature == 0.0f) rule = VerifyRule::kGreedy;
      if (rule == VerifyRule::kGreedy) temperature = 0.0f;
      // the block rule reads rows of q, and a scalar is none
      if (rule == VerifyRule::kBlock && p.draft_logprob != nullptr) faults |= kBadParameter;
      if ((rule == VerifyRule::kToken || rule == VerifyRule::kBlock) &&
          (p.draft_logits != nullptr || p.draft_logprob != nullptr)) {
        draft_temperature = p.draft_temperature == nullptr       ? temperature
                            : draft_temperature_ahead != nullptr ? *draft_temperature_ahead
                                                                 : p.draft_temperature[b];
        if (!(draft_temperature >= 0.0f && draft_temperature <= FLT_MAX)) faults |= kBadParameter;
        if (draft_temperature > 0.0f)
          q = p.draft_logits == nullptr ? DraftLaw::kScalar
              : p.draft_ids != nullptr  ? DraftLaw::kPool
                                        : DraftLaw::kDense;
      }
    }
    rows = faults != 0 ? 0 : static_cast<int>(count);
  }

  // What another thread has found out, of parameters at hand.
  DOMINO_HD ChainRequest(const VerifyChainParams& params, const ChainRequest& known)
      : p(params),
        b(known.b),
        first_row(known.first_row),
        rows(known.rows),
        faults(known.faults),
        rule(known.rule),
        q(known.q),
        temperature(known.temperature),
        draft_temperature(known.draft_temperature),
        first_slot(known.first_slot) {}

  // Rows that exist: those of a residual are its own and, never looked at, the one behind it.
  DOMINO_HD int judged_rows() const { return p.residual_slot != nullptr && rows > 0 ? 1 : rows; }
  DOMINO_HD bool greedy() const { return rule == VerifyRule::kGreedy; }
  DOMINO_HD bool by_block() const { return rule == VerifyRule::kBlock && q != DraftLaw::kOneHot; }

  DOMINO_HD int64_t draft_token(int i) const {
    return p.draft_tokens[b * p.draft_tokens_stride + i];
  }

  DOMINO_HD LogitRow target_row(int i) const {
    const int64_t offset = p.cu_rows != nullptr
                               ? (first_row + i) * p.target_row_stride
                               : b * p.target_batch_stride + i * p.target_row_stride;
    return LogitRow{p.target_logits, p.target_dtype}.plus(offset);
  }

  // Of the vocabulary, or of the pool.
  DOMINO_HD LogitRow draft_row(int i) const {
    return LogitRow{p.draft_logits, p.draft_dtype}.plus(b * p.draft_batch_stride +
                                                        i * p.draft_row_stride);
  }

  DOMINO_HD const int32_t* draft_ids(int i) const {
    return p.draft_ids + b * p.ids_batch_stride + i * p.ids_row_stride;
  }

  DOMINO_HD RowEdits edits(int i) const {
    RowEdits out;
    if (p.logit_bias != nullptr) out.bias = p.logit_bias + b * p.bias_stride;
    if (p.repetition_penalty != nullptr) out.penalties.repetition = p.repetition_penalty[b];
    if (p.presence_penalty != nullptr) out.penalties.presence = p.presence_penalty[b];
    if (p.frequency_penalty != nullptr) out.penalties.frequency = p.frequency_penalty[b];
    if (out.penalties.any()) {
      if (p.prompt_mask != nullptr) out.prompt = p.prompt_mask + b * p.prompt_stride;
      if (p.output_counts != nullptr) out.counts = p.output_counts + b * p.counts_stride;
      out.drafts = p.draft_tokens + b * p.draft_tokens_stride;
      out.before = i;
    }
    if (p.grammar_mask != nullptr)
      out.grammar = p.grammar_mask + (p.cu_rows != nullptr
                                          ? (first_row + i) * p.grammar_row_stride
                                          : b * p.grammar_batch_stride + i * p.grammar_row_stride);
    out.any = out.bias != nullptr || out.penalties.any() || out.grammar != nullptr;
    return out;
  }

  // A request with temperature 0 has no filters.
  DOMINO_HD FilterParams filters() const { return greedy() ? FilterParams{} : read_filters(p, b); }

  DOMINO_HD BlockNoise noise() const { return {p.seed[b], p.block_start[b]}; }
  // Of the token that row i is about, for rules whose output is a function of the position.
  DOMINO_HD BlockNoise position_noise(int i) const {
    return {p.seed[b], p.block_start[b] + 1 + first_slot + i};
  }
};

}  // namespace domino
