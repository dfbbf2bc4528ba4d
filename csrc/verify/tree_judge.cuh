// What the walk does at one node, by a pair of warps: one puts together the law q and what it says
// of the children, which takes nothing but what the call was given, the other meanwhile the
// target's law, from the row's statistics. Then the first gives the verdict.
#pragma once

#include "common/copy_async.cuh"
#include "verify/tree_path.cuh"

namespace domino {

// The laws of one node over its pool, in shared memory.
struct PoolView {
  int32_t* ids;  // -1: unused
  float* p;      // the target's logits at first
  float* q;
  int count;

  // Where x stands, -1 where q gives it nothing.
  __device__ __forceinline__ int find(int x) const {
#pragma unroll 1
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

  // A pair has a part to itself. With large pools there are fewer parts than pairs: most_pairs().
  __device__ __forceinline__ PoolView part(int which, int count) {
    const int at = which * count;
    return {ids + at, p + at, q + at, count};
  }
  static __device__ __forceinline__ int most_pairs(int count) {
    const int pairs = static_cast<int>(blockDim.x) / (2 * kWarpSize);
    return count == 0 ? pairs : min(pairs, static_cast<int>(kMaxPool) / count);
  }
};

// By child, at its parent.
struct SharedChildren {
  float p[kMaxTreeNodes];     // of its token, in the parent's target row: its logit at first
  float q[kMaxTreeNodes];     // 0: not to be stepped to
  float left[kMaxTreeNodes];  // mass of q that is not drawn once it and all before it are
};

// What all blocks of a cluster know of a traversal.
struct SharedTraversal {
  float2 law[kMaxTreeNodes];        // p and q of a node at its parent; q 0: not to be stepped to
  uint32_t start[kMaxTreeNodes];    // with which probability it is reached, kPending until known,
  float keep[kMaxTreeNodes];        // and, if it has children, kept once they are not
  uint64_t outside[kMaxTreeNodes];  // of a block's own nodes: of p, outside of the pool
  uint32_t status;                  // of all nodes that are reached
};

constexpr int kPoolAhead = 2;  // entries of a lane that are on their way at once

// Ids and law q of node n's pool. By one warp.
__device__ __forceinline__ RowStats load_pool(const TreeRequest& r, int n, const PoolView& pool) {
  const int lane = threadIdx.x % kWarpSize;
  const int32_t* ids = r.pool_ids(n);
  const LogitRow logits = r.pool_row(n);
  uint32_t key = 0;
  for (int base = lane; base < pool.count; base += kPoolAhead * kWarpSize) {
    int id[kPoolAhead];
    float q[kPoolAhead];
#pragma unroll
    for (int j = 0; j < kPoolAhead; ++j) {
      const int m = base + j * kWarpSize;
      id[j] = m < pool.count ? ids[m] : -1;
      q[j] = m < pool.count ? logits.at(m) : -INFINITY;
    }
#pragma unroll
    for (int j = 0; j < kPoolAhead; ++j) {
      const int m = base + j * kWarpSize;
      if (m >= pool.count) break;
      if (id[j] >= r.p.vocab) id[j] = -1;
      if (id[j] >= 0) key = max(key, logit_key(q[j]));
      pool.ids[m] = id[j];
      pool.q[m] = id[j] >= 0 ? q[j] : -INFINITY;
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

// The sum over this lane and those before it.
__device__ __forceinline__ uint64_t sum_so_far(uint64_t value) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll 1
  for (int step = 1; step < kWarpSize; step *= 2) {
    const uint64_t before = __shfl_up_sync(kFullMask, value, step);
    if (lane >= step) value += before;
  }
  return value;
}

// The law q at node n, and what it says of the children. By one warp.
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
      int at = -1;
      for (unsigned rest = __ballot_sync(kFullMask, q > 0.0f); rest != 0; rest &= rest - 1) {
        const int other = __ffs(rest) - 1;
        const int found = pool.find(__shfl_sync(kFullMask, x, other));
        if (lane == other) at = found;
      }
      q = at < 0 ? 0.0f : pool.q[at];
      const uint64_t drawn = sum_so_far(to_units(q));
      left = from_units(drafted - drawn);
      drafted -= __shfl_sync(kFullMask, drawn, kWarpSize - 1);
    }
    if (child) {
      children->q[c] = q;
      children->left[c] = left;
    }
    return true;
  });
  __syncwarp();
}

