#include <algorithm>
#include <vector>

#include "verify/chain_walk.h"

// The loops over tokens are worth a second compilation with AVX2 and FMA; the bits are the same in
// both.
#if defined(__x86_64__) && defined(__GLIBC__) && __GNUC__ >= 12 && !defined(__clang__)
#define DOMINO_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define DOMINO_CLONES
#endif

namespace domino {

namespace {

constexpr int kTile = 1024;
constexpr int kLanes = 16;

// Greatest logit of a tile, NaN left out. Lanes, because a float maximum is not reassociated.
DOMINO_CLONES float tile_top(const float* logits, int count, bool* non_finite) {
  float top[kLanes];
  std::fill_n(top, kLanes, -INFINITY);
  int bad = 0;
  for (int first = 0; first < count; first += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float z = logits[first + lane];
      top[lane] = z > top[lane] ? z : top[lane];
      bad |= !(z < INFINITY);
    }
  }
  *non_finite |= bad != 0;
  return *std::max_element(top, top + kLanes);
}

// Sum of to_fixed(weight). Upper and lower 20 bits apart: a tile of either fits 32 bits.
DOMINO_CLONES uint64_t tile_sum(const float* logits, int count, float top, float scale) {
  int32_t high = 0, low = 0;
  for (int j = 0; j < count; ++j) {
    const float scaled = token_weight(logits[j], top, scale) * 0x1p20f;
    const int32_t whole = static_cast<int32_t>(scaled);
    high += whole;
    low += static_cast<int32_t>((scaled - static_cast<float>(whole)) * 0x1p20f);
  }
  return (static_cast<uint64_t>(high) << 20) + static_cast<uint64_t>(low);
}

// Copies logits [first, first + count) as fp32, padded with -inf to whole lanes.
int load_tile(const LogitRow& row, int64_t first, int64_t vocab, float* tile) {
  const int count = static_cast<int>(std::min<int64_t>(kTile, vocab - first));
  dispatch_dtype(row.dtype, [&](auto tag) {
    const auto* data = static_cast<const decltype(tag)*>(row.data) + first;
    for (int j = 0; j < count; ++j) tile[j] = to_float(data[j]);
    return kOk;
  });
  const int padded = (count + kLanes - 1) / kLanes * kLanes;
  std::fill(tile + count, tile + padded, -INFINITY);
  return padded;
}

RowStats row_stats(const LogitRow& row, int64_t vocab, float scale) {
  float tile[kTile];
  bool non_finite = false;
  RowStats stats{0, -INFINITY, 0, 0, 0};
  for (int64_t first = 0; first < vocab; first += kTile) {
    const int count = load_tile(row, first, vocab, tile);
    const float top = tile_top(tile, count, &non_finite);
    if (top > stats.top) {
      stats.top = top;
      stats.argmax = static_cast<int32_t>(first + (std::find(tile, tile + count, top) - tile));
    }
  }
  stats.faults = row_faults(non_finite, stats.top);
  if (stats.faults != 0) return stats;
  for (int64_t first = 0; first < vocab; first += kTile) {
    const int count = load_tile(row, first, vocab, tile);
    stats.sum += tile_sum(tile, count, stats.top, scale);
  }
  return stats;
}

// Rows are read when the walk asks for them; each is asked for more than once.
class LazyStats {
 public:
  explicit LazyStats(const ChainRequest& request) : r_(request) {}

  const RowStats& target(int i) {
    while (static_cast<int>(target_.size()) <= i) {
      const int row = static_cast<int>(target_.size());
      target_.push_back(row_stats(r_.target_row(row), r_.p.vocab, law_scale(r_.temperature)));
    }
    return target_[i];
  }

  const RowStats& draft(int i) {
    while (static_cast<int>(draft_.size()) <= i) {
      const int row = static_cast<int>(draft_.size());
      draft_.push_back(row_stats(r_.draft_row(row), r_.p.vocab, law_scale(r_.draft_temperature)));
    }
    return draft_[i];
  }

