// Where a nucleus cuts a row of bf16 logits that a cluster holds in its registers, and which tokens
// can win the row's race, whatever the cut. The steps of verify_nucleus.cuh.
#pragma once

#include "verify/bin_rows.cuh"
#include "verify/draft_row.cuh"
#include "verify/ranked_tokens.cuh"
#include "verify/row_counter.cuh"

namespace domino {

constexpr int kOwnRows = ceil_div(kOctaves, kRankedBlocks);  // of a block, a warp each
static_assert(kOwnRows <= kJudge);
constexpr int kMostCandidates = kJudge * kWarpSize;  // one to a thread of any block

enum class NucleusWay : uint32_t { kSettled, kRace, kByValue };

// What the leader tells all blocks of the row.
struct alignas(16) NucleusVerdict {
  NucleusWay way;
  Outcome outcome;
  float cut_logit;
  int32_t cut_id;  // as SlotVerdict's
  uint64_t mass;
  uint64_t draft_sum;
  float draft_top;
  uint32_t one_hot;
  uint64_t unused;
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

struct NucleusShared {
  alignas(16) uint32_t count[kValueBins];  // of this block
  alignas(8) uint32_t top;                 // logit_key
  uint32_t near;                           // tokens in the bins around 0 that are not 0
  uint32_t candidates;                     // tokens that may win the race
  alignas(8) WarpMass mass[kCutWarps];     // of their groups' greatest tokens, about
  float logit[kMostCandidates];
  uint32_t word[kMostCandidates];
  int32_t token[kMostCandidates];
  uint16_t near_token[kNearTokens];  // bf16
  NucleusVerdict verdict;
  uint64_t go;  // NucleusWay, where the verdict's is kRace
  PoolAhead pool;
  // of the leader
  alignas(16) uint64_t row_mass[kOctaves];
  alignas(16) WarpTime times[kRankedReaders + 1];
  NucleusVerdict out;
};

__device__ __forceinline__ void count_group(uint32_t* bins, const Group<bf16>& group,
                                            uint32_t& nearest) {
  const uint32_t words[4] = {group.words.x, group.words.y, group.words.z, group.words.w};
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    nearest = __viaddmax_s16x2(~words[n] & 0x7fff7fffu, 0x00010001u, nearest);
    const uint32_t both = value_bins(words[n]);
    atomicAdd(&bins[both & 0xffffu], 1u);
    atomicAdd(&bins[both >> 16], 1u);
  }
}

// The cluster's counts of a lane's bins of a row. -0 is +0.
__device__ __forceinline__ uint4 cluster_bins(const RowCluster& cluster, NucleusShared& s,
                                              int row) {
  const int lane = threadIdx.x % kWarpSize;
  uint4* own = reinterpret_cast<uint4*>(s.count) + row * kWarpSize + lane;
  uint4 theirs[kRankedBlocks], sum{0, 0, 0, 0};
#pragma unroll
  for (int block = 0; block < kRankedBlocks; ++block) theirs[block] = *cluster.map(own, block);
#pragma unroll
  for (int block = 0; block < kRankedBlocks; ++block)
    sum = {sum.x + theirs[block].x, sum.y + theirs[block].y, sum.z + theirs[block].z,
           sum.w + theirs[block].w};
  if (row == kZeroBin / kRowBins) {
    const uint32_t minus = lane < kRankedBlocks ? *cluster.map(s.count + kZeroBin + 1, lane) : 0;
    sum = join_zeros(row, sum, __reduce_add_sync(kFullMask, minus));
  }
  return join_zeros(row, sum, 0);
}

// What lies in a lane's bins of a row. near: what the tokens near 0 weigh more than 0 does
__device__ __forceinline__ void weigh_bins(const RowLaw& law, int row, const uint4& bins,
                                           uint64_t near, uint64_t (&mass)[4]) {
  const int bin = row * kRowBins + threadIdx.x % kWarpSize * 4;
  const uint32_t counts[4] = {bins.x, bins.y, bins.z, bins.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) mass[j] = counts[j] * to_fixed(law.weight(bin_logit(bin + j)));
  if (bin + 3 == kZeroBin) mass[3] += near;
}

__device__ __forceinline__ bool has_near(uint32_t nearest) {
  return ((nearest + kLeastBits * 0x10001u) & 0x80008000u) != 0;
}
// As note_near() and near_mass() of row_counter.cuh.
static __device__ __noinline__ void note_near(NucleusShared& s, uint4 words) {
  const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int n = 0; n < kGroup; ++n) {
    const uint32_t half = pairs[n / 2] >> (n % 2 * 16) & 0xffffu;
    if ((half & 0x7fffu) - 1 >= kLeastBits) continue;
    const uint32_t at = atomicAdd(&s.near, 1u);
    if (at < kNearTokens) s.near_token[at] = static_cast<uint16_t>(half);
  }
}
static __device__ __noinline__ uint64_t near_mass(NucleusShared& s, RowCluster cluster,
                                                  RowLaw law) {
  uint64_t sum = 0;
  for (int block = 0; block < cluster.size; ++block)
    for (uint32_t n = 0; n < *cluster.map(&s.near, block); ++n) {
      const uint32_t half = cluster.map(s.near_token, block)[n];
      sum += to_fixed(law.weight(__uint_as_float(half << 16))) - to_fixed(law.weight(0.0f));
    }
  return sum;
}

