#include <algorithm>

#include "verify/few_rows.cuh"
#include "verify/verify_nucleus.cuh"

namespace domino {

bool launch_nucleus_dense(const DeviceInfo& device, const VerifyChainParams& p, void* stream,
                          int* status) {
  return with_row_blocks(p, [&](auto row) {
    using Row = decltype(row);
    return launch_few_rows<Row>(verify_nucleus_kernel<true, Row::kBlocks>,
                                std::max(sizeof(NucleusShared<Row>), sizeof(ListedBlock)), device,
                                p, stream, status, true);
  });
}

}  // namespace domino
