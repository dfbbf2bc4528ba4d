"""`draft_chain` for DSpark's Markov heads, at the vocabulary and rank of Qwen3-8B's drafters.

`ours` is the persistent form, `ours/plain` three launches an id over the whole vocabulary, as other
sizes and GPUs take, `graph` the loop in Torch, captured. Winners are planted in the base logits.
"""

from typing import NamedTuple

import torch
from torch.nn import functional

from bench.ops.head_inputs import BASE_STD, DELTA_STD, drawer
from bench.peers.head import DRAFTS
from bench.registry import Case
from domino_kernels import ChainPlan, DraftResult, HeadWeights, draft_chain_out

HIDDEN, VOCAB, RANK, SLOTS = 4096, 151936, 256, 16
DTYPE = torch.bfloat16


class Operands(NamedTuple):
    """planted [B, 15]: the right ids, which lead by far."""

    base: torch.Tensor
    hidden: torch.Tensor | None
    anchor: torch.Tensor
    weights: HeadWeights
    plan: ChainPlan
    out: DraftResult
    planted: torch.Tensor


def pool_size(batch):
    return 2048 if batch <= 8 else 512


def make(kind, batch, seed, device):
    draw = drawer(seed, device)
    scale = DELTA_STD * BASE_STD * RANK**-0.5
    w1 = draw(RANK, HIDDEN + RANK, scale=2 * (HIDDEN + RANK) ** -0.5) if kind == "gate" else None
    weights = HeadWeights(None, None, w1, draw(VOCAB, RANK, scale=scale), draw(VOCAB, RANK), kind)
    base = draw(batch, SLOTS, VOCAB, scale=BASE_STD)
    planted = torch.randint(VOCAB, (batch, DRAFTS), device=device)
    base[:, :DRAFTS].scatter_(2, planted[..., None], 60)
    options = dict(num_drafts=DRAFTS, pool_size=pool_size(batch))
    return Operands(
        base,
        draw(batch, SLOTS, HIDDEN) if kind == "gate" else None,
        torch.randint(VOCAB, (batch,), device=device),
        weights,
        ChainPlan(weights, batch, **options),
        DraftResult.empty(weights, batch, **options),
        planted,
    )


def ours(o, **options):
    size = pool_size(len(o.anchor))
    return draft_chain_out(*o[:4], out=o.out, plan=o.plan, pool_size=size, **options).tokens


def graph(o):
    """The loop in Torch; of a gate W1h H for all slots at once."""
    weights, tokens = o.weights, [o.base[:, 0].argmax(-1)]
    if o.hidden is not None:
        of_hidden, of_row = weights.w1.split((HIDDEN, RANK), 1)
        mixed = functional.linear(o.hidden[:, :DRAFTS], of_hidden)
    for slot in range(1, DRAFTS):
        u = weights.embedding[tokens[-1]]
        if o.hidden is not None:
            u = torch.sigmoid(mixed[:, slot] + functional.linear(u, of_row)) * u
        tokens.append(torch.addmm(o.base[:, slot], u, weights.w2.T).argmax(-1))
    return torch.stack(tokens, 1)


def check(operands, tokens):
    (o,) = operands
    wrong = int((tokens != o.planted).sum())
    assert wrong == 0, f"{wrong} of {tokens.numel()} ids are not the planted winners"


def case(kind, batch, exact):
    name = "exact" if exact else "pool"
    providers = {"ours": lambda o: ours(o, exact=exact)}
    if exact:
        providers |= {"ours/plain": lambda o: ours(o, portable=True), "graph": graph}
    scored = VOCAB if exact else min(VOCAB, batch * pool_size(batch))
    return Case(
        op="markov_chain",
        case=name,
        params={"model": "qwen3-8b", "kind": kind, "num_drafts": DRAFTS, "M": pool_size(batch)},
        provider_params={"ours/plain": {"portable": True}} if exact else {},
        shape={"H": HIDDEN if kind == "gate" else 0, "R": RANK, "V": VOCAB},
        batch=batch,
        make=lambda seed, device: (make(kind, batch, seed, device),),
        providers=providers,
        check=check,
        bytes=(scored * RANK + batch * DRAFTS * (VOCAB + RANK)) * DTYPE.itemsize,
    )


def cases():
    for batch in (1, 8, 64):
        for kind in ("row", "gate"):
            for exact in (True, False):
                yield case(kind, batch, exact)
