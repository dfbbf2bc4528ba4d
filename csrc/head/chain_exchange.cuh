// Words by which the resident blocks of a launch pass values to each other through L2.
//
// A word is 8 or 16 bytes, written and read at once, and carries a tag beside its value: who sees
// the tag has the value, without fence or flag.
//
//   state   4 elements of S_j. |S_j| < 2 leaves bit 14 of each free (fp16 and bf16 alike): a tag of
//           4 bits, 1 + j / 2, with a buffer for even and one for odd drafts
//   key     an argmax key: value, id (27 bits), and j + 1 in 5 bits
//   u       2 elements and an epoch of 32 bits that no other launch has
//   input   three sums of fp32 and that epoch (chain_input.cuh)
//
// Tags that small must not be found where the last launch left them. So launches take turns between
// two sets of states and keys, and each clears the other's: kernel boundaries lie between.
//
// Waiting is bounded: a warp that waits for kPatience cycles sets *aborted and goes on with what it
// has, and so does every other; control flow stays as it is, so no barrier is left out.
#pragma once

#include <cstdint>

#include "common/launch.h"
#include "head/draft_chain.h"

namespace domino {

constexpr uint32_t kPatience = 1 << 19;  // about 280 us

// The sums of a unit's gates over a quarter of the inputs.
struct InputWord {
  float r, z, n;
  uint32_t tag;  // epoch + j
};

// Where the words stand: u of two groups, two sets of states and keys of two groups, inputs.
struct ChainExchange {
  char* at;
  int units, rank, set;

  __device__ ChainExchange(void* memory, int units, int rank, uint32_t epoch)
      : at(static_cast<char*>(memory)), units(units), rank(rank), set(epoch / kEpochStride & 1) {}
  __device__ uint4* low_rank(int group) const {  // [rows, rank / 4]
    return reinterpret_cast<uint4*>(at + group * kGroupRows * rank * 4);
  }
  __device__ int set_bytes() const { return 2 * (2 * kGroupRows * units * 2 + kKeyBytes); }
  __device__ char* set_at(int which) const {
    return at + 2 * kGroupRows * rank * 4 + which * set_bytes();
  }
  template <class T>
  __device__ T* states(int group, int j) const {  // [rows, units]
    return reinterpret_cast<T*>(set_at(set)) + (group * 2 + (j & 1)) * kGroupRows * units;
  }
  __device__ uint64_t* keys(int group) const {  // [rows, kGroup * words]
    return reinterpret_cast<uint64_t*>(set_at(set) + 4 * kGroupRows * units * 2 +
                                       group * kKeyBytes);
  }
  // kind: 0 of the token itself, 1 and 2 of what was guessed for even and odd drafts
  __device__ InputWord* inputs(int kind, int row, int quarter) const {  // [units]
    return reinterpret_cast<InputWord*>(set_at(2)) +
           ((kind * kGroupRows + row) * 4 + quarter) * units;
  }
  __device__ uint64_t* guess(int row, int j) const {
    return reinterpret_cast<uint64_t*>(inputs(3, 0, 0)) + row * kEpochStride + j;
  }
  __device__ void clear_other(int thread, int threads) const {
    uint4* const other = reinterpret_cast<uint4*>(set_at(set ^ 1));
    for (int i = thread; i < set_bytes() / 16; i += threads) other[i] = {0, 0, 0, 0};
  }
};

__device__ __forceinline__ void send(void* at, uint64_t word) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(at), "l"(word) : "memory");
}

__device__ __forceinline__ void send(void* at, uint64_t first, uint64_t second) {
  asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(at), "l"(first), "l"(second)
               : "memory");
}

__device__ __forceinline__ void send(InputWord* at, const InputWord& word) {
  asm volatile(
      "{.reg .b64 low, high; .reg .b128 word; mov.b64 low, {%1, %2}; mov.b64 high, {%3, %4};"
      "mov.b128 word, {low, high}; st.relaxed.gpu.global.b128 [%0], word;}" ::"l"(at),
      "r"(__float_as_uint(word.r)), "r"(__float_as_uint(word.z)), "r"(__float_as_uint(word.n)),
      "r"(word.tag)
      : "memory");
}

