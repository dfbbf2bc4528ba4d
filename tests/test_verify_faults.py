"""Shapes on which verifiers of serving engines went wrong, each with its right answer.

The thread stands with each test. Covered elsewhere: sizes above 2^31 and 2^32 elements (vllm#46560,
#48055), seeds and the batch (vllm#6034), acceptance rates (vllm#40149) and capture without
synchronisation (sglang#10226) in test_verify_chain.py and losslessness; q that was not sampled from
(transformers#47932) in test_adapters.py; noise used twice (vllm#47386) in losslessness; trees in
tests of their own.
"""

import numpy as np
import pytest
import torch
from chain_cases import make, to

from domino_kernels import VerifyStatus, noise, rng, verify_chain
from domino_kernels.reference.law import Sampling, law
from domino_kernels.testing.losslessness import g_test

INF, NAN = float("inf"), float("nan")
RULES = ["token", "onehot", "match", "block", "gumbel"]


def sampled(rows, drafts, rule, device, *, draft=None, runs=1, **more):
    """verify_chain of one request [K + 1, V], `runs` times with other seeds, at temperature 1."""
    rows = torch.as_tensor(rows, dtype=torch.float32, device=device)
    drafts = torch.as_tensor(drafts, dtype=torch.int64, device=device)
    if draft is not None:
        draft = torch.as_tensor(draft, dtype=torch.float32, device=device)
        more["draft_logits"] = draft.expand(runs, *draft.shape)
    return verify_chain(
        rows.expand(runs, *rows.shape),
        drafts.expand(runs, -1),
        rule=rule,
        temperature=torch.ones(runs, device=device),
        seed=torch.arange(runs, device=device),
        block_start=torch.full((runs,), 40, device=device),
        **more,
    )


@pytest.mark.parametrize("rule", RULES)
def test_pads_behind_a_draft(rule, device):
    """vllm#46533, #50939: drafts [5, -1, -1]; the pads were read out of bounds, or counted."""
    rows = torch.full((4, 8), -INF)
    rows[0, 5], rows[1, 2] = 0.0, 0.0
    rows[2:] = NAN  # behind the chain's end
    draft = torch.zeros(3, 8)
    draft[1:] = NAN
    result = sampled(rows, [5, -1, -1], rule, device, draft=draft)
    assert result.tokens.tolist() == [[5, 2, -1, -1]]
    assert result.num_accepted.item() == 1 and result.status.item() == 0


@pytest.mark.parametrize("rule", RULES)
def test_ids_that_do_not_exist(rule, device):
    """Ids at and beyond the vocabulary, and far below zero: the chain ends, a status says so."""
    for bad in (8, 10**15, -2, -(2**62)):
        rows = torch.full((3, 8), -INF)
        rows[0, 5], rows[1, 2], rows[2, 7] = 0.0, 0.0, 0.0
        result = sampled(rows, [5, bad], rule, device, draft=torch.zeros(2, 8))
        assert result.tokens.tolist() == [[5, 2, -1]]
        assert result.status.item() == VerifyStatus.BAD_ID


@pytest.mark.parametrize("rule", ["greedy", *RULES])
def test_one_nan_row_among_four_requests(rule, device, generator):
    """vllm#20531, #21876, #45060: an id equal to V came out, and the output was empty."""
    arguments = make(4, 2, 50, generator, dense=False) | {"rule": rule}
    arguments["temperature"][:] = 0.9
    healthy = verify_chain(**to(clean(arguments, rule), device))
    arguments["target_logits"][1, 0] = NAN
    result = verify_chain(**to(clean(arguments, rule), device))
    assert result.tokens[1].tolist() == [-1, -1, -1] and result.num_emitted[1] == 0
    assert result.status.tolist() == [0, VerifyStatus.NON_FINITE, 0, 0]
    others = [0, 2, 3]
    assert torch.equal(result.tokens[others], healthy.tokens[others])
    assert ((result.tokens >= -1) & (result.tokens < 50)).all()


def clean(arguments, rule):
    if rule != "greedy":
        return arguments
    return {k: v for k, v in arguments.items() if k in ("target_logits", "draft_tokens", "rule")}


