"""The rules by exact enumeration in float64, and broken ones that enumeration has to catch."""

import numpy as np
import pytest

from domino_kernels.testing.losslessness import (
    Model,
    enumerate_rule,
    softmax,
    token_rule,
    total_variation,
)

MODELS = [Model.random(3, 3, seed) for seed in range(20)]
MODELS += [Model.random(4, 2, seed, draft_top_k=2) for seed in range(10)]
MODELS += [Model.random(4, 2, seed, masked=1, distance=2.0) for seed in range(10)]


def distance(model, rule=token_rule, drafts=2, **keywords):
    law = enumerate_rule(model, rule, drafts, **keywords)
    return total_variation(law, model.law(keywords.get("temperature", 1.0), drafts + 1))


@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize(
    "keywords",
    [
        dict(),
        dict(temperature=0.6, draft_temperature=1.4),
        dict(one_hot=True),
        dict(one_hot=True, argmax=True, temperature=0.7),
        dict(stop=lambda drafted: len(drafted) == 1 and drafted[0] == 1),
        dict(stop=lambda drafted: len(drafted) == 2, one_hot=True),
    ],
    ids=["dense", "temperatures", "one-hot", "argmax", "stop-after-a-token", "short"],
)
def test_the_token_rule_is_lossless(keywords, drafts):
    models = MODELS if drafts < 3 else MODELS[::4]
    assert max(distance(model, drafts=drafts, **keywords) for model in models) < 1e-14


def test_law_is_a_law():
    for model in MODELS:
        law = model.law(0.8, 4)
        assert law.shape == (model.vocab**4,) and abs(law.sum() - 1) < 1e-14
        # [1, 0] by hand
        first, second = (softmax(model.target[model.context(h)], 0.8) for h in ((), (1,)))
        pair = law.reshape(model.vocab, model.vocab, -1).sum(-1)[1, 0]
        assert abs(pair - first[1] * second[0]) < 1e-15


def without_residual_update(p_rows, q_rows, drafts):
    """A rejected draft is replaced from p itself."""
    reached = 1.0
    for i, x in enumerate(drafts):
        accept = min(1.0, p_rows[i][x] / q_rows[i][x])
        for y, p in enumerate(p_rows[i]):
            yield reached * (1 - accept) * p, (*drafts[:i], y)
        reached *= accept
    for y, p in enumerate(p_rows[-1]):
        yield reached * p, (*drafts, y)


def dropping_the_trigger(p_rows, q_rows, drafts):
    """The chain is cut before the token whose own draft probability is low."""
    keep = next((i for i, x in enumerate(drafts) if q_rows[i][x] < 0.25), len(drafts))
    yield from token_rule(p_rows[: keep + 1], q_rows[:keep], drafts[:keep])


def cutting_by_the_law(p_rows, q_rows, drafts):
    """The right form of it: the cut depends on the law of the next draft, not on the draft."""
    keep = next((i for i in range(len(drafts)) if q_rows[i].max() < 0.6), len(drafts))
    yield from token_rule(p_rows[: keep + 1], q_rows[:keep], drafts[:keep])


def test_truncation_by_the_draft_law_is_lossless():
    assert max(distance(model, cutting_by_the_law) for model in MODELS) < 1e-14


@pytest.mark.parametrize(
    "rule, keywords",
    [
        (without_residual_update, {}),
        (dropping_the_trigger, {}),
        (token_rule, dict(argmax=True)),  # argmax drafts judged by the soft q
        (token_rule, dict(draft_temperature=1.0, wrong=0.6)),  # q off by a temperature
    ],
    ids=["no-residual-update", "dropped-trigger", "soft-q-argmax", "wrong-temperature"],
)
def test_broken_rules_are_caught(rule, keywords):
    keywords = dict(keywords)
    wrong = keywords.pop("wrong", None)

    def told_wrong(p_rows, q_rows, drafts):
        power = np.power(q_rows, 1 / wrong)
        return rule(p_rows, power / power.sum(-1, keepdims=True), drafts)

    found = [distance(m, told_wrong if wrong else rule, **keywords) for m in MODELS[:20]]
    assert np.median(found) > 0.01, found
