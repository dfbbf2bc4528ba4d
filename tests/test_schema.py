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


def draft_chain(dtype, shift_label):
    batch, slots, drafts, vocab, hidden, units, rank = 2, 4, 3, 11, 8, 4, 6
    base, rows = torch.randn(batch, slots, vocab), torch.randn(batch, slots, hidden).to(dtype)
    sizes = [(3 * units, hidden), (3 * units, units), (rank, hidden + units), (vocab, rank)]
    weights = [torch.randn(size).to(dtype) for size in [*sizes, (vocab, hidden)]]
    workspace = torch.zeros(1 << 16, dtype=torch.uint8)
    outputs = torch.zeros(batch, drafts, dtype=torch.int64), torch.zeros(batch, drafts)
    anchor = torch.tensor([0, 10])
    return (base, rows, anchor, *weights, shift_label, 1, workspace, *outputs)


# op -> argument tuples of its OpOverload; an op with several forms lists one of each
SAMPLES = {
    "gru_step": [gru_step(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)],
    "draft_chain": [draft_chain(torch.float32, True), draft_chain(torch.bfloat16, False)],
}
CASES = [(name, i) for name, samples in SAMPLES.items() for i in range(len(samples))]


def test_every_op_has_samples():
    assert set(SAMPLES) == set(OPS), "tests/test_schema.py: SAMPLES lists other ops than OPS"


@pytest.mark.parametrize("name, i", CASES, ids=[f"{name}-{i}" for name, i in CASES])
def test_opcheck(name, i, device):
    sample = [a.to(device) if isinstance(a, torch.Tensor) else a for a in SAMPLES[name][i]]
    results = torch.library.opcheck(OPS[name], tuple(sample))
    assert set(results.values()) == {"SUCCESS"}, results
