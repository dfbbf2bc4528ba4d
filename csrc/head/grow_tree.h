// grow_tree: takes the children of one level's paths (expand.h) up into a request's tree, and picks
// the paths of the next level.
//
// Candidate c of a request is a drafted node; node numbers are c + 1, 0 is the root (the anchor).
// Child i of path w becomes candidate first + w * children + i: its parent is the node of path w,
// its log-probability is summed along the path. Of all children of the level the next_paths most
// probable become the next paths, ties to the lowest index; a child that is not there (-1) comes
// last, with log-probability -inf, and is a path that has no children.
#pragma once

#include <cstdint>

#include "common/argmax_key.h"

namespace domino {

struct GrowTreeParams {
  // the tree, of which this level writes candidates first .. first + paths * children - 1
  int64_t* tokens;       // [batch, candidates], contiguous as all are
  int32_t* parents;      // [batch, candidates]: candidate index, -1: the root
  float* log_probs;      // [batch, candidates]: of the path to each
  float* log_remaining;  // [batch, candidates]
  // the next level's paths
  int64_t* next_token;         // [batch, next_paths]
  int64_t* next_node;          // [batch, next_paths]
  int64_t* next_parent;        // [batch, next_paths]: row of its parent's state: first_row + w
  float* next_log_prob;        // [batch, next_paths]: of the path
  const int64_t* token;        // [batch, paths, children]: what expand returned
  const float* log_prob;       // [batch, paths, children]
  const float* remaining;      // [batch, paths, children]
  const int64_t* node;         // [batch, paths]: null: the root alone
  const float* path_log_prob;  // [batch, paths]; null: 0
  int64_t batch;
  int64_t paths;
  int64_t children;
  int64_t next_paths;  // 0: the last level
  int64_t candidates;
  int64_t first;
  int64_t first_row;
};

constexpr int64_t kMaxLevel = 1024;  // paths * children

// One child: what it is in the tree.
struct GrownChild {
  int64_t token, node, row;
  float log_prob;

  DOMINO_HD GrownChild(const GrowTreeParams& p, int64_t b, int64_t i) {
    const int64_t w = i / p.children, path = b * p.paths + w;
    const int64_t from = b * p.paths * p.children + i, at = b * p.candidates + p.first + i;
    const int64_t parent = p.node != nullptr ? p.node[path] : 0;
    token = p.token[from];
    node = p.first + i + 1;
    row = p.first_row + w;
    log_prob = p.log_prob[from] + (p.path_log_prob != nullptr ? p.path_log_prob[path] : 0.0f);
    p.tokens[at] = token;
    p.parents[at] = static_cast<int32_t>(parent - 1);
    p.log_probs[at] = log_prob;
    p.log_remaining[at] = p.remaining[from];
  }

  DOMINO_HD uint64_t key(int64_t i) const {
    return argmax_key(token < 0 ? -INFINITY : log_prob, static_cast<uint32_t>(i));
  }

  DOMINO_HD void become_path(const GrowTreeParams& p, int64_t b, int64_t rank) const {
    const int64_t at = b * p.next_paths + rank;
    p.next_token[at] = token;
    p.next_node[at] = node;
    p.next_parent[at] = row;
    p.next_log_prob[at] = log_prob;
  }
};

int grow_tree_cuda(const GrowTreeParams& p, void* stream);
int grow_tree_cpu(const GrowTreeParams& p);

}  // namespace domino
