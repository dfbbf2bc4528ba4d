#include "verify/row_stats.h"
#include "verify/verify_launch.cuh"
#include "verify/verify_walk.cuh"

namespace domino {

namespace {

constexpr int kWarps = 4;

// A warp puts the chunks of a row together.
__global__ void __launch_bounds__(kWarps* kWarpSize)
    row_stats_kernel(const __grid_constant__ VerifyChainParams rows,
                     const __grid_constant__ RowStatsParams p) {
  const ChainWorkspace chunks(rows.workspace, p.rows, 0, p.vocab, false);
  const WalkWorkspace work(chunks, p.rows, 0);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  previous_launch_done();
  if (row >= p.rows) return;
  const float temperature = p.temperature != nullptr ? p.temperature[row] : 1.0f;
  const int64_t local = p.tokens != nullptr ? p.tokens[row] - p.vocab_start : -1;
  const ChunkStats* from = chunks.row(row, 0);
  uint32_t lane_key;
  DigitSums sums;
  RowStats stats = unread_row();
  if (is_temperature(temperature))
    stats = combine_chunks(from, chunks.first + (from - chunks.chunks),
                           static_cast<int>(chunks.row_chunks), law_scale(temperature), true,
                           &lane_key, &sums);
  if (threadIdx.x % kWarpSize != 0) return;
  RowPartial out{stats.top, static_cast<int32_t>(stats.argmax + p.vocab_start), sums, -INFINITY, 0};
  if (local >= 0 && local < p.vocab)
    out.chosen = LogitRow{p.logits, p.dtype}.plus(row * p.row_stride).at(local);
  p.partials[row] = out;
  write_row_stats(p, row);
  JudgedRow judged{};
  judged.target = stats;
  judged.outcome = stats.faults != 0 ? Outcome::kFail : Outcome::kAccept;
  if (p.top_logprobs != 0) work.rows[row] = judged;
}

// A thread joins the parts of a row.
__global__ void combine_row_stats_kernel(const __grid_constant__ RowStatsParams p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row < p.rows) write_row_stats(p, row);
}

}  // namespace

int row_stats_cuda(const RowStatsParams& p, void* stream) {
  if (p.vocab < 1 || p.vocab > kMaxVocab || p.parts != 1) return kBadArgument;
  if (p.rows == 0) return kOk;
  VerifyChainParams rows{};
  rows.batch = p.rows;
  rows.vocab = p.vocab;
  rows.workspace = p.workspace;
  rows.target_logits = p.logits;
  rows.target_batch_stride = rows.target_row_stride = p.row_stride;
  rows.target_dtype = p.dtype;
  rows.temperature = p.temperature;
  rows.rule = VerifyRule::kToken;
  rows.all_stats = true;
  rows.top_ids = p.top_ids;
  rows.top_logprob = p.top_logprob;
  rows.top_logprobs = p.top_logprobs;
  if (const int status = launch_rows(rows, stream); status != kOk) return status;
  const int64_t blocks = ceil_div<int64_t>(p.rows, kWarps);
  if (const int status =
          launch_behind(row_stats_kernel, rows, blocks, false, kWarps * kWarpSize, stream, p);
      status != kOk)
    return status;
  if (p.top_logprobs == 0) return kOk;
  return launch_row_head(rows, stream);
}

int combine_row_stats_cuda(const RowStatsParams& p, void* stream) {
  if (p.rows == 0) return kOk;
  constexpr int kThreads = 128;
  const int64_t blocks = ceil_div<int64_t>(p.rows, kThreads);
  if (blocks > INT32_MAX) return kBadArgument;
  combine_row_stats_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, as_stream(stream)>>>(p);
  return launched();
}

}  // namespace domino
