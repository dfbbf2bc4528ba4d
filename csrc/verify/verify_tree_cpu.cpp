#include <algorithm>
#include <vector>

#include "verify/row_cut_cpu.h"
#include "verify/row_stats.h"
#include "verify/tree_walk.h"

namespace domino {

namespace {

// Rows are read when the walk asks for them.
class LazyRows {
 public:
  explicit LazyRows(const TreeRequest& r) : r_(r), target_(r.nodes), draft_(r.nodes) {}

  const RowStats& target(int n) {
    return get(target_[n], r_.target_row(n), law_scale(r_.temperature));
  }
  const RowStats& draft(int n) {
    return get(draft_[n], r_.draft_row(n), law_scale(r_.draft_temperature));
  }

  NodeLaw law(int n) {
    const RowStats& stats = target(n);
    const FilterParams filters = r_.filters();
    if (!filters.any(r_.p.vocab)) return {stats, r_.temperature, nullptr};
    Entry& entry = target_[n];
    if (!entry.cut_known) {
      const RowLaw law(stats, r_.temperature);
      entry.cut = find_cut(r_.target_row(n), r_.p.vocab, stats, law, filters);
      entry.cut_known = true;
    }
    return {stats, r_.temperature, &entry.cut};
  }

 private:
  struct Entry {
    bool known = false, cut_known = false;
    RowStats stats;
    RowFilter cut;
  };
  const RowStats& get(Entry& entry, const LogitRow& row, float scale) {
    if (!entry.known) entry.stats = row_stats_cpu(row, r_.p.vocab, scale);
    entry.known = true;
    return entry.stats;
  }
  const TreeRequest& r_;
  std::vector<Entry> target_, draft_;
};

// p and q of one node over the tokens that q is known for, and what of p lies outside of them.
struct Laws {
  std::vector<int64_t> tokens;  // of a pool; empty: the whole vocabulary
  std::vector<float> p, q;
  uint64_t outside = 0;  // units of p
  uint64_t drafted = 0;  // units of q that are not drawn yet
  bool usable = false;

  // Where x stands, -1 where q gives it nothing.
  int64_t find(int64_t x) const {
    if (tokens.empty()) return q[x] > 0.0f ? x : -1;
    for (size_t m = 0; m < tokens.size(); ++m)
      if (tokens[m] == x && q[m] > 0.0f) return static_cast<int64_t>(m);
    return -1;
  }
  uint64_t units_over(float rho) const {
    uint64_t units = outside;
    for (size_t m = 0; m < p.size(); ++m) units += to_units(add_rn(p[m], -mul_rn(rho, q[m])));
    return units;
  }
};

class Walk {
 public:
  explicit Walk(const TreeRequest& r) : r_(r), rows_(r), next_(r.nodes, -1), child_(r.nodes, -1) {
    for (int n = r.nodes - 1; n > 0; --n) {
      faults_ |= r.parent_fault(n);
      const int parent = r.parent(n);
      if (parent < 0) continue;
      next_[n] = child_[parent];
      child_[parent] = n;
    }
  }

  void run() {
    uint32_t status = faults_;
    int n = 0;
    NodeRecord record;
    std::vector<int> path;
    if (r_.rule == TreeRule::kTraversal) {
      n = traverse(&record, &status);
      for (int at = n; at >= 0; at = r_.parent(at)) path.push_back(at);
      std::reverse(path.begin(), path.end());
    } else {
      for (;; n = record.step) {
        path.push_back(n);
        record = descend(n, static_cast<int>(path.size()) - 1);
        status |= record.status;
        if (record.step < 0) break;
      }
    }
    const RowStats& stats = rows_.target(n);
    int64_t last = record.stats.argmax;
    if (stats.faults != 0) {
      status |= stats.faults;
      last = -1;
    } else if (draw_kind(r_.rule, record) != TreeDraw::kNone) {
      if (record.moved != 0 && record.keep == 0.0f) status |= kZeroResidual;
      last = draw(n, record);
      if (last < 0) {
        status |= kZeroResidual;
        last = draw(n, fresh_record(stats, 1.0f));
      }
    }
    emit(path, last, status);
  }

