#include <algorithm>
#include <vector>

#include "common/rows_times.h"
#include "head/expand.h"

namespace domino {

namespace {

// Values are kept widened to fp32; rounded() puts one back on the grid of the weights' dtype.
template <class T>
float rounded(float value) {
  return to_float(from_float<T>(value));
}

// The path that this thread works on. Paths share nothing but the weights.
template <class T, class Base>
class Expand {
 public:
  explicit Expand(const ExpandParams& p)
      : p_(p),
        state_(p.units),
        low_rank_(p.rank),
        scores_(p.candidates),
        keys_(p.candidates),
        row_(std::max({p.inputs, p.hidden_width, p.units})),
        sums_(std::max(3 * p.units, p.rank)),
        sums_s_(3 * p.units) {}

  void run(int64_t n) {
    const ExpandPath path(p_, n);
    if (path.token >= 0) {
      step_state(n, path);
      if (path.corrected) compute_low_rank(path);
      score(path);
    } else {
      std::fill(scores_.begin(), scores_.end(), -INFINITY);
    }
    if (float* out = scores_of(p_, n)) std::copy(scores_.begin(), scores_.end(), out);
    choose(n);
  }

 private:
  const float* widen(const void* matrix, int64_t offset, int64_t length) {
    const T* from = static_cast<const T*>(matrix) + offset;
    for (int64_t k = 0; k < length; ++k) row_[k] = to_float(from[k]);
    return row_.data();
  }

  void product(const void* w, int64_t column, int64_t stride, int64_t rows, int64_t length,
               const float* x, std::vector<float>& out) const {
    rows_times(static_cast<const T*>(w) + column, stride, rows, length, x, length, 1, out.data(),
               rows);
  }

  void step_state(int64_t n, const ExpandPath& path) {
    const int64_t units = p_.units;
    const float* x = widen(p_.embedding, path.token * p_.inputs, p_.inputs);
    if (!p_.recurrent()) {
      std::copy(x, x + units, state_.begin());
    } else {
      if (p_.table != nullptr) {
        for (int64_t g = 0; g < 3 * units; ++g)
          sums_[g] = to_float(static_cast<const T*>(
              p_.table)[path.token * 3 * units + table_offset(g % units, g / units)]);
      } else {
        product(p_.w_ih, 0, p_.inputs, 3 * units, p_.inputs, x, sums_);
      }
      std::fill(state_.begin(), state_.end(), 0.0f);
      std::fill(sums_s_.begin(), sums_s_.end(), 0.0f);
      if (p_.parent_states != nullptr) {
        const float* s = widen(p_.parent_states, parent_offset(p_, n), units);
        std::copy(s, s + units, state_.begin());
        product(p_.w_hh, 0, units, 3 * units, units, s, sums_s_);
      }
      for (int64_t g = 0; g < units; ++g)
        state_[g] =
            rounded<T>(gru_cell(sums_[g] + sums_s_[g], sums_[units + g] + sums_s_[units + g],
                                sums_[2 * units + g], sums_s_[2 * units + g], state_[g]));
      T* out = static_cast<T*>(p_.states) + states_offset(p_, n);
      for (int64_t g = 0; g < units; ++g) out[g] = from_float<T>(state_[g]);
    }
  }

  void compute_low_rank(const ExpandPath& path) {
    const int64_t at = path.b * p_.hidden_batch_stride + path.slot * p_.hidden_slot_stride;
    const int64_t width = p_.hidden_width + p_.units;
    std::fill(low_rank_.begin(), low_rank_.end(), 0.0f);
    if (p_.kind != LowRank::kRow)
      product(p_.w1, p_.hidden_width, width, p_.rank, p_.units, state_.data(), low_rank_);
    std::fill(sums_.begin(), sums_.end(), 0.0f);
    if (p_.hidden != nullptr)
      product(p_.w1, 0, width, p_.rank, p_.hidden_width, widen(p_.hidden, at, p_.hidden_width),
              sums_);
    for (int64_t r = 0; r < p_.rank; ++r) {
      const float from_hidden = p_.from_hidden != nullptr ? p_.from_hidden[at + r] : sums_[r];
      const float row = p_.recurrent() ? 0.0f : state_[r];
      low_rank_[r] = rounded<T>(low_rank_input(p_.kind, from_hidden + low_rank_[r], row));
    }
  }

