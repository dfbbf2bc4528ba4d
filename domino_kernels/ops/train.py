"""Training operators: the dual cross-entropy of a base-anchored low-rank drafting head."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["DualCE", "dual_ce"]


class DualCE(NamedTuple):
    """What `dual_ce` returns; only `loss` carries a gradient.

    loss: float32 scalar. base_ce, final_ce: float32 [N] (float64 for a float64 head), unweighted, 0
    where there is no label. base_top, final_top: int64 [N], argmax of the logits, the lowest id on
    a tie. Without a low-rank branch the final values are the base values.
    """

    loss: torch.Tensor
    base_ce: torch.Tensor
    final_ce: torch.Tensor
    base_top: torch.Tensor
    final_top: torch.Tensor


def dual_ce(
    hidden: torch.Tensor,
    low_rank: torch.Tensor | None,
    labels: torch.Tensor,
    weights: torch.Tensor,
    lm_head: torch.Tensor,
    w2: torch.Tensor | None,
    lam: float,
    *,
    chunk_rows: int = 8192,
) -> DualCE:
    """Weighted cross-entropy of base logits and of base + low-rank logits, gradients taken in the
    forward.

        base = hidden @ lm_head.T          final = base + low_rank @ w2.T
        loss = sum_i weights[i] * (lam * CE(base_i, labels_i) + (1 - lam) * CE(final_i, labels_i))

    hidden [N, H], low_rank [N, R] or None, labels int64 [N] (outside [0, V): no label), weights
    float [N], lm_head [V, H] (frozen), w2 [V, R] or None. Matrix products run in lm_head's dtype
    with fp32 accumulation, softmax statistics in fp32; gradients are returned in the dtype of their
    operand. Rows go through `chunk_rows` at a time, so the largest temporaries are two [chunk_rows,
    V] buffers, and no logit outlives its chunk. With low_rank None the loss is the plain weighted
    cross-entropy, whatever lam is. Source: Domino (arXiv 2605.29707), the base-anchored objective;
    a frozen head is what makes the gradient of every chunk final in the forward.
    """
    op = "dual_ce"
    if hidden.dim() != 2:
        raise ValueError(f"{op}: hidden: got {hidden.dim()} dimensions, expected 2 [N, H]")
    rows, width = hidden.shape
    if lm_head.dim() != 2 or lm_head.shape[1] != width:
        raise ValueError(f"{op}: lm_head: got {tuple(lm_head.shape)}, expected [V, {width}]")
    if lm_head.requires_grad:
        raise ValueError(f"{op}: lm_head: got requires_grad=True, expected a frozen matrix")
    for name, value, right in (
        ("labels", labels, labels.dtype == torch.int64),
        ("weights", weights, weights.is_floating_point()),
    ):
        if value.shape != (rows,):
            raise ValueError(f"{op}: {name}: got {tuple(value.shape)}, expected ({rows},)")
        if not right:
            kind = "torch.int64" if name == "labels" else "a floating dtype"
            raise TypeError(f"{op}: {name}: got {value.dtype}, expected {kind}")
    if (low_rank is None) != (w2 is None):
        raise ValueError(f"{op}: w2: got one of low_rank and w2 as None, expected both or neither")
    if low_rank is not None:
        if low_rank.dim() != 2 or low_rank.shape[0] != rows:
            raise ValueError(f"{op}: low_rank: got {tuple(low_rank.shape)}, expected [{rows}, R]")
        if w2.shape != (lm_head.shape[0], low_rank.shape[1]):
            raise ValueError(
                f"{op}: w2: got {tuple(w2.shape)}, expected {(lm_head.shape[0], low_rank.shape[1])}"
            )
    if not 0.0 <= lam <= 1.0:
        raise ValueError(f"{op}: lam: got {lam}, expected a value in [0, 1]")
    if chunk_rows < 1:
        raise ValueError(f"{op}: chunk_rows: got {chunk_rows}, expected at least 1")
    for name, tensor in (("low_rank", low_rank), ("labels", labels), ("weights", weights),
                         ("lm_head", lm_head), ("w2", w2)):  # fmt: skip
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"{op}: {name}: got {tensor.device}, expected {hidden.device}")
    loss, ce, top = _DualCE.apply(
        hidden, low_rank, labels, weights, lm_head, w2, float(lam), chunk_rows
    )
    final = 0 if low_rank is None else 1
    return DualCE(loss, ce[0], ce[final], top[0].long(), top[final].long())


class _DualCE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, low_rank, labels, weights, lm_head, w2, lam, chunk_rows):
        rows, width = hidden.shape
        vocab, dtype = lm_head.shape[0], lm_head.dtype
        with_head = low_rank is not None
        grad_on = any(ctx.needs_input_grad)
        step = _row_kernel(hidden.device)
        h_all = hidden.detach().to(dtype)
        u_all = low_rank.detach().to(dtype) if with_head else None
        w2_c = w2.detach().to(dtype) if with_head else None
        # Padded rows: the kernel is specialised on 16-byte alignment, and N changes at every call.
        padded = (2, -(-rows // 64) * 64)
        ce = torch.zeros(padded, dtype=_sum_dtype(dtype), device=hidden.device)[:, :rows]
        top = torch.zeros(padded, dtype=torch.int32, device=hidden.device)[:, :rows]
        d_hidden = torch.empty(rows, width, dtype=dtype, device=hidden.device) if grad_on else None
        d_low = torch.empty_like(u_all) if grad_on and with_head else None
        d_w2 = None
        if grad_on and with_head:
            d_w2 = torch.zeros(w2.shape, dtype=_sum_dtype(dtype), device=w2.device)

        chunk = min(chunk_rows, max(rows, 1))
        base_buf = torch.empty(chunk, vocab, dtype=dtype, device=hidden.device)
        delta_buf = torch.empty_like(base_buf) if with_head else None
        with torch.autocast(hidden.device.type, enabled=False):
            for lo in range(0, rows, chunk):
                hi = min(lo + chunk, rows)
                base = torch.mm(h_all[lo:hi], lm_head.t(), out=base_buf[: hi - lo])
                delta = None
                if with_head:
                    delta = torch.mm(u_all[lo:hi], w2_c.t(), out=delta_buf[: hi - lo])
                step(base, delta, labels[lo:hi], weights[lo:hi], lam, ce[:, lo:hi],
                     top[:, lo:hi], write_grad=grad_on)  # fmt: skip
                if grad_on:
                    torch.mm(base, lm_head, out=d_hidden[lo:hi])
                    if with_head:
                        torch.mm(delta, w2_c, out=d_low[lo:hi])
                        d_w2 += delta.t() @ u_all[lo:hi]

        sum_dtype = _sum_dtype(dtype)
        w = weights.to(sum_dtype)
        if with_head:
            loss = lam * (w * ce[0]).sum() + (1.0 - lam) * (w * ce[1]).sum()
        else:
            loss = (w * ce[0]).sum()
        if grad_on:
            ctx.save_for_backward(d_hidden, d_low, d_w2)
            ctx.dtypes = (hidden.dtype, low_rank.dtype if with_head else None,
                          w2.dtype if with_head else None)  # fmt: skip
        ctx.mark_non_differentiable(ce, top)
        return loss, ce, top

    @staticmethod
    def backward(ctx, grad_loss, _ce, _top):
        d_hidden, d_low, d_w2 = ctx.saved_tensors
        hidden_dtype, low_dtype, w2_dtype = ctx.dtypes
        need = ctx.needs_input_grad
        g_hidden = (d_hidden * grad_loss).to(hidden_dtype) if need[0] else None
        g_low = (d_low * grad_loss).to(low_dtype) if d_low is not None and need[1] else None
        g_w2 = (d_w2 * grad_loss).to(w2_dtype) if d_w2 is not None and need[5] else None
        return g_hidden, g_low, None, None, None, g_w2, None, None


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _row_kernel(device: torch.device):
    if device.type == "cuda":
        from domino_kernels.triton_kernels.dual_ce import dual_ce_rows

        return dual_ce_rows
    return dual_ce_rows_torch


def dual_ce_rows_torch(base, delta, labels, weights, lam, ce, top, *, write_grad):
    """The row kernel of triton_kernels/dual_ce.py in plain torch, in place on base and delta [R,
    V].
    """
    sum_dtype = _sum_dtype(base.dtype)
    labelled = (labels >= 0) & (labels < base.shape[1])
    safe = torch.where(labelled, labels, 0)[:, None]
    w = torch.where(labelled, weights.to(sum_dtype), 0.0)[:, None]
    b = base.to(sum_dtype)
    logits = [b] if delta is None else [b, b + delta.to(sum_dtype)]
    factors = [1.0] if delta is None else [lam, 1.0 - lam]
    grads = []
    for row, (x, factor) in enumerate(zip(logits, factors)):
        lse = torch.logsumexp(x, dim=-1, keepdim=True)
        ce[row] = torch.where(labelled, (lse - x.gather(1, safe))[:, 0], 0.0)
        top[row] = x.argmax(dim=-1)
        if write_grad:
            grad = torch.exp(x - lse)
            grad.scatter_add_(1, safe, torch.full_like(grad[:, :1], -1.0))
            grads.append(grad.mul_(factor * w))
    if write_grad:
        base.copy_(sum(grads))
        if delta is not None:
            delta.copy_(grads[1])
