import numpy as np
import pytest
import torch

import domino_kernels
from domino_kernels.reference.head import gru_step as reference_gru_step
from domino_kernels.testing import Guarded, assert_error_rule, to_numpy

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# (batch, inputs, units): one of each, tails of vector loads, warps and row tiles, a real ratio
SHAPES = [(1, 1, 1), (1, 64, 32), (3, 37, 19), (5, 96, 40), (9, 200, 64), (4, 640, 256)]


def make(shape, dtype, device, generator):
    batch, inputs, units = shape
    scale = (inputs + units) ** -0.5
    draw = lambda *size: torch.randn(size, generator=generator)  # noqa: E731
    tensors = (
        draw(batch, inputs),
        draw(batch, units).tanh(),
        draw(3 * units, inputs) * (2 * scale),
        draw(3 * units, units) * (2 * scale),
    )
    return [t.to(device, dtype) for t in tensors]


def torch_gru_step(x, state, w_ih, w_hh):
    """The same-dtype baseline of the error rule."""
    x_r, x_z, x_n = (x @ w_ih.T).chunk(3, -1)
    s_r, s_z, s_n = (state @ w_hh.T).chunk(3, -1)
    r, z = torch.sigmoid(x_r + s_r), torch.sigmoid(x_z + s_z)
    n = torch.tanh(x_n + r * s_n)
    return (1 - z) * n + z * state


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error_rule(shape, dtype, device, generator):
    inputs = make(shape, dtype, device, generator)
    out = Guarded((shape[0], shape[2]), dtype, device)
    assert domino_kernels.gru_step(*inputs, out=out.tensor) is out.tensor
    expected = reference_gru_step(*map(to_numpy, inputs))
    assert_error_rule(out.check(), expected, torch_gru_step(*inputs))


