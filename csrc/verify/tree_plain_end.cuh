// The end of a walk in tree_plain.cuh, and in tree_finish.cuh where nothing filters and no q is
// dense: the token that comes last, by a cluster, all of whose warps but one a block read the row
// where the walk ends. That one, the clerk, emits in the first block.
//
// At a leaf the race does not wait for the sum of the row: its greatest logit gives the weights,
// and bounds the race, since no token's E is above kLongestTime. Warps tell each other what theirs
// is, sum while that is on its way, and race; the clerk joins the sums meanwhile.
#pragma once

#include "verify/cluster_mail.cuh"
#include "verify/tree_last_row.cuh"
#include "verify/tree_path.cuh"
#include "verify/tree_taken.cuh"

namespace domino {

constexpr int kPlainThreads = 384, kPlainWarps = kPlainThreads / kWarpSize;
constexpr int kReaders = kPlainWarps - 1, kClerk = kReaders;

constexpr float kLongestTime = 23.0f;  // exponential() ends at 33 ln 2

// The winner of a warp. Of greedy requests the key is ~logit_key, id.
struct alignas(16) Winner {
  unsigned long long key;
  uint64_t logit;  // its bits
};

// What the readers of a cluster tell.
struct alignas(16) SharedDraw {
  Mailbox top_mail, mail;
  uint64_t tops[16 * kReaders];  // logit_key
  Winner winners[16 * kReaders];

