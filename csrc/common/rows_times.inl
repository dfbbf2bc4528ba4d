// Body of rows_times, included by rows_times_cpu.cpp once for each instruction set, which
// DOMINO_TARGET names. A function without it would be compiled for the oldest CPU.

DOMINO_TARGET inline F8 load8(const float* p) {
  F8 value;
  memcpy(&value, p, sizeof(value));
  return value;
}

DOMINO_TARGET inline F8 load8(const bf16* p) {
  H8 bits;
  memcpy(&bits, p, sizeof(bits));
  return reinterpret_cast<F8>(__builtin_convertvector(bits, U8) << 16);
}

DOMINO_TARGET inline F8 load8(const f16* p) {  // as to_float(f16) in common/dtype.h
  H8 bits;
  memcpy(&bits, p, sizeof(bits));
  const U8 wide = __builtin_convertvector(bits, U8);
  const U8 rest = (wide & 0x7fffu) << 13;
  const U8 scaled = reinterpret_cast<U8>(reinterpret_cast<F8>(rest) * 0x1p112f);
  const U8 special = reinterpret_cast<U8>(rest >= 0x0f800000u) & 0x7f800000u;
  return reinterpret_cast<F8>(scaled | special | (wide & 0x8000u) << 16);
}

DOMINO_TARGET inline F4 fold(F8 value) {
  F4 half[2];
  memcpy(half, &value, sizeof(value));
  return half[0] + half[1];
}

// The sums of four vectors: two steps of a 4 x 4 transposition, each followed by an addition.
DOMINO_TARGET inline F4 four_sums(F8 a, F8 b, F8 c, F8 d) {
  const F4 x = fold(a), y = fold(b), z = fold(c), w = fold(d);
  const F4 xy = F4{x[0], y[0], x[1], y[1]} + F4{x[2], y[2], x[3], y[3]};
  const F4 zw = F4{z[0], w[0], z[1], w[1]} + F4{z[2], w[2], z[3], w[3]};
  return F4{xy[0], xy[1], zw[0], zw[1]} + F4{xy[2], xy[3], zw[2], zw[3]};
}

template <class T>
DOMINO_TARGET void rows_times(const T* w, int64_t w_stride, int64_t rows, int64_t length,
                              const float* x, int64_t x_stride, int64_t batch, float* out,
                              int64_t out_stride) {
  const int64_t whole = length / 8 * 8;
  for (int64_t m = 0; m < rows; m += 4) {
    const int64_t here = rows - m < 4 ? rows - m : 4;  // missing rows repeat the last one
    const T* row0 = w + m * w_stride;
    const T* row1 = row0 + (here > 1 ? w_stride : 0);
    const T* row2 = row1 + (here > 2 ? w_stride : 0);
    const T* row3 = row2 + (here > 3 ? w_stride : 0);
    for (int64_t n = 0; n < batch; ++n) {
      const float* vector = x + n * x_stride;
      F8 acc0 = {}, acc1 = {}, acc2 = {}, acc3 = {};
      for (int64_t k = 0; k < whole; k += 8) {
        const F8 value = load8(vector + k);
        acc0 += load8(row0 + k) * value;
        acc1 += load8(row1 + k) * value;
        acc2 += load8(row2 + k) * value;
        acc3 += load8(row3 + k) * value;
      }
      F4 sums = four_sums(acc0, acc1, acc2, acc3);
      for (int64_t k = whole; k < length; ++k)
        sums += F4{to_float(row0[k]), to_float(row1[k]), to_float(row2[k]), to_float(row3[k])} *
                vector[k];
      float* target = out + n * out_stride + m;
      if (here == 4) {
        memcpy(target, &sums, sizeof(sums));
      } else {
        for (int i = 0; i < here; ++i) target[i] = sums[i];
      }
    }
  }
}
