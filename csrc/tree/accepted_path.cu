#include <algorithm>

#include "tree/accepted_path.cuh"

namespace domino {

namespace {

// The largest unit of 16, 8, .. bytes that divides all of these.
template <class Fn>
int with_unit(uint64_t bits, Fn fn) {
  if (bits % 16 == 0) return fn(uint4{});
  if (bits % 8 == 0) return fn(uint64_t{});
  if (bits % 4 == 0) return fn(uint32_t{});
  if (bits % 2 == 0) return fn(uint16_t{});
  return fn(uint8_t{});
}

}  // namespace

int compact_accepted_cuda(const CompactParams& p, void* stream) {
  if (p.path.batch == 0 || p.path.width == 0 || p.count == 0) return kOk;
  if (p.path.batch > 65535 || p.path.width > INT32_MAX) return kBadArgument;
  uint64_t bits = 0;
  for (int t = 0; t < p.count; ++t) {
    const CompactRows& rows = p.tensors[t];
    bits |= reinterpret_cast<uintptr_t>(rows.in) | reinterpret_cast<uintptr_t>(rows.out) |
            static_cast<uint64_t>(rows.bytes | rows.in_batch_stride | rows.in_node_stride);
  }
  const dim3 grid(static_cast<unsigned>(p.path.width), static_cast<unsigned>(p.path.batch),
                  static_cast<unsigned>(p.count));
  return with_unit(bits, [&](auto unit) {
    compact_kernel<decltype(unit)><<<grid, kCompactThreads, 0, as_stream(stream)>>>(p);
    return launched();
  });
}

int kv_move_cuda(const MoveParams& p, void* stream) {
  if (p.path.batch == 0 || p.count == 0 || p.heads * p.bytes == 0) return kOk;
  if (p.path.batch > 65535) return kBadArgument;
  uint64_t bits = static_cast<uint64_t>(p.bytes | p.batch_stride | p.slot_stride | p.head_stride);
  for (int t = 0; t < p.count; ++t) bits |= reinterpret_cast<uintptr_t>(p.caches[t]);
  return with_unit(bits, [&](auto unit) {
    const int64_t units = p.heads * p.bytes / static_cast<int64_t>(sizeof(unit));
    const int64_t blocks = ceil_div<int64_t>(units, kMoveThreads);
    if (blocks > INT32_MAX) return static_cast<int>(kBadArgument);
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(p.path.batch),
                    static_cast<unsigned>(p.count));
    const int threads = static_cast<int>(
        std::min<int64_t>(kMoveThreads, ceil_div<int64_t>(units, kWarpSize) * kWarpSize));
    kv_move_kernel<decltype(unit)><<<grid, threads, 0, as_stream(stream)>>>(p);
    return launched();
  });
}

}  // namespace domino
