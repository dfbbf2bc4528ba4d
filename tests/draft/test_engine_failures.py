"""The engine: what goes wrong ends one request, or nothing."""

import pytest
import torch
from domino_draft import DominoDrafter, Engine, Target
from domino_draft.policy import Choice

from .conftest import tiny_model
from .test_decode import own_text
from .test_engine import LENGTH, collect, make_drafter


@pytest.fixture(scope="module")
def target():
    return Target(tiny_model("Qwen3"))


def test_what_cannot_work_is_refused_and_the_others_go_on(target):
    engine = Engine(target, max_batch=2, max_length=12)
    engine.add([5, 17], 8)
    engine.step()

    def refused(error, message, prompt=(1, 2), new=4, **settings):
        with pytest.raises(error, match=message):
            engine.add(prompt, new, **settings)

    refused(ValueError, "add: prompt: got no tokens", [])
    refused(ValueError, "add: prompt: got token 61, expected 0..60", [61])
    refused(TypeError, "add: prompt: got a string", "text")
    refused(ValueError, "got 2 tokens and max_new_tokens 11, expected at most 12", new=11)
    refused(ValueError, "add: max_new_tokens: got 0", new=0)
    refused(ValueError, "add: temperature: got nan", temperature=float("nan"))
    refused(ValueError, "add: seed: got 9223372036854775808", seed=1 << 63)
    refused(ValueError, "add: seed: got 1.5, expected an integer", seed=1.5)
    refused(TypeError, "add: stop_token_ids: got 5, expected a list", stop_token_ids=5)
    engine.add([3], 11)
    texts, finish = {}, {}
    collect(engine, texts, finish)
    assert finish == {0: "length", 1: "length"}
    assert texts[1] == own_text(target.model, [3], 11)


def test_settings_out_of_range(target, tiny_config):
    def refused(message, drafter=None, **settings):
        with pytest.raises(ValueError, match=message):
            Engine(target, drafter, **({"max_batch": 1, "max_length": 8} | settings))

    refused("Engine: max_batch: got 0", max_batch=0)
    refused("Engine: max_length: got 0", max_length=0)
    refused("Engine: max_length: got 257, expected at most 256", max_length=257)
    refused("Engine: prefill_tokens: got 0", prefill_tokens=0)
    refused("Engine: num_drafts: got 3 and no drafter", num_drafts=3)
    refused("check_target: vocab_size", DominoDrafter(tiny_config(vocab_size=64)))
    refused("Engine: draft_vocab: got one, expected a drafter", draft_vocab=[3], fused=True)
    drafter = DominoDrafter(tiny_config())
    refused("draft_vocab: got 2 ids from 3 to 61", drafter, draft_vocab=[3, 61], fused=True)
    refused("draft_vocab: got 0 ids, expected", drafter, draft_vocab=[], fused=True)
    for wrong in (torch.ones(61, dtype=torch.bool), [3.5]):
        with pytest.raises(TypeError, match=r"draft_vocab: got torch\..*, expected integers"):
            Engine(target, drafter, max_batch=1, max_length=8, draft_vocab=wrong, fused=True)


@pytest.mark.parametrize("fused", [False, True], ids=["stock", "fused"])
@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("kind", ["none", "domino"])
def test_unusable_logits_end_their_own_request(tiny_config, kind, place, fused):
    """A token is NaN: its request fails, and leaves nothing that the next in its row could meet.

    Of three rows the first fails, and the last takes its place; or the last, and a short request
    joins there, beside rows that reach over the remains.
    """
    target = Target(tiny_model("Llama"))
    drafter = make_drafter(kind, tiny_config)
    requests = [([5, 17, 3], 20), ([12, 30, 4], 20), ([1], 12)]
    wanted = [own_text(target.model, *request) for request in requests]
    unseen = set(range(61)).difference([9], *wanted, *(prompt for prompt, _ in requests))
    bad = unseen.pop()
    with torch.no_grad():
        target.model.get_input_embeddings().weight[bad] = float("nan")
    requests.insert(place, ([9, bad] + [9] * 20, 5))
    engine = Engine(target, drafter, max_batch=3, max_length=LENGTH, fused=fused)
    for request in requests:
        engine.add(*request)
    texts, finish = {}, {}
    for chunk in engine:
        collect([chunk], texts, finish)
        if chunk.request == place:
            assert chunk.finish == "error"
            assert f"target logits of request {place}: got NaN" in str(chunk.error)
        else:
            assert chunk.error is None
    assert texts.pop(place) == []
    assert [texts[number] for number in sorted(texts)] == wanted


