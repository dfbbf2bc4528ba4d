"""Fixtures and the gpu marker. Shared assertions live in domino_kernels.testing."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

import domino_kernels

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))


def pytest_report_header(config):
    # from a checkout the source folder shadows an installed wheel: say which one is tested
    return str(domino_kernels.build_info()).splitlines()


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    required = os.environ.get("DOMINO_REQUIRE_GPU") == "1"
    for item in items:
        if "gpu" in item.keywords and not required:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Runs a test on the CPU twin and, with the marker gpu, on the kernel."""
    return request.param


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(20261129)


@pytest.fixture
def graph_replay():
    """graph_replay(fn) captures fn() and returns the replay function (CUDA only)."""

    def capture(fn):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            fn()  # loads the kernels: loading is not allowed during a capture
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fn()
        return graph.replay

    return capture
