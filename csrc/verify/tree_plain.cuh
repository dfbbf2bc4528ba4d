// Last launch of verify_tree where no request has a q or filters and the rule is not match: greedy
// and target-only. A cluster owns a request: its warps judge the nodes with children side by side
// and tell each other (cluster_mail.cuh), every thread follows the steps, and all read the row
// where they end, if it is a leaf's, and race for the token that comes last. Bytes: the chunks'
// statistics and one row a request; bound by latency, and by instructions that run once and have to
// be fetched, so the code is short.
#pragma once

#include "verify/cluster_mail.cuh"
#include "verify/tree_last_row.cuh"
#include "verify/tree_path.cuh"
#include "verify/tree_taken.cuh"

namespace domino {

constexpr int kPlainThreads = 384, kPlainWarps = kPlainThreads / kWarpSize;
constexpr int kSetupThreads = 128, kSetupWarps = kSetupThreads / kWarpSize;

// What a node with children says to the walk.
struct alignas(16) PlainVerdict {
  uint64_t sum;  // of the row, as RowStats has it
  float top;
  int32_t argmax;
  int32_t step;     // the child to step to; -1: the walk ends here
  uint32_t status;  // of the children that were looked at; from bit 8 on the row's faults
  float mass;       // target-only: of p without the children
  uint32_t moved;   // and whether there are any
};
static_assert(sizeof(PlainVerdict) == 32);

// Behind it in shared memory: PlainVerdict[width], and from sm_90 on ChunkStats[row_chunks].
struct alignas(16) PlainShared {
  SharedTree tree;
  Mailbox verdicts, chunks;
  SharedRace race;
  float coins[kMaxTreeNodes];           // VERIFY_COIN n
  float logit[kMaxTreeNodes];           // of a node's token, in its parent's row
  uint32_t usable[kMaxTreeNodes / 32];  // nodes with a token that no earlier sibling has
  int16_t path[kMaxTreeNodes];
  SharedTaken taken;
};

inline int plain_shared_bytes(int64_t width, int64_t vocab, int major) {
  const int64_t chunks = major >= 9 ? ceil_div<int64_t>(vocab, kChunk) : 0;
  return static_cast<int>(sizeof(PlainShared) + width * sizeof(PlainVerdict) +
                          chunks * sizeof(ChunkStats));
}

// What the race weighs the tokens of the last row by.
struct PlainWeights {
  const RowLaw& law;
  RowFilter filter;          // none
  const SharedTaken* taken;  // or null

