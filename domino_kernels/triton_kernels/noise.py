"""The noise contract of domino_kernels.rng in Triton: the same words, uniforms and exponentials."""

import triton
import triton.language as tl


@triton.jit
def words(seed, start, i, purpose, group):
    """The four words of indices 4 * group .. 4 * group + 3: uint32, of the shape of `group`."""
    key, at = seed.to(tl.uint64), start.to(tl.uint64)
    k0, k1 = (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)
    c0 = group.to(tl.uint32)
    zero = c0 * 0
    c1 = ((zero + i).to(tl.uint32) & 0xFFFFFF) | ((zero + purpose).to(tl.uint32) << 24)
    c2 = zero + (at & 0xFFFFFFFF).to(tl.uint32)
    c3 = zero + (at >> 32).to(tl.uint32)
    a = tl.full((), 0xD2511F53, tl.uint32)
    b = tl.full((), 0xCD9E8D57, tl.uint32)
    step0 = tl.full((), 0x9E3779B9, tl.uint32)
    step1 = tl.full((), 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        # the high halves by 64-bit products: exact in the interpreter too
        product0, product1 = c0.to(tl.uint64) * a, c2.to(tl.uint64) * b
        high0, high1 = (product0 >> 32).to(tl.uint32), (product1 >> 32).to(tl.uint32)
        c0, c1 = high1 ^ c1 ^ k0, (product1 & 0xFFFFFFFF).to(tl.uint32)
        c2, c3 = high0 ^ c3 ^ k1, (product0 & 0xFFFFFFFF).to(tl.uint32)
        k0, k1 = k0 + step0, k1 + step1
    return c0, c1, c2, c3


@triton.jit
def uniform(word):
    """(0, 1], float32."""
    return (word.to(tl.uint64) + 1).to(tl.float32) * 2.3283064365386963e-10


@triton.jit
def exponential(word):
    """Standard exponential of (word + 1/2) * 2^-32, float32, never 0."""
    small = word < 0x4AFB0CCC
    x = (tl.where(small, word, ~word).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # -log1p(-x) keeps the accuracy of a small x: minimax of (log1p(f) - f + f^2/2) / f^3 at f = -x
    f = -tl.where(small, x, 0.0)
    poly = -7.63449296e-2 * f + 1.27615750e-1
    poly = poly * f - 1.31601825e-1
    poly = poly * f + 1.42017588e-1
    poly = poly * f - 1.66233569e-1
    poly = poly * f + 2.00012267e-1
    poly = poly * f - 2.50008196e-1
    poly = poly * f + 3.33333313e-1
    square = f * f
    near = f + (square * f * poly - 0.5 * square)
    return -tl.where(small, near, tl.log(x))
