"""draft_chain in Triton, the portable backend. Formula, rounding points: csrc/head/draft_chain.h.

    vocabulary  argmax of the uncorrected drafts                 once
    project     W1h H of the corrected ones                      once
    shortlist   the pool: the best of each group of ids          once
    gates       S_j                                              a draft
    product     u_j = SiLU(W1h H + W1s S_j) and W_hh S_j         a draft
    pool        argmax of base + W2 u_j over the pool            a draft
    vocabulary  argmax of base + W2 u over all ids               once for all drafts: certifies them
    restart     the first draft whose winner the pool missed     once
    gates, product, vocabulary   over again from there on        a draft; over at once if none
    finish      ids and scores from the keys                     once

Sums run in the same order at every batch: a product is always a [rows of W, 16 columns] tile, its K
split at fixed places. Winners meet in atomic maxima of (value, id) keys, whose order is immaterial.
Without a table, `project` also streams W_ih once a draft.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tlx

COLUMNS = 16  # batch rows, or (slot, row) pairs, of a tile: the least that tl.dot takes
SPLIT_K = 4  # parts of the input products, summed by whoever reads them
GROUP_BEST = 16  # ids that a group of the vocabulary sends to the pool
BLOCK_N, PRODUCT_K = 64, 256
POOL_BLOCK = 32
GROUP_LIMIT = 2048  # ids of a group: what a tile holds
NO_KEY = tl.constexpr(-(2**63))

# What changes from draft to draft or with the batch gets no kernel of its own for a 1, a multiple
# of 16 or an address that happens to be aligned: each costs a second to compile.
_kernel = triton.jit(
    do_not_specialize=("draft", "first_block", "batch", "columns", "drafts", "prefix", "slots"),
    do_not_specialize_on_alignment=("keys_ptr", "chain_keys_ptr", "token_ptr", "first_ptr"),
)


@triton.jit
def _begin(OVERLAP: tl.constexpr):
    """What launches before this one wrote may be read from here on; the next launch may start."""
    if OVERLAP:
        tlx.gdc_wait()
        tlx.gdc_launch_dependents()


@triton.jit
def _key(value, index):
    """(value, id) as an int64 whose maximum is the argmax: see csrc/common/argmax_key.h."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0 becomes +0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(value == value, ordered, -(2**31))
    return (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - index.to(tl.int64))


@triton.jit
def _key_id(key):
    return 0xFFFFFFFF - (key & 0xFFFFFFFF)


@triton.jit
def _key_value(key):
    ordered = (key >> 32).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    value = bits.to(tl.float32, bitcast=True)
    return tl.where(ordered == -(2**31), float("nan"), value)


@triton.jit
def _token(row, token_ptr, vocab, ANCHOR: tl.constexpr):
    """y_j of these rows, from the anchors or from the keys of draft j - 1."""
    token = tl.load(token_ptr + row)
    if not ANCHOR:
        token = _key_id(token)
    return tl.minimum(tl.maximum(token, 0), vocab - 1)


@triton.jit
def _sum_parts(x_ptr, x_split, at, mask, SPLIT: tl.constexpr):
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, SPLIT):
        x += tl.load(x_ptr + part * x_split + at, mask=mask, other=0.0)
    return x


