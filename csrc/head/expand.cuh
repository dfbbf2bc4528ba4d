// expand in three launches; formulas and rounding points stand in expand.h.
//
//   expand_hidden     W1h H of each path; only where it does not come hoisted   block: 16 of W1's
//   rows expand_state      S = GRU(E[token], parent state)                           block: 8 units
//   expand_low_rank   u from W1h H and W1s S                                    block: 16 of W1's
//   rows expand_score      scores, children and their law                            block: a part
//   of the
//                                                                               candidates, 8-32
//                                                                               paths
//
// A launch overlaps the one before it (launch_kernel), and the first the one before the call: the
// loads in front of previous_launch_done() are of weights only.
//
// expand_score reads W2 once for up to 32 paths. A block keeps the scores of its part in shared
// memory and a warp takes a path: it finds the part's k best and the sum of the other weights
// relative to the part's greatest score. The block that comes last merges: the k best of all lie in
// the k parts whose best is greatest, and every sum is of positive terms. Which scores meet in a
// part depends on the number of candidates alone, so a path's bits do not depend on the others.
// Bytes: W2 (or the pool's rows of it) and the base rows; bound by that stream over the whole
// vocabulary, by latency on a pool.
#pragma once

#include "common/reduce.cuh"
#include "head/expand.h"
#include "head/head_tile.cuh"

namespace domino {

constexpr int kPartTile = kHeadWarps * kTileRows;  // candidates a block scores at a time
constexpr int kMaxParts = 396;                     // 3 blocks on each of 132 processors

struct ExpandPart {
  float top;   // greatest score
  float rest;  // sum of weights relative to it, without the part's k best
  float sum;   // with them
  float unused;
};

// Columns of the MMA tiles: paths of one request fill whole tiles where they share a pool.
struct ExpandLayout {
  int64_t tiles;          // of 8 columns
  int64_t tiles_a_batch;  // 0: column n is path n

  DOMINO_HD explicit ExpandLayout(const ExpandParams& p) {
    tiles_a_batch = p.pool != nullptr ? (p.paths + kTileColumns - 1) / kTileColumns : 0;
    tiles = p.pool != nullptr ? p.batch * tiles_a_batch
                              : (p.batch * p.paths + kTileColumns - 1) / kTileColumns;
  }
  DOMINO_HD int64_t column(const ExpandParams& p, int64_t n) const {
    return tiles_a_batch == 0 ? n : n / p.paths * tiles_a_batch * kTileColumns + n % p.paths;
  }
  // -1 where the column holds no path
  DOMINO_HD int64_t path(const ExpandParams& p, int64_t column) const {
    if (tiles_a_batch == 0) return column < p.batch * p.paths ? column : -1;
    const int64_t width = tiles_a_batch * kTileColumns;
    return column % width < p.paths ? column / width * p.paths + column % width : -1;
  }
};

// What the launches hand on, and how the candidates are cut into parts. Elements of u are counted
// as 4 bytes, so that one workspace serves every dtype.
struct ExpandWorkspace {
  int64_t part_size, parts;
  int64_t from_hidden;  // f32 [batch * paths, rank]
  int64_t low_rank;     // blocked [columns, rank]: u
  int64_t part;         // ExpandPart [columns, parts]
  int64_t keys;         // u64 [columns, children, parts]: the parts' best, in falling order
  int64_t scores;       // f32 [columns, children, parts]
  int64_t arrived;      // u32 [tiles]: blocks that have put their part in
  int64_t bytes;

  DOMINO_HD explicit ExpandWorkspace(const ExpandParams& p) {
    const auto up = [](int64_t n, int64_t to) { return (n + to - 1) / to * to; };
    const int64_t tiles_a_part =
        (p.candidates + int64_t{kMaxParts} * kPartTile - 1) / (int64_t{kMaxParts} * kPartTile);
    part_size = kPartTile * tiles_a_part;
    parts = (p.candidates + part_size - 1) / part_size;
    const int64_t columns = up(ExpandLayout(p).tiles, 4) * kTileColumns, rows = columns * parts;
    int64_t at = 0;
    const auto take = [&](int64_t size) {
      const int64_t here = at;
      at += up(size, 256);
      return here;
    };
    from_hidden = take(p.batch * p.paths * p.rank * 4);
    low_rank = take(columns * up(p.rank, kChunk) * 4);
    part = take(rows * sizeof(ExpandPart));
    keys = take(rows * p.children * 8);
    scores = take(rows * p.children * 4);
    arrived = take(columns / kTileColumns * 4);
    bytes = at;
  }
};

struct ExpandArgs : ExpandParams {
  ExpandLayout layout;
  ExpandWorkspace at;

