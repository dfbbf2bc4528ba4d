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

// Lets the kernel have `bytes` of shared memory, in clusters that are larger than is portable.
template <class Kernel>
int allow(Kernel kernel, int bytes, int cluster) {
  const int status = allow_shared_memory(kernel, bytes);
  return status != kOk || cluster <= kTeam
             ? status
             : cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

// Clusters that can be resident at once, one block a processor. The question takes longer than a
// launch, so a thread asks it once for as long as it stays on one device.
template <int kBlocks>
int count_clusters(int memory, int* count) {
  thread_local int known = -1, clusters = 0;
  int index = 0;
  if (const int status = cudaGetDevice(&index); status != kOk) return status;
  if (index != known) {
    const auto kernel = chain_team<bf16, 4, 256, kBlocks>;
    if (const int status = allow(kernel, memory, kBlocks); status != kOk) return status;
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = kBlocks;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(kBlocks);
    config.blockDim = dim3(kTeamThreads);
    config.dynamicSmemBytes = memory;
    config.attrs = &cluster;
    config.numAttrs = 1;
    const cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
    if (error != cudaSuccess && kBlocks == kTeam) return error;
    if (error != cudaSuccess) clusters = 0, (void)cudaGetLastError();  // not on this GPU
    known = index;
  }
  *count = clusters;
  return kOk;
}

int state_clusters(const ChainBlockParams& p, int blocks) {
  return ceil_div(static_cast<int>(p.units), blocks * kStateUnits);
}

int w2_pitch(const ChainBlockParams& p) { return static_cast<int>(p.rank) * 2 + 16; }

// Bytes of shared memory where a block has `part` ids, their rows of W2 and, in the plain case,
// base logits of two drafts and W1h H of all.
int role_bytes(const ChainBlockParams& p, int part, bool plain) {
  const int fixed = TeamMemory{p.pools > 1 ? 2 * part : part}.w2();
  const int of_drafts = plain ? (2 * part + static_cast<int>(p.drafts) * kWarpSize) * 4 : 0;
  return fixed + part * w2_pitch(p) + of_drafts;
}

bool is_plain(const ChainBlockParams& p) {
  return p.rank == 256 && p.units == 1024 && p.temperature == nullptr && p.pools == 1 && !p.bias &&
         !p.mask && p.vocab_valid == p.vocab && p.base_dtype == p.dtype;
}

// Ids of a block.
int part_of(const ChainBlockParams& p, int blocks) {
  return std::max(16, 1 << log2_up(ceil_div<int64_t>(p.pool_size, blocks)));
}

// Blocks of a row's cluster; 0: the team form does not suit. memory: of a block.
int choose_team(const ChainBlockParams& p, const DeviceInfo& device, int memory, int* size) {
  *size = 0;
  if (device.major < 9 || p.portable || p.table == nullptr) return kOk;
  int clusters = 0;
  if (const int status = count_clusters<kTeam>(memory, &clusters); status != kOk) return status;
  const int64_t ids = ceil_div<int64_t>(p.pool_size, kTeam);
  // every block of a team has units: what the others send it waits for its own
  const int units = static_cast<int>(p.units);
  const bool shared = (kTeam - 1) * round_up(ceil_div(units, kTeam), 32) < units;
  const int most_rows = std::min(clusters - state_clusters(p, kTeam), kTeamRows);
  if (p.batch > most_rows || ids > 4096 || !shared) return kOk;
  *size = kTeam;
  const int part = part_of(p, kWideTeam);
  if (!is_plain(p) || part / 16 > kTeamWarps || role_bytes(p, part, true) > memory) return kOk;
  if (const int status = count_clusters<kWideTeam>(memory, &clusters); status != kOk) return status;
  if (p.batch + state_clusters(p, kWideTeam) <= clusters) *size = kWideTeam;
  return kOk;
}

template <class T, int kSteps, int kRank, int kBlocks>
int launch(TeamArgs& p, int part, int most_bytes, cudaStream_t stream) {
  constexpr int kStage = StateRole<T, kSteps>::Stages::kBytes;
  const int fixed = TeamMemory{p.pools > 1 ? 2 * part : part}.w2();
  p.part_log = log2_up(part);
  p.key_words = ceil_div(part / 16, 1 << p.tiles_log);
  p.resident = role_bytes(p, part, kRank != 0) <= most_bytes;
  p.stages = std::clamp((most_bytes - fixed) / kStage, 1, StateRole<T, kSteps>::Stages::kSixteens);
  const int bytes = std::max({p.resident ? role_bytes(p, part, kRank != 0) : fixed,
                              StateMemory::bytes, fixed + p.stages * kStage});
  if (bytes > most_bytes) return kBadArgument;
  const auto kernel = chain_team<T, kSteps, kRank, kBlocks>;
  if (const int status = allow(kernel, bytes, kBlocks); status != kOk) return status;
  LaunchShape shape{dim3((p.teams + state_clusters(p, kBlocks)) * kBlocks), kTeamThreads};
  shape.shared = bytes;
  shape.cluster = kBlocks;
  shape.cooperative = shape.overlap = true;
  launch_kernel(shape, stream, kernel, p);
  return launched();
}

template <class T>
int launch(TeamArgs& p, int size, int most_bytes, cudaStream_t stream) {
  p.pitch = w2_pitch(p);
  const int part = part_of(p, size);
  p.tiles_log = 0;
  if (size == kWideTeam) return launch<T, 4, 256, kWideTeam>(p, part, most_bytes, stream);
  p.tiles_log = std::max(log2_up(ceil_div(part / 16, kTeamWarps)), part > 16 ? 1 : 0);
  if (p.units <= 256) return launch<T, 1, 0, kTeam>(p, part, most_bytes, stream);
  return is_plain(p) && p.tiles_log == 1 && role_bytes(p, part, true) <= most_bytes
             ? launch<T, 4, 256, kTeam>(p, part, most_bytes, stream)
             : launch<T, 4, 0, kTeam>(p, part, most_bytes, stream);
}

}  // namespace

int draft_chain_team_blocks(const ChainBlockParams& p, int* blocks) {
  DeviceInfo device;
  if (const int status = current_device(&device); status != kOk) return status;
  int size = 0;
  const int status = choose_team(p, device, device.shared_memory - kStaticMemory, &size);
  *blocks = size == 0 ? 0 : (static_cast<int>(p.batch) + state_clusters(p, size)) * size;
  return status;
}

int draft_chain_team_cuda(const ChainBlockParams& params, bool restart, bool* done, void* stream) {
  DeviceInfo device;
  if (const int status = current_device(&device); status != kOk) return status;
  const int memory = device.shared_memory - kStaticMemory;
  int size = 0;
  if (const int status = choose_team(params, device, memory, &size); status != kOk) return status;
  *done = size != 0;
  if (!*done) return kOk;

  TeamArgs p{};
  static_cast<ChainBlockParams&>(p) = params;
  p.restart = restart;
  p.teams = static_cast<int>(p.batch);
  return p.dtype == DType::kBF16 ? launch<bf16>(p, size, memory, as_stream(stream))
                                 : launch<f16>(p, size, memory, as_stream(stream));
}

}  // namespace domino
