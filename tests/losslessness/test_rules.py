"""The rules by exact enumeration in float64, and broken ones that enumeration has to catch."""

import numpy as np
import pytest

from domino_kernels.testing.losslessness import (
    Model,
    Sampling,
    enumerate_coupled,
    enumerate_rule,
    softmax,
    total_variation,
)
from domino_kernels.testing.rules import (
    block_rule,
    block_thresholds,
    coupling,
    match_rule,
    token_rule,
)

PLAIN = Sampling()
MODELS = [Model.random(3, 3, seed) for seed in range(20)]
MODELS += [Model.random(4, 2, seed, draft_top_k=2) for seed in range(10)]  # q with zeros
MODELS += [Model.random(4, 2, seed, masked=1, distance=2.0) for seed in range(10)]  # p with zeros
RULES = {"token": token_rule, "match": match_rule, "block": block_rule}


def distance(model, rule, drafts=2, sampling=PLAIN, **keywords):
    law = enumerate_rule(model, rule, drafts, sampling=sampling, **keywords)
    return total_variation(law, model.law(sampling, drafts + 1))


MODES = {
    "sampled": dict(),
    "temperatures": dict(sampling=Sampling(0.6), draft_temperature=1.4),
    "one-hot": dict(one_hot=True),
    "argmax": dict(one_hot=True, argmax=True, sampling=Sampling(0.7)),
    "-1 after a token": dict(stop=lambda drafted: len(drafted) == 1 and drafted[0] == 1),
    "ragged": dict(stop=lambda drafted: len(drafted) == 2, sampling=Sampling(1.3)),
    "filtered target": dict(sampling=Sampling(0.8, top_k=3, top_p=0.8)),
    "filtered target, min-p": dict(sampling=Sampling(1.0, min_p=0.3), one_hot=True),
    "penalties": dict(sampling=Sampling(0.9, repetition=1.4, presence=0.5, frequency=0.3)),
}


