// verify_chain where the vocabulary is split over shards: what one of them finds.
//
// A shard has its columns of the target's rows, and of all shards what row_stats says of theirs
// (RowPartial). So it knows each row's law and, as any other shard does, how far the walk comes;
// the token at its end is raced for among the shard's own tokens, and the least key of all shards
// wins. Rules, noise and bits are those of verify_chain (chain_walk.h); filters, edits, q in dense
// rows and the block rule are not for shards.
#pragma once

#include "verify/chain_walk.h"
#include "verify/row_stats.h"

namespace domino {

enum class ShardVerdict : uint8_t {
  kAccept = 0,
  kLast = 1,          // the walk ends here with the token of the least key
  kFail = 2,          // it ends without one
  kNeedsResidual = 3  // scalar q: the same, residual_sample has the token
};

struct VerifyShardParams {
  uint8_t* verdict;            // [batch, drafts + 1] of ShardVerdict; of rows behind kFail anything
  uint8_t* status;             // the same: the bits of that slot
  float* logprob;              // the same: log p of the draft, 0 where it is none
  int64_t* keys;               // [2, batch, drafts + 1]: of the race, and of the one in its place
                               // where no token of any shard has weight; kNoShardKey: none
  float* key_logprob;          // the same: log p of the key's token
  const RowPartial* partials;  // [parts, batch * (drafts + 1)], by row_stats with the drafts
  const void* target_logits;   // [batch, drafts + 1, vocab]: this shard's columns
  const int64_t* draft_tokens;     // [batch, drafts]: ids in the whole vocabulary
  const float* temperature;        // [batch], or null: greedy
  const int64_t* seed;             // [batch], or null with temperature
  const int64_t* block_start;      // [batch], or null with temperature
  const void* draft_logits;        // [batch, drafts, pool], or null
  const int32_t* draft_ids;        // [batch, drafts, pool], or null
  const float* draft_logprob;      // [batch, drafts], or null
  const float* draft_temperature;  // [batch], or null: that of the target
  int64_t batch;
  int64_t drafts;
  int64_t parts;
  int64_t vocab;        // of this shard
  int64_t vocab_start;  // id of its first token, a multiple of 4
  int64_t vocab_total;
  int64_t pool;
  int64_t target_batch_stride;
  int64_t target_row_stride;
  int64_t draft_tokens_stride;
  int64_t draft_batch_stride;
  int64_t draft_row_stride;
  int64_t ids_batch_stride;
  int64_t ids_row_stride;
  VerifyRule rule;
  DType target_dtype;
  DType draft_dtype;
};

// As an integer with a sign, so that an all-reduce with the minimum joins keys.
constexpr int64_t kNoShardKey = INT64_MAX;

// The call of verify_chain that the shards make up.
inline VerifyChainParams whole_call(const VerifyShardParams& p) {
  VerifyChainParams out{};
  out.target_logits = p.target_logits;
  out.draft_tokens = p.draft_tokens;
  out.temperature = p.temperature;
  out.seed = p.seed;
  out.block_start = p.block_start;
  out.draft_logits = p.draft_logits;
  out.draft_ids = p.draft_ids;
  out.draft_logprob = p.draft_logprob;
  out.draft_temperature = p.draft_temperature;
  out.batch = p.batch;
  out.drafts = p.drafts;
  out.vocab = p.vocab_total;
  out.pool = p.pool;
  out.target_batch_stride = p.target_batch_stride;
  out.target_row_stride = p.target_row_stride;
  out.draft_tokens_stride = p.draft_tokens_stride;
  out.draft_batch_stride = p.draft_batch_stride;
  out.draft_row_stride = p.draft_row_stride;
  out.ids_batch_stride = p.ids_batch_stride;
  out.ids_row_stride = p.ids_row_stride;
  out.rule = p.rule;
  out.target_dtype = p.target_dtype;
  out.draft_dtype = p.draft_dtype;
  return out;
}

// A slot as every shard sees it.
struct ShardSlot {
  RowStats target;
  RowStats draft;  // of a pool
  int64_t x;       // the draft, -1: none
  float logit;     // of the draft
  Slot slot;
  uint32_t status;

