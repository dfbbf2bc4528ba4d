// The noise contract (domino_kernels/rng.py holds the text and the same bits in NumPy).
//
// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3, SC 2011).
//   key     = the request's 64-bit seed, low word first
//   counter = (index / 4, i | purpose << 24, block_start low, block_start high), word = index % 4
// No state: any thread computes any word, so a draw does not depend on the batch row, the padding,
// the launch shape or a split of the vocabulary.
#pragma once

#include <cstdint>

#include "common/hd.h"

namespace domino {

// What a word is used for. Values are part of the contract: never renumber.
enum Purpose : uint32_t {
  kDraftToken = 1,    // race of the drafter for block slot i, index = token id
  kVerifyCoin = 2,    // accept test of draft i, index = 0
  kResidualDraw = 3,  // race for the token that replaces the rejected draft i
  kBonusDraw = 4,     // race for a token drawn from the target law itself at row i
  kPositionDraw = 5   // match and gumbel rules only: i = 0 and block_start = the token's position
};

struct NoiseWords {
  uint32_t word[4];
};

DOMINO_HD uint32_t mul_high(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  return __umulhi(a, b);
#else
  return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
#endif
}

DOMINO_HD NoiseWords philox4x32_10(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0,
                                   uint32_t k1) {
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

// The noise of one block of one request.
struct BlockNoise {
  int64_t seed;
  int64_t block_start;

  // Words of index 4 * group .. 4 * group + 3.
  DOMINO_HD NoiseWords words(Purpose purpose, int i, uint32_t group) const {
    const uint64_t key = static_cast<uint64_t>(seed), start = static_cast<uint64_t>(block_start);
    return philox4x32_10(group, (static_cast<uint32_t>(i) & 0xffffffu) | purpose << 24,
                         static_cast<uint32_t>(start), static_cast<uint32_t>(start >> 32),
                         static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
  }
};

// (0, 1]: for coins and inverse CDFs. All 32 bits count near zero, where coins are decided.
DOMINO_HD float uniform(uint32_t word) {
  return static_cast<float>(static_cast<uint64_t>(word) + 1) * 0x1p-32f;
}

}  // namespace domino
