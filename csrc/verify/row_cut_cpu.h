// Rows on the CPU: their edits, tiles of fp32 logits, and the cut of the filters (filter.h).
#pragma once

#include <algorithm>
#include <vector>

#include "verify/chain_request.h"

namespace domino {

constexpr int kTile = 1024;

// Row i of a request's target with its edits; empty where it has none.
inline std::vector<float> edited_row(const ChainRequest& r, int i) {
  const RowEdits edits = r.edits(i);
  std::vector<float> out;
  if (!edits.any) return out;
  const LogitRow row = r.target_row(i);
  out.resize(static_cast<size_t>(r.p.vocab));
  for (int64_t x = 0; x < r.p.vocab; ++x) out[static_cast<size_t>(x)] = edits.apply(row.at(x), x);
  return out;
}

// Copies logits [first, first + count) as fp32.
inline int load_tile(const LogitRow& row, int64_t first, int64_t vocab, float* tile) {
  const int count = static_cast<int>(std::min<int64_t>(kTile, vocab - first));
  dispatch_dtype(row.dtype, [&](auto tag) {
    const auto* data = static_cast<const decltype(tag)*>(row.data) + first;
    for (int j = 0; j < count; ++j) tile[j] = to_float(data[j]);
    return kOk;
  });
  return count;
}

// The tokens of a usable row that the filters leave, and their mass.
RowFilter find_cut(const LogitRow& row, int64_t vocab, const RowStats& stats, const RowLaw& law,
                   const FilterParams& f, bool by_value = false);

}  // namespace domino
