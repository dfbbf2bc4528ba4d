// What is left to do of a row that the kernels of a few rows (verify_ranked.cuh,
// verify_nucleus.cuh) do not settle their own way: the cut by value, and the race over the row.
#pragma once

#include "verify/row_words.cuh"
#include "verify/settle_row.cuh"
#include "verify/verify_listed.cuh"

namespace domino {

// All threads of the cluster call it. words: of the request
template <bool kByPosition>
static __device__ __noinline__ void end_by_value(const VerifyChainParams& p, RowCluster cluster,
                                                 int64_t b, int i, unsigned long long* words,
                                                 ListedBlock& block) {
  cluster.sync();  // nobody needs any more what was there before
  listed_row<kByPosition, false>(p, cluster, b, i, block);
  cluster.sync();
  const ChainRequest r(p, b);
  const ChainWorkspace chunks(p.workspace, p.batch, p.drafts, p.vocab, false);
  SlotVerdict slot;
  const uint4* from =
      reinterpret_cast<const uint4*>(slot_verdicts(chunks) + b * (p.drafts + 1) + i);
#pragma unroll
  for (size_t n = 0; n < sizeof(slot) / sizeof(uint4); ++n)
    reinterpret_cast<uint4*>(&slot)[n] = __ldcg(from + n);
  const SettledRow row = settle_row<kByPosition>(cluster, r, i, slot, r.noise());
  if (cluster.rank != cluster.size - 1) return;
  if (threadIdx.x == 0) store_word(words + i, row_word(row.stops, row.token, row.status));
  if (threadIdx.x < kWarpSize && i == r.rows - 1) walk_words(r, words);
}

}  // namespace domino
