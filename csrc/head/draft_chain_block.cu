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

template <class T, int kSteps, int kTiles, int kRank, ChainInputs kInputs>
int launch(const ChainBlockArgs& p, int servers, int bytes, bool overlap, cudaStream_t stream) {
  const auto kernel = chain_block<T, kSteps, kTiles, kRank, kInputs>;
  CUtensorMap w_ih{};
  if (kInputs == ChainInputs::kJoint)
    if (const int status = make_tile_map(&w_ih, p.w_ih, p.dtype, 3 * p.units, p.inputs,
                                         JointProduct<T>::kTaskUnits);
        status != kOk)
      return status;
  if (const int status = allow_shared_memory(kernel, bytes); status != kOk) return status;
  LaunchShape shape{dim3(p.chain_blocks + servers), BlockMemory<kTiles>::kThreads};
  shape.shared = bytes;
  shape.cooperative = true;
  shape.overlap = overlap;
  launch_kernel(shape, stream, kernel, p, w_ih);
  return launched();
}

template <class T, int kSteps, int kTiles>
int launch(ChainBlockArgs& p, ChainInputs inputs, const DeviceInfo& device, cudaStream_t stream) {
  const int all_ids = ceil_div(p.group_rows << p.part_log, 16) * 16;
  p.tiles_log = log2_up(ceil_div(all_ids / 16, BlockMemory<kTiles>::kWarps));
  p.words = std::max(1, 1 << p.part_log >> 4 >> p.tiles_log);
  using Memory = BlockMemory<kTiles>;
  const int ids_bytes = 2 * all_ids * 4;
  p.ids_at = Memory::w2_rows + all_ids * p.pitch;
  p.resident = p.ids_at + ids_bytes <= device.shared_memory;
  if (!p.resident) p.ids_at = Memory::w2_rows;
  if (inputs == ChainInputs::kJoint) {
    using Product = JointProduct<T>;
    const int rings = Memory::low_sums + Product::kBytes, slot = 2 * Product::kWeightSlot;
    p.weight_slots =
        std::min((device.shared_memory - ids_bytes - rings) / slot, Product::kMostSlots);
    if (p.weight_slots < 2) return kBadArgument;
    const int end = rings + p.weight_slots * slot;
    p.lent_rows = std::min(ceil_div(end - Memory::w2_rows, p.pitch), all_ids);
    p.ids_at = std::max(p.ids_at, (end + 15) / 16 * 16);
  }
  int bytes = p.ids_at + ids_bytes;
  if (bytes > device.shared_memory) return kBadArgument;
  int servers = 0;
  if (inputs == ChainInputs::kServed) {
    servers = std::min(device.processors - p.chain_blocks, input_slabs(p.units));
    p.keeps_inputs = InputServer<T, kTiles>::kBytes <= device.shared_memory;
    bytes = std::max(bytes, p.keeps_inputs ? InputServer<T, kTiles>::kBytes
                                           : InputServer<T, kTiles>::kLeastBytes);
  }
  const bool plain = p.rank == 256 && p.units == 1024 && p.resident && p.temperature == nullptr &&
                     p.pools == 1 && !p.bias && !p.mask && p.vocab_valid == p.vocab &&
                     p.base_dtype == p.dtype;
  const bool overlap = device.major >= 9 && !p.portable;
  const auto run = [&](auto known) {
    constexpr ChainInputs kInputs = decltype(known)::value;
    if constexpr (kSteps == 4)
      if (plain) return launch<T, kSteps, kTiles, 256, kInputs>(p, servers, bytes, overlap, stream);
    return launch<T, kSteps, kTiles, 0, kInputs>(p, servers, bytes, overlap, stream);
  };
  if constexpr (kSteps == 4 && kTiles == 4)
    if (inputs == ChainInputs::kJoint)
      return run(std::integral_constant<ChainInputs, ChainInputs::kJoint>{});
  return inputs == ChainInputs::kTable
             ? run(std::integral_constant<ChainInputs, ChainInputs::kTable>{})
             : run(std::integral_constant<ChainInputs, ChainInputs::kServed>{});
}

template <class T, int kSteps>
int launch(ChainBlockArgs& p, ChainInputs inputs, const DeviceInfo& device, cudaStream_t stream) {
  const int all_ids = ceil_div(p.group_rows << p.part_log, 16) * 16;
  const bool few = p.group_rows <= kColumns && inputs != ChainInputs::kJoint;
  const int bytes = BlockMemory<1>::w2_rows + all_ids * (p.pitch + 8);
  if (few && (inputs == ChainInputs::kServed || bytes <= device.shared_memory))
    return launch<T, kSteps, 1>(p, inputs, device, stream);
  return launch<T, kSteps, 4>(p, inputs, device, stream);
}

template <class T>
int launch(ChainBlockArgs& p, ChainInputs inputs, const DeviceInfo& device, cudaStream_t stream) {
  return p.units <= 256 ? launch<T, 1>(p, inputs, device, stream)
                        : launch<T, 4>(p, inputs, device, stream);
}

}  // namespace

int draft_chain_block_cuda(const ChainBlockParams& params, bool restart, void* stream) {
  bool done = false;
  const int team_status = draft_chain_team_cuda(params, restart, &done, stream);
  if (done || team_status != kOk) return team_status;
  DeviceInfo device;
  if (const int status = current_device(&device); status != kOk) return status;
  const int most_groups = std::min(2, device.processors / kGroup);
  // not enough room for the blocks: the second form does all of it
  if (most_groups == 0 || (params.table == nullptr && device.processors == kGroup))
    return restart ? static_cast<int>(kOk) : draft_chain_rescue_cuda(params, true, stream);

  ChainBlockArgs p{};
  static_cast<ChainBlockParams&>(p) = params;
  p.restart = restart;
  p.part_log = std::max(3, log2_up(ceil_div<int64_t>(p.pool_size, kGroup)));
  p.pitch = static_cast<int>((p.rank * 2 + 95) / 128 * 128 + 32);
  // larger pools: their ids leave no room for the rings of a product
  const bool joins =
      most_groups == 2 && device.major == 9 && !p.portable && p.units > 256 && p.part_log <= 8;
  int rows = 0;
  for (p.row0 = 0; p.row0 < p.batch; p.row0 += rows) {
    rows = static_cast<int>(std::min<int64_t>(p.batch - p.row0, most_groups * kGroupRows));
    int groups = rows > 2 ? most_groups : 1;  // fewer rows a group, shorter steps
    ChainInputs inputs = ChainInputs::kTable;
    if (p.table == nullptr) {
      inputs = joins && rows > kColumns ? ChainInputs::kJoint : ChainInputs::kServed;
      if (inputs == ChainInputs::kServed) {  // one group, the other processors serve it
        groups = 1;
        rows = std::min(rows, kGroupRows);
      }
    }
    p.group_rows = ceil_div(rows, groups);
    p.chain_blocks = groups * kGroup;
    const int status = p.dtype == DType::kBF16 ? launch<bf16>(p, inputs, device, as_stream(stream))
                                               : launch<f16>(p, inputs, device, as_stream(stream));
    if (status != kOk) return status;
  }
  return kOk;
}

}  // namespace domino
