#include "verify/verify_cut.cuh"
#include "verify/verify_draw.cuh"
#include "verify/verify_launch.cuh"

namespace domino {

int launch_by_value(const VerifyChainParams& p, void* stream) {
  DeviceInfo device;
  if (const int status = current_device(&device); status != kOk) return status;
  const int64_t rows = p.batch * (p.drafts + 1);
  // as many blocks a row as the device has room for
  const int row_blocks = device.major < 9 ? 1
                         : rows <= 16     ? 8
                         : rows <= 32     ? 4
                         : rows <= 64     ? 2
                                          : 1;
  const int draw_blocks = device.major < 9 ? 1 : p.batch <= 16 ? 8 : 4;
  if (rows * row_blocks > INT32_MAX || p.batch * draw_blocks > INT32_MAX) return kBadArgument;
  LaunchShape shape{dim3(static_cast<unsigned>(rows * row_blocks)), kCutThreads};
  shape.cluster = row_blocks;
  launch_kernel(shape, as_stream(stream), verify_cut_kernel, p);
  if (const int status = launched(); status != kOk) return status;
  shape = {dim3(static_cast<unsigned>(p.batch * draw_blocks)), kDrawThreads};
  shape.cluster = draw_blocks;
  shape.overlap = device.major >= 9;
  launch_kernel(shape, as_stream(stream), verify_draw_kernel, p);
  return launched();
}

}  // namespace domino
