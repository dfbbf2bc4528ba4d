"""How many tokens to draft, by what is accepted and what a cycle costs."""

import random
from collections import deque

import pytest
from domino_draft.engine import AHEAD
from domino_draft.policy import Choice, DraftLength

WHOLE = DraftLength(15).choices(1)
FLAT = {c: 1.2 + 0.005 * c.drafts if c.drafts else 1.0 for c in WHOLE}
STEEP = {c: 1.3 + 0.25 * c.drafts if c.drafts else 1.0 for c in WHOLE}
# Rows, milliseconds of a step and of a cycle with so many drafts on an H200
# (bench/results/cycle-{smollm2,qwen3-8b}-h200.json).
MEASURED = {
    "smollm2-1": (1, 0.736, 15, 0.992),
    "qwen3-8b-1": (1, 4.48, 15, 5.61),
    "qwen3-8b-8": (8, 4.73, 15, 7.00),
    "qwen3-8b-32": (32, 5.92, 7, 10.45),
    "qwen3-8b-64": (64, 7.43, 3, 11.92),
}


def measured(case):
    """(rows, costs): of what a cycle adds to a step, half is taken to come with the first draft and
    the rest to go with their number."""
    rows, step, drafts, cycle = MEASURED[case]
    added = (cycle - step) / 2
    return rows, {c: step + bool(c.drafts) * added * (1 + c.drafts / drafts) for c in WHOLE}


def kept(rng, chance, drafts):
    n = 0
    while n < drafts and rng.random() < chance:
        n += 1
    return n


def run(policy, chance, costs, cycles, rows, seed=1):
    """Drafts of each cycle, chosen as the engine does: AHEAD of what it then observes."""
    rng, taken, queued = random.Random(seed), [], deque()
    while len(taken) < cycles:
        while len(queued) < AHEAD:
            queued.append(policy.choose(costs))
        choice = queued.popleft()
        policy.observe(choice, [kept(rng, chance, choice.drafts) for _ in range(rows)])
        taken.append(choice.drafts)
    return taken


def best(chance, costs):
    """The best number of drafts, and the tokens per time of any, as a share of its."""
    rate = lambda k: sum(chance**i for i in range(k + 1)) / costs[Choice.whole(k)]  # noqa: E731
    top = max((choice.drafts for choice in costs), key=rate)
    return top, lambda k: rate(k) / rate(top)


def speed(chance, costs, taken):
    """Tokens per time of these cycles, as a share of what the best choice has."""
    time = sum(costs[Choice.whole(k)] for k in taken)
    tokens = sum(sum(chance**i for i in range(k + 1)) for k in taken)
    top = best(chance, costs)[0]
    return tokens / time * costs[Choice.whole(top)] / sum(chance**i for i in range(top + 1))


@pytest.mark.parametrize("costs", [FLAT, STEEP], ids=["flat", "steep"])
@pytest.mark.parametrize("chance", [0.3, 0.6, 0.88])
def test_comes_close_to_the_best(chance, costs):
    taken = run(DraftLength(15), chance, costs, 400, rows=8)
    assert speed(chance, costs, taken[100:]) > 0.97


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("case", MEASURED)
def test_loses_less_than_a_hundredth_where_nothing_is_accepted(case, seed):
    """Over 2,000 cycles, finding it out included; the first 100, too, where a batch tells soon."""
    rows, costs = measured(case)
    taken = run(DraftLength(15), 0.0, costs, 2000, rows, seed)
    assert speed(0.0, costs, taken) > 0.99
    assert speed(0.0, costs, taken[:100]) > (0.97 if rows > 1 else 0.93)
    assert any(taken[1000:])  # and it never stops to try


@pytest.mark.parametrize("case", MEASURED)
@pytest.mark.parametrize("chance", [0.3, 0.5, 0.75, 0.88])
def test_finds_the_best_within_100_cycles(case, chance):
    rows, costs = measured(case)
    taken = run(DraftLength(15), chance, costs, 2000, rows)
    assert speed(chance, costs, taken) > 0.985
    assert speed(chance, costs, taken[:100]) > 0.95
    assert speed(chance, costs, taken[100:]) > 0.985


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("case", MEASURED)
def test_drafts_again_when_the_text_turns_easy(case, seed):
    """After 2,000 cycles in which nothing was accepted: within 100 cycles of a batch, and within
    300 of a single row, of which each try tells less."""
    rows, costs = measured(case)
    policy = DraftLength(15)
    run(policy, 0.0, costs, 2000, rows, seed)
    late = run(policy, 0.75, costs, 600, rows, seed)[100 if rows > 1 else 300 :]
    assert speed(0.75, costs, late) > 0.97


def test_few_drafts_do_not_hide_what_more_would_keep():
    """Once every block is found to keep 3 drafts of 15, blocks of 3 drafts are all kept, always:
    that says nothing about a fourth."""
    policy = DraftLength(15)
    for choice in [Choice.whole(15)] * 50 + [Choice.whole(3)] * 500:
        policy.observe(choice, [3] * 8)
    gain = policy.expected(Choice.whole(15)) - policy.expected(Choice.whole(3))
    assert policy.expected(Choice.whole(3)) > 3.9 and gain < 0.3


def test_choices_end_with_the_most():
    drafts = lambda most: [c.drafts for c in DraftLength(most).choices(1)]  # noqa: E731
    assert drafts(6) == [0, 1, 3, 6] and drafts(1) == [0, 1]
    assert not any(c.partial for c in DraftLength(15).choices(7))
    assert not any(c.partial for c in DraftLength(15, partial=False).choices(64))


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_fewer_are_verified_where_confidence_tells_the_rows_apart(share):
    """Half of the rows keep everything and half nothing. If the head can tell which, verifying half
    the tokens is best; if it is as good as blind, it is not. Cost: the tokens verified."""
    policy, rng, taken = DraftLength(15), random.Random(3), []
    costs = {c: 1.0 + 0.1 * c.tokens + 0.01 * c.drafts for c in policy.choices(8)}
    for _ in range(3000):
        choice, rows = policy.choose(costs), []
        for row in range(8):
            easy, told = row < 4, rng.random() < share
            verified = choice.drafts
            if choice.partial:  # the tokens of the rows that seem easy
                verified = min(2 * choice.tokens - 1, choice.drafts) if easy == told else 0
            rows.append(verified if easy else 0)
        policy.observe(choice, rows)
        taken.append(choice)
    late = taken[1500:]
    partial = sum(c.partial for c in late) / len(late)
    assert partial > 0.9 if share == 0.9 else partial < 0.2
