import importlib
import json

import numpy as np
import pytest
from domino_draft import Target, evaluate, generate
from domino_draft.ngram import NgramDrafter

from .conftest import tiny_model
from .test_ngram import latest_place
from .tokens import chat_tokenizer


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


def test_run_counts_cut_at_a_stop_token_and_at_the_tail():
    run = evaluate.Run(output=list(range(10)), stopped=True, cycles=[3, 4, 4])
    assert run.counts() == (9, 3)  # the first token is the prompt's; two drafts lay past the stop
    assert evaluate.Run(list(range(10)), False, [3, 4, 4]).counts() == (11, 3)
    assert run.counts(keep=8) == (7, 2)  # cycles start at output tokens 1, 4 and 8
    assert run.counts(keep=4) == (3, 1)
    assert run.counts(keep=1) == (0, 0)


@pytest.fixture(scope="module")
def target():
    tokenizer = chat_tokenizer()
    return Target(tiny_model("Llama", vocab_size=len(tokenizer)), tokenizer)


@pytest.fixture(scope="module")
def prompts(target):
    rng = np.random.default_rng(0)
    size = target.vocab_size
    made = [
        evaluate.Prompt(name, f"{name}/{i}", "", rng.integers(2, size, n).tolist())
        for name, lengths in (("short", (3, 5, 4)), ("long", (12, 9)))
        for i, n in enumerate(lengths)
    ]
    return [*made, evaluate.Prompt("long", "long/1/2", "why", after="long/1")]


class Forgetful(NgramDrafter):
    """Looks one token back and proposes two."""

    def __init__(self):
        super().__init__(max_ngram=1, max_drafts=2)


def offline(prompt, text, propose):
    """Tokens and cycles along a fixed text, from the definition of a cycle."""
    position, cycles = 1, []
    while position < len(text):
        drafts = propose(prompt + text[:position])
        right = 0
        while right < len(drafts) and text[position + right :][:1] == [drafts[right]]:
            right += 1
        cycles.append(right + 1)
        position += right + 1
    return cycles


