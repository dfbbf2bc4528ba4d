"""The law of what verify_chain emits, with its own noise, over several blocks.

Quick on the CPU; `slow` takes 2e6 runs; on a GPU 1e6, and with `slow` 1e8 of the laws that differ
most, which sees a total variation of about 4e-4, and 1e7 of the rest. Every broken verifier goes
through the same test and has to fail.
"""

import numpy as np
import pytest
import torch

from domino_kernels import noise, rng, verify_chain
from domino_kernels.testing.losslessness import (
    Drafter,
    Model,
    Sampling,
    chain_verifier,
    g_test,
    sample,
    softmax,
)

ALARM = 1e-9
SMALL = Model.random(3, 3, 1)
FILTERED = Model.random(4, 2, 2, draft_top_k=2)
MASKED = Model.random(4, 2, 3, masked=1, distance=2.0)
WIDE = Model.random(6, 1, 5)
TAILED = Model(
    np.float32([[0.0, -1.0, -11.5]] * 4), np.float32([[-1.0, 0.0, -9.0]] * 4), 1
)  # a token of mass 7e-6

PLAIN = Sampling()
# name: rule, model, dense q, drafter, tokens a sequence, the target's sampling
LAWS = {
    "dense": ("token", SMALL, True, Drafter(3), 4, PLAIN),
    "dense, temperatures": ("token", SMALL, True, Drafter(2, temperature=1.5), 4, Sampling(0.6)),
    "dense, ragged": ("token", SMALL, True, Drafter(3, ragged=True), 4, PLAIN),
    "dense, filtered q": ("token", FILTERED, True, Drafter(2), 4, PLAIN),
    "dense, masked target": ("token", MASKED, True, Drafter(2), 4, Sampling(0.8)),
    "dense, tail": ("token", TAILED, True, Drafter(2), 3, PLAIN),
    "pool": ("token", WIDE, True, Drafter(2, pool=3, temperature=0.8), 3, PLAIN),
    "one-hot, argmax": ("token", SMALL, False, Drafter(3, argmax=True), 4, PLAIN),
    "one-hot, sampled": ("onehot", SMALL, True, Drafter(2), 4, Sampling(0.7)),
    "one-hot, ragged": ("token", MASKED, False, Drafter(3, argmax=True, ragged=True), 4, PLAIN),
    "no drafts": ("token", SMALL, False, Drafter(0), 4, PLAIN),
    "dense, V = 257": ("token", Model.random(257, 1, 4), True, Drafter(2), 2, PLAIN),
    "block": ("block", SMALL, True, Drafter(3), 5, PLAIN),
    "block, temperatures": ("block", SMALL, True, Drafter(3, temperature=1.5), 4, Sampling(0.6)),
    "block, ragged": ("block", SMALL, True, Drafter(3, ragged=True), 4, PLAIN),
    "block, filtered q": ("block", FILTERED, True, Drafter(3), 4, PLAIN),
    "block, masked target": ("block", MASKED, True, Drafter(2), 4, Sampling(0.8)),
    "block, tail": ("block", TAILED, True, Drafter(2), 3, PLAIN),
    "block, pool": ("block", WIDE, True, Drafter(3, pool=3), 3, PLAIN),
    "match": ("match", SMALL, False, Drafter(3), 4, PLAIN),
    "match, argmax": ("match", MASKED, False, Drafter(2, argmax=True), 4, Sampling(0.7)),
    "gumbel": ("gumbel", SMALL, False, Drafter(3, coupled=True), 4, PLAIN),
    "gumbel, temperatures": (
        "gumbel", FILTERED, False, Drafter(3, coupled=True, temperature=0.5), 4, Sampling(1.2)
    ),
    "top-k and top-p": (
        "token", WIDE, True, Drafter(2), 3, Sampling(0.8, top_k=4, top_p=0.8)
    ),
    "min-p": ("token", WIDE, True, Drafter(2), 3, Sampling(1.0, min_p=0.1)),
    "filters, vLLM's order": (
        "token", WIDE, False, Drafter(2, argmax=True), 3,
        Sampling(0.9, top_k=5, top_p=0.7, min_p=0.1, order="vllm"),
    ),
    "filters, joint, block": (
        "block", WIDE, True, Drafter(3), 3,
        Sampling(0.9, top_k=4, top_p=0.7, min_p=0.05, order="joint"),
    ),
    "filters, match": ("match", WIDE, False, Drafter(2), 3, Sampling(0.9, top_p=0.6)),
    "penalties": (
        "token", SMALL, True, Drafter(3), 4,
        Sampling(0.9, repetition=1.3, presence=0.4, frequency=0.3),
    ),
    "penalties, block": (
        "block", SMALL, True, Drafter(3), 4, Sampling(presence=0.7, frequency=0.2, top_p=0.9)
    ),
}  # fmt: skip
DEEP = ("dense", "dense, tail", "one-hot, argmax", "block", "gumbel", "top-k and top-p")
AMOUNTS = [
    pytest.param("cpu", 60_000, id="quick"),
    pytest.param("cpu", 2_000_000, id="slow", marks=pytest.mark.slow),
    pytest.param("cuda", 1_000_000, id="gpu", marks=pytest.mark.gpu),
    # sees a total variation of 4e-4; minutes
    pytest.param("cuda", 100_000_000, id="deep", marks=[pytest.mark.gpu, pytest.mark.slow]),
]


