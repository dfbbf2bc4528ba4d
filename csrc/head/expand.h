// expand: one level of a draft tree, for W paths of each request in one call.
//
// A path ends in a node at depth d: the token `token` behind the node whose GRU state is row
// `parent` of `parent_states` (no states: the path is the anchor alone, S = 0 before it).
//
//   S     = GRU(E[token], parent state)                        or E[token] itself: low_rank.h
//   score = base[slot] + W2 u      slot = first_slot + d, u from H[slot] and S (low_rank.h)
//         = base[slot]             d < prefix
//
// over the candidates: the pool's ids, or the whole vocabulary. Scores that are not finite take no
// part. The law of a path is softmax(score / temperature) over the candidates. Its children are
//   top-k    the k greatest scores, ties to the lowest id
//   drawn    k draws without replacement, in draw order: the k greatest race values
//            score / temperature + G, G Gumbel noise at (seed, block start, i = node, kDraftToken,
//            index = id). Temperature 0 is the one-hot law: one child.
// For each: its id, log-probability, and log R, the log of the mass that was left before it was
// drawn. Fewer candidates than k: id -1, both -inf. So is every child of a path whose token is -1.
// R is a sum of what is left, never 1 minus what is gone: that cancels. Children whose weight is
// below 2^-100 of the greatest are not drawn: their mass is 0 in fp32.
//
// Rounding points are those of draft_chain.h: S and u are rounded, all else is fp32.
#pragma once

#include <cstdint>

#include "common/argmax_key.h"
#include "common/philox.cuh"
#include "head/low_rank.h"
#include "verify/row_law.h"

namespace domino {

constexpr int kMaxChildren = 32;

struct ExpandParams {
  void* states;          // [batch, paths, units]: S of each path; not written for a token of -1
  int64_t* tokens;       // [batch, paths, children], contiguous
  float* log_probs;      // [batch, paths, children], contiguous
  float* log_remaining;  // [batch, paths, children], contiguous
  float* scores;         // contiguous, or null; -inf takes no part: [batch, paths, candidates], or
                         // [batch, score_nodes, candidates] with row `node` for a path
  void* workspace;       // ExpandWorkspace.bytes, 16-byte aligned; CUDA only
  const void* base_logits;     // [batch, slots, >= vocab] of base_dtype
  const void* hidden;          // [batch, slots, hidden_width], or null
  const float* from_hidden;    // [batch, slots, rank]: W1h H, in place of hidden; or null
  const void* parent_states;   // [batch, nodes, units], or null
  const int64_t* parent;       // [batch, paths], clamped to nodes; null: path w has row w
  const int64_t* token;        // [batch, paths], clamped to vocab; -1: no path
  const int64_t* path_depth;   // [batch, paths], or null: depth
  const int64_t* node;         // [batch, paths]; with drawn or score_nodes
  const int32_t* pool;         // [batch, candidates], -1: none; null: the whole vocabulary
  const float* temperature;    // [batch], null: 1
  const int64_t* seed;         // [batch]; with drawn
  const int64_t* block_start;  // [batch]; with drawn
  const void* w_ih;            // [3 * units, inputs], contiguous as all weights are
  const void* w_hh;            // [3 * units, units]
  const void* w1;              // [rank, hidden_width + units], the hidden row's columns first
  const void* w2;              // [>= vocab, rank]
  const void* embedding;       // [>= vocab, inputs]
  const void* table;           // [>= vocab, units / 16, 3, 16]: E W_ih^T (draft_chain.h), or null
  int64_t batch;
  int64_t paths;
  int64_t children;
  int64_t candidates;  // of the pool, or vocab
  int64_t slots;
  int64_t nodes;
  int64_t score_nodes;  // 0: a row of scores a path
  int64_t first_slot;
  int64_t depth;
  int64_t prefix;
  int64_t vocab;  // ids from it on are never children
  int64_t inputs;
  int64_t hidden_width;
  int64_t units;  // of the GRU; inputs where there is none
  int64_t rank;
  int64_t base_batch_stride;  // strides in elements
  int64_t base_slot_stride;
  int64_t hidden_batch_stride;  // of hidden or from_hidden
  int64_t hidden_slot_stride;
  int64_t parent_batch_stride;
  int64_t parent_stride;
  int64_t states_batch_stride;
  int64_t states_stride;
  DType dtype;       // of hidden, states and the weights
  DType base_dtype;  // of base_logits: dtype or fp32
  LowRank kind;
  int drawn;  // not 0: children are drawn

