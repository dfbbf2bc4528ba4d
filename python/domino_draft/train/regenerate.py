"""Responses written by the target itself: what a drafter must learn to predict.

A training response has to be the target's own text (spec of the public recipes: responses are
regenerated; a drafter trained on somebody else's answers predicts somebody else). One static batch
of slots is decoded with continuous refilling: a slot whose response ended takes the next prompt, so
the batch stays full. On CUDA one decoding step is a captured graph; nothing in it allocates or
synchronises, and the host looks at the tokens every `sync_every` steps.

Measured figures stand in the drafter's card, with their command.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from ..cache import RowCache
from ..cache_ops import embed
from ..files import replacing
from ..fused import FusedTarget
from ..row_ops import Workspace
from ..target import Target
from .data import read_arrays

LOOP_WINDOW = 96
MAX_PERIOD = 32


@dataclass
class Prompt:
    """One piece of work: continue `ids` until a stop token.

    `open_turn`: the ids end inside the user's turn; the target first finishes that turn (sampled at
    `turn_temperature`), then `turn_suffix` is appended and the result is answered like any other
    prompt. A turn that does not end in time is dropped.
    """

    ids: np.ndarray
    tag: int = 0
    open_turn: bool = False
    temperature: float = 0.0
    answer_temperature: float = 0.0


@dataclass
class Response:
    """`ids` = prompt and response, which starts at `prompt_length`; `finished` by a stop token."""

    ids: np.ndarray
    prompt_length: int
    tag: int
    temperature: float
    finished: bool


@dataclass
class _Slots:
    """Host side of the batch: who sits where and what was written so far."""

    history: np.ndarray
    count: np.ndarray
    prompt_length: np.ndarray
    prompt: list[Prompt | None] = field(default_factory=list)


def looping(history: np.ndarray, count: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Rows whose last `LOOP_WINDOW` tokens repeat with a period of at most `MAX_PERIOD`.

    Args:
        history: `[rows, length]` tokens; count: `[rows]` valid tokens; start: `[rows]` first token
            of the response.
    """
    rows = np.flatnonzero(count - start >= LOOP_WINDOW)
    window = history[rows[:, None], count[rows, None] - LOOP_WINDOW + np.arange(LOOP_WINDOW)]
    found = np.zeros(len(history), bool)
    for period in range(1, MAX_PERIOD + 1):
        found[rows] |= (window[:, period:] == window[:, :-period]).all(1)
    return found


