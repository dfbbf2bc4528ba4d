// What the walk does at one node, by one warp: first what the call was given (the children's coins
// and logits, q), which does not wait for the rows, then the verdict from the row's statistics.
#pragma once

#include "common/copy_async.cuh"
#include "verify/tree_workspace.cuh"

namespace domino {

// The laws of one node over its pool, in shared memory.
struct PoolView {
  int32_t* ids;  // -1: unused
  float* p;      // the target's logits at first
  float* q;
  int count;

  // Where x stands, -1 where q gives it nothing.
  __device__ __forceinline__ int find(int x) const {
    for (int base = 0; base < count; base += kWarpSize) {
      const int m = base + static_cast<int>(threadIdx.x % kWarpSize);
      const unsigned hit = __ballot_sync(kFullMask, m < count && ids[m] == x && q[m] > 0.0f);
      if (hit != 0) return base + __ffs(hit) - 1;
    }
    return -1;
  }

  __device__ __forceinline__ uint64_t units_over(float rho) const {
    uint64_t sum = 0;
    for (int m = threadIdx.x % kWarpSize; m < count; m += kWarpSize)
      sum += to_units(add_rn(p[m], -mul_rn(rho, q[m])));
    return warp_sum(sum);
  }
};

struct SharedPools {
  int32_t ids[kMaxPool];
  float p[kMaxPool];
  float q[kMaxPool];

