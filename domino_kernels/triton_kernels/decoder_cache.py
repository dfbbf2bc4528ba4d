"""The steps of a Llama-type decoder over a static cache: attention, and a cycle's two ends.

attend_kernel   q and k norms, rotary, cache write and attention of every row over its own context
rotate_store_kernel  norms, rotary and cache write alone: prompts, and the drafter's context
embed_kernel, commit_kernel: the first and the last step of a cycle; allot_kernel: which drafts are
verified, where not all of them are

Rows stand at lengths[b] .. lengths[b] + tokens - 1 of a static cache; every position, length and
token is read on the device, so a captured launch serves any of them, and the numbers of rows,
tokens and parts are no constants of a kernel. Sums are fp32; results are rounded once, at the
store. PDL: see decoder_rows.py.
"""

import triton
import triton.language as tl

from domino_kernels.triton_kernels.decoder_rows import _begin


@triton.jit
def _half_heads(ptr, norm_ptr, rope_ptr, position, inside, eps, NORM, HALF, BLOCK_H):
    """Heads at ptr[i] after RMSNorm (where NORM) and rotary embedding: two halves, fp32.

    position[i] is the row of the rope table, which holds HALF cosines, then HALF sines.
    """
    h = tl.arange(0, BLOCK_H)
    ok = inside[:, None] & (h < HALF)[None, :]
    a = tl.load(ptr[:, None] + h[None, :], mask=ok, other=0.0).to(tl.float32)
    b = tl.load(ptr[:, None] + HALF + h[None, :], mask=ok, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        a *= factor * tl.load(norm_ptr + h, mask=h < HALF, other=0.0).to(tl.float32)[None, :]
        b *= factor * tl.load(norm_ptr + HALF + h, mask=h < HALF, other=0.0).to(tl.float32)[None, :]
    rope = rope_ptr + position[:, None] * (2 * HALF) + h[None, :]
    cos = tl.load(rope, mask=ok, other=0.0)
    sin = tl.load(rope + HALF, mask=ok, other=0.0)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _attend(q1, q2, k1, k2, v, seen, scale, best, total, acc):
    """One step of the running softmax: k1, k2 are [HALF, N], v [N, DIM], seen [M, N]."""
    scores = tl.dot(q1, k1, input_precision="ieee") + tl.dot(q2, k2, input_precision="ieee")
    scores = tl.where(seen, scores * scale, float("-inf"))
    new = tl.maximum(best, tl.max(scores, 1))
    shift = tl.where(new == float("-inf"), 0.0, new)  # a row that has seen nothing yet
    probs = tl.exp(scores - shift[:, None])
    decay = tl.exp(best - shift)
    total = total * decay + tl.sum(probs, 1)
    acc = acc * decay[:, None] + tl.dot(probs.to(v.dtype), v, input_precision="ieee")
    return new, total, acc


@triton.jit(do_not_specialize=["max_length", "tokens", "splits", "causal"])
def attend_kernel(
    qkv_ptr, keys_ptr, values_ptr, lengths_ptr, rope_ptr, q_norm_ptr, k_norm_ptr, out_ptr,
    starts_ptr, positions_ptr, tree_ptr, partial_ptr, counter_ptr,
    scale, eps, max_length, cache_row, cache_head, tokens, splits, causal,
    NORM: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr,
    RAGGED: tl.constexpr, TREE: tl.constexpr,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    SPLIT: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[b, t, h] = softmax_j(scale q . k_j) v_j over the cache before lengths[b] and the block.

    qkv [B * tokens, (GROUP + 2) * KV_HEADS * DIM] is what the projections give; cache rows are
    [KV_HEADS, max_length, DIM]. A program owns a part of the context of one (row, kv head) for
    BLOCK_M of its GROUP * tokens queries; the last part also takes the block's own keys and values
    and writes them into the cache. causal: token t sees the block up to itself, else all of it.
    WINDOW > 0: only the last WINDOW positions. RING: position p lies at p % max_length, which is
    at least WINDOW + tokens - 1. RAGGED: a row's tokens are starts[b] to starts[b + 1] of the
    batch. TREE > 0: they stand at positions[b, t], and bit j of the TREE words of tree[b, t] says
    whether t sees j. The last part to arrive joins all of them, in order.
    Bytes: 2 KV_HEADS lengths DIM a row, once; bound: latency below some thousand positions, then
    memory.
    """
    HALF: tl.constexpr = DIM // 2
    part = tl.program_id(0) % splits
    tile = tl.program_id(0) // splits
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    begin = row * tokens
    if RAGGED:
        begin = tl.load(starts_ptr + row).to(tl.int64)
        tokens = (tl.load(starts_ptr + row + 1) - begin).to(tl.int32)
    base = row * cache_row + head * cache_head
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(length - WINDOW + 1, 0).to(tl.int32)
    count = length.to(tl.int32) - lowest
    chunk = tl.cdiv(tl.cdiv(count, splits), BLOCK_N) * BLOCK_N
    first = lowest + part * chunk
    last = tl.minimum(first + chunk, length.to(tl.int32))
    if RAGGED:  # of a row with few tokens the other tiles are empty
        last = tl.where(tile * BLOCK_M < GROUP * tokens, last, first)
    _begin(PDL)
    qkv_stride = (GROUP + 2) * KV_HEADS * DIM

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    m_in = m < GROUP * tokens
    token = m % tokens
    q_head = head * GROUP + m // tokens
    q_at = qkv_ptr + (begin + token) * qkv_stride + q_head * DIM
    dtype = qkv_ptr.dtype.element_ty
    position = length + token
    if TREE > 0:
        position = tl.load(positions_ptr + begin + token)
    q1, q2 = _half_heads(q_at, q_norm_ptr, rope_ptr, position, m_in, eps, NORM, HALF, BLOCK_H)
    q1, q2 = q1.to(dtype), q2.to(dtype)

    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    h_in, d_in = h < HALF, d < DIM
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    if RING:
        turn = length - length % max_length  # the last position that lay at 0
    for start in range(first, last, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        j_in = j < last
        slot = j
        if RING:
            slot = (j - turn).to(tl.int32)
            slot += tl.where(slot < 0, max_length, 0)
        k_at = keys_ptr + base + slot[None, :] * DIM + h[:, None]
        k_in = h_in[:, None] & j_in[None, :]
        k1 = tl.load(k_at, mask=k_in, other=0.0)
        k2 = tl.load(k_at + HALF, mask=k_in, other=0.0)
        v = tl.load(
            values_ptr + base + slot[:, None] * DIM + d[None, :],
            mask=j_in[:, None] & d_in[None, :], other=0.0,
        )  # fmt: skip
        seen = j_in[None, :]
        if WINDOW > 0:
            seen = seen & (j[None, :] > position[:, None] - WINDOW)
        best, total, acc = _attend(q1, q2, k1, k2, v, seen, scale, best, total, acc)

    if part == splits - 1:
        t = tl.arange(0, BLOCK_T)
        t_in = t < tokens
        kv_at = qkv_ptr + (begin + t) * qkv_stride + (GROUP * KV_HEADS + head) * DIM
        place = length + t
        if TREE > 0:
            place = tl.load(positions_ptr + begin + t, mask=t_in, other=0)
        k1, k2 = _half_heads(kv_at, k_norm_ptr, rope_ptr, place, t_in, eps, NORM, HALF, BLOCK_H)
        k1, k2 = k1.to(dtype), k2.to(dtype)
        v = tl.load(
            kv_at[:, None] + KV_HEADS * DIM + d[None, :],
            mask=t_in[:, None] & d_in[None, :], other=0.0,
        )  # fmt: skip
        if tile == 0:
            end = length + t
            if RING:
                end -= turn
                end -= tl.where(end < max_length, 0, max_length)
            keep = t_in & (end < max_length)
            at = base + end * DIM
            k_keep = keep[:, None] & h_in[None, :]
            tl.store(keys_ptr + at[:, None] + h[None, :], k1, mask=k_keep)
            tl.store(keys_ptr + at[:, None] + HALF + h[None, :], k2, mask=k_keep)
            v_keep = keep[:, None] & d_in[None, :]
            tl.store(values_ptr + at[:, None] + d[None, :], v, mask=v_keep)
        seen = t_in[None, :]
        if TREE > 0:
            word = tree_ptr + (begin + token)[:, None] * TREE + (t // 32)[None, :]
            bits = tl.load(word, mask=m_in[:, None] & t_in[None, :], other=0)
            seen = seen & (((bits >> (t % 32)[None, :]) & 1) != 0)
        else:
            seen = seen & ((t[None, :] <= token[:, None]) | (causal == 0))
        if WINDOW > 0:
            seen = seen & (place[None, :] > position[:, None] - WINDOW)
        k1, k2 = tl.trans(k1), tl.trans(k2)
        best, total, acc = _attend(q1, q2, k1, k2, v, seen, scale, best, total, acc)

    if SPLIT:
        group = (row * KV_HEADS + head) * (tl.num_programs(0) // splits) + tile
        size = BLOCK_M * (BLOCK_D + 2)
        i = tl.arange(0, BLOCK_M)
        cell = i[:, None] * BLOCK_D + d[None, :]
        mine = partial_ptr + (group * splits + part) * size
        tl.store(mine + i, best)
        tl.store(mine + BLOCK_M + i, total)
        tl.store(mine + 2 * BLOCK_M + cell, acc)
        tl.debug_barrier()
        joins = tl.atomic_add(counter_ptr + group, 1, sem="acq_rel") == splits - 1
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for s in range(tl.where(joins, splits, 0)):
            theirs = partial_ptr + (group * splits + s) * size
            their_best = tl.load(theirs + i, cache_modifier=".cg")
            new = tl.maximum(best, their_best)
            shift = tl.where(new == float("-inf"), 0.0, new)
            ours, others = tl.exp(best - shift), tl.exp(their_best - shift)
            total = total * ours + others * tl.load(theirs + BLOCK_M + i, cache_modifier=".cg")
            their_acc = tl.load(theirs + 2 * BLOCK_M + cell, cache_modifier=".cg")
            acc = acc * ours[:, None] + their_acc * others[:, None]
            best = new
        if joins:
            tl.store(counter_ptr + group, 0)
        m_in = m < tl.where(joins, GROUP * tokens, 0)

    out_at = out_ptr + (begin + token) * (GROUP * KV_HEADS * DIM) + q_head * DIM
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_at[:, None] + d[None, :], out, mask=m_in[:, None] & d_in[None, :])


@triton.jit
def _row(index, starts_ptr, tokens, rows, RAGGED: tl.constexpr):
    """(row, token in it) of token `index` of a batch: `tokens` a row, or RAGGED rows in starts.

    RAGGED is a power of two from `rows` on.
    """
    row = index // tokens
    token = index % tokens
    if RAGGED > 0:
        at = tl.arange(0, RAGGED)
        starts = tl.load(starts_ptr + at, mask=at < rows, other=0x7FFFFFFF)
        row = tl.sum((starts <= index).to(tl.int32), 0).to(tl.int64) - 1
        token = index - tl.load(starts_ptr + row)
    return row, token


@triton.jit(do_not_specialize=["max_length", "tokens", "rows", "angles"])
def rotate_store_kernel(
    qkv_ptr, cache_ptr, lengths_ptr, rope_ptr, q_norm_ptr, k_norm_ptr, starts_ptr, places_ptr,
    eps, max_length, cache_layer, cache_value, cache_row, cache_head, tokens, rows, angles,
    counts_ptr,
    NORM: tl.constexpr, RAGGED: tl.constexpr, PLACED: tl.constexpr, RING: tl.constexpr,
    COUNTED: tl.constexpr, PDL: tl.constexpr,
    LAYERS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Norms and rotary of many tokens: queries in place, keys and values into the cache, keys that
    stand beside queries in place as well. PLACED: row b is row places[b] of the cache, -1: of none.
    COUNTED: of its tokens the first counts[b] are stored, and of those the last max_length. RING:
    position p lies at p % max_length.

    qkv [B * tokens, LAYERS, HEADS + 2 KV_HEADS, DIM]: a prompt's (one layer), or the context of
    drafter layers, all or some (no queries, HEADS = 0; k_norm of these layers). One program a
    (token, layer).
    """
    HALF: tl.constexpr = DIM // 2
    _begin(PDL)
    index = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    row, token = _row(index, starts_ptr, tokens, rows, RAGGED)
    length = tl.load(lengths_ptr + row) + token
    turn = tl.minimum(length, angles - 1)  # of a token past the end, which is not stored
    place = row
    if PLACED:
        place = tl.load(places_ptr + row)
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    h_in = (h < HALF)[None, :]
    dtype = cache_ptr.dtype.element_ty
    base = qkv_ptr + (index * LAYERS + layer) * ((HEADS + 2 * KV_HEADS) * DIM)
    if HEADS > 0:
        q_head = tl.arange(0, BLOCK_Q)
        q_in = q_head < HEADS
        q_at = base + q_head * DIM
        q1, q2 = _half_heads(
            q_at, q_norm_ptr, rope_ptr, turn + q_head * 0, q_in, eps, NORM, HALF, BLOCK_H
        )
        q_keep = q_in[:, None] & h_in
        tl.store(q_at[:, None] + h[None, :], q1.to(dtype), mask=q_keep)
        tl.store(q_at[:, None] + HALF + h[None, :], q2.to(dtype), mask=q_keep)
    head = tl.arange(0, BLOCK_R)
    if RING:
        length = length % max_length
    position = length + head * 0  # one a head
    head_in = head < KV_HEADS
    k_at = base + (HEADS + head) * DIM
    k1, k2 = _half_heads(
        k_at, k_norm_ptr + layer * DIM, rope_ptr, turn + head * 0, head_in, eps, NORM, HALF, BLOCK_H
    )
    if HEADS > 0:
        k_keep = head_in[:, None] & h_in
        tl.store(k_at[:, None] + h[None, :], k1.to(dtype), mask=k_keep)
        tl.store(k_at[:, None] + HALF + h[None, :], k2.to(dtype), mask=k_keep)
    keep = head_in & (position < max_length) & (place + 0 * head >= 0)
    if COUNTED:
        count = tl.load(counts_ptr + row)
        keep = keep & (token + 0 * head < count) & (token + 0 * head >= count - max_length)
    at = cache_ptr + layer.to(tl.int64) * cache_layer + place * cache_row + position * DIM
    at = at + head * cache_head
    tl.store(at[:, None] + h[None, :], k1.to(dtype), mask=keep[:, None] & h_in)
    tl.store(at[:, None] + HALF + h[None, :], k2.to(dtype), mask=keep[:, None] & h_in)
    v_keep = keep[:, None] & (d < DIM)[None, :]
    v = tl.load(k_at[:, None] + KV_HEADS * DIM + d[None, :], mask=v_keep, other=0.0)
    tl.store(at[:, None] + cache_value + d[None, :], v, mask=v_keep)


@triton.jit(do_not_specialize=["tokens", "rows"])
def embed_kernel(
    anchors_ptr, drafts_ptr, table_ptr, out_ptr, starts_ptr, mask_id, k, vocab, tokens, rows,
    PDL: tl.constexpr, RAGGED: tl.constexpr, MASKED: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows of the embedding: each row's anchor, then its drafts, or (MASKED) the mask token.

    An id that is no id (-1: no draft here) takes row 0: what follows it is not kept.
    """
    _begin(PDL)
    index = tl.program_id(0).to(tl.int64)
    row, token = _row(index, starts_ptr, tokens, rows, RAGGED)
    anchor = tl.load(anchors_ptr + row)
    if MASKED:
        chosen = tl.where(token == 0, anchor, mask_id)
    else:
        at = tl.maximum(row * (tokens - 1) + token - 1, 0)
        draft = tl.load(drafts_ptr + at, mask=token > 0, other=0)
        chosen = tl.where(token == 0, anchor, draft)
    chosen = tl.minimum(tl.maximum(chosen, 0), vocab - 1)
    at = tl.arange(0, BLOCK_K)
    x = tl.load(table_ptr + chosen * k + at, mask=at < k, other=0.0)
    tl.store(out_ptr + index * k + at, x, mask=at < k)


@triton.jit(do_not_specialize=["drafts"])
def commit_kernel(
    tokens_ptr, accepted_ptr, status_ptr, anchors_ptr, lengths_ptr, limits_ptr, line_ptr, drafts,
    features_ptr, places_ptr, turns_ptr, places, width,
    PDL: tl.constexpr, LATE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """The end of a cycle for one row: its new anchor and length, and a line for the host.

    line = [accepted, status, tokens...]. lengths stops at limits: queued cycles of a row that is
    done, or of no request (limit 0), stay inside the cache. LATE: the row of features goes to the
    row's next place, which a cycle without drafts has no other launch for.
    """
    _begin(PDL)
    row = tl.program_id(0)
    accepted = tl.load(accepted_ptr + row)
    at = tl.arange(0, BLOCK)
    inside = at < drafts + 1
    tokens = tl.load(tokens_ptr + row * (drafts + 1) + at, mask=inside, other=0)
    line = line_ptr + row * (drafts + 3)
    tl.store(line, accepted.to(tl.int64))
    tl.store(line + 1, tl.load(status_ptr + row).to(tl.int64))
    tl.store(line + 2 + at, tokens, mask=inside)
    anchor = tl.sum(tl.where(at == accepted, tokens, 0))
    tl.store(anchors_ptr + row, tl.maximum(anchor, 0))
    length = tl.load(lengths_ptr + row) + accepted + 1
    tl.store(lengths_ptr + row, tl.minimum(length, tl.load(limits_ptr + row)))
    if LATE:
        turn = tl.load(turns_ptr + row)
        tl.store(turns_ptr + row, turn + 1)
        to = places_ptr + (row.to(tl.int64) * places + turn) * width
        w = tl.arange(0, BLOCK_W)
        for first in range(0, width, BLOCK_W):
            keep = (first + w < width) & (turn + 0 * w < places)
            x = tl.load(features_ptr + row.to(tl.int64) * width + first + w, mask=keep)
            tl.store(to + first + w, x, mask=keep)


@triton.jit(do_not_specialize=["rows", "drafts", "total"])
def allot_kernel(
    log_prob_ptr, limits_ptr, starts_ptr, rows, drafts, total,
    PDL: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """starts[b]: where row b's tokens begin if `total` are verified: every row's anchor, and those
    drafts that are likeliest to be kept, a draft k as likely as all of log_prob[b, :k + 1] say.

    A row of no request (limit 0) comes last. Ties go to the earlier draft, so a row's drafts are
    always its first ones. One program: a search for the threshold, then a count.
    """
    _begin(PDL)
    k = tl.arange(0, BLOCK_K)
    b = tl.arange(0, BLOCK_B)
    inside = (k < drafts)[:, None] & (b < rows)[None, :]
    chance = tl.load(log_prob_ptr + b[None, :] * drafts + k[:, None], mask=inside, other=0.0)
    chance = tl.where(chance > -100.0, tl.minimum(chance, 0.0), -100.0)  # NaN: the worst
    chance = tl.cumsum(chance, 0)
    live = tl.load(limits_ptr + b, mask=b < rows, other=0) > 0
    chance = tl.where(live[None, :], chance, -1e5)
    chance = tl.where(inside, chance, -1e6)
    wanted = total - rows
    low, high = -1e5 - 1.0, 1.0  # at least, and fewer than, `wanted` lie above
    for _ in range(40):
        middle = 0.5 * (low + high)
        enough = tl.sum(tl.sum((chance > middle).to(tl.int32), 0), 0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    taken = (chance > high).to(tl.int32)
    left = wanted - tl.sum(tl.sum(taken, 0), 0)
    tied = ((chance > low) & (chance <= high)).to(tl.int32)
    of_draft = tl.sum(tied, 1)
    before = (tl.cumsum(of_draft, 0) - of_draft)[:, None] + tl.cumsum(tied, 1) - tied
    taken += tied * (before < left).to(tl.int32)
    count = tl.sum(taken, 0) + (b < rows).to(tl.int32)
    end = tl.cumsum(count, 0)
    tl.store(starts_ptr + b, end - count, mask=b < rows)
    tl.store(starts_ptr + rows, total)
