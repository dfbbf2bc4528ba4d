"""exact=True: winners inside and outside the pool, restarts, the dense finish.

Blocks with an input table have the int8 screen as well, those without have none.
"""

from dataclasses import replace

import pytest
import torch

from bench.ops.head_inputs import planted_block
from domino_kernels import ChainPlan, DraftResult, draft_chain, draft_chain_out

SHAPE = {"H": 128, "G": 64, "R": 32, "V": 6000}
DRAFTS = 15
ALL = DRAFTS - 1  # restarts: every corrected winner is outside the pool
POOL = 128


def make(batch, restarts, device, table=True, dtype=torch.bfloat16):
    block = planted_block(SHAPE, batch, 5, device, restarts=restarts, dtype=dtype)
    return packed(block) if table else block


def packed(block):
    return block._replace(weights=block.weights.with_table().with_screen())


def draft(block, *, pool="block", **options):
    plan = ChainPlan(block.weights, len(block.anchor), pool_size=POOL, pool=pool)
    call = dict(plan=plan, pool=pool, pool_size=POOL, return_details=True)
    result = draft_chain(*block[:4], **call, **options)
    aborted = plan.workspace[8:12]  # ChainControl: epoch, left, aborted
    assert not aborted.any(), "a block waited in vain: the ids are the second form's"
    return result


@pytest.mark.parametrize("table", [True, False], ids=["table", "embedding"])
@pytest.mark.parametrize("restarts", [0, 1, ALL])
@pytest.mark.parametrize("batch", [1, 3, pytest.param(9, marks=pytest.mark.gpu)])
def test_planted_winners(batch, restarts, table, device):
    block = make(batch, restarts, device, table)
    result = draft(block)
    assert torch.equal(result.tokens, block.planted)
    pooled = draft(block, exact=False)
    missed = (pooled.tokens != block.planted).any(1)
    expected = {0: [False] * batch, 1: [True] + [False] * (batch - 1), ALL: [True] * batch}
    assert missed.tolist() == expected[restarts], "the pool alone does not find what is outside"
    if device == "cuda":
        assert ((result.restarts > 0) == missed).all(), result.restarts.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("restarts", [0, 1, ALL])
@pytest.mark.parametrize("batch", [20, 70])
def test_many_rows(batch, restarts, dtype, portable):
    """The certificate on warpgroup tensor cores, several parts of columns, two groups of rows."""
    block = make(batch, restarts, "cuda", dtype=dtype)
    assert torch.equal(draft(block, portable=portable).tokens, block.planted)


@pytest.mark.gpu
@pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
@pytest.mark.parametrize("restarts", [0, 1, ALL])
@pytest.mark.parametrize("batch, rank", [(1, 256), (7, 96), (20, 256), (33, 160), (64, 256)])
def test_a_large_vocabulary(batch, rank, restarts, portable):
    """The certificate's ring of rows goes around many times, the dense steps' blocks likewise.

    The last: three stages, and a W2 that only a part of fits in L2, so that its rows come in any
    order; a restart is then judged by warpgroups that take turns.
    """
    shape = {"H": 128, "G": 64, "R": rank, "V": 100_003 if batch < 64 else 151_936}
    block = packed(planted_block(shape, batch, 6, "cuda", restarts=restarts))
    for _ in range(3 if batch < 64 else 10):
        assert torch.equal(draft(block, portable=portable).tokens, block.planted)


@pytest.mark.gpu
@pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
@pytest.mark.parametrize("batch", [3, 20])
def test_a_restart_with_a_pool_for_each_slot(batch, portable):
    block = make(batch, 1, "cuda")
    assert torch.equal(draft(block, pool="slot", portable=portable).tokens, block.planted)


@pytest.mark.gpu
@pytest.mark.parametrize("restarts", [0, 1, ALL])
@pytest.mark.parametrize("batch", [9, 70])
def test_the_portable_form_has_the_same_bits(batch, restarts):
    block = make(batch, restarts, "cuda")
    usual, portable = draft(block), draft(block, portable=True)
    for field in ("tokens", "scores", "restarts"):
        assert torch.equal(getattr(portable, field), getattr(usual, field)), field


@pytest.mark.gpu
@pytest.mark.parametrize("restarts", [0, 1, ALL])
@pytest.mark.parametrize("batch, units, pool", [(9, 1024, "slot"), (40, 528, "block")], ids=str)
def test_input_products_of_all_blocks_have_the_bits_of_servers(batch, units, pool, restarts):
    block = planted_block(SHAPE | {"G": units}, batch, 5, "cuda", restarts=restarts)
    joint, served = draft(block, pool=pool), draft(block, pool=pool, portable=True)
    assert torch.equal(joint.tokens, block.planted)
    for field in ("tokens", "scores", "restarts"):
        assert torch.equal(getattr(joint, field), getattr(served, field)), field


