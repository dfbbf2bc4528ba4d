"""verify_chain and row_stats in Triton: against float64, and on a GPU against the CUDA kernels.

Without a GPU the interpreter runs the kernels; it is slow, so shapes are small there.
"""

import numpy as np
import pytest
import torch
from chain_cases import make, reference, to

import domino_kernels
from domino_kernels import VerifyStatus, rng
from domino_kernels.triton_kernels import noise, verify_chain
from domino_kernels.triton_kernels.verify_chain import row_stats

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = float("inf"), float("nan")
RULES = [
    ("token", False),
    ("token", True),
    ("onehot", True),
    ("match", False),
    ("gumbel", True),
    ("block", True),
    ("block", False),
]


def cases(shape, rule, dense, generator, **filters):
    arguments = make(*shape, generator, dense=dense) | {"rule": rule}
    like = arguments["temperature"]
    for name, value in filters.items():
        if name != "filter_order":
            dtype = torch.int32 if name == "top_k" else torch.float32
            value = torch.full_like(like, value, dtype=dtype)
        arguments[name] = value
    return arguments


def compare(arguments, device=DEVICE):
    expected = reference(arguments)
    with np.errstate(all="ignore"):
        result = verify_chain.verify_chain(**to(arguments, device))
    tokens, accepted, emitted, logprob, status = expected
    assert (result.tokens.cpu().numpy() == tokens).all()
    assert (result.num_accepted.cpu().numpy() == accepted).all()
    assert (result.num_emitted.cpu().numpy() == emitted).all()
    assert (result.status.cpu().numpy() == status).all()
    error = np.abs(result.chosen_logprob.cpu().double().numpy() - logprob) / (1 + np.abs(logprob))
    assert error.max(initial=0) < 1e-6
    return result


@pytest.mark.parametrize("rule, dense", RULES)
def test_rules(rule, dense, generator):
    result = compare(cases((15, 3, 37), rule, dense, generator))
    assert 0 < result.num_accepted.float().mean() < 3


@pytest.mark.parametrize("shape", [(6, 0, 5), (6, 2, 1), (3, 2, 9000)], ids=str)
def test_shapes(shape, generator):
    """No drafts, a vocabulary of one, rows in several parts."""
    compare(cases(shape, "token", True, generator))


@pytest.mark.parametrize("order", ["transformers", "vllm", "joint"])
def test_filters(order, generator):
    filters = dict(top_k=6, top_p=0.7, min_p=0.05, filter_order=order)
    compare(cases((6, 1, 17), "token", True, generator, **filters))
    compare(cases((4, 1, 17), "match", False, generator, top_p=0.4, filter_order=order))
    compare(cases((4, 1, 17), "match", False, generator, top_p=NAN, filter_order=order))


def test_filters_with_ties(generator):
    arguments = cases((6, 1, 16), "onehot", False, generator, top_p=0.5)
    arguments["target_logits"] = arguments["target_logits"].round()
    compare(arguments)
    arguments["top_k"], arguments["top_p"] = torch.full((6,), 4, dtype=torch.int32), None
    compare(arguments)


def test_ragged_and_strided(generator):
    arguments = cases((5, 3, 21), "token", False, generator)
    cu_rows = torch.tensor([1, 5, 6, 6, 9, 11], dtype=torch.int32)
    packed = torch.full((12, 30), NAN)[:, :21]
    for b in range(5):
        first, last = int(cu_rows[b]), int(cu_rows[b + 1])
        packed[first:last] = arguments["target_logits"][b, : last - first]
    result = compare(arguments | dict(target_logits=packed, cu_rows=cu_rows))
    assert result.num_emitted[2] == 0


