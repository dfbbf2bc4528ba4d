"""The accept rules of a drafted chain as exact laws, for `losslessness.enumerate_rule`.

A rule is a function (p_rows, q_rows, drafts) that yields (probability, emitted tokens): p_rows are
the target's laws, one more than drafts, q_rows the laws that the drafts came from.
"""

from itertools import pairwise

import numpy as np


def _replaced(weight, rest, kept):
    """Outcomes of emitting `kept` and one token of the law `rest` (unnormalised)."""
    total = rest.sum()
    for y in np.flatnonzero(rest):
        yield weight * rest[y] / total, (*kept, int(y))


def token_rule(p_rows, q_rows, drafts):
    """Leviathan et al. 2211.17192; with a one-hot q the one-hot rule."""
    reached = 1.0
    for i, x in enumerate(drafts):
        p, q = p_rows[i], q_rows[i]
        accept = min(1.0, p[x] / q[x])
        if accept < 1.0:
            yield from _replaced(reached * (1.0 - accept), np.maximum(p - q, 0.0), drafts[:i])
        reached *= accept
    yield from _replaced(reached, p_rows[-1], drafts)


def match_rule(p_rows, q_rows, drafts):
    """y is drawn from p without a look at the draft x, which is kept where x = y."""
    reached = 1.0
    for i, x in enumerate(drafts):
        others = p_rows[i] * (np.arange(len(p_rows[i])) != x)
        yield from _replaced(reached * others.sum(), others, drafts[:i])
        reached *= p_rows[i][x]
    yield from _replaced(reached, p_rows[-1], drafts)


def block_thresholds(p_rows, q_rows, drafts):
    """(reach_0 .. reach_n, h_0 .. h_n) of block verification (Sun et al. 2403.10444)."""
    reach, h = [1.0], []
    for i, x in enumerate(drafts):
        rest = np.maximum(reach[i] * p_rows[i] - q_rows[i], 0.0).sum()
        below = rest + 1.0 - reach[i]
        h.append(rest / below if below > 0 else 1.0)
        reach.append(min(1.0, reach[i] * p_rows[i][x] / q_rows[i][x]))
    return reach, [*h, reach[-1]]


def block_rule(p_rows, q_rows, drafts):
    """The largest i whose coin is at most h_i, 0 if there is none."""
    reach, h = block_thresholds(p_rows, q_rows, drafts)
    left = 1.0
    for i in range(len(drafts), -1, -1):
        stops = left * (h[i] if i > 0 else 1.0)
        rest = p_rows[i] if i == len(drafts) else reach[i] * p_rows[i] - q_rows[i]
        if stops > 0:
            yield from _replaced(stops, np.maximum(rest, 0.0), drafts[:i])
        left -= stops


def coupling(p, q):
    """[V, V]: probability that argmin E/q is a and argmin E/p is b, with one noise E for both.

    Diagonal: 1 / sum_j max(p_j / p_a, q_j / q_a). Elsewhere, with s = E_b / p_b and t = E_a / q_a,
    all other E_j exceed max(p_j s, q_j t); the integral over the scale leaves one over the ratio
    t / s of p_b q_a / (sum of the maxima)^2, which is piecewise elementary.
    """
    vocab = len(p)
    out = np.zeros((vocab, vocab))
    for a in range(vocab):
        for b in range(vocab):
            if p[b] == 0 or q[a] == 0:
                continue
            if a == b:
                out[a, b] = 1 / np.maximum(p / p[a], q / q[a]).sum()
                continue
            # token b must not win the draft's race nor a the target's: p_a/q_a <= ratio <= p_b/q_b
            low = p[a] / q[a]
            high = p[b] / q[b] if q[b] > 0 else np.inf
            others = [j for j in range(vocab) if j not in (a, b)]
            knots = {p[j] / q[j] for j in others if q[j] > 0}
            knots = [low, *sorted(k for k in knots if low < k < high), high]
            for left, right in pairwise(knots):
                if not left < right:
                    continue
                # a ratio inside the piece says which of p_j s and q_j t is the larger
                inside = 2 * left + 1 if np.isinf(right) else (left + right) / 2
                by_draft = [j for j in others if q[j] * inside > p[j]]
                constant = p[b] + sum(p[j] for j in others if j not in by_draft)
                slope = q[a] + sum(q[j] for j in by_draft)
                upper = 0.0 if np.isinf(right) else 1 / (constant + slope * right)
                out[a, b] += p[b] * q[a] / slope * (1 / (constant + slope * left) - upper)
    return out
