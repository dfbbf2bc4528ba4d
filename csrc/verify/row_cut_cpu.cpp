#include "verify/row_cut_cpu.h"

#include <utility>
#include <vector>

namespace domino {

static uint64_t mass_of_row(const LogitRow& row, int64_t vocab, const RowLaw& law) {
  float tile[kTile];
  uint64_t mass = 0;
  for (int64_t first = 0; first < vocab; first += kTile) {
    const int count = load_tile(row, first, vocab, tile);
    for (int j = 0; j < count; ++j) mass += to_fixed(law.weight(tile[j]));
  }
  return mass;
}

// The tokens that the filters leave, and their mass (filter.h). Only tokens down to some octaves
// below the greatest weight are sorted, more where these do not settle it: in a peaked row the
// first step takes a handful.
RowFilter find_cut(const LogitRow& row, int64_t vocab, const RowStats& stats, const RowLaw& law,
                   const FilterParams& f, bool by_value) {
  const float lowest = f.lowest_exponent(law);
  const bool ranked = f.by_rank(vocab);
  const bool by_both = f.order == FilterOrder::kVllm && (ranked || f.by_weight());
  const uint64_t row_mass = by_value && f.by_mass() ? mass_of_row(row, vocab, law) : stats.sum;
  std::vector<std::pair<float, int32_t>> tokens;
  const auto likelier = [](const auto& a, const auto& b) {
    return a.first > b.first || (a.first == b.first && a.second < b.second);
  };
  for (float octaves = 8.0f;; octaves *= 4.0f) {
    const bool all = octaves > 100.0f;
    const float floor = all ? -FLT_MAX : law.exponent(stats.top) - octaves;
    float tile[kTile];
    tokens.clear();
    for (int64_t first = 0; first < vocab; first += kTile) {
      const int count = load_tile(row, first, vocab, tile);
      for (int j = 0; j < count; ++j)
        if (law.exponent(tile[j]) >= floor && law.weight(tile[j]) > 0.0f)
          tokens.emplace_back(tile[j], static_cast<int32_t>(first + j));
    }
    const size_t k = ranked ? static_cast<size_t>(f.top_k) : tokens.size();
    if (tokens.size() < k && !all) continue;
    std::sort(tokens.begin(), tokens.end(), likelier);

    size_t top_k = std::min(k, tokens.size()), min_p = 0;
    while (top_k < tokens.size() && tokens[top_k].first == tokens[top_k - 1].first) ++top_k;
    while (min_p < tokens.size() && law.exponent(tokens[min_p].first) >= lowest) ++min_p;
    const size_t kept = std::min(top_k, min_p);
    const auto mass_of = [&](size_t count) {
      uint64_t mass = 0;
      for (size_t n = 0; n < count; ++n) mass += to_fixed(law.weight(tokens[n].first));
      return mass;
    };
    // are the tokens that top-k and min-p keep all above the floor?
    const bool complete = all || ranked || min_p < tokens.size();
    if (!complete && (by_both || !f.by_mass())) continue;
    uint64_t base = row_mass;
    if (by_both) base = mass_of(kept);
    if (f.order == FilterOrder::kTransformers && ranked) base = mass_of(top_k);

    const uint64_t cut = nucleus_cut(base, f.top_p);
    RowFilter out;
    size_t count = 0;
    while (count < kept && out.mass < cut) out.mass += to_fixed(law.weight(tokens[count++].first));
    if (out.mass < cut && !complete) continue;
    out.cut_logit = tokens[count - 1].first;
    out.cut_id = tokens[count - 1].second;
    return out;
  }
}

}  // namespace domino
