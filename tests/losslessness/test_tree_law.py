"""The law of what verify_tree emits, with its own noise, over several blocks.

Amounts as in test_chain_law.py. Children are drawn by Gumbel-top-k with the drafting noise of the
contract, so drafter and verifier share a seed as they do in a decoder.
"""

import pytest
import torch

from domino_kernels.testing.losslessness import Model, g_test
from domino_kernels.testing.trees import TreeDrafter, sample_tree, tree_verifier

ALARM = 1e-9
SMALL = Model.random(3, 3, 1)
ZEROS = Model.random(4, 2, 2, draft_top_k=2)
MASKED = Model.random(4, 2, 3, masked=1, distance=2.0)
FORK, DEEP, STAR = (-1, 0, 0, 1, 1, 2), (-1, 0, 0, 1, 1, 3), (-1, 0, 0, 0)
WIDE = (-1,) + (0,) * 40 + (1, 2)

# name: rule, model, drafter, tokens a sequence, target temperature
LAWS = {
    "match": ("match", SMALL, TreeDrafter(FORK, top_k=True), 4, 1.0),
    "target_only": ("target_only", SMALL, TreeDrafter(FORK, top_k=True), 4, 1.0),
    "target_only, drawn": ("target_only", MASKED, TreeDrafter(DEEP), 4, 0.8),
    "rrsw": ("rrsw", SMALL, TreeDrafter(FORK), 4, 1.0),
    "rrsw, temperatures": ("rrsw", SMALL, TreeDrafter(DEEP, temperature=1.5), 4, 0.6),
    "rrsw, q with zeros": ("rrsw", ZEROS, TreeDrafter(STAR), 4, 1.0),
    "rrsw, pool": ("rrsw", SMALL, TreeDrafter(FORK, pool=2), 4, 1.0),
    "rrsw, masked target": ("rrsw", MASKED, TreeDrafter(FORK, pool=3), 4, 0.8),
    "rrsw, 40 siblings": ("rrsw", Model.random(64, 1, 5), TreeDrafter(WIDE, pool=48), 2, 1.0),
    "rrsw, q all but certain": ("rrsw", SMALL, TreeDrafter(STAR, temperature=0.02), 2, 1.0),
    "rrsw, pool all but certain": ("rrsw", SMALL, TreeDrafter(STAR, 0.02, pool=3), 2, 1.0),
    "traversal": ("traversal", SMALL, TreeDrafter(FORK), 4, 1.0),
    "traversal, deep": ("traversal", SMALL, TreeDrafter(DEEP, temperature=1.5), 4, 0.6),
    "traversal, q with zeros": ("traversal", ZEROS, TreeDrafter(DEEP), 4, 1.0),
    "traversal, q all but certain": (
        "traversal",
        SMALL,
        TreeDrafter(FORK, temperature=0.02),
        2,
        1.0,
    ),
    "traversal, pool": ("traversal", MASKED, TreeDrafter(DEEP, pool=2), 4, 1.0),
    "traversal, V = 257": ("traversal", Model.random(257, 1, 4), TreeDrafter(STAR), 2, 1.0),
}
DEEPEST = ("rrsw, pool", "traversal", "traversal, pool")
AMOUNTS = [
    pytest.param("cpu", 60_000, id="quick"),
    pytest.param("cpu", 1_000_000, id="slow", marks=pytest.mark.slow),
    pytest.param("cuda", 1_000_000, id="gpu", marks=pytest.mark.gpu),
    # sees a total variation of 4e-4; minutes
    pytest.param("cuda", 100_000_000, id="deep", marks=[pytest.mark.gpu, pytest.mark.slow]),
]


def judge(case, runs, device):
    rule, model, drafter, length, temperature = LAWS[case] if isinstance(case, str) else case
    counts = sample_tree(
        model,
        tree_verifier(rule),
        drafter,
        runs=runs,
        length=length,
        sampling=temperature,
        device=device,
    )
    assert counts.sum() == runs
    return g_test(counts, model.law(temperature, length))


@pytest.mark.parametrize("device, runs", AMOUNTS)
@pytest.mark.parametrize("name", LAWS)
def test_law(name, device, runs):
    runs = runs if name in DEEPEST else min(runs, 10_000_000)
    if "40 siblings" in name or "257" in name:
        runs = runs // 10  # large rows
    result = judge(name, runs, device)
    print(name, result)
    assert result.p_value > ALARM, result


BROKEN = {
    "rrsw on top-k siblings": ("rrsw", SMALL, TreeDrafter(FORK, top_k=True), 4, 1.0),
    "traversal on top-k siblings": ("traversal", SMALL, TreeDrafter(FORK, top_k=True), 4, 1.0),
    "rrsw, the first draw left out": (
        "rrsw",
        SMALL,
        TreeDrafter((-1, 0, 1), drop_first=True),
        4,
        1.0,
    ),
    "traversal, noise used again in the next block": (
        "traversal",
        SMALL,
        TreeDrafter(FORK, fixed_start=True),
        4,
        1.0,
    ),
    "traversal, noise by depth": ("traversal", SMALL, TreeDrafter(FORK, by_depth=True), 4, 1.0),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_drafters_are_caught(name, device):
    runs = 400_000 if "depth" in name else 60_000
    result = judge(BROKEN[name], runs, device)
    print(name, result)
    assert result.p_value < ALARM, result


def test_more_siblings_are_accepted_than_one(device):
    """Accepted drafts: one sibling < two < traversal's; the tests above could pass with none."""
    model, runs = SMALL, 20_000

    def accepted(rule, parents):
        total = 0

        def verify(*arguments, **keywords):
            nonlocal total
            tokens, number = tree_verifier(rule)(*arguments, **keywords)
            total += int((number - 1).sum())
            return tokens, number

        sample_tree(model, verify, TreeDrafter(parents), runs=runs, length=1, device=device)
        return total / runs

    one, two = accepted("rrsw", (-1, 0)), accepted("rrsw", (-1, 0, 0))
    assert two > one + 0.05
    assert accepted("traversal", FORK) > accepted("rrsw", FORK) - 0.02
    assert accepted("rrsw", FORK) > two + 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_law_of_rounded_logits(dtype, device):
    rounded = Model(
        torch.from_numpy(SMALL.target).to(dtype).float().numpy(), SMALL.draft, SMALL.order
    )
    counts = sample_tree(
        rounded,
        tree_verifier("rrsw", dtype=dtype),
        TreeDrafter(FORK),
        runs=60_000,
        length=4,
        device=device,
    )
    assert g_test(counts, rounded.law(1.0, 4)).p_value > ALARM