  explicit ExpandArgs(const ExpandParams& p) : ExpandParams(p), layout(p), at(p) {}

  template <class T>
  __device__ T* scratch(int64_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(workspace) + offset);
  }
  template <class T>
  __device__ BlockedColumns<T> low_rank_columns(int64_t tile) const {
    const int chunks = ceil_div<int>(rank, kChunk);
    return {scratch<T>(at.low_rank) + tile * chunks * kTileColumns * kChunk, chunks};
  }
  template <class Base>
  __device__ const Base* base_row(const ExpandPath& path) const {
    return static_cast<const Base*>(base_logits) + path.b * base_batch_stride +
           path.slot * base_slot_stride;
  }
  __device__ int64_t hidden_offset(const ExpandPath& path) const {
    return path.b * hidden_batch_stride + path.slot * hidden_slot_stride;
  }
};

// offset[column] = of_path(n) of the block's columns, the last path's past the end.
template <int kTiles, class OfPath>
__device__ __forceinline__ void fill_offsets(int64_t (&offset)[kTiles * kTileColumns],
                                             const ExpandArgs& p, OfPath of_path) {
  if (threadIdx.x < kTiles * kTileColumns) {
    const int64_t n = static_cast<int64_t>(blockIdx.y) * kTiles * kTileColumns + threadIdx.x;
    offset[threadIdx.x] = of_path(min(n, p.batch * p.paths - 1));
  }
  __syncthreads();
}

// No block of expand_score has arrived. By each launch in front of it, in one block.
__device__ __forceinline__ void expand_begin(const ExpandArgs& p) {
  if (blockIdx.x != 0 || blockIdx.y != 0) return;
  for (int64_t i = threadIdx.x; i < p.layout.tiles; i += kHeadThreads)
    p.scratch<unsigned int>(p.at.arrived)[i] = 0;
}

// from_hidden[n, :] = W1h H[slot of n]. Grid: x = W1's rows / 16, y = paths / (8 tiles)
template <class T, bool kMma, int kTiles>
__global__ void __launch_bounds__(kHeadThreads, 2)
    expand_hidden(const __grid_constant__ ExpandArgs p) {
  __shared__ int64_t offset[kTiles * kTileColumns];
  const GatheredColumns<T> columns{static_cast<const T*>(p.hidden), offset};
  const auto ready = [&] {
    previous_launch_done();
    expand_begin(p);
    fill_offsets<kTiles>(offset, p, [&](int64_t n) { return p.hidden_offset(ExpandPath(p, n)); });
  };
  const auto store = [&](int tile, int64_t row, int column, float sum) {
    const int64_t n = (blockIdx.y * int64_t{kTiles} + tile) * kTileColumns + column;
    if (n < p.batch * p.paths) p.scratch<float>(p.at.from_hidden)[n * p.rank + row] = sum;
  };
  project<T, kMma, kTiles>(static_cast<const T*>(p.w1), p.hidden_width + p.units, p.rank,
                           p.hidden_width, columns, ready, store);
}

