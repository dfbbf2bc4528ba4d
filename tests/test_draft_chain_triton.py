"""The Triton backend of draft_chain, under the interpreter without a GPU, against the fp64 rule.

The interpreter rounds bfloat16 wrongly: that dtype is tested on a GPU.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from test_draft_chain import arrays, assert_chain, make, planted

from bench.ops.head_inputs import planted_block
from bench.peers.head import DRAFTS
from domino_kernels import ChainPlan, DraftResult, draft_chain, draft_chain_out
from domino_kernels.reference.head import draft_chain as reference_chain
from domino_kernels.reference.head import group_pool
from domino_kernels.testing import Guarded, to_numpy

ON = pytest.mark.parametrize(
    "dtype, device",
    [
        (torch.float32, "cpu"),
        (torch.float16, "cpu"),
        *(
            pytest.param(dtype, "cuda", marks=pytest.mark.gpu)
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
        ),
    ],
    ids=str,
)
SMALL = dict(B=3, S=6, V=300, H=24, G=24, R=24)
# shift_label, prefix, num_drafts, sizes
CASES = [
    (True, 1, 5, SMALL),
    (True, 0, 6, SMALL | dict(B=1)),
    (False, 2, 5, SMALL | dict(B=2)),
    (True, 6, 5, SMALL),  # nothing is corrected
    (True, 2, 4, dict(B=2, S=4, V=257, H=33, G=17, R=5)),  # tails everywhere
    (True, 1, 3, dict(B=1, S=3, V=5, H=8, G=8, R=8)),
    (True, 1, 2, dict(B=1, S=2, V=2000, H=8, G=8, R=8)),  # a group of 2000 ids
    (False, 1, 3, dict(B=33, S=4, V=140, H=40, G=32, R=72)),  # three row blocks, gates alone
    (True, 0, 2, dict(B=4, S=2, V=200, H=16, G=160, R=264)),  # several blocks of units and rank
]
MODES = [(True, 16), (False, 16)]  # exact, pool_size


def chain(inputs, exact, pool_size, *, shift_label=True, prefix=1, drafts=5):
    found = draft_chain(
        *inputs,
        num_drafts=drafts,
        shift_label=shift_label,
        pure_draft_prefix_len=prefix,
        exact=exact,
        pool_size=pool_size,
        backend="triton",
        return_details=True,
    )
    return found.tokens, found.scores, found.restarts


def assert_same(found, expected):
    """The same bits on a GPU; the interpreter multiplies by BLAS, whose sums depend on shapes."""
    for a, b in zip(found, expected, strict=True):
        if a.is_cuda or not a.is_floating_point():
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def pool(base, size):
    """[B, slots, V] -> [B, V] bool: what is in the pool of the block."""
    best = base.float().amax(1).cpu()
    ids = torch.from_numpy(group_pool(best.numpy(), size))
    inside = torch.zeros_like(best, dtype=torch.bool).scatter_(1, ids, True)
    return inside.to(base.device)


@ON
@pytest.mark.parametrize("shift_label, prefix, drafts, sizes", CASES, ids=str)
def test_exact_against_reference(shift_label, prefix, drafts, sizes, dtype, device, generator):
    """With a pool that misses most winners, and one that holds all: the same bits."""
    inputs = make(generator, dtype, device, **sizes)
    options = dict(shift_label=shift_label, prefix=prefix, drafts=drafts)
    tokens, scores, restarts = chain(inputs, True, 4, **options)
    assert_chain(tokens, scores, inputs, shift_label, prefix)
    everything = chain(inputs, True, 4 * sizes["V"], **options)
    assert_same(everything, (tokens, scores, torch.zeros_like(restarts)))
    if sizes["V"] > 100 and prefix < drafts - 1:
        assert (restarts == 1).any()


@ON
@pytest.mark.parametrize("table", [False, True])
def test_pool_is_the_chain_over_its_pool(table, dtype, device, generator):
    base, *rest, weights = make(generator, dtype, device, **SMALL | dict(G=32))
    given = weights.with_table() if table else weights
    tokens, scores, restarts = chain((base, *rest, given), False, 16)
    within = base.clone()
    within[:, 1:].masked_fill_(~pool(base[:, 1:5], 16)[:, None], -torch.inf)
    # a table is one more rounding
    epsilon = {torch.float32: 5e-5, torch.float16: 0.02, torch.bfloat16: 0.05}[dtype] * (1 + table)
    assert_chain(tokens, scores, (within, *rest, weights), epsilon=epsilon)
    assert (restarts == 0).all()


@pytest.mark.parametrize("restarts", [0, 1, DRAFTS - 1])
def test_planted_winners_outside_the_pool(restarts, device):
    shape = {"H": 24, "G": 20, "R": 24, "V": 400}
    block = planted_block(shape, 3, 14, device, restarts=restarts, dtype=torch.float32)
    tokens, _, restarted = chain(block[:4], True, 64, drafts=DRAFTS)
    assert tokens.tolist() == block.planted.tolist()
    expected = {0: [0, 0, 0], 1: [1, 0, 0], DRAFTS - 1: [1, 1, 1]}[restarts]
    assert restarted.tolist() == expected
    uncertified = chain(block[:4], False, 64, drafts=DRAFTS)[0]
    assert (uncertified != block.planted).any(1).int().tolist() == expected


@pytest.mark.parametrize("shift_label", [True, False])
def test_planted_chain(shift_label, device):
    inputs, expected = planted(shift_label, 1, torch.float32, device, B=2, S=6)
    tokens = chain(inputs, True, 16, shift_label=shift_label, drafts=expected.shape[1])[0]
    assert tokens.tolist() == expected.tolist()


@ON
@pytest.mark.parametrize("exact, pool_size", MODES)
def test_batch_invariant_bitwise(exact, pool_size, dtype, device, generator):
    inputs = make(generator, dtype, device, B=35, S=3, V=150, H=16, G=24, R=16)
    whole = chain(inputs, exact, pool_size, drafts=3)
    again = chain(inputs, exact, pool_size, drafts=3)
    assert all(torch.equal(a, b) for a, b in zip(whole, again))
    *tensors, weights = inputs
    for rows in (slice(0, 1), slice(31, 35), slice(5, 22)):
        alone = chain((*(t[rows] for t in tensors), weights), exact, pool_size, drafts=3)
        assert_same(alone, [part[rows] for part in whole])


@pytest.mark.parametrize("exact, pool_size", MODES)
def test_writes_its_outputs_and_nothing_else(exact, pool_size, device, generator):
    inputs = make(generator, torch.float32, device, **SMALL)
    options = dict(num_drafts=5, pool_size=pool_size)
    plan = ChainPlan(inputs[-1], 3, **options, backend="triton")
    workspace = Guarded(plan.workspace.shape, torch.uint8, device)
    plan.workspace = workspace.tensor
    shapes = ((3, 5), torch.int64), ((3, 5), torch.float32), ((3,), torch.int32)
    guards = [Guarded(*shape, device) for shape in shapes]
    out = DraftResult(*(guard.tensor for guard in guards), None, None, None)
    draft_chain_out(*inputs, out=out, plan=plan, exact=exact, pool_size=pool_size)
    workspace.check(all_written=False)
    for guard, expected in zip(guards, chain(inputs, exact, pool_size)):
        assert torch.equal(guard.check(), expected)


def test_strided_rows_and_float32_base(device, generator):
    base, hidden, anchor, weights = make(generator, torch.float16, device, **SMALL)
    expected = chain((base.float(), hidden, anchor, weights), True, 16)
    wide_base = torch.full((8, 3, 308), torch.nan, device=device)
    wide_hidden = torch.full((3, 9, 32), torch.nan, dtype=torch.float16, device=device)
    wide_base[2:, :, :300] = base.transpose(0, 1)
    wide_hidden[:, 2:8, :24] = hidden
    strided = wide_base[2:, :, :300].transpose(0, 1), wide_hidden[:, 2:8, :24]
    found = chain((*strided, anchor, weights), True, 16)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


@pytest.mark.parametrize("corrected", [True, False])
def test_ties_nan_and_infinities(corrected, device, generator):
    """By hand, with W2 = 0 where the correction is on."""
    _, hidden, anchor, weights = make(
        generator, torch.float32, device, B=1, S=6, V=300, H=8, G=8, R=8
    )
    weights.w2.zero_()
    nan, inf = torch.nan, torch.inf
    base = torch.full((1, 6, 300), -1.0, device=device)
    base[0, 0, [280, 17, 299]] = 2.0  # a tie: the lowest id
    base[0, 1] = -inf  # all equal
    base[0, 2, [3, 40]] = torch.tensor([nan, 5.0], device=device)  # NaN never wins,
    base[0, 3] = nan  # unless there is nothing else
    base[0, 4] = torch.where(torch.arange(300, device=device) == 250, -inf, nan)  # -inf beats it
    base[0, 5] = -2.0
    base[0, 5, [8, 5]] = torch.tensor([-0.0, 0.0], device=device)  # equal
    inputs = base, hidden, anchor, weights
    tokens, scores, _ = chain(inputs, True, 16, prefix=0 if corrected else 6, drafts=6)
    assert tokens.tolist() == [[17, 0, 40, 0, 250, 5]]
    np.testing.assert_array_equal(to_numpy(scores), [[2, -inf, 5, nan, -inf, 0]])


def test_anchor_outside_the_vocabulary(device, generator):
    base, hidden, _, weights = make(generator, torch.float32, device, **SMALL)
    for given, read in ((-5, 0), (10**12, 299)):
        outside, inside = (torch.full((3,), a, device=device) for a in (given, read))
        assert torch.equal(
            chain((base, hidden, outside, weights), True, 16)[0],
            chain((base, hidden, inside, weights), True, 16)[0],
        )


@pytest.mark.gpu
@pytest.mark.parametrize("exact, pool_size", MODES)
def test_graph(exact, pool_size, graph_replay, generator):
    inputs = make(generator, torch.bfloat16, "cuda", **SMALL)
    options = dict(num_drafts=5, pool_size=pool_size)
    plan = ChainPlan(inputs[-1], 3, **options, backend="triton")
    out = DraftResult.empty(inputs[-1], 3, **options)
    call = dict(out=out, plan=plan, exact=exact, pool_size=pool_size)
    replay = graph_replay(lambda: draft_chain_out(*inputs, **call))
    for _ in range(3):
        fresh = make(generator, torch.bfloat16, "cuda", **SMALL)
        for tensor, value in zip(inputs[:3], fresh):
            tensor.copy_(value)
        out.tokens.fill_(-1)
        replay()
        assert torch.equal(out.tokens, chain(inputs, exact, pool_size)[0])


UNSUPPORTED = [
    dict(pool="slot"),
    dict(vocab_valid=299),
    dict(num_active=torch.ones(1, dtype=torch.int32)),
    dict(bias=torch.zeros(3, 300)),
]


@pytest.mark.parametrize("option", UNSUPPORTED, ids=str)
def test_what_it_does_not_take(option, generator):
    inputs = make(generator, torch.float32, **SMALL)
    with pytest.raises(ValueError, match="draft_chain: backend: got 'triton', which takes"):
        draft_chain(*inputs, num_drafts=5, backend="triton", **option)
    with pytest.raises(ValueError, match="ChainPlan: backend: got 'tirton', expected one of"):
        draft_chain(*inputs, num_drafts=5, backend="tirton")


def test_reference_pool_chain_differs(generator):
    """The negative control of test_pool_is_the_chain_over_its_pool: its pool misses winners."""
    inputs = make(generator, torch.float32, **SMALL)
    found = reference_chain(*arrays(*inputs), num_drafts=5).tokens
    inside = pool(inputs[0][:, 1:5], 16)
    assert not all(inside[row, ids[1:]].all() for row, ids in enumerate(torch.tensor(found)))
