"""SGLang's tree functions against transcriptions of their contracts, in plain Python."""

import numpy as np
import pytest
import torch

from domino_kernels.adapters import sglang
from domino_kernels.testing.losslessness import g_test

VOCAB = 5


def random_tree(nodes, generator):
    """Parents before children; siblings have distinct tokens where the vocabulary allows it."""
    parents, tokens = [-1], [0]
    for n in range(1, nodes):
        while True:
            parent = int(generator.integers(n))
            used = [t for t, p in zip(tokens, parents) if p == parent]
            if len(used) < VOCAB:
                break
        free = [t for t in range(VOCAB) if t not in used]
        parents.append(parent)
        tokens.append(int(generator.choice(free)))
    return parents, tokens


def links(parents):
    """(first child, next sibling) of each node, -1 for none."""
    child, sibling = [-1] * len(parents), [-1] * len(parents)
    for n in range(len(parents) - 1, 0, -1):
        sibling[n] = child[parents[n]]
        child[parents[n]] = n
    return child, sibling


def contract_greedy(predicts, accept_index, candidates, rows, child, sibling, predict):
    node, count = 0, 0
    accept_index[0] = rows[0]
    while True:
        predicts[rows[node]] = predict[node]
        n = child[node]
        while n != -1 and candidates[n] != predict[node]:
            n = sibling[n]
        if n == -1:
            return count
        count += 1
        node = n
        accept_index[count] = rows[n]


def contract_target_only(predicts, accept_index, candidates, rows, child, sibling, coins, last, p):
    node, count = 0, 0
    accept_index[0] = rows[0]
    while True:
        rest, mass, n, coin = p[node].copy(), 0.0, child[node], coins[node]
        while n != -1:
            mass += p[node][candidates[n]]
            if coin < mass:
                break
            rest[candidates[n]] = 0.0
            n = sibling[n]
        if n == -1:
            pick = np.searchsorted(np.cumsum(rest), last * rest.sum(), side="right")
            predicts[rows[node]] = int(pick)
            return count
        predicts[rows[node]] = candidates[n]
        count += 1
        node = n
        accept_index[count] = rows[n]


def batch_of_trees(batch, nodes, seed, device):
    generator = np.random.default_rng(seed)
    trees = [random_tree(nodes, generator) for _ in range(batch)]
    pairs = [links(parents) for parents, _ in trees]
    rows = generator.permutation(batch * nodes).reshape(batch, nodes)
    integer = lambda a: torch.tensor(np.array(a), device=device)  # noqa: E731
    return (
        trees,
        integer([t for _, t in trees]),
        integer(rows),
        integer([c for c, _ in pairs]),
        integer([s for _, s in pairs]),
    )


def buffers(batch, nodes, device):
    return (
        torch.full((batch * nodes,), -7, dtype=torch.int32, device=device),
        torch.full((batch, nodes), -9, dtype=torch.int32, device=device),
        torch.full((batch,), -5, dtype=torch.int32, device=device),
    )


def test_parents_of_links(device):
    for nodes in (1, 2, 7, 64):
        trees, _, _, child, sibling = batch_of_trees(20, nodes, nodes, device)
        parents = sglang.tree_parents(child, sibling)
        assert parents.dtype == torch.int32
        assert parents.tolist() == [p for p, _ in trees]


def test_links_in_circles_end(device):
    child = torch.tensor([[1, 2, 0], [1, 1, 99], [-1, -5, 2]], device=device)
    sibling = torch.tensor([[-1, 1, 2], [2, 1, 2], [0, 2, 1]], device=device)
    parents = sglang.tree_parents(child, sibling)
    assert parents.shape == (3, 3) and ((parents >= -1) & (parents < 3)).all()
    p = torch.full((3, 3, VOCAB), 1 / VOCAB, device=device)
    uniform = torch.rand(3, 3, device=device)
    tokens = torch.zeros(3, 3, dtype=torch.int64, device=device)
    rows = torch.arange(9, device=device).view(3, 3)
    outputs = buffers(3, 3, device)
    sglang.tree_speculative_sampling_target_only(
        *outputs, tokens, rows, child, sibling, uniform, uniform[:, 0], p, None
    )
    assert ((outputs[2] >= 0) & (outputs[2] < 3)).all()


def test_no_requests(device):
    empty = lambda *size: torch.zeros(size, dtype=torch.int64, device=device)  # noqa: E731
    tree = [empty(0, 3) for _ in range(4)]
    laws = [torch.zeros(0, 3, VOCAB, device=device)] * 2
    uniform = torch.zeros(0, 3, device=device)
    for last in ((empty(0, 3),), (uniform, uniform[:, 0], *laws)):
        for function in (
            (sglang.verify_tree_greedy,)
            if len(last) == 1
            else (sglang.tree_speculative_sampling_target_only, sglang.chain_speculative_sampling)
        ):
            outputs = buffers(0, 3, device)
            function(*outputs, *tree, *last)
            assert outputs[0].shape == (0,) and outputs[2].shape == (0,)


