// draft_chain: the K ids that the Domino head drafts behind an anchor, greedily, for a batch.
//
//   y_0 = anchor, S_{-1} = 0, and for j = 0 .. drafts-1:
//     S_j     = GRU(E[y_j], S_{j-1})                             state after y_0..y_j
//     slot    = first_slot + j                                   first_slot: 0 shifted, 1 not
//     score_j = base[slot]                                       j <  prefix
//             = base[slot] + W2 SiLU(W1h H[slot] + W1s S_j)      j >= prefix; W1 = [W1h | W1s]
//     y_{j+1} = argmax score_j                                   ties to the lowest id
//
// Heads of another kind differ in how u = SiLU(..) comes about (low_rank.h). One without a GRU has
// no w_ih and w_hh; S_j is then the row of y_j in the head's own table, `embedding` [vocab, rank].
//
// The label conventions differ by first_slot alone: slot i scores y_{i+1} (shift_label) or y_i.
//
// Arithmetic, alike in the kernel, the CPU twin and the reference: weights and hidden rows enter as
// they are, every sum is fp32, and two values are rounded to the weights' dtype: the state S_j and
// u = SiLU(..). The hoisted W1h H, W2 u and base + W2 u stay fp32. NaN: common/argmax_key.h. An id
// outside [0, vocab) (anchor) is clamped, so that nothing outside the embedding is read.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/dtype.h"
#include "head/low_rank.h"

namespace domino {

struct DraftChainParams {
  int64_t* tokens;          // [batch, drafts], contiguous: y_1 .. y_drafts
  float* scores;            // [batch, drafts], contiguous: the score of each
  void* workspace;          // draft_chain_workspace() bytes, 16-byte aligned; CUDA only
  const void* base_logits;  // [batch, slots, vocab] of base_dtype
  const void* hidden;       // [batch, slots, hidden_width]
  const int64_t* anchor;    // [batch]
  const void* w_ih;         // [3 * units, inputs], contiguous as all weights are; null: no GRU
  const void* w_hh;         // [3 * units, units]
  const void* w1;           // [rank, hidden_width + units], the hidden row's columns first
  const void* w2;           // [vocab, rank]
  const void* embedding;    // [vocab, inputs]
  int64_t batch;
  int64_t drafts;
  int64_t first_slot;
  int64_t prefix;
  int64_t vocab;
  int64_t inputs;
  int64_t hidden_width;  // 0 where the head does not see hidden rows
  int64_t units;         // of the GRU; rank where there is none
  int64_t rank;
  int64_t base_batch_stride;  // strides in elements
  int64_t base_slot_stride;
  int64_t hidden_batch_stride;
  int64_t hidden_slot_stride;
  // optional inputs, 0 where absent
  const void* table;           // [vocab, units / 16, 3, 16]: E W_ih^T, packed; 0: W_ih E[y] a step
  const void* screen;          // chain_screen.h: W2 in int8; 0: certify reads W2 itself
  const int32_t* num_active;   // [1]: rows from it on are left alone
  const float* temperature;    // [batch]: 0 = greedy; with it seed and block_start
  const int64_t* seed;         // [batch]
  const int64_t* block_start;  // [batch]
  const uint32_t* mask;        // [batch, mask_stride]: bit v % 32 of word v / 32: v is allowed
  const float* bias;           // [batch, bias_stride]: added to base_logits
  int64_t mask_stride;
  int64_t bias_stride;
  int64_t vocab_valid;  // ids from it on are never drafted; vocab where all may be
  int64_t pool_size;    // ids of a pool; 0: the plain form, over the whole vocabulary
  int64_t pools;        // of a row: 1 (shared by the block) or drafts (pool j for draft j)
  bool exact;           // certify against the whole vocabulary
  bool portable;        // nothing above sm_80, on any GPU
  // outputs besides tokens and scores, 0 where not wanted
  int32_t* restarts;    // [batch]
  int32_t* pool_ids;    // [batch, drafts, pool_size]: the pool of each draft (sampled)
  float* pool_logits;   // [batch, drafts, pool_size]: score of each id of the pool (sampled)
  float* log_probs;     // [batch, drafts]: of the id under softmax(pool_logits / temperature)
  float* dense_logits;  // [batch, drafts, vocab]: pool_logits by id, -inf for other ids (sampled)
  DType dtype;          // of hidden and the weights
  DType base_dtype;     // of base_logits: dtype or fp32
  LowRank kind;
};

// What the kernels hand on from launch to launch: byte offsets into the workspace, and its size.
// Elements are counted as 4 bytes, so that one workspace serves every dtype and any prefix.
struct DraftChainWorkspace {
  int64_t keys;         // u64 [batch, drafts]: running argmax keys
  int64_t from_hidden;  // f32 [batch, drafts, rank]: W1h H
  int64_t state[2];     // blocked [batch, units]: S_j in state[j % 2]
  int64_t low_rank;     // blocked [batch, rank]: u
  int64_t bytes;

