#include <algorithm>
#include <numeric>
#include <vector>

#include "verify/row_stats.h"
#include "verify/verify_chain.h"

// The loops over tokens are worth a second compilation with AVX2 and FMA; the bits are the same in
// both.
#if defined(__x86_64__) && defined(__GLIBC__) && __GNUC__ >= 12 && !defined(__clang__)
#define DOMINO_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define DOMINO_CLONES
#endif

namespace domino {

namespace {

constexpr int kTile = 8 * kSegment;
constexpr int kLanes = 16;

// Greatest logit of a tile, NaN left out. Lanes, because a float maximum is not reassociated.
DOMINO_CLONES float tile_top(const float* logits, bool* has_nan) {
  float top[kLanes];
  std::fill_n(top, kLanes, -INFINITY);
  int bad = 0;
  for (int first = 0; first < kTile; first += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float z = logits[first + lane];
      top[lane] = z > top[lane] ? z : top[lane];
      bad |= z != z;
    }
  }
  *has_nan |= bad != 0;
  return *std::max_element(top, top + kLanes);
}

// Sums of the tile's segments: balanced trees over neighbours.
DOMINO_CLONES void segment_sums(const float* logits, float lowest, float scale, float shift,
                                float* sums) {
  float w[kTile], next[kTile / 2];
  for (int j = 0; j < kTile; ++j)
    w[j] = exp2_product(logits[j] > lowest ? logits[j] : lowest, scale, shift);
  for (int width = kTile / 2; width >= kTile / kSegment; width /= 2) {
    for (int j = 0; j < width; ++j) next[j] = w[2 * j] + w[2 * j + 1];
    std::copy_n(next, width, w);
  }
  std::copy_n(w, kTile / kSegment, sums);
}

// Copies logits [first, first + kTile) as fp32, -inf behind the vocabulary.
void load_tile(const LogitRow& row, int64_t first, int64_t vocab, float* tile) {
  const int count = static_cast<int>(std::min<int64_t>(kTile, vocab - first));
  dispatch_dtype(row.dtype, [&](auto tag) {
    const auto* data = static_cast<const decltype(tag)*>(row.data) + first;
    for (int j = 0; j < count; ++j) tile[j] = to_float(data[j]);
    return kOk;
  });
  std::fill(tile + count, tile + kTile, -INFINITY);
}

}  // namespace

RowStats row_stats_cpu(const LogitRow& row, int64_t vocab, float scale, DigitSums* digits) {
  float tile[kTile];
  bool has_nan = false;
  RowStats stats{0, -INFINITY, 0, 0, 0};
  for (int64_t first = 0; first < vocab; first += kTile) {
    load_tile(row, first, vocab, tile);
    const float top = tile_top(tile, &has_nan);
    if (top > stats.top) {
      stats.top = top + 0.0f;  // -0 is +0
      stats.argmax = static_cast<int32_t>(first + (std::find(tile, tile + kTile, top) - tile));
    }
  }
  stats.faults = has_nan ? kNonFinite : row_faults(stats.top);
  if (stats.faults != 0) return stats;
  const RowExponent exponent(stats.top, scale);
  const float reference = 20.0f * static_cast<float>(exponent.grid());
  const float lowest = (reference - 120.0f) / scale, shift = kRoundMagic - reference;
  DigitSums sums;
  uint64_t equal = 0;
  for (int64_t first = 0; first < vocab; first += kTile) {
    load_tile(row, first, vocab, tile);
    if (exponent.huge) {
      equal += static_cast<uint64_t>(std::count(tile, tile + kTile, stats.top));
      continue;
    }
    float segments[kTile / kSegment];
    segment_sums(tile, lowest, scale, shift, segments);
    for (const float segment : segments) sums.add(Digits::of(segment).at, 0);
  }
  if (exponent.huge) sums.at[0] = equal;
  stats.sum = exponent.huge ? equal << 40 : sums.fixed(exponent);
  if (digits != nullptr) *digits = sums;
  return stats;
}

namespace {

// The likeliest tokens of a row, ties by id; -inf is none.
void write_top(const RowStatsParams& p, int64_t row, const LogitRow& logits, const RowLaw& law) {
  const int64_t count = std::min(p.top_logprobs, p.vocab);
  std::vector<int32_t> order(static_cast<size_t>(p.vocab));
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](int32_t a, int32_t b) {
    const float x = logits.at(a), y = logits.at(b);
    return x > y || (x == y && a < b);
  });
  for (int64_t n = 0; n < count; ++n) {
    const int32_t id = order[static_cast<size_t>(n)];
    if (logits.at(id) == -INFINITY) return;
    p.top_ids[row * p.top_logprobs + n] = id;
    p.top_logprob[row * p.top_logprobs + n] = law.log_probability(logits.at(id));
  }
}

}  // namespace

int row_stats_cpu(const RowStatsParams& p) {
  if (p.vocab < 1 || p.vocab > kMaxVocab || p.parts != 1) return kBadArgument;
  for (int64_t row = 0; row < p.rows; ++row) {
    const LogitRow logits = LogitRow{p.logits, p.dtype}.plus(row * p.row_stride);
    const float temperature = p.temperature != nullptr ? p.temperature[row] : 1.0f;
    const float scale = law_scale(temperature);
    RowPartial out{};
    RowStats stats = unread_row();
    if (is_temperature(temperature)) stats = row_stats_cpu(logits, p.vocab, scale, &out.sums);
    out.top = stats.faults == kNonFinite ? NAN : stats.top;
    out.argmax = static_cast<int32_t>(stats.argmax + p.vocab_start);
    out.chosen = -INFINITY;
    const int64_t local = p.tokens != nullptr ? p.tokens[row] - p.vocab_start : -1;
    if (local >= 0 && local < p.vocab) out.chosen = logits.at(local);
    p.partials[row] = out;
    write_row_stats(p, row);
    if (p.top_logprobs == 0) continue;
    std::fill_n(p.top_ids + row * p.top_logprobs, p.top_logprobs, -1);
    std::fill_n(p.top_logprob + row * p.top_logprobs, p.top_logprobs, 0.0f);
    if (stats.faults == 0) write_top(p, row, logits, RowLaw(stats.top, stats.sum, scale));
  }
  return kOk;
}

int combine_row_stats_cpu(const RowStatsParams& p) {
  for (int64_t row = 0; row < p.rows; ++row) write_row_stats(p, row);
  return kOk;
}

}  // namespace domino
