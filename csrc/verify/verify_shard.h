// verify_chain where the vocabulary is split over shards: what one of them finds.
//
//   verify_shard_rows  of each row of the shard's columns, edited, a RowPartial and, for filters,
//   the
//                      likeliest tokens; gathered from all
//   verify_shard       judges the slots and races for their tokens among the shard's own
//
// With what all shards gathered a shard knows each row's law and, as any other shard does, how far
// the walk comes; the token at its end is raced for among the shard's own tokens, and the least key
// of all shards wins. Rules, noise and bits are those of verify_chain (chain_walk.h). Where a
// filter cuts behind the tokens that were gathered the walk ends without a token, and says so
// (kUnsettled): flat rows, which have to be looked at whole.
//
// By the block rule the walk ends where sums over whole rows say (Z of block_walk.h): a shard adds
// up its own part of each, and whoever joins the shards adds the parts and walks. Every row races
// ahead for what would follow it.
#pragma once

#include "verify/block_walk.h"
#include "verify/chain_walk.h"
#include "verify/listed_cut.h"
#include "verify/row_stats.h"

namespace domino {

enum class ShardVerdict : uint8_t {
  kAccept = 0,
  kLast = 1,           // the walk ends here with the token of the least key
  kFail = 2,           // it ends without one
  kNeedsResidual = 3,  // scalar q: the same, residual_sample has the token
  kMatch = 4,          // the token of the least key: where it is the draft, the walk goes on
  kUnsettled = 5,      // it ends without a token: a filter's cut is not known
  kBlock = 6           // a draft of a chain by the block rule; the token of the least key follows
                       // where the walk ends here
};

// The call of verify_chain that the shards make up, of which a shard has its columns: those of
// target_logits, dense draft_logits, logit_bias and output_counts, and the words of the masks.
// vocab is the whole vocabulary; outputs of verify_chain and residual_slot are not used.
struct VerifyShardParams : VerifyChainParams {
  uint8_t* verdict;      // [batch, drafts + 1] of ShardVerdict; of rows behind kFail anything
  uint8_t* slot_status;  // the same: the bits of that slot
  float* logprob;        // the same: log p of the draft, 0 where it is none
  int64_t* keys;       // [2, batch, drafts + 1]: of the race, and of the one in its place where no
                       // token of any shard has weight; kNoShardKey: none
  float* key_logprob;  // the same: log p of the key's token
  // of drafts by the block rule, otherwise 0; where a cut is not known of them q alone
  float* draft_laws;    // [3, batch, drafts + 1]: filtered p, q (1 as one-hot), and the coin
  int64_t* row_masses;  // the same: of what is kept, the shard's part of Z as far as it lies on
                        // what q covers, and the shard's part of the mass there
  // [parts, batch, rows_per_request(), row_words()], of target rows, then of q's where they are
  // dense: a RowPartial, then the words of the row's `listed` likeliest tokens (listed_cut.h),
  // which only filtered rows have, kNoToken behind them; parts is 1 where they are written
  uint64_t* partials;
  int64_t parts;
  int64_t listed;
  int64_t vocab_start;  // id of the shard's first token, a multiple of 128
  int64_t shard_vocab;

