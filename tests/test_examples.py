"""The decoders of examples/: each decodes as the model itself does, and all draw the same tokens.

Noise is keyed by seed and anchor position, so decoders that draft alike and verify alike emit the
same sampled ids, in the same cycles: `domino_draft.generate`, whose law tests/draft/test_law.py
checks, is the measure. The drafter is often right about its target (examples/tiny.py).
"""

import sys
from pathlib import Path

import pytest
import torch
from domino_draft import Target, generate

from domino_kernels.testing.losslessness import g_test

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import plain_decoder
import sglang_style_worker
import tiny
import transformers_generate
import vllm_style_proposer

PROMPTS = [[5, 17, 3], [1], [40, 2, 8, 33, 21, 9, 11, 7], [12, 12, 30, 4, 4]]
NEW = 24
TEMPERATURES = [0.0, 0.7, 1.0, 0.0]
SEEDS = [3, 3, -8, 2**62]


@pytest.fixture(scope="module", params=[True, False], ids=["shift", "no-shift"])
def pair(request):
    return tiny.tiny_pair(shift_label=request.param)


def own_text(model, prompt, **keywords):
    """What Transformers decodes; the mask, so that no id is taken for padding."""
    ids = torch.tensor([prompt])
    settings = dict(attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW)
    return model.generate(ids, **settings | keywords)[0, len(prompt) :].tolist()


def greedy(model):
    return [own_text(model, prompt) for prompt in PROMPTS]


def reference(pair, temperatures=TEMPERATURES):
    """Ids and cycles of the package's own loop."""
    model, drafter = pair
    settings = dict(max_new_tokens=NEW, temperature=temperatures, seed=SEEDS, stop_token_ids=())
    result = generate(Target(model), drafter, PROMPTS, **settings)
    assert result.stats.accepted_length > 1.5  # otherwise the comparison would show little
    return result.sequences, result.stats.accepted


def llama(pair):
    return tiny.Llama(pair[0], pair[1].feature_layers)


def requests(kind, temperatures=TEMPERATURES, **keywords):
    rows = zip(PROMPTS, temperatures, SEEDS)
    return [kind(p, NEW, temperature=t, seed=s, **keywords) for p, t, s in rows]


def sglang(pair, made, **keywords):
    worker = sglang_style_worker.DominoWorker(llama(pair), pair[1], room=64, **keywords)
    sglang_style_worker.serve(worker, made)
    return [r.output for r in made], [r.emitted for r in made]


def vllm(pair, made, most=3, **keywords):
    vllm_style_proposer.Runner(llama(pair), pair[1], **keywords).serve(made, most)
    return [r.output for r in made], [r.emitted for r in made]


def hf(pair, prompt, **keywords):
    emitted = []
    method = dict(custom_generate=transformers_generate.domino, drafter=pair[1], emitted=emitted)
    return own_text(pair[0], prompt, **method, **keywords), emitted


# ---- plain decoder ----


def test_plain_decoder_is_greedy(pair):
    output, emitted = plain_decoder.decode(llama(pair), pair[1], PROMPTS, NEW)
    assert output == greedy(pair[0])
    accepted = reference(pair, 0.0)[1]
    assert [sum(cycle) for cycle in emitted] == [
        sum(row[i] for row in accepted if i < len(row)) for i in range(len(emitted))
    ]


def test_plain_decoder_samples_as_the_package(pair):
    settings = dict(max_new_tokens=NEW, temperature=0.8, seed=5, stop_token_ids=())
    expected = generate(Target(pair[0]), pair[1], PROMPTS, **settings).sequences
    output, _ = plain_decoder.decode(llama(pair), pair[1], PROMPTS, NEW, temperature=0.8, seed=5)
    assert output == expected != greedy(pair[0])


def test_plain_decoder_draws_from_the_law():
    """Three tokens of 4096 seeds against the exact law of the model; 20% off is caught."""
    model, drafter = tiny.tiny_pair(vocab=7)
    target = tiny.Llama(model, drafter.feature_layers)
    prompts, runs, base = [[2, 5]], 4096, torch.tensor([49, 7, 1])
    texts = torch.cartesian_prod(*[torch.arange(7)] * 3)
    with torch.no_grad():
        ids = torch.cat((torch.tensor(prompts).expand(len(texts), -1), texts), dim=1)
        laws = torch.softmax(model(ids).logits[:, 1:4].double() / 0.8, dim=-1)
    law = laws.gather(2, texts[..., None])[..., 0].prod(dim=1)
    for temperature, fits in ((0.8, True), (0.96, False)):
        output, emitted = plain_decoder.decode(
            target, drafter, prompts * runs, 3, temperature=temperature, seed=1
        )
        assert sum(map(sum, emitted)) > 1.2 * sum(map(len, emitted))
        counts = torch.bincount((torch.tensor(output) * base).sum(1), minlength=343)
        test = g_test(counts.numpy(), law.numpy())
        assert (test.p_value > 1e-9) == fits, str(test)


