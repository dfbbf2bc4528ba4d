"""build_tree, compact_accepted and kv_move against plain Python."""

import pytest
import torch

import domino_kernels
from domino_kernels import TreeStatus, build_tree, compact_accepted, kv_move
from domino_kernels.testing import Guarded

NAN = float("nan")


def plain_tree(root, tokens, parents, scores, prefix, nodes):
    """(tokens, parents, index, depths, ancestor sets) of one request."""
    count = len(tokens)
    key = [None] * count
    for c in range(count):
        if not -1 <= parents[c] < c or (parents[c] >= 0 and key[parents[c]] is None):
            continue
        own = -float("inf") if scores is None or scores[c] != scores[c] else scores[c]
        rank = (0, own) if scores is None or scores[c] == scores[c] else (-1, own)
        key[c] = rank if parents[c] < 0 else min(rank, key[parents[c]])
    valid = [c for c in range(count) if key[c] is not None]
    chosen = sorted(sorted(valid, key=lambda c: key[c], reverse=True)[: nodes - 1])
    node = {-1: 0} | {c: n + 1 for n, c in enumerate(chosen)}
    out = [int(root)], [-1], [-1], [0], [{0}]
    for c in chosen:
        up = node[parents[c]]
        for values, value in zip(
            out, (int(tokens[c]), up, c, out[3][up] + 1, out[4][up] | {node[c]})
        ):
            values.append(value)
    for n in range(len(chosen) + 1, nodes):
        for values, value in zip(out, (-1, -1, -1, 0, {n})):
            values.append(value)
    return out


def candidates(batch, count, generator, *, chain=False, orphans=False):
    drawn = dict(generator=generator)
    tokens = torch.randint(1000, (batch, count), **drawn)
    up = torch.rand(batch, count, **drawn) * torch.arange(count + 1)[1:]
    parents = up.long().int() - 1
    if chain:
        parents = torch.arange(count, dtype=torch.int32).expand(batch, count) - 1
    parents = parents.contiguous()
    scores = torch.randn(batch, count, **drawn)
    if count > 6:
        scores[:, ::3] = scores[:, 1:2]  # ties
        scores[:, 5] = NAN
        scores[:, 6] = -float("inf")
    if orphans:
        for c, parent in ((2, 2), (4, 7), (5, -2), (6, 4)):
            parents[:, c] = parent
    root = torch.randint(1000, (batch,), **drawn)
    prefix = torch.randint(0, 50, (batch,), **drawn)
    return root, tokens, parents, scores, prefix


# candidates, nodes: none, one, all, fewer than nodes, words and blocks of columns, the largest
SHAPES = [(0, 1), (1, 1), (1, 2), (7, 5), (12, 40), (40, 33), (200, 64), (700, 300)]


