"""Reference of verify_tree, float64, with the noise of domino_kernels.rng.

A tree is a parent array in topological order: node 0 is the root (the last committed token),
parents[n] < n. Row n holds the target's law p of the token after node n, and q the law from which
the children of n were drawn, in the order of their indices. `resolve` says what every node would do
if the walk reached it; no coin enters. `outcomes` and `walk` then add up or follow the coins.
"""

from typing import NamedTuple

import numpy as np

from domino_kernels import rng
from domino_kernels.reference.law import Sampling, law

RULES = "greedy", "match", "target_only", "rrsw", "traversal"
NON_FINITE, EMPTY_ROW, BAD_ID, ZERO_RESIDUAL, BAD_DRAFT_LAW, BAD_PARAMETER, BAD_ROWS, BAD_TREE = (
    1 << n for n in range(8)
)
_NOTHING = 1e-12  # a residual of less is rounding


class Node(NamedTuple):
    """What the walk meets at one node, with all of its children rejected at the end."""

    children: list  # in order
    accept: list  # rrsw, target_only: probability to step into the child; traversal: the child's a
    rest: np.ndarray  # weights of the token that follows if no child does
    keep: float  # traversal: probability that the node itself is kept, all children rejected
    moved: bool  # a child was rejected
    faults: list  # status of each child


def children(parents):
    """Children of every node; a parent that is not an earlier node makes an orphan."""
    found = [[] for _ in parents]
    for n in range(1, len(parents)):
        if 0 <= parents[n] < n:
            found[parents[n]].append(n)
    return found


def resolve_node(rule, p, q, a, nodes, tokens):
    """One node. p, q: laws [V] (q None: unusable); a: traversal's probability of being kept."""
    accept, moved, faults, vocab = [], False, [], len(p)
    rest, left = p.copy(), None if q is None else q.copy()
    seen = set()
    for child in nodes:
        x = int(tokens[child])
        faults.append(0)
        if not 0 <= x < vocab:
            faults[-1] = BAD_ID if x != -1 else 0
            accept.append(0.0)
        elif rule in ("target_only", "match"):
            # the k-th child is taken with p(x): the chance that no earlier one was is divided out
            free = rest.sum()
            accept.append(0.0 if x in seen or free <= 0 else rest[x] / free)
            rest[x] = 0.0
            seen.add(x)
            moved = True
        elif q is None or left[x] <= 0.0:
            faults[-1] = BAD_DRAFT_LAW
            accept.append(0.0)
        elif a <= 0.0:
            accept.append(0.0)
        else:
            drawn = left / left.sum()
            accept.append(min(1.0, a * rest[x] / drawn[x]))
            moved = True
            over = np.maximum(a * rest - drawn, 0.0)
            z = over.sum()
            if z <= _NOTHING:
                # no later child, and not this node (correction 1); a rule that has to emit here
                # draws from p
                a, rest = 0.0, np.zeros(vocab)
                continue
            rest = over / z
            if rule == "traversal":
                a = z / (z + 1.0 - a)
            left[x] = 0.0
    return Node(list(nodes), accept, rest, a, moved, faults)


def resolve(rule, p, q, tokens, parents):
    """A Node for every node; p, q: lists of laws, q[n] None where unusable."""
    kids, start = children(parents), np.ones(len(parents))
    nodes = []
    for n in range(len(parents)):
        a = start[n] if rule == "traversal" else 1.0
        nodes.append(resolve_node(rule, p[n], q[n], a, kids[n], tokens))
        for child, chance in zip(kids[n], nodes[n].accept):
            start[child] = chance
    return nodes


def outcomes(rule, nodes, n=0):
    """([(probability, node where the walk ends)], probability that it leaves n's subtree)."""
    node, found, left = nodes[n], [], 1.0
    for child, chance in zip(node.children, node.accept):
        if rule == "traversal":
            inside, out = outcomes(rule, nodes, child)
        else:
            inside, out = [(chance * w, m) for w, m in outcomes(rule, nodes, child)[0]], 1 - chance
        found += [(left * w, m) for w, m in inside]
        left *= out
    keep = node.keep if rule == "traversal" and n else 1.0
    return [*found, (left * keep, n)], left * (1.0 - keep)


