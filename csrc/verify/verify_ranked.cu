#include <algorithm>

#include "verify/few_rows.cuh"
#include "verify/verify_ranked.cuh"

namespace domino {

bool launch_ranked(const DeviceInfo& device, const VerifyChainParams& p, void* stream,
                   int* status) {
  if (p.top_k == nullptr) return false;
  return with_row_blocks(p, [&](auto row) {
    using Row = decltype(row);
    const auto kernel = draws_every_row(p) ? verify_ranked_kernel<true, Row::kBlocks>
                                           : verify_ranked_kernel<false, Row::kBlocks>;
    return launch_few_rows<Row>(kernel, std::max(sizeof(RankedShared<Row>), sizeof(ListedBlock)),
                                device, p, stream, status);
  });
}

}  // namespace domino