@pytest.mark.parametrize("scored", [True, False], ids=["scores", "first"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["random", "chain", "orphans"])
def test_build_tree(kind, shape, scored, device, generator):
    count, nodes = shape
    if kind == "orphans" and count < 8:
        pytest.skip("needs eight candidates")
    batch = 3
    root, tokens, parents, scores, prefix = candidates(
        batch, count, generator, chain=kind == "chain", orphans=kind == "orphans"
    )
    scores = scores if scored else None
    arguments = [t.to(device) for t in (root, tokens, parents)]
    keywords = dict(prefix=prefix.to(device), num_nodes=nodes)
    keywords["scores"] = None if scores is None else scores.to(device)
    columns = int(prefix.max()) + nodes + 3
    results = {
        "bool": build_tree(*arguments, **keywords, mask="bool"),
        "packed": build_tree(*arguments, **keywords, mask="packed"),
        "full": build_tree(*arguments, **keywords, mask="full", columns=columns),
        "none": build_tree(*arguments, **keywords, mask="none"),
    }
    for b in range(batch):
        expected = plain_tree(
            root[b], tokens[b].tolist(), parents[b].tolist(),
            None if scores is None else scores[b].tolist(), prefix[b], nodes,
        )  # fmt: skip
        sees = torch.zeros(nodes, nodes, dtype=torch.bool)
        for n, ancestors in enumerate(expected[4]):
            sees[n, list(ancestors)] = True
        for tree in results.values():
            for value, wanted in zip(tree[:4], expected):
                assert value[b].tolist() == wanted
            assert tree.positions[b].tolist() == [int(prefix[b]) + d for d in expected[3]]
            assert tree.status[b] == (TreeStatus.BAD_TREE if kind == "orphans" else 0)
        assert torch.equal(results["bool"].mask[b].cpu(), sees)
        words = results["packed"].mask[b].cpu()
        bits = words[..., None] >> torch.arange(32) & 1
        assert torch.equal(bits.flatten(1)[:, :nodes].bool(), sees)
        assert not bits.flatten(1)[:, nodes:].any()
        full, start = results["full"].mask[b].cpu(), int(prefix[b])
        assert full[:, :start].all() and not full[:, start + nodes :].any()
        assert torch.equal(full[:, start : start + nodes], sees)


def test_build_tree_writes_all_and_nothing_else(device, generator):
    root, tokens, parents, scores, prefix = (t.to(device) for t in candidates(2, 50, generator))
    shapes = domino_kernels.ops.tree._tree_shapes(2, 37, "packed", None)
    guards = [Guarded(shape, dtype, device) for shape, dtype in shapes]
    out = domino_kernels.Tree(*(guard.tensor for guard in guards))
    result = build_tree(
        root, tokens, parents, scores=scores, prefix=prefix, num_nodes=37, mask="packed", out=out
    )
    assert result is out
    for guard in guards:
        guard.check()


def test_full_masks_stay_inside(device, generator):
    """Whatever the prefix: columns that do not exist are not written."""
    nodes, columns = 300, 320
    arguments = candidates(4, 700, generator)
    prefix = torch.tensor([-200, -1, 30, 2**40])
    keywords = dict(num_nodes=nodes, mask="full", columns=columns)
    expected = build_tree(*arguments[:3], scores=arguments[3], prefix=prefix, **keywords)
    shapes = domino_kernels.ops.tree._tree_shapes(4, nodes, "full", columns)
    guards = [Guarded(shape, dtype, device) for shape, dtype in shapes]
    out = domino_kernels.Tree(*(guard.tensor for guard in guards))
    root, tokens, parents, scores = (t.to(device) for t in arguments[:4])
    build_tree(root, tokens, parents, scores=scores, prefix=prefix.to(device), **keywords, out=out)
    for guard, a, b in zip(guards, out, expected):
        guard.check(all_written=False)  # a mask may hold what it was filled with
        assert torch.equal(a.cpu(), b)


def test_build_tree_of_strided_candidates(device, generator):
    arguments = [t.to(device) for t in candidates(3, 20, generator)]
    root, tokens, parents, scores, prefix = arguments
    expected = build_tree(root, tokens, parents, scores=scores, prefix=prefix, num_nodes=9)
    wide = [torch.cat([t, t], 1)[:, :20] for t in (tokens, parents, scores)]
    strided = build_tree(root, *wide[:2], scores=wide[2], prefix=prefix, num_nodes=9)
    for a, b in zip(strided, expected):
        assert torch.equal(a, b)


# --- after verification -------------------------------------------------------------------------


def random_paths(batch, width, nodes, generator):
    """Rising paths from node 0, of all lengths."""
    path = torch.full((batch, width), -1, dtype=torch.int32)
    accepted = torch.zeros(batch, dtype=torch.int32)
    for b in range(batch):
        count = int(torch.randint(0, min(width, nodes), (1,), generator=generator))
        chosen = torch.randperm(nodes - 1, generator=generator)[:count].sort().values + 1
        path[b, : count + 1] = torch.cat([torch.zeros(1, dtype=torch.int64), chosen]).int()
        accepted[b] = count
    return path, accepted


@pytest.mark.parametrize("nodes, width", [(1, 1), (9, 9), (70, 33)])
def test_compact_accepted(nodes, width, device, generator):
    path, accepted = random_paths(4, width, nodes, generator)
    tensors = [
        torch.randn(4, nodes, 6, generator=generator).bfloat16(),
        torch.randint(99, (4, nodes), generator=generator),
        torch.randn(4, nodes, 2, 40, generator=generator).transpose(0, 1).contiguous()
        .transpose(0, 1),
        torch.randint(255, (4, nodes, 5), generator=generator).to(torch.uint8),
    ]  # fmt: skip
    moved = [t.to(device) for t in tensors]
    guards = [Guarded((4, width, *t.shape[2:]), t.dtype, device) for t in tensors[:3]]
    result = compact_accepted(path.to(device), accepted.to(device), *moved)
    out = tuple(guard.tensor for guard in guards)
    compact_accepted(path.to(device), accepted.to(device), *moved[:3], out=out)
    for guard, value in zip(guards, result):
        assert torch.equal(guard.check(), value)
    for tensor, value in zip(tensors, result):
        expected = torch.zeros_like(value.cpu())
        for b in range(4):
            kept = path[b, : int(accepted[b]) + 1].long()
            expected[b, : len(kept)] = tensor[b, kept]
        assert torch.equal(value.cpu(), expected)


def plain_move(cache, slots, path, accepted, start):
    """slots(b, s) -> index of slot s; the moves one by one on a copy."""
    out = cache.clone()
    for b in range(len(path)):
        for i in range(1, int(accepted[b]) + 1):
            out[slots(b, int(start[b]) + i)] = cache[slots(b, int(start[b]) + int(path[b, i]))]
    return out


@pytest.mark.parametrize("dtype, dim", [(torch.bfloat16, 64), (torch.uint8, 3), (torch.half, 6)])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_kv_move_contiguous(layout, dtype, dim, device, generator):
    batch, length, heads, nodes = 3, 120, 2, 70
    path, accepted = random_paths(batch, nodes, nodes, generator)
    accepted[0], path[0] = nodes - 1, torch.arange(nodes)  # a chain: nothing moves
    start = torch.tensor([0, 17, 50])
    plain = [torch.randint(255, (batch, length, heads, dim), generator=generator).to(dtype)
             for _ in range(5)]  # fmt: skip
    caches = [c.clone() if layout == "NHD" else c.transpose(1, 2).contiguous() for c in plain]
    caches = [c.to(device) for c in caches]
    kv_move(caches, path.to(device), accepted.to(device), start.to(device), layout=layout)
    for cache, before in zip(caches, plain):
        after = cache.cpu() if layout == "NHD" else cache.cpu().transpose(1, 2)
        expected = plain_move(before, lambda b, s: (b, s), path, accepted, start)
        assert torch.equal(after, expected)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_kv_move_paged(layout, page_size, device, generator):
    batch, heads, dim, nodes, slots = 4, 2, 16, 40, 192
    pages = slots // page_size
    path, accepted = random_paths(batch, nodes, nodes, generator)
    table = torch.randperm(batch * pages + 5, generator=generator)[: batch * pages]
    table = table.reshape(batch, pages).int()
    start = torch.tensor([0, 1, 95, 130])
    plain = [
        torch.randn(batch * pages + 5, page_size, heads, dim, generator=generator).bfloat16()
        for _ in range(3)
    ]
    caches = [c.clone() if layout == "NHD" else c.transpose(1, 2).contiguous() for c in plain]
    # keys and values side by side, as engines keep them
    caches = [torch.stack([c, c + 1]).to(device) for c in caches]
    views = [part for cache in caches for part in cache]
    arguments = [t.to(device) for t in (path, accepted, start)]
    kv_move(views, *arguments, layout=layout, page_table=table.to(device))

    def place(b, s):
        return int(table[b, s // page_size]), s % page_size

    for cache, before in zip(caches, plain):
        for part, offset in zip(cache.cpu(), (0, 1)):
            after = part if layout == "NHD" else part.transpose(1, 2)
            assert torch.equal(after, plain_move(before + offset, place, path, accepted, start))


def test_kv_move_stays_inside(device, generator):
    """Bad paths, pages and slots end a request's move; nothing else is touched."""
    cache = torch.randn(5, 8, 1, 4, generator=generator).to(device)
    before = cache.clone()
    path = torch.tensor([[0, 3, 2, 5], [0, 9, 10, 11], [0, 2, 2, 3], [0, -1, 3, 4], [0, 2, 3, 99]])
    accepted = torch.tensor([3, 3, 3, 3, 9])
    start = torch.tensor([0, 2, 5, 0, 6])
    arguments = [path.int().to(device), accepted.int().to(device), start.to(device)]
    kv_move([cache], *arguments)
    expected = before.clone()
    expected[0, 1] = before[0, 3]  # 2 does not rise
    expected[2, 6] = before[2, 7]
    assert torch.equal(cache, expected)
    paged = before.clone().view(5, 8, 1, 4)
    table = torch.tensor([[0, 99]] * 5, dtype=torch.int32, device=device)
    kv_move([paged], *arguments, page_table=table)  # slots from 8 on have no page
    changed = (paged != before).flatten(1).any(1)
    assert changed.tolist() == [True, False, False, False, False]


def test_errors():
    path, accepted = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    start, cache = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 9, 1, 4)
    with pytest.raises(ValueError, match=r"kv_move: layout: got 'DHN', expected 'NHD' or 'HND'"):
        kv_move([cache], path, accepted, start, layout="DHN")
    with pytest.raises(ValueError, match=r"kv_move: caches: got none"):
        kv_move([], path, accepted, start)
    with pytest.raises(ValueError, match=r"kv_move: caches\[1\]: got shape"):
        kv_move([cache, cache[:, :8]], path, accepted, start)
    with pytest.raises(TypeError, match=r"kv_move: page_table: got torch.int64, expected"):
        kv_move([cache], path, accepted, start, page_table=start[:, None])
    with pytest.raises(TypeError, match=r"compact_accepted: path: got torch.int64"):
        compact_accepted(path.long(), accepted, torch.zeros(2, 9))
    with pytest.raises(ValueError, match=r"compact_accepted: tensors: got 0, expected 1 to 16"):
        compact_accepted(path, accepted)
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    keywords = dict(prefix=start, num_nodes=3)
    with pytest.raises(ValueError, match=r"build_tree: num_nodes: got 2000, expected 1 to 1024"):
        build_tree(start, tokens, tokens.int(), prefix=start, num_nodes=2000)
    with pytest.raises(TypeError, match=r"build_tree: parents: got torch.int64, expected"):
        build_tree(start, tokens, tokens, **keywords)
    with pytest.raises(ValueError, match=r"build_tree: columns: got None, expected it with"):
        build_tree(start, tokens, tokens.int(), **keywords, mask="full")


@pytest.mark.gpu
def test_graph_replay(graph_replay, generator):
    root, tokens, parents, scores, prefix = (t.cuda() for t in candidates(4, 60, generator))
    nodes = 32
    out = build_tree(root, tokens, parents, scores=scores, prefix=prefix, num_nodes=nodes)
    replay = graph_replay(
        lambda: build_tree(
            root, tokens, parents, scores=scores, prefix=prefix, num_nodes=nodes, out=out
        )
    )
    scores.copy_(torch.randn(4, 60, generator=generator))
    replay()
    again = build_tree(root, tokens, parents, scores=scores, prefix=prefix, num_nodes=nodes)
    for a, b in zip(out, again):
        assert torch.equal(a, b)
