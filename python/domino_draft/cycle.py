"""A decoding cycle whose state lives on the device: what `Engine` captures in CUDA graphs.

Draft (block embedding, backbone, LM head, `draft_chain`), verify (target forward, `verify_chain`),
commit (drafter context, anchors, lengths, a line of tokens for the host). It reads nothing back:
rows that are done go on, inside their cache, until the host has seen it. One graph a padded number
of rows, number of drafts and rule; all share a memory pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from domino_kernels import ChainPlan, DraftResult, draft_chain_out, verify_chain

from . import fused_ops as ops
from .fused import FusedDrafter, FusedTarget

if TYPE_CHECKING:
    from domino_kernels.ops.verify import VerifyResult

    from .cache import RowCache
    from .config import DominoConfig
    from .drafter import DominoSession
    from .target import Target


def _nvtx(device: torch.device, name: str):
    return torch.cuda.nvtx.range(name) if device.type == "cuda" else nullcontext()


# Drafts are chosen among this many ids, those of the largest base logits: a cheaper chain, which
# finds the winner of the whole vocabulary in 99.8% of slots (bench/README.md). Fixed, so that what
# is drafted does not depend on the batch.
_POOL = 1024
_TABLE_BYTES = 1 << 30  # an input table of the GRU up to this is worth its memory
_BORROW = 32  # cycles that a size goes without a graph of its own while a larger one is there
_TIMED = 4  # replays that a new graph is timed by


def table_bytes(config: DominoConfig, dtype: torch.dtype) -> int:
    """Bytes of the GRU's input table that a captured cycle makes; 0 where it goes without."""
    size = 3 * config.vocab_size * config.gru_hidden_dim * dtype.itemsize
    fits = size <= _TABLE_BYTES and config.gru_hidden_dim % 16 == 0 and dtype != torch.float32
    return size if fits else 0


def padded_rows(rows: int) -> int:
    """The batch size that a graph is captured for: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ..."""
    power = 1 << (rows - 1).bit_length()
    return 3 * power // 4 if power >= 4 and 3 * power // 4 >= rows else power


