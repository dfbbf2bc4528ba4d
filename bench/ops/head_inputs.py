"""Inputs of a drafting head: random weights, logits of a trained drafter's scale, known winners."""

from typing import NamedTuple

import torch
from torch.nn import functional

from bench.peers.head import DRAFTS
from domino_kernels import HeadWeights

# Means over the corrected slots of the shipped SmolLM2 drafter on held-out prompts, counted by
# bench/pool_recall.py ("scale" in bench/results/pool-recall-smollm2.json). The first is the
# deviation of the base logits over the vocabulary, the others are in units of it.
BASE_STD = 2.47
DELTA_STD = 0.71
WINNER_BASE = 4.81
WINNER_DELTA = 3.16
FIRST_BASE = 8.0  # slot 0 has no correction: far enough above the best of random logits


class Block(NamedTuple):
    """base [B, S, V], hidden [B, S, H], anchor [B], weights, and planted [B, 15]: the right ids."""

    base: torch.Tensor
    hidden: torch.Tensor
    anchor: torch.Tensor
    weights: HeadWeights
    planted: torch.Tensor


def drawer(seed, device, dtype=torch.bfloat16):
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*size, scale=1.0):
        return torch.randn(size, generator=generator, device=device, dtype=dtype).mul_(scale)

    return draw


def teacher_forced(hidden, tokens, weights):
    """u = SiLU(W1 [H ; S]) after each id: hidden [B, S, H], tokens [B, T] -> [B, T, R]."""
    state, rows = hidden.new_zeros(len(hidden), weights.gru_size), []
    for slot, token in enumerate(tokens.unbind(1)):
        state = torch.gru_cell(weights.embedding[token], state, weights.w_ih, weights.w_hh)
        mixed = torch.cat((hidden[:, slot], state), -1)
        rows.append(functional.silu(functional.linear(mixed, weights.w1)))
    return torch.stack(rows, 1)


def planted_block(shape, batch, seed, device, *, restarts=0, slots=16, dtype=torch.bfloat16):
    """A block whose winners are known, with the margin that a trained drafter's winners have.

    The ids are distinct and random. The row of W2 of each lies along the low-rank input of its
    slot, so that the correction lifts it by WINNER_DELTA, the mean of the drafter's winners; its
    base logit is their mean as well, which no other id of the slot reaches with its correction.

    restarts: how many winners are outside of every pool (their base logit is the mean of the
        slot, their correction makes up for it): 0; 1, in the middle of row 0; or DRAFTS - 1, all
        corrected slots of all rows.
    """
    inputs, units, rank, vocab = (shape[name] for name in "HGRV")
    draw = drawer(seed, device, dtype)
    weights = HeadWeights(
        w_ih=draw(3 * units, inputs, scale=2 * inputs**-0.5),
        w_hh=draw(3 * units, units, scale=2 * units**-0.5),
        w1=draw(rank, inputs + units, scale=2 * (inputs + units) ** -0.5),
        w2=draw(vocab, rank),
        embedding=draw(vocab, inputs),
    )
    hidden = draw(batch, slots, inputs)
    generator = torch.Generator(device).manual_seed(seed + 1)
    ids = torch.randperm(vocab, generator=generator, device=device)[: batch * (DRAFTS + 1)]
    anchor, planted = ids.view(batch, DRAFTS + 1).tensor_split([1], 1)
    anchor, planted = anchor[:, 0].contiguous(), planted.contiguous()

    chain = torch.cat((anchor[:, None], planted[:, :-1]), 1)
    low_rank = teacher_forced(hidden, chain, weights).float()
    squares = low_rank.square().sum(-1, keepdim=True)
    weights.w2.mul_(DELTA_STD * BASE_STD / squares.mean().sqrt())
    outside = torch.zeros(batch, DRAFTS, dtype=torch.bool, device=device)
    if restarts == 1:
        outside[0, DRAFTS // 2] = True
    elif restarts:
        outside[:, 1:] = True
    in_base = torch.full((batch, DRAFTS), WINNER_BASE, device=device)
    in_base[:, 0] = FIRST_BASE
    lift = torch.full_like(in_base, WINNER_DELTA).add_(in_base * outside)
    in_base[outside] = 0.0
    weights.w2[planted] = (low_rank * (lift[..., None] * BASE_STD / squares)).to(dtype)
    base = draw(batch, slots, vocab, scale=BASE_STD)
    # A planted row of W2 lifts its id in other slots too: there its base logit takes that back.
    every = planted.flatten()
    base[:, :DRAFTS, every] = -functional.relu(low_rank @ weights.w2[every].float().T).to(dtype)
    base[:, :DRAFTS].scatter_(2, planted[..., None], (in_base * BASE_STD).to(dtype)[..., None])
    return Block(base, hidden, anchor, weights, planted)