  DOMINO_HD bool dense() const { return draft_logits != nullptr && draft_ids == nullptr; }
  DOMINO_HD int64_t rows_per_request() const { return drafts + 1 + (dense() ? drafts : 0); }
  DOMINO_HD int64_t row_words() const {
    return static_cast<int64_t>(sizeof(RowPartial) / sizeof(uint64_t)) + listed;
  }
  // Of row `row` of request b.
  DOMINO_HD RowPartial& partial(int64_t part, int64_t b, int64_t row) const {
    const int64_t at = (part * batch + b) * rows_per_request() + row;
    return *reinterpret_cast<RowPartial*>(partials + at * row_words());
  }
  DOMINO_HD uint64_t* list(int64_t part, int64_t b, int64_t row) const {
    return reinterpret_cast<uint64_t*>(&partial(part, b, row) + 1);
  }
};

// As an integer with a sign, so that an all-reduce with the minimum joins keys.
constexpr int64_t kNoShardKey = INT64_MAX;

// The call with pointers to where token 0 of the whole vocabulary would be: ids are the same
// everywhere.
inline VerifyShardParams in_whole_ids(VerifyShardParams p) {
  const auto move = [&](auto& columns, int64_t bytes) {
    using Pointer = std::remove_reference_t<decltype(columns)>;
    if (columns != nullptr)
      columns = reinterpret_cast<Pointer>(reinterpret_cast<uintptr_t>(columns) -
                                          static_cast<uintptr_t>(bytes));
  };
  move(p.target_logits, p.vocab_start * (p.target_dtype == DType::kF32 ? 4 : 2));
  if (p.dense()) move(p.draft_logits, p.vocab_start * (p.draft_dtype == DType::kF32 ? 4 : 2));
  move(p.logit_bias, p.vocab_start * 4);
  move(p.output_counts, p.vocab_start * 4);
  move(p.prompt_mask, p.vocab_start / 8);
  move(p.grammar_mask, p.vocab_start / 8);
  return p;
}

// The rows alone, as if the shard's columns were all that there are.
inline VerifyChainParams rows_of_shard(const VerifyShardParams& p) {
  VerifyChainParams out = p;
  out.vocab = p.shard_vocab;
  out.all_stats = true;
  return out;
}

// A row of the shard as the law has it.
struct ShardRow {
  LogitRow logits;
  RowEdits edits;

  DOMINO_HD ShardRow(const ChainRequest& r, int i) : logits(r.target_row(i)), edits(r.edits(i)) {}
  DOMINO_HD float at(int64_t token) const { return edits.apply(logits.at(token), token); }
};

// Which row of a request a partial is of: the target's of slot i, or q's.
struct ShardRowIndex {
  int64_t row;
  bool of_draft;
  int i;

  DOMINO_HD ShardRowIndex(const VerifyShardParams& p, int64_t row_of_request)
      : row(row_of_request),
        of_draft(row > p.drafts),
        i(static_cast<int>(of_draft ? row - p.drafts - 1 : row)) {}
  DOMINO_HD bool exists(const ChainRequest& r) const {
    return of_draft ? r.q == DraftLaw::kDense && i < r.rows - 1 : i < r.rows;
  }
  DOMINO_HD float scale(const ChainRequest& r) const {
    return law_scale(of_draft ? r.draft_temperature : r.temperature);
  }
  // Of the slot's draft, -inf where there is none, or not here.
  DOMINO_HD float chosen(const ChainRequest& r) const {
    const int64_t x = i < r.rows - 1 ? r.draft_token(i) : -1;
    if (x < 0 || x >= r.p.vocab) return -INFINITY;
    return of_draft ? r.draft_row(i).at(x) : ShardRow(r, i).at(x);
  }
};

// Of a row that does not exist.
DOMINO_HD RowPartial no_partial() { return {-INFINITY, -1, DigitSums(), -INFINITY, 0}; }

// A slot as every shard sees it.
struct ShardSlot {
  bool chained;  // has a draft, which is kept or not by the block rule
  RowStats target;
  RowStats draft;  // of a dense row or a pool
  int64_t x;       // the draft, -1: none
  float logit;     // of the draft
  Slot slot;
  uint32_t status;