// The target's logits at node n: of the children's tokens, and at the ids of the pool, of which
// some have none. By one warp, whose lanes read back what they have written.
template <class T>
__device__ __noinline__ void fetch_target(const TreeRequest& r, const SharedTree& tree, int n,
                                          const PoolView& pool, SharedChildren* children) {
  const int lane = threadIdx.x % kWarpSize;
  const T* row = static_cast<const T*>(r.target_row(n).data);
  const int32_t* ids = r.pool_ids(n);
  int id[kPoolAhead];
#pragma unroll
  for (int j = 0; j < kPoolAhead; ++j) {
    const int m = lane + j * kWarpSize;
    id[j] = m < pool.count ? ids[m] : -1;
  }
  tree.for_each_window(n, [&](int c, unsigned mask) {
    if ((mask >> lane & 1) != 0) {
      const int x = tree.token[c];
      children->p[c] = x >= 0 ? to_float(row[x]) : -INFINITY;
    }
    return true;
  });
  for (int base = lane; base < pool.count; base += kPoolAhead * kWarpSize) {
#pragma unroll
    for (int j = 0; j < kPoolAhead; ++j) {
      const int m = base + j * kWarpSize;
      const bool has = id[j] >= 0 && id[j] < r.p.vocab;
      const float logit = has ? to_float(row[id[j]]) : -INFINITY;
      if (m < pool.count) pool.p[m] = logit;
      const int next = m + kPoolAhead * kWarpSize;
      id[j] = next < pool.count ? ids[next] : -1;
    }
  }
}

