#include <algorithm>

#include "verify/few_rows.cuh"
#include "verify/verify_nucleus.cuh"

namespace domino {

bool launch_nucleus(const DeviceInfo& device, const VerifyChainParams& p, void* stream,
                    int* status) {
  if (p.top_k != nullptr || p.top_p == nullptr) return false;
  const auto kernel =
      draws_every_row(p) ? verify_nucleus_kernel<true> : verify_nucleus_kernel<false>;
  return launch_few_rows(kernel, std::max(sizeof(NucleusShared), sizeof(ListedBlock)), device, p,
                         stream, status);
}

}  // namespace domino
