// Rows on the CPU: tiles of fp32 logits, and the cut of the filters (filter.h).
#pragma once

#include <algorithm>

#include "verify/filter.h"
#include "verify/row_law.h"

namespace domino {

constexpr int kTile = 1024;

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
