"""Host time of an eager call: public function, checks, dispatch, launch. At most 15 us.

Shapes are tiny, so the CPU twin's own work is below 0.1 us; on a GPU the launch is asynchronous and
the queue never fills. The bound is on the fastest round: what the code costs, not the machine's
other work. Save and compare with pytest-benchmark's --benchmark-autosave / --benchmark-compare.
"""

import pytest
import torch

import domino_kernels

LIMIT_US = 15.0


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


def measure(benchmark, call):
    with torch.no_grad():
        call()
        benchmark.pedantic(call, rounds=30, iterations=200, warmup_rounds=2)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    fastest = benchmark.stats.stats.min * 1e6
    assert fastest <= LIMIT_US, f"{fastest:.1f} us a call, limit {LIMIT_US}"


def test_gru_step(benchmark, device):
    ones = torch.ones(3, 1, device=device)
    x, out = ones[:1], torch.empty(1, 1, device=device)
    measure(benchmark, lambda: domino_kernels.gru_step(x, x, ones, ones, out=out))
