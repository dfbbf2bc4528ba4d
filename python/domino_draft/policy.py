"""How many tokens to draft and to verify: what pays on this GPU, for this batch, on this text.

Chosen between cycles from what earlier ones accepted, never from the drafts at hand, so the law of
the output stays the target's. 0 is among the choices: drafting turns itself off. In a large batch
the target may verify fewer tokens than were drafted; which ones, the head's own probabilities say
(`cache_ops.allot`). Drafts are argmaxes, functions of the text before them, and so is that choice.

A cycle with k drafts tells what fewer would have kept, but not what more would: only the choices
that the best one says nothing about are tried now and then, and for a stated share of the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Choice(NamedTuple):
    """drafts of a row, and how many tokens a row are verified, its anchor included: all of them
    where tokens = drafts + 1, otherwise on average over the batch (of a tree: its nodes)."""

    drafts: int
    tokens: int

    @classmethod
    def whole(cls, drafts: int) -> Choice:
        return cls(drafts, drafts + 1)

    @property
    def partial(self) -> bool:
        return self.tokens <= self.drafts


DRAFTS = 0, 1, 3, 7, 15  # each is captured by itself, so few
PARTIAL_ROWS = 8  # a batch from which on tokens are dear enough to leave drafts unverified
_CHANCE, _PRIOR = 0.6, 8  # that a draft is kept before any was judged, and the drafts it weighs as
_GAIN = 1.1  # of a partial choice that has not been seen yet
_ROWS, _CYCLES = 128, 16  # an observation is old after so many rows, but not before so many cycles
_LEAST = 8  # rows that what was seen still weighs as, however long ago that was
_MARGIN = 1.02  # by which drafting must win: what a cycle takes is known no better
_SHARE = 0.005  # of the time that trying other choices may lose, as far as one believes beforehand
_PRICE = 0.2  # of a cycle: what a try is taken to lose at least
_SAVED = 2  # cycles: the most of that time that is kept for later


class DraftLength:
    """`choose` what to draft and verify, `observe` how many drafts were kept.

    survival[k - 1]: the estimated probability that at least k drafts of a row are kept: the product
    of the chances of its drafts, each judged only where those before it were kept. What few rows
    have judged leans on the mean chance. gain[choice]: what a partial choice keeps, as a multiple
    of what as many tokens keep that are shared out evenly.
    """

    def __init__(self, most: int, partial: bool = True):
        lengths = [k for k in DRAFTS if k < most] + [most]
        self._whole = [Choice.whole(k) for k in lengths]
        parts = [Choice(k, (k + 1) // n) for k in lengths if k >= 7 for n in (2, 4)]
        self._parts = parts if partial else []
        # Of the k-th drafts, weighted by age. What is assumed is forgotten like what was seen.
        self._judged = [float(_PRIOR)] + [0.0] * (most - 1)
        self._kept = [_PRIOR * _CHANCE] + [0.0] * (most - 1)
        self._age = 0  # cycles since the last observation
        self._budget = 0.0
        self.survival = self._survival()
        self.gain = dict.fromkeys(self._parts, _GAIN)

    def choices(self, rows: int) -> list[Choice]:
        """What there is to choose from for a batch of so many rows."""
        return self._whole + (self._parts if rows >= PARTIAL_ROWS else [])

    def expected(self, choice: Choice) -> float:
        """Tokens of a cycle and row."""
        if not choice.partial:
            return 1 + sum(self.survival[: choice.drafts])
        even = 1 + sum(self.survival[: choice.tokens - 1])
        return min(even * self.gain[choice], 1 + sum(self.survival[: choice.drafts]))

    def choose(self, costs: Mapping[Choice, float]) -> Choice:
        """The best of the choices in `costs`, which maps them to the time of a cycle; or one that
        is worth trying."""
        tokens = {c: self.expected(c) * (1 if c.drafts else _MARGIN) for c in costs}
        best = max(costs, key=lambda c: tokens[c] / costs[c])
        lost = {c: costs[c] - tokens[c] * costs[best] / tokens[best] for c in costs}
        self._age += 1
        self._budget = min(self._budget + _SHARE * costs[best], _SAVED * costs[best])
        others = [c for c in costs if c.drafts and c != best]
        untold = [c for c in others if c.drafts > best.drafts or c.partial or best.partial]
        tried = min(untold, key=lost.__getitem__, default=best)
        price = max(lost[tried], _PRICE * costs[best])
        if price > self._budget:
            return best
        self._budget -= price
        return tried

    def observe(self, choice: Choice, kept: Sequence[int]) -> None:
        """A cycle of this choice kept so many drafts in each row."""
        if not choice.drafts or not kept:
            return
        if choice.partial:
            even = 1 + sum(self.survival[: choice.tokens - 1])
            ratio = (1 + sum(kept) / len(kept)) / even
            self.gain[choice] += (ratio - self.gain[choice]) / 16
            return
        forgotten = min(len(kept) / _ROWS, 1 / _CYCLES)
        held = max((1 - forgotten) ** self._age, min(1.0, _LEAST / self._judged[0]))
        self._age = 0
        reached = [sum(n >= k for n in kept) for k in range(choice.drafts + 1)]
        self._judged = [held * n for n in self._judged]
        self._kept = [held * n for n in self._kept]
        for k in range(choice.drafts):
            self._judged[k] += reached[k]
            self._kept[k] += reached[k + 1]
        self.survival = self._survival()

    def _survival(self) -> list[float]:
        mean = sum(self._kept) / sum(self._judged)
        survival, alive = [], 1.0
        for kept, judged in zip(self._kept, self._judged):
            alive *= (kept + _PRIOR * mean) / (judged + _PRIOR)
            survival.append(alive)
        return survival