 private:
  const ChainRequest& r_;
  std::vector<RowStats> target_, draft_;
};

// race_key of each token of a tile but for its id: weights and words give orders, the least wins.
DOMINO_CLONES uint32_t tile_race(const float* weights, const uint32_t* words, int count,
                                 uint32_t* orders) {
  uint32_t best = kNoOrder;
  for (int j = 0; j < count; ++j) {
    orders[j] = race_order(weights[j], words[j]);
    best = std::min(best, orders[j]);
  }
  return best;
}

DOMINO_CLONES void tile_noise(const BlockNoise& noise, Purpose purpose, int i, int64_t first,
                              int count, uint32_t* words) {
  for (int g = 0; 4 * g < count; ++g) {
    const NoiseWords four = noise.words(purpose, i, static_cast<uint32_t>(first / 4 + g));
    for (int lane = 0; lane < 4; ++lane) words[4 * g + lane] = four.word[lane];
  }
}

DOMINO_CLONES void tile_weights(const RowLaw& law, const float* logits, int count, float* weights) {
  for (int j = 0; j < count; ++j) weights[j] = token_weight(logits[j], law.top, law.scale);
}

DOMINO_CLONES void tile_residual(const RowLaw& p, const RowLaw& q, const float* target,
                                 const float* draft, int count, float* weights) {
  for (int j = 0; j < count; ++j)
    weights[j] = add_rn(p.probability(target[j]), -q.probability(draft[j]));
}

int64_t run_race(const Draw& draw, int64_t vocab) {
  float target[kTile], draft[kTile], weights[kTile];
  uint32_t words[kTile], orders[kTile], best = kNoOrder;
  int64_t winner = -1;
  for (int64_t first = 0; first < vocab; first += kTile) {
    const int count = load_tile(draw.target, first, vocab, target);
    if (draw.dense) {
      load_tile(draw.draft, first, vocab, draft);
      tile_residual(draw.p, draw.q, target, draft, count, weights);
    } else {
      tile_weights(draw.p, target, count, weights);
      if (draw.exclude >= first && draw.exclude < first + count)
        weights[draw.exclude - first] = 0.0f;
    }
    tile_noise(draw.noise, draw.purpose, draw.i, first, count, words);
    const uint32_t order = tile_race(weights, words, count, orders);
    if (order < best) {
      best = order;
      winner = first + (std::find(orders, orders + count, order) - orders);
    }
  }
  return winner;
}

void verify_request(const VerifyChainParams& p, int64_t b) {
  const ChainRequest r(p, b);
  LazyStats stats(r);
  uint32_t status = r.faults;
  int stop = 0;
  int64_t last = -1;
  if (r.rows > 0) {
    Slot slot = decide_slot(r, 0, stats);
    status |= slot.status;
    while (slot.outcome == Outcome::kAccept) {
      slot = decide_slot(r, ++stop, stats);
      status |= slot.status;
    }
    if (slot.outcome == Outcome::kArgmax) {
      last = stats.target(stop).argmax;
    } else if (slot.outcome != Outcome::kFail) {
      last = run_race(Draw(r, stop, slot.outcome, slot.exclude, stats), p.vocab);
      if (last < 0) {
        status |= kZeroResidual;
        last = run_race(Draw(r, stop, Outcome::kDraw, -1, stats), p.vocab);
      }
    }
  }
  for (int i = 0; i <= p.drafts; ++i) emit_slot(r, i, stop, last, stats);
  emit_counts(r, stop, last, status);
}

}  // namespace

int verify_chain_cpu(const VerifyChainParams& p) {
  if (p.vocab < 1 || p.vocab > kMaxVocab) return kBadArgument;
  for (int64_t b = 0; b < p.batch; ++b) verify_request(p, b);
  return kOk;
}

}  // namespace domino
