// Verdicts of sampled siblings and traversal with a dense q, by a cluster: it goes from node to
// node, and a rejected child costs a pass over two rows.
#pragma once

#include "verify/race.cuh"
#include "verify/tree_path.cuh"

namespace domino {

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

struct SharedDense {
  float start[kMaxTreeNodes];
  RowStats target, draft;
  unsigned long long sum;  // of this block
  unsigned long long slots[kWarpSize];
};

// Laws of one node over the whole vocabulary.
struct DenseLaws {
  RowReader target, draft;
  NodeLaw p;
  RowLaw q;

  // Units of mass(p, q) over the vocabulary, in all threads of the cluster.
  template <class Mass>
  __device__ __forceinline__ uint64_t units(const RowCluster& cluster, SharedDense& shared,
                                            Mass mass) const {
    unsigned long long sum = 0;
    const int threads = blockDim.x * cluster.size, thread = cluster.rank * blockDim.x + threadIdx.x;
#pragma unroll 1
    for (int x = kGroup * thread; x < target.vocab; x += kGroup * threads) {
      const Group<float> of_p = target.group(x), of_q = draft.group(x);
#pragma unroll
      for (int j = 0; j < kGroup; ++j)
        if (x + j < target.vocab)
          sum += to_units(
              mass(p.probability(of_p.at(j), x + j), counted_draft(q.probability(of_q.at(j)))));
    }
    sum = block_reduce(
        sum, [](unsigned long long a, unsigned long long b) { return a + b; }, shared.slots);
    if (threadIdx.x == 0) shared.sum = sum;
    cluster.sync();
    sum = warp_sum(static_cast<uint64_t>(cluster.of_lane(&shared.sum)));
    cluster.sync();  // nobody writes the next sum before all have read
    return sum;
  }
};

// All records of request r, and the steps. Every block goes the same way; the first one writes the
// records and the log-probabilities of the nodes' tokens.
__device__ __noinline__ void judge_dense(const RowCluster& cluster, const TreeRequest& r,
                                         const TreeWorkspace& workspace, const SharedTree& tree,
                                         const float* coins, int32_t* steps, float* logprobs) {
  __shared__ SharedDense shared;
  const bool traversal = r.rule == TreeRule::kTraversal, filtered = r.filters().any(r.p.vocab);
  const bool writes = cluster.rank == 0;
  const int row_chunks = workspace.row_chunks, vocab = static_cast<int>(r.p.vocab);
  const int64_t first = r.b * r.p.width;
  for (int n = threadIdx.x; n < r.nodes; n += blockDim.x) shared.start[n] = n == 0 ? 1.0f : 0.0f;
  __syncthreads();
#pragma unroll 1
  for (int k = 0; k < tree.inner.count; ++k) {
    const int n = tree.inner.at[k];
    const int64_t at = first + n;
    const float reached = shared.start[n];
    NodeRecord record = fresh_record(RowStats{}, reached);
    uint32_t status = 0;
    if (reached > 0.0f) {
      const int warp = threadIdx.x / kWarpSize;
      if (warp < 2) {  // one of either row
        const int64_t row = (warp == 0 ? at : at + r.p.batch * r.p.width) * row_chunks;
        uint32_t lane_key;
        const RowStats stats = combine_chunks(
            workspace.chunks + row, workspace.first + row, row_chunks,
            law_scale(warp == 0 ? r.temperature : r.draft_temperature), false, &lane_key);
        if (threadIdx.x % kWarpSize == 0) (warp == 0 ? shared.target : shared.draft) = stats;
      }
      __syncthreads();
      record.stats = shared.target;
      if (writes && threadIdx.x == 0) workspace.drafts[at] = shared.draft;
    }
    if (reached > 0.0f && record.stats.faults == 0) {
      const DenseLaws laws{
          {r.target_row(n), vocab},
          {r.draft_row(n), vocab},
          NodeLaw(record.stats, r.temperature, filtered ? workspace.filters + at : nullptr),
          RowLaw(shared.draft, r.draft_temperature)};
      const bool usable = shared.draft.faults == 0;
      for (int c = n + 1 + threadIdx.x; writes && c < r.nodes; c += blockDim.x)
        if (r.p.chosen_logprob != nullptr && tree.parent[c] == n && tree.token[c] >= 0)
          logprobs[c] = laws.p.law.log_probability(laws.target.at(tree.token[c]));
      Residual state(reached);
      uint64_t drafted = 0;
      bool summed = false;
#pragma unroll 1
      for (int c = n + 1; c < r.nodes; ++c) {
        if (tree.parent[c] != n) continue;
        const int x = tree.token[c];
        status |= x == SharedTree::kBad ? kBadId : 0u;
        if (x < 0) continue;
        bool repeated = false;
        for (int m = n + 1; m < c; ++m) repeated |= tree.parent[m] == n && tree.token[m] == x;
        const float q =
            usable && !repeated ? counted_draft(laws.q.probability(laws.draft.at(x))) : 0.0f;
        if (q == 0.0f) {
          status |= kBadDraftLaw;
          continue;
        }
        if (state.keep == 0.0f) continue;
        const float mass = laws.p.probability(laws.target.at(x), x);
        if (traversal) {
          if (threadIdx.x == 0) shared.start[c] = state.chance(mass, q);
        } else if (state.accepts(coins[c - 1], mass, q)) {
          record.step = c;
          if (threadIdx.x == 0) shared.start[c] = 1.0f;
          break;
        }
        if (!summed) drafted = laws.units(cluster, shared, [](float, float of_q) { return of_q; });
        summed = true;
        drafted -= to_units(q);
        const float rho = state.next_rho();
        const uint64_t over = laws.units(cluster, shared, [&](float of_p, float of_q) {
          return add_rn(of_p, -mul_rn(rho, of_q));
        });
        state.reject(traversal, rho, from_units(over), from_units(drafted));
      }
      record.rho = state.rho;
      record.mass = state.mass;
      record.keep = state.keep;
      record.moved = state.moved;
    }
    record.status = static_cast<uint16_t>(status);
    if (threadIdx.x == 0) steps[n] = (record.step & kNoStep) | static_cast<int>(status << 16);
    if (writes && threadIdx.x == 0) workspace.records[at] = record;
    __syncthreads();  // start[] of later nodes, and the statistics
  }
  for (int n = threadIdx.x; writes && n < r.nodes; n += blockDim.x)
    if (!tree.inner.has(n))
      workspace.records[first + n] = fresh_record(RowStats{}, shared.start[n]);
}

}  // namespace domino
