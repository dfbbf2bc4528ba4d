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


class Chain:
    """Blocks that take turns on one plan: words that one leaves must not pass for the next one's.

    A winner of the second block is outside of every pool: it restarts in row 0.
    """

    def __init__(self, shape, batch, seed=0, table=True):
        self.blocks = [planted_block(shape, batch, seed + i, "cuda", restarts=i) for i in range(2)]
        self.weights = [b.weights.with_table() if table else b.weights for b in self.blocks]
        self.plan = ChainPlan(self.weights[0], batch)
        self.epoch, _, _, self.mute = self.plan.workspace[:16].view(torch.int32).split(1)
        self.out = [DraftResult.empty(self.weights[0], batch) for _ in self.blocks]

    def launch(self):
        for block, weights, out in zip(self.blocks, self.weights, self.out):
            draft_chain_out(*block[:3], weights, out=out, plan=self.plan)

    def check(self, restarts=True):
        torch.cuda.synchronize()
        for i, (block, out) in enumerate(zip(self.blocks, self.out)):
            wrong = int((out.tokens != block.planted).sum())
            assert wrong == 0, f"block {i}: {wrong} of {block.planted.numel()} ids are wrong"
            if restarts:
                assert out.restarts.tolist() == [i] + [0] * (len(block.anchor) - 1)
            out.tokens.fill_(-1)
            out.restarts.fill_(-1)


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


@pytest.mark.parametrize(
    "shape, batch, replays, table",
    [(QWEN, 1, 40_000, True), (SMALL, 9, 10_000, True), (SMALL, 5, 10_000, False)],
)
def test_back_to_back(shape, batch, replays, table):
    """More than 10^5 blocks, two a replay."""
    chain = Chain(shape, batch, table=table)
    graph = capture(chain.launch)
    for i in range(replays):
        graph.replay()
        if i % 2_000 == 1_999:
            chain.check()


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
    chain = Chain(QWEN, batch)
    graph = capture(chain.launch)
    for _ in range(20):
        busy(20)  # about 30 ms
        for _ in range(50):
            graph.replay()
        chain.check()


def test_two_plans_on_two_streams():
    chains = [Chain(QWEN, 8), Chain(SMALL, 33, seed=7)]
    graphs = [capture(chain.launch) for chain in chains]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(10):
        torch.cuda.synchronize()
        for _ in range(200):
            for graph, stream in zip(graphs, streams):
                with torch.cuda.stream(stream):
                    graph.replay()
        for chain in chains:
            chain.check()


def test_in_a_graph_with_other_work():
    chain = Chain(QWEN, 8)
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(a)
    side = torch.cuda.Stream()

    def launch():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(4):
                torch.mm(a, a, out=product)
        chain.launch()
        torch.cuda.current_stream().wait_stream(side)
        torch.mm(a, a, out=product)

    graph = capture(launch)
    for _ in range(10):
        for _ in range(100):
            graph.replay()
        chain.check()


@pytest.mark.parametrize("batch", [1, 9, 64])
def test_epochs_wrap_around(batch):
    chain = Chain(SMALL, batch)
    graph = capture(chain.launch)
    chain.check()
    chain.epoch.fill_(-416)
    seen = []
    for _ in range(40):
        graph.replay()
        chain.check()
        seen.append(chain.epoch.item())
    assert seen[0] < 0 < seen[-1], f"epochs {seen[0]} to {seen[-1]} do not wrap around"


@pytest.mark.parametrize("batch", [1, 9, 64])
def test_after_aborted_launches(batch):
    """A block that stays silent: the second form does the work. Then all is as ever."""
    chain = Chain(SMALL, batch, table=batch != 9)
    graph = capture(chain.launch)
    for i in range(50):
        for mute in (1 + 5 * i % 40, 0):  # one of the thread blocks stays silent, or none
            chain.mute.fill_(mute)
            graph.replay()
            chain.check(restarts=mute == 0)
