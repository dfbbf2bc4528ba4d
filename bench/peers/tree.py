"""Peers of `verify_tree` in Torch: whole softmaxes, then a walk by levels without host reads.

Each is a function of a case's operands (bench/ops/tree.py) that returns (tokens [B, N], accepted
[B]). They know the tree's depth on the host, which a serving engine does not.
"""

from functools import cache

import torch


def _emit(o, path, kept, last):
    """Tokens of the kept levels, then the last one; path [B, D + 1] node by level."""
    tokens = o["tokens"].gather(1, path[:, 1:])
    tokens = torch.nn.functional.pad(tokens, (0, 1))
    return tokens.scatter(1, kept[:, None], last[:, None]), kept


def _descend(o, choose):
    """choose(node [B], children [B, C], exists) -> (hit [B], which [B])."""
    batch = len(o["tokens"])
    node = torch.zeros(batch, dtype=torch.int64, device=o["tokens"].device)
    alive, path = torch.ones_like(node, dtype=torch.bool), [node]
    kept = torch.zeros_like(node)
    for _ in range(o["depth"]):
        children = o["children"].gather(1, node[:, None, None].expand(-1, 1, o["children"].size(2)))
        children = children[:, 0]
        hit, which = choose(node, children.clamp_min(0), children >= 0)
        alive = alive & hit
        node = torch.where(alive, children.gather(1, which[:, None])[:, 0], node)
        kept = kept + alive
        path.append(node)
    return node, torch.stack(path, 1), kept


def torch_greedy(o):
    best = o["target"].argmax(-1)

    def choose(node, children, exists):
        hit = (o["tokens"].gather(1, children) == best.gather(1, node[:, None])) & exists
        return hit.any(1), hit.int().argmax(1)

    node, path, kept = _descend(o, choose)
    return _emit(o, path, kept, best.gather(1, node[:, None])[:, 0])


def _row(table, node):
    return table.gather(1, node[:, None, None].expand(-1, 1, table.size(2)))[:, 0]


def torch_target_only(o):
    p = (o["target"].float() / o["temperature"][:, None, None]).softmax(-1)
    coins = torch.rand(o["tokens"].shape, device=p.device)

    def choose(node, children, exists):
        mass = _row(p, node).gather(1, o["tokens"].gather(1, children)) * exists
        hit = (coins.gather(1, node[:, None]) <= mass.cumsum(1)) & exists & (mass > 0)
        return hit.any(1), hit.int().argmax(1)

    node, path, kept = _descend(o, choose)
    rest = _row(p, node)
    children = _row(o["children"], node)
    gone = o["tokens"].gather(1, children.clamp_min(0)).where(children >= 0, 0)
    keep = (children < 0).float()  # token 0 is no draft
    rest = rest.scatter(1, gone, rest.gather(1, gone) * keep)
    return _emit(o, path, kept, (rest / torch.empty_like(rest).exponential_()).argmax(-1))


def _pool_laws(o, node):
    """q [B, V] of the children of a node [B]."""
    ids, logits = (_row(part, node) for part in o["pool"])
    q = torch.zeros(len(ids), o["target"].size(-1), device=ids.device)
    return q.scatter(1, ids.long(), (logits / o["temperature"][:, None]).softmax(-1))


def torch_rrsw(o):
    p = (o["target"].float() / o["temperature"][:, None, None]).softmax(-1)
    coins = torch.rand(o["tokens"].shape, device=p.device)
    rest = p[:, 0]

    def choose(node, children, exists):
        nonlocal rest
        rest, q = _row(p, node), _pool_laws(o, node)
        hit = torch.zeros_like(node, dtype=torch.bool)
        which = torch.zeros_like(node)
        for k in range(children.size(1)):
            child = children[:, k : k + 1]
            x = o["tokens"].gather(1, child)
            ratio = rest.gather(1, x) / q.gather(1, x)
            take = ((coins.gather(1, child) <= ratio) & exists[:, k : k + 1])[:, 0] & ~hit
            which, hit = torch.where(take, k, which), hit | take
            over = (rest - q).relu()
            left = (over / over.sum(-1, keepdim=True)).nan_to_num(0)
            rest = torch.where((hit | ~exists[:, k])[:, None], rest, left)
            q = q.scatter(1, x, 0.0)
            q = q / q.sum(-1, keepdim=True)
        return hit, which

    _, path, kept = _descend(o, choose)
    return _emit(o, path, kept, (rest / torch.empty_like(rest).exponential_()).argmax(-1))


@cache
def compiled(fn):
    return torch.compile(fn, dynamic=False)


def compiled_greedy(o):
    return compiled(torch_greedy)(o)


def compiled_target_only(o):
    return compiled(torch_target_only)(o)


def sglang_target_only(o):
    from bench.peers import tree_triton

    return tree_triton.target_only(o)
