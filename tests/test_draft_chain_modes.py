"""draft_chain on pools, drawn drafts, and what engines ask for besides."""

import numpy as np
import pytest
import torch
from test_draft_chain import DTYPES, EPSILON, arrays, make, name_of

from domino_kernels import ChainPlan, DraftResult, draft_chain, draft_chain_out, verify_chain
from domino_kernels.reference.head import Drawn, group_pool, replay_chain
from domino_kernels.testing import to_numpy

SIZES = dict(V=1000, H=72, G=48, R=32)  # the block form takes them
NARROW = dict(V=3000, H=72, G=256, R=96)


def with_table(inputs):
    return (*inputs[:3], inputs[3].with_table())


def block_inputs(generator, dtype, batch, sizes, table=True):
    inputs = make(generator, dtype, "cuda", B=batch, **sizes)
    return with_table(inputs) if table else inputs


def reference_arrays(inputs, bias=None, allowed=None):
    """arrays() with the adjusted base logits; a table stands in the embedding's place."""
    base, hidden, anchor, tensors = arrays(*inputs)
    if bias is not None:
        base = base + to_numpy(bias)[:, None]
    if allowed is not None:
        base = np.where(np.asarray(allowed)[:, None], base, -np.inf)
    table = inputs[3].table
    if table is not None:
        rows = to_numpy(table.transpose(1, 2).reshape(len(table), -1))
        tensors = [None, *tensors[1:4], rows]
    return base, hidden, anchor, tensors


def gave_up(plan):
    """Whether a block of the last call waited in vain; its ids are then the second form's."""
    return plan.workspace[8:12].any().item()  # ChainControl: epoch, left, aborted, mute


def on_pools(inputs, device):
    """Whether a call that is not exact runs on pools: the plain form on a GPU scores all ids."""
    return device == "cpu" or inputs[3].dtype != torch.float32


def pools_of(base, size, pool, drafts, first, prefix):
    window = base[:, first : first + drafts]
    if pool == "slot":
        return group_pool(window, size)
    return group_pool(window[:, prefix:].max(1, keepdims=True), size)


def assert_replay(tokens, values, inputs, base, dtype, **options):
    replay = replay_chain(tokens.cpu().numpy(), base, *inputs, dtype=name_of(dtype), **options)
    assert replay.regret.max() <= EPSILON[dtype]
    np.testing.assert_allclose(
        to_numpy(values), replay.scores - replay.regret, atol=EPSILON[dtype], rtol=0
    )


CASES = [  # shift_label, prefix, drafts, batch, pool, M
    (True, 1, 15, 3, "block", 64),
    (True, 0, 16, 1, "block", 200),
    (False, 2, 15, 2, "block", 7),
    (True, 1, 15, 9, "slot", 40),
    (False, 0, 5, 1, "slot", 1),
    (True, 2, 7, 2, "block", 1000),
    (True, 3, 9, 4, "slot", 40),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("table", [False, True], ids=["embedding", "table"])
@pytest.mark.parametrize("shift_label, prefix, drafts, batch, pool, size", CASES, ids=str)
def test_pools(shift_label, prefix, drafts, batch, pool, size, table, dtype, device, generator):
    inputs = make(generator, dtype, device, B=batch, **SIZES)
    inputs = with_table(inputs) if table else inputs
    plan = ChainPlan(inputs[3], batch, num_drafts=drafts, pool_size=size, pool=pool)
    tokens, scores = draft_chain(
        *inputs,
        num_drafts=drafts,
        shift_label=shift_label,
        pure_draft_prefix_len=prefix,
        exact=False,
        pool_size=size,
        pool=pool,
        plan=plan,
        return_scores=True,
    )
    assert not gave_up(plan)
    base, *rest = reference_arrays(inputs)
    pools = None
    if on_pools(inputs, device):
        pools = pools_of(base, size, pool, drafts, 0 if shift_label else 1, prefix)
    options = dict(shift_label=shift_label, prefix=prefix, pools=pools)
    assert_replay(tokens, scores, rest, base, dtype, **options)
    if pools is not None and size < 100:  # negative control: the pool matters
        free = draft_chain(*inputs, num_drafts=drafts, shift_label=shift_label)
        assert not torch.equal(free, tokens)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_pool_of_everything_is_exact(dtype, device, generator):
    inputs = with_table(make(generator, dtype, device, B=3, **SIZES))
    exact = draft_chain(*inputs, return_scores=True)
    pooled = draft_chain(*inputs, exact=False, pool_size=1000, return_scores=True)
    assert torch.equal(exact[0], pooled[0]), "the same order of sums in the twin and on the GPU"
    torch.testing.assert_close(exact[1], pooled[1], rtol=1e-5, atol=1e-5)


def edits(batch, device):
    """A bias, a mask that forbids about half, as int32 words and as booleans, and a valid size."""
    generator = torch.Generator().manual_seed(8)
    bias = torch.randn(batch, 1000, generator=generator) * 2
    allowed = torch.rand(batch, 1000, generator=generator) < 0.5
    padded = torch.nn.functional.pad(allowed, (0, 24)).view(batch, 32, 32).long()
    words = (padded << torch.arange(32)).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    return bias.to(device), words.to(device), allowed.to(device)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "pool"])
