"""draft_chain with heads of another kind, against their own definitions: DSpark's Markov heads and
the token-only GRU head of DeLS-Spec."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from domino_kernels import ChainPlan, DraftResult, HeadWeights, draft_chain, draft_chain_out
from domino_kernels.reference.expand import chain_scores
from domino_kernels.testing import to_numpy

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPSILON = {torch.float32: 5e-5, torch.float16: 0.02, torch.bfloat16: 0.05}
V, H, G, R, S = 700, 72, 40, 24, 16


class Markov(nn.Module):
    """bias = W2 W1[previous token] (DSpark, equation 5)."""

    def __init__(self, rank=R, vocab=V):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, vocab, bias=False)

    def rollout(self, base, hidden, anchor):
        token, tokens, scores = anchor, [], []
        for slot in range(base.size(1)):
            logits = base[:, slot] + self.markov_w2(self.latent(hidden[:, slot], token))
            score, token = logits.max(-1)
            tokens.append(token)
            scores.append(score)
        return torch.stack(tokens, 1), torch.stack(scores, 1)

    def latent(self, hidden, token):
        return self.markov_w1(token)


class GatedMarkov(Markov):
    """A sigmoid gate of the hidden row and the previous token's row scales that row."""

    def __init__(self, rank=R, vocab=V):
        super().__init__(rank, vocab)
        self.gate_proj = nn.Linear(H + rank, rank, bias=False)

    def latent(self, hidden, token):
        row = self.markov_w1(token)
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, row], -1))) * row


class TokenGru(nn.Module):
    """Logits of the tokens alone: low_rank_lm_head(act(rank_proj(GRU state))) (DeLS-Spec)."""

    def __init__(self, activation, units=G, rank=R):
        super().__init__()
        self.embedding = nn.Embedding(V, H)
        self.prefix_gru = nn.GRU(H, units, bias=False, batch_first=True)
        self.rank_proj = nn.Linear(units, rank, bias=False)
        self.low_rank_lm_head = nn.Linear(rank, V, bias=False)
        self.activation = activation

    def rollout(self, base, hidden, anchor):
        token, state, tokens, scores = anchor, None, [], []
        for slot in range(base.size(1)):
            _, state = self.prefix_gru(self.embedding(token)[:, None], state)
            local = self.low_rank_lm_head(self.activation(self.rank_proj(state[0])))
            score, token = (base[:, slot] + local).max(-1)
            tokens.append(token)
            scores.append(score)
        return torch.stack(tokens, 1), torch.stack(scores, 1)


HEADS = {
    "row": Markov,
    "gate": GatedMarkov,
    "silu": lambda: TokenGru(functional.silu),
    "linear": lambda: TokenGru(lambda z: z),
    # sizes that one persistent launch takes on a GPU
    "row-block": lambda: Markov(96),
    "gate-block": lambda: GatedMarkov(96),
    "row-wide": lambda: Markov(256, 5000),
    "gate-wide": lambda: GatedMarkov(256, 5000),
    "silu-block": lambda: TokenGru(functional.silu, 64, 32),
    "linear-block": lambda: TokenGru(lambda z: z, 64, 32),
}
MARKOV_BLOCKS = ["row-block", "gate-block", "row-wide", "gate-wide"]


def make(kind, dtype, device, B=3):
    """A module with random weights, its HeadWeights by their public names, and a block."""
    torch.manual_seed(5)
    module = HEADS[kind]().to(dtype)
    for name, parameter in module.named_parameters():
        parameter.data.normal_(0, 1 if "markov_w1" in name else 2 * parameter.size(1) ** -0.5)
    module.to(device).requires_grad_(False)
    names = module.state_dict()
    if kind.startswith(("row", "gate")):
        names = {f"markov_head.{name}": value for name, value in names.items()}
        weights = HeadWeights.from_state_dict(names)
    else:
        activation = "identity" if "linear" in kind else "silu"
        table = names.pop("embedding.weight")
        weights = HeadWeights.from_state_dict(names, table, rank_activation=activation)
    assert weights.low_rank == kind.split("-")[0]
    vocab = weights.vocab_size
    base = (torch.randn(B, S, vocab) * 2).to(device, dtype)
    hidden = torch.randn(B, S, H).to(device, dtype) if weights.low_rank == "gate" else None
    return module, weights, base, hidden, torch.randint(vocab, (B,)).to(device)


@pytest.mark.parametrize("B", [1, 3, 19])
@pytest.mark.parametrize("kind", HEADS)
def test_against_the_modules(kind, B, device):
    module, weights, base, hidden, anchor = make(kind, torch.float32, device, B)
    rows = base.new_zeros(B, S, 1) if hidden is None else hidden
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=False):  # cuDNN's GRU is TF32
        tokens, scores = module.rollout(base, rows, anchor)
    got = draft_chain(
        base, hidden, anchor, weights, num_drafts=S, pure_draft_prefix_len=0, return_scores=True
    )
    assert torch.equal(got[0], tokens)
    torch.testing.assert_close(got[1], scores, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shift_label, prefix", [(True, 0), (True, 2), (False, 0), (False, 1)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", HEADS)
