#include <algorithm>
#include <vector>

#include "common/argmax_key.h"
#include "common/dot_cpu.h"
#include "common/rows_times.h"
#include "head/chain_pool.h"
#include "head/draft_chain.h"
#include "head/draft_draw.h"
#include "head/gru_cell.h"

namespace domino {

namespace {

// Vectors are kept widened to fp32; rounded() puts one back on the grid of the weights' dtype.
template <class T>
float rounded(float value) {
  return to_float(from_float<T>(value));
}

template <class T>
void widen(const T* row, int64_t length, float* out) {
  for (int64_t k = 0; k < length; ++k) out[k] = to_float(row[k]);
}

template <class T, class Base>
class DraftChain {
 public:
  explicit DraftChain(const DraftChainParams& p)
      : p_(p),
        token_(p.batch),
        row_(p.batch * std::max(p.inputs, p.hidden_width)),
        gates_x_(p.batch * 3 * p.units),
        gates_s_(p.batch * 3 * p.units),
        state_(p.batch * p.units, 0.0f),
        low_rank_(p.batch * p.rank),
        from_hidden_(p.batch * p.rank),
        delta_(p.batch * kTile) {}

  int run() {
    const bool pooled = p_.pool_size > 0 && !p_.exact;
    if (pooled) find_pools();
    for (int64_t b = 0; b < p_.batch; ++b) token_[b] = p_.anchor[b];
    for (int64_t b = 0; b < active(); ++b)
      if (p_.restarts) p_.restarts[b] = 0;
    for (int64_t j = 0; j < p_.drafts; ++j) {
      if (p_.drafts > p_.prefix) step_state();
      if (j >= p_.prefix) compute_low_rank(p_.first_slot + j);
      if (!pooled || (j < p_.prefix && !p_.temperature)) {
        choose(j);
      } else {
        for (int64_t b = 0; b < active(); ++b) choose_from_pool(b, j);
      }
    }
    return kOk;
  }

 private:
  static constexpr int64_t kTile = 256;  // vocabulary rows scored at a time

  int64_t active() const {
    return p_.num_active ? std::max<int64_t>(0, std::min<int64_t>(*p_.num_active, p_.batch))
                         : p_.batch;
  }

  const Base* base_row(int64_t b, int64_t j) const {
    return static_cast<const Base*>(p_.base_logits) + b * p_.base_batch_stride +
           (p_.first_slot + j) * p_.base_slot_stride;
  }

  // The GRU's input product comes rounded from the table, where there is one.
  void read_table(int64_t b, int64_t id) {
    constexpr int64_t kUnits = 16;  // of a group in the table
    const T* row = static_cast<const T*>(p_.table) + id * 3 * p_.units;
    for (int64_t unit = 0; unit < p_.units; ++unit)
      for (int64_t gate = 0; gate < 3; ++gate)
        gates_x_[(b * 3 + gate) * p_.units + unit] =
            to_float(row[(unit / kUnits * 3 + gate) * kUnits + unit % kUnits]);
  }

  void find_pools() {
    pool_.resize(p_.batch * p_.pools * p_.pool_size);
    const int64_t first = p_.temperature || p_.prefix >= p_.drafts ? 0 : p_.prefix;
    for (int64_t b = 0; b < active(); ++b) {
      for (int64_t pool = 0; pool < p_.pools; ++pool) {
        int32_t* ids = &pool_[(b * p_.pools + pool) * p_.pool_size];
        p_.pools > 1 ? find_pool(b, pool, pool + 1, ids) : find_pool(b, first, p_.drafts, ids);
      }
    }
  }

