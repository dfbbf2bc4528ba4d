#include <algorithm>

#include "verify/few_rows.cuh"
#include "verify/verify_nucleus.cuh"

namespace domino {

// verify_nucleus_draws.cu, verify_nucleus_dense.cu: the same for rules that draw every row's token,
// and with rows of q.
bool launch_nucleus_draws(const DeviceInfo& device, const VerifyChainParams& p, void* stream,
                          int* status);
bool launch_nucleus_dense(const DeviceInfo& device, const VerifyChainParams& p, void* stream,
                          int* status);

bool launch_nucleus(const DeviceInfo& device, const VerifyChainParams& p, void* stream,
                    int* status) {
  if (p.top_k != nullptr || p.top_p == nullptr) return false;
  if (draws_every_row(p)) return launch_nucleus_draws(device, p, stream, status);
  if (is_dense(p)) return launch_nucleus_dense(device, p, stream, status);
  return with_row_blocks(p, [&](auto row) {
    using Row = decltype(row);
    return launch_few_rows<Row>(verify_nucleus_kernel<false, Row::kBlocks>,
                                std::max(sizeof(NucleusShared<Row>), sizeof(ListedBlock)), device,
                                p, stream, status);
  });
}

}  // namespace domino
