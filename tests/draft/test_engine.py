"""The engine: requests come and go, and none notices the others."""

import random

import pytest
import torch
from domino_draft import DominoDrafter, Engine, NgramDrafter, Target, generate
from domino_draft.cycle import padded_rows
from domino_draft.policy import Choice

from .conftest import tiny_model
from .test_decode import Oracle, assert_own_text, drafters, own_text

LENGTH = 64
KINDS = ["none", "oracle", "ngram", "domino", "domino-plain", "sliding"]


@pytest.fixture(scope="module")
def target():
    return Target(tiny_model("Qwen3"))


def some_requests(count, seed):
    """(prompt, max_new_tokens, settings): lengths, limits, laws and stops of all kinds."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        prompt = [rng.randrange(61) for _ in range(rng.choice((1, 2, 5, 9, 17)))]
        settings = {"temperature": rng.choice((0.0, 0.7, 1.2)), "seed": rng.randrange(1 << 40)}
        if number % 3 == 2:
            settings["stop_token_ids"] = [rng.randrange(61) for _ in range(4)]
        found.append((prompt, rng.choice((1, 3, 8, 20)), settings))
    return found


def make_drafter(kind, tiny_config, device="cpu"):
    if kind == "ngram":
        return NgramDrafter()
    if kind == "oracle":
        return Oracle({})
    drafter = drafters(tiny_config, [])[kind]
    return drafter.to(device) if isinstance(drafter, DominoDrafter) else drafter


def collect(chunks, texts, finish):
    for chunk in chunks:
        assert chunk.request not in finish  # nothing comes after the last chunk
        assert chunk.accepted is None or chunk.accepted >= len(chunk.tokens)
        texts.setdefault(chunk.request, []).extend(chunk.tokens)
        if chunk.finish:
            finish[chunk.request] = chunk.finish


def check_arrivals(target, drafter, fused=None):
    """Ten requests in three rows, two added a step: each text is the target's own."""
    requests = [(prompt, limit) for prompt, limit, _ in some_requests(10, seed=0)]
    wanted = [own_text(target.model, prompt, limit) for prompt, limit in requests]
    engine = Engine(target, drafter, max_batch=3, max_length=LENGTH, fused=fused)
    texts, finish, steps, most = {}, {}, 0, 0
    while len(finish) < len(wanted):
        for request in requests[2 * steps : 2 * steps + 2]:
            number = engine.add(*request)
            if isinstance(drafter, Oracle):
                drafter.texts[number] = wanted[number]
        collect(engine.step(), texts, finish)
        most = max(most, engine.num_running)
        steps += 1
    assert most == 3 and not engine.num_running and not engine.num_waiting
    assert engine.step() == [] and set(finish.values()) == {"length"}
    got = [texts[number] for number in range(len(wanted))]
    assert_own_text(target, [prompt for prompt, _ in requests], got, wanted)
    return engine.mode


