"""Argument checks of the public functions: `op: argument: got X, expected Y`.

The passing path costs well under a microsecond an argument; messages are only built on failure.
"""

import torch


def sizes(op, name, value, layout):
    """The sizes of a tensor laid out as e.g. "[B, H]"; TypeError / ValueError otherwise."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {name}: got {type(value).__name__}, expected a tensor {layout}")
    shape = value.shape
    if len(shape) != layout.count(",") + 1:
        raise ValueError(f"{op}: {name}: got shape {list(shape)}, expected {layout}")
    return shape


def tensor(op, name, value, shape, dtype, device):
    """Shape, dtype and device as given, last dimension contiguous, and no gradient asked for."""
    if (  # the passing path: each question costs 35 to 75 ns
        isinstance(value, torch.Tensor)
        and value.shape == shape
        and value.dtype is dtype
        and value.device == device
        and value.is_contiguous()
        and not value.requires_grad
    ):
        return
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {name}: got {type(value).__name__}, expected a tensor")
    if value.shape != shape:
        raise ValueError(f"{op}: {name}: got shape {list(value.shape)}, expected {list(shape)}")
    if value.dtype != dtype:
        raise TypeError(f"{op}: {name}: got {value.dtype}, expected {dtype}")
    if value.device != device:
        raise ValueError(f"{op}: {name}: got a tensor on {value.device}, expected {device}")
    if not value.is_contiguous() and value.stride(-1) != 1 and shape[-1] > 1:
        raise ValueError(
            f"{op}: {name}: got strides {value.stride()}, expected a contiguous last dimension"
        )
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{op}: {name}: got a tensor that requires grad, expected none: the op has no "
            f"gradient (call it under torch.no_grad())"
        )


def output(op, name, value, shape, dtype, device):
    """A contiguous tensor to write."""
    if not (
        isinstance(value, torch.Tensor)
        and value.shape == shape
        and value.dtype is dtype
        and value.device == device
        and value.is_contiguous()
    ):
        tensor(op, name, value, shape, dtype, device)
        contiguous(op, name, value)


def contiguous(op, name, value):
    if not value.is_contiguous():
        raise ValueError(f"{op}: {name}: got strides {value.stride()}, expected contiguous memory")


def integer(op, name, value, least, most):
    if not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{op}: {name}: got {value!r}, expected {least} to {most}")


def dtype(op, name, value, allowed):
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {name}: got {type(value).__name__}, expected a tensor")
    if value.dtype not in allowed:
        expected = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise TypeError(f"{op}: {name}: got {value.dtype}, expected one of {expected}")
