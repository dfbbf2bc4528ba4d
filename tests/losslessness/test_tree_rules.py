"""The tree rules by exact enumeration in float64, and broken ones that enumeration has to catch."""

import numpy as np
import pytest

from domino_kernels.reference import tree as reference
from domino_kernels.reference.law import Sampling
from domino_kernels.testing.losslessness import Model, softmax, total_variation
from domino_kernels.testing.rules import block_rule
from domino_kernels.testing.trees import TreeDrafter, _drawn_trees, enumerate_tree

CHAIN, STAR, FORK = (-1, 0, 1), (-1, 0, 0), (-1, 0, 0, 1, 1, 2)
COMB, DEEP = (-1, 0, 0, 2, 3), (-1, 0, 0, 1, 1, 3)
SHAPES = dict(chain=CHAIN, star=STAR, fork=FORK, comb=COMB, deep=DEEP)
MODELS = [Model.random(3, 2, seed) for seed in range(6)]
MODELS += [Model.random(4, 2, seed, draft_top_k=2) for seed in range(3)]  # q with zeros
MODELS += [Model.random(4, 2, seed, masked=2, distance=2.0) for seed in range(4)]
DRAWN = "rrsw", "traversal"


def distance(model, rule, drafter, sampling=1.0, **keywords):
    law = enumerate_tree(model, rule, drafter, sampling=sampling, **keywords)
    return total_variation(law, model.law(sampling, drafter.depth + 1))


