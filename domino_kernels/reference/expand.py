"""References of the head's cousins and of trees, float64, from the formulas of their papers.

Source: Domino (arXiv 2605.29707), section 3; DSpark (arXiv 2607.05147), equations 4 and 5;
DeLS-Spec (arXiv 2607.07409); Gumbel-top-k: arXiv 1903.06059.
"""

import numpy as np

from domino_kernels import rng
from domino_kernels.reference.head import gru_step, round_to, sigmoid


def low_rank_input(kind, hidden, state, w1):
    """u as in HeadWeights; hidden [.., H] (H may be 0), state [.., G] or the token's row."""
    if kind == "row":
        return state
    z = np.concatenate([hidden, state], -1) @ w1.T
    if kind == "silu":
        return z * sigmoid(z)
    return sigmoid(z) * state if kind == "gate" else z


def step(token, parent_state, weights, rounded):
    """State of a path: the GRU's, or without one (w_hh None) the token's row of the table."""
    w_ih, w_hh, embedding = weights[0], weights[1], weights[4]
    rows = embedding[np.clip(token, 0, len(embedding) - 1)]
    return rows if w_hh is None else rounded(gru_step(rows, parent_state, w_ih, w_hh))


def expand_scores(
    base,
    hidden,
    token,
    parent_state,
    depth,
    weights,
    *,
    low_rank="silu",
    shift_label=True,
    prefix=1,
    dtype="float32",
):
    """base [B,S,V], hidden [B,S,H] (H may be 0), token and depth [B,W], parent_state [B,W,G].

    Returns (states [B,W,G], scores [B,W,V]).
    """
    weights = tuple(None if w is None else np.asarray(w, np.float64) for w in weights)
    rounded = round_to(dtype)
    states = step(token, parent_state, weights, rounded)
    row = np.arange(len(base))[:, None]
    slot = depth + (0 if shift_label else 1)
    scores = np.asarray(base, np.float64)[row, slot]
    u = low_rank_input(low_rank, np.asarray(hidden, np.float64)[row, slot], states, weights[2])
    delta = rounded(u) @ weights[3][: scores.shape[-1]].T
    return states, scores + np.where((depth >= prefix)[..., None], delta, 0.0)


def log_law(scores, temperature):
    """log softmax(scores / temperature) [n]; not finite scores have no mass."""
    logits = np.where(np.isfinite(scores), scores, -np.inf) / temperature
    top = logits.max()
    return logits - top - np.log(np.exp(logits - top).sum())


def race_values(scores, ids, temperature, seed, block_start, node):
    """What Gumbel-top-k orders by: score / temperature + Gumbel noise of each id."""
    noise = rng.exponential(rng.words(seed, block_start, node, rng.DRAFT_TOKEN, ids))
    return np.where(np.isfinite(scores), scores, -np.inf) / temperature - np.log(noise)


def law_of_children(scores, children, temperature=1.0):
    """(log_probs, log_remaining) of children given as positions of `scores` [n], in their order."""
    log_p = log_law(scores, temperature)
    taken = np.zeros(len(scores), bool)
    remaining = []
    for child in children:
        left = log_p[~taken]
        remaining.append(left.max() + np.log(np.exp(left - left.max()).sum()))
        taken[child] = True
    return log_p[np.asarray(children, int)], np.array(remaining)


def chain_scores(tokens, base, hidden, anchor, weights, *, shift_label=True, prefix=1, **head):
    """Scores [B,K,V] of a chain of any kind of head, teacher-forced on tokens [B,K].

    `head` is `low_rank` and `dtype` of `expand_scores`.
    """
    tokens = np.asarray(tokens)
    state = None if weights[1] is None else np.zeros((len(tokens), 1, weights[1].shape[1]))
    scores = []
    for depth, token in enumerate([anchor, *tokens.T[:-1]]):
        at = np.full((len(tokens), 1), depth)
        options = dict(shift_label=shift_label, prefix=prefix, **head)
        state, row = expand_scores(base, hidden, token[:, None], state, at, weights, **options)
        scores.append(row[:, 0])
    return np.stack(scores, 1)
