// Last launch of verify_tree: a cluster owns one request. Pairs of its warps judge the nodes with
// children side by side (tree_judge.cuh), every block then follows the steps, and all of them race
// for the token that comes last: as tree_plain_end.cuh does, or with filters, a dense q or the rule
// match by race_last(), which reads a leaf's row first.
// Bytes: the chunks' statistics and one row a request; bound by latency.
#pragma once

#include "verify/row_cut.cuh"
#include "verify/tree_dense.cuh"
#include "verify/tree_judge.cuh"
#include "verify/tree_last_row.cuh"
#include "verify/tree_path.cuh"
#include "verify/tree_plain_end.cuh"
#include "verify/tree_taken.cuh"

namespace domino {

// What race_last() weighs the tokens of one node by.
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

// What a pair's second warp tells the first.
struct TargetOfNode {
  RowStats stats;
  uint64_t outside;  // of p, outside of the pool
};

// As small as lets a block stand beside two of the first launch (launch_rows in verify_tree.cu).
struct alignas(16) TreeFinishShared {
  SharedTree tree;
  union {
    float coins[kMaxTreeNodes];   // VERIFY_COIN n
    int16_t path[kMaxTreeNodes];  // once the steps are known
  };
  SharedChildren children;
  float logprob[kMaxTreeNodes];  // of each node's token, in the block that emits the path
  SharedPools pools;
  SharedTaken taken;
  int32_t step[kMaxTreeNodes];
  SharedTraversal traversal;
  NodeRecord judged[kWalkWarps / 2];     // of traversal, where a pair has one node at most
  TargetOfNode targets[kWalkWarps / 2];  // of pairs
  Mailbox chunks;
  SharedRace race;
  SharedDraw draw;
  RowStats leaf;

