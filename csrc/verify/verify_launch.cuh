// How the launches of the verification ops are made.
#pragma once

#include "verify/race.cuh"

namespace domino {

constexpr int kMostClusterBlocks = 16;

inline bool has_edits(const VerifyChainParams& p) {
  return p.logit_bias != nullptr || p.repetition_penalty != nullptr ||
         p.presence_penalty != nullptr || p.frequency_penalty != nullptr ||
         p.grammar_mask != nullptr;
}

// Calls fn(T{}) with the dtype of all rows that are read in full, fn() where they have none in
// common or are edited.
template <class Fn>
int dispatch_rows(const VerifyChainParams& p, bool plain, Fn fn) {
  if (!plain) return fn(static_cast<void*>(nullptr));
  return dispatch_dtype(p.target_dtype, [&](auto tag) { return fn(&tag); });
}

// Launches kernel(p, ...) that may start while the launch in front runs: `groups` blocks, or with
// `clustered` as many clusters of the blocks that a row keeps busy.
template <class... Params, class... Args>
int launch_behind(void (*kernel)(VerifyChainParams, Params...), const VerifyChainParams& p,
                  int64_t groups, bool clustered, int threads, void* stream, Args... args) {
  int size = 1;
  DeviceInfo device;
  if (const int status = current_device(&device); status != kOk) return status;
  const int major = device.major;
  const int64_t chunks = ceil_div<int64_t>(p.vocab, kChunk);
  // as many blocks a row as keep the device busy; more than 8 is for the data centre parts alone,
  // and only a few such clusters fit at a time
  const int most = major == 9 || major == 10 ? kMostClusterBlocks : 8;
  const int wanted = groups <= 4 ? most : groups <= 16 ? 8 : groups <= 32 ? 4 : 2;
  if (clustered && major >= 9)
    while (size < wanted && size * kWalkWarps < chunks) size *= 2;
  if (size > 8) {
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (status != cudaSuccess) return status;
  }
  if (groups * size > INT32_MAX) return kBadArgument;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(size), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(groups * size));
  config.blockDim = dim3(threads);
  config.stream = as_stream(stream);
  config.attrs = attributes;
  config.numAttrs = major < 9 ? 0 : size > 1 ? 2 : 1;
  cudaLaunchKernelEx(&config, kernel, p, args...);
  return launched();
}

// All of verify_chain where every request is greedy and nobody asks for the likeliest tokens.
int verify_greedy_cuda(const VerifyChainParams& p, void* stream);

// Is every row's token drawn, in a call that counts_values()?
inline bool draws_every_row(const VerifyChainParams& p) {
  return p.rule == VerifyRule::kMatch || p.rule == VerifyRule::kGumbel;
}

// All launches of a call that counts_values().
int launch_by_value(const VerifyChainParams& p, void* stream);

// Its kernels by rows of q (verify_dense.cu): a cluster to each row, or blocks that take several;
// then a cluster to each request.
struct DenseKernels {
  void (*listed)(VerifyChainParams);
  void (*cut)(VerifyChainParams, int);
  void (*draw)(VerifyChainParams);
};
DenseKernels dense_kernels(const VerifyChainParams& p);

// The likeliest tokens of every row that was emitted: the last launch of verify_chain and
// row_stats.
int launch_row_head(const VerifyChainParams& p, void* stream);

}  // namespace domino
