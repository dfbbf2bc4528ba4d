"""A decoding cycle whose state lives on the device: what `Engine` captures in CUDA graphs.

Draft (block embedding, backbone, LM head, `draft_chain`), verify (target forward, `verify_chain`),
commit (drafter context, anchors, lengths, a line of tokens for the host). It reads nothing back:
rows that are done go on, inside their cache, until the host has seen it. One graph a padded number
of rows, number of drafts and of verified tokens, and rule; prompts have graphs of their own; all
share a memory pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from domino_kernels import ChainPlan, DraftResult, draft_chain_out, verify_chain

from . import cache_ops, row_ops
from .config import TAKEN_BACK
from .fused import FusedDrafter, FusedTarget
from .requests import SAMPLING, Law, Sampling, law_of, on_device
from .vocabulary import DraftVocabulary

if TYPE_CHECKING:
    from domino_kernels.ops.verify import VerifyResult

    from .cache import RowCache
    from .config import DominoConfig
    from .drafter import DominoDrafter, DominoSession
    from .edits import Edits
    from .policy import Choice
    from .target import Target


def _nvtx(device: torch.device, name: str):
    return torch.cuda.nvtx.range(name) if device.type == "cuda" else nullcontext()


# Drafts are chosen among this many ids, those of the largest base logits: a cheaper chain, which
# finds the winner of the whole vocabulary in 99.8% of slots (bench/README.md). Fixed, so that what
# is drafted does not depend on the batch.
_POOL = 1024
_TABLE_BYTES = 1 << 30  # an input table of the GRU up to this is worth its memory
LATE_PLACES = 16  # cycles without drafts whose hidden states become the drafter's context together
_SHORT = 4096  # tokens of prompts that are padded and captured together
_TIMED = TAKEN_BACK - 1  # replays that a new graph is timed by, after a first


def table_bytes(config: DominoConfig, dtype: torch.dtype) -> int:
    """Bytes of the GRU's input table that a captured cycle makes; 0 where it goes without."""
    size = 3 * config.vocab_size * config.gru_hidden_dim * dtype.itemsize
    fits = size <= _TABLE_BYTES and config.gru_hidden_dim % 16 == 0 and dtype != torch.float32
    return size if fits else 0


