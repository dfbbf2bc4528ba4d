"""The drafting head at the shapes of the public checkpoints, and of the drafter shipped here."""

import torch
from torch.nn import functional

import domino_kernels
from bench.registry import Case
from domino_kernels import HeadWeights
from domino_kernels.reference.head import gru_step as reference_gru_step
from domino_kernels.testing import assert_error_rule, to_numpy

# H hidden size, G GRU units, R rank of the correction, V vocabulary
MODELS = {
    "smollm2-135m": {"H": 576, "G": 256, "R": 96, "V": 49152},
    "qwen3-4b": {"H": 2560, "G": 1024, "R": 256, "V": 151936},
    "qwen3-8b": {"H": 4096, "G": 1024, "R": 256, "V": 151936},
}
BATCHES = (1, 4, 16, 64)
DRAFTS, SLOTS = 15, 16
DTYPE = torch.bfloat16


def drawer(seed, device):
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*size, scale=1.0):
        return torch.randn(size, generator=generator, device=device, dtype=DTYPE).mul_(scale)

    return draw


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


def torch_draft_chain(base, hidden, anchor, weights):
    """The loop in eager Torch, the part that needs no token hoisted: the peer."""
    from_hidden = functional.linear(hidden, weights.w1[:, : hidden.size(-1)])
    w1_state = weights.w1[:, hidden.size(-1) :]
    state, token, tokens = hidden.new_zeros(len(anchor), weights.gru_size), anchor, []
    for slot in range(DRAFTS):
        state = torch.gru_cell(weights.embedding[token], state, weights.w_ih, weights.w_hh)
        scores = base[:, slot]
        if slot > 0:
            low_rank = functional.silu(from_hidden[:, slot] + functional.linear(state, w1_state))
            scores = scores + functional.linear(low_rank, weights.w2)
        token = scores.argmax(-1)
        tokens.append(token)
    return torch.stack(tokens, 1)


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


def draft_chain_case(model, batch):
    shape = MODELS[model]
    hidden, units, rank, vocab = shape.values()

    def make(seed, device):
        draw = drawer(seed, device)
        weights = HeadWeights(
            w_ih=draw(3 * units, hidden, scale=2 * hidden**-0.5),
            w_hh=draw(3 * units, units, scale=2 * units**-0.5),
            w1=draw(rank, hidden + units, scale=2 * (hidden + units) ** -0.5),
            w2=draw(vocab, rank, scale=3 * rank**-0.5),
            embedding=draw(vocab, hidden),
        )
        anchor = torch.arange(batch, device=device) * 7 % vocab
        tokens = torch.empty(batch, DRAFTS, dtype=torch.int64, device=device)
        scores = torch.empty(batch, DRAFTS, device=device)
        workspace = domino_kernels.draft_chain_workspace(batch, DRAFTS, weights)
        base = draw(batch, SLOTS, vocab, scale=2.0)
        return base, draw(batch, SLOTS, hidden), anchor, weights, tokens, scores, workspace

    def ours(base, hidden, anchor, weights, tokens, scores, workspace):
        return domino_kernels.draft_chain_out(
            base, hidden, anchor, weights, out=tokens, scores=scores, workspace=workspace
        )

    head = 3 * units * (hidden + units) + rank * (hidden + units) + vocab * rank
    rows = batch * DRAFTS * (vocab + 2 * hidden)  # base logits, hidden row, embedding row
    return Case(
        op="draft_chain",
        case="full",
        params={"model": model, "num_drafts": DRAFTS},
        shape=shape,
        batch=batch,
        make=make,
        providers={"ours": ours, "torch": lambda *operands: torch_draft_chain(*operands[:4])},
        check=lambda operands, tokens: assert_winners(tokens, *operands[:4]),
        bytes=(head + rows) * DTYPE.itemsize,
    )


def cases():
    for case in (gru_step_case, draft_chain_case):
        for model in MODELS:
            for batch in BATCHES:
                yield case(model, batch)