// S of each path. Grid: x = units / 8, y = paths / (8 tiles)
template <class T, bool kMma, int kTiles>
__global__ void __launch_bounds__(kHeadThreads, 1)
    expand_state(const __grid_constant__ ExpandArgs p) {
  __shared__ int64_t token[kTiles * kTileColumns], of_x[kTiles * kTileColumns],
      of_state[kTiles * kTileColumns];
  const T* before = static_cast<const T*>(p.parent_states);
  T* after = static_cast<T*>(p.states);
  const auto ready = [&] {
    previous_launch_done();
    expand_begin(p);
    fill_offsets<kTiles>(token, p, [&](int64_t n) { return ExpandPath(p, n).token; });
    fill_offsets<kTiles>(
        of_x, p, [&](int64_t n) { return max(ExpandPath(p, n).token, int64_t{0}) * p.inputs; });
    fill_offsets<kTiles>(of_state, p, [&](int64_t n) { return parent_offset(p, n); });
  };
  const auto store = [&](int tile, int column, int64_t unit, float r, float z, float n_x,
                         float n_s) {
    const int c = tile * kTileColumns + column;
    const int64_t n = static_cast<int64_t>(blockIdx.y) * kTiles * kTileColumns + c;
    if (n >= p.batch * p.paths || token[c] < 0) return;
    if (p.table != nullptr) {
      const T* row = static_cast<const T*>(p.table) + token[c] * 3 * p.units;
      r += to_float(row[table_offset(unit, 0)]);
      z += to_float(row[table_offset(unit, 1)]);
      n_x += to_float(row[table_offset(unit, 2)]);
    }
    const float s = before != nullptr ? to_float(before[of_state[c] + unit]) : 0.0f;
    after[states_offset(p, n) + unit] = from_float<T>(gru_cell(r, z, n_x, n_s, s));
  };
  gru_tile<T, kMma, kTiles>(static_cast<const T*>(p.w_ih), static_cast<const T*>(p.w_hh), p.inputs,
                            p.units, p.table != nullptr ? 0 : p.inputs,
                            before != nullptr ? p.units : 0,
                            GatheredColumns<T>{static_cast<const T*>(p.embedding), of_x},
                            GatheredColumns<T>{before, of_state}, ready, store);
}

// u of each path. Grid: x = W1's rows / 16, y = paths / (8 tiles)
template <class T, bool kMma, int kTiles>
__global__ void __launch_bounds__(kHeadThreads, 2)
    expand_low_rank(const __grid_constant__ ExpandArgs p) {
  __shared__ int64_t offset[kTiles * kTileColumns];
  const bool recurrent = p.recurrent();
  const GatheredColumns<T> columns{static_cast<const T*>(recurrent ? p.states : p.embedding),
                                   offset};
  const auto ready = [&] {
    previous_launch_done();
    expand_begin(p);
    fill_offsets<kTiles>(offset, p, [&](int64_t n) {
      return recurrent ? states_offset(p, n) : max(ExpandPath(p, n).token, int64_t{0}) * p.inputs;
    });
  };
  const BlockedColumns<T> out = p.low_rank_columns<T>(0);
  const auto store = [&](int tile, int64_t row, int column, float sum) {
    const int c = tile * kTileColumns + column;
    const int64_t n = static_cast<int64_t>(blockIdx.y) * kTiles * kTileColumns + c;
    if (n >= p.batch * p.paths) return;
    float z = sum;
    if (p.from_hidden != nullptr) {
      z = p.from_hidden[p.hidden_offset(ExpandPath(p, n)) + row] + sum;
    } else if (p.hidden != nullptr) {
      z = p.scratch<float>(p.at.from_hidden)[n * p.rank + row] + sum;
    }
    const float own = recurrent ? 0.0f : to_float(*columns.at(tile, column, row));
    const int64_t at = p.layout.column(p, n);
    *out.at(at / kTileColumns, at % kTileColumns, row) =
        from_float<T>(low_rank_input(p.kind, z, own));
  };
  const int length = p.kind == LowRank::kRow ? 0 : static_cast<int>(p.units);
  project<T, kMma, kTiles>(static_cast<const T*>(p.w1) + p.hidden_width, p.hidden_width + p.units,
                           p.rank, length, columns, ready, store);
}

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

// The warp's up to k greatest keys in falling order: emit(i, position) runs in one lane, and has to
// make key_at(position) 0. best() gives {key, position} of the greatest of a lane's own. Returns
// how many there were.
template <class Best, class Emit>
__device__ __forceinline__ int warp_select(int k, Best best, Emit emit) {
  auto mine = best();
  int count = 0;
  for (; count < k; ++count) {
    const uint64_t greatest = warp_max(mine.key);
    if (greatest == 0) break;
    const int owner = __ffs(__ballot_sync(kFullMask, mine.key == greatest)) - 1;
    if (lane_id() == owner) {
      emit(count, mine.at);
      mine = best();
    }
  }
  __syncwarp();
  return count;
}

struct Positioned {
  uint64_t key;
  int at;
};