  // The pool of the drafts [first, end).
  void find_pool(int64_t b, int64_t first, int64_t end, int32_t* ids) const {
    const PoolGroups groups(p_.pool_size);
    std::vector<uint64_t> best(groups.groups * kGroupBest, 0);
    for (int64_t v = 0; v < p_.vocab_valid; ++v) {
      float most = -INFINITY;
      for (int64_t j = first; j < end; ++j) {
        const float here = adjusted_base(p_, base_row(b, j), b, v);
        if (here > most) most = here;
      }
      uint64_t key = argmax_key(most, static_cast<uint32_t>(v));
      uint64_t* of_group = &best[groups.group_of(v) * kGroupBest];
      for (int i = 0; i < kGroupBest; ++i)
        if (key > of_group[i]) std::swap(key, of_group[i]);
    }
    for (int64_t m = 0; m < p_.pool_size; ++m) ids[m] = key_id(best[m]);
  }

  // y_{j+1} of row b: the pool's argmax, or drawn from its law
  void choose_from_pool(int64_t b, int64_t j) {
    const int32_t* pool = &pool_[(b * p_.pools + (p_.pools > 1 ? j : 0)) * p_.pool_size];
    const float temperature = p_.temperature ? p_.temperature[b] : 0.0f;
    const bool drawn = temperature > 0.0f;
    DraftDraw draw{};
    if (drawn) draw = {{p_.seed[b], p_.block_start[b]}, 1.0f / temperature, static_cast<int>(j)};
    std::vector<float> logits(p_.pool_size, -INFINITY);
    uint64_t best = 0;
    int64_t at = 0;
    for (int64_t m = 0; m < p_.pool_size; ++m) {
      const int64_t v = pool[m];
      if (v < 0) continue;
      logits[m] = adjusted_base(p_, base_row(b, j), b, v);
      if (j >= p_.prefix)
        logits[m] +=
            dot(static_cast<const T*>(p_.w2) + v * p_.rank, &low_rank_[b * p_.rank], p_.rank);
      const uint32_t id = static_cast<uint32_t>(v);
      const uint64_t key =
          argmax_key(drawn ? draw.order(logits[m], draw.bonus(id)) : logits[m], id);
      if (key > best) best = key, at = m;
    }
    const int64_t n = b * p_.drafts + j;
    token_[b] = p_.tokens[n] = pool[at];
    p_.scores[n] = logits[at];
    if (!p_.temperature) return;
    std::copy_n(pool, p_.pool_size, p_.pool_ids + n * p_.pool_size);
    std::copy_n(logits.data(), p_.pool_size, p_.pool_logits + n * p_.pool_size);
    p_.log_probs[n] = pool_log_prob(logits.data(), p_.pool_size, logits[at], temperature);
    if (!p_.dense_logits) return;
    float* const dense = p_.dense_logits + n * p_.vocab;
    std::fill_n(dense, p_.vocab, -INFINITY);
    for (int64_t m = 0; m < p_.pool_size; ++m)
      if (pool[m] >= 0) dense[pool[m]] = logits[m];
  }

  static float pool_log_prob(const float* logits, int64_t size, float logit, float temperature) {
    const float inverse = temperature > 0.0f ? 1.0f / temperature : 1.0f;
    const float top = *std::max_element(logits, logits + size);
    double sum = 0.0;
    for (int64_t m = 0; m < size; ++m) sum += std::exp((logits[m] - top) * inverse);
    return static_cast<float>((logit - top) * inverse - std::log(sum));
  }

  // S_j = GRU(E[y_j], S_{j-1}), or without a GRU E[y_j]
  void step_state() {
    const int64_t units = p_.units, inputs = p_.inputs;
    for (int64_t b = 0; b < p_.batch; ++b) {
      const int64_t id = clamp_id(token_[b], p_.vocab);
      if (p_.table) {
        read_table(b, id);
        continue;
      }
      widen(static_cast<const T*>(p_.embedding) + id * inputs, inputs, &row_[b * inputs]);
    }
    if (p_.w_hh == nullptr) {
      std::copy_n(row_.begin(), state_.size(), state_.begin());
      return;
    }
    if (!p_.table) product(p_.w_ih, inputs, 3 * units, inputs, row_, gates_x_);
    product(p_.w_hh, units, 3 * units, units, state_, gates_s_);
    for (int64_t b = 0; b < p_.batch; ++b) {
      const float* x = &gates_x_[b * 3 * units];
      const float* s = &gates_s_[b * 3 * units];
      for (int64_t g = 0; g < units; ++g) {
        float& state = state_[b * units + g];
        state = rounded<T>(gru_cell(x[g] + s[g], x[units + g] + s[units + g], x[2 * units + g],
                                    s[2 * units + g], state));
      }
    }
  }

