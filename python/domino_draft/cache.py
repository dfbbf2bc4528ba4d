"""Static key/value rows of different lengths, which texts join and leave."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

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

    layer_lengths: of layers 0, 1, ..., where one holds fewer positions than max_length. Such a
    layer is a ring: position p lies at p % length, and the last `length` positions are held. Its
    roll-back is free as long as the ring is longer than its window by what is written and taken
    back; a prompt's tokens go in by `extend`, which writes none that is not kept.

    All calls are about the rows in focus: neighbours, at first all. The tensors are made once, for
    all rows: at the first `update`, or by `allocate`, all layers in one, for the fused layers.
    """

    def __init__(
        self,
        rows: int,
        max_length: int,
        device: torch.device | str,
        layer_lengths: Sequence[int] = (),
    ):
        self.max_length, self._layer_lengths = max_length, tuple(layer_lengths)
        self.all_lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self._all_host_lengths = [0] * rows
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._stacks: list[Tensor] = []
        self._used = self._written = 0  # rows and positions that ever held anything
        self.focus(0, rows)

    def focus(self, first: int, count: int) -> None:
        """Make the calls that follow be about rows first .. first + count - 1."""
        self._at: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # what `_places` has made
        self._rows = slice(first, first + count)
        self.lengths = self.all_lengths[self._rows]
        self.host_lengths = self._all_host_lengths[self._rows]
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # what `_part` has made

    def _part(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the rows in focus, cut when asked for: the fused layers never ask."""
        if layer not in self._layers:
            keys, values = self._buffers[layer]
            self._layers[layer] = keys[self._rows], values[self._rows]
        return self._layers[layer]

    def length_of(self, layer: int) -> int:
        """Positions that a layer holds: max_length, or fewer in a ring."""
        return self._layer_lengths[layer] if layer < len(self._layer_lengths) else self.max_length

    @property
    def rings(self) -> list[bool]:
        """Which of layers 0, 1, ... are rings; others are not."""
        return [length < self.max_length for length in self._layer_lengths]

    def allocate(self, layers: int, kv_heads: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
        """Make all layers at once: one tensor [n, 2, rows, kv_heads, length, D] for each run of n
        layers of the same length, in their order.

        For the fused layers, which read a row up to its length and no further: what has left a row
        need not become zero.
        """
        rows, device = len(self._all_host_lengths), self.all_lengths.device
        runs = [(n, len([*run])) for n, run in groupby(map(self.length_of, range(layers)))]
        self._stacks = [
            torch.zeros(count, 2, rows, kv_heads, length, dim, dtype=dtype, device=device)
            for length, count in runs
        ]
        pairs = (pair for stack in self._stacks for pair in stack)
        self._buffers = {n: (pair[0], pair[1]) for n, pair in enumerate(pairs)}
        self.focus(self._rows.start, len(self.host_lengths))
        return self._stacks

    @property
    def uniform(self) -> bool:
        """Every row has the same length, so no mask is needed to tell them apart."""
        return min(self.host_lengths) == max(self.host_lengths)

    def positions(self, tokens: int) -> Tensor:
        """Absolute positions int64 [B, tokens] of the next tokens of every row."""
        return self.lengths[:, None] + torch.arange(tokens, device=self.lengths.device)

    def update(self, k: Tensor, v: Tensor, layer: int, *_, **__) -> tuple[Tensor, Tensor]:
        """Write T rows of one layer ([B, heads, T, D]); returns its keys and values so far.

        The result ends at the longest row's last new token: [B, heads, max(lengths) + T, D]. Of
        a ring that is full it is the whole, in the order of its places.
        """
        tokens, length = k.shape[2], self.length_of(layer)
        end = max(self.host_lengths) + tokens
        keys, values = self._reach(layer, k, v, end)
        if self.uniform and end <= length:
            keys[:, :, end - tokens : end] = k
            values[:, :, end - tokens : end] = v
        else:
            rows, at = self._places(tokens, length)
            keys[rows, :, at] = k.transpose(1, 2)
            values[rows, :, at] = v.transpose(1, 2)
        return keys[:, :, :end], values[:, :, :end]

    def extend(
        self,
        layers: Sequence[tuple[Tensor, Tensor]],
        counts: Tensor,
        host_counts: Sequence[int],
    ) -> None:
        """`update` of layers 0, 1, ... and `advance`: row b keeps its first counts[b] tokens.

        T may exceed a ring, into which only what is kept is written, and of that the last.
        """
        tokens = max(host_counts)
        for layer, (k, v) in enumerate(layers):
            length = self.length_of(layer)
            if length == self.max_length:
                self.update(k, v, layer)
                continue
            keys, values = self._reach(layer, k, v, max(self.host_lengths) + tokens)
            # The columns that a row keeps last; one that keeps fewer writes its first repeatedly.
            last = torch.arange(-min(tokens, length), 0, device=counts.device)
            column = (counts[:, None] + last).clamp(min=0)
            at = (self.lengths[:, None] + column) % length
            rows = torch.arange(len(host_counts), device=counts.device)[:, None]
            keys[rows, :, at] = k[rows, :, column]
            values[rows, :, at] = v[rows, :, column]
        self.advance(counts, host_counts)

    def _reach(self, layer: int, k: Tensor, v: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """A layer's tensors, made if they are not there, for a forward up to position `end`."""
        if end > self.max_length:
            raise ValueError(f"RowCache: tokens: got {end} in a row, expected <= {self.max_length}")
        if layer not in self._buffers:
            # Zeros, not empty: a masked value still meets its weight 0, and 0 * NaN is NaN.
            rows, length = len(self._all_host_lengths), self.length_of(layer)
            self._buffers[layer] = tuple(
                x.new_zeros(rows, x.shape[1], length, x.shape[3]) for x in (k, v)
            )
        self._used = max(self._used, self._rows.stop)
        self._written = max(self._written, end)
        return self._part(layer)

    def _places(self, tokens: int, length: int) -> tuple[Tensor, Tensor]:
        """Row and place of every new token, made once for all layers of a forward."""
        if (tokens, length) not in self._at:
            rows = torch.arange(len(self.host_lengths), device=self.lengths.device)
            at = self.positions(tokens)
            self._at[tokens, length] = rows[:, None], at % length
        return self._at[tokens, length]

    def advance(self, counts: Tensor, host_counts: Sequence[int]) -> None:
        """Keep the first counts[b] of the tokens written last; the two arguments agree."""
        self._at = {}
        self.lengths += counts
        self.host_lengths = [n + c for n, c in zip(self.host_lengths, host_counts)]
        self._all_host_lengths[self._rows] = self.host_lengths

    def tensors(self) -> list[Tensor]:
        """Keys and values of all layers, each [B, heads, length, D], of the rows in focus."""
        return [x for layer in self._buffers for x in self._part(layer)]

    def rewind(self, host_lengths: Sequence[int]) -> None:
        """Go back to these lengths of the rows in focus."""
        self._at = {}
        self.lengths.copy_(torch.tensor(host_lengths))
        self.host_lengths = list(host_lengths)
        self._all_host_lengths[self._rows] = self.host_lengths

    def select(self, rows: Sequence[int], reach: int | None = None) -> None:
        """Keep only these of all rows, as rows 0, 1, ..., which then are in focus.

        Only rows that change place are copied, up to `reach` positions (None: all). The rest is
        empty afterwards, and zero where `update` reads it: a masked value still meets its weight 0,
        so a NaN in it would reach the next text of its place. Rows made by `allocate` move one
        after the other, without memory of their own: none may be read once its place is written.
        """
        kept = len(rows)
        moved = [(to, row) for to, row in enumerate(rows) if to != row]
        if moved:
            to, source = torch.tensor(moved, device=self.all_lengths.device).unbind(1)
            self.all_lengths[to] = self.all_lengths[source]
        for stack in self._stacks:
            held = stack[:, :, :, :, :reach]
            for place, row in moved:  # each by itself: indexing would hold a copy of all of them
                held[:, :, place].copy_(held[:, :, row])
        if not self._stacks:
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


def row_mask(
    cache: RowCache,
    tokens: int,
    *,
    causal: bool,
    window: int | None = None,
    length: int | None = None,
) -> Tensor:
    """bool [B, 1, tokens, keys]: which of the keys that `update` returns a new token may see.

    Token t of row b stands at lengths[b] + t. causal: it sees keys up to itself; otherwise all
    tokens of its forward. window: and only the last `window` of those, itself included. length:
    of the layers that it is for, where they are rings.
    """
    at, end = cache.positions(tokens), max(cache.host_lengths) + tokens
    length = cache.max_length if length is None else length
    keys = torch.arange(min(end, length), device=at.device)
    last = at if causal else at[:, -1:].expand_as(at)
    mask = keys <= last[..., None]
    if end > length:  # the position that a place holds, below 0 where it holds none yet
        keys = held_positions(at[:, -1:], length)[:, None]
        mask = (keys >= 0) & (keys <= last[..., None])
    if window is not None:
        mask &= keys > at[..., None] - window
    return mask[:, None]


def held_positions(last: Tensor, length: int) -> Tensor:
    """int64 [B, length]: what a ring whose newest positions are last [B, 1] holds at each place,
    below 0: nothing."""
    return last - (last - torch.arange(length, device=last.device)) % length
