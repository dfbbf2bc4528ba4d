// What is left to do of a row that the kernels of a few rows (few_rows.cuh) do not settle their own
// way: the cut by value, and the race over the row.
#pragma once

#include "verify/row_words.cuh"
#include "verify/settle_row.cuh"
#include "verify/verify_listed.cuh"

namespace domino {

// All threads of the cluster call it and get the same.
template <bool kByPosition, bool kDense = false>
__device__ __forceinline__ SettledRow settle_by_value(const VerifyChainParams& p,
                                                      const RowCluster& cluster, int64_t b, int i,
                                                      ListedBlock& block) {
  cluster.sync();  // nobody needs any more what was there before
  listed_row<kByPosition, false, kDense>(p, cluster, b, i, block);
  cluster.sync();
  const ChainRequest r(p, b);
  const ChainWorkspace chunks(p.workspace, p.batch, p.drafts, p.vocab, kDense);
  SlotVerdict slot;
  const uint4* from =
      reinterpret_cast<const uint4*>(slot_verdicts(chunks) + b * (p.drafts + 1) + i);
#pragma unroll
  for (size_t n = 0; n < sizeof(slot) / sizeof(uint4); ++n)
    reinterpret_cast<uint4*>(&slot)[n] = __ldcg(from + n);
  return settle_row<kByPosition>(cluster, r, i, slot, r.noise());
}

// The same, and the walk. words: of the request
template <bool kByPosition, bool kDense = false>
static __device__ __noinline__ void end_by_value(const VerifyChainParams& p, RowCluster cluster,
                                                 int64_t b, int i, unsigned long long* words,
                                                 ListedBlock& block) {
  const SettledRow row = settle_by_value<kByPosition, kDense>(p, cluster, b, i, block);
  const ChainRequest r(p, b);
  if (cluster.rank != cluster.size - 1) return;
  if (threadIdx.x == 0) store_word(words + i, row_word(row.stops, row.token, row.status));
  if (threadIdx.x < kWarpSize && i == r.rows - 1) walk_words(r, words);
}

}  // namespace domino