  DOMINO_HD bool accepts() const { return slot.outcome == Outcome::kAccept; }
};

// pool(x, &logit of x): the statistics of the slot's pool.
template <class Pool>
DOMINO_HD ShardSlot judge_shard_slot(const VerifyShardParams& p, const ChainRequest& r, int i,
                                     Pool pool) {
  ShardSlot out{};
  const int64_t rows = p.batch * (p.drafts + 1), row = r.b * (p.drafts + 1) + i;
  out.target = join_partials(p.partials, p.parts, rows, row, law_scale(r.temperature), &out.logit);
  out.x = i < r.rows - 1 ? r.draft_token(i) : -1;
  if (out.x < 0 || out.x >= p.vocab_total) {
    out.status = out.x == -1 ? 0u : kBadId;
    out.x = -1;
  }
  if (out.target.faults != 0) {
    out.slot = {Outcome::kFail, 0, true, 1.0f};
    out.status = out.target.faults;
    return out;
  }
  float q = -1.0f, draft_logit;
  if (out.x >= 0 && r.q == DraftLaw::kPool) {
    out.draft = pool(out.x, &draft_logit);
    q = draft_mass(out.draft, r.draft_temperature, draft_logit);
  } else if (out.x >= 0 && r.q == DraftLaw::kScalar) {
    q = scalar_mass(p.draft_logprob[r.b * p.drafts + i]);
  }
  out.slot = decide_slot(r, i, out.target, out.x, out.logit, q, FilterBounds());
  out.status |= out.slot.status;
  return out;
}

// What a race over the shard's tokens weighs them by.
struct ShardWeights {
  RowLaw law;
  RowLaw draft;
  LogitRow pool_logits;
  const int32_t* ids;  // null: q is nothing
  int64_t pool;
  int64_t without;  // a one-hot draft that was rejected, or -1

  DOMINO_HD ShardWeights(const ChainRequest& r, int i, const ShardSlot& s, bool replaces)
      : law(s.target, r.temperature),
        draft(s.draft, r.draft_temperature),
        pool_logits(r.draft_row(i)),
        ids(replaces && !s.slot.one_hot ? r.draft_ids(i) : nullptr),
        pool(r.p.pool),
        without(replaces && s.slot.one_hot ? s.x : -1) {}

  // Not below the weight.
  DOMINO_HD float upper(float logit, int64_t token) const {
    if (token == without) return 0.0f;
    return ids != nullptr ? law.probability(logit) : law.weight(logit);
  }
  DOMINO_HD float exact(float upper, int64_t token) const {
    if (ids != nullptr)
      for (int64_t m = 0; m < pool; ++m)
        if (ids[m] == token) return add_rn(upper, -draft.probability(pool_logits.at(m)));
    return upper;
  }
};

// Writes a slot once its races are known: keys[0], and keys[1] of the race in its place.
DOMINO_HD void write_shard_slot(const VerifyShardParams& p, const ChainRequest& r, int i,
                                const ShardSlot& s, const uint64_t (&keys)[2]) {
  const int64_t count = p.batch * (p.drafts + 1), at = r.b * (p.drafts + 1) + i;
  const bool needs =
      s.slot.outcome == Outcome::kResidual && r.q == DraftLaw::kScalar && !s.slot.one_hot;
  const ShardVerdict verdict = s.accepts()                        ? ShardVerdict::kAccept
                               : s.slot.outcome == Outcome::kFail ? ShardVerdict::kFail
                               : needs                            ? ShardVerdict::kNeedsResidual
                                                                  : ShardVerdict::kLast;
  p.verdict[at] = static_cast<uint8_t>(verdict);
  p.status[at] = static_cast<uint8_t>(s.status | (needs ? kNeedsResidual : 0u));
  const RowLaw law(s.target, r.temperature);
  const bool usable = s.target.faults == 0;
  p.logprob[at] = usable && s.x >= 0 ? law.log_probability(s.logit) : 0.0f;
  for (int n = 0; n < 2; ++n) {
    int64_t key = keys[n] == kNoWinner ? kNoShardKey : static_cast<int64_t>(keys[n]);
    float logprob = 0.0f;
    if (n == 0 && usable && s.slot.outcome == Outcome::kArgmax) {  // as if it had won at once
      key = s.target.argmax;
      logprob = law.log_probability(s.target.top);
    } else if (key != kNoShardKey) {
      const int64_t local = (key & 0xffffffff) - p.vocab_start;
      logprob = law.log_probability(r.target_row(i).at(local));
    }
    p.keys[n * count + at] = key;
    p.key_logprob[n * count + at] = logprob;
  }
}

int verify_shard_cuda(const VerifyShardParams& p, void* stream);
int verify_shard_cpu(const VerifyShardParams& p);

}  // namespace domino
