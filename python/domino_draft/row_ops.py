"""The steps of a decoder layer that see a row at a time: Triton on a GPU, the same algebra in
Torch off it.

Nothing here synchronises or depends on the values of a tensor for its launch, so all of it can be
captured. The kernels and what they fuse: domino_kernels/triton_kernels/decoder_rows.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

SKINNY_ROWS = 16  # up to here our own product, beyond it the library's with the steps apart
SMALL, SMALL_ROWS = 1 << 21, 32  # the same of a weight of so few elements
HEAD_ROWS, FP8_HEAD_ROWS = 64, 16  # the same of an LM head, which has at least
HEAD_OUTPUTS = 1 << 16  # ids


_interpret = False  # tests only: run the kernels on CPU tensors, under Triton's interpreter


def on_triton(x: Tensor) -> bool:
    return x.is_cuda or _interpret


def pow2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


_PARTIALS, _COUNTERS = 1 << 22, 1 << 14


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
    """Tile sizes of `linear_kernel` or, for a large weight, `stream_kernel`.

    block_m: rows of a tile, a power of two from 16 on; None: all of them, up to 64.
    ahead: lines (128 bytes) of each row of the weight that `linear_kernel` asks for before the
    launch in front has ended; a power of two.
    """

    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int
    stream: bool = False
    ahead: int = 4
    block_m: int | None = None


@cache
def overlap(device: torch.device) -> dict[str, bool]:
    """How a launch may begin before the one in front of it has ended."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}