  DOMINO_HD bool accepts() const { return !chained && slot.outcome == Outcome::kAccept; }
  // Is a rejected draft's replacement for residual_sample?
  DOMINO_HD bool needs_residual(const ChainRequest& r) const {
    return slot.outcome == Outcome::kResidual && r.q == DraftLaw::kScalar && !slot.one_hot;
  }
};

// A slot of a request that has no such row, or none that can be judged.
DOMINO_HD ShardSlot no_shard_slot(const ChainRequest& r) {
  ShardSlot out{};
  out.x = -1;
  out.slot = {Outcome::kFail, 0, true, 1.0f};
  out.status = r.faults;
  out.target.faults = 1;
  return out;
}

// pool(x, &logit of x): the statistics of the slot's pool.
template <class Pool>
DOMINO_HD ShardSlot judge_shard_slot(const VerifyShardParams& p, const ChainRequest& r, int i,
                                     Pool pool) {
  ShardSlot out = no_shard_slot(r);
  if (i >= r.rows) return out;
  const auto joined = [&](int64_t row, float temperature, float* chosen) {
    return join_partials(
        [&](int64_t part) -> const RowPartial& { return p.partial(part, r.b, row); }, p.parts,
        law_scale(temperature), chosen);
  };
  out.target = joined(i, r.temperature, &out.logit);
  if (out.target.faults != 0) {
    out.status = out.target.faults;
    return out;
  }
  out.x = i < r.rows - 1 ? r.draft_token(i) : -1;
  if (out.x < 0 || out.x >= p.vocab) {
    out.status = out.x == -1 ? 0u : kBadId;
    out.x = -1;
  }
  float q = -1.0f, draft_logit;
  if (out.x >= 0 && (r.q == DraftLaw::kPool || r.q == DraftLaw::kDense)) {
    out.draft = r.q == DraftLaw::kPool
                    ? pool(out.x, &draft_logit)
                    : joined(p.drafts + 1 + i, r.draft_temperature, &draft_logit);
    q = draft_mass(out.draft, r.draft_temperature, draft_logit);
  } else if (out.x >= 0 && r.q == DraftLaw::kScalar) {
    q = scalar_mass(p.draft_logprob[r.b * p.drafts + i]);
  }
  out.slot = decide_slot(r, i, out.target, out.x, out.logit, q, FilterBounds());
  out.status |= out.slot.status;
  out.chained = r.by_block() && out.x >= 0;
  return out;
}

// Down to where all tokens of a filtered row are in one of its lists, as a word. kNoToken: they all
// are.
DOMINO_HD uint64_t last_listed(const VerifyShardParams& p, int64_t b, int i) {
  uint64_t last = kNoToken;
  for (int64_t part = 0; part < p.parts; ++part) {
    const uint64_t end = p.list(part, b, i)[p.listed - 1];
    last = end < last ? end : last;
  }
  return last;
}

// The slot of a filtered row, which was judged as if it were not.
DOMINO_HD void filter_slot(const ChainRequest& r, int i, const ListedCut& cut, ShardSlot* s) {
  Slot& slot = s->slot;
  const bool by_coin =
      !s->chained && (slot.outcome == Outcome::kAccept || slot.outcome == Outcome::kResidual);
  const RowLaw law(s->target, r.temperature);
  if (cut.settled) {
    if (by_coin)
      slot.outcome = filtered_outcome(law, cut.filter, s->logit, s->x, slot.q, verify_coin(r, i));
    return;
  }
  const float head = mul_rn(static_cast<float>(cut.head) * (1.0f / kFixedOne), law.inverse_sum);
  const FilterBounds bounds(r.filters(), law, r.p.vocab, head);
  slot.outcome = by_coin ? token_outcome(law, bounds, s->logit, slot.q, verify_coin(r, i))
                         : Outcome::kUndecided;
  // what takes its place is among the tokens that are kept
  if (slot.outcome == Outcome::kResidual && !s->needs_residual(r))
    slot.outcome = Outcome::kUndecided;
}

// Is there a race at the slot? over: a slot before it stops.
DOMINO_HD bool has_shard_race(const ChainRequest& r, const ShardSlot& s, bool over) {
  if (s.slot.outcome == Outcome::kPosition) return true;
  if ((over && !r.by_block()) || s.chained || s.needs_residual(r)) return false;
  return s.slot.outcome == Outcome::kDraw || s.slot.outcome == Outcome::kResidual;
}

// What a race over the shard's tokens weighs them by.
struct ShardWeights {
  RowLaw law;
  float inverse_mass;  // 1 over the mass that is kept
  float reach;         // of p, in the block rule
  DraftLaw q;          // not one-hot: it is subtracted, so p has to be a probability
  RowLaw draft;
  LogitRow draft_row;
  const int32_t* ids;
  int64_t pool;
  int64_t without;  // a one-hot draft that was rejected, or -1

  // filter: null without
  DOMINO_HD ShardWeights(const ChainRequest& r, int i, const ShardSlot& s, bool replaces,
                         const RowFilter* filter = nullptr, float reach_of_row = 1.0f)
      : law(s.target, r.temperature),
        inverse_mass(filter != nullptr ? div_rn(kFixedOne, static_cast<float>(filter->mass))
                                       : law.inverse_sum),
        reach(reach_of_row),
        q(replaces && !s.slot.one_hot ? r.q : DraftLaw::kOneHot),
        draft(s.draft, r.draft_temperature),
        draft_row(r.draft_row(i)),
        ids(r.draft_ids(i)),
        pool(r.p.pool),
        without(replaces && s.slot.one_hot ? s.x : -1) {}

