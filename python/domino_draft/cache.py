"""Static key/value rows of different lengths, which texts join and leave."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class RowCache:
    """Keys and values of all layers, [rows, heads, max_length, D]; row b holds `lengths[b]` tokens.

    A forward of T tokens writes them at lengths[b] .. lengths[b] + T - 1 and reads everything up
    to the longest row's end; `advance` then says how many of them stay. What is not kept is
    overwritten by the next forward, so a roll-back costs nothing. It serves the drafter's context,
    and the target: `transformers` models take it as their cache (`update` is what their attention
    calls; both the 5.17 and the 5.24 calling convention fit). `row_mask` hides what lies past a
    row's end. lengths is int64 on the device; host_lengths is its copy on the host.

    All calls are about the rows in focus: neighbours, at first all. The tensors are made once, for
    all rows: at the first `update`, or by `allocate`, all layers in one, for the fused layers.
    """

    def __init__(self, rows: int, max_length: int, device: torch.device | str):
        self.max_length = max_length
        self.all_lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self._all_host_lengths = [0] * rows
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._whole: Tensor | None = None
        self._used = self._written = 0  # rows and positions that ever held anything
        self.focus(0, rows)

    def focus(self, first: int, count: int) -> None:
        """Make the calls that follow be about rows first .. first + count - 1."""
        self._at: tuple[Tensor, Tensor] | None = None  # where ragged rows write: (row, position)
        self._rows = slice(first, first + count)
        self.lengths = self.all_lengths[self._rows]
        self.host_lengths = self._all_host_lengths[self._rows]
        self._layers = {n: self._part(pair) for n, pair in self._buffers.items()}

    def _part(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return pair[0][self._rows], pair[1][self._rows]

    def allocate(self, layers: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Tensor:
        """Make all layers at once: [layers, 2, rows, kv_heads, max_length, D].

        For the fused layers, which read a row up to its length and no further: what has left a row
        need not become zero.
        """
        rows = len(self._all_host_lengths)
        shape = layers, 2, rows, kv_heads, self.max_length, dim
        self._whole = torch.zeros(shape, dtype=dtype, device=self.all_lengths.device)
        self._buffers = {n: (pair[0], pair[1]) for n, pair in enumerate(self._whole)}
        self.focus(self._rows.start, len(self.host_lengths))
        return self._whole

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
        if layer not in self._buffers:
            # Zeros, not empty: a masked value still meets its weight 0, and 0 * NaN is NaN.
            self._buffers[layer] = tuple(
                x.new_zeros(len(self._all_host_lengths), x.shape[1], self.max_length, x.shape[3])
                for x in (k, v)
            )
            self._layers[layer] = self._part(self._buffers[layer])
        keys, values = self._layers[layer]
        if self.uniform:
            keys[:, :, end - tokens : end] = k
            values[:, :, end - tokens : end] = v
        else:
            rows, at = self._write_index(tokens)
            keys[rows, :, at] = k.transpose(1, 2)
            values[rows, :, at] = v.transpose(1, 2)
        self._used = max(self._used, self._rows.stop)
        self._written = max(self._written, end)
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
        self.lengths += counts
        self.host_lengths = [n + c for n, c in zip(self.host_lengths, host_counts)]
        self._all_host_lengths[self._rows] = self.host_lengths

    def tensors(self) -> list[Tensor]:
        """Keys and values of all layers, each [B, heads, max_length, D], of the rows in focus."""
        return [x for pair in self._layers.values() for x in pair]

    def rewind(self, host_lengths: Sequence[int]) -> None:
        """Go back to these lengths of the rows in focus."""
        self._at = None
        self.lengths.copy_(torch.tensor(host_lengths))
        self.host_lengths = list(host_lengths)
        self._all_host_lengths[self._rows] = self.host_lengths

    def select(self, rows: Sequence[int], reach: int | None = None) -> None:
        """Keep only these of all rows, as rows 0, 1, ..., which then are in focus.

        Only rows that change place are copied, up to `reach` positions (None: all). The rest is
        empty afterwards, and zero where `update` reads it: a masked value still meets its weight 0,
        so a NaN in it would reach the next text of its place.
        """
        kept = len(rows)
        moved = [(to, row) for to, row in enumerate(rows) if to != row]
        if moved:
            to, source = torch.tensor(moved, device=self.all_lengths.device).unbind(1)
            self.all_lengths[to] = self.all_lengths[source]
        if self._whole is not None:
            held = self._whole[:, :, :, :, :reach]
            if moved:
                held[:, :, to] = held[:, :, source]
        else:
            for pair in self._buffers.values():
                for x in pair:
                    x = x[:, :, : self._written]
                    if moved:
                        x[to] = x[source]
                    x[kept : self._used].zero_()
        self.all_lengths[kept:].zero_()
        empty = [0] * (len(self._all_host_lengths) - kept)
        self._all_host_lengths = [self._all_host_lengths[row] for row in rows] + empty
        self._used = kept
        self.focus(0, kept)

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
