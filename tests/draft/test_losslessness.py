"""The greedy comparison: it passes the target's own text and catches one wrong token."""

import pytest
import torch
from domino_draft import Target, generate, greedy_report

from .conftest import tiny_model
from .test_decode import PROMPTS, Oracle, own_text

NEW = 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_own_text_passes_and_a_planted_token_does_not(family, dtype):
    target = Target(tiny_model(family, vocab_size=512).to(dtype))
    texts = [own_text(target.model, prompt, NEW) for prompt in PROMPTS]
    outputs = generate(target, Oracle(texts), PROMPTS, max_new_tokens=NEW).sequences
    tolerance = 0.0
    for prompt, text in zip(PROMPTS + PROMPTS, texts + outputs):
        report = greedy_report(target, prompt, text)
        print(report)
        assert report.violations == 0 and report.tokens == NEW
        assert report.exact + report.near_ties == NEW
        tolerance = max(tolerance, report.tolerance)
    assert tolerance == 1e-4 if dtype == torch.float32 else 0 < tolerance < 1

    caught = 0
    for at in range(NEW):
        planted = list(outputs[0])
        planted[at] = (planted[at] + 17) % 512
        report = greedy_report(target, PROMPTS[0], planted[: at + 1])
        caught += at in report.violation_positions
    # A random token is as good as the best within rounding only by a rare accident.
    assert caught >= NEW - 1


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
