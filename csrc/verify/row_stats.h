// row_stats: log-sum-exp, argmax and a chosen log-probability of rows of logits, and what shards of
// the vocabulary exchange for them: a RowPartial of each shard's part of a row. Partials combine to
// the bits of the whole row, however it was cut at multiples of 128 tokens (row_law.h).
#pragma once

#include "verify/row_law.h"

namespace domino {

struct RowPartial {
  float top;       // greatest logit of the part, -inf where it has none, NaN where it holds one
  int32_t argmax;  // lowest id that has it, in the whole vocabulary
  DigitSums sums;  // of the weights on the part's own grid; counts where the exponent is huge
  float chosen;    // logit of the row's token, -inf where it lies in another part
  uint32_t unused;
};
static_assert(sizeof(RowPartial) == 40);

struct RowStatsParams {
  float* lse;                // [rows]: log sum exp(logits / temperature)
  int64_t* argmax;           // [rows], -1 where the row has none
  float* logprob;            // [rows]: log p of the row's token, or null
  uint8_t* status;           // [rows]: kNonFinite, kEmptyRow, kBadId
  RowPartial* partials;      // [parts, rows]: written by row_stats (parts = 1), read by combine
  int32_t* top_ids;          // [rows, top_logprobs], padded with -1, or null
  float* top_logprob;        // the same, padded with 0
  void* workspace;           // CUDA: verify_chain_workspace(rows, 0, vocab, false) bytes
  const void* logits;        // [rows, vocab]
  const int64_t* tokens;     // [rows]: ids in the whole vocabulary; or null
  const float* temperature;  // [rows], or null: 1
  int64_t rows;
  int64_t vocab;        // of this part
  int64_t vocab_start;  // id of the part's first token
  int64_t vocab_total;  // of the whole vocabulary
  int64_t row_stride;
  int64_t parts;
  int64_t top_logprobs;
  DType dtype;
};

// The statistics of a row from its parts, of_part(0 .. parts - 1); chosen: the row's token's logit,
// -inf where it has none.
template <class OfPart>
DOMINO_HD RowStats join_partials(OfPart of_part, int64_t parts, float scale, float* chosen) {
  RowStats stats{0, -INFINITY, -1, 0, 0};
  *chosen = -INFINITY;
  for (int64_t part = 0; part < parts; ++part) {
    const RowPartial& from = of_part(part);
    if (!(from.top < INFINITY)) stats.faults = kNonFinite;
    if (from.top > stats.top || (from.top == stats.top && from.argmax < stats.argmax)) {
      stats.top = from.top;
      stats.argmax = from.argmax;
    }
    *chosen = from.chosen > *chosen ? from.chosen : *chosen;
  }
  if (stats.faults == 0) stats.faults = row_faults(stats.top);
  if (stats.faults != 0) return stats;
  const RowExponent exponent(stats.top, scale);
  DigitSums sums;
  for (int64_t part = 0; part < parts; ++part) {
    const RowPartial& from = of_part(part);
    if (from.top == -INFINITY) continue;
    const RowExponent own(from.top, scale);
    if (exponent.huge) {
      if (from.top == stats.top) sums.at[0] += from.sums.at[0];
    } else if (!own.huge) {
      sums.add(from.sums.at, exponent.grid() - own.grid());
    }
  }
  stats.sum = exponent.huge ? sums.at[0] << 40 : sums.fixed(exponent);
  return stats;
}

// The same of row `row` of [parts, rows].
DOMINO_HD RowStats join_partials(const RowPartial* partials, int64_t parts, int64_t rows,
                                 int64_t row, float scale, float* chosen) {
  return join_partials(
      [=](int64_t part) -> const RowPartial& { return partials[part * rows + row]; }, parts, scale,
      chosen);
}

// Is there a law at this temperature? A row without one is not read.
DOMINO_HD bool is_temperature(float value) { return value >= 0.0f && value <= FLT_MAX; }
DOMINO_HD RowStats unread_row() { return {0, NAN, 0, kNonFinite, 0}; }

// Joins the parts of row `row` and writes what the row's tensors are to hold.
DOMINO_HD void write_row_stats(const RowStatsParams& p, int64_t row) {
  const float temperature = p.temperature != nullptr ? p.temperature[row] : 1.0f;
  const float scale = law_scale(temperature);
  float chosen;
  RowStats stats = join_partials(p.partials, p.parts, p.rows, row, scale, &chosen);
  if (!is_temperature(temperature)) stats.faults = kBadParameter;
  const bool usable = stats.faults == 0;
  const RowLaw law(usable ? stats.top : 0.0f, usable ? stats.sum : 1, scale);
  p.argmax[row] = usable ? stats.argmax : -1;
  p.lse[row] = !usable ? NAN : law.log_mass();
  if (p.logprob != nullptr) {
    const int64_t token = p.tokens[row];
    const bool exists = token >= 0 && token < p.vocab_total;
    if (!exists && token != -1) stats.faults |= kBadId;
    p.logprob[row] = !usable || !exists ? 0.0f : law.log_probability(chosen);
  }
  p.status[row] = static_cast<uint8_t>(stats.faults);
}

// Also the digits, where asked for.
RowStats row_stats_cpu(const LogitRow& row, int64_t vocab, float scale,
                       DigitSums* digits = nullptr);

int row_stats_cuda(const RowStatsParams& p, void* stream);
int row_stats_cpu(const RowStatsParams& p);
// Only write_row_stats: from partials that several shards wrote.
int combine_row_stats_cuda(const RowStatsParams& p, void* stream);
int combine_row_stats_cpu(const RowStatsParams& p);

}  // namespace domino
