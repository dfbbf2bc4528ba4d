"""torch.library.opcheck on every registered schema: mutation annotations, fakes, tracing."""

from importlib import import_module
from pkgutil import iter_modules

import pytest
import torch

import domino_kernels.ops
from domino_kernels.torch_library import OPS

for module in iter_modules(domino_kernels.ops.__path__, "domino_kernels.ops."):
    import_module(module.name)


def gru_step(dtype):
    rows = torch.randn(3, 2, 8)[:, 0]  # strided
    tensors = rows, torch.randn(3, 4), torch.randn(12, 8), torch.randn(12, 4), torch.zeros(3, 4)
    return tuple(t.to(dtype) for t in tensors)


# op -> argument tuples of its OpOverload; an op with several forms lists one of each
SAMPLES = {
    "gru_step": [gru_step(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)],
}
CASES = [(name, i) for name, samples in SAMPLES.items() for i in range(len(samples))]


def test_every_op_has_samples():
    assert set(SAMPLES) == set(OPS), "tests/test_schema.py: SAMPLES lists other ops than OPS"


@pytest.mark.parametrize("name, i", CASES, ids=[f"{name}-{i}" for name, i in CASES])
def test_opcheck(name, i, device):
    sample = [a.to(device) if isinstance(a, torch.Tensor) else a for a in SAMPLES[name][i]]
    results = torch.library.opcheck(OPS[name], tuple(sample))
    assert set(results.values()) == {"SUCCESS"}, results
