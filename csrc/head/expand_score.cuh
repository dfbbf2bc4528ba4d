// The last launch of expand: scores of a part of the candidates for 8 or 32 paths, then children.
//
// W2 is read once for the block's paths, kAhead chunks of a warp's 16 rows in flight while those
// before are multiplied. The scores stay in shared memory, and a warp takes a path: it finds the
// part's k best and the sum of the other weights relative to the part's greatest score. The block
// that comes last merges the parts: the k best of all lie in the k parts whose best is greatest,
// and every sum is of positive terms. Which scores meet in a part depends on the number of
// candidates alone, so a path's bits do not depend on the others. Bytes: W2 (or the pool's rows of
// it) and the base rows; bound by that stream over the whole vocabulary, by latency on a pool.
#pragma once

#include "common/reduce.cuh"
#include "head/expand.cuh"

namespace domino {

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    value = fmaxf(value, __shfl_xor_sync(kFullMask, value, offset));
  return value;
}

__device__ __forceinline__ uint64_t warp_max(uint64_t key) {
  const uint32_t high = __reduce_max_sync(kFullMask, static_cast<uint32_t>(key >> 32));
  const uint32_t low = key >> 32 == high ? static_cast<uint32_t>(key) : 0u;
  return static_cast<uint64_t>(high) << 32 | __reduce_max_sync(kFullMask, low);
}

struct Ranked {
  uint64_t key;
  int at;
};

// Room for the candidates of warp_top.
DOMINO_HD int64_t top_bytes(int64_t n, int64_t k) {
  return k * ((n + kWarpSize - 1) / kWarpSize) * sizeof(Ranked);
}

// The warp's up to k greatest of keys key_at(0 .. n - 1), 0: none: emit(rank, key, position), each
// in some lane. Lane i holds positions i, i + 32, ..: the k best are in the k lanes whose own best
// are greatest, and no smaller than the least of those. Returns how many there are.
template <class KeyAt, class Emit>
__device__ __forceinline__ int warp_top(int n, int k, Ranked* list, KeyAt key_at, Emit emit) {
  const int lane = lane_id();
  uint64_t best = 0;
#pragma unroll 4
  for (int i = lane; i < n; i += kWarpSize) {
    const uint64_t key = key_at(i);
    best = key > best ? key : best;
  }
  int above = 0;  // lanes whose best is greater
#pragma unroll
  for (int other = 0; other < kWarpSize; ++other) {
    const uint64_t its = __shfl_sync(kFullMask, best, other);
    above += its > best || (its == best && other < lane);
  }
  const int last = __ffs(__ballot_sync(kFullMask, above == k - 1)) - 1;
  const uint64_t least = __shfl_sync(kFullMask, best, last);
  const uint64_t bound = least > 1 ? least : 1;
  int count = 0;
  for (int i0 = 0; i0 < n; i0 += kWarpSize) {
    const uint64_t key = i0 + lane < n && above < k ? key_at(i0 + lane) : 0;
    const unsigned taken = __ballot_sync(kFullMask, key >= bound);
    if (key >= bound) list[count + __popc(taken & ((1u << lane) - 1))] = {key, i0 + lane};
    count += __popc(taken);
  }
  __syncwarp();
  for (int e = lane; e < count; e += kWarpSize) {
    const Ranked mine = list[e];
    int rank = 0;
    for (int other = 0; other < count; ++other) {
      const uint64_t key = list[other].key;
      rank += key > mine.key || (key == mine.key && other < e);
    }
    if (rank < k) emit(rank, mine.key, mine.at);
  }
  __syncwarp();
  return min(count, k);
}

// A block's share of the candidates.
struct ExpandShare {
  const ExpandArgs& p;
  int part;
  int count;           // candidates in it
  const int32_t* ids;  // shared memory; null over the vocabulary

  __device__ int id(int i) const { return ids != nullptr ? ids[i] : first() + i; }
  __device__ int first() const { return part * static_cast<int>(p.at.part_size); }
};

