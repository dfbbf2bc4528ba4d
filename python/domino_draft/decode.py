"""Decode a list of prompts: `generate` and `stream`, on an `Engine` made for the call."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import index
from typing import TYPE_CHECKING

from . import requests
from .drafter import Drafter
from .engine import Engine
from .fused import why_not

if TYPE_CHECKING:
    from .target import Target
    from .tree import TreeOptions


@dataclass
class Stats:
    """What a call did. accepted[row] lists the tokens each cycle emitted (accepted drafts + 1).

    `tokens` counts what was returned (stop token included); a cycle's accepted length is counted
    whole even where the output was cut inside it. The first token of a row comes from the prompt's
    forward and belongs to no cycle. seconds covers the whole call, prefill_seconds the forwards
    over prompts.
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


@dataclass(frozen=True)
class RowChunk:
    """New tokens of one row; finish is "stop" or "length" on its last chunk, else None.

    From `follow` it may be "error", with the reason; `stream` raises that."""

    row: int
    tokens: list[int]
    finish: str | None
    error: Exception | None = None


def generate(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int] | str],
    *,
    max_new_tokens: int,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    repetition_penalty: float | Sequence[float] = 1.0,
    presence_penalty: float | Sequence[float] = 0.0,
    frequency_penalty: float | Sequence[float] = 0.0,
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None = None,
    seed: int | Sequence[int] = 0,
    stop_token_ids: Sequence[int] | None = None,
    num_drafts: int | str | None = None,
    tree: TreeOptions | None = None,
) -> GenerateResult:
    """Decode a batch of prompts, with a drafter or (None) with the target alone.

    prompts: token ids, or strings when the target has a tokenizer (no chat template is applied).
    temperature, the filters, penalties and biases (see `Engine.add`) and seed: one for all or one
    a row; temperature 0 is greedy. An int seed gives row r seed + r;
    seeds count modulo 2**64, as in domino_kernels.rng. A row's output depends on its own prompt,
    seed and temperature only, up to the rounding of batched arithmetic. stop_token_ids None: the
    model's own; () never stops. num_drafts: tokens drafted a cycle, up to drafter.max_drafts,
    or "auto" (see `Engine`). tree: draft a tree a cycle in place of a chain, with a Domino drafter
    (see `TreeOptions`).

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
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
        seed=seed,
        stop_token_ids=stop_token_ids,
        num_drafts=num_drafts,
        tree=tree,
        stats=stats,
    )
    sequences: list[list[int]] = [[] for _ in prompts]
    finish = ["length"] * len(prompts)
    for chunk in chunks:
        sequences[chunk.row] += chunk.tokens
        finish[chunk.row] = chunk.finish or finish[chunk.row]
    return GenerateResult(sequences, finish, stats)


def stream(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int] | str],
    *,
    max_new_tokens: int,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    repetition_penalty: float | Sequence[float] = 1.0,
    presence_penalty: float | Sequence[float] = 0.0,
    frequency_penalty: float | Sequence[float] = 0.0,
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None = None,
    seed: int | Sequence[int] = 0,
    stop_token_ids: Sequence[int] | None = None,
    num_drafts: int | str | None = None,
    tree: TreeOptions | None = None,
    stats: Stats | None = None,
) -> Iterator[RowChunk]:
    """`generate`, one chunk a row and cycle as it is decided. `stats` is filled on the way.

    Arguments are checked when this is called, not at the first chunk.
    """
    op = "generate"
    if isinstance(prompts, str) or not hasattr(prompts, "__len__") or len(prompts) == 0:
        raise ValueError(f"{op}: prompts: got {prompts!r}, expected a list of prompts")
    count = requests.new_tokens(f"{op}: max_new_tokens", max_new_tokens)
    ids = []
    for i, prompt in enumerate(prompts):
        ids.append(requests.prompt_ids(f"{op}: prompts[{i}]", target, prompt))
        if target.max_length is not None and len(ids[i]) + count > target.max_length:
            raise ValueError(
                f"{op}: prompts[{i}]: got {len(ids[i])} tokens and max_new_tokens {count}, "
                f"expected at most {target.max_length} positions in all"
            )
    sampling = requests.samplings(
        op, target, len(ids), temperature, logit_bias, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
    )  # fmt: skip
    laws = [s.temperature for s in sampling]
    where = f"{op}: seed"
    if not requests.is_list(seed):
        seed = [requests.per_row(where, seed, 1, index, "integers")[0] + r for r in range(len(ids))]
    seeds = requests.per_row(where, seed, len(ids), index, "integers")
    if tree is not None and num_drafts is not None:
        raise ValueError(f"{op}: num_drafts: got {num_drafts} and a tree, expected its own depth")
    if num_drafts != "auto":
        num_drafts = requests.num_drafts(f"{op}: num_drafts", drafter, num_drafts) or None
    if stop_token_ids is not None:
        stop_token_ids = requests.integers(f"{op}: stop_token_ids", stop_token_ids)
    stats = stats if stats is not None else Stats()
    stats.accepted = [[] for _ in ids]
    options = None if tree is None else tree.settled(drafter, laws)
    if options is not None:
        requests.no_edits(op, sampling)
    if options is not None and (options.lookup or target.device.type != "cuda" or why_not(target)):
        from .tree import TreeLoop

        stops = target.stop_token_ids if stop_token_ids is None else stop_token_ids
        bits = [requests.seed_bits(s) for s in seeds]
        stops = frozenset(stops)
        loop = TreeLoop(target, drafter, ids, count, sampling, bits, stops, options, stats)
        return (RowChunk(*part) for part in loop.run())
    engine = Engine(
        target,
        drafter,
        max_batch=len(ids),
        max_length=max(map(len, ids)) + count,
        num_drafts=num_drafts,
        tree=options,
    )
    for prompt, chosen, bits in zip(ids, sampling, seeds):
        engine.add(
            prompt,
            count,
            **asdict(chosen) | {"logit_bias": dict(chosen.logit_bias)},
            seed=requests.seed_bits(bits),
            stop_token_ids=stop_token_ids,
        )
    return _raising(follow(engine, stats, range(len(ids))))


def _raising(chunks: Iterator[RowChunk]) -> Iterator[RowChunk]:
    for chunk in chunks:
        if chunk.error is not None:
            raise chunk.error
        yield chunk


def follow(engine: Engine, stats: Stats, rows: Sequence[int] | Mapping[int, int]):
    """Run an engine until nothing is left: an iterator of RowChunk, `stats` filled on the way.

    rows[request] is the row that a chunk names and that stats.accepted has a list for. A request
    that fails ends in a chunk with the error, and the others go on.
    """
    start = time.perf_counter()
    while engine.num_waiting or engine.num_running:
        step = time.perf_counter()
        chunks = engine.step()
        now = time.perf_counter()
        stats.seconds = now - start
        if chunks[0].accepted is None:
            stats.prefill_seconds += now - step
        else:
            stats.cycles += 1
        for chunk in chunks:
            row = rows[chunk.request]
            stats.tokens += len(chunk.tokens)
            if chunk.accepted is not None:
                stats.accepted[row].append(chunk.accepted)
            yield RowChunk(row, chunk.tokens, chunk.finish, chunk.error)
