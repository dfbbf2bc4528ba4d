#include <algorithm>
#include <functional>
#include <vector>

#include "common/status.h"
#include "head/grow_tree.h"

namespace domino {

int grow_tree_cpu(const GrowTreeParams& p) {
  const int64_t level = p.paths * p.children;
  if (level > kMaxLevel || p.next_paths > level) return kBadArgument;
  std::vector<GrownChild> children;
  std::vector<uint64_t> keys(level);
  for (int64_t b = 0; b < p.batch; ++b) {
    children.clear();
    for (int64_t i = 0; i < level; ++i) {
      children.emplace_back(p, b, i);
      keys[i] = children[i].key(i);
    }
    std::sort(keys.begin(), keys.end(), std::greater<>());
    for (int64_t rank = 0; rank < p.next_paths; ++rank)
      children[key_id(keys[rank])].become_path(p, b, rank);
  }
  return kOk;
}

}  // namespace domino
