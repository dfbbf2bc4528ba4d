"""draft_tree: each candidate against a walk of the fp64 reference, the choice of paths, the law."""

import itertools

import numpy as np
import pytest
import torch

from domino_kernels import HeadWeights, TreeDraft, TreePlan, draft_chain, draft_tree
from domino_kernels.reference.expand import expand_scores, law_of_children, log_law
from domino_kernels.testing import to_numpy
from domino_kernels.testing.losslessness import g_test

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPSILON = {torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.2}  # of a path's log_prob


def make(generator, dtype, device="cpu", *, B=2, S=8, V=200, H=40, G=24, R=16, kind="silu"):
    home = generator.device

    def draw(*size, scale=1.0):
        return (torch.randn(size, generator=generator, device=home) * scale).to(device, dtype)

    recurrent = kind == "silu"
    weights = HeadWeights(
        w_ih=draw(3 * G, H, scale=2 * H**-0.5) if recurrent else None,
        w_hh=draw(3 * G, G, scale=2 * G**-0.5) if recurrent else None,
        w1=draw(R, H + G, scale=2 * (H + G) ** -0.5) if recurrent else None,
        w2=draw(V, R, scale=2 * R**-0.5),
        embedding=draw(V, H if recurrent else R),
        low_rank=kind,
    )
    anchor = torch.randint(V, (B,), generator=generator, device=home).to(device)
    hidden = draw(B, S, H) if recurrent else None
    return draw(B, S, V, scale=2.0), hidden, anchor, weights


def reference_paths(tree, base, hidden, anchor, weights, row, temperature=1.0, **options):
    """For each candidate of a request: (fp64 log_prob of its path, law of its parent [V])."""
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    tensors = ("w_ih", "w_hh", "w1", "w2", "embedding")
    arrays = [getattr(weights, name) for name in tensors]
    arrays = [None if a is None else to_numpy(a) for a in arrays]
    base = to_numpy(base[row : row + 1])
    hidden = np.zeros((1, base.shape[1], 0)) if hidden is None else to_numpy(hidden[row : row + 1])
    states, laws, depths = {}, {}, {-1: 0}
    head = dict(low_rank=weights.low_rank, dtype=str(weights.dtype).removeprefix("torch."))

    def law_of(node):  # node -1 is the root
        if node not in laws:
            token = anchor[row].item() if node < 0 else tokens[node]
            before = np.zeros((1, 1, weights.state_size)) if node < 0 else states[parents[node]]
            states[node], scores = expand_scores(
                base, hidden, np.array([[token]]), before, np.array([[depths[node]]]), arrays,
                **head, **options
            )  # fmt: skip
            laws[node] = log_law(scores[0, 0], temperature)
        return laws[node]

    totals, parent_laws = {-1: 0.0}, []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if token < 0:
            parent_laws.append(None)
            continue
        law = law_of(parent)
        totals[node], depths[node] = totals[parent] + law[token], depths[parent] + 1
        parent_laws.append(law)
    return totals, parent_laws


def assert_shape(tree, widths, children):
    """Parents are earlier; each level hangs on the most probable children of the one before."""
    B, C = tree.tokens.shape
    assert children * sum(widths) == C
    firsts = np.cumsum([0] + [children * width for width in widths])
    for row in range(B):
        parents = tree.parents[row].cpu().numpy()
        log_probs = tree.log_probs[row].cpu().numpy()
        assert (parents[:children] == -1).all()
        for level in range(1, len(widths)):
            mine = parents[firsts[level] : firsts[level + 1]].reshape(widths[level], children)
            assert (mine == mine[:, :1]).all()
            before = log_probs[firsts[level - 1] : firsts[level]]
            order = np.argsort(-before, kind="stable")[: widths[level]]
            np.testing.assert_array_equal(mine[:, 0], order + firsts[level - 1])
        for parent in np.unique(parents):
            siblings = tree.tokens[row, parents == parent]
            siblings = siblings[siblings >= 0]
            assert len(siblings.unique()) == len(siblings)


