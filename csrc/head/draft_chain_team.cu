#include <algorithm>
#include <type_traits>

#include "head/draft_chain_team.cuh"

namespace domino {

namespace {

constexpr int kStaticMemory = 1024;  // of the kernel, and what a cluster reserves

int log2_up(int64_t n) {
  int log = 0;
  while (int64_t{1} << log < n) ++log;
  return log;
}

// Clusters that can be resident at once, one block a processor. The question takes longer than a
// launch, so a thread asks it once for as long as it stays on one device.
int count_clusters(int memory, int* count) {
  thread_local int known = -1, clusters = 0;
  int index = 0;
  if (const int status = cudaGetDevice(&index); status != kOk) return status;
  if (index != known) {
    const auto kernel = chain_team<bf16, 4, 256>;
    cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, memory);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = kTeam;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(kTeam);
    config.blockDim = dim3(kTeamThreads);
    config.dynamicSmemBytes = memory;
    config.attrs = &cluster;
    config.numAttrs = 1;
    error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
    if (error != cudaSuccess) return error;
    known = index;
  }
  *count = clusters;
  return kOk;
}

template <class T, int kSteps, int kRank>
int launch(const TeamArgs& p, int clusters, int bytes, cudaStream_t stream) {
  const auto kernel = chain_team<T, kSteps, kRank>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  LaunchShape shape{dim3(clusters * kTeam), kTeamThreads};
  shape.shared = bytes;
  shape.cluster = kTeam;
  shape.cooperative = shape.overlap = true;
  launch_kernel(shape, stream, kernel, p);
  return launched();
}

template <class T>
int launch(TeamArgs& p, int clusters, int most_bytes, cudaStream_t stream) {
  const int part = 1 << p.part_log;
  p.tiles_log = std::max(log2_up(ceil_div(part / 16, kTeamWarps)), part > 16 ? 1 : 0);
  p.key_words = ceil_div(part / 16, 1 << p.tiles_log);
  p.pitch = static_cast<int>(p.rank) * 2 + 16;
  int bytes = TeamMemory{p.pools > 1 ? 2 * part : part}.w2();
  p.resident = bytes + part * p.pitch <= most_bytes;
  if (p.resident) bytes += part * p.pitch;
  bytes = std::max(bytes, StateMemory::bytes);
  if (bytes > most_bytes) return kBadArgument;
  const bool plain = p.rank == 256 && p.units == 1024 && p.resident && p.tiles_log == 1 &&
                     p.temperature == nullptr && p.pools == 1 && !p.bias && !p.mask &&
                     p.vocab_valid == p.vocab && p.base_dtype == p.dtype;
  if (p.units <= 256) return launch<T, 1, 0>(p, clusters, bytes, stream);
  return plain ? launch<T, 4, 256>(p, clusters, bytes, stream)
               : launch<T, 4, 0>(p, clusters, bytes, stream);
}

}  // namespace

int draft_chain_team_cuda(const ChainBlockParams& params, bool restart, bool* done, void* stream) {
  *done = false;
  DeviceInfo device;
  if (const int status = current_device(&device); status != kOk) return status;
  if (device.major < 9 || params.portable || params.table == nullptr) return kOk;
  const int memory = device.shared_memory - kStaticMemory;
  int clusters = 0;
  if (const int status = count_clusters(memory, &clusters); status != kOk) return status;
  const int of_state = ceil_div(static_cast<int>(params.units), kTeam * kStateUnits);
  const int64_t ids = ceil_div<int64_t>(params.pool_size, kTeam);
  // every block of a team has units: what the others send it waits for its own
  const int units = static_cast<int>(params.units);
  const bool shared = (kTeam - 1) * round_up(ceil_div(units, kTeam), 32) < units;
  if (params.batch > std::min(clusters - of_state, kTeamRows) || ids > 4096 || !shared) return kOk;
  *done = true;

  TeamArgs p{};
  static_cast<ChainBlockParams&>(p) = params;
  p.restart = restart;
  p.teams = static_cast<int>(p.batch);
  p.part_log = std::max(4, log2_up(ids));
  return p.dtype == DType::kBF16 ? launch<bf16>(p, p.teams + of_state, memory, as_stream(stream))
                                 : launch<f16>(p, p.teams + of_state, memory, as_stream(stream));
}

}  // namespace domino
