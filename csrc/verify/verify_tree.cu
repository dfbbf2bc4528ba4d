#include <algorithm>

#include "verify/tree_extra.cuh"
#include "verify/tree_finish.cuh"

namespace domino {

namespace {

bool has_filters(const VerifyTreeParams& p) {
  return p.top_k != nullptr || p.top_p != nullptr || p.min_p != nullptr;
}

int launch_rows(const VerifyTreeParams& p, bool of_target, const DeviceInfo& device,
                cudaStream_t stream) {
  const int64_t rows = p.batch * p.width, row_chunks = ceil_div<int64_t>(p.vocab, kChunk);
  // blocks to a row: all of a small batch at once, a few of a large one, so that verdicts come
  // early
  const int64_t resident = device.processors * kTreeRowBlocks;
  const int64_t wanted = std::clamp<int64_t>(resident / rows, 3, std::max<int64_t>(row_chunks, 3));
  const int steps = static_cast<int>(ceil_div<int64_t>(row_chunks, wanted * kTreeRowWarps));
  const int64_t row_blocks = ceil_div<int64_t>(row_chunks, steps * kTreeRowWarps);
  if (rows * row_blocks > INT32_MAX || row_blocks > 0xffff) return kBadArgument;
  const int prune_from = static_cast<int>(resident);
  return dispatch_dtype(of_target ? p.target_dtype : p.draft_dtype, [&](auto tag) {
    tree_rows_kernel<decltype(tag)>
        <<<static_cast<unsigned>(rows * row_blocks), kTreeRowWarps * kWarpSize, 0, stream>>>(
            p, static_cast<int>(row_blocks), steps, prune_from, of_target);
    return launched();
  });
}

int launch_cuts(const VerifyTreeParams& p, const DeviceInfo& device, cudaStream_t stream) {
  int size = 1;
  const int64_t chunks = ceil_div<int64_t>(p.vocab, kChunk), nodes = p.batch * p.width;
  if (device.major >= 9)
    while (size < 8 && size < chunks) size *= 2;
  if (nodes * size > INT32_MAX) return kBadArgument;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(size), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(nodes * size));
  config.blockDim = dim3(kWalkThreads);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = device.major >= 9 ? 2 : 0;
  return dispatch_dtype(p.target_dtype, [&](auto tag) {
    cudaLaunchKernelEx(&config, tree_cut_kernel<decltype(tag)>, p);
    return launched();
  });
}

}  // namespace

int verify_tree_cuda(const VerifyTreeParams& p, void* raw_stream) {
  if (p.vocab < 1 || p.vocab > kMaxVocab || p.width < 1 || p.width > kMaxTreeNodes ||
      p.pool > kMaxPool)
    return kBadArgument;
  if (p.batch == 0) return kOk;
  const cudaStream_t stream = as_stream(raw_stream);
  DeviceInfo device;
  if (const int status = current_device(&device); status != kOk) return status;
  const bool overlap = device.major >= 9;
  if (const int status = launch_rows(p, true, device, stream); status != kOk) return status;
  if (has_filters(p)) {
    if (const int status = launch_cuts(p, device, stream); status != kOk) return status;
    if (p.draft_logits == nullptr) {
      launch_kernel(overlap, static_cast<unsigned>(p.batch * p.width), kTreeRowWarps * kWarpSize,
                    stream, tree_judge_kernel, p);
      if (const int status = launched(); status != kOk) return status;
    }
  }
  if (p.draft_logits != nullptr) {
    if (const int status = launch_rows(p, false, device, stream); status != kOk) return status;
    launch_kernel(overlap, static_cast<unsigned>(p.batch), kDenseThreads, stream, tree_dense_kernel,
                  p);
    if (const int status = launched(); status != kOk) return status;
  }
  const int64_t splits = share_count(p.vocab);
  if (p.batch * splits > INT32_MAX) return kBadArgument;
  launch_kernel(overlap, static_cast<unsigned>(p.batch * splits), kFinishThreads, stream,
                tree_finish_kernel, p, static_cast<int>(splits));
  return launched();
}

}  // namespace domino
