#include <algorithm>

#include "verify/few_rows.cuh"
#include "verify/verify_ranked.cuh"

namespace domino {

bool launch_ranked(const DeviceInfo& device, const VerifyChainParams& p, void* stream,
                   int* status) {
  if (p.top_k == nullptr || p.batch * (p.drafts + 1) > kMostRankedRows) return false;
  const auto kernel = draws_every_row(p) ? verify_ranked_kernel<true> : verify_ranked_kernel<false>;
  return launch_few_rows<RowBlocks<kRankedBlocks>>(
      kernel, std::max(sizeof(RankedShared), sizeof(ListedBlock)), device, p, stream, status);
}

}  // namespace domino
