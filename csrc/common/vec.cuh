// N elements moved by one load or store (16 bytes at most).
#pragma once

#include "common/dtype.h"

namespace domino {

template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  static_assert(sizeof(T) * N <= 16 && (N & (N - 1)) == 0);
  T at[N];
};

// Elements of T in a 16-byte load.
template <class T>
constexpr int kVecWidth = 16 / static_cast<int>(sizeof(T));

template <int N, class T>
__device__ __forceinline__ Vec<T, N> load(const T* pointer) {
  return *reinterpret_cast<const Vec<T, N>*>(pointer);
}

}  // namespace domino
