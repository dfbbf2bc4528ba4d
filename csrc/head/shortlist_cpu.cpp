#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "common/argmax_key.h"
#include "head/shortlist.h"

namespace domino {

namespace {

template <class Base>
class Shortlist {
 public:
  explicit Shortlist(const ShortlistParams& p) : p_(p), most_(p.vocab), keys_(p.vocab) {}

  int run() {
    const int64_t active = p_.num_active ? std::min<int64_t>(*p_.num_active, p_.batch) : p_.batch;
    const bool shared = p_.pools == 1;
    for (int64_t b = 0; b < active; ++b) {
      std::fill(most_.begin(), most_.end(), -INFINITY);
      for (int64_t slot = 0; slot < p_.slots; ++slot) {
        raise(b, slot);
        if (shared) continue;
        pick(b * p_.pools + slot);
        std::fill(most_.begin(), most_.end(), -INFINITY);
      }
      if (shared) pick(b);
    }
    return kOk;
  }

 private:
  float value(int64_t b, int64_t slot, int64_t v) const {
    const bool masked = p_.mask && (p_.mask[b * p_.mask_stride + v / 32] >> (v % 32) & 1) == 0;
    if (v >= p_.vocab_valid || masked) return -INFINITY;
    const float base = to_float(static_cast<const Base*>(
        p_.base_logits)[b * p_.base_batch_stride + slot * p_.base_slot_stride + v]);
    return p_.bias ? base + p_.bias[b * p_.bias_stride + v] : base;
  }

  void raise(int64_t b, int64_t slot) {
    for (int64_t v = 0; v < p_.vocab; ++v) {
      const float here = value(b, slot, v);
      if (here > most_[v]) most_[v] = here;
    }
  }

  void pick(int64_t row) {
    int32_t* ids = p_.ids + row * p_.size;
    for (int64_t v = 0; v < p_.vocab; ++v) keys_[v] = argmax_key(most_[v], v);
    std::nth_element(keys_.begin(), keys_.begin() + (p_.size - 1), keys_.end(), std::greater<>());
    for (int64_t i = 0; i < p_.size; ++i) ids[i] = key_id(keys_[i]);
    std::sort(ids, ids + p_.size);
    for (int64_t i = 0; p_.scores && i < p_.size; ++i)
      p_.scores[row * p_.size + i] = most_[ids[i]] + 0.0f;
  }

  const ShortlistParams& p_;
  std::vector<float> most_;
  std::vector<uint64_t> keys_;
};

}  // namespace

int64_t shortlist_workspace(int64_t batch, int64_t pools, int64_t vocab) {
  const int64_t padded = (vocab + kKeyTile - 1) / kKeyTile * kKeyTile;
  return batch * pools * padded * static_cast<int64_t>(sizeof(uint32_t));
}

int shortlist_cpu(const ShortlistParams& p) {
  if (p.size == 0) return kOk;
  return dispatch_dtype(p.dtype, [&](auto tag) { return Shortlist<decltype(tag)>(p).run(); });
}

}  // namespace domino