def assert_same_without_screen(block, **options):
    bare = block._replace(weights=replace(block.weights, screen=None))
    screened, plain = draft(block, **options), draft(bare, **options)
    for field in ("tokens", "scores", "restarts"):
        # bits: NaN scores count as well
        actual, expected = getattr(screened, field), getattr(plain, field)
        assert torch.equal(actual.view(torch.int32), expected.view(torch.int32)), field


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("restarts", [0, 1, ALL])
@pytest.mark.parametrize(
    "batch, units, rank",
    [(1, 64, 256), (1, 256, 256), (1, 256, 80), (5, 64, 256), (16, 64, 128), (65, 64, 176)],
)
def test_the_screen_changes_no_bit(batch, units, rank, restarts, dtype):
    shape = {"H": 128, "G": units, "R": rank, "V": 20_011}
    block = packed(planted_block(shape, batch, 7, "cuda", restarts=restarts, dtype=dtype))
    assert_same_without_screen(block)


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [DRAFTS, 10, 9, 3])
@pytest.mark.parametrize("restarts", [0, 1, ALL])
@pytest.mark.parametrize("units, rank, vocab", [(256, 96, 20_011), (1024, 256, 151_937)])
def test_one_row_is_certified_beside_its_chain(units, rank, vocab, restarts, drafts):
    shape = {"H": 128, "G": units, "R": rank, "V": vocab}
    block = packed(planted_block(shape, 1, 7, "cuda", restarts=restarts))
    plan = ChainPlan(block.weights, 1, num_drafts=drafts, pool_size=POOL)
    active = torch.zeros(1, dtype=torch.int32, device="cuda")
    options = dict(num_drafts=drafts, plan=plan, pool_size=POOL, num_active=active)
    for rows in (0, 1, 1):
        active.fill_(rows)
        result = draft_chain(*block[:4], **options)
    assert plan.workspace[32:36].view(torch.int32) % 32 == 1  # ChainControl.begun: it was told
    assert torch.equal(result, block.planted[:, :drafts])


def raised(block, row, drafts):
    """Base logits with which the winners of these drafts are in the pool."""
    base = block.base.clone()
    base[row, drafts, block.planted[row, drafts]] = 12.0
    return block._replace(base=base)


@pytest.mark.gpu
@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize("units, rank, vocab", [(256, 96, 20_011), (1024, 256, 151_937)])
def test_one_row_starts_again_behind_any_draft(units, rank, vocab, prefix):
    shape = {"H": 128, "G": units, "R": rank, "V": vocab}
    outside = packed(planted_block(shape, 1, 7, "cuda", restarts=ALL))
    for draft_outside in range(1, DRAFTS):
        block = raised(outside, 0, [j for j in range(1, DRAFTS) if j != draft_outside])
        assert_same_without_screen(block, pure_draft_prefix_len=prefix)
        if prefix == 1:
            result = draft(block)
            assert torch.equal(result.tokens, block.planted)
            assert result.restarts.tolist() == [1]


def mostly_outside(batch, units):
    """All winners outside the pool but in the first three rows."""
    shape = {"H": 128, "G": units, "R": 256, "V": 100_003}
    block = packed(planted_block(shape, batch, 7, "cuda", restarts=ALL))
    every = list(range(1, DRAFTS))
    block = raised(block, 0, every)
    block = raised(block, 1, every[:5] + every[6:])
    return raised(block, 2, every[:-1])


def was_cut(plan):
    return plan.workspace[48:52].any().item()  # ChainControl.cut


@pytest.mark.gpu
@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("batch, units", [(40, 64), (70, 256), (64, 1024)])
def test_a_certificate_that_most_rows_fail_is_cut(batch, units, prefix):
    """Then all rows take the dense steps, also those that it would have left alone."""
    block = mostly_outside(batch, units)
    plan = ChainPlan(block.weights, batch, pool_size=POOL)
    options = dict(plan=plan, pool_size=POOL, return_details=True, pure_draft_prefix_len=prefix)
    first = draft_chain(*block[:4], **options)
    for _ in range(3):
        result = draft_chain(*block[:4], **options)
        assert not plan.workspace[8:12].any(), "a block waited in vain"
        assert was_cut(plan), "most rows missed, and no block left"
        for field in ("tokens", "scores", "restarts"):
            assert torch.equal(getattr(result, field), getattr(first, field)), field
    if prefix == 1:
        assert torch.equal(first.tokens, block.planted)
        assert first.restarts.tolist() == [0, 1, 1] + [2] * (batch - 3)
    assert_same_without_screen(block, pure_draft_prefix_len=prefix)


@pytest.mark.gpu
def test_a_cut_is_of_one_call(graph_replay):
    """Neither of the next one nor, with fewer rows in use, of those that are left."""
    block = mostly_outside(40, 64)
    inside = block
    for row in range(40):
        inside = raised(inside, row, list(range(1, DRAFTS)))
    base = block.base.clone()
    active = torch.full((1,), 40, dtype=torch.int32, device="cuda")
    plan = ChainPlan(block.weights, 40, pool_size=POOL)
    out = DraftResult.empty(block.weights, 40, pool_size=POOL)
    options = dict(out=out, plan=plan, pool_size=POOL, num_active=active)
    replay = graph_replay(lambda: draft_chain_out(base, *block[1:4], **options))
    for source, rows, cut in ((block, 40, True), (inside, 40, False), (block, 20, False)):
        base.copy_(source.base)
        active.fill_(rows)
        out.tokens.fill_(-7)
        replay()
        assert was_cut(plan) == cut
        assert torch.equal(out.tokens[:rows], block.planted[:rows])
        assert (out.tokens[rows:] == -7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, 0.2, 1e-4, 1e-23])
