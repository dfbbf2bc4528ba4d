"""verify_chain by top-p alone against the CPU twin: a few rows in one launch, and more of them."""

import pytest
import torch
from chain_cases import assert_same, to
from test_verify_cuts import KINDS, arguments_of, rows

from domino_kernels import verify_chain
from domino_kernels.ops.verify import _CONTROL_WORDS, _empty_result, verify_chain_workspace
from domino_kernels.reference.law import FILTER_ORDERS

pytestmark = pytest.mark.gpu

FEW = [((1, 15, 40_000), 200), ((16, 0, 32_768), 0), ((4, 3, 33_000), 5), ((1, 2, 151_936), 64)]
MORE = [((8, 15, 4096), 64), ((13, 9, 1501), 200), ((4, 31, 9000), 5), ((9, 7, 40_000), 5)]


def nucleus_of(kind, shape, form, generator, pool=5):
    """Most requests by top-p alone, at 0.95."""
    arguments = arguments_of(kind, *shape, form, generator, pool)
    usual = torch.rand(shape[0], generator=generator)
    arguments["top_p"] = arguments["top_p"].where(usual < 0.4, 0.95)
    return arguments | dict(top_k=None, min_p=None, logprobs=False)


@pytest.mark.parametrize(
    "rule, form",
    [
        ("token", "none"),
        ("token", "pool"),
        ("token", "scalar"),
        ("match", "none"),
        ("gumbel", "none"),
        ("block", "none"),
    ],
)
@pytest.mark.parametrize("kind", [*KINDS, "close together"])
@pytest.mark.parametrize("shapes", [FEW, MORE], ids=["few", "more"])
def test_top_p_alone(shapes, kind, rule, form):
    generator = torch.Generator().manual_seed(20261206)
    workspace = verify_chain_workspace(16, 31, 151_936, device="cuda")
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
            expected = verify_chain(**arguments)
            kernel = verify_chain(**to(arguments, "cuda"), workspace=workspace)
            try:
                assert_same(kernel, expected)
            except AssertionError as error:
                raise AssertionError(f"{shape}, {order}") from error
            # a call leaves the words in front as they were, and counts on nothing behind them
            assert not workspace[:_CONTROL_WORDS].any()
            workspace[_CONTROL_WORDS:].random_()


@pytest.mark.parametrize("shape", [(4, 3, 32_768), (9, 8, 2048)])
def test_in_a_graph(shape, graph_replay):
    """Replays whose requests go by top-p, by value and without filters in turn."""
    generator = torch.Generator().manual_seed(20261207)
    batch, drafts, _ = shape
    workspace = verify_chain_workspace(*shape, device="cuda")
    out = _empty_result(batch, drafts, "cuda", logprobs=False)

    def draw():
        arguments = nucleus_of("normal", shape, "none", generator)
        weighed = torch.rand(batch, generator=generator) < 0.2
        return arguments | dict(min_p=torch.where(weighed, 0.1, 0.0))

    static = to(draw(), "cuda")
    replay = graph_replay(lambda: verify_chain(**static, out=out, workspace=workspace))
    for _ in range(20):
        arguments = draw()
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                static[name].copy_(value)
        for tensor in (out.tokens, out.num_accepted, out.num_emitted, out.status):
            tensor.fill_(7)
        replay()
        assert_same(out, verify_chain(**arguments))


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
    streams = [torch.cuda.Stream() for _ in range(4)]
    calls = []
    for n in range(len(streams)):
        shape = (1, 15, 40_000) if n % 2 == 0 else (3, 4, 60_000)
        arguments = nucleus_of("normal", shape, "none", generator)
        workspace = verify_chain_workspace(*shape, device="cuda")
        calls.append((to(arguments, "cuda"), workspace, verify_chain(**arguments)))
    torch.cuda.synchronize()
    results = []
    for _ in range(60):
        for stream, (arguments, workspace, expected) in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                results.append((verify_chain(**arguments, workspace=workspace), expected))
    torch.cuda.synchronize()
    for result, expected in results:
        assert_same(result, expected)
