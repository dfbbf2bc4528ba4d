"""References of the drafting head's ops, float64, and the replay that judges a chain's ids.

Source: Domino (arXiv 2605.29707), section 3; PyTorch's GRU equations and gate order (r, z, n).
"""

from typing import NamedTuple

import numpy as np

from domino_kernels import rng


def sigmoid(value):
    # the two-sided form: exp never overflows
    small = np.exp(-np.abs(value))
    return np.where(value >= 0, 1 / (1 + small), small / (1 + small))


def gru_step(x, state, w_ih, w_hh):
    """x [B, H], state [B, G], w_ih [3G, H], w_hh [3G, G] (gates r, z, n) -> [B, G].

    w_ih None: x [B, 3G] is the product already, a row of an input table.
    """
    x, state, w_hh = (np.asarray(a, dtype=np.float64) for a in (x, state, w_hh))
    product = x if w_ih is None else x @ np.asarray(w_ih, dtype=np.float64).T
    x_r, x_z, x_n = np.split(product, 3, axis=-1)
    s_r, s_z, s_n = np.split(state @ w_hh.T, 3, axis=-1)
    r, z = sigmoid(x_r + s_r), sigmoid(x_z + s_z)
    n = np.tanh(x_n + r * s_n)
    return (1 - z) * n + z * state


