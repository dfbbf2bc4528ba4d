#include <algorithm>

#include "verify/few_rows.cuh"
#include "verify/verify_plain.cuh"

namespace domino {

bool launch_plain_dense(const DeviceInfo& device, const VerifyChainParams& p, void* stream,
                        int* status) {
  return with_row_blocks(p, [&](auto row) {
    using Row = decltype(row);
    return launch_few_rows<Row>(verify_plain_kernel<true, Row::kBlocks>,
                                std::max(sizeof(PlainBlock<Row>), sizeof(ListedBlock)), device, p,
                                stream, status, true);
  });
}

}  // namespace domino
