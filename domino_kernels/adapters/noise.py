"""Seeds for callers that bring uniforms or a generator instead of seeds."""

import torch

_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # odd: requests of one call get distinct seeds


def seeds_of_uniforms(*uniforms):
    """[B] int64 seeds from the bits of uniforms [B] or [B, n], float32: the caller's randomness.

    Two rows with the same uniforms get the same seed, as they would have got the same coins.
    """
    seed = None
    for values in uniforms:
        bits = values.float().contiguous().view(torch.int32).long()
        for column in [bits] if bits.dim() == 1 else bits.unbind(1):
            seed = column if seed is None else seed * _STEP + column
            seed = seed ^ (seed >> 29)
    return seed


def seeds_of_call(batch, device, seed=None, generator=None):
    """[B] int64 from one seed for the call, an int or a tensor of one element, or from none."""
    if seed is None:
        drawn = torch.randint(-(2**63), 2**63 - 1, (1,), device=device, generator=generator)
        return drawn + torch.arange(batch, device=device) * _STEP
    return torch.arange(batch, device=device) * _STEP + one_number(seed, device)


def one_number(value, device):
    """An int, or the first element of a tensor of any integer dtype as [1] int64."""
    if isinstance(value, torch.Tensor):
        return value.to(device, torch.int64).reshape(-1)[:1]
    return value
