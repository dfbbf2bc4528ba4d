// Launch of verify_tree between the rows and the walk, with filters or the rule match: a cluster
// finds where the filters cut the row of one node with children, and draws from it for match.
// Bytes: what its filters keep of a row, several times; bound by latency.
#pragma once

#include "verify/row_cut.cuh"
#include "verify/tree_finish.cuh"

namespace domino {

// Grid: clusters, one a node of a request.
template <class T>
__global__ void __launch_bounds__(kWalkThreads, 1)
    tree_node_kernel(const __grid_constant__ VerifyTreeParams p) {
  __shared__ InnerNodes inner;
  __shared__ int16_t parent[kMaxTreeNodes];
  __shared__ RowStats shared_stats;
  __shared__ SharedRace shared_race;
  const RowCluster cluster;
  const TreeWorkspace workspace(p);
  const int64_t at = blockIdx.x / cluster.size;
  const EarlyLoads early(p, at / p.width, false);
  const TreeRequest r(p, at / p.width);
  const int n = static_cast<int>(at % p.width);
  const FilterParams filters = r.filters();
  const bool match = r.rule == TreeRule::kMatch, filtered = filters.any(p.vocab);
  if (threadIdx.x == 0) shared_race.open();
  inner.load(r, early, blockDim.x, sync_block, [&](int m, int stored) {
    parent[m] = static_cast<int16_t>(stored < m ? stored : -1);
  });
  previous_launch_done();
  if (n >= r.nodes || !inner.has(n) || !(match || filtered)) return;
  const int row_chunks = workspace.row_chunks;
  const ChunkStats* chunks = workspace.chunks + at * row_chunks;
  if (threadIdx.x < kWarpSize) {
    uint32_t lane_key;
    const RowStats stats = combine_chunks(chunks, workspace.first + at * row_chunks, row_chunks,
                                          law_scale(r.temperature), false, &lane_key);
    if (threadIdx.x == 0) shared_stats = stats;
  }
  cluster.sync();  // all blocks are there
  const RowStats stats = shared_stats;
  if (stats.faults != 0) return;
  const RowSource<T> source(r.target_row(n), RowEdits{}, static_cast<int>(p.vocab));
  const RowLaw law(stats, r.temperature);
  RowFilter filter;
  if (filtered) {
    CutFinder<RowSource<T>> finder(cluster, source, chunks, row_chunks, stats, law, filters);
    filter = finder.find();
    if (cluster.rank == 0 && threadIdx.x == 0) workspace.filters[at] = filter;
  }
  if (!match) return;
  int depth = 0;
  for (int m = n; m > 0 && depth < r.nodes; m = parent[m]) ++depth;
  const TreeWeights weights{law, filter, 1.0f, nullptr, LogitRow{nullptr, DType::kF32}, law, 0.0f};
  const uint64_t mass = filtered ? filter.mass : stats.sum;
  LastRow<T> row(cluster, r.target_row(n), p.vocab, blockDim.x / kWarpSize);
  int turn = 0;
  const unsigned long long key =
      race_last(cluster, &row, weights, RaceNoise{r.position_noise(depth), kPositionDraw, 0},
                static_cast<float>(mass) * (1.0f / kFixedOne), &turn, &shared_race)
          .key;
  if (cluster.rank == 0 && threadIdx.x == 0)
    workspace.drawn[at] = static_cast<int32_t>(key & 0xffffffffu);
}

}  // namespace domino
