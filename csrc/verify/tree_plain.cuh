// Last launch of verify_tree where no request has a q or filters and the rule is not match: greedy
// and target-only. A cluster owns a request: its warps judge the nodes with children side by side
// and tell each other (cluster_mail.cuh), every thread follows the steps, and all read the row
// where they end, if it is a leaf's, and race for the token that comes last. Bytes: the chunks'
// statistics and one row a request; bound by latency, and by instructions that run once and have to
// be fetched, so the code is short.
#pragma once

#include "verify/cluster_mail.cuh"
#include "verify/tree_path.cuh"
#include "verify/tree_plain_end.cuh"
#include "verify/tree_taken.cuh"

namespace domino {
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
  SharedDraw draw;
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

// The tree, by the first warps, and the logit of this thread's node, which need not be there yet.
template <class T, bool kArgmaxOnly>
__device__ __forceinline__ float load_tree(const TreeRequest& r, const EarlyLoads& early,
                                           PlainShared& shared) {
  const auto sync = [] { asm volatile("bar.sync 1, %0;" ::"n"(kSetupThreads) : "memory"); };
  if (threadIdx.x < kMaxTreeNodes / 32) shared.usable[threadIdx.x] = 0;
  float own_logit = -INFINITY;
  shared.tree.load(r, early, kSetupThreads, sync, [&](int n, int parent, int token) {
    if (kArgmaxOnly || parent < 0 || token < 0) return;
    const float logit = to_float(static_cast<const T*>(r.target_row(parent).data)[token]);
    if (n < kSetupThreads)
      own_logit = logit;
    else
      shared.logit[n] = logit;
  });
  return own_logit;
}

// What else the walk takes that does not wait for the rows. By the same warps.
__device__ __forceinline__ void prepare_nodes(const TreeRequest& r, bool greedy,
                                              const RowCluster& cluster, PlainShared& shared,
                                              PlainVerdict* verdicts) {
  const SharedTree& tree = shared.tree;
  const int lane = threadIdx.x % kWarpSize;
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
  if (threadIdx.x / kWarpSize == kClerk) touch_pages(p, b);
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
    shared.draw.open();
  }
  cluster.arrive();
  float own_logit = -INFINITY;
  if (warp < kSetupWarps) own_logit = load_tree<T, kArgmaxOnly>(r, early, shared);
  __syncthreads();
  if (warp < kSetupWarps) {
    prepare_nodes(r, greedy, cluster, shared, verdicts);
    if (!kArgmaxOnly && threadIdx.x < r.nodes) shared.logit[threadIdx.x] = own_logit;
  } else if (!greedy && warp >= 2 * kSetupWarps) {
    constexpr int kOthers = kPlainThreads - 2 * kSetupThreads;
    const int thread = threadIdx.x - 2 * kSetupThreads;
#pragma unroll 1
    for (int n = thread; n < r.nodes; n += kOthers)
      shared.coins[n] = uniform(early.noise.words(kVerifyCoin, n, 0).word[0]);
    shared.taken.clear(thread, kOthers);
  }
  cluster.wait();  // all blocks are there, and their mailboxes
  previous_launch_done();

  // The block's first nodes are those of warps that have nothing to prepare: they put the rows'
  // chunks together meanwhile.
  const int turn = (warp + kPlainWarps - kSetupWarps) % kPlainWarps;
  bool prepared = false;
#pragma unroll 1
  for (int k = cluster.rank + cluster.size * turn;; k += cluster.size * kPlainWarps) {
    const bool any = k < tree.inner.count;
    const int n = any ? tree.inner.at[k] : 0;
    const int64_t chunks = (first + n) * row_chunks;
    RowStats stats{};
    if (any) {
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
    }
    if (!prepared) __syncthreads();
    prepared = true;
    if (!any) break;
    const PlainVerdict verdict = judge_plain(r, shared, greedy, n, stats);
    uint64_t words[4];
    memcpy(words, &verdict, sizeof(words));
    shared.verdicts.send(cluster, verdicts + n, words);
  }
  shared.verdicts.wait(cluster, tree.inner.count * static_cast<int>(sizeof(PlainVerdict)));

  int n = 0, last = 0;
  uint32_t status = tree.faults;
  const bool emits_path = warp == kClerk && cluster.rank == cluster.size - 1;
  const auto said_by = [&](int m) { return *reinterpret_cast<const int2*>(&verdicts[m].step); };
  int2 said = said_by(0);
#pragma unroll 1
  for (;; ++last) {                             // by every thread
    const int2 next = said_by(max(said.x, 0));  // on its way while this one is looked at
    if (emits_path && threadIdx.x % kWarpSize == 0) shared.path[last] = static_cast<int16_t>(n);
    status |= static_cast<uint32_t>(said.y);
    if (said.x < 0) break;
    n = said.x;
    said = next;
  }
  const bool leaf = !tree.inner.has(n);
  LastRow<T> row(cluster, r.target_row(n), p.vocab, kReaders);
  if (leaf || !greedy) row.fetch_ahead();
  if (emits_path) {
    __syncwarp();
    emit_path(r, tree, shared.path, last, threadIdx.x % kWarpSize, kWarpSize, [&](int i) {
      const PlainVerdict& at = verdicts[shared.path[i]];
      return RowLaw(at.top, at.sum, scale).log_probability(shared.logit[shared.path[i + 1]]);
    });
  }
#if __CUDA_ARCH__ >= 900
  ChunkStats* chunks = reinterpret_cast<ChunkStats*>(verdicts + p.width);
#else
  ChunkStats* chunks = workspace.chunks + (first + n) * row_chunks;
#endif
  if (status >> 8 != 0 || (greedy && !leaf)) {
    if (cluster.rank != 0 || threadIdx.x != 0) return;
    const PlainVerdict& end = verdicts[n];
    const bool usable = status >> 8 == 0;
    emit_last(r, last, usable ? end.argmax : -1,
              p.chosen_logprob != nullptr && usable
                  ? RowLaw(end.top, end.sum, scale).log_probability(end.top)
                  : 0.0f,
              (status | status >> 8) & 0xffu);
    return;
  }
  PlainEnd end{last, status, greedy,  leaf, {early.noise, kBonusDraw, n},
               0.0f, 0,      nullptr, 0.0f, 1.0f};
  if (!leaf) {
    const PlainVerdict& verdict = verdicts[n];
    end.top = verdict.top;
    end.sum = verdict.sum;
    end.mass = static_cast<float>(verdict.sum) * (1.0f / kFixedOne);
    if (verdict.moved != 0) {
      end.noise.purpose = kResidualDraw;
      end.taken = &shared.taken;
      end.mass *= verdict.mass;
      shared.taken.put_children(tree, n);
      __syncthreads();
    }
  }
  end_walk<kArgmaxOnly>(cluster, r, end, scale, &row, chunks, &shared.chunks, &shared.draw);
}

}  // namespace domino
