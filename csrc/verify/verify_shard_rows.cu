// First launches of a sharded verify_chain: the shard's rows in chunks (row_chunks.cuh), then a
// warp puts the chunks of a row together. Bytes: the shard's part of every row once; bound by HBM.
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
  if (threadIdx.x % kWarpSize == 0) p.partials[index] = out;
}

}  // namespace

int verify_shard_rows_cuda(const VerifyShardParams& p, void* stream) {
  if (p.shard_vocab < 1 || p.shard_vocab > kMaxVocab) return kBadArgument;
  if (p.batch == 0) return kOk;
  const VerifyChainParams rows = rows_of_shard(p);
  if (const int status = launch_rows(rows, stream); status != kOk) return status;
  const int64_t blocks = ceil_div<int64_t>(p.batch * p.rows_per_request(), kWarps);
  return launch_behind(verify_shard_rows_kernel, rows, blocks, false, kWarps * kWarpSize, stream,
                       p);
}

}  // namespace domino
