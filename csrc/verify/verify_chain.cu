#include <algorithm>

#include "verify/verify_chain.cuh"

namespace domino {

int verify_chain_cuda(const VerifyChainParams& p, void* stream) {
  if (p.vocab < 1 || p.vocab > kMaxVocab) return kBadArgument;
  if (p.batch == 0) return kOk;
  const int64_t rows = p.batch * (p.drafts + 1 + (p.draft_logits != nullptr ? p.drafts : 0));
  const int64_t splits = ceil_div(p.vocab, kWalkTokens);
  if (rows > INT32_MAX || p.batch * splits > INT32_MAX) return kBadArgument;

  // about one 16-byte load of bf16 a thread for a small vocabulary, many for a large one
  const int64_t row_threads = ceil_div<int64_t>(p.vocab, 8 * kWarpSize) * kWarpSize;
  verify_rows_kernel<<<static_cast<unsigned>(rows),
                       static_cast<unsigned>(std::min<int64_t>(row_threads, kRowThreads)), 0,
                       as_stream(stream)>>>(p);
  if (const int status = launched(); status != kOk) return status;

  const int64_t most = std::max(p.drafts + 1, ceil_div<int64_t>(p.vocab, 4));
  const int64_t walk_threads = ceil_div<int64_t>(most, kWarpSize) * kWarpSize;
  verify_walk_kernel<<<static_cast<unsigned>(p.batch * splits),
                       static_cast<unsigned>(std::min<int64_t>(walk_threads, kWalkThreads)), 0,
                       as_stream(stream)>>>(p, static_cast<int>(splits));
  return launched();
}

}  // namespace domino
