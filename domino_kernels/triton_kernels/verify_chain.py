"""row_stats and verify_chain in Triton: the same rules and words of noise as the CUDA kernels.

The portable form: it needs no extension, and runs wherever Triton does. Rows are read once for
their statistics, split over programs of 8192 tokens, and the row in which a walk ends once more for
its draw; match and gumbel race every row; filters read every row about 70 times more, in one
program a row. All values are fp32 and probabilities differ from the CUDA kernels' in the last bits,
so a token can differ where two keys of a race, or a coin and its threshold, agree to about 1e-6.

Laws of the logits as they are: penalties, bias and grammar masks are for the caller to apply.
"""

import math
from typing import NamedTuple

import torch
import triton

from domino_kernels.triton_kernels import verify_kernels as kernels

RULES = {"greedy": 0, "token": 1, "onehot": 2, "match": 3, "block": 4, "gumbel": 3}
ORDERS = {"transformers": 0, "vllm": 1, "joint": 2}
_SPLIT = 8192
_DRAW_SPLIT = 4096
# a product and a sum stay two roundings, as in the CUDA kernels
_OPTIONS = {"enable_fp_fusion": False}


class Rows(NamedTuple):
    """Rows of logits and their statistics; all but `logits` [rows]."""

    logits: torch.Tensor
    offsets: torch.Tensor  # int64, in elements; -1: no row
    scales: torch.Tensor  # log2(e) / temperature
    top: torch.Tensor
    mass: torch.Tensor
    argmax: torch.Tensor
    faults: torch.Tensor


class RowStats(NamedTuple):
    lse: torch.Tensor  # [...] float32, natural logarithm of sum exp(logits / temperature)
    argmax: torch.Tensor  # [...] int64, lowest id of the greatest logit
    chosen: torch.Tensor | None  # [...] float32, logit of `tokens`
    status: torch.Tensor  # [...] uint8: 1 NaN or +inf, 2 all -inf; then lse is NaN


def _scales(temperature):
    """Finite and positive for any temperature, as `law_scale` (csrc/verify/row_law.h)."""
    scales = math.log2(math.e) / torch.where(temperature == 0, 1.0, temperature)
    return scales.nan_to_num(nan=0.0).clamp(min=1e-30)


def _measure(logits, offsets, scales):
    """Statistics of the rows of a table."""
    rows, vocab, device = offsets.numel(), logits.size(-1), logits.device
    splits = triton.cdiv(vocab, _SPLIT)
    new = lambda *shape, **k: torch.zeros(shape, device=device, **k)  # noqa: E731
    top, mass = new(rows, splits), new(rows, splits)
    best = new(rows, splits, dtype=torch.int32)
    block = min(_SPLIT, triton.next_power_of_2(vocab))
    out = Rows(
        logits, offsets, scales, new(rows), new(rows), new(rows, dtype=torch.int32),
        new(rows, dtype=torch.int32),
    )  # fmt: skip
    if rows:
        kernels.partial_kernel[(rows, splits)](
            logits, offsets, scales, top, mass, best, vocab, splits, BLOCK=block, **_OPTIONS
        )
        kernels.combine_kernel[(rows,)](
            offsets, scales, top, mass, best, out.top, out.mass, out.argmax, out.faults, splits,
            PADDED=triton.next_power_of_2(splits), **_OPTIONS,
        )  # fmt: skip
    return out


