#include "tree/build_tree.cuh"

namespace domino {

int build_tree_cuda(const BuildTreeParams& p, void* stream) {
  if (p.nodes < 1 || p.nodes > kMaxBuiltNodes || p.candidates > kMaxCandidates) return kBadArgument;
  if (p.batch == 0) return kOk;
  const unsigned columns =
      p.mask_kind == TreeMask::kNone
          ? 1
          : static_cast<unsigned>(ceil_div<int64_t>(p.nodes, 32 * kColumnWords));
  const dim3 grid(static_cast<unsigned>(p.batch), columns);
  build_tree_kernel<<<grid, kBuildThreads, 0, as_stream(stream)>>>(p);
  return launched();
}

}  // namespace domino