def tells_chances(drafter: DominoDrafter) -> bool:
    """Whether a draft can say how likely it is: any base's softmax can, and of heads on a GPU those
    that the block form of `draft_chain` takes."""
    if drafter.head is None or drafter.device.type != "cuda":
        return True
    units, rank = drafter.config.gru_hidden_dim, drafter.config.emb_dim
    fits = units % 16 == 0 and units <= 1024 and rank % 16 == 0 and rank <= 256
    return fits and drafter.dtype != torch.float32


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

    block: tokens that a cycle writes into a row; None: the anchor and its drafts. draft_vocab: ids
    to draft from, from `draft_ids`; None: all.

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
        *,
        block: int | None = None,
        draft_vocab: Tensor | None = None,
    ):
        self.target, self.cache, self.session = FusedTarget(target), cache, session
        decoder, device = self.target.decoder, target.device
        (self.kv,) = cache.allocate(
            len(decoder.layers), decoder.kv_heads, decoder.dim, target.dtype
        )
        self.rope = decoder.rope(cache.max_length)
        self.taps: tuple[int, ...] = ()
        if session is not None:
            self.config = session.config
            self.drafter = FusedDrafter(session.drafter, session.cache.rings)
            self.taps = tuple(session.drafter.feature_layers)
            decoder = self.drafter.decoder
            self.draft_kv = session.cache.allocate(
                len(decoder.layers), decoder.kv_heads, decoder.dim, session.drafter.dtype
            )
            self.draft_rope = decoder.rope(session.cache.max_length)
            width = len(self.taps) * target.hidden_size
            self._late = torch.empty(rows, LATE_PLACES, width, dtype=target.dtype, device=device)
            self.head = session.head
            if self.head is not None and device.type == "cuda":
                if table_bytes(self.config, self.head.dtype):
                    self.head = self.head.with_table()
        head, self.vocabulary = self.target.head, None
        if draft_vocab is not None and session is not None:
            self.vocabulary = DraftVocabulary(draft_vocab, head, self.head, rows)
            head, self.head = self.vocabulary.lm_head, self.vocabulary.weights
        self.draft_head = row_ops.Fp8Weight.of(head) if fp8_draft_head else head
        self.rows, self.num_drafts, self.device = rows, num_drafts, device
        self.block = num_drafts + 1 if block is None else block
        self.workspace = row_ops.Workspace(device)
        self.anchors = torch.zeros(rows, dtype=torch.int64, device=device)
        self.limits = torch.zeros_like(self.anchors)
        self.seed = torch.zeros_like(self.anchors)
        self.temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.int32, device=device)
        self.top_p = torch.ones_like(self.temperature)
        self.min_p = torch.zeros_like(self.temperature)
        self._filtered = False  # a request with filters has been there
        self.edits: Edits | None = None  # the engine's, once a request has any
        self._zero = torch.zeros_like(self.temperature)
        self._graphs: dict[tuple[int, Choice, Law], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._late_turns = torch.zeros_like(self.anchors)
        self._late_count = self._late_rows = 0
        self._late_graphs: dict[int, torch.cuda.CUDAGraph | None] = {}
        self._prompt_graphs: dict[tuple[int, int], tuple | None] = {}
        self._context_of_prompts: Callable[[], None] | None = None
        self._lost: dict[int, float] = {}
        self._capture_ms = float("inf")
        self._costs: dict[tuple[int, Choice, Law], float] = {}
        self._chains: dict[tuple[int, int], ChainPlan] = {}
        self._pool = None
        pinned = device.type == "cuda"
        # Places for lines; one is free again when four more have been read.
        self._hosts = [
            torch.empty(rows * (num_drafts + 3), dtype=torch.int64, pin_memory=pinned)
            for _ in range(4)
        ]
        self._turn = 0

    def put(
        self, first: int, anchors: Tensor, sampling: Sequence[Sampling], seeds: Sequence[int]
    ) -> None:
        """Rows `first` and up start at these anchors; their prompts are in the caches."""
        rows = slice(first, first + len(anchors))
        self.anchors[rows] = anchors
        self._filtered |= law_of(sampling) >= Law.FILTERED
        for name in self._settings(self._filtered):
            values = [getattr(s, name) for s in sampling]
            getattr(self, name)[rows] = on_device(values, SAMPLING[name], self.device)
        self.seed[rows] = on_device(seeds, torch.int64, self.device)
        # A block of a row that stands there still ends inside the cache.
        self.limits[rows] = self.cache.max_length - self.block

    def select(self, rows: Sequence[int], reach: int) -> None:
        """Keep only these rows, as rows 0, 1, ...; none holds anything from `reach` on."""
        self.catch_up()
        index = torch.tensor(rows, dtype=torch.int64, device=self.device)
        settings = self._settings(self._filtered).values()
        for state in (self.anchors, self.seed, *settings):
            state[: len(rows)] = state[index]
        self.limits[len(rows) :] = 0
        self.cache.select(rows, reach)
        if self.session is not None:
            self.session.cache.select(rows, reach)

    # ---- prompts ----

    def prefill(self, ids: Tensor, first: int, start: int, counts: Tensor, keep: Tensor) -> Tensor:
        """A piece of the prompts of rows `first` and up, which all stand at `start`.

        ids int64 [n, T], of which the first counts[n] are a row's; caches are written, lengths are
        not advanced. Returns the logits [n, len(keep), V] of the columns `keep`.
        """
        self.catch_up()
        self._context_of_prompts = None
        with _nvtx(self.device, f"domino prefill B={ids.shape[0]} T={ids.shape[1]}"):
            return self._prefill(ids, first, start, counts, keep)

    def _prefill(self, ids: Tensor, first: int, start: int, counts: Tensor, keep: Tensor) -> Tensor:
        count, tokens = ids.shape
        rows = slice(first, first + count)
        lengths = self.cache.all_lengths[rows]
        x, features = self.target.decoder.prefill(
            self.target.embedding[ids.flatten()], start, lengths, self.kv[:, :, rows], self.rope,
            self.workspace, taps=self.taps,
        )  # fmt: skip
        if self.session is not None:
            held = [stack[:, :, rows] for stack in self.draft_kv]
            self.drafter.store_context(
                features, lengths, held, self.draft_rope, self.workspace, counts=counts
            )
        ends = x.view(count, tokens, -1)[:, keep]
        return self.target.logits(ends.flatten(0, 1)).view(count, len(keep), -1)

    def prompts(self, prompts: Sequence[Sequence[int]], first: int) -> Tensor:
        """`prefill` of whole prompts: the logits [n, V] that follow each. The drafter's context of
        them is left to `store_prompts`, so that no first token waits for it.

        Padded to a power of two of rows and of tokens, and captured when a size comes back, where
        that is small enough for the launches to be what takes the time.
        """
        self.catch_up()
        self._context_of_prompts = None
        count, longest = len(prompts), max(map(len, prompts))
        tokens = min(max(16, 1 << (longest - 1).bit_length()), self.cache.max_length)
        size = 1 << (count - 1).bit_length(), tokens
        if size[0] * size[1] > _SHORT:
            size = count, longest
        pinned = self.device.type == "cuda"
        ids = torch.zeros(size[0], size[1] + 2, dtype=torch.int64, pin_memory=pinned)
        ids[:, -2] = -1  # of no row, ending anywhere
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
            ids[row, -2], ids[row, -1] = first + row, len(prompt) - 1
        with _nvtx(self.device, f"domino prompts B={size[0]} T={size[1]}"):
            if size[0] * size[1] > _SHORT or self.device.type != "cuda":
                return self._prompts(ids.to(self.device, non_blocking=True))[:count]
            if size not in self._prompt_graphs:
                self._prompt_graphs[size] = None
                return self._prompts(ids.to(self.device, non_blocking=True))[:count]
            if self._prompt_graphs[size] is None:
                held = ids.to(self.device, non_blocking=True)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._pool):
                    logits = self._prompts(held)
                self._pool = self._pool or graph.pool()
                if self.session is not None:
                    context = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(context, pool=self._pool):
                        self.store_prompts()
                    self._context_of_prompts = context.replay
                self._prompt_graphs[size] = graph, held, logits, self._context_of_prompts
            graph, held, logits, self._context_of_prompts = self._prompt_graphs[size]
            held.copy_(ids, non_blocking=True)
            graph.replay()
            return logits[:count]

    def _prompts(self, ids: Tensor) -> Tensor:
        """ids int64 [n, T + 2]: tokens, the caches' row (-1: none), the last token's column."""
        places, ends, ids = ids[:, -2].contiguous(), ids[:, -1], ids[:, :-2]
        lengths = torch.zeros_like(places)
        x, features = self.target.decoder.prefill(
            self.target.embedding[ids.flatten()], 0, lengths, self.kv, self.rope, self.workspace,
            taps=self.taps, places=places,
        )  # fmt: skip
        if self.session is not None:
            counts = ends + 1 if any(self.session.cache.rings) else None
            self._context_of_prompts = lambda: self.drafter.store_context(
                features, lengths, self.draft_kv, self.draft_rope, self.workspace, places=places,
                counts=counts,
            )  # fmt: skip
        rows = torch.arange(len(ids), device=self.device)
        return self.target.logits(x.view(*ids.shape, -1)[rows, ends])

    def store_prompts(self) -> None:
        """Make the drafter's context of the prompts that `prompts` ran last. Nothing else of this
        pool runs in between: features that a graph has left may lie where another's work would."""
        if self._context_of_prompts is not None:
            self._context_of_prompts()
            self._context_of_prompts = None

    # ---- the cycle ----

    def run(self, rows: int, choice: Choice, law: Law) -> Tensor:
        """One cycle of rows 0 .. rows - 1; returns its line, [rows, drafts + 3] on the device."""
        lengths = self.cache.all_lengths[:rows]
        anchors = self.anchors[:rows]
        proposed, tokens = anchors.new_empty(rows, 0), cache_ops.Rows(choice.drafts + 1)
        if choice.drafts:
            hidden = self._block(anchors, lengths, choice.drafts)
            base = self._draft_logits(hidden)
            proposed, log_probs = self._chain(hidden, base, anchors, choice, law)
            if choice.partial:
                starts = cache_ops.allot(log_probs, self.limits[:rows], rows * choice.tokens)
                tokens = cache_ops.Rows(choice.drafts + 1, starts)
        x, features = self._forward(anchors, proposed, lengths, tokens, rows * choice.tokens)
        result = self._verify(self.target.logits(x), proposed, lengths, tokens.starts, law)
        return self._commit(result, features, anchors, lengths, tokens)

    # Its stages.

    def _block(self, anchors: Tensor, lengths: Tensor, drafts: int) -> Tensor:
        """The drafter's hidden states [rows, slots, H] of anchors and masks."""
        slots = self.config.slots_for(drafts)
        x = cache_ops.embed(
            anchors, self.target.embedding, slots, mask_id=self.config.mask_token_id
        ).to(self.drafter.fc.dtype)
        x, _ = self.drafter.decoder.run(x, lengths, self.draft_kv, self.draft_rope, self.workspace)
        return self.drafter.hidden(x).view(anchors.shape[0], slots, -1)

    def _draft_logits(self, hidden: Tensor) -> Tensor:
        """Base logits [rows, slots, V] of the target's LM head, or its fp8 copy."""
        x = hidden.flatten(0, 1).to(self.target.head.dtype)
        return row_ops.lm_head(x, self.draft_head).view(*hidden.shape[:2], -1)

    def _chain(
        self, hidden: Tensor, base: Tensor, anchors: Tensor, choice: Choice, law: Law = Law.GREEDY
    ) -> tuple[Tensor, Tensor | None]:
        """Drafts int64 [rows, drafts]: the head's chain, or without a head the base's winners.
        And the logarithms of their probabilities, where not all of them are to be verified."""
        config, head, rows, drafts = self.config, self.head, anchors.shape[0], choice.drafts
        valid, pool_size, named = None, _POOL, lambda ids: ids
        bias = self.edits.logit_bias[:rows] if law is Law.EDITED else None
        if self.vocabulary is not None:
            bias = None if bias is None else self.vocabulary.columns(bias)
            anchors, valid = self.vocabulary.place(anchors), self.vocabulary.size
            pool_size, named = min(_POOL, valid), self.vocabulary.tokens
        if head is None:
            first = 0 if config.shift_label else 1
            base = base[:, first : first + drafts, :valid]
            if bias is not None:
                base = base + bias[:, None, :valid]
            best = base.argmax(-1)
            if not choice.partial:
                return named(best), None
            chosen = base.gather(2, best[..., None])[..., 0].float()
            return named(best), chosen - base.float().logsumexp(-1)
        if base.dtype != head.w2.dtype:
            base = base.float()
        noise = {}
        if choice.partial:  # the form that gives probabilities; at temperature 0 it draws argmaxes
            noise = dict(temperature=self._zero[:rows], seed=self.seed[:rows])
            noise["block_start"] = self.cache.all_lengths[:rows]
        result = draft_chain_out(
            base,
            hidden,
            anchors,
            head,
            shift_label=config.shift_label,
            pure_draft_prefix_len=config.pure_draft_prefix_len,
            exact=False,
            pool_size=pool_size,
            vocab_valid=valid,
            bias=bias,
            out=DraftResult.empty(
                head, rows, num_drafts=drafts, pool_size=pool_size, vocab_valid=valid,
                sampled=choice.partial,
            ),
            plan=self._chain_plan(rows, drafts, pool_size),
            **noise,
        )  # fmt: skip
        return named(result.tokens), result.log_probs

    def _chain_plan(self, rows: int, drafts: int, pool_size: int) -> ChainPlan:
        """Made before a capture, by the run that precedes it: its contents may outlive a replay."""
        key = rows, drafts
        if key not in self._chains:
            self._chains[key] = ChainPlan(self.head, rows, num_drafts=drafts, pool_size=pool_size)
        return self._chains[key]

    def _forward(
        self, anchors: Tensor, proposed: Tensor, lengths: Tensor, tokens: cache_ops.Rows, total: int
    ):
        """The target's layers over anchors and drafts: (before the final norm, features)."""
        x = cache_ops.embed(
            anchors, self.target.embedding, tokens.tokens, drafts=proposed, starts=tokens.starts,
            total=total,
        )  # fmt: skip
        return self.target.decoder.run(
            x, lengths, self.kv, self.rope, self.workspace, taps=self.taps, rows=tokens
        )

    def _verify(
        self,
        logits: Tensor,
        proposed: Tensor,
        lengths: Tensor,
        starts: Tensor | None,
        law: Law,
    ) -> VerifyResult:
        rows = len(lengths)
        given = dict(logprobs=False, cu_rows=starts)
        if starts is None:
            logits = logits.view(rows, -1, logits.shape[-1])
        if law is Law.GREEDY:
            return verify_chain(logits, proposed, **given)
        if law is Law.EDITED:
            given |= self.edits.arguments(slice(rows))
        result = verify_chain(
            logits,
            proposed,
            rule="token",
            seed=self.seed[:rows],
            block_start=lengths,
            **{n: values[:rows] for n, values in self._settings(law >= Law.FILTERED).items()},
            **given,
        )
        if law is Law.EDITED:
            self.edits.count(result.tokens)
        return result

    def _settings(self, filtered: bool) -> dict[str, Tensor]:
        names = SAMPLING if filtered else ("temperature",)
        return {name: getattr(self, name) for name in names}

    def _commit(
        self,
        result: VerifyResult,
        features: Tensor | None,
        anchors: Tensor,
        lengths: Tensor,
        tokens: cache_ops.Rows | None = None,
    ) -> Tensor:
        """What was kept becomes context, at once or, one token a row, later; returns the line for
        the host."""
        late = None
        if self.session is not None and result.tokens.shape[1] == 1:
            late = features, self._late, self._late_turns
        elif self.session is not None:
            self.drafter.store_context(
                features, lengths, self.draft_kv, self.draft_rope, self.workspace, tokens
            )
        rows, width = result.tokens.shape
        line = torch.empty(rows, width + 2, dtype=torch.int64, device=self.device)
        cache_ops.commit(result, anchors, lengths, self.limits[:rows], line, late)
        return line

    # ---- what cycles without drafts leave for later ----

    def catch_up(self) -> None:
        """Make the drafter's context of what cycles without drafts have kept: 16 tokens cost what
        one does, and a text on which drafting does not pay should not pay for it."""
        if not self._late_count:
            return
        rows = self._late_rows
        if self.device.type != "cuda" or rows not in self._late_graphs:
            self._catch_up(rows)
            self._late_graphs[rows] = None
        else:
            if self._late_graphs[rows] is None:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._pool):
                    self._catch_up(rows)
                self._pool = self._pool or graph.pool()
                self._late_graphs[rows] = graph
            self._late_graphs[rows].replay()
        self._late_count = 0  # not before: where memory was missing, it is done again

    def _warm_late(self, rows: int) -> None:
        """Capture `catch_up` of so many rows: its first run loads kernels, its second captures."""
        while self._late_graphs.get(rows) is None:
            self.catch_up()
            self._late_count, self._late_rows = 1, rows
            self.catch_up()

    def _catch_up(self, rows: int) -> None:
        # Places behind the last one that is held get rubbish, which later tokens write over.
        starts = (self.cache.all_lengths[:rows] - self._late_turns[:rows]).clamp(min=0)
        features = self._late[:rows].flatten(0, 1)
        self.drafter.store_context(features, starts, self.draft_kv, self.draft_rope, self.workspace)
        self._late_turns.zero_()

    # ---- graphs ----

    def queue(self, rows: int, size: int, choice: Choice, law: Law) -> Pending:
        """Queue a cycle of the first `rows` rows, padded to `size`; captured on first use."""
        if choice.drafts or self._late_count == LATE_PLACES or size != self._late_rows:
            self.catch_up()
        if self.session is not None and not choice.drafts:
            self._late_count, self._late_rows = self._late_count + 1, size
        key, captured = (size, choice, law), self.device.type == "cuda"
        if captured and key not in self._graphs:
            self._graphs[key] = self._capture(*key)
        with _nvtx(self.device, f"domino cycle B={size} K={choice.drafts}"):
            if not captured:
                return self.read(self.run(*key), rows)
            graph, line = self._graphs[key]
            graph.replay()
            return self.read(line, rows)

    def read(self, line: Tensor, rows: int) -> Pending:
        """Queue the copy of the first `rows` rows' line to the host."""
        if self.device.type != "cuda":
            return Pending(line[:rows], None)
        self._turn = (self._turn + 1) % len(self._hosts)
        host = self._hosts[self._turn][: line.numel()].view(line.shape)
        host.copy_(line, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return Pending(host[:rows], event)

    def costs(self, size: int, choices: Sequence[Choice], law: Law) -> dict[Choice, float]:
        """Milliseconds of a cycle for each of them; captures what is not captured yet."""
        if not all((size, c, law) in self._costs for c in choices):
            self.warmup([size], choices, [law])
        return {c: self._costs[size, c, law] for c in choices}

    def size(self, rows: int, choices: Sequence[Choice], law: Law) -> int:
        """The number of rows to run the next cycle for: padded; or, until what that loses makes up
        for a capture of all the choices, that of the next larger graphs. A batch that runs empty
        passes many sizes, and does not stop at each."""
        size = min(padded_rows(rows), self.rows)
        if all((size, c, law) in self._graphs for c in choices):
            return size
        there = [s for s, c, g in self._graphs if c == choices[0] and g is law and s > size]
        there = [s for s in there if all((s, c, law) in self._graphs for c in choices)]
        if not there:
            return size
        larger = min(there)
        # Half of a cycle's time is taken to follow its rows.
        lost = self._costs[larger, choices[0], law] * (1 - size / larger) / 2
        self._lost[size] = self._lost.get(size, 0.0) + lost
        return larger if self._lost[size] <= len(choices) * self._capture_ms else size

    def warmup(self, sizes: Iterable[int], choices: Iterable[Choice], laws: Iterable[Law]) -> None:
        """Capture what `queue` would for these numbers of rows and these choices."""
        laws, choices = list(laws), sorted(choices, reverse=True)
        # The largest first: smaller ones find their memory in the pool.
        for size in sorted({min(padded_rows(n), self.rows) for n in sizes}, reverse=True):
            for key in ((size, choice, law) for choice in choices for law in laws):
                if self.device.type != "cuda":
                    self._costs[key] = 1.0 + key[1].drafts / 16  # nothing to measure, or to gain
                elif key not in self._graphs:
                    self._graphs[key] = self._capture(*key)
            if self.session is not None and not choices[-1].drafts and self.device.type == "cuda":
                self._warm_late(size)

    def _capture(self, rows: int, choice: Choice, law: Law):
        begun = time.perf_counter()
        state = (self.anchors, self.cache.all_lengths, self._late_turns)
        state += (self.edits.output_counts,) if law is Law.EDITED else ()
        kept = [t.clone() for t in state]

        def restore():
            for t, value in zip(state, kept):
                t.copy_(value)

        current = torch.cuda.current_stream(self.device)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                self.run(rows, choice, law)  # kernels load, and libraries make their plans
        finally:  # of a run that found no memory, too: what it has queued still writes the caches
            current.wait_stream(stream)
            restore()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            line = self.run(rows, choice, law)
        self._pool = self._pool or graph.pool()

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        for _ in range(_TIMED):
            graph.replay()
        end.record()
        restore()
        end.synchronize()
        self._costs[rows, choice, law] = start.elapsed_time(end) / _TIMED
        # The least: others loaded kernels, too.
        self._capture_ms = min(self._capture_ms, (time.perf_counter() - begun) * 1e3)
        return graph, line