def judge(case, runs, device, verify=None):
    rule, model, dense, drafter, length, sampling = LAWS[case] if isinstance(case, str) else case
    verify = verify or chain_verifier(rule, dense=dense)
    counts = sample(
        model, verify, drafter, runs=runs, length=length, sampling=sampling, device=device
    )
    assert counts.sum() == runs
    return g_test(counts, model.law(sampling, length))


@pytest.mark.parametrize("device, runs", AMOUNTS)
@pytest.mark.parametrize("name", LAWS)
def test_law(name, device, runs):
    runs = runs if name in DEEP else min(runs, 10_000_000)
    result = judge(name, runs, device)
    print(name, result)
    assert result.p_value > ALARM, result


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_law_of_rounded_logits(dtype, device):
    """The target's law is that of the logits as stored."""
    rounded = lambda a: torch.from_numpy(a).to(dtype).float().numpy()  # noqa: E731
    model = Model(rounded(SMALL.target), rounded(SMALL.draft), SMALL.order)
    verify = chain_verifier(dense=True, dtype=dtype)
    result = judge(("token", model, True, Drafter(2), 4, PLAIN), 60_000, device, verify)
    assert result.p_value > ALARM, result


# --- controls: each of these must be caught ---------------------------------------------------


def eager_verifier(*, residual=True):
    """A third party's token rule with torch's own generator; without `residual`, a broken one."""

    def verify(target_logits, draft_tokens, *, temperature, draft_logits, draft_temperature, **_):
        generator = torch.Generator(target_logits.device).manual_seed(len(target_logits))
        p = (target_logits / temperature[:, None, None]).softmax(-1)
        q = (draft_logits / draft_temperature[:, None, None]).softmax(-1)
        drafts = draft_tokens.shape[1]
        ratio = (p[:, :drafts] / q).gather(-1, draft_tokens[..., None])[..., 0]
        u = torch.rand(ratio.shape, generator=generator, device=ratio.device)
        accepted = (u < ratio).int().cumprod(-1).sum(-1)
        rest = torch.cat([(p[:, :drafts] - q).clamp_min(0), p[:, drafts:]], 1)
        law = (rest if residual else p)[torch.arange(len(p), device=p.device), accepted]
        last = torch.multinomial(law, 1, generator=generator)
        tokens = torch.cat([draft_tokens, last], 1).scatter(1, accepted[:, None], last)
        return tokens, accepted + 1

    return verify


def test_the_harness_takes_a_third_party_verifier(device):
    case = "token", SMALL, True, Drafter(3), 4, PLAIN
    result = judge(case, 60_000, device, eager_verifier())
    assert result.p_value > ALARM, result