def test_replay(kind, dtype, shift_label, prefix, device):
    """Given the ids before it, each id is the fp64 winner or within epsilon of it."""
    _, weights, base, hidden, anchor = make(kind, dtype, device, B=9)
    options = dict(shift_label=shift_label, num_drafts=15)
    tokens, scores = draft_chain(
        base, hidden, anchor, weights, pure_draft_prefix_len=prefix, return_scores=True, **options
    )
    arrays = [getattr(weights, name) for name in ("w_ih", "w_hh", "w1", "w2", "embedding")]
    expected = chain_scores(
        tokens.cpu().numpy(),
        to_numpy(base),
        np.zeros((9, S, 0)) if hidden is None else to_numpy(hidden),
        anchor.cpu().numpy(),
        [None if a is None else to_numpy(a) for a in arrays],
        shift_label=shift_label,
        prefix=prefix,
        low_rank=weights.low_rank,
        dtype=str(dtype).removeprefix("torch."),
    )
    of_ids = np.take_along_axis(expected, tokens.cpu().numpy()[..., None], -1)[..., 0]
    assert (expected.max(-1) - of_ids).max() <= EPSILON[dtype]
    np.testing.assert_allclose(to_numpy(scores), of_ids, atol=EPSILON[dtype])
    late = draft_chain(base, hidden, anchor.roll(1), weights, pure_draft_prefix_len=0, **options)
    assert not torch.equal(late, tokens)  # the anchor matters


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", HEADS)
def test_a_row_does_not_depend_on_the_others(kind, dtype, device):
    _, weights, base, hidden, anchor = make(kind, dtype, device, B=19)
    whole = draft_chain(base, hidden, anchor, weights, return_scores=True)
    for rows in (slice(0, 1), slice(7, 8), slice(3, 12)):
        part = base[rows], None if hidden is None else hidden[rows], anchor[rows]
        alone = draft_chain(*part, weights, return_scores=True)
        assert torch.equal(alone[0], whole[0][rows]) and torch.equal(alone[1], whole[1][rows])


def assert_exact(tokens, scores, weights, base, hidden, anchor, prefix):
    """By Torch in float64, on the operands' device: no id is behind the winner by more than
    epsilon, given the ids before it."""
    table, w2 = weights.embedding.double(), weights.w2.double()
    rounded = lambda x: x.to(weights.dtype).double()  # noqa: E731
    last = anchor
    for j in range(tokens.size(1)):
        expected = base[:, j].double()
        if j >= prefix:
            u = table[last]
            if weights.low_rank == "gate":
                mixed = torch.cat([hidden[:, j].double(), u], -1) @ weights.w1.double().T
                u = rounded(mixed.sigmoid() * u)
            expected = expected + u @ w2.T
        found = expected.gather(1, tokens[:, j : j + 1])[:, 0]
        assert (expected.amax(1) - found).max() <= EPSILON[weights.dtype]
        assert (found - scores[:, j].double()).abs().max() <= EPSILON[weights.dtype]
        last = tokens[:, j]


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("B", [1, 3, 40])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("kind", MARKOV_BLOCKS)
def test_exact_markov_drafts_do_not_depend_on_the_pool(kind, dtype, B, prefix, device):
    """Whether a winner is in its pool, found by a certificate, or by the dense steps behind two."""
    if device == "cpu" and ("wide" in kind or B > 3):
        pytest.skip("sizes of the kernels")
    _, weights, base, hidden, anchor = make(kind, dtype, device, B)
    whole = None
    for size in (16, 48, 512, 2048):
        found = draft_chain(
            base, hidden, anchor, weights, pure_draft_prefix_len=prefix, pool_size=size,
            return_details=True,
        )  # fmt: skip
        assert_exact(found.tokens, found.scores, weights, base, hidden, anchor, prefix)
        whole = found if whole is None else whole
        assert torch.equal(found.tokens, whole.tokens)
        if device == "cuda":  # the twin has no one order of a sum
            assert torch.equal(found.scores, whole.scores)
            assert size > 16 or found.restarts.float().mean() > 1
    pooled = draft_chain(
        base, hidden, anchor, weights, exact=False, pool_size=weights.vocab_size if "block" in kind
        else 2048, pure_draft_prefix_len=prefix, return_scores=True,
    )  # fmt: skip
    if "block" in kind:  # all ids
        assert torch.equal(pooled[0], whole.tokens)
        assert device == "cpu" or torch.equal(pooled[1], whole.scores)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", MARKOV_BLOCKS)
