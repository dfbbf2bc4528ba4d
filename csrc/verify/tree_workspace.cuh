// What the launches of verify_tree leave for each other, and a request's tree in shared memory.
#pragma once

#include "common/reduce.cuh"
#include "verify/chain_judge.cuh"
#include "verify/row_cluster.cuh"
#include "verify/tree_walk.h"

namespace domino {

// Zero before a call and zero again behind it.
struct RequestControl {
  uint32_t arrived;  // blocks of the last launch that have run their race
  uint32_t judged;   // traversal: nodes whose pool is known
};
struct NodeControl {
  uint32_t
      arrived;  // blocks that are done with their part of the row; pruned ones in the upper half
  int32_t verdict;  // 0: not known; kDead; otherwise kKnown + the child that is stepped to, or - 1
};
// A block of the last launch races so many tokens.
constexpr int kFinishThreads = 256;
constexpr int kShare = kFinishThreads * kGroup;
__host__ __device__ constexpr int64_t share_count(int64_t vocab) {
  return (vocab + kShare - 1) / kShare;
}

constexpr int32_t kDead = 1;  // no walk comes here
constexpr int32_t kKnown = 3;

// The winner of one block's race.
struct alignas(16) RaceSlot {
  unsigned long long key;
  float logprob;
  uint32_t unused;
};

struct PoolUnits {
  uint64_t outside;  // of p
  uint64_t drafted;  // of q, before any draw
};

static_assert(sizeof(RequestControl) == 8 && sizeof(NodeControl) == 8 && sizeof(RaceSlot) == 16 &&
              sizeof(PoolUnits) == 16 && kShare == 2048 && sizeof(NodeRecord) == 48 &&
              sizeof(RowStats) == 24 && sizeof(RowFilter) == 16 && sizeof(ChunkStats) == 16 &&
              kChunk == 1024 && kGroup == 8);  // verify_tree_workspace() counts on it

struct TreeWorkspace {
  RequestControl* requests;  // [batch]
  NodeControl* nodes;        // [batch, width]
  RaceSlot* slots;           // [batch, shares]
  NodeRecord* records;       // [batch, width]
  RowStats* drafts;          // [batch, width]: of the draft row or the pool
  PoolUnits* units;          // [batch, width]
  RowFilter* filters;        // [batch, width], with filters
  float* pool_p;             // [batch, width, pool]
  float* pool_q;
  ChunkStats* chunks;  // [batch, rows, row_chunks]: target rows, then the rows of a dense q
  uint32_t* first;     // the same: the lowest id that has the chunk's greatest logit

  __host__ __device__ TreeWorkspace(void* base, int64_t batch, int64_t width, int64_t vocab,
                                    int64_t pool, bool dense, bool filtered) {
    char* at = static_cast<char*>(base);
    const int64_t count = batch * width;
    const auto take = [&](int64_t size) {
      char* taken = at;
      at += (size + 15) / 16 * 16;
      return static_cast<void*>(taken);
    };
    requests = static_cast<RequestControl*>(take(batch * sizeof(RequestControl)));
    nodes = static_cast<NodeControl*>(take(count * sizeof(NodeControl)));
    slots = static_cast<RaceSlot*>(take(batch * share_count(vocab) * sizeof(RaceSlot)));
    records = static_cast<NodeRecord*>(take(count * sizeof(NodeRecord)));
    const bool drafted = dense || pool > 0;
    drafts = static_cast<RowStats*>(take(drafted ? count * sizeof(RowStats) : 0));
    units = static_cast<PoolUnits*>(take(pool > 0 ? count * sizeof(PoolUnits) : 0));
    filters = static_cast<RowFilter*>(take(filtered ? count * sizeof(RowFilter) : 0));
    pool_p = static_cast<float*>(take(count * pool * sizeof(float)));
    pool_q = static_cast<float*>(take(count * pool * sizeof(float)));
    const int64_t row_chunks = (vocab + kChunk - 1) / kChunk;
    const int64_t parts = count * (dense ? 2 : 1) * row_chunks;
    chunks = static_cast<ChunkStats*>(take(parts * sizeof(ChunkStats)));
    first = static_cast<uint32_t*>(take(parts * sizeof(uint32_t)));
  }

