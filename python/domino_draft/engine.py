"""Continuous batching: requests join a batch, go through the cycle of `decode.py`, and leave it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .decode import _Loop, prompt_ids
from .drafter import Drafter
from .slots import SlotBatch, SlotCache, begin_slots

if TYPE_CHECKING:
    from .target import Target

PREFILL_TOKENS = 8192  # of a forward over prompts, padding included


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


@dataclass(eq=False)
class _Request:
    id: int
    prompt: list[int]
    max_new_tokens: int
    temperature: float
    seed: int
    stops: frozenset[int]
    emitted: int = 0


class Engine(_Loop):
    """Continuous batching: add requests at any time, step, cancel.

    ::

        engine = Engine(target, drafter, max_batch=8, max_length=2048)
        engine.add("def fibonacci(n):", 128)
        engine.add(ids, 64, temperature=0.7, seed=3)
        for chunk in engine:  # until nothing is left; more may be added meanwhile
            print(chunk.request, chunk.tokens, chunk.finish)

    A request's output depends on its own prompt and settings only, up to the rounding of batched
    arithmetic. What goes wrong with one request ends that one: `add` refuses what cannot work, and
    a request whose prompt finds no memory, or whose logits are NaN, ends in a chunk with an error.
    One thread at a time.

    The cycle is that of `generate`; how rows join and leave it is written here.

    Args:
        drafter: None is the target alone, in the same loop.
        max_batch: requests that run at once; others wait, first come, first served.
        max_length: prompt and new tokens of one request. The caches are made for max_batch requests
            of this length (`estimate_memory`).
        num_drafts: tokens drafted a cycle, up to drafter.max_drafts.
        prefill_tokens: tokens in one forward over prompts. Several short prompts share one, a
            longer one is run in pieces.

    Raises:
        ValueError: a setting out of range, a drafter that does not fit the target.
        TypeError: a drafter without sessions for an engine (`slots.begin_slots`).
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        max_batch: int,
        max_length: int,
        num_drafts: int | None = None,
        prefill_tokens: int = PREFILL_TOKENS,
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
        self.num_drafts = check_num_drafts(drafter, num_drafts)
        self.prefill_tokens = prefill_tokens
        self.layers = tuple(drafter.feature_layers) if drafter is not None else ()
        # A row at its last token may still run a whole block.
        room = max_length + self.num_drafts + 1
        self.cache = SlotCache(max_batch, room, target.device)
        self.session = None
        if drafter is not None:
            self.session = begin_slots(drafter, target, max_batch, room)
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._added = 0
        self._joined = False  # the last step took requests in
        self.batch = SlotBatch([], torch.empty(0), [])
        self._keep([])

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
        seed: int = 0,
        stop_token_ids: Iterable[int] | None = None,
    ) -> int:
        """Queue a request; returns its id: 0, 1, ... in this order.

        prompt: token ids, or a string when the target has a tokenizer (no chat template is
        applied). temperature 0 is greedy. stop_token_ids None: the model's own; () never stops.

        Raises:
            ValueError, TypeError: the prompt is empty, has an id outside the vocabulary or does
                not fit max_length with its new tokens, or a setting is out of range. The request is
                not taken and the others do not notice.
        """
        ids = prompt_ids("add: prompt", self.target, prompt)
        if max_new_tokens < 1:
            raise ValueError(f"add: max_new_tokens: got {max_new_tokens}, expected at least 1")
        if len(ids) + max_new_tokens > self.max_length:
            raise ValueError(
                f"add: prompt: got {len(ids)} tokens and max_new_tokens {max_new_tokens}, expected "
                f"at most {self.max_length} positions in all"
            )
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"add: temperature: got {temperature}, expected finite and >= 0")
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"add: seed: got {seed}, expected 64 bits with a sign")
        stops = self.target.stop_token_ids if stop_token_ids is None else stop_token_ids
        request = _Request(
            self._added, ids, int(max_new_tokens), float(temperature), int(seed), frozenset(stops)
        )
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
        alive = [b for b, running in enumerate(self._running) if running.id != request]
        if len(alive) == len(self._running):
            return False
        self._keep(alive)
        return True

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
        lengths = self.cache.host_lengths
        try:
            lines, _ = self._cycle()
        except BaseException:
            self.cache.rewind(lengths)
            self._keep(range(len(self._running)))
            raise
        return self._deliver(0, lines, cycle=True)

    def _next_group(self) -> list[_Request]:
        """The waiting requests that the next prefill takes: one at least, within its tokens."""
        group, longest = [], 0
        while self._waiting and len(self._running) + len(group) < self.max_batch:
            longest = max(longest, len(self._waiting[0].prompt))
            if group and longest * (len(group) + 1) > self.prefill_tokens:
                break
            group.append(self._waiting.popleft())
        return group

    def _admit(self, group: list[_Request]) -> list[Chunk]:
        first = len(self._running)
        self._running += group
        self.batch.tokens += [list(r.prompt) for r in group]
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
        padded = torch.tensor([p + [0] * (longest - len(p)) for p in prompts], device=device)
        size = longest if len(prompts) > 1 else self.prefill_tokens
        self.cache.focus(first, len(prompts))
        for start in range(0, longest, size):
            piece = padded[:, start : start + size]
            held = [min(n - start, piece.shape[1]) for n in lengths]
            # The head runs at the few columns in which a prompt ends, not over the prompts.
            ends = sorted({n - 1 for n in held})
            logits, features = self.target.forward(
                piece, self.cache, layers=self.layers, keep=torch.tensor(ends, device=device)
            )
            counts = torch.tensor(held, device=device)
            self.cache.advance(counts, held)
            if self.session:
                self.session.commit(features, counts, held, first)
        column = torch.tensor([ends.index(n - 1) for n in held], device=device)
        logits = logits[torch.arange(len(prompts), device=device), column][:, None]
        drafts = torch.empty(len(prompts), 0, dtype=torch.int64, device=device)
        self._set_law(self._running[first:])
        return self._host(self._verify(logits, drafts, self.cache.lengths - 1))[0]

    def _host(self, result) -> tuple[list[list[int]], list[int]]:
        """[drafts kept, status, tokens ...] of every row, and how many tokens: the one host read of
        a cycle. Unusable logits are not an error of all rows."""
        accepted, status = result.num_accepted[:, None], result.status[:, None]
        table = torch.cat((accepted, status, result.tokens), dim=1).tolist()
        return table, [line[0] + 1 for line in table]

    def _set_law(self, requests: Sequence[_Request]) -> None:
        """How these rows are to be verified."""
        device = self.target.device
        temperatures, seeds = [r.temperature for r in requests], [r.seed for r in requests]
        self.greedy = not any(temperatures)
        if not self.greedy:
            self.temperature = torch.tensor(temperatures, dtype=torch.float32, device=device)
            self.seed = torch.tensor(seeds, dtype=torch.int64, device=device)

    def _deliver(self, first: int, lines: list[list[int]], *, cycle: bool) -> list[Chunk]:
        """Chunks of rows `first` and up; the rows that are done leave."""
        chunks, alive = [], list(range(first))
        for b, line in enumerate(lines, first):
            chunk = self._chunk(self._running[b], line, cycle)
            self.batch.tokens[b] += chunk.tokens
            chunks.append(chunk)
            if chunk.finish is None:
                alive.append(b)
        if not cycle or len(alive) < len(self._running):
            self._keep(alive)
        return chunks

    @staticmethod
    def _chunk(request: _Request, line: list[int], cycle: bool) -> Chunk:
        """A row's new tokens, cut at a stop token and at the request's limit."""
        accepted = line[0] + 1 if cycle else None
        new = line[2 : 3 + line[0]]
        if new[-1] < 0:
            error = ValueError(
                f"step: target logits of request {request.id}: got NaN or no finite value "
                f"(verify_chain status {line[1]}), expected a law to choose from"
            )
            return Chunk(request.id, [], "error", accepted, error)
        left = request.max_new_tokens - request.emitted
        new = new[:left]
        finish = "length" if len(new) == left else None
        stop = next((i for i, token in enumerate(new) if token in request.stops), None)
        if stop is not None:
            new, finish = new[: stop + 1], "stop"
        request.emitted += len(new)
        return Chunk(request.id, new, finish, accepted)

    def _keep(self, alive: Sequence[int]) -> None:
        """Let all rows but these go, and make ready for cycles of them."""
        count = len(alive)
        tokens = self.batch.tokens
        if count < len(self._running):
            last = iter([b for b in alive if b >= count])
            staying = set(alive)
            rows = [b if b in staying else next(last) for b in range(count)]
            self._running = [self._running[b] for b in rows]
            tokens = [tokens[b] for b in rows]
            self.cache.select(rows)
            if self.session:
                self.session.select(rows)
        self.cache.focus(0, count)
        self._set_law(self._running)
        last = [t[-1] for t in tokens]
        anchors = torch.tensor(last, dtype=torch.int64, device=self.target.device)
        self.batch = SlotBatch(tokens, anchors, [r.id for r in self._running])


def check_num_drafts(drafter: Drafter | None, num_drafts: int | None) -> int:
    """Drafts a cycle: what was asked for, or the drafter's default; 0 without a drafter."""
    if drafter is None:
        if num_drafts:
            raise ValueError(f"Engine: num_drafts: got {num_drafts} and no drafter, expected None")
        return 0
    count = drafter.default_drafts if num_drafts is None else num_drafts
    if not 1 <= count <= drafter.max_drafts:
        raise ValueError(f"Engine: num_drafts: got {count}, expected 1..{drafter.max_drafts}")
    return count