@pytest.mark.parametrize("rule", ["target_only", "rrsw", "traversal"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rules_are_lossless(shape, rule):
    drafter = TreeDrafter(SHAPES[shape], temperature=1.3)
    found = [distance(model, rule, drafter, sampling=0.8) for model in MODELS]
    assert max(found) < 1e-12, found


@pytest.mark.parametrize("rule", ["target_only", "rrsw", "traversal"])
@pytest.mark.parametrize(
    "filters", [dict(top_k=1), dict(top_k=2), dict(top_p=0.7), dict(min_p=0.4)]
)
def test_filtered_targets(filters, rule):
    """Filters give rows with a P <= Q: the case Z = 0 of correction 1."""
    found = [
        distance(m, rule, TreeDrafter(shape), Sampling(temperature=0.9, **filters))
        for m in MODELS[:3] + MODELS[6:8]
        for shape in (STAR, DEEP)
    ]
    assert max(found) < 1e-12, found


def test_filtered_targets_meet_an_empty_residual():
    """Otherwise the test above says nothing about Z = 0."""
    found = 0
    for model in MODELS[:3]:
        for code in range(len(model.target)):
            p = reference.law(model.target[code], Sampling(top_k=2))[0]
            q = reference.law(model.draft[code], 1.0)[0]
            for a in (1.0, 0.5, 0.2):
                for x in range(3):
                    node = reference.resolve_node("traversal", p, q, a, [1], [-1, x])
                    found += node.keep == 0.0
    assert found > 20


def test_any_distinct_siblings_go_with_target_only():
    drafter = TreeDrafter(FORK, top_k=True)
    assert max(distance(model, "target_only", drafter) for model in MODELS) < 1e-12


@pytest.mark.parametrize("rule", ["target_only", "rrsw", "traversal"])
def test_repeated_siblings_are_passed_over(rule):
    """Drawn with replacement, and repeats left alone: those that count are draws without."""
    drafter = TreeDrafter((-1, 0, 0, 0), independent=True)
    assert max(distance(model, rule, drafter) for model in MODELS) < 1e-12


@pytest.mark.parametrize("rule", ["target_only", "rrsw", "traversal"])
def test_many_siblings(rule):
    """38 siblings of a vocabulary of 40: the law of one step, averaged over drawn trees.

    Given the draws, target-only has the target's law exactly; the others have it on average.
    """
    generator = np.random.default_rng(3)
    vocab, draws = 40, 400
    p, q = (generator.dirichlet(np.full(vocab, 0.3)) for _ in range(2))
    parents = (-1,) + (0,) * 38
    rows = [p] + [np.eye(vocab)[0]] * 38
    laws = np.zeros((draws, vocab))
    for law in laws:
        order = np.argsort(generator.exponential(size=vocab) / q)
        for chance, emitted in reference.tree_rule(
            rule, rows, [q] * 39, [-1, *order[:38]], parents
        ):
            law[emitted[0]] += chance
    assert np.allclose(laws.sum(-1), 1.0, atol=1e-12)
    if rule == "target_only":
        assert np.abs(laws - p).max() < 1e-12
    # a chance between 0 and 1 of mean p has at most the variance of a coin
    assert (np.abs(laws.mean(0) - p) < 5 * np.sqrt(p / draws) + 5 / draws).all()


def test_traversal_accepts_most_and_equals_block_verification_on_chains():
    def mean(model, rule, parents):
        total = 0.0
        for tokens, weight in _drawn_trees(model, TreeDrafter(parents)):
            paths = [reference.path_to(n, parents)[1:] for n in range(len(parents))]
            codes = [model.context([tokens[m] for m in path]) for path in paths]
            p, q = softmax(model.target[codes], 1.0), softmax(model.draft[codes], 1.0)
            for chance, emitted in reference.tree_rule(rule, list(p), list(q), tokens, parents):
                total += weight * chance * (len(emitted) - 1)
        return total

    def chain_mean(model):
        total = 0.0
        for x in range(3):
            for y in range(3):
                codes = [model.context(t) for t in ((), (x,), (x, y))]
                p, q = softmax(model.target[codes], 1.0), softmax(model.draft[codes], 1.0)
                for chance, emitted in block_rule(p, q[:2], (x, y)):
                    total += q[0][x] * q[1][y] * chance * (len(emitted) - 1)
        return total

    for model in MODELS[:6]:
        rrsw, traversal = (mean(model, rule, FORK) for rule in DRAWN)
        target_only = mean(model, "target_only", FORK)
        assert traversal >= rrsw - 1e-12
        assert rrsw > target_only
        assert abs(mean(model, "traversal", CHAIN) - chain_mean(model)) < 1e-12


# --- controls ---------------------------------------------------------------------------------


def wrong_rules():
    """name -> (rule, tree_rule) of forms that have been shipped or proposed."""

    def without(change):
        def tree_rule(rule, p, q, tokens, parents):
            original = reference.resolve_node
            reference.resolve_node = change(original)
            try:
                return list(reference.tree_rule(rule, p, q, tokens, parents))
            finally:
                reference.resolve_node = original

        return tree_rule

    def independent(original):  # every sibling by p / q, p never updated
        def resolve(rule, p, q, a, nodes, tokens):
            node = original(rule, p, q, a, nodes, tokens)
            accept = [min(1.0, p[tokens[c]] / q[tokens[c]]) for c in nodes]
            return node._replace(accept=accept, rest=p)

        return resolve

    def keep_q(original):  # p updated, q not renormalised without the tried sibling
        def resolve(rule, p, q, a, nodes, tokens):
            rest, accept = p.copy(), []
            for c in nodes:
                x = tokens[c]
                accept.append(min(1.0, rest[x] / q[x]))
                over = np.maximum(rest - q, 0.0)
                rest = over / over.sum() if over.sum() > 1e-12 else rest
            return original(rule, p, q, a, nodes, tokens)._replace(accept=accept, rest=rest)

        return resolve

    def forget_a(original):  # the accept test without the node's a
        def resolve(rule, p, q, a, nodes, tokens):
            node = original(rule, p, q, a, nodes, tokens)
            return node._replace(accept=original(rule, p, q, 1.0, nodes, tokens).accept)

        return resolve

    return {
        "independent siblings": ("rrsw", without(independent)),
        "q is not renormalised": ("rrsw", without(keep_q)),
        "accept test without a": ("traversal", without(forget_a)),
    }


@pytest.mark.parametrize("name", wrong_rules())
def test_broken_rules_are_caught(name):
    rule, tree_rule = wrong_rules()[name]
    found = [distance(m, rule, TreeDrafter(DEEP), tree_rule=tree_rule) for m in MODELS[:6]]
    assert np.median(found) > 0.005, found


@pytest.mark.parametrize("rule", DRAWN)
@pytest.mark.parametrize("wrong", [dict(top_k=True), dict(drop_first=True)])
def test_trees_that_were_not_drawn_are_caught(wrong, rule):
    """Correction 3: top-k trees, and a sibling left out."""
    shape = STAR if "drop_first" not in wrong else CHAIN
    found = [distance(m, rule, TreeDrafter(shape, **wrong)) for m in MODELS[:6]]
    assert np.median(found) > 0.003, found