def test_markov_drafts_in_a_graph(kind):
    """Replays on other inputs are what eager calls give."""
    _, weights, base, hidden, anchor = make(kind, torch.bfloat16, "cuda", B=6)
    plan = ChainPlan(weights, 6)
    out = DraftResult.empty(weights, 6)
    call = lambda out, plan: draft_chain_out(  # noqa: E731
        base, hidden, anchor, weights, out=out, plan=plan, pool_size=64
    )
    call(out, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(out, plan)
    for _ in range(20):
        base.copy_(base.roll(1, 2))
        anchor.copy_(anchor.roll(1))
        graph.replay()
        wanted = call(DraftResult.empty(weights, 6), ChainPlan(weights, 6))
        for got, right in zip(out[:3], wanted[:3]):
            assert torch.equal(got, right)


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("kind", ["silu-block", "linear-block", "row-block", "gate-block"])
def test_drafts_are_drawn(kind, table, device):
    """From the pool's law, in one persistent launch on a GPU: its logits are the scores."""
    dtype = torch.bfloat16
    _, weights, base, hidden, anchor = make(kind, dtype, device, B=5)
    if table and not weights.recurrent:
        pytest.skip("no GRU, no table")
    number = torch.arange(5, device=device)
    result = draft_chain(
        base,
        hidden,
        anchor,
        weights.with_table() if table else weights,
        exact=False,
        pool_size=50,
        temperature=torch.full((5,), 0.9, device=device),
        seed=number,
        block_start=number,
    )
    arrays = [getattr(weights, name) for name in ("w_ih", "w_hh", "w1", "w2", "embedding")]
    expected = chain_scores(
        result.tokens.cpu().numpy(),
        to_numpy(base),
        np.zeros((5, S, 0)) if hidden is None else to_numpy(hidden),
        anchor.cpu().numpy(),
        [None if a is None else to_numpy(a) for a in arrays],
        shift_label=True,
        prefix=1,
        low_rank=weights.low_rank,
        dtype="bfloat16",
    )
    ids = result.pool_ids.cpu().numpy()
    np.testing.assert_allclose(
        result.pool_logits.cpu().numpy(),
        np.take_along_axis(expected, ids, -1),
        atol=2 * EPSILON[dtype],
    )
    assert len({tuple(row) for row in result.tokens.tolist()}) > 1


def fields(**changes):
    shapes = dict(w_ih=(12, 8), w_hh=(12, 4), w1=(3, 12), w2=(50, 3), embedding=(50, 8))
    return {n: None if s is None else torch.zeros(s) for n, s in (shapes | changes).items()}


NO_GRU = dict(w_ih=None, w_hh=None, embedding=(50, 3))
BAD = [
    (fields(), "tanh", ValueError, "low_rank: got 'tanh', expected one of silu, linear, gate, row"),
    (fields(w1=(3, 5)), "silu", ValueError, r"w1: got shape \[3, 5\], expected \[3, 12\]"),
    (fields(**NO_GRU), "silu", TypeError, "w_hh: got NoneType, expected a tensor"),
    (fields(w1=None), "row", ValueError, "w_ih: got a tensor, expected None with low_rank='row'"),
    (fields(**NO_GRU), "row", ValueError, "w1: got a tensor, expected None with low_rank='row'"),
    (fields(**NO_GRU | dict(w1=(3, 2))), "gate", ValueError, r"w1: got shape \[3, 2\], expected"),
    (fields(**NO_GRU | dict(w1=None)), "gate", TypeError, "w1: got NoneType, expected a tensor"),
]


@pytest.mark.parametrize("tensors, low_rank, error, message", BAD, ids=[b[3] for b in BAD])
def test_bad_weights(tensors, low_rank, error, message):
    with pytest.raises(error, match=f"HeadWeights: {message}"):
        HeadWeights(**tensors, low_rank=low_rank)


def test_sizes_and_memory():
    weights = HeadWeights(**fields(**NO_GRU | dict(w1=(3, 9))), low_rank="gate")
    assert not weights.recurrent and weights.gru_size == 0
    assert (weights.hidden_size, weights.state_size, weights.input_size) == (6, 3, 3)
    assert repr(weights) == (
        "HeadWeights(gate, V=50, H=6, G=0, R=3, float32, cpu, 0.0 MiB + 0.0 MiB embedding of the "
        "target)"
    )
    token_gru = HeadWeights(**fields(w1=(3, 4)))
    assert (token_gru.hidden_size, token_gru.state_size, token_gru.input_size) == (0, 4, 8)


def test_unknown_activation():
    names = ("prefix_gru.weight_ih_l0", "rank_proj.weight", "low_rank_lm_head.weight")
    with pytest.raises(ValueError, match="rank_activation: got 'relu', expected 'silu' or"):
        HeadWeights.from_state_dict(dict.fromkeys(names), rank_activation="relu")
