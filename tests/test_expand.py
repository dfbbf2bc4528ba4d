"""expand: scores and states against the fp64 reference, children against the law they state."""

import itertools

import numpy as np
import pytest
import torch

from domino_kernels import (
    Expansion,
    HeadWeights,
    draft_chain,
    expand,
    expand_out,
    expand_workspace,
    project_hidden,
)
from domino_kernels.reference.expand import expand_scores, law_of_children, race_values
from domino_kernels.testing import Guarded, to_numpy
from domino_kernels.testing.losslessness import g_test

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# of a score, on inputs of make(): as in test_draft_chain.py, for one step instead of fifteen
EPSILON = {torch.float32: 2e-5, torch.float16: 0.01, torch.bfloat16: 0.05}
FIELDS = ("w_ih", "w_hh", "w1", "w2")


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def make(
    generator, dtype, device="cpu", *, B=2, W=3, S=8, N=5, V=1000, H=72, G=40, R=24, kind="silu"
):
    """Random arguments of expand on which correction and base logits weigh about the same."""
    home = generator.device

    def draw(*size, scale=1.0):
        return (torch.randn(size, generator=generator, device=home) * scale).to(device, dtype)

    def integers(high, *size, low=0):
        return torch.randint(low, high, size, generator=generator, device=home).to(device)

    recurrent = kind in ("silu", "linear", "token")
    fed = 0 if kind in ("token", "row") else H
    state = G if recurrent else R
    weights = HeadWeights(
        w_ih=draw(3 * G, H, scale=2 * H**-0.5) if recurrent else None,
        w_hh=draw(3 * G, G, scale=2 * G**-0.5) if recurrent else None,
        w1=None if kind == "row" else draw(R, fed + state, scale=2 * (fed + state) ** -0.5),
        w2=draw(V, R, scale=3 * R**-0.5),
        embedding=draw(V, H if recurrent else R),
        low_rank="silu" if kind == "token" else kind,
    )
    return dict(
        base_logits=draw(B, S, V, scale=2.0),
        hidden=draw(B, S, H) if fed else None,
        token=integers(V, B, W),
        weights=weights,
        states=draw(B, N, G).tanh() if recurrent else None,
        parent=integers(N, B, W) if recurrent else None,
        depth=integers(S - 1, B, W),
    )


def drawn(generator, arguments):
    B, W = arguments["token"].shape
    device = arguments["token"].device
    integers = lambda low, high, *size: torch.randint(  # noqa: E731
        low, high, size, generator=generator, device=generator.device
    ).to(device)
    return dict(
        seed=integers(-(2**63), 2**63 - 1, B),
        block_start=integers(0, 2**40, B),
        node=integers(0, 1024, B, W),
        temperature=(torch.rand(B, generator=generator, device=generator.device) + 0.4).to(device),
    )


def reference_scores(arguments, shift_label=True, prefix=1):
    weights = arguments["weights"]
    numpy = lambda t: None if t is None else to_numpy(t)  # noqa: E731
    B, S, _ = arguments["base_logits"].shape
    token = arguments["token"].cpu().numpy()
    parent = np.zeros((*token.shape, weights.state_size))
    if arguments.get("states") is not None:
        which = arguments.get("parent")
        which = np.arange(token.shape[1])[None] if which is None else which.cpu().numpy()
        parent = to_numpy(arguments["states"])[np.arange(B)[:, None], which]
    depth = arguments.get("depth", 0)
    depth = depth.cpu().numpy() if isinstance(depth, torch.Tensor) else np.full(token.shape, depth)
    hidden, table = arguments["hidden"], weights.embedding
    seen = arguments["token"].clamp(0, len(table) - 1).unique()
    embedding = np.zeros(table.shape)  # memory that is not touched costs nothing
    embedding[seen.cpu().numpy()] = to_numpy(table[seen])
    return expand_scores(
        to_numpy(arguments["base_logits"]),
        np.zeros((B, S, 0)) if hidden is None else to_numpy(hidden),
        token,
        parent,
        depth,
        [*(numpy(getattr(weights, field)) for field in FIELDS), embedding],
        low_rank=weights.low_rank,
        shift_label=shift_label,
        prefix=prefix,
        dtype=name_of(weights.dtype),
    )