__device__ __forceinline__ uint64_t sum_up_to(uint64_t own) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const uint64_t left = __shfl_up_sync(kFullMask, own, step);
    if (lane >= step) own += left;
  }
  return own;
}

// The cut, from the masses of all rows of bins. bins_of(row): a lane's bins of a row; near: as
// weigh_bins(). By a warp.
template <class Bins>
__device__ __forceinline__ ValueCut find_cut(const uint64_t* row_mass, const RowLaw& law,
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

// The probability of a kept token less q, as exact_weight(); not from DrawWeights, whose pool ptxas
// 13.0 takes for local memory here.
__device__ __forceinline__ float less_pool(const ChainRequest& r, int i, const PoolAhead& pool,
                                           const NucleusVerdict& verdict, float weight,
                                           int32_t token) {
  const int count = static_cast<int>(r.p.pool);
  int at = pool.find(token, count);
  float logit = at >= 0 ? pool.logit[at] : 0.0f;
#pragma unroll 1
  for (int m = PoolAhead::kCount; m < count && at < 0; ++m)
    if (r.draft_ids(i)[m] == token) logit = r.draft_row(i).at(at = m);
  const float p = mul_rn(weight, div_rn(kFixedOne, static_cast<float>(verdict.mass)));
  if (at < 0) return p;
  const RowLaw draft(verdict.draft_top, verdict.draft_sum, law_scale(r.draft_temperature));
  return add_rn(p, -draft.probability(logit));
}

// Lists those of this lane's eight tokens that may be soon enough. limit: of a word, of a token of
// weight 1. By a whole warp.
__device__ __forceinline__ void list_candidates(NucleusShared& s, const Group<bf16>& group,
                                                int token, const AboutWeight& weight,
                                                const RaceNoise& noise, float limit) {
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
    float logit = group.at(0);
    uint32_t word = words[0];
#pragma unroll
    for (int j = 1; j < kGroup; ++j) {
      logit = which == j ? group.at(j) : logit;
      word = which == j ? words[j] : word;
    }
    if (!(static_cast<float>(word) <= weight.of(logit) * limit)) continue;
    const uint32_t at = atomicAdd(&s.candidates, 1u);
    if (at >= kMostCandidates) return;
    s.logit[at] = logit;
    s.word[at] = word;
    s.token[at] = token + which;
  }
}

}  // namespace domino
