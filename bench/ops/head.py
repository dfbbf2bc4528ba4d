"""The drafting head at the shapes of the public checkpoints, and of the drafter shipped here."""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional

import domino_kernels
from bench.ops import lm_head, markov
from bench.ops.head_inputs import drawer, planted_block
from bench.peers import head as peers
from bench.peers.head import DRAFTS
from bench.registry import Case
from domino_kernels import ChainPlan, DraftResult, draft_chain_out
from domino_kernels.reference.head import gru_step as reference_gru_step
from domino_kernels.testing import assert_error_rule, to_numpy

# H hidden size, G GRU units, R rank of the correction, V vocabulary
MODELS = {
    "smollm2-135m": {"H": 576, "G": 256, "R": 96, "V": 49152},
    "qwen3-4b": {"H": 2560, "G": 1024, "R": 256, "V": 151936},
    "qwen3-8b": {"H": 4096, "G": 1024, "R": 256, "V": 151936},
}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
SLOTS = 16
DTYPE = torch.bfloat16


def gru_step_case(model, batch):
    hidden, units = MODELS[model]["H"], MODELS[model]["G"]
    scale = (hidden + units) ** -0.5

    def make(seed, device):
        draw = drawer(seed, device)
        state = draw(batch, units).tanh_()
        w_ih, w_hh = draw(3 * units, hidden, scale=scale), draw(3 * units, units, scale=scale)
        return draw(batch, hidden), state, w_ih, w_hh, torch.empty_like(state)

    def ours(x, state, w_ih, w_hh, out):
        return domino_kernels.gru_step(x, state, w_ih, w_hh, out=out)

    def peer(x, state, w_ih, w_hh, out):
        return torch.gru_cell(x, state, w_ih, w_hh)

    def check(operands, result):
        expected = reference_gru_step(*map(to_numpy, operands[:4]))
        assert_error_rule(result, expected, peer(*operands))

    elements = batch * (hidden + 2 * units) + 3 * units * (hidden + units)
    return Case(
        op="gru_step",
        case="bf16",
        params={"model": model},
        shape={"H": hidden, "G": units},
        batch=batch,
        make=make,
        providers={"ours": ours, "torch": peer},
        check=check,
        bytes=elements * DTYPE.itemsize,
    )


class Operands(NamedTuple):
    """What ours and the peers get. The weights have the screen; `with_table`: and the input table.

    plan, out: memory of a call of ours in each mode: mode -> ChainPlan, DraftResult.
    law: [B] temperatures, seeds and positions of a drawn block.
    """

    base: torch.Tensor
    hidden: torch.Tensor
    anchor: torch.Tensor
    weights: domino_kernels.HeadWeights
    prepared: peers.Prepared
    with_table: domino_kernels.HeadWeights
    plan: domino_kernels.ChainPlan
    triton_plan: domino_kernels.ChainPlan
    out: domino_kernels.DraftResult
    drawn_out: domino_kernels.DraftResult
    law: dict[str, torch.Tensor]
    planted: torch.Tensor


def ours(o, *, table=True, exact=True, drawn=False, backend="cuda"):
    return draft_chain_out(
        *o[:3],
        o.with_table if table else o.weights,
        out=o.drawn_out if drawn else o.out,
        plan=o.triton_plan if backend == "triton" else o.plan,
        exact=exact and not drawn,
        pool_size=pool_size(len(o.anchor)),
        **(o.law if drawn else {}),
    ).tokens


# mode of ours -> its arguments, by case; a row's params name them
MODES = {
    "exact": {
        "ours": {"table": True},
        "ours/no-table": {"table": False},
        "ours/triton": {"table": True, "backend": "triton"},
    },
    "pool": {
        "ours": {"table": True, "exact": False},
        "ours/triton": {"table": True, "exact": False, "backend": "triton"},
    },
    "sampled": {"ours": {"table": True, "drawn": True}},
}


def triton_table(*operands):
    from bench.peers.head_triton import full_table

    return full_table(*operands)


# peer -> (function, what its rows say besides the case's params)
EXACT = {
    "eager": (peers.full, {}),
    "graph": (peers.full, {}),
    "compile": (peers.compiled, {}),
    "compile-table": (peers.compiled_table, {"table": True}),
    "cudnn": (peers.cudnn, {}),
    "triton-table": (triton_table, {"table": True}),
}
POOLED = {"graph-pool": (peers.pool, {"M": 2048})}
PEERS = {"exact": EXACT, "pool": POOLED, "sampled": {}}
# slow to time or to compile and nowhere the fastest: at the shapes of the README's table only
SLOW = ("eager", "compile", "compile-table", "cudnn")
BARS = {("qwen3-8b", batch) for batch in (1, 8, 64)}
# winners outside the pool change nothing for the peers, which score all ids
RESTART_PEERS = ("graph",)


COLD = 0.01  # a temperature at which the planted winners are drawn: they lead by 25 of it


def pool_size(batch):
    return 2048 if batch <= 8 else 512  # what the op does of itself


@cache
def recall(size):
    """Of the full vocabulary's winners, on the shipped drafter's held-out blocks; None: unknown."""
    counts = Path(__file__).parent.parent / "results" / "pool-recall-smollm2.json"
    rows = json.loads(counts.read_text())["sets"]["all"]["pools"]
    return next((r["recall"] for r in rows if (r["pool"], r["M"]) == ("group", size)), None)


