#include "head/draft_chain_law.cuh"
#include "head/draft_chain_rescue.cuh"

namespace domino {

namespace {

// Whether launches may overlap the ones in front of them.
int may_overlap(const ChainBlockParams& p, bool& overlap) {
  DeviceInfo device;
  const int status = current_device(&device);
  overlap = device.major >= 9 && !p.portable;
  return status;
}

}  // namespace

int draft_chain_rescue_cuda(const ChainBlockParams& params, bool always, void* stream) {
  bool overlap = false;
  if (const int status = may_overlap(params, overlap)) return status;
  ChainBlockArgs p{};
  static_cast<ChainBlockParams&>(p) = params;
  p.always = always;
  const auto run = [&](auto kernel) {
    launch_kernel(overlap, dim3(static_cast<unsigned>(p.batch)), kRescueThreads, as_stream(stream),
                  kernel, p);
    return launched();
  };
  const bool small = p.units <= 256;
  if (p.dtype == DType::kBF16) return run(small ? chain_rescue<bf16, 1> : chain_rescue<bf16, 4>);
  return run(small ? chain_rescue<f16, 1> : chain_rescue<f16, 4>);
}

int draft_chain_law_cuda(const ChainBlockParams& p, void* stream) {
  bool overlap = false;
  if (const int status = may_overlap(p, overlap)) return status;
  const dim3 grid(static_cast<unsigned>(p.drafts), static_cast<unsigned>(p.batch));
  launch_kernel(overlap, grid, kLawThreads, as_stream(stream), chain_law, p);
  return launched();
}

}  // namespace domino
