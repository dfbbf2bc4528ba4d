// The rules of verify_tree, node by node. Kernel and CPU twin share what is here and differ in how
// they go over children and vocabularies.
//
//   greedy        step to the child whose token is argmax p; without one, emit the argmax
//   match         draw y from p with the noise of y's position; step to the child y, or emit y
//   target-only   one coin against the running sum of p over the children; without a hit, draw from
//                 p without the children's tokens. Lossless for any distinct siblings.
//   siblings      (RRSw: Jeon et al. 2402.14160, Chen et al. 2402.12374) the children were drawn
//                 from q without replacement: accept in turn, each rejection turns p into what is
//                 left of p over q; without a hit, draw from what is left
//   traversal     (Weng et al. 2505.12398) leaf first: a node is reached with probability a, its
//                 children are tried before itself, the first that is kept in post-order wins
//
// After any rejections what is left of p is relu(p - rho q) / mass, mass = sum relu(p - rho q), so
// two numbers a node replace a row of residuals. With a the node's probability of being kept (1 for
// siblings) and `left` the mass of q that is not drawn yet, rejecting a child turns
//     rho  into rho' = rho + mass / (left a)
//     mass into mass' = sum relu(p - rho' q)
//     a    into Z / (Z + 1 - a), Z = a mass' / mass      (traversal)
// Drawn tokens stay at zero by themselves: relu(p - rho' q) is zero where the child was acceptable
// with certainty, and rho only grows.
//
// What is not a law degrades to something that is lossless for any draft, never to a guess:
//   a child that is -1 (pad), outside the vocabulary, or repeats a sibling     never stepped to
//   a child to which q gives less than kLeastDraft, or whose q is unusable     likewise
//   mass' of nothing (p = a q up to rounding)      no later child and not this node; where a token
//                                                  has to be emitted, it is drawn from p
//   a parent that is not an earlier node           the node and all below it are never reached
//   target row unusable                            stop; what is accepted so far is all
#pragma once

#include "verify/chain_walk.h"
#include "verify/verify_tree.h"

namespace domino {

constexpr uint32_t kBadTree = 128;  // in a status: a parent that is not an earlier node

// Sums of probabilities are kept in units of 2^-60: integers add to the same bits in any order, and
// what is left of q after a draw is a difference without cancellation.
constexpr float kUnit = 0x1p-60f;

DOMINO_HD uint64_t to_units(float mass) {
  const float capped = mass < 1.0f ? mass : 1.0f;
  return mass > 0.0f ? static_cast<uint64_t>(mul_rn(capped, 1.0f / kUnit)) : 0;
}

DOMINO_HD float from_units(uint64_t units) { return mul_rn(static_cast<float>(units), kUnit); }

// Less of q than this is nothing: what is left of q keeps 20 bits after any draws. Such children
// say nothing of the others, whose law is still that of draws from what counts.
constexpr float kLeastDraft = 0x1p-40f;

DOMINO_HD float counted_draft(float q) { return q >= kLeastDraft ? q : 0.0f; }

// Below this, relu(p - rho q) is the rounding of p and q.
constexpr float kNoMass = 0x1p-20f;

// What the rejections so far have left of p at one node.
struct Residual {
  float rho = 0.0f;
  float mass = 1.0f;
  float keep = 1.0f;  // a
  float left = 1.0f;
  bool moved = false;  // a child was rejected

  DOMINO_HD explicit Residual(float a) : keep(a) {}

  DOMINO_HD float over(float p, float q) const { return add_rn(p, -mul_rn(rho, q)); }

  // keep left over / (mass q) without the quotient
  DOMINO_HD bool accepts(float u, float p, float q) const {
    const float gain = mul_rn(mul_rn(keep, left), over(p, q));
    return p > 0.0f && gain > 0.0f && mul_rn(mul_rn(u, mass), q) <= gain;
  }