@pytest.mark.parametrize("rule", ["greedy", *RULES])
@pytest.mark.parametrize("value, bit", [(-INF, 2), (INF, 1), (NAN, 1)])
def test_rows_without_a_law(rule, value, bit, device, generator):
    """flashinfer#1049, #2402, #2455, #2456: a hang or a fault on rows of -inf or NaN."""
    for filters in (False, True):
        arguments = make(3, 2, 40, generator, dense=False) | {"rule": rule}
        arguments["temperature"][:] = 1.0
        arguments["target_logits"][:, 0] = value
        arguments["target_logits"][1:, 0, :20] = 0.0 if value != -INF else -INF
        if filters and rule != "greedy":
            arguments |= dict(top_k=torch.full((3,), 5).int(), top_p=torch.full((3,), 0.5))
        result = verify_chain(**to(clean(arguments, rule), device))
        assert (result.status == bit).all() and not result.num_emitted.any()
        assert (result.tokens == -1).all() and (result.chosen_logprob == 0).all()


@pytest.mark.parametrize("rule", ["token", "block"])
def test_nan_in_the_draft_row(rule, device):
    """vllm#41834: with NaN in q a rejected token 0 was emitted again."""
    rows = torch.tensor([[0.0, -1.0, 0.5]]).repeat(3, 1)
    draft = torch.zeros(2, 3)
    draft[1] = NAN
    result = sampled(rows, [1, 0], rule, device, draft=draft, runs=4000)
    at_one = result.num_accepted == 1
    assert at_one.any() and (result.tokens[at_one, 1] != 0).all()
    assert (result.status[result.num_accepted >= 1] == VerifyStatus.BAD_DRAFT_LAW).all()


@pytest.mark.parametrize("rule", RULES)
def test_seeded_requests_in_any_order(rule, device, generator):
    """vllm#6034, #10863, #13196: requests with and without a seed of their own got mixed up."""
    arguments = make(4, 3, 30, generator, dense=True) | {"rule": rule}
    for name in ("target_logits", "draft_tokens", "draft_logits", "temperature", "block_start"):
        arguments[name] = arguments[name][:1].expand_as(arguments[name]).clone()
    arguments["temperature"][:] = 0.9
    arguments["seed"] = torch.tensor([7, 123456, 7, -99])
    first = verify_chain(**to(arguments, device)).tokens
    assert torch.equal(first[0], first[2])
    arguments["seed"] = torch.tensor([-99, 7, 123456, 7])
    again = verify_chain(**to(arguments, device)).tokens
    assert torch.equal(again, first[[3, 0, 1, 2]])


def test_parameters_apply_to_accepted_drafts_too(device):
    """vllm#42744, #10198: min-p and bias were skipped where drafts were verified."""
    logits = torch.tensor([2.0, 1.0, -0.4, -0.5, -3.0])
    runs = 30_000
    for name, more, sampling, edited in [
        ("min-p", dict(min_p=torch.full((runs,), 0.1, device=device)), Sampling(min_p=0.1), logits),
        (
            "bias",
            dict(logit_bias=torch.tensor([0.0, 0, 0, 3, 0], device=device).expand(runs, -1)),
            Sampling(),
            logits + torch.tensor([0.0, 0, 0, 3, 0]),
        ),
    ]:
        for x in (2, 4):  # a draft that stays, and one that min-p removes
            result = sampled(logits.repeat(2, 1), [x], "token", device, runs=runs, **more)
            p, _ = law(edited.numpy(), sampling)
            counts = np.bincount(result.tokens[:, 0].cpu(), minlength=5)
            assert g_test(counts, p).p_value > 1e-9, name
            assert (counts[p == 0] == 0).all()
            assert (result.num_accepted.sum() == 0) == (p[x] == 0)


def test_masked_drafts_are_rejected(device):
    """TensorRT-LLM#18892: the grammar mask has to act in every row, also on drafts."""
    rows, drafts = torch.zeros(3, 40), [3, 35]
    mask = torch.full((1, 3, 2), -1, dtype=torch.int32, device=device)
    mask[0, 1, 1] &= ~(1 << 3)  # token 35 is not allowed in row 1
    mask[0, 1, 0] = 1 << 17
    mask[0, 1, 1] = 0
    rows[0, 3] = 50.0
    result = sampled(rows, drafts, "token", device, grammar_mask=mask)
    assert result.tokens.tolist() == [[3, 17, -1]]


