"""losslessness for trees: the exact law of a tree rule, and sampling with any tree verifier.

A tree verifier is any callable

    verify(target_logits [N, nodes, V], tokens [N, nodes], parents [N, nodes], *, temperature [N],
           seed [N], block_start [N], draft_temperature [N], draft_logits [N, nodes, V or M],
           draft_ids [N, nodes, M] (with a pool), sampling)
        -> tokens [N, >= depth + 1] int64 (those behind the emitted ones are ignored), num_emitted

Node 0 is the root, its token is not read; row n holds the law after node n. `tree_verifier` is
domino_kernels.verify_tree. As in losslessness: the rule by enumeration, the implementation over
several blocks, and controls that must fail.
"""

from dataclasses import dataclass

import numpy as np
import torch

from domino_kernels import rng
from domino_kernels.reference import tree as reference
from domino_kernels.reference.law import PLAIN, Sampling
from domino_kernels.testing import losslessness

__all__ = ["TreeDrafter", "enumerate_tree", "sample_tree", "tree_verifier"]


@dataclass(frozen=True)
class TreeDrafter:
    """How the children of a node are made. The defaults are right for every rule."""

    parents: tuple[int, ...]  # of every node, -1 for the root
    temperature: float = 1.0
    pool: int = 0  # children come from the likeliest tokens only
    top_k: bool = False  # the likeliest tokens instead of draws (greedy, match, target_only)
    # controls that must fail with a rule that needs draws, or with all
    independent: bool = False  # siblings are drawn with replacement
    by_depth: bool = False  # nodes of one depth share their noise
    drop_first: bool = False  # the first drawn sibling is left out
    fixed_start: bool = False  # every block is keyed as block 0

    @property
    def depth(self):
        return max(map(self.level, range(len(self.parents))))

    def level(self, n):
        return len(reference.path_to(n, self.parents)) - 1


def _drawn_trees(model, drafter):
    """(tokens of all nodes, probability) of the trees that the drafter can draw."""
    kids = reference.children(drafter.parents)

    def grow(n, tokens, weight):
        if n == len(drafter.parents):
            yield tokens, weight
            return
        context = model.context([tokens[m] for m in reference.path_to(n, drafter.parents)[1:]])
        q = losslessness.softmax(model.draft[context], drafter.temperature)
        count = len(kids[n])
        if drafter.top_k:
            children = [(tuple(np.argsort(-q)[:count]), 1.0)]
        elif drafter.independent:
            children = _products(q, count)
        else:
            extra = int(drafter.drop_first and count > 0)
            children = ((x[extra:], w) for x, w in reference.draws(q, count + extra))
        for chosen, chance in children:
            after = list(tokens)
            for child, x in zip(kids[n], chosen):
                after[child] = int(x)
            yield from grow(n + 1, after, weight * chance)

    return grow(0, [-1] * len(drafter.parents), 1.0)


def _products(q, count):
    if count == 0:
        yield (), 1.0
        return
    for first, weight in _products(q, count - 1):
        for x in np.flatnonzero(q):
            yield (*first, int(x)), weight * q[x]


def enumerate_tree(model, rule, drafter, *, sampling=PLAIN, tree_rule=reference.tree_rule):
    """The exact law of the first depth + 1 tokens that a rule emits, [V ** (depth + 1)].

    What the rule leaves open follows the target's law, as later blocks would. sampling: a Sampling
    or a temperature. tree_rule(rule, p, q, tokens, parents) yields (probability, emitted tokens).
    """
    if not isinstance(sampling, Sampling):
        sampling = Sampling(temperature=sampling)
    parents, length = drafter.parents, drafter.depth + 1
    rows = np.stack([reference.law(logits, sampling)[0] for logits in model.target])
    drafts = losslessness.softmax(model.draft, drafter.temperature)
    total, open_laws = np.zeros(model.vocab**length), {}
    for tokens, weight in _drawn_trees(model, drafter):
        paths = [reference.path_to(n, parents)[1:] for n in range(len(parents))]
        codes = [model.context([tokens[m] for m in path]) for path in paths]
        p, q = rows[codes], drafts[codes]
        for chance, emitted in tree_rule(rule, list(p), list(q), tokens, parents):
            rest = length - len(emitted)
            at = sum(t * model.vocab ** (length - 1 - i) for i, t in enumerate(emitted))
            if emitted not in open_laws:
                open_laws[emitted] = model.law(sampling, rest, emitted)
            total[at : at + model.vocab**rest] += weight * chance * open_laws[emitted]
    return total


