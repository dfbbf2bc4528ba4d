#include <algorithm>
#include <type_traits>

#include "head/draft_chain_block.cuh"

namespace domino {

namespace {

int log2_up(int64_t n) {
  int log = 0;
  while (int64_t{1} << log < n) ++log;
  return log;
}

template <class T, int kSteps, int kTiles, int kRank, bool kTable>
int launch(const ChainBlockArgs& p, int servers, int bytes, bool overlap, cudaStream_t stream) {
  const auto kernel = chain_block<T, kSteps, kTiles, kRank, kTable>;
  if (const int status = allow_shared_memory(kernel, bytes); status != kOk) return status;
  LaunchShape shape{dim3(p.chain_blocks + servers), BlockMemory<kTiles>::kThreads};
  shape.shared = bytes;
  shape.cooperative = true;
  shape.overlap = overlap;
  launch_kernel(shape, stream, kernel, p);
  return launched();
}

template <class T, int kSteps, int kTiles>
int launch(ChainBlockArgs& p, const DeviceInfo& device, cudaStream_t stream) {
  const int all_ids = ceil_div(p.group_rows << p.part_log, 16) * 16;
  p.tiles_log = log2_up(ceil_div(all_ids / 16, BlockMemory<kTiles>::kWarps));
  p.words = std::max(1, 1 << p.part_log >> 4 >> p.tiles_log);
  int bytes = BlockMemory<kTiles>::bytes(all_ids, p.pitch);
  p.resident = bytes <= device.shared_memory;
  if (!p.resident) bytes = BlockMemory<kTiles>::bytes(all_ids, 0);
  if (bytes > device.shared_memory) return kBadArgument;
  int servers = 0;
  if (p.table == nullptr) {
    servers = std::min(device.processors - p.chain_blocks, input_slabs(p.units));
    p.keeps_inputs = InputServer<T, kTiles>::kBytes <= device.shared_memory;
    bytes = std::max(bytes, p.keeps_inputs ? InputServer<T, kTiles>::kBytes
                                           : InputServer<T, kTiles>::kLeastBytes);
  }
  const bool plain = p.rank == 256 && p.units == 1024 && p.resident && p.temperature == nullptr &&
                     p.pools == 1 && !p.bias && !p.mask && p.vocab_valid == p.vocab &&
                     p.base_dtype == p.dtype;
  const bool overlap = device.major >= 9 && !p.portable;
  const auto run = [&](auto table) {
    constexpr bool kTable = decltype(table)::value;
    if constexpr (kSteps == 4)
      if (plain) return launch<T, kSteps, kTiles, 256, kTable>(p, servers, bytes, overlap, stream);
    return launch<T, kSteps, kTiles, 0, kTable>(p, servers, bytes, overlap, stream);
  };
  return p.table ? run(std::true_type{}) : run(std::false_type{});
}

template <class T, int kSteps>
int launch(ChainBlockArgs& p, const DeviceInfo& device, cudaStream_t stream) {
  const int all_ids = ceil_div(p.group_rows << p.part_log, 16) * 16;
  const bool few = p.group_rows <= kColumns;
  if (few &&
      (p.table == nullptr || BlockMemory<1>::bytes(all_ids, p.pitch) <= device.shared_memory))
    return launch<T, kSteps, 1>(p, device, stream);
  return launch<T, kSteps, 4>(p, device, stream);
}

template <class T>
int launch(ChainBlockArgs& p, const DeviceInfo& device, cudaStream_t stream) {
  return p.units <= 256 ? launch<T, 1>(p, device, stream) : launch<T, 4>(p, device, stream);
}

}  // namespace

int draft_chain_block_cuda(const ChainBlockParams& params, bool restart, void* stream) {
  bool done = false;
  const int team_status = draft_chain_team_cuda(params, restart, &done, stream);
  if (done || team_status != kOk) return team_status;
  DeviceInfo device;
  if (const int status = current_device(&device); status != kOk) return status;
  // without a table one group, the other processors serve it
  const bool serves = params.table == nullptr;
  const int most_groups =
      serves ? device.processors > kGroup : std::min(2, device.processors / kGroup);
  if (most_groups == 0)  // not enough room for the blocks: the second form does all of it
    return restart ? static_cast<int>(kOk) : draft_chain_rescue_cuda(params, true, stream);

  ChainBlockArgs p{};
  static_cast<ChainBlockParams&>(p) = params;
  p.restart = restart;
  p.part_log = std::max(3, log2_up(ceil_div<int64_t>(p.pool_size, kGroup)));
  p.pitch = static_cast<int>((p.rank * 2 + 95) / 128 * 128 + 32);
  const int most_rows = most_groups * kGroupRows;
  for (p.row0 = 0; p.row0 < p.batch; p.row0 += most_rows) {
    const int rows = static_cast<int>(std::min<int64_t>(p.batch - p.row0, most_rows));
    const int groups = rows > 2 ? most_groups : 1;  // fewer rows a group, shorter steps
    p.group_rows = ceil_div(rows, groups);
    p.chain_blocks = groups * kGroup;
    const int status = p.dtype == DType::kBF16 ? launch<bf16>(p, device, as_stream(stream))
                                               : launch<f16>(p, device, as_stream(stream));
    if (status != kOk) return status;
  }
  return kOk;
}

}  // namespace domino
