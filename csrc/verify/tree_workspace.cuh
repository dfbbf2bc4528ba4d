// What the launches of verify_tree leave for each other, and a request's tree in shared memory.
#pragma once

#include "verify/chain_judge.cuh"
#include "verify/row_cluster.cuh"
#include "verify/tree_walk.h"

namespace domino {

// A child at its parent, for traversal.
struct alignas(16) ChildLaw {
  float p;
  float q;     // 0: not to be stepped to
  float left;  // mass of q that is not drawn once the child and all before it are
  uint32_t unused;
};

static_assert(sizeof(ChildLaw) == 16 && sizeof(NodeRecord) == 48 && sizeof(RowStats) == 24 &&
              sizeof(RowFilter) == 16 && sizeof(ChunkStats) == 16 &&
              kChunk == 1024);  // verify_tree_workspace() counts on it

struct TreeWorkspace {
  NodeRecord* records;          // [batch, width], of nodes with children
  ChildLaw* children;           // [batch, width]
  RowStats* drafts;             // [batch, width]: of the draft row or the pool
  unsigned long long* outside;  // [batch, width]: units of p outside of the pool
  RowFilter* filters;           // [batch, width], with filters
  int32_t* drawn;               // [batch, width], match: the token that follows
  float* pool_p;                // [batch, width, pool]
  float* pool_q;
  ChunkStats* chunks;  // [batch, rows, row_chunks]: target rows, then the rows of a dense q
  uint32_t* first;     // the same: the lowest id that has the chunk's greatest logit
  int row_chunks;

  __host__ __device__ explicit TreeWorkspace(const VerifyTreeParams& p)
      : row_chunks(static_cast<int>((p.vocab + kChunk - 1) / kChunk)) {
    char* at = static_cast<char*>(p.workspace);
    const int64_t count = p.batch * p.width;
    const bool dense = p.draft_logits != nullptr;
    const auto take = [&](int64_t size) {
      char* taken = at;
      at += (size + 15) / 16 * 16;
      return static_cast<void*>(taken);
    };
    records = static_cast<NodeRecord*>(take(count * sizeof(NodeRecord)));
    children = static_cast<ChildLaw*>(take(count * sizeof(ChildLaw)));
    drafts = static_cast<RowStats*>(take(dense || p.pool > 0 ? count * sizeof(RowStats) : 0));
    outside = static_cast<unsigned long long*>(take(p.pool > 0 ? count * 8 : 0));
    filters = static_cast<RowFilter*>(take(p.has_filters() ? count * sizeof(RowFilter) : 0));
    drawn = static_cast<int32_t*>(take(count * sizeof(int32_t)));
    pool_p = static_cast<float*>(take(count * p.pool * sizeof(float)));
    pool_q = static_cast<float*>(take(count * p.pool * sizeof(float)));
    const int64_t parts = count * (dense ? 2 : 1) * row_chunks;
    chunks = static_cast<ChunkStats*>(take(parts * sizeof(ChunkStats)));
    first = static_cast<uint32_t*>(take(parts * sizeof(uint32_t)));
  }
};

__device__ __forceinline__ NodeRecord load_record(const NodeRecord* record) {
  NodeRecord out;
  uint4* to = reinterpret_cast<uint4*>(&out);
#pragma unroll
  for (int n = 0; n < 3; ++n) to[n] = __ldcg(reinterpret_cast<const uint4*>(record) + n);
  return out;
}

// Asks for what every block of request b reads first, so that it does not come from memory one by
// one. By a whole block.
__device__ __forceinline__ void ask_for_request(const VerifyTreeParams& p, int64_t b) {
  const auto ask = [](const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
  };
  if (p.cu_nodes == nullptr && threadIdx.x < p.width) {
    ask(p.parents + b * p.parents_stride + threadIdx.x);
    ask(p.tokens + b * p.tokens_stride + threadIdx.x);
  }
  if (threadIdx.x == 0 && p.temperature != nullptr) {
    ask(p.seed + b);
    ask(p.block_start + b);
    if (p.draft_temperature != nullptr) ask(p.draft_temperature + b);
  }
}

// The nodes that have children. Rows of others are read where the walk ends, and nowhere else.
struct InnerNodes {
  static constexpr int kWords = kMaxTreeNodes / 32;
  int count;
  uint32_t bits[kWords];
  uint32_t before[kWords];
  int16_t at[kMaxTreeNodes];  // in order

  __device__ __forceinline__ bool has(int n) const { return (bits[n / 32] >> n % 32 & 1) != 0; }

