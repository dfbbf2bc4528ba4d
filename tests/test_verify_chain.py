"""verify_chain against its float64 reference, and everything that must not change its bits.

That the emitted tokens have the target's law: tests/losslessness.
"""

import numpy as np
import pytest
import torch
from chain_cases import (
    assert_reference,
    assert_same,
    guarded_result,
    make,
    reference,
    to,
    token_arguments,
)

import domino_kernels
from domino_kernels import VerifyStatus, rng, verify_chain
from domino_kernels.ops.verify import _CONTROL_WORDS, _empty_result, verify_chain_workspace

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
INF, NAN = float("inf"), float("nan")


# V: one, smaller than a group of four, tails of vectors and tiles, more than one split
SHAPES = [(9, 3, 1), (30, 4, 3), (30, 0, 5), (24, 5, 257), (12, 2, 1031), (6, 3, 20011)]


@pytest.mark.parametrize("dense", [False, True], ids=["one-hot", "dense"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference(shape, dtype, dense, device, generator):
    arguments = make(*shape, generator, dense=dense, dtype=dtype)
    guards, out = guarded_result(*shape[:2], device)
    assert verify_chain(**to(arguments, device), out=out) is out
    for guard in guards:
        guard.check()
    assert_reference(out, reference(arguments))


@pytest.mark.parametrize("dense", [False, True], ids=["one-hot", "dense"])
def test_real_vocabulary(dense, device, generator):
    arguments = make(3, 4, 151936, generator, dense=dense, dtype=torch.bfloat16)
    assert_reference(verify_chain(**to(arguments, device)), reference(arguments))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_greedy_is_argmax_and_cumulative_accept(dtype, device, generator):
    target = torch.randn(64, 6, 999, generator=generator).to(dtype)
    best = target.float().argmax(-1)
    drafts = torch.where(torch.rand(64, 5, generator=generator) < 0.8, best[:, :5], best[:, 1:])
    result = verify_chain(target.to(device), drafts.to(device))
    accepted = (drafts == best[:, :5]).int().cumprod(-1).sum(-1)
    assert 0 < accepted.float().mean() < 5
    assert torch.equal(result.num_accepted.cpu(), accepted.int())
    assert torch.equal(result.num_emitted.cpu(), accepted.int() + 1)
    keep = torch.arange(6) <= accepted[:, None]
    assert torch.equal(result.tokens.cpu(), best.where(keep, torch.tensor(-1)))
    logprob = target.double().log_softmax(-1).gather(-1, best[..., None])[..., 0] * keep
    torch.testing.assert_close(result.chosen_logprob.cpu().double(), logprob, rtol=1e-6, atol=1e-6)
    assert not result.status.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(40, 5, 999), (7, 35, 130), (3, 15, 151936)], ids=str)
def test_greedy_without_logprobs(shape, dtype, device, generator):
    """The short form of the greedy rule decides as the long one, also on rows that are no law."""
    batch, drafts, vocab = shape
    target = torch.randn(batch, drafts + 1, vocab, generator=generator).to(dtype)
    tokens = target.float().argmax(-1)[:, :drafts].contiguous()
    stop = torch.randint(0, drafts + 1, (batch,), generator=generator)
    for b in range(batch):
        if stop[b] < drafts:
            tokens[b, stop[b]] = [0, -1, vocab, 2**62][b % 4]
    target[0, 0, 1], target[1, drafts] = NAN, -INF
    target, tokens = target.to(device), tokens.to(device)
    rows = [n % (drafts + 2) for n in range(batch)]
    cu_rows = torch.tensor([0, *np.cumsum(rows)], dtype=torch.int32, device=device)
    packed = torch.cat([target[b, :n] for b, n in enumerate(rows)])
    for source, ragged in ((target, None), (packed, cu_rows)):
        long = verify_chain(source, tokens, cu_rows=ragged)
        short = verify_chain(source, tokens, cu_rows=ragged, logprobs=False)
        assert short.chosen_logprob is None
        for name in ("tokens", "num_accepted", "num_emitted", "status"):
            assert torch.equal(getattr(short, name), getattr(long, name)), name
        assert ragged is not None or (long.status.any() and (long.num_accepted > 0).any())


