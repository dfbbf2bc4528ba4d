#include <algorithm>

#include "verify/few_rows.cuh"
#include "verify/verify_nucleus_draws.cuh"

namespace domino {

bool launch_nucleus_draws(const DeviceInfo& device, const VerifyChainParams& p, void* stream,
                          int* status) {
  return with_row_blocks(p, [&](auto row) {
    using Row = decltype(row);
    return launch_few_rows<Row>(verify_nucleus_draws_kernel<Row::kBlocks>,
                                std::max(sizeof(NucleusDrawsShared), sizeof(ListedBlock)), device,
                                p, stream, status);
  });
}

}  // namespace domino
