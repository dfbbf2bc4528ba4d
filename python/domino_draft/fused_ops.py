"""The steps of a decoder layer in few launches: Triton on a GPU, the same algebra in Torch off it.

Nothing here synchronises or depends on the values of a tensor for its launch, so all of it can be
captured. The kernels and what they fuse: domino_kernels/triton_kernels/decoder.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

SKINNY_ROWS = 16  # up to here our own product, beyond it the library's with the steps apart


_interpret = False  # tests only: run the kernels on CPU tensors, under Triton's interpreter


def _triton(x: Tensor) -> bool:
    return x.is_cuda or _interpret


def _pow2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


_PARTIALS, _COUNTERS = 1 << 22, 1 << 14
_PROGRAMS = 100  # that a launch should have at least, for a GPU of some hundred multiprocessors


def workspace_bytes(device: torch.device) -> int:
    return 4 * (_PARTIALS + _COUNTERS) if device.type == "cuda" else 0


class Workspace:
    """Partial sums and arrival counters of split launches; one stream of work uses it at a time."""

    def __init__(
        self, device: torch.device | str, floats: int = _PARTIALS, counters: int = _COUNTERS
    ):
        on = torch.device(device).type == "cuda" or _interpret
        self.partial = torch.empty(floats if on else 0, dtype=torch.float32, device=device)
        # A launch leaves its counters as it found them: at zero.
        self.counters = torch.zeros(counters if on else 0, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class LinearPlan:
    """Tile sizes of `linear_kernel` or, for a large weight, `stream_kernel`."""

    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int
    stream: bool = False


@cache
def _streams(device: torch.device) -> bool:
    """Whether the GPU has TMA and the shared memory that `stream_kernel` asks for."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


def linear_plan(rows: int, n: int, k: int, size: int, device: torch.device) -> LinearPlan | None:
    """None: the library's product, with the steps apart."""
    if rows > SKINNY_ROWS or size > 2:
        return None
    if n * k <= 1 << 22:  # the launch is what it costs
        return LinearPlan(16, 256, 1, 2, 3)
    if n % 64 or k % 128 or not _streams(device):
        return None
    # A large weight: the library streams it as fast, with a launch more before or behind it.
    splits = 2 if n <= 66 * 64 else 1
    return LinearPlan(64, 128, splits, 4, 6 if splits > 1 else 5, stream=True)