  DraftChainWorkspace(int64_t batch, int64_t drafts, int64_t units, int64_t rank) {
    const auto padded = [](int64_t n, int64_t to) { return (n + to - 1) / to * to; };
    const auto take = [&](int64_t size) {
      const int64_t at = bytes;
      bytes += padded(size, 256);
      return at;
    };
    bytes = 0;
    keys = take(batch * drafts * 8);
    from_hidden = take(batch * drafts * rank * 4);
    for (int64_t& buffer : state) buffer = take(padded(batch, 32) * padded(units, 32) * 4);
    low_rank = take(padded(batch, 32) * padded(rank, 32) * 4);
  }
};

// ---- Block form: one persistent launch for the whole block, on pools ----
//
// The launches of one draft, all on one stream, each reading only what those before it wrote:
//   draft_chain_pool     clears control->aborted, begun, tickets, found, missed and cut; pool,
//                        from_hidden, keys of drafts < prefix (the whole vocabulary's argmax),
//                        tile_max (exact; not beside draft_chain_certify_early)
//   draft_chain_block    the chain on the pools: keys, tokens, scores of the drafts >= prefix,
//                        tokens and scores of the others from keys, low_rank and states (exact),
//                        first[0, b] = prefix (row_done() where row b is not active), first[1, b]
//                        = first[2, b] = row_done(), restarts[b] = 0
//   draft_chain_certify  exact, round 0: checks drafts first[0, b].. against the whole vocabulary
//                        with low_rank. Where an id beats the winner of draft j it becomes keys[b,
//                        j], and first[1, b] falls to j + 1; otherwise nothing is written. Where
//                        most rows of a large batch have missed it may leave the rest (cut)
//   draft_chain_block    round 1: rows with first[1, b] = f < row_done(): tokens and scores of
//                        draft f - 1 from keys, ++restarts[b]; then on from states[b, f - 1] and
//                        that token (draft j runs S_j from S_{j-1} and y_j). Where most rows of a
//                        large launch would start again it does nothing, and they go to round 2:
//                        first[2, b] = f, first[1, b] = row_done(). So do all rows where the
//                        certificate was cut, with first[2, b] = prefix
//   draft_chain_certify  round 1: drafts first[1, b].. of those rows; first[2, b]
//   draft_chain_finish   exact, round 2: rows with first[2, b] < row_done(), a pass over W2 a
//                        draft (S and u of draft `prefix` are there); restarts[b] as if no row had
//                        left out round 1. Where control->aborted is set: the whole draft of all
//                        rows, a block each
//   draft_chain_rescue   not exact: the same where control->aborted is set (not behind
//                        draft_chain_markov, which is the chain of heads without a GRU)
//   draft_chain_law      drawn drafts: scores, log_probs and dense_logits from pool_logits
// Each leaves at once where it has nothing to do. Those that mostly do so let the next one start
// before the one in front has ended: each still waits for the one in front, and so for all.
//
// Score of an id, the same bits wherever it is computed: k in ascending order, 16 to an MMA
// (m16n8k16, lane t of a quad takes k = 4t .. 4t + 3 of the 16), in four chains of
// ceil(rank / 64) MMAs each, chain q over the k from q * 16 * ceil(rank / 64) on:
//   score = base + ((c0 + c1) + (c2 + c3))         base with bias and mask: adjusted_base()

// Kept between launches; all zero at first.
struct ChainControl {
  uint32_t epoch;  // of the next draft_chain_block launch: a multiple of kEpochStride, wraps around
  uint32_t left;   // blocks that have left the launch; the last one moves epoch on
  uint32_t aborted;     // not 0: draft_chain_block gave up waiting for one of its blocks
  uint32_t mute;        // for tests: 1 + a block of draft_chain_block that stays silent; 0: none
  uint32_t arrived;     // at the barriers of the running draft_chain_finish launch, all together
  uint32_t searched;    // blocks of the running draft_chain_pool launch that have found winners
  uint32_t tickets[2];  // tiles of W2 that chain_certify_few hands out, by round
  // By round, the chain has what it loads at first: others may have the memory. Where it sends
  // words (chain_words.cuh), begun_word(); 0: not yet.
  uint32_t begun[2];
  uint32_t found;   // not 0: something has passed the first certificate's screen, at up to 9 rows
  uint32_t missed;  // rows of which the first certificate has beaten a winner; not in all forms
  uint32_t cut;     // not 0: it has left out ids, because most rows have missed
  uint32_t unused[19];
};
constexpr uint32_t kEpochStride = 32;

// Rows up to which launches that mostly leave at once let the next one start before they wait. With
// more rows this has not been measured.
constexpr int kEarlyRows = 16;

// draft_chain_block: rows of a group of blocks, and bytes of the keys that it passes around
constexpr int kGroupRows = 32;
constexpr int kKeyBytes = 64 * 32 * 8;

constexpr int kPoolTile = 128;    // ids of a tile of tile_max
constexpr int kMaxKeyParts = 16;  // of a row of base logits whose winner is looked for
constexpr int kRounds = 3;        // the chain, its restart, the dense steps

struct ChainBlockParams : DraftChainParams {
  // the plan's memory, at the offsets of ChainBlockWorkspace
  ChainControl* control;
  int32_t* first;       // [kRounds, batch]: where a round begins; see first_of()
  uint64_t* keys;       // [batch, drafts]: argmax_key of y_{j+1}
  int32_t* pool;        // [batch, pools, pool_size]: ids, by groups (chain_pool.h)
  float* from_hidden;   // [batch, corrected, rank]: W1h H
  void* low_rank;       // [batch, corrected, rank]: u, rounded
  void* states;         // [batch, drafts, units]: S_j, rounded
  float* tile_max;      // [ceil(vocab / kPoolTile), batch, corrected]: max of adjusted base
  uint64_t* key_parts;  // [batch, min(prefix, drafts), parts]: argmax keys of parts of the ids
  void* exchange;       // words that the blocks pass to each other (chain_exchange.cuh)

