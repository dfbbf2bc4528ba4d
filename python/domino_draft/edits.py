"""Penalties and biases of requests, as `verify_chain` reads them on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .requests import on_device

if TYPE_CHECKING:
    from .requests import Sampling


def edits_bytes(rows: int, vocab: int) -> int:
    return rows * (8 * vocab + 4 * (-(-vocab // 32)) + 12)


class Edits:
    """The state of `rows` rows; a row that has none of them is at their off values.

    Its memory stays where it is, so that captured cycles may read and count in it.
    """

    def __init__(self, rows: int, vocab: int, device: torch.device):
        def new(*size, dtype=torch.float32, value=0):
            return torch.full(size, value, dtype=dtype, device=device)

        self.state = {
            "repetition_penalty": new(rows, value=1),
            "presence_penalty": new(rows),
            "frequency_penalty": new(rows),
            "logit_bias": new(rows, vocab),
            "prompt_mask": new(rows, -(-vocab // 32), dtype=torch.int32),
            "output_counts": new(rows, vocab, dtype=torch.int32),
        }

    @property
    def logit_bias(self) -> Tensor:
        return self.state["logit_bias"]

    @property
    def output_counts(self) -> Tensor:
        return self.state["output_counts"]

    def arguments(self, rows: slice) -> dict[str, Tensor]:
        """Of `verify_chain`."""
        return {name: values[rows] for name, values in self.state.items()}

    def put(
        self, first: int, sampling: Sequence[Sampling], prompts: Sequence[Sequence[int]]
    ) -> None:
        """Rows `first` and up begin: nothing has been generated in them."""
        device, rows = self.logit_bias.device, slice(first, first + len(sampling))
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            values = [getattr(s, name) for s in sampling]
            self.state[name][rows] = on_device(values, torch.float32, device)
        self.logit_bias[rows] = 0
        self.output_counts[rows] = 0
        words = np.zeros((len(prompts), self.state["prompt_mask"].shape[1]), np.uint32)
        for row, (one, prompt) in enumerate(zip(sampling, prompts)):
            ids = np.asarray(prompt)
            np.bitwise_or.at(words[row], ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
            if one.logit_bias:
                ids, values = zip(*one.logit_bias)
                at = on_device(ids, torch.int64, device)
                self.logit_bias[first + row].index_copy_(
                    0, at, on_device(values, torch.float32, device)
                )
        self.state["prompt_mask"][rows] = on_device(words.view(np.int32), torch.int32, device)

    def count(self, tokens: Tensor, first: int = 0) -> None:
        """Rows `first` and up have emitted tokens [n, T], -1: none."""
        counts = self.output_counts[first : first + len(tokens)]
        counts.scatter_add_(1, tokens.clamp(min=0), (tokens >= 0).int())

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, as rows 0, 1, ...; one that moves comes from behind them all."""
        for to, row in enumerate(rows):
            if to != row:
                for values in self.state.values():
                    values[to] = values[row]
