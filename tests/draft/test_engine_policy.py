"""The engine: how much it drafts and verifies, of which ids, and in graphs of which size."""

import pytest
import torch
from domino_draft import DominoDrafter, Engine, Target
from domino_draft.cycle import padded_rows
from domino_draft.policy import Choice
from domino_draft.requests import Law

from .conftest import tiny_model
from .test_decode import assert_own_text, own_text
from .test_engine import LENGTH, collect, make_drafter, some_requests


@pytest.fixture(scope="module")
def target():
    return Target(tiny_model("Qwen3"))


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
    there = [
        (8, none, Law.GREEDY),
        (6, none, Law.GREEDY),
        (8, two, Law.GREEDY),
        (3, none, Law.DRAWN),
    ]
    cycle._graphs, cycle._costs = dict.fromkeys(there), dict.fromkeys(there, 4.0)
    cycle._capture_ms = 40.0  # 1 ms a cycle of 6 rows where 3 would do: 40 cycles
    assert [cycle.size(3, [none], Law.GREEDY) for _ in range(43)] == [6] * 40 + [3] * 3
    assert cycle.size(7, [none], Law.GREEDY) == 8 and cycle.size(5, [none], Law.GREEDY) == 6
    # 1.5 ms where 2 would do in place of 8, and two choices to capture: 53 cycles
    assert [cycle.size(2, [none, two], Law.GREEDY) for _ in range(55)] == [8] * 53 + [2] * 2
    assert cycle.size(4, [none], Law.DRAWN) == 4
