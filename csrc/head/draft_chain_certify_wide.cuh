// draft_chain_certify for many columns, on warpgroup tensor cores (sm_90a): the same work, screen
// and bits as chain_certify, which see. A warpgroup owns 64 rows of W2 at a time, in registers as
// the A operand; the block's columns stay in shared memory as B, 56 to a tile. Bound by tensor
// cores.
#pragma once

#include "common/wgmma.cuh"
#include "head/draft_chain_certify.cuh"

namespace domino {

constexpr int kWarpgroupWarps = 4;
constexpr int kWarpgroupRows = kWarpgroupWarps * kTileRows;

struct WideTile {
  uint4 u[kScoreSteps][2][kWgmmaColumns];  // a wgmma_operand each
};

template <class T, class Base, int kRank>
__global__ void __launch_bounds__(kCertifyThreads, 1)
    chain_certify_wide(const __grid_constant__ ChainBlockParams p, int most, bool) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint4 memory[];
  __shared__ int slots[kCertifyWarps];
  using Rows = CertifyRows<T, 1, kRank>;
  auto* const stages = reinterpret_cast<typename Rows::Stage*>(memory);
  WideTile* const u = reinterpret_cast<WideTile*>(stages + kCertifyWarps);
  CertifyColumn* const columns = reinterpret_cast<CertifyColumn*>(u + most / kWgmmaColumns);
  float* const limits = reinterpret_cast<float*>(columns + most);  // [groups, 2, most]
  int* const list = reinterpret_cast<int*>(limits + 4 * most);
  const ScoreSteps steps(p.rank);
  const int vocab = static_cast<int>(p.vocab), groups = ceil_div(vocab, kWarpgroupRows);
  const int64_t all_columns = p.batch * p.corrected();
  const T* w2 = static_cast<const T*>(p.w2);
  typename Rows::Stage& stage = stages[warp_id()];

  previous_launch_done();
  const uint32_t aborted = p.control->aborted;
  const PendingRows<kCertifyThreads> pending(p, list, slots);
  if (aborted || pending.count == 0) return;
  const CertifyShare share = certify_share<kWgmmaColumns>(p, pending, most, columns);
  constexpr int kGroups = kCertifyWarps / kWarpgroupWarps;  // warpgroups of the block
  const int warpgroup = warp_id() / kWarpgroupWarps;
  const int row_of_warp = warp_id() % kWarpgroupWarps * kTileRows;
  int group = share.turn * kGroups + warpgroup;
  const int step = share.turns * kGroups;
  if (group < groups) Rows::fetch(stage, w2, group * kWarpgroupRows + row_of_warp, vocab, steps);
  for (int i = threadIdx.x; i < share.tiles * kScoreSteps * 2 * kWgmmaColumns;
       i += kCertifyThreads) {
    const int column = i / (2 * kScoreSteps) % kWgmmaColumns;
    const int tile = i / (2 * kScoreSteps * kWgmmaColumns), step = i / 2 % kScoreSteps;
    const int n = tile * kWgmmaColumns + column;
    uint4* to = &u[tile].u[step][i % 2][column];
    if (n < share.columns && steps.used(step) && steps.k(step) < steps.rank) {
      copy_async16(shared_address(to), static_cast<const T*>(p.low_rank) +
                                           static_cast<int64_t>(columns[n].index) * p.rank +
                                           steps.k(step) + i % 2 * 8);
    } else {
      *to = {0, 0, 0, 0};
    }
  }
  copy_async_commit();
  copy_async_wait<0>();
  fence_async_proxy();
  __syncthreads();

  // The limits of a group's tile of ids, two groups of which take turns in shared memory: this
  // thread's columns are loaded while the group before is multiplied.
  constexpr int kMine = 3;
  const int thread = threadIdx.x % (kWarpgroupWarps * kWarpSize);
  float most_base[kMine];
  const auto load_limits = [&](int of_group) {
    const float* from = p.tile_max + of_group * kWarpgroupRows / kPoolTile * all_columns;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int n = thread + i * kWarpgroupWarps * kWarpSize;
      most_base[i] = n < share.columns && of_group < groups ? from[columns[n].index] : 0.0f;
    }
  };
  const auto store_limits = [&](float* to) {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int n = thread + i * kWarpgroupWarps * kWarpSize;
      if (n < share.tiles * kWgmmaColumns) to[n] = certify_limit(columns[n].winner, most_base[i]);
    }
    asm volatile("bar.sync %0, %1;" ::"r"(1 + warpgroup), "n"(kWarpgroupWarps * kWarpSize)
                 : "memory");
  };
  float* limit = limits + warpgroup * 2 * most;
  float* next_limit = limit + most;
  load_limits(group);
  store_limits(limit);
  for (; group < groups; group += step) {
    const int row0 = group * kWarpgroupRows + row_of_warp;
    Rows rows;
    rows.take(stage, steps);
    if (group + step < groups)
      Rows::fetch(stage, w2, (group + step) * kWarpgroupRows + row_of_warp, vocab, steps);
    load_limits(group + step);
    for (int tile = 0; tile < share.tiles; ++tile) {
      float sums[kScoreChains][kWgmmaColumns / 2];
      const uint64_t operand = wgmma_operand(&u[tile]);
      wgmma_begin();
#pragma unroll
      for (int q = 0; q < kScoreChains; ++q)
#pragma unroll
        for (int i = 0; i < kChainSteps; ++i) {
          const int at = q * kChainSteps + i;
          wgmma_64x56x16<T>(sums[q], rows.a[0][at],
                            operand + at * (sizeof(WideTile) / kScoreSteps / 16), i > 0);
        }
      wgmma_commit();
      wgmma_wait<0>();
      const int column = tile * kWgmmaColumns + lane_id() % 4 * 2;
      bool may = false;
#pragma unroll
      for (int j = 0; j < kWgmmaColumns / 8; ++j) {
        const float2 of_pair = *reinterpret_cast<const float2*>(limit + column + j * 8);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& sum = sums[0][4 * j + i];
          sum = (sum + sums[1][4 * j + i]) + (sums[2][4 * j + i] + sums[3][4 * j + i]);
        }
        may |= !(fmaxf(sums[0][4 * j], sums[0][4 * j + 2]) < of_pair.x);
        may |= !(fmaxf(sums[0][4 * j + 1], sums[0][4 * j + 3]) < of_pair.y);
      }
      if (!may) continue;
#pragma unroll
      for (int i = 0; i < kWgmmaColumns / 4; ++i) {
        const int n = column + i / 2 * 8 + i % 2;
        const float of_column[2] = {sums[0][i / 2 * 4 + i % 2], sums[0][i / 2 * 4 + 2 + i % 2]};
        if (!(fmaxf(of_column[0], of_column[1]) < limit[n]))
          certify_ids<Base>(p, columns[n], row0 + lane_id() / 4, of_column);
      }
    }
    store_limits(next_limit);
    float* const used = limit;
    limit = next_limit;
    next_limit = used;
  }
  certify_finish(p, pending);
#endif
}

}  // namespace domino
