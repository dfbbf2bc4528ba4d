#include <algorithm>

#include "verify/tree_extra.cuh"
#include "verify/tree_plain.cuh"

namespace domino {

namespace {

int launch_rows(const VerifyTreeParams& p, bool of_target, bool argmax_only,
                const DeviceInfo& device, cudaStream_t stream) {
  const int64_t chunks = p.width * ceil_div<int64_t>(p.vocab, kChunk);
  const int64_t resident = device.processors * kTreeRowBlocks;
  return dispatch_dtype(of_target ? p.target_dtype : p.draft_dtype, [&](auto tag) {
    using T = decltype(tag);
    constexpr bool kMayBeWide = sizeof(T) == 2;  // a chunk of fp32 has twice the registers
    // what the last launch prepares for pools waits for the issue slots that more warps take
    const bool wide = kMayBeWide && p.batch == 1 && p.pool == 0;
    const int warps = wide ? kTreeRowWarps<true> : kTreeRowWarps<false>;
    const int64_t blocks =
        std::clamp<int64_t>(resident / p.batch, 1, ceil_div<int64_t>(chunks, warps));
    if (p.batch * blocks > INT32_MAX || chunks > INT32_MAX / 2)
      return static_cast<int>(kBadArgument);
    const auto kernel =
        wide ? (argmax_only ? tree_rows_kernel<T, true, kMayBeWide>
                            : tree_rows_kernel<T, false, kMayBeWide>)
             : (argmax_only ? tree_rows_kernel<T, true, false> : tree_rows_kernel<T, false, false>);
    // so that an SM need not change its split before it takes a block of the last launch
    if (const int status = set_attribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                         cudaSharedmemCarveoutMaxShared);
        status != kOk)
      return status;
    const LaunchShape shape{dim3(static_cast<unsigned>(p.batch * blocks)), warps * kWarpSize};
    launch_kernel(shape, stream, kernel, p, static_cast<int>(blocks), of_target);
    return launched();
  });
}

// A launch of clusters that may start while the one in front runs, unless it is the call's first:
// what it reads early may be what other kernels have just written.
template <class Kernel>
int launch_clusters(Kernel kernel, const VerifyTreeParams& p, int64_t groups, int threads,
                    int64_t shared, const DeviceInfo& device, cudaStream_t stream) {
  // as many blocks to a group as keep the device busy; more than 8 is for the data centre parts
  // alone, and only a few such clusters fit at a time
  const int64_t chunks = ceil_div<int64_t>(p.vocab, kChunk);
  const int most = device.major == 9 || device.major == 10 ? 16 : 8;
  const int wanted = groups <= 4 ? most : groups <= 16 ? 8 : groups <= 64 ? 4 : 2;
  int size = 1;
  if (device.major >= 9)
    while (size < wanted && size * threads / kWarpSize < chunks) size *= 2;
  if (size > 8) {
    const int status = set_attribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (status != kOk) return status;
  }
  if (shared > 0)
    if (const int status = allow_shared_memory(kernel, shared); status != kOk) return status;
  if (groups * size > INT32_MAX) return kBadArgument;
  LaunchShape shape{dim3(static_cast<unsigned>(groups * size)), threads};
  shape.shared = shared;
  shape.cluster = size;
  shape.overlap = device.major >= 9 && p.width > 1;
  launch_kernel(shape, stream, kernel, p);
  return launched();
}

template <class T, bool kGeneral>
int launch_finish(const VerifyTreeParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const auto kernel = tree_finish_kernel<T, kGeneral>;
  const int64_t chunks = kGeneral || device.major < 9 ? 0 : ceil_div<int64_t>(p.vocab, kChunk);
  const int64_t more = chunks > TreeFinishShared::kLawChunks ? chunks * sizeof(ChunkStats) : 0;
  return launch_clusters(kernel, p, p.batch, kGeneral ? kWalkThreads : kFinishThreads,
                         sizeof(TreeFinishShared) + more, device, stream);
}

template <class T, bool kArgmaxOnly>
int launch_plain(const VerifyTreeParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return launch_clusters(tree_plain_kernel<T, kArgmaxOnly>, p, p.batch, kPlainThreads,
                         plain_shared_bytes(p.width, p.vocab, device.major), device, stream);
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
  const bool argmax_only = p.temperature == nullptr && p.chosen_logprob == nullptr;
  const bool dense = p.draft_logits != nullptr, match = p.rule == TreeRule::kMatch;
  const bool may_draft = p.rule == TreeRule::kSiblings || p.rule == TreeRule::kTraversal;
  const bool plain =
      argmax_only || (!p.has_filters() && !match && (p.temperature == nullptr || !may_draft));
  const bool general = !plain && (p.has_filters() || dense || match);
  if (p.width > 1) {
    if (const int status = launch_rows(p, true, argmax_only, device, stream); status != kOk)
      return status;
    if (dense)
      if (const int status = launch_rows(p, false, false, device, stream); status != kOk)
        return status;
  }
  return dispatch_dtype(p.target_dtype, [&](auto tag) {
    using T = decltype(tag);
    if (argmax_only) return launch_plain<T, true>(p, device, stream);
    if (plain) return launch_plain<T, false>(p, device, stream);
    if (!general) return launch_finish<T, false>(p, device, stream);
    if (p.width > 1 && (p.has_filters() || match)) {
      const int status = launch_clusters(tree_node_kernel<T>, p, p.batch * p.width, kWalkThreads, 0,
                                         device, stream);
      if (status != kOk) return status;
    }
    return launch_finish<T, true>(p, device, stream);
  });
}

}  // namespace domino
