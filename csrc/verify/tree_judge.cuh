// What the walk does at one node, by one warp (match: by a block), from the row's statistics.
#pragma once

#include "verify/tree_workspace.cuh"

namespace domino {

// The laws of one node over its pool, in shared or global memory.
struct PoolView {
  const int32_t* ids;
  const float* p;
  const float* q;
  int count;
  PoolUnits units;

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
    return units.outside + warp_sum(sum);
  }
};

// What a node begins with, passed between the warps of a block: kPending until it is known.
constexpr uint32_t kPending = 0xffffffffu;
constexpr int kMaxSpins = 1 << 22;

__device__ __forceinline__ void set_start(uint32_t* start, float value) {
  if (threadIdx.x % kWarpSize == 0) atomicExch(start, __float_as_uint(value));
}
// By a whole warp. The parent's warp is at work, so it comes; the bound is for what cannot be.
__device__ __forceinline__ float wait_start(uint32_t* start) {
  uint32_t word = kPending;
  if (threadIdx.x % kWarpSize == 0)
    for (int spins = 0; word == kPending && spins < kMaxSpins; ++spins) word = atomicOr(start, 0u);
  word = __shfl_sync(kFullMask, word, 0);
  return word == kPending ? 0.0f : __uint_as_float(word);
}

// The children in turn: by coins (siblings), or into start[] what each begins with (traversal).
__device__ inline void judge_pool(const TreeRequest& r, const SharedTree& tree, int n,
                                  const PoolView& pool, bool usable, uint32_t* start,
                                  NodeRecord* record) {
  Residual state(record->start);
  uint64_t drafted = pool.units.drafted;
  uint32_t status = 0;
  tree.for_each_child(n, [&](int c, int x, bool repeated) {
    const int at = x >= 0 && usable && !repeated ? pool.find(x) : -1;
    if (at < 0) {
      status |= x >= 0 ? kBadDraftLaw : x == SharedTree::kBad ? kBadId : 0u;
      if (start != nullptr) set_start(&start[c], 0.0f);
      return true;
    }
    const float p = pool.p[at], q = pool.q[at];
    if (start != nullptr) set_start(&start[c], state.keep == 0.0f ? 0.0f : state.chance(p, q));
    if (state.keep == 0.0f) return true;
    if (start == nullptr && state.accepts(r.child_coin(c), p, q)) {
      record->step = c;
      return false;
    }
    drafted -= to_units(q);
    const float rho = state.next_rho();
    state.reject(start != nullptr, rho, from_units(pool.units_over(rho)), from_units(drafted));
    return true;
  });
  record->rho = state.rho;
  record->keep = state.keep;
  record->moved = state.moved;
  record->status = status;
}

struct SharedPool {
  int32_t ids[kMaxPool];
  float p[kMaxPool];  // the target's logits at first
  float q[kMaxPool];
  RowStats stats;
};

// Ids, the target's logits there and the law q of node n's pool, by one warp.
__device__ __noinline__ void load_pool(const TreeRequest& r, int n, SharedPool* pool) {
  const int count = static_cast<int>(r.p.pool), lane = threadIdx.x % kWarpSize;
  const int32_t* ids = r.pool_ids(n);
  const LogitRow logits = r.pool_row(n), target = r.target_row(n);
  uint32_t key = 0;
  for (int m = lane; m < count; m += kWarpSize) {
    const int id = ids[m];
    const bool used = id >= 0 && id < r.p.vocab;
    const float z = logits.at(m);
    if (used) key = max(key, logit_key(z));
    pool->ids[m] = used ? id : -1;
    pool->q[m] = used ? z : -INFINITY;
    pool->p[m] = used ? target.at(id) : -INFINITY;
  }
  key = __reduce_max_sync(kFullMask, key);
  RowStats stats{0, key == 0 ? -INFINITY : key_logit(key), -1, 0, 0};
  stats.faults = row_faults(stats.top);
  if (stats.faults == 0) {
    const RowLaw weights(stats.top, 1, law_scale(r.draft_temperature));
    uint64_t sum = 0;
    for (int m = lane; m < count; m += kWarpSize) sum += to_fixed(weights.weight(pool->q[m]));
    stats.sum = warp_sum(sum);
    const RowLaw q(stats, r.draft_temperature);
    for (int m = lane; m < count; m += kWarpSize) pool->q[m] = q.probability(pool->q[m]);
  }
  if (lane == 0) pool->stats = stats;
  __syncwarp();
}

