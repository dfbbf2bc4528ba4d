"""The drafting head at the shapes of the public checkpoints, and of the drafter shipped here."""

import torch
from torch.nn import functional

import domino_kernels
from bench.ops.head_inputs import drawer, planted_block
from bench.peers import head as peers
from bench.peers.head import DRAFTS
from bench.registry import Case
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
POOL = 2048
# model, batch and restarts: one winner outside the pool, and all of them
OUTSIDE = [("qwen3-8b", batch, restarts) for batch in (1, 8, 64) for restarts in (1, DRAFTS - 1)]


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


def triton_table(*operands):
    from bench.peers.head_triton import full_table

    return full_table(*operands)


# provider -> (function, what its rows say besides the case's params)
EXACT = {
    "eager": (peers.full, {}),
    "graph": (peers.full, {}),
    "compile": (peers.compiled, {}),
    "compile-table": (peers.compiled_table, {"table": True}),
    "cudnn": (peers.cudnn, {}),
    "triton-table": (triton_table, {"table": True}),
}
POOLED = {"graph-pool": (peers.pool, {"M": POOL})}
# seconds a shape to compile: at the shapes that the bars name only
COMPILED = {("qwen3-8b", batch) for batch in (1, 8, 64)}
# winners outside the pool change nothing for the peers, which score all ids
RESTART_PEERS = ("graph",)


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
    block = operands[:4]
    assert_winners(tokens, *block)
    wrong = int((tokens != operands[-1]).sum())
    assert wrong == 0, f"{wrong} of {tokens.numel()} ids are not the planted winners"


def draft_chain_case(model, batch, case="exact", restarts=0):
    shape = MODELS[model]
    hidden, units, rank, vocab = shape.values()
    rivals = dict(EXACT if case == "exact" else POOLED)
    for name in EXACT:
        slow = name.startswith("compile") and (model, batch) not in COMPILED
        if slow or (restarts and name not in RESTART_PEERS):
            rivals.pop(name, None)

    def make(seed, device):
        block = planted_block(
            shape, batch, seed, device, restarts=restarts, slots=SLOTS, dtype=DTYPE
        )
        out = domino_kernels.DraftResult.empty(block.weights, batch)
        plan = domino_kernels.ChainPlan(block.weights, batch)
        prepared = peers.prepare(block.weights)
        return *block[:4], prepared, out, plan, block.planted

    def ours(base, hidden, anchor, weights, prepared, out, plan, planted):
        return domino_kernels.draft_chain_out(
            base, hidden, anchor, weights, out=out, plan=plan
        ).tokens

    providers = {"ours": ours} if case == "exact" else {}
    for name, (peer, _) in rivals.items():
        providers[name] = lambda *operands, peer=peer: peer(*operands[:5])
    head = 3 * units * (hidden + units) + rank * (hidden + units) + vocab * rank
    rows = batch * DRAFTS * (vocab + 2 * hidden)  # base logits, hidden row, embedding row
    if case == "pool":  # the base logits are read all the same; of W2 the pool's rows
        head -= max(0, vocab - batch * POOL) * rank
    return Case(
        op="draft_chain",
        case=case,
        params={"model": model, "num_drafts": DRAFTS, "data": "planted", "restarts": restarts},
        provider_params={name: more for name, (_, more) in rivals.items() if more},
        shape=shape,
        batch=batch,
        make=make,
        providers=providers,
        eager=tuple({"eager"} & rivals.keys()),
        gpu_only=tuple({"triton-table"} & rivals.keys()),
        check=check_draft_chain,
        bytes=(head + rows) * DTYPE.itemsize,
    )


def cases():
    for model in MODELS:
        for batch in BATCHES:
            yield gru_step_case(model, batch)
            yield draft_chain_case(model, batch)
            yield draft_chain_case(model, batch, case="pool")
    for model, batch, restarts in OUTSIDE:
        yield draft_chain_case(model, batch, restarts=restarts)