CASES = [  # widths, children, sizes
    ((1, 4, 8, 8, 8), 8, dict()),
    ((1, 3, 2), 4, dict(B=3)),
    ((1,), 5, dict(B=1)),
    ((1, 8, 20), 8, dict(V=5)),  # fewer tokens than children: paths that are not there
    ((1, 2, 2), 2, dict(kind="row")),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift_label, prefix", [(True, 1), (False, 0), (True, 2)])
@pytest.mark.parametrize("widths, children, sizes", CASES, ids=str)
def test_candidates_are_what_they_say(
    widths, children, sizes, shift_label, prefix, dtype, device, generator
):
    inputs = make(generator, dtype, device, **sizes)
    options = dict(shift_label=shift_label, pure_draft_prefix_len=prefix)
    tree = draft_tree(*inputs, widths=widths, children=children, return_scores=True, **options)
    assert_shape(tree, widths, children)
    for row in range(len(tree.tokens)):
        walk = dict(shift_label=shift_label, prefix=prefix)
        totals, laws = reference_paths(tree, *inputs, row, **walk)
        assert len(totals) - 1 == (tree.tokens[row] >= 0).sum()
        for node, token in enumerate(tree.tokens[row].tolist()):
            got = tree.log_probs[row, node].item()
            if token < 0:
                assert got == -torch.inf
                continue
            assert abs(got - totals[node]) < EPSILON[dtype]
            parent = tree.parents[row, node].item()
            law = to_numpy(tree.scores[row, parent + 1].log_softmax(-1))
            np.testing.assert_allclose(law, laws[node], atol=EPSILON[dtype])


def test_all_paths_of_a_small_vocabulary(device, generator):
    """Widths that hold every path: the best nodes are those of an exhaustive search."""
    inputs = make(generator, torch.float32, device, B=1, V=4)
    tree = draft_tree(*inputs, widths=(1, 4, 16), children=4)
    totals, _ = reference_paths(tree, *inputs, 0)
    paths = {}
    for node in range(84):
        path, at = [], node
        while at >= 0:
            path.append(tree.tokens[0, at].item())
            at = tree.parents[0, at].item()
        paths[tuple(reversed(path))] = totals[node]
    every = itertools.chain.from_iterable(
        itertools.product(range(4), repeat=length) for length in (1, 2, 3)
    )
    assert set(paths) == set(every)
    best = torch.tensor([totals[node] for node in range(84)]).topk(20).indices
    assert set(tree.log_probs[0].topk(20).indices.tolist()) == set(best.tolist())


def test_one_path_and_child_is_the_chain(device, generator):
    inputs = make(generator, torch.float32, device, B=5)
    tree = draft_tree(*inputs, widths=(1,) * 7, children=1)
    assert torch.equal(tree.tokens, draft_chain(*inputs, num_drafts=7))
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 3, 4, 5]] * 5


@pytest.mark.parametrize("pooled", [False, True])
def test_drawn_tree_has_its_law(pooled, device):
    """Two of three drawn below the root, then two of three below the more probable of them."""
    rows, first, second = 40000, [0.4, -0.3, 0.9], [0.0, 1.2, -0.5]
    zeros = lambda *size: torch.zeros(size, device=device)  # noqa: E731
    weights = HeadWeights(zeros(3, 1), zeros(3, 1), zeros(1, 2), zeros(3, 1), zeros(3, 1))
    base = torch.tensor([first, second], device=device).expand(rows, 2, 3)
    integers = torch.arange(rows, device=device)
    pool = torch.tensor([2, 0, 1], dtype=torch.int32, device=device).expand(rows, 3).contiguous()
    tree = draft_tree(
        base, zeros(rows, 2, 1), integers * 0, weights, widths=(1, 1), children=2,
        seed=integers, block_start=integers * 0 + 9, pool=pool if pooled else None,
    )  # fmt: skip
    assert_shape(TreeDraft(*(t[:50] for t in tree[:4]), None), (1, 1), 2)
    p, q = (np.exp(s) / np.exp(s).sum() for s in (np.array(first), np.array(second)))
    pairs = list(itertools.permutations(range(3), 2))
    law = [p[a] * p[b] / (1 - p[a]) * q[c] * q[d] / (1 - q[c]) for a, b in pairs for c, d in pairs]
    place = torch.tensor([27, 9, 3, 1], device=device)
    codes = (tree.tokens * place).sum(-1).cpu().numpy()
    counts = [(codes == 27 * a + 9 * b + 3 * c + d).sum() for a, b in pairs for c, d in pairs]
    assert sum(counts) == rows
    assert g_test(np.array(counts), np.array(law)).p_value > 1e-9
    for row in range(0, rows, 4000):
        for half, scores in ((slice(0, 2), first), (slice(2, 4), second)):
            _, remaining = law_of_children(np.array(scores), tree.tokens[row, half].tolist())
            np.testing.assert_allclose(
                to_numpy(tree.log_remaining[row, half]), remaining, atol=2e-6
            )


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(dtype, drawn, device, generator):
    base, hidden, anchor, weights = make(generator, dtype, device, B=7)
    options = dict(widths=(1, 3, 6, 6), children=4, return_scores=True)
    pool = torch.rand(7, 200, generator=generator).argsort(1)[:, :64].int().to(device)
    integers = torch.arange(7, device=device)

    def run(rows):
        keys = dict(seed=integers[rows], block_start=integers[rows] + 3) if drawn else {}
        pools = pool[rows].contiguous()
        return draft_tree(
            base[rows], hidden[rows], anchor[rows], weights, pool=pools, **options, **keys
        )

    whole = run(slice(None))
    for rows in (slice(None), slice(2, 3), slice(4, 7)):
        for name, a, b in zip(TreeDraft._fields, run(rows), whole, strict=True):
            assert torch.equal(a, b[rows]), name


