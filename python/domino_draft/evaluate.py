"""Accepted length, speed and token identity of drafters on sets of prompts.

Every figure comes from running :func:`domino_draft.generate` itself: the target alone first (that
fixes each prompt's continuation), then each drafter in the same process on the same batches.

- *Accepted length* of a set = tokens emitted / (cycle, row) pairs, a ratio of sums over its
  prompts: accepted drafts + 1 per cycle. The token that the prompt's own forward yields belongs to
  no cycle.
- *Without tails*: greedy text of a small model often ends in a loop, which any drafter predicts.
  :func:`repetitive_tail` says where a loop begins; cycles that start after that point are left out.
- *Intervals*: 95% percentile bootstrap over prompts; differences between two drafters resample the
  same prompts for both (paired).
- *Identical*: fraction of prompts whose output equals the target's own, token for token. The rest
  is split by :func:`domino_draft.greedy_report` into near-ties and violations.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .generate import Drafter
    from .target import Target

MAX_PERIOD = 32
MIN_REPEATS = 3
MIN_TAIL = 16
RESAMPLES = 10_000
TARGET = "target"


def repetitive_tail(
    tokens: Sequence[int],
    max_period: int = MAX_PERIOD,
    min_repeats: int = MIN_REPEATS,
    min_tail: int = MIN_TAIL,
) -> int:
    """How many of `tokens` to keep so that one period of a final loop remains.

    A loop is a suffix that repeats with a period of at most `max_period`, `min_repeats` times or
    more (the last time may be cut short after that) and is at least `min_tail` long, which spares
    a number such as 1000000. The text is cut at the start of the second repetition. Text without
    such a suffix is kept whole. Give the tokens without the stop token.
    """
    ids = np.asarray(tokens)
    keep = len(ids)
    for period in range(1, min(max_period, len(ids) // min_repeats) + 1):
        differs = np.flatnonzero(ids[period:] != ids[:-period])
        # ids[start:] has this period, and its second repetition starts at start + period
        start = int(differs[-1]) + 1 if len(differs) else 0
        if len(ids) - start >= max(min_repeats * period, min_tail):
            keep = min(keep, start + period)
    return keep


def ratio_of_sums(emitted: np.ndarray, cycles: np.ndarray) -> float:
    """sum(emitted) / sum(cycles), NaN if no cycle is left."""
    total = float(np.sum(cycles))
    return float(np.sum(emitted)) / total if total else float("nan")


def bootstrap(
    statistic: Callable[[np.ndarray], np.ndarray],
    prompts: int,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, float]:
    """95% percentile interval of `statistic` over resampled prompts.

    `statistic` gets weights [resamples, prompts] (how often each prompt was drawn) and returns one
    value a resample. One `seed` draws the same prompts for every statistic.
    """
    generator = np.random.default_rng(seed)
    weights = generator.multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples)
    low, high = np.nanpercentile(statistic(weights), (2.5, 97.5))
    return float(low), float(high)


def accepted_length(emitted: np.ndarray, cycles: np.ndarray, **options: Any) -> dict[str, Any]:
    """Ratio of sums over prompts with its interval: {"value", "low", "high", "cycles"}."""
    emitted, cycles = np.asarray(emitted, float), np.asarray(cycles, float)
    low, high = bootstrap(lambda w: (w @ emitted) / (w @ cycles), len(cycles), **options)
    value = ratio_of_sums(emitted, cycles)
    return {"value": value, "low": low, "high": high, "cycles": int(cycles.sum())}


def difference(
    first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray], **options: Any
) -> dict[str, float]:
    """Accepted length of `first` minus `second`, each (emitted, cycles) over the same prompts."""
    (a, b), (c, d) = (tuple(np.asarray(x, float) for x in pair) for pair in (first, second))
    low, high = bootstrap(lambda w: (w @ a) / (w @ b) - (w @ c) / (w @ d), len(a), **options)
    return {"value": ratio_of_sums(a, b) - ratio_of_sums(c, d), "low": low, "high": high}