  DOMINO_HD int64_t corrected() const { return drafts > prefix ? drafts - prefix : 0; }
  // [batch]: the draft that a round begins with. drafts: nothing to draft, but the last id is new.
  DOMINO_HD int32_t* first_of(int round) const { return first + round * batch; }
  DOMINO_HD int32_t row_done() const { return static_cast<int32_t>(drafts) + 1; }
};

// base_logits[b, slot, v] as drafts are scored from it: with the bias, -inf where v is not allowed.
template <class Base>
DOMINO_HD float adjusted_base(const DraftChainParams& p, const Base* row, int64_t b, int64_t v) {
  float value = to_float(row[v]);
  if (p.bias) value += p.bias[b * p.bias_stride + v];
  if (v >= p.vocab_valid) value = -INFINITY;
  if (p.mask && (p.mask[b * p.mask_stride + v / 32] >> (v % 32) & 1) == 0) value = -INFINITY;
  return value;
}

struct ChainBlockWorkspace {
  int64_t control, exchange;  // kept_bytes()
  int64_t first, keys, pool, from_hidden, low_rank, states, tile_max, key_parts;
  int64_t bytes;

  explicit ChainBlockWorkspace(const ChainBlockParams& p) {
    const auto take = [&](int64_t size) {
      const int64_t at = bytes;
      bytes += padded(size);
      return at;
    };
    const int64_t rows = p.batch * p.corrected();
    control = 0;
    exchange = padded(sizeof(ChainControl));
    bytes = kept_bytes(p.units, p.rank);
    first = take(kRounds * p.batch * 4);
    keys = take(p.batch * p.drafts * 8);
    pool = take(p.batch * p.pools * p.pool_size * 4);
    from_hidden = take(rows * p.rank * 4);
    low_rank = take(rows * p.rank * 2);
    states = take(p.batch * p.drafts * p.units * 2);
    tile_max = take(rows * ((p.vocab + kPoolTile - 1) / kPoolTile) * 4);
    key_parts = take(p.batch * p.drafts * kMaxKeyParts * 8);
  }

