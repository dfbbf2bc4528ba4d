#include <algorithm>
#include <cmath>
#include <vector>

#include "common/argmax_key.h"
#include "common/rows_times.h"
#include "head/vocab_winners.h"

namespace domino {

namespace {

template <class T, class Base>
int run(const VocabWinnersParams& p) {
  constexpr int64_t kTile = 256;  // vocabulary rows scored at a time
  const int64_t active = p.num_active ? std::min<int64_t>(*p.num_active, p.batch) : p.batch;
  const int64_t columns = active * p.slots;
  std::vector<float> u(p.low_rank ? columns * p.rank : 0), delta(columns * kTile, 0.0f);
  for (int64_t n = 0; n < (p.low_rank ? columns : 0); ++n) {
    const T* row = static_cast<const T*>(p.low_rank) + n / p.slots * p.low_rank_batch_stride +
                   n % p.slots * p.low_rank_slot_stride;
    for (int64_t k = 0; k < p.rank; ++k) u[n * p.rank + k] = to_float(row[k]);
  }
  std::vector<uint64_t> best(columns, 0);
  for (int64_t v0 = 0; v0 < p.vocab; v0 += kTile) {
    const int64_t count = std::min(kTile, p.vocab - v0);
    if (p.low_rank)
      rows_times(static_cast<const T*>(p.w2) + v0 * p.rank, p.rank, count, p.rank, u.data(), p.rank,
                 columns, delta.data(), kTile);
    for (int64_t n = 0; n < columns; ++n) {
      const int64_t b = n / p.slots;
      const Base* base = static_cast<const Base*>(p.base_logits) + b * p.base_batch_stride +
                         n % p.slots * p.base_slot_stride;
      for (int64_t v = v0; v < v0 + count; ++v) {
        float value = to_float(base[v]);
        if (p.bias) value += p.bias[b * p.bias_stride + v];
        const bool masked = p.mask && (p.mask[b * p.mask_stride + v / 32] >> (v % 32) & 1) == 0;
        if (v >= p.vocab_valid || masked) value = -INFINITY;
        const float score = value + delta[n * kTile + v - v0];
        best[n] = std::max(best[n], argmax_key(score, static_cast<uint32_t>(p.first_id + v)));
      }
    }
  }
  for (int64_t n = 0; n < columns; ++n) p.keys[n] = static_cast<int64_t>(best[n] ^ kTopBit);
  return kOk;
}

}  // namespace

int vocab_winners_cpu(const VocabWinnersParams& p) {
  return dispatch_dtype(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    if (p.base_dtype == p.dtype) return run<T, T>(p);
    if (p.base_dtype == DType::kF32) return run<T, float>(p);
    return static_cast<int>(kBadDtype);
  });
}

}  // namespace domino