// From those logits to probabilities, and what of p lies outside of the pool. By the same warp.
__device__ __forceinline__ uint64_t settle_target(const TreeRequest& r, const SharedTree& tree,
                                                  int n, const NodeLaw& law, const PoolView& pool,
                                                  SharedChildren* children, float* logprobs) {
  const int lane = threadIdx.x % kWarpSize;
  const int32_t* ids = r.pool_ids(n);
  uint64_t inside = 0;
  for (int m = lane; m < pool.count; m += kWarpSize) {
    const float p = law.probability(pool.p[m], law.filtered ? ids[m] : 0);
    pool.p[m] = p;
    inside += to_units(p);
  }
  tree.for_each_window(n, [&](int c, unsigned mask) {
    if ((mask >> lane & 1) != 0) {
      const int x = tree.token[c];
      const float logit = children->p[c];
      children->p[c] = x >= 0 ? law.probability(logit, x) : 0.0f;
      if (r.p.chosen_logprob != nullptr) logprobs[c] = law.law.log_probability(logit);
    }
    return true;
  });
  inside = warp_sum(inside);
  const uint64_t whole = to_units(1.0f);
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

// Tells all blocks the laws of the children in a warp's window.
__device__ __forceinline__ void tell_children(const RowCluster& cluster, SharedTraversal* traversal,
                                              int c, unsigned mask, float2 law) {
  const int lane = threadIdx.x % kWarpSize;
  for (; mask != 0; mask &= mask - 1) {
    const int other = __ffs(mask) - 1;
    const float p = __shfl_sync(kFullMask, law.x, other), q = __shfl_sync(kFullMask, law.y, other);
    if (lane < cluster.size) *cluster.map(&traversal->law[c - lane + other], lane) = {p, q};
  }
}

// The verdict on node n. coins: VERIFY_COIN of every index; outside: of p, outside of the pool. By
// one warp; the record is complete but for traversal, where it waits for the probability of
// reaching the node (traverse).
__device__ __forceinline__ void judge_node(const TreeRequest& r, const SharedTree& tree,
                                           const float* coins, int n, uint64_t outside,
                                           const PoolView& pool, const SharedChildren& children,
                                           const RowCluster& cluster, SharedTraversal* traversal,
                                           NodeRecord* record) {
  const int lane = threadIdx.x % kWarpSize;
  Residual state(1.0f);
  uint32_t status = 0;
  float sum = 0.0f;
  bool more = true;
  tree.for_each_window(n, [&](int c, unsigned mask) {
    const bool child = (mask >> lane & 1) != 0;
    const int x = child ? tree.token[c] : SharedTree::kPad;
    if (r.rule == TreeRule::kGreedy || r.rule == TreeRule::kMatch) {
      more = !find_child(c, x, static_cast<uint32_t>(record->stats.argmax), &record->step, &status);
    } else {
      const float p = child ? children.p[c] : 0.0f;
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
      } else {
        tell_children(cluster, traversal, c, mask, {p, q});
      }
    }
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
  if (r.rule == TreeRule::kTraversal && lane == 0) traversal->outside[n] = outside;
}

// What a node begins with, passed between the warps of a cluster: kPending until it is known.
constexpr uint32_t kPending = 0xffffffffu;
constexpr int kMaxSpins = 1 << 22;
constexpr uint64_t kNoLaw = ~uint64_t{0};  // as `outside`: the node's row is unusable

// By a whole warp, to all blocks.
__device__ __forceinline__ void tell_start(const RowCluster& cluster, uint32_t* start,
                                           float value) {
  const int lane = threadIdx.x % kWarpSize;
  if (lane < cluster.size)
    *const_cast<volatile uint32_t*>(cluster.map(start, lane)) = __float_as_uint(value);
}
// By a whole warp. The parent's warp is at work, so it comes; the bound is for what cannot be.
__device__ __forceinline__ float wait_start(uint32_t* start) {
  uint32_t word = kPending;
  for (int spins = 0; word == kPending && spins < kMaxSpins; ++spins)
    word = *const_cast<volatile uint32_t*>(start);
  word = __shfl_sync(kFullMask, word, 0);
  return word == kPending ? 0.0f : __uint_as_float(word);
}

// Behind the barrier that ends all verdicts: what lies on the way down by first children waits for
// no rejection, so each block says it to itself, by its last warp. All threads of a block.
__device__ __forceinline__ void start_first_children(const SharedTree& tree, int32_t* step,
                                                     SharedTraversal* traversal) {
#pragma unroll 1
  for (int n = threadIdx.x; n < tree.nodes; n += blockDim.x) {
    const int above = tree.parent[n];
    if (above >= 0 && traversal->law[n].y > 0.0f) atomicMin(&step[above], n);
  }
  __syncthreads();
  if (threadIdx.x != blockDim.x - kWarpSize) return;
  constexpr int kAny = kMaxTreeNodes - 1;  // kNoStep & kAny is some node
  float reached = 1.0f;
  int n = step[0];
  float2 law = traversal->law[n & kAny];
#pragma unroll 1
  while (n != kNoStep) {
    const int next = step[n];
    const float2 next_law = traversal->law[next & kAny];  // on its way while this one is looked at
    reached = Residual(reached).chance(law.x, law.y);
    *const_cast<volatile uint32_t*>(&traversal->start[n]) = __float_as_uint(reached);
    n = next;
    law = next_law;
  }
}

// Traversal at node n, once its parent has said with which probability it is reached. A parent
// comes before its children in the order of each warp's nodes, so no warp waits for ever. By one
// warp; completes *record.
__device__ __forceinline__ void traverse_node(const RowCluster& cluster, const SharedTree& tree,
                                              int n, const PoolView& pool,
                                              const SharedChildren& children,
                                              SharedTraversal* traversal, NodeRecord* record) {
  const int lane = threadIdx.x % kWarpSize;
  const uint64_t outside = traversal->outside[n];
  const bool has_law = outside != kNoLaw;
  const float reached = wait_start(&traversal->start[n]);
  Residual state(reached);
  uint32_t status = 0;
  tree.for_each_window(n, [&](int c, unsigned mask) {
    const bool child = (mask >> lane & 1) != 0;
    const float2 law = child ? traversal->law[c] : float2{0.0f, 0.0f};
    const float left = child ? children.left[c] : 0.0f;
    const int x = child ? tree.token[c] : SharedTree::kPad;
    const bool usable = law.y > 0.0f && has_law && reached > 0.0f;
    for (unsigned none = mask & ~__ballot_sync(kFullMask, usable); none != 0; none &= none - 1)
      tell_start(cluster, &traversal->start[c - lane + __ffs(none) - 1], 0.0f);
    if (reached == 0.0f) return true;
    bool more = true;
    const auto one = [&](int other) {
      const float p = __shfl_sync(kFullMask, law.x, other);
      const float q = __shfl_sync(kFullMask, law.y, other);
      const bool over = state.keep == 0.0f;
      tell_start(cluster, &traversal->start[c - lane + other], over ? 0.0f : state.chance(p, q));
      if (over) return true;
      const float rho = state.next_rho();
      const uint64_t units = outside + pool.units_over(rho);
      state.reject(true, rho, from_units(units), __shfl_sync(kFullMask, left, other));
      return true;
    };
    if (has_law) status |= go_over(child, x, usable, &more, one);
    return true;
  });
  if (lane < cluster.size) {
    *cluster.map(&traversal->keep[n], lane) = state.keep;
    if (status != 0) atomicOr(cluster.map(&traversal->status, lane), status);
  }
  record->status = static_cast<uint16_t>(status);
  record->moved = state.moved;
  record->rho = state.rho;
  record->mass = state.mass;
  record->start = reached;
  record->keep = state.keep;
}

}  // namespace domino
