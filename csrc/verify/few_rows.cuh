// How the kernels of a few rows (verify_ranked.cuh, verify_nucleus.cuh, verify_nucleus_draws.cuh,
// verify_plain.cuh, verify_plain_draws.cuh) are launched: a cluster to each row, all of them at
// once.
#pragma once

#include "verify/row_blocks.cuh"
#include "verify/verify_launch.cuh"

namespace domino {

// Clusters of `blocks` whole processors that the current device has room for at once: of a part of
// one (MIG, MPS) maybe none. A thread asks the runtime once for as long as it stays with one kernel
// and device.
template <class Kernel>
int most_clusters(Kernel kernel, int blocks, size_t bytes) {
  thread_local int known = -1;
  thread_local Kernel asked = nullptr;
  thread_local int clusters = 0;
  int index = 0;
  if (cudaGetDevice(&index) != cudaSuccess) return 0;
  if (index == known && kernel == asked) return clusters;
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kCutThreads);
  config.dynamicSmemBytes = bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int room = 0;
  const cudaError_t status = cudaOccupancyMaxActiveClusters(&room, kernel, &config);
  known = index;
  asked = kernel;
  clusters = status == cudaSuccess ? room : 0;
  if (status != cudaSuccess) cudaGetLastError();  // not one of this call
  return clusters;
}

// dense: the kernel takes rows of q. False where the call has other rows than few, aligned ones of
// bf16 that a cluster can take; otherwise it has been launched, with this status.
template <class Row, class Kernel>
bool launch_few_rows(Kernel kernel, size_t bytes, const DeviceInfo& device,
                     const VerifyChainParams& p, void* stream, int* status, bool dense = false) {
  const int64_t rows = p.batch * (p.drafts + 1);
  const bool by_block = p.rule == VerifyRule::kBlock && p.draft_logits != nullptr;
  if (p.chosen_logprob != nullptr || by_block || (is_dense(p) && !dense)) return false;
  if (device.major < 9 || p.drafts >= kMostTeamRows || rows * Row::kBlocks > device.processors)
    return false;
  if (p.vocab < 1 << 15 || p.vocab > Row::kMostVocab) return false;
  if (p.vocab % kGroup != 0 || p.target_row_stride % kGroup != 0 ||
      p.target_batch_stride % kGroup != 0 || !is_aligned(p.target_logits, 16))
    return false;
  if (dense && (p.draft_dtype != DType::kBF16 || p.draft_row_stride % kGroup != 0 ||
                p.draft_batch_stride % kGroup != 0 || !is_aligned(p.draft_logits, 16)))
    return false;
  *status = allow_shared_memory(kernel, bytes);
  if (*status != kOk) return true;
  if (most_clusters(kernel, Row::kBlocks, bytes) < rows) return false;
  LaunchShape shape{
      dim3(Row::kBlocks, static_cast<unsigned>(p.drafts) + 1, static_cast<unsigned>(p.batch)),
      kCutThreads, bytes};
  shape.cluster = Row::kBlocks;
  launch_kernel(shape, as_stream(stream), kernel, p);
  *status = launched();
  return true;
}

// launch(RowBlocks) with as many blocks a row as give all of them processors of their own on an
// H200, where clusters of eight come to 14 and of four to 30.
template <class Launch>
bool with_row_blocks(const VerifyChainParams& p, Launch launch) {
  const int64_t rows = p.batch * (p.drafts + 1);
  if (rows <= 16) return launch(RowBlocks<6>());
  if (rows <= 32) return launch(RowBlocks<3>());
  return rows <= 64 && launch(RowBlocks<2>());
}

}  // namespace domino
