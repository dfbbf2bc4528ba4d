"""Static rows that texts join and leave: the caches and drafting sessions of `engine.py`.

The rows in use are always the first. A new text is prefilled in the rows behind them and so joins
without a copy; where one leaves, the last takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .cache import RowCache
from .drafter import Batch, DominoDrafter, DominoSession, Drafter
from .ngram import NgramDrafter, NgramSession


class SlotCache(RowCache):
    """A `RowCache` of which all calls are about the rows in focus: neighbours, at first all.

    The tensors are made once, for all rows; lengths is a part of one static tensor.
    """

    def __init__(self, rows: int, max_length: int, device: torch.device | str):
        super().__init__(rows, max_length, device)
        self._all_lengths, self._all_host_lengths = self.lengths, self.host_lengths
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._used = self._written = 0  # rows and positions that ever held anything
        self.focus(0, rows)

    def focus(self, first: int, count: int) -> None:
        """Make the calls that follow be about rows first .. first + count - 1."""
        self._at = None
        self._rows = slice(first, first + count)
        self.lengths = self._all_lengths[self._rows]
        self.host_lengths = self._all_host_lengths[self._rows]
        self._layers = {n: self._part(pair) for n, pair in self._buffers.items()}

    def _part(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return pair[0][self._rows], pair[1][self._rows]

    def update(self, k: Tensor, v: Tensor, layer: int, *_, **__) -> tuple[Tensor, Tensor]:
        if layer not in self._buffers:
            rows = len(self._all_host_lengths)
            self._buffers[layer] = tuple(
                x.new_zeros(rows, x.shape[1], self.max_length, x.shape[3]) for x in (k, v)
            )
            self._layers[layer] = self._part(self._buffers[layer])
        found = super().update(k, v, layer)
        self._used = max(self._used, self._rows.stop)
        self._written = max(self._written, found[0].shape[2])
        return found

    def advance(self, counts: Tensor, host_counts: Sequence[int]) -> None:
        self._at = None
        self.lengths += counts
        self.host_lengths = [n + c for n, c in zip(self.host_lengths, host_counts)]
        self._all_host_lengths[self._rows] = self.host_lengths

    def rewind(self, host_lengths: Sequence[int]) -> None:
        """Go back to these lengths of the rows in focus."""
        self._at = None
        self.lengths.copy_(torch.tensor(host_lengths))
        self.host_lengths = list(host_lengths)
        self._all_host_lengths[self._rows] = self.host_lengths

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these of all rows, as rows 0, 1, ..., which then are in focus.

        Only rows that change place are copied. The rest is empty afterwards, and zero: a masked
        value still meets its weight 0, so a NaN in it would reach the next text of its place.
        """
        kept = len(rows)
        moved = [(to, row) for to, row in enumerate(rows) if to != row]
        buffers = [x[:, :, : self._written] for pair in self._buffers.values() for x in pair]
        if moved:
            to, source = torch.tensor(moved, device=self._all_lengths.device).unbind(1)
            for x in (self._all_lengths, *buffers):
                x[to] = x[source]
        for x in buffers:
            x[kept : self._used].zero_()
        self._all_lengths[kept:].zero_()
        empty = [0] * (len(self._all_host_lengths) - kept)
        self._all_host_lengths = [self._all_host_lengths[row] for row in rows] + empty
        self._used = kept
        self.focus(0, kept)


@dataclass
class SlotBatch(Batch):
    """The running rows; requests[b] names the text in row b, whatever row it has moved to."""

    requests: list[int]


class SlotSession(Protocol):
    """A drafter's state for the rows of an engine, all empty at first."""

    def commit(
        self, features: Tensor | None, counts: Tensor, host_counts: Sequence[int], first: int = 0
    ) -> None:
        """As `DraftSession.commit`, of rows first .. first + len(host_counts) - 1.

        A new row gets its prompt in one or more calls. A call that raises must leave the context as
        it was.
        """

    def propose(self, batch: SlotBatch, num_drafts: int) -> Tensor:
        """As `DraftSession.propose`, for the first rows: those of the batch."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, as rows 0, 1, ...; those behind them are empty again."""


class DominoSlots(DominoSession):
    """A DominoDrafter's context in static rows."""

    def __init__(self, drafter: DominoDrafter, target, rows: int, max_length: int):
        super().__init__(drafter, target, rows, max_length)
        self.cache = SlotCache(rows, self.cache.max_length, target.device)

    def commit(
        self, features: Tensor, counts: Tensor, host_counts: Sequence[int], first: int = 0
    ) -> None:
        self.cache.focus(first, len(host_counts))
        super().commit(features, counts, host_counts)

    def propose(self, batch: SlotBatch, num_drafts: int) -> Tensor:
        self.cache.focus(0, len(batch.tokens))
        return super().propose(batch, num_drafts)


class NgramSlots(NgramSession):
    """Prompt lookup in rows that texts join and leave."""

    def commit(
        self, features: None, counts: Tensor, host_counts: Sequence[int], first: int = 0
    ) -> None:
        pass

    def select(self, rows: Sequence[int]) -> None:
        empty = len(self._ends) - len(rows)
        super().select(rows)
        self._ends += [{} for _ in range(empty)]
        self._indexed += [0] * empty


def begin_slots(drafter: Drafter, target, rows: int, max_length: int) -> SlotSession:
    """A session of `rows` rows, none longer than max_length, with any drafter that has one: its own
    method `begin_slots(target, rows, max_length)`, or a drafter of this package.
    """
    if isinstance(drafter, DominoDrafter):
        drafter.check_target(target)
        return DominoSlots(drafter, target, rows, max_length)
    if isinstance(drafter, NgramDrafter):
        return NgramSlots(drafter.max_ngram, rows)
    if not hasattr(drafter, "begin_slots"):
        raise TypeError(
            f"Engine: drafter: got a {type(drafter).__name__}, expected a DominoDrafter, an "
            "NgramDrafter, or one with a method begin_slots"
        )
    return drafter.begin_slots(target, rows, max_length)
