"""draft_chain in Triton, the portable backend. Formula, rounding points: csrc/head/draft_chain.h.

    vocabulary  argmax of the uncorrected drafts                 once
    project     W1h H of the corrected ones                      once
    shortlist   the pool: the best of each group of ids          once
    state       S_j, u_j = SiLU(W1h H + W1s S_j), W_hh S_j       a draft
    pool        argmax of base + W2 u_j over the pool            a draft
    vocabulary  argmax of base + W2 u over all ids               once for all drafts: certifies them
    restart     the first draft whose winner the pool missed     once
    state, vocabulary   over again from that draft on            a draft; over at once if none
    finish      ids and scores from the keys                     once

The GRU step and the low-rank correction are one launch a draft: gates are elementwise, so every
program computes those of all units itself and multiplies its own rows of [W1s ; W_hh] with the new
state. Above FUSED_ROWS batch rows that redundancy costs more than a launch: `gates` stands alone.

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
FUSED_ROWS = 4
SPLIT_K = 4  # parts of the input products, summed by whoever reads them
GROUP_BEST = 4  # ids that a group of the vocabulary sends to the pool
BLOCK_N, STATE_WARPS, STAGES = 32, 4, 3
BLOCK_V, VOCABULARY_WARPS = 128, 8
OVERLAP = True
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
def _token(row, inside, token_ptr, vocab, ANCHOR: tl.constexpr):
    """y_j of these rows, from the anchors or from the keys of draft j - 1."""
    token = tl.load(token_ptr + row, mask=inside, other=0)
    if not ANCHOR:
        token = _key_id(token)
    return tl.minimum(tl.maximum(token, 0), vocab - 1)


@triton.jit
def _gates(x_r, x_z, x_n, s_r, s_z, s_n, state):
    reset = tl.sigmoid(x_r + s_r)
    update = tl.sigmoid(x_z + s_z)
    candidate = 2 * tl.sigmoid(2 * (x_n + reset * s_n)) - 1  # tanh
    return candidate + update * (state - candidate)


@triton.jit
def _input(x_ptr, x_split, at, mask, SPLIT: tl.constexpr):
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, SPLIT):
        x += tl.load(x_ptr + part * x_split + at, mask=mask, other=0.0)
    return x


@triton.jit
def _next_state(
    k, row, x_row, mask, units, x_ptr, x_split, product_ptr, state_ptr,
    TABLE: tl.constexpr, FIRST: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """S_j at [k, row], rounded to the dtype of the states; `x_row` is where a row's inputs begin.

    A row of the table is [units / 16, gate, 16], one of the streamed products [gate, units].
    """
    x = x_row[None, :] + (k // 16 * 48 + k % 16 if TABLE else k)[:, None]
    gate = 16 if TABLE else units
    x_r = _input(x_ptr, x_split, x, mask, SPLIT)
    x_z = _input(x_ptr, x_split, x + gate, mask, SPLIT)
    x_n = _input(x_ptr, x_split, x + 2 * gate, mask, SPLIT)
    if FIRST:
        zero = tl.zeros_like(x_r)
        new = _gates(x_r, x_z, x_n, zero, zero, zero, zero)
    else:
        s = row[None, :] * 3 * units + k[:, None]
        s_r = tl.load(product_ptr + s, mask=mask, other=0.0)
        s_z = tl.load(product_ptr + s + units, mask=mask, other=0.0)
        s_n = tl.load(product_ptr + s + 2 * units, mask=mask, other=0.0)
        state = tl.load(state_ptr + row[None, :] * units + k[:, None], mask=mask, other=0.0)
        new = _gates(x_r, x_z, x_n, s_r, s_z, s_n, state.to(tl.float32))
    return new.to(state_ptr.dtype.element_ty)


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
        at = _token(n, inside, token_ptr, vocab, ANCHOR) * x_stride
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
    draft, units, batch, vocab,
    OVERLAP: tl.constexpr, TABLE: tl.constexpr, ANCHOR: tl.constexpr,
    RESTART: tl.constexpr, SPLIT: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """S_j of one row and BLOCK_G units."""
    row = tl.program_id(1).to(tl.int64) + tl.arange(0, 1)
    _begin(OVERLAP)
    if RESTART:
        if tl.load(first_ptr + tl.program_id(1)) >= draft:
            return
    k = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)
    x_row = _token(row, row < batch, token_ptr, vocab, ANCHOR) if TABLE else row
    mask = (k < units)[:, None]
    new = _next_state(k, row, x_row * x_stride, mask, units, x_ptr, x_split, product_ptr,
                      state_ptr, TABLE, ANCHOR, SPLIT)  # fmt: skip
    tl.store(new_ptr + row[None, :] * units + k[:, None], new, mask=mask)


@_kernel
def state_kernel(
    x_ptr, x_split, x_stride, token_ptr, product_ptr, state_ptr, new_ptr, new_product_ptr,
    from_hidden_ptr, from_hidden_split, low_rank_ptr, w1s_ptr, w1_stride, w_hh_ptr, first_ptr,
    draft, first_block, rank_blocks, rank, units, batch, vocab,
    OVERLAP: tl.constexpr, FUSED: tl.constexpr, TABLE: tl.constexpr, ANCHOR: tl.constexpr,
    RESTART: tl.constexpr, SPLIT: tl.constexpr, Z_SPLIT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of [W1s ; W_hh] times S_j: u_j, or W_hh S_j for the next step.

    FUSED: the gates of all units come first, for ROWS <= COLUMNS batch rows; the other columns of
    the tile repeat them. Else S_j is read.
    """
    block = tl.program_id(0) + first_block
    row = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS) % ROWS
    inside = row < batch
    few = tl.program_id(1) * COLUMNS + tl.arange(0, ROWS)
    few_inside = few < batch
    _begin(OVERLAP)
    if RESTART:
        inside &= tl.load(first_ptr + row, mask=inside, other=draft) < draft
        few_inside &= tl.load(first_ptr + few, mask=few_inside, other=draft) < draft
        if tl.max(few_inside.to(tl.int32), 0) == 0:
            return
    i = (block if block < rank_blocks else block - rank_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = rank if block < rank_blocks else 3 * units
    stride = w1_stride if block < rank_blocks else units
    w_ptr = w1s_ptr if block < rank_blocks else w_hh_ptr
    w_row = w_ptr + i.to(tl.int64)[:, None] * stride
    sums = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
    if FUSED:
        few = few.to(tl.int64)
        x_row = _token(few, few_inside, token_ptr, vocab, ANCHOR) if TABLE else few
        x_row = x_row * x_stride
    for start in range(0, units, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w = tl.load(w_row + k[None, :], mask=(i < rows)[:, None] & (k < units)[None, :], other=0.0)
        if FUSED:
            mask = (k < units)[:, None] & few_inside[None, :]
            new = _next_state(k, few, x_row, mask, units, x_ptr, x_split, product_ptr, state_ptr,
                              TABLE, ANCHOR, SPLIT)  # fmt: skip
            if tl.program_id(0) == start // BLOCK_K % tl.num_programs(0):  # one of all stores it
                tl.store(new_ptr + few[None, :] * units + k[:, None], new, mask=mask)
            new = tl.where(mask, new, 0.0).to(new.dtype)
            new = tl.broadcast_to(new[:, None, :], (BLOCK_K, COLUMNS // ROWS, ROWS))
            new = tl.reshape(new, (BLOCK_K, COLUMNS))
        else:
            mask = (k < units)[:, None] & inside[None, :]
            at = row.to(tl.int64)[None, :] * units + k[:, None]
            new = tl.load(new_ptr + at, mask=mask, other=0.0)
        sums = tl.dot(w, new, sums, input_precision="ieee")
    own = tl.arange(0, COLUMNS) < ROWS
    mask = (inside & own)[None, :] & (i < rows)[:, None]
    at = row.to(tl.int64)[None, :] * rows + i[:, None]
    if block < rank_blocks:
        mixed = sums + _input(from_hidden_ptr, from_hidden_split, at, mask, Z_SPLIT)
        low_rank = mixed / (1 + tl.exp(-mixed))
        tl.store(low_rank_ptr + at, low_rank.to(low_rank_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(new_product_ptr + at, sums, mask=mask)


@_kernel
def shortlist_kernel(
    pool_ptr, base_ptr, base_stride, base_stride_slot, groups, members, slots, vocab,
    BEST: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """The BEST ids of each group {g, g + groups, ...} by the maximum of base over the slots."""
    row = tl.program_id(1).to(tl.int64)
    g = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)
    i = tl.arange(0, BLOCK_I)
    v = i[:, None] * groups + g[None, :]
    mask = (v < vocab) & (i < members)[:, None] & (g < groups)[None, :]
    base = base_ptr + row * base_stride
    best = tl.full([BLOCK_I, BLOCK_G], float("-inf"), tl.float32)
    for slot in range(slots):
        value = tl.load(
            base + tl.cast(slot, tl.int64) * base_stride_slot + v, mask=mask, other=float("-inf")
        )
        best = tl.maximum(best, value.to(tl.float32))
    key = tl.where(mask, _key(best, v), NO_KEY)
    out = pool_ptr + row * groups * BEST + g
    for place in tl.static_range(BEST):
        top = tl.max(key, 0)
        key = tl.where(key == top[None, :], NO_KEY, key)
        # a group of fewer ids repeats an id
        chosen = tl.where(top == NO_KEY, tl.minimum(g, vocab - 1), _key_id(top).to(tl.int32))
        tl.store(out + place * groups, chosen, mask=g < groups)


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
    if CORRECTED and CHUNKS == 1:
        w2 = tl.load(w2_row + r[None, :], mask=known & (r < rank)[None, :], other=0.0)
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
    tokens_ptr, scores_ptr, keys_ptr, batch, drafts, OVERLAP: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    _begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    draft = tl.arange(0, BLOCK_K)
    key = tl.load(keys_ptr + draft * batch + row, mask=draft < drafts, other=0)
    at = row * drafts + draft
    tl.store(tokens_ptr + at, _key_id(key), mask=draft < drafts)
    tl.store(scores_ptr + at, _key_value(key), mask=draft < drafts)


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
        self.pool = self._take(torch.int32, batch, pool_size)

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


class _Chain:
    """The launches of one block, in order."""

    def __init__(self, base, hidden, anchor, weights, table, memory, *, first_slot, prefix):
        self.base, self.hidden, self.anchor = base, hidden, anchor
        self.weights, self.table, self.memory = weights, table, memory
        self.first_slot, self.prefix = first_slot, prefix
        self.drafts, self.batch = memory.keys.shape[1:]
        self.corrected = self.drafts - prefix
        self.row_blocks = triton.cdiv(self.batch, COLUMNS)
        self.overlap = {"OVERLAP": False}
        if OVERLAP and _can_overlap(anchor.device):
            self.overlap = {"OVERLAP": True, "launch_pdl": True}
        self.block_k = 64 if weights.dtype == torch.float32 else 128
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
            COLUMNS=COLUMNS, BLOCK_N=BLOCK_N, BLOCK_K=self.block_k, num_stages=STAGES,
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
        flags = dict(TABLE=self.table is not None, ANCHOR=draft == 0, RESTART=restart)
        flags["SPLIT"] = 1 if flags["TABLE"] else SPLIT_K
        fused = self.batch <= FUSED_ROWS
        if not fused:
            gates_kernel[triton.cdiv(units, 256), self.batch](
                x, x.stride(0), x_stride, tokens, m.products[before], m.states[before],
                m.states[draft], m.first, draft, units, self.batch, w.vocab_size,
                **flags, BLOCK_G=256,
            **self.overlap,
            )  # fmt: skip
        corrected = draft >= self.prefix
        slot = max(draft - self.prefix, 0)
        rank_blocks = triton.cdiv(rank, BLOCK_N)
        first_block = 0 if corrected else rank_blocks
        blocks = rank_blocks - first_block
        if draft + 1 < self.drafts:
            blocks += triton.cdiv(3 * units, BLOCK_N)
        if blocks == 0:
            return
        state_kernel[blocks, self.row_blocks](
            x, x.stride(0), x_stride, tokens, m.products[before], m.states[before],
            m.states[draft], m.products[draft], m.from_hidden[0, slot], m.from_hidden.stride(0),
            m.low_rank[slot], w.w1[:, w.hidden_size :], w.w1.stride(0), w.w_hh, m.first,
            draft, first_block, rank_blocks, rank, units, self.batch, w.vocab_size,
            FUSED=fused, **flags, Z_SPLIT=SPLIT_K, COLUMNS=COLUMNS,
            ROWS=triton.next_power_of_2(self.batch) if fused else COLUMNS,
            BLOCK_N=BLOCK_N, BLOCK_K=min(self.block_k, triton.next_power_of_2(max(units, 16))),
            num_warps=STATE_WARPS, num_stages=STAGES,
            **self.overlap,
        )  # fmt: skip

    def shortlist(self):
        base, pool = self.base[:, self.first_slot + self.prefix :], self.memory.pool
        groups = pool.size(1) // GROUP_BEST
        members = triton.cdiv(self.weights.vocab_size, groups)
        shortlist_kernel[triton.cdiv(groups, 16), self.batch](
            pool, base, base.stride(0), base.stride(1),
            groups, members, self.corrected, self.weights.vocab_size,
            BEST=GROUP_BEST, BLOCK_G=16, BLOCK_I=triton.next_power_of_2(members), num_warps=8,
        )  # fmt: skip

    def score_pool(self, draft, keys):
        w, m = self.weights, self.memory
        base, size = self.slot(draft), m.pool.size(1)
        block = 32 if self.batch < 16 else 64
        pool_kernel[triton.cdiv(size, block), self.batch](
            keys[draft], m.pool, base, base.stride(0), m.low_rank[draft - self.prefix], w.w2,
            size, w.rank, CHUNKS=triton.cdiv(w.rank, self.block_r),
            BLOCK_M=block, BLOCK_R=self.block_r, **self.overlap,
        )  # fmt: skip

    def score_all(self, draft, slots, keys, restart=False):
        """Drafts draft .. draft + slots - 1, all corrected or none."""
        w, base = self.weights, self.base[:, self.first_slot + draft :]
        vocabulary_kernel[(triton.cdiv(w.vocab_size, BLOCK_V),)](
            keys[draft], base, base.stride(0), base.stride(1),
            self.memory.low_rank[max(draft - self.prefix, 0)], w.w2, self.memory.first, draft,
            self.batch, slots * self.batch, w.vocab_size, w.rank,
            CORRECTED=draft >= self.prefix, RESTART=restart,
            CHUNKS=triton.cdiv(w.rank, self.block_r),
            COLUMNS=COLUMNS, BLOCK_V=BLOCK_V, BLOCK_R=self.block_r, num_warps=VOCABULARY_WARPS,
            **self.overlap,
        )  # fmt: skip

    def restart(self, keys, chain_keys):
        restart_kernel[(self.batch,)](
            self.memory.first, keys, chain_keys, self.batch, self.prefix, self.drafts,
            **self.overlap,
        )  # fmt: skip

    def finish(self, tokens, scores, keys):
        finish_kernel[(self.batch,)](
            tokens, scores, keys, self.batch, self.drafts, **self.overlap,
            BLOCK_K=triton.next_power_of_2(self.drafts),
        )  # fmt: skip


def draft_chain(
    base, hidden, anchor, weights, tokens, scores, workspace, *,
    shift_label, prefix, exact, pool_size, table=None,
):  # fmt: skip
    """Launches the block: `tokens` [B, K] int64 and `scores` [B, K] float32 are written.

    exact: every id is the winner over all ids. With a pool (pool_size > 0) the chain runs over it,
        one pass over W2 certifies all drafts, and rows that were wrong go on over all ids from
        there; without one, every draft is scored over all ids.
    """
    batch, drafts = tokens.shape
    prefix = min(prefix, drafts)
    corrected = drafts - prefix
    memory = Workspace(workspace, batch, drafts, prefix, weights, pool_size)
    keys, chain_keys = memory.keys
    memory.keys.fill_(NO_KEY.value)
    first_slot = 0 if shift_label else 1
    chain = _Chain(
        base, hidden, anchor, weights, table, memory, first_slot=first_slot, prefix=prefix
    )
    if prefix:
        chain.score_all(0, prefix, keys)
    if corrected:
        chain.project_hidden()
    if corrected and pool_size:
        chain.shortlist()
        for draft in range(drafts):
            # y_j of the uncorrected slots, and all of them where nothing certifies
            seen = chain_keys if exact and draft > prefix else keys
            chain.step(draft, seen)
            if draft >= prefix:
                chain.score_pool(draft, chain_keys if exact else keys)
        if exact:
            chain.score_all(prefix, corrected, keys)
            chain.restart(keys, chain_keys)
            for draft in range(prefix + 1, drafts):
                chain.step(draft, keys, restart=True)
                chain.score_all(draft, 1, keys, restart=True)
    elif corrected:
        for draft in range(drafts):
            chain.step(draft, keys)
            if draft >= prefix:
                chain.score_all(draft, 1, keys)
    chain.finish(tokens, scores, keys)
    return tokens
