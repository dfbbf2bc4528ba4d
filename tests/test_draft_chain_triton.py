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
from domino_kernels.ops.head_triton import run, workspace_bytes
from domino_kernels.reference.head import draft_chain as reference_chain
from domino_kernels.testing import Guarded, to_numpy
from domino_kernels.triton_kernels.draft_chain import GROUP_BEST

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
    (False, 1, 3, dict(B=33, S=4, V=140, H=40, G=32, R=72)),  # three row blocks, gates alone
    (True, 0, 2, dict(B=4, S=2, V=200, H=16, G=160, R=264)),  # several blocks of units and rank
]
MODES = [(True, 0), (True, 16), (False, 16)]  # exact, pool_size


def chain(inputs, exact, pool_size, *, shift_label=True, prefix=1, drafts=5, **options):
    return run(
        *inputs,
        num_drafts=drafts,
        shift_label=shift_label,
        pure_draft_prefix_len=prefix,
        exact=exact,
        pool_size=pool_size,
        **options,
    )


def pool(base, size):
    """[B, slots, V] -> [B, V] bool: the best of each group of ids by the maximum over slots."""
    best, groups = base.float().amax(1), size // GROUP_BEST
    inside = torch.zeros_like(best, dtype=torch.bool)
    for row, values in enumerate(best):
        for group in range(groups):
            ids = torch.arange(group, values.numel(), groups, device=values.device)
            order = values[ids].argsort(descending=True, stable=True)
            inside[row, ids[order[:GROUP_BEST]]] = True
    return inside


@ON
@pytest.mark.parametrize("shift_label, prefix, drafts, sizes", CASES, ids=str)
def test_exact_against_reference(shift_label, prefix, drafts, sizes, dtype, device, generator):
    """Dense, and certified with a pool that misses most winners: the same bits."""
    inputs = make(generator, dtype, device, **sizes)
    options = dict(shift_label=shift_label, prefix=prefix, drafts=drafts)
    tokens, scores = chain(inputs, True, 0, **options)
    assert_chain(tokens, scores, inputs, shift_label, prefix)
    certified = chain(inputs, True, 8, **options)
    assert torch.equal(certified[0], tokens) and torch.equal(certified[1], scores)


@ON
@pytest.mark.parametrize("table", [False, True])
def test_pool_is_the_chain_over_its_pool(table, dtype, device, generator):
    base, *rest = inputs = make(generator, dtype, device, **SMALL | dict(G=32))
    weights = rest[-1]
    packed = None
    if table:  # [V, 3G] -> [V, G / 16, 3, 16]
        products = torch.nn.functional.linear(weights.embedding, weights.w_ih)
        packed = products.view(300, 3, -1, 16).transpose(1, 2).contiguous()
    tokens, scores = chain(inputs, False, 16, table=packed)
    within = base.clone()
    within[:, 1:].masked_fill_(~pool(base[:, 1:5], 16)[:, None], -torch.inf)
    assert not torch.equal(within, base)
    # a table is one more rounding
    epsilon = {torch.float32: 5e-5, torch.float16: 0.02, torch.bfloat16: 0.05}[dtype] * (1 + table)
    assert_chain(tokens, scores, (within, *rest), epsilon=epsilon)


@pytest.mark.parametrize("restarts", [0, 1, DRAFTS - 1])
def test_planted_winners_outside_the_pool(restarts, device):
    shape = {"H": 24, "G": 20, "R": 24, "V": 400}
    block = planted_block(shape, 3, 14, device, restarts=restarts, dtype=torch.float32)
    tokens, _ = chain(block[:4], True, 64, drafts=DRAFTS)
    assert tokens.tolist() == block.planted.tolist()
    uncertified, _ = chain(block[:4], False, 64, drafts=DRAFTS)
    assert (uncertified != block.planted).any(1).tolist() == {
        0: [False] * 3, 1: [True, False, False], DRAFTS - 1: [True] * 3
    }[restarts]  # fmt: skip