  static int64_t padded(int64_t size) { return (size + 255) / 256 * 256; }

  // What stands first in a workspace of either form, zeroed once and kept from call to call.
  static int64_t kept_bytes(int64_t units, int64_t rank) {
    return padded(sizeof(ChainControl)) + padded(exchange_bytes(units, rank));
  }

  // u of two groups in words of 2 values; two sets of states of even and odd drafts and of keys;
  // inputs of a group, of its tokens and of guesses for even and odd drafts; guesses
  static int64_t exchange_bytes(int64_t units, int64_t rank) {
    return 2 * kGroupRows * rank * 4 + 2 * 2 * (2 * kGroupRows * units * 2 + kKeyBytes) +
           3 * kGroupRows * 4 * units * 16 + kGroupRows * kEpochStride * 8;
  }

  void bind(ChainBlockParams& p, void* memory) const {
    char* at = static_cast<char*>(memory);
    p.control = reinterpret_cast<ChainControl*>(at + control);
    p.exchange = at + exchange;
    p.first = reinterpret_cast<int32_t*>(at + first);
    p.keys = reinterpret_cast<uint64_t*>(at + keys);
    p.pool = reinterpret_cast<int32_t*>(at + pool);
    p.from_hidden = reinterpret_cast<float*>(at + from_hidden);
    p.low_rank = at + low_rank;
    p.states = at + states;
    p.tile_max = reinterpret_cast<float*>(at + tile_max);
    p.key_parts = reinterpret_cast<uint64_t*>(at + key_parts);
  }
};

// Launchers of the block form; each a phase of draft_chain_cuda.
int draft_chain_pool_cuda(const ChainBlockParams& p, void* stream);
int draft_chain_block_cuda(const ChainBlockParams& p, bool restart, void* stream);
// The chain of heads without a GRU (draft_chain_markov.cuh), which leave states and
// control->aborted alone. Fits: whether a GPU can have it.
bool draft_chain_markov_fits(const DraftChainParams& p, int major, int shared_memory);
int draft_chain_markov_cuda(const ChainBlockParams& p, bool restart, void* stream);
// The same where it suits the team form (draft_chain_team.cuh); otherwise not *done, and nothing.
int draft_chain_team_cuda(const ChainBlockParams& p, bool restart, bool* done, void* stream);
// Blocks of that form, 0 where it is not the one: the certificate runs beside them.
int draft_chain_team_blocks(const ChainBlockParams& p, int* blocks);
int draft_chain_certify_cuda(const ChainBlockParams& p, int round, void* stream);
// The same for one batch row with a screen, beside the team form (draft_chain_certify_early.cuh):
// its blocks, 0 where it does not suit, and the launch; otherwise not *done, and nothing.
int draft_chain_early_blocks(const ChainBlockParams& p, int* blocks);
int draft_chain_certify_early_cuda(const ChainBlockParams& p, int round, bool* done, void* stream);
// Exact drafts of the rows of round 2, a pass over W2 each.
int draft_chain_finish_cuda(const ChainBlockParams& p, void* stream);
// The whole draft by single blocks: always, or where control->aborted.
int draft_chain_rescue_cuda(const ChainBlockParams& p, bool always, void* stream);
// scores, log_probs and dense_logits of drawn drafts, from pool_logits.
int draft_chain_law_cuda(const ChainBlockParams& p, void* stream);

// Bytes of workspace that either form needs.
inline int64_t draft_chain_workspace(const DraftChainParams& p) {
  ChainBlockParams block{};
  static_cast<DraftChainParams&>(block) = p;
  const int64_t plain = ChainBlockWorkspace::kept_bytes(p.units, p.rank) +
                        DraftChainWorkspace(p.batch, p.drafts, p.units, p.rank).bytes;
  const int64_t with_pools = ChainBlockWorkspace(block).bytes;
  return plain > with_pools ? plain : with_pools;
}

int draft_chain_cuda(const DraftChainParams& p, void* stream);
int draft_chain_cpu(const DraftChainParams& p);

DOMINO_HD int64_t clamp_id(int64_t id, int64_t vocab) {
  return id < 0 ? 0 : id < vocab ? id : vocab - 1;
}

}  // namespace domino
