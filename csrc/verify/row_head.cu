// The likeliest tokens of every emitted token's row: top_ids and top_logprob of verify_chain.
#include "verify/verify_launch.cuh"
#include "verify/verify_walk.cuh"

namespace domino {

namespace {

// Grid: a cluster for each row of each request, behind the walk.
__global__ void __launch_bounds__(kWalkThreads, 1)
    row_head_kernel(const __grid_constant__ VerifyChainParams p) {
  const RowCluster cluster;
  const int64_t index = blockIdx.x / cluster.size;
  const int64_t b = index / (p.drafts + 1);
  const int i = static_cast<int>(index - b * (p.drafts + 1));
  const ChainRequest r(p, b);
  const ChainWorkspace chunks(p.workspace, p.batch, p.drafts, p.vocab, is_dense(p));
  const WalkWorkspace work(chunks, p.batch, p.drafts);
  previous_launch_done();
  int32_t* ids = p.top_ids + index * p.top_logprobs;
  float* logprobs = p.top_logprob + index * p.top_logprobs;
  int count = 0;
  const JudgedRow row = load_row(work.rows + index);
  // row_stats asks for all rows that can be used
  if (p.num_emitted == nullptr ? row.outcome != Outcome::kFail : i < __ldcg(p.num_emitted + b)) {
    const RowSource<void> source(r.target_row(i), r.edits(i), static_cast<int>(p.vocab));
    const RowLaw law(row.target, r.temperature);
    FilterParams likeliest;
    likeliest.top_k = p.top_logprobs;
    CutFinder<RowSource<void>> finder(cluster, source, chunks.row(b, i),
                                      static_cast<int>(chunks.row_chunks), row.target, law,
                                      likeliest);
    count = finder.find(true).cut_id;
    if (cluster.rank != 0) return;
    for (int n = threadIdx.x; n < count; n += kWalkThreads) {
      ids[n] = finder.listed(n);
      logprobs[n] = law.log_probability(source.at(ids[n]));
    }
  }
  if (cluster.rank != 0) return;
  for (int64_t n = count + threadIdx.x; n < p.top_logprobs; n += kWalkThreads) {
    ids[n] = -1;
    logprobs[n] = 0.0f;
  }
}

}  // namespace

int launch_row_head(const VerifyChainParams& p, void* stream) {
  return launch_behind(row_head_kernel, p, p.batch * (p.drafts + 1), true, kWalkThreads, stream);
}

}  // namespace domino