// The k best of a part for path n, by one warp. score, value: [count] in shared memory, which hold
// the same scores; one array where children are not drawn.
__device__ __forceinline__ void expand_select(const ExpandShare& share, int64_t column, int64_t n,
                                              float* score, float* value, Ranked* list) {
  const ExpandArgs& p = share.p;
  const ChildLaw law(p, n);
  float top = -INFINITY;
  float* out = scores_of(p, n);
  for (int i = lane_id(); i < share.count; i += kWarpSize) {
    top = fmaxf(top, score[i]);
    if (out != nullptr) out[share.first() + i] = score[i];
  }
  top = warp_max(top);
  if (law.drawn && share.ids == nullptr) {  // four ids of a group share their noise
    for (int i = lane_id() * 4; i < share.count; i += kWarpSize * 4) {
      const NoiseWords noise = law.words(static_cast<uint32_t>((share.first() + i) / 4));
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (i + j < share.count) value[i + j] = law.race_value(score[i + j], noise.word[j]);
    }
  } else if (law.drawn) {
    for (int i = lane_id(); i < share.count; i += kWarpSize) {
      const NoiseWords noise = law.words(static_cast<uint32_t>(share.ids[i] / 4));
      const int lane = share.ids[i] % 4;
      const uint32_t low = lane == 0 ? noise.word[0] : noise.word[1];
      const uint32_t word = lane < 2 ? low : lane == 2 ? noise.word[2] : noise.word[3];
      value[i] = score[i] > -INFINITY ? law.race_value(score[i], word) : -INFINITY;
    }
  } else if (value != score) {
    for (int i = lane_id(); i < share.count; i += kWarpSize) value[i] = score[i];
  }
  __syncwarp();
  const int64_t parts = p.at.parts, at_list = column * p.children * parts + share.part;
  uint64_t* keys = p.scratch<uint64_t>(p.at.keys) + at_list;
  float* scores = p.scratch<float>(p.at.scores) + at_list;
  float best = 0.0f;  // weights of this lane's share of the k best
  const int found = warp_top(
      share.count, static_cast<int>(p.children), list,
      [&](int i) { return ChildLaw::key(value[i], share.id(i)); },
      [&](int rank, uint64_t key, int at) {
        keys[rank * parts] = key;
        scores[rank * parts] = score[at];
        best += law.weight(score[at], top);
        score[at] = -INFINITY;
      });
  for (int c = found + lane_id(); c < p.children; c += kWarpSize) keys[c * parts] = 0;
  float rest = 0.0f;
#pragma unroll 4
  for (int i = lane_id(); i < share.count; i += kWarpSize) rest += law.weight(score[i], top);
  rest = warp_sum(rest);
  best = warp_sum(best);
  if (lane_id() == 0)
    p.scratch<ExpandPart>(p.at.part)[column * parts + share.part] = {top, rest, rest + best, 0.0f};
}

// Bytes of shared memory in which a warp merges: the parts' best and what warp_top needs, later
// the candidates; behind it the children.
DOMINO_HD int64_t merge_bytes(int64_t k, int64_t parts) {
  const int64_t heads = parts * 8 + top_bytes(parts, k), candidates = k * k * 12;
  return ((heads > candidates ? heads : candidates) + k * 8 + 15) / 16 * 16;
}

