import numpy as np
import pytest
import torch
from domino_draft.train.regenerate import (
    Prompt,
    Regenerator,
    load_prompts,
    load_responses,
    looping,
    save_responses,
)

transformers = pytest.importorskip("transformers")
STOP = 30


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.6, tie_word_embeddings=True, bos_token_id=1, eos_token_id=STOP,
        pad_token_id=3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def prompts(count, rng, **kwargs):
    return [Prompt(rng.integers(4, 61, rng.integers(2, 12)), tag=i, **kwargs) for i in range(count)]


def greedy(model, ids, room):
    """The plain loop: one full forward a token, no cache, the library's own attention."""
    ids = list(ids)
    for _ in range(room):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == STOP:
            break
    return ids


@torch.no_grad()
def test_greedy_responses_are_the_targets_own(model):
    # 11 prompts through 3 slots: every slot is refilled, at different lengths.
    work = prompts(11, np.random.default_rng(0))
    out = Regenerator(model, slots=3, sampled_slots=0, max_length=40, stop_ids=[STOP], seed=0).run(
        work, max_new_tokens=14, sync_every=4, prefill_rows=2
    )
    assert sorted(r.tag for r in out) == list(range(11))
    expected = {i: greedy(model, p.ids, 14) for i, p in enumerate(work)}
    for response in out:
        assert response.ids.tolist() == expected[response.tag]
        assert response.prompt_length == len(work[response.tag].ids)
        assert response.finished == (expected[response.tag][-1] == STOP)
    assert any(r.finished for r in out) and not all(r.finished for r in out)


def test_sampled_slots_follow_the_law(model):
    ids = np.array([5, 17, 8])
    temperature = 0.8
    work = [Prompt(ids, temperature=temperature) for _ in range(2000)]
    out = Regenerator(
        model, slots=200, sampled_slots=200, max_length=16, stop_ids=[STOP], seed=1
    ).run(work, max_new_tokens=1, sync_every=1)
    with torch.no_grad():
        law = (model(torch.tensor(ids)[None]).logits[0, -1] / temperature).softmax(-1).numpy()
    seen = np.bincount([r.ids[-1] for r in out], minlength=61)
    expected = law * len(out)
    common = expected > 5
    chi2 = ((seen - expected)[common] ** 2 / expected[common]).sum()
    # Mean = degrees of freedom, deviation sqrt(2 df): eight deviations is a false alarm in about
    # 1e-12.
    assert chi2 < common.sum() + 8 * np.sqrt(2 * common.sum())


def test_open_turn_is_finished_then_answered(model):
    work = [
        Prompt(np.array([9, 4, 31 + i]), tag=i, open_turn=True, temperature=1.0) for i in range(12)
    ]
    suffix = [7, 8]
    out = Regenerator(model, slots=4, sampled_slots=2, max_length=64, stop_ids=[STOP], seed=3).run(
        work, max_new_tokens=12, turn_suffix=suffix, sync_every=4
    )
    assert out
    for response in out:
        prompt = response.ids[: response.prompt_length].tolist()
        assert prompt[:3] == work[response.tag].ids.tolist() and prompt[-3:] == [STOP, *suffix]
        assert response.temperature == 0.0
        assert response.ids.tolist() == greedy(model, prompt, 12)


def test_loops_are_found():
    count = np.array([200, 200, 200])
    start = np.array([10, 10, 150])
    rng = np.random.default_rng(0)
    history = rng.integers(0, 50, (3, 200))
    history[0, 100:] = np.tile(history[0, 90:97], 15)[:100]
    history[2, 100:] = 7
    assert looping(history, count, start).tolist() == [True, False, False]


def test_bad_input_is_named(model):
    regenerator = Regenerator(
        model, slots=2, sampled_slots=0, max_length=8, stop_ids=[STOP], seed=0
    )
    with pytest.raises(ValueError, match=r"prompts\[0\]: got 9 tokens, expected 1..7"):
        regenerator.run([Prompt(np.arange(9))], max_new_tokens=2)
    with pytest.raises(ValueError, match="sampled_slots: got 0"):
        regenerator.run([Prompt(np.arange(3), temperature=0.5)], max_new_tokens=2)
    answered = Prompt(np.arange(3), open_turn=True, answer_temperature=0.5)
    with pytest.raises(ValueError, match="sampled_slots: got 0"):
        regenerator.run([answered], max_new_tokens=2)
    with pytest.raises(ValueError, match="max_length: got 65, expected at most 64"):
        Regenerator(model, slots=2, sampled_slots=0, max_length=65, stop_ids=[STOP], seed=0)
    with pytest.raises(ValueError, match="sampled_slots: got 3"):
        Regenerator(model, slots=2, sampled_slots=3, max_length=8, stop_ids=[STOP], seed=0)


def test_responses_file_round_trip(model, tmp_path):
    work = prompts(5, np.random.default_rng(2))
    out = Regenerator(model, slots=2, sampled_slots=0, max_length=40, stop_ids=[STOP], seed=0).run(
        work, max_new_tokens=6
    )
    path = tmp_path / "responses.npz"
    save_responses(path, out)
    back = load_responses(path)
    assert [r.ids.tolist() for r in back] == [r.ids.tolist() for r in out]
    assert [(r.prompt_length, r.tag, r.temperature, r.finished) for r in back] == [
        (r.prompt_length, r.tag, r.temperature, r.finished) for r in out
    ]
    assert not list(tmp_path.glob("*.tmp*"))


def test_shards_part_the_prompts(tmp_path):
    path = tmp_path / "prompts.npz"
    np.savez(
        path, tokens=np.arange(7), offsets=np.arange(8), kind=np.zeros(7), domain=np.zeros(7)
    )  # fmt: skip
    laws = dict(seed=0, sampled_fraction=0.5, temperature=0.7, turn_temperature=0.8)
    parts = [load_prompts(path, shard=(i, 3), **laws) for i in range(3)]
    assert sorted(int(p.ids[0]) for part in parts for p in part) == list(range(7))
    with pytest.raises(ValueError, match="shard: got 3 of 3, expected an index below"):
        load_prompts(path, shard=(3, 3), **laws)