def tree_verifier(rule, *, dtype=torch.float32):
    """domino_kernels.verify_tree as a tree verifier."""
    from domino_kernels import verify_tree

    def verify(
        target_logits, tokens, parents, *, draft_logits, draft_temperature, sampling,
        draft_ids=None, **keywords,
    ):  # fmt: skip
        if rule in ("rrsw", "traversal"):
            keywords["draft_temperature"] = draft_temperature
            if draft_ids is None:
                keywords["draft_logits"] = draft_logits
            else:
                keywords["draft_pool"] = draft_ids, draft_logits
        result = verify_tree(target_logits.to(dtype), tokens, parents, rule=rule, **keywords)
        return result.tokens, result.num_emitted

    return verify


def _children(drafter, logits, count, seed, start, n):
    """Tokens [N, count] of the children of node n, logits [N, V], in the order of the draws."""
    from domino_kernels import noise

    extra = int(drafter.drop_first)
    if drafter.top_k:
        return logits.topk(count, -1).indices
    law = (logits / drafter.temperature).softmax(-1)
    key = drafter.level(n) if drafter.by_depth else n
    if drafter.independent:
        keys = [key + k * len(drafter.parents) for k in range(count)]
    else:
        keys = [key]
    races = [
        noise(seed, start, i, rng.DRAFT_TOKEN, logits.size(-1), kind="exponential") / law
        for i in keys
    ]
    if drafter.independent:
        return torch.stack([race.argmin(-1) for race in races], -1)
    finish, tokens = races[0].topk(min(count + extra, logits.size(-1)), -1, largest=False)
    tokens = tokens.where(finish.isfinite(), -1)[:, extra:]  # E / 0 = inf: nothing left to draw
    pad = tokens.new_full((len(tokens), count - tokens.size(1)), -1)
    return torch.cat([tokens, pad], 1)


def _decode(model, verify, drafter, sampling, length, seeds, device):
    target = torch.from_numpy(model.target).to(device)
    draft = torch.from_numpy(model.draft).to(device)
    if drafter.pool:
        pool_logits, pool_ids = draft.topk(drafter.pool, -1)
        draft = torch.full_like(draft, -torch.inf).scatter(-1, pool_ids, pool_logits)
    kids, nodes = reference.children(drafter.parents), len(drafter.parents)
    runs = len(seeds)
    out = torch.zeros(runs, length + nodes + 1, dtype=torch.int64, device=device)
    count = torch.zeros(runs, dtype=torch.int64, device=device)
    code = torch.full_like(count, model.start)
    active = torch.arange(runs, device=device)
    shape = torch.tensor(drafter.parents, dtype=torch.int32, device=device)
    while len(active):
        seed, start = seeds[active], count[active]
        if drafter.fixed_start:
            start = torch.zeros_like(start)
        contexts = [code[active]] + [None] * (nodes - 1)
        tokens = torch.full((len(active), nodes), -1, dtype=torch.int64, device=device)
        for n, children in enumerate(kids):
            if not children:
                continue
            drawn = _children(drafter, draft[contexts[n]], len(children), seed, start, n)
            tokens[:, children] = drawn
            for k, child in enumerate(children):
                contexts[child] = model.advance(contexts[n], drawn[:, k].clamp_min(0))
        contexts = torch.stack(contexts, 1)
        q = {"draft_logits": draft[contexts]}
        if drafter.pool:
            q = {"draft_logits": pool_logits[contexts], "draft_ids": pool_ids[contexts].int()}
        like = torch.ones(len(active), device=device)
        emitted, number = verify(
            target[contexts],
            tokens,
            shape.expand(len(active), nodes).contiguous(),
            temperature=like * sampling.temperature,
            seed=seed,
            block_start=start,
            draft_temperature=like * drafter.temperature,
            sampling=sampling,
            **q,
        )
        assert bool((number >= 1).all()), "the verifier emitted nothing for a healthy request"
        for j in range(drafter.depth + 1):
            has = j < number
            rows, token = active[has], emitted[:, j][has]
            assert bool(((token >= 0) & (token < model.vocab)).all()), "an id that does not exist"
            out[rows, count[rows] + j] = token
            code[rows] = model.advance(code[rows], token)
        count[active] += number
        active = active[count[active] < length]
    return out[:, :length]


def sample_tree(
    model, verify, drafter, *, runs, length, sampling=PLAIN, device="cpu", first_seed=0
):  # fmt: skip
    """Counts [V ** length] of the sequences of `runs` runs; see losslessness.sample."""
    if not isinstance(sampling, Sampling):
        sampling = Sampling(temperature=sampling)
    counts = torch.zeros(model.vocab**length, dtype=torch.int64, device=device)
    place = model.vocab ** torch.arange(length - 1, -1, -1, device=device)
    chunk = losslessness.CHUNK // 4  # a tree has more rows than a chain
    for first in range(0, runs, chunk):
        last = min(first + chunk, runs)
        seeds = torch.arange(first_seed + first, first_seed + last, device=device)
        sequences = _decode(model, verify, drafter, sampling, length, seeds, device)
        counts += torch.bincount((sequences * place).sum(-1), minlength=len(counts))
    return counts.cpu().numpy()