// The children of path n from its parts, by one warp.
__device__ __forceinline__ void expand_merge(const ExpandArgs& p, int64_t column, int64_t n,
                                             unsigned char* memory) {
  constexpr int kPartsALane = (kMaxParts + kWarpSize - 1) / kWarpSize;
  const int k = static_cast<int>(p.children), parts = static_cast<int>(p.at.parts);
  const int lane = lane_id();
  const ChildLaw law(p, n);
  const ExpandPart* part = p.scratch<ExpandPart>(p.at.part) + column * parts;
  const uint64_t* keys = p.scratch<uint64_t>(p.at.keys) + column * k * parts;
  const float* scores = p.scratch<float>(p.at.scores) + column * k * parts;
  uint64_t* head = reinterpret_cast<uint64_t*>(memory);                  // [parts]
  uint64_t* candidate = head;                                            // [k, k]
  float* candidate_score = reinterpret_cast<float*>(candidate + k * k);  // [k, k]
  float* child_score = reinterpret_cast<float*>(memory + merge_bytes(k, parts)) - k;
  uint32_t* child = reinterpret_cast<uint32_t*>(child_score) - k;

  float top_of[kPartsALane], sum_of[kPartsALane], top = -INFINITY;
#pragma unroll
  for (int i = 0; i < kPartsALane; ++i) {
    const int at = i * kWarpSize + lane;
    top_of[i] = at < parts ? __ldcg(&part[at].top) : -INFINITY;
    sum_of[i] = at < parts ? __ldcg(&part[at].sum) : 0.0f;
    if (at < parts) head[at] = __ldcg(keys + at);
    top = fmaxf(top, top_of[i]);
  }
  top = warp_max(top);
  __syncwarp();
  // No other part can hold one of the k best: k parts have a better one each.
  const int lists = warp_top(
      parts, k, reinterpret_cast<Ranked*>(head + parts), [&](int i) { return head[i]; },
      [&](int rank, uint64_t, int at) {
        child[rank] = at;
        head[at] = 0;
      });
  float left = 0.0f;
#pragma unroll
  for (int i = 0; i < kPartsALane; ++i) {
    const int at = i * kWarpSize + lane;
    if (at < parts && head[at] != 0) left += law.weight(top_of[i], top) * sum_of[i];
  }
  if (lane < lists) {
    const ExpandPart* from = part + child[lane];
    left += law.weight(__ldcg(&from->top), top) * __ldcg(&from->rest);
  }
  __syncwarp();
  for (int i = lane; i < k * k; i += kWarpSize) {
    const bool there = i / k < lists;
    const int64_t at = there ? static_cast<int64_t>(i % k) * parts + child[i / k] : 0;
    const uint64_t key = __ldcg(keys + at);
    const float score = __ldcg(scores + at);
    candidate[i] = there ? key : 0;
    candidate_score[i] = there && key != 0 ? score : -INFINITY;
  }
  __syncwarp();
  int count = 0;
  const auto best_of_lane = [&] {
    Ranked best{0, -1};
    for (int i = lane; i < k * k; i += kWarpSize)
      if (candidate[i] > best.key) best = {candidate[i], i};
    return best;
  };
  Ranked mine = best_of_lane();
  for (; count < (law.one_hot ? 1 : k); ++count) {
    const uint64_t greatest = warp_max(mine.key);
    if (greatest == 0) break;
    const int owner = __ffs(__ballot_sync(kFullMask, mine.key == greatest)) - 1;
    if (lane == owner) {
      child[count] = key_id(greatest);
      child_score[count] = candidate_score[mine.at];
      candidate[mine.at] = 0;
      candidate_score[mine.at] = -INFINITY;
      mine = best_of_lane();
    }
  }
  __syncwarp();
  for (int i = lane; i < k * k; i += kWarpSize) left += law.weight(candidate_score[i], top);
  left = warp_sum(left);

  const float score = lane < count ? child_score[lane] : -INFINITY;
  const float weight = law.weight(score, top);
  if (law.drawn)  // up to the first without mass
    count = min(count, __clz(__brev(~__ballot_sync(kFullMask, weight > 0.0f))));
  left += warp_sum(lane >= count ? weight : 0.0f);
  float remaining = 0.0f;
  for (int c = count - 1; c >= 0; --c) {
    left += __shfl_sync(kFullMask, weight, c);
    if (lane == c) remaining = left;
  }
  if (!(left > 0.0f)) count = 0;
  if (lane < k) {
    const int64_t at = n * k + lane;
    const bool there = lane < count;
    p.tokens[at] = there ? static_cast<int64_t>(child[lane]) : -1;
    p.log_probs[at] = there ? law.log_prob(score, top, left) : -INFINITY;
    p.log_remaining[at] = there ? law.log_remaining(remaining, left) : -INFINITY;
  }
}

// Where the shared memory of a block of expand_score is, in bytes.
struct ScoreMemory {
  int64_t scores;    // f32 [columns][part_size]
  int64_t values;    // the same, where children are drawn; otherwise the scores
  int64_t low_rank;  // T, blocked [columns, rank]
  int64_t ids;       // i32 [part_size], of a pool
  int64_t lists;     // [selecting warps][top_bytes]
  int64_t bytes;

