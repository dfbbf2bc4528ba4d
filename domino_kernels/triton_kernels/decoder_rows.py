"""The steps of a Llama-type decoder's layer that see one row at a time: products and norms.

linear_kernel   a product with few rows, with what stands before and after it in a layer
stream_kernel   the same of a large weight, by TMA
head_kernel     the product with an LM head, also one in fp8
rms_norm_kernel, silu_mul_kernel: the same steps alone, around library products of many rows
quantise_rows_kernel  rows in fp8, for products that only propose

With attention (decoder_cache.py) a layer is five launches. Sums are fp32; results are rounded once,
at the store.

PDL: a launch may start before the one in front of it has ended. What the one in front wrote, or
still reads, is touched after `_begin`; before it `linear_kernel` asks for the first lines of its
weight (AHEAD of each row). The number of rows is no constant of a kernel, so that it compiles
nothing anew.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda as tlx


@triton.jit
def _begin(PDL: tl.constexpr):
    """What launches before this one wrote may be read from here on; the next launch may start."""
    if PDL:
        tlx.gdc_wait()
        tlx.gdc_launch_dependents()


@triton.jit
def _prefetch(row_ptr, size, LINES: tl.constexpr):
    """The first LINES lines of 128 bytes of every row, or its `size` bytes, to L2."""
    at = tl.minimum(128 * tl.arange(0, LINES), size - 1)
    line = row_ptr.to(tl.int64)[:, None] + at[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x_ptr, w_ptr, out_ptr, norm_ptr, bias_ptr, residual_ptr, partial_ptr, counter_ptr,
    rows, n, k, x_stride, out_stride, residual_stride, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GLU: tl.constexpr,
    SPLITS: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[m, j] = f(sum_k x'[m, k] w[j, k]), m < rows <= a few BLOCK_M, j < n.

    NORM: x' is x after RMSNorm: the row's factor comes out of the sum, so x is read once. GLU: w
    has 2n rows and out = silu(gate) * up. RESIDUAL: it is added to the sum. The weight is the left
    operand: its tile goes from shared memory to the tensor cores, and BLOCK_M may be as small as
    the rows are few. Bytes: the weight, once; bound: memory. SPLITS programs share a tile of out
    along k; the last to arrive adds their sums in order, so that the result is always the same.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    kk = tl.arange(0, BLOCK_K)
    j_in, m_in = j < n, m < rows
    chunk = tl.cdiv(tl.cdiv(k, SPLITS), BLOCK_K) * BLOCK_K
    first = split * chunk
    last = tl.minimum(first + chunk, k)

    w_rows = w_ptr + j.to(tl.int64)[:, None] * k
    if AHEAD > 0:
        row = w_ptr + tl.minimum(j, n - 1).to(tl.int64) * k + first
        length = (last - first) * (w_ptr.dtype.element_ty.primitive_bitwidth // 8)
        _prefetch(row, length, AHEAD)
        if GLU:
            _prefetch(row + n.to(tl.int64) * k, length, AHEAD)
    _begin(PDL)
    x_rows = x_ptr + m.to(tl.int64)[None, :] * x_stride
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    square = tl.zeros([BLOCK_M], tl.float32)
    for start in range(first, last, BLOCK_K):
        at = start + kk
        at_in = at < last
        w = tl.load(w_rows + at[None, :], mask=j_in[:, None] & at_in[None, :], other=0.0)
        x = tl.load(x_rows + at[:, None], mask=at_in[:, None] & m_in[None, :], other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            square += tl.sum(wide * wide, 0)
            g = tl.load(norm_ptr + at, mask=at_in, other=0.0).to(tl.float32)
            x = (wide * g[:, None]).to(x.dtype)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if GLU:
            w_up = tl.load(
                w_rows + n.to(tl.int64) * k + at[None, :],
                mask=j_in[:, None] & at_in[None, :], other=0.0,
            )  # fmt: skip
            up = tl.dot(w_up, x, up, input_precision="ieee")

    inside = j_in[:, None] & m_in[None, :]
    if SPLITS > 1:
        tl.static_assert(not NORM and not GLU, "a split sum has no norm and no gate")
        group = tl.program_id(2) * tl.num_programs(0) + tile
        cell = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        mine = partial_ptr + (group * SPLITS + split) * (BLOCK_N * BLOCK_M)
        tl.store(mine + cell, acc)
        tl.debug_barrier()
        joins = tl.atomic_add(counter_ptr + group, 1, sem="acq_rel") == SPLITS - 1
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for s in range(tl.where(joins, SPLITS, 0)):
            theirs = partial_ptr + (group * SPLITS + s) * (BLOCK_N * BLOCK_M)
            acc += tl.load(theirs + cell, cache_modifier=".cg")
        if joins:
            tl.store(counter_ptr + group, 0)
        inside = j_in[:, None] & (m < tl.where(joins, rows, 0))[None, :]

    if NORM:
        factor = tl.rsqrt(square / k + eps)[None, :]
        acc = acc * factor
        up = up * factor
    if BIAS:
        acc += tl.load(bias_ptr + j, mask=j_in, other=0.0).to(tl.float32)[:, None]
    if GLU:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    if RESIDUAL:
        at = m.to(tl.int64)[None, :] * residual_stride + j[:, None]
        acc += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    at = m.to(tl.int64)[None, :] * out_stride + j[:, None]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def stream_kernel(
    x_desc, w_desc, out_ptr, bias_ptr, residual_ptr, partial_ptr, counter_ptr,
    rows, n, k, out_stride, residual_stride,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GLU: tl.constexpr, SPLITS: tl.constexpr,
    PDL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`linear_kernel` for a large weight: both operands come by TMA, so that nothing but the copies
    and the products is left in the loop. x has passed its norm.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    chunk = tl.cdiv(tl.cdiv(k, SPLITS), BLOCK_K) * BLOCK_K
    first = split * chunk
    last = tl.minimum(first + chunk, k)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    _begin(PDL)
    for start in range(first, last, BLOCK_K):
        w = w_desc.load([tile * BLOCK_N, start])
        x = x_desc.load([tl.program_id(2) * BLOCK_M, start])
        acc = tl.dot(w, x.T, acc, input_precision="ieee")
        if GLU:
            w_up = w_desc.load([n + tile * BLOCK_N, start])
            up = tl.dot(w_up, x.T, up, input_precision="ieee")

    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (j < n)[:, None] & (m < rows)[None, :]
    if SPLITS > 1:
        group = tl.program_id(2) * tl.num_programs(0) + tile
        cell = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        size: tl.constexpr = BLOCK_N * BLOCK_M * (2 if GLU else 1)
        mine = partial_ptr + (group * SPLITS + split) * size
        tl.store(mine + cell, acc)
        if GLU:
            tl.store(mine + BLOCK_N * BLOCK_M + cell, up)
        tl.debug_barrier()
        joins = tl.atomic_add(counter_ptr + group, 1, sem="acq_rel") == SPLITS - 1
        if joins:
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for s in tl.static_range(SPLITS):
                theirs = partial_ptr + (group * SPLITS + s) * size
                acc += tl.load(theirs + cell, cache_modifier=".cg")
                if GLU:
                    up += tl.load(theirs + BLOCK_N * BLOCK_M + cell, cache_modifier=".cg")
            tl.store(counter_ptr + group, 0)
        inside = (j < n)[:, None] & (m < tl.where(joins, rows, 0))[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + j, mask=j < n, other=0.0).to(tl.float32)[:, None]
    if GLU:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    if RESIDUAL:
        at = m.to(tl.int64)[None, :] * residual_stride + j[:, None]
        acc += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    at = m.to(tl.int64)[None, :] * out_stride + j[:, None]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def head_kernel(
    x_desc, w_desc, out_ptr, x_scale_ptr, w_scale_ptr, rows, n, k,
    SCALED: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[m, j] = sum_k x[m, k] w[j, k], contiguous, m < rows <= BLOCK_M, j < n; SCALED: times the
    scales of both rows.

    A program takes tiles in turn, and the copies for the next one are under way while one is
    stored: a tile has too few k for its copies to fill the memory pipe by themselves. Bytes: the
    weight, once; bound: memory.
    """
    m = tl.arange(0, BLOCK_M)
    _begin(PDL)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n, BLOCK_N), tl.num_programs(0), flatten=True):
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for start in range(0, k, BLOCK_K):
            w = w_desc.load([tile * BLOCK_N, start])
            acc = tl.dot(w, x_desc.load([0, start]).T, acc, input_precision="ieee")
        j = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        if SCALED:
            acc *= tl.load(x_scale_ptr + m, mask=m < rows, other=0.0)[None, :]
            acc *= tl.load(w_scale_ptr + j, mask=j < n, other=0.0)[:, None]
        at = m.to(tl.int64)[None, :] * n + j[:, None]
        inside = (j < n)[:, None] & (m < rows)[None, :]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, delta_ptr, sum_ptr, k, x_stride, out_stride, sum_stride, eps,
    DELTA: tl.constexpr, PDL: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[row] = x[row] / rms(x[row]) * weight; one program a row. DELTA: x has delta added first,
    and the sum is kept."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK_K)
    inside = at < k
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    _begin(PDL)
    x = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if DELTA:
        x += tl.load(delta_ptr + row * k + at, mask=inside, other=0.0).to(tl.float32)
        whole = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * sum_stride + at, whole, mask=inside)
        x = whole.to(tl.float32)
    out = x * tl.rsqrt(tl.sum(x * x) / k + eps) * weight
    tl.store(out_ptr + row * out_stride + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def quantise_rows_kernel(x_ptr, out_ptr, scale_ptr, k, PDL: tl.constexpr, BLOCK_K: tl.constexpr):
    """out[row] = x[row] / scale[row] in e4m3, scale = its largest magnitude / 448."""
    _begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + row * k + at, mask=at < k, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x)) / 448.0, 1e-12)
    tl.store(scale_ptr + row, scale)
    out = x / scale
    tl.store(out_ptr + row * k + at, out.to(out_ptr.dtype.element_ty), mask=at < k)


@triton.jit
def silu_mul_kernel(x_ptr, out_ptr, n, PDL: tl.constexpr, BLOCK: tl.constexpr):
    """out[row, j] = silu(x[row, j]) * x[row, n + j]; rows are contiguous."""
    _begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    gate = tl.load(x_ptr + row * 2 * n + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * n + n + at, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * n + at, out.to(out_ptr.dtype.element_ty), mask=inside)
