"""How many tokens to draft, by what is accepted and what a cycle costs."""

import random

import pytest
from domino_draft.policy import Choice, DraftLength


def kept(rng, chance, drafts):
    n = 0
    while n < drafts and rng.random() < chance:
        n += 1
    return n


def settle(chance, costs, cycles=400, rows=1, most=15):
    policy, rng, taken = DraftLength(most), random.Random(1), []
    for _ in range(cycles):
        choice = policy.choose(costs)
        policy.observe(choice, [kept(rng, chance, choice.drafts) for _ in range(rows)])
        taken.append(choice.drafts)
    return policy, taken


def best(chance, costs):
    value = lambda k: sum(chance**i for i in range(k + 1)) / costs[Choice.whole(k)]  # noqa: E731
    return max((choice.drafts for choice in costs), key=value), value


WHOLE = DraftLength(15).choices(1)
FLAT = {c: 1.2 + 0.005 * c.drafts if c.drafts else 1.0 for c in WHOLE}
STEEP = {c: 1.3 + 0.25 * c.drafts if c.drafts else 1.0 for c in WHOLE}


@pytest.mark.parametrize("costs", [FLAT, STEEP], ids=["flat", "steep"])
@pytest.mark.parametrize("chance", [0.3, 0.6, 0.88])
def test_comes_within_a_tenth_of_the_best(chance, costs):
    wanted, value = best(chance, costs)
    _, taken = settle(chance, costs, rows=8)
    late = [value(k) for k in taken[100:]]
    assert sum(late) / len(late) > 0.9 * value(wanted)


def test_turns_off_and_tries_again_ever_less_often():
    _, taken = settle(0.0, STEEP, cycles=2000)
    tries = [i for i, k in enumerate(taken) if k]
    assert 3 < len(tries) < 40 and taken[-1] == 0
    late = [i for i in tries if i > 200]
    assert len(late) / 1800 < 0.005


def test_comes_back_when_the_text_turns_easy():
    policy, _ = settle(0.0, STEEP, cycles=300)
    rng, taken = random.Random(2), []
    for _ in range(4000):
        choice = policy.choose(FLAT)
        policy.observe(choice, [kept(rng, 0.95, choice.drafts)])
        taken.append(choice.drafts)
    assert taken[-1] > 5


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