  // A warp has a part to itself. With large pools there are fewer parts than warps: most_warps().
  __device__ __forceinline__ PoolView part(int which, int count) {
    const int at = which * count;
    return {ids + at, p + at, q + at, count};
  }
  static __device__ __forceinline__ int most_warps(int count) {
    const int warps = static_cast<int>(blockDim.x) / kWarpSize;
    return count == 0 ? warps : min(warps, static_cast<int>(kMaxPool) / count);
  }
};

// By child, at its parent.
struct SharedChildren {
  float logit[kMaxTreeNodes];  // of its token, in the parent's target row
  float q[kMaxTreeNodes];      // 0: not to be stepped to
  float left[kMaxTreeNodes];   // mass of q that is not drawn once it and all before it are
};

constexpr int kPoolAhead = 2;  // entries of a lane that are on their way at once

// Asks for all pools of request r: which nodes have children is not known yet. By all threads of a
// cluster.
__device__ __forceinline__ void ask_for_pools(const RowCluster& cluster, const TreeRequest& r) {
  const VerifyTreeParams& p = r.p;
  if (!r.uses_draft() || p.draft_logits != nullptr) return;
  constexpr int kStep = 128 / sizeof(int32_t);  // entries of a line
  const int lines = static_cast<int>((p.pool + kStep - 1) / kStep), all = r.nodes * lines;
#pragma unroll 1
  for (int i = cluster.rank * blockDim.x + threadIdx.x; i < all; i += cluster.size * blockDim.x) {
    const int n = i / lines, m = (i - n * lines) * kStep;
    prefetch_l2(r.pool_ids(n) + m);
    prefetch_l2(r.pool_row(n).plus(m).data);
  }
}

// Ids, the target's logits there and the law q of node n's pool. By one warp.
__device__ __forceinline__ RowStats load_pool(const TreeRequest& r, int n, const PoolView& pool) {
  const int lane = threadIdx.x % kWarpSize;
  const int32_t* ids = r.pool_ids(n);
  const LogitRow logits = r.pool_row(n), target = r.target_row(n);
  uint32_t key = 0;
  for (int base = lane; base < pool.count; base += kPoolAhead * kWarpSize) {
    int id[kPoolAhead];
    float q[kPoolAhead], p[kPoolAhead];
#pragma unroll
    for (int j = 0; j < kPoolAhead; ++j) {
      const int m = base + j * kWarpSize;
      id[j] = m < pool.count ? ids[m] : -1;
      q[j] = m < pool.count ? logits.at(m) : -INFINITY;
    }
#pragma unroll
    for (int j = 0; j < kPoolAhead; ++j) {
      if (id[j] < 0 || id[j] >= r.p.vocab) id[j] = -1;
      p[j] = id[j] >= 0 ? target.at(id[j]) : -INFINITY;
    }
#pragma unroll
    for (int j = 0; j < kPoolAhead; ++j) {
      const int m = base + j * kWarpSize;
      if (m >= pool.count) break;
      if (id[j] >= 0) key = max(key, logit_key(q[j]));
      pool.ids[m] = id[j];
      pool.q[m] = id[j] >= 0 ? q[j] : -INFINITY;
      pool.p[m] = p[j];
    }
  }
  key = __reduce_max_sync(kFullMask, key);
  RowStats stats{0, key == 0 ? -INFINITY : key_logit(key), -1, 0, 0};
  stats.faults = row_faults(stats.top);
  if (stats.faults == 0) {
    const RowLaw weights(stats.top, 1, law_scale(r.draft_temperature));
    uint64_t sum = 0;
    for (int m = lane; m < pool.count; m += kWarpSize) sum += to_fixed(weights.weight(pool.q[m]));
    stats.sum = warp_sum(sum);
    const RowLaw q(stats, r.draft_temperature);
    for (int m = lane; m < pool.count; m += kWarpSize)
      pool.q[m] = counted_draft(q.probability(pool.q[m]));
  } else {
    for (int m = lane; m < pool.count; m += kWarpSize) pool.q[m] = 0.0f;
  }
  __syncwarp();
  return stats;
}

// What does not take the statistics of node n's row: the law q, and what it says of the children.
__device__ __noinline__ void prepare_node(const TreeRequest& r, const TreeWorkspace& workspace,
                                          const SharedTree& tree, int n, bool pooled,
                                          const PoolView& pool, SharedChildren* children) {
  const int lane = threadIdx.x % kWarpSize;
  if (r.rule == TreeRule::kGreedy || r.rule == TreeRule::kMatch) return;
  uint64_t drafted = 0;
  bool others = false;
  if (pooled) {
    const RowStats stats = load_pool(r, n, pool);
    if (lane == 0) workspace.drafts[r.b * r.p.width + n] = stats;
    for (int m = lane; m < pool.count; m += kWarpSize) drafted += to_units(pool.q[m]);
    drafted = warp_sum(drafted);
  }
  tree.for_each_window(n, [&](int c, unsigned mask) {
    const bool child = (mask >> lane & 1) != 0;
    const int x = child ? tree.token[c] : SharedTree::kPad;
    const bool repeated = tree.repeats(n, c, child, others);
    others = true;
    float q = x >= 0 && !repeated ? 1.0f : 0.0f, left = 0.0f;
    if (pooled) {
      const unsigned usable = __ballot_sync(kFullMask, q > 0.0f);
      for (; mask != 0; mask &= mask - 1) {
        const int other = __ffs(mask) - 1;
        const int at =
            (usable >> other & 1) != 0 ? pool.find(__shfl_sync(kFullMask, x, other)) : -1;
        const float mass = at < 0 ? 0.0f : pool.q[at];
        drafted -= to_units(mass);
        if (lane == other) {
          q = mass;
          left = from_units(drafted);
        }
      }
    }
    if (child) {
      children->q[c] = q;
      children->left[c] = left;
    }
    return true;
  });
  __syncwarp();
}

// From logits to p, and what of p lies outside of the pool.
__device__ __forceinline__ uint64_t settle_pool(const NodeLaw& law, const PoolView& pool) {
  uint64_t inside = 0;
  for (int m = threadIdx.x % kWarpSize; m < pool.count; m += kWarpSize) {
    const int id = pool.ids[m];
    const float p = id >= 0 ? law.probability(pool.p[m], id) : 0.0f;
    pool.p[m] = p;
    inside += to_units(p);
  }
  inside = warp_sum(inside);
  const uint64_t whole = to_units(1.0f);
  __syncwarp();
  return inside < whole ? whole - inside : 0;
}

// step(lane) for the usable children of a window in turn, until it returns false. Returns the
// status of those that were passed over on the way. x: their tokens; usable: q gives them
// something.
template <class Step>
__device__ __forceinline__ uint32_t go_over(bool child, int x, bool usable, bool* more, Step step) {
  unsigned seen = kFullMask;
  for (unsigned left = __ballot_sync(kFullMask, usable); left != 0; left &= left - 1) {
    *more = step(__ffs(left) - 1);
    if (*more) continue;
    seen = (left & (0u - left)) - 1;
    break;
  }
  const unsigned none = __ballot_sync(kFullMask, child && x >= 0 && !usable);
  const unsigned bad = __ballot_sync(kFullMask, x == SharedTree::kBad);
  return ((none & seen) != 0 ? kBadDraftLaw : 0u) | ((bad & seen) != 0 ? kBadId : 0u);
}

// The verdict on node n. coins: VERIFY_COIN of every index; logprobs: of the tokens of nodes, where
// the block that emits them has it. By one warp; the record is complete but for traversal, where it
// waits for the probability of reaching the node (traverse).
__device__ __forceinline__ void judge_node(const TreeRequest& r, const TreeWorkspace& workspace,
                                           const SharedTree& tree, const float* coins, int n,
                                           const NodeLaw& law, const PoolView& pool,
                                           const SharedChildren& children, float* logprobs,
                                           NodeRecord* record) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t first = r.b * r.p.width;
  const bool pooled = r.rule == TreeRule::kSiblings || r.rule == TreeRule::kTraversal;
  const uint64_t outside = pooled ? settle_pool(law, pool) : 0;
  Residual state(1.0f);
  uint32_t status = 0;
  float sum = 0.0f;
  bool more = true;
  tree.for_each_window(n, [&](int c, unsigned mask) {
    const bool child = (mask >> lane & 1) != 0;
    const int x = child ? tree.token[c] : SharedTree::kPad;
    const float logit = child ? children.logit[c] : -INFINITY;
    if (r.rule == TreeRule::kGreedy || r.rule == TreeRule::kMatch) {
      more = !find_child(c, x, static_cast<uint32_t>(record->stats.argmax), &record->step, &status);
    } else {
      const float p = x >= 0 ? law.probability(logit, x) : 0.0f;
      const float q = child ? children.q[c] : 0.0f, left = child ? children.left[c] : 0.0f;
      if (r.rule == TreeRule::kTargetOnly) {
        const float u = coins[n];
        const auto step = [&](int other) {
          const float mass = __shfl_sync(kFullMask, p, other);
          record->moved = 1;
          sum = add_rn(sum, mass);
          if (mass > 0.0f && u <= sum) record->step = c - lane + other;
          return record->step < 0;
        };
        status |= go_over(child, x, q > 0.0f, &more, step) & ~uint32_t{kBadDraftLaw};  // repeated
      } else if (r.rule == TreeRule::kSiblings) {
        const float u = child ? coins[c - 1] : 0.0f;
        const auto step = [&](int other) {
          const float of_q = __shfl_sync(kFullMask, q, other);
          const float of_p = __shfl_sync(kFullMask, p, other);
          if (state.keep == 0.0f) return true;
          if (state.accepts(__shfl_sync(kFullMask, u, other), of_p, of_q)) {
            record->step = c - lane + other;
            return false;
          }
          const float rho = state.next_rho();
          const uint64_t over = outside + pool.units_over(rho);
          state.reject(false, rho, from_units(over), __shfl_sync(kFullMask, left, other));
          return true;
        };
        status |= go_over(child, x, q > 0.0f, &more, step);
      } else if (child) {
        workspace.children[first + c] = {p, q, left, 0};
      }
    }
    if (child && r.p.chosen_logprob != nullptr) logprobs[c] = law.law.log_probability(logit);
    return more;
  });
  if (r.rule == TreeRule::kTargetOnly) record->mass = 1.0f - sum;
  if (r.rule == TreeRule::kSiblings) {
    record->rho = state.rho;
    record->mass = state.mass;
    record->keep = state.keep;
    record->moved = state.moved;
  }
  record->status = static_cast<uint16_t>(status);
  if (r.rule == TreeRule::kTraversal) {
    for (int m = lane; m < pool.count; m += kWarpSize) {
      workspace.pool_p[(first + n) * pool.count + m] = pool.p[m];
      workspace.pool_q[(first + n) * pool.count + m] = pool.q[m];
    }
    if (lane == 0) workspace.outside[first + n] = outside;
  }
}