@pytest.mark.parametrize("temperature", [1e-38, 1e-40, 1e-45, 3e38])
def test_extreme_temperatures(temperature, generator):
    """1 / temperature leaves float32: the law is that of the CUDA kernels all the same."""
    arguments = cases((8, 3, 37), "token", True, generator, temperature=temperature)
    arguments["draft_temperature"] = None
    result = verify_chain.verify_chain(**to(arguments, DEVICE))
    expected = domino_kernels.verify_chain(**to(arguments, DEVICE))
    assert torch.equal(result.tokens, expected.tokens)
    assert torch.equal(result.status, expected.status)


def test_bad_input(generator):
    """NaN and empty rows, ids that do not exist, a draft law that is none: status, no guess."""
    for rule in ("token", "block"):
        arguments = cases((6, 2, 9), rule, True, generator)
        arguments["temperature"][:] = 0.8
        arguments["draft_tokens"][0, 0] = 9
        arguments["draft_tokens"][1, 1] = -1
        arguments["target_logits"][2, 0, 3] = NAN
        arguments["target_logits"][3, 0] = -INF
        arguments["draft_logits"][4, 0] = NAN
        arguments["target_logits"][5, 1, 0] = INF
        status = compare(arguments).status.tolist()
        assert status[0] & VerifyStatus.BAD_ID and status[1] & VerifyStatus.BAD_ID == 0
        assert status[2] & VerifyStatus.NON_FINITE and status[3] & VerifyStatus.EMPTY_ROW
        assert status[4] & VerifyStatus.BAD_DRAFT_LAW


def test_zero_residual_draws_from_the_target():
    ln2 = float(np.log(2))
    arguments = dict(
        target_logits=torch.tensor([-60 * ln2, 0.0]).expand(3, 2, 2).contiguous(),
        draft_tokens=torch.zeros(3, 1, dtype=torch.int64),
        temperature=torch.ones(3),
        seed=torch.arange(3),
        block_start=torch.zeros(3, dtype=torch.int64),
        draft_logits=torch.tensor([-41 * ln2, 0.0]).expand(3, 1, 2).contiguous(),
    )
    result = verify_chain.verify_chain(**to(arguments, DEVICE))
    assert (result.status == VerifyStatus.ZERO_RESIDUAL).all()
    assert result.tokens.tolist() == [[1, -1]] * 3


def test_row_stats(generator):
    logits = torch.randn(2, 3, 9001, generator=generator) * 3
    logits[0, 0, 5] = logits[0, 0, 8500] = 40.0  # a tie over two parts of the row
    logits[1, 1, 7], logits[1, 2] = NAN, -INF
    temperature = torch.rand(2, 3, generator=generator) + 0.3
    tokens = torch.tensor([[0, 9000, -1], [9001, 3, 4]])
    stats = row_stats(*(t.to(DEVICE) for t in (logits, tokens, temperature)))
    expected = (logits.double() / temperature[..., None].double()).logsumexp(-1)
    usable = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    torch.testing.assert_close(
        stats.lse.cpu()[usable].double(), expected[usable], rtol=1e-6, atol=1e-6
    )
    assert stats.lse.cpu()[~usable].isnan().all() and stats.argmax.cpu()[0, 0] == 5
    assert torch.equal(stats.argmax.cpu()[usable], logits.argmax(-1)[usable])
    assert stats.status.tolist() == [[0, 0, 0], [0, 1, 2]]
    chosen = stats.chosen.cpu()
    assert chosen[0, 0] == logits[0, 0, 0] and chosen[0, 1] == logits[0, 1, 9000]
    assert chosen[0, 2].isnan() and chosen[1, 0].isnan()
    # two shards of the vocabulary
    halves = [row_stats(logits[0, :, part].contiguous().to(DEVICE)) for part in (
        slice(0, 4096), slice(4096, None))]  # fmt: skip
    whole = row_stats(logits[0].to(DEVICE)).lse
    torch.testing.assert_close(torch.logaddexp(halves[0].lse, halves[1].lse), whole)


