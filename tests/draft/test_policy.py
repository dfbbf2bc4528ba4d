"""How many tokens to draft, by what is accepted and what a cycle costs."""

import random

import pytest
from domino_draft.policy import DraftLength


def kept(rng, chance, drafts):
    n = 0
    while n < drafts and rng.random() < chance:
        n += 1
    return n


def settle(chance, costs, cycles=400, rows=1, most=15):
    policy, rng, taken = DraftLength(most), random.Random(1), []
    for _ in range(cycles):
        drafts = policy.choose(costs)
        policy.observe(drafts, [kept(rng, chance, drafts) for _ in range(rows)])
        taken.append(drafts)
    return policy, taken


def best(chance, costs):
    value = lambda k: sum(chance**i for i in range(k + 1)) / costs[k]  # noqa: E731
    return max(costs, key=value), value


FLAT = {k: 1.2 + 0.005 * k if k else 1.0 for k in DraftLength(15).choices}
STEEP = {k: 1.3 + 0.25 * k if k else 1.0 for k in DraftLength(15).choices}


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
        drafts = policy.choose(FLAT)
        policy.observe(drafts, [kept(rng, 0.95, drafts)])
        taken.append(drafts)
    assert taken[-1] > 5


def test_choices_end_with_the_most():
    assert DraftLength(6).choices == [0, 1, 3, 6]
    assert DraftLength(1).choices == [0, 1]
