"""Prompt lookup: draft what followed the last tokens when they stood in the text before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .drafter import Batch


class NgramDrafter:
    """A drafter without weights. It looks for the last `max_ngram` tokens (then for fewer) earlier
    in the row, prompt included, takes the latest such place and proposes the tokens after it. Where
    these reach the end of the text, the copy goes on into its own proposals: a loop is continued.
    """

    feature_layers = ()

    def __init__(self, max_ngram: int = 3, max_drafts: int = 16):
        if max_ngram < 1 or max_drafts < 1:
            raise ValueError(
                f"NgramDrafter: max_ngram, max_drafts: got {max_ngram}, {max_drafts}, "
                "expected at least 1"
            )
        self.max_ngram = max_ngram
        self.max_drafts = self.default_drafts = max_drafts

    def begin(self, target, rows: int, max_length: int) -> NgramSession:
        """A session of static rows (see `Drafter`)."""
        return NgramSession(self.max_ngram, rows)


class NgramSession:
    """Per row: where each n-gram was last followed by something."""

    def __init__(self, max_ngram: int, rows: int):
        self.max_ngram = max_ngram
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in range(rows)]
        self._indexed = [0] * rows  # n-grams that end at or before this position are in the dict

    def commit(
        self, features: None, counts: Tensor, host_counts: Sequence[int], first: int = 0
    ) -> None:
        pass

    def propose(self, batch: Batch, num_drafts: int) -> Tensor:
        found = [self._lookup(b, row, num_drafts) for b, row in enumerate(batch.tokens)]
        width = max(map(len, found))
        padded = [row + [-1] * (width - len(row)) for row in found]
        return torch.tensor(padded, dtype=torch.int64, device=batch.anchors.device)

    def select(self, rows: Sequence[int]) -> None:
        empty = len(self._ends) - len(rows)
        self._ends = [self._ends[b] for b in rows] + [{} for _ in range(empty)]
        self._indexed = [self._indexed[b] for b in rows] + [0] * empty

    def _lookup(self, b: int, tokens: list[int], num_drafts: int) -> list[int]:
        ends = self._ends[b]
        for end in range(self._indexed[b] + 1, len(tokens)):
            for n in range(1, min(self.max_ngram, end) + 1):
                ends[tuple(tokens[end - n : end])] = end
        self._indexed[b] = len(tokens) - 1
        for n in range(min(self.max_ngram, len(tokens)), 0, -1):
            place = ends.get(tuple(tokens[-n:]))
            if place is not None:
                copied = tokens[place : place + num_drafts]
                while len(copied) < num_drafts:
                    copied.append(copied[len(copied) + place - len(tokens)])
                return copied
        return []
