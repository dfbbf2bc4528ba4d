"""References of the drafting head's ops, float64."""

import numpy as np


def sigmoid(value):
    # the two-sided form: exp never overflows
    small = np.exp(-np.abs(value))
    return np.where(value >= 0, 1 / (1 + small), small / (1 + small))


def gru_step(x, state, w_ih, w_hh):
    """x [B, H], state [B, G], w_ih [3G, H], w_hh [3G, G] (gates r, z, n) -> [B, G]."""
    x, state, w_ih, w_hh = (np.asarray(a, dtype=np.float64) for a in (x, state, w_ih, w_hh))
    x_r, x_z, x_n = np.split(x @ w_ih.T, 3, axis=-1)
    s_r, s_z, s_n = np.split(state @ w_hh.T, 3, axis=-1)
    r, z = sigmoid(x_r + s_r), sigmoid(x_z + s_z)
    n = np.tanh(x_n + r * s_n)
    return (1 - z) * n + z * state