# ---- Transformers ----


def test_transformers_generate_is_greedy(pair):
    for prompt, expected in zip(PROMPTS, greedy(pair[0])):
        assert hf(pair, prompt)[0] == expected


def test_transformers_generate_samples_as_the_package(pair):
    expected, accepted = reference(pair)
    for row, prompt in enumerate(PROMPTS):
        keywords = dict(seed=SEEDS[row])
        if TEMPERATURES[row]:
            keywords |= dict(do_sample=True, temperature=TEMPERATURES[row], top_k=0)
        output, emitted = hf(pair, prompt, **keywords)
        assert output == expected[row] and emitted == accepted[row]


def test_transformers_generate_obeys_processors_and_stopping(pair):
    prompt = PROMPTS[2]
    plain = own_text(pair[0], prompt)
    penalty = dict(repetition_penalty=1.8, no_repeat_ngram_size=2)
    expected = own_text(pair[0], prompt, **penalty)
    assert expected != plain
    assert hf(pair, prompt, **penalty)[0] == expected
    expected = own_text(pair[0], prompt, eos_token_id=plain[7])
    assert len(expected) <= 8
    assert hf(pair, prompt, eos_token_id=plain[7])[0] == expected
    output, _ = hf(pair, prompt, do_sample=True, temperature=3.0, top_k=4, seed=1)
    ids = torch.tensor([prompt + output])
    with torch.no_grad():
        best = pair[0](ids).logits[0, len(prompt) - 1 : -1].topk(4).indices
    assert all(token in row for token, row in zip(output, best.tolist()))
    assert any(token != row[0] for token, row in zip(output, best.tolist()))


def test_transformers_generate_refuses_a_batch(pair):
    ids = torch.tensor([[1, 2], [3, 4]])
    with pytest.raises(ValueError, match="domino: input_ids: got a batch"):
        pair[0].generate(
            ids,
            custom_generate=transformers_generate.domino,
            drafter=pair[1],
            max_new_tokens=NEW,
        )


# ---- SGLang-style worker ----


@pytest.mark.parametrize("max_batch", [1, 3, 4])
def test_sglang_style_worker(pair, max_batch):
    """Whatever the padding and the neighbours; at 3, requests come and go."""
    output, _ = sglang(pair, requests(sglang_style_worker.Request, [0.0] * 4), max_batch=max_batch)
    assert output == greedy(pair[0])
    assert sglang(pair, requests(sglang_style_worker.Request), max_batch=max_batch) == reference(
        pair
    )


def test_sglang_style_worker_returns_its_slots(pair):
    worker = sglang_style_worker.DominoWorker(llama(pair), pair[1], max_batch=2, room=64)
    before = set(worker.table.free_slots), set(worker.table.free_requests)
    sglang_style_worker.serve(worker, requests(sglang_style_worker.Request))
    assert (set(worker.table.free_slots), set(worker.table.free_requests)) == before


@pytest.mark.gpu
def test_sglang_style_worker_in_graphs():
    pair = tiny.tiny_pair(device="cuda")
    made = [requests(sglang_style_worker.Request) for _ in range(2)]
    eager, graphed = (
        sglang(pair, batch, max_batch=3, graphs=graphs)
        for batch, graphs in zip(made, (False, True))
    )
    assert graphed == eager


# ---- vLLM-style proposer ----


@pytest.mark.parametrize("chunk, most", [(64, 1), (64, 3), (3, 4), (1, 2)])
def test_vllm_style_proposer(pair, chunk, most):
    """Prompts in chunks and blocks of others in one batch change nothing."""
    output, _ = vllm(pair, requests(vllm_style_proposer.Request, [0.0] * 4), most, chunk=chunk)
    assert output == greedy(pair[0])
    assert vllm(pair, requests(vllm_style_proposer.Request), most, chunk=chunk) == reference(pair)


def test_vllm_style_proposer_with_ragged_drafts(pair):
    made = requests(vllm_style_proposer.Request, [0.0] * 4)
    for request, drafts in zip(made, (0, 1, 2, None)):
        request.num_drafts = drafts
    output, emitted = vllm(pair, made, chunk=4)
    assert output == greedy(pair[0])
    assert emitted[0] == [] and max(emitted[1]) == 2 and max(emitted[2]) <= 3 <= max(emitted[3])


def test_vllm_style_proposer_returns_its_pages(pair):
    runner = vllm_style_proposer.Runner(llama(pair), pair[1])
    before = set(runner.free)
    runner.serve(requests(vllm_style_proposer.Request))
    assert set(runner.free) == before


# ---- as programs ----


@pytest.mark.parametrize(
    "module", [plain_decoder, transformers_generate, sglang_style_worker, vllm_style_proposer]
)
def test_main_runs(module, capsys):
    module.main()
    assert "ids [" in (out := capsys.readouterr().out) or "greedy: [" in out
