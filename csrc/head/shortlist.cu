#include <algorithm>

#include "head/shortlist.cuh"

namespace domino {

namespace {

template <class Base, bool kPacked, int kThreads, int kBlocks, int kCount, bool kTileMax>
int launch_row(const ShortlistParams& p, bool aligned, int64_t cluster, int64_t keys,
               cudaStream_t stream) {
  const auto kernel = shortlist_row<Base, kPacked, kThreads, kBlocks, kCount, kTileMax>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(keys));
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error != cudaSuccess) return error;
  LaunchShape shape{dim3(p.batch * p.pools * cluster), kThreads};
  shape.shared = keys;
  shape.cluster = static_cast<int>(cluster);
  shape.overlap = p.overlap;
  launch_kernel(shape, stream, kernel, p, aligned);
  return launched();
}

template <class Base, bool kPacked, bool kTileMax>
int launch(const ShortlistParams& p, bool aligned, int processors, int major, cudaStream_t stream) {
  using Key = typename Eight<Base, kPacked>::Key;
  constexpr int64_t kMostKeys = 86 << 10;  // bytes of a block, two of which share a processor
  constexpr int kWide = sizeof(Base) / 2;
  const int64_t rows = p.batch * p.pools, tiles = ceil_div<int64_t>(p.vocab, kPoolTile);
  if (major >= 9 && !p.portable) {
    // As many blocks a row as the chip holds, but so many that their keys fit. One block a
    // processor while that is enough, two from there on: one selects while the other reads.
    int64_t cluster = kMaxCluster;
    const auto keys = [&] { return ceil_div(tiles, cluster) * kPoolTile * int64_t{sizeof(Key)}; };
    while (cluster > 1 && rows * cluster > 2 * processors) cluster /= 2;
    while (cluster < kMaxCluster && keys() > kMostKeys) cluster *= 2;
    if (keys() <= kMostKeys && rows * cluster <= processors)
      return launch_row<Base, kPacked, 640, 1, 16 / kWide, kTileMax>(p, aligned, cluster, keys(),
                                                                     stream);
    if (keys() <= kMostKeys)
      return launch_row<Base, kPacked, 512, 2, (kPacked ? 8 : 4) / kWide, kTileMax>(
          p, aligned, cluster, keys(), stream);
  }
  if (p.winners && p.prefix > 0) {
    const cudaError_t error = cudaMemset2DAsync(p.winners, p.winners_stride * sizeof(uint64_t), 0,
                                                p.prefix * sizeof(uint64_t), p.batch, stream);
    if (error != cudaSuccess) return error;
  }
  const int64_t slices = std::clamp<int64_t>(processors / rows, 1, ceil_div<int64_t>(tiles, 2));
  const dim3 grid(slices, std::min<int64_t>(rows, 65535));
  shortlist_keys<Base, kPacked, kTileMax><<<grid, kKeysThreads, 0, stream>>>(p, aligned);
  shortlist_select<Eight<Base, kPacked>><<<rows, kSelectThreads, 0, stream>>>(p);
  return launched();
}

}  // namespace

int shortlist_cuda(const ShortlistParams& p, void* stream) {
  if (p.batch * p.pools == 0 || p.size == 0) return kOk;
  if (p.prefix > kMaxWinners && p.winners) return kBadArgument;
  int index = 0, processors = 0, major = 0;
  cudaError_t error = cudaGetDevice(&index);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, index);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
  if (error != cudaSuccess) return error;
  return dispatch_dtype(p.dtype, [&](auto tag) {
    using Base = decltype(tag);
    const bool aligned = is_aligned(p.base_logits, 16) &&
                         p.base_batch_stride * sizeof(Base) % 16 == 0 &&
                         p.base_slot_stride * sizeof(Base) % 16 == 0;
    const auto run = [&](auto packed) {
      constexpr bool kPacked = decltype(packed)::value;
      const auto go = p.tile_max ? launch<Base, kPacked, true> : launch<Base, kPacked, false>;
      return go(p, aligned, processors, major, as_stream(stream));
    };
    if constexpr (!std::is_same_v<Base, float>) {
      if (!p.bias) return run(std::true_type{});
    }
    return run(std::false_type{});
  });
}

}  // namespace domino