def round_to(dtype: str):
    """Rounding of fp64 values to `"float32" | "float16" | "bfloat16"`, ties to even.

    A kernel keeps the GRU state and the low-rank input in the weights' dtype. float32 is left
    unrounded: there the difference is part of the error that a test bounds.
    """
    if dtype == "float32":
        return lambda x: x
    if dtype == "float16":
        return lambda x: x.astype(np.float16).astype(np.float64)
    if dtype != "bfloat16":
        raise ValueError(f"round_to: dtype: got {dtype!r}, expected float32, float16 or bfloat16")

    def to_bfloat16(x: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
        bits = (bits + ((bits >> 16) & 1) + np.uint32(0x7FFF)) & np.uint32(0xFFFF0000)
        return np.where(np.isnan(x), np.nan, bits.view(np.float32).astype(np.float64))

    return to_bfloat16


def first_argmax(scores: np.ndarray) -> np.ndarray:
    """Argmax over the last axis: ties to the lowest id, NaN below everything, all NaN gives 0."""
    ranked = np.where(np.isnan(scores), -np.inf, scores)
    # Where the best is -inf, a NaN before it must not win over a true -inf.
    return np.argmax((ranked == ranked.max(-1, keepdims=True)) & ~np.isnan(scores), axis=-1)


class Replay(NamedTuple):
    """What the fp64 chain says about given ids, each slot after the given ids before it.

    `tokens [B,K]` are the fp64 winners, `scores [B,K]` their scores, `margin [B,K]` the lead
    of each winner over the runner-up, `regret [B,K]` its lead over the given id (0 = agrees).
    """

    tokens: np.ndarray
    scores: np.ndarray
    margin: np.ndarray
    regret: np.ndarray


def group_pool(base: np.ndarray, size: int) -> np.ndarray:
    """The pool of `size` ids of `base [.., V]`, as csrc/head/chain_pool.h defines it: [.., size].

    The best 16 of each of ceil(size / 16) groups, to which runs of 16 ids go in turn; largest
    first, ties to the lowest id, NaN as -inf.
    """
    groups = -(-size // 16)
    periods = -(-base.shape[-1] // (16 * groups))
    ids = np.arange(periods * groups * 16).reshape(periods, groups, 16)
    ids = ids.swapaxes(0, 1).reshape(groups, -1)  # of each group
    values = np.full((*base.shape[:-1], ids.size), -np.inf)
    values[..., : base.shape[-1]] = np.where(np.isnan(base), -np.inf, base)
    order = np.argsort(-values[..., ids], axis=-1, kind="stable")[..., :16]
    best = np.take_along_axis(np.broadcast_to(ids, (*base.shape[:-1], *ids.shape)), order, -1)
    return best.reshape(*base.shape[:-1], -1)[..., :size]


class Drawn(NamedTuple):
    """How drafts are drawn: arrays [B]; temperature 0 takes the argmax."""

    temperature: np.ndarray
    seed: np.ndarray
    block_start: np.ndarray

    def order(self, scores, draft):
        """The values whose argmax draft `draft` is: scores [B, V]."""
        index = np.arange(scores.shape[-1])
        words = rng.words(
            self.seed[:, None], self.block_start[:, None], draft, rng.DRAFT_TOKEN, index
        )
        warm = np.asarray(self.temperature, np.float64)[:, None]
        noise = -np.log(rng.exponential(words))
        return np.where(warm > 0, scores / np.where(warm > 0, warm, 1) + noise, scores)


def _walk(
    base, hidden, anchor, weights, num_drafts, shift_label, prefix, dtype, given, pools, drawn
):
    w_ih, *rest = weights
    w_hh, w1, w2, embedding = (np.asarray(w, dtype=np.float64) for w in rest)
    base, hidden = np.asarray(base, np.float64), np.asarray(hidden, np.float64)
    rounded = round_to(dtype)
    batch, width = base.shape[0], hidden.shape[-1]
    rows = np.arange(batch)
    state = np.zeros((batch, w_hh.shape[1]))
    token = np.clip(np.asarray(anchor), 0, len(embedding) - 1)
    columns = []
    for draft in range(num_drafts):  # this turn scores y_{draft+1} from y_0..y_draft
        slot = draft if shift_label else draft + 1
        state = rounded(gru_step(embedding[token], state, w_ih, w_hh))
        scores = base[:, slot]
        if draft >= prefix:
            mixed = hidden[:, slot] @ w1[:, :width].T + state @ w1[:, width:].T
            low_rank = rounded(mixed * sigmoid(mixed))  # SiLU
            scores = scores + low_rank @ w2.T
        if pools is not None and (draft >= prefix or drawn is not None):
            outside = np.ones(scores.shape, bool)
            np.put_along_axis(outside, pools[:, draft % pools.shape[1]], False, axis=-1)
            scores = np.where(outside, -np.inf, scores)
        if drawn is not None:
            scores = drawn.order(scores, draft)
        best = first_argmax(scores)
        top = scores[rows, best]
        token = best if given is None else np.asarray(given)[:, draft]
        others = scores.copy()
        others[rows, best] = -np.inf
        columns.append((best, top, top - others.max(-1), top - scores[rows, token]))
    return Replay(*(np.stack(column, axis=1) for column in zip(*columns, strict=True)))


def draft_chain(
    base,
    hidden,
    anchor,
    weights,
    *,
    num_drafts=15,
    shift_label=True,
    prefix=1,
    dtype="float32",
    pools=None,
    drawn=None,
) -> Replay:
    """The chain itself: `base [B,S,V]`, `hidden [B,S,H]`, `anchor [B]`.

    `weights` are `(w_ih [3G,H], w_hh [3G,G], w1 [R,H+G], w2 [V,R], embedding [V,H])`; `dtype`
    names the weights' dtype, to which the state and the low-rank input are rounded. `pools`
    [B, 1 or num_drafts, M] are the ids that corrected drafts are taken from, `drawn` a Drawn: then
    all drafts are, and scores stand for score / temperature + noise.
    """
    return _walk(
        base,
        hidden,
        anchor,
        weights,
        num_drafts,
        shift_label,
        prefix,
        dtype,
        None,
        pools,
        drawn,
    )


def replay_chain(
    tokens,
    base,
    hidden,
    anchor,
    weights,
    *,
    shift_label=True,
    prefix=1,
    dtype="float32",
    pools=None,
    drawn=None,
) -> Replay:
    """The same scores teacher-forced on `tokens [B,K]`.

    A kernel is right where `regret` is 0; where it is not, `margin` says whether rounding may
    explain it, because then the fp64 winner leads by less than the kernel's error.
    """
    k = np.asarray(tokens).shape[1]
    return _walk(base, hidden, anchor, weights, k, shift_label, prefix, dtype, tokens, pools, drawn)