def assert_expansion(out, arguments, epsilon=None, shift_label=True, prefix=1):
    """States and scores near the reference's; children and their law near what the scores say."""
    weights = arguments["weights"]
    epsilon = epsilon or EPSILON[weights.dtype]
    states, scores = reference_scores(arguments, shift_label, prefix)
    if weights.recurrent:
        np.testing.assert_allclose(to_numpy(out.states), states, atol=epsilon / 4)
    B, W, k = out.tokens.shape
    pool = arguments.get("pool")
    temperature = arguments.get("temperature")
    for b, w in itertools.product(range(B), range(W)):
        ids = np.arange(scores.shape[-1]) if pool is None else pool[b].cpu().numpy()
        there = (ids >= 0) & (ids < scores.shape[-1])
        ids, row = ids[there], scores[b, w, ids[there]]
        if out.scores is not None:
            got = to_numpy(out.scores[b, w])
            assert (got[~there] == -np.inf).all()
            np.testing.assert_allclose(got[there], row, atol=epsilon)
        T = 1.0 if temperature is None else float(temperature[b])
        values, slack = row, epsilon
        if arguments.get("seed") is not None:
            key = (int(arguments[n][b]) for n in ("seed", "block_start"))
            values = race_values(row, ids, T, *key, int(arguments["node"][b, w]))
            slack = epsilon / T
        children = out.tokens[b, w].tolist()
        count = min(k, len(ids))
        assert children[count:] == [-1] * (k - count)
        assert len(set(children[:count])) == count
        at = [int(np.flatnonzero(ids == child)[0]) for child in children[:count]]
        best = np.sort(values)[::-1][:count]
        # each child is the best of what is left, or as near to it as the scores are
        np.testing.assert_allclose(values[at], best, atol=2 * slack)
        log_probs, remaining = law_of_children(row, at, T)
        bound = dict(atol=2 * epsilon / T, rtol=1e-5)
        np.testing.assert_allclose(to_numpy(out.log_probs[b, w, :count]), log_probs, **bound)
        np.testing.assert_allclose(to_numpy(out.log_remaining[b, w, :count]), remaining, **bound)
        assert (out.log_probs[b, w, count:] == -torch.inf).all()
        assert (out.log_remaining[b, w, count:] == -torch.inf).all()


SIZES = [  # children, sizes
    (4, dict()),
    (1, dict(B=1, W=1)),
    (8, dict(B=1, W=8)),
    (32, dict(B=3, W=9)),
    (5, dict(B=2, W=33, V=300)),
    (8, dict(B=2, W=2, V=5)),  # fewer candidates than children
    (3, dict(B=2, W=3, V=257, H=33, G=17, R=5)),  # no row is aligned to a vector
    (2, dict(B=9, W=1, H=64, G=24, R=40)),
]
KINDS = ["silu", "linear", "token", "gate", "row"]