def linear(
    x: Tensor,
    weight: Tensor,
    workspace: Workspace,
    *,
    norm: tuple[Tensor, float] | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    glu: bool = False,
    out: Tensor | None = None,
    plan: LinearPlan | None = None,
) -> Tensor:
    """x [M, K] times weight [N, K] transposed, with its neighbours in a layer.

    norm: (weight [K], eps) of an RMSNorm that x passes first. glu: weight holds gate rows, then up
    rows, and the result is silu(gate) * up, [M, N / 2]. residual [M, N] is added; it may be out.
    Rows of x, residual and out may be strided.
    """
    rows, k = x.shape
    n = weight.shape[0] // 2 if glu else weight.shape[0]
    if out is None:
        out = x.new_empty(rows, n)
    if plan is None and _triton(x):
        plan = linear_plan(rows, n, k, x.element_size(), x.device)
    if plan is None:
        return _linear_apart(x, weight, norm, bias, residual, glu, out)
    from domino_kernels.triton_kernels.decoder import linear_kernel, stream_kernel

    block_m = max(16, min(_pow2(rows), 64))
    grid = (-(-n // plan.block_n), plan.splits, -(-rows // block_m))
    if plan.stream:
        from triton.tools.tensor_descriptor import TensorDescriptor

        x = rms_norm(x, *norm) if norm else x
        stream_kernel[grid](
            TensorDescriptor.from_tensor(x, [block_m, plan.block_k]),
            TensorDescriptor.from_tensor(weight, [plan.block_n, plan.block_k]),
            out, bias if bias is not None else x, residual if residual is not None else x,
            workspace.partial, workspace.counters, rows, n, k, out.stride(0),
            residual.stride(0) if residual is not None else 0,
            BIAS=bias is not None, RESIDUAL=residual is not None, GLU=glu, SPLITS=plan.splits,
            BLOCK_M=block_m, BLOCK_N=plan.block_n, BLOCK_K=plan.block_k,
            num_warps=plan.warps, num_stages=plan.stages,
        )  # fmt: skip
        return out
    linear_kernel[grid](
        x, weight, out, norm[0] if norm else x, bias if bias is not None else x,
        residual if residual is not None else x, workspace.partial, workspace.counters,
        rows, n, k, x.stride(0), out.stride(0), residual.stride(0) if residual is not None else 0,
        norm[1] if norm else 0.0,
        NORM=norm is not None, BIAS=bias is not None, RESIDUAL=residual is not None, GLU=glu,
        SPLITS=plan.splits, BLOCK_M=block_m, BLOCK_N=plan.block_n, BLOCK_K=plan.block_k,
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return out


def _linear_apart(x, weight, norm, bias, residual, glu, out):
    if norm is not None:
        x = rms_norm(x, *norm)
    if residual is not None and bias is None and not glu:
        # One rounding, inside the product, where the residual is the result's own place.
        if residual.data_ptr() != out.data_ptr():
            out.copy_(residual)
        return torch.addmm(out, x, weight.t(), out=out)
    y = F.linear(x, weight, bias)
    if glu:
        y = silu_mul(y)
    return out.copy_(y if residual is None else y + residual)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [M, K] / rms(x) * weight; rows may be strided."""
    rows, k = x.shape
    out = x.new_empty(rows, k)
    if not _triton(x):
        wide = x.float()
        factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return out.copy_(wide * factor * weight.float())
    from domino_kernels.triton_kernels.decoder import rms_norm_kernel

    block = _pow2(k)
    rms_norm_kernel[(rows,)](
        x, weight, out, k, x.stride(0), k, eps, BLOCK_K=block,
        num_warps=min(16, max(4, block >> 9)),
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class Fp8Weight:
    """A weight [N, K] in e4m3 with a scale a row, for products that only propose."""

    values: Tensor
    scale: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Fp8Weight:
        n, k = weight.shape
        if n % 16 or k % 16:
            raise ValueError(f"Fp8Weight: weight: got {n} x {k}, expected multiples of 16")
        values = torch.empty(n, k, dtype=torch.float8_e4m3fn, device=weight.device)
        scale = torch.empty(n, 1, dtype=torch.float32, device=weight.device)
        for first in range(0, n, 1 << 14):  # in fp32 the whole would be twice the model's
            part = slice(first, first + (1 << 14))
            values[part], scale[part] = quantise_rows(weight[part])
        return cls(values, scale)

    def product(self, x: Tensor) -> Tensor:
        """x [M, K] times it transposed, in the dtype of x; x is rounded to e4m3 by rows as well."""
        q, scale = quantise_rows(x)
        if not x.is_cuda:
            wide = (q.float() * scale) @ (self.values.float() * self.scale).t()
            return wide.to(x.dtype)
        return torch._scaled_mm(
            q, self.values.t(), scale_a=scale, scale_b=self.scale.t(), out_dtype=torch.bfloat16
        ).to(x.dtype)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] in e4m3, and the scale of each row [M, 1]."""
    rows, k = x.shape
    if not x.is_cuda:
        wide = x.float()
        scale = (wide.abs().amax(1, keepdim=True) / 448).clamp(min=1e-12)
        return (wide / scale).to(torch.float8_e4m3fn), scale
    from domino_kernels.triton_kernels.decoder import quantise_rows_kernel

    q = torch.empty(rows, k, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    quantise_rows_kernel[(rows,)](x, q, scale, k, BLOCK_K=_pow2(k), num_warps=8)
    return q, scale


def silu_mul(x: Tensor) -> Tensor:
    """silu of the first half of x [M, 2N], times its second half."""
    rows, n = x.shape[0], x.shape[1] // 2
    if not _triton(x):
        gate, up = x.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(x.dtype)
    from domino_kernels.triton_kernels.decoder import silu_mul_kernel

    out = x.new_empty(rows, n)
    silu_mul_kernel[(rows, -(-n // 1024))](x, out, n, BLOCK=1024, num_warps=4)
    return out


def rope_table(inv_freq: Tensor, positions: int, scaling: float = 1.0) -> Tensor:
    """fp32 [positions, D]: D/2 cosines and D/2 sines of every position."""
    at = torch.arange(positions, device=inv_freq.device, dtype=torch.float32)
    angles = at[:, None] * inv_freq.float()
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * scaling


def _rotate(x: Tensor, rope: Tensor) -> Tensor:
    """x [B, T, heads, D] fp32, rope [B, T, D]."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = rope[:, :, None].chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _norm_heads(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x = x.float()
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def attend(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    rope: Tensor,
    workspace: Workspace,
    *,
    heads: int,
    scale: float,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    causal: bool = True,
    window: int | None = None,
    plan: AttendPlan | None = None,
) -> Tensor:
    """Attention of each row's T new tokens over its cache and each other; writes the cache.

    qkv [B * T, (heads + 2 kv_heads) * D]; keys, values [rows >= B, kv_heads, L, D]; lengths int64
    [B]: row b's tokens stand, and are written, at lengths[b] .. lengths[b] + T - 1. rope: from
    `rope_table`. Returns [B * T, heads * D]. causal False: the new tokens all see each other.
    """
    batch = lengths.shape[0]
    tokens = qkv.shape[0] // batch
    kv_heads, room, dim = keys.shape[1:]
    group = heads // kv_heads
    out = qkv.new_empty(batch * tokens, heads * dim)
    if not _triton(qkv):
        return _attend_torch(
            qkv, keys, values, lengths, rope, out, heads, scale, q_norm, k_norm, eps, causal, window
        )
    from domino_kernels.triton_kernels.decoder import attend_kernel

    if plan is None:
        plan = attend_plan(batch, tokens, group, kv_heads, dim, room, qkv.element_size())
    block_d = max(16, _pow2(dim))
    tiles = -(-group * tokens // plan.block_m)
    parts = batch * kv_heads * tiles * plan.splits
    if plan.splits > 1 and (
        parts * plan.block_m * (block_d + 2) > workspace.partial.numel()
        or parts > workspace.counters.numel()
    ):
        raise ValueError(f"attend: plan: got {plan}, expected parts that fit the workspace")
    attend_kernel[(plan.splits * tiles, kv_heads, batch)](
        qkv, keys, values, lengths, rope, q_norm if q_norm is not None else qkv,
        k_norm if k_norm is not None else qkv, out, workspace.partial, workspace.counters,
        scale, eps, room, keys.stride(0), keys.stride(1),
        NORM=q_norm is not None, CAUSAL=causal, WINDOW=window or 0,
        TOKENS=tokens, GROUP=group, KV_HEADS=kv_heads, DIM=dim, SPLITS=plan.splits, TILES=tiles,
        BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, BLOCK_T=max(16, _pow2(tokens)),
        BLOCK_H=max(16, _pow2(dim // 2)), BLOCK_D=block_d,
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class AttendPlan:
    """Tile sizes of `attend_kernel`: queries and keys of a program, parts of a row's context."""

    block_m: int
    block_n: int
    splits: int
    warps: int
    stages: int


def attend_plan(
    batch: int, tokens: int, group: int, kv_heads: int, dim: int, room: int, size: int
) -> AttendPlan:
    """Enough programs to fill the GPU: by fewer queries each, then by parts of the context."""
    queries = group * tokens
    block_m = 16
    if batch * kv_heads * -(-queries // 16) > _PROGRAMS:  # enough: rather share the keys
        block_m = max(16, min(_pow2(queries), 64))
    programs = batch * kv_heads * -(-queries // block_m)
    most, splits = 4 if tokens > 4 else 8, 1
    while programs * splits < _PROGRAMS and 128 * splits < room and splits < most:
        splits *= 2
    block_n = 128 if block_m == 16 else 64
    return AttendPlan(block_m, block_n if size == 2 and dim <= 128 else 32, splits, 4, 2)


def _attend_torch(
    qkv, keys, values, lengths, rope, out, heads, scale, q_norm, k_norm, eps, causal, window
):
    batch, (kv_heads, room, dim) = lengths.shape[0], keys.shape[1:]
    qkv = qkv.view(batch, -1, heads + 2 * kv_heads, dim)
    tokens = qkv.shape[1]
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=2)
    at = lengths[:, None] + torch.arange(tokens, device=lengths.device)
    angles = rope[at.clamp(max=rope.shape[0] - 1)]
    q = _rotate(_norm_heads(q, q_norm, eps), angles).to(qkv.dtype)
    k = _rotate(_norm_heads(k, k_norm, eps), angles).to(qkv.dtype)
    _store(keys, k, at)
    _store(values, v, at)
    j = torch.arange(room, device=lengths.device)
    last = at if causal else at[:, -1:].expand_as(at)
    seen = j <= last[..., None]
    if window:
        seen &= j > at[..., None] - window
    # What lies behind a row's end may be anything: its weight is 0, and 0 * NaN is NaN.
    held = (j <= at[:, -1:])[:, None, :, None]
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        keys[:batch].where(held, 0),
        values[:batch].where(held, 0),
        attn_mask=seen[:, None],
        scale=scale,
        enable_gqa=True,
    )
    return out.copy_(y.transpose(1, 2).reshape(out.shape))


def _store(cache: Tensor, x: Tensor, at: Tensor) -> None:
    """x [B, T, kv_heads, D] to positions at [B, T] of the first B rows; none past the end."""
    room = cache.shape[2]
    rows = torch.arange(at.shape[0], device=at.device)[:, None].expand_as(at)
    keep = at < room
    cache[rows[keep], :, at[keep]] = x[keep]


def rotate_store(
    qkv: Tensor,
    cache: Tensor,
    lengths: Tensor,
    rope: Tensor,
    *,
    heads: int = 0,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Norms and rotary alone: queries in place, keys and values into the cache.

    qkv [B * T, layers * (heads + 2 kv_heads) * D], contiguous; cache [layers, 2, rows, kv_heads, L,
    D]; k_norm [layers, D].
    """
    layers, _, _, kv_heads, room, dim = cache.shape
    batch = lengths.shape[0]
    tokens = qkv.shape[0] // batch
    if not _triton(qkv):
        qkv = qkv.view(batch, tokens, layers, heads + 2 * kv_heads, dim)
        at = lengths[:, None] + torch.arange(tokens, device=lengths.device)
        angles = rope[at.clamp(max=rope.shape[0] - 1)]
        for layer in range(layers):
            q, k, v = qkv[:, :, layer].split((heads, kv_heads, kv_heads), dim=2)
            q.copy_(_rotate(_norm_heads(q, q_norm, eps), angles))
            weight = k_norm[layer] if k_norm is not None else None
            k = _rotate(_norm_heads(k, weight, eps), angles)
            _store(cache[layer, 0], k.to(qkv.dtype), at)
            _store(cache[layer, 1], v, at)
        return
    from domino_kernels.triton_kernels.decoder import rotate_store_kernel

    rotate_store_kernel[(batch * tokens, layers)](
        qkv, cache, lengths, rope, q_norm if q_norm is not None else qkv,
        k_norm if k_norm is not None else qkv, eps, room, *cache.stride()[:4],
        NORM=k_norm is not None, TOKENS=tokens, LAYERS=layers, HEADS=heads, KV_HEADS=kv_heads,
        DIM=dim, BLOCK_Q=_pow2(heads), BLOCK_R=_pow2(kv_heads), BLOCK_H=_pow2(dim // 2),
        BLOCK_D=_pow2(dim), num_warps=4,
    )  # fmt: skip


def embed(
    anchors: Tensor, table: Tensor, tokens: int, *, drafts: Tensor | None = None, mask_id: int = 0
) -> Tensor:
    """Rows of the table, [B * tokens, H]: each anchor, then its drafts [B, tokens - 1] (-1: none)
    or, without drafts, the mask token."""
    batch, hidden = anchors.shape[0], table.shape[1]
    if not _triton(table):
        ids = anchors.new_full((batch, tokens), mask_id)
        ids[:, 0] = anchors
        if drafts is not None:
            ids[:, 1:] = drafts
        return table[ids.clamp(0, table.shape[0] - 1).flatten()]
    from domino_kernels.triton_kernels.decoder import embed_kernel

    out = table.new_empty(batch * tokens, hidden)
    embed_kernel[(batch * tokens,)](
        anchors, drafts if drafts is not None else anchors, table, out, mask_id, hidden,
        table.shape[0], TOKENS=tokens, MASKED=drafts is None, BLOCK_K=_pow2(hidden), num_warps=4,
    )  # fmt: skip
    return out


def commit(result, anchors: Tensor, lengths: Tensor, limits: Tensor, line: Tensor) -> None:
    """End a cycle: anchors and lengths move on, line [B, K + 3] = accepted, status, tokens.

    lengths never pass limits: a row of no request (limit 0) stays empty, and queued cycles of one
    that is done stay inside the cache.
    """
    drafts = result.tokens.shape[1] - 1
    if not _triton(anchors):
        accepted = result.num_accepted.long()[:, None]
        line.copy_(torch.cat((accepted, result.status.long()[:, None], result.tokens), dim=1))
        anchors.copy_(result.tokens.gather(1, accepted)[:, 0].clamp(min=0))
        lengths.copy_(torch.minimum(lengths + accepted[:, 0] + 1, limits))
        return
    from domino_kernels.triton_kernels.decoder import commit_kernel

    commit_kernel[(anchors.shape[0],)](
        result.tokens, result.num_accepted, result.status, anchors, lengths, limits, line,
        DRAFTS=drafts, BLOCK=_pow2(drafts + 1), num_warps=1,
    )  # fmt: skip