 private:
  NodeRecord descend(int n, int depth) {
    const RowStats& stats = rows_.target(n);
    NodeRecord record = fresh_record(stats, 1.0f);
    if (stats.faults != 0) return record;
    const LogitRow row = r_.target_row(n);
    switch (r_.rule) {
      case TreeRule::kMatch: {
        const NodeLaw p = rows_.law(n);
        record.stats.argmax =
            static_cast<int32_t>(race(r_.position_noise(depth), kPositionDraw, 0,
                                      [&](int64_t x) { return p.weight(row.at(x), x); }));
        [[fallthrough]];
      }
      case TreeRule::kGreedy:
        for (int c = child_[n]; c >= 0 && record.step < 0; c = next_[c])
          if (r_.usable(r_.token(c), &record.status) && r_.token(c) == record.stats.argmax)
            record.step = c;
        return record;
      case TreeRule::kTargetOnly: {
        const NodeLaw p = rows_.law(n);
        const float u = r_.coin(n);
        float sum = 0.0f;
        for (int c = child_[n]; c >= 0 && record.step < 0; c = next_[c]) {
          const int64_t x = r_.token(c);
          if (!r_.usable(x, &record.status) || repeats(n, c)) continue;
          record.moved = 1;
          const float mass = p.probability(row.at(x), x);
          sum = add_rn(sum, mass);
          if (mass > 0.0f && u <= sum) record.step = c;
        }
        return record;
      }
      default:
        judge(n, 1.0f, &record, nullptr);
        return record;
    }
  }

  // Children of n in turn: by coins (siblings), or what each starts with (traversal).
  void judge(int n, float keep, NodeRecord* record, std::vector<float>* start) {
    *record = fresh_record(rows_.target(n), keep);
    if (child_[n] < 0 || rows_.target(n).faults != 0) return;
    Residual state(keep);
    Laws laws = node_laws(n);
    for (int c = child_[n]; c >= 0; c = next_[c]) {
      const int64_t x = r_.token(c);
      if (!r_.usable(x, &record->status)) continue;
      const int64_t at = laws.usable ? laws.find(x) : -1;
      if (at < 0 || repeats(n, c)) {
        record->status |= kBadDraftLaw;
        continue;
      }
      if (state.keep == 0.0f) continue;
      if (start != nullptr) {
        (*start)[c] = state.chance(laws.p[at], laws.q[at]);
      } else if (state.accepts(r_.child_coin(c), laws.p[at], laws.q[at])) {
        record->step = c;
        break;
      }
      laws.drafted -= to_units(laws.q[at]);
      const float rho = state.next_rho();
      state.reject(start != nullptr, rho, from_units(laws.units_over(rho)),
                   from_units(laws.drafted));
    }
    record->rho = state.rho;
    record->keep = state.keep;
    record->moved = state.moved;
  }

  int traverse(NodeRecord* result, uint32_t* status) {
    std::vector<float> start(r_.nodes, 0.0f);
    std::vector<NodeRecord> records(r_.nodes);
    start[0] = 1.0f;
    for (int n = 0; n < r_.nodes; ++n) {
      if (start[n] == 0.0f) continue;
      judge(n, start[n], &records[n], &start);
      *status |= records[n].status;
    }
    // the first kept node in post-order: children come before their parent, in order
    std::vector<int> found(r_.nodes, -1);
    for (int n = r_.nodes - 1; n >= 0; --n) {
      const bool kept = n == 0 || (start[n] > 0.0f && r_.child_coin(n) <= records[n].keep);
      if (found[n] < 0 && kept) found[n] = n;
      if (n > 0 && found[n] >= 0 && r_.parent(n) >= 0) found[r_.parent(n)] = found[n];
    }
    *result = records[found[0]];
    return found[0];
  }

  bool repeats(int n, int child) const {
    for (int c = child_[n]; c != child; c = next_[c])
      if (r_.token(c) == r_.token(child)) return true;
    return false;
  }

  Laws node_laws(int n) {
    Laws laws;
    const NodeLaw p = rows_.law(n);
    const LogitRow target = r_.target_row(n);
    if (r_.p.draft_logits != nullptr) {
      if (rows_.draft(n).faults != 0) return laws;
      const RowLaw q(rows_.draft(n), r_.draft_temperature);
      const LogitRow draft = r_.draft_row(n);
      for (int64_t x = 0; x < r_.p.vocab; ++x) {
        laws.p.push_back(p.probability(target.at(x), x));
        laws.q.push_back(counted_draft(q.probability(draft.at(x))));
        laws.drafted += to_units(laws.q.back());
      }
      laws.usable = true;
      return laws;
    }
    const int32_t* ids = r_.pool_ids(n);
    const LogitRow pool = r_.pool_row(n);
    std::vector<float> logits;
    for (int64_t m = 0; m < r_.p.pool; ++m) {
      if (ids[m] < 0 || ids[m] >= r_.p.vocab) continue;
      laws.tokens.push_back(ids[m]);
      logits.push_back(pool.at(m));
    }
    const RowStats stats = pool_stats(logits);
    if (stats.faults != 0) return laws;
    const RowLaw q(stats, r_.draft_temperature);
    uint64_t inside = 0;
    for (size_t m = 0; m < logits.size(); ++m) {
      laws.p.push_back(p.probability(target.at(laws.tokens[m]), laws.tokens[m]));
      laws.q.push_back(counted_draft(q.probability(logits[m])));
      inside += to_units(laws.p.back());
      laws.drafted += to_units(laws.q.back());
    }
    const uint64_t whole = to_units(1.0f);
    laws.outside = inside < whole ? whole - inside : 0;
    laws.usable = true;
    return laws;
  }

