"""Host time of an eager call: public function, checks, dispatch, launch. The aim is 15 us.

Shapes are tiny, so the CPU twin's own work is below 0.1 us; on a GPU a round begins with an idle
device and is short enough for the launch queue, so that no call waits for the kernels before it.
The bound is on the fastest round: what the code costs, not the machine's other work. How fast a
core is today it cannot tell: the same code took 14.0, 15.04 and 25.2 us on three two-core machines
of one kind. So a call passes, too, that takes no more than LIMIT_YARDSTICKS times ten calls of
torch.add in the same rounds; verify_chain took 2.4 of them.
"""

import statistics
import time

import pytest
import torch

import domino_kernels
from domino_kernels import HeadWeights

LIMIT_US = 15.0
LIMIT_YARDSTICKS = 2.9
ROUNDS, CALLS = 100, 50


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


def measure(call):
    one = torch.zeros(1)
    rounds, yardsticks = [], []
    with torch.no_grad():
        for _ in range(ROUNDS):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            rounds.append(time_of(call, CALLS))
            yardsticks.append(10 * time_of(lambda: torch.add(one, one, out=one), CALLS))
    limit = max(LIMIT_US, LIMIT_YARDSTICKS * min(yardsticks))
    report = f"{min(rounds):.1f} us a call, median round {statistics.median(rounds):.1f}, "
    report += f"limit {limit:.1f} ({min(yardsticks):.1f} us for ten times torch.add)"
    print(report)
    assert min(rounds) <= limit, report


def time_of(call, count):
    """us a call."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) * 1e6 / count


def test_draft_chain(device):
    """One draft from a head of width 8: the checks of ten tensors and a call of 47 keywords."""
    make = lambda *size: torch.ones(size, device=device)  # noqa: E731
    weights = HeadWeights(make(24, 8), make(24, 8), make(8, 16), make(2, 8), make(2, 8))
    base, hidden = make(1, 1, 2), make(1, 1, 8)
    anchor = torch.zeros(1, dtype=torch.int64, device=device)
    rest = dict(out=domino_kernels.DraftResult.empty(weights, 1, num_drafts=1))
    rest["plan"] = domino_kernels.ChainPlan(weights, 1, num_drafts=1)
    call = domino_kernels.draft_chain_out
    measure(lambda: call(base, hidden, anchor, weights, **rest))


@pytest.mark.parametrize("rule", ["greedy", "token"])
def test_verify_chain(device, rule):
    logits = torch.zeros(1, 2, 2, device=device)
    drafts = torch.zeros(1, 1, dtype=torch.int64, device=device)
    out = domino_kernels.verify_chain(logits, drafts)
    rest = dict(out=out, workspace=domino_kernels.verify_chain_workspace(1, 1, 2, device=device))
    if rule == "token":
        rest |= dict(rule="token", temperature=torch.ones(1, device=device))
        rest |= dict(seed=drafts[0], block_start=drafts[0])
    measure(lambda: domino_kernels.verify_chain(logits, drafts, **rest))


def test_gru_step(device):
    ones = torch.ones(3, 1, device=device)
    x, out = ones[:1], torch.empty(1, 1, device=device)
    measure(lambda: domino_kernels.gru_step(x, x, ones, ones, out=out))
