"""The steps of a decoder layer over static caches, and a cycle's two ends: Triton on a GPU, the
same algebra in Torch off it.

Captured like those of row_ops.py. The kernels: domino_kernels/triton_kernels/decoder_cache.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache import held_positions
from .row_ops import Workspace, on_triton, overlap, pow2

_PROGRAMS = 100  # that a launch should have at least, for a GPU of some hundred multiprocessors


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
    rows: Rows | None = None,
    ring: bool = False,
    plan: AttendPlan | None = None,
) -> Tensor:
    """Attention of each row's T new tokens over its cache and each other; writes the cache.

    qkv [B * T, (heads + 2 kv_heads) * D]; keys, values [rows >= B, kv_heads, L, D]; lengths int64
    [B]: row b's tokens stand, and are written, at lengths[b] .. lengths[b] + T - 1. rope: from
    `rope_table`. Returns [B * T, heads * D]. causal False: the new tokens all see each other.
    rows: where the tokens are not T a row, one behind the other. ring: position p lies at p % L,
    where L >= window + T - 1.

    Raises:
        ValueError: a ring that is too short for its window, or with a tree of tokens; a plan whose
            parts do not fit the workspace.
    """
    batch = lengths.shape[0]
    rows = rows or Rows(qkv.shape[0] // batch)
    tokens = rows.tokens
    kv_heads, room, dim = keys.shape[1:]
    if ring and (not window or room < window + tokens - 1 or rows.mask is not None):
        tree = "" if rows.mask is None else " of a tree"
        raise ValueError(
            f"attend: ring: got {room} places for a window of {window} and {tokens} tokens{tree}, "
            "expected at least a window and tokens - 1, and no tree"
        )
    group = heads // kv_heads
    out = qkv.new_empty(qkv.shape[0], heads * dim)
    if not on_triton(qkv):
        return _attend_torch(
            qkv, keys, values, lengths, rope, out, heads, scale, q_norm, k_norm, eps, causal,
            window, rows, ring,
        )  # fmt: skip
    from domino_kernels.triton_kernels.decoder_cache import attend_kernel

    if plan is None:
        plan = attend_plan(batch, tokens, group, kv_heads, dim, room, qkv.element_size())
    block_d = max(16, pow2(dim))
    tiles = -(-group * tokens // plan.block_m)
    parts = batch * kv_heads * tiles * plan.splits
    if plan.splits > 1 and (
        parts * plan.block_m * (block_d + 2) > workspace.partial.numel()
        or parts > workspace.counters.numel()
    ):
        raise ValueError(f"attend: plan: got {plan}, expected parts that fit the workspace")
    attend_kernel[(plan.splits * tiles, kv_heads, batch)](
        qkv, keys, values, lengths, rope, q_norm if q_norm is not None else qkv,
        k_norm if k_norm is not None else qkv, out, *rows.tensors(lengths),
        workspace.partial, workspace.counters, scale, eps, room, keys.stride(0), keys.stride(1),
        tokens, plan.splits, int(causal),
        NORM=q_norm is not None, WINDOW=window or 0, RING=ring,
        RAGGED=rows.starts is not None, TREE=rows.mask.shape[2] if rows.mask is not None else 0,
        GROUP=group, KV_HEADS=kv_heads, DIM=dim, SPLIT=plan.splits > 1,
        BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, BLOCK_T=max(16, pow2(tokens)),
        BLOCK_H=max(16, pow2(dim // 2)), BLOCK_D=block_d,
        num_warps=plan.warps, num_stages=plan.stages, **overlap(qkv.device),
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class Rows:
    """Which tokens of a batch are whose, and where they stand.

    tokens: those of a row, or the most that one may have. starts int32 [B + 1]: row b has tokens
    starts[b] .. starts[b + 1] - 1, at least one. Of a tree (build_tree), all rows with `tokens`
    nodes: positions int64 [B, tokens], and mask int32 [B, tokens, words], packed: what a node sees
    of the others. A node's place in the cache is lengths[b] + its number all the same.
    """

    tokens: int
    starts: Tensor | None = None
    positions: Tensor | None = None
    mask: Tensor | None = None

    def tensors(self, instead: Tensor) -> list[Tensor]:
        found = self.starts, self.positions, self.mask
        return [instead if t is None else t for t in found]

    def ragged(self, batch: int) -> int:
        """What the kernels look a token's row up in: a power of two, or 0."""
        return 0 if self.starts is None else pow2(batch)

    def places(self, total: int, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(row, token in it) int64 [total] of every token."""
        index = torch.arange(total, device=lengths.device)
        if self.starts is None:
            return index // self.tokens, index % self.tokens
        row = torch.bucketize(index, self.starts.long(), right=True) - 1
        return row, index - self.starts[row]


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
        block_m = max(16, min(pow2(queries), 64))
    programs = batch * kv_heads * -(-queries // block_m)
    most, enough, splits = (4, 2 * _PROGRAMS, 1) if tokens > 4 else (8, _PROGRAMS, 1)
    while programs * splits < enough and 128 * splits < room and splits < most:
        splits *= 2
    block_n = 128 if block_m == 16 else 64
    return AttendPlan(block_m, block_n if size == 2 and dim <= 128 else 32, splits, 4, 2)


def _attend_torch(
    qkv, keys, values, lengths, rope, out, heads, scale, q_norm, k_norm, eps, causal, window, rows,
    ring,
):  # fmt: skip
    batch, (kv_heads, room, dim) = lengths.shape[0], keys.shape[1:]
    row, token = rows.places(qkv.shape[0], lengths)
    # A place for every token that a row may have; those that it has not are never looked at.
    padded = qkv.new_zeros(batch, rows.tokens, heads + 2 * kv_heads, dim)
    padded[row, token] = qkv.view(-1, heads + 2 * kv_heads, dim)
    q, k, v = padded.split((heads, kv_heads, kv_heads), dim=2)
    slot = lengths[:, None] + torch.arange(rows.tokens, device=lengths.device)
    at = slot if rows.positions is None else rows.positions
    angles = rope[at.clamp(max=rope.shape[0] - 1)]
    q = _rotate(_norm_heads(q, q_norm, eps), angles).to(qkv.dtype)
    k = _rotate(_norm_heads(k, k_norm, eps), angles).to(qkv.dtype)
    held = torch.zeros(batch, rows.tokens, dtype=torch.bool, device=lengths.device)
    held[row, token] = True
    place = slot % room if ring else slot
    _store(keys, k, place, held)
    _store(values, v, place, held)
    j = torch.arange(room, device=lengths.device)
    if rows.mask is None:
        # The position that a place holds; below 0 a ring's place holds none.
        where = held_positions(slot[:, -1:], room)[:, None] if ring else j
        last = slot if causal else slot[:, -1:].expand_as(slot)
        seen = (where >= 0) & (where <= last[..., None])
    else:
        t = torch.arange(rows.tokens, device=lengths.device)
        bits = (rows.mask[..., t // 32] >> (t % 32)) & 1
        behind = torch.zeros(batch, rows.tokens, room + rows.tokens, device=lengths.device)
        behind.scatter_(2, slot[:, None].expand(-1, rows.tokens, -1), bits.to(behind.dtype))
        seen = (j < lengths[:, None, None]) | (behind[..., :room] != 0)
        where = torch.arange(room + rows.tokens, device=lengths.device).expand(batch, -1)
        where = where.scatter(1, slot, at)[:, None, :room]
    if window:
        seen = seen & (where > at[..., None] - window)
    # What lies behind a row's end may be anything: its weight is 0, and 0 * NaN is NaN.
    held = (where[:, 0] >= 0 if ring else j <= slot[:, -1:])[:, None, :, None]
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        keys[:batch].where(held, 0),
        values[:batch].where(held, 0),
        attn_mask=seen[:, None],
        scale=scale,
        enable_gqa=True,
    )
    return out.copy_(y.transpose(1, 2)[row, token].reshape(out.shape))


def _store(cache: Tensor, x: Tensor, at: Tensor, held: Tensor) -> None:
    """x [B, T, kv_heads, D] to positions at [B, T] of the first B rows where held; none past the
    end."""
    rows = torch.arange(at.shape[0], device=at.device)[:, None].expand_as(at)
    keep = held & (at < cache.shape[2])
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
    rows: Rows | None = None,
    places: Tensor | None = None,
    ring: bool = False,
    counts: Tensor | None = None,
) -> None:
    """Norms and rotary alone: keys and values into the cache, queries and their keys in place.

    qkv [tokens of all rows, layers * (heads + 2 kv_heads) * D], contiguous or such columns of more
    layers; cache [layers, 2, rows, kv_heads, L, D]; k_norm [layers, D]. rows: where they are not
    equally many a row. places int64 [B]: the cache's row of each, -1: none; None: its first ones.
    ring: position p lies at p % L. counts int64 [B]: of each row's tokens the first counts[b] are
    stored, and of those the last L; None: all, of which a ring takes L at most.

    Raises:
        ValueError: more tokens than a ring holds, without counts.
    """
    layers, _, _, kv_heads, room, dim = cache.shape
    batch, total = lengths.shape[0], qkv.shape[0]
    rows = rows or Rows(total // batch)
    if ring and counts is None and rows.tokens > room:
        raise ValueError(
            f"rotate_store: counts: got None, expected some with {rows.tokens} tokens a row and a "
            f"ring of {room} places"
        )
    if not on_triton(qkv):
        row, token = rows.places(total, lengths)
        at = lengths[row] + token
        place = row if places is None else places[row]
        keep = place >= 0
        if counts is not None:
            keep &= (token < counts[row]) & (token >= counts[row] - room)
        angles = rope[at.clamp(max=rope.shape[0] - 1)][:, None]
        if ring:
            at = at % room
        keep &= at < room
        qkv = qkv.view(total, 1, layers, heads + 2 * kv_heads, dim)
        for layer in range(layers):
            q, k, v = qkv[:, :, layer].split((heads, kv_heads, kv_heads), dim=2)
            q.copy_(_rotate(_norm_heads(q, q_norm, eps), angles))
            weight = k_norm[layer] if k_norm is not None else None
            k_new = _rotate(_norm_heads(k, weight, eps), angles).to(qkv.dtype)
            if heads:
                k.copy_(k_new)
            cache[layer, 0, place[keep], :, at[keep]] = k_new[keep, 0]
            cache[layer, 1, place[keep], :, at[keep]] = v[keep, 0]
        return
    from domino_kernels.triton_kernels.decoder_cache import rotate_store_kernel

    rotate_store_kernel[(total, layers)](
        qkv, cache, lengths, rope, q_norm if q_norm is not None else qkv,
        k_norm if k_norm is not None else qkv, rows.tensors(lengths)[0],
        places if places is not None else lengths, eps, room, *cache.stride()[:4], rows.tokens,
        batch, rope.shape[0], counts if counts is not None else lengths,
        NORM=k_norm is not None, RAGGED=rows.ragged(batch), PLACED=places is not None,
        RING=ring, COUNTED=counts is not None,
        LAYERS=qkv.stride(0) // ((heads + 2 * kv_heads) * dim),  # of a token's row
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim,
        BLOCK_Q=pow2(heads), BLOCK_R=pow2(kv_heads), BLOCK_H=pow2(dim // 2),
        BLOCK_D=pow2(dim), num_warps=4, **overlap(qkv.device),
    )  # fmt: skip


def embed(
    anchors: Tensor,
    table: Tensor,
    tokens: int,
    *,
    drafts: Tensor | None = None,
    mask_id: int = 0,
    starts: Tensor | None = None,
    total: int | None = None,
) -> Tensor:
    """Rows of the table, [B * tokens, H]: each anchor, then its drafts [B, tokens - 1] (-1: none)
    or, without drafts, the mask token. starts: see `Rows`; the rows then have `total` tokens."""
    batch, hidden = anchors.shape[0], table.shape[1]
    rows = Rows(tokens, starts)
    total = batch * tokens if total is None else total
    if not on_triton(table):
        ids = anchors.new_full((batch, tokens), mask_id)
        ids[:, 0] = anchors
        if drafts is not None:
            ids[:, 1:] = drafts
        ids = ids[rows.places(total, anchors)]
        return table[ids.clamp(0, table.shape[0] - 1)]
    from domino_kernels.triton_kernels.decoder_cache import embed_kernel

    out = table.new_empty(total, hidden)
    embed_kernel[(total,)](
        anchors, drafts if drafts is not None else anchors, table, out, rows.tensors(anchors)[0],
        mask_id, hidden, table.shape[0], tokens, batch, RAGGED=rows.ragged(batch),
        MASKED=drafts is None, BLOCK_K=pow2(hidden), num_warps=4, **overlap(table.device),
    )  # fmt: skip
    return out


def commit(
    result,
    anchors: Tensor,
    lengths: Tensor,
    limits: Tensor,
    line: Tensor,
    late: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """End a cycle: anchors and lengths move on, line [B, K + 3] = accepted, status, tokens.

    lengths never pass limits: a row of no request (limit 0) stays empty, and queued cycles of one
    that is done stay inside the cache. late: features [B, W] to put by, in places
    [rows >= B, P, W], and turns int64 [rows]: row b's go to place turns[b], which moves on; from
    turn P on nothing is kept.
    """
    drafts = result.tokens.shape[1] - 1
    if not on_triton(anchors):
        accepted = result.num_accepted.long()[:, None]
        line.copy_(torch.cat((accepted, result.status.long()[:, None], result.tokens), dim=1))
        anchors.copy_(result.tokens.gather(1, accepted)[:, 0].clamp(min=0))
        lengths.copy_(torch.minimum(lengths + accepted[:, 0] + 1, limits))
        if late is not None:
            features, places, turns = late
            row = torch.arange(len(features), device=turns.device)
            row = row[turns[: len(features)] < places.shape[1]]
            places[row, turns[row]] = features[row]
            turns[: len(features)] += 1
        return
    from domino_kernels.triton_kernels.decoder_cache import commit_kernel

    features, places, turns = late or (line, line, line)
    room, width = (0, 0) if late is None else places.shape[1:]
    commit_kernel[(anchors.shape[0],)](
        result.tokens, result.num_accepted, result.status, anchors, lengths, limits, line, drafts,
        features, places, turns, room, width,
        LATE=late is not None, BLOCK=pow2(drafts + 1), BLOCK_W=min(pow2(width), 4096),
        num_warps=1 if late is None else 4, **overlap(anchors.device),
    )  # fmt: skip


def allot(log_probs: Tensor, limits: Tensor, total: int) -> Tensor:
    """starts int32 [B + 1] of the `total` tokens that are best verified (see `Rows`).

    log_probs fp32 [B, K] of the drafts, each given those before it; limits int64 [B], 0: a row of
    no request. Every row has its anchor, and of the drafts those are taken that are likeliest to
    be kept with all that stand before them. B <= total <= B (K + 1).
    """
    rows, drafts = log_probs.shape
    starts = torch.empty(rows + 1, dtype=torch.int32, device=log_probs.device)
    if not on_triton(log_probs):
        chance = log_probs.clamp(max=0).nan_to_num(nan=-100.0).clamp(min=-100).cumsum(1)
        chance = chance.masked_fill((limits <= 0)[:, None], -1e5).t().flatten()
        order = chance.argsort(descending=True, stable=True)[: total - rows] % rows
        counts = torch.bincount(order, minlength=rows) + 1
        starts[0] = 0
        starts[1:] = counts.cumsum(0)
        return starts
    from domino_kernels.triton_kernels.decoder_cache import allot_kernel

    allot_kernel[(1,)](
        log_probs, limits, starts, rows, drafts, total,
        BLOCK_K=pow2(drafts), BLOCK_B=pow2(rows), num_warps=4, **overlap(log_probs.device),
    )  # fmt: skip
    return starts