// From logits to p, and the units of both laws.
__device__ inline PoolUnits settle_pool(const TreeRequest& r, const NodeLaw& law,
                                        SharedPool* pool) {
  uint64_t inside = 0, drafted = 0;
  for (int m = threadIdx.x % kWarpSize; m < r.p.pool; m += kWarpSize) {
    const int id = pool->ids[m];
    const float p = id >= 0 ? law.probability(pool->p[m], id) : 0.0f;
    pool->p[m] = p;
    if (pool->stats.faults != 0) pool->q[m] = 0.0f;
    inside += to_units(p);
    drafted += to_units(pool->q[m]);
  }
  inside = warp_sum(inside);
  const uint64_t whole = to_units(1.0f);
  __syncwarp();
  return {inside < whole ? whole - inside : 0, warp_sum(drafted)};
}

struct Runner {
  unsigned long long key = kNoWinner;
  float logit = 0.0f;

  __device__ __forceinline__ void meet(unsigned long long other, float other_logit) {
    if (other < key) {
      key = other;
      logit = other_logit;
    }
  }
};

// The best of this thread's groups of eight tokens: from `first` in steps of `stride`.
template <class Weight>
__device__ __forceinline__ Runner race_groups(const RowReader& reader, int64_t first,
                                              int64_t stride, int64_t end, const RaceNoise& noise,
                                              Weight weight) {
  Runner best;
  float bound = INFINITY;  // a little above the best E / weight of the warp
  for (int64_t base = first; __any_sync(kFullMask, base < end); base += stride) {
    float weights[kGroup], logits[kGroup];
    int likely = 0;
    Group<float> group{};
    if (base < end) group = reader.group(static_cast<int>(base));
    NoiseWords words[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      words[half] = noise.words(static_cast<uint32_t>(base / 4 + half));
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      logits[j] = group.at(j);
      weights[j] = base + j < end ? weight(logits[j], base + j) : 0.0f;
      likely = weights[j] > weights[likely] ? j : likely;
    }
    // the lane's likeliest token first: its time bounds those of all others
#pragma unroll
    for (int j = 0; j < kGroup; ++j)
      if (j == likely)
        best.meet(race_key(weights[j], words[j / 4].word[j % 4], base + j), logits[j]);
    const uint32_t order = __reduce_min_sync(kFullMask, static_cast<uint32_t>(best.key >> 32));
    if (order < 0x7f800000u) bound = fminf(bound, __uint_as_float(order) * 1.001f);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const uint32_t word = words[j / 4].word[j % 4];
      // E is not below (word + 1/2) 2^-32
      if (weights[j] > 0.0f && static_cast<float>(word) * 0x1p-32f <= bound * weights[j])
        best.meet(race_key(weights[j], word, base + j), logits[j]);
    }
  }
  return best;
}

__device__ __forceinline__ unsigned long long least_key(unsigned long long a,
                                                        unsigned long long b) {
  return a < b ? a : b;
}

// The token that plain seeded sampling draws after node n. The whole block.
__device__ __noinline__ int32_t draw_by_position(const TreeRequest& r, const SharedTree& tree,
                                                 unsigned long long* slots, int n,
                                                 const NodeLaw& law) {
  int depth = 0;
  for (int m = n; m > 0 && depth < r.nodes; m = tree.parent[m]) ++depth;
  const RaceNoise noise{r.position_noise(depth), kPositionDraw, 0};
  const RowReader reader{r.target_row(n), static_cast<int>(r.p.vocab)};
  const Runner best =
      race_groups(reader, kGroup * threadIdx.x, kGroup * blockDim.x, r.p.vocab, noise,
                  [&](float logit, int64_t x) { return law.weight(logit, x); });
  return static_cast<int32_t>(block_reduce(best.key, least_key, slots) & 0xffffffffu);
}

