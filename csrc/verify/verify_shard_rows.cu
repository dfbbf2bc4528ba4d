// First launches of a sharded verify_chain: the shard's rows in chunks (row_chunks.cuh), then a
// warp puts the chunks of a row together. Bytes: the shard's part of every row once; bound by HBM.
#include "verify/verify_launch.cuh"
#include "verify/verify_shard.h"

namespace domino {

namespace {

constexpr int kWarps = 4;

// rows: of the shard alone
__global__ void __launch_bounds__(kWarps* kWarpSize)
    verify_shard_rows_kernel(const __grid_constant__ VerifyChainParams rows, RowPartial* partials,
                             int64_t vocab_start) {
  const ChainWorkspace chunks(rows.workspace, rows.batch, rows.drafts, rows.vocab, false);
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  previous_launch_done();
  if (index >= rows.batch * (rows.drafts + 1)) return;
  const int64_t b = index / (rows.drafts + 1);
  const int i = static_cast<int>(index - b * (rows.drafts + 1));
  const ChainRequest r(rows, b);
  RowPartial out = no_partial();
  if (i < r.rows) {
    const ChunkStats* from = chunks.row(b, i);
    uint32_t lane_key;
    const RowStats stats = combine_chunks(from, chunks.first + (from - chunks.chunks),
                                          static_cast<int>(chunks.row_chunks),
                                          law_scale(r.temperature), true, &lane_key, &out.sums);
    out.top = stats.top;
    out.argmax = static_cast<int32_t>(stats.argmax + vocab_start);
    out.chosen = ShardRow(r, i).draft_logit(r, i);
  }
  if (threadIdx.x % kWarpSize == 0) partials[index] = out;
}

}  // namespace

int verify_shard_rows_cuda(const VerifyShardParams& p, void* stream) {
  if (p.shard_vocab < 1 || p.shard_vocab > kMaxVocab) return kBadArgument;
  if (p.batch == 0) return kOk;
  const VerifyChainParams rows = rows_of_shard(p);
  if (const int status = launch_rows(rows, stream); status != kOk) return status;
  const int64_t blocks = ceil_div<int64_t>(p.batch * (p.drafts + 1), kWarps);
  return launch_behind(verify_shard_rows_kernel, rows, blocks, false, kWarps * kWarpSize, stream,
                       p.partials, p.vocab_start);
}

}  // namespace domino
