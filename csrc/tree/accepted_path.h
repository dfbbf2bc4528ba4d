// What follows the verification of a tree: the accepted nodes' rows come to the front.
//
// The path of request b is path[b, 0 .. num_accepted[b]], root first, as verify_tree writes it. Its
// nodes rise; an entry that does not, or that is no node, ends it.
//
//   compact_accepted   out[b, i] = in[b, path[b, i]] of several tensors, zeros behind the path
//   kv_move            cache slot start[b] + path[b, i] moves to slot start[b] + i, in all layers
#pragma once

#include <cstdint>
#include <vector>

#include "common/hd.h"
#include "common/status.h"

namespace domino {

struct AcceptedPath {
  const int32_t* path;          // [batch, width]
  const int32_t* num_accepted;  // [batch]
  int64_t batch;
  int64_t width;
  int64_t nodes;

  // Entries of the path that are good, the root's included.
  DOMINO_HD int length(int64_t b) const {
    const int64_t limit =
        num_accepted[b] + int64_t{1} < width ? num_accepted[b] + int64_t{1} : width;
    int before = -1, i = 0;
    for (; i < limit; ++i) {
      const int node = path[b * width + i];
      if (node <= before || node >= nodes) break;
      before = node;
    }
    return i;
  }
};

// One tensor: rows of `bytes` contiguous bytes.
struct CompactRows {
  const char* in;
  char* out;
  int64_t bytes;
  int64_t in_batch_stride;  // bytes
  int64_t in_node_stride;
};
constexpr int kMaxCompactTensors = 16;

struct CompactParams {
  AcceptedPath path;
  CompactRows tensors[kMaxCompactTensors];
  int count;
};

constexpr int kMaxMoveTensors = 384;  // as many pointers as a launch's parameters hold

// Keys or values of one layer each, all of one layout. Contiguous: slot s of request b lies at
// b * batch_stride + s * slot_stride; paged: at page_table[b, s / page_size] * batch_stride +
// s % page_size * slot_stride. A head's `bytes` are contiguous. Strides in bytes.
struct MoveParams {
  AcceptedPath path;
  const int64_t* start;       // [batch]: slot of the root
  const int32_t* page_table;  // [batch, pages], or null
  int64_t pages;
  int64_t page_size;
  int64_t page_count;  // of a cache; for contiguous caches unused
  int64_t slots;       // of a request
  int64_t heads;
  int64_t bytes;
  int64_t batch_stride;
  int64_t slot_stride;
  int64_t head_stride;
  int count;
  char* caches[kMaxMoveTensors];

  // Byte offset of a slot, -1 where there is none.
  DOMINO_HD int64_t slot_offset(int64_t b, int64_t slot) const {
    if (slot < 0 || slot >= slots) return -1;
    if (page_table == nullptr) return b * batch_stride + slot * slot_stride;
    const int64_t page = page_table[b * pages + slot / page_size];
    if (page < 0 || page >= page_count) return -1;
    return page * batch_stride + slot % page_size * slot_stride;
  }
};
static_assert(sizeof(MoveParams) <= 4096);

int compact_accepted_cuda(const CompactParams& p, void* stream);
int compact_accepted_cpu(const CompactParams& p);
int kv_move_cuda(const MoveParams& p, void* stream);
int kv_move_cpu(const MoveParams& p);

}  // namespace domino
