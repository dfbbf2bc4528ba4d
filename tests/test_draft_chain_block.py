"""draft_chain's block form, one launch for all ids of a block. GPU only."""

import pytest
import torch
from test_draft_chain import DTYPES, make
from test_draft_chain_modes import (
    NARROW,
    assert_replay,
    block_inputs,
    drawn_arguments,
    gave_up,
    pools_of,
    reference_arrays,
)

from domino_kernels import ChainPlan, DraftResult, draft_chain, draft_chain_out

WIDE = dict(V=3000, H=128, G=1024, R=256)
HALF = DTYPES[1:]


BLOCK_CASES = [  # sizes, batch, table, exact: groups of 1 to 32 rows, more than one launch
    (WIDE, 1, True, True),
    (WIDE, 3, True, False),
    (WIDE, 8, False, True),
    (WIDE, 20, True, False),
    (WIDE, 20, False, False),
    (WIDE, 64, True, True),
    (NARROW, 1, False, False),
    (NARROW, 5, True, True),
    (NARROW, 33, True, False),
    (WIDE, 64, False, True),
    (NARROW, 70, False, True),
    (NARROW, 70, True, False),
    (dict(NARROW, G=512, R=128), 2, True, True),
    (dict(NARROW, G=512, R=128), 17, False, False),
]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes, batch, table, exact", BLOCK_CASES, ids=str)
def test_block_form(sizes, batch, table, exact, generator):
    inputs = block_inputs(generator, torch.bfloat16, batch, sizes, table)
    settings = dict(exact=exact, pool_size=600, return_scores=True)
    tokens, scores = draft_chain(*inputs, **settings)
    base, *rest = reference_arrays(inputs)
    pools = None if exact else pools_of(base, 600, "block", 15, 0, 1)
    assert_replay(tokens, scores, rest, base, torch.bfloat16, pools=pools)
    again = draft_chain(*inputs, **settings)
    assert torch.equal(again[0], tokens) and torch.equal(again[1], scores)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["exact", "pool", "slot", "drawn"])
@pytest.mark.parametrize(
    "dtype, table", [(HALF[0], True), (HALF[1], True), (HALF[1], False)], ids=str
)
def test_block_form_is_batch_invariant_bitwise(dtype, table, mode, generator):
    base, hidden, anchor, weights = block_inputs(generator, dtype, 40, WIDE, table)
    arguments = drawn_arguments(40, "cuda") if mode == "drawn" else {}
    arguments.pop("exact", None)

    def run(rows):
        return draft_chain(
            base[rows],
            hidden[rows],
            anchor[rows],
            weights,
            exact=mode == "exact",
            pool="slot" if mode == "slot" else "block",
            pool_size=300,
            return_details=True,
            **{name: value[rows] for name, value in arguments.items()},
        )

    whole = run(slice(None))
    order = torch.randperm(40, generator=generator)
    for rows in ([0], [7, 8], range(5), range(9), range(3, 20), range(33), order):
        rows = torch.as_tensor(list(rows))
        for one, all_rows in zip(run(rows), whole):
            if one is not None:
                assert torch.equal(one, all_rows[rows.cuda()]), f"{len(rows)} rows"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("batch", [1, 6, 20])
