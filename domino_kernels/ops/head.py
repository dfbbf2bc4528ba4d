"""gru_step: one step of the prefix GRU."""

import torch

from domino_kernels import _C
from domino_kernels.ops import checks
from domino_kernels.torch_library import DTYPES, check_status, define, target


def _launch_gru_step(x, state, w_ih, w_hh, out):
    status = _C.gru_step(
        out=out.data_ptr(),
        x=x.data_ptr(),
        state=state.data_ptr(),
        w_ih=w_ih.data_ptr(),
        w_hh=w_hh.data_ptr(),
        batch=x.size(0),
        inputs=x.size(1),
        units=state.size(1),
        out_stride=out.stride(0),
        x_stride=x.stride(0),
        state_stride=state.stride(0),
        dtype=DTYPES[x.dtype],
        **target(x),
    )
    check_status("gru_step", status)


_gru_step = define(
    "gru_step(Tensor x, Tensor state, Tensor w_ih, Tensor w_hh, Tensor(a!) out) -> ()",
    _launch_gru_step,
)


def gru_step(x, state, w_ih, w_hh, *, out=None):
    """One step of a GRU without bias, for a batch of rows: the prefix GRU of the Domino head.

        r = sigmoid(w_ir x + w_hr s)    z = sigmoid(w_iz x + w_hz s)
        n = tanh(w_in x + r * (w_hn s))    s' = (1 - z) * n + z * s

    Equivalent to `torch.nn.GRU(H, G, bias=False)` for one step, with fp32 accumulation and one
    rounding, at the store. A row's result does not depend on the other rows.

    Args:
        x: [B, H] inputs; float32, float16 or bfloat16. Rows may be strided.
        state: [B, G] previous states, dtype of x. Rows may be strided.
        w_ih: [3G, H] contiguous, gates in the order r, z, n (`weight_ih_l0` of torch.nn.GRU).
        w_hh: [3G, G] contiguous (`weight_hh_l0`).
        out: [B, G] receives the new states; rows may be strided. It must not overlap an input.

    Returns:
        out, or a new tensor where out is None.

    Raises:
        TypeError, ValueError: an argument does not fit, or requires grad (the op has no gradient).

    Source: Domino's prefix GRU (public checkpoints' `prefix_gru`).
    """
    batch, inputs = checks.sizes("gru_step", "x", x, "[B, H]")
    units = checks.sizes("gru_step", "state", state, "[B, G]")[1]
    dtype, device = x.dtype, x.device
    checks.dtype("gru_step", "x", x, DTYPES)
    checks.tensor("gru_step", "x", x, (batch, inputs), dtype, device)
    checks.tensor("gru_step", "state", state, (batch, units), dtype, device)
    checks.tensor("gru_step", "w_ih", w_ih, (3 * units, inputs), dtype, device)
    checks.tensor("gru_step", "w_hh", w_hh, (3 * units, units), dtype, device)
    checks.contiguous("gru_step", "w_ih", w_ih)
    checks.contiguous("gru_step", "w_hh", w_hh)
    if out is None:
        out = torch.empty((batch, units), dtype=dtype, device=device)
    else:
        checks.tensor("gru_step", "out", out, (batch, units), dtype, device)
    _gru_step(x, state, w_ih, w_hh, out)
    return out
