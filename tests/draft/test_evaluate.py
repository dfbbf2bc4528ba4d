import numpy as np
import pytest
from domino_draft import evaluate


@pytest.mark.parametrize(
    "text, kept",
    [
        ("abcdefghijklmnopqrst", "abcdefghijklmnopqrst"),
        ("start" + "xyz" * 6, "startxyz"),  # cut at the start of the second repetition
        ("start" + "xyz" * 6 + "x", "startxyz"),  # the last repetition may be cut short
        ("start" + "xyz" * 6 + "!", "start" + "xyz" * 6 + "!"),  # not at the end
        ("price 1000000", "price 1000000"),  # repeated, but short
        ("start" + "abcdefgh" * 2, "start" + "abcdefgh" * 2),  # two times are not a loop
        ("start" + "abcdefgh" * 3, "startabcdefgh"),
        ("t" * 40, "t"),
        ("", ""),
    ],
)
def test_repetitive_tail(text, kept):
    assert text[: evaluate.repetitive_tail([ord(c) for c in text])] == kept


def test_repetitive_tail_looks_no_further_than_the_longest_period():
    period = list(range(33))
    assert evaluate.repetitive_tail(period * 4) == 4 * 33
    assert evaluate.repetitive_tail(period * 4, max_period=33) == 33


def test_accepted_length_is_a_ratio_of_sums_and_not_a_mean_of_ratios():
    found = evaluate.accepted_length(np.array([30, 4]), np.array([10, 4]), resamples=200)
    assert found["value"] == pytest.approx(34 / 14)
    assert found["low"] == 1.0 and found["high"] == 3.0 and found["cycles"] == 14


def test_bootstrap_interval_covers_the_truth_about_95_times_in_100():
    generator = np.random.default_rng(1)
    covered = 0
    for trial in range(200):
        cycles = generator.integers(20, 60, 80)
        emitted = cycles + generator.poisson(1.3 * cycles)
        found = evaluate.accepted_length(emitted, cycles, resamples=400, seed=trial)
        covered += found["low"] <= 2.3 <= found["high"]
    assert 180 <= covered <= 199


def test_paired_difference_is_tighter_than_two_separate_intervals():
    generator = np.random.default_rng(2)
    tokens = generator.integers(100, 200, 100).astype(float)
    hard = generator.uniform(1.5, 4.0, 100)  # prompts differ much more than drafters do
    cycles = tokens / hard
    better, worse = (tokens, cycles), (tokens, cycles * 1.05)
    found = evaluate.difference(better, worse, resamples=500)
    assert found["value"] == pytest.approx(tokens.sum() / cycles.sum() * (1 - 1 / 1.05))
    assert found["low"] > 0
    single = evaluate.accepted_length(*better, resamples=500)
    assert found["high"] - found["low"] < 0.2 * (single["high"] - single["low"])
    swapped = evaluate.difference(worse, better, resamples=500)
    assert (swapped["low"], swapped["high"]) == pytest.approx((-found["high"], -found["low"]))
