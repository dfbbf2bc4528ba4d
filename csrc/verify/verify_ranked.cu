#include <algorithm>

#include "verify/verify_launch.cuh"
#include "verify/verify_ranked.cuh"

namespace domino {

namespace {

constexpr int64_t kMostRankedRows = 16;  // clusters that have processors of their own
static_assert(kMostRankedRows <= kWarpSize && kMostRankedRows <= kGreedyWords);
constexpr size_t kRankedBytes = std::max(sizeof(RankedShared), sizeof(ListedBlock));

// Has the current device room for a cluster of six whole processors? A part of one may have none
// (MIG, MPS). A thread asks the runtime once for as long as it stays on one device.
template <class Kernel>
bool has_room(Kernel kernel) {
  thread_local int known = -1;
  thread_local bool room = false;
  int index = 0;
  if (cudaGetDevice(&index) != cudaSuccess) return false;
  if (index == known) return room;
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {kRankedBlocks, 1, 1};
  config.gridDim = dim3(kRankedBlocks);
  config.blockDim = dim3(kCutThreads);
  config.dynamicSmemBytes = kRankedBytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  const cudaError_t status = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
  known = index;
  room = status == cudaSuccess && clusters > 0;
  if (status != cudaSuccess) cudaGetLastError();  // not one of this call
  return room;
}

}  // namespace

bool launch_ranked(const DeviceInfo& device, const VerifyChainParams& p, void* stream,
                   int* status) {
  const int64_t rows = p.batch * (p.drafts + 1);
  const bool by_block = p.rule == VerifyRule::kBlock && p.draft_logits != nullptr;
  if (p.top_k == nullptr || p.chosen_logprob != nullptr || by_block || is_dense(p)) return false;
  // few enough for blocks that fill processors, and rows that their threads can keep
  if (device.major < 9 || rows > kMostRankedRows || rows * kRankedBlocks > device.processors)
    return false;
  if (p.vocab < 1 << 15 || p.vocab > kRankedSteps * kRankedReaders * kGroupStep) return false;
  if (p.vocab % kGroup != 0 || p.target_row_stride % kGroup != 0 ||
      p.target_batch_stride % kGroup != 0 || !is_aligned(p.target_logits, 16))
    return false;
  const auto kernel = draws_every_row(p) ? verify_ranked_kernel<true> : verify_ranked_kernel<false>;
  *status = allow_shared_memory(kernel, kRankedBytes);
  if (*status != kOk) return true;
  if (!has_room(kernel)) return false;
  LaunchShape shape{
      dim3(kRankedBlocks, static_cast<unsigned>(p.drafts) + 1, static_cast<unsigned>(p.batch)),
      kCutThreads, kRankedBytes};
  shape.cluster = kRankedBlocks;
  launch_kernel(shape, as_stream(stream), kernel, p);
  *status = launched();
  return true;
}

}  // namespace domino
