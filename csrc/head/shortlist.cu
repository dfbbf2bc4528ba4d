#include <algorithm>

#include "head/shortlist.cuh"

namespace domino {

namespace {

constexpr int64_t kMostKeys = 80 << 10;  // bytes of a block, two of which share a processor

template <class Base, bool kPacked, bool kTileMax>
int launch(const ShortlistParams& p, bool aligned, int processors, int major, cudaStream_t stream) {
  using Values = Eight<Base, kPacked>;
  const int64_t rows = p.batch * p.pools, tiles = ceil_div<int64_t>(p.vocab, kPoolTile);
  const bool portable = major < 9 || p.portable;

  const auto keys = p.pools == 1 ? shortlist_keys<Base, kPacked, 32 / sizeof(Base), kTileMax>
                                 : shortlist_keys<Base, kPacked, 1, kTileMax>;
  LaunchShape shape{dim3(ceil_div<int64_t>(p.vocab, kKeysIds), std::min<int64_t>(rows, 65535)),
                    kKeysThreads};
  shape.overlap = p.overlap && !portable;
  launch_kernel(shape, stream, keys, p, aligned);

  // As many blocks a row as the chip holds, and so many that their keys fit.
  int64_t cluster = portable ? 1 : kMaxCluster;
  const auto bytes = [&] {
    return ceil_div(tiles, cluster) * kPoolTile * int64_t{sizeof(typename Values::Key)};
  };
  while (cluster > 1 && rows * cluster > 2 * processors) cluster /= 2;
  while (!portable && cluster < kMaxCluster && bytes() > kMostKeys) cluster *= 2;
  const bool in_memory = bytes() <= kMostKeys;
  const auto select = shortlist_select<Values>;
  cudaError_t error = cudaFuncSetAttribute(select, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(kMostKeys));
  if (error == cudaSuccess && cluster > 8)
    error = cudaFuncSetAttribute(select, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error != cudaSuccess) return error;
  shape = {dim3(rows * cluster), kSelectThreads};
  shape.shared = in_memory ? bytes() : 0;
  shape.cluster = static_cast<int>(cluster);
  shape.overlap = !portable;
  launch_kernel(shape, stream, select, p, in_memory);
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
