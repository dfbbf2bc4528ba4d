"""Pointers are tensor.data_ptr(), strides count elements, the result is a status (0 = ok).

device = -1 runs the CPU twin; otherwise the kernel is queued on `stream` of that CUDA device.
Field by field: csrc/<family>/<op>.h.
"""

F32: int
F16: int
BF16: int

def status_name(status: int) -> str: ...
def status_text(status: int) -> str: ...
def gru_step(
    *,
    out: int,
    x: int,
    state: int,
    w_ih: int,
    w_hh: int,
    batch: int,
    inputs: int,
    units: int,
    out_stride: int,
    x_stride: int,
    state_stride: int,
    dtype: int,
    device: int,
    stream: int,
) -> int: ...
