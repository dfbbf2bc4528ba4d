"""Peer of `draft_chain`: four launches a step, the vocabulary in one fused Triton kernel.

The structure of SGLang's pull request 28998: the input table [V, 3G] (a row is the GRU's input
product of an id), W1h H once for all slots, and in each step one GEMM for both products of the
state, SiLU + W2 + base + argmax of a vocabulary tile, the argmax over tiles, the GRU gates. There
one program scores one row of the batch and W2 is read once a row, as here at batch 1; above, a tile
of W2 meets up to 64 rows on the tensor cores.
"""

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear

from bench.peers.head import DRAFTS


@triton.jit
def score_kernel(
    base_ptr, base_stride, hidden_ptr, hidden_stride, state_ptr, state_stride, w2_ptr,
    best_ptr, best_id_ptr, batch, vocab, rank, tiles,
    CORRECTED: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Best of BLOCK_V ids for BLOCK_B rows: max of base + W2 SiLU(from_hidden + from_state)."""
    tile = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (row < batch)[:, None] & (v < vocab)[None, :]
    at = row.to(tl.int64)
    base = tl.load(base_ptr + at[:, None] * base_stride + v[None, :], mask=inside, other=0.0)
    scores = base.to(tl.float32)
    if CORRECTED:
        for start in range(0, rank, BLOCK_R):
            r = start + tl.arange(0, BLOCK_R)
            known = (row < batch)[:, None] & (r < rank)[None, :]
            mixed = tl.load(hidden_ptr + at[:, None] * hidden_stride + r[None, :], mask=known,
                            other=0.0).to(tl.float32)  # fmt: skip
            mixed += tl.load(state_ptr + at[:, None] * state_stride + r[None, :], mask=known,
                             other=0.0).to(tl.float32)  # fmt: skip
            low_rank = mixed / (1 + tl.exp(-mixed))
            stored = (v < vocab)[:, None] & (r < rank)[None, :]
            w2 = tl.load(w2_ptr + v.to(tl.int64)[:, None] * rank + r[None, :], mask=stored,
                         other=0.0)  # fmt: skip
            low_rank = low_rank.to(w2.dtype)
            if BLOCK_B == 1:
                products = low_rank.to(tl.float32) * w2.to(tl.float32)
                scores += tl.sum(products, 1)[None, :]
            else:
                scores = tl.dot(low_rank, tl.trans(w2), scores, input_precision="ieee")
    scores = tl.where(inside, scores, float("-inf"))
    best, place = tl.max(scores, 1, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_ptr + at * tiles + tile, best, mask=row < batch)
    tl.store(best_id_ptr + at * tiles + tile, tile * BLOCK_V + place, mask=row < batch)


@triton.jit
def winner_kernel(best_ptr, best_id_ptr, token_ptr, token_stride, tiles, BLOCK: tl.constexpr):
    """The best tile of one row; tiles ascend, so the leftmost of equals has the lowest id."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    _, place = tl.max(best, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(
        token_ptr + row * token_stride, tl.load(best_id_ptr + row * tiles + place).to(tl.int64)
    )


@triton.jit
def gates_kernel(
    token_ptr, token_stride, table_ptr, product_ptr, product_stride, state_ptr, units,
    BLOCK_G: tl.constexpr,
):  # fmt: skip
    """state := GRU(state) in place: input products from the table, state products given."""
    row = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    inside = g < units
    token = tl.load(token_ptr + row * token_stride)
    x_ptr = table_ptr + token * 3 * units + g
    s_ptr = product_ptr + row * product_stride + g
    x_r = tl.load(x_ptr, mask=inside, other=0.0).to(tl.float32)
    x_z = tl.load(x_ptr + units, mask=inside, other=0.0).to(tl.float32)
    x_n = tl.load(x_ptr + 2 * units, mask=inside, other=0.0).to(tl.float32)
    s_r = tl.load(s_ptr, mask=inside, other=0.0).to(tl.float32)
    s_z = tl.load(s_ptr + units, mask=inside, other=0.0).to(tl.float32)
    s_n = tl.load(s_ptr + 2 * units, mask=inside, other=0.0).to(tl.float32)
    state = tl.load(state_ptr + row * units + g, mask=inside, other=0.0).to(tl.float32)
    reset = tl.sigmoid(x_r + s_r)
    update = tl.sigmoid(x_z + s_z)
    candidate = 2 * tl.sigmoid(2 * (x_n + reset * s_n)) - 1  # tanh
    new = candidate + update * (state - candidate)
    tl.store(state_ptr + row * units + g, new.to(state_ptr.dtype.element_ty), mask=inside)


def tiles_of(batch, rank):
    """BLOCK_B, BLOCK_V and BLOCK_R: the fastest measured on an H200 at batch 1, 8 and 64."""
    if batch == 1:
        return 1, 32, triton.next_power_of_2(rank)
    return (16, 256, 64) if batch <= 16 else (min(triton.next_power_of_2(batch), 64), 128, 64)


def full_table(base, hidden, anchor, weights, prepared):
    batch, vocab, rank, units = len(anchor), weights.vocab_size, weights.rank, weights.gru_size
    rows, block_v, block_r = tiles_of(batch, rank)
    tiles = triton.cdiv(vocab, block_v)
    from_hidden = linear(hidden, weights.w1[:, : weights.hidden_size])
    state = hidden.new_zeros(batch, units)
    product = hidden.new_zeros(batch, rank + 3 * units)  # of the zero state
    best = torch.empty(batch, tiles, device=hidden.device)
    best_id = torch.empty(batch, tiles, dtype=torch.int32, device=hidden.device)
    chain = torch.empty(batch, DRAFTS + 1, dtype=torch.int64, device=hidden.device)
    chain[:, 0] = anchor
    for slot in range(DRAFTS):
        gates_kernel[batch, triton.cdiv(units, 256)](
            chain[:, slot], chain.stride(0), prepared.table, product[:, rank:], product.stride(0),
            state, units, BLOCK_G=256,
        )  # fmt: skip
        torch.mm(state, prepared.from_state.t(), out=product)
        score_kernel[tiles, triton.cdiv(batch, rows)](
            base[:, slot], base.stride(0), from_hidden[:, slot], from_hidden.stride(0),
            product, product.stride(0), weights.w2, best, best_id, batch, vocab, rank, tiles,
            CORRECTED=slot > 0, BLOCK_B=rows, BLOCK_V=block_v, BLOCK_R=block_r, num_warps=4,
        )  # fmt: skip
        winner_kernel[(batch,)](
            best, best_id, chain[:, slot + 1], chain.stride(0), tiles,
            BLOCK=triton.next_power_of_2(tiles),
        )  # fmt: skip
    return chain[:, 1:]