  DOMINO_HD ScoreMemory(const ExpandParams& p, const ExpandWorkspace& at, int columns, int size) {
    const int64_t rows = columns * at.part_size * 4;
    scores = 0;
    values = p.drawn != 0 ? rows : 0;
    low_rank = values + rows;
    ids = low_rank + columns * ((p.rank + kChunk - 1) / kChunk) * kChunk * size;
    lists = ids + (p.pool != nullptr ? at.part_size * 4 : 0);
    bytes = lists + selecting(p) * top_bytes(at.part_size, p.children);
    const int64_t merging = selecting(p) * merge_bytes(p.children, at.parts);
    bytes = bytes > merging ? bytes : merging;
  }

  // Warps that select and merge: as many as have room.
  static DOMINO_HD int selecting(const ExpandParams& p) {
    return p.children > 16 ? kHeadWarps / 2 : kHeadWarps;
  }
};

// Grid: x = parts, y = tiles / kTiles.
template <class T, class Base, bool kMma, int kTiles>
__global__ void __launch_bounds__(kHeadThreads, 2)
    expand_score(const __grid_constant__ ExpandArgs p, int corrected) {
  using Tile = RowTile<T, kMma>;
  constexpr int kColumns = kTiles * kTileColumns, kAhead = kTiles > 1 ? 2 : 4;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ const Base* base_of[kColumns];  // null: no path
  __shared__ bool corrected_of[kColumns];
  __shared__ unsigned int arrived;
  const ScoreMemory at(p, p.at, kColumns, sizeof(T));
  const int size = static_cast<int>(p.at.part_size);
  float* const score = reinterpret_cast<float*>(memory + at.scores);
  float* const value = reinterpret_cast<float*>(memory + at.values);
  int32_t* const ids = reinterpret_cast<int32_t*>(memory + at.ids);
  const int64_t first_tile = static_cast<int64_t>(blockIdx.y) * kTiles;
  const int64_t first_column = first_tile * kTileColumns;
  ExpandShare share{p, static_cast<int>(blockIdx.x), 0, p.pool != nullptr ? ids : nullptr};
  share.count = min(size, static_cast<int>(p.candidates) - share.first());

  if (threadIdx.x < kColumns) {
    const int64_t n = p.layout.path(p, first_column + threadIdx.x);
    const ExpandPath path(p, max(n, int64_t{0}));
    base_of[threadIdx.x] = n < 0 || path.token < 0 ? nullptr : p.base_row<Base>(path);
    corrected_of[threadIdx.x] = path.corrected;
  }
  if (p.pool != nullptr) {
    const int64_t b = first_tile / p.layout.tiles_a_batch;
    for (int i = threadIdx.x; i < share.count; i += kHeadThreads) {
      const int32_t id = p.pool[b * p.candidates + share.first() + i];
      ids[i] = id < p.vocab ? id : -1;
    }
  }
  __syncthreads();

  // A step is kAhead chunks of the 16 rows of a round; a warp has rounds of 16 rows.
  const T* w2 = static_cast<const T*>(p.w2);
  const int chunks = ceil_div<int>(p.rank, kChunk), length = corrected ? p.rank : 0;
  const int steps_a_round = corrected ? ceil_div(chunks, kAhead) : 1;
  const int g = lane_id() / 4, t = lane_id() % 4;
  struct Step {
    typename Tile::Row low[kAhead], high[kAhead];
    float base[kTiles][4];  // of a round's first step
  };
  const auto row_id = [&](int round, int half) {
    const int r = (warp_id() + round * kHeadWarps) * kTileRows + g + 8 * half;
    return r < share.count ? share.id(r) : -1;
  };
  const auto load = [&](Step& step, int s) {
    const int round = s / steps_a_round, batch = s % steps_a_round;
    const int id[2] = {row_id(round, 0), row_id(round, 1)};
    const T* low = w2 + max(id[0], 0) * p.rank;
    const T* high = w2 + max(id[1], 0) * p.rank;
    const int first = kMma ? id[0] : max(id[0], id[1]);  // RowTile: low is as long as high
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int k0 = (batch * kAhead + i) * kChunk;
      step.low[i] = Tile::row(low, k0, first < 0 ? 0 : length);
      step.high[i] = Tile::row(high, k0, id[1] < 0 ? 0 : length);
    }
    if (batch != 0) return;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Base* row = base_of[tile * kTileColumns + 2 * t + i % 2];
        step.base[tile][i] =
            row != nullptr && id[i / 2] >= 0 ? to_float(row[id[i / 2]]) : -INFINITY;
      }
  };
  T* const low_rank = reinterpret_cast<T*>(memory + at.low_rank);
  const BlockedColumns<T> columns{low_rank, chunks};
  float base[kTiles][4], sums[kTiles][4];
  const auto multiply = [&](const Step& step, int s) {
    const int round = s / steps_a_round, batch = s % steps_a_round;
    if (batch == 0) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          base[tile][i] = step.base[tile][i];
          sums[tile][i] = 0.0f;
        }
    }
    if (corrected) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
          Tile::add(sums[tile], step.low[i], step.high[i],
                    Tile::column(columns, tile, (batch * kAhead + i) * kChunk, length));
    }
    if (batch + 1 != steps_a_round) return;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int c = tile * kTileColumns + 2 * t + i % 2;
        const int r = (warp_id() + round * kHeadWarps) * kTileRows + g + i / 2 * 8;
        const float delta = corrected_of[c] ? sums[tile][i] : 0.0f;
        if (r < share.count) score[c * size + r] = ChildLaw::finite(base[tile][i] + delta);
      }
  };
  const int rounds = ceil_div(max(share.count - warp_id() * kTileRows, 0), kPartTile);
  const int steps = rounds * steps_a_round;
  Step even, odd;
  load(even, 0);
  previous_launch_done();
  if (corrected) {
    const auto* from = reinterpret_cast<const uint4*>(p.low_rank_columns<T>(first_tile).base);
    const int words = kColumns * chunks * kChunk * static_cast<int>(sizeof(T)) / 16;
    for (int i = threadIdx.x; i < words; i += kHeadThreads)
      reinterpret_cast<uint4*>(low_rank)[i] = from[i];
  }
  __syncthreads();
  for (int s = 0; s < steps; s += 2) {
    load(odd, s + 1);
    multiply(even, s);
    if (s + 1 == steps) break;
    load(even, s + 2);
    multiply(odd, s + 1);
  }
  __syncthreads();

  const int selecting = ScoreMemory::selecting(p);
  if (warp_id() < selecting) {
    auto* list = reinterpret_cast<Ranked*>(memory + at.lists +
                                           warp_id() * top_bytes(p.at.part_size, p.children));
    for (int c = warp_id(); c < kColumns; c += selecting)
      if (base_of[c] != nullptr)
        expand_select(share, first_column + c, p.layout.path(p, first_column + c), score + c * size,
                      value + c * size, list);
  }
  if (gridDim.x > 1) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
      arrived = atomicAdd(p.scratch<unsigned int>(p.at.arrived) + blockIdx.y, 1u) + 1;
    __syncthreads();
    if (arrived != gridDim.x) return;
    __threadfence();
  } else {
    __syncthreads();
  }
  if (warp_id() >= selecting) return;
  for (int c = warp_id(); c < kColumns; c += selecting) {
    const int64_t n = p.layout.path(p, first_column + c);
    if (base_of[c] != nullptr) {
      expand_merge(p, first_column + c, n,
                   memory + warp_id() * merge_bytes(p.children, p.at.parts));
    } else if (n >= 0) {
      for (int i = lane_id(); i < p.children; i += kWarpSize) {
        const int64_t to = n * p.children + i;
        p.tokens[to] = -1;
        p.log_probs[to] = p.log_remaining[to] = -INFINITY;
      }
      if (float* out = scores_of(p, n))
        for (int64_t i = lane_id(); i < p.candidates; i += kWarpSize) out[i] = -INFINITY;
    }
    __syncwarp();
  }
}

}  // namespace domino