def row_stats(logits, tokens=None, temperature=None):
    """Log-sum-exp, argmax and the logit of a token, for every row of logits.

    Args:
        logits: [..., V] contiguous, float32, float16 or bfloat16; a masked token is -inf.
        tokens: [...] integers, whose logits are wanted; NaN where outside the vocabulary.
        temperature: [...] float32; None: 1. 0 counts as 1.

    Returns:
        RowStats. NaN and +inf make a row unusable, and so do only -inf: `status` says which.

    Shards of a vocabulary combine: lse by logaddexp, argmax by the greater logit.
    """
    shape, vocab = logits.shape[:-1], logits.size(-1)
    flat = logits.reshape(-1, vocab)
    offsets = torch.arange(flat.size(0), device=logits.device) * vocab
    if temperature is None:
        temperature = torch.ones(shape, device=logits.device)
    rows = _measure(flat, offsets, _scales(temperature.reshape(-1)))
    usable = rows.faults == 0
    lse = (rows.top * rows.scales + rows.mass.log2()) * math.log(2)
    chosen = None
    if tokens is not None:
        inside = (tokens >= 0) & (tokens < vocab)
        at = tokens.where(inside, 0).reshape(-1, 1).long()
        chosen = flat.gather(1, at)[:, 0].float().view(shape)
        chosen = chosen.where(inside, torch.nan)
    return RowStats(
        lse.where(usable, torch.nan).view(shape),
        rows.argmax.long().where(usable, -1).view(shape),
        chosen,
        rows.faults.to(torch.uint8).view(shape),
    )


def _filter(rows, slots, top_k, top_p, min_p, order, batch):
    """(cut logit, cut id, kept mass) of every row."""
    device = rows.top.device
    cut_logit = torch.full_like(rows.top, -torch.inf)
    cut_id = torch.full_like(rows.argmax, 2**31 - 1)
    if top_k is None and top_p is None and min_p is None:
        return cut_logit, cut_id, rows.mass
    kept = rows.mass.clone()
    if top_k is None:
        top_k = torch.zeros(batch, dtype=torch.int32, device=device)
    top_p = torch.ones(batch, device=device) if top_p is None else top_p
    min_p = torch.zeros(batch, device=device) if min_p is None else min_p
    vocab = rows.logits.size(-1)
    kernels.cut_kernel[(rows.top.numel(),)](
        rows.logits, rows.offsets, rows.scales, rows.top, rows.mass, rows.faults, top_k, top_p,
        min_p, cut_logit, cut_id, kept, vocab, SLOTS=slots, ORDER=ORDERS[order],
        BLOCK=min(_DRAW_SPLIT, triton.next_power_of_2(vocab)), **_OPTIONS,
    )  # fmt: skip
    return cut_logit, cut_id, kept


