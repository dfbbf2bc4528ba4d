"""Peers of `draft_chain` in Torch: 15 ids a block, slot i scores y_{i+1}, slot 0 a plain argmax.

Each is a function (base [B, S, V], hidden [B, S, H], anchor [B], HeadWeights, Prepared) -> ids
[B, 15], without synchronisation, so that it can be captured in a CUDA graph.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch.nn.functional import embedding, linear, silu

DRAFTS = 15


class Prepared(NamedTuple):
    """What a peer makes of the weights once, outside the clock.

    table [V, 3G] = E W_ihᵀ, the GRU's input product of every id; from_state [R + 3G, G] = W1's
    state columns over W_hh, both products of a state in one; gru: the GRU as a module, its weights
    in the one buffer that cuDNN wants.
    """

    table: torch.Tensor
    from_state: torch.Tensor
    gru: torch.nn.GRU


def prepare(weights):
    inputs, units = weights.hidden_size, weights.gru_size
    gru = torch.nn.GRU(inputs, units, bias=False, batch_first=True)
    gru = gru.to(weights.device, weights.dtype).eval().requires_grad_(False)
    gru.weight_ih_l0.copy_(weights.w_ih)
    gru.weight_hh_l0.copy_(weights.w_hh)
    if weights.device.type == "cuda":
        # one buffer, or each call copies the weights; flatten_parameters() passes over bfloat16
        mode = torch.backends.cudnn.rnn.get_cudnn_mode("GRU")
        torch._cudnn_rnn_flatten_weight(
            gru._flat_weights, 2, inputs, mode, units, 0, 1, True, False
        )
    from_state = torch.cat((weights.w1[:, inputs:], weights.w_hh))
    return Prepared(linear(weights.embedding, weights.w_ih), from_state, gru)


def aten_cell(token, state, weights, prepared):
    return torch.gru_cell(embedding(token, weights.embedding), state, weights.w_ih, weights.w_hh)


def cudnn_cell(token, state, weights, prepared):
    return prepared.gru(weights.embedding[token][:, None], state[None])[1][0]


def table_cell(token, state, weights, prepared):
    x_r, x_z, x_n = prepared.table[token].chunk(3, -1)
    s_r, s_z, s_n = linear(state, weights.w_hh).chunk(3, -1)
    update = torch.sigmoid(x_z + s_z)
    candidate = torch.tanh(x_n + torch.sigmoid(x_r + s_r) * s_n)
    return candidate + update * (state - candidate)


def corrected(base, from_hidden, state, weights):
    """The winners of one slot: base [B, V], from_hidden = W1h H [B, R]."""
    low_rank = silu(torch.addmm(from_hidden, state, weights.w1[:, weights.hidden_size :].t()))
    return torch.addmm(base, low_rank, weights.w2.t()).argmax(-1)


def loop(cell, score=corrected):
    """The whole vocabulary in every step; W1h H, which needs no token, once for all slots."""

    def peer(base, hidden, anchor, weights, prepared):
        from_hidden = linear(hidden, weights.w1[:, : weights.hidden_size])
        state = cell(anchor, hidden.new_zeros(len(anchor), weights.gru_size), weights, prepared)
        tokens = [base[:, 0].argmax(-1)]
        for slot in range(1, DRAFTS):
            state = cell(tokens[-1], state, weights, prepared)
            tokens.append(score(base[:, slot], from_hidden[:, slot], state, weights))
        return torch.stack(tokens, 1)

    return peer


full = loop(aten_cell)
cudnn = loop(cudnn_cell)


@cache
def compile_once(fn):
    # a kernel for every shape, and an error where Dynamo would quietly go back to eager
    torch._dynamo.config.recompile_limit = 1024
    torch._dynamo.config.accumulated_recompile_limit = 4096
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(fn, dynamic=False, fullgraph=True)


def compiled(base, hidden, anchor, weights, prepared):
    """`full` with the step's parts compiled: nothing can be fused across an argmax."""
    peer = loop(compile_once(aten_cell), compile_once(corrected))
    return peer(base, hidden, anchor, weights, prepared)


def compiled_table(base, hidden, anchor, weights, prepared):
    """`compiled` with the input table, so the gates are one kernel after the product W_hh S."""
    peer = loop(compile_once(table_cell), compile_once(corrected))
    return peer(base, hidden, anchor, weights, prepared)


def pool(base, hidden, anchor, weights, prepared, size=2048):
    """The structure that SGLang merged: one pool a request, the `size` best of its base logits.

    The pool is the top of the maximum over the corrected slots; its rows of W2 and its base logits
    are gathered once and only they are scored. The GRU runs over the first two ids as a module,
    then cell by cell with the whole input product. W1h H stands before the loop, as in the others;
    there [H ; S] is concatenated in every step.
    """
    slots = base[:, 1:DRAFTS]
    ids = slots.amax(1).topk(size, dim=-1, sorted=False).indices
    rows = weights.w2[ids]
    in_pool = slots.gather(2, ids[:, None].expand(-1, DRAFTS - 1, -1))[..., None]
    w1_hidden, w1_state = weights.w1.tensor_split([weights.hidden_size], 1)
    from_hidden = linear(hidden, w1_hidden)
    tokens = [base[:, 0].argmax(-1)]
    prefix = torch.stack((anchor, tokens[0]), 1)
    state = prepared.gru(embedding(prefix, weights.embedding))[1][0]
    for slot in range(1, DRAFTS):
        if slot > 1:
            state = aten_cell(tokens[-1], state, weights, prepared)
        low_rank = silu(torch.addmm(from_hidden[:, slot], state, w1_state.t()))
        scores = torch.baddbmm(in_pool[:, slot - 1], rows, low_rank[..., None])[..., 0]
        tokens.append(ids.gather(1, scores.argmax(-1, keepdim=True))[:, 0])
    return torch.stack(tokens, 1)
