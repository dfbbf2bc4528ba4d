"""What the tests and the bench's correctness gate share: the error rule and poisoned memory.

Error rule: err(kernel, fp64 reference) <= factor * err(same-dtype torch, fp64 reference) + floor,
errors as the largest absolute difference. The baseline scales the bound with dtype and shape, so no
tolerance is ever picked by hand. The floor is one correct rounding of the largest value.
"""

import numpy as np
import torch

_SENTINEL = {  # a value that no op writes
    torch.int32: -(2**31) + 7,
    torch.int64: -(2**63) + 7,
    torch.uint8: 0xA5,
    torch.bool: True,
}


def to_numpy(tensor):
    """A float64 array of a tensor of any float dtype, exactly."""
    return tensor.detach().double().cpu().numpy()


def max_error(value, reference):
    """Largest |value - reference| and its index; NaN and inf must agree in place and sign."""
    value = to_numpy(value) if isinstance(value, torch.Tensor) else np.asarray(value)
    assert value.shape == reference.shape, f"shape {value.shape}, reference {reference.shape}"
    if value.size == 0:
        return 0.0, ()
    finite = np.isfinite(reference)
    same = (value == reference) | (np.isnan(value) & np.isnan(reference))
    error = np.where(finite, np.abs(value - np.where(finite, reference, 0)), 0.0)
    error = np.where(np.isnan(error) | (~finite & ~same), np.inf, error)
    index = np.unravel_index(np.argmax(error), error.shape)
    return float(error[index]), tuple(int(i) for i in index)


def assert_error_rule(actual, reference, baseline, *, factor=2.0, name="out"):
    """`actual` obeys the error rule; 3.0 is the factor for gradients.

    reference: float64 array. baseline: the torch result in the dtype of `actual`.
    """
    assert actual.dtype == baseline.dtype, f"{name}: {actual.dtype}, baseline {baseline.dtype}"
    error, index = max_error(actual, reference)
    allowed, _ = max_error(baseline, reference)
    assert np.isfinite(allowed), f"{name}: the baseline is not finite where the reference is"
    finite = reference[np.isfinite(reference)]
    largest = float(np.abs(finite).max()) if finite.size else 0.0
    floor = torch.finfo(actual.dtype).eps / 2 * largest
    bound = factor * allowed + floor
    assert error <= bound, (
        f"{name}: error {error:.3e} > {bound:.3e} = {factor} * {allowed:.3e} + {floor:.3e} "
        f"at {index}: got {actual[index].item()!r}, expected {reference[index]!r}"
    )


class Guarded:
    """An output tensor full of poison (NaN, or a sentinel for integers) between guard bands.

    `strides` are in elements, contiguous by default. After the op: `check()`.
    """

    BAND = 64

    def __init__(self, shape, dtype, device="cpu", strides=None):
        if strides is None:
            strides = torch.empty(shape, device="meta").stride()
        span = 1 + sum((n - 1) * s for n, s in zip(shape, strides)) if 0 not in shape else 0
        self.poison = float("nan") if dtype.is_floating_point else _SENTINEL[dtype]
        self.memory = torch.full((span + 2 * self.BAND,), self.poison, dtype=dtype, device=device)
        self.tensor = self.memory.as_strided(shape, strides, self.BAND)
        outside = torch.ones(self.memory.shape, dtype=torch.bool, device=device)
        outside.as_strided(shape, strides, self.BAND).fill_(False)
        self._outside = outside

    def _is_poison(self, values):
        return values.isnan() if values.dtype.is_floating_point else values == self.poison

    def check(self, all_written=True):
        """Nothing outside the tensor changed; every element inside was written."""
        kept = self._is_poison(self.memory[self._outside])
        assert bool(kept.all()), f"{int((~kept).sum())} elements outside the output were written"
        if all_written:
            left = self._is_poison(self.tensor)
            where = left.nonzero()[:4].tolist()
            assert not bool(left.any()), f"{int(left.sum())} elements not written, e.g. {where}"
        return self.tensor