@pytest.mark.parametrize("shift_label", [True, False])
def test_planted_chain(shift_label, device):
    inputs, expected = planted(shift_label, 1, torch.float32, device, B=2, S=6)
    tokens, _ = chain(inputs, True, 16, shift_label=shift_label, drafts=expected.shape[1])
    assert tokens.tolist() == expected.tolist()


@ON
@pytest.mark.parametrize("exact, pool_size", MODES)
def test_batch_invariant_bitwise(exact, pool_size, dtype, device, generator):
    inputs = make(generator, dtype, device, B=18, S=3, V=150, H=16, G=24, R=16)
    whole = chain(inputs, exact, pool_size, drafts=3)
    again = chain(inputs, exact, pool_size, drafts=3)
    assert all(torch.equal(a, b) for a, b in zip(whole, again))
    *tensors, weights = inputs
    for rows in (slice(0, 1), slice(16, 18), slice(5, 9)):
        alone = chain((*(t[rows] for t in tensors), weights), exact, pool_size, drafts=3)
        for one, of_all in zip(alone, whole):
            assert torch.equal(one, of_all[rows]), f"rows {rows} depend on their batch"


@pytest.mark.parametrize("exact, pool_size", MODES)
def test_writes_its_outputs_and_nothing_else(exact, pool_size, device, generator):
    inputs = make(generator, torch.float32, device, **SMALL)
    size = workspace_bytes(3, 5, inputs[-1], 1, pool_size)
    memory = {
        "out": Guarded((3, 5), torch.int64, device),
        "scores": Guarded((3, 5), torch.float32, device),
        "workspace": Guarded((size,), torch.uint8, device),
    }
    expected = chain(inputs, exact, pool_size)
    chain(inputs, exact, pool_size, **{name: m.tensor for name, m in memory.items()})
    memory["workspace"].check(all_written=False)
    assert torch.equal(memory["out"].check(), expected[0])
    assert torch.equal(memory["scores"].check(), expected[1])


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
    tokens, scores = chain(inputs, True, 0, prefix=0 if corrected else 6, drafts=6)
    assert tokens.tolist() == [[17, 0, 40, 0, 250, 5]]
    np.testing.assert_array_equal(to_numpy(scores), [[2, -inf, 5, nan, -inf, 0]])


def test_anchor_outside_the_vocabulary(device, generator):
    base, hidden, _, weights = make(generator, torch.float32, device, **SMALL)
    for given, read in ((-5, 0), (10**12, 299)):
        outside, inside = (torch.full((3,), a, device=device) for a in (given, read))
        assert torch.equal(
            chain((base, hidden, outside, weights), True, 0)[0],
            chain((base, hidden, inside, weights), True, 0)[0],
        )


@pytest.mark.gpu
@pytest.mark.parametrize("exact, pool_size", MODES)
def test_graph(exact, pool_size, graph_replay, generator):
    inputs = make(generator, torch.bfloat16, "cuda", **SMALL)
    memory = dict(
        out=torch.zeros(3, 5, dtype=torch.int64, device="cuda"),
        scores=torch.zeros(3, 5, device="cuda"),
        workspace=torch.empty(
            workspace_bytes(3, 5, inputs[-1], 1, pool_size), dtype=torch.uint8, device="cuda"
        ),
    )
    replay = graph_replay(lambda: chain(inputs, exact, pool_size, **memory))
    for _ in range(3):
        fresh = make(generator, torch.bfloat16, "cuda", **SMALL)
        for tensor, value in zip(inputs[:3], fresh):
            tensor.copy_(value)
        memory["out"].fill_(-1)
        replay()
        assert torch.equal(memory["out"], chain(inputs, exact, pool_size)[0])


def test_reference_pool_chain_differs(generator):
    """The negative control of test_pool_is_the_chain_over_its_pool: its pool misses winners."""
    inputs = make(generator, torch.float32, **SMALL)
    found = reference_chain(*arrays(*inputs), num_drafts=5).tokens
    inside = pool(inputs[0][:, 1:5], 16)
    assert not all(inside[row, ids[1:]].all() for row, ids in enumerate(torch.tensor(found)))
