// Where the filters cut a row (filter.h) of which only the likeliest tokens are known, in order,
// and its whole mass: what shards of a vocabulary tell each other.
//
// A token is a word that rises with its place: falling logit, then rising id. Every list is all of
// its shard's tokens down to its last one, so the tokens down to the earliest of the last ones,
// over the lists that are full, are all of the row's. Where the cut lies among them it is exact,
// and it is said if it may not.
#pragma once

#include "common/argmax_key.h"
#include "verify/filter.h"

namespace domino {

constexpr uint64_t kNoToken = ~uint64_t{0};

DOMINO_HD uint64_t token_word(float logit, int64_t token) {
  return ~argmax_key(logit, static_cast<uint32_t>(token));
}
DOMINO_HD int64_t word_token(uint64_t word) { return static_cast<uint32_t>(word); }
DOMINO_HD float word_logit(uint64_t word) { return key_value(~word); }

struct ListedCut {
  RowFilter filter;
  int kept;       // tokens of the list
  uint64_t head;  // mass of listed tokens that top-k and min-p keep
  bool settled;   // otherwise only `head` means something
};

// How many of 0 .. count - 1 have a property that the first ones have, if any.
template <class Holds>
DOMINO_HD int count_while(int count, Holds holds) {
  int low = 0;
  while (count > 0) {
    const int half = count / 2;
    if (holds(low + half)) {
      low += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  return low;
}

// How far the sum of to_fixed of a row's weights may be from RowStats::sum: a tree of 128 rounds
// seven times, and either sum loses up to a unit a token.
DOMINO_HD uint64_t mass_error(const RowStats& stats, int64_t vocab) {
  return (stats.sum >> 21) + 2 * static_cast<uint64_t>(vocab);
}

// tokens: the first `count` of a usable row; all: it has no other; before: mass of those in front
// of each, [count + 1]; by_value: see counts_values()
DOMINO_HD ListedCut cut_listed(const uint64_t* tokens, const uint64_t* before, int count, bool all,
                               const RowStats& stats, const RowLaw& law, const FilterParams& f,
                               int64_t vocab, bool by_value) {
  const bool ranked = f.by_rank(vocab);
  int by_rank = count, by_weight = count;
  if (ranked && f.top_k <= count) {
    const uint64_t last = tokens[f.top_k - 1] | 0xffffffffu;
    by_rank = count_while(count, [&](int n) { return tokens[n] <= last; });
  }
  if (f.by_weight()) {
    const float lowest = f.lowest_exponent(law);
    by_weight =
        count_while(count, [&](int n) { return law.exponent(word_logit(tokens[n])) >= lowest; });
  }
  const int kept = by_rank < by_weight ? by_rank : by_weight;
  const bool kept_known = kept < count || all;
  ListedCut out{RowFilter(), kept, before[kept], kept_known};
  if (f.by_mass()) {
    // the mass that top_p is a share of, between two bounds
    const bool of_rank = ranked && f.order == FilterOrder::kTransformers;
    const bool of_both = f.order == FilterOrder::kVllm && (ranked || f.by_weight());
    const uint64_t error = mass_error(stats, vocab);
    uint64_t least = stats.sum - (by_value ? error : 0), most = stats.sum + (by_value ? error : 0);
    if (of_rank || of_both) {
      const int prefix = of_rank ? by_rank : kept;
      least = before[prefix];
      most = prefix < count || all ? least : stats.sum + error;
    }
    const uint64_t targets[2] = {nucleus_cut(least, f.top_p), nucleus_cut(most, f.top_p)};
    int counts[2];
    for (int n = 0; n < 2; ++n) {
      counts[n] = count_while(count + 1, [&](int m) { return before[m] < targets[n]; });
      out.settled = (n == 0 || out.settled) && (counts[n] <= kept || kept_known);
      if (counts[n] > kept) counts[n] = kept;
    }
    out.kept = counts[0];
    out.settled = out.settled && counts[0] == counts[1];
  }
  if (out.settled) {
    const uint64_t last = tokens[out.kept - 1];
    out.filter = {word_logit(last), static_cast<int32_t>(word_token(last)), before[out.kept]};
  }
  return out;
}

}  // namespace domino