  // All threads of a block; synchronises. parents: what r.parent() says, for others to see, or null
  __device__ __forceinline__ void load(const TreeRequest& r, int16_t* parents) {
    static_assert(kWords == kWarpSize);
    const int own = threadIdx.x < r.nodes ? r.parent(threadIdx.x) : -1;
    if (threadIdx.x < kWords) bits[threadIdx.x] = 0;
    __syncthreads();
    for (int n = threadIdx.x; n < r.nodes; n += blockDim.x) {
      const int parent = n < blockDim.x ? own : r.parent(n);
      if (parents != nullptr) parents[n] = static_cast<int16_t>(parent);
      if (parent >= 0) atomicOr(&bits[parent / 32], 1u << parent % 32);
    }
    __syncthreads();
    if (threadIdx.x < kWords) {
      const uint32_t here = __popc(bits[threadIdx.x]);
      uint32_t sum = here;
#pragma unroll
      for (int offset = 1; offset < kWarpSize; offset *= 2) {
        const uint32_t lower = __shfl_up_sync(kFullMask, sum, offset);
        sum += threadIdx.x >= offset ? lower : 0;
      }
      before[threadIdx.x] = sum - here;
      if (threadIdx.x == kWords - 1) count = static_cast<int>(sum);
    }
    __syncthreads();
    for (int n = threadIdx.x; n < r.nodes; n += blockDim.x)
      if (has(n))
        at[before[n / 32] + __popc(bits[n / 32] & ((1u << n % 32) - 1))] = static_cast<int16_t>(n);
    __syncthreads();
  }
};

struct SharedTree {
  static constexpr int kPad = -1, kBad = -2;
  int nodes;
  uint32_t faults;  // kBadTree
  InnerNodes inner;
  int16_t parent[kMaxTreeNodes];  // -1: root, pad or orphan
  int32_t token[kMaxTreeNodes];   // kPad and kBad: not a token

  // All threads of a block; synchronises.
  __device__ void load(const TreeRequest& r) {
    uint32_t found = 0;
    for (int n = threadIdx.x; n < r.nodes; n += blockDim.x) {
      uint32_t status = 0;
      const int64_t x = n == 0 ? kPad : r.token(n);
      token[n] = r.usable(x, &status) ? static_cast<int>(x) : status != 0 ? kBad : kPad;
      found |= r.parent_fault(n);
    }
    if (threadIdx.x == 0) nodes = r.nodes;
    if (const int any = __syncthreads_or(found != 0); threadIdx.x == 0)
      faults = any != 0 ? kBadTree : 0u;
    inner.load(r, parent);
  }

  // fn(c, mask) for the children of n, in order, 32 nodes at a time: a lane has node c, the mask
  // is of the lanes whose node is a child. By a whole warp, until fn returns false.
  template <class Fn>
  __device__ __forceinline__ void for_each_window(int n, Fn fn) const {
    for (int base = (n + 1) / kWarpSize * kWarpSize; base < nodes; base += kWarpSize) {
      const int c = base + static_cast<int>(threadIdx.x % kWarpSize);
      const unsigned mask = __ballot_sync(kFullMask, c > n && c < nodes && parent[c] == n);
      if (mask != 0 && !fn(c, mask)) return;
    }
  }

  // Does an earlier child of n have the token of this lane's child? By a whole warp. others: are
  // there children in front of this window?
  __device__ __forceinline__ bool repeats(int n, int c, bool child, bool others) const {
    const int lane = threadIdx.x % kWarpSize;
    const int x = child && token[c] >= 0 ? token[c] : -1 - lane;
    bool found = (__match_any_sync(kFullMask, x) & ((1u << lane) - 1)) != 0;
    for (int m = n + 1; others && m < c - lane; ++m) found |= parent[m] == n && token[m] == x;
    return found;
  }
};

// Is one of the children in this warp's window, whose tokens x are, the token? Then it is the step.
__device__ __forceinline__ bool find_child(int c, int x, uint32_t token, int* step,
                                           uint32_t* status) {
  const unsigned hit = __ballot_sync(kFullMask, x >= 0 && static_cast<uint32_t>(x) == token);
  const unsigned bad = __ballot_sync(kFullMask, x == SharedTree::kBad);
  if ((hit != 0 ? bad & ((hit & (0u - hit)) - 1) : bad) != 0) *status |= kBadId;
  if (hit != 0) *step = c - static_cast<int>(threadIdx.x % kWarpSize) + __ffs(hit) - 1;
  return hit != 0;
}

}  // namespace domino