@cache
def _streams(device: torch.device) -> bool:
    """Whether the GPU has TMA and the shared memory that `stream_kernel` asks for."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


def linear_plan(rows: int, n: int, k: int, x: Tensor) -> LinearPlan | None:
    """For a weight [n, k] and rows of x's kind. None: the library's product, the steps apart."""
    most = SMALL_ROWS if n * k <= SMALL else SKINNY_ROWS
    if not on_triton(x) or rows > most or x.element_size() > 2:
        return None
    if n * k <= 1 << 22:  # the launch is what it costs; rows in tiles of 16 were the fastest
        return LinearPlan(16, 256, 1, 2, 3, block_m=16)
    if n % 64 or k % 128 or not _streams(x.device):
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
    if plan is None:
        plan = linear_plan(rows, n, k, x)
    if plan is None:
        return _linear_apart(x, weight, norm, bias, residual, glu, out)
    if out is None:
        out = x.new_empty(rows, n)
    from domino_kernels.triton_kernels.decoder_rows import linear_kernel, stream_kernel

    # The kernel multiplies by the norm's weight before it divides by the norm: fp16 may overflow.
    if norm is not None and (plan.stream or x.dtype == torch.float16):
        x, norm = rms_norm(x, *norm), None
    block_m = plan.block_m or max(16, min(pow2(rows), 64))
    grid = (-(-n // plan.block_n), plan.splits, -(-rows // block_m))
    pdl = overlap(x.device)
    if plan.stream:
        from triton.tools.tensor_descriptor import TensorDescriptor

        stream_kernel[grid](
            TensorDescriptor.from_tensor(x, [block_m, plan.block_k]),
            TensorDescriptor.from_tensor(weight, [plan.block_n, plan.block_k]),
            out, bias if bias is not None else x, residual if residual is not None else x,
            workspace.partial, workspace.counters, rows, n, k, out.stride(0),
            residual.stride(0) if residual is not None else 0,
            BIAS=bias is not None, RESIDUAL=residual is not None, GLU=glu, SPLITS=plan.splits,
            BLOCK_M=block_m, BLOCK_N=plan.block_n, BLOCK_K=plan.block_k,
            num_warps=plan.warps, num_stages=plan.stages, **pdl,
        )  # fmt: skip
        return out
    linear_kernel[grid](
        x, weight, out, norm[0] if norm else x, bias if bias is not None else x,
        residual if residual is not None else x, workspace.partial, workspace.counters,
        rows, n, k, x.stride(0), out.stride(0), residual.stride(0) if residual is not None else 0,
        norm[1] if norm else 0.0,
        NORM=norm is not None, BIAS=bias is not None, RESIDUAL=residual is not None, GLU=glu,
        SPLITS=plan.splits, AHEAD=plan.ahead if pdl["PDL"] else 0, BLOCK_M=block_m,
        BLOCK_N=plan.block_n, BLOCK_K=plan.block_k,
        num_warps=plan.warps, num_stages=plan.stages, **pdl,
    )  # fmt: skip
    return out


def _linear_apart(x, weight, norm, bias, residual, glu, out):
    if norm is not None:
        x = rms_norm(x, *norm)
    y = F.linear(x, weight, bias)
    if glu:
        y = silu_mul(y)
    if out is None:
        return y if residual is None else y + residual
    return out.copy_(y if residual is None else y + residual)


def lm_head(x: Tensor, weight: Tensor | Fp8Weight) -> Tensor:
    """x [M, K] times the weight [V, K] of an LM head transposed."""
    if isinstance(weight, Fp8Weight):
        return weight.product(x)
    if x.element_size() > 2 or not _streams_head(x, weight, HEAD_ROWS):
        return F.linear(x, weight)
    return _stream_head(x, weight, x.dtype)


def _streams_head(x: Tensor, weight: Tensor, most_rows: int) -> bool:
    rows, k = x.shape
    large = rows <= most_rows and weight.shape[0] >= HEAD_OUTPUTS
    described = k % 16 == 0 and weight.is_contiguous() and weight.data_ptr() % 16 == 0
    return large and described and _streams(x.device)


def _stream_head(
    x: Tensor, weight: Tensor, dtype: torch.dtype, scales: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """scales: of the rows of x and of the weight, [M, 1] and [V, 1]."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from domino_kernels.triton_kernels.decoder_rows import head_kernel

    (rows, k), n, size = x.shape, weight.shape[0], x.element_size()
    block_m = max(16, pow2(rows))
    block_n, bytes_k, stages = {16: (64, 512, 5), 32: (128, 256, 5), 64: (128, 256, 4)}[block_m]
    block_k = bytes_k // size
    out = torch.empty(rows, n, dtype=dtype, device=x.device)
    x_scale, w_scale = (x, x) if scales is None else scales
    blocks = -(-n // block_n)
    if x.is_cuda:  # one resident block each
        blocks = min(blocks, torch.cuda.get_device_properties(x.device).multi_processor_count)
    head_kernel[(blocks,)](
        TensorDescriptor.from_tensor(x.contiguous(), [block_m, block_k]),
        TensorDescriptor.from_tensor(weight, [block_n, block_k]),
        out, x_scale, w_scale, rows, n, k, SCALED=scales is not None,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=4, num_stages=stages, **overlap(x.device),
    )  # fmt: skip
    return out


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None, total: Tensor | None = None
) -> Tensor:
    """x [M, K] / rms(x) * weight; rows may be strided.

    delta [M, K], contiguous: it is added to x first, and total [M, K], maybe x, gets the sum.
    """
    rows, k = x.shape
    out = x.new_empty(rows, k)
    if not on_triton(x):
        if delta is not None:
            x = total.copy_(x + delta)
        wide = x.float()
        factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return out.copy_(wide * factor * weight.float())
    from domino_kernels.triton_kernels.decoder_rows import rms_norm_kernel

    block = pow2(k)
    rms_norm_kernel[(rows,)](
        x, weight, out, x if delta is None else delta, x if delta is None else total,
        k, x.stride(0), k, 0 if delta is None else total.stride(0), eps,
        DELTA=delta is not None, BLOCK_K=block,
        num_warps=min(16, max(4, block >> 9)), **overlap(x.device),
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
        rows = x.shape[0]
        if not x.is_cuda:
            q, scale = quantise_rows(x)
            wide = (q.float() * scale) @ (self.values.float() * self.scale).t()
            return wide.to(x.dtype)
        if _streams_head(x, self.values, FP8_HEAD_ROWS):
            q, scale = quantise_rows(x)
            return _stream_head(q, self.values, x.dtype, (scale, self.scale))
        # Rows in sixteens, as it likes them; what those behind the last hold is not read.
        q, scale = quantise_rows(x, places=rows + -rows % 16)
        y = torch._scaled_mm(
            q, self.values.t(), scale_a=scale, scale_b=self.scale.t(), out_dtype=torch.bfloat16
        )
        return y[:rows].to(x.dtype)


def quantise_rows(x: Tensor, places: int | None = None) -> tuple[Tensor, Tensor]:
    """x [M, K] in e4m3, and the scale of each row [M, 1]; places: of so many rows, on a GPU."""
    rows, k = x.shape
    if not x.is_cuda:
        wide = x.float()
        scale = (wide.abs().amax(1, keepdim=True) / 448).clamp(min=1e-12)
        return (wide / scale).to(torch.float8_e4m3fn), scale
    from domino_kernels.triton_kernels.decoder_rows import quantise_rows_kernel

    q = torch.empty(places or rows, k, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(places or rows, 1, dtype=torch.float32, device=x.device)
    pdl = overlap(x.device)
    quantise_rows_kernel[(rows,)](x, q, scale, k, BLOCK_K=pow2(k), num_warps=8, **pdl)
    return q, scale


def silu_mul(x: Tensor) -> Tensor:
    """silu of the first half of x [M, 2N], times its second half."""
    rows, n = x.shape[0], x.shape[1] // 2
    if not on_triton(x):
        gate, up = x.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(x.dtype)
    from domino_kernels.triton_kernels.decoder_rows import silu_mul_kernel

    out = x.new_empty(rows, n)
    grid = rows, -(-n // 1024)
    silu_mul_kernel[grid](x, out, n, BLOCK=1024, num_warps=4, **overlap(x.device))
    return out