def assert_winners(tokens, base, hidden, anchor, weights):
    """Given the ids before it, no id is behind the fp64 winner by more than 4 bf16 roundings.

    In Torch on the operands' device: the NumPy replay of the tests would take minutes at V = 152k.
    """
    w1, w2, w_ih, w_hh = (getattr(weights, n).double() for n in ("w1", "w2", "w_ih", "w_hh"))
    rounded = lambda t: t.to(DTYPE).double()  # noqa: E731
    state = w_hh.new_zeros(len(anchor), w_hh.size(1))
    for slot, token in enumerate([anchor, *tokens.unbind(1)][:-1]):
        state = rounded(torch.gru_cell(weights.embedding[token].double(), state, w_ih, w_hh))
        scores = base[:, slot].double()
        if slot > 0:
            mixed = torch.cat([hidden[:, slot].double(), state], -1) @ w1.T
            scores = scores + rounded(functional.silu(mixed)) @ w2.T
        best = scores.amax(-1)
        behind = best - scores.gather(1, tokens[:, slot : slot + 1])[:, 0]
        bound = 4 * torch.finfo(DTYPE).eps * best.abs()
        assert (behind <= bound).all(), f"slot {slot}: {behind.max():.3f} behind the winner"


def check_draft_chain(operands, tokens):
    (o,) = operands
    assert_winners(tokens, *o[:4])
    wrong = int((tokens != o.planted).sum())
    assert wrong == 0, f"{wrong} of {tokens.numel()} ids are not the planted winners"


def draft_chain_bytes(shape, batch, case):
    """Each operand once; of E W_ih^T, the hidden rows and, for a pool, W2 the rows looked up."""
    hidden, units, rank, vocab = shape.values()
    scored = vocab if case == "exact" else min(vocab, batch * pool_size(batch))
    head = 3 * units * units + rank * (hidden + units) + scored * rank
    return (head + batch * DRAFTS * (vocab + hidden + 3 * units)) * DTYPE.itemsize


@cache
def make_operands(model, batch, restarts, device, seed):
    """One copy, which the cases of a shape share: exact, pool and sampled."""
    shape, size = MODELS[model], pool_size(batch)
    block = planted_block(shape, batch, seed, device, restarts=restarts, slots=SLOTS, dtype=DTYPE)
    options = dict(num_drafts=DRAFTS, pool_size=size)
    weights = block.weights.with_screen()
    return Operands(
        *block[:3],
        weights,
        peers.prepare(block.weights),
        weights.with_table(),
        ChainPlan(weights, batch, **options),
        ChainPlan(weights, batch, **options, backend="triton"),
        DraftResult.empty(weights, batch, **options),
        DraftResult.empty(weights, batch, **options, sampled=True),
        {
            "temperature": torch.full((batch,), COLD, device=device),
            "seed": torch.arange(batch, device=device),
            "block_start": torch.full((batch,), 100, device=device),
        },
        block.planted,
    )


make_operands.last = None


def draft_chain_case(model, batch, case="exact", restarts=0):
    shape, size = MODELS[model], pool_size(batch)
    rivals = {}
    for name, peer in PEERS[case].items():
        left_out = name in SLOW and (model, batch) not in BARS
        if not left_out and (not restarts or name in RESTART_PEERS):
            rivals[name] = peer

    def make(seed, device):
        if make_operands.last != (model, batch, restarts):  # memory of another shape goes
            make_operands.cache_clear()
            make_operands.last = model, batch, restarts
        return (make_operands(model, batch, restarts, device, seed),)

    providers, params = {}, {}
    for name, mode in MODES[case].items():
        providers[name] = lambda o, mode=mode: ours(o, **mode)
        params[name] = {"table": mode["table"], "M": size, "recall": recall(size)}
        if "backend" in mode:
            params[name]["backend"] = mode["backend"]
    for name, (peer, more) in rivals.items():
        providers[name] = lambda o, peer=peer: peer(*o[:5])
        params[name] = more
    return Case(
        op="draft_chain",
        case=case,
        params={"model": model, "num_drafts": DRAFTS, "data": "planted", "restarts": restarts},
        provider_params=params,
        shape=shape,
        batch=batch,
        make=make,
        providers=providers,
        eager=tuple({"eager"} & rivals.keys()),
        gpu_only=tuple(name for name in providers if "triton" in name),
        check=check_draft_chain,
        bytes=draft_chain_bytes(shape, batch, case),
    )


def cases():
    """The shapes of the README's table first."""
    for model, batch in sorted(BARS):
        for case in MODES:
            yield draft_chain_case(model, batch, case)
        for restarts in (1, DRAFTS - 1):  # one winner outside the pool, and all of them
            yield draft_chain_case(model, batch, restarts=restarts)
    shapes = [(model, batch) for model in MODELS for batch in BATCHES]
    for model, batch in shapes:
        if (model, batch) not in BARS:
            for case in MODES:
                yield draft_chain_case(model, batch, case)
    for model, batch in shapes:
        yield gru_step_case(model, batch)
    yield from lm_head.cases()
    yield from markov.cases()
