// DOMINO_HD marks code that the kernel and its CPU twin both include: the CPU tests then test what
// runs on the GPU.
#pragma once

#ifdef __CUDACC__
#define DOMINO_HD __host__ __device__ __forceinline__
#else
#define DOMINO_HD inline
#endif