def test_words_and_numbers_of_noise():
    """All fields of the contract in play; exponentials to 3e-7, uniforms exactly."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(out, uniform, race, seed, start, i, purpose, COUNT: tl.constexpr):
        groups = tl.arange(0, COUNT // 4)
        four = noise.words(tl.load(seed), tl.load(start), i, purpose, groups)
        for lane in tl.static_range(4):
            tl.store(out + 4 * groups + lane, four[lane].to(tl.int64))
            tl.store(uniform + 4 * groups + lane, noise.uniform(four[lane]))
            tl.store(race + 4 * groups + lane, noise.exponential(four[lane]))

    for seed, start, i, purpose in [
        (0, 0, 0, 1), (-1, 2**32 - 1, 3, 5), (2**63 - 1, 2**40 + 7, 2**24 - 1, 3), (7, -9, 1, 2)
    ]:  # fmt: skip
        out = torch.zeros(1024, dtype=torch.int64, device=DEVICE)
        uniform, race = torch.zeros(2, 1024, device=DEVICE)
        values = (torch.tensor([v], device=DEVICE) for v in (seed, start))
        kernel[(1,)](out, uniform, race, *values, i, purpose, COUNT=1024)
        words = rng.words(seed, start, i, purpose, np.arange(1024))
        assert (out.cpu().numpy() == words.astype(np.int64)).all()
        assert (uniform.cpu().numpy() == rng.uniform(words).astype(np.float32)).all()
        expected = rng.exponential(words)
        assert (np.abs(race.cpu().numpy() - expected) / expected).max() < 5e-7


@pytest.mark.gpu
@pytest.mark.parametrize("rule, dense", RULES)
def test_triton_and_cuda_agree(rule, dense):
    """Tokens, counts and status of every request."""
    generator = torch.Generator("cuda").manual_seed(20261129)
    for shape in [(3000, 3, 37), (16, 3, 151936)]:  # every new shape compiles ten kernels
        arguments = make(*shape, generator, dense=dense, dtype=torch.bfloat16) | {"rule": rule}
        triton = verify_chain.verify_chain(**arguments)
        cuda = domino_kernels.verify_chain(**arguments)
        different = (triton.tokens != cuda.tokens).any(-1)
        # of thousands of draws one may hang on the last bit of a key
        assert int(different.sum()) <= 1, f"{int(different.sum())} of {len(different)} requests"
        same = ~different
        assert torch.equal(triton.num_emitted[same], cuda.num_emitted[same])
        assert torch.equal(triton.status[same], cuda.status[same])
        torch.testing.assert_close(triton.chosen_logprob[same], cuda.chosen_logprob[same])


@pytest.mark.gpu
def test_triton_and_cuda_agree_with_filters():
    generator = torch.Generator("cuda").manual_seed(20261129)
    for filters in (dict(top_k=9, top_p=0.9), dict(top_p=0.8, min_p=0.02)):
        arguments = cases((500, 3, 37), "token", True, generator, **filters)
        triton = verify_chain.verify_chain(**arguments)
        cuda = domino_kernels.verify_chain(**arguments)
        assert int((triton.tokens != cuda.tokens).any(-1).sum()) <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_law(rule, runs=500_000):
    """The G-test of tests/losslessness, several blocks, on the Triton kernels."""
    from domino_kernels.testing.losslessness import Drafter, Model, Sampling, g_test, sample

    def verify(target_logits, draft_tokens, *, sampling, counts, draft_logits, **keywords):
        told = dict(draft_logits=draft_logits.contiguous()) if rule != "match" else {}
        if rule == "match":
            del keywords["draft_temperature"]
        result = verify_chain.verify_chain(
            target_logits.contiguous(), draft_tokens, rule=rule, **told, **keywords
        )
        return result.tokens, result.num_emitted

    model, sampling = Model.random(3, 3, 1), Sampling(0.8)
    drafter = Drafter(3, temperature=1.2)
    counts = sample(model, verify, drafter, runs=runs, length=4, sampling=sampling, device=DEVICE)
    result = g_test(counts, model.law(sampling, 4))
    assert result.p_value > 1e-9, result
