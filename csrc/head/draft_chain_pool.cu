#include "head/draft_chain_pool.cuh"

namespace domino {

namespace {

constexpr int64_t kFewColumns = 256;  // up to here latency decides, from here on L2's bandwidth

template <class T, int kRowTiles, int kColumnTiles, int kWarps, int kAhead>
void launch_hoist(const ChainBlockParams& p, cudaStream_t stream) {
  const int64_t columns = p.batch * p.corrected();
  const dim3 grid(ceil_div<int64_t>(p.rank, kRowTiles * kTileRows),
                  ceil_div<int64_t>(columns, kColumnTiles * kTileColumns));
  chain_hoist<T, kRowTiles, kColumnTiles, kWarps, kAhead>
      <<<grid, kWarps * kWarpSize, 0, stream>>>(p);
}

}  // namespace

int draft_chain_pool_cuda(const ChainBlockParams& p, void* stream) {
  const int status = dispatch_dtype(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    if (p.batch * p.corrected() == 0) return static_cast<int>(kOk);
    if constexpr (std::is_same_v<T, float>) {
      return static_cast<int>(kBadDtype);
    } else {
      if (p.batch * p.corrected() <= kFewColumns) {
        launch_hoist<T, 1, 2, 32, 4>(p, as_stream(stream));
      } else {
        launch_hoist<T, 2, 4, 8, 2>(p, as_stream(stream));
      }
      return launched();
    }
  });
  if (status != kOk) return status;
  ShortlistParams list{};
  list.ids = p.pool;
  list.winners = p.keys;
  list.tile_max = p.exact ? p.tile_max : nullptr;
  list.workspace = p.shortlist;
  list.base_logits = static_cast<const char*>(p.base_logits) +
                     p.first_slot * p.base_slot_stride * (p.base_dtype == DType::kF32 ? 4 : 2);
  list.mask = p.mask;
  list.bias = p.bias;
  list.num_active = p.num_active;
  list.batch = p.batch;
  list.slots = p.drafts;
  // drawn drafts come from the pool in front of the prefix's end too
  list.prefix = p.temperature ? 0 : p.prefix < p.drafts ? p.prefix : p.drafts;
  list.vocab = p.vocab;
  list.vocab_valid = p.vocab_valid;
  list.pools = p.pools;
  list.size = p.pool_size;
  list.winners_stride = p.drafts;
  list.base_batch_stride = p.base_batch_stride;
  list.base_slot_stride = p.base_slot_stride;
  list.mask_stride = p.mask_stride;
  list.bias_stride = p.bias_stride;
  list.dtype = p.base_dtype;
  list.portable = p.portable;
  list.overlap = true;
  return shortlist_cuda(list, stream);
}

}  // namespace domino
