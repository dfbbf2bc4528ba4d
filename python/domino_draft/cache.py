"""A static key/value cache in which every row of the batch has a length of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class RowCache:
    """Keys and values of every layer, [B, heads, max_length, D]; row b holds `lengths[b]` tokens.

    A forward of T tokens writes them at lengths[b] .. lengths[b] + T - 1 and reads everything up
    to the longest row's end; `advance` then says how many of them stay. What is not kept is
    overwritten by the next forward, so a roll-back costs nothing. It serves the drafter's context,
    and the target: `transformers` models take it as their cache (`update` is what their attention
    calls; both the 5.17 and the 5.24 calling convention fit). `row_mask` hides what lies past a
    row's end. lengths is int64 [B] on the device; host_lengths is its copy on the host.
    """

    def __init__(self, batch: int, max_length: int, device: torch.device | str):
        self.max_length = max_length
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.host_lengths = [0] * batch
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._at: tuple[Tensor, Tensor] | None = None  # where ragged rows write: (row, position)

    @property
    def uniform(self) -> bool:
        """Every row has the same length, so no mask is needed to tell them apart."""
        return min(self.host_lengths) == max(self.host_lengths)

    def positions(self, tokens: int) -> Tensor:
        """Absolute positions int64 [B, tokens] of the next tokens of every row."""
        return self.lengths[:, None] + torch.arange(tokens, device=self.lengths.device)

    def update(self, k: Tensor, v: Tensor, layer: int, *_, **__) -> tuple[Tensor, Tensor]:
        """Write T rows of one layer ([B, heads, T, D]); returns its keys and values so far.

        The result ends at the longest row's last new token: [B, heads, max(lengths) + T, D].
        """
        tokens = k.shape[2]
        end = max(self.host_lengths) + tokens
        if end > self.max_length:
            raise ValueError(f"RowCache: tokens: got {end} in a row, expected <= {self.max_length}")
        if layer not in self._layers:
            # Zeros, not empty: a masked value still meets its weight 0, and 0 * NaN is NaN.
            self._layers[layer] = tuple(
                x.new_zeros(*x.shape[:2], self.max_length, x.shape[3]) for x in (k, v)
            )
        keys, values = self._layers[layer]
        if self.uniform:
            keys[:, :, end - tokens : end] = k
            values[:, :, end - tokens : end] = v
        else:
            rows, at = self._write_index(tokens)
            keys[rows, :, at] = k.transpose(1, 2)
            values[rows, :, at] = v.transpose(1, 2)
        return keys[:, :, :end], values[:, :, :end]

    def _write_index(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Row and position of every new token, made once for all layers of a forward."""
        if self._at is None or self._at[1].shape[1] != tokens:
            rows = torch.arange(len(self.host_lengths), device=self.lengths.device)
            self._at = rows[:, None], self.positions(tokens)
        return self._at

    def advance(self, counts: Tensor, host_counts: Sequence[int]) -> None:
        """Keep the first counts[b] of the tokens written last; the two arguments agree."""
        self._at = None
        self.lengths = self.lengths + counts
        self.host_lengths = [n + c for n, c in zip(self.host_lengths, host_counts)]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch, in this order."""
        self._at = None
        index = torch.tensor(rows, device=self.lengths.device)
        self.lengths = self.lengths[index]
        self.host_lengths = [self.host_lengths[row] for row in rows]
        self._layers = {n: (k[index], v[index]) for n, (k, v) in self._layers.items()}

    # What transformers asks of a cache when it builds the mask itself (uniform rows only).

    def get_seq_length(self, layer: int = 0) -> int:
        return max(self.host_lengths)

    def get_query_offset(self, layer: int = 0) -> int:
        return max(self.host_lengths)

    def get_mask_sizes(self, query_length: int, layer: int = 0) -> tuple[int, int]:
        return max(self.host_lengths) + query_length, 0


def row_mask(cache: RowCache, tokens: int, *, causal: bool, window: int | None = None) -> Tensor:
    """bool [B, 1, tokens, keys]: which of the keys that `update` returns a new token may see.

    Token t of row b stands at lengths[b] + t. causal: it sees keys up to itself; otherwise all
    tokens of its forward. window: and only the last `window` of those, itself included.
    """
    at = cache.positions(tokens)
    keys = torch.arange(max(cache.host_lengths) + tokens, device=at.device)
    last = at if causal else at[:, -1:].expand_as(at)
    mask = keys <= last[..., None]
    if window is not None:
        mask &= keys > at[..., None] - window
    return mask[:, None]