  DOMINO_HD float chance(float p, float q) const {
    const float gain = mul_rn(mul_rn(keep, left), over(p, q)), cost = mul_rn(mass, q);
    if (!(p > 0.0f && gain > 0.0f)) return 0.0f;
    return gain < cost ? div_rn(gain, cost) : 1.0f;
  }

  DOMINO_HD float next_rho() const { return add_rn(rho, div_rn(mass, mul_rn(left, keep))); }

  DOMINO_HD void reject(bool traversal, float next_rho, float next_mass, float next_left) {
    moved = true;
    left = next_left;
    if (!(next_mass >= kNoMass)) {
      keep = 0.0f;
      return;
    }
    if (traversal) {
      const float z = mul_rn(keep, div_rn(next_mass, mass));
      keep = div_rn(z, add_rn(z, add_rn(1.0f, -keep)));
    }
    rho = next_rho;
    mass = next_mass;
  }
};

// Everything of request b but its row statistics.
struct TreeRequest {
  const VerifyTreeParams& p;
  int64_t b;
  int64_t first = 0;
  int nodes = 0;        // 0: inactive or unusable
  uint32_t faults = 0;  // kBadRows, kBadParameter
  TreeRule rule = TreeRule::kGreedy;
  float temperature = 0.0f;
  float draft_temperature = 0.0f;

  DOMINO_HD TreeRequest(const VerifyTreeParams& params, int64_t request) : p(params), b(request) {
    int64_t count = p.width;
    if (p.cu_nodes != nullptr) {
      first = p.cu_nodes[b];
      count = static_cast<int64_t>(p.cu_nodes[b + 1]) - first;
      if (count == 0) return;
      if (count < 0 || count > p.width || first < 0 || first + count > p.total_nodes)
        faults |= kBadRows;
    }
    if (p.temperature != nullptr) {
      temperature = p.temperature[b];
      if (!(temperature >= 0.0f && temperature <= FLT_MAX)) faults |= kBadParameter;
      if (temperature > 0.0f) rule = p.rule;
    }
    if (uses_draft()) {
      draft_temperature = p.draft_temperature != nullptr ? p.draft_temperature[b] : temperature;
      if (!(draft_temperature >= 0.0f && draft_temperature <= FLT_MAX)) faults |= kBadParameter;
      if (draft_temperature == 0.0f) rule = TreeRule::kTargetOnly;  // one-hot drafts
    }
    nodes = faults != 0 ? 0 : static_cast<int>(count);
  }

  DOMINO_HD bool uses_draft() const {
    return rule == TreeRule::kSiblings || rule == TreeRule::kTraversal;
  }

  DOMINO_HD int64_t offset(int n, int64_t batch_stride, int64_t node_stride) const {
    return p.cu_nodes != nullptr ? (first + n) * node_stride : b * batch_stride + n * node_stride;
  }
  DOMINO_HD int64_t token(int n) const { return p.tokens[offset(n, p.tokens_stride, 1)]; }

  // Not of the root, whose parent is not read.
  DOMINO_HD int stored_parent(int n) const { return p.parents[offset(n, p.parents_stride, 1)]; }
  // -1: the root, a pad or an orphan.
  DOMINO_HD int parent(int n) const {
    if (n == 0) return -1;
    const int parent = stored_parent(n);
    return parent >= 0 && parent < n ? parent : -1;
  }
  // kBadTree where node n > 0 is neither a pad (-1) nor a child of an earlier node.
  DOMINO_HD static uint32_t parent_fault(int n, int stored) {
    return stored >= -1 && stored < n ? 0u : kBadTree;
  }
  DOMINO_HD uint32_t parent_fault(int n) const {
    return n == 0 ? 0u : parent_fault(n, stored_parent(n));
  }