  // u from W1h H[slot] and W1s S_j
  void compute_low_rank(int64_t slot) {
    const int64_t hidden = p_.hidden_width, width = hidden + p_.units;
    for (int64_t b = 0; b < p_.batch && hidden > 0; ++b)
      widen(static_cast<const T*>(p_.hidden) + b * p_.hidden_batch_stride +
                slot * p_.hidden_slot_stride,
            hidden, &row_[b * hidden]);
    const T* w1 = static_cast<const T*>(p_.w1);
    if (hidden > 0) product(w1, width, p_.rank, hidden, row_, from_hidden_);
    if (p_.kind != LowRank::kRow) product(w1 + hidden, width, p_.rank, p_.units, state_, low_rank_);
    for (int64_t i = 0; i < p_.batch * p_.rank; ++i) {
      const float row = p_.w_hh == nullptr ? state_[i] : 0.0f;
      low_rank_[i] = rounded<T>(low_rank_input(p_.kind, from_hidden_[i] + low_rank_[i], row));
    }
  }

  // y_{j+1} = argmax over the vocabulary, a tile of W2 rows at a time for the whole batch
  void choose(int64_t j) {
    const bool corrected = j >= p_.prefix;
    std::vector<uint64_t> best(p_.batch, 0);
    for (int64_t v0 = 0; v0 < p_.vocab; v0 += kTile) {
      const int64_t count = std::min(kTile, p_.vocab - v0);
      if (corrected)
        rows_times(static_cast<const T*>(p_.w2) + v0 * p_.rank, p_.rank, count, p_.rank,
                   low_rank_.data(), p_.rank, p_.batch, delta_.data(), kTile);
      for (int64_t b = 0; b < p_.batch; ++b) {
        const Base* base = base_row(b, j);
        const float* delta = &delta_[b * kTile];
        uint64_t key = best[b];
        for (int64_t v = 0; v < count; ++v) {
          const float score = adjusted_base(p_, base, b, v0 + v) + (corrected ? delta[v] : 0.0f);
          key = std::max(key, argmax_key(score, static_cast<uint32_t>(v0 + v)));
        }
        best[b] = key;
      }
    }
    for (int64_t b = 0; b < active(); ++b) {
      token_[b] = p_.tokens[b * p_.drafts + j] = key_id(best[b]);
      p_.scores[b * p_.drafts + j] = key_value(best[b]);
    }
  }

  // out[b, m] = sum_k w[m, k] x[b, k]
  void product(const void* w, int64_t stride, int64_t rows, int64_t length,
               const std::vector<float>& x, std::vector<float>& out) const {
    rows_times(static_cast<const T*>(w), stride, rows, length, x.data(), length, p_.batch,
               out.data(), rows);
  }

  const DraftChainParams& p_;
  std::vector<int64_t> token_;
  std::vector<int32_t> pool_;  // [batch, pools, pool_size]
  std::vector<float> row_, gates_x_, gates_s_, state_, low_rank_, from_hidden_, delta_;
};

}  // namespace

int draft_chain_cpu(const DraftChainParams& p) {
  return dispatch_dtype(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    if (p.base_dtype == p.dtype) return DraftChain<T, T>(p).run();
    if (p.base_dtype == DType::kF32) return DraftChain<T, float>(p).run();
    return static_cast<int>(kBadDtype);
  });
}

}  // namespace domino
