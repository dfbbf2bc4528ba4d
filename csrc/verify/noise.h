// noise: the words of common/philox.cuh for many requests, raw or as the kernels use them.
#pragma once

#include <cstdint>

#include "common/exact_math.cuh"
#include "common/philox.cuh"

namespace domino {

enum class NoiseKind : int { kWords = 0, kUniform = 1, kExponential = 2 };

struct NoiseParams {
  void* out;                   // [batch, count] contiguous; int64 for words, otherwise float
  const int64_t* seed;         // [batch]
  const int64_t* block_start;  // [batch]
  int64_t batch;
  int64_t count;  // indices 0..count-1
  int i;
  int purpose;  // Purpose
  NoiseKind kind;
};

// Writes the up to four indices of one group of request b.
DOMINO_HD void write_noise(const NoiseParams& p, int64_t b, int64_t group) {
  const BlockNoise noise{p.seed[b], p.block_start[b]};
  const NoiseWords words =
      noise.words(static_cast<Purpose>(p.purpose), p.i, static_cast<uint32_t>(group));
  for (int lane = 0; lane < 4 && 4 * group + lane < p.count; ++lane) {
    const int64_t at = b * p.count + 4 * group + lane;
    const uint32_t word = words.word[lane];
    if (p.kind == NoiseKind::kWords) {
      static_cast<int64_t*>(p.out)[at] = word;
    } else {
      static_cast<float*>(p.out)[at] =
          p.kind == NoiseKind::kUniform ? uniform(word) : exponential(word);
    }
  }
}

int noise_cuda(const NoiseParams& p, void* stream);
int noise_cpu(const NoiseParams& p);

}  // namespace domino