  __device__ __forceinline__ float scaled(float logit) const { return law.weight(logit); }
  __device__ __forceinline__ float upper(float logit, int64_t) const { return law.weight(logit); }
  __device__ __forceinline__ float exact(float upper, int64_t token) const {
    return taken == nullptr ? upper : add_rn(upper, -taken->of(static_cast<int>(token)));
  }
};

// The winner of a row: key of its logit, ~id. By a whole warp.
__device__ __forceinline__ unsigned long long row_winner(const TreeWorkspace& workspace,
                                                         int64_t row) {
  const uint2* chunks =
      reinterpret_cast<const uint2*>(workspace.chunks) + row * workspace.row_chunks;
  unsigned long long best = 0;
#pragma unroll 5
  for (int c = threadIdx.x % kWarpSize; c < workspace.row_chunks; c += kWarpSize) {
    const uint2 chunk = __ldcg(chunks + c);
    best = max(best, static_cast<unsigned long long>(chunk.x) << 32 | ~chunk.y);
  }
  return ~warp_least(~best);
}

// The verdict on node n, by one warp.
__device__ __forceinline__ PlainVerdict judge_plain(const TreeRequest& r, const PlainShared& shared,
                                                    bool greedy, int n, const RowStats& stats) {
  const int lane = threadIdx.x % kWarpSize;
  const SharedTree& tree = shared.tree;
  PlainVerdict out{stats.sum, stats.top, stats.argmax, -1, stats.faults << 8, 1.0f, 0};
  if (stats.faults != 0) return out;
  const RowLaw law(stats, r.temperature);
  const float u = shared.coins[n];
  float sum = 0.0f;
  tree.for_each_window(n, [&](int c, unsigned mask) {
    const int x = (mask >> lane & 1) != 0 ? tree.token[c] : SharedTree::kPad;
    if (greedy)
      return !find_child(c, x, static_cast<uint32_t>(stats.argmax), &out.step, &out.status);
    unsigned left = shared.usable[c / kWarpSize] & mask, seen = kFullMask;
    const float p = (left >> lane & 1) != 0 ? law.probability(shared.logit[c]) : 0.0f;
#pragma unroll 1
    for (; left != 0; left &= left - 1) {
      const int other = __ffs(left) - 1;
      const float mass = __shfl_sync(kFullMask, p, other);
      out.moved = 1;
      sum = add_rn(sum, mass);
      if (!(mass > 0.0f && u <= sum)) continue;
      out.step = c - lane + other;
      seen = (1u << other) - 1;
      break;
    }
    if ((__ballot_sync(kFullMask, x == SharedTree::kBad) & seen) != 0) out.status |= kBadId;
    return out.step < 0;
  });
  out.mass = 1.0f - sum;
  return out;
}

// What the walk takes that does not wait for the rows, by the first warps.
template <class T, bool kArgmaxOnly>
__device__ __forceinline__ void set_up(const TreeRequest& r, const EarlyLoads& early, bool greedy,
                                       const RowCluster& cluster, PlainShared& shared,
                                       PlainVerdict* verdicts) {
  const SharedTree& tree = shared.tree;
  const int lane = threadIdx.x % kWarpSize;
  const auto sync = [] { asm volatile("bar.sync 1, %0;" ::"n"(kSetupThreads) : "memory"); };
  if (threadIdx.x < kMaxTreeNodes / 32) shared.usable[threadIdx.x] = 0;
  float own_logit = -INFINITY;
  shared.tree.load(r, early, kSetupThreads, sync, [&](int n, int parent, int token) {
    if (kArgmaxOnly || parent < 0 || token < 0) return;
    const float logit = to_float(static_cast<const T*>(r.target_row(parent).data)[token]);
    if (n < kSetupThreads)
      own_logit = logit;  // on its way until all else is done
    else
      shared.logit[n] = logit;
  });
#pragma unroll 1
  for (int n = threadIdx.x; n < r.nodes; n += kSetupThreads) {
    if (tree.inner.has(n)) continue;
    verdicts[n].step = -1;
    verdicts[n].status = 0;
  }
#pragma unroll 1
  for (int k = cluster.rank + cluster.size * (threadIdx.x / kWarpSize);
       !greedy && k < tree.inner.count; k += cluster.size * kSetupWarps) {
    bool others = false;
    const int n = tree.inner.at[k];
    tree.for_each_window(n, [&](int c, unsigned mask) {
      const bool child = (mask >> lane & 1) != 0;
      const bool repeated = tree.repeats(n, c, child, others);
      const unsigned all = __ballot_sync(kFullMask, child && !repeated && tree.token[c] >= 0);
      if (lane == 0) atomicOr(&shared.usable[c / kWarpSize], all);
      others = true;
      return true;
    });
  }
  if (!kArgmaxOnly && threadIdx.x < r.nodes) shared.logit[threadIdx.x] = own_logit;
}

// Grid: a cluster a request. kArgmaxOnly: all requests are greedy and nobody wants
// log-probabilities; then chunks are (key, first) pairs.
template <class T, bool kArgmaxOnly>
__global__ void __launch_bounds__(kPlainThreads, sizeof(T) == 4 ? 1 : 2)
    tree_plain_kernel(const __grid_constant__ VerifyTreeParams p) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  PlainShared& shared = *reinterpret_cast<PlainShared*>(shared_bytes);
  PlainVerdict* verdicts = reinterpret_cast<PlainVerdict*>(shared_bytes + sizeof(PlainShared));
  const RowCluster cluster;
  const int64_t b = blockIdx.x / cluster.size, first = b * p.width;
  const EarlyLoads early(p, b, true);
  const TreeRequest r(p, b);
  const TreeWorkspace workspace(p);
  const SharedTree& tree = shared.tree;
  const int warp = threadIdx.x / kWarpSize, row_chunks = workspace.row_chunks;
  if (r.nodes == 0) {
    previous_launch_done();
    if (cluster.rank == 0) emit_nothing(r);
    return;
  }
  const bool greedy = kArgmaxOnly || r.rule == TreeRule::kGreedy;
  const bool wants_sum = !greedy || p.chosen_logprob != nullptr;
  const float scale = law_scale(r.temperature);
  if (threadIdx.x == 0) {
    shared.verdicts.open();
    shared.chunks.open();
    shared.race.open();
  }
  cluster.arrive();
  if (warp < kSetupWarps) {
    set_up<T, kArgmaxOnly>(r, early, greedy, cluster, shared, verdicts);
  } else if (!greedy) {
    constexpr int kOthers = kPlainThreads - kSetupThreads;
    const int thread = threadIdx.x - kSetupThreads;
#pragma unroll 1
    for (int n = thread; n < r.nodes; n += kOthers)
      shared.coins[n] = uniform(early.noise.words(kVerifyCoin, n, 0).word[0]);
    shared.taken.clear(thread, kOthers);
  }
  __syncthreads();
  cluster.wait();  // all blocks are there, and their mailboxes
  previous_launch_done();

#pragma unroll 1
  for (int k = cluster.rank + cluster.size * warp; k < tree.inner.count;
       k += cluster.size * kPlainWarps) {
    const int n = tree.inner.at[k];
    const int64_t chunks = (first + n) * row_chunks;
    RowStats stats{};
    if constexpr (kArgmaxOnly) {
      const unsigned long long winner = row_winner(workspace, first + n);
      stats.top = key_logit(static_cast<uint32_t>(winner >> 32));
      stats.argmax = static_cast<int32_t>(~static_cast<uint32_t>(winner));
      stats.faults = row_faults(stats.top);
    } else {
      stats = join_chunks(
          row_chunks, scale, greedy, wants_sum,
          [&](int c) { return load_chunk(workspace.chunks + chunks + c); },
          [&](int c) { return __ldcg(workspace.first + chunks + c); });
    }
    const PlainVerdict verdict = judge_plain(r, shared, greedy, n, stats);
    uint64_t words[4];
    memcpy(words, &verdict, sizeof(words));
    shared.verdicts.send(cluster, verdicts + n, words);
  }
  shared.verdicts.wait(cluster, tree.inner.count * static_cast<int>(sizeof(PlainVerdict)));