@pytest.mark.parametrize("drafts", [0, 1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", RULES)
def test_rules_are_lossless(rule, mode, drafts):
    models = MODELS if drafts < 3 else MODELS[::4]
    found = [distance(model, RULES[rule], drafts, **MODES[mode]) for model in models]
    assert max(found) < 1e-12, max(found)


@pytest.mark.parametrize("drafts", [1, 2, 3])
@pytest.mark.parametrize("mode", ["sampled", "temperatures", "filtered target", "penalties"])
def test_the_coupled_rule_is_lossless(mode, drafts):
    keywords = {k: v for k, v in MODES[mode].items() if k != "one_hot"}
    for model in MODELS if drafts < 3 else MODELS[::8]:
        law = enumerate_coupled(model, drafts, **keywords)
        expected = model.law(keywords.get("sampling", Sampling()), drafts + 1)
        assert total_variation(law, expected) < 1e-12


def laws(count, vocab, seed):
    """Pairs (p, q) of random laws; every third has zeros, every seventh is a pair of equal ones."""
    generator = np.random.default_rng(seed)
    for n in range(count):
        p, q = generator.dirichlet(np.ones(vocab), 2)
        if n % 3 == 0:
            p[generator.integers(vocab)] = 0
            q[generator.integers(vocab)] = 0
        if n % 7 == 0:
            q = p.copy()
        yield p / p.sum(), q / q.sum()


def test_coupling_has_the_right_margins():
    for vocab in (2, 3, 5):
        for p, q in laws(100, vocab, vocab):
            joint = coupling(p, q)
            assert (joint >= 0).all()
            assert np.abs(joint.sum(0) - p).max() < 1e-12
            assert np.abs(joint.sum(1) - q).max() < 1e-12
            # Daliri et al. 2408.07978: at least (1 - TV) / (1 + TV)
            distance = total_variation(p, q)
            assert joint.trace() > (1 - distance) / (1 + distance) - 1e-12


def accepted(model, rule, drafts):
    """Expected number of accepted drafts."""
    total = 0.0

    def counted(p_rows, q_rows, drafted):
        nonlocal total
        for weight, emitted in rule(p_rows, q_rows, drafted):
            chain = np.prod([q[x] for q, x in zip(q_rows, drafted)])
            total += chain * weight * (len(emitted) - 1)
            yield weight, emitted

    enumerate_rule(model, counted, drafts)
    return total


def test_acceptance_of_the_rules():
    """match <= token <= block, and block is token for one draft."""
    gained = []
    for model in MODELS[:20]:
        match, token, block = (accepted(model, RULES[n], 3) for n in ("match", "token", "block"))
        assert match <= token + 1e-12 and token <= block + 1e-12
        gained.append(block - token)
        assert abs(accepted(model, token_rule, 1) - accepted(model, block_rule, 1)) < 1e-12
    assert np.mean(gained) > 0.05


def test_block_rule_with_one_hot_drafts_is_the_token_rule():
    for model in MODELS[:8]:
        by_rule = []
        for rule in (token_rule, block_rule):
            counts = np.zeros(4)

            def counted(p_rows, q_rows, drafted):
                for weight, emitted in rule(p_rows, q_rows, drafted):  # noqa: B023
                    counts[len(emitted) - 1] += weight / 27  # noqa: B023
                    yield weight, emitted

            enumerate_rule(model, counted, 3, one_hot=True)
            by_rule.append(counts)
        # the same number of accepted drafts, in law
        assert np.abs(by_rule[0] - by_rule[1]).max() < 1e-12


def test_law_is_a_law():
    for model in MODELS:
        law = model.law(0.8, 4)
        assert law.shape == (model.vocab**4,) and abs(law.sum() - 1) < 1e-14
        # [1, 0] by hand
        first, second = (softmax(model.target[model.context(h)], 0.8) for h in ((), (1,)))
        pair = law.reshape(model.vocab, model.vocab, -1).sum(-1)[1, 0]
        assert abs(pair - first[1] * second[0]) < 1e-15
    penalised = MODELS[0].law(Sampling(presence=1.0), 3)
    assert abs(penalised.sum() - 1) < 1e-14
    assert total_variation(penalised, MODELS[0].law(1.0, 3)) > 0.01


# --- controls: each of these must be caught ---------------------------------------------------


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


def cutting_by_the_law(rule):
    """The right form of it: the cut depends on the law of the next draft, not on the draft."""

    def cut(p_rows, q_rows, drafts):
        keep = next((i for i in range(len(drafts)) if q_rows[i].max() < 0.6), len(drafts))
        yield from rule(p_rows[: keep + 1], q_rows[:keep], drafts[:keep])

    return cut


@pytest.mark.parametrize("rule", [token_rule, block_rule, match_rule])
def test_truncation_by_the_draft_law_is_lossless(rule):
    assert max(distance(model, cutting_by_the_law(rule)) for model in MODELS) < 1e-14


def block_to_the_first_failure(p_rows, q_rows, drafts):
    """Stops at the first coin above its h instead of looking for the last one below."""
    reach, h = block_thresholds(p_rows, q_rows, drafts)
    n, reached = len(drafts), 1.0
    for i in range(n + 1):
        go_on = h[i + 1] if i < n else 0.0
        rest = p_rows[i] if i == n else np.maximum(reach[i] * p_rows[i] - q_rows[i], 0.0)
        if rest.sum() == 0:
            rest = p_rows[i]
        for y, weight in enumerate(rest / rest.sum()):
            yield reached * (1 - go_on) * weight, (*drafts[:i], y)
        reached *= go_on


def block_by_the_drafted_token(p_rows, q_rows, drafts):
    """Z with q = 1 for the whole row, as an engine's first version had it."""
    _, h = block_thresholds(p_rows, np.ones_like(q_rows), drafts)
    reach, _ = block_thresholds(p_rows, q_rows, drafts)
    left, n = 1.0, len(drafts)
    for i in range(n, -1, -1):
        stops = left * (h[i] if 0 < i < n else reach[i])
        rest = p_rows[i] if i == n else np.maximum(reach[i] * p_rows[i] - q_rows[i], 0.0)
        if rest.sum() == 0:
            rest = p_rows[i]
        for y, weight in enumerate(rest / rest.sum()):
            yield stops * weight, (*drafts[:i], y)
        left -= stops


def coins_shared_with_the_draft(p_rows, q_rows, drafts):
    """Race noise of draft and target is one, and the ratio test comes on top."""
    p, q, x = p_rows[0], q_rows[0], drafts[0]
    joint = coupling(p, q)
    accept = min(1.0, p[x] / q[x])
    for y in range(len(p)):
        yield (1 - accept) * joint[x, y] / q[x], (y,)
    for y in range(len(p)):
        yield accept * p_rows[1][y], (x, y)


@pytest.mark.parametrize(
    "rule, keywords",
    [
        (without_residual_update, {}),
        (dropping_the_trigger, {}),
        (block_to_the_first_failure, {}),
        (block_by_the_drafted_token, {}),
        (coins_shared_with_the_draft, dict(drafts=1)),
        (token_rule, dict(argmax=True)),  # argmax drafts judged by the soft q
        (block_rule, dict(argmax=True)),
        (token_rule, dict(wrong=0.6)),  # q off by a temperature
        (block_rule, dict(wrong=0.6)),
    ],
    ids=[
        "no-residual-update",
        "dropped-trigger",
        "first-failure-scan",
        "block-with-q-of-the-draft",
        "shared-race",
        "soft-q-argmax-token",
        "soft-q-argmax-block",
        "wrong-temperature-token",
        "wrong-temperature-block",
    ],
)
def test_broken_rules_are_caught(rule, keywords):
    keywords = dict(keywords)
    wrong = keywords.pop("wrong", None)

    def told_wrong(p_rows, q_rows, drafts):
        power = np.power(q_rows, 1 / wrong)
        return rule(p_rows, power / power.sum(-1, keepdims=True), drafts)

    found = [distance(m, told_wrong if wrong else rule, **keywords) for m in MODELS[:20]]
    print(f"median distance {np.median(found):.3f}")
    assert np.median(found) > 0.005, found
