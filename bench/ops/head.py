"""The drafting head at the shapes of the public checkpoints (Qwen3-4B and 8B drafters)."""

import torch

import domino_kernels
from bench.registry import Case
from domino_kernels.reference.head import gru_step as reference_gru_step
from domino_kernels.testing import assert_error_rule, to_numpy

HIDDEN = {"qwen3-4b": 2560, "qwen3-8b": 4096}
UNITS = 1024
BATCHES = (1, 4, 16, 64)
DTYPE = torch.bfloat16


def gru_step_case(model, batch):
    hidden = HIDDEN[model]

    def make(seed, device):
        generator = torch.Generator(device).manual_seed(seed)
        sizes = (batch, hidden), (batch, UNITS), (3 * UNITS, hidden), (3 * UNITS, UNITS)
        draws = [torch.randn(s, generator=generator, device=device).to(DTYPE) for s in sizes]
        x, state, w_ih, w_hh = draws
        scale = (hidden + UNITS) ** -0.5
        return x, state.tanh(), w_ih * scale, w_hh * scale, torch.empty_like(state)

    def ours(x, state, w_ih, w_hh, out):
        return domino_kernels.gru_step(x, state, w_ih, w_hh, out=out)

    def peer(x, state, w_ih, w_hh, out):
        return torch.gru_cell(x, state, w_ih, w_hh)

    def check(operands, result):
        expected = reference_gru_step(*map(to_numpy, operands[:4]))
        assert_error_rule(result, expected, peer(*operands))

    elements = batch * (hidden + 2 * UNITS) + 3 * UNITS * (hidden + UNITS)
    return Case(
        op="gru_step",
        case="bf16",
        params={"model": model},
        shape={"H": hidden, "G": UNITS},
        batch=batch,
        make=make,
        providers={"ours": ours, "torch": peer},
        check=check,
        bytes=elements * DTYPE.itemsize,
    )


def cases():
    for model in HIDDEN:
        for batch in BATCHES:
            yield gru_step_case(model, batch)