@pytest.mark.parametrize(
    "line, tokens, finish",
    [
        ([2, 1, 9, 7, -1], [9, 7], "stop"),
        ([4, 1, 1, 2, 3, 4, -1], [1, 2, 3, 4], "length"),
        ([2, 1, 9, 8, -1], [], "error"),
    ],
)
def test_unusable_logits_behind_the_end_are_nobodys(target, line, tokens, finish):
    """A cycle goes on behind a stop token or the limit, and meets a NaN there."""
    engine = Engine(target, max_batch=1, max_length=LENGTH)
    engine.add([5], 4, stop_token_ids=[7])
    chunk = engine._chunk(engine._waiting[0], line, True)
    assert (chunk.tokens, chunk.finish) == (tokens, finish)


def test_a_prompt_without_memory_fails_alone(target, monkeypatch):
    forward = target.forward

    def limited(ids, *args, **kwargs):
        if ids.shape[1] > 12:
            raise torch.OutOfMemoryError("this GPU is full")
        return forward(ids, *args, **kwargs)

    monkeypatch.setattr(target, "forward", limited)
    engine = Engine(target, max_batch=4, max_length=LENGTH)
    requests = [([5, 17], 9), ([7] * 13, 9), ([3, 3, 3], 9)]
    for request in requests:
        engine.add(*request)
    chunks = list(engine)
    (error,) = [chunk for chunk in chunks if chunk.error is not None]
    assert error.request == 1 and isinstance(error.error, torch.OutOfMemoryError)
    assert "prompt of 13 tokens" in str(error.error) and "this GPU is full" in str(error.error)
    texts, finish = {}, {}
    collect(chunks, texts, finish)
    assert finish == {0: "length", 1: "error", 2: "length"}
    for number in (0, 2):
        assert texts[number] == own_text(target.model, *requests[number])


@pytest.mark.parametrize("at", ["forward", "context_kv", "run", "prompts", "store_prompts"])
def test_a_step_that_raises_can_be_repeated(target, tiny_config, monkeypatch, at):
    """Before the target's forward of a cycle or a prefill, and in the drafter's part after it; in
    a queued cycle and in a prefill of the fused layers, before its token is read and after."""
    drafter, fused = make_drafter("domino", tiny_config), at not in ("forward", "context_kv")
    engine = Engine(target, drafter, max_batch=2, max_length=LENGTH, fused=fused)
    owner = {"forward": target, "context_kv": drafter}.get(at, engine._fused)
    inner, calls, failures = getattr(owner, at), [0], 0

    def failing(*args, **kwargs):
        calls[0] += 1
        if calls[0] % 3 == 1:
            raise RuntimeError("once")
        return inner(*args, **kwargs)

    monkeypatch.setattr(owner, at, failing)
    requests = [([5, 17, 3], 12), ([40, 2, 8, 33, 21], 12), ([1], 12)]
    for request in requests:
        engine.add(*request)
    texts, finish = {}, {}
    while len(finish) < 3:
        try:
            chunks = engine.step()
        except RuntimeError:
            failures += 1
            continue
        collect(chunks, texts, finish)
    assert failures > (0 if at in ("prompts", "store_prompts") else 4)
    monkeypatch.undo()
    for number, request in enumerate(requests):
        assert texts[number] == own_text(target.model, *request)