@pytest.mark.parametrize("table", [False, True], ids=["embedding", "table"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_mask_and_valid_vocabulary(dtype, table, exact, device, generator):
    """The same bits as a call on base logits that were edited beforehand."""
    inputs = make(generator, dtype, device, B=3, base_dtype=torch.float32, **SIZES)
    inputs = with_table(inputs) if table else inputs
    bias, mask, allowed = edits(3, device)
    settings = dict(exact=exact, pool_size=100, return_scores=True)
    edit = dict(bias=bias, mask=mask, vocab_valid=901)
    for names in (["bias"], ["mask"], ["vocab_valid"], list(edit)):
        base = inputs[0] + bias[:, None] if "bias" in names else inputs[0].clone()
        if "mask" in names:
            base.masked_fill_(~allowed[:, None], -torch.inf)
        if "vocab_valid" in names:
            base[..., 901:] = -torch.inf
        edited = draft_chain(base, *inputs[1:], **settings)
        actual = draft_chain(*inputs, **settings, **{name: edit[name] for name in names})
        assert torch.equal(actual[0], edited[0]) and torch.equal(actual[1], edited[1]), names
        plain = draft_chain(*inputs, **settings)
        assert not torch.equal(actual[0], plain[0]), f"{names} had no effect"


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "pool"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_past_num_active_are_left_alone(dtype, exact, device, generator):
    inputs = with_table(make(generator, dtype, device, B=5, **SIZES))
    expected = draft_chain(*inputs, exact=exact, pool_size=64)
    plan = ChainPlan(inputs[3], 5, pool_size=64)
    for count in (0, 1, 3, 5):
        out = DraftResult.empty(inputs[3], 5, pool_size=64)
        for tensor in out[:3]:
            tensor.fill_(-7)
        active = torch.tensor([count], dtype=torch.int32, device=device)
        settings = dict(exact=exact, pool_size=64, num_active=active)
        draft_chain_out(*inputs, out=out, plan=plan, **settings)
        assert torch.equal(out.tokens[:count], expected[:count])
        for tensor in out[:3]:
            assert (tensor[count:] == -7).all()


def drawn_arguments(batch, device):
    temperature = torch.linspace(0.5, 1.5, batch)
    temperature[::3] = 0
    seed = torch.arange(batch) * 77 - 3
    block_start = torch.arange(batch) * 16 + 2**33
    return dict(
        temperature=temperature.to(device),
        seed=seed.to(device),
        block_start=block_start.to(device),
        exact=False,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift_label, prefix, drafts, batch, pool, size", CASES, ids=str)
def test_drawn(shift_label, prefix, drafts, batch, pool, size, dtype, device, generator):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("drafts are drawn by the block form")
    inputs = with_table(make(generator, dtype, device, B=batch, **SIZES))
    arguments = drawn_arguments(batch, device)
    plan = ChainPlan(inputs[3], batch, num_drafts=drafts, pool_size=size, pool=pool)
    result = draft_chain(
        *inputs,
        num_drafts=drafts,
        shift_label=shift_label,
        pure_draft_prefix_len=prefix,
        pool_size=size,
        pool=pool,
        plan=plan,
        **arguments,
    )
    assert not gave_up(plan)
    base, *rest = reference_arrays(inputs)
    first = 0 if shift_label else 1
    pools = pools_of(base, size, pool, drafts, first, 0)
    ids = result.pool_ids.cpu().numpy()
    assert (ids == np.broadcast_to(pools, ids.shape)).all()

    drawn = Drawn(*(arguments[n].cpu().numpy() for n in ("temperature", "seed", "block_start")))
    replay = replay_chain(
        result.tokens.cpu().numpy(),
        base,
        *rest,
        dtype=name_of(dtype),
        shift_label=shift_label,
        prefix=prefix,
        pools=pools,
        drawn=drawn,
    )
    warm = np.where(drawn.temperature > 0, drawn.temperature, 1)[:, None]
    assert (replay.regret * warm <= EPSILON[dtype]).all()
    other = np.roll(drawn.seed, 1) + 1  # negative control: other words, other drafts
    if batch > 2 and size > 1:
        wrong = replay_chain(
            result.tokens.cpu().numpy(),
            base,
            *rest,
            shift_label=shift_label,
            prefix=prefix,
            pools=pools,
            drawn=drawn._replace(seed=other),
        )
        assert (wrong.regret * warm > EPSILON[dtype]).any()

    law = (result.pool_logits.double().cpu() / torch.tensor(warm)[..., None]).log_softmax(-1)
    chosen = result.pool_ids.cpu() == result.tokens.cpu()[..., None]
    assert (chosen.sum(-1) == 1).all()
    torch.testing.assert_close(
        result.log_probs.cpu().double(), law[chosen].view(batch, drafts), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        result.scores, result.pool_logits[chosen.to(device)].view_as(result.scores)
    )


@pytest.mark.parametrize("pool", ["block", "slot"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dense_q(dtype, pool, device, generator):
    """The pool's law over the vocabulary, and the same verdicts from it as from the pool."""
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("drafts are drawn by the block form")
    batch, drafts, vocab = 6, 4, SIZES["V"]
    inputs = with_table(make(generator, dtype, device, B=batch, **SIZES))
    arguments = drawn_arguments(batch, device)
    active = torch.tensor([batch - 1], dtype=torch.int32, device=device)
    options = dict(num_drafts=drafts, pool_size=40, pool=pool)
    out = DraftResult.empty(
        inputs[3], batch, num_drafts=drafts, pool_size=40, sampled=True, dense_q=True
    )
    out.dense_logits.fill_(7.0)
    draft_chain_out(
        *inputs,
        out=out,
        plan=ChainPlan(inputs[3], batch, **options),
        num_active=active,
        pool_size=40,
        pool=pool,
        **arguments,
    )
    expected = torch.full((batch, drafts, vocab), -torch.inf)
    ids, logits = (t[:-1].cpu() for t in (out.pool_ids, out.pool_logits))
    expected[:-1].scatter_(2, ids.long(), logits)
    expected[-1] = 7.0  # not active
    assert torch.equal(out.dense_logits.cpu(), expected)

    result = draft_chain(*inputs, **options, **arguments, return_dense_q=True)
    assert torch.equal(result.dense_logits[:-1].cpu(), expected[:-1])
    # targets near the drafts' law, so that walks of all lengths occur
    noise = torch.randn(batch, drafts + 1, vocab, generator=generator).to(device)
    target = inputs[0][:, : drafts + 1].float() + noise
    verify = dict(
        temperature=torch.full((batch,), 0.8, device=device),
        block_start=arguments["block_start"],
        draft_temperature=arguments["temperature"],
    )
    walks = set()
    for rule in ("token", "block"):
        for seed in range(20):
            number = torch.arange(batch, device=device) + 100 * seed
            pooled, dense = (
                verify_chain(target, result.tokens, rule=rule, seed=number, **verify, **q)
                for q in (
                    dict(draft_logits=result.pool_logits, draft_ids=result.pool_ids),
                    dict(draft_logits=result.dense_logits),
                )
            )
            assert torch.equal(pooled.tokens, dense.tokens)
            assert torch.equal(pooled.num_accepted, dense.num_accepted)
            walks |= set(dense.num_accepted.tolist())
    assert len(walks) > 2


def pool_ids(base, weights, hidden, device, **options):
    """The pools of the drafts, which a call that draws them returns."""
    batch, slots, _ = base.shape
    rows = torch.arange(batch, device=device)
    result = draft_chain(
        base.to(device),
        hidden,
        rows,
        weights,
        num_drafts=slots,
        exact=False,
        temperature=torch.ones(batch, device=device),
        seed=rows,
        block_start=rows,
        **options,
    )
    return result.pool_ids.cpu().numpy()


@pytest.mark.parametrize("base_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab", [1000, 5003])  # 16-byte loads, and rows that start anywhere
@pytest.mark.parametrize("size", [1, 7, 16, 72, 96, 512])
def test_pool_ids(size, vocab, base_dtype, device, generator):
    """Ties, NaN, infinities; mask, bias and vocab_valid; pools of the block and of each slot."""
    dtype = torch.float16 if base_dtype == torch.float32 else base_dtype
    batch, slots, valid = 3, 2, vocab - 38
    inputs = make(generator, dtype, device, B=batch, S=slots, V=vocab, H=72, G=48, R=32)
    weights, hidden = inputs[3].with_table(), inputs[1]
    base = (torch.randn(batch, slots, vocab, generator=generator) * 2).round() / 2
    for start, value in enumerate((torch.nan, torch.inf, -torch.inf, -0.0)):
        base[..., start::97] = value
    base = base.to(base_dtype)
    bias = torch.randn(batch, vocab, generator=generator).round().to(device)
    words = torch.randint(-(2**31), 2**31, (batch, (vocab + 31) // 32), generator=generator).int()
    allowed = (words.long()[..., None] >> torch.arange(32) & 1).flatten(1)[:, None, :vocab].bool()
    edits = dict(bias=bias, mask=words.to(device), vocab_valid=valid)
    for names in ([], ["mask"], ["vocab_valid"], list(edits)):
        values = base.float() + (bias.cpu()[:, None] if "bias" in names else 0)
        values = np.where(allowed, values, -np.inf) if "mask" in names else values.numpy()
        values = values[..., :valid] if "vocab_valid" in names else values
        options = dict(pool_size=size, **{name: edits[name] for name in names})
        found = pool_ids(base, weights, hidden, device, **options)
        maxima = np.fmax.reduce(values, axis=1, keepdims=True)
        assert (found == group_pool(maxima, size)).all(), names
        found = pool_ids(base, weights, hidden, device, pool="slot", **options)
        assert (found == group_pool(values, size)).all(), names


@pytest.mark.gpu
@pytest.mark.parametrize("batch, size", [(1, 2048), (3, 2048), (8, 2048), (33, 512), (64, 512)])
def test_pool_ids_of_a_large_vocabulary(batch, size, generator):
    """Blocks of 16 to 256 ids a period; the pools that the twin finds for some rows."""
    base, hidden, _, weights = block_inputs(generator, torch.bfloat16, batch, dict(NARROW, V=40000))
    found = pool_ids(base[:, :15], weights, hidden[:, :15], "cuda", pool_size=size)
    rows = [0, batch // 2, batch - 1]
    maxima = base[rows, :15].float().amax(1, keepdim=True).cpu().numpy()
    assert (found[rows] == group_pool(maxima, size)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("slots", [2, 3, 15])
@pytest.mark.parametrize("batch, size", [(33, 512), (70, 128), (32, 1024)])
def test_pool_ids_by_the_copy_engine(batch, size, slots, dtype, generator):
    """Rows enough for it, ties, NaN and infinities, whole turns of periods and what is left."""
    sizes = dict(NARROW, V=40_008)
    _, hidden, _, weights = block_inputs(generator, dtype, batch, sizes)
    base = (torch.randn(batch, slots, sizes["V"], generator=generator) * 2).round() / 2
    for start, value in enumerate((torch.nan, torch.inf, -torch.inf, -0.0)):
        base[..., start::997] = value
    base = base.to(dtype)
    found = pool_ids(base, weights, hidden[:, :slots], "cuda", pool_size=size)
    rows = [0, batch // 2, batch - 1]
    maxima = np.fmax.reduce(base[rows].float().numpy(), axis=1, keepdims=True)
    assert (found[rows] == group_pool(maxima, size)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_draws_follow_the_law(dtype, device, generator):
    """One draft of 4000 requests that differ in their seed only."""
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("drafts are drawn by the block form")
    inputs = with_table(make(generator, dtype, device, B=1, S=1, V=64, H=72, G=48, R=32))
    count = 4000
    base, hidden, anchor = (t.expand(count, *t.shape[1:]).contiguous() for t in inputs[:3])
    number = torch.arange(count, device=device)
    result = draft_chain(
        base,
        hidden,
        anchor,
        inputs[3],
        num_drafts=1,
        pure_draft_prefix_len=0,
        exact=False,
        pool_size=12,
        temperature=torch.full((count,), 2.0, device=device),
        seed=number,
        block_start=torch.zeros_like(number),
    )
    law = (result.pool_logits[0, 0].double() / 2).softmax(-1).cpu()
    ids = result.pool_ids[0, 0].cpu()
    counts = (result.tokens[:, :1].cpu() == ids).sum(0).double()
    statistic = ((counts - count * law) ** 2 / (count * law)).sum().item()
    assert statistic < 60, statistic  # 11 degrees of freedom: p < 1e-8
    assert ((counts - count / 12) ** 2 / (count / 12)).sum() > 60  # it is not uniform


BAD = [
    (dict(pool_size=0, exact=False), ValueError, "pool_size: got 0, expected at least 1"),
    (dict(pool="row"), ValueError, "pool: got 'row', expected one of block, slot"),
    (dict(vocab_valid=0), ValueError, r"vocab_valid: got 0, expected 1\.\.1000"),
    (
        dict(mask=torch.zeros(2, 31).int()),
        ValueError,
        r"mask: got shape \[2, 31\], expected \[2, 32",
    ),
    (dict(mask=torch.zeros(2, 32)), TypeError, "mask: got torch.float32, expected torch.int32"),
    (dict(bias=torch.zeros(2, 999)), ValueError, r"bias: got shape \[2, 999\], expected \[2, 1000"),
    (dict(num_active=torch.zeros(1)), TypeError, "num_active: got torch.float32, expected torch.i"),
    (dict(temperature=torch.ones(2)), ValueError, "exact: got True with temperature, expected exa"),
    (dict(temperature=torch.ones(2), exact=False), TypeError, "seed: got NoneType, expected a ten"),
    (dict(return_dense_q=True), ValueError, "return_dense_q: got True without temperature"),
]


@pytest.mark.parametrize("change, error, message", BAD, ids=[b[2][:40] for b in BAD])
def test_bad_arguments(change, error, message, generator):
    inputs = make(generator, torch.float32, **SIZES)
    with pytest.raises(error, match=f"(draft_chain|ChainPlan): {message}"):
        draft_chain(*inputs, **change)


@pytest.mark.gpu
@pytest.mark.parametrize("drafts, prefix", [(1, 1), (3, 4), (29, 1)])
def test_blocks_that_are_not_drawn_on_a_gpu(drafts, prefix, generator):
    inputs = make(generator, torch.bfloat16, "cuda", B=2, **SIZES | dict(S=30))
    options = dict(num_drafts=drafts, pure_draft_prefix_len=prefix, **drawn_arguments(2, "cuda"))
    message = f"num_drafts: got {drafts} with temperature on a GPU, expected more than"
    with pytest.raises(ValueError, match=message):
        draft_chain(*inputs, **options)


# ---- HeadWeights.with_table ----


def test_table(device, generator):
    weights = make(generator, torch.bfloat16, device, **SIZES)[3]
    table = weights.with_table()
    expected = weights.embedding.double() @ weights.w_ih.double().T
    actual = table.table.double().transpose(1, 2).reshape(1000, -1)
    torch.testing.assert_close(actual, expected, rtol=2**-8, atol=1e-2)
    assert "0.3 MiB input table" in repr(table) and "table" not in repr(weights)
    assert table.w2.data_ptr() == weights.w2.data_ptr()


def test_table_needs_units_by_sixteen(generator):
    weights = make(generator, torch.float32, V=50, G=40)[3]
    with pytest.raises(ValueError, match="table: got G=40, expected a multiple of 16"):
        weights.with_table()
