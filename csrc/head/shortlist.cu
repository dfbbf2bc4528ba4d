#include <algorithm>

#include "head/shortlist.cuh"

namespace domino {

namespace {

constexpr int64_t kMostKeys = 80 << 10;  // bytes of a block, two of which share a processor

template <class Base, bool kPacked>
int launch(const ShortlistParams& p, bool aligned, const DeviceInfo& device, cudaStream_t stream) {
  using Values = EightLogits<Base, kPacked>;
  const int64_t rows = p.batch * p.pools, tiles = ceil_div<int64_t>(p.vocab, kKeyTile);
  const bool portable = device.major < 9 || p.portable;

  const auto keys = p.pools == 1 ? shortlist_keys < Base, kPacked,
             kPacked ? 16 : 8 >  : shortlist_keys<Base, kPacked, 1>;
  LaunchShape shape{dim3(ceil_div<int64_t>(p.vocab, kKeysIds), std::min<int64_t>(rows, 65535)),
                    kKeysThreads};
  launch_kernel(shape, stream, keys, p, aligned);

  // As many blocks a row as the chip holds, and so many that their keys fit.
  int64_t cluster = portable ? 1 : kMaxCluster;
  const auto bytes = [&] {
    return ceil_div(tiles, cluster) * kKeyTile * int64_t{sizeof(typename Values::Key)};
  };
  while (cluster > 1 && rows * cluster > 2 * device.processors) cluster /= 2;
  while (!portable && cluster < kMaxCluster && bytes() > kMostKeys) cluster *= 2;
  const bool in_memory = bytes() <= kMostKeys;
  const auto select = shortlist_select<Values>;
  int status = allow_shared_memory(select, kMostKeys);
  if (status == kOk && cluster > 8)
    status = set_attribute(select, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (status != kOk) return status;
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
  DeviceInfo device;
  if (const int status = current_device(&device); status != kOk) return status;
  return dispatch_dtype(p.dtype, [&](auto tag) {
    using Base = decltype(tag);
    const bool aligned = is_aligned(p.base_logits, 16) &&
                         p.base_batch_stride * sizeof(Base) % 16 == 0 &&
                         p.base_slot_stride * sizeof(Base) % 16 == 0;
    const auto run = [&](auto packed) {
      constexpr bool kPacked = decltype(packed)::value;
      return launch<Base, kPacked>(p, aligned, device, as_stream(stream));
    };
    if constexpr (!std::is_same_v<Base, float>) {
      if (!p.bias) return run(std::true_type{});
    }
    return run(std::false_type{});
  });
}

}  // namespace domino
