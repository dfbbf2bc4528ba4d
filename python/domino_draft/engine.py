"""Continuous batching: requests join a batch, go through cycles, and leave it.

One cycle (arXiv 2605.29707, inference): the anchor is the last committed token, whose keys the
target does not hold yet. The drafter proposes K tokens after it; the target runs anchor and drafts
in one forward; `verify_chain` keeps a prefix of n drafts and adds one token of its own, so a cycle
emits n + 1 tokens. The target's cache keeps the anchor and the n drafts; their hidden states become
the drafter's context. With greedy decoding the output is the target's own; with a temperature every
token follows the target's law.

The rows in use are always the first. A new text is prefilled in the rows behind them and so joins
without a copy; where one leaves, the last takes its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from domino_kernels import verify_chain

from . import requests as checks
from .cache import RowCache
from .cycle import Cycle, Pending, padded_rows, tells_chances
from .drafter import Batch, DominoDrafter, Drafter
from .edits import Edits
from .fused import CannotFuse
from .policy import Choice, DraftLength
from .requests import SAMPLING, Law, Request, on_device
from .tree_cycle import TreeCycle
from .vocabulary import draft_ids

if TYPE_CHECKING:
    from .target import Target
    from .tree import TreeOptions

PREFILL_TOKENS = 8192  # of a forward over prompts, padding included
AHEAD = 2  # cycles queued before the first of them is read, so that the GPU never waits


@dataclass(frozen=True)
class Chunk:
    """New tokens of one request.

    request: what `Engine.add` returned. finish: on the request's last chunk "stop", "length" or,
    with the reason in `error`, "error"; None before. accepted: the tokens that the cycle emitted
    (accepted drafts + 1), before a stop token or the limit cut them; None for a request's first
    token, which comes from the prompt's forward.
    """

    request: int
    tokens: list[int]
    finish: str | None = None
    accepted: int | None = None
    error: Exception | None = None


class Engine:
    """Continuous batching: add requests at any time, step, cancel.

    ::

        engine = Engine(target, drafter, max_batch=8, max_length=2048)
        engine.add("def fibonacci(n):", 128)
        engine.add(ids, 64, temperature=0.7, top_p=0.95, seed=3)
        for chunk in engine:  # until nothing is left; more may be added meanwhile
            print(chunk.request, chunk.tokens, chunk.finish)

    A request's output depends on its own prompt and settings only, up to the rounding of batched
    arithmetic. What goes wrong with one request ends that one: `add` refuses what cannot work, and
    a request whose prompt finds no memory, or whose logits are NaN, ends in a chunk with an error.
    One thread at a time.

    On a GPU the cycle of a Llama-type target, alone or with a DominoDrafter, runs as one captured
    graph (`cycle.py`); other models and drafters run their stock forward. `mode` says which and
    why. `warmup` captures beforehand what would be captured on first use.

    Args:
        drafter: None is the target alone, in the same loop.
        max_batch: requests that run at once; others wait, first come, first served. The attribute
            of this name may be lowered between steps, and raised again up to this.
        max_length: prompt and new tokens of one request. The caches are made for max_batch requests
            of this length (`estimate_memory`).
        num_drafts: tokens drafted a cycle, up to drafter.max_drafts; "auto": between 0 and the
            drafter's default, by what pays (`policy.py`; captured cycles only). What is drawn with
            a temperature then depends on the choice, its law does not.
        prefill_tokens: tokens in one forward over prompts. Several short prompts share one, a
            longer one is run in pieces.
        fp8_draft_head: draft with a copy of the LM head in fp8, half its bytes. The target's own
            head stays, so the output does. Fused layers only.
        verify_fewer: with "auto", batches of 8 and more may verify a half or a quarter of the
            drafts, those likeliest to be kept by the head's own probabilities.
        draft_vocab: ids to draft from, None: all (see `vocabulary.py`). Fused layers only.
        fused: True, the fused layers or an error; False, the stock forward; None, the fused layers
            on a GPU, where the model allows it.
        tree: draft a tree a cycle in place of a chain (see `TreeOptions`; no lookup). Fused layers
            only: for others there is `generate(tree=...)`.

    Raises:
        TypeError: a tree without a Domino head.
        ValueError: a setting out of range, a drafter that does not fit the target.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        max_batch: int,
        max_length: int,
        num_drafts: int | str | None = None,
        prefill_tokens: int = PREFILL_TOKENS,
        fp8_draft_head: bool = False,
        draft_vocab: Sequence[int] | Tensor | None = None,
        verify_fewer: bool = False,
        fused: bool | None = None,
        tree: TreeOptions | None = None,
    ):
        for name, value in (
            ("max_batch", max_batch),
            ("max_length", max_length),
            ("prefill_tokens", prefill_tokens),
        ):
            if value < 1:
                raise ValueError(f"Engine: {name}: got {value}, expected at least 1")
        if target.max_length is not None and max_length > target.max_length:
            raise ValueError(
                f"Engine: max_length: got {max_length}, expected at most {target.max_length}, the "
                "positions that the target was made for"
            )
        self.target, self.max_batch, self.max_length = target, max_batch, max_length
        self.tree = tree
        if tree is not None:
            if num_drafts is not None or tree.lookup:
                raise ValueError(
                    f"Engine: tree: got one with num_drafts {num_drafts} and lookup {tree.lookup}, "
                    "expected None and 0"
                )
            self.tree = replace(tree.settled(drafter, ()), rule=tree.rule)
            num_drafts = self.tree.depth
        auto, num_drafts = num_drafts == "auto", None if num_drafts == "auto" else num_drafts
        self.num_drafts = checks.num_drafts("Engine: num_drafts", drafter, num_drafts)
        self.prefill_tokens = prefill_tokens
        self.layers = tuple(drafter.feature_layers) if drafter is not None else ()
        # A row at its last token may still run a whole block.
        self._block = self.num_drafts + 1 if self.tree is None else self.tree.nodes
        room = max_length + self._block
        self.cache = RowCache(max_batch, room, target.device)
        self.session = None
        if drafter is not None:
            self.session = drafter.begin(target, max_batch, room)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._added = 0
        self._joined = False  # the last step took requests in
        self._edits: Edits | None = None  # once a request has any
        self._queued: deque[tuple[Pending, Choice, list[Request]]] = deque()
        if draft_vocab is not None:
            draft_vocab = draft_ids("Engine: draft_vocab", draft_vocab, target.vocab_size)
        self._fused, self.mode = self._make_cycle(drafter, fused, fp8_draft_head, draft_vocab)
        choose = auto and self.num_drafts and self._fused is not None
        partial = choose and verify_fewer and tells_chances(drafter)
        self._policy = DraftLength(self.num_drafts, partial) if choose else None
        self.batch = Batch([], torch.empty(0), [])
        self._keep([])

    def _make_cycle(
        self, drafter, fused: bool | None, fp8: bool, vocab: Tensor | None
    ) -> tuple[Cycle | None, str]:
        on_gpu = self.target.device.type == "cuda"
        fused = fused or (True if self.tree is not None and fused is None else fused)
        for name, given in (("fp8_draft_head", fp8), ("draft_vocab", vocab is not None)):
            if given and (drafter is None or not (on_gpu or fused)):
                raise ValueError(
                    f"Engine: {name}: got one, expected a drafter and the fused layers with it"
                )
        if self.tree is not None and not fused:
            raise ValueError("Engine: tree: got one, expected the fused layers with it")
        if fused is False or (fused is None and not on_gpu):
            return None, "stock forward"
        try:
            if not isinstance(drafter, DominoDrafter | None):
                raise CannotFuse(f"a {type(drafter).__name__} drafts on the host")
            state = self.target, self.session, self.cache, self.max_batch
            own = None if drafter is None else drafter.draft_ids
            part = own if vocab is None else vocab
            if self.tree is not None:
                cycle = TreeCycle(*state, self.tree, fp8, part)
            else:
                cycle = Cycle(*state, self.num_drafts, fp8, draft_vocab=part)
        except CannotFuse as reason:
            if fused or fp8 or vocab is not None:
                raise ValueError(
                    f"Engine: fused: got True, but the model cannot: {reason}"
                ) from None
            return None, f"stock forward: {reason}"
        return cycle, "captured" if on_gpu else "fused"

    def warmup(
        self,
        batch_sizes: Iterable[int] | None = None,
        *,
        sampled: bool = False,
        filtered: bool = False,
        edited: bool = False,
    ) -> None:
        """Capture the cycles of these batch sizes (default: all up to max_batch).

        sampled: those of requests with a temperature too; filtered: with filters; edited: with
        penalties or biases.
        """
        if self._fused is not None:
            sizes = range(1, self.max_batch + 1) if batch_sizes is None else batch_sizes
            with torch.inference_mode():
                laws = [Law.GREEDY]
                laws += [Law.DRAWN] if sampled else []
                laws += [Law.FILTERED] if filtered else []
                laws += [Law.EDITED] if edited else []
                if edited:
                    self._make_edits()
                sizes = {min(padded_rows(n), self._fused.rows) for n in sizes}
                for rows in sorted(sizes, reverse=True):  # smaller ones find memory in the pool
                    self._fused.warmup([rows], self._choices(rows), laws)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(
        self,
        prompt: Sequence[int] | str,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        seed: int | None = None,
        stop_token_ids: Iterable[int] | None = None,
    ) -> int:
        """Queue a request; returns its id: 0, 1, ... in this order.

        prompt: token ids, or a string when the target has a tokenizer (no chat template is
        applied). temperature 0 is greedy; else tokens follow the target's law, filtered as by
        Transformers: the top_k likeliest (0: all), of these the fewest with a share of top_p (1:
        all), of these all of at least min_p times the greatest probability.
        Before the temperature, as in `verify_chain`: logit_bias, a number to add for each of some
        tokens (-inf: never); repetition_penalty over prompt and output, presence_penalty and
        frequency_penalty over the output. Not with trees.
        seed None: the request's id, so that no two share noise.
        stop_token_ids None: the model's own; () never stops.

        Raises:
            ValueError, TypeError: the prompt is empty, has an id outside the vocabulary or does
                not fit max_length with its new tokens, or a setting is out of range. The request is
                not taken and the others do not notice.
        """
        ids = checks.prompt_ids("add: prompt", self.target, prompt)
        max_new_tokens = checks.new_tokens("add: max_new_tokens", max_new_tokens)
        if len(ids) + max_new_tokens > self.max_length:
            raise ValueError(
                f"add: prompt: got {len(ids)} tokens and max_new_tokens {max_new_tokens}, expected "
                f"at most {self.max_length} positions in all"
            )
        (sampling,) = checks.samplings(
            "add", self.target, 1, temperature, logit_bias, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
        )  # fmt: skip
        if self.tree is not None:
            checks.no_edits("add", [sampling])
        if sampling.temperature and self.tree is not None and self.tree.rule == "greedy":
            raise ValueError(
                f"add: temperature: got {temperature}, expected 0 with trees of rule 'greedy'"
            )
        if seed is None:
            seed = self._added
        if not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
            raise ValueError(f"add: seed: got {seed!r}, expected an integer of 64 bits with a sign")
        if stop_token_ids is None:
            stop_token_ids = self.target.stop_token_ids
        stops = checks.integers("add: stop_token_ids", stop_token_ids)
        request = Request(self._added, ids, max_new_tokens, sampling, seed, frozenset(stops))
        self._added += 1
        self._waiting.append(request)
        return request.id

    @torch.inference_mode()
    def cancel(self, request: int) -> bool:
        """End a request, without a further chunk; False if there is none of this id any more."""
        for waiting in self._waiting:
            if waiting.id == request:
                self._waiting.remove(waiting)
                return True
        for running in self._running:
            if running.id == request:
                running.done = True  # cycles that are queued still hold it
                self._keep([b for b, r in enumerate(self._running) if not r.done])
                return True
        return False

    @torch.inference_mode()
    def step(self) -> list[Chunk]:
        """Take waiting requests in (their first tokens), or run a cycle for those that run.

        Never the former twice in a row while requests run, so that these go on whatever arrives.
        Nothing to do: []. An exception (a GPU too full for a cycle) leaves everything as it was
        before: cancel something and step again.
        """
        room = len(self._running) < self.max_batch
        if self._waiting and room and not (self._joined and self._running):
            self._joined = True
            return self._admit(self._next_group())
        self._joined = False
        return self._advance() if self._running else []

    def run(self) -> Iterator[Chunk]:
        """Chunks until no request is left; the same as iterating over the engine. A step's chunks
        come all, also of what is cancelled between them."""
        while self._waiting or self._running:
            yield from self.step()

    __iter__ = run

    def _advance(self) -> list[Chunk]:
        if self._fused is not None:
            return self._advance_fused()
        lengths = self.cache.host_lengths
        try:
            lines = self._cycle()
        except BaseException:
            self.cache.rewind(lengths)
            self._keep(range(len(self._running)))
            raise
        return self._deliver(0, lines, cycle=True)

    def _advance_fused(self) -> list[Chunk]:
        """Keep AHEAD cycles queued and read the oldest. Rows that its tokens end are let go then:
        what later cycles did to them is not looked at."""
        chunks: list[Chunk] = []
        while not chunks and self._running:
            while len(self._queued) < AHEAD:
                rows = len(self._running)
                choices = self._choices(rows)
                size, choice = self._fused.size(rows, choices, self.law), choices[0]
                if self._policy is not None:
                    choice = self._policy.choose(self._fused.costs(size, choices, self.law))
                cycle = self._fused.queue(rows, size, choice, self.law)
                self._queued.append((cycle, choice, list(self._running)))
            cycle, choice, requests = self._queued.popleft()
            live = [(r, line) for r, line in zip(requests, cycle.lines()) if not r.done]
            chunks += [self._take(request, line, True) for request, line in live]
            if self._policy is not None:
                self._policy.observe(choice, [line[0] for _, line in live])
        alive = [b for b, request in enumerate(self._running) if not request.done]
        if len(alive) < len(self._running):
            self._keep(alive)
        return chunks

    def _choices(self, rows: int) -> list[Choice]:
        """What a captured cycle of so many rows may draft and verify."""
        if self._policy is not None:
            return self._policy.choices(rows)
        return [Choice(self.num_drafts, self._block)]

    def _take(self, request: Request, line: list[int], cycle: bool) -> Chunk:
        chunk = self._chunk(request, line, cycle)
        request.tokens += chunk.tokens
        request.done = chunk.finish is not None
        return chunk

    def _next_group(self) -> list[Request]:
        """The waiting requests that the next prefill takes: one at least, within its tokens."""
        group, longest = [], 0
        while self._waiting and len(self._running) + len(group) < self.max_batch:
            longest = max(longest, len(self._waiting[0].prompt))
            if group and longest * (len(group) + 1) > self.prefill_tokens:
                break
            group.append(self._waiting.popleft())
        return group

    def _admit(self, group: list[Request]) -> list[Chunk]:
        first = len(self._running)
        self._running += group
        self.batch.tokens += [r.tokens for r in group]
        try:
            lines = self._prefill(first)
        except torch.OutOfMemoryError as error:
            failure = str(error)  # not the error itself: it holds on to the forward's tensors
        except BaseException:
            self._keep(range(first))
            self._waiting.extendleft(reversed(group))
            raise
        else:
            return self._deliver(first, lines, cycle=False)
        self._keep(range(first))
        if len(group) > 1:
            self._waiting.extendleft(reversed(group[1:]))
            return self._admit(group[:1])
        error = torch.OutOfMemoryError(
            f"request {group[0].id}: no memory for its prompt of {len(group[0].prompt)} tokens in "
            f"pieces of {self.prefill_tokens}, expected a shorter one: {failure}"
        )
        return [Chunk(group[0].id, [], "error", error=error)]

    def _prefill(self, first: int) -> list[list[int]]:
        """Run the prompts of rows `first` and up, which hold nothing yet. More tokens than one
        forward may have are always a single row's, which is run in pieces."""
        prompts, device = self.batch.tokens[first:], self.target.device
        lengths = [len(p) for p in prompts]
        longest = max(lengths)
        size = longest if len(prompts) > 1 else self.prefill_tokens
        self.cache.focus(first, len(prompts))
        self._set_edits(first)
        self._set_law(first)
        if self._fused is not None and longest <= size:
            counts = on_device(lengths, torch.int64, device)
            logits = self._fused.prompts(prompts, first)[:, None]
            self.cache.advance(counts, lengths)
            return self._first_tokens(logits, first)
        padded = torch.tensor([p + [0] * (longest - len(p)) for p in prompts], device=device)
        for start in range(0, longest, size):
            piece = padded[:, start : start + size]
            held = [min(n - start, piece.shape[1]) for n in lengths]
            # The head runs at the few columns in which a prompt ends, not over the prompts.
            ends = sorted({n - 1 for n in held})
            keep, counts = torch.tensor(ends, device=device), torch.tensor(held, device=device)
            if self._fused is not None:
                logits = self._fused.prefill(piece, first, start, counts, keep)
                self.cache.advance(counts, held)
                continue
            logits, features = self.target.forward(piece, self.cache, layers=self.layers, keep=keep)
            self.cache.advance(counts, held)
            if self.session:
                self.session.commit(features, counts, held, first)
        column = torch.tensor([ends.index(n - 1) for n in held], device=device)
        logits = logits[torch.arange(len(prompts), device=device), column][:, None]
        return self._first_tokens(logits, first)

    def _first_tokens(self, logits: Tensor, first: int) -> list[list[int]]:
        """What follows the prompts of rows `first` and up, by their logits [n, 1, V]."""
        new = self._running[first:]
        drafts = torch.empty(len(new), 0, dtype=torch.int64, device=logits.device)
        result = self._verify(logits, drafts, self.cache.lengths - 1)
        if self._edits is not None:
            self._edits.count(result.tokens, first)
        line = _line(result)
        if self._fused is None:
            return line.tolist()
        anchors = result.tokens[:, 0].clamp(min=0)
        self._fused.put(first, anchors, [r.sampling for r in new], [r.seed for r in new])
        pending = self._fused.read(line, len(new))
        self._fused.store_prompts()
        return pending.lines()

    def _cycle(self) -> list[list[int]]:
        """A cycle by the stock forward, with the drafter's session on the host's side."""
        anchors = self.batch.anchors[:, None]
        if self.session:
            drafts = self.session.propose(self.batch, self.num_drafts)
        else:
            drafts = anchors[:, :0]
        block = torch.cat((anchors, drafts.clamp(min=0)), dim=1)
        logits, features = self.target.forward(block, self.cache, layers=self.layers)
        result = self._verify(logits, drafts, self.cache.lengths)
        self.batch.anchors = result.tokens.gather(1, result.num_accepted[:, None].long())[:, 0]
        lines = _line(result).tolist()
        counts = [line[0] + 1 for line in lines]
        kept = result.num_accepted.to(torch.int64) + 1
        self.cache.advance(kept, counts)
        if self.session:
            if features is not None:
                features = features[:, : max(counts)]
            self.session.commit(features, kept, counts)
        if self._edits is not None:
            self._edits.count(result.tokens)
        return lines

    def _verify(self, logits: Tensor, drafts: Tensor, block_start: Tensor):
        if self.law is Law.GREEDY:
            return verify_chain(logits, drafts)
        return verify_chain(
            logits,
            drafts,
            rule="match" if self.tree is not None and self.tree.rule == "match" else "token",
            block_start=block_start,
            **self._drawn,
        )

    def _make_edits(self) -> None:
        if self._edits is None:
            self._edits = Edits(
                len(self.cache.all_lengths), self.target.vocab_size, self.target.device
            )
            if self._fused is not None:
                self._fused.edits = self._edits

    def _set_edits(self, first: int) -> None:
        """Penalties and biases of the rows from here on, which are new."""
        requests = self._running[first:]
        sampling = [r.sampling for r in requests]
        if checks.law_of(sampling) is Law.EDITED:
            self._make_edits()
        if self._edits is not None:
            self._edits.put(first, sampling, [r.prompt for r in requests])

    def _set_law(self, first: int) -> None:
        """How the rows from here on are to be verified."""
        requests = self._running[first:]
        device, sampling = self.target.device, [r.sampling for r in requests]
        self.law = checks.law_of(sampling)
        if self.law is Law.GREEDY:
            return
        self._drawn = {"seed": on_device([r.seed for r in requests], torch.int64, device)}
        for name, dtype in SAMPLING.items():
            if name == "temperature" or self.law >= Law.FILTERED:
                values = [getattr(s, name) for s in sampling]
                self._drawn[name] = on_device(values, dtype, device)
        if self.law is Law.EDITED:
            self._drawn |= self._edits.arguments(slice(first, first + len(requests)))

    def _deliver(self, first: int, lines: list[list[int]], *, cycle: bool) -> list[Chunk]:
        """Chunks of rows `first` and up; the rows that are done leave."""
        chunks, alive = [], list(range(first))
        for b, line in enumerate(lines, first):
            chunks.append(self._take(self._running[b], line, cycle))
            if not self._running[b].done:
                alive.append(b)
        if not cycle or len(alive) < len(self._running):
            self._keep(alive)
        return chunks

    @staticmethod
    def _chunk(request: Request, line: list[int], cycle: bool) -> Chunk:
        """A row's new tokens, cut at a stop token and at the request's limit."""
        accepted = line[0] + 1 if cycle else None
        left = request.max_new_tokens - request.emitted
        new = line[2 : 3 + line[0]][:left]
        finish = "length" if len(new) == left else None
        stop = next((i for i, token in enumerate(new) if token in request.stops), None)
        if stop is not None:
            new, finish = new[: stop + 1], "stop"
        if new[-1] < 0:
            error = ValueError(
                f"step: target logits of request {request.id}: got NaN or no finite value "
                f"(verify_chain status {line[1]}), expected a law to choose from"
            )
            return Chunk(request.id, [], "error", accepted, error)
        request.emitted += len(new)
        return Chunk(request.id, new, finish, accepted)

    def _keep(self, alive: Sequence[int]) -> None:
        """Let all rows but these go, and make ready for cycles of them."""
        count = len(alive)
        if count < len(self._running):
            last = iter([b for b in alive if b >= count])
            staying = set(alive)
            rows = [b if b in staying else next(last) for b in range(count)]
            running = [self._running[b] for b in rows]
            if self._fused is not None:
                ahead = len(self._queued) * (self.num_drafts + 1) + self._block
                longest = max((len(r.tokens) for r in running), default=0)
                self._fused.select(rows, longest + ahead)
            else:
                self.cache.select(rows)
                if self.session:
                    self.session.select(rows)
            if self._edits is not None:
                self._edits.select(rows)
            self._running = running  # not before the device has moved them: that may raise
        self.cache.focus(0, count)
        self.law = checks.law_of([r.sampling for r in self._running])
        anchors = self.batch.anchors  # which nothing reads where they live in the cycle's state
        if self._fused is None:
            self._set_law(0)
            last = [r.tokens[-1] for r in self._running]
            anchors = torch.tensor(last, dtype=torch.int64, device=self.target.device)
        self.batch = Batch(
            [r.tokens for r in self._running], anchors, [r.id for r in self._running]
        )


def _line(result) -> Tensor:
    """[drafts kept, status, tokens ...] of every row: the one host read of a cycle."""
    accepted, status = result.num_accepted[:, None], result.status[:, None]
    return torch.cat((accepted, status, result.tokens), dim=1)
