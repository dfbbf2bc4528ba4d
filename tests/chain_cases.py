"""Arguments and comparisons that the tests of verify_chain share."""

import numpy as np
import torch

from domino_kernels import VerifyResult
from domino_kernels.ops.verify import _empty_result
from domino_kernels.reference.verify import verify_chain as reference_verify_chain
from domino_kernels.testing import Guarded, to_numpy


def make(batch, drafts, vocab, generator, *, dense=False, dtype=torch.float32, spread=2.0):
    """Arguments of a token-rule call where the generator is; every third request is greedy.

    Drafts are likely ones, so that walks of all lengths occur.
    """
    drawn = dict(generator=generator, device=generator.device)
    target = (torch.randn(batch, drafts + 1, vocab, **drawn) * spread).to(dtype)
    noise = torch.randn(batch, drafts, vocab, **drawn) * (spread / 4)
    draft = (target[:, :drafts] + noise).to(dtype)
    temperature = torch.rand(batch, **drawn) + 0.4
    temperature[::3] = 0
    sampled = torch.zeros(batch, drafts, dtype=torch.int64, device=target.device)
    if drafts:
        q = (draft.float() / temperature.clamp_min(0.4)[:, None, None]).softmax(-1)
        sampled = torch.multinomial(q.reshape(-1, vocab), 1, generator=generator)
        sampled = sampled.reshape(batch, drafts)
    likely = target[:, :drafts].float().argmax(-1)
    tokens = sampled if dense else likely
    tokens[temperature == 0] = likely[temperature == 0]
    if drafts > 2:
        tokens[::5, drafts - 1] = -1
    return dict(
        target_logits=target,
        draft_tokens=tokens,
        rule="token",
        temperature=temperature,
        seed=torch.randint(-(2**63), 2**63 - 1, (batch,), **drawn),
        block_start=torch.randint(0, 2**40, (batch,), **drawn),
        draft_logits=draft if dense else None,
    )


def to(arguments, device):
    move = lambda v: v.to(device) if isinstance(v, torch.Tensor) else v  # noqa: E731
    return {name: move(value) for name, value in arguments.items()}


def reference(arguments):
    move = lambda v: v.double().numpy() if v.is_floating_point() else v.numpy()  # noqa: E731
    keywords = {k: move(v) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    return reference_verify_chain(**keywords)


def guarded_result(batch, drafts, device):
    sizes = _empty_result(batch, drafts, "cpu")[:5]
    guards = [Guarded(t.shape, t.dtype, device) for t in sizes]
    return guards, VerifyResult(*(guard.tensor for guard in guards))


def assert_same(actual, expected):
    for name, a, b in zip(VerifyResult._fields, actual, expected):
        if a is None and b is None:
            continue
        assert torch.equal(a.cpu(), b.cpu()), f"{name}: {a} is not {b}"


def assert_reference(result, expected):
    tokens, accepted, emitted, logprob, status = expected
    assert (result.tokens.cpu().numpy() == tokens).all()
    assert (result.num_accepted.cpu().numpy() == accepted).all()
    assert (result.num_emitted.cpu().numpy() == emitted).all()
    assert (result.status.cpu().numpy() == status).all()
    error = np.abs(to_numpy(result.chosen_logprob) - logprob) / (1 + np.abs(logprob))
    assert error.max(initial=0) < 5e-7, error.max()


def token_arguments(batch=2, drafts=3, vocab=5):
    return dict(
        target_logits=torch.zeros(batch, drafts + 1, vocab),
        draft_tokens=torch.zeros(batch, drafts, dtype=torch.int64),
        rule="token",
        temperature=torch.ones(batch),
        seed=torch.zeros(batch, dtype=torch.int64),
        block_start=torch.zeros(batch, dtype=torch.int64),
        draft_logits=torch.zeros(batch, drafts, vocab),
        draft_temperature=torch.ones(batch),
    )