def test_reference_is_torch_gru(generator):
    x, state, w_ih, w_hh = make((3, 20, 12), torch.float64, "cpu", generator)
    gru = torch.nn.GRU(20, 12, bias=False, batch_first=True, dtype=torch.float64)
    gru.load_state_dict({"weight_ih_l0": w_ih, "weight_hh_l0": w_hh})
    expected = gru(x[:, None], state[None])[0][:, 0]
    actual = reference_gru_step(*map(to_numpy, (x, state, w_ih, w_hh)))
    np.testing.assert_allclose(actual, to_numpy(expected), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_rows(dtype, device, generator):
    x, state, w_ih, w_hh = make((5, 37, 24), dtype, device, generator)
    expected = domino_kernels.gru_step(x, state, w_ih, w_hh)
    wide_x, wide_state = (torch.full((5, 2, 40), torch.nan, device=device).to(dtype) for _ in "xs")
    wide_x[:, 1, :37], wide_state[:, 0, :24] = x, state
    out = Guarded((5, 24), dtype, device, strides=(31, 1))
    domino_kernels.gru_step(wide_x[:, 1, :37], wide_state[:, 0, :24], w_ih, w_hh, out=out.tensor)
    # a row stride that breaks the alignment takes the scalar path: another order of summation
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.check(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_repeats_and_batches_bitwise(dtype, device, generator):
    x, state, w_ih, w_hh = make((7, 96, 40), dtype, device, generator)
    whole = domino_kernels.gru_step(x, state, w_ih, w_hh)
    for _ in range(3):
        assert torch.equal(domino_kernels.gru_step(x, state, w_ih, w_hh), whole)
    for b in range(7):
        alone = domino_kernels.gru_step(x[b : b + 1], state[b : b + 1], w_ih, w_hh)
        assert torch.equal(alone, whole[b : b + 1]), f"row {b} depends on its batch"


def test_special_values(device):
    """Gates that saturate, and a NaN that stays in its own row."""
    x = torch.tensor([[200.0], [-200.0], [torch.nan]], device=device)
    ones = torch.ones(3, 1, device=device)
    state = torch.full((3, 1), 0.5, device=device)
    out = domino_kernels.gru_step(x, state, ones, ones)
    # x -> +inf: z = 1 keeps the state; x -> -inf: z = 0, n = tanh(-200) = -1
    assert out[0].item() == 0.5
    assert out[1].item() == -1.0
    assert out[2].isnan()


def test_empty_batch(device):
    weights = torch.zeros(12, 8, device=device), torch.zeros(12, 4, device=device)
    empty = torch.zeros(0, 8, device=device), torch.zeros(0, 4, device=device)
    assert domino_kernels.gru_step(*empty, *weights).shape == (0, 4)


@pytest.mark.gpu
def test_graph_replay(generator, graph_replay):
    for dtype in DTYPES:
        inputs = make((4, 64, 32), dtype, "cuda", generator)
        out = torch.empty_like(inputs[1])
        replay = graph_replay(lambda: domino_kernels.gru_step(*inputs, out=out))  # noqa: B023
        for tensor, new in zip(inputs, make((4, 64, 32), dtype, "cuda", generator)):
            tensor.copy_(new)
        replay()
        assert torch.equal(out, domino_kernels.gru_step(*inputs))


@pytest.mark.gpu
def test_runs_on_the_current_stream(generator):
    """Queued behind a long copy on a side stream, it must see the copied input."""
    x, state, w_ih, w_hh = make((2, 64, 32), torch.float32, "cuda", generator)
    expected = domino_kernels.gru_step(x, state, w_ih, w_hh)
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        late.copy_(x)
        out = domino_kernels.gru_step(late, state, w_ih, w_hh)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_inputs_past_two_billion_elements():
    """int64 addressing: the last row of x starts past 2^31 elements."""
    stride, rows = 1 << 20, 2050
    x = torch.zeros(rows, stride, dtype=torch.bfloat16, device="cuda")[:, :8]
    x[-1] = torch.arange(8, device="cuda")
    state = torch.zeros(rows, 8, dtype=torch.bfloat16, device="cuda")
    w_ih = torch.full((24, 8), 0.01, dtype=torch.bfloat16, device="cuda")
    w_hh = torch.zeros(24, 8, dtype=torch.bfloat16, device="cuda")
    out = domino_kernels.gru_step(x, state, w_ih, w_hh)
    assert torch.equal(out[-1:], domino_kernels.gru_step(x[-1:], state[-1:], w_ih, w_hh))
    assert out[-1].abs().min() > 0


GOOD = dict(x=(2, 8), state=(2, 4), w_ih=(12, 8), w_hh=(12, 4))
BAD = [
    (dict(x=torch.zeros(8)), ValueError, r"gru_step: x: got shape \[8\], expected \[B, H\]"),
    (dict(x=[1.0]), TypeError, "gru_step: x: got list, expected a tensor"),
    (dict(x=torch.zeros(2, 8).int()), TypeError, "gru_step: x: got torch.int32, expected one of"),
    (dict(state=torch.zeros(3, 4)), ValueError, r"state: got shape \[3, 4\], expected \[2, 4\]"),
    (dict(state=torch.zeros(2, 4).half()), TypeError, "state: got torch.float16, expected torch.f"),
    (dict(state=torch.zeros(2, 4, device="meta")), ValueError, "state: got a tensor on meta"),
    (dict(w_ih=torch.zeros(12, 7)), ValueError, r"w_ih: got shape \[12, 7\], expected \[12, 8\]"),
    (dict(w_hh=torch.zeros(12, 5)), ValueError, r"w_hh: got shape \[12, 5\], expected \[12, 4\]"),
    (dict(w_ih=torch.zeros(8, 12).T), ValueError, r"w_ih: got strides \(1, 12\), expected a cont"),
    (dict(w_ih=torch.zeros(12, 9)[:, :8]), ValueError, r"w_ih: got strides \(9, 1\), expected con"),
    (dict(x=torch.zeros(8, 2).T), ValueError, r"x: got strides \(1, 2\), expected a contiguous"),
    (dict(x=torch.zeros(2, 8, requires_grad=True)), ValueError, "x: got a tensor that requires gr"),
    (dict(out=torch.zeros(2, 5)), ValueError, r"out: got shape \[2, 5\], expected \[2, 4\]"),
]


@pytest.mark.parametrize("change, error, message", BAD, ids=[b[2][:40] for b in BAD])
def test_bad_arguments(change, error, message):
    arguments = {name: torch.zeros(shape) for name, shape in GOOD.items()} | change
    with pytest.raises(error, match=message):
        domino_kernels.gru_step(**arguments)


def test_parameters_are_fine_without_grad():
    arguments = {name: torch.zeros(shape, requires_grad=True) for name, shape in GOOD.items()}
    with torch.no_grad():
        assert domino_kernels.gru_step(**arguments).shape == (2, 4)


def test_a_status_becomes_a_readable_error(monkeypatch):
    from domino_kernels.ops import head

    monkeypatch.setitem(head.DTYPES, torch.float32, 99)
    with pytest.raises(RuntimeError, match="gru_step: unsupported dtype"):
        domino_kernels.gru_step(**{name: torch.zeros(shape) for name, shape in GOOD.items()})