@_kernel
def project_kernel(
    out_ptr, out_split, w_ptr, w_stride, x_ptr, x_stride, x_stride_slot, token_ptr, first_ptr,
    draft, rows, length, batch, columns, vocab,
    OVERLAP: tl.constexpr, EMBEDDED: tl.constexpr, ANCHOR: tl.constexpr,
    RESTART: tl.constexpr, SPLIT: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[part, n, i] = W[i, part of k] x_n: a hidden row (n = slot * batch + row), or E[y_n]."""
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(2)
    inside = n < columns
    _begin(OVERLAP)
    if RESTART:
        inside &= tl.load(first_ptr + n, mask=inside, other=draft) < draft
        if tl.max(inside.to(tl.int32), 0) == 0:
            return
    if EMBEDDED:
        at = _token(tl.minimum(n, columns - 1), token_ptr, vocab, ANCHOR) * x_stride
    else:
        at = (n % batch).to(tl.int64) * x_stride + (n // batch).to(tl.int64) * x_stride_slot
    span = tl.cdiv(tl.cdiv(length, SPLIT), BLOCK_K) * BLOCK_K
    end = tl.minimum(length, (part + 1) * span)
    sums = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
    w_row = w_ptr + i.to(tl.int64)[:, None] * w_stride
    for start in range(part * span, end, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w = tl.load(w_row + k[None, :], mask=(i < rows)[:, None] & (k < end)[None, :], other=0.0)
        x = tl.load(x_ptr + at[None, :] + k[:, None], mask=inside[None, :] & (k < end)[:, None],
                    other=0.0)  # fmt: skip
        sums = tl.dot(w, x, sums, input_precision="ieee")
    out = part.to(tl.int64) * out_split + n.to(tl.int64)[None, :] * rows + i[:, None]
    tl.store(out_ptr + out, sums, mask=inside[None, :] & (i < rows)[:, None])


@_kernel
def gates_kernel(
    x_ptr, x_split, x_stride, token_ptr, product_ptr, state_ptr, new_ptr, first_ptr,
    draft, units, vocab,
    OVERLAP: tl.constexpr, TABLE: tl.constexpr, ANCHOR: tl.constexpr,
    RESTART: tl.constexpr, SPLIT: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """S_j of one row and BLOCK_G units.

    A row of the table is [units / 16, gate, 16], one of the streamed products [gate, units].
    """
    row = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)
    mask = k < units
    _begin(OVERLAP)
    if RESTART:
        if tl.load(first_ptr + row) >= draft:
            return
    x = (_token(row, token_ptr, vocab, ANCHOR) if TABLE else row) * x_stride
    x += k // 16 * 48 + k % 16 if TABLE else k
    gate = 16 if TABLE else units
    x_r = _sum_parts(x_ptr, x_split, x, mask, SPLIT)
    x_z = _sum_parts(x_ptr, x_split, x + gate, mask, SPLIT)
    x_n = _sum_parts(x_ptr, x_split, x + 2 * gate, mask, SPLIT)
    s_r, s_z, s_n, state = 0.0, 0.0, 0.0, 0.0
    if not ANCHOR:  # the state before is 0
        s = product_ptr + row * 3 * units + k
        s_r = tl.load(s, mask=mask, other=0.0)
        s_z = tl.load(s + units, mask=mask, other=0.0)
        s_n = tl.load(s + 2 * units, mask=mask, other=0.0)
        state = tl.load(state_ptr + row * units + k, mask=mask, other=0.0).to(tl.float32)
    reset, update = tl.sigmoid(x_r + s_r), tl.sigmoid(x_z + s_z)
    candidate = 2 * tl.sigmoid(2 * (x_n + reset * s_n)) - 1  # tanh
    new = candidate + update * (state - candidate)
    tl.store(new_ptr + row * units + k, new.to(new_ptr.dtype.element_ty), mask=mask)


@_kernel
def product_kernel(
    state_ptr, product_ptr, from_hidden_ptr, from_hidden_split, low_rank_ptr,
    w1s_ptr, w1_stride, w_hh_ptr, first_ptr,
    draft, first_block, rank_blocks, rank, units, batch,
    OVERLAP: tl.constexpr, RESTART: tl.constexpr, SPLIT: tl.constexpr, CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of [W1s ; W_hh] times S_j: u_j, or W_hh S_j for the next step."""
    block = tl.program_id(0) + first_block
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = n < batch
    i = (block if block < rank_blocks else block - rank_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = rank if block < rank_blocks else 3 * units
    stride = w1_stride if block < rank_blocks else units
    w_row = (w1s_ptr if block < rank_blocks else w_hh_ptr) + i.to(tl.int64)[:, None] * stride
    sums = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        k = chunk * BLOCK_K + tl.arange(0, BLOCK_K)
        w = tl.load(w_row + k[None, :], mask=(i < rows)[:, None] & (k < units)[None, :], other=0.0)
        if chunk == 0:
            _begin(OVERLAP)
            if RESTART:
                inside &= tl.load(first_ptr + n, mask=inside, other=draft) < draft
                if tl.max(inside.to(tl.int32), 0) == 0:
                    return
        at = n.to(tl.int64)[None, :] * units + k[:, None]
        mask = (k < units)[:, None] & inside[None, :]
        sums = tl.dot(w, tl.load(state_ptr + at, mask=mask, other=0.0), sums,
                      input_precision="ieee")  # fmt: skip
    mask = inside[None, :] & (i < rows)[:, None]
    at = n.to(tl.int64)[None, :] * rows + i[:, None]
    if block < rank_blocks:
        mixed = sums + _sum_parts(from_hidden_ptr, from_hidden_split, at, mask, SPLIT)
        low_rank = mixed / (1 + tl.exp(-mixed))  # SiLU
        tl.store(low_rank_ptr + at, low_rank.to(low_rank_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(product_ptr + at, sums, mask=mask)


@_kernel
def shortlist_kernel(
    pool_ptr, base_ptr, base_stride, base_stride_slot, groups, periods, slots, vocab,
    BEST: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """The BEST ids of each group by the maximum of base over the slots (csrc/head/chain_pool.h).

    Runs of BEST ids go to the groups in turn: BLOCK_G groups are BEST * BLOCK_G columns, and a row
    of the tile is a period.
    """
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK_G
    i = tl.arange(0, BLOCK_I)
    column = first * BEST + tl.arange(0, BEST * BLOCK_G)
    v = i[:, None] * (BEST * groups) + column[None, :]
    mask = (v < vocab) & (i < periods)[:, None] & (column < BEST * groups)[None, :]
    base = base_ptr + row * base_stride
    best = tl.full([BLOCK_I, BEST * BLOCK_G], float("-inf"), tl.float32)
    for slot in range(slots):
        value = tl.load(
            base + tl.cast(slot, tl.int64) * base_stride_slot + v, mask=mask, other=float("-inf")
        )
        best = tl.maximum(best, value.to(tl.float32))
    key = tl.where(mask, _key(best, v), NO_KEY)
    g = first + tl.arange(0, BLOCK_G)
    out = pool_ptr + (row * groups + g) * BEST
    for place in range(BEST):
        top = tl.max(tl.reshape(tl.max(key, 0), [BLOCK_G, BEST]), 1)
        tops = tl.reshape(tl.broadcast_to(top[:, None], [BLOCK_G, BEST]), [BEST * BLOCK_G])
        key = tl.where(key == tops[None, :], NO_KEY, key)
        # a group of fewer ids repeats an id
        chosen = tl.where(top == NO_KEY, tl.minimum(g, vocab - 1), _key_id(top).to(tl.int32))
        tl.store(out + place, chosen, mask=g < groups)


@_kernel
def pool_kernel(
    keys_ptr, pool_ptr, base_ptr, base_stride, low_rank_ptr, w2_ptr, size, rank,
    OVERLAP: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """keys[row] = max of (base + W2 u, id) over BLOCK_M ids of a row's pool."""
    row = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    ids = tl.load(pool_ptr + row * size + m, mask=m < size, other=0)
    base = tl.load(base_ptr + row * base_stride + ids, mask=m < size, other=0.0)
    sums = tl.zeros([BLOCK_M], tl.float32)
    r = tl.arange(0, BLOCK_R)
    for chunk in tl.static_range(CHUNKS):
        k = chunk * BLOCK_R + r
        w2 = tl.load(w2_ptr + ids.to(tl.int64)[:, None] * rank + k[None, :],
                     mask=(m < size)[:, None] & (k < rank)[None, :], other=0.0)  # fmt: skip
        if chunk == 0:
            _begin(OVERLAP)  # the pool is older than the launch before this one
        low_rank = tl.load(low_rank_ptr + row * rank + k, mask=k < rank, other=0.0)
        sums += tl.sum(w2.to(tl.float32) * low_rank.to(tl.float32)[None, :], 1)
    key = tl.where(m < size, _key(base.to(tl.float32) + sums, ids), NO_KEY)
    tl.atomic_max(keys_ptr + row, tl.max(key, 0), sem="relaxed")


@_kernel
def vocabulary_kernel(
    keys_ptr, base_ptr, base_stride, base_stride_slot, low_rank_ptr, w2_ptr, first_ptr,
    draft, batch, columns, vocab, rank,
    OVERLAP: tl.constexpr, CORRECTED: tl.constexpr, RESTART: tl.constexpr, CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """keys[n] = max of (base + W2 u_n, id) over BLOCK_V ids, for columns n = slot * batch + row."""
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    r = tl.arange(0, BLOCK_R)
    w2_row = w2_ptr + v.to(tl.int64)[:, None] * rank
    known = (v < vocab)[:, None]
    if RESTART:
        _begin(OVERLAP)
        pending = tl.zeros([COLUMNS], tl.int32)
        for start in range(0, columns, COLUMNS):
            n = start + tl.arange(0, COLUMNS)
            first = tl.load(first_ptr + n, mask=n < columns, other=draft)
            pending = tl.maximum(pending, (first < draft).to(tl.int32))
        if tl.max(pending, 0) == 0:
            return
    if CORRECTED and CHUNKS == 1:
        w2 = tl.load(w2_row + r[None, :], mask=known & (r < rank)[None, :], other=0.0)
    if not RESTART:
        _begin(OVERLAP)
    for start in range(0, columns, COLUMNS):
        n = start + tl.arange(0, COLUMNS)
        inside = n < columns
        if RESTART:
            inside &= tl.load(first_ptr + n, mask=inside, other=draft) < draft
        if not RESTART or tl.max(inside.to(tl.int32), 0) != 0:
            at = (n % batch).to(tl.int64) * base_stride
            at += (n // batch).to(tl.int64) * base_stride_slot
            mask = known & inside[None, :]
            base = tl.load(base_ptr + at[None, :] + v[:, None], mask=mask, other=0.0)
            scores = base.to(tl.float32)
            if CORRECTED:
                sums = tl.zeros([BLOCK_V, COLUMNS], tl.float32)
                for chunk in tl.static_range(CHUNKS):
                    k = chunk * BLOCK_R + r
                    if CHUNKS > 1:
                        w2 = tl.load(w2_row + k[None, :], mask=known & (k < rank)[None, :],
                                     other=0.0)  # fmt: skip
                    u = tl.load(low_rank_ptr + n.to(tl.int64)[None, :] * rank + k[:, None],
                                mask=inside[None, :] & (k < rank)[:, None], other=0.0)  # fmt: skip
                    sums = tl.dot(w2, u, sums, input_precision="ieee")
                scores += sums
            key = tl.where(mask, _key(scores, v[:, None]), NO_KEY)
            tl.atomic_max(keys_ptr + n, tl.max(key, 0), mask=inside, sem="relaxed")


@_kernel
def restart_kernel(
    first_ptr, keys_ptr, chain_keys_ptr, batch, prefix, drafts, OVERLAP: tl.constexpr
):
    """first[row]: first draft whose certified winner is not the chain's; keys behind it go."""
    _begin(OVERLAP)
    row = tl.program_id(0)
    first = drafts
    for back in range(prefix, drafts):
        draft = drafts - 1 - back + prefix
        certified = tl.load(keys_ptr + draft * batch + row)
        chosen = tl.load(chain_keys_ptr + draft * batch + row)
        first = tl.where(_key_id(certified) == _key_id(chosen), first, draft)
    tl.store(first_ptr + row, first)
    for draft in range(first + 1, drafts):
        tl.store(keys_ptr + draft * batch + row, NO_KEY)


@_kernel
def finish_kernel(
    tokens_ptr, scores_ptr, restarts_ptr, keys_ptr, first_ptr, batch, drafts,
    OVERLAP: tl.constexpr, CERTIFIED: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    draft = tl.arange(0, BLOCK_K)
    key = tl.load(keys_ptr + draft * batch + row, mask=draft < drafts, other=0)
    at = row * drafts + draft
    tl.store(tokens_ptr + at, _key_id(key), mask=draft < drafts)
    tl.store(scores_ptr + at, _key_value(key), mask=draft < drafts)
    restarts = 0
    if CERTIFIED:
        restarts = (tl.load(first_ptr + row) < drafts).to(tl.int32)
    tl.store(restarts_ptr + row, restarts)


class Workspace:
    """Views of one uint8 tensor. States, products and u of all drafts stay: restarts read them."""

    def __init__(self, memory, batch, drafts, prefix, weights, pool_size):
        self.bytes, self._memory = 0, memory
        corrected = max(1, drafts - prefix)
        units, rank, dtype = weights.gru_size, weights.rank, weights.dtype
        self.keys = self._take(torch.int64, 2, drafts, batch)
        self.first = self._take(torch.int32, batch)
        self.states = self._take(dtype, drafts, batch, units)
        self.products = self._take(torch.float32, drafts, batch, 3 * units)
        self.low_rank = self._take(dtype, corrected, batch, rank)
        self.from_hidden = self._take(torch.float32, SPLIT_K, corrected, batch, rank)
        self.inputs = self._take(torch.float32, SPLIT_K, batch, 3 * units)
        groups = max(
            triton.cdiv(pool_size, GROUP_BEST), triton.cdiv(weights.vocab_size, GROUP_LIMIT)
        )
        self.pool = self._take(torch.int32, batch, groups * GROUP_BEST)

    def _take(self, dtype, *shape):
        start, size = self.bytes, dtype.itemsize
        for n in shape:
            size *= n
        self.bytes += (size + 255) // 256 * 256
        if self._memory is None:
            return None
        return self._memory[start : start + size].view(dtype).view(shape)


@cache
def _can_overlap(device):
    """Whether a launch may start before the one in front of it has ended (sm_90 and later)."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _block_v(device):
    """Ids of the vocabulary in a tile: 92 KB of shared memory, or 59 where there is less."""
    if device.type != "cuda":
        return 128
    properties = torch.cuda.get_device_properties(device)
    return 128 if getattr(properties, "shared_memory_per_block_optin", 0) >= 96 << 10 else 64


class _Chain:
    """The launches of one block, in order."""

    def __init__(self, base, hidden, anchor, weights, table, memory, first_slot, prefix):
        self.base, self.hidden, self.anchor = base, hidden, anchor
        self.weights, self.table, self.memory = weights, table, memory
        self.first_slot, self.prefix = first_slot, prefix
        self.drafts, self.batch = memory.keys.shape[1:]
        self.corrected = self.drafts - prefix
        self.row_blocks = triton.cdiv(self.batch, COLUMNS)
        wide = weights.dtype == torch.float32  # its tiles are twice as large, and slow to compile
        self.block_v = 64 if wide else _block_v(anchor.device)
        self.overlap = {"OVERLAP": False}
        if _can_overlap(anchor.device):
            self.overlap = {"OVERLAP": True, "launch_pdl": True}
        self.block_k = 64 if wide else 128
        self.block_r = min(max(16, triton.next_power_of_2(weights.rank)), 2 * self.block_k)

    def slot(self, draft):
        return self.base[:, self.first_slot + draft]

    def project_hidden(self):
        w, m = self.weights, self.memory
        x = self.hidden[:, self.first_slot + self.prefix :]
        columns = self.batch * self.corrected
        self._project(m.from_hidden, w.w1, w.rank, w.hidden_size, x, x.stride(0), x.stride(1),
                      columns, self.anchor, 0, False, False)  # fmt: skip

    def _project(self, out, w, rows, length, x, x_stride, x_stride_slot, columns, tokens, draft,
                 embedded, restart):  # fmt: skip
        grid = triton.cdiv(rows, BLOCK_N), triton.cdiv(columns, COLUMNS), SPLIT_K
        project_kernel[grid](
            out, out.stride(0), w, w.stride(0), x, x_stride, x_stride_slot, tokens,
            self.memory.first, draft, rows, length, self.batch, columns, self.weights.vocab_size,
            EMBEDDED=embedded, ANCHOR=draft == 0, RESTART=restart, SPLIT=SPLIT_K,
            COLUMNS=COLUMNS, BLOCK_N=BLOCK_N, BLOCK_K=self.block_k,
            **self.overlap,
        )  # fmt: skip

    def step(self, draft, keys, restart=False):
        """S_j, and what follows from it: u_j, and W_hh S_j where another draft comes."""
        w, m = self.weights, self.memory
        units, rank = w.gru_size, w.rank
        tokens = keys[draft - 1] if draft else self.anchor
        x, x_stride = self.table, 3 * units
        if x is None:
            x = m.inputs
            self._project(x, w.w_ih, 3 * units, w.hidden_size, w.embedding, w.hidden_size, 0,
                          self.batch, tokens, draft, True, restart)  # fmt: skip
        before = max(draft - 1, 0)
        gates_kernel[triton.cdiv(units, 256), self.batch](
            x, x.stride(0), x_stride, tokens, m.products[before], m.states[before],
            m.states[draft], m.first, draft, units, w.vocab_size,
            TABLE=self.table is not None, ANCHOR=draft == 0, RESTART=restart,
            SPLIT=1 if self.table is not None else SPLIT_K, BLOCK_G=256, **self.overlap,
        )  # fmt: skip
        slot = max(draft - self.prefix, 0)
        rank_blocks = triton.cdiv(rank, BLOCK_N)
        first_block = 0 if draft >= self.prefix else rank_blocks
        blocks = rank_blocks - first_block
        if draft + 1 < self.drafts:
            blocks += triton.cdiv(3 * units, BLOCK_N)
        if blocks == 0:
            return
        block_k = min(PRODUCT_K, triton.next_power_of_2(max(units, 16)))
        product_kernel[blocks, self.row_blocks](
            m.states[draft], m.products[draft], m.from_hidden[0, slot], m.from_hidden.stride(0),
            m.low_rank[slot], w.w1[:, w.hidden_size :], w.w1.stride(0), w.w_hh, m.first,
            draft, first_block, rank_blocks, rank, units, self.batch,
            RESTART=restart, SPLIT=SPLIT_K, CHUNKS=triton.cdiv(units, block_k), COLUMNS=COLUMNS,
            BLOCK_N=BLOCK_N, BLOCK_K=block_k, **self.overlap,
        )  # fmt: skip

    def shortlist(self):
        base, pool = self.base[:, self.first_slot + self.prefix :], self.memory.pool
        groups = pool.size(1) // GROUP_BEST
        periods = triton.cdiv(self.weights.vocab_size, GROUP_BEST * groups)
        # A group a program: the keys of more of them, 64 bits each, would not stay in registers.
        shortlist_kernel[groups, self.batch](
            pool, base, base.stride(0), base.stride(1),
            groups, periods, self.corrected, self.weights.vocab_size,
            BEST=GROUP_BEST, BLOCK_G=1, BLOCK_I=triton.next_power_of_2(periods), num_warps=4,
        )  # fmt: skip

    def score_pool(self, draft, keys):
        w, m = self.weights, self.memory
        base, size = self.slot(draft), m.pool.size(1)
        pool_kernel[triton.cdiv(size, POOL_BLOCK), self.batch](
            keys[draft], m.pool, base, base.stride(0), m.low_rank[draft - self.prefix], w.w2,
            size, w.rank, CHUNKS=triton.cdiv(w.rank, self.block_r),
            BLOCK_M=POOL_BLOCK, BLOCK_R=self.block_r, **self.overlap,
        )  # fmt: skip

    def score_all(self, draft, slots, keys, restart=False):
        """Drafts draft .. draft + slots - 1, all corrected or none."""
        w, base = self.weights, self.base[:, self.first_slot + draft :]
        chunks = triton.cdiv(w.rank, self.block_r)
        vocabulary_kernel[(triton.cdiv(w.vocab_size, self.block_v),)](
            keys[draft], base, base.stride(0), base.stride(1),
            self.memory.low_rank[max(draft - self.prefix, 0)], w.w2, self.memory.first, draft,
            self.batch, slots * self.batch, w.vocab_size, w.rank,
            CORRECTED=draft >= self.prefix, RESTART=restart, CHUNKS=chunks,
            COLUMNS=COLUMNS, BLOCK_V=self.block_v, BLOCK_R=self.block_r,
            # with parts of W2 in the loop, two stages of every part would not fit shared memory
            num_stages=3 if chunks == 1 else 1, **self.overlap,
        )  # fmt: skip

    def restart(self, keys, chain_keys):
        restart_kernel[(self.batch,)](
            self.memory.first, keys, chain_keys, self.batch, self.prefix, self.drafts,
            **self.overlap,
        )  # fmt: skip

    def finish(self, keys, tokens, scores, restarts, certified):
        finish_kernel[(self.batch,)](
            tokens, scores, restarts, keys, self.memory.first, self.batch, self.drafts,
            CERTIFIED=certified, BLOCK_K=triton.next_power_of_2(self.drafts), **self.overlap,
        )  # fmt: skip


def draft_chain(
    base, hidden, anchor, weights, table, tokens, scores, restarts, workspace, *,
    shift_label, prefix, exact, pool_size,
):  # fmt: skip
    """Launches the block: tokens [B, K] int64, scores [B, K] float32, restarts [B] int32.

    The chain runs over a pool. exact: one pass over W2 certifies all drafts, and rows whose winner
    the pool missed go on over all ids from there: one restart. table [V, G / 16, 3, 16] or None.
    """
    batch, drafts = tokens.shape
    prefix = min(prefix, drafts)
    corrected = drafts - prefix
    memory = Workspace(workspace, batch, drafts, prefix, weights, pool_size)
    chain = _Chain(base, hidden, anchor, weights, table, memory, 0 if shift_label else 1, prefix)
    memory.keys.fill_(NO_KEY.value)
    keys, chain_keys = memory.keys
    if not exact:
        chain_keys = keys
    if prefix:
        chain.score_all(0, prefix, keys)
    if corrected:
        chain.project_hidden()
        chain.shortlist()
        for draft in range(drafts):
            chain.step(draft, chain_keys if draft > prefix else keys)
            if draft >= prefix:
                chain.score_pool(draft, chain_keys)
    if corrected and exact:
        chain.score_all(prefix, corrected, keys)
        chain.restart(keys, chain_keys)
        for draft in range(prefix + 1, drafts):
            chain.step(draft, keys, restart=True)
            chain.score_all(draft, 1, keys, restart=True)
    chain.finish(keys, tokens, scores, restarts, certified=bool(corrected and exact))