def test_greedy_writes_what_the_contract_says(device):
    generator = np.random.default_rng(1)
    for nodes in (1, 5, 20):
        _, tokens, rows, child, sibling = batch_of_trees(40, nodes, nodes + 10, device)
        predict = torch.tensor(generator.integers(VOCAB, size=(40, nodes)), device=device)
        outputs = buffers(40, nodes, device)
        sglang.verify_tree_greedy(*outputs, tokens, rows, child, sibling, predict)
        told = [-7] * (40 * nodes), [[-9] * nodes for _ in range(40)], []
        for b in range(40):
            arguments = (t[b].tolist() for t in (tokens, rows, child, sibling, predict))
            told[2].append(contract_greedy(told[0], told[1][b], *arguments))
        assert outputs[0].tolist() == told[0]
        assert outputs[1].tolist() == told[1]
        assert outputs[2].tolist() == told[2]
        assert nodes == 1 or max(told[2]) > 1


def test_a_path_is_cut_at_the_width_of_accept_index(device):
    """What accept_token_num counts stands in accept_index, and the last token behind it."""
    tokens = torch.tensor([[0, 1, 2, 3]], device=device)
    rows = torch.arange(4, device=device)[None]
    child, sibling = torch.tensor([[1, 2, 3, -1], [-1] * 4], device=device)[:, None]
    p = torch.eye(VOCAB, device=device)[None, 1:]  # node n says n + 1: all drafts are kept
    uniform = torch.rand(1, 4, device=device)
    tree = tokens, rows, child, sibling
    for width in (1, 2, 4, 6):
        for last in ((p.argmax(-1),), (uniform, uniform[:, 0], p, None)):
            function = (
                sglang.verify_tree_greedy
                if len(last) == 1
                else sglang.tree_speculative_sampling_target_only
            )
            predicts, accept_index, count = buffers(1, 4, device)
            accept_index = torch.full((1, width), -9, dtype=torch.int32, device=device)
            function(predicts, accept_index, count, *tree, *last)
            kept = min(width, 4)
            assert count.tolist() == [kept - 1]
            assert accept_index[0].tolist() == [*range(kept), *[-9] * (width - kept)]
            assert predicts.tolist() == [*range(1, kept + 1), *[-7] * (4 - kept)]


def test_target_only_writes_what_the_contract_says(device):
    """Rows with all mass on one token: coins cannot matter."""
    generator = np.random.default_rng(2)
    for nodes in (1, 6, 33):
        _, tokens, rows, child, sibling = batch_of_trees(30, nodes, nodes + 20, device)
        p = np.eye(VOCAB)[generator.integers(VOCAB, size=(30, nodes))]
        outputs = buffers(30, nodes, device)
        uniform = torch.rand(30, nodes, device=device)
        sglang.tree_speculative_sampling_target_only(
            *outputs, tokens, rows, child, sibling, uniform, uniform[:, 0],
            torch.tensor(p, dtype=torch.float32, device=device), None,
        )  # fmt: skip
        told = [-7] * (30 * nodes), [[-9] * nodes for _ in range(30)], []
        for b in range(30):
            arguments = (t[b].tolist() for t in (tokens, rows, child, sibling))
            half = [0.5] * nodes
            told[2].append(contract_target_only(told[0], told[1][b], *arguments, half, 0.5, p[b]))
        assert outputs[0].tolist() == told[0]
        assert outputs[1].tolist() == told[1]
        assert outputs[2].tolist() == told[2]


def path_law(parents, tokens, p):
    """{emitted tokens: probability}: the target decodes along the tree as far as it goes."""
    law = {}

    def walk(node, emitted, probability):
        children = {tokens[n]: n for n in range(1, len(parents)) if parents[n] == node}
        for y in range(VOCAB):
            if p[node][y] == 0:
                continue
            if y in children:
                walk(children[y], (*emitted, y), probability * p[node][y])
            else:
                law[(*emitted, y)] = probability * p[node][y]

    walk(0, (), 1.0)
    return law


def test_target_only_law(device):
    nodes, runs = 7, 40_000
    generator = np.random.default_rng(4)
    parents, tokens = random_tree(nodes, generator)
    p = generator.dirichlet(np.ones(VOCAB), nodes)
    law = path_law(parents, tokens, p)
    keys = sorted(law)
    expected = np.array([law[k] for k in keys])
    child, sibling = links(parents)
    wide = lambda a: torch.tensor(a, device=device).expand(runs, *np.shape(a))  # noqa: E731
    rows = torch.arange(runs * nodes, device=device).view(runs, nodes)
    seeded = torch.Generator(device).manual_seed(0)
    uniform = torch.rand(runs, nodes, generator=seeded, device=device)
    final = torch.rand(runs, generator=seeded, device=device)
    outputs = buffers(runs, nodes, device)
    sglang.tree_speculative_sampling_target_only(
        *outputs, wide(tokens), rows, wide(child), wide(sibling), uniform, final,
        wide(p).float(), None,
    )  # fmt: skip
    predicts, index, count = (t.cpu() for t in outputs)
    got = [tuple(predicts[index[b, : count[b] + 1]].tolist()) for b in range(runs)]
    assert set(got) <= set(keys)
    result = g_test([got.count(k) for k in keys], expected)
    assert result.p_value > 1e-9, result
    told, coins = [], generator.random((4000, nodes + 1))
    for c in coins:
        out, at = [0] * nodes, [0] * nodes
        n = contract_target_only(out, at, tokens, range(nodes), child, sibling, c, c[-1], p)
        told.append(tuple(out[i] for i in at[: n + 1]))
    assert g_test([told.count(k) for k in keys], expected).p_value > 1e-9


def test_thresholds_are_refused(device):
    with pytest.raises(ValueError, match=r"threshold_single: got 0\.9, expected 1"):
        sglang.tree_speculative_sampling_target_only(*[None] * 11, 0.9)