// What node n of a descending rule does. The whole block calls it with what warp 0 needs; the pool
// is loaded. Only warp 0 returns with the record.
__device__ inline void judge_node(const TreeRequest& r, const TreeWorkspace& workspace,
                                  const SharedTree& tree, SharedPool* pool,
                                  unsigned long long* slots, int n, const RowFilter* cut,
                                  NodeRecord* record) {
  const LogitRow row = r.target_row(n);
  const NodeLaw law(record->stats, r.temperature, cut);
  if (r.rule == TreeRule::kMatch) record->stats.argmax = draw_by_position(r, tree, slots, n, law);
  if (threadIdx.x >= kWarpSize) return;

  uint32_t status = 0;
  switch (r.rule) {
    case TreeRule::kGreedy:
    case TreeRule::kMatch:
      tree.for_each_child(n, [&](int c, int x, bool) {
        status |= x == SharedTree::kBad ? kBadId : 0u;
        if (x == record->stats.argmax) record->step = c;
        return record->step < 0;
      });
      record->status = status;
      return;
    case TreeRule::kTargetOnly: {
      const float u = r.coin(n);
      float sum = 0.0f;
      const auto mass_of = [&](int, int x) {
        return x >= 0 ? law.probability(row.at(x), x) : 0.0f;
      };
      tree.for_each_child(n, mass_of, [&](int c, int x, bool repeated, float mass) {
        status |= x == SharedTree::kBad ? kBadId : 0u;
        if (x < 0 || repeated) return true;
        record->moved = 1;
        sum = add_rn(sum, mass);
        if (mass > 0.0f && u <= sum) record->step = c;
        return record->step < 0;
      });
      record->status = status;
      return;
    }
    default:
      break;
  }
  if (r.p.draft_logits != nullptr) return;  // tree_dense_kernel goes on
  const PoolUnits units = settle_pool(r, law, pool);
  const int count = static_cast<int>(r.p.pool);
  const int64_t at = r.b * r.p.width + n;
  if (threadIdx.x == 0) workspace.drafts[at] = pool->stats;
  if (r.rule == TreeRule::kSiblings) {
    const PoolView view{pool->ids, pool->p, pool->q, count, units};
    judge_pool(r, tree, n, view, pool->stats.faults == 0, nullptr, record);
    return;
  }
  // traversal: kept until the probability of reaching the node is known
  for (int m = threadIdx.x; m < count; m += kWarpSize) {
    workspace.pool_p[at * count + m] = pool->p[m];
    workspace.pool_q[at * count + m] = pool->q[m];
  }
  if (threadIdx.x == 0) workspace.units[at] = units;
}

// Traversal with pools, by a whole block: nodes in parallel, each by a warp as soon as its parent
// is done. Tickets rise with the nodes and a parent has an earlier one than its children, so no
// warp waits for ever.
__device__ inline void judge_all(const TreeRequest& r, const TreeWorkspace& workspace,
                                 const SharedTree& tree, SharedPool* pool, uint32_t* start,
                                 uint32_t* inner, int* ticket) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int count = static_cast<int>(r.p.pool);
  for (int n = threadIdx.x; n < r.nodes; n += blockDim.x)
    start[n] = n == 0 ? __float_as_uint(1.0f) : tree.parent[n] >= 0 ? kPending : 0u;
  for (int i = threadIdx.x; i < kMaxTreeNodes / 32; i += blockDim.x) inner[i] = 0;
  if (threadIdx.x == 0) *ticket = 0;
  __syncthreads();
  for (int n = threadIdx.x; n < r.nodes; n += blockDim.x)
    if (const int parent = tree.parent[n]; parent >= 0)
      atomicOr(&inner[parent / 32], 1u << parent % 32);
  __syncthreads();
  const auto has_children = [&](int n) { return (inner[n / 32] >> n % 32 & 1) != 0; };
  // a warp holds the pool that it works on: with large ones fewer take part
  const bool works = (warp + 1) * count <= kMaxPool;
  int32_t* ids = pool->ids + (works ? warp * count : 0);
  float* own_p = pool->p + (works ? warp * count : 0);
  float* own_q = pool->q + (works ? warp * count : 0);
  while (works) {
    int n = lane == 0 ? atomicAdd(ticket, 1) : 0;
    n = __shfl_sync(kFullMask, n, 0);
    if (n >= r.nodes) break;
    if (!has_children(n)) continue;
    const int64_t at = r.b * r.p.width + n;
    NodeRecord* stored = workspace.records + at;
    const uint32_t faults = __ldcg(&stored->stats.faults);
    PoolUnits units;
    units.outside = __ldcg(reinterpret_cast<unsigned long long*>(&workspace.units[at].outside));
    units.drafted = __ldcg(reinterpret_cast<unsigned long long*>(&workspace.units[at].drafted));
    __syncwarp();
    for (int m = lane; m < count; m += kWarpSize) {
      ids[m] = r.pool_ids(n)[m];
      own_p[m] = __ldcg(workspace.pool_p + at * count + m);
      own_q[m] = __ldcg(workspace.pool_q + at * count + m);
    }
    __syncwarp();
    const PoolView view{ids, own_p, own_q, count, units};
    const float reached = wait_start(&start[n]);
    NodeRecord record = fresh_record(RowStats{}, reached);
    if (reached > 0.0f && faults == 0) {
      judge_pool(r, tree, n, view, true, start, &record);
    } else {
      for (int c = n + 1; c < r.nodes; ++c)
        if (tree.parent[c] == n) set_start(&start[c], 0.0f);
    }
    if (lane == 0) {
      stored->rho = record.rho;
      stored->start = record.start;
      stored->keep = record.keep;
      stored->status = record.status;
      stored->moved = record.moved;
    }
    __syncwarp();
  }
  __syncthreads();
  for (int n = threadIdx.x; n < r.nodes; n += blockDim.x)
    if (!has_children(n)) {
      NodeRecord* stored = workspace.records + r.b * r.p.width + n;
      stored->start = stored->keep = __uint_as_float(start[n]);
    }
}

}  // namespace domino