@pytest.mark.parametrize("batch", [1, 8, 40])
def test_the_screen_changes_no_bit_where_winners_lead_by_little(batch, scale):
    """Random logits: with the scale goes what the correction decides, down to ties."""
    shape = {"H": 128, "G": 256, "R": 64, "V": 20_011}
    block = planted_block(shape, batch, 8, "cuda")
    draw = torch.Generator("cuda").manual_seed(batch)
    block.base.normal_(generator=draw).mul_(2)
    if scale < 1e-3:
        block.base.round_()
    if scale < 1e-20:  # the correction decides all the same
        block.base.zero_()
    block.weights.w2.normal_(generator=draw).mul_(scale)
    assert_same_without_screen(packed(block))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 9, 40])
def test_the_screen_changes_no_bit_where_weights_and_inputs_are_odd(batch):
    shape = {"H": 128, "G": 256, "R": 32, "V": 9_001}
    block = planted_block(shape, batch, 9, "cuda", restarts=1)
    w2, nan, inf = block.weights.w2, float("nan"), float("inf")
    w2[128:400] = 0
    w2[500] = 1e-30
    w2[600, 3], w2[900, 4], w2[1200, 5] = nan, inf, -inf
    w2[1500], w2[1800:1803] = 3e38, -3e38
    w2[2100:2400] = 0.25  # ties
    w2[2600, 7] = 1000
    block.hidden[0, 3] = nan  # u of a slot
    if batch > 1:
        block.hidden[1, 2] = 1e38
        block.hidden[2] = 0
        block.base[3, 4] = -inf
        block.base[4, 5] = nan
        block.base[5, 6, 7000] = inf
    assert_same_without_screen(packed(block))


@pytest.mark.gpu
@pytest.mark.parametrize("restarts", [0, 1, ALL])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(restarts):
    block = make(33, restarts, "cuda")
    base, hidden, anchor, weights, _ = block
    whole = draft(block)
    order = torch.randperm(33, device="cuda")
    shuffled = draft_chain(
        base[order], hidden[order], anchor[order], weights, pool_size=POOL, return_details=True
    )
    for field in ("tokens", "scores", "restarts"):
        assert torch.equal(getattr(shuffled, field), getattr(whole, field)[order]), field
    for rows in (slice(0, 1), slice(5, 6), slice(0, 8), slice(32, 33)):
        part = draft_chain(
            base[rows], hidden[rows], anchor[rows], weights, pool_size=POOL, return_details=True
        )
        for field in ("tokens", "scores", "restarts"):
            assert torch.equal(getattr(part, field), getattr(whole, field)[rows]), (field, rows)


@pytest.mark.gpu
def test_finish_has_the_bits_of_the_chain_on_a_pool_of_everything():
    block = make(5, ALL, "cuda")
    dense = draft(block)
    pooled = draft_chain(*block[:4], pool_size=SHAPE["V"], exact=False, return_details=True)
    assert torch.equal(dense.tokens, pooled.tokens)
    assert torch.equal(dense.scores, pooled.scores)


@pytest.mark.gpu
def test_graph_replays_go_from_no_restart_to_many(graph_replay):
    blocks = [make(4, restarts, "cuda") for restarts in (0, ALL, 1, 0)]
    base, hidden, anchor = (tensor.clone() for tensor in blocks[0][:3])
    weights = blocks[0].weights
    plan = ChainPlan(weights, 4, pool_size=POOL)
    out = DraftResult.empty(weights, 4, pool_size=POOL)
    replay = graph_replay(
        lambda: draft_chain_out(base, hidden, anchor, weights, out=out, plan=plan, pool_size=POOL)
    )
    for block in blocks:  # other logits and other weights behind the same addresses
        for target, source in zip((base, hidden, anchor), block[:3], strict=True):
            target.copy_(source)
        for name in ("w_ih", "w_hh", "w1", "w2", "embedding", "table", "screen"):
            getattr(weights, name).copy_(getattr(block.weights, name))
        replay()
        assert torch.equal(out.tokens, block.planted)


@pytest.mark.gpu
def test_rows_from_num_active_on_are_left_alone():
    block = make(6, ALL, "cuda")
    plan = ChainPlan(block.weights, 6, pool_size=POOL)
    out = DraftResult.empty(block.weights, 6, pool_size=POOL)
    for active in (0, 2, 6):
        out.tokens.fill_(-7)
        count = torch.tensor([active], dtype=torch.int32, device="cuda")
        draft_chain_out(*block[:4], out=out, plan=plan, pool_size=POOL, num_active=count)
        assert torch.equal(out.tokens[:active], block.planted[:active])
        assert (out.tokens[active:] == -7).all()