def verify_chain(
    target_logits,
    draft_tokens,
    *,
    rule="token",
    temperature,
    seed,
    block_start,
    draft_logits=None,
    draft_temperature=None,
    cu_rows=None,
    top_k=None,
    top_p=None,
    min_p=None,
    filter_order="transformers",
):
    """domino_kernels.verify_chain in Triton, for one rule and dense or one-hot q.

    Args and returns: as there (VerifyResult). Contiguous last dimensions; K >= 0.
    """
    from domino_kernels.ops.verify import VerifyResult

    batch, drafts = draft_tokens.shape
    slots, vocab, device = drafts + 1, target_logits.size(-1), target_logits.device
    slot = torch.arange(slots, device=device)
    if cu_rows is None:
        steps = target_logits.stride()
        offsets = torch.arange(batch, device=device)[:, None] * steps[0] + slot * steps[1]
    else:
        first, last = cu_rows[:-1].long(), cu_rows[1:].long()
        at = first[:, None] + slot
        offsets = (at * target_logits.stride(0)).where(at < last[:, None], -1)
    greedy = temperature == 0
    scales = _scales(temperature)[:, None].expand(-1, slots).contiguous().view(-1)
    rows = _measure(target_logits, offsets.contiguous().view(-1), scales)
    cut = _filter(rows, slots, top_k, top_p, min_p, filter_order, batch)
    dense = draft_logits is not None and rule in ("token", "block") and drafts > 0
    q_rows = rows  # not read
    has_q = torch.zeros_like(greedy)
    if dense:
        told = temperature if draft_temperature is None else draft_temperature
        steps = draft_logits.stride()
        of = torch.arange(batch, device=device)[:, None] * steps[0] + slot[:drafts] * steps[1]
        # a request without q, by its temperatures, has scale 0
        has_q = ~greedy & (told != 0)
        q_scales = _scales(told).masked_fill(~has_q, 0.0)
        q_scales = q_scales[:, None].expand(-1, drafts).contiguous().view(-1)
        q_rows = _measure(draft_logits, of.contiguous().view(-1), q_scales)

    # one-hot drafts: block verification is the token rule
    name = torch.where(has_q, RULES["block"], RULES["token"]) if rule == "block" else RULES[rule]
    kind = torch.where(greedy, RULES["greedy"], name).int()
    count = batch * slots
    new = lambda *shape, **k: torch.zeros(shape, device=device, **k)  # noqa: E731
    integers = lambda *shape: new(*shape, dtype=torch.int64)  # noqa: E731
    p, q, status = new(count), new(count), new(count, dtype=torch.int32)
    law = rows.logits, rows.offsets, rows.scales, rows.top, cut[2], cut[0], cut[1]
    q_law = q_rows.logits, q_rows.offsets, q_rows.scales, q_rows.top, q_rows.mass
    stride = draft_tokens.stride(0)
    kernels.judge_kernel[(count,)](
        *law, rows.faults, *q_law, q_rows.faults, draft_tokens, stride, p, q, status, vocab,
        SLOTS=slots, DENSE=dense, **_OPTIONS,
    )  # fmt: skip

    block = min(_DRAW_SPLIT, max(4, triton.next_power_of_2(vocab)))
    splits = triton.cdiv(vocab, block)
    padded = triton.next_power_of_2(splits)
    reach, rest = torch.ones(count, device=device), new(count, 1)
    if rule == "block":
        kernels.reach_kernel[(batch,)](p, q, reach, SLOTS=slots, **_OPTIONS)
        rest = new(count, splits)
        kernels.rest_kernel[(count, splits)](
            *law, *q_law, draft_tokens, stride, p, q, reach, rest, vocab, splits, SLOTS=slots,
            BLOCK=block, **_OPTIONS,
        )  # fmt: skip
    value, winner = new(count, splits), new(count, splits, dtype=torch.int32)

    def race(units, row, draft, without, weight, purpose, start, i, dense):
        kernels.race_kernel[(units, splits)](
            *law, *q_law, row, draft, without, weight, purpose, seed, start, i, value, winner,
            vocab, splits, SLOTS=slots, DENSE=dense, BLOCK=block, **_OPTIONS,
        )  # fmt: skip

    none = torch.full((count,), -1, dtype=torch.int64, device=device)
    if rule in ("match", "gumbel"):
        usable = (rows.offsets >= 0) & (rows.faults == 0)
        position = (block_start[:, None] + 1 + slot).contiguous().view(-1)
        number = torch.arange(count, device=device).where(usable, -1)
        purpose = torch.full_like(rows.argmax, 5)
        race(count, number, none, none, reach, purpose, position, torch.zeros_like(purpose), False)

    stop, found = new(batch, dtype=torch.int32), new(batch, dtype=torch.int32)
    last, again, row, of, without, start = (integers(batch) for _ in range(6))
    weight, purpose, i = new(batch), torch.zeros_like(stop), torch.zeros_like(stop)
    kernels.walk_kernel[(batch,)](
        p, q, status, rows.argmax, draft_tokens, stride, kind, seed, block_start, reach, rest,
        rest.size(1), value, winner, splits, rows.offsets, stop, last, found, row, of, without,
        weight, purpose, start, i, SLOTS=slots, PADDED=padded,
        REST_PADDED=triton.next_power_of_2(rest.size(1)), **_OPTIONS,
    )  # fmt: skip
    race(batch, row, of, without, weight, purpose, start, i, dense)
    kernels.again_kernel[(batch,)](
        value, winner, splits, row, of, without, purpose, found, last, again, PADDED=padded
    )
    race(batch, again, of, without, weight, purpose, start, i, False)
    out = VerifyResult(
        integers(batch, slots), torch.zeros_like(stop), torch.zeros_like(stop), new(batch, slots),
        new(batch, dtype=torch.uint8),
    )  # fmt: skip
    kernels.emit_kernel[(batch,)](
        rows.logits, rows.offsets, rows.scales, rows.top, rows.mass, draft_tokens, stride, stop,
        last, again, value, winner, splits, found, *out[:2], out[2], out[3], out[4],
        SLOTS=slots, PADDED=padded, **_OPTIONS,
    )  # fmt: skip
    return out