  // A leaf's row, behind the last cluster.sync(): from then on nobody reads the children's laws.
  static constexpr int kLawChunks = sizeof(SharedTraversal::law) / sizeof(ChunkStats);
  __device__ __forceinline__ ChunkStats* chunks_of(int count) {
    return reinterpret_cast<ChunkStats*>(count <= kLawChunks ? static_cast<void*>(traversal.law)
                                                             : this + 1);
  }
};

static_assert(offsetof(TreeFinishShared, traversal.law) % sizeof(ChunkStats) == 0);  // st.async

// The steps to the first kept node in post-order: the way down to it by least children. All threads
// of a block; synchronises.
__device__ __forceinline__ void find_steps(TreeFinishShared* shared) {
  const SharedTree& tree = shared->tree;
  const SharedTraversal& traversal = shared->traversal;
#pragma unroll 1
  for (int n = threadIdx.x; n < tree.nodes; n += blockDim.x) shared->step[n] = kNoStep;
  __syncthreads();
#pragma unroll 1
  for (int n = threadIdx.x; n < tree.nodes; n += blockDim.x) {
    const float start = __uint_as_float(traversal.start[n]);
    const float keep = tree.inner.has(n) ? traversal.keep[n] : start;
    if (n == 0 || !(start > 0.0f) || !(shared->coins[n - 1] <= keep)) continue;
#pragma unroll 1
    for (int m = n; m > 0; m = tree.parent[m])  // whoever marks a node first goes on
      if (atomicMin(&shared->step[tree.parent[m]], m) != kNoStep) break;
  }
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
  const EarlyLoads early(p, b, true);
  const TreeRequest r(p, b);
  const TreeWorkspace workspace(p);
  const SharedTree& tree = shared.tree;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int64_t first = b * p.width;
  if (r.nodes == 0) {
    previous_launch_done();
    if (cluster.rank == 0) emit_nothing(r);
    return;
  }
  if (threadIdx.x == 0) {
    shared.traversal.status = 0;
    shared.chunks.open();
    if (kGeneral)
      shared.race.open();
    else
      shared.draw.open();
  }
  shared.tree.load(r, early, blockDim.x, sync_block, [](int, int, int) {});
  const bool dense = kGeneral && r.uses_draft() && p.draft_logits != nullptr;
  const bool pooled = r.uses_draft() && !dense;
  const bool filtered = kGeneral && r.filters().any(p.vocab);
  const bool greedy = r.rule == TreeRule::kGreedy;
  const float scale = law_scale(r.temperature);
  const int count = pooled ? static_cast<int>(p.pool) : 0;
  const int all_pairs = static_cast<int>(blockDim.x) / (2 * kWarpSize), pair = warp % all_pairs;
  const int pairs = SharedPools::most_pairs(count), own = cluster.rank + cluster.size * pair;
  const bool traversal = r.rule == TreeRule::kTraversal;
  const bool many = tree.inner.count > cluster.size * pairs;  // more than a node a pair
  const bool works = !dense && pair < pairs, judges = works && warp < all_pairs;
  const PoolView pool = shared.pools.part(pair, count);
  const int home = kGeneral ? 0 : cluster.size - 1;  // the block that emits the path
  // log-probabilities are wanted of all rules
  const bool wants_children = !greedy || p.chosen_logprob != nullptr;
  const bool wants_coins = !greedy && r.rule != TreeRule::kMatch;
#pragma unroll 1
  for (int n = blockDim.x - 1 - threadIdx.x; n < r.nodes; n += blockDim.x) {  // first warps: a node
    shared.step[n] = kNoStep;
    shared.traversal.start[n] = n == 0                ? __float_as_uint(1.0f)
                                : tree.parent[n] >= 0 ? kPending
                                                      : 0u;
    if (wants_coins) shared.coins[n] = uniform(early.noise.words(kVerifyCoin, n, 0).word[0]);
  }
  constexpr int kOthers = 8 * kWarpSize;  // threads from there on have the time
  if (threadIdx.x >= kOthers) shared.taken.clear(threadIdx.x - kOthers, blockDim.x - kOthers);
  cluster.arrive_shared();
  // the two warps of a pair
  const auto meet = [&] {
    __syncwarp();
    asm volatile("bar.sync %0, 64;" ::"r"(1 + pair) : "memory");
  };
  bool waits = true;
  const auto wait_for_others = [&] {
    if (waits) {
      cluster.wait_shared();  // all blocks are there, and their steps
      if (cluster.size == 1) sync_block();
      previous_launch_done();
    }
    waits = false;
  };
  if (works && !judges) {
    float* logprobs = cluster.map(shared.logprob, home);
#pragma unroll 1
    for (int k = own; k < tree.inner.count; k += cluster.size * pairs) {
      const int n = tree.inner.at[k];
      const int64_t row = (first + n) * workspace.row_chunks;
      if (k != own) meet();  // the node before is judged
      if (wants_children) fetch_target<T>(r, tree, n, pool, &shared.children);
      wait_for_others();
      TargetOfNode target{join_chunks(
                              workspace.row_chunks, scale, greedy, true,
                              [&](int c) { return load_chunk(workspace.chunks + row + c); },
                              [&](int c) { return __ldcg(workspace.first + row + c); }),
                          0};
      if (target.stats.faults == 0) {
        if (kGeneral && r.rule == TreeRule::kMatch)
          target.stats.argmax = __ldcg(workspace.drawn + first + n);
        const NodeLaw law(target.stats, r.temperature,
                          filtered ? workspace.filters + first + n : nullptr);
        if (wants_children)
          target.outside = settle_target(r, tree, n, law, pool, &shared.children, logprobs);
      }
      if (lane == 0) shared.targets[pair] = target;
      meet();
    }
  }
  if (judges) {
#pragma unroll 1
    for (int k = own; k < tree.inner.count; k += cluster.size * pairs) {
      const int n = tree.inner.at[k];
      if (k != own) meet();
      prepare_node(r, workspace, tree, n, pooled, pool, &shared.children);
      wait_for_others();
      meet();
      NodeRecord record = fresh_record(shared.targets[pair].stats, 1.0f);
      if (record.stats.faults == 0) {
        judge_node(r, tree, shared.coins, n, shared.targets[pair].outside, pool, shared.children,
                   cluster, &shared.traversal, &record);
      } else if (traversal) {
        tree.for_each_window(n, [&](int c, unsigned mask) {
          tell_children(cluster, &shared.traversal, c, mask, {0.0f, 0.0f});
          return true;
        });
        if (lane == 0) shared.traversal.outside[n] = kNoLaw;
      }
      for (int m = lane; traversal && many && m < count; m += kWarpSize) {
        workspace.pool_p[(first + n) * count + m] = pool.p[m];
        workspace.pool_q[(first + n) * count + m] = pool.q[m];
      }
      if (!traversal) publish_step(cluster, shared.step, n, record.step, record.status);
      if (lane == 0)
        (traversal && !many ? shared.judged[pair] : workspace.records[first + n]) = record;
      __syncwarp();
    }
  }
  wait_for_others();
  if (dense) judge_dense(cluster, r, workspace, tree, shared.coins, shared.step, shared.logprob);
  cluster.sync();
  if (traversal) {
    if (pooled) {
      start_first_children(tree, shared.step, &shared.traversal);
      __syncwarp();
      for (int k = own; judges && k < tree.inner.count; k += cluster.size * pairs) {
        const int64_t at = first + tree.inner.at[k];
        for (int m = lane; many && m < count; m += kWarpSize) {
          pool.p[m] = workspace.pool_p[at * count + m];
          pool.q[m] = workspace.pool_q[at * count + m];
        }
        __syncwarp();
        NodeRecord record = many ? load_record(workspace.records + at) : shared.judged[pair];
        traverse_node(cluster, tree, tree.inner.at[k], pool, shared.children, &shared.traversal,
                      &record);
        if (lane == 0) workspace.records[at] = record;
      }
    } else {
#pragma unroll 1
      for (int m = threadIdx.x; m < r.nodes; m += blockDim.x) {
        const NodeRecord record = load_record(workspace.records + first + m);
        shared.traversal.start[m] = __float_as_uint(record.start);
        shared.traversal.keep[m] = record.keep;
        if (record.status != 0)
          atomicOr(&shared.traversal.status, static_cast<uint32_t>(record.status));
      }
    }
    cluster.sync();
    find_steps(&shared);
  }
  int n = 0, last = 0;
  uint32_t status = tree.faults | (traversal ? shared.traversal.status : 0u);
  NodeRecord record = fresh_record(RowStats{}, 1.0f);
  follow(shared.step, &n, &last, &status,
         threadIdx.x == kClerk * kWarpSize ? shared.path : nullptr);
  const bool leaf = !tree.inner.has(n);
  // what the last token takes, in the order in which it is needed
  RowStats draft{};
  int pool_id = -1;
  float pool_logit = 0.0f;
  if (!leaf) record = load_record(workspace.records + first + n);
  if (!leaf && r.uses_draft()) draft = workspace.drafts[first + n];
  if (!leaf && pooled && threadIdx.x < p.pool) {
    pool_id = r.pool_ids(n)[threadIdx.x];
    pool_logit = r.pool_row(n).at(threadIdx.x);
  }
  LastRow<T> row(cluster, r.target_row(n), p.vocab,
                 kGeneral ? static_cast<int>(blockDim.x) / kWarpSize : kReaders);
  if (leaf || !greedy) row.fetch_ahead();
  const auto emit_nodes = [&](int thread, int threads) {
    emit_path(r, tree, shared.path, last, thread, threads,
              [&](int i) { return shared.logprob[shared.path[i + 1]]; });
  };
  const auto take_pool = [&] {
    const RowLaw q(draft, r.draft_temperature);
    for (int m = threadIdx.x; m < p.pool; m += blockDim.x) {
      if (m >= static_cast<int>(blockDim.x)) {
        pool_id = r.pool_ids(n)[m];
        pool_logit = r.pool_row(n).at(m);
      }
      if (pool_id >= 0 && pool_id < p.vocab)
        shared.taken.put(pool_id, mul_rn(record.rho, counted_draft(q.probability(pool_logit))));
    }
  };
  const TreeDraw drawn = draw_kind(r.rule, record);
  if constexpr (!kGeneral) {
    const RowStats& stats = record.stats;
    const uint32_t faults = leaf ? 0 : stats.faults;
    const bool known = !leaf && (faults != 0 || greedy);
    PlainEnd end{last,
                 status,
                 greedy,
                 leaf,
                 {early.noise, kBonusDraw, n},
                 stats.top,
                 stats.sum,
                 nullptr,
                 static_cast<float>(stats.sum) * (1.0f / kFixedOne),
                 1.0f};
    if (!leaf && !known) {
      if (record.moved != 0 && record.keep == 0.0f) end.status |= kZeroResidual;
      if (drawn != TreeDraw::kPlain) {
        end.noise.purpose = kResidualDraw;
        end.taken = &shared.taken;
        end.mass *= record.mass;
      }
      if (drawn == TreeDraw::kWithoutChildren) shared.taken.put_children(tree, n);
      if (drawn == TreeDraw::kResidual) {
        end.unit = RowLaw(stats, r.temperature).inverse_sum;
        end.mass = record.mass;
        take_pool();
      }
      __syncthreads();
    }
    if (warp == kClerk && cluster.rank == home) {
      __syncwarp();
      emit_nodes(lane, kWarpSize);
    }
    if (known) {
      if (cluster.rank != 0 || threadIdx.x != 0) return;
      emit_last(r, last, faults == 0 ? stats.argmax : -1,
                p.chosen_logprob != nullptr && faults == 0
                    ? RowLaw(stats, r.temperature).log_probability(stats.top)
                    : 0.0f,
                status | faults);
      return;
    }
#if __CUDA_ARCH__ >= 900
    ChunkStats* told = shared.chunks_of(workspace.row_chunks);
#else
    ChunkStats* told = workspace.chunks + (first + n) * workspace.row_chunks;
#endif
    return end_walk<false>(cluster, r, end, scale, &row, told, &shared.chunks, &shared.draw);
  }
  __syncthreads();  // the path
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
  status |= r.faults | faults;
  if (faults != 0) {
    if (cluster.rank == home) emit_nodes(threadIdx.x, blockDim.x);
    if (cluster.rank == 0 && threadIdx.x == 0) emit_last(r, last, -1, 0.0f, status);
    return;
  }
  const RowLaw law(record.stats, r.temperature);
  const bool match = r.rule == TreeRule::kMatch;
  const TreeDraw kind = match && leaf ? TreeDraw::kPlain : drawn;
  bool emits = cluster.rank == 0 && threadIdx.x == 0;
  int64_t token = record.stats.argmax;
  float logit = record.stats.top;
  if (kind != TreeDraw::kNone) {
    if (record.moved != 0 && record.keep == 0.0f) status |= kZeroResidual;
    RowFilter filter;
    if (filtered && !leaf) filter = workspace.filters[first + n];
    if (filtered && leaf)
      filter = find_cut(cluster, row.source, chunks, workspace.row_chunks, record.stats, law,
                        r.filters());
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
        take_pool();
        weights.taken = &shared.taken;
      }
    } else if (kind == TreeDraw::kWithoutChildren) {
      shared.taken.put_children(tree, n);
      weights.taken = &shared.taken;
      mass *= record.mass;
    }
    __syncthreads();
    RaceNoise noise{early.noise, kind == TreeDraw::kPlain ? kBonusDraw : kResidualDraw, n};
    if (match) noise = {r.position_noise(last), kPositionDraw, 0};
    RaceResult won;
    int turn = 0;
    bool again = kind != TreeDraw::kPlain;
#pragma unroll 1
    for (;; again = false) {
      won = race_last(cluster, &row, weights, noise, mass, &turn, &shared.race);
      if (won.key != kNoWinner || !again) break;
      status |= kZeroResidual;  // p without the children, or over q, is nothing up to rounding
      weights.unit = 1.0f;
      weights.taken = nullptr;
      weights.dense.data = nullptr;
      noise.purpose = kBonusDraw;
      mass = static_cast<float>(whole) * (1.0f / kFixedOne);
    }
    emits = won.own;
    token = static_cast<int64_t>(won.key & 0xffffffffu);
    logit = won.logit;
  } else if (match && emits) {
    logit = row.source.at(token);
  }
  if (emits)
    emit_last(r, last, token, p.chosen_logprob != nullptr ? law.log_probability(logit) : 0.0f,
              status);
  if (cluster.rank == home) emit_nodes(threadIdx.x, blockDim.x);
}

}  // namespace domino