  int n = 0, last = 0;
  uint32_t status = tree.faults;
  const bool emits_path = cluster.rank == cluster.size - 1;
#pragma unroll 1
  for (;; ++last) {  // by every thread
    const int2 said = *reinterpret_cast<const int2*>(&verdicts[n].step);
    if (emits_path && threadIdx.x == 0) shared.path[last] = static_cast<int16_t>(n);
    status |= static_cast<uint32_t>(said.y);
    if (said.x < 0) break;
    n = said.x;
  }
  const bool leaf = !tree.inner.has(n);
  LastRow<T> row(cluster, r.target_row(n), p.vocab);
  if (leaf || !greedy) row.fetch_ahead();
  PlainVerdict verdict{};
  RowStats stats{};
  if (leaf) {
#if __CUDA_ARCH__ >= 900
    ChunkStats* chunks = reinterpret_cast<ChunkStats*>(verdicts + p.width);
#else
    ChunkStats* chunks = workspace.chunks + (first + n) * row_chunks;
#endif
    stats = read_leaf<kArgmaxOnly>(cluster, greedy, wants_sum, scale, &row, chunks, &shared.chunks,
                                   &shared.race);
  } else {
    verdict = verdicts[n];
    stats = {verdict.sum, verdict.top, verdict.argmax, status >> 8, 0};
  }
  status = (status & 0xffu) | stats.faults | r.faults;
  bool emits = cluster.rank == 0 && threadIdx.x == 0;
  int64_t token = stats.faults == 0 ? stats.argmax : -1;
  float logit = stats.top;
  if (!greedy && stats.faults == 0) {
    const RowLaw law(stats.top, stats.sum, scale);
    const bool without = verdict.moved != 0;  // the children
    PlainWeights weights{law, RowFilter{}, nullptr};
    float mass = static_cast<float>(stats.sum) * (1.0f / kFixedOne);
    if (without) {
      shared.taken.put_children(tree, n);
      weights.taken = &shared.taken;
      mass *= verdict.mass;
      __syncthreads();
    }
    RaceNoise noise{early.noise, without ? kResidualDraw : kBonusDraw, n};
    RaceResult won;
    int turn = 0;
#pragma unroll 1
    for (;;) {
      won = race_last(cluster, &row, weights, noise, mass, &turn, &shared.race);
      if (won.key != kNoWinner || weights.taken == nullptr) break;
      status |= kZeroResidual;  // p without the children is nothing up to rounding
      weights.taken = nullptr;
      noise.purpose = kBonusDraw;
      mass = static_cast<float>(stats.sum) * (1.0f / kFixedOne);
    }
    emits = won.own;
    token = static_cast<int64_t>(won.key & 0xffffffffu);
    logit = won.logit;
  }
  if (emits)
    emit_last(r, last, token,
              p.chosen_logprob != nullptr && token >= 0
                  ? RowLaw(stats.top, stats.sum, scale).log_probability(logit)
                  : 0.0f,
              status);
  if (!emits_path) return;
  __syncthreads();
  emit_path(r, tree, shared.path, last, [&](int i) {
    const PlainVerdict& at = verdicts[shared.path[i]];
    return RowLaw(at.top, at.sum, scale).log_probability(shared.logit[shared.path[i + 1]]);
  });
}

}  // namespace domino
