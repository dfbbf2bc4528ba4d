// First launches of a sharded verify_chain: the shard's rows in chunks (row_chunks.cuh), then a
// warp puts the chunks of a row together, and of a filtered row a cluster lists the likeliest
// tokens (row_cut.cuh). Bytes: the shard's part of every row once, of filtered rows some chunks
// again; bound by HBM.
#include "verify/row_cut.cuh"
#include "verify/verify_launch.cuh"
#include "verify/verify_shard.h"

namespace domino {

namespace {

constexpr int kWarps = 4;

__global__ void __launch_bounds__(kWarps* kWarpSize)
    verify_shard_rows_kernel(const __grid_constant__ VerifyChainParams rows,
                             const __grid_constant__ VerifyShardParams p) {
  const ChainWorkspace chunks(rows.workspace, rows.batch, rows.drafts, rows.vocab, p.dense());
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  previous_launch_done();
  if (index >= p.batch * chunks.rows_per_request) return;
  const int64_t b = index / chunks.rows_per_request;
  const ShardRowIndex row(p, index - b * chunks.rows_per_request);
  const ChainRequest r(rows, b);
  RowPartial out = no_partial();
  if (row.exists(r)) {
    const int64_t first = index * chunks.row_chunks;
    uint32_t lane_key;
    const RowStats stats = combine_chunks(chunks.chunks + first, chunks.first + first,
                                          static_cast<int>(chunks.row_chunks), row.scale(r), true,
                                          &lane_key, &out.sums);
    out.top = stats.top;
    out.argmax = static_cast<int32_t>(stats.argmax + p.vocab_start);
    out.chosen = row.chosen(r);
  }
  const int lane = threadIdx.x % kWarpSize;
  if (lane == 0) p.partial(0, b, row.row) = out;
  for (int64_t n = lane; n < p.listed; n += kWarpSize) p.list(0, b, row.row)[n] = kNoToken;
}

// Grid: a cluster for each row of the target.
__global__ void __launch_bounds__(kWalkThreads, 1)
    verify_shard_lists_kernel(const __grid_constant__ VerifyChainParams rows,
                              const __grid_constant__ VerifyShardParams p) {
  const RowCluster cluster;
  const ChainWorkspace chunks(rows.workspace, rows.batch, rows.drafts, rows.vocab, p.dense());
  const int64_t index = blockIdx.x / cluster.size;
  const int64_t b = index / (p.drafts + 1);
  const int i = static_cast<int>(index - b * (p.drafts + 1));
  const ChainRequest r(rows, b);
  previous_launch_done();
  if (i >= r.rows || !r.filters().any(p.vocab)) return;
  const float top = __ldcg(&p.partial(0, b, i).top);
  if (row_faults(top) != 0) return;
  const RowStats stats{1, top, 0, 0, 0};
  const RowLaw law(stats, r.temperature);
  const RowSource<void> source(r.target_row(i), r.edits(i), static_cast<int>(rows.vocab));
  FilterParams likeliest;
  likeliest.top_k = p.listed;
  CutFinder<RowSource<void>> finder(cluster, source, chunks.row(b, i),
                                    static_cast<int>(chunks.row_chunks), stats, law, likeliest);
  const int count = finder.find(true).cut_id;
  if (cluster.rank != 0) return;
  for (int n = threadIdx.x; n < count; n += kWalkThreads) {
    const int32_t local = finder.listed(n);
    p.list(0, b, i)[n] = token_word(source.at(local), p.vocab_start + local);
  }
}

}  // namespace

int verify_shard_rows_cuda(const VerifyShardParams& p, void* stream) {
  if (p.shard_vocab < 1 || p.shard_vocab > kMaxVocab || p.listed > kListed) return kBadArgument;
  if (p.batch == 0) return kOk;
  const VerifyChainParams rows = rows_of_shard(p);
  if (const int status = launch_rows(rows, stream); status != kOk) return status;
  const int64_t blocks = ceil_div<int64_t>(p.batch * p.rows_per_request(), kWarps);
  const int status =
      launch_behind(verify_shard_rows_kernel, rows, blocks, false, kWarps * kWarpSize, stream, p);
  if (status != kOk || p.listed == 0) return status;
  return launch_behind(verify_shard_lists_kernel, rows, p.batch * (p.drafts + 1), true,
                       kWalkThreads, stream, p);
}

}  // namespace domino