  DOMINO_HD LogitRow target_row(int n) const {
    return LogitRow{p.target_logits, p.target_dtype}.plus(
        offset(n, p.target_batch_stride, p.target_node_stride));
  }
  DOMINO_HD LogitRow draft_row(int n) const {
    return LogitRow{p.draft_logits, p.draft_dtype}.plus(
        offset(n, p.draft_batch_stride, p.draft_node_stride));
  }
  DOMINO_HD const int32_t* pool_ids(int n) const {
    return p.pool_ids + offset(n, p.ids_batch_stride, p.ids_node_stride);
  }
  DOMINO_HD LogitRow pool_row(int n) const {
    return LogitRow{p.pool_logits, p.draft_dtype}.plus(
        offset(n, p.pool_batch_stride, p.pool_node_stride));
  }

  // A request with temperature 0 has no filters.
  DOMINO_HD FilterParams filters() const {
    return temperature == 0.0f ? FilterParams{} : read_filters(p, b);
  }

  DOMINO_HD BlockNoise noise() const { return {p.seed[b], p.block_start[b]}; }
  // Of the token that follows a node, for the rule whose output is a function of the position.
  DOMINO_HD BlockNoise position_noise(int depth) const {
    return {p.seed[b], p.block_start[b] + 1 + depth};
  }
  DOMINO_HD float coin(int index) const {
    return uniform(noise().words(kVerifyCoin, index, 0).word[0]);
  }
  // Coins have the words of a chain: draft i of a chain is node i + 1 of a tree.
  DOMINO_HD float child_coin(int child) const { return coin(child - 1); }

  // A child that can be stepped to as far as its token goes; `status` otherwise says why not.
  template <class Status>
  DOMINO_HD bool usable(int64_t token, Status* status) const {
    if (token >= 0 && token < p.vocab) return true;
    if (token != -1) *status |= static_cast<Status>(kBadId);
    return false;
  }
};

// The target's law at one node.
struct NodeLaw {
  RowLaw law;
  RowFilter filter;
  bool filtered;
  float inverse_mass;

  DOMINO_HD NodeLaw(const RowStats& stats, float temperature, const RowFilter* cut)
      : law(stats, temperature), filtered(cut != nullptr), inverse_mass(law.inverse_sum) {
    if (filtered) {
      filter = *cut;
      inverse_mass = div_rn(kFixedOne, static_cast<float>(filter.mass));
    }
  }
  DOMINO_HD float weight(float logit, int64_t token) const {
    return filtered && !filter.keeps(logit, token) ? 0.0f : law.weight(logit);
  }
  DOMINO_HD float probability(float logit, int64_t token) const {
    return mul_rn(weight(logit, token), inverse_mass);
  }
};

// What one node says to the walk.
struct alignas(16) NodeRecord {
  RowStats stats;   // of the target row; match: argmax is the token that was drawn
  int32_t step;     // the child to step to; -1: the walk ends here
  uint16_t status;  // of what was looked at
  uint16_t moved;   // the last token comes from what rejections have left
  float rho;        // siblings, traversal: what is left of p, relu(p - rho q), ..
  float mass;       // .. and about how much that is
  float start;      // traversal: probability that the node is reached, ..
  float keep;       // .. and that it is kept once its children are not
};

DOMINO_HD NodeRecord fresh_record(const RowStats& stats, float start) {
  return {stats, -1, 0, 0, 0.0f, 1.0f, start, start};
}

// How the last token is drawn at the node where the walk ended.
enum class TreeDraw : int { kNone, kPlain, kWithoutChildren, kResidual };

DOMINO_HD TreeDraw draw_kind(TreeRule rule, const NodeRecord& record) {
  if (rule == TreeRule::kGreedy || rule == TreeRule::kMatch) return TreeDraw::kNone;
  if (record.moved == 0) return TreeDraw::kPlain;
  if (rule == TreeRule::kTargetOnly) return TreeDraw::kWithoutChildren;
  return record.keep > 0.0f ? TreeDraw::kResidual : TreeDraw::kPlain;
}

}  // namespace domino