  // Not below the weight.
  DOMINO_HD float upper(float logit, int64_t token) const {
    if (token == without) return 0.0f;
    const float weight = law.weight(logit);
    return q != DraftLaw::kOneHot ? mul_rn(reach, mul_rn(weight, inverse_mass)) : weight;
  }
  DOMINO_HD float exact(float upper, int64_t token) const {
    if (q == DraftLaw::kDense) return add_rn(upper, -draft.probability(draft_row.at(token)));
    if (q == DraftLaw::kPool)
      for (int64_t m = 0; m < pool; ++m)
        if (ids[m] == token) return add_rn(upper, -draft.probability(draft_row.at(m)));
    return upper;
  }
};

// A listed token's part in the race, if it is one of the shard's.
DOMINO_HD uint64_t listed_key(const VerifyShardParams& p, const ShardWeights& weights,
                              const RaceNoise& noise, uint64_t word) {
  const int64_t token = word_token(word), local = token - p.vocab_start;
  if (local < 0 || local >= p.shard_vocab) return kNoWinner;
  const float upper = weights.upper(word_logit(word), token);
  if (!(upper > 0.0f)) return kNoWinner;
  const NoiseWords four = noise.words(static_cast<uint32_t>(token / 4));
  const uint32_t random = token % 4 == 0   ? four.word[0]
                          : token % 4 == 1 ? four.word[1]
                          : token % 4 == 2 ? four.word[2]
                                           : four.word[3];
  return race_key(weights.exact(upper, token), random, token);
}

// The shard's tokens of a row that is not the chain's last, for Z: p(x) on what q covers.
struct ShardRest {
  uint64_t sum = 0, covered = 0;

