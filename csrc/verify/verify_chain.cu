#include "verify/verify_block.cuh"
#include "verify/verify_launch.cuh"

namespace domino {

namespace {

static_assert(kChunk == 1024 && sizeof(ChunkStats) == 16 && sizeof(JudgedRow) == 64 &&
              sizeof(RowFilter) == 16);  // verify_chain_workspace() counts on it

// May a request of the batch go by this rule?
bool may_be(const VerifyChainParams& p, VerifyRule rule) {
  return p.temperature != nullptr && (p.rules != nullptr || p.rule == rule);
}

}  // namespace

// verify_plain.cu: all in one launch, if it is a call for that.
bool launch_plain(const VerifyChainParams& p, void* stream, int* status);
// verify_row.cu: the same in two launches, where each row has a processor to itself.
bool launch_plain_rows(const VerifyChainParams& p, void* stream, int* status);

int verify_chain_cuda(const VerifyChainParams& p, void* stream) {
  if (p.vocab < 1 || p.vocab > kMaxVocab) return kBadArgument;
  if (p.batch == 0) return kOk;
  if (counts_values(p)) return launch_by_value(p, stream);
  if (is_greedy_walk(p)) return verify_greedy_cuda(p, stream);
  if (int status; launch_plain(p, stream, &status)) return status;
  if (int status; launch_plain_rows(p, stream, &status)) return status;
  if (const int status = launch_rows(p, stream); status != kOk) return status;

  const int64_t rows = p.batch * (p.drafts + 1);
  if (may_be(p, VerifyRule::kBlock) && p.draft_logits != nullptr) {
    const int laws = launch_behind(block_laws_kernel, p, rows, true, kWalkThreads, stream);
    if (laws != kOk) return laws;
    const int walk = launch_behind(block_walk_kernel, p, rows, true, kWalkThreads, stream);
    if (walk != kOk) return walk;
  }
  const bool by_row = may_be(p, VerifyRule::kMatch) || may_be(p, VerifyRule::kGumbel);
  const int walk = dispatch_rows(p, !has_edits(p), [&](auto* tag) {
    using Stored = std::remove_pointer_t<decltype(tag)>;
    // fp32 rows go by the general form: a form of their own has registers to spill
    using T = std::conditional_t<std::is_same_v<Stored, float>, void, Stored>;
    return launch_behind(verify_walk_kernel<T>, p, by_row ? rows : p.batch, true, kWalkThreads,
                         stream, by_row);
  });
  if (walk != kOk || p.top_logprobs == 0) return walk;
  return launch_row_head(p, stream);
}

}  // namespace domino
