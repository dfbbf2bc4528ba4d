"""The greedy comparison: it passes the target's own text and catches one wrong token."""

import copy

import pytest
import torch
from domino_draft import Engine, Target, generate, greedy_report
from domino_draft.losslessness import _in_fp32
from torch.nn import functional as F

from .conftest import tiny_model
from .test_decode import PROMPTS, Oracle, own_text

NEW = 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_own_text_passes_and_a_planted_token_does_not(family, dtype):
    target = Target(tiny_model(family, vocab_size=512).to(dtype))
    texts = [own_text(target.model, prompt, NEW) for prompt in PROMPTS]
    outputs = generate(target, Oracle(texts), PROMPTS, max_new_tokens=NEW).sequences
    for prompt, text in zip(PROMPTS + PROMPTS, texts + outputs):
        report = greedy_report(target, prompt, text)
        print(report)
        assert report.violations == 0 and report.tokens == NEW
        assert report.exact + report.near_ties == NEW
        half = dtype != torch.float32
        assert report.tolerance == (2 * report.noise if half else 1e-4) and report.noise > 0

    caught = 0
    for at in range(NEW):
        planted = list(outputs[0])
        planted[at] = (planted[at] + 17) % 512
        report = greedy_report(target, PROMPTS[0], planted[: at + 1])
        caught += at in report.violation_positions
    # A random token is as good as the best within rounding only by a rare accident.
    assert caught >= NEW - 1


def as_tensor_cores(monkeypatch):
    """Products and attention sum in fp32 and round once: on a model this small the whole sum is one
    tile, so a row's result does not depend on how many rows there are."""

    def wide(fn):
        def call(*args, **kwargs):
            low = args[0].dtype
            args = [x.float() if isinstance(x, torch.Tensor) else x for x in args]
            return fn(*args, **kwargs).to(low)

        return call

    for name in ("linear", "scaled_dot_product_attention"):
        monkeypatch.setattr(F, name, wide(getattr(F, name)))


@pytest.mark.parametrize("one_tile", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_fused_layers_pass_in_bf16(family, one_tile, monkeypatch):
    """They round at other places than the stock modules that judge, which shapes do not show."""
    target = Target(tiny_model(family).to(torch.bfloat16))
    if one_tile:
        as_tensor_cores(monkeypatch)
    engine = Engine(target, max_batch=4, max_length=64, fused=True)
    for prompt in PROMPTS:
        engine.add(prompt, NEW)
    texts = [[] for _ in PROMPTS]
    for chunk in engine:
        texts[chunk.request] += chunk.tokens
    reports = [greedy_report(target, prompt, text) for prompt, text in zip(PROMPTS, texts)]
    assert [report.violations for report in reports] == [0] * 4
    if one_tile:
        assert sum(report.near_ties for report in reports)  # so there was something to forgive


@torch.no_grad()
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("tied, inference", [(False, False), (True, False), (False, True)])
def test_rounding_is_the_distance_from_fp32(family, tied, inference):
    """Of a forward of a copy in fp32; the weights stay where they are, also after a failure."""
    with torch.inference_mode(inference):
        model = tiny_model(family, tie_word_embeddings=tied).to(torch.bfloat16)
        copied = copy.deepcopy(model).float()
    target = Target(model)
    ids = torch.tensor([PROMPTS[2]])
    plain = target.model(ids).logits
    places = [(p.data_ptr(), p.dtype) for p in target.model.parameters()]
    with _in_fp32(target):
        logits = target.model(ids).logits
        with pytest.raises(IndexError):
            target.model(ids + 61)
    assert places == [(p.data_ptr(), p.dtype) for p in target.model.parameters()]
    assert torch.equal(target.model(ids).logits, plain)
    exact = copied(ids).logits
    assert logits.dtype == torch.float32 and torch.equal(logits, exact)
    report = greedy_report(target, PROMPTS[2], [plain[0, -1].argmax().item()])
    best, index = plain[0, -1].topk(16)
    assert report.noise >= 0.999 * (best - exact[0, -1, index]).abs().max().item() > 0


def test_second_best_token_is_caught_unless_it_ties():
    target = Target(tiny_model("Llama"))
    prompt = PROMPTS[0]
    logits = target.model(torch.tensor([prompt])).logits[0, -1]
    second = logits.topk(2).indices[1].item()
    gap = (logits.max() - logits[second]).item()
    report = greedy_report(target, prompt, [second])
    assert report.violation_positions == [0] and report.exact == 0
    assert report.worst_loss == pytest.approx(gap, rel=1e-4)
    report = greedy_report(target, prompt, [second], tolerance=gap * 1.01)
    assert report.near_tie_positions == [0] and report.violations == 0


def test_a_later_token_is_judged_by_the_text_before_it():
    """After a planted token the rest is right again: only the plant is reported."""
    target = Target(tiny_model("Qwen2"))
    prompt, planted = PROMPTS[2], 44
    head = own_text(target.model, prompt, 3)
    assert planted != head[-1]
    text = [*head[:2], planted]
    text += own_text(target.model, prompt + text, 6)
    report = greedy_report(target, prompt, text)
    assert report.violation_positions == [2] and report.exact == 8
    assert "1 violations" in str(report)


def test_empty_input():
    target = Target(tiny_model("Llama"))
    with pytest.raises(ValueError, match="got 0 and 1 tokens"):
        greedy_report(target, [], [1])
    with pytest.raises(ValueError, match="got 1 and 0 tokens"):
        greedy_report(target, [1], [])
