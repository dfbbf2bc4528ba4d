// Last launch of verify_tree: a cluster owns one request. Its warps judge the nodes with children
// side by side (tree_judge.cuh), every block then follows the steps, and all of them race for the
// token that comes last (race.cuh). Where the walk ends at a leaf they read its row first.
// Bytes: the chunks' statistics and one row a request; bound by latency.
#pragma once

#include "verify/row_cut.cuh"
#include "verify/tree_dense.cuh"
#include "verify/tree_judge.cuh"
#include "verify/tree_last_row.cuh"
#include "verify/tree_path.cuh"

namespace domino {

// What the last token may no longer be, or less often: tokens with what is taken off their weight.
struct SharedTaken {
  static constexpr int kSlots = 2 * kMaxPool, kNone = -1;
  int32_t ids[kSlots];
  float amounts[kSlots];

  static_assert(kSlots == 1 << 11);
  static __device__ __forceinline__ int slot_of(int id) {
    return static_cast<int>(static_cast<uint32_t>(id) * 0x9e3779b1u >> (32 - 11));
  }

  __device__ void clear() {
    for (int i = threadIdx.x; i < kSlots; i += blockDim.x) ids[i] = kNone;
  }
  // Tokens are distinct, or all amounts are infinite; at most half of the slots are taken.
  __device__ void put(int id, float amount) {
    int i = slot_of(id);
    for (;; i = (i + 1) % kSlots) {
      const int found = atomicCAS(&ids[i], kNone, id);
      if (found == kNone || found == id) break;
    }
    amounts[i] = amount;
  }
  __device__ __forceinline__ float of(int id) const {
    for (int i = slot_of(id);; i = (i + 1) % kSlots) {
      const int found = ids[i];
      if (found == id) return amounts[i];
      if (found == kNone) return 0.0f;
    }
  }
};

// What the race weighs the tokens of one node by (race_row).
struct TreeWeights {
  const RowLaw& law;
  const RowFilter& filter;
  float unit;  // 1, or for residuals 1 over the mass that is kept: then the weight is p
  const SharedTaken* taken;
  LogitRow dense;  // q of the whole vocabulary, or null
  const RowLaw& dense_law;
  float rho;

