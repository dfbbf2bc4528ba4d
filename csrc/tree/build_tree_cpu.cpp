#include <algorithm>
#include <numeric>
#include <vector>

#include "tree/build_tree.h"

namespace domino {

namespace {

void build_request(const BuildTreeParams& p, int64_t b) {
  const int candidates = static_cast<int>(p.candidates), nodes = static_cast<int>(p.nodes);
  const int32_t* parents = p.parents + b * p.parents_stride;
  bool orphans = false;
  // keys of candidates that hang on the root; 0: left out
  std::vector<uint32_t> keys(candidates);
  for (int c = 0; c < candidates; ++c) {
    const int parent = parents[c];
    if (parent < -1 || parent >= c) {
      orphans = true;
      continue;
    }
    const uint32_t above = parent < 0 ? ~0u : keys[parent];
    const uint32_t own =
        p.scores == nullptr ? 1u : std::max(1u, score_key(p.scores[b * p.scores_stride + c]));
    keys[c] = std::min(above, own);
  }
  std::vector<int> chosen;
  for (int c = 0; c < candidates; ++c)
    if (keys[c] != 0) chosen.push_back(c);
  std::stable_sort(chosen.begin(), chosen.end(), [&](int a, int c) { return keys[a] > keys[c]; });
  if (static_cast<int>(chosen.size()) > nodes - 1) chosen.resize(nodes - 1);
  std::sort(chosen.begin(), chosen.end());

  std::vector<int> node_of(candidates, 0);
  std::vector<std::vector<bool>> sees(nodes, std::vector<bool>(nodes));
  const int64_t start = p.prefix[b];
  for (int n = 0; n < nodes; ++n) {
    const int c = n == 0 || n > static_cast<int>(chosen.size()) ? -1 : chosen[n - 1];
    int parent = -1, depth = 0;
    if (c >= 0) {
      node_of[c] = n;
      parent = parents[c] < 0 ? 0 : node_of[parents[c]];
      depth = p.out_depth[b * nodes + parent] + 1;
      sees[n] = sees[parent];
    }
    sees[n][n] = true;
    const int64_t at = b * nodes + n;
    p.out_tokens[at] = n == 0 ? p.root[b] : c < 0 ? -1 : p.tokens[b * p.tokens_stride + c];
    p.out_parents[at] = parent;
    p.out_index[at] = c;
    p.out_depth[at] = depth;
    p.out_position[at] = start + depth;
  }
  p.status[b] = orphans ? kTreeStatus : 0;

  if (p.mask_kind == TreeMask::kPacked) {
    const int64_t words = (p.nodes + 31) / 32;
    uint32_t* mask = static_cast<uint32_t*>(p.mask) + b * nodes * words;
    std::fill_n(mask, nodes * words, 0u);
    for (int n = 0; n < nodes; ++n)
      for (int m = 0; m < nodes; ++m)
        if (sees[n][m]) mask[n * words + m / 32] |= 1u << m % 32;
  } else if (p.mask_kind != TreeMask::kNone) {
    const int64_t first = p.mask_kind == TreeMask::kFull ? start : 0;
    uint8_t* mask = static_cast<uint8_t*>(p.mask) + b * nodes * p.columns;
    for (int n = 0; n < nodes; ++n)
      for (int64_t j = 0; j < p.columns; ++j)
        mask[n * p.columns + j] =
            j < first || (j - first < nodes && sees[n][static_cast<int>(j - first)]);
  }
}

}  // namespace

int build_tree_cpu(const BuildTreeParams& p) {
  if (p.nodes < 1 || p.nodes > kMaxBuiltNodes || p.candidates > kMaxCandidates) return kBadArgument;
  for (int64_t b = 0; b < p.batch; ++b) build_request(p, b);
  return kOk;
}

}  // namespace domino
