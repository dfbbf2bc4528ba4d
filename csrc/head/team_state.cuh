// The blocks of the team form that hold W_hh: the products with S_j of all rows of the launch, for
// the teams' next step.
//
// A block has 32 units, its 8 warps two of the 16 parts of k each, as MMA fragments in registers.
// Batch rows are the columns of the MMAs, 8 at a time.
#pragma once

#include "head/team_layout.cuh"

namespace domino {

template <class T, int kSteps>
struct StateRole {
  using Memory = StateMemory;
  static constexpr int kMmas = kTeamParts * kSteps;  // of a warp, for 16 units of a gate
  static constexpr int kPairs = kMmas / 2;           // of 32 k
  static constexpr int kTiles = kStateUnits / 16;
  using Stages = WeightStages<T, kMmas, 3 * kTiles>;
  uint4 w[3 * kTiles][kMmas];  // of tile i / 3, gate i % 3

  __device__ __forceinline__ void load(const TeamArgs& p, char* memory, int unit0) {
    const int units = static_cast<int>(p.units), k0 = threadIdx.x / kWarpSize * kMmas * 16;
    const auto rows = [&](int i) {
      const int unit = unit0 + i / 3 * 16;
      const T* const row =
          static_cast<const T*>(p.w_hh) + static_cast<int64_t>(i % 3 * units + unit) * units + k0;
      return WeightRows<T>{unit < units ? row : nullptr, units};
    };
    const Stages stages{shared_address(memory), min(p.stages, Stages::kSixteens)};
    stages.fetch(0, units - k0, rows);
    stages.take(w, units - k0, rows);
    __syncthreads();  // the products' sums will stand there
  }

  // From draft `from` on; start: the first draft of each row.
  __device__ __forceinline__ void run(const TeamArgs& p, const ChainExchange& exchange,
                                      char* memory, const int* start, int unit0, int from,
                                      uint32_t epoch) const {
    uint32_t* const aborted = &p.control->aborted;
    const int units = static_cast<int>(p.units), drafts = static_cast<int>(p.drafts);
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int g = lane / 4, t = lane % 4, k0 = warp * kMmas * 16;
    const StateWords words_at{p.teams, round_up(units, 32)};
    uint32_t every = 0;  // words of a row that there are
#pragma unroll
    for (int i = 0; i < kMmas; ++i)
      if (k0 + i * 16 < units) every |= 1u << i;
    int turn = 0;
#pragma unroll 1
    for (int j = from; j + 1 < drafts; ++j) {
      const uint64_t tag = state_tag(j);
      const char* const states = reinterpret_cast<const char*>(exchange.states<T>(0, j));
#pragma unroll 1
      for (int tile = 0; tile < p.teams; tile += 8, ++turn) {
        float* const buffer = reinterpret_cast<float*>(memory + (turn & 1) * Memory::kBuffer);
        const int row = min(tile + g, p.teams - 1), columns = min(p.teams - tile, 8);
        const int starts = tile + g < p.teams ? start[row] : drafts;
        uint64_t words[kPairs][2] = {};
        if (p.restart && starts == j + 1 && starts < drafts) {
          const T* const state =
              static_cast<const T*>(p.states) + ((p.row0 + row) * drafts + j) * units + k0 + 4 * t;
#pragma unroll
          for (int i = 0; i < kMmas; ++i)
            if (every >> i & 1)
              words[i / 2][i % 2] = *reinterpret_cast<const uint64_t*>(state + i * 16);
        }
        await_state(words, states + words_at.at(row, k0, t), words_at.stride(row), tag,
                    j >= starts ? every : 0, aborted);
#pragma unroll
        for (int of = 0; of < kTiles; ++of)
#pragma unroll
          for (int gate = 0; gate < 3; ++gate) {
            float sums[kTeamParts][4];
#pragma unroll
            for (int i = 0; i < kSteps; ++i)
#pragma unroll
              for (int part = 0; part < kTeamParts; ++part) {
                const int at = part * kSteps + i;
                const uint4 a = w[of * 3 + gate][at];
                const uint64_t b = words[at / 2][at % 2];
                const uint32_t b0 = static_cast<uint32_t>(b), b1 = static_cast<uint32_t>(b >> 32);
                if (i == 0) {
                  mma_first_16x8x16<T>(sums[part], a.x, a.y, a.z, a.w, b0, b1);
                } else {
                  mma_16x8x16<T>(sums[part], a.x, a.y, a.z, a.w, b0, b1);
                }
              }
            store_sums(buffer + warp * Memory::kPart + gate * kStateUnits + of * 16, columns, sums);
          }
        __syncthreads();
        // warp r sums and sends row r, a lane one unit
        if (warp < columns && j + 1 >= start[tile + warp] && unit0 + lane < units) {
          const float* const of_unit = buffer + warp * Memory::kColumn + lane;
          const auto sum = [&](int gate) {
            return sum_of<kTeamWarps, Memory::kPart>(of_unit + gate * kStateUnits);
          };
          send(exchange.inputs(0, tile + warp, 0) + unit0 + lane,
               InputWord{sum(0), sum(1), sum(2), epoch + j});
        }
      }
    }
  }

 private:
  // Two parts of k of 16 units and 8 columns, together.
  static __device__ __forceinline__ void store_sums(float* to, int columns,
                                                    const float (&sums)[kTeamParts][4]) {
    static_assert(kTeamParts == 2);
    const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
    to += 2 * t * Memory::kColumn + g;
    if (2 * t < columns) to[0] = sums[0][0] + sums[1][0], to[8] = sums[0][2] + sums[1][2];
    if (2 * t + 1 < columns) {
      to[Memory::kColumn] = sums[0][1] + sums[1][1];
      to[Memory::kColumn + 8] = sums[0][3] + sums[1][3];
    }
  }

  // This lane's words of a row, `stride` bytes from 32 units to the next: bit 2i + h of `wanted`
  // says whether word h of the i-th is there to come; the others stay.
  static __device__ __forceinline__ void await_state(uint64_t (&words)[kPairs][2], const char* from,
                                                     int stride, uint64_t tag, uint32_t wanted,
                                                     uint32_t* aborted) {
    uint32_t missing = wanted;
    await(
        [&] {
#pragma unroll
          for (int i = 0; i < kPairs; ++i)
            look_twice_if(words[i], from + i * stride, missing >> 2 * i & 3);
#pragma unroll
          for (int i = 0; i < kMmas; ++i)
            if (has_state_tag(words[i / 2][i % 2], tag)) missing &= ~(1u << i);
          return missing == 0;
        },
        aborted);
#pragma unroll
    for (int i = 0; i < kMmas; ++i)
      if (wanted >> i & 1) words[i / 2][i % 2] &= ~kStateTagBits;
  }
};

}  // namespace domino
