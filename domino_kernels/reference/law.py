"""What a row of logits means: edits, temperature and filters, in float64.

Order, that of Transformers' processors: bias, repetition, presence and frequency penalties, grammar
mask, temperature, then the filters. `verify_chain` (csrc/verify) keeps the same order.
"""

from dataclasses import dataclass

import numpy as np

NON_FINITE, EMPTY_ROW = 1, 2

# What the mass of the nucleus is a share of. The filters are the same in all three:
# - "transformers" (temperature, top-k, top-p, min-p): of the top-k tokens
# - "vllm" (temperature, min-p, top-k, top-p): of the tokens that top-k and min-p leave
# - "joint" (FlashInfer): of the whole row
FILTER_ORDERS = "transformers", "vllm", "joint"


@dataclass(frozen=True)
class Sampling:
    """How logits become a law. The defaults change nothing.

    top_k: 0 keeps all; ties with the k-th value stay. top_p: the least set of likeliest tokens,
    ties by id, with at least that mass; 1 keeps all. min_p: keeps p >= min_p * max p, above 1 as 1.
    The likeliest token stays in any case. order: one of FILTER_ORDERS.
    repetition: logits of tokens seen before are divided by it where positive, otherwise multiplied
    (Keskar et al. 1909.05858). presence, frequency: taken off once for a token that was generated,
    and once for each time that it was.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    order: str = "transformers"
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def __post_init__(self):
        if self.order not in FILTER_ORDERS:
            raise ValueError(
                f"Sampling: order: got {self.order!r}, expected one of {FILTER_ORDERS}"
            )

    @property
    def penalises(self):
        return self.repetition != 1 or self.presence != 0 or self.frequency != 0


PLAIN = Sampling()


def edit(logits, sampling=PLAIN, *, bias=None, seen=None, counts=None, allowed=None):
    """Logits [V] after bias [V], penalties and grammar mask.

    seen: [V] bool, tokens of the prompt; counts: [V], how often each was generated, drafts before
    this row included; allowed: [V] bool.
    """
    logits = np.array(logits, np.float64)
    if bias is not None:
        logits += bias
    counts = np.zeros(len(logits)) if counts is None else np.asarray(counts)
    before = counts > 0 if seen is None else (counts > 0) | np.asarray(seen, bool)
    penalised = np.where(logits > 0, logits / sampling.repetition, logits * sampling.repetition)
    logits = np.where(before, penalised, logits)
    logits -= sampling.presence * (counts > 0) + sampling.frequency * counts
    return logits if allowed is None else np.where(np.asarray(allowed, bool), logits, -np.inf)


def kept(logits, sampling):
    """[V] bool: the tokens that the filters leave. logits: edited, at least one above -inf."""
    logits = np.asarray(logits, np.float64)
    weight = weights(logits, sampling.temperature)
    order = np.lexsort((np.arange(len(logits)), -logits))  # likeliest first, ties by id
    sorted_logits, sorted_weight = logits[order], weight[order]
    k = sampling.top_k if 0 < sampling.top_k < len(logits) else len(logits)
    in_top_k = sorted_logits >= sorted_logits[k - 1]
    in_min_p = ~(sorted_weight < min(sampling.min_p, 1.0))  # NaN: off
    base = {
        "transformers": in_top_k,
        "vllm": in_top_k & in_min_p,
        "joint": np.ones_like(in_top_k),
    }[sampling.order]
    before = np.cumsum(sorted_weight) - sorted_weight
    nucleus = before < sampling.top_p * sorted_weight[base].sum()
    if sampling.top_p >= 1:
        nucleus[:] = True  # whatever the rounding of the sums
    inside = in_top_k & in_min_p & nucleus
    inside[0] = True
    out = np.zeros(len(logits), bool)
    out[order] = inside
    return out & (weight > 0)


def weights(logits, temperature):
    """exp((logits - max) / temperature); what is below 2**-100 counts as nothing."""
    logits = np.asarray(logits, np.float64)
    with np.errstate(over="ignore", under="ignore"):
        power = (logits - logits.max()) / temperature
        return np.where(power * np.log2(np.e) >= -100.0, np.exp(power), 0.0)


def law(logits, sampling=PLAIN):
    """(the law [V] of edited logits, 0), or (None, the status bit that says why there is none).

    `sampling` may be a temperature; its filters apply, its penalties do not (see `edit`).
    """
    if not isinstance(sampling, Sampling):
        sampling = Sampling(temperature=sampling)
    logits = np.asarray(logits, np.float64)
    if np.isnan(logits).any() or np.isposinf(logits).any():
        return None, NON_FINITE
    if np.isneginf(logits).all():
        return None, EMPTY_ROW
    weight = weights(logits, sampling.temperature) * kept(logits, sampling)
    return weight / weight.sum(), 0
