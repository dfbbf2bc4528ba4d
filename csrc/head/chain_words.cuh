// What the chain of one batch row tells its certificate while it still runs: words with tags, as
// chain_exchange.cuh has them, where the forms without an input table keep what they guess.
#pragma once

#include "head/chain_exchange.cuh"

namespace domino {

struct ChainWords {
  InputWord* keys;     // [drafts]: order and id of an argmax key
  uint64_t* low_rank;  // [corrected, rank / 2]: two elements of u and the tag

  __device__ explicit ChainWords(const ChainExchange& exchange)
      : keys(exchange.inputs(1, 0, 0)),
        low_rank(reinterpret_cast<uint64_t*>(keys + kEpochStride)) {}

  __device__ __forceinline__ void send_key(int j, unsigned long long key, uint32_t epoch) const {
    send(keys + j, InputWord{__uint_as_float(static_cast<uint32_t>(key >> 32)),
                             __uint_as_float(static_cast<uint32_t>(key)), 0.0f, epoch + j});
  }
  // elements: those of `pair` of u's column `at`
  __device__ __forceinline__ void send_low_rank(int at, int rank, int pair, uint32_t elements,
                                                uint32_t tag) const {
    send(low_rank + (at * rank / 2 + pair), static_cast<uint64_t>(tag) << 32 | elements);
  }
  // Whether the key of draft j is there; then *key is.
  __device__ __forceinline__ bool take_key(int j, uint32_t epoch, unsigned long long* key) const {
    const InputWord word = look(keys + j);
    *key = static_cast<unsigned long long>(__float_as_uint(word.r)) << 32 | __float_as_uint(word.z);
    return word.tag == epoch + j;
  }
  // Likewise elements k .. k + 7 of a column.
  __device__ __forceinline__ bool take_low_rank(int at, int rank, int k, uint32_t tag,
                                                uint4* eight) const {
    const uint64_t* const from = low_rank + (at * rank + k) / 2;
    const ulonglong2 low = look_twice(from), high = look_twice(from + 2);
    *eight = {static_cast<uint32_t>(low.x), static_cast<uint32_t>(low.y),
              static_cast<uint32_t>(high.x), static_cast<uint32_t>(high.y)};
    const auto right = [tag](uint64_t word) { return static_cast<uint32_t>(word >> 32) == tag; };
    return right(low.x) && right(low.y) && right(high.x) && right(high.y);
  }
};

// What control->begun is where they are sent: the launch's epoch, and the draft that it begins
// with.
__device__ __forceinline__ uint32_t begun_word(uint32_t epoch, int first) { return epoch + first; }
__device__ __forceinline__ int begun_draft(uint32_t begun) {
  return static_cast<int>(begun % kEpochStride) - 1;
}
__device__ __forceinline__ uint32_t begun_epoch(uint32_t begun) {
  return begun - begun_draft(begun);
}

}  // namespace domino
