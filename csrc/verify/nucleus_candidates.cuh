// Which tokens can win the race of a row, whatever the cut of its nucleus, and what its blocks tell
// each other about them. The steps of verify_nucleus_draws.cuh and verify_plain_draws.cuh.
#pragma once

#include "verify/nucleus_row.cuh"

namespace domino {

constexpr int kMostReaders = RowBlocks<6>::kReaders;
constexpr int kMostCandidates = kJudge * kWarpSize;  // one to a thread of any block

// The time that some token surely takes less than, over the mass of the greatest tokens of a
// block's groups, or over the least that the row's greatest token weighs: no more than the row.
constexpr float kNucleusTime = 12.0f;
constexpr float kLeastTop = 0.35f;

enum class NucleusWay : uint32_t { kSettled, kRace, kByValue };

// What the leader tells all blocks of the row.
struct alignas(16) NucleusVerdict {
  NucleusWay way;
  float cut_logit;
  int32_t cut_id;  // as SlotVerdict's
  uint32_t unused;
};
constexpr int kVerdictParts = sizeof(NucleusVerdict) / 16;

// The least time of a warp's tokens.
struct alignas(16) WarpTime {
  unsigned long long key;
  uint32_t bound;  // a float: tokens of this block that are not listed take longer
  uint32_t tied;   // does this one tie with a cut that not all ties are on the right side of?
};

// What a warp's tokens weigh, in units of the weight of one of them.
struct WarpMass {
  float sum;
  float logit;
};

// Of a block.
struct Candidates {
  alignas(8) WarpMass mass[kCutWarps];  // of their groups' greatest tokens, about
  uint32_t candidates;                  // tokens that may win the race
  float logit[kMostCandidates];
  uint32_t word[kMostCandidates];
  int32_t token[kMostCandidates];
};

struct NucleusDrawsShared : NucleusCounts, Candidates {
  alignas(16) NucleusVerdict verdict;
  uint64_t go;  // NucleusWay, where the verdict's is kRace
  PoolAhead pool;
  // of the leader
  alignas(16) uint64_t row_mass[kOctaves];
  alignas(16) WarpTime times[kMostReaders + 1];
  NucleusVerdict out;
};

// The cut, from the masses of all rows of bins. bins_of(row): a lane's bins of a row; near: as
// weigh_bins(). By a warp.
template <class Bins>
__device__ __forceinline__ ValueCut find_row_and_cut(const uint64_t* row_mass, const RowLaw& law,
                                                     float top_p, uint64_t near, Bins bins_of) {
  const int lane = threadIdx.x % kWarpSize;
  const ulonglong2 own = reinterpret_cast<const ulonglong2*>(row_mass)[lane];
  uint64_t up_to = sum_up_to(own.x + own.y);
  const uint64_t target = nucleus_cut(__shfl_sync(kFullMask, up_to, kWarpSize - 1), top_p);
  int from = __ffs(__ballot_sync(kFullMask, up_to >= target)) - 1;
  uint64_t before = up_to - own.x - own.y;
  const bool first = before + own.x >= target;
  if (!first) before += own.x;
  const int row = __shfl_sync(kFullMask, 2 * lane + (first ? 0 : 1), from);
  before = __shfl_sync(kFullMask, before, from);

  const uint4 bins = bins_of(row);
  uint64_t mass[4];
  weigh_bins(law, row, bins, near, mass);
  const uint64_t of_lane = mass[0] + mass[1] + mass[2] + mass[3];
  up_to = before + sum_up_to(of_lane);
  from = __ffs(__ballot_sync(kFullMask, up_to >= target)) - 1;
  before = up_to - of_lane;
  const uint32_t counts[4] = {bins.x, bins.y, bins.z, bins.w};
  uint32_t count = counts[0];
  int at = 0;
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    if (at != j || before + mass[j] >= target) continue;
    before += mass[j];
    at = j + 1;
    count = counts[at];
  }
  const int bin = __shfl_sync(kFullMask, row * kRowBins + lane * 4 + at, from);
  return cut_ties(bin_logit(bin), __shfl_sync(kFullMask, before, from),
                  __shfl_sync(kFullMask, count, from), target, law);
}

// The weight of a logit, 2^-16 of it more or less.
class AboutWeight {
 public:
  __device__ __forceinline__ explicit AboutWeight(const RowLaw& law)
      : scale_(law.scale), unit_(law.shift - kRoundMagic) {}
  __device__ __forceinline__ float of(float logit) const {
    return exp2_about(fma_rn(logit, scale_, unit_));
  }

 private:
  float scale_, unit_;
};

// The time that some token surely takes less than, by what the first `warps` warps of this block
// have left. By a warp.
__device__ __forceinline__ float sure_time(const Candidates& s, int warps,
                                           const AboutWeight& about) {
  const int lane = threadIdx.x % kWarpSize;
  float mass = 0.0f;
  if (lane < warps && s.mass[lane].sum > 0.0f)
    mass = s.mass[lane].sum * about.of(s.mass[lane].logit);
  return kNucleusTime / fmaxf(warp_sum(mass), kLeastTop);
}

// The winner of a race, from the times of all warps; -1: nobody is sure to be it. By a warp.
template <class Row>
__device__ __forceinline__ int32_t sure_winner(const WarpTime* times) {
  const int lane = threadIdx.x % kWarpSize;
  uint32_t bound = ~0u, ties = 0;
  unsigned long long mine = kNoWinner;
#pragma unroll
  for (int n = lane; n < Row::kReaders; n += kWarpSize) {
    const WarpTime time = times[n];
    bound = min(bound, time.bound);
    if (time.key < mine) {
      mine = time.key;
      ties = time.tied;
    }
  }
  const unsigned long long least = least_of_warp(mine);
  bound = __reduce_min_sync(kFullMask, bound);
  const bool tied = __any_sync(kFullMask, mine == least && ties != 0);
  return least == kNoWinner || tied || least >> 32 > bound
             ? -1
             : static_cast<int32_t>(least & 0xffffffffu);
}

// Lists those of this lane's eight tokens that may be soon enough. limit: of a word, of a token of
// weight 1. By a whole warp.
__device__ __forceinline__ void list_candidates(Candidates& s, const Group<bf16>& group, int token,
                                                const AboutWeight& weight, const RaceNoise& noise,
                                                float limit) {
  // half a word is the least that there is
  const float reach = weight.of(greater_half(group.most())) * limit;
  if (!__any_sync(kFullMask, reach >= 0.5f)) return;
  const uint32_t most = __float2uint_rz(reach);
  uint32_t words[kGroup], least = ~0u, chance = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const NoiseWords four = noise.words(static_cast<uint32_t>(token / 4 + half));
#pragma unroll
    for (int j = 0; j < 4; ++j) least = min(least, words[4 * half + j] = four.word[j]);
  }
  if (!(reach >= 0.5f) || least > most) return;
#pragma unroll
  for (int j = 0; j < kGroup; ++j) chance |= (words[j] <= most ? 1u : 0u) << j;
#pragma unroll 1
  for (; chance != 0; chance &= chance - 1) {
    const int which = __ffs(chance) - 1;
    float logit;
    uint32_t word;
    pick_token(group, words, which, logit, word);
    if (!(static_cast<float>(word) <= weight.of(logit) * limit)) continue;
    const uint32_t at = atomicAdd(&s.candidates, 1u);
    if (at >= kMostCandidates) return;
    s.logit[at] = logit;
    s.word[at] = word;
    s.token[at] = token + which;
  }
}

}  // namespace domino
