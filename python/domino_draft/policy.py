"""How many tokens to draft: what pays on this GPU, for this batch, on this text.

Chosen between cycles from what earlier ones accepted, never from the drafts at hand, so the law of
the output stays the target's. 0 is among the choices: drafting turns itself off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

CHOICES = 0, 1, 3, 7, 15  # each is compiled and captured by itself, so few
_MEMORY = 256  # rows of cycles after which an observation has lost most of its weight
_PROBES = 16, 1024  # cycles without drafting before one is tried again: at first, at most


class DraftLength:
    """`choose` a number of drafts, `observe` how many of them were kept.

    survival[k - 1]: the estimated probability that at least k drafts of a row are kept. Beyond the
    longest block seen lately it is continued with the mean chance of one more.
    """

    def __init__(self, most: int):
        self.choices = [k for k in CHOICES if k < most] + [most]
        self.survival = [0.8**k for k in range(1, most + 1)]
        self._off = 0  # cycles since drafting was last tried
        self._wait = _PROBES[0]

    def expected(self, drafts: int) -> float:
        """Tokens of a cycle and row."""
        return 1 + sum(self.survival[:drafts])

    def choose(self, costs: Mapping[int, float]) -> int:
        """The best of the numbers in `costs`, which maps them to the time of a cycle."""
        best = max(costs, key=lambda k: self.expected(k) / costs[k])
        if best > 0:
            self._off, self._wait = 0, _PROBES[0]
            return best
        self._off += 1
        if self._off < self._wait or len(costs) == 1:
            return 0
        self._off, self._wait = 0, min(2 * self._wait, _PROBES[1])
        return max((k for k in costs if k), key=lambda k: self.expected(k) / costs[k])

    def observe(self, drafts: int, kept: Sequence[int]) -> None:
        """A cycle of `drafts` drafts kept so many in each row."""
        if not drafts or not kept:
            return
        weight = 1 - (1 - 1 / _MEMORY) ** len(kept)
        weight = max(weight, 1 / 32)
        for k in range(1, drafts + 1):
            share = sum(n >= k for n in kept) / len(kept)
            self.survival[k - 1] += weight * (share - self.survival[k - 1])
        # One more draft is kept with the mean chance of those that were judged.
        judged = 1 + sum(self.survival[: drafts - 1])
        chance = min(sum(self.survival[:drafts]) / judged, 1.0)
        for k in range(drafts, len(self.survival)):
            self.survival[k] = self.survival[k - 1] * chance
