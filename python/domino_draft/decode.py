"""The decoding loop: draft a block, verify it in one target forward, keep what is right.

One cycle (arXiv 2605.29707, inference): the anchor is the last committed token, whose keys the
target does not hold yet. The drafter proposes K tokens after it; the target runs anchor and drafts
in one forward; `verify_chain` keeps a prefix of n drafts and adds one token of its own, so a cycle
emits n + 1 tokens. The target's cache keeps the anchor and the n drafts; their hidden states become
the drafter's context. With greedy decoding the output is the target's own; with a temperature every
token follows the target's law.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from domino_kernels import verify_chain

from .cache import RowCache
from .drafter import Batch, Drafter

if TYPE_CHECKING:
    from .target import Target


@dataclass
class Stats:
    """What a call did. accepted[row] lists the tokens each cycle emitted (accepted drafts + 1).

    `tokens` counts what was returned (stop token included); a cycle's accepted length is counted
    whole even where the output was cut inside it. The first token of a row comes from the prompt's
    forward and belongs to no cycle. seconds covers the whole call, prefill_seconds its first part.
    """

    cycles: int = 0
    tokens: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    accepted: list[list[int]] = field(default_factory=list)

    @property
    def accepted_length(self) -> float:
        """Mean tokens emitted by a cycle and row (ratio of sums); 0 without a cycle."""
        count = sum(map(len, self.accepted))
        return sum(map(sum, self.accepted)) / count if count else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class GenerateResult:
    """sequences[row]: new token ids, prompt left out, a stop token kept. finish[row]: why it ended
    ("stop" or "length")."""

    sequences: list[list[int]]
    finish: list[str]
    stats: Stats


def generate(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int] | str],
    *,
    max_new_tokens: int,
    temperature: float | Sequence[float] = 0.0,
    seed: int | Sequence[int] = 0,
    stop_token_ids: Sequence[int] | None = None,
    num_drafts: int | None = None,
) -> GenerateResult:
    """Decode a batch of prompts, with a drafter or (None) with the target alone.

    prompts: token ids, or strings when the target has a tokenizer (no chat template is applied).
    temperature and seed: one for all or one a row; 0 is greedy. An int seed gives row r seed + r;
    seeds count modulo 2**64, as in domino_kernels.rng. A row's output depends on its own prompt,
    seed and temperature only, up to the rounding of batched arithmetic. stop_token_ids None: the
    model's own; () never stops. num_drafts: tokens drafted a cycle, up to drafter.max_drafts.

    Raises:
        ValueError: an empty prompt, a prompt and max_new_tokens longer than the model allows, an
            id outside the vocabulary, a drafter that does not fit the target.
        TypeError: an argument of another kind (ids and seeds are integers).
    """
    stats = Stats()
    chunks = stream(
        target,
        drafter,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        stop_token_ids=stop_token_ids,
        num_drafts=num_drafts,
        stats=stats,
    )
    sequences: list[list[int]] = [[] for _ in prompts]
    finish = ["length"] * len(prompts)
    for chunk in chunks:
        sequences[chunk.row] += chunk.tokens
        finish[chunk.row] = chunk.finish or finish[chunk.row]
    return GenerateResult(sequences, finish, stats)


@dataclass(frozen=True)
class Chunk:
    """New tokens of one row; finish is "stop" or "length" on its last chunk, else None."""

    row: int
    tokens: list[int]
    finish: str | None


def stream(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int] | str],
    *,
    max_new_tokens: int,
    temperature: float | Sequence[float] = 0.0,
    seed: int | Sequence[int] = 0,
    stop_token_ids: Sequence[int] | None = None,
    num_drafts: int | None = None,
    stats: Stats | None = None,
) -> Iterator[Chunk]:
    """`generate`, one chunk a row and cycle as it is decided. `stats` is filled on the way.

    Arguments are checked when this is called, not at the first chunk.
    """
    ids = _prompt_ids(target, prompts, max_new_tokens)
    temperatures = _per_row("temperature", temperature, len(ids), float, "numbers")
    if any(not 0 <= t <= torch.finfo(torch.float32).max for t in temperatures):
        raise ValueError(
            f"generate: temperature: got {temperature}, expected >= 0 and finite in float32"
        )
    if not _is_list(seed):
        seed = [_per_row("seed", seed, 1, index, "integers")[0] + row for row in range(len(ids))]
    seeds = _per_row("seed", seed, len(ids), index, "integers")
    seeds = [(s + 2**63) % 2**64 - 2**63 for s in seeds]  # the same 64 bits as an int64
    stops = target.stop_token_ids if stop_token_ids is None else stop_token_ids
    if not _is_list(stops):
        raise TypeError(f"generate: stop_token_ids: got {stops!r}, expected a list of ids")
    stops = frozenset(_ids("generate: stop_token_ids", stops))
    drafts = 0
    if drafter is not None:
        drafts = drafter.default_drafts if num_drafts is None else num_drafts
        if not hasattr(drafts, "__index__"):
            raise TypeError(f"generate: num_drafts: got {drafts!r}, expected an integer")
        if not 1 <= drafts <= drafter.max_drafts:
            raise ValueError(
                f"generate: num_drafts: got {drafts}, expected 1..{drafter.max_drafts}"
            )
    elif num_drafts:
        raise ValueError(f"generate: num_drafts: got {num_drafts} and no drafter, expected None")
    loop = _Loop(target, drafter, ids, max_new_tokens, temperatures, seeds, stops, drafts, stats)
    return loop.run()


class _Loop:
    def __init__(
        self, target, drafter, prompts, max_new_tokens, temperatures, seeds, stops, drafts, stats
    ):
        self.target, self.drafter = target, drafter
        self.limit, self.stops, self.num_drafts = max_new_tokens, stops, drafts
        self.stats = stats if stats is not None else Stats()
        self.stats.accepted = [[] for _ in prompts]
        self.rows = list(range(len(prompts)))  # prompt index of every row still in the batch
        self.emitted = [0] * len(prompts)  # by row in the batch, as are all lists below
        device = target.device
        self.greedy = not any(temperatures)
        self.temperature = torch.tensor(temperatures, dtype=torch.float32, device=device)
        self.seed = torch.tensor(seeds, dtype=torch.int64, device=device)
        longest = max(map(len, prompts))
        # A row at its last token may still run a whole block.
        room = longest + max_new_tokens + drafts + 1
        self.cache = RowCache(len(prompts), room, device)
        self.batch = Batch([list(p) for p in prompts], torch.empty(0, device=device))
        self.session = drafter.begin(target, self.batch, room) if drafter else None
        self.layers = tuple(drafter.feature_layers) if drafter else ()

    @torch.inference_mode()
    def run(self) -> Iterator[Chunk]:
        start = time.perf_counter()
        yield from self._emit(*self._prefill(), cycle=False)
        self.stats.prefill_seconds = self.stats.seconds = time.perf_counter() - start
        while self.rows:
            chunks = list(self._emit(*self._cycle(), cycle=True))
            self.stats.seconds = time.perf_counter() - start
            yield from chunks

    def _prefill(self) -> tuple[list[list[int]], list[int]]:
        prompts, device = self.batch.tokens, self.target.device
        lengths = [len(p) for p in prompts]
        longest = max(lengths)
        padded = torch.tensor([p + [0] * (longest - len(p)) for p in prompts], device=device)
        # The head runs at the few columns in which a prompt ends, not over the prompts.
        ends = sorted({n - 1 for n in lengths})
        logits, features = self.target.forward(
            padded, self.cache, layers=self.layers, keep=torch.tensor(ends, device=device)
        )
        column = torch.tensor([ends.index(n - 1) for n in lengths], device=device)
        logits = logits[torch.arange(len(prompts), device=device), column][:, None]
        counts = torch.tensor(lengths, device=device)
        drafts = torch.empty(len(prompts), 0, dtype=torch.int64, device=device)
        result = self._verify(logits, drafts, counts - 1)
        self.cache.advance(counts, lengths)
        if self.session:
            self.session.commit(features, counts, lengths)
        return self._host(result)

    def _cycle(self) -> tuple[list[list[int]], list[int]]:
        anchors = self.batch.anchors[:, None]
        if self.session:
            drafts = self.session.propose(self.batch, self.num_drafts)
        else:
            drafts = anchors[:, :0]
        block = torch.cat((anchors, drafts.clamp(min=0)), dim=1)
        logits, features = self.target.forward(block, self.cache, layers=self.layers)
        result = self._verify(logits, drafts, self.cache.lengths)
        tokens, counts = self._host(result)
        kept = result.num_accepted.to(torch.int64) + 1
        self.cache.advance(kept, counts)
        if self.session:
            if features is not None:
                features = features[:, : max(counts)]
            self.session.commit(features, kept, counts)
        return tokens, counts

    def _verify(self, logits: Tensor, drafts: Tensor, block_start: Tensor):
        if self.greedy:
            result = verify_chain(logits, drafts, rule="greedy")
        else:
            result = verify_chain(
                logits,
                drafts,
                rule="token",
                temperature=self.temperature,
                seed=self.seed,
                block_start=block_start,
            )
        self.batch.anchors = result.tokens.gather(1, result.num_accepted[:, None].long())[:, 0]
        return result

    def _host(self, result) -> tuple[list[list[int]], list[int]]:
        """Emitted tokens and their number per row: the one host read of a cycle."""
        accepted, status = result.num_accepted[:, None], result.status[:, None]
        table = torch.cat((accepted, status, result.tokens), dim=1).tolist()
        for row, line in zip(self.rows, table):
            if line[2 + line[0]] < 0:
                raise ValueError(
                    f"generate: target logits of prompt {row}: got NaN or no finite value "
                    f"(verify_chain status {line[1]}), expected a law to choose from"
                )
        return [line[2 : 3 + line[0]] for line in table], [line[0] + 1 for line in table]

    def _emit(self, tokens, counts, *, cycle: bool) -> Iterator[Chunk]:
        """Cut at stop tokens and limits, record, and drop the rows that are done."""
        alive = []
        if cycle:
            self.stats.cycles += 1
        for b, row in enumerate(self.rows):
            new = tokens[b][: self.limit - self.emitted[b]]
            finish = "length" if len(new) == self.limit - self.emitted[b] else None
            stop = next((i for i, token in enumerate(new) if token in self.stops), None)
            if stop is not None:
                new, finish = new[: stop + 1], "stop"
            self.batch.tokens[b] += new
            self.emitted[b] += len(new)
            self.stats.tokens += len(new)
            if cycle:
                self.stats.accepted[row].append(counts[b])
            if finish is None:
                alive.append(b)
            yield Chunk(row, new, finish)
        if len(alive) < len(self.rows):
            self._select(alive)

    def _select(self, alive: list[int]) -> None:
        self.rows = [self.rows[b] for b in alive]
        if not alive:
            return
        self.emitted = [self.emitted[b] for b in alive]
        index = torch.tensor(alive, device=self.cache.lengths.device)
        self.temperature, self.seed = self.temperature[index], self.seed[index]
        self.batch.tokens = [self.batch.tokens[b] for b in alive]
        self.batch.anchors = self.batch.anchors[index]
        self.cache.select(alive)
        if self.session:
            self.session.select(alive)


def _is_list(value) -> bool:
    return hasattr(value, "__iter__") and not isinstance(value, str) and getattr(value, "ndim", 1)


def _per_row(name: str, value, rows: int, kind: Callable, kinds: str) -> list:
    values = list(value) if _is_list(value) else [value] * rows
    if len(values) != rows:
        raise ValueError(f"generate: {name}: got {len(values)} values, expected {rows} (one a row)")
    try:
        return [kind(v) for v in values]
    except (TypeError, ValueError):
        raise TypeError(f"generate: {name}: got {value!r}, expected {kinds}") from None


def _ids(where: str, tokens) -> list[int]:
    try:
        return [index(token) for token in tokens]
    except TypeError:
        raise TypeError(f"{where}: got {tokens!r}, expected a list of integers") from None


def prompt_ids(where: str, target: Target, prompt: Sequence[int] | str) -> list[int]:
    """Token ids of one prompt; an error begins with `where`, the op and the argument."""
    if isinstance(prompt, str):
        if target.tokenizer is None:
            raise TypeError(
                f"{where}: got a string, expected token ids (the target has no tokenizer)"
            )
        prompt = target.tokenizer(prompt)["input_ids"]
    ids = _ids(where, prompt)
    if not ids:
        raise ValueError(f"{where}: got no tokens, expected at least one")
    bad = next((t for t in ids if not 0 <= t < target.vocab_size), None)
    if bad is not None:
        raise ValueError(f"{where}: got token {bad}, expected 0..{target.vocab_size - 1}")
    return ids


def _prompt_ids(target: Target, prompts: Sequence, max_new_tokens: int) -> list[list[int]]:
    if isinstance(prompts, str) or not hasattr(prompts, "__len__") or len(prompts) == 0:
        raise ValueError(f"generate: prompts: got {prompts!r}, expected a list of prompts")
    if not hasattr(max_new_tokens, "__index__"):
        raise TypeError(f"generate: max_new_tokens: got {max_new_tokens!r}, expected an integer")
    if max_new_tokens < 1:
        raise ValueError(f"generate: max_new_tokens: got {max_new_tokens}, expected at least 1")
    result = []
    for i, prompt in enumerate(prompts):
        ids = prompt_ids(f"generate: prompts[{i}]", target, prompt)
        if target.max_length is not None and len(ids) + max_new_tokens > target.max_length:
            raise ValueError(
                f"generate: prompts[{i}]: got {len(ids)} tokens and max_new_tokens "
                f"{max_new_tokens}, expected at most {target.max_length} positions in all"
            )
        result.append(ids)
    return result