// The greatest of a lane's keys key_at(lane), key_at(lane + 32), .. below n.
template <class KeyAt>
__device__ __forceinline__ Positioned best_of(int n, KeyAt key_at) {
  Positioned best{0, -1};
  for (int i = lane_id(); i < n; i += kWarpSize) {
    const uint64_t key = key_at(i);
    if (key > best.key) best = {key, i};
  }
  return best;
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

// The k best of a part for one path, by one warp. score, value: [count] in shared memory.
__device__ __forceinline__ void expand_select(const ExpandShare& share, int64_t column, int64_t n,
                                              float* score, float* value) {
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
  const int64_t list = column * p.children * p.at.parts + share.part;
  uint64_t* keys = p.scratch<uint64_t>(p.at.keys) + list;
  float* scores = p.scratch<float>(p.at.scores) + list;
  float best = 0.0f;  // weights of this lane's share of the k best
  const auto key_at = [&](int i) { return ChildLaw::key(value[i], share.id(i)); };
  const int found = warp_select(
      static_cast<int>(p.children), [&] { return best_of(share.count, key_at); },
      [&](int c, int at) {
        keys[c * p.at.parts] = key_at(at);
        scores[c * p.at.parts] = score[at];
        best += law.weight(score[at], top);
        value[at] = score[at] = -INFINITY;
      });
  for (int c = found + lane_id(); c < p.children; c += kWarpSize) keys[c * p.at.parts] = 0;
  float rest = 0.0f;
  for (int i = lane_id(); i < share.count; i += kWarpSize) rest += law.weight(score[i], top);
  rest = warp_sum(rest);
  best = warp_sum(best);
  if (lane_id() == 0)
    p.scratch<ExpandPart>(p.at.part)[column * p.at.parts + share.part] = {top, rest, rest + best,
                                                                          0.0f};
}

// Bytes of shared memory in which a warp merges: the parts' best, later candidates; then children.
DOMINO_HD int64_t merge_bytes(int64_t children, int64_t parts) {
  const int64_t heads = parts * 8, candidates = children * children * 12;
  return ((heads > candidates ? heads : candidates) + children * 8 + 15) / 16 * 16;
}

// The children of path n from its parts, by one warp.
__device__ __forceinline__ void expand_merge(const ExpandArgs& p, int64_t column, int64_t n,
                                             unsigned char* memory) {
  const int k = static_cast<int>(p.children), parts = static_cast<int>(p.at.parts);
  const int lane = lane_id();
  const ChildLaw law(p, n);
  const ExpandPart* part = p.scratch<ExpandPart>(p.at.part) + column * parts;
  const uint64_t* keys = p.scratch<uint64_t>(p.at.keys) + column * k * parts;
  const float* scores = p.scratch<float>(p.at.scores) + column * k * parts;
  uint64_t* head = reinterpret_cast<uint64_t*>(memory);                  // [parts], then
  uint64_t* candidate = head;                                            // [k, k]
  float* candidate_score = reinterpret_cast<float*>(candidate + k * k);  // [k, k]
  float* child_score = reinterpret_cast<float*>(memory + merge_bytes(k, parts)) - k;
  uint32_t* child = reinterpret_cast<uint32_t*>(child_score) - k;

  float top = -INFINITY;
  for (int i = lane; i < parts; i += kWarpSize) {
    head[i] = __ldcg(keys + i);
    top = fmaxf(top, __ldcg(&part[i].top));
  }
  top = warp_max(top);
  // No other part can hold one of the k best: k parts have a better one each.
  const int lists = warp_select(
      k, [&] { return best_of(parts, [&](int i) { return head[i]; }); },
      [&](int t, int at) {
        child[t] = at;
        head[at] = 0;
      });
  float left = 0.0f;
  for (int i = lane; i < parts; i += kWarpSize)
    if (head[i] != 0) left += law.weight(__ldcg(&part[i].top), top) * __ldcg(&part[i].sum);
  if (lane < lists) {
    const ExpandPart* from = part + child[lane];
    left += law.weight(__ldcg(&from->top), top) * __ldcg(&from->rest);
  }
  __syncwarp();
  for (int i = lane; i < k * k; i += kWarpSize) {
    const int64_t at = i / k < lists ? static_cast<int64_t>(i % k) * parts + child[i / k] : -1;
    candidate[i] = at >= 0 ? __ldcg(keys + at) : 0;
    candidate_score[i] = candidate[i] != 0 ? __ldcg(scores + at) : -INFINITY;
  }
  __syncwarp();
  int count = warp_select(
      law.one_hot ? 1 : k, [&] { return best_of(k * k, [&](int i) { return candidate[i]; }); },
      [&](int c, int at) {
        child[c] = key_id(candidate[at]);
        child_score[c] = candidate_score[at];
        candidate[at] = 0;
        candidate_score[at] = -INFINITY;
      });
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

// Scores of a part for the block's columns, then its best; the last block merges. Grid: x = parts,
// y = tiles / kTiles. Shared memory: [kTiles * 8][part_size] scores, and as many race values where
// children are drawn; the merge uses the same.
template <class T, class Base, bool kMma, int kTiles>
__global__ void __launch_bounds__(kHeadThreads, kMma&& kTiles == 1 ? 3 : 2)
    expand_score(const __grid_constant__ ExpandArgs p, int corrected) {
  constexpr int kColumns = kTiles * kTileColumns, kAhead = 2;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ const Base* base_of[kColumns];  // null: no path
  __shared__ bool corrected_of[kColumns];
  __shared__ unsigned int arrived;
  const int size = static_cast<int>(p.at.part_size);
  float* const score = reinterpret_cast<float*>(memory);
  float* const value = p.drawn != 0 ? score + kColumns * size : score;
  int32_t* const ids = reinterpret_cast<int32_t*>(value + kColumns * size);
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

  const BlockedColumns<T> columns = p.low_rank_columns<T>(first_tile);
  const T* w2 = static_cast<const T*>(p.w2);
  const int g = lane_id() / 4, t = lane_id() % 4;
  bool waiting = true;
  const auto ready = [&] {
    if (waiting) previous_launch_done();
    waiting = false;
  };
  for (int r0 = warp_id() * kTileRows; r0 < share.count; r0 += kPartTile) {
    const int r[2] = {r0 + g, r0 + g + 8};
    int id[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) id[h] = r[h] < share.count ? share.id(r[h]) : -1;
    float base[kTiles][4], sums[kTiles][4] = {};
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Base* row = base_of[tile * kTileColumns + 2 * t + i % 2];
        base[tile][i] = row != nullptr && id[i / 2] >= 0 ? to_float(row[id[i / 2]]) : -INFINITY;
      }
    if (corrected)
      accumulate<RowTile<T, kMma>, kTiles, kAhead>(sums, w2 + max(id[0], 0) * p.rank,
                                                   w2 + max(id[1], 0) * p.rank, p.rank, columns, 0,
                                                   1, ready);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int c = tile * kTileColumns + 2 * t + i % 2;
        const float delta = corrected_of[c] ? sums[tile][i] : 0.0f;
        if (r[i / 2] < share.count)
          score[c * size + r[i / 2]] = ChildLaw::finite(base[tile][i] + delta);
      }
  }
  ready();  // a warp without rows
  __syncthreads();

  for (int c = warp_id(); c < kColumns; c += kHeadWarps)
    if (base_of[c] != nullptr)
      expand_select(share, first_column + c, p.layout.path(p, first_column + c), score + c * size,
                    value + c * size);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0)
    arrived = atomicAdd(p.scratch<unsigned int>(p.at.arrived) + blockIdx.y, 1u) + 1;
  __syncthreads();
  if (arrived != gridDim.x) return;
  __threadfence();
  const int merging = p.children > 16 ? kHeadWarps / 2 : kHeadWarps;  // as many fit the memory
  if (warp_id() >= merging) return;
  for (int c = warp_id(); c < kColumns; c += merging) {
    const int64_t n = p.layout.path(p, first_column + c);
    if (base_of[c] != nullptr) {
      expand_merge(p, first_column + c, n,
                   memory + warp_id() * merge_bytes(p.children, p.at.parts));
    } else if (n >= 0) {
      for (int i = lane_id(); i < p.children; i += kWarpSize) {
        const int64_t at = n * p.children + i;
        p.tokens[at] = -1;
        p.log_probs[at] = p.log_remaining[at] = -INFINITY;
      }
      if (float* out = scores_of(p, n))
        for (int64_t i = lane_id(); i < p.candidates; i += kWarpSize) out[i] = -INFINITY;
    }
    __syncwarp();
  }
}

}  // namespace domino