def tree_rule(rule, p, q, tokens, parents):
    """Yields (probability, emitted tokens); p, q: laws by node."""
    nodes = resolve(rule, p, q, tokens, parents)
    for weight, n in outcomes(rule, nodes)[0]:
        path, rest = path_to(n, parents), nodes[n].rest
        rest = rest if rest.sum() > 0 else p[n]
        kept = tuple(int(tokens[m]) for m in path[1:])
        for y in np.flatnonzero(rest) if weight > 0 else ():
            yield weight * rest[y] / rest.sum(), (*kept, int(y))


def path_to(n, parents):
    path = [n]
    while path[-1] > 0:
        path.append(int(parents[path[-1]]))
    return path[::-1]


def draws(q, count):
    """([tokens], probability) of `count` draws without replacement in order (Gumbel-top-k)."""
    if count == 0:
        yield (), 1.0
        return
    for first, weight in draws(q, count - 1):
        left = 1.0 - sum(q[x] for x in first)
        for x in np.flatnonzero(q):
            if x not in first:
                # re-summed: 1 - sum cancels
                rest = q.sum() if not first else np.delete(q, list(first)).sum()
                if left > 0 or rest > 0:
                    yield (*first, int(x)), weight * q[x] / rest


# --- the op -------------------------------------------------------------------------------------


def pool_law(ids, logits, vocab, temperature):
    """q [V] of one sparse pool: ids [M] (outside [0, V): unused), logits [M]; None: unusable."""
    used = (ids >= 0) & (ids < vocab)
    part, fault = law(np.where(used, logits, -np.inf), temperature)
    if fault:
        return None
    out = np.zeros(vocab)
    out[ids[used]] = part[used]
    return out


def verify_request(
    rule, target, tokens, parents, sampling, seed=0, block_start=0, draft_law=None
):  # fmt: skip
    """One request: target [N, V] logits, tokens [N], parents [N], draft_law(n) -> q or None.

    Returns (path with the root, last token or None, status).
    """
    t = sampling.temperature
    if not (np.isfinite(t) and t >= 0):
        return [0], None, BAD_PARAMETER
    if t == 0:
        rule, sampling = "greedy", Sampling()
    kids, status = children(parents), 0
    if any(not 0 <= parents[n] < n and parents[n] != -1 for n in range(1, len(parents))):
        status |= BAD_TREE
    coin = lambda i: rng.uniform(rng.words(seed, block_start, i, rng.VERIFY_COIN, 0))[0]  # noqa: E731
    race = lambda w, i, purpose: rng.race(w, seed, block_start, i, purpose)  # noqa: E731

    def finish(path, rest, rejected):
        n = path[-1]
        p, fault = law(target[n], sampling)
        if fault:
            return path, None, status | fault
        if rest is None:
            rest = p
        if rest.sum() > 0:
            return path, race(rest, n, rng.RESIDUAL_DRAW if rejected else rng.BONUS_DRAW), status
        return path, race(p, n, rng.BONUS_DRAW), status | ZERO_RESIDUAL

    if rule == "traversal":
        laws = [law(row, sampling) for row in target]
        usable = [None if fault else p for p, fault in laws]
        path, rest, rejected, more = _traverse(usable, draft_law, tokens, parents, kids, coin)
        status |= more
        return finish(path, rest, rejected)

    path = [0]
    while True:
        n = path[-1]
        p, fault = law(target[n], sampling)
        if fault:
            return path, None, status | fault
        here = [c for c in kids[n] if 0 <= tokens[c] < len(p)]
        bad = any(not 0 <= tokens[c] < len(p) and tokens[c] != -1 for c in kids[n])
        if rule in ("greedy", "match"):
            y = int(np.argmax(target[n]))
            if rule == "match":
                y = rng.race(p, seed, block_start + len(path), 0, rng.POSITION_DRAW)
            step = next((c for c in here if tokens[c] == y), None)
            if step is None:
                return path, y, status | (BAD_ID if bad else 0)
            before = kids[n][: kids[n].index(step)]
            bad = any(not 0 <= tokens[c] < len(p) and tokens[c] != -1 for c in before)
            status |= BAD_ID if bad else 0
            path.append(step)
            continue
        q = draft_law(n) if rule == "rrsw" and kids[n] else None
        node = resolve_node(rule, p, q, 1.0, kids[n], tokens)
        u, step, left = coin(n), None, 0.0
        for child, chance, fault in zip(node.children, node.accept, node.faults):
            status |= fault
            if rule == "rrsw":
                if chance > 0 and coin(child - 1) <= chance:
                    step = child
                    break
            else:
                left = left + p[tokens[child]] if chance > 0 else left
                if chance > 0 and u <= left:
                    step = child
                    break
        if step is None:
            return finish(path, node.rest, node.moved)
        path.append(step)


