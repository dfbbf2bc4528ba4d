"""The structure of vLLM's second model runner for rejection sampling, rebuilt in Triton.

Logits of the target with temperature and filters already applied, [R, V] fp32 or bf16, and of the
draft, at its temperature, or none (one-hot). Four launches:

1. stats: one program a row and 8192 tokens: greatest logit, its id, sum of exponentials; draft too
2. reject: one program a request: row after row, p(x) >= u q(x) from the partial statistics
3. resample: one program a request and 1024 tokens: Gumbel-max over log(relu(p - q))
4. insert: one program a request: the best of these goes into the output

The coins are an argument, so that the accepted count is that of the case; the engine draws them in
the second launch, one Philox word each.
"""

import torch
import triton
import triton.language as tl

STATS_BLOCK = 8192
DRAW_BLOCK = 1024


@triton.jit
def _partial(row, columns, inside):
    z = tl.load(row + columns, mask=inside, other=-float("inf")).to(tl.float32)
    top = tl.max(z, axis=0)
    # a block that the filters left nothing of: exp(-inf - 0) = 0, not exp(-inf + inf)
    total = tl.sum(tl.exp(z - tl.where(top > -float("inf"), top, 0.0)), axis=0)
    return top, total, tl.argmax(z, axis=0)


@triton.jit
def stats_kernel(
    target,
    draft,
    top,
    total,
    best,
    draft_top,
    draft_total,
    vocab,
    blocks,
    SLOTS: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    value, mass, where = _partial(target + row * vocab, columns, inside)
    at = row * blocks + block
    tl.store(top + at, value)
    tl.store(total + at, mass)
    tl.store(best + at, (block * BLOCK + where).to(tl.int64))
    slot = row % SLOTS
    if HAS_DRAFT:
        if slot < SLOTS - 1:
            of = row // SLOTS * (SLOTS - 1) + slot
            value, mass, where = _partial(draft + of * vocab, columns, inside)
            tl.store(draft_top + at, value)
            tl.store(draft_total + at, mass)


@triton.jit
def _lse(top, total, row, blocks, PADDED: tl.constexpr):
    at = tl.arange(0, PADDED)
    tops = tl.load(top + row * blocks + at, mask=at < blocks, other=-float("inf"))
    totals = tl.load(total + row * blocks + at, mask=at < blocks, other=0.0)
    most = tl.max(tops, axis=0)
    return most + tl.log(tl.sum(totals * tl.exp(tops - most), axis=0)), tops


@triton.jit
def reject_kernel(
    target,
    draft,
    drafts,
    coins,
    top,
    total,
    best,
    draft_top,
    draft_total,
    tokens,
    kept,
    lse_at,
    draft_lse_at,
    vocab,
    blocks,
    SLOTS: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
    GREEDY: tl.constexpr,
    PADDED: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    going = True
    count = 0
    for slot in range(SLOTS - 1):
        if going:
            row = b * SLOTS + slot
            x = tl.load(drafts + b * (SLOTS - 1) + slot)
            lse, tops = _lse(top, total, row, blocks, PADDED)
            if GREEDY:
                winner = tl.load(best + row * blocks + tl.argmax(tops, axis=0))
                going = winner == x
                tl.store(tokens + row, winner)
            else:
                p = tl.exp(tl.load(target + row * vocab + x).to(tl.float32) - lse)
                q = 1.0
                draft_lse = 0.0
                if HAS_DRAFT:
                    draft_lse, _ = _lse(draft_top, draft_total, row, blocks, PADDED)
                    of = b * (SLOTS - 1) + slot
                    q = tl.exp(tl.load(draft + of * vocab + x).to(tl.float32) - draft_lse)
                going = tl.load(coins + b * (SLOTS - 1) + slot) * q <= p
                tl.store(tokens + row, x)
                tl.store(lse_at + b, lse)
                tl.store(draft_lse_at + b, draft_lse)
            count += going.to(tl.int32)
    if going:
        row = b * SLOTS + SLOTS - 1
        lse, tops = _lse(top, total, row, blocks, PADDED)
        tl.store(lse_at + b, lse)
        if GREEDY:
            tl.store(tokens + row, tl.load(best + row * blocks + tl.argmax(tops, axis=0)))
    tl.store(kept + b, count)


@triton.jit
def resample_kernel(
    target,
    draft,
    drafts,
    kept,
    lse_at,
    draft_lse_at,
    value,
    where,
    seed,
    vocab,
    blocks,
    SLOTS: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(kept + b)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    row = b * SLOTS + slot
    z = tl.load(target + row * vocab + columns, mask=inside, other=-float("inf")).to(tl.float32)
    if slot < SLOTS - 1:
        if HAS_DRAFT:
            of = b * (SLOTS - 1) + slot
            d = tl.load(draft + of * vocab + columns, mask=inside, other=-float("inf"))
            p = tl.exp(z - tl.load(lse_at + b))
            q = tl.exp(d.to(tl.float32) - tl.load(draft_lse_at + b))
            z = tl.where(p > q, tl.log(p - q), -float("inf"))
        else:
            z = tl.where(columns == tl.load(drafts + b * (SLOTS - 1) + slot), -float("inf"), z)
    u = tl.rand(seed, (b * vocab + columns).to(tl.int32))
    perturbed = z - tl.log(-tl.log(tl.maximum(u, 1e-20)))
    at = b * blocks + block
    tl.store(value + at, tl.max(perturbed, axis=0))
    tl.store(where + at, (block * BLOCK + tl.argmax(perturbed, axis=0)).to(tl.int64))


@triton.jit
def insert_kernel(tokens, kept, value, where, blocks, SLOTS: tl.constexpr, PADDED: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    values = tl.load(value + b * blocks + at, mask=at < blocks, other=-float("inf"))
    winner = tl.load(where + b * blocks + tl.argmax(values, axis=0))
    tl.store(tokens + b * SLOTS + tl.load(kept + b), winner)


def rejection_sample(target, drafts, coins, draft=None, greedy=False):
    """(tokens [B, K + 1], kept [B]); target [B, K + 1, V], draft [B, K, V], contiguous."""
    batch, slots, vocab = target.shape
    new = lambda *shape, **k: torch.empty(shape, device=target.device, **k)  # noqa: E731
    blocks = triton.cdiv(vocab, STATS_BLOCK)
    wide = batch * slots, blocks
    top, total, draft_top, draft_total = (new(*wide) for _ in range(4))
    best = new(*wide, dtype=torch.int64)
    has = dict(SLOTS=slots, HAS_DRAFT=draft is not None)
    stats_kernel[(batch * slots, blocks)](
        target, draft, top, total, best, draft_top, draft_total, vocab, blocks,
        BLOCK=STATS_BLOCK, **has,
    )  # fmt: skip
    tokens = new(batch, slots, dtype=torch.int64)
    kept = new(batch, dtype=torch.int32)
    lse, draft_lse = new(batch), new(batch)
    reject_kernel[(batch,)](
        target, draft, drafts, coins, top, total, best, draft_top, draft_total, tokens, kept,
        lse, draft_lse, vocab, blocks, GREEDY=greedy, PADDED=triton.next_power_of_2(blocks),
        num_warps=1, **has,
    )  # fmt: skip
    if greedy:
        return tokens, kept
    blocks = triton.cdiv(vocab, DRAW_BLOCK)
    value, where = new(batch, blocks), new(batch, blocks, dtype=torch.int64)
    resample_kernel[(batch, blocks)](
        target, draft, drafts, kept, lse, draft_lse, value, where, 7, vocab, blocks,
        BLOCK=DRAW_BLOCK, **has,
    )  # fmt: skip
    insert_kernel[(batch,)](
        tokens, kept, value, where, blocks, SLOTS=slots, PADDED=triton.next_power_of_2(blocks)
    )
    return tokens, kept