  // logit: of a token of the shard; q: of it
  DOMINO_HD void add(const ShardWeights& weights, float logit, bool kept, float q) {
    const float weight = kept ? weights.law.weight(logit) : 0.0f;
    sum += block_rest_fixed(weights.reach, mul_rn(weight, weights.inverse_mass), q);
    covered += to_fixed(weight);
  }
};

// Its tokens number `first`, first + step, .. of a pool, or a draft that is taken as one-hot.
// filter: null without
DOMINO_HD ShardRest rest_of_pool(const VerifyShardParams& p, const ShardRow& row,
                                 const ShardSlot& s, const ShardWeights& weights,
                                 const RowFilter* filter, int64_t first, int64_t step) {
  ShardRest out;
  const auto add = [&](int64_t token, bool counts, float q) {
    if (token < p.vocab_start || token >= p.vocab_start + p.shard_vocab) return;
    const float logit = row.at(token);
    const bool kept = filter == nullptr || filter->keeps(logit, token);
    if (counts)
      out.add(weights, logit, kept, q);
    else
      out.covered += kept ? to_fixed(weights.law.weight(logit)) : 0;
  };
  if (s.slot.one_hot) {
    if (first == 0) add(s.x, false, 1.0f);
  } else {
    for (int64_t m = first; m < weights.pool; m += step)
      add(weights.ids[m], true, weights.draft.probability(weights.draft_row.at(m)));
  }
  return out;
}

// The reach of row i, negative where its slot is no draft of a chain by the block rule, or nobody
// knows. The slots' verdicts and laws have been written.
DOMINO_HD float shard_reach(const VerifyShardParams& p, int64_t b, int i) {
  const int64_t at = b * (p.drafts + 1), count = p.batch * (p.drafts + 1);
  float reach = 1.0f;
  for (int j = 0; j <= i; ++j) {
    if (p.verdict[at + j] != static_cast<uint8_t>(ShardVerdict::kBlock)) return -1.0f;
    if (j < i) reach = next_reach(reach, p.draft_laws[at + j], p.draft_laws[count + at + j]);
  }
  return reach;
}

// Writes what a slot's races found: keys[0], and keys[1] of the race in its place.
DOMINO_HD void write_shard_keys(const VerifyShardParams& p, const ChainRequest& r, int i,
                                const ShardSlot& s, const uint64_t (&keys)[2]) {
  const int64_t count = p.batch * (p.drafts + 1), at = r.b * (p.drafts + 1) + i;
  const RowLaw law(s.target, r.temperature);
  for (int n = 0; n < 2; ++n) {
    int64_t key = keys[n] == kNoWinner ? kNoShardKey : static_cast<int64_t>(keys[n]);
    float logprob = 0.0f;
    if (n == 0 && s.target.faults == 0 && s.slot.outcome == Outcome::kArgmax) {
      key = s.target.argmax;  // as if it had won at once
      logprob = law.log_probability(s.target.top);
    } else if (key != kNoShardKey) {
      logprob = law.log_probability(ShardRow(r, i).at(key & 0xffffffff));
    }
    p.keys[n * count + at] = key;
    p.key_logprob[n * count + at] = logprob;
  }
}

// Writes a slot once its races are known, those of the block rule apart. filter: null without
DOMINO_HD void write_shard_slot(const VerifyShardParams& p, const ChainRequest& r, int i,
                                const ShardSlot& s, const RowFilter* filter,
                                const uint64_t (&keys)[2]) {
  const int64_t count = p.batch * (p.drafts + 1), at = r.b * (p.drafts + 1) + i;
  const bool needs = s.needs_residual(r);
  const bool matches = s.slot.outcome == Outcome::kPosition && s.x >= 0;
  const ShardVerdict verdict = s.accepts()                             ? ShardVerdict::kAccept
                               : s.slot.outcome == Outcome::kFail      ? ShardVerdict::kFail
                               : s.slot.outcome == Outcome::kUndecided ? ShardVerdict::kUnsettled
                               : s.chained                             ? ShardVerdict::kBlock
                               : needs   ? ShardVerdict::kNeedsResidual
                               : matches ? ShardVerdict::kMatch
                                         : ShardVerdict::kLast;
  p.verdict[at] = static_cast<uint8_t>(verdict);
  p.slot_status[at] = static_cast<uint8_t>(s.status | (needs ? kNeedsResidual : 0u));
  const RowLaw law(s.target, r.temperature);
  const bool usable = s.target.faults == 0;
  p.logprob[at] = usable && s.x >= 0 ? law.log_probability(s.logit) : 0.0f;
  float laws[3] = {0.0f, 0.0f, 0.0f};
  int64_t masses[3] = {0, 0, 0};
  if (s.chained) laws[1] = s.slot.q;
  if (verdict == ShardVerdict::kBlock) {
    const bool kept = filter == nullptr || filter->keeps(s.logit, s.x);
    const float inverse = ShardWeights(r, i, s, false, filter).inverse_mass;
    laws[0] = kept ? mul_rn(law.weight(s.logit), inverse) : 0.0f;
    laws[2] = verify_coin(r, i);
    masses[0] = static_cast<int64_t>(filter != nullptr ? filter->mass : s.target.sum);
  }
  for (int n = 0; n < 3; ++n) {
    p.draft_laws[n * count + at] = laws[n];
    p.row_masses[n * count + at] = masses[n];
  }
  write_shard_keys(p, r, i, s, keys);
}

// Writes what the block rule adds to a slot.
DOMINO_HD void write_shard_rest(const VerifyShardParams& p, int64_t b, int i, const ShardRest& rest,
                                bool dense) {
  const int64_t count = p.batch * (p.drafts + 1), at = b * (p.drafts + 1) + i;
  p.row_masses[count + at] = static_cast<int64_t>(rest.sum);
  // dense q covers all there is
  p.row_masses[2 * count + at] = !dense               ? static_cast<int64_t>(rest.covered)
                                 : p.vocab_start == 0 ? p.row_masses[at]
                                                      : 0;
}

// target_logits and the rest as the shard has them; draft_tokens are counted from its first token.
int verify_shard_rows_cuda(const VerifyShardParams& p, void* stream);
int verify_shard_rows_cpu(const VerifyShardParams& p);

int verify_shard_cuda(const VerifyShardParams& p, void* stream);
int verify_shard_cpu(const VerifyShardParams& p);

}  // namespace domino
