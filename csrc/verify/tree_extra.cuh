// Launches of verify_tree that only some calls need.
//
//   tree_cut_kernel     filters: a cluster finds where they cut one node's row
//   tree_judge_kernel   filters: a block judges one node, as the first launch does without them
//   tree_dense_kernel   siblings and traversal with a dense q: a block owns a request and goes from
//                       node to node; a rejected child costs a pass over the two rows
#pragma once

#include "verify/row_cut.cuh"
#include "verify/tree_rows.cuh"

namespace domino {

constexpr int kDenseThreads = 1024;

// Grid: clusters, one a node of a request.
template <class T>
__global__ void __launch_bounds__(kWalkThreads)
    tree_cut_kernel(const __grid_constant__ VerifyTreeParams p) {
  const RowCluster cluster;
  const TreeWorkspace workspace(p);
  const int64_t at = blockIdx.x / cluster.size;
  const TreeRequest r(p, at / p.width);
  const int n = static_cast<int>(at % p.width);
  previous_launch_done();
  const FilterParams filters = r.filters();
  if (n >= r.nodes || !filters.any(p.vocab)) return;
  const RowStats stats = workspace.records[at].stats;
  if (stats.faults != 0) return;
  const int row_chunks = static_cast<int>((p.vocab + kChunk - 1) / kChunk);
  const RowSource<T> source(r.target_row(n), RowEdits{}, static_cast<int>(p.vocab));
  const RowLaw law(stats, r.temperature);
  CutFinder<RowSource<T>> finder(cluster, source, workspace.chunks + at * row_chunks, row_chunks,
                                 stats, law, filters);
  const RowFilter cut = finder.find();
  if (cluster.rank == 0 && threadIdx.x == 0) workspace.filters[at] = cut;
}

// Grid: requests x nodes.
__global__ void __launch_bounds__(kTreeRowWarps* kWarpSize)
    tree_judge_kernel(const __grid_constant__ VerifyTreeParams p) {
  __shared__ TreeRowsShared shared;
  const TreeWorkspace workspace(p);
  const int64_t at = blockIdx.x;
  const TreeRequest r(p, at / p.width);
  const int n = static_cast<int>(at % p.width);
  previous_launch_done();
  if (n >= r.nodes || !r.filters().any(p.vocab)) return;
  NodeRecord record = workspace.records[at];
  if (threadIdx.x / kWarpSize == 1 && r.uses_draft() && p.draft_logits == nullptr)
    load_pool(r, n, &shared.pool);
  shared.tree.load(r);
  finish_node(r, workspace, n, workspace.filters + at, &record, &shared);
}

// Laws of one node over the whole vocabulary.
struct DenseLaws {
  RowReader target, draft;
  NodeLaw p;
  RowLaw q;

  // Units of mass(p, q) over the vocabulary. All threads of the block.
  template <class Mass>
  __device__ uint64_t units(unsigned long long* slots, Mass mass) const {
    unsigned long long sum = 0;
    for (int x = kGroup * threadIdx.x; x < target.vocab; x += kGroup * blockDim.x) {
      const Group<float> of_p = target.group(x), of_q = draft.group(x);
#pragma unroll
      for (int j = 0; j < kGroup; ++j)
        if (x + j < target.vocab)
          sum += to_units(mass(p.probability(of_p.at(j), x + j), q.probability(of_q.at(j))));
    }
    return block_reduce(
        sum, [](unsigned long long a, unsigned long long b) { return a + b; }, slots);
  }
};

// Grid: requests. Nodes in order of index: parents come first.
__global__ void __launch_bounds__(kDenseThreads)
    tree_dense_kernel(const __grid_constant__ VerifyTreeParams p) {
  __shared__ SharedTree tree;
  __shared__ float start[kMaxTreeNodes];
  __shared__ unsigned long long slots[kWarpSize];
  __shared__ RowStats draft_stats;
  const TreeWorkspace workspace(p);
  const int64_t b = blockIdx.x;
  const TreeRequest r(p, b);
  previous_launch_done();
  if (r.nodes == 0 || !r.uses_draft()) return;
  tree.load(r);
  for (int n = threadIdx.x; n < r.nodes; n += blockDim.x) start[n] = n == 0 ? 1.0f : 0.0f;
  __syncthreads();
  const bool traversal = r.rule == TreeRule::kTraversal, filtered = r.filters().any(p.vocab);
  const int row_chunks = static_cast<int>((p.vocab + kChunk - 1) / kChunk), vocab = p.vocab;
  for (int n = 0; n < r.nodes; ++n) {
    const int64_t at = b * p.width + n, draft_at = (at + p.batch * p.width) * row_chunks;
    const float reached = start[n];
    NodeRecord record = fresh_record(workspace.records[at].stats, reached);
    uint32_t status = 0;
    if (reached > 0.0f && record.stats.faults == 0) {
      if (threadIdx.x < kWarpSize) {
        uint32_t lane_key;
        const RowStats stats =
            combine_chunks(workspace.chunks + draft_at, workspace.first + draft_at, row_chunks,
                           law_scale(r.draft_temperature), false, &lane_key);
        if (threadIdx.x == 0) draft_stats = workspace.drafts[at] = stats;
      }
      __syncthreads();
      const DenseLaws laws{
          {r.target_row(n), vocab},
          {r.draft_row(n), vocab},
          NodeLaw(record.stats, r.temperature, filtered ? workspace.filters + at : nullptr),
          RowLaw(draft_stats, r.draft_temperature)};
      const bool usable = draft_stats.faults == 0;
      Residual state(reached);
      uint64_t drafted = 0;
      bool summed = false;
      for (int c = n + 1; c < r.nodes; ++c) {  // the whole block goes the same way
        if (tree.parent[c] != n) continue;
        const int x = tree.token[c];
        status |= x == SharedTree::kBad ? kBadId : 0u;
        if (x < 0) continue;
        bool repeated = false;
        for (int m = n + 1; m < c; ++m) repeated |= tree.parent[m] == n && tree.token[m] == x;
        const float q = usable && !repeated ? laws.q.probability(laws.draft.at(x)) : 0.0f;
        if (q == 0.0f) {
          status |= kBadDraftLaw;
          continue;
        }
        if (state.keep == 0.0f) continue;
        const float mass = laws.p.probability(laws.target.at(x), x);
        if (traversal) {
          if (threadIdx.x == 0) start[c] = state.chance(mass, q);
        } else if (state.accepts(r.child_coin(c), mass, q)) {
          record.step = c;
          if (threadIdx.x == 0) start[c] = 1.0f;
          break;
        }
        if (!summed) drafted = laws.units(slots, [](float, float of_q) { return of_q; });
        summed = true;
        drafted -= to_units(q);
        const float rho = state.next_rho();
        const uint64_t units = laws.units(
            slots, [&](float of_p, float of_q) { return add_rn(of_p, -mul_rn(rho, of_q)); });
        state.reject(traversal, rho, from_units(units), from_units(drafted));
      }
      record.rho = state.rho;
      record.keep = state.keep;
      record.moved = state.moved;
    }
    record.status = status;
    __syncthreads();  // start[] of later nodes; draft_stats
    if (threadIdx.x == 0) workspace.records[at] = record;
  }
}

}  // namespace domino