def test_a_plan_keeps_the_memory_of_calls_with_other_slots(device, generator):
    """A graph of the first call still writes there."""
    base, hidden, anchor, weights = make(generator, torch.float32, device)
    plan = TreePlan(2, weights, widths=(1, 2), children=2)
    written = []
    for slots in (8, 3, 8):
        got = plan(base[:, :slots], hidden[:, :slots], anchor)
        expected = draft_tree(
            base[:, :slots], hidden[:, :slots], anchor, weights, widths=(1, 2), children=2
        )
        assert torch.equal(got.tokens, expected.tokens)
        written.append({t.data_ptr() for t in plan.from_hidden.values()})
    assert len(written[0]) == 1 and written[0] < written[1] == written[2]


@pytest.mark.gpu
@pytest.mark.parametrize("drawn", [False, True])
def test_graph_replay(drawn, generator, graph_replay):
    base, hidden, anchor, weights = make(generator, torch.bfloat16, "cuda", B=3)
    shape = dict(widths=(1, 4, 8, 8), children=8)
    keys = {}
    if drawn:
        integers = torch.arange(3, device="cuda")
        keys = dict(seed=integers, block_start=integers.clone())
    plan = TreePlan(3, weights, **shape)
    replay = graph_replay(lambda: plan(base, hidden, anchor, **keys))
    for step in range(3):
        base.copy_(torch.randn(base.shape))
        anchor.copy_(torch.randint(200, (3,)))
        if drawn:
            keys["block_start"].add_(step)
        replay()
        expected = draft_tree(base, hidden, anchor, weights, **shape, **keys)
        for a, b in zip(plan.result[:4], expected[:4], strict=True):
            assert torch.equal(a, b)


ERRORS = [
    (dict(widths=(2, 4)), r"TreePlan: widths: got \(2, 4\) with 4 children, expected 1 first"),
    (dict(widths=(1, 5)), r"TreePlan: widths: got \(1, 5\) with 4 children"),
    (dict(widths=()), r"TreePlan: widths: got \(\)"),
    (dict(widths=(1,) * 9), "base_logits: got 8 slots, expected at least 9 for 9 levels"),
    (dict(children=33), r"children: got 33, expected 1\.\.32"),
    (
        dict(anchor=torch.zeros(3, dtype=torch.int64)),
        "base_logits: got 2 rows, expected 3, as anchor",
    ),
    (dict(hidden=torch.zeros(2, 8, 41)), r"hidden: got shape \[2, 8, 41\], expected"),
]


@pytest.mark.parametrize("change, message", ERRORS, ids=[e[1] for e in ERRORS])
def test_errors(change, message, generator):
    names = ("base_logits", "hidden", "anchor", "weights")
    inputs = dict(zip(names, make(generator, torch.float32), strict=True))
    with pytest.raises(ValueError, match=message):
        draft_tree(**inputs | dict(widths=(1, 4), children=4) | change)


def test_plan_and_call_agree_on_the_pool(generator):
    base, hidden, anchor, weights = make(generator, torch.float32)
    plan = TreePlan(2, weights, widths=(1, 2), children=2, pool_size=10)
    with pytest.raises(ValueError, match=r"draft_tree: pool: got None, expected what the plan"):
        plan(base, hidden, anchor)
