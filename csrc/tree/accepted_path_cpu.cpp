#include <cstring>

#include "tree/accepted_path.h"

namespace domino {

int compact_accepted_cpu(const CompactParams& p) {
  const AcceptedPath& path = p.path;
  for (int64_t b = 0; b < path.batch; ++b) {
    const int length = path.length(b);
    for (int t = 0; t < p.count; ++t) {
      const CompactRows& rows = p.tensors[t];
      for (int64_t i = 0; i < path.width; ++i) {
        char* out = rows.out + (b * path.width + i) * rows.bytes;
        if (i >= length) {
          std::memset(out, 0, rows.bytes);
          continue;
        }
        const int64_t node = path.path[b * path.width + i];
        std::memcpy(out, rows.in + b * rows.in_batch_stride + node * rows.in_node_stride,
                    rows.bytes);
      }
    }
  }
  return kOk;
}

// A slot moves down or stays, and later slots come from farther up: in rising order nothing is
// overwritten before it is read.
int kv_move_cpu(const MoveParams& p) {
  for (int64_t b = 0; b < p.path.batch; ++b) {
    const int length = p.path.length(b);
    for (int i = 1; i < length; ++i) {
      const int64_t from = p.slot_offset(b, p.start[b] + p.path.path[b * p.path.width + i]);
      const int64_t to = p.slot_offset(b, p.start[b] + i);
      if (from < 0 || to < 0) break;
      if (from == to) continue;
      for (int t = 0; t < p.count; ++t)
        for (int64_t h = 0; h < p.heads; ++h)
          std::memcpy(p.caches[t] + to + h * p.head_stride, p.caches[t] + from + h * p.head_stride,
                      p.bytes);
    }
  }
  return kOk;
}

}  // namespace domino