FUSED = ["none", "domino", "domino-plain", "sliding"]  # what drafts on the device
MODELS = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Qwen3-sliding": dict(use_sliding_window=True, sliding_window=5, max_window_layers=2),
    "Llama-tied": dict(tie_word_embeddings=True),
    "Llama-scaled": dict(
        rope_parameters=dict(
            rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0,
            high_freq_factor=4.0, original_max_position_embeddings=64,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("kind", FUSED)
def test_fused_layers_decode_as_the_model(tiny_config, kind, family):
    target = Target(tiny_model(family.partition("-")[0], **MODELS[family]))
    assert check_arrivals(target, make_drafter(kind, tiny_config), fused=True) == "fused"


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3-sliding"])
@pytest.mark.parametrize("kind", FUSED)
def test_captured_cycles_on_cuda(tiny_config, kind, family):
    target = Target(tiny_model(family.partition("-")[0], **MODELS[family]).cuda())
    assert check_arrivals(target, make_drafter(kind, tiny_config, "cuda")) == "captured"


def test_the_number_of_drafts_may_change_between_cycles(target, tiny_config, monkeypatch):
    """Off and on again: the text is the target's, and the drafter's context has no gap."""
    drafter, prompt = make_drafter("domino", tiny_config), [5, 17, 3]
    turns = map(Choice.whole, [0, 3, 0, 0, 1, 2] * 40)
    monkeypatch.setattr("domino_draft.policy.DraftLength.choose", lambda *_: next(turns))

    def run(prompt, new):
        engine = Engine(
            target, drafter, max_batch=1, max_length=LENGTH, num_drafts="auto", fused=True
        )
        engine.add(prompt, new)
        return [t for chunk in engine for t in chunk.tokens], engine._fused

    text, cycle = run(prompt, 30)
    assert text == own_text(target.model, prompt, 30)
    whole = prompt + text[:-1]
    _, again = run(whole, 1)  # the same context from one forward over it
    for held, wanted in (*zip(cycle.draft_kv, again.draft_kv), (cycle.kv, again.kv)):
        torch.testing.assert_close(
            held[:, :, 0, :, : len(whole)], wanted[:, :, 0, :, : len(whole)], rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_cycles_without_drafts_are_caught_up_with_together(tiny_config, monkeypatch, device):
    """The drafter's context of 16 of them at once: of each by itself costs 4% of a small cycle."""
    monkeypatch.setattr("domino_draft.policy.DraftLength.choose", lambda *_: Choice.whole(0))
    target, drafter = Target(tiny_model("Qwen3").to(device)), make_drafter("domino", tiny_config)
    engine = Engine(
        target, drafter.to(device), max_batch=1, max_length=LENGTH, num_drafts="auto", fused=True
    )
    engine.warmup()
    cycle, caught = engine._fused, []
    inner = cycle.catch_up

    def catch_up():
        caught.append(cycle._late_count)
        inner()

    monkeypatch.setattr(cycle, "catch_up", catch_up)
    engine.add([5, 17, 3], 50)
    text = [t for chunk in engine for t in chunk.tokens]
    assert [n for n in caught[:-1] if n] == [16, 16, 16]  # and what is left, at the end
    assert text == own_text(target.model, [5, 17, 3], 50)


def check_partial(target, drafter, monkeypatch, mode, **settings):
    """Two of three drafts, or one, on average: the text is the target's, laws do not matter."""
    turns = iter([Choice(3, 3), Choice(3, 2), Choice.whole(2), Choice(3, 1)] * 80)
    monkeypatch.setattr("domino_draft.policy.DraftLength.choose", lambda *_: next(turns))
    monkeypatch.setattr("domino_draft.policy.DraftLength.observe", lambda *_: None)
    requests = [(prompt, limit) for prompt, limit, _ in some_requests(8, seed=3)]
    engine = Engine(target, drafter, max_batch=4, max_length=LENGTH, num_drafts="auto", **settings)
    for request in requests:
        engine.add(*request)
    sampled = engine.add([7, 3], 20, temperature=0.8, seed=2)
    texts, finish = {}, {}
    collect(engine, texts, finish)
    assert engine.mode == mode and len(texts[sampled]) == 20
    wanted = [own_text(target.model, *request) for request in requests]
    got = [texts[number] for number in range(8)]
    assert_own_text(target, [prompt for prompt, _ in requests], got, wanted)


@pytest.mark.parametrize("kind", ["domino", "domino-plain"])
def test_fewer_tokens_verified_than_drafted(target, tiny_config, kind, monkeypatch):
    check_partial(target, make_drafter(kind, tiny_config), monkeypatch, "fused", fused=True)


def check_vocabulary(target, drafter, kept, **settings):
    """Text is the target's, whose tokens are in part outside; drafted is from the part alone."""
    requests = [(prompt, 20) for prompt, _, _ in some_requests(6, seed=4)]
    engine = Engine(target, drafter, max_batch=3, max_length=LENGTH, draft_vocab=kept, **settings)
    cycle, drafted = engine._fused, set()
    inner = cycle._chain

    def chain(*args):
        tokens, log_probs = inner(*args)
        drafted.update(tokens.flatten().tolist())
        return tokens, log_probs

    if target.device.type == "cpu":
        cycle._chain = chain
    for request in requests:
        engine.add(*request)
    texts, finish = {}, {}
    collect(engine, texts, finish)
    wanted = [own_text(target.model, *request) for request in requests]
    got = [texts[number] for number in range(6)]
    assert_own_text(target, [prompt for prompt, _ in requests], got, wanted)
    assert drafted <= set(kept)
    return drafted


def check_short_room(target, drafter, **settings):
    """Prompts that are padded to more than the cache holds; sizes that come back."""
    engine = Engine(target, drafter, max_batch=2, max_length=22, **settings)
    requests = [([5, 17, 3] * 6, 4), ([40, 2] * 9, 4), ([9], 21), ([8] * 18, 4)]
    for request in requests:
        engine.add(*request)
        list(engine)
    for request in requests:
        engine.add(*request)
    texts, finish = {}, {}
    collect(engine, texts, finish)
    wanted = [own_text(target.model, *request) for request in requests]
    got = [texts[number] for number in sorted(texts)]
    assert_own_text(target, [prompt for prompt, _ in requests], got, wanted)


def test_prompts_that_fill_the_cache(target, tiny_config):
    check_short_room(target, make_drafter("domino", tiny_config), fused=True)


@pytest.mark.gpu
def test_prompts_that_fill_the_cache_on_cuda(tiny_config):
    target = Target(tiny_model("Qwen3").cuda())
    check_short_room(target, make_drafter("domino", tiny_config, "cuda"))


@pytest.mark.parametrize("kind", ["domino", "domino-plain", "sliding"])
def test_drafts_from_a_part_of_the_vocabulary(target, tiny_config, kind):
    drafter = make_drafter(kind, tiny_config)
    kept = [*range(3, 61, 4), 7, 9]
    drafted = check_vocabulary(target, drafter, kept, fused=True)
    assert len(drafted) > 3
    every = Engine(
        target, drafter, max_batch=2, max_length=LENGTH, fused=True, draft_vocab=range(61)
    )
    plain = Engine(target, drafter, max_batch=2, max_length=LENGTH, fused=True)
    for engine in (every, plain):
        engine.add([5, 17, 3], 20)
    assert [c.accepted for c in every] == [c.accepted for c in plain]  # the same drafts


def pair_on_cuda(tiny_config):
    """In bfloat16, of sizes that the block form of the head takes."""
    target = Target(tiny_model("Llama").bfloat16().cuda())
    torch.manual_seed(2)
    config = tiny_config(gru_hidden_dim=32, emb_dim=16, dtype="bfloat16")
    return target, DominoDrafter(config).bfloat16().cuda().eval()


@pytest.mark.gpu
def test_drafts_from_a_part_of_the_vocabulary_on_cuda(tiny_config):
    check_vocabulary(*pair_on_cuda(tiny_config), [*range(3, 61, 4), 7, 9])


@pytest.mark.gpu
def test_fewer_tokens_verified_on_cuda(tiny_config, monkeypatch):
    check_partial(*pair_on_cuda(tiny_config), monkeypatch, "captured")


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_requests_that_come_and_go(target, tiny_config, kind):
    check_arrivals(target, make_drafter(kind, tiny_config))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_requests_on_cuda(tiny_config, kind):
    target = Target(tiny_model("Qwen3").cuda())
    check_arrivals(target, make_drafter(kind, tiny_config, "cuda"))


@pytest.mark.parametrize("fused", [False, True], ids=["stock", "fused"])
@pytest.mark.parametrize("kind", ["none", "ngram", "domino"])
def test_soak(target, tiny_config, kind, fused):
    """Random arrivals, laws, stops and cancellations: what `generate` gives for each alone."""
    drafter, count, rng = make_drafter(kind, tiny_config), 40, random.Random(5)
    requests = some_requests(count, seed=1)
    if kind == "ngram" and fused:
        pytest.skip("it drafts on the host")
    engine = Engine(target, drafter, max_batch=4, max_length=LENGTH, fused=fused)
    texts, finish, added, cancelled = {}, {}, 0, {}
    while added < count or engine.num_running or engine.num_waiting:
        while added < count and rng.random() < 0.4:
            prompt, limit, settings = requests[added]
            assert engine.add(prompt, limit, **settings) == added
            added += 1
        collect(engine.step(), texts, finish)
        live = [n for n in range(added) if n not in finish and n not in cancelled]
        if live and rng.random() < 0.15:
            victim = rng.choice(live)
            assert engine.cancel(victim)
            cancelled[victim] = len(texts.get(victim, []))  # and not a token more
    assert all(len(texts.get(n, [])) == seen for n, seen in cancelled.items())
    assert 0 in cancelled.values() and max(cancelled.values()) > 0
    assert len(finish) + len(cancelled) == count
    assert not any(engine.cancel(n) for n in (*cancelled, *finish, count))
    for number, (prompt, limit, settings) in enumerate(requests):
        done = generate(target, drafter, [prompt], max_new_tokens=limit, **settings)
        text, got = done.sequences[0], texts.get(number, [])
        if number in cancelled:
            assert got == text[: len(got)] and number not in finish
        else:
            assert (got, finish[number]) == (text, done.finish[0])
    assert {"stop", "length"} == set(finish.values())


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "domino"])
def test_soak_on_cuda(tiny_config, kind):
    """1,000 requests at random through captured cycles: no wrong token, no memory that stays."""
    target = Target(tiny_model("Qwen3").cuda())
    drafter, rng = make_drafter(kind, tiny_config, "cuda"), random.Random(6)
    requests = some_requests(40, seed=2)
    alone = [
        generate(target, drafter, [prompt], max_new_tokens=limit, **settings).sequences[0]
        for prompt, limit, settings in requests
    ]
    count, used = 1000, []
    engine = Engine(target, drafter, max_batch=16, max_length=LENGTH)
    assert engine.mode == "captured"
    engine.warmup(sampled=True)
    texts, finish, kinds, cancelled = {}, {}, [], set()
    while len(finish) + len(cancelled) < count:
        while len(kinds) < count and engine.num_waiting < 20 and rng.random() < 0.7:
            kinds.append(rng.randrange(len(requests)))
            prompt, limit, settings = requests[kinds[-1]]
            assert engine.add(prompt, limit, **settings) == len(kinds) - 1
        collect(engine.step(), texts, finish)
        if rng.random() < 0.1 and kinds:
            victim = rng.randrange(max(0, len(kinds) - 30), len(kinds))
            if engine.cancel(victim):
                cancelled.add(victim)
        if len(finish) % 50 == 0:
            used.append(torch.cuda.memory_allocated())
    assert len(cancelled) > 20 and {"stop", "length"} == set(finish.values())
    for number, choice in enumerate(kinds):
        got = texts.get(number, [])
        assert got == (alone[choice] if number in finish else alone[choice][: len(got)])
    assert max(used[len(used) // 2 :]) <= max(used[: len(used) // 2]) + (1 << 20)


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


@pytest.mark.parametrize("family", ["Llama", "Qwen3-sliding"])
@pytest.mark.parametrize("kind", ["none", "domino", "sliding"])
def test_long_prompts_in_pieces_through_fused_layers(tiny_config, family, kind):
    target = Target(tiny_model(family.partition("-")[0], **MODELS[family]))
    drafter = make_drafter(kind, tiny_config)
    prompts = [[(7 * i + n) % 61 for i in range(n)] for n in (40, 3, 33, 5, 8)]
    found = []
    for tokens in (16, 8192):
        engine = Engine(
            target, drafter, max_batch=5, max_length=LENGTH, prefill_tokens=tokens, fused=True
        )
        for prompt in prompts:
            engine.add(prompt, 9)
        texts, accepted = {}, {}
        for chunk in engine:
            texts.setdefault(chunk.request, []).extend(chunk.tokens)
            accepted.setdefault(chunk.request, []).append(chunk.accepted)
        found.append((texts, accepted))
    assert found[0] == found[1]
    for number, prompt in enumerate(prompts):
        assert found[0][0][number] == own_text(target.model, prompt, 9)


@pytest.mark.parametrize("family", ["Llama", "Qwen3-sliding"])
@pytest.mark.parametrize("kind", ["none", "domino", "sliding"])
def test_long_prompts_in_pieces(tiny_config, monkeypatch, family, kind):
    """No forward over more than prefill_tokens, and nothing else changes, drafts included."""
    sliding = dict(use_sliding_window=True, sliding_window=5, max_window_layers=2)
    name, _, window = family.partition("-")
    target = Target(tiny_model(name, **(sliding if window else {})))
    drafter = make_drafter(kind, tiny_config)
    prompts = [[(7 * i + n) % 61 for i in range(n)] for n in (40, 3, 33, 5, 8)]
    whole = [generate(target, drafter, [p], max_new_tokens=9) for p in prompts]
    sizes, forward = [], target.forward

    def counted(ids, *args, keep=None, **kwargs):
        if keep is not None:
            sizes.append(ids.numel())
        return forward(ids, *args, keep=keep, **kwargs)

    monkeypatch.setattr(target, "forward", counted)
    engine = Engine(target, drafter, max_batch=5, max_length=LENGTH, prefill_tokens=16)
    for prompt in prompts:
        engine.add(prompt, 9)
    texts, finish, accepted = {}, {}, {}
    for chunk in engine:
        collect([chunk], texts, finish)
        if chunk.accepted:
            accepted.setdefault(chunk.request, []).append(chunk.accepted)
    assert sizes == [16, 16, 8, 3, 16, 16, 1, 16]  # the last is two prompts together
    for number, done in enumerate(whole):
        assert texts[number] == done.sequences[0]
        assert accepted[number] == done.stats.accepted[0]


def test_arrivals_do_not_starve_what_runs(target):
    engine = Engine(target, max_batch=4, max_length=LENGTH)
    number, got = engine.add([5], 30), 0
    for _ in range(20):
        engine.add([3], 1)
        got += sum(len(chunk.tokens) for chunk in engine.step() if chunk.request == number)
    assert got >= 10


def test_requests_may_be_added_and_cancelled_while_iterating(target):
    engine = Engine(target, max_batch=1, max_length=LENGTH)
    engine.add([5, 17], 30)
    texts, finish = {}, {}
    for chunk in engine:
        collect([chunk], texts, finish)
        if len(texts[0]) == 4 and chunk.request == 0:
            engine.add([1], 6)
            engine.cancel(0)
    assert finish == {1: "length"} and len(texts[0]) == 4
    assert texts[1] == own_text(target.model, [1], 6)


def test_stop_tokens_may_come_in_a_tensor(target):
    text = own_text(target.model, [5, 17], 12)
    engine = Engine(target, max_batch=1, max_length=LENGTH)
    engine.add([5, 17], 12, stop_token_ids=torch.tensor([text[3]]))
    assert [t for chunk in engine for t in chunk.tokens] == text[: text.index(text[3]) + 1]


def test_padded_batch_sizes():
    sizes = [padded_rows(n) for n in range(1, 65)]
    assert sorted(set(sizes)) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert all(n <= size < 1.5 * n for n, size in enumerate(sizes, 1))


def test_fp8_draft_head_changes_drafts_only(tiny_config):
    target = Target(tiny_model("Llama", vocab_size=64))
    torch.manual_seed(3)
    drafter = DominoDrafter(tiny_config(vocab_size=64, mask_token_id=63))
    wanted = own_text(target.model, [5, 17, 3], 20)
    engine = Engine(
        target, drafter, max_batch=1, max_length=LENGTH, fused=True, fp8_draft_head=True
    )
    exact = engine._fused.target.head
    held = engine._fused.draft_head.product(torch.eye(32)).t()
    assert 0 < (held - exact).abs().max() < 0.1 * exact.abs().max()
    engine.add([5, 17, 3], 20)
    assert [t for chunk in engine for t in chunk.tokens] == wanted
    for given, fused in ((None, True), (drafter, False)):
        with pytest.raises(ValueError, match="fp8_draft_head: got one"):
            Engine(target, given, max_batch=1, max_length=8, fused=fused, fp8_draft_head=True)


def test_a_batch_that_runs_empty_borrows_the_larger_graph_for_a_while(target):
    """Until half a cycle's time, in proportion to the rows that are too many, has added up to a
    capture of every choice."""
    cycle = Engine(target, max_batch=8, max_length=8, fused=True)._fused
    none, two = Choice.whole(0), Choice.whole(2)
    there = [(8, none, True), (6, none, True), (8, two, True), (3, none, False)]
    cycle._graphs, cycle._costs = dict.fromkeys(there), dict.fromkeys(there, 4.0)
    cycle._capture_ms = 40.0  # 1 ms a cycle of 6 rows where 3 would do: 40 cycles
    assert [cycle.size(3, [none], True) for _ in range(43)] == [6] * 40 + [3] * 3
    assert cycle.size(7, [none], True) == 8 and cycle.size(5, [none], True) == 6
    # 1.5 ms where 2 would do in place of 8, and two choices to capture: 53 cycles
    assert [cycle.size(2, [none, two], True) for _ in range(55)] == [8] * 53 + [2] * 2
    assert cycle.size(4, [none], False) == 4


def test_fused_steps_cut_nothing_out_of_the_caches(target, tiny_config):
    """Two views a layer whenever a row comes or goes would be host time of the first token."""
    engine = Engine(
        target, make_drafter("domino", tiny_config), max_batch=2, max_length=LENGTH, fused=True
    )
    for length in (3, 9, 4):
        engine.add([5] * length, 4)
    assert len({chunk.request for chunk in engine}) == 3
    assert not engine.cache._layers and not engine.session.cache._layers


def test_a_first_token_does_not_wait_for_the_drafter(target, tiny_config, monkeypatch):
    engine = Engine(
        target, make_drafter("domino", tiny_config), max_batch=1, max_length=LENGTH, fused=True
    )
    order = []
    for name in ("prompts", "read", "store_prompts"):
        inner = getattr(engine._fused, name)

        def told(*args, name=name, inner=inner):
            order.append(name)
            return inner(*args)

        monkeypatch.setattr(engine._fused, name, told)
    engine.add([5, 17, 3], 4)
    (chunk,) = engine.step()
    assert order == ["prompts", "read", "store_prompts"] and len(chunk.tokens) == 1
