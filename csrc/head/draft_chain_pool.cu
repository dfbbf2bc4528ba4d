#include <algorithm>

#include "head/draft_chain_pool.cuh"

namespace domino {

namespace {

constexpr int64_t kFillingBlocks = 96;  // of the pass
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
        ceil_div<int64_t>(p.vocab, kPoolThreads * kEight) * kEight <= 1 << 16)
      return launch<T, Base, true>(p, shape, blocks, stream);
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
