#include <algorithm>

#include "head/draft_chain.cuh"

namespace domino {

namespace {

constexpr int64_t kMaxGridY = 65535;

bool fits_mma(const DraftChainParams& p) {
  const auto rows = [](const void* pointer, int64_t length) {
    return is_aligned(pointer, 16) && length % 8 == 0;
  };
  return p.dtype != DType::kF32 && rows(p.w_ih, p.inputs) && rows(p.w_hh, p.units) &&
         rows(p.w1, p.hidden_width + p.units) && p.hidden_width % 8 == 0 && rows(p.w2, p.rank) &&
         rows(p.embedding, p.inputs) && rows(p.hidden, p.hidden_batch_stride) &&
         p.hidden_slot_stride % 8 == 0;
}

// kWide: more than 8 batch rows, so that the weights are read once for several tiles of them.
template <class T, class Base, bool kMma, bool kWide>
int launch(const DraftChainArgs& p, const DeviceInfo& device, cudaStream_t stream) {
  constexpr int kTiles = kWide ? 2 : 1, kScoreTiles = kWide ? 4 : 1;
  const int64_t corrected = p.corrected();
  const auto tiles = [](int64_t columns, int count) -> unsigned {
    return ceil_div<int64_t>(columns, count * kTileColumns);
  };
  const unsigned rank_blocks = ceil_div<int64_t>(p.rank, kTileRows);
  const unsigned vocab_blocks =
      std::min<int64_t>(ceil_div<int64_t>(p.vocab, kTileRows * kHeadWarps),
                        2 * static_cast<int64_t>(device.processors));
  const dim3 hidden_grid(rank_blocks, tiles(p.batch * corrected, kTiles));
  const dim3 state_grid(ceil_div<int64_t>(p.units, 8), tiles(p.batch, kTiles));
  const dim3 low_rank_grid(rank_blocks, tiles(p.batch, kTiles));
  const dim3 score_grid(vocab_blocks, tiles(p.batch, kScoreTiles));
  if (hidden_grid.y > kMaxGridY || state_grid.y > kMaxGridY) return kBadArgument;

  const int64_t ids = p.batch * p.drafts;
  const cudaError_t cleared = cudaMemsetAsync(p.keys, 0, ids * sizeof(*p.keys), stream);
  if (cleared != cudaSuccess) return cleared;
  const auto run = [&](bool overlap, dim3 grid, auto kernel, auto... arguments) {
    launch_kernel(overlap, grid, kHeadThreads, stream, kernel, p, arguments...);
  };
  if (const int prefix = static_cast<int>(std::min(p.prefix, p.drafts))) {
    const dim3 grid(std::min(vocab_blocks, 64u), std::min(p.batch * prefix, kMaxGridY));
    run(false, grid, chain_base<Base>, prefix);
  }
  const bool overlap = device.major >= 9 && !p.portable;
  if (corrected > 0) {
    const bool gru = p.w_hh != nullptr;
    if (p.hidden_width > 0) run(false, hidden_grid, chain_hidden<T, kMma, kTiles>);
    for (int j = 0; j < p.drafts; ++j) {
      if (gru) run(overlap, state_grid, chain_state<T, kMma, kTiles>, j);
      if (j < p.prefix) continue;
      const auto low_rank =
          gru ? chain_low_rank<T, kMma, kTiles, true> : chain_low_rank<T, kMma, kTiles, false>;
      run(overlap, low_rank_grid, low_rank, j);
      run(overlap, score_grid, chain_score<T, Base, kMma, kScoreTiles>, j);
    }
  }
  run(overlap, ceil_div<int64_t>(ids, kHeadThreads), chain_finish);
  return launched();
}

template <class T, class Base>
int launch(const DraftChainParams& p, cudaStream_t stream) {
  DeviceInfo device;
  if (const int status = current_device(&device); status != kOk) return status;
  const DraftChainArgs args(p);
  if constexpr (!std::is_same_v<T, float>) {
    if (fits_mma(p) && p.batch > kTileColumns)
      return launch<T, Base, true, true>(args, device, stream);
    if (fits_mma(p)) return launch<T, Base, true, false>(args, device, stream);
  }
  return launch<T, Base, false, false>(args, device, stream);
}

int takes_block_form(const DraftChainParams& p, bool* takes) {
  *takes = fits_mma(p) && is_aligned(p.table, 16) && p.units % 16 == 0 && p.units <= 1024 &&
           p.rank % 16 == 0 && p.rank <= 256 && p.drafts < kEpochStride - 3 &&
           p.drafts > p.prefix && p.vocab < 1 << 27 && p.pool_size > 0;
  if (!*takes || p.w_hh != nullptr) return kOk;
  DeviceInfo device;
  const int status = current_device(&device);
  *takes = draft_chain_markov_fits(p, device.major, device.shared_memory);
  return status;
}

int launch_block_form(const DraftChainParams& params, void* stream) {
  ChainBlockParams p{};
  static_cast<DraftChainParams&>(p) = params;
  ChainBlockWorkspace(p).bind(p, p.workspace);
  const auto all = [](auto... phases) {
    int status = kOk;
    (void)((status = phases(), status == kOk) && ...);
    return status;
  };
  const bool gru = p.w_hh != nullptr;
  const auto chain = [&](bool restart) {
    return gru ? draft_chain_block_cuda(p, restart, stream)
               : draft_chain_markov_cuda(p, restart, stream);
  };
  const auto certify = [&](int round) {
    return p.exact ? draft_chain_certify_cuda(p, round, stream) : kOk;
  };
  return all([&] { return draft_chain_pool_cuda(p, stream); }, [&] { return chain(false); },
             [&] { return certify(0); }, [&] { return p.exact ? chain(true) : kOk; },
             [&] { return certify(1); },
             [&] { return p.exact ? draft_chain_finish_cuda(p, stream) : kOk; },
             [&] { return gru && !p.exact ? draft_chain_rescue_cuda(p, false, stream) : kOk; },
             [&] { return p.temperature ? draft_chain_law_cuda(p, stream) : kOk; });
}

}  // namespace

int draft_chain_cuda(const DraftChainParams& p, void* stream) {
  if (p.batch == 0 || p.drafts == 0) return kOk;
  bool block_form = false;
  if (const int status = takes_block_form(p, &block_form); status != kOk) return status;
  if (block_form) return launch_block_form(p, stream);
  if (p.temperature != nullptr) return kBadArgument;
  return dispatch_dtype(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    if (p.base_dtype == p.dtype) return launch<T, T>(p, as_stream(stream));
    if (p.base_dtype == DType::kF32) return launch<T, float>(p, as_stream(stream));
    return static_cast<int>(kBadDtype);
  });
}

}  // namespace domino