def test_exact_ids_do_not_depend_on_the_pool(batch, dtype, generator):
    """Winners outside a small pool: restarts, then the dense end. The same bits all the same."""
    inputs = block_inputs(generator, dtype, batch, WIDE)
    everything = draft_chain(*inputs, pool_size=2048, return_details=True)
    for size in (8, 64, 400):
        result = draft_chain(*inputs, pool_size=size, return_details=True)
        assert torch.equal(result.tokens, everything.tokens)
        assert torch.equal(result.scores, everything.scores)
    small = draft_chain(*inputs, pool_size=8, return_details=True)
    assert (small.restarts > 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("table", [True, False], ids=["table", "embedding"])
@pytest.mark.parametrize("mode", ["exact", "pool", "drawn"])
def test_a_block_that_never_comes(mode, table, generator):
    """The others give up in time, the second form does the block with the same bits."""
    inputs = block_inputs(generator, torch.bfloat16, 12, WIDE, table)
    settings = dict(exact=mode == "exact", pool_size=100)
    settings |= drawn_arguments(12, "cuda") if mode == "drawn" else {}
    plan = ChainPlan(inputs[3], 12, pool_size=100)
    memory = dict(plan=plan, return_details=True)
    expected = draft_chain(*inputs, **settings, **memory)
    control = plan.workspace[:16].view(torch.int32)  # ChainControl: epoch, left, aborted, mute
    for mute in (1, 70, 0):
        control[3] = mute
        result = draft_chain(*inputs, **settings, **memory)
        assert (control[2] != 0) == (mute != 0)
        for name in ("tokens", "scores", "pool_logits", "log_probs"):
            actual, wanted = getattr(result, name), getattr(expected, name)
            assert actual is wanted is None or torch.equal(actual, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["exact", "pool", "drawn"])
@pytest.mark.parametrize("prefix", [0, 1, 2, 5])
@pytest.mark.parametrize(
    "units, batch, table",
    [
        (48, 2, True),
        (512, 3, False),
        (512, 20, True),
        (512, 9, False),
        (512, 40, False),
        (1024, 2, True),
        (1024, 64, False),
    ],
)
def test_nobody_misses_a_word(units, batch, table, prefix, mode, generator):
    """Blocks without units, which send keys all the same, keep step with those that read them."""
    sizes = dict(NARROW, G=units)
    inputs = block_inputs(generator, torch.bfloat16, batch, sizes, table)
    settings = drawn_arguments(batch, "cuda") if mode == "drawn" else dict(exact=mode == "exact")
    plan = ChainPlan(inputs[3], batch, pool_size=300)
    call = dict(plan=plan, pool_size=300, pure_draft_prefix_len=prefix, **settings)
    for _ in range(5):
        draft_chain(*inputs, **call)
        assert not gave_up(plan)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [576, 4096, 5000])
@pytest.mark.parametrize("batch", [1, 8, 9, 70])
def test_input_product_without_a_table(batch, hidden, generator):
    """What is kept on the chip of W_ih, and what is not, sums as the second form does."""
    inputs = block_inputs(generator, torch.float16, batch, dict(WIDE, H=hidden), table=False)
    plan = ChainPlan(inputs[3], batch, pool_size=64)
    call = dict(exact=False, pool_size=64, plan=plan, return_scores=True)
    tokens, scores = draft_chain(*inputs, **call)
    control = plan.workspace[:16].view(torch.int32)
    assert control[2] == 0
    control[3] = 1
    second = draft_chain(*inputs, **call)
    assert control[2] != 0
    assert torch.equal(tokens, second[0]) and torch.equal(scores, second[1])


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 12])
def test_epochs_wrap_around(batch, generator):
    inputs = block_inputs(generator, torch.bfloat16, batch, NARROW)
    plan = ChainPlan(inputs[3], batch, pool_size=500)
    settings = dict(exact=False, pool_size=500, plan=plan)
    expected = draft_chain(*inputs, **settings)
    epoch = plan.workspace[:4].view(torch.int32)
    epoch[0] = -96  # three launches in front of 2^32
    for _ in range(8):
        assert torch.equal(draft_chain(*inputs, **settings), expected)
    assert 0 < epoch[0] < 1000


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["exact", "pool", "drawn"])
def test_block_form_in_a_graph(mode, generator, graph_replay):
    inputs = block_inputs(generator, torch.bfloat16, 9, NARROW)
    arguments = drawn_arguments(9, "cuda") if mode == "drawn" else {}
    settings = dict(exact=mode == "exact", pool_size=128)
    plan = ChainPlan(inputs[3], 9, pool_size=128)
    out = DraftResult.empty(inputs[3], 9, pool_size=128, sampled=mode == "drawn")
    call = dict(out=out, plan=plan) | arguments | settings
    replay = graph_replay(lambda: draft_chain_out(*inputs, **call))
    for step in range(3):
        fresh = make(generator, torch.bfloat16, "cuda", B=9, **NARROW)
        for old, new in zip(inputs[:3], fresh[:3]):
            old.copy_(new)
        for name in ("temperature", "seed", "block_start"):
            if name in arguments:
                arguments[name].add_(step)
        plan.scratch.fill_(0xFF)
        replay()
        details = dict(return_details=True)
        expected = draft_chain(*inputs, **settings | arguments | details)
        assert torch.equal(out.tokens, expected.tokens)
        assert torch.equal(out.scores, expected.scores)