  // The sum over a pool is that of fixed-point weights.
  RowStats pool_stats(const std::vector<float>& logits) const {
    RowStats stats{0, -INFINITY, -1, 0, 0};
    for (const float z : logits)
      if (!(z <= stats.top) && !std::isnan(stats.top)) stats.top = z;
    stats.faults = row_faults(stats.top);
    if (stats.faults != 0) return stats;
    const RowLaw law(stats.top, 1, law_scale(r_.draft_temperature));
    for (const float z : logits) stats.sum += to_fixed(law.weight(z));
    return stats;
  }

  int64_t draw(int n, const NodeRecord& record) {
    const NodeLaw p = rows_.law(n);
    const LogitRow row = r_.target_row(n);
    const TreeDraw kind = draw_kind(r_.rule, record);
    const Purpose purpose = kind == TreeDraw::kPlain ? kBonusDraw : kResidualDraw;
    if (kind != TreeDraw::kResidual) {
      std::vector<bool> out(r_.p.vocab);
      uint32_t status = 0;
      for (int c = child_[n]; c >= 0 && kind == TreeDraw::kWithoutChildren; c = next_[c])
        if (r_.usable(r_.token(c), &status)) out[r_.token(c)] = true;
      return race(r_.noise(), purpose, n,
                  [&](int64_t x) { return out[x] ? 0.0f : p.weight(row.at(x), x); });
    }
    const Laws laws = node_laws(n);
    std::vector<float> q(r_.p.vocab);
    for (size_t m = 0; m < laws.q.size(); ++m)
      q[laws.tokens.empty() ? m : laws.tokens[m]] = laws.q[m];
    return race(r_.noise(), purpose, n, [&](int64_t x) {
      return add_rn(p.probability(row.at(x), x), -mul_rn(record.rho, q[x]));
    });
  }

  template <class Weight>
  int64_t race(const BlockNoise& noise, Purpose purpose, int i, Weight weight) const {
    uint64_t best = kNoWinner;
    for (int64_t group = 0; 4 * group < r_.p.vocab; ++group) {
      const NoiseWords words = noise.words(purpose, i, static_cast<uint32_t>(group));
      for (int64_t x = 4 * group; x < std::min(4 * group + 4, r_.p.vocab); ++x)
        best = std::min(best, race_key(weight(x), words.word[x - 4 * group], x));
    }
    return best == kNoWinner ? -1 : static_cast<int64_t>(best & 0xffffffffu);
  }

  void emit(const std::vector<int>& path, int64_t last, uint32_t status) {
    const VerifyTreeParams& p = r_.p;
    const int accepted = static_cast<int>(path.size()) - 1;
    const int emitted = accepted + (last >= 0 ? 1 : 0);
    for (int i = 0; i < p.width; ++i) {
      const int64_t at = r_.b * p.width + i;
      const int64_t token = i < accepted ? r_.token(path[i + 1]) : i < emitted ? last : -1;
      p.path[at] = i <= accepted ? path[i] : -1;
      p.out_tokens[at] = token;
      if (p.chosen_logprob == nullptr) continue;
      p.chosen_logprob[at] = 0.0f;
      if (token >= 0)
        p.chosen_logprob[at] = RowLaw(rows_.target(path[i]), r_.temperature)
                                   .log_probability(r_.target_row(path[i]).at(token));
    }
    p.num_accepted[r_.b] = accepted;
    p.num_emitted[r_.b] = emitted;
    p.status[r_.b] = static_cast<uint8_t>(status);
  }

  const TreeRequest& r_;
  LazyRows rows_;
  std::vector<int> next_, child_;
  uint32_t faults_ = 0;
};

void emit_nothing(const TreeRequest& r) {
  for (int64_t at = r.b * r.p.width; at < (r.b + 1) * r.p.width; ++at) {
    r.p.path[at] = -1;
    r.p.out_tokens[at] = -1;
    if (r.p.chosen_logprob != nullptr) r.p.chosen_logprob[at] = 0.0f;
  }
  r.p.num_accepted[r.b] = 0;
  r.p.num_emitted[r.b] = 0;
  r.p.status[r.b] = static_cast<uint8_t>(r.faults);
}

}  // namespace

int verify_tree_cpu(const VerifyTreeParams& p) {
  if (p.vocab < 1 || p.vocab > kMaxVocab || p.width < 1 || p.width > kMaxTreeNodes ||
      p.pool > kMaxPool)
    return kBadArgument;
  for (int64_t b = 0; b < p.batch; ++b) {
    const TreeRequest r(p, b);
    if (r.nodes == 0) {
      emit_nothing(r);
    } else {
      Walk(r).run();
    }
  }
  return kOk;
}

}  // namespace domino
