// One block a request, one thread a child: its rank among the keys of the level is how many are
// greater. Bytes: nothing to speak of; bound by latency.
#include "common/launch.h"
#include "head/grow_tree.h"

namespace domino {

namespace {

__global__ void __launch_bounds__(kMaxLevel)
    grow_tree_kernel(const __grid_constant__ GrowTreeParams p, int level) {
  __shared__ uint64_t keys[kMaxLevel];
  previous_launch_done();
  const int i = min(static_cast<int>(threadIdx.x), level - 1);  // the last one several times
  const GrownChild child(p, blockIdx.x, i);
  keys[i] = child.key(i);
  __syncthreads();
  int rank = 0;
  for (int other = 0; other < level; ++other) rank += keys[other] > keys[i];
  if (rank < p.next_paths) child.become_path(p, blockIdx.x, rank);
}

}  // namespace

int grow_tree_cuda(const GrowTreeParams& p, void* stream) {
  const int64_t level = p.paths * p.children;
  if (p.batch == 0 || level == 0) return kOk;
  if (level > kMaxLevel || p.next_paths > level || p.batch > INT32_MAX) return kBadArgument;
  DeviceInfo device;
  if (const int status = current_device(&device); status != kOk) return status;
  const int threads = ceil_div<int>(level, kWarpSize) * kWarpSize;
  launch_kernel(device.major >= 9, dim3(p.batch), threads, as_stream(stream), grow_tree_kernel, p,
                static_cast<int>(level));
  return launched();
}

}  // namespace domino
