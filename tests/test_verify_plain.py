"""verify_chain without filters against the CPU twin: a few rows of bf16 logits in one launch, and
more of them in two."""

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
)
from test_verify_nucleus import MORE

from domino_kernels import verify_chain
from domino_kernels.ops.verify import verify_chain_workspace

pytestmark = pytest.mark.gpu


def plain_of(kind, shape, form, generator, pool=5):
    arguments = arguments_of(kind, *shape, form, generator, pool)
    return arguments | dict(top_k=None, top_p=None, min_p=None, logprobs=False)


@pytest.mark.parametrize("rule, form", [*RULES, ("token", "dense")])
@pytest.mark.parametrize("kind", [*KINDS, "close together"])
@pytest.mark.parametrize("shapes", [FEW, MORE], ids=["few", "more"])
def test_without_filters(shapes, kind, rule, form):
    generator = torch.Generator().manual_seed(20261210)
    dense = form == "dense"
    workspace = verify_chain_workspace(16, 31, 151_936, dense=dense, device="cuda")
    for shape, pool in shapes:
        if shape[1] == 0 and form != "none":
            continue
        arguments = plain_of(kind, shape, form, generator, pool) | dict(rule=rule)
        for _ in range(3):
            arguments["seed"] = arguments["seed"] + 1
            try:
                assert_same_in(workspace, arguments)
            except AssertionError as error:
                raise AssertionError(f"{shape}") from error


@pytest.mark.parametrize(
    "form, batch, vocab", [("pool", 1, 32_768), ("dense", 1, 32_768), ("pool", 9, 4096)]
)
def test_of_a_draft_that_is_the_target(form, batch, vocab):
    """A residual of which nothing is left, by rounding: what replaces the draft is from p."""
    generator = torch.Generator().manual_seed(20261211)
    arguments = plain_of("normal", (batch, 7, vocab), "dense", generator)
    target = arguments["target_logits"]
    arguments["temperature"] = arguments["draft_temperature"] = torch.full((batch,), 0.8)
    if form == "dense":
        arguments["draft_logits"] = target[:, :7].contiguous()
    else:
        ids = torch.arange(vocab, dtype=torch.int32).expand(batch, 7, -1).contiguous()
        arguments |= dict(draft_logits=target[:, :7].contiguous(), draft_ids=ids)
    for seed in range(20):
        arguments["seed"] = torch.arange(batch) * 20 + seed
        assert_same(verify_chain(**to(arguments, "cuda")), verify_chain(**arguments))


@pytest.mark.parametrize("shape", [(4, 3, 32_768), (9, 8, 2048)])
def test_in_a_graph(shape, graph_replay):
    generator = torch.Generator().manual_seed(20261212)
    assert_replays_same(lambda: plain_of("normal", shape, "none", generator), shape, graph_replay)


def test_calls_that_share_the_processors():
    """Requests whose blocks do not all run at once: those that come first do not wait for ever."""
    generator = torch.Generator().manual_seed(20261213)
    assert_streams_same(lambda shape: plain_of("normal", shape, "none", generator))