__device__ __forceinline__ InputWord look(const InputWord* at) {
  uint32_t r, z, n, tag;
  asm volatile(
      "{.reg .b64 low, high; .reg .b128 word; ld.relaxed.gpu.global.b128 word, [%4];"
      "mov.b128 {low, high}, word; mov.b64 {%0, %1}, low; mov.b64 {%2, %3}, high;}"
      : "=r"(r), "=r"(z), "=r"(n), "=r"(tag)
      : "l"(at)
      : "memory");
  return {__uint_as_float(r), __uint_as_float(z), __uint_as_float(n), tag};
}

__device__ __forceinline__ uint64_t look(const void* at) {
  uint64_t word;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
  return word;
}

__device__ __forceinline__ void look_if(uint64_t& word, const void* at, uint32_t wanted) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p ld.relaxed.gpu.global.b64 %0, [%1];}"
               : "+l"(word)
               : "l"(at), "r"(wanted)
               : "memory");
}

__device__ __forceinline__ ulonglong2 look_twice(const void* at) {
  ulonglong2 words;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(words.x), "=l"(words.y)
               : "l"(at)
               : "memory");
  return words;
}

// Two words side by side, where `wanted` is not 0; otherwise they stay.
__device__ __forceinline__ void look_twice_if(uint64_t (&words)[2], const void* at,
                                              uint32_t wanted) {
  asm volatile(
      "{.reg .pred p; setp.ne.u32 p, %3, 0; @p ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];}"
      : "+l"(words[0]), "+l"(words[1])
      : "l"(at), "r"(wanted)
      : "memory");
}

constexpr uint64_t kStateTagBits = 0x4000400040004000ull;

__device__ __forceinline__ uint64_t state_tag(int j) {
  const uint64_t tag = 1 + j / 2;
  return (tag & 1) << 14 | (tag & 2) << 29 | (tag & 4) << 44 | (tag & 8) << 59;
}

__device__ __forceinline__ bool has_state_tag(uint64_t word, uint64_t tag) {
  const uint64_t other = word ^ tag;
  const uint32_t either = static_cast<uint32_t>(other) | static_cast<uint32_t>(other >> 32);
  return (either & static_cast<uint32_t>(kStateTagBits)) == 0;
}

__device__ __forceinline__ uint64_t key_word(unsigned long long key, int j) {
  const uint64_t low = static_cast<uint32_t>(key) & 0x7ffffffu;  // of 2^32 - 1 - id
  return key >> 32 << 32 | low << 5 | static_cast<uint32_t>(j + 1);
}

__device__ __forceinline__ int key_tag(uint64_t word) { return static_cast<int>(word & 31); }

__device__ __forceinline__ bool is_key_of(uint64_t word, int j) { return (word & 31) == j + 1; }

__device__ __forceinline__ uint32_t key_word_id(uint32_t low) { return 0x7ffffffu - (low >> 5); }

__device__ __forceinline__ uint32_t cycles() {
  uint32_t now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
  return now;
}

// Until poll() is true in every lane of the warp; false: it gave up.
template <class Poll>
__device__ __forceinline__ bool await(Poll poll, uint32_t* aborted) {
  uint32_t since = 0;
#pragma unroll 1
  for (int spins = 0; !__all_sync(kFullMask, poll()); ++spins) {
    if (spins == 0) since = cycles();
    if (spins % 64 != 63) continue;
    const bool late = cycles() - since > kPatience;
    if (late) *reinterpret_cast<volatile uint32_t*>(aborted) = 1;
    if (__any_sync(kFullMask, late || *reinterpret_cast<volatile uint32_t*>(aborted) != 0))
      return false;
  }
  return true;
}

// By all threads of every block of a launch, as its last act.
__device__ __forceinline__ void leave_chain(ChainControl* control) {
  __syncthreads();
  if (threadIdx.x != 0 || atomicAdd(&control->left, 1u) != gridDim.x - 1) return;
  control->left = 0;
  control->epoch += kEpochStride;
}

}  // namespace domino
