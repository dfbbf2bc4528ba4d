"""The engine: requests come and go, and none notices the others."""

import random

import pytest
import torch
from domino_draft import DominoDrafter, Engine, NgramDrafter, Target, generate

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