def test_greedy_ties_go_to_the_lowest_id(device):
    target = torch.zeros(1, 3, 3000, device=device)
    target[0, 0, [2999, 1500, 700]] = 1.0  # far apart: other lanes, tiles and vectors
    target[0, 1] = -2.0
    target[0, 2, 5], target[0, 2, 4] = 0.0, -0.0  # and all others 0: token 0
    result = verify_chain(target, torch.tensor([[700, 0]], device=device))
    assert result.tokens.tolist() == [[700, 0, 0]]
    assert verify_chain(target, torch.tensor([[1500, 0]], device=device)).tokens[0, 0] == 700


def test_temperature_zero_is_the_greedy_rule(device, generator):
    arguments = to(make(12, 4, 50, generator, dense=True), device)
    mixed = verify_chain(**arguments)
    greedy = verify_chain(arguments["target_logits"], arguments["draft_tokens"])
    for a, b in zip(mixed[:5], greedy[:5]):
        assert torch.equal(a[::3], b[::3])
    assert not torch.equal(mixed.tokens, greedy.tokens)


@pytest.mark.parametrize("dense", [False, True], ids=["one-hot", "dense"])
def test_ragged_is_each_request_alone(dense, device, generator):
    arguments = to(make(7, 4, 130, generator, dense=dense), device)
    rows = [5, 1, 3, 0, 2, 5, 4]
    cu_rows = torch.tensor([2, *(2 + np.cumsum(rows))], dtype=torch.int32, device=device)
    packed = torch.full((2 + sum(rows) + 3, 130), NAN, device=device)  # unused rows: poison
    for b, n in enumerate(rows):
        packed[int(cu_rows[b]) : int(cu_rows[b]) + n] = arguments["target_logits"][b, :n]
    ragged = verify_chain(**arguments | dict(target_logits=packed, cu_rows=cu_rows))
    assert ragged.num_emitted[3] == 0 and ragged.status[3] == 0  # inactive
    assert (ragged.tokens[3] == -1).all() and (ragged.chosen_logprob[3] == 0).all()
    for b, n in enumerate(rows):
        if n == 0:
            continue
        alone = {
            k: v[b : b + 1] if isinstance(v, torch.Tensor) else v for k, v in arguments.items()
        }
        for name in ("draft_tokens", "draft_logits"):
            if alone[name] is not None:
                alone[name] = alone[name][:, : n - 1]
        alone["target_logits"] = alone["target_logits"][:, :n]
        one = verify_chain(**alone)
        assert torch.equal(ragged.tokens[b, :n], one.tokens[0])
        assert torch.equal(ragged.chosen_logprob[b, :n], one.chosen_logprob[0])
        assert ragged.num_emitted[b] == one.num_emitted[0] and ragged.status[b] == one.status[0]
        assert (ragged.tokens[b, n:] == -1).all()


@pytest.mark.parametrize("dense", [False, True], ids=["one-hot", "dense"])
def test_pads_are_a_shorter_block(dense, device, generator):
    """-1 from slot n on, whatever the rows and the ids behind it hold."""
    arguments = to(make(40, 4, 9, generator, dense=dense), device)
    short = {k: v[:, :2] if k.startswith("draft_") and v is not None else v
             for k, v in arguments.items()}  # fmt: skip
    short["target_logits"] = arguments["target_logits"][:, :3]
    arguments["target_logits"] = arguments["target_logits"].clone()
    arguments["target_logits"][:, 3:] = NAN
    arguments["draft_tokens"][:, 2] = -1
    arguments["draft_tokens"][:, 3] = 10**9
    long, expected = verify_chain(**arguments), verify_chain(**short)
    assert torch.equal(long.tokens[:, :3], expected.tokens)
    assert torch.equal(long.chosen_logprob[:, :3], expected.chosen_logprob)
    assert torch.equal(long.num_emitted, expected.num_emitted)
    assert not long.status.any()