def eager_coupled():
    """Draft and target race with one noise, and the ratio test comes on top (vllm#47386)."""

    def verify(target_logits, draft_tokens, *, temperature, seed, block_start, **rest):
        drafts, vocab = draft_tokens.size(1), target_logits.size(-1)
        p = (target_logits / temperature[:, None, None]).softmax(-1)
        q = (rest["draft_logits"] / rest["draft_temperature"][:, None, None]).softmax(-1)
        at = draft_tokens[..., None]
        u = [noise(seed, block_start, i, rng.VERIFY_COIN, 1, kind="uniform") for i in range(drafts)]
        ratio = (p[:, :drafts].gather(-1, at) / q.gather(-1, at))[..., 0]
        kept = (torch.cat(u, 1) <= ratio).int().cumprod(-1).sum(-1)
        rows = torch.arange(len(p), device=p.device)
        rest = torch.cat([(p[:, :drafts] - q).clamp_min(0), p[:, drafts:]], 1)[rows, kept]
        race = noise(seed, block_start + 1 + kept, 0, rng.POSITION_DRAW, vocab, kind="exponential")
        last = (race / rest).argmin(-1, keepdim=True)
        return torch.cat([draft_tokens, last], 1).scatter(1, kept[:, None], last), kept + 1

    return verify


def token_case(drafter, length=4, sampling=PLAIN):
    return "token", SMALL, True, drafter, length, sampling


def told(**wrong):
    """The token rule, told other sampling parameters than the law that is tested."""
    inner = chain_verifier("token", dense=True)
    return lambda *a, sampling, **k: inner(*a, sampling=Sampling(**wrong), **k)


