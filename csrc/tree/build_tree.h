// build_tree: a tree of nodes out of drafted candidates, with depths, positions and the attention
// mask.
//
// Candidate c hangs on candidate parents[c] < c, or on the root with -1. With scores the num_nodes
// - 1 best are taken, and a candidate is never better than what it hangs on, so the choice is
// closed; equal scores go to the lowest index. Nodes keep the order of their candidates behind the
// root, node 0: it stays topological, and siblings keep theirs. A candidate whose parent is not an
// earlier one is left out, with everything below it.
#pragma once

#include <cstdint>

#include "common/hd.h"
#include "common/status.h"

namespace domino {

enum class TreeMask : int {
  kNone = 0,
  kBool = 1,    // [batch, nodes, columns] bytes: node i sees j, columns = nodes
  kPacked = 2,  // [batch, nodes, words] of 32 bits, bit j % 32 of word j / 32
  kFull = 3     // [batch, nodes, columns] bytes: the prefix [0, prefix[b]), then the nodes
};

struct BuildTreeParams {
  int64_t* out_tokens;     // [batch, nodes]; -1: pad
  int32_t* out_parents;    // [batch, nodes]; -1: the root, or a pad
  int32_t* out_index;      // [batch, nodes]: the candidate; -1: the root, or a pad
  int32_t* out_depth;      // [batch, nodes]; 0 for a pad
  int64_t* out_position;   // [batch, nodes]: prefix + depth
  void* mask;              // see TreeMask; a pad sees itself only, and the prefix
  uint8_t* status;         // [batch]: kBadTree where a candidate was left out for its parent
  const int64_t* root;     // [batch]
  const int64_t* tokens;   // [batch, candidates]
  const int32_t* parents;  // [batch, candidates]
  const float* scores;     // [batch, candidates], or null: the first nodes - 1 candidates
  const int64_t* prefix;   // [batch]: position of the root
  int64_t batch;
  int64_t candidates;
  int64_t nodes;
  int64_t columns;
  int64_t tokens_stride;
  int64_t parents_stride;
  int64_t scores_stride;
  TreeMask mask_kind;
};

constexpr int kMaxBuiltNodes = 1024;
constexpr int kMaxCandidates = 2048;
constexpr int kTreeStatus = 128;  // kBadTree of verify/tree_walk.h

// Candidates by score: greater is better, NaN is the worst.
DOMINO_HD uint32_t score_key(float score) {
  if (score != score) return 0;
  union {
    float value;
    uint32_t bits;
  } word{score + 0.0f};
  return (word.bits >> 31) != 0 ? ~word.bits : word.bits | 0x80000000u;
}

int build_tree_cuda(const BuildTreeParams& p, void* stream);
int build_tree_cpu(const BuildTreeParams& p);

}  // namespace domino