def test_rows_that_could_not_move_stay_theirs(target, tiny_config, monkeypatch):
    """The device has no memory for what a request's end asks of it: the others go on."""
    engine = Engine(
        target, make_drafter("domino", tiny_config), max_batch=3, max_length=LENGTH, fused=True
    )
    requests = [([5, 17, 3], 4), ([40, 2, 8], 20), ([1], 20)]
    for request in requests:
        engine.add(*request)
    select, calls = engine._fused.select, []

    def failing(*args):
        calls.append(args)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("this GPU is full")
        select(*args)

    monkeypatch.setattr(engine._fused, "select", failing)
    texts = {1: [], 2: []}
    while engine.num_running or engine.num_waiting:
        asked = len(calls)
        try:
            chunks = engine.step()
        except torch.OutOfMemoryError:
            assert asked == 0 and len(calls) == 1
            # of what this step has read nothing comes out
            for number in texts:
                tokens = engine._running[number].tokens
                texts[number] = tokens[len(requests[number][0]) :]
            continue
        for chunk in chunks:
            if chunk.request in texts:
                texts[chunk.request] += chunk.tokens
    assert len(calls) > 1
    for number, text in texts.items():
        assert text == own_text(target.model, *requests[number])


def test_catching_up_is_done_again_where_it_failed(target, tiny_config, monkeypatch):
    """Cycles without drafts, and no memory for the drafter's context of them at first."""
    drafter, prompt, new = make_drafter("domino", tiny_config), [5, 17, 3], 50
    turns = iter([Choice.whole(0)] * 40 + [Choice.whole(3)] * 40)
    monkeypatch.setattr("domino_draft.policy.DraftLength.choose", lambda *_: next(turns))
    engine = Engine(target, drafter, max_batch=1, max_length=LENGTH, num_drafts="auto", fused=True)
    cycle, failures = engine._fused, [3]
    inner = cycle._catch_up

    def failing(rows):
        if failures[0]:
            failures[0] -= 1
            raise torch.OutOfMemoryError("this GPU is full")
        inner(rows)

    monkeypatch.setattr(cycle, "_catch_up", failing)
    engine.add(prompt, new)
    text, errors = [], 0
    while engine.num_running or engine.num_waiting:
        try:
            text += [t for chunk in engine.step() for t in chunk.tokens]
        except torch.OutOfMemoryError:
            errors += 1
    assert errors == 3 and text == own_text(target.model, prompt, new)
    whole = prompt + text[:-1]
    again = Engine(target, drafter, max_batch=1, max_length=LENGTH, fused=True)
    again.add(whole, 1)
    list(again)
    for held, wanted in zip(cycle.draft_kv, again._fused.draft_kv):  # no gap
        torch.testing.assert_close(
            held[:, :, 0, :, : len(whole)], wanted[:, :, 0, :, : len(whole)], rtol=1e-3, atol=1e-3
        )


@pytest.mark.gpu
def test_a_first_run_that_fails_is_taken_back_on_cuda(tiny_config, monkeypatch):
    """A new size's first run ends in an error behind its last launch: rows stand where they did."""
    target = Target(tiny_model("Qwen3").cuda())
    engine = Engine(
        target, make_drafter("domino", tiny_config, "cuda"), max_batch=2, max_length=LENGTH
    )
    requests = [([5, 17, 3], 12), ([40, 2, 8, 33, 21], 12), ([1], 12)]
    for request in requests:
        engine.add(*request)
    run, failed = engine._fused.run, set()

    def failing(*key):
        line = run(*key)
        if key not in failed:
            failed.add(key)
            raise RuntimeError("once")
        return line

    monkeypatch.setattr(engine._fused, "run", failing)
    texts, finish = {}, {}
    while len(finish) < 3:
        try:
            chunks = engine.step()
        except RuntimeError:
            continue
        collect(chunks, texts, finish)
    assert failed
    for number, request in enumerate(requests):
        assert texts[number] == own_text(target.model, *request)