def test_second_turn_follows_the_own_answer(target, prompts):
    done = evaluate.complete_turns(target, prompts, max_new_tokens=6, batch_size=2)
    first, second = done[-2], done[-1]
    answer = generate(target, None, [first.ids], max_new_tokens=6).sequences[0]
    assert second.ids[: len(first.ids) + 6] == first.ids + answer
    assert target.tokenizer.decode(second.ids[len(first.ids) + 6 :]) == (
        "<|im_end|>\n<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_report_equals_an_offline_walk(target, prompts, batch_size):
    seen = []
    drafters = {"lookup": NgramDrafter(), "forgetful": Forgetful()}
    report = evaluate.evaluate(
        target,
        drafters,
        prompts,
        max_new_tokens=40,
        batch_size=batch_size,
        num_drafts={"lookup": 9},
        resamples=50,
        progress=lambda done, total: seen.append((done, total)),
    )
    json.dumps(report)
    assert seen[-1][0] == seen[-1][1] == len(seen)
    assert report["run"]["num_drafts"] == {"lookup": 9, "forgetful": 2}
    whole = evaluate.complete_turns(target, prompts, max_new_tokens=40, batch_size=batch_size)
    sums = {}
    for prompt, row in zip(whole, report["prompts"]):
        assert (prompt.set, prompt.id) == (row["set"], row["id"])
        text = generate(target, None, [prompt.ids], max_new_tokens=40).sequences[0]
        assert row["tokens"] == len(text) and row["kept"] == evaluate.repetitive_tail(text)
        for name, n, k in (("lookup", 3, 9), ("forgetful", 1, 2)):
            assert row["identical"][name]
            cycles = offline(prompt.ids, text, lambda ids, n=n, k=k: latest_place(ids, n, k))
            # what is drafted past the end of a cut text counts whole in the loop
            assert row["counts"][name][1] == len(cycles)
            assert sum(cycles) <= row["counts"][name][0] <= sum(cycles) + k
            total = sums.setdefault((prompt.set, name), [0, 0])
            total[0] += row["counts"][name][0]
            total[1] += row["counts"][name][1]
    for (name, drafter), (emitted, cycles) in sums.items():
        found = report["sets"][name]["drafters"][drafter]
        assert found["accepted_length"]["value"] == pytest.approx(emitted / cycles)
        assert found["accepted_length"]["cycles"] == cycles
        assert found["identical"] == 1.0 and found["violation_tokens"] == 0
        assert found["tokens_per_second"] > 0
    lookup = report["sets"]["short"]["drafters"]["lookup"]["accepted_length"]["value"]
    forgetful = report["sets"]["short"]["drafters"]["forgetful"]["accepted_length"]["value"]
    gap = next(d for d in report["sets"]["short"]["differences"] if d["tails"])
    assert gap["value"] == pytest.approx(lookup - forgetful)
    shown = evaluate.markdown(report)
    assert f"| short | lookup | {lookup:.2f} (" in shown and "100.0%" in shown


def test_a_changed_token_is_a_violation(target, prompts, monkeypatch):
    loop = importlib.import_module("domino_draft.decode")

    def broken(target, drafter, *args, **kwargs):
        result = generate(target, drafter, *args, **kwargs)
        if drafter is not None:
            result.sequences[0][1] = (result.sequences[0][1] + 1) % target.vocab_size
        return result

    monkeypatch.setattr(loop, "generate", broken)
    report = evaluate.evaluate(
        target, {"lookup": NgramDrafter()}, prompts[:3], max_new_tokens=8, resamples=10
    )
    found = report["sets"]["short"]["drafters"]["lookup"]
    assert found["identical"] == 0.0 and found["violation_tokens"] >= 3


def test_load_prompts(tmp_path):
    path = tmp_path / "p.jsonl"
    rows = [{"set": "a", "id": f"a/{i}", "text": "t", "ids": [1], "domain": "x"} for i in range(5)]
    rows += [
        {"set": "b", "id": "b/1/1", "text": "t", "ids": [1]},
        {"set": "b", "id": "b/1/2", "text": "t", "ids": None, "after": "b/1/1"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(evaluate.load_prompts(path)) == 7
    assert [p.id for p in evaluate.load_prompts(path, ["a"], 3)] == ["a/0", "a/2", "a/4"]
    with pytest.raises(ValueError, match=r"got 'c', expected some of \['a', 'b'\]"):
        evaluate.load_prompts(path, ["c"])
    good = {"set": "a", "id": "a/0", "text": "t", "ids": [1]}
    for bad, message in (
        ({"ids": None}, "p.jsonl:2: ids: got None, expected token ids"),
        ({"ids": []}, r"ids: got \[\]"),
        ({"ids": [1.5]}, r"ids: got \[1.5\]"),
        ({"ids": [1.5], "after": "a/0"}, r"ids: got \[1.5\]"),
        ({"id": 3}, "p.jsonl:2: id: got 3, expected a string"),
        ({"text": None}, "text: got None"),
        ({}, "id: got 'a/0' twice"),
    ):
        path.write_text(json.dumps(good) + "\n" + json.dumps(good | bad))
        with pytest.raises(ValueError, match=message):
            evaluate.load_prompts(path)
    for text, message in (("", "without a prompt"), ("{", "p.jsonl:1: got no JSON"), ("[]", "set")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            evaluate.load_prompts(path)
    path.write_text(json.dumps(rows[-1]))
    with pytest.raises(ValueError, match="b/1/2: got after='b/1/1'"):
        evaluate.load_prompts(path)
    third = {"set": "b", "id": "b/1/3", "text": "t", "after": "b/1/2"}
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, third]))
    with pytest.raises(ValueError, match=r"b/1/3: got after='b/1/2', expected .* a first turn"):
        evaluate.load_prompts(path)