  __host__ __device__ explicit TreeWorkspace(const VerifyTreeParams& p)
      : TreeWorkspace(p.workspace, p.batch, p.width, p.vocab, p.pool, p.draft_logits != nullptr,
                      p.top_k != nullptr || p.top_p != nullptr || p.min_p != nullptr) {}
};

// Counts up in *counter; what a block wrote before (with a barrier in between) is visible to the
// block that sees the last count, behind a barrier. By one thread.
__device__ __forceinline__ uint32_t arrive(uint32_t* counter, uint32_t amount) {
  uint32_t before;
#if __CUDA_ARCH__ >= 700
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(amount)
               : "memory");
#else
  __threadfence();
  before = atomicAdd(counter, amount);
  __threadfence();
#endif
  return before;
}

// A row of any dtype.
struct RowReader {
  LogitRow row;
  int vocab;

  __device__ __forceinline__ float at(int64_t token) const { return row.at(token); }
  __device__ __forceinline__ Group<float> group(int token) const {
    if (row.dtype == DType::kF32) return widen(static_cast<const float*>(row.data), token);
    if (row.dtype == DType::kF16) return widen(static_cast<const f16*>(row.data), token);
    return widen(static_cast<const bf16*>(row.data), token);
  }

 private:
  template <class T>
  __device__ __forceinline__ Group<float> widen(const T* data, int token) const {
    Group<T> stored;
    stored.load(data, token, vocab, reinterpret_cast<uintptr_t>(data) % 16 == 0);
    Group<float> out;
#pragma unroll
    for (int j = 0; j < kGroup; ++j) out.values[j] = stored.at(j);
    return out;
  }
};

struct SharedTree {
  static constexpr int kPad = -1, kBad = -2;
  int nodes;
  uint32_t faults;                // kBadTree
  int16_t parent[kMaxTreeNodes];  // -1: root, pad or orphan
  int32_t token[kMaxTreeNodes];   // kPad and kBad: not a token

  // All threads of a block; synchronises.
  __device__ void load(const TreeRequest& r) {
    uint32_t found = 0;
    for (int n = threadIdx.x; n < r.nodes; n += blockDim.x) {
      uint32_t status = 0;
      const int64_t x = n == 0 ? kPad : r.token(n);
      parent[n] = static_cast<int16_t>(r.parent(n));
      token[n] = r.usable(x, &status) ? static_cast<int>(x) : status != 0 ? kBad : kPad;
      found |= r.parent_fault(n);
    }
    if (threadIdx.x == 0) nodes = r.nodes;
    if (const int any = __syncthreads_or(found != 0); threadIdx.x == 0)
      faults = any != 0 ? kBadTree : 0u;
    __syncthreads();
  }

  // fn(child, token, repeated, value) for the children of n in order, by a whole warp, until it
  // returns false. repeated: an earlier sibling has the token. value: what `of` gives for a child;
  // it is asked for 32 of them side by side.
  template <class Of, class Fn>
  __device__ __forceinline__ void for_each_child(int n, Of of, Fn fn) const {
    for (int base = (n + 1) / kWarpSize * kWarpSize; base < nodes; base += kWarpSize) {
      const int c = base + static_cast<int>(threadIdx.x % kWarpSize);
      const bool mine = c > n && c < nodes && parent[c] == n;
      unsigned mask = __ballot_sync(kFullMask, mine);
      if (mask == 0) continue;
      const int own = mine ? token[c] : kPad;
      const float value = mine ? of(c, own) : 0.0f;
      bool repeated = false;
      if (mine)
        for (int m = n + 1; m < c; ++m) repeated |= parent[m] == n && token[m] == own;
      const unsigned repeats = __ballot_sync(kFullMask, repeated);
      for (; mask != 0; mask &= mask - 1) {
        const int lane = __ffs(mask) - 1;
        if (!fn(base + lane, __shfl_sync(kFullMask, own, lane), (repeats >> lane & 1) != 0,
                __shfl_sync(kFullMask, value, lane)))
          return;
      }
    }
  }

  template <class Fn>
  __device__ __forceinline__ void for_each_child(int n, Fn fn) const {
    for_each_child(
        n, [](int, int) { return 0.0f; },
        [&](int c, int x, bool repeated, float) { return fn(c, x, repeated); });
  }
};

}  // namespace domino
