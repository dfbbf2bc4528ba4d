"""The LM head of a draft block, and whether choosing a pool would pay as the end of its product.

`ours` is the product that the loop takes (`row_ops.lm_head`; `ours/shortlist` with the shortlist
behind it, as trees draft), `library` that of cuBLAS. `fused` is less than any fused form does: a
persistent Triton product whose logits stay in registers but for the maximum over a block's slots,
which is where a pool begins. Nothing is chosen, none of the logits is stored. What it saves is the
most that fusion may cost: choosing comes on top.
"""

from typing import NamedTuple

import torch
from domino_draft import row_ops
from domino_draft.row_ops import Fp8Weight
from torch.nn import functional

from bench.registry import Case
from domino_kernels import shortlist

SLOTS = 15
MODELS = {"qwen3-8b": (4096, 151936), "smollm2-135m": (576, 49152)}  # H, V
DTYPE = torch.bfloat16
# batch -> (ids, rows, k of a tile, warps, stages), for bf16: in fp8 twice the k. The best of those
# tried: 128 ids or smaller stages at batch 1, 256 ids or larger k at 8, fewer ids or stages at 64.
PLANS = {1: (64, 16, 256, 4, 5), 8: (128, 128, 64, 8, 5), 64: (256, 128, 64, 8, 4)}


class Operands(NamedTuple):
    """hidden [B, 15, H]; weight [V, H], in fp8 or not; rows [16 B, H]: a block's slots and one
    more, in the weight's dtype, and the scale of each in fp8."""

    hidden: torch.Tensor
    weight: torch.Tensor | Fp8Weight
    rows: torch.Tensor
    scale: torch.Tensor | None


def make(size, batch, fp8, seed, device):
    width, vocab = size
    generator = torch.Generator(device).manual_seed(seed)
    draw = lambda *size: torch.randn(size, generator=generator, device=device, dtype=DTYPE)  # noqa: E731
    weight, hidden, scale = draw(vocab, width).mul_(width**-0.5), draw(batch, SLOTS, width), None
    rows = functional.pad(hidden, (0, 0, 0, 1)).flatten(0, 1)
    if fp8:
        weight = Fp8Weight.of(weight)
        rows, scale = row_ops.quantise_rows(rows)
    return Operands(hidden, weight, rows, scale)


def ours(o):
    return row_ops.lm_head(o.hidden.flatten(0, 1), o.weight).view(*o.hidden.shape[:2], -1)


def library(o):
    x = o.hidden.flatten(0, 1)
    if o.scale is None:
        return functional.linear(x, o.weight).view(*o.hidden.shape[:2], -1)
    if not x.is_cuda:
        return ours(o)
    q, scale = row_ops.quantise_rows(x, places=len(x) + -len(x) % 16)
    scales = dict(scale_a=scale, scale_b=o.weight.scale.t())
    base = torch._scaled_mm(q, o.weight.values.t(), out_dtype=DTYPE, **scales)
    return base[: len(x)].view(*o.hidden.shape[:2], -1)


def fused(o, plan):
    from bench.peers.lm_head_triton import fused

    return fused(o.rows, o.weight, o.scale, plan)


def maxima(base):
    """Of each id over the slots, [B, V]: what all providers are compared by."""
    return base.float().amax(1)


def check(operands, got):
    """got: logits [B, S, V], their maxima [B, V], or the ids of a shortlist [B, M]."""
    (o,) = operands
    best = maxima(library(o))
    if got.dtype == torch.int32:  # all of the shortlist are above all that it leaves out
        best = maxima(ours(o))
        chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, got.long(), True)
        least = best.masked_fill(~chosen, torch.inf).amin(1)
        assert (best.masked_fill(chosen, -torch.inf).amax(1) <= least).all(), "not the largest"
        return
    off = (maxima(got) if got.dim() == 3 else got.float()) - best
    bound = 2 * torch.finfo(DTYPE).eps * best.abs().clamp(min=1)
    assert (off.abs() <= bound).all(), f"off by {off.abs().max():.4f}"


def case(model, batch, fp8):
    width, vocab = size = MODELS[model]
    pool = 2048 if batch <= 8 else 512
    plan = PLANS[batch]
    providers = {
        "ours": ours,
        "ours/shortlist": lambda o: shortlist(ours(o), pool),
        "library": library,
        "fused": lambda o: fused(o, plan),
    }
    params = {"ours/shortlist": {"M": pool}, "fused": {"plan": list(plan)}}
    return Case(
        op="lm_head",
        case="fp8" if fp8 else "bf16",
        params={"model": model},
        provider_params=params,
        shape={"H": width, "V": vocab, "S": SLOTS},
        batch=batch,
        make=lambda seed, device: (make(size, batch, fp8, seed, device),),
        providers=providers,
        gpu_only=("fused",),
        check=check,
        bytes=vocab * width * (1 if fp8 else 2) + 2 * batch * SLOTS * width,
    )


def cases():
    for model in MODELS:
        for batch in PLANS:
            for fp8 in (False, True):
                yield case(model, batch, fp8)
