#include <algorithm>

#include "head/draft_chain_pool_stream.cuh"

namespace domino {

namespace {

constexpr int64_t kFillingBlocks = 96;    // of the pass
constexpr int64_t kStreamingBlocks = 64;  // of it where they stream
// Rows from which on that is faster: with tile_max, and without.
constexpr int64_t kStreamingRows[2] = {16, 32};
// That look for winners: more of them come only when others leave, and are the last to end.
constexpr int64_t kWinnerBlocks = 32;
constexpr int64_t kLeastKeyParts = 4;

template <class T, class Base, bool kPacked>
int launch(const ChainBlockParams& p, const PoolLaunch& shape, int64_t blocks,
           cudaStream_t stream) {
  if (blocks > INT32_MAX) return kBadArgument;
  chain_pool<T, Base, kPacked>
      <<<static_cast<unsigned>(blocks), kPoolThreads, 0, stream>>>(p, shape);
  return launched();
}

// Base logits of 16 bits as [batch, slots, whole periods, ids of a period], in tiles of 128 ids of
// 2 periods and `of_stage` slots; what is outside comes as zeros.
int make_stream_map(CUtensorMap* map, const ChainBlockParams& p, int64_t period, int of_stage) {
  decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  if (const int status = find_tile_encoder(&encode); status != kOk) return status;
  const auto bytes = [](int64_t elements) { return static_cast<cuuint64_t>(elements) * 2; };
  const cuuint64_t sizes[4] = {
      static_cast<cuuint64_t>(period), static_cast<cuuint64_t>(p.vocab / period),
      static_cast<cuuint64_t>(p.first_slot + p.drafts), static_cast<cuuint64_t>(p.batch)};
  const cuuint64_t strides[3] = {bytes(period), bytes(p.base_slot_stride),
                                 bytes(p.base_batch_stride)};
  const cuuint32_t tile[4] = {kPoolTile, kStreamPeriods, static_cast<cuuint32_t>(of_stage), 1};
  const cuuint32_t step[4] = {1, 1, 1, 1};
  const CUresult result =
      encode(map,
             p.base_dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                          : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
             4, const_cast<void*>(p.base_logits), sizes, strides, tile, step,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? kOk : kBadArgument;
}

// For rows and slots as chain_pool_stream takes them; otherwise not *done, and nothing.
template <class T>
int launch_stream(const ChainBlockParams& p, PoolLaunch shape, const DeviceInfo& device, bool* done,
                  cudaStream_t stream) {
  const int64_t period = PoolGroups(p.pool_size).period();
  const int64_t slots = p.temperature ? p.drafts : p.corrected();
  if (device.major != 9 || p.portable || p.pools != 1 || !shape.aligned || p.mask ||
      p.vocab_valid != p.vocab || period % kPoolTile != 0 || p.vocab < period ||
      slots > 2 * kMostStreamSlots || p.batch < kStreamingRows[p.exact ? 0 : 1] ||
      p.batch * (period / kPoolTile) < kStreamingBlocks)
    return kOk;
  const int of_stage = static_cast<int>(ceil_div<int64_t>(slots, 2));
  CUtensorMap map;
  if (make_stream_map(&map, p, period, of_stage) != kOk)
    return kOk;  // strides that the copy engine does not take
  *done = true;
  shape.columns_log = 4;
  shape.parts = period / kPoolTile;
  shape.pass_blocks = p.batch * shape.parts;
  shape.pass_tiles = p.exact;
  shape.hoist_blocks = hoist_stream_blocks(p.rank, p.batch * p.corrected());
  const int64_t blocks = int64_t{shape.pass_blocks} + shape.hoist_blocks + shape.winner_blocks;
  if (blocks > INT32_MAX) return kBadArgument;
  LaunchShape of_launch{dim3(static_cast<unsigned>(blocks)), kPoolThreads};
  of_launch.shared = std::max(stream_bytes(of_stage), kHoistBytes);
  const auto kernel = chain_pool_stream<T>;
  if (const int status = allow_shared_memory(kernel, of_launch.shared); status != kOk)
    return status;
  launch_kernel(of_launch, stream, kernel, p, map, shape, of_stage);
  return launched();
}

template <class T, class Base>
int launch(const ChainBlockParams& p, cudaStream_t stream) {
  DeviceInfo device;
  if (const int status = current_device(&device); status != kOk) return status;
  const int64_t period = PoolGroups(p.pool_size).period(), eights = period / kEight;
  const int64_t rows = p.batch * p.pools, columns = p.batch * p.corrected();
  PoolLaunch shape{};
  shape.aligned = is_aligned(p.base_logits, 16) && p.base_batch_stride * sizeof(Base) % 16 == 0 &&
                  p.base_slot_stride * sizeof(Base) % 16 == 0;

  // A block's runs of ids as wide as leaves enough blocks to fill the chip.
  const auto parts = [&] { return ceil_div(eights, int64_t{1} << shape.columns_log); };
  shape.columns_log = 4;
  while (shape.columns_log > 1 && rows * parts() < kFillingBlocks) --shape.columns_log;
  shape.parts = parts();
  shape.pass_blocks = rows * shape.parts;
  shape.pass_tiles = p.exact && kEight << shape.columns_log >= kPoolTile && period % kPoolTile == 0;
  int early = 0;
  if (const int status = draft_chain_early_blocks(p, &early); status != kOk) return status;
  if (p.exact && !shape.pass_tiles && early == 0)
    shape.tile_blocks =
        ceil_div(p.batch * ceil_div<int64_t>(p.vocab, kEight * kWarpSize), int64_t{kPoolWarps});

  // Small tiles where latency decides, larger ones that read less where L2 does.
  shape.hoist_tile = columns <= 16 ? 0 : columns <= 256 ? 1 : 2;
  const int64_t hoist_columns = shape.hoist_tile == 2 ? 32 : 16, hoist_rows = 8 << shape.hoist_tile;
  shape.hoist_blocks = ceil_div(p.rank, hoist_rows) * ceil_div(columns, hoist_columns);

  const int64_t drafts = p.temperature ? 0 : p.batch * p.prefix;  // whose winners are looked for
  shape.winner_parts = static_cast<int>(std::clamp<int64_t>(
      kWinnerBlocks / std::max<int64_t>(drafts, 1), kLeastKeyParts, kMaxKeyParts));
  shape.winner_blocks = drafts * shape.winner_parts;

  const int64_t blocks =
      int64_t{shape.pass_blocks} + shape.hoist_blocks + shape.winner_blocks + shape.tile_blocks;
  shape.pass_first = blocks > 2 * device.processors;
  if constexpr (sizeof(Base) == 2) {
    // 16 bits count the ids of a group, and those of a thread that looks for a winner
    if (!p.bias && ceil_div(p.vocab, period) * kGroupRun <= 1 << 16 &&
        ceil_div<int64_t>(p.vocab, kPoolThreads * kEight) * kEight <= 1 << 16) {
      bool done = false;
      const int status = launch_stream<T>(p, shape, device, &done, stream);
      if (done || status != kOk) return status;
      return launch<T, Base, true>(p, shape, blocks, stream);
    }
  }
  return launch<T, Base, false>(p, shape, blocks, stream);
}

}  // namespace

int draft_chain_pool_cuda(const ChainBlockParams& p, void* stream) {
  return dispatch_dtype(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    if constexpr (std::is_same_v<T, float>) {
      return static_cast<int>(kBadDtype);
    } else {
      return p.base_dtype == DType::kF32 ? launch<T, float>(p, as_stream(stream))
                                         : launch<T, T>(p, as_stream(stream));
    }
  });
}

}  // namespace domino
