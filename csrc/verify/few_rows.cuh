// How the kernels of a few rows (verify_ranked.cuh, verify_nucleus.cuh, verify_nucleus_draws.cuh,
// verify_plain.cuh) are launched: a cluster to each row, all of them at once.
#pragma once

#include "verify/ranked_tokens.cuh"
#include "verify/verify_launch.cuh"

namespace domino {

constexpr int64_t kMostFewRows = 16;  // clusters that have processors of their own
static_assert(kMostFewRows <= kWarpSize && kMostFewRows <= kGreedyWords);

// Has the current device room for a cluster of six whole processors? A part of one may have none
// (MIG, MPS). A thread asks the runtime once for as long as it stays with one kernel and
// device.
template <class Kernel>
bool has_room(Kernel kernel, size_t bytes) {
  thread_local int known = -1;
  thread_local Kernel asked = nullptr;
  thread_local bool room = false;
  int index = 0;
  if (cudaGetDevice(&index) != cudaSuccess) return false;
  if (index == known && kernel == asked) return room;
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {kRankedBlocks, 1, 1};
  config.gridDim = dim3(kRankedBlocks);
  config.blockDim = dim3(kCutThreads);
  config.dynamicSmemBytes = bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  const cudaError_t status = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
  known = index;
  asked = kernel;
  room = status == cudaSuccess && clusters > 0;
  if (status != cudaSuccess) cudaGetLastError();  // not one of this call
  return room;
}

// dense: the kernel takes rows of q, aligned ones. False where the call has other rows than few,
// aligned ones that the threads of a cluster can keep; otherwise it has been launched, with this
// status.
template <class Kernel>
bool launch_few_rows(Kernel kernel, size_t bytes, const DeviceInfo& device,
                     const VerifyChainParams& p, void* stream, int* status, bool dense = false) {
  const int64_t rows = p.batch * (p.drafts + 1);
  const bool by_block = p.rule == VerifyRule::kBlock && p.draft_logits != nullptr;
  if (p.chosen_logprob != nullptr || by_block || (is_dense(p) && !dense)) return false;
  if (device.major < 9 || rows > kMostFewRows || rows * kRankedBlocks > device.processors)
    return false;
  if (p.vocab < 1 << 15 || p.vocab > kRankedSteps * kRankedReaders * kGroupStep) return false;
  if (p.vocab % kGroup != 0 || p.target_row_stride % kGroup != 0 ||
      p.target_batch_stride % kGroup != 0 || !is_aligned(p.target_logits, 16))
    return false;
  *status = allow_shared_memory(kernel, bytes);
  if (*status != kOk) return true;
  if (!has_room(kernel, bytes)) return false;
  LaunchShape shape{
      dim3(kRankedBlocks, static_cast<unsigned>(p.drafts) + 1, static_cast<unsigned>(p.batch)),
      kCutThreads, bytes};
  shape.cluster = kRankedBlocks;
  launch_kernel(shape, as_stream(stream), kernel, p);
  *status = launched();
  return true;
}

}  // namespace domino
