#include "verify/verdict_words.cuh"
#include "verify/verify_cut.cuh"
#include "verify/verify_draw.cuh"
#include "verify/verify_launch.cuh"

namespace domino {

// verify_dense.cu: a cluster to each request, once its rows have been judged.
void (*dense_counted_draw())(VerifyChainParams);
// verify_listed.cu: a cluster to each row.
void launch_listed(const LaunchShape& shape, const VerifyChainParams& p, void* stream);
// verify_ranked.cu, verify_nucleus.cu: all in one launch, if it is a call for that.
bool launch_ranked(const DeviceInfo& device, const VerifyChainParams& p, void* stream, int* status);
bool launch_nucleus(const DeviceInfo& device, const VerifyChainParams& p, void* stream,
                    int* status);
// verify_row.cu: the first launch, if each row has a processor to itself; the second behind it
// where that hands words.
bool launch_row(const DeviceInfo& device, const VerifyChainParams& p, void* stream, int* status);
int launch_row_draws(const DeviceInfo& device, const VerifyChainParams& p, void* stream);

// Blocks that draw for a request once its rows have been judged: as timed with 32 and 64 requests,
// where all should find room at once (with dense q two a processor, otherwise three).
static int counted_blocks(int64_t batch, bool dense) {
  if (batch <= 32) return dense ? 6 : 8;
  if (dense) return 3;
  return batch <= 64 ? 5 : 4;
}

int launch_by_value(const VerifyChainParams& p, void* stream) {
  DeviceInfo device;
  if (const int status = current_device(&device); status != kOk) return status;
  if (int status; launch_ranked(device, p, stream, &status)) return status;
  if (int status; launch_nucleus(device, p, stream, &status)) return status;
  const int64_t rows = p.batch * (p.drafts + 1);
  const int64_t resident = 2 * device.processors;  // blocks
  // as many blocks a row as the device has room for
  const int row_blocks = device.major < 9 ? 1
                         : rows <= 16     ? 8
                         : rows <= 32     ? 4
                         : rows <= 64     ? 2
                                          : 1;
  const bool dense = is_dense(p) && !draws_every_row(p);
  const bool in_turn = rows > resident && p.chosen_logprob == nullptr;
  const bool counted =  // rows, as they are judged
      in_turn && p.top_k == nullptr && counts_judged(p) && device.major >= 9;
  const bool large_clusters = device.major == 9 || device.major == 10;
  const int draw_blocks = device.major < 9                 ? 1
                          : p.batch <= 8 && large_clusters ? kMostClusterBlocks
                          : p.batch <= 16                  ? 8
                          : counted                        ? counted_blocks(p.batch, dense)
                                                           : 4;
  if (rows * row_blocks > INT32_MAX - kRowBuffers * resident || p.batch * draw_blocks > INT32_MAX)
    return kBadArgument;
  LaunchShape shape{dim3(static_cast<unsigned>(rows * row_blocks)), kCutThreads};
  shape.cluster = row_blocks;
  const DenseKernels of_dense = dense ? dense_kernels(p) : DenseKernels{};
  int row_status = kOk;
  const bool by_row = launch_row(device, p, stream, &row_status);
  if (row_status != kOk) return row_status;
  if (by_row && hands_words(p)) return launch_row_draws(device, p, stream);
  if (by_row) {
    // its verdicts are on their way
  } else if (!in_turn) {
    if (dense)
      launch_kernel(shape, as_stream(stream), of_dense.listed, p);
    else
      launch_listed(shape, p, stream);
  } else {
    const auto cut = dense                ? of_dense.cut
                     : p.top_k == nullptr ? verify_cut_kernel<false, false, false>  // races nothing
                     : draws_every_row(p) ? verify_cut_kernel<true>
                                          : verify_cut_kernel<false>;
    shape.grid = dim3(static_cast<unsigned>(resident));
    shape.cluster = 1;
    shape.shared = sizeof(RowsShared);
    const cudaError_t status = cudaFuncSetAttribute(
        cut, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared));
    if (status != cudaSuccess) return status;
    launch_kernel(shape, as_stream(stream), cut, p, static_cast<int>(rows));
  }
  if (const int status = launched(); status != kOk) return status;
  const auto draw = dense && counted               ? dense_counted_draw()
                    : dense                        ? of_dense.draw
                    : draws_every_row(p)           ? verify_draw_kernel<VerifyRule::kMatch>
                    : p.rule == VerifyRule::kBlock ? verify_draw_kernel<VerifyRule::kBlock>
                    : counted      ? verify_draw_kernel<VerifyRule::kToken, 3, false, true>
                    : p.batch > 16 ? verify_draw_kernel<VerifyRule::kToken, 3>
                                   : verify_draw_kernel<VerifyRule::kToken>;
  if (draw_blocks > 8) {
    const cudaError_t status =
        cudaFuncSetAttribute(draw, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (status != cudaSuccess) return status;
  }
  shape = {dim3(static_cast<unsigned>(p.batch * draw_blocks)), kDrawThreads};
  shape.cluster = draw_blocks;
  shape.overlap = device.major >= 9;
  launch_kernel(shape, as_stream(stream), draw, p);
  return launched();
}

}  // namespace domino