  __device__ __forceinline__ void open() {
    top_mail.open();
    mail.open();
  }
};

// RaceNoise::words() in a loop: code that runs once takes longer to fetch than to run.
__device__ __forceinline__ NoiseWords looped_words(const RaceNoise& noise, uint32_t group) {
  const uint64_t key = static_cast<uint64_t>(noise.noise.seed);
  const uint64_t start = static_cast<uint64_t>(noise.noise.block_start);
  uint32_t c0 = group, c1 = (static_cast<uint32_t>(noise.i) & 0xffffffu) | noise.purpose << 24;
  uint32_t c2 = static_cast<uint32_t>(start), c3 = static_cast<uint32_t>(start >> 32);
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma unroll 1
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = mul_high(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const uint32_t high1 = mul_high(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

constexpr int kQuads = kLaneGroups * kGroup / 4;

// A lane's groups, four tokens on: those of groups[0] come last.
template <class T>
__device__ __forceinline__ void next_quad(Group<T> (&groups)[kLaneGroups]) {
  const Group<T> first = groups[0];
#pragma unroll
  for (int g = 0; g < kLaneGroups; ++g) {
    const Group<T>& next = g + 1 < kLaneGroups ? groups[g + 1] : first;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        groups[g].values[j] = groups[g].values[4 + j];
        groups[g].values[4 + j] = next.values[j];
      }
    } else {
      groups[g].words = {groups[g].words.z, groups[g].words.w, next.words.x, next.words.y};
    }
  }
}

// The winner among a warp's chunks, least E / weight, and its logit in *logit; the weight is the
// law's times `unit`, less what is taken off it, if not null. Its time is `bound` at most, or there
// is none. As race_chunks
// (tree_last_row.cuh), but in few instructions: most of them run once.
template <class T>
__device__ __forceinline__ unsigned long long race_few(LastRow<T>* row, const RowLaw& law,
                                                       float unit, const SharedTaken* taken,
                                                       const RaceNoise& noise, float bound,
                                                       float* logit) {
  unsigned long long own = kNoWinner;
  // half a word over this weight is as late as the bound
  const float least = __log2f(__fdividef(0x1p-33f, bound * unit)) - 0.01f;
  row->for_each_chunk([&](int, int token) {
    Group<T>(&groups)[kLaneGroups] = row->groups;
    if (!__any_sync(kFullMask, law.exponent(lane_top(groups)) >= least)) return;
#pragma unroll 1
    for (int quad = 0; quad < kQuads; ++quad, next_quad(groups)) {
      const Group<T>& group = groups[0];
      const int first = token + quad / 2 * kGroupStep + quad % 2 * 4;
      const float top = fmaxf(fmaxf(group.at(0), group.at(1)), fmaxf(group.at(2), group.at(3)));
      if (!__any_sync(kFullMask, law.exponent(top) >= least)) continue;
      const float limit = bound * (1.001f * 0x1p32f);
      const float reach = mul_rn(law.weight(top), unit) * limit;
      const uint32_t most = __float2uint_rz(reach);
      const NoiseWords words = looped_words(noise, static_cast<uint32_t>(first / 4));
      uint32_t chance = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) chance |= (words.word[j] <= most ? 1u : 0u) << j;
      if (reach < 0.5f) chance = 0;
#pragma unroll 1
      for (; chance != 0; chance &= chance - 1) {
        const int which = __ffs(chance) - 1;
        float here;
        uint32_t word;
        pick_token(group, words.word, which, here, word);
        float weight = mul_rn(law.weight(here), unit);
        if (!(static_cast<float>(word) <= weight * limit)) continue;
        if (taken != nullptr) weight = add_rn(weight, -taken->of(first + which));
        if (!(weight > 0.0f)) continue;
        const unsigned long long mine = race_key(weight, word, first + which);
        if (mine < own) *logit = here;
        own = min(own, mine);
      }
      // who is later than another of the warp needs no look; kNoWinner is NaN here
      const uint32_t least = __reduce_min_sync(kFullMask, static_cast<uint32_t>(own >> 32));
      bound = fminf(bound, __uint_as_float(least));
    }
  });
  return own;
}

// Where a walk ends.
struct PlainEnd {
  int last;         // of the path
  uint32_t status;  // of it
  bool greedy;
  bool leaf;
  RaceNoise noise;  // these not of greedy requests: the race's,
  float top;        // and at a node with children its law,
  uint64_t sum;
  const SharedTaken* taken;  // what is taken off its tokens' weights, or null,
  float mass;                // about what that leaves of them,
  float unit;                // and what they are multiplied by before
};

// By all threads of the cluster; where a greedy walk ends at a node with children, its token is
// known. chunks: of a row, in shared memory where there are clusters.
template <bool kArgmaxOnly, class T>
__device__ __forceinline__ void end_walk(const RowCluster& cluster, const TreeRequest& r,
                                         PlainEnd end, float scale, LastRow<T>* row,
                                         ChunkStats* chunks, Mailbox* chunk_mail,
                                         SharedDraw* shared) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int count = cluster.size * kReaders, slot = warp * cluster.size + cluster.rank;
  const bool greedy = kArgmaxOnly || end.greedy, reads = warp != kClerk;
  const bool emits = !reads && cluster.rank == 0;
  const bool sums = !kArgmaxOnly && end.leaf && r.p.chosen_logprob != nullptr;
  const auto tell = [&](unsigned long long key, float logit, int blocks) {
    const uint64_t words[2] = {key, __float_as_uint(logit)};
    shared->mail.send(cluster, shared->winners + slot, words, blocks);
  };
  uint32_t faults = 0;
  if (end.leaf) {
    const auto tell_top = [&](uint32_t key) {
      const uint64_t words[1] = {key};
      shared->top_mail.send(cluster, shared->tops + slot, words);
    };
    uint32_t key = 0;
    unsigned long long best = kNoWinner;
    if (!greedy && reads && row->first >= row->count) tell_top(key);
    row->for_each_chunk([&](int chunk, int token) {
      const uint32_t own = logit_key(lane_top(row->groups));
      ChunkStats stats{__reduce_max_sync(kFullMask, own), {0, 0, 0}};
      const float top = key_logit(stats.key);
      key = max(key, stats.key);
      if (greedy)
        best = min(best, static_cast<unsigned long long>(~stats.key) << 32 |
                             first_of(row->groups, token, top, own == stats.key));
      else if (chunk + row->stride >= row->count)
        tell_top(key);
      if (!sums) return;
      if (stats.key < kInfinityKey && stats.key > kEmptyKey)
        chunk_digits(row->groups, top, scale, stats.digits);
      const uint64_t words[2] = {static_cast<uint64_t>(stats.digits[0]) << 32 | stats.key,
                                 static_cast<uint64_t>(stats.digits[2]) << 32 | stats.digits[1]};
      chunk_mail->send(cluster, chunks + chunk, words, 1);
    });
    if (greedy) {
      if (reads) tell(best, 0.0f, 1);
    } else {
      shared->top_mail.wait(cluster, count * static_cast<int>(sizeof(uint64_t)));
      key = 0;
#pragma unroll
      for (int k = 0; k < ceil_div(16 * kReaders, kWarpSize); ++k)
        if (lane + k * kWarpSize < count)
          key = max(key, static_cast<uint32_t>(shared->tops[lane + k * kWarpSize]));
      end.top = key_logit(__reduce_max_sync(kFullMask, key));
      faults = row_faults(end.top);
    }
    if (sums && emits) {
      chunk_mail->wait_as(cluster, lane == 0, row->count * static_cast<int>(sizeof(ChunkStats)));
      const RowStats stats = join_chunks(
          row->count, scale, false, true, [&](int c) { return chunks[c]; }, [](int) { return 0u; });
      end.sum = stats.sum;
      if (greedy) end.top = stats.top;
    } else if (sums) {
      Mailbox::pass(cluster);
    }
    if (greedy && !emits) return Mailbox::pass(cluster);
  }
  RowLaw law(end.top, 1, scale);
  if (emits) law.log_sum = RowLaw(end.top, end.sum, scale).log_sum;
  const float whole = static_cast<float>(end.sum) * (1.0f / kFixedOne);
  float bound = end.leaf ? __fdividef(kLongestTime, law.weight(end.top))
                         : __fdividef(kSureTime, fmaxf(end.mass, 0.0f));
#pragma unroll 1
  for (int turn = 0; faults == 0; ++turn) {
    float logit = 0.0f;
    if constexpr (!kArgmaxOnly) {
      if (reads) {
        const unsigned long long own =
            race_few(row, law, end.unit, end.taken, end.noise, bound, &logit);
        const unsigned long long key = warp_least(own);
        const unsigned has = __ballot_sync(kFullMask, own == key);
        tell(key, __shfl_sync(kFullMask, logit, __ffs(has) - 1), cluster.size);
      }
    }
    shared->mail.wait_as(cluster, greedy ? lane == 0 : threadIdx.x == 0,
                         count * static_cast<int>(sizeof(Winner)), turn);
    unsigned long long own = kNoWinner;
#pragma unroll 1
    for (int k = lane; k < count; k += kWarpSize) {
      const Winner other = shared->winners[k];
      if (other.key < own) logit = __uint_as_float(static_cast<uint32_t>(other.logit));
      own = min(own, other.key);
    }
    const unsigned long long key = warp_least(own);
    if (greedy) {
      logit = key_logit(~static_cast<uint32_t>(key >> 32));
      faults = row_faults(logit);
      if (faults != 0) break;
    }
    const bool found = __uint_as_float(static_cast<uint32_t>(key >> 32)) <= bound;  // or NaN
    if (greedy || found || (bound == INFINITY && end.taken == nullptr)) {
      if (emits && own == key)
        emit_last(r, end.last, static_cast<int64_t>(key & 0xffffffffu),
                  r.p.chosen_logprob != nullptr ? law.log_probability(logit) : 0.0f, end.status);
      return;
    }
    cluster.sync();  // nobody reads the winners any more
    if (bound == INFINITY) {
      end.status |= kZeroResidual;  // what is left of p is nothing up to rounding
      end.taken = nullptr;
      end.unit = 1.0f;
      end.noise.purpose = kBonusDraw;
      bound = __fdividef(kSureTime, whole);
    } else {
      bound = INFINITY;
    }
  }
  if (emits && lane == 0) emit_last(r, end.last, -1, 0.0f, end.status | faults);
}

}  // namespace domino