  int64_t id(int64_t b, int64_t i) const {
    return p_.pool != nullptr ? p_.pool[b * p_.candidates + i] : i;
  }

  void score(const ExpandPath& path) {
    const Base* base = static_cast<const Base*>(p_.base_logits) + path.b * p_.base_batch_stride +
                       path.slot * p_.base_slot_stride;
    const T* w2 = static_cast<const T*>(p_.w2);
    if (path.corrected && p_.pool == nullptr)
      rows_times(w2, p_.rank, p_.vocab, p_.rank, low_rank_.data(), p_.rank, 1, scores_.data(),
                 p_.vocab);
    for (int64_t i = 0; i < p_.candidates; ++i) {
      const int64_t v = id(path.b, i);
      if (v < 0 || v >= p_.vocab) {
        scores_[i] = -INFINITY;
        continue;
      }
      float delta = path.corrected ? scores_[i] : 0.0f;
      if (path.corrected && p_.pool != nullptr)
        rows_times(w2 + v * p_.rank, p_.rank, 1, p_.rank, low_rank_.data(), p_.rank, 1, &delta, 1);
      scores_[i] = ChildLaw::finite(to_float(base[v]) + delta);
    }
  }

  void choose(int64_t n) {
    const ChildLaw law(p_, n);
    const int64_t b = n / p_.paths;
    float top = -INFINITY;
    for (int64_t i = 0; i < p_.candidates; ++i) {
      const int64_t v = id(b, i);
      const float score = scores_[i];
      top = std::max(top, score);
      float value = score;
      if (law.drawn && score > -INFINITY)
        value = law.race_value(score, law.words(static_cast<uint32_t>(v / 4)).word[v % 4]);
      keys_[i] = ChildLaw::key(value, v);
    }
    int64_t child[kMaxChildren];
    float weights[kMaxChildren], scores[kMaxChildren];
    int64_t count = 0;
    const int64_t most = law.one_hot ? 1 : p_.children;
    for (; count < most; ++count) {
      const int64_t at = std::max_element(keys_.begin(), keys_.end()) - keys_.begin();
      if (keys_[at] == 0) break;
      weights[count] = law.weight(scores_[at], top);
      if (law.drawn && weights[count] == 0.0f) break;
      child[count] = id(b, at);
      scores[count] = scores_[at];
      keys_[at] = 0;
      scores_[at] = -INFINITY;
    }
    double left = 0.0;  // a long sum of small terms; the kernel adds them as a tree
    float remaining[kMaxChildren];
    for (int64_t i = 0; i < p_.candidates; ++i) left += law.weight(scores_[i], top);
    for (int64_t c = count - 1; c >= 0; --c) remaining[c] = static_cast<float>(left += weights[c]);
    const float total = static_cast<float>(left);
    if (!(total > 0.0f)) count = 0;
    for (int64_t c = 0; c < p_.children; ++c) {
      const int64_t at = n * p_.children + c;
      const bool there = c < count;
      p_.tokens[at] = there ? child[c] : -1;
      p_.log_probs[at] = there ? law.log_prob(scores[c], top, total) : -INFINITY;
      p_.log_remaining[at] = there ? law.log_remaining(remaining[c], total) : -INFINITY;
    }
  }

  const ExpandParams& p_;
  std::vector<float> state_, low_rank_, scores_;
  std::vector<uint64_t> keys_;
  std::vector<float> row_, sums_, sums_s_;
};

}  // namespace

int expand_cpu(const ExpandParams& p) {
  return dispatch_dtype(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto run = [&](auto expand) {
      for (int64_t n = 0; n < p.batch * p.paths; ++n) expand.run(n);
      return static_cast<int>(kOk);
    };
    if (p.base_dtype == p.dtype) return run(Expand<T, T>(p));
    if (p.base_dtype == DType::kF32) return run(Expand<T, float>(p));
    return static_cast<int>(kBadDtype);
  });
}

}  // namespace domino