class Regenerator:
    """A target with a static batch of decoding slots.

    Args:
        model: a `transformers` causal LM on its device, of a family that `fused.py` knows.
        slots: rows decoded together; the first `sampled_slots` draw at a temperature, the rest are
            greedy.
        max_length: positions a slot can hold, prompt included.
        stop_ids: tokens that end a response; the stop token is kept.
        graph: capture a step in a CUDA graph (ignored on the CPU).

    Raises:
        ValueError: the slots do not fit each other, or the model is of another form (CannotFuse).
    """

    def __init__(
        self,
        model,
        *,
        slots: int,
        sampled_slots: int,
        max_length: int,
        stop_ids: Sequence[int],
        seed: int,
        graph=True,
    ):
        if not 0 <= sampled_slots <= slots:
            raise ValueError(f"regenerate: sampled_slots: got {sampled_slots}, expected 0..{slots}")
        target = Target(model)
        if target.max_length is not None and max_length > target.max_length:
            raise ValueError(
                f"regenerate: max_length: got {max_length}, expected at most {target.max_length}, "
                "the positions that the target was made for"
            )
        self.target = FusedTarget(target)
        decoder, weight = self.target.decoder, self.target.embedding
        self.device = weight.device
        self.slots, self.sampled, self.max_length = slots, sampled_slots, max_length
        self.cache = RowCache(slots, max_length, self.device)
        (self.kv,) = self.cache.allocate(
            len(decoder.layers), decoder.kv_heads, decoder.dim, weight.dtype
        )
        self.rope, self.workspace = decoder.rope(max_length), Workspace(self.device)
        self.stop = torch.zeros(len(weight), dtype=torch.bool, device=self.device)
        self.stop[list(stop_ids)] = True
        self.stop_host = self.stop.cpu().numpy()
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=self.device)
        self.active = torch.zeros(slots, dtype=torch.bool, device=self.device)
        self.temperature = torch.ones(max(sampled_slots, 1), 1, device=self.device)
        self.use_graph = graph and self.device.type == "cuda"
        self.graph: torch.cuda.CUDAGraph | None = None
        torch.manual_seed(seed)

    def _step(self) -> None:
        lengths = self.cache.all_lengths
        x, _ = self.target.decoder.run(
            embed(self.tokens, self.target.embedding, 1), lengths, self.kv, self.rope,
            self.workspace,
        )  # fmt: skip
        logits = self.target.logits(x)
        best = logits.argmax(-1)
        if self.sampled:
            scaled = logits[: self.sampled].float() / self.temperature
            # Exponential race: argmax of p / E. `exponential_` never returns 0, so no token wins by
            # a division by zero.
            race = scaled.softmax(-1).div_(torch.empty_like(scaled).exponential_())
            best[: self.sampled] = race.argmax(-1)
        # A stopped slot keeps its length: it rewrites the same position until it is refilled, and
        # cannot run off the end.
        lengths += self.active
        self.tokens.copy_(torch.where(self.active, best, self.tokens))
        self.active &= ~self.stop[best] & (lengths < self.max_length - 1)

    def _steps(self, count: int) -> np.ndarray:
        out = torch.empty(count, self.slots, dtype=torch.int64, device=self.device)
        for i in range(count):
            if self.graph is not None:
                self.graph.replay()
            elif self.use_graph:
                self._capture()
                self.graph.replay()
            else:
                self._step()
            out[i] = self.tokens
        return out.cpu().numpy()

    def _capture(self) -> None:
        saved = [t.clone() for t in (self.tokens, self.active, self.cache.all_lengths)]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()
        for tensor, value in zip(
            (self.tokens, self.active, self.cache.all_lengths), saved, strict=True
        ):
            tensor.copy_(value)

    def _fill(self, rows: list[int], prompts: list[Prompt]) -> None:
        width = max(len(p.ids) for p in prompts)
        width = min(-(-width // 32) * 32, self.max_length)
        ids = np.zeros((len(rows), width), np.int64)
        for i, prompt in enumerate(prompts):
            ids[i, : len(prompt.ids)] = prompt.ids
        lengths = torch.tensor([len(p.ids) for p in prompts], device=self.device)
        index = torch.tensor(rows, device=self.device)
        inputs = torch.from_numpy(ids).to(self.device)
        target = self.target
        # The rows are anywhere, and a prefill's are neighbours: it has a cache of its own.
        layers, two, _, heads, _, dim = self.kv.shape
        held = self.kv.new_empty(layers, two, len(rows), heads, width, dim)
        target.decoder.prefill(
            target.embedding[inputs.flatten()], 0, torch.zeros_like(lengths), held, self.rope,
            self.workspace,
        )  # fmt: skip
        self.kv[:, :, index, :, :width] = held
        # The first step feeds the prompt's last token again: it rewrites the same key and yields
        # the first new token.
        self.cache.all_lengths[index] = lengths - 1
        self.tokens[index] = inputs[torch.arange(len(rows), device=self.device), lengths - 1]
        self.active[index] = True
        sampled = [
            (row, p.temperature) for row, p in zip(rows, prompts, strict=True) if row < self.sampled
        ]
        if sampled:
            at = torch.tensor([row for row, _ in sampled], device=self.device)
            self.temperature[at, 0] = torch.tensor([t for _, t in sampled], device=self.device)

    @torch.inference_mode()
    def run(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int,
        turn_suffix: Sequence[int] = (),
        max_seconds: float = float("inf"),
        sync_every: int = 16,
        prefill_rows: int = 256,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Response]:
        """Continue every prompt; stops early, with what is finished, after `max_seconds`.

        Prompts with a temperature above 0 run in the sampled slots, the others in the greedy ones.
        Responses that fall into a loop are ended there (`finished=False`). Order of the result is
        order of completion.
        """
        for i, prompt in enumerate(prompts):
            if not 0 < len(prompt.ids) < self.max_length:
                raise ValueError(
                    f"regenerate: prompts[{i}]: got {len(prompt.ids)} tokens, "
                    f"expected 1..{self.max_length - 1}"
                )
        # Shortest waiting time first would starve long prompts; the given order is kept, so a seed
        # decides it outside.
        queues = {
            True: deque(p for p in prompts if p.temperature > 0),
            False: deque(p for p in prompts if p.temperature <= 0),
        }
        # The answers to open turns queue later, and they need a slot of their kind too.
        kinds = {p.temperature > 0 for p in prompts}
        kinds |= {p.answer_temperature > 0 for p in prompts if p.open_turn}
        if True in kinds and not self.sampled:
            raise ValueError(
                "regenerate: sampled_slots: got 0, expected at least 1 for prompts with a "
                "temperature"
            )
        if False in kinds and self.sampled == self.slots:
            raise ValueError(
                f"regenerate: sampled_slots: got {self.sampled}, expected a greedy slot for greedy "
                "prompts"
            )
        slots = _Slots(
            np.zeros((self.slots, self.max_length + sync_every), np.int32),
            np.zeros(self.slots, np.int64),
            np.zeros(self.slots, np.int64),
            [None] * self.slots,
        )
        free = {True: list(range(self.sampled)), False: list(range(self.sampled, self.slots))}
        done: list[Response] = []
        started, rounds, written = time.perf_counter(), 0, 0
        while time.perf_counter() - started < max_seconds:
            for kind in (True, False):
                # Refilling in groups keeps the prefill's launches few; at the start and the end any
                # group will do.
                while free[kind] and queues[kind]:
                    idle = len(free[kind])
                    if idle < min(prefill_rows, len(queues[kind])) and idle < (self.slots // 8):
                        break
                    take = min(idle, prefill_rows, len(queues[kind]))
                    rows = [free[kind].pop() for _ in range(take)]
                    group = [queues[kind].popleft() for _ in range(take)]
                    self._fill(rows, group)
                    for row, prompt in zip(rows, group, strict=True):
                        slots.prompt[row] = prompt
                        slots.prompt_length[row] = slots.count[row] = len(prompt.ids)
                        slots.history[row, : len(prompt.ids)] = prompt.ids
            busy = np.array([p is not None for p in slots.prompt])
            if not busy.any():
                break
            new = self._steps(sync_every)
            rounds += 1
            ended = self._collect(slots, busy, new, max_new_tokens, check_loops=rounds % 4 == 0)
            for row, finished in ended:
                prompt = slots.prompt[row]
                ids = slots.history[row, : slots.count[row]].copy()
                written += len(ids) - len(prompt.ids)
                if not prompt.open_turn:
                    done.append(
                        Response(ids, len(prompt.ids), prompt.tag, prompt.temperature, finished)
                    )
                elif finished and len(ids) + len(turn_suffix) < self.max_length - 16:
                    answer = Prompt(
                        np.concatenate([ids, np.asarray(turn_suffix, ids.dtype)]), prompt.tag,
                        temperature=prompt.answer_temperature,
                    )  # fmt: skip
                    queues[answer.temperature > 0].append(answer)
                slots.prompt[row] = None
                free[row < self.sampled].append(row)
            if ended:
                self.active[torch.tensor([row for row, _ in ended], device=self.device)] = False
            if progress:
                progress(len(done), written)
        return done

    def _collect(
        self, slots: _Slots, busy, new, max_new_tokens: int, check_loops: bool
    ) -> list[tuple[int, bool]]:
        steps = new.shape[0]
        rows = np.flatnonzero(busy)
        tokens = new.T[rows]
        slots.history[rows[:, None], slots.count[rows, None] + np.arange(steps)] = tokens
        stops = self.stop_host[tokens]
        stopped = stops.any(1)
        room = np.minimum(max_new_tokens, self.max_length - 1 - slots.prompt_length[rows])
        used = (
            slots.count[rows]
            - slots.prompt_length[rows]
            + np.where(stopped, stops.argmax(1) + 1, steps)
        )
        # A stop token past the room that is left does not count: the response was cut before it.
        finished = stopped & (used <= room)
        slots.count[rows] = slots.prompt_length[rows] + np.minimum(used, room)
        ended = finished | (used >= room)
        if check_loops:
            ended |= looping(slots.history[rows], slots.count[rows], slots.prompt_length[rows])
        return [(int(r), bool(f)) for r, f, e in zip(rows, finished, ended, strict=True) if e]


def save_responses(path, responses: Sequence[Response]) -> None:
    """Write responses as one `.npz` (written to a temporary name, then renamed).

    Arrays: `tokens` uint16 or int32 `[sum of lengths]`, `offsets` int64 `[n+1]`, `prompt_lengths`
    int32 `[n]`, `tags` int32 `[n]`, `temperatures` float32 `[n]`, `finished` bool `[n]`.
    """
    lengths = np.array([len(r.ids) for r in responses], np.int64)
    tokens = np.concatenate([r.ids for r in responses]) if responses else np.zeros(0, np.int32)
    small = tokens.size == 0 or tokens.max() < 2**16
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(
            file,
            tokens=tokens.astype(np.uint16 if small else np.int32),
            offsets=np.concatenate([[0], lengths.cumsum()]),
            prompt_lengths=np.array([r.prompt_length for r in responses], np.int32),
            tags=np.array([r.tag for r in responses], np.int32),
            temperatures=np.array([r.temperature for r in responses], np.float32),
            finished=np.array([r.finished for r in responses], bool),
        )


def load_responses(path) -> list[Response]:
    """Read what `save_responses` wrote."""
    data = read_arrays(Path(path))
    offsets = data["offsets"]
    return [
        Response(
            data["tokens"][offsets[i] : offsets[i + 1]].astype(np.int32),
            int(data["prompt_lengths"][i]),
            int(data["tags"][i]),
            float(data["temperatures"][i]),
            bool(data["finished"][i]),
        )
        for i in range(len(offsets) - 1)
    ]


def load_prompts(
    path,
    *,
    seed: int,
    sampled_fraction: float,
    temperature: float,
    turn_temperature: float,
    shard: tuple[int, int],
) -> list[Prompt]:
    """Prompts of an `.npz` of `tokens`, `offsets`, `kind` (1 = open user turn) and `domain`.

    Their order is set by `seed`. A `sampled_fraction` of the answers is drawn at `temperature`, the
    rest is greedy. `shard` = (index, count) keeps every count-th prompt, so that several processes
    share one file.
    """
    if not 0 <= shard[0] < shard[1]:
        raise ValueError(
            f"regenerate: shard: got {shard[0]} of {shard[1]}, expected an index below the count"
        )
    data = read_arrays(Path(path))
    for name in ("tokens", "offsets", "kind", "domain"):
        if name not in data:
            raise ValueError(f"regenerate: prompts: {name}: missing in {path}, expected an array")
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(data["kind"]))
    answers = np.where(rng.random(len(order)) < sampled_fraction, temperature, 0.0)
    prompts = []
    for i in order[shard[0] :: shard[1]]:
        ids = data["tokens"][data["offsets"][i] : data["offsets"][i + 1]].astype(np.int32)
        open_turn = bool(data["kind"][i])
        first = turn_temperature if open_turn else answers[i]
        prompts.append(
            Prompt(ids, int(data["domain"][i]), open_turn, float(first), float(answers[i]))
        )
    return prompts


def run(
    target: str,
    prompts: str,
    output: str,
    *,
    slots: int = 1024,
    sampled_slots: float = 0.4,
    max_length: int = 512,
    max_new_tokens: int = 320,
    sampled_fraction: float = 0.3,
    temperature: float = 0.7,
    turn_temperature: float = 0.8,
    max_seconds: float = float("inf"),
    seed: int = 0,
    shard: tuple[int, int] = (0, 1),
    device: str = "cpu",
    dtype: str = "bfloat16",
) -> dict:
    """Answer the prompts of a file with the model in folder `target` and write `output`.

    Returns counts and tokens/s.

    `sampled_slots` is the share of slots that draw at a temperature (open user turns do, too).
    """
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (Path(target) / "config.json").is_file():
        raise ValueError(f"regenerate: target: got {target!r}, expected a model's folder")
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, dtype)).to(device)
    stop = Target(model).stop_token_ids
    suffix = _turn_suffix(tokenizer)
    regenerator = Regenerator(
        model,
        slots=slots,
        sampled_slots=int(slots * sampled_slots),
        max_length=max_length,
        stop_ids=stop,
        seed=seed,
    )
    work = load_prompts(
        prompts, seed=seed, sampled_fraction=sampled_fraction, temperature=temperature,
        turn_temperature=turn_temperature, shard=shard,
    )  # fmt: skip
    fitting = [p for p in work if len(p.ids) < max_length - 32]
    started = time.perf_counter()
    # stdout is for the counts
    columns = TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=False) as bar:
        task = bar.add_task("regenerate", total=None)
        out = regenerator.run(
            fitting,
            max_new_tokens=max_new_tokens,
            turn_suffix=suffix,
            max_seconds=max_seconds,
            progress=lambda done, new: bar.update(
                task, description=f"{done} responses, {new} tokens"
            ),
        )
    seconds = time.perf_counter() - started
    save_responses(output, out)
    tokens = sum(len(r.ids) - r.prompt_length for r in out)
    return {
        "prompts": len(work),
        "too_long": len(work) - len(fitting),
        "responses": len(out),
        "response_tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "finished": sum(r.finished for r in out),
    }


def _turn_suffix(tokenizer) -> list[int]:
    """What stands between a user turn and the answer, read off the tokenizer's chat template."""
    marker = "\u241f"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": marker}], tokenize=False, add_generation_prompt=True
    )
    after = text.split(marker, 1)[1]
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    stop = tokenizer.eos_token_id
    if stop not in ids:
        raise ValueError(
            f"regenerate: chat template: got {after!r} after a user turn, expected the stop token "
            f"in it"
        )
    return ids[ids.index(stop) + 1 :]