@pytest.mark.parametrize("draws", [False, True], ids=["top", "drawn"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("children, sizes", SIZES, ids=str)
def test_against_reference(children, sizes, dtype, draws, device, generator):
    arguments = make(generator, dtype, device, **sizes)
    if draws:
        arguments |= drawn(generator, arguments)
    out = expand(**arguments, children=children, return_scores=True)
    assert_expansion(out, arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_heads(kind, dtype, device, generator):
    arguments = make(generator, dtype, device, kind=kind, R=40)
    out = expand(**arguments, children=4, return_scores=True)
    assert (out.states is None) == (kind in ("gate", "row"))
    assert_expansion(out, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("draws", [False, True], ids=["top", "drawn"])
@pytest.mark.parametrize("M", [1, 64, 300, 1000])
def test_pool(M, draws, dtype, device, generator):
    arguments = make(generator, dtype, device, B=3, W=9)
    ids = torch.rand(3, 1000, generator=generator).argsort(1)[:, :M].int()
    if M > 64:
        ids[1, 10:40] = -1
        ids[2, 5] = 2**31 - 1
    arguments["pool"] = ids.to(device)
    if draws:
        arguments |= drawn(generator, arguments)
    out = expand(**arguments, children=8, return_scores=True)
    assert_expansion(out, arguments)
    if M == 1000:  # the whole vocabulary in another order: the same draws
        whole = expand(**{**arguments, "pool": None}, children=8)
        assert (out.tokens[0] == whole.tokens[0]).float().mean() > 0.98


@pytest.mark.parametrize("shift_label, prefix", [(True, 0), (True, 2), (False, 1), (False, 0)])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_slots(shift_label, prefix, depth, device, generator):
    arguments = make(generator, torch.float32, device) | dict(depth=depth)
    options = dict(shift_label=shift_label, pure_draft_prefix_len=prefix)
    out = expand(**arguments, children=3, return_scores=True, **options)
    assert_expansion(out, arguments, shift_label=shift_label, prefix=prefix)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [0, 2])
def test_anchor_paths_start_from_zero(kind, depth, device, generator):
    arguments = make(generator, torch.float32, device, kind=kind) | dict(
        states=None, parent=None, depth=depth
    )
    out = expand(**arguments, children=3, return_scores=True)
    assert_expansion(out, arguments)


@pytest.mark.parametrize("base_dtype", [torch.float32, torch.bfloat16])
def test_vocabulary_of_the_logits_may_be_shorter(base_dtype, device, generator):
    arguments = make(generator, torch.bfloat16, device)
    wide = arguments["base_logits"].to(base_dtype)
    arguments |= dict(base_logits=wide[:, :, :777], token=arguments["token"] % 777)
    assert_expansion(expand(**arguments, children=4, return_scores=True), arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("B, W", [(1, 3), (3, 7)])
def test_input_table(B, W, dtype, device, generator):
    """The rows of W_ih E come from a table; other values than the reference's by one rounding."""
    arguments = make(generator, dtype, device, B=B, W=W, G=48)
    arguments["weights"] = arguments["weights"].with_table()
    out = expand(**arguments, children=4, return_scores=True)
    assert_expansion(out, arguments, epsilon=4 * EPSILON[dtype])
    anchors = arguments | dict(states=None, parent=None)
    assert_expansion(expand(**anchors, children=4), anchors, epsilon=4 * EPSILON[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind, B, H", [("silu", 2, 72), ("gate", 1, 72), ("silu", 9, 33)])
def test_hoisted_hidden_rows(kind, B, H, dtype, device, generator):
    arguments = make(generator, dtype, device, B=B, H=H, kind=kind, R=40)
    hidden, weights = arguments["hidden"], arguments["weights"]
    hoisted = project_hidden(hidden, weights)
    assert hoisted.dtype == torch.float32 and hoisted.shape == (B, 8, 40)
    expected = to_numpy(hidden) @ to_numpy(weights.w1[:, :H]).T
    np.testing.assert_allclose(to_numpy(hoisted), expected, atol=2e-5)
    guard = Guarded((B, 8, 40), torch.float32, device)
    strided = torch.full((8, B, H + 8), torch.nan, dtype=dtype, device=device)[:, :, :H]
    strided.copy_(hidden.transpose(0, 1))
    project_hidden(strided.transpose(0, 1), weights, out=guard.tensor)
    assert torch.equal(guard.check(), hoisted)
    raw = expand(**arguments, children=4, return_scores=True)
    out = expand(
        **arguments | dict(hidden=None, from_hidden=hoisted), children=4, return_scores=True
    )
    for name, a, b in zip(Expansion._fields, out, raw, strict=True):
        assert a is b is None or torch.equal(a, b), name


def test_one_path_and_child_is_the_chain(device, generator):
    """Level by level, the greedy path of expand is draft_chain."""
    arguments = make(generator, torch.float32, device, B=3, W=1)
    base, hidden, weights = (arguments[name] for name in ("base_logits", "hidden", "weights"))
    anchor = arguments["token"][:, 0]
    expected = draft_chain(base, hidden, anchor, weights, num_drafts=7)
    token, states = anchor[:, None], None
    for depth in range(7):
        out = expand(base, hidden, token, weights, children=1, depth=depth, states=states)
        token, states = out.tokens[:, :, 0], out.states
        assert torch.equal(token[:, 0], expected[:, depth])


@pytest.mark.parametrize("draws", [False, True], ids=["top", "drawn"])
@pytest.mark.parametrize("M", [None, 96])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_path_does_not_depend_on_the_others(dtype, M, draws, device, generator):
    arguments = make(generator, dtype, device, B=5, W=7) | dict(parent=None)
    arguments["states"] = torch.randn(5, 7, 40, generator=generator).to(device, dtype)
    arguments |= drawn(generator, arguments)
    if not draws:
        arguments |= dict(seed=None)
    if M is not None:
        ids = torch.rand(5, 1000, generator=generator).argsort(1)[:, :M].int()
        arguments["pool"] = ids.to(device)
    whole = expand(**arguments, children=6, return_scores=True)
    again = expand(**arguments, children=6, return_scores=True)
    for name, a, b in zip(Expansion._fields, whole, again, strict=True):
        assert torch.equal(a, b), name

    def rows(b, w):
        cut = {"weights": arguments["weights"]}
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                per_path = name in ("token", "depth", "node", "states")
                cut[name] = value[b][:, w].contiguous() if per_path else value[b]
        return cut

    for b, w in [([2], [3]), ([4, 1], [6, 0, 2]), ([0, 1, 2], [5])]:
        part = expand(**rows(b, w), children=6, return_scores=True)
        for name, a, e in zip(Expansion._fields, part, whole, strict=True):
            assert torch.equal(a, e[b][:, w]), f"{name} of rows {b}, paths {w}"


def test_padding_paths_have_no_children(device, generator):
    arguments = make(generator, torch.bfloat16, device, B=3, W=9)
    whole = expand(**arguments, children=4, return_scores=True)
    arguments["token"][0, 2:] = -1
    arguments["token"][2] = -1
    out = expand(**arguments, children=4, return_scores=True)
    gone = arguments["token"] < 0
    assert (out.tokens[gone] == -1).all()
    for value in (out.log_probs, out.log_remaining, out.scores):
        assert (value[gone] == -torch.inf).all()
    for a, b in zip(out, whole, strict=True):
        assert torch.equal(a[~gone], b[~gone])


def test_not_finite_scores_take_no_part(device, generator):
    arguments = make(generator, torch.float32, device, B=1, W=1, V=300) | dict(depth=0)
    base = arguments["base_logits"]
    base[0, 0] = -torch.inf
    base[0, 0, :5] = torch.tensor([torch.nan, torch.inf, 1.0, 2.0, 1.0], device=device)
    for draws in (False, True):
        if draws:
            arguments |= drawn(generator, arguments) | dict(temperature=None)
        out = expand(**arguments, children=4, return_scores=True)
        assert sorted(out.tokens[0, 0].tolist()) == [-1, 2, 3, 4]
        log_probs, remaining = law_of_children(to_numpy(base[0, 0]), out.tokens[0, 0, :3].tolist())
        np.testing.assert_allclose(to_numpy(out.log_probs[0, 0, :3]), log_probs, atol=1e-6)
        np.testing.assert_allclose(to_numpy(out.log_remaining[0, 0, :3]), remaining, atol=1e-6)
        assert (out.scores[0, 0, [0, 1, 5]] == -torch.inf).all()
    assert expand(**arguments | dict(seed=None), children=3).tokens[0, 0].tolist() == [3, 2, 4]
    base[0, 0] = torch.nan
    out = expand(**arguments, children=4)
    assert (out.tokens == -1).all() and (out.log_probs == -torch.inf).all()


def test_temperature_zero(device, generator):
    arguments = make(generator, torch.float32, device, B=2, W=2)
    top = expand(**arguments, children=3)
    zero = torch.zeros(2, device=device)
    cold = expand(**arguments, children=3, temperature=zero)
    assert torch.equal(cold.tokens, top.tokens) and torch.equal(cold.log_probs, top.log_probs)
    out = expand(**arguments | drawn(generator, arguments) | dict(temperature=zero), children=3)
    assert torch.equal(out.tokens[:, :, 0], top.tokens[:, :, 0])
    assert (out.tokens[:, :, 1:] == -1).all()
    assert (out.log_probs[:, :, 0] == 0).all() and (out.log_remaining[:, :, 0] == 0).all()
    bad = expand(**arguments, children=3, temperature=zero - 1)
    assert (bad.tokens == -1).all()


def one_slot(scores, rows, device, seed=0):
    """Arguments whose every row draws from softmax(scores) at depth 0, each with its own seed."""
    V = len(scores)
    zeros = lambda *size: torch.zeros(size, device=device)  # noqa: E731
    weights = HeadWeights(zeros(3, 1), zeros(3, 1), zeros(1, 2), zeros(V, 1), zeros(V, 1))
    count = torch.zeros(rows, dtype=torch.int64, device=device)
    return dict(
        base_logits=torch.tensor(scores, device=device).expand(rows, 1, V),
        hidden=zeros(rows, 1, 1),
        token=count[:, None].clone(),
        weights=weights,
        seed=torch.arange(rows, device=device) + seed,
        block_start=count + 17,
        node=count[:, None] + 5,
    )


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("T", [1.0, 0.6])
def test_draws_follow_the_law_without_replacement(T, pooled, device):
    """The joint law of three draws of five, enumerated: P(a) P(b | not a) P(c | not a, b)."""
    scores, rows = [0.3, 1.7, -0.9, 1.1, 0.0], 60000
    arguments = one_slot(scores, rows, device)
    if pooled:
        pool = torch.tensor([4, 1, -1, 0, 3, 2], dtype=torch.int32, device=device)
        arguments["pool"] = pool.expand(rows, 6).contiguous()
    arguments["temperature"] = torch.full((rows,), T, device=device)
    out = expand(**arguments, children=3)
    p = np.exp(np.array(scores) / T)
    p /= p.sum()
    sequences = list(itertools.permutations(range(5), 3))
    law = [p[a] * p[b] / (1 - p[a]) * p[c] / (1 - p[a] - p[b]) for a, b, c in sequences]
    code = (out.tokens[:, 0] * torch.tensor([25, 5, 1], device=device)).sum(-1).cpu().numpy()
    counts = np.array([(code == 25 * a + 5 * b + c).sum() for a, b, c in sequences])
    assert counts.sum() == rows
    assert g_test(counts, np.array(law)).p_value > 1e-9
    wrong = [p[a] * p[b] * p[c] for a, b, c in sequences]  # negative control: no renormalising
    assert g_test(counts, np.array(wrong) / sum(wrong)).p_value < 1e-9
    for row in range(0, rows, 5000):
        children = out.tokens[row, 0].tolist()
        log_probs, remaining = law_of_children(np.array(scores), children, T)
        np.testing.assert_allclose(to_numpy(out.log_probs[row, 0]), log_probs, atol=2e-6)
        np.testing.assert_allclose(to_numpy(out.log_remaining[row, 0]), remaining, atol=2e-6)


def test_nodes_and_blocks_have_their_own_noise(device):
    """Key by key: the second draw of a node says nothing about the draw of another."""
    scores = [0.0, 0.0, 0.0]
    arguments = one_slot(scores, 20000, device)
    first = expand(**arguments, children=1).tokens[:, 0, 0]
    for change in (
        dict(node=arguments["node"] + 1),
        dict(block_start=arguments["block_start"] + 1),
    ):
        other = expand(**arguments | change, children=1).tokens[:, 0, 0]
        counts = torch.bincount(first * 3 + other, minlength=9).cpu().numpy()
        assert g_test(counts, np.full(9, 1 / 9)).p_value > 1e-9


def test_remaining_mass_does_not_cancel(device):
    """After a child of mass 1 - 1e-9 (and one of 1 - 1e-9 of the rest) R keeps its digits."""
    scores = [0.0, -21.0, -42.0, -42.5, -60.0]
    arguments = one_slot(scores, 4000, device)
    out = expand(**arguments, children=4)
    ordinary = (out.tokens[:, 0, :2] == torch.tensor([0, 1], device=device)).all(-1).nonzero()
    assert len(ordinary) > 3900
    for row in ordinary[:50, 0].tolist():
        log_probs, remaining = law_of_children(np.array(scores), out.tokens[row, 0].tolist())
        np.testing.assert_allclose(to_numpy(out.log_probs[row, 0]), log_probs, rtol=1e-5, atol=1e-9)
        np.testing.assert_allclose(
            to_numpy(out.log_remaining[row, 0]), remaining, rtol=1e-5, atol=1e-9
        )


def test_no_more_children_than_support(device):
    """A weight below 2^-100 of the greatest has no mass: it is not drawn, but may be a top-k id."""
    arguments = one_slot([0.0, -1.0, -80.0, -90.0], 500, device)
    out = expand(**arguments, children=4)
    assert (out.tokens[:, 0, 2:] == -1).all() and (out.tokens[:, 0, :2] >= 0).all()
    assert (expand(**arguments | dict(seed=None), children=4).tokens >= 0).all()


def test_ties_go_to_the_lowest_id(device):
    arguments = one_slot([1.0, 2.0, 2.0, 1.0, 2.0], 1, device) | dict(seed=None)
    assert expand(**arguments, children=4).tokens[0, 0].tolist() == [1, 2, 4, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("draws", [False, True], ids=["top", "drawn"])
def test_writes_its_outputs_and_nothing_else(dtype, draws, device, generator):
    arguments = make(generator, dtype, device, B=3, W=5)
    if draws:
        arguments |= drawn(generator, arguments)
    expected = expand(**arguments, children=6, return_scores=True)
    guards = [Guarded(tuple(t.shape), t.dtype, device) for t in expected]
    needed = expand_workspace(3, 5, 6, arguments["weights"])
    workspace = Guarded((needed.numel(),), torch.uint8, device)
    out = Expansion(*(guard.tensor for guard in guards))
    for _ in range(2):  # the second time over what the first has left in the workspace
        assert expand_out(**arguments, out=out, workspace=workspace.tensor) is out
    workspace.check(all_written=False)
    for guard, value in zip(guards, expected, strict=True):
        assert torch.equal(guard.check(), value)


def test_states_may_be_rows_of_a_pool_of_nodes(device, generator):
    """A tree keeps one tensor of node states: parents are read from it, children written to it."""
    arguments = make(generator, torch.bfloat16, device, B=2, W=3)
    expected = expand(**arguments, children=4)
    nodes = torch.full((2, 20, 40), torch.nan, dtype=torch.bfloat16, device=device)
    nodes[:, 2:7] = arguments["states"]
    arguments |= dict(states=nodes, parent=arguments["parent"] + 2)
    out = expected._replace(states=nodes[:, 10:13], tokens=torch.empty_like(expected.tokens))
    workspace = expand_workspace(2, 3, 4, arguments["weights"])
    expand_out(**arguments, out=out, workspace=workspace)
    assert torch.equal(out.states, expected.states) and torch.equal(out.tokens, expected.tokens)
    assert nodes[:, 7:10].isnan().all() and nodes[:, 13:].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("M", [None, 2048])
@pytest.mark.parametrize("draws", [False, True], ids=["top", "drawn"])
@pytest.mark.parametrize("B, W", [(1, 8), (8, 4), (2, 20)])
def test_checkpoint_shapes(B, W, draws, M, generator):
    generator = torch.Generator("cuda").manual_seed(1)
    sizes = dict(B=B, W=W, V=151936, H=4096, G=1024, R=256)
    arguments = make(generator, torch.bfloat16, "cuda", **sizes)
    if M is not None:
        ids = torch.rand(B, 151936, generator=generator, device="cuda").argsort(1)[:, :M]
        arguments["pool"] = ids.int().contiguous()
    if draws:
        arguments |= drawn(generator, arguments)
    assert_expansion(expand(**arguments, children=8, return_scores=True), arguments, epsilon=0.1)


@pytest.mark.gpu
def test_graph_replay(generator, graph_replay):
    arguments = make(generator, torch.bfloat16, "cuda", B=2, W=8)
    arguments |= drawn(generator, arguments)
    out = expand(**arguments, children=4, return_scores=True)
    workspace = expand_workspace(2, 8, 4, arguments["weights"])
    replay = graph_replay(lambda: expand_out(**arguments, out=out, workspace=workspace))
    for step in range(3):
        arguments["token"].copy_(torch.randint(1000, (2, 8)))
        arguments["depth"].fill_(step)
        arguments["seed"].add_(1)
        arguments["temperature"].mul_(0.9)
        replay()
        expected = expand(**arguments, children=4, return_scores=True)
        for a, b in zip(out, expected, strict=True):
            assert torch.equal(a, b)


def arguments_of_errors(generator):
    arguments = make(generator, torch.float32)
    return arguments | drawn(generator, arguments) | dict(children=4)


ERRORS = [
    (dict(weights={}), TypeError, "weights: got dict, expected HeadWeights"),
    (dict(children=0), ValueError, r"children: got 0, expected 1\.\.32"),
    (dict(children=33), ValueError, r"children: got 33, expected 1\.\.32"),
    (dict(token=torch.zeros(2, 3)), TypeError, "token: got torch.float32, expected torch.int64"),
    (dict(depth=-1), ValueError, "depth: got -1, expected at least 0"),
    (
        dict(depth=torch.zeros(2, dtype=torch.int64)),
        ValueError,
        r"depth: got shape \[2\], expected",
    ),
    (dict(node=None), ValueError, "node: got None, expected a tensor with seed"),
    (dict(block_start=None), ValueError, "block_start: got None, expected a tensor with seed"),
    (dict(hidden=None), TypeError, "hidden: got NoneType, expected a tensor"),
    (
        dict(states=torch.zeros(2, 2, 40), parent=None),
        ValueError,
        "states: got 2 rows, expected one",
    ),
    (dict(states=torch.zeros(2, 0, 40)), ValueError, "states: got 0 rows, expected at least 1"),
    (dict(base_logits=torch.zeros(2, 0, 60)), ValueError, "base_logits: got 0 slots, expected"),
    (dict(pool=torch.zeros(2, 5)), TypeError, "pool: got torch.float32, expected torch.int32"),
    (dict(base_logits=torch.zeros(2, 8, 1001)), ValueError, r"base_logits: got 1001 ids, expected"),
    (dict(temperature=torch.ones(3)), ValueError, r"temperature: got shape \[3\], expected \[2\]"),
    (dict(pure_draft_prefix_len=-1), ValueError, "pure_draft_prefix_len: got -1, expected"),
    (
        dict(hidden=torch.zeros(2, 8, 72, requires_grad=True)),
        ValueError,
        "hidden: got a tensor that",
    ),
]


@pytest.mark.parametrize("change, error, message", ERRORS, ids=[e[2] for e in ERRORS])
def test_errors(change, error, message, generator):
    with pytest.raises(error, match=f"expand: {message}"):
        expand(**arguments_of_errors(generator) | change)
