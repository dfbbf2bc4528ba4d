#include <algorithm>

#include "verify/few_rows.cuh"
#include "verify/verify_nucleus.cuh"
#include "verify/verify_nucleus_draws.cuh"

namespace domino {

static_assert(kMostFewRows <= kMostTeamRows &&
              kMostFewRows * (kVerdictWords + kRankedBlocks) <= kGreedyWords);

bool launch_nucleus(const DeviceInfo& device, const VerifyChainParams& p, void* stream,
                    int* status) {
  if (p.top_k != nullptr || p.top_p == nullptr) return false;
  const bool draws = draws_every_row(p);
  const size_t bytes = draws ? sizeof(NucleusDrawsShared) : sizeof(NucleusShared);
  return launch_few_rows(draws ? verify_nucleus_draws_kernel : verify_nucleus_kernel,
                         std::max(bytes, sizeof(ListedBlock)), device, p, stream, status);
}

}  // namespace domino