def test_log_probabilities_of_all_emitted_tokens(device, generator):
    """vllm#30846, #34497, #44727: rows of the wrong tokens, or of the wrong shape."""
    arguments = make(60, 4, 30, generator, dense=True)
    result = verify_chain(**to(arguments, device))
    temperature = arguments["temperature"]
    law = (
        arguments["target_logits"] / torch.where(temperature == 0, 1.0, temperature)[:, None, None]
    )
    tokens = result.tokens.cpu()
    expected = law.log_softmax(-1).gather(-1, tokens.clamp_min(0)[..., None])[..., 0]
    emitted = torch.arange(5) < result.num_emitted.cpu()[:, None]
    assert torch.equal(emitted, tokens >= 0)
    torch.testing.assert_close(
        result.chosen_logprob.cpu(), expected * emitted, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_nucleus_of_a_known_row(ties, device, generator):
    """flashinfer#2202, #3623: V = 500, p = 0.9, against a sort; every kept token can come."""
    logits = torch.randn(500, generator=generator) * 2
    if ties:
        logits = (logits * 4).round() / 4
    p, _ = law(logits.numpy(), Sampling(top_p=0.9))
    order = np.lexsort((np.arange(500), -logits.numpy()))
    full = np.exp(logits.double().numpy())[order] / np.exp(logits.double().numpy()).sum()
    size = int(np.searchsorted(np.cumsum(full), 0.9)) + 1
    assert set(np.flatnonzero(p)) == set(order[:size])
    runs = 200_000
    none = torch.zeros(0, dtype=torch.int64)
    result = sampled(
        logits[None],
        none,
        "token",
        device,
        runs=runs,
        top_p=torch.full((runs,), 0.9, device=device),
    )
    result = g_test(np.bincount(result.tokens[:, 0].cpu(), minlength=500), p)
    assert result.p_value > 1e-9, result


# the last token, and a top_p that by a hair does not keep it: less than the rounding of the masses
EDGES = [
    ([1.28356588, -2.46305704, 1.65962267], 1, 0.990485489),
    ([-3.28742266, -0.633522809, 1.96373653, 1.81776547], 0, 0.997303665),
    ([0.279879659, -1.89653957, 5.74004602, 3.73393607], 1, 0.999576509),
]


@pytest.mark.parametrize("row, x, top_p", EDGES)
def test_a_draft_at_the_edge_of_the_nucleus(row, x, top_p, device):
    """Not kept by its cut, so not accepted, though its p is above 1 - top_p as fp32 has it."""
    logits = torch.tensor(row, device=device)
    result = sampled(
        logits.expand(2, -1),
        [x],
        "token",
        device,
        runs=50,
        top_p=torch.full((50,), top_p, device=device),
        draft_logprob=(logits.log_softmax(-1)[x] - 2).expand(50, 1).contiguous(),
    )
    assert (result.status == VerifyStatus.NEEDS_RESIDUAL).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("more", [{}, dict(top_k=4), dict(min_p=0.1)], ids=str)
def test_top_p_that_is_no_number_keeps_the_first_token(more, dtype, device):
    """As one that is not positive, whatever other filters there are."""
    runs = 64
    filters = {"top_p": torch.full((runs,), NAN, device=device)}
    for name, value in more.items():
        filters[name] = torch.full((runs,), value, device=device)
    filters = {k: v.int() if k == "top_k" else v for k, v in filters.items()}
    result = verify_chain(
        torch.tensor([0.0, 0.1, 0.2, 0.3, -1.0], dtype=dtype, device=device).expand(runs, 1, 5),
        torch.zeros(runs, 0, dtype=torch.int64, device=device),
        rule="token",
        temperature=torch.ones(runs, device=device),
        seed=torch.arange(runs, device=device),
        block_start=torch.zeros(runs, dtype=torch.int64, device=device),
        **filters,
    )
    assert (result.tokens == 3).all()


@pytest.mark.parametrize("rule", ["token", "block"])
def test_equal_laws_and_laws_without_common_tokens(rule, device):
    """p = q keeps everything; p and q apart reject everything, and the residual is p itself."""
    rows = torch.tensor([0.3, 1.0, -1.0, -INF]).repeat(3, 1)
    result = sampled(rows, [0, 1], rule, device, draft=rows[:2], runs=2000)
    assert (result.num_accepted == 2).all() and not result.status.any()
    draft = torch.tensor([-INF, -INF, -INF, 0.0]).repeat(2, 1)
    result = sampled(rows, [3, 3], rule, device, draft=draft, runs=20_000)
    assert (result.num_accepted == 0).all() and not result.status.any()
    p, _ = law(rows[0].numpy())
    assert g_test(np.bincount(result.tokens[:, 0].cpu(), minlength=4), p).p_value > 1e-9


def test_extreme_temperatures(device):
    """Near 0 the argmax, near infinity the uniform law; a negative one or NaN is a status."""
    none = torch.zeros(1, 0, dtype=torch.int64, device=device)

    def draw(temperature, runs=1, row=(1.0, 1.0078125, 0.5, -INF)):
        return verify_chain(
            torch.tensor(row, device=device).expand(runs, 1, 4), none.expand(runs, 0), rule="token",
            temperature=torch.full((runs,), temperature, device=device),
            seed=torch.arange(runs, device=device),
            block_start=torch.zeros(runs, dtype=torch.int64, device=device),
        )  # fmt: skip

    for tiny in (1e-4, 1e-30, 1e-45):
        assert (draw(tiny, 200).tokens == 1).all()
    # the greatest logit times log2(e) / T below 2^21 and above: the one beside it is 0.91 as likely
    near = 999.99994, 1000.0, 0.0, -INF
    assert set(draw(6.9e-4, 200, near).tokens.flatten().tolist()) == {0, 1}
    assert (draw(6.85e-4, 200, near).tokens == 1).all()
    counts = np.bincount(draw(1e30, 30_000).tokens[:, 0].cpu(), minlength=4)
    assert g_test(counts, [1 / 3, 1 / 3, 1 / 3, 0]).p_value > 1e-9
    for wrong in (-1.0, NAN, INF):
        result = draw(wrong)
        assert result.status.item() == VerifyStatus.BAD_PARAMETER and not result.num_emitted.any()


@pytest.mark.parametrize("rule", RULES)
def test_tail_tokens_keep_their_mass(rule, device):
    """vllm#51367, #46665: uniforms of 24 bits cut the tail. 4096 tokens share a mass of 2e-3."""
    vocab, runs = 4104, 150_000
    logits = torch.zeros(1, vocab)
    logits[0, 8:] = float(np.log(2e-3 / 4096 / (1 - 2e-3) * 8))
    none = torch.zeros(0, dtype=torch.int64)
    tokens = sampled(logits, none, rule, device, runs=runs).tokens[:, 0]
    tail = int((tokens >= 8).sum())
    assert abs(tail - 2e-3 * runs) < 6 * (2e-3 * runs) ** 0.5


def test_a_uniform_of_one_does_not_win_a_race(device):
    """Races use v = (k + 1/2) 2^-32: the largest word gives a finite E, the smallest no zero."""
    race = noise(
        torch.tensor([3], device=device), torch.tensor([9], device=device), 0, rng.DRAFT_TOKEN,
        1 << 22, kind="exponential",
    )  # fmt: skip
    assert race.min() > 0 and race.max() < 23.0


@pytest.mark.gpu
def test_no_compilation_after_the_first_call(generator):
    """vllm#54455, #54630: a flip of dtype or flag compiled again, +613 ms."""
    for rule in RULES:
        arguments = to(make(4, 3, 1031, generator, dense=True), "cuda") | {"rule": rule}
        verify_chain(**arguments)
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    slowest = 0.0
    for batch, drafts, vocab in [(1, 0, 5), (7, 1, 1031), (64, 15, 20011), (3, 40, 151936)]:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for rule in RULES:
                arguments = to(
                    make(batch, drafts, vocab, generator, dense=True, dtype=dtype), "cuda"
                )
                start.record()
                verify_chain(**arguments | {"rule": rule})
                end.record()
                end.synchronize()
                slowest = max(slowest, start.elapsed_time(end))
    assert slowest < 100, f"{slowest:.0f} ms: something was compiled or loaded"


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
def test_graph_replays_draw_fresh_noise(rule, generator, graph_replay):
    """A thousand replays with a start that grows: all different from each other, equal to eager."""
    arguments = to(make(2, 3, 200, generator, dense=True, spread=0.5), "cuda") | {"rule": rule}
    arguments["temperature"][:] = 1.0
    from domino_kernels.ops.verify import _empty_result, verify_chain_workspace

    out = _empty_result(2, 3, "cuda")
    workspace = verify_chain_workspace(2, 3, 200, dense=True, device="cuda")
    replay = graph_replay(lambda: verify_chain(**arguments, out=out, workspace=workspace))
    seen = []
    for n in range(1000):
        arguments["block_start"].fill_(1000 + 4 * n)
        replay()
        seen.append(out.tokens.clone())
        if n % 250 == 0:
            assert torch.equal(verify_chain(**arguments).tokens, out.tokens)
    assert len({tuple(t.flatten().tolist()) for t in seen}) > 900
