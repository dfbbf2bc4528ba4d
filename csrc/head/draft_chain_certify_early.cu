#include <algorithm>

#include "head/draft_chain_certify_early.cuh"

namespace domino {

namespace {

constexpr int kAlign = 1024;
constexpr int kStages =
    std::min<int>(kEarlyStages, (kScreenMemory - kAlign - sizeof(EarlyMemory)) / kEarlyTileBytes);

template <class T>
int launch(const ChainBlockParams& p, int round, int blocks, void* stream) {
  CUtensorMap map;  // 4 bits as 16-bit elements
  if (const int status = make_tile_map(&map, nibble_rows(p.screen, p.vocab, p.rank), DType::kBF16,
                                       p.vocab, nibble_row(p.rank) / 2, kPoolTile);
      status != kOk)
    return status;
  const bool raw = p.base_dtype == p.dtype && !p.bias && !p.mask && p.vocab_valid == p.vocab &&
                   is_aligned(p.base_logits, 16) && p.base_slot_stride % 8 == 0;
  LaunchShape shape{dim3(blocks), kEarlyThreads};
  shape.shared = kAlign + kStages * kEarlyTileBytes + sizeof(EarlyMemory);
  shape.overlap = true;
  const auto kernel = chain_certify_early<T>;
  if (const int status = allow_shared_memory(kernel, shape.shared); status != kOk) return status;
  launch_kernel(shape, as_stream(stream), kernel, p, map, round, kStages, raw);
  return launched();
}

}  // namespace

int draft_chain_early_blocks(const ChainBlockParams& p, int* blocks) {
  *blocks = 0;
  DeviceInfo device;
  if (const int status = current_device(&device); status != kOk) return status;
  if (!p.exact || device.major != 9 || p.batch != 1 || p.corrected() == 0 ||
      p.corrected() > kEarlyColumns || p.screen == nullptr || !is_aligned(p.screen, 16) ||
      p.w_hh == nullptr)
    return kOk;
  int chain_blocks = 0;  // of the launch in front, which it runs beside
  if (const int status = draft_chain_team_blocks(p, &chain_blocks); status != kOk) return status;
  const int free = device.processors - chain_blocks;
  if (chain_blocks > 0 && free > 0 &&
      ceil_div<int64_t>(p.vocab, kPoolTile * free) <= kStages + kEarlyHalves)
    *blocks = free;
  return kOk;
}

int draft_chain_certify_early_cuda(const ChainBlockParams& p, int round, bool* done, void* stream) {
  int blocks = 0;
  if (const int status = draft_chain_early_blocks(p, &blocks); status != kOk) return status;
  *done = blocks != 0;
  if (!*done) return kOk;
  return p.dtype == DType::kBF16 ? launch<bf16>(p, round, blocks, stream)
                                 : launch<f16>(p, round, blocks, stream);
}

}  // namespace domino
