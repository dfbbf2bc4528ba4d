"""draft_chain for long and under pressure: every block done, every id right, and no hang.

`pytest -m "gpu and slow" --timeout 120 tests/test_soak.py`. A launch that waits for a block which
never comes would hang here; the timeout is part of the test.
"""

import pytest
import torch

from bench.ops.head_inputs import planted_block
from domino_kernels import ChainPlan, DraftResult, draft_chain_out

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
QWEN = {"H": 4096, "G": 1024, "R": 256, "V": 151936}
SMALL = {"H": 576, "G": 256, "R": 96, "V": 49152}


class Plan:
    """Blocks that take turns on one workspace: words that one leaves must not pass for the next's.

    Of two blocks one restarts in row 0, and each expects its planted winners.
    """

    def __init__(self, shape, batch, seed=0):
        self.blocks = [planted_block(shape, batch, seed + i, "cuda", restarts=i) for i in range(2)]
        self.weights = [block.weights.with_table() for block in self.blocks]
        self.plan = ChainPlan(self.weights[0], batch)
        self.out = [DraftResult.empty(weights, batch) for weights in self.weights]

    def launch(self):
        for block, weights, out in zip(self.blocks, self.weights, self.out):
            draft_chain_out(*block[:3], weights, out=out, plan=self.plan)

    def check(self):
        torch.cuda.synchronize()
        for i, block in enumerate(self.blocks):
            wrong = int((self.out[i].tokens != block.planted).sum())
            assert wrong == 0, f"block {i}: {wrong} of {block.planted.numel()} ids are wrong"
            self.out[i].tokens.fill_(-1)


def capture(launch):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


@pytest.mark.parametrize("shape, batch, replays", [(QWEN, 1, 40_000), (SMALL, 9, 10_000)])
def test_back_to_back(shape, batch, replays):
    """Together 10^5 blocks, two a replay."""
    plan = Plan(shape, batch)
    graph = capture(plan.launch)
    for i in range(replays):
        graph.replay()
        if i % 2_000 == 1_999:
            plan.check()


@pytest.fixture
def busy():
    """busy() queues matrix products that fill the chip, on a stream of higher priority."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(a)
    stream = torch.cuda.Stream(priority=-1)

    def queue(count):
        with torch.cuda.stream(stream):
            for _ in range(count):
                torch.mm(a, a, out=product)

    queue(1)
    torch.cuda.synchronize()
    return queue


@pytest.mark.parametrize("batch", [1, 64])
def test_beside_a_product_that_fills_the_chip(batch, busy):
    plan = Plan(QWEN, batch)
    graph = capture(plan.launch)
    for _ in range(20):
        busy(20)  # about 30 ms
        for _ in range(50):
            graph.replay()
        plan.check()


def test_two_plans_on_two_streams():
    plans = [Plan(QWEN, 8), Plan(SMALL, 33, seed=7)]
    graphs = [capture(plan.launch) for plan in plans]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(10):
        torch.cuda.synchronize()
        for _ in range(200):
            for graph, stream in zip(graphs, streams):
                with torch.cuda.stream(stream):
                    graph.replay()
        for plan in plans:
            plan.check()


def test_in_a_graph_with_other_work():
    plan = Plan(QWEN, 8)
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(a)
    side = torch.cuda.Stream()

    def launch():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(4):
                torch.mm(a, a, out=product)
        plan.launch()
        torch.cuda.current_stream().wait_stream(side)
        torch.mm(a, a, out=product)

    graph = capture(launch)
    for _ in range(10):
        for _ in range(100):
            graph.replay()
        plan.check()
