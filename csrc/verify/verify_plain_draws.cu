#include <algorithm>

#include "verify/few_rows.cuh"
#include "verify/verify_plain_draws.cuh"

namespace domino {

bool launch_plain_draws(const DeviceInfo& device, const VerifyChainParams& p, void* stream,
                        int* status) {
  return with_row_blocks(p, [&](auto row) {
    using Row = decltype(row);
    return launch_few_rows<Row>(verify_plain_draws_kernel<Row::kBlocks>,
                                std::max(sizeof(PlainDrawsShared), sizeof(ListedBlock)), device, p,
                                stream, status);
  });
}

}  // namespace domino