class Pending:
    """A cycle that has been queued: `lines` waits for it."""

    def __init__(self, host: Tensor, event: torch.cuda.Event | None):
        self._host, self._event = host, event

    def lines(self) -> list[list[int]]:
        """Of each row: accepted drafts, status, tokens."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


class Cycle:
    """The device state of `rows` rows and the graphs over it.

    Raises:
        CannotFuse: the target or the drafter is not of the form that `fused.py` knows.
    """

    def __init__(
        self,
        target: Target,
        session: DominoSession | None,
        cache: RowCache,
        rows: int,
        num_drafts: int,
        fp8_draft_head: bool = False,
    ):
        self.target, self.cache, self.session = FusedTarget(target), cache, session
        decoder, device = self.target.decoder, target.device
        self.kv = cache.allocate(len(decoder.layers), decoder.kv_heads, decoder.dim, target.dtype)
        self.rope = decoder.rope(cache.max_length)
        self.taps: tuple[int, ...] = ()
        if session is not None:
            self.drafter, self.config = FusedDrafter(session.drafter), session.config
            self.taps = tuple(session.drafter.feature_layers)
            decoder = self.drafter.decoder
            self.draft_kv = session.cache.allocate(
                len(decoder.layers), decoder.kv_heads, decoder.dim, session.drafter.dtype
            )
            self.draft_rope = decoder.rope(session.cache.max_length)
            self.head = session.head
            if self.head is not None and device.type == "cuda":
                if table_bytes(self.config, self.head.dtype):
                    self.head = self.head.with_table()
        head = self.target.head
        self.draft_head = ops.Fp8Weight.of(head) if fp8_draft_head else None
        self.rows, self.num_drafts, self.device = rows, num_drafts, device
        self.workspace = ops.Workspace(device)
        self.anchors = torch.zeros(rows, dtype=torch.int64, device=device)
        self.limits = torch.zeros_like(self.anchors)
        self.seed = torch.zeros_like(self.anchors)
        self.temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self._graphs: dict[tuple[int, int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._borrowed: dict[int, int] = {}
        self._costs: dict[tuple[int, int, bool], float] = {}
        self._chains: dict[tuple[int, int], ChainPlan] = {}
        self._pool = None
        self._hosts: list[Tensor] = []
        self._turn = 0

    def put(
        self,
        first: int,
        anchors: Sequence[int],
        temperatures: Sequence[float],
        seeds: Sequence[int],
    ) -> None:
        """Rows `first` and up start at these anchors; their prompts are in the caches."""
        rows = slice(first, first + len(anchors))
        self.anchors[rows] = torch.tensor(anchors, device=self.device)
        # A block of a row that stands there still ends inside the cache.
        self.limits[rows] = self.cache.max_length - (self.num_drafts + 1)
        self.temperature[rows] = torch.tensor(temperatures, device=self.device)
        self.seed[rows] = torch.tensor(seeds, device=self.device)

    def select(self, rows: Sequence[int], reach: int) -> None:
        """Keep only these rows, as rows 0, 1, ...; none holds anything from `reach` on."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.device)
        for state in (self.anchors, self.seed, self.temperature):
            state[: len(rows)] = state[index]
        self.limits[len(rows) :] = 0
        self.cache.select(rows, reach)
        if self.session is not None:
            self.session.cache.select(rows, reach)

    def prefill(self, ids: Tensor, first: int, start: int, keep: Tensor) -> Tensor:
        """A piece of the prompts of rows `first` and up, which all stand at `start`.

        ids int64 [n, T], right-padded; caches are written, lengths are not advanced. Returns the
        logits [n, len(keep), V] of the columns `keep`.
        """
        with _nvtx(self.device, f"domino prefill B={ids.shape[0]} T={ids.shape[1]}"):
            return self._prefill(ids, first, start, keep)

    def _prefill(self, ids: Tensor, first: int, start: int, keep: Tensor) -> Tensor:
        count, tokens = ids.shape
        rows = slice(first, first + count)
        lengths = self.cache.all_lengths[rows]
        x, features = self.target.decoder.prefill(
            self.target.embedding[ids.flatten()], start, lengths, self.kv[:, :, rows], self.rope,
            self.workspace, taps=self.taps,
        )  # fmt: skip
        if self.session is not None:
            self.drafter.store_context(
                features, lengths, self.draft_kv[:, :, rows], self.draft_rope, self.workspace
            )
        ends = x.view(count, tokens, -1)[:, keep]
        return self.target.logits(ends.flatten(0, 1)).view(count, len(keep), -1)

    # ---- the cycle ----

    def run(self, rows: int, drafts: int, greedy: bool) -> Tensor:
        """One cycle of rows 0 .. rows - 1; returns its line, [rows, drafts + 3] on the device."""
        lengths = self.cache.all_lengths[:rows]
        anchors = self.anchors[:rows]
        proposed = self._draft(anchors, lengths, drafts) if drafts else anchors.new_empty(rows, 0)
        x = ops.embed(anchors, self.target.embedding, drafts + 1, drafts=proposed)
        x, features = self.target.decoder.run(
            x, lengths, self.kv, self.rope, self.workspace, taps=self.taps
        )
        logits = self.target.logits(x).view(rows, drafts + 1, -1)
        result = self._verify(logits, proposed, lengths, greedy)
        if self.session is not None:
            self.drafter.store_context(
                features, lengths, self.draft_kv, self.draft_rope, self.workspace
            )
        line = torch.empty(rows, drafts + 3, dtype=torch.int64, device=self.device)
        ops.commit(result, anchors, lengths, self.limits[:rows], line)
        return line

    def _verify(
        self, logits: Tensor, proposed: Tensor, lengths: Tensor, greedy: bool
    ) -> VerifyResult:
        if greedy:
            return verify_chain(logits, proposed)
        rows = slice(0, len(lengths))
        return verify_chain(
            logits,
            proposed,
            rule="token",
            temperature=self.temperature[rows],
            seed=self.seed[rows],
            block_start=lengths,
        )

    def _draft(self, anchors: Tensor, lengths: Tensor, drafts: int) -> Tensor:
        config, rows = self.config, anchors.shape[0]
        slots = config.slots_for(drafts)
        x = ops.embed(anchors, self.target.embedding, slots, mask_id=config.mask_token_id)
        x = x.to(self.drafter.fc.dtype)
        x, _ = self.drafter.decoder.run(x, lengths, self.draft_kv, self.draft_rope, self.workspace)
        hidden = self.drafter.hidden(x)
        base = hidden.to(self.target.head.dtype)
        if self.draft_head is not None:
            base = self.draft_head.product(base)
        else:
            base = F.linear(base, self.target.head)
        hidden, base = hidden.view(rows, slots, -1), base.view(rows, slots, -1)
        head = self.head
        if head is None:
            first = 0 if config.shift_label else 1
            return base[:, first : first + drafts].argmax(-1)
        if base.dtype != head.w2.dtype:
            base = base.float()
        return draft_chain_out(
            base,
            hidden,
            anchors,
            head,
            shift_label=config.shift_label,
            pure_draft_prefix_len=config.pure_draft_prefix_len,
            exact=False,
            pool_size=_POOL,
            out=DraftResult.empty(head, rows, num_drafts=drafts, pool_size=_POOL),
            plan=self._chain_plan(rows, drafts),
        ).tokens

    def _chain_plan(self, rows: int, drafts: int) -> ChainPlan:
        """Made before a capture, by the run that precedes it: its contents may outlive a replay."""
        key = rows, drafts
        if key not in self._chains:
            self._chains[key] = ChainPlan(self.head, rows, num_drafts=drafts, pool_size=_POOL)
        return self._chains[key]

    # ---- graphs ----

    def queue(self, rows: int, drafts: int, greedy: bool) -> Pending:
        """Queue a cycle of the first `rows` rows, captured on first use."""
        size = self._size(rows, [drafts], greedy)
        if self.device.type != "cuda":
            return Pending(self.run(size, drafts, greedy)[:rows], None)
        key = size, drafts, greedy
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key)
        graph, line = self._graphs[key]
        with _nvtx(self.device, f"domino cycle B={size} K={drafts}"):
            graph.replay()
            host = self._host(line)
            host.copy_(line, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return Pending(host[:rows], event)

    def costs(self, rows: int, choices: Iterable[int], greedy: bool) -> dict[int, float]:
        """Milliseconds of a cycle for each number of drafts; captures what is not captured yet."""
        choices = list(choices)
        size = self._size(rows, choices, greedy)
        self.warmup([size], choices, [greedy])
        return {k: self._costs[size, k, greedy] for k in choices}

    def _size(self, rows: int, choices: Sequence[int], greedy: bool) -> int:
        """The number of rows to run for these: padded, or for a while of a larger graph that is
        there, so that a batch that runs empty does not stop for a capture at each size."""
        size = min(padded_rows(rows), self.rows)
        there = [s for s, k, g in self._graphs if k == choices[0] and g == greedy and s >= size]
        there = [s for s in there if all((s, k, greedy) in self._graphs for k in choices)]
        if not there or min(there) == size:
            return size
        self._borrowed[size] = self._borrowed.get(size, 0) + 1
        return min(there) if self._borrowed[size] <= _BORROW else size

    def warmup(self, sizes: Iterable[int], drafts: Iterable[int], rules: Iterable[bool]) -> None:
        """Capture what `queue` would for these numbers of rows and of drafts."""
        rules, drafts = list(rules), sorted(drafts, reverse=True)
        # The largest first: smaller ones find their memory in the pool.
        for size in sorted({min(padded_rows(n), self.rows) for n in sizes}, reverse=True):
            for key in ((size, count, greedy) for count in drafts for greedy in rules):
                if self.device.type != "cuda":
                    self._costs[key] = 1.0 + key[1] / 16  # nothing to measure, nothing to gain
                elif key not in self._graphs:
                    self._graphs[key] = self._capture(*key)

    def _host(self, line: Tensor) -> Tensor:
        """A pinned place for a line; a place is free again when four cycles have come after it."""
        if not self._hosts:
            width = self.num_drafts + 3
            self._hosts = [
                torch.empty(self.rows * width, dtype=torch.int64, pin_memory=True) for _ in range(4)
            ]
        self._turn = (self._turn + 1) % len(self._hosts)
        return self._hosts[self._turn][: line.numel()].view(line.shape)

    def _capture(self, rows: int, drafts: int, greedy: bool):
        state = (self.anchors, self.cache.all_lengths)
        kept = [t.clone() for t in state]

        def restore():
            for t, value in zip(state, kept):
                t.copy_(value)

        current = torch.cuda.current_stream(self.device)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self.run(rows, drafts, greedy)  # kernels load, and libraries make their plans
            restore()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            line = self.run(rows, drafts, greedy)
        self._pool = self._pool or graph.pool()

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        for _ in range(_TIMED):
            graph.replay()
        end.record()
        restore()
        end.synchronize()
        self._costs[rows, drafts, greedy] = start.elapsed_time(end) / _TIMED
        return graph, line