// What a node begins with, passed between the warps of a block: kPending until it is known.
constexpr uint32_t kPending = 0xffffffffu;
constexpr int kMaxSpins = 1 << 22;

__device__ __forceinline__ void set_start(uint32_t* start, float value) {
  *const_cast<volatile uint32_t*>(start) = __float_as_uint(value);
}
// By a whole warp. The parent's warp is at work, so it comes; the bound is for what cannot be.
__device__ __forceinline__ float wait_start(uint32_t* start) {
  uint32_t word = kPending;
  for (int spins = 0; word == kPending && spins < kMaxSpins; ++spins)
    word = *const_cast<volatile uint32_t*>(start);
  word = __shfl_sync(kFullMask, word, 0);
  return word == kPending ? 0.0f : __uint_as_float(word);
}

// Traversal, by a whole block: the nodes with children in parallel, each by a warp as soon as its
// parent has said with which probability it is reached. keep: with which it is kept, *all_status:
// of all that were reached; both in shared memory. Tickets rise with the nodes and a parent has an
// earlier one than its children, so no warp waits for ever. All that nodes take is fetched
// beforehand if there is room for all pools. Completes all records.
__device__ __forceinline__ void traverse(const TreeRequest& r, const TreeWorkspace& workspace,
                                         const SharedTree& tree, SharedPools* pools,
                                         SharedChildren* children, float* child_p, uint32_t* start,
                                         float* keep, uint32_t* all_status, int* ticket) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int count = static_cast<int>(r.p.pool), inner = tree.inner.count;
  const int64_t first = r.b * r.p.width;
  const bool ahead = inner * count <= kMaxPool;
