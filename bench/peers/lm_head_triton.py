"""The least that an LM head with a pool behind it in one launch has to do: see `ops/lm_head.py`."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def lm_head_kernel(
    x_desc, w_desc, x_scale_ptr, w_scale_ptr, out_ptr, vocab, tiles, row_tiles,
    SCALED: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[b, v] = max over b's SLOTS rows of x w[v]; the last slot is no row of the block.

    A program takes tiles in turn, those of the same ids one after the other.
    """
    for tile in tl.range(tl.program_id(0), tiles * row_tiles, tl.num_programs(0), flatten=True):
        v0, m0 = tile // row_tiles * BLOCK_V, tile % row_tiles * BLOCK_M
        acc = tl.zeros([BLOCK_V, BLOCK_M], tl.float32)
        for k in range(0, K, BLOCK_K):
            acc = tl.dot(w_desc.load([v0, k]), x_desc.load([m0, k]).T, acc)
        v, m = v0 + tl.arange(0, BLOCK_V), m0 + tl.arange(0, BLOCK_M)
        if SCALED:
            acc *= tl.load(x_scale_ptr + m)[None, :]
            acc *= tl.load(w_scale_ptr + v, mask=v < vocab, other=0.0)[:, None]
        acc = tl.where((m % SLOTS == SLOTS - 1)[None, :], float("-inf"), acc)
        best = tl.max(acc.reshape(BLOCK_V, BLOCK_M // SLOTS, SLOTS), 2)
        b = m0 // SLOTS + tl.arange(0, BLOCK_M // SLOTS)
        at = b.to(tl.int64)[None, :] * vocab + v[:, None]
        tl.store(out_ptr + at, best.to(out_ptr.dtype.element_ty), mask=(v < vocab)[:, None])


def fused(rows, weight, scale, plan):
    """Maxima over slots [B, V] of rows [16 B, H] times weight [V, H]; scale: both are in fp8."""
    values = weight if scale is None else weight.values
    vocab, k = values.shape
    block_v, block_m, block_k, warps, stages = plan
    if scale is not None:  # as many bytes a tile
        block_k *= 2
    out = torch.empty(len(rows) // 16, vocab, dtype=torch.bfloat16, device=rows.device)
    processors = torch.cuda.get_device_properties(rows.device).multi_processor_count
    tiles, row_tiles = -(-vocab // block_v), len(rows) // block_m
    held = stages * (block_v + block_m) * block_k * values.element_size()
    blocks = min(tiles * row_tiles, processors * max(1, 227_000 // held))
    lm_head_kernel[(blocks,)](
        TensorDescriptor.from_tensor(rows, [block_m, block_k]),
        TensorDescriptor.from_tensor(values, [block_v, block_k]),
        rows if scale is None else scale, rows if scale is None else weight.scale,
        out, vocab, tiles, row_tiles,
        SCALED=scale is not None, K=k, SLOTS=16, BLOCK_V=block_v, BLOCK_M=block_m, BLOCK_K=block_k,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