  __device__ __forceinline__ float scaled(float logit) const {
    return mul_rn(law.weight(logit), unit);
  }
  __device__ __forceinline__ float upper(float logit, int64_t token) const {
    return filter.keeps(logit, token) ? scaled(logit) : 0.0f;
  }
  __device__ __forceinline__ float exact(float upper, int64_t token) const {
    if (dense.data != nullptr)
      return add_rn(upper, -mul_rn(rho, counted_draft(dense_law.probability(dense.at(token)))));
    return taken == nullptr ? upper : add_rn(upper, -taken->of(static_cast<int>(token)));
  }
};

struct TreeFinishShared {
  SharedTree tree;
  float coins[kMaxTreeNodes];  // VERIFY_COIN n
  SharedChildren children;     // logit: in the end the log-probability of each node's token
  union {
    SharedPools pools;
    SharedTaken taken;
  };
  union {
    uint32_t start[kMaxTreeNodes];
    int32_t step[kMaxTreeNodes];
  };
  union {
    float child_p[kMaxTreeNodes];
    SharedRace race;
  };
  int16_t path[kMaxTreeNodes];
  RowStats leaf;
  uint32_t status;
  int last;  // index of the last node of the path
  int ticket;
};

// The path along the steps. All threads of a block; synchronises.
__device__ __forceinline__ void find_path(const TreeRequest& r, const TreeWorkspace& workspace,
                                          TreeFinishShared* shared) {
  const SharedTree& tree = shared->tree;
  const int64_t first = r.b * r.p.width;
  if (threadIdx.x == 0) shared->status = tree.faults;
  if (r.rule == TreeRule::kTraversal) {
    // the first kept node in post-order: the way down to it by least children
    for (int n = threadIdx.x; n < r.nodes; n += blockDim.x) shared->step[n] = kNoStep;
    __syncthreads();
    for (int n = threadIdx.x; n < r.nodes; n += blockDim.x) {
      const NodeRecord record = load_record(workspace.records + first + n);
      if (record.status != 0) atomicOr(&shared->status, static_cast<uint32_t>(record.status));
      if (n == 0 || !(record.start > 0.0f) || !(shared->coins[n - 1] <= record.keep)) continue;
      for (int m = n; m > 0; m = tree.parent[m]) atomicMin(&shared->step[tree.parent[m]], m);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) shared->last = follow(shared->step, shared->path, &shared->status);
  __syncthreads();
}

template <class T>
__device__ __noinline__ RowFilter find_cut(const RowCluster& cluster, const RowSource<T>& source,
                                           const ChunkStats* chunks, int count,
                                           const RowStats& stats, const RowLaw& law,
                                           const FilterParams& filters) {
  CutFinder<RowSource<T>> finder(cluster, source, chunks, count, stats, law, filters);
  return finder.find();
}

constexpr int kFinishThreads = 384;

// Grid: a cluster a request. kGeneral: with filters, a dense q or the rule match.
template <class T, bool kGeneral>
__global__ void __launch_bounds__(kGeneral ? kWalkThreads : kFinishThreads,
                                  kGeneral || sizeof(T) == 4 ? 1 : 2)
    tree_finish_kernel(const __grid_constant__ VerifyTreeParams p) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  TreeFinishShared& shared = *reinterpret_cast<TreeFinishShared*>(shared_bytes);
  const RowCluster cluster;
  const int64_t b = blockIdx.x / cluster.size;
  ask_for_request(p, b);
  const TreeRequest r(p, b);
  const TreeWorkspace workspace(p);
  const SharedTree& tree = shared.tree;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int64_t first = b * p.width;
  if (r.nodes == 0) {
    previous_launch_done();
    if (cluster.rank == 0) {
      emit_path(r, tree, nullptr, nullptr, -1);
      if (threadIdx.x == 0) emit_last(r, -1, -1, 0.0f, r.faults);
    }
    return;
  }
  shared.tree.load(r);
  const bool wants_coins = r.rule != TreeRule::kGreedy && r.rule != TreeRule::kMatch;
  for (int n = threadIdx.x; n < r.nodes; n += blockDim.x) {
    const int parent = tree.parent[n], x = tree.token[n];
    shared.step[n] = kNoStep;
    const float logit = parent >= 0 && x >= 0 ? r.target_row(parent).at(x) : -INFINITY;
    if (wants_coins) shared.coins[n] = r.coin(n);  // while the logit is on its way
    shared.children.logit[n] = logit;
  }
  cluster.sync();  // all blocks are there, and their steps

  const bool dense = kGeneral && r.uses_draft() && p.draft_logits != nullptr;
  const bool pooled = r.uses_draft() && !dense;
  const bool filtered = kGeneral && r.filters().any(p.vocab);
  const bool greedy = r.rule == TreeRule::kGreedy;
  const float scale = law_scale(r.temperature);
  const int count = pooled ? static_cast<int>(p.pool) : 0;
  const int workers = SharedPools::most_warps(count);
  bool waited = false;
  if (!dense && warp < workers) {
    const PoolView pool = shared.pools.part(warp, count);
    float* logprobs = cluster.map(shared.children.logit, 0);
    for (int k = cluster.rank + cluster.size * warp; k < tree.inner.count;
         k += cluster.size * workers) {
      const int n = tree.inner.at[k];
      prepare_node(r, workspace, tree, n, pooled, pool, &shared.children);
      if (!waited) previous_launch_done();
      waited = true;
      const int64_t row = (first + n) * workspace.row_chunks;
      uint32_t lane_key;
      NodeRecord record =
          fresh_record(combine_chunks(workspace.chunks + row, workspace.first + row,
                                      workspace.row_chunks, scale, greedy, &lane_key),
                       1.0f);
      if (record.stats.faults == 0) {
        if (kGeneral && r.rule == TreeRule::kMatch)
          record.stats.argmax = __ldcg(workspace.drawn + first + n);
        const NodeLaw law(record.stats, r.temperature,
                          filtered ? workspace.filters + first + n : nullptr);
        judge_node(r, workspace, tree, shared.coins, n, law, pool, shared.children, logprobs,
                   &record);
      }
      publish_step(cluster, shared.step, n, record.step, record.status);
      if (lane == 0) workspace.records[first + n] = record;
      __syncwarp();
    }
  }
  if (!waited) previous_launch_done();
  if (dense)
    judge_dense(cluster, r, workspace, tree, shared.coins, shared.step, shared.children.logit);
  cluster.sync();
  if (pooled && r.rule == TreeRule::kTraversal) {
    if (cluster.rank == 0)
      traverse(r, workspace, tree, &shared.pools, &shared.children, shared.child_p, shared.start,
               &shared.ticket);
    cluster.sync();
  }
  find_path(r, workspace, &shared);
  shared.taken.clear();
  __syncthreads();

  const int last = shared.last, n = shared.path[last];
  const bool leaf = !tree.inner.has(n);
  // what the last token takes, in the order in which it is needed
  NodeRecord record = fresh_record(RowStats{}, 1.0f);
  RowStats draft{};
  int pool_id = -1;
  float pool_logit = 0.0f;
  if (!leaf) record = load_record(workspace.records + first + n);
  if (!leaf && r.uses_draft()) draft = workspace.drafts[first + n];
  if (!leaf && pooled && threadIdx.x < p.pool) {
    pool_id = r.pool_ids(n)[threadIdx.x];
    pool_logit = r.pool_row(n).at(threadIdx.x);
  }
  LastRow<T> row(cluster, r.target_row(n), p.vocab);
  if (leaf || !greedy) row.fetch_ahead();
  const ChunkStats* chunks = workspace.chunks + (first + n) * workspace.row_chunks;
  if (leaf) {
    read_row<false>(cluster, r, workspace, (first + n) * workspace.row_chunks, &row);
    if (warp == 0) {
      uint32_t lane_key;
      const RowStats stats =
          combine_chunks(chunks, workspace.first + (first + n) * workspace.row_chunks,
                         workspace.row_chunks, scale, greedy, &lane_key);
      if (lane == 0) shared.leaf = stats;
    }
    __syncthreads();
    record.stats = shared.leaf;
  }
  const uint32_t faults = record.stats.faults;
  uint32_t status = r.faults | shared.status | faults;
  if (faults != 0) {
    if (cluster.rank != 0) return;
    emit_path(r, tree, shared.path, shared.children.logit, last);
    if (threadIdx.x == 0) emit_last(r, last, -1, 0.0f, status);
    return;
  }
  const RowLaw law(record.stats, r.temperature);
  const bool match = r.rule == TreeRule::kMatch;
  TreeDraw kind = draw_kind(r.rule, record);
  if (kGeneral && match && leaf) kind = TreeDraw::kPlain;
  int64_t token = record.stats.argmax;
  if (kind != TreeDraw::kNone) {
    if (record.moved != 0 && record.keep == 0.0f) status |= kZeroResidual;
    RowFilter filter;
    if (filtered && !leaf) filter = workspace.filters[first + n];
    if constexpr (kGeneral) {
      if (filtered && leaf)
        filter = find_cut(cluster, row.source, chunks, workspace.row_chunks, record.stats, law,
                          r.filters());
    }
    const uint64_t whole = filtered ? filter.mass : record.stats.sum;
    const bool residual = kind == TreeDraw::kResidual;
    const bool with_dense = residual && dense;
    const RowLaw dense_law = with_dense ? RowLaw(draft, r.draft_temperature) : law;
    TreeWeights weights{law,
                        filter,
                        1.0f,
                        nullptr,
                        with_dense ? r.draft_row(n) : LogitRow{nullptr, DType::kF32},
                        dense_law,
                        record.rho};
    float mass = static_cast<float>(whole) * (1.0f / kFixedOne);
    if (residual) {
      weights.unit = filtered ? div_rn(kFixedOne, static_cast<float>(whole)) : law.inverse_sum;
      mass = record.mass;
      if (!dense) {
        const RowLaw q(draft, r.draft_temperature);
        for (int m = threadIdx.x; m < p.pool; m += blockDim.x) {
          if (m >= static_cast<int>(blockDim.x)) {
            pool_id = r.pool_ids(n)[m];
            pool_logit = r.pool_row(n).at(m);
          }
          if (pool_id >= 0 && pool_id < p.vocab)
            shared.taken.put(pool_id, mul_rn(record.rho, counted_draft(q.probability(pool_logit))));
        }
        weights.taken = &shared.taken;
      }
    } else if (kind == TreeDraw::kWithoutChildren) {
      for (int c = n + 1 + threadIdx.x; c < r.nodes; c += blockDim.x)
        if (tree.parent[c] == n && tree.token[c] >= 0) shared.taken.put(tree.token[c], INFINITY);
      weights.taken = &shared.taken;
      mass *= record.mass;
    }
    __syncthreads();
    RaceNoise noise{r.noise(), kind == TreeDraw::kPlain ? kBonusDraw : kResidualDraw, n};
    if (kGeneral && match) noise = {r.position_noise(last), kPositionDraw, 0};
    int turn = 0;
    unsigned long long key = race_last(cluster, &row, weights, noise, mass, &turn, &shared.race);
    if (key == kNoWinner) {  // p without the children, or over q, is nothing up to rounding
      status |= kZeroResidual;
      weights.unit = 1.0f;
      weights.taken = nullptr;
      weights.dense.data = nullptr;
      noise.purpose = kBonusDraw;
      key = race_last(cluster, &row, weights, noise, static_cast<float>(whole) * (1.0f / kFixedOne),
                      &turn, &shared.race);
    }
    token = static_cast<int64_t>(key & 0xffffffffu);
  }
  if (cluster.rank != 0) return;
  emit_path(r, tree, shared.path, shared.children.logit, last);
  if (threadIdx.x == 0)
    emit_last(r, last, token,
              p.chosen_logprob != nullptr ? law.log_probability(row.source.at(token)) : 0.0f,
              status);
}

}  // namespace domino