#pragma unroll 1
  for (int i = threadIdx.x; ahead && i < inner * count; i += blockDim.x) {
    const int64_t at = (first + tree.inner.at[i / count]) * count + i % count;
    pools->p[i] = __ldcg(workspace.pool_p + at);
    pools->q[i] = __ldcg(workspace.pool_q + at);
  }
  for (int n = threadIdx.x; n < r.nodes; n += blockDim.x) {
    start[n] = n == 0 ? __float_as_uint(1.0f) : tree.parent[n] >= 0 ? kPending : 0u;
    const float4 law = __ldcg(reinterpret_cast<const float4*>(workspace.children + first + n));
    child_p[n] = law.x;
    children->q[n] = law.y;
    children->left[n] = law.z;
  }
  if (threadIdx.x == 0) *ticket = 0;
  __syncthreads();
  while (ahead || warp < SharedPools::most_warps(count)) {
    int k = lane == 0 ? atomicAdd(ticket, 1) : 0;
    k = __shfl_sync(kFullMask, k, 0);
    if (k >= inner) break;
    const int n = tree.inner.at[k];
    const int64_t at = first + n;
    NodeRecord* stored = workspace.records + at;
    const uint32_t faults = __ldcg(&stored->stats.faults);
    const uint64_t outside = __ldcg(workspace.outside + at);
    const PoolView pool = pools->part(ahead ? k : warp, count);
    if (!ahead) {
      __syncwarp();
      for (int m = lane; m < count; m += kWarpSize) {
        pool.p[m] = __ldcg(workspace.pool_p + at * count + m);
        pool.q[m] = __ldcg(workspace.pool_q + at * count + m);
      }
      __syncwarp();
    }
    Residual state(-1.0f);  // not asked for yet
    uint32_t status = 0;
    float reached = 0.0f;
    tree.for_each_window(n, [&](int c, unsigned mask) {
      const bool child = (mask >> lane & 1) != 0;
      const float p = child ? child_p[c] : 0.0f, q = child ? children->q[c] : 0.0f;
      const float left = child ? children->left[c] : 0.0f;
      const int x = child ? tree.token[c] : SharedTree::kPad;
      bool usable = q > 0.0f && faults == 0;
      const unsigned all = __ballot_sync(kFullMask, usable);
      if (child && !usable) set_start(&start[c], 0.0f);
      if (state.keep < 0.0f) {
        reached = wait_start(&start[n]);
        state.keep = reached;
        // the next level may wait for the first child
        if (all != 0 && lane == __ffs(all) - 1) set_start(&start[c], state.chance(p, q));
      } else if (all != 0 && lane == __ffs(all) - 1) {
        set_start(&start[c], state.keep == 0.0f ? 0.0f : state.chance(p, q));
      }
      if (reached == 0.0f) {
        if (child) set_start(&start[c], 0.0f);
        return true;
      }
      bool more = true, is_first = true;
      const auto step = [&](int other) {
        if (state.keep == 0.0f) {
          if (lane == other) set_start(&start[c], 0.0f);
          return true;
        }
        if (!is_first && lane == other) set_start(&start[c], state.chance(p, q));
        is_first = false;
        const float rho = state.next_rho();
        const uint64_t over = outside + pool.units_over(rho);
        state.reject(true, rho, from_units(over), __shfl_sync(kFullMask, left, other));
        return true;
      };
      if (faults == 0) status |= go_over(child, x, usable, &more, step);
      return true;
    });
    if (lane == 0) {
      keep[n] = state.keep;
      if (status != 0) atomicOr(all_status, status);
      stored->status = static_cast<uint16_t>(status);
      stored->moved = state.moved;
      stored->rho = state.rho;
      stored->mass = state.mass;
      stored->start = reached;
      stored->keep = state.keep;
    }
    __syncwarp();
  }
  __syncthreads();
#pragma unroll 1
  for (int n = threadIdx.x; n < r.nodes; n += blockDim.x)
    if (!tree.inner.has(n)) keep[n] = __uint_as_float(start[n]);
}

}  // namespace domino