  DOMINO_HD bool recurrent() const { return kind == LowRank::kSilu || kind == LowRank::kLinear; }
};

// The request of path n = b * paths + w; 32 bits hold n, and a division of 64 takes a GPU 100
// cycles.
DOMINO_HD int64_t request_of(const ExpandParams& p, int64_t n) {
  return static_cast<uint32_t>(n) / static_cast<uint32_t>(p.paths);
}

// A path, as the kernels and the twin see it.
struct ExpandPath {
  int64_t b;
  int64_t token;  // -1: none
  int64_t slot;
  bool corrected;

  DOMINO_HD ExpandPath(const ExpandParams& p, int64_t n) : b(request_of(p, n)) {
    const int64_t d = p.path_depth != nullptr ? p.path_depth[n] : p.depth;
    const int64_t last = p.slots - 1, at = p.first_slot + d;
    token = p.token[n] < 0 ? -1 : p.token[n] < p.vocab ? p.token[n] : p.vocab - 1;
    slot = at < 0 ? 0 : at < last ? at : last;
    corrected = d >= p.prefix;
  }
};

// Element offset of the state that path n starts from.
DOMINO_HD int64_t parent_offset(const ExpandParams& p, int64_t n) {
  const int64_t b = request_of(p, n);
  int64_t row = p.parent != nullptr ? p.parent[n] : n - b * p.paths;
  row = row < 0 ? 0 : row < p.nodes ? row : p.nodes - 1;
  return b * p.parent_batch_stride + row * p.parent_stride;
}

DOMINO_HD int64_t states_offset(const ExpandParams& p, int64_t n) {
  const int64_t b = request_of(p, n);
  return b * p.states_batch_stride + (n - b * p.paths) * p.states_stride;
}

// Where the scores of path n go, or null.
DOMINO_HD float* scores_of(const ExpandParams& p, int64_t n) {
  if (p.scores == nullptr) return nullptr;
  if (p.score_nodes == 0) return p.scores + n * p.candidates;
  const int64_t last = p.score_nodes - 1, row = p.node[n] < last ? p.node[n] : last;
  return p.scores + (request_of(p, n) * p.score_nodes + (row < 0 ? 0 : row)) * p.candidates;
}

// Element of a row of `table`: gate 0, 1, 2 = r, z, n.
DOMINO_HD int64_t table_offset(int64_t unit, int64_t gate) {
  return unit / 16 * 48 + gate * 16 + unit % 16;
}

// How the candidates of one path are ordered and weighed.
struct ChildLaw {
  float scale;   // log2(e) / temperature
  bool drawn;    // by race values; scores otherwise
  bool one_hot;  // temperature 0 and drawn
  int node;
  BlockNoise noise;

  DOMINO_HD ChildLaw(const ExpandParams& p, int64_t n) {
    const int64_t b = request_of(p, n);
    const float temperature = p.temperature != nullptr ? p.temperature[b] : 1.0f;
    scale = temperature >= 0.0f ? law_scale(temperature) : NAN;
    one_hot = p.drawn != 0 && temperature == 0.0f;
    drawn = p.drawn != 0 && !one_hot;
    node = drawn ? static_cast<int>(p.node[n]) : 0;
    noise = drawn ? BlockNoise{p.seed[b], p.block_start[b]} : BlockNoise{0, 0};
  }

  // -inf takes no part.
  static DOMINO_HD float finite(float score) { return score - score == 0.0f ? score : -INFINITY; }

  // The noise words of ids 4 * group .. 4 * group + 3.
  DOMINO_HD NoiseWords words(uint32_t group) const { return noise.words(kDraftToken, node, group); }

  // In units of log2: Gumbel noise is -log E of an exponential E.
  DOMINO_HD float race_value(float score, uint32_t word) const {
    return add_rn(mul_rn(score, scale), -mul_rn(log_positive(exponential(word)), kLog2e));
  }

  static DOMINO_HD uint64_t key(float value, int64_t id) {
    return value > -INFINITY ? argmax_key(value, static_cast<uint32_t>(id)) : 0;
  }

  DOMINO_HD float weight(float score, float top) const { return token_weight(score, top, scale); }

  // Log-probability of a score, and log R, of sums of weights relative to `top`.
  DOMINO_HD float log_prob(float score, float top, float total) const {
    if (one_hot) return 0.0f;
    return fma_rn(mul_rn(add_rn(score, -top), scale), kLn2, -log_positive(total));
  }
  DOMINO_HD float log_remaining(float left, float total) const {
    if (one_hot || left == total) return 0.0f;
    const float value = add_rn(log_positive(left), -log_positive(total));
    return value < 0.0f ? value : 0.0f;
  }
};

int expand_cuda(const ExpandParams& p, void* stream);
int expand_cpu(const ExpandParams& p);

}  // namespace domino