def _traverse(p, draft_law, tokens, parents, kids, coin):
    """Bottom-up: the first kept node in post-order (children in order, then their parent)."""
    start, nodes = np.zeros(len(parents)), []
    start[0] = 1.0
    for n in range(len(parents)):
        q = draft_law(n) if kids[n] else None
        if p[n] is None:
            nodes.append(Node(kids[n], [0.0] * len(kids[n]), None, start[n], False, []))
        else:
            nodes.append(resolve_node("traversal", p[n], q, start[n], kids[n], tokens))
        for child, chance in zip(kids[n], nodes[n].accept):
            start[child] = chance

    def visit(n):
        for child, chance in zip(nodes[n].children, nodes[n].accept):
            found = visit(child) if chance > 0 else None
            if found is not None:
                return found
        return n if n == 0 or coin(n - 1) <= nodes[n].keep else None

    n = visit(0)
    status = 0
    for m, node in enumerate(nodes):  # of all nodes that the walk may come to
        reached = start[m] > 0 and (m == 0 or 0 <= parents[m] < m)
        for fault in node.faults if reached else ():
            status |= fault
    return path_to(n, parents), nodes[n].rest, nodes[n].moved, status


def verify_tree(
    target_logits,
    tokens,
    parents,
    *,
    rule="greedy",
    sampling=None,
    seed=None,
    block_start=None,
    draft_pool=None,
    draft_logits=None,
    draft_temperature=None,
    cu_nodes=None,
):
    """Arguments as domino_kernels.verify_tree, NumPy arrays; sampling: a Sampling a request.

    Returns (tokens [B, N], path [B, N], num_accepted, num_emitted, chosen_logprob, status).
    """
    batch = len(tokens) if cu_nodes is None else len(cu_nodes) - 1
    width, vocab = tokens.shape[-1], target_logits.shape[-1]
    out, path = np.full((2, batch, width), -1, np.int64)
    logprob = np.zeros((batch, width))
    accepted, emitted, status = np.zeros((3, batch), np.int64)
    for b in range(batch):
        at = b
        if cu_nodes is not None:
            first, last = int(cu_nodes[b]), int(cu_nodes[b + 1])
            if first == last:
                continue
            if not 0 <= first < last <= tokens.shape[0]:
                status[b] = BAD_ROWS
                continue
            at = slice(first, last)
        choice = Sampling(temperature=0.0) if sampling is None else sampling[b]
        t = choice.temperature if draft_temperature is None else draft_temperature[b]
        request_rule = rule
        if rule in ("rrsw", "traversal") and choice.temperature > 0:
            if not (np.isfinite(t) and t >= 0):
                status[b] = BAD_PARAMETER
                continue
            request_rule = rule if t > 0 else "target_only"  # one-hot drafts

        def draft_law(n, at=at, t=t):
            if draft_pool is not None:
                return pool_law(draft_pool[0][at][n], draft_pool[1][at][n], vocab, t)
            return law(draft_logits[at][n], t)[0]

        found, last, status[b] = verify_request(
            request_rule,
            target_logits[at],
            tokens[at],
            parents[at],
            choice,
            0 if seed is None else int(seed[b]),
            0 if block_start is None else int(block_start[b]),
            draft_law,
        )
        if status[b] & BAD_PARAMETER:
            continue
        kept = [int(tokens[at][n]) for n in found[1:]] + ([] if last is None else [int(last)])
        path[b, : len(found)] = found
        out[b, : len(kept)] = kept
        accepted[b], emitted[b] = len(found) - 1, len(kept)
        for i, x in enumerate(kept):
            p = law(target_logits[at][found[i]], choice.temperature or 1.0)[0]
            logprob[b, i] = np.log(p[x])
    return out, path, accepted, emitted, logprob, status
