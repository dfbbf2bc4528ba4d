"""verify_chain by top-p alone against the CPU twin: a few rows in one launch, and more of them."""

import pytest
import torch
from chain_cases import assert_same, to
from test_verify_cuts import (
    FEW,
    KINDS,
    RULES,
    arguments_of,
    assert_replays_same,
    assert_same_in,
    assert_streams_same,
    rows,
)

from domino_kernels import verify_chain
from domino_kernels.ops.verify import verify_chain_workspace
from domino_kernels.reference.law import FILTER_ORDERS

pytestmark = pytest.mark.gpu

MORE = [
    ((8, 15, 4096), 64),  # a processor to each row, as the next two
    ((13, 9, 1504), 200),
    ((3, 40, 2048), 5),
    ((13, 9, 1501), 200),
    ((4, 31, 9000), 5),
    ((9, 7, 40_000), 5),
]


def nucleus_of(kind, shape, form, generator, pool=5):
    """Most requests by top-p alone, at 0.95."""
    arguments = arguments_of(kind, *shape, form, generator, pool)
    usual = torch.rand(shape[0], generator=generator)
    arguments["top_p"] = arguments["top_p"].where(usual < 0.4, 0.95)
    return arguments | dict(top_k=None, min_p=None, logprobs=False)


@pytest.mark.parametrize("rule, form", [*RULES, ("token", "dense")])
@pytest.mark.parametrize("kind", [*KINDS, "close together"])
@pytest.mark.parametrize("shapes", [FEW, MORE], ids=["few", "more"])
def test_top_p_alone(shapes, kind, rule, form):
    generator = torch.Generator().manual_seed(20261206)
    dense = form == "dense"
    workspace = verify_chain_workspace(16, 31, 151_936, dense=dense, device="cuda")
    for shape, pool in shapes:
        if shape[1] == 0 and form != "none":
            continue
        arguments = nucleus_of(kind, shape, form, generator, pool)
        for order in FILTER_ORDERS:
            arguments |= {"filter_order": order, "rule": rule}
            arguments["seed"] = arguments["seed"] + 1
            if order == "joint":  # some of them by value
                weighed = torch.rand(shape[0], generator=generator) < 0.3
                arguments["min_p"] = torch.where(weighed, 0.01, 0.0)
            try:
                assert_same_in(workspace, arguments)
            except AssertionError as error:
                raise AssertionError(f"{shape}, {order}") from error


def test_of_a_pool_in_one_part_of_the_row():
    """More of its tokens than a block of those that race together keeps, and some twice."""
    generator = torch.Generator().manual_seed(20261214)
    arguments = nucleus_of("normal", (1, 3, 32_768), "pool", generator, 64)
    ids = torch.randint(600, (1, 3, 400), generator=generator, dtype=torch.int32)
    for count in (400, 200):
        ids[..., 0] = arguments["draft_tokens"]
        draft = torch.randn(1, 3, count, generator=generator).bfloat16() + 3
        draft[..., 0] = 9.0
        arguments |= dict(draft_ids=ids[..., :count].contiguous(), draft_logits=draft)
        arguments |= dict(temperature=torch.tensor([0.7]), top_p=torch.tensor([0.95]))
        for seed in range(10):
            arguments["seed"] = torch.full((1,), seed)
            assert_same(verify_chain(**to(arguments, "cuda")), verify_chain(**arguments))


@pytest.mark.parametrize("shape", [(4, 3, 32_768), (9, 8, 2048)])
def test_in_a_graph(shape, graph_replay):
    """Replays whose requests go by top-p, by value and without filters in turn."""
    generator = torch.Generator().manual_seed(20261207)

    def draw():
        arguments = nucleus_of("normal", shape, "none", generator)
        weighed = torch.rand(shape[0], generator=generator) < 0.2
        return arguments | dict(min_p=torch.where(weighed, 0.1, 0.0))

    assert_replays_same(draw, shape, graph_replay)


@pytest.mark.parametrize("batch, drafts, vocab", [(4, 3, 40_000), (12, 7, 3000)])
def test_of_a_ragged_batch(batch, drafts, vocab):
    generator = torch.Generator().manual_seed(20261208)
    total = batch * (drafts + 1) - 7
    logits = rows("normal", (total, vocab), generator)
    for bad in (False, True):
        bounds = torch.randint(drafts + 2, (batch,), generator=generator).cumsum(0)
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), bounds]).clamp(max=total)
        if bad:
            bounds[-1] = total + 1  # rows that do not exist
        own = (bounds[:-1, None] + torch.arange(drafts)).clamp(max=total - 1)
        arguments = dict(
            target_logits=logits,
            draft_tokens=logits.float().argmax(-1)[own],
            cu_rows=bounds.int(),
            rule="token",
            temperature=torch.full((batch,), 0.3),
            seed=torch.arange(batch),
            block_start=torch.arange(batch) * 100,
            top_p=torch.full((batch,), 0.95),
            logprobs=False,
        )
        for active in (None, 0, batch // 2):
            if active is not None:
                arguments["num_active"] = torch.tensor([active], dtype=torch.int32)
            kernel = verify_chain(**to(arguments, "cuda"))
            assert_same(kernel, verify_chain(**arguments))


def test_calls_that_share_the_processors():
    """Clusters of a request that start at different times."""
    generator = torch.Generator().manual_seed(20261209)
    assert_streams_same(lambda shape: nucleus_of("normal", shape, "none", generator))