BROKEN = {
    "soft q with argmax drafts": (token_case(Drafter(3, argmax=True)), None),
    "q off by a temperature": (token_case(Drafter(3, told_temperature=0.6)), None),
    "no residual update": (token_case(Drafter(3)), eager_verifier(residual=False)),
    "draft noise shared with the replacement": (
        token_case(Drafter(3, purpose=rng.RESIDUAL_DRAW)),
        None,
    ),
    "draft noise shared with the coin": (token_case(Drafter(3, purpose=rng.VERIFY_COIN)), None),
    "noise used again in the next block": (token_case(Drafter(2, fixed_start=True)), None),
    "filters that are not applied": (token_case(Drafter(3), 4, Sampling(top_p=0.8)), told()),
    "a filter in place of another": (
        token_case(Drafter(3), 4, Sampling(min_p=0.4)),
        told(top_p=0.8),
    ),
    "penalties without the drafts": (
        token_case(Drafter(3), 4, Sampling(presence=0.8)),
        told(),
    ),
    "ratio test with coupled noise": (token_case(Drafter(3, coupled=True)), eager_coupled()),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_verifiers_are_caught(name, device):
    case, verify = BROKEN[name]
    result = judge(case, 60_000, device, verify)
    print(name, result)
    assert result.p_value < ALARM, result


@pytest.mark.parametrize(
    "device, runs",
    [
        pytest.param("cpu", 2_000_000, id="slow", marks=pytest.mark.slow),
        pytest.param("cuda", 4_000_000, id="gpu", marks=pytest.mark.gpu),
    ],
)
def test_position_keyed_draft_noise_breaks_the_block_rule(device, runs):
    """What a look-ahead rule has seen of a position is used again there in the next block.

    In one block nothing shows, and the token rule, which looks no further than it accepts, bears
    it: vLLM's block verification keyed by position looks affected, and a test of one block passes.
    """
    drafter = Drafter(3, by_position=True)
    several = judge(("block", SMALL, True, drafter, 5, PLAIN), runs, device)
    print(several)
    assert several.p_value < ALARM, several
    one = judge(("block", SMALL, True, drafter, 1, PLAIN), runs, device)
    token = judge(("token", SMALL, True, drafter, 5, PLAIN), runs, device)
    assert one.p_value > ALARM and token.p_value > ALARM, (one, token)


def test_one_block_cannot_see_noise_that_is_used_twice(device):
    """Why sequences are longer than a block: in the first block nothing has been used before."""
    result = judge(token_case(Drafter(2, fixed_start=True), 1), 60_000, device)
    assert result.p_value > ALARM, result


# --- acceptance and large vocabularies ------------------------------------------------------------


def first_slot(vocab, runs, device, *, temperature, draft_temperature=None):
    """One draft of one fixed pair of laws, `runs` requests: arguments, p and q."""
    generator = torch.Generator().manual_seed(vocab)
    target = torch.randn(vocab, generator=generator) * 2
    draft = target + torch.randn(vocab, generator=generator)
    p = softmax(target.numpy(), temperature)
    q = softmax(draft.numpy(), draft_temperature or 1.0)
    seed = torch.arange(runs, device=device)
    arguments = dict(
        target_logits=target.to(device).expand(runs, 2, vocab),
        rule="token",
        temperature=torch.full((runs,), temperature, device=device),
        seed=seed,
        block_start=torch.full_like(seed, 7),
    )
    return arguments, draft.to(device), p, q


@pytest.mark.parametrize("one_hot", [False, True], ids=["dense", "one-hot"])
def test_acceptance_rate(one_hot, device):
    """sum min(p, q) of the drafts is kept, or p(x): within 4 standard errors (vllm#40149)."""
    runs = 40_000
    arguments, draft, p, q = first_slot(50, runs, device, temperature=0.8)
    if one_hot:
        tokens = torch.full((runs,), int(p.argmax()), device=device)
        expected = p.max()
    else:
        law = torch.tensor(q, device=device)
        zeros = torch.full_like(arguments["seed"], 7)
        race = noise(arguments["seed"], zeros, 0, rng.DRAFT_TOKEN, 50, kind="exponential")
        tokens = (race / law).argmin(-1)
        ones = torch.ones(runs, device=device)
        arguments |= dict(draft_logits=draft.expand(runs, 1, 50), draft_temperature=ones)
        expected = np.minimum(p, q).sum()
    accepted = verify_chain(draft_tokens=tokens[:, None], **arguments).num_accepted
    rate = accepted.double().mean().item()
    assert abs(rate - expected) < 4 * (expected * (1 - expected) / runs) ** 0.5


@pytest.mark.parametrize(
    "device, vocab, runs",
    [
        pytest.param("cpu", 20_011, 3_000, id="quick"),
        pytest.param("cpu", 151_936, 20_000, id="slow", marks=pytest.mark.slow),
        pytest.param("cuda", 151_936, 1_000_000, id="gpu", marks=pytest.mark.gpu),
    ],
)
def test_draws_from_a_large_vocabulary(device, vocab, runs):
    """Tokens pooled by rank of mass: heads, tails and the split of the vocabulary all count."""
    arguments, _, p, _ = first_slot(vocab, runs, device, temperature=1.0)
    arguments["target_logits"] = arguments["target_logits"][:, :1]
    none = torch.empty(runs, 0, dtype=torch.int64, device=device)
    drawn = verify_chain(draft_tokens=none, **arguments).tokens[:, 0].cpu().numpy()
    for key in (np.argsort(np.argsort(-p)), np.arange(vocab)):  # by mass, and by id
        pool = key * 64 // vocab
        law = np.bincount(pool, weights=p, minlength=64)
        result = g_test(np.bincount(pool[drawn], minlength=64), law / law.sum())
        assert result.p_value > ALARM, result


def test_g_test_itself():
    """p-values of true laws are uniform, rare cells are pooled, and impossible counts are fatal."""
    generator = np.random.default_rng(0)
    law = softmax(generator.normal(size=400) * 3, 1.0)
    p_values = [g_test(generator.multinomial(5000, law), law).p_value for _ in range(400)]
    assert (
        0.4 < np.mean(p_values) < 0.6
        and min(p_values) > 1e-5
        and np.mean(np.array(p_values) < 0.1) < 0.2
    )
    assert g_test([5, 5, 1], [0.5, 0.5, 0.0]).p_value == 0.0
    assert g_test([60, 40], [0.5, 0.5]).p_value == pytest.approx(0.0452, abs=1e-3)
    assert g_test([8, 2], [0.5, 0.5]).p_value == 1.0  # too few runs to say anything
