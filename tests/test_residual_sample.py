"""residual_sample: verify_chain with scalars, then one row of q, is verify_chain with all of q."""

import pytest
import torch
from chain_cases import make, to

from domino_kernels import VerifyStatus, residual_sample, verify_chain
from domino_kernels.ops.verify import _empty_result


def log_q(arguments):
    """log q(x) of each draft as the drafter knows it, [B, K]."""
    x = arguments["draft_tokens"].clamp_min(0)[..., None]
    temperature = arguments["temperature"].clamp_min(0.4)[:, None, None]
    law = (arguments["draft_logits"].double() / temperature).log_softmax(-1)
    return law.gather(-1, x)[..., 0].float()


@pytest.mark.parametrize("filtered", [False, True], ids=["plain", "filtered"])
@pytest.mark.parametrize("pool", [False, True], ids=["dense", "pool"])
@pytest.mark.parametrize("shape", [(60, 4, 9), (30, 3, 1031)], ids=str)
def test_lazy_is_eager(shape, pool, filtered, device, generator):
    batch, drafts, _ = shape
    arguments = make(*shape, generator, dense=True)
    if pool:  # q is on the pool alone, and the drafts are in it
        logits, ids = arguments["draft_logits"].topk(4, -1)
        arguments["draft_tokens"] = ids[..., 1].contiguous()
        full = torch.full_like(arguments["draft_logits"], -float("inf")).scatter(-1, ids, logits)
        arguments |= dict(draft_logits=full)
    filters = dict(top_k=torch.full((batch,), 7).int(), top_p=torch.full((batch,), 0.8))
    arguments = to(arguments | (filters if filtered else {}), device)
    scalars = log_q(arguments)
    q = dict(draft_logits=arguments["draft_logits"])
    if pool:
        q = dict(draft_logits=logits.to(device), draft_ids=ids.int().to(device))
    eager = verify_chain(**arguments | q)
    lazy = verify_chain(**arguments | dict(draft_logits=None, draft_logprob=scalars))
    assert torch.equal(lazy.num_accepted, eager.num_accepted)
    needs = (lazy.status & VerifyStatus.NEEDS_RESIDUAL).bool()
    assert needs.float().mean() > 0.1
    assert torch.equal(lazy.tokens[~needs], eager.tokens[~needs])
    assert torch.equal(lazy.num_emitted[needs], eager.num_accepted[needs])

    every, at = torch.arange(batch, device=device), eager.num_accepted.long()
    inside = at.clamp_max(drafts - 1)
    names = ["temperature", "seed", "block_start"] + (["top_k", "top_p"] if filtered else [])
    tokens, logprob, status = residual_sample(
        arguments["target_logits"][every, at],
        arguments["draft_tokens"][every, inside],
        torch.where(needs, at, -1).int(),
        **{name: arguments[name] for name in names},
        **{name: value[every, inside] for name, value in q.items()},
    )
    assert not status.any()
    assert (tokens[~needs] == -1).all() and (logprob[~needs] == 0).all()
    last = eager.tokens.gather(1, at[:, None])[:, 0]
    assert torch.equal(tokens[needs], last[needs])
    chosen = eager.chosen_logprob.gather(1, at[:, None])[:, 0]
    assert torch.equal(logprob[needs], chosen[needs])


def test_one_hot(device):
    """Without q the rejected draft does not come back, and all else has its share of p."""
    n = 30_000
    logits = torch.tensor([0.0, 1.0, 0.5, -1.0], device=device)
    ones = torch.ones(n, device=device)
    tokens, _, status = residual_sample(
        logits.expand(n, 4),
        ones.long(),
        torch.zeros_like(ones).int(),
        temperature=ones,
        seed=torch.arange(n, device=device),
        block_start=ones.long(),
    )
    share = torch.bincount(tokens, minlength=4).double().cpu() / n
    law = logits.double().cpu().softmax(-1)
    law[1] = 0
    law /= law.sum()
    assert share[1] == 0 and not status.any()
    assert ((share - law).abs() < 4 * (law * (1 - law) / n).sqrt() + 1e-12).all()


def test_greedy_requests_get_the_argmax(device):
    """Also where that is what they say was rejected; only their own row is looked at."""
    rows = torch.full((4, 9), float("nan"), device=device)
    rows[::2] = 0.0
    rows[::2, 3] = 1.0
    zeros = torch.zeros(2, device=device)
    tokens, _, status = residual_sample(
        rows[::2],
        torch.tensor([3, 5], device=device),
        zeros.int(),
        temperature=zeros,
        seed=zeros.long(),
        block_start=zeros.long(),
        out=(out := _empty_result(2, 1, torch.device(device))),
    )
    assert tokens.tolist() == [3, 3] and not status.any()
    assert out.num_accepted.tolist() == [0, 0] and out.num_emitted.tolist() == [1, 1]


def test_bad_arguments():
    ones = torch.ones(2)
    good = dict(temperature=ones, seed=ones.long(), block_start=ones.long())
    rows, ids = torch.zeros(2, 5), ones.long()
    with pytest.raises(ValueError, match=r"residual_sample: slot: got shape \[3\], expected \[2\]"):
        residual_sample(rows, ids, torch.zeros(3).int(), **good)
    with pytest.raises(TypeError, match=r"residual_sample: rejected: got torch\.float32"):
        residual_sample(rows, ones, ones.int(), **good)
    with pytest.raises(ValueError, match="residual_sample: vocab_valid: got 6, expected 1 to V"):
        residual_sample(rows, ids, ones.int(), **good, vocab_valid=6)
    with pytest.raises(ValueError, match=r"draft_logits: got shape \[2, 1, 4\]"):
        residual_sample(rows, ids, ones.int(), **good, draft_logits=torch.zeros(2, 4))
    narrow = _empty_result(1, 0, rows.device)
    with pytest.raises(ValueError, match=r"residual_sample: out.tokens: got shape \[1, 1\]"):
        residual_sample(rows, ids, ones.int(), **good, out=narrow)
