"""How many tokens to draft and to verify: what pays on this GPU, for this batch, on this text.

Chosen between cycles from what earlier ones accepted, never from the drafts at hand, so the law of
the output stays the target's. 0 is among the choices: drafting turns itself off. In a large batch
the target may verify fewer tokens than were drafted; which ones, the head's own probabilities say
(`fused_ops.allot`). Drafts are argmaxes, functions of the text before them, and so is that choice.
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
_GAIN = 1.1  # of a partial choice that has not been seen yet
_MEMORY = 256  # rows of cycles after which an observation has lost most of its weight
_PROBES = 16, 1024  # cycles without drafting before one is tried again: at first, at most
_SECOND = 64  # cycles after which the second best choice has a turn, so that its estimate stays new


class DraftLength:
    """`choose` what to draft and verify, `observe` how many drafts were kept.

    survival[k - 1]: the estimated probability that at least k drafts of a row are kept. Beyond the
    longest block seen lately it is continued with the mean chance of one more. gain[choice]: what a
    partial choice keeps, as a multiple of what as many tokens keep that are shared out evenly.
    """

    def __init__(self, most: int, partial: bool = True):
        self.most = most
        lengths = [k for k in DRAFTS if k < most] + [most]
        self._whole = [Choice.whole(k) for k in lengths]
        parts = [Choice(k, (k + 1) // n) for k in lengths if k >= 7 for n in (2, 4)]
        self._parts = parts if partial else []
        self.survival = [0.8**k for k in range(1, most + 1)]
        self.gain = dict.fromkeys(self._parts, _GAIN)
        self._off = 0  # cycles since drafting was last tried
        self._wait = _PROBES[0]
        self._turn = 0

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
        """The best of the choices in `costs`, which maps them to the time of a cycle."""
        ranked = sorted(costs, key=lambda c: self.expected(c) / costs[c], reverse=True)
        drafting = [c for c in ranked if c.drafts]
        if ranked[0].drafts:
            self._off, self._wait = 0, _PROBES[0]
            self._turn = (self._turn + 1) % _SECOND
            return drafting[1] if self._turn == 0 and len(drafting) > 1 else ranked[0]
        self._off += 1
        if self._off < self._wait or not drafting:
            return ranked[0]
        self._off, self._wait = 0, min(2 * self._wait, _PROBES[1])
        return drafting[0]

    def observe(self, choice: Choice, kept: Sequence[int]) -> None:
        """A cycle of this choice kept so many drafts in each row."""
        drafts = choice.drafts
        if not drafts or not kept:
            return
        weight = max(1 - (1 - 1 / _MEMORY) ** len(kept), 1 / 32)
        if choice.partial:
            even = 1 + sum(self.survival[: choice.tokens - 1])
            ratio = (1 + sum(kept) / len(kept)) / even
            gain = self.gain.get(choice, _GAIN)
            self.gain[choice] = gain + weight * (ratio - gain)
            return
        for k in range(1, drafts + 1):
            share = sum(n >= k for n in kept) / len(kept)
            self.survival[k - 1] += weight * (share - self.survival[k - 1])
        # One more draft is kept with the mean chance of those that were judged.
        judged = 1 + sum(self.survival[: drafts - 1])
        chance = min(sum(self.survival[:drafts]) / judged, 1.0)
        for k in range(drafts, len(self.survival)):
            self.survival[k] = self.survival[k - 1] * chance