@pytest.mark.parametrize("dense", [False, True], ids=["one-hot", "dense"])
def test_batch_order_and_padding_change_no_bit(dense, device, generator):
    arguments = to(make(23, 3, 1031, generator, dense=dense), device)
    whole = verify_chain(**arguments)
    assert_same(verify_chain(**arguments), whole)
    order = torch.randperm(23, generator=generator).to(device)
    order = torch.cat([order, order[:9]])  # and a larger batch
    shuffled = {k: v[order] if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    assert_same(verify_chain(**shuffled), [t[order] for t in whole[:5]])
    for b in (0, 7, 22):
        alone = {
            k: v[b : b + 1] if isinstance(v, torch.Tensor) else v for k, v in arguments.items()
        }
        assert_same(verify_chain(**alone), [t[b : b + 1] for t in whole[:5]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_change_no_bit(dtype, device, generator):
    arguments = to(make(5, 3, 1031, generator, dense=True, dtype=dtype), device)
    expected = verify_chain(**arguments)
    wide = torch.full((4, 5, 2 * 1031 + 5), NAN, device=device).to(dtype)  # [slots, B, ...]
    wide_draft = torch.full((5, 6, 1033), NAN, device=device).to(dtype)
    wide_tokens = torch.full((5, 11), 10**6, device=device)
    for shift in (0, 1, 3):  # other alignments of the rows
        target = wide[:, :, shift : shift + 1031].transpose(0, 1)
        target.copy_(arguments["target_logits"])
        draft = wide_draft[:, ::2, :1031]
        draft.copy_(arguments["draft_logits"])
        tokens = wide_tokens[:, 4:7]
        tokens.copy_(arguments["draft_tokens"])
        strided = dict(target_logits=target, draft_logits=draft, draft_tokens=tokens)
        assert_same(verify_chain(**arguments | strided), expected)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_storage_dtype_changes_no_bit(dtype, device, generator):
    arguments = to(make(20, 3, 300, generator, dense=True, dtype=dtype), device)
    expected = verify_chain(**arguments)
    for names in (["target_logits"], ["draft_logits"], ["target_logits", "draft_logits"]):
        widened = {name: arguments[name].float() for name in names}
        assert_same(verify_chain(**arguments | widened), expected)


def test_draft_temperature(device, generator):
    arguments = to(make(30, 3, 40, generator, dense=True), device)
    default = verify_chain(**arguments)
    same = verify_chain(**arguments, draft_temperature=arguments["temperature"])
    assert_same(same, default)
    zero = torch.zeros(30, device=device)
    one_hot = verify_chain(**arguments | dict(draft_logits=None))
    assert_same(verify_chain(**arguments, draft_temperature=zero), one_hot)
    assert not torch.equal(one_hot.tokens, default.tokens)
    hot = arguments | dict(draft_temperature=torch.full((30,), 1.7, device=device))
    assert_reference(verify_chain(**hot), reference(to(hot, "cpu")))


def coins(count):
    """(seed, coin) of the smallest and the largest coins of slot 0 among 2^20 seeds."""
    seeds = np.arange(1 << 20)
    u = rng.uniform(rng.words(seeds, 0, 0, rng.VERIFY_COIN, 0))
    order = np.argsort(u)
    chosen = np.concatenate([order[:count], order[-count:]])
    return torch.tensor(seeds[chosen]), u[chosen]


@pytest.mark.parametrize("dense", [False, True], ids=["one-hot", "dense"])
def test_coin_at_the_edge_of_acceptance(dense, device):
    """Coins near 0 and near 1 keep their 32 bits: p / q a little above or below each decides."""
    seed, u = coins(32)
    assert u.min() < 1e-5
    for factor, accepted in ((1 + 2e-6, 1), (1 - 2e-6, 0)):
        ratio = u * factor
        keep = ratio < 1
        q = 0.25 if dense else 1.0
        p = torch.tensor(ratio[keep] * q)
        logits = torch.stack([p.log(), (-p).log1p()], -1).float()  # [N, 2]
        draft = torch.tensor([0.25, 0.75]).log().expand(len(p), 1, 2) if dense else None
        result = verify_chain(
            **to(
                dict(
                    target_logits=logits[:, None].repeat(1, 2, 1),
                    draft_tokens=torch.zeros(len(p), 1, dtype=torch.int64),
                    temperature=torch.ones(len(p)),
                    seed=seed[torch.tensor(keep)],
                    block_start=torch.zeros(len(p), dtype=torch.int64),
                    draft_logits=draft,
                ),
                device,
            ),
            rule="token",
        )
        assert (result.num_accepted == accepted).all()
        if not accepted:
            assert (result.tokens[:, 0] == 1).all()


def test_a_token_without_mass_is_never_emitted(device, generator):
    """-inf target logits: not accepted although u * q underflows, and never drawn."""
    n = 20000
    target = torch.tensor([[0.0, -INF, -1.0, -INF, -INF], [-INF, 0.0, -INF, 1.0, -INF]])
    for q in ([-87.0, -87.0, 0.0, 0.0, -87.0], None):
        draft = None if q is None else torch.tensor(q).expand(n, 1, 5).to(device)
        result = verify_chain(
            target.expand(n, 2, 5).to(device),
            torch.ones(n, 1, dtype=torch.int64, device=device),
            rule="token",
            temperature=torch.full((n,), 1.0, device=device),
            seed=torch.arange(n, device=device),
            block_start=torch.zeros(n, dtype=torch.int64, device=device),
            draft_logits=draft,
        )
        assert (result.num_accepted == 0).all()
        assert sorted(set(result.tokens[:, 0].tolist())) == [0, 2]


def test_equal_laws_accept_everything(device, generator):
    arguments = to(make(64, 3, 33, generator, dense=True), device)
    arguments["draft_logits"] = arguments["target_logits"][:, :3]
    arguments["draft_tokens"] = torch.randint(33, (64, 3), generator=generator).to(device)
    arguments["temperature"] = torch.full((64,), 0.8, device=device)
    result = verify_chain(**arguments)
    assert (result.num_accepted == 3).all() and not result.status.any()


def test_bad_draft_law_replaces_without_the_rejected_token(device):
    """A NaN row of q: the rejected draft must not come back (vllm-project/vllm#41834)."""
    n = 4000
    target = torch.tensor([0.0, 1.0, 0.5]).expand(n, 2, 3).to(device)
    result = verify_chain(
        target,
        torch.zeros(n, 1, dtype=torch.int64, device=device),
        rule="token",
        temperature=torch.ones(n, device=device),
        seed=torch.arange(n, device=device),
        block_start=torch.zeros(n, dtype=torch.int64, device=device),
        draft_logits=torch.full((n, 1, 3), NAN, device=device),
    )
    rejected = result.num_accepted == 0
    assert 0.5 < rejected.float().mean() < 0.95
    assert (result.tokens[rejected, 0] != 0).all()
    assert (result.status == VerifyStatus.BAD_DRAFT_LAW).all()


def test_zero_residual_draws_from_the_target(device):
    """Where rounding leaves nothing of relu(p - q), p = q up to rounding: draw from p.

    In both laws token 0 is too light for the sum, so token 1 has p = q = 1 and the residual of the
    rejected token 0 is empty.
    """
    n, ln2 = 500, float(np.log(2))
    result = verify_chain(
        torch.tensor([-60 * ln2, 0.0]).expand(n, 2, 2).to(device),
        torch.zeros(n, 1, dtype=torch.int64, device=device),
        rule="token",
        temperature=torch.ones(n, device=device),
        seed=torch.arange(n, device=device),
        block_start=torch.zeros(n, dtype=torch.int64, device=device),
        draft_logits=torch.tensor([-41 * ln2, 0.0]).expand(n, 1, 2).to(device),
    )
    assert (result.status == VerifyStatus.ZERO_RESIDUAL).all()
    assert (result.tokens == torch.tensor([1, -1], device=device)).all()
    assert (result.num_emitted == 1).all() and (result.num_accepted == 0).all()


def test_empty_batch(device):
    none = torch.zeros(0, 2, dtype=torch.int64, device=device)
    result = verify_chain(torch.zeros(0, 3, 5, device=device), none)
    assert result.tokens.shape == (0, 3) and result.status.shape == (0,)


# --- on a GPU ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dense", [False, True], ids=["one-hot", "dense"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_and_twin_agree_bitwise(dtype, dense):
    """Tokens, counts, status and also the log-probabilities."""
    generator = torch.Generator("cuda").manual_seed(20261129)
    for shape in [(4000, 3, 3), (3000, 2, 257), (200, 15, 1031), (64, 7, 32000), (8, 15, 151936)]:
        arguments = make(*shape, generator, dense=dense, dtype=dtype)
        assert_same(verify_chain(**arguments), verify_chain(**to(arguments, "cpu")))


@pytest.mark.gpu
def test_more_slots_than_threads(generator):
    """K = 700: the walk takes several stretches of a block's threads."""
    target = torch.randn(6, 701, 11, generator=generator)
    drafts = target[:, :700].argmax(-1)
    for b, stop in enumerate([0, 255, 256, 511, 699]):
        drafts[b, stop] = (drafts[b, stop] + 1) % 11
    expected = verify_chain(target, drafts)
    assert expected.num_accepted.tolist() == [0, 255, 256, 511, 699, 700]
    assert_same(verify_chain(target.cuda(), drafts.cuda()), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dense", [False, True], ids=["one-hot", "dense"])
def test_graph_replay(dense, generator, graph_replay):
    """Logits, drafts, seeds, starts and temperatures change between replays."""
    static = to(make(8, 5, 20011, generator, dense=dense), "cuda")
    out = _empty_result(8, 5, "cuda")
    workspace = verify_chain_workspace(8, 5, 20011, dense=dense, device="cuda")
    replay = graph_replay(lambda: verify_chain(**static, out=out, workspace=workspace))
    for _ in range(20):
        arguments = make(8, 5, 20011, generator, dense=dense)
        for name, value in to(arguments, "cuda").items():
            if isinstance(value, torch.Tensor):
                static[name].copy_(value)
        workspace[_CONTROL_WORDS:].random_()  # nothing may be kept there
        for tensor in out[:5]:
            tensor.fill_(7)
        replay()
        assert_same(out, verify_chain(**arguments))


@pytest.mark.gpu
def test_out_form_neither_allocates_nor_synchronises(generator):
    arguments = to(make(8, 5, 20011, generator, dense=True), "cuda")
    out = _empty_result(8, 5, "cuda")
    workspace = verify_chain_workspace(8, 5, 20011, dense=True, device="cuda")
    verify_chain(**arguments, out=out, workspace=workspace)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        verify_chain(**arguments, out=out, workspace=workspace)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    n = workspace.numel()
    with pytest.raises(ValueError, match=f"workspace: got {n - 1} words, expected {n} or more"):
        verify_chain(**arguments, out=out, workspace=workspace[:-1])


@pytest.mark.gpu
@pytest.mark.parametrize("rows, vocab", [(15408, 151936), (8608, 250880), (28288, 151936)])
def test_more_than_two_billion_logits(rows, vocab):
    """vllm-project/vllm#46560 and #48055: row * V overflows 32 bits; the last also 2^32."""
    if torch.cuda.mem_get_info()[0] < 2.2 * rows * vocab:
        pytest.skip("not enough device memory")
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device="cuda")
    batch = rows // 16
    best = (torch.arange(rows, device="cuda") * 7919 + 13) % vocab
    logits[torch.arange(rows, device="cuda"), best] = 30.0
    drafts = best.view(batch, 16)[:, :15].contiguous()
    drafts[:, 10] += (torch.arange(batch, device="cuda") % 2 == 1).long()
    cu_rows = (torch.arange(batch + 1, device="cuda") * 16).int()
    shaped = logits.view(batch, 16, vocab)
    ones = torch.ones(batch, device="cuda")
    sampled = dict(rule="token", temperature=0.1 * ones, seed=ones.long(), block_start=ones.long())
    keep = torch.where(torch.arange(batch, device="cuda") % 2 == 1, 10, 15).int()
    for keywords in ({}, dict(logprobs=False), sampled):
        for source, cu in ((shaped, None), (logits, cu_rows)):
            result = verify_chain(source, drafts, cu_rows=cu, **keywords)
            assert torch.equal(result.num_accepted, keep)
            last = result.tokens.gather(1, keep.long()[:, None])[:, 0]
            assert torch.equal(last, best.view(batch, 16).gather(1, keep.long()[:, None])[:, 0])
            assert not result.status.any()


@pytest.mark.gpu
def test_runs_on_the_current_stream(generator):
    arguments = to(make(4, 3, 3000, generator), "cuda")
    expected = verify_chain(**arguments)
    late = torch.zeros_like(arguments["target_logits"])
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        late.copy_(arguments["target_logits"])
        result = verify_chain(**arguments | dict(target_logits=late))
        torch.cuda.current_stream().synchronize()
    assert_same(result, expected)


@pytest.mark.gpu
def test_wrong_device():
    arguments = to(token_arguments(), "cuda")
    with pytest.raises(ValueError, match="verify_chain: seed: got a tensor on cpu, expected cuda"):
        domino_kernels.verify_chain(**arguments | dict(seed=torch.zeros(2).long()))
