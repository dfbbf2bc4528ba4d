"""Accepted length, speed and token identity of drafters on sets of prompts.

Every figure comes from running :func:`domino_draft.generate` itself: the target alone first (that
fixes each prompt's continuation), then each drafter in the same process on the same batches.

- *Accepted length* of a set = tokens emitted / (cycle, row) pairs, a ratio of sums over its
  prompts: accepted drafts + 1 per cycle. The token that the prompt's own forward yields belongs to
  no cycle. A cycle that a stop token cuts counts up to it; one that `max_new_tokens` cuts counts
  whole.
- *Without tails*: greedy text of a small model often ends in a loop, which any drafter predicts.
  :func:`repetitive_tail` says where a loop begins; cycles that start after that point are left out.
- *Intervals*: 95% percentile bootstrap over prompts; differences between two drafters resample the
  same prompts for both (paired).
- *Identical*: fraction of prompts whose output equals the target's own, token for token. The rest
  is judged by :func:`domino_draft.greedy_report`, both outputs of a pair that differs: near ties
  and violations.
"""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .files import lines_of

if TYPE_CHECKING:
    from .drafter import Drafter
    from .target import Target
    from .tree import TreeOptions

MAX_PERIOD = 32
MIN_REPEATS = 3
MIN_TAIL = 16
RESAMPLES = 10_000
TARGET = "target"


def repetitive_tail(
    tokens: Sequence[int],
    max_period: int = MAX_PERIOD,
    min_repeats: int = MIN_REPEATS,
    min_tail: int = MIN_TAIL,
) -> int:
    """How many of `tokens` to keep so that one period of a final loop remains.

    A loop is a suffix that repeats with a period of at most `max_period`, `min_repeats` times or
    more (the last time may be cut short after that) and is at least `min_tail` long, which spares
    a number such as 1000000. The text is cut at the start of the second repetition. Text without
    such a suffix is kept whole. Give the tokens without the stop token.
    """
    ids = np.asarray(tokens)
    keep = len(ids)
    for period in range(1, min(max_period, len(ids) // min_repeats) + 1):
        differs = np.flatnonzero(ids[period:] != ids[:-period])
        # ids[start:] has this period, and its second repetition starts at start + period
        start = int(differs[-1]) + 1 if len(differs) else 0
        if len(ids) - start >= max(min_repeats * period, min_tail):
            keep = min(keep, start + period)
    return keep


def ratio_of_sums(emitted: np.ndarray, cycles: np.ndarray) -> float:
    """sum(emitted) / sum(cycles), NaN if no cycle is left."""
    total = float(np.sum(cycles))
    return float(np.sum(emitted)) / total if total else float("nan")


def bootstrap(
    statistic: Callable[[np.ndarray], np.ndarray],
    prompts: int,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, float]:
    """95% percentile interval of `statistic` over resampled prompts.

    `statistic` gets weights [resamples, prompts] (how often each prompt was drawn) and returns one
    value a resample. One `seed` draws the same prompts for every statistic.
    """
    generator = np.random.default_rng(seed)
    weights = generator.multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples)
    with np.errstate(invalid="ignore"):  # a resample can be without a cycle
        low, high = np.nanpercentile(statistic(weights), (2.5, 97.5))
    return float(low), float(high)


def accepted_length(emitted: np.ndarray, cycles: np.ndarray, **options: Any) -> dict[str, Any]:
    """Ratio of sums over prompts with its interval: {"value", "low", "high", "cycles"}."""
    emitted, cycles = np.asarray(emitted, float), np.asarray(cycles, float)
    low, high = bootstrap(lambda w: (w @ emitted) / (w @ cycles), len(cycles), **options)
    value = ratio_of_sums(emitted, cycles)
    return {"value": value, "low": low, "high": high, "cycles": int(cycles.sum())}


def difference(
    first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray], **options: Any
) -> dict[str, float]:
    """Accepted length of `first` minus `second`, each (emitted, cycles) over the same prompts."""
    (a, b), (c, d) = (tuple(np.asarray(x, float) for x in pair) for pair in (first, second))

    def statistic(weights: np.ndarray) -> np.ndarray:
        return (weights @ a) / (weights @ b) - (weights @ c) / (weights @ d)

    low, high = bootstrap(statistic, len(a), **options)
    return {"value": ratio_of_sums(a, b) - ratio_of_sums(c, d), "low": low, "high": high}


@dataclass(frozen=True)
class Prompt:
    """A row of an evaluation set: ids, or (`after`) a second turn to the answer of another row."""

    set: str
    id: str
    text: str
    ids: list[int] | None = None
    after: str | None = None


def load_prompts(
    path: str | Path, sets: Iterable[str] = (), limit: int | None = None
) -> list[Prompt]:
    """Prompts of a JSONL file with "set", "id", "text" and "ids" (or "after") a line.

    sets: names to keep, all if empty. limit: that many prompts a set, evenly spread over it.

    Raises:
        ValueError: a name in `sets` that is not in the file, a second turn without its first, a
            line that is no prompt (named), an id that comes twice, or no prompt at all.
    """
    rows = [
        _read_prompt(line, f"{Path(path).name}:{number}")
        for number, line in enumerate(lines_of(path), 1)
        if line.strip()
    ]
    if not rows:
        raise ValueError(f"load_prompts: path: got {path} without a prompt, expected some")
    twice = [name for name, count in Counter(row.id for row in rows).items() if count > 1]
    if twice:  # results are kept by id
        raise ValueError(f"load_prompts: id: got {twice[0]!r} twice, expected distinct ids")
    found = list(dict.fromkeys(row.set for row in rows))
    wanted = list(sets) or found
    for name in wanted:
        if name not in found:
            raise ValueError(f"load_prompts: sets: got {name!r}, expected some of {found}")
    chosen = []
    for name in wanted:
        part = [row for row in rows if row.set == name]
        if limit is not None and limit < len(part):
            picked = {round(i * (len(part) - 1) / max(limit - 1, 1)) for i in range(limit)}
            kept = [part[i] for i in sorted(picked)]
            needed = {row.after for row in kept} - {row.id for row in kept} - {None}
            part = [row for row in part if row in kept or row.id in needed]
        chosen += part
    first = {row.id for row in chosen if row.after is None}
    for row in chosen:
        if row.after is not None and row.after not in first:
            raise ValueError(
                f"load_prompts: {row.id}: got after={row.after!r}, expected the id of a first turn"
            )
    return chosen


def _read_prompt(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"load_prompts: {where}: got no JSON ({error})") from error
    record = record if isinstance(record, dict) else {}
    row = Prompt(*(record.get(name) for name in ("set", "id", "text", "ids", "after")))
    for name in ("set", "id", "text"):
        if not isinstance(getattr(row, name), str):
            raise ValueError(
                f"load_prompts: {where}: {name}: got {getattr(row, name)!r}, expected a string"
            )
    listed = isinstance(row.ids, list) and row.ids and all(type(i) is int for i in row.ids)
    if not listed and (row.ids or not isinstance(row.after, str)):
        raise ValueError(
            f"load_prompts: {where}: ids: got {row.ids!r}, expected token ids (or after, the id of "
            "a first turn)"
        )
    return row


def next_turn(tokenizer, text: str) -> list[int]:
    """Ids that follow an answer (without its stop token) when the user goes on with `text`."""
    mark = "\u241f"
    turns = [("user", "?"), ("assistant", mark), ("user", text)]
    whole = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns],
        tokenize=False,
        add_generation_prompt=True,
    )
    return tokenizer(whole.split(mark)[1], add_special_tokens=False)["input_ids"]


def batches(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """Batches of one set each, prompts of similar length together."""
    result = []
    for name in dict.fromkeys(p.set for p in prompts):
        part = sorted((p for p in prompts if p.set == name), key=lambda p: len(p.ids))
        result += [part[i : i + size] for i in range(0, len(part), size)]
    return result


def complete_turns(
    target: Target, prompts: Sequence[Prompt], *, max_new_tokens: int, batch_size: int
) -> list[Prompt]:
    """The prompts with second turns filled in after the target's own greedy first answers."""
    from .decode import generate

    needed = {p.after for p in prompts} - {None}
    first = {p.id: p for p in prompts if p.id in needed}
    stops, history = set(target.stop_token_ids), {}
    for batch in batches(list(first.values()), batch_size):
        done = generate(target, None, [p.ids for p in batch], max_new_tokens=max_new_tokens)
        for prompt, ids in zip(batch, done.sequences):
            history[prompt.id] = prompt.ids + (ids[:-1] if ids[-1] in stops else ids)
    return [
        p
        if p.after is None
        else Prompt(p.set, p.id, p.text, history[p.after] + next_turn(target.tokenizer, p.text))
        for p in prompts
    ]


@dataclass(frozen=True)
class Run:
    """One prompt decoded by one drafter; cycles = tokens emitted by each cycle."""

    output: list[int]
    stopped: bool
    cycles: list[int]

    def counts(self, keep: int | None = None) -> tuple[int, int]:
        """(tokens emitted, cycles), of the cycles that start before output token `keep`."""
        emitted, position, number = 0, 1, 0
        for size in self.cycles:
            if keep is not None and position >= keep:
                break
            if self.stopped:
                size = min(size, len(self.output) - position)
            emitted, position, number = emitted + size, position + size, number + 1
        return emitted, number


def evaluate(
    target: Target,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 256,
    batch_size: int = 1,
    num_drafts: Mapping[str, int] | None = None,
    trees: Mapping[str, TreeOptions] | None = None,
    resamples: int = RESAMPLES,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Decode every prompt with the target alone and with each drafter, and compare.

    Args:
        drafters: by the names that the report uses.
        num_drafts: proposals a cycle by drafter name (a drafter's own default otherwise).
        trees: drafters that draft trees, by name.
        progress: called with (batches done, batches in all).

    Returns:
        A report that `json` can write:

        - "run": device, dtype, threads, versions, date, batch_size, max_new_tokens, num_drafts,
          trees
        - "sets": by set name {"prompts", "tokens" (of the target's outputs), "tail_fraction" (of
          those tokens), "target": {"tokens_per_second"}, "drafters": by name {"accepted_length"
          and "accepted_length_without_tails": {"value", "low", "high", "cycles"}, "identical"
          (fraction of prompts), "near_tie_tokens" and "violation_tokens" (where outputs are not
          identical: of the drafter's and the target's own), "tokens_per_second", "speedup"},
          "differences": [{"first", "second", "tails" (bool), "value", "low", "high"}]}
        - "prompts": [{"set", "id", "tokens", "kept" (tokens before the tail), "identical" and
          "counts" by drafter (emitted, cycles, emitted and cycles without tails)}]
    """
    from .losslessness import greedy_report

    if not prompts:
        raise ValueError("evaluate: prompts: got none, expected at least one")
    if TARGET in drafters:
        raise ValueError(f"evaluate: drafters: got the name {TARGET!r}, expected another one")
    prompts = complete_turns(target, prompts, max_new_tokens=max_new_tokens, batch_size=batch_size)
    runs, speed = _decode_all(
        target, drafters, prompts, max_new_tokens, batch_size, num_drafts or {}, trees or {},
        progress,
    )  # fmt: skip
    stops = set(target.stop_token_ids)

    def kept(run: Run) -> int:
        text = run.output[:-1] if run.output[-1] in stops else run.output
        cut = repetitive_tail(text)
        return len(run.output) if cut == len(text) else cut

    rows, near = [], {}
    for prompt in prompts:
        own = runs[TARGET][prompt.id]
        row = {"set": prompt.set, "id": prompt.id, "tokens": len(own.output), "kept": kept(own)}
        row["identical"], row["counts"] = {}, {}
        for name in drafters:
            run = runs[name][prompt.id]
            row["identical"][name] = run.output == own.output
            row["counts"][name] = [*run.counts(), *run.counts(kept(run))]
            if run.output != own.output:
                # Either of the two may be the one that took the other side of a near tie.
                both = [greedy_report(target, prompt.ids, o) for o in (run.output, own.output)]
                ties, violations = near.get((prompt.set, name), (0, 0))
                near[prompt.set, name] = (
                    ties + sum(found.near_ties for found in both),
                    violations + sum(found.violations for found in both),
                )
        rows.append(row)
    names = dict.fromkeys(p.set for p in prompts)
    return {
        "run": environment(target)
        | {
            "batch_size": batch_size,
            "max_new_tokens": max_new_tokens,
            "num_drafts": {
                n: (num_drafts or {}).get(n, d.default_drafts)
                for n, d in drafters.items()
                if n not in (trees or {})
            },
            "trees": {name: asdict(tree) for name, tree in (trees or {}).items()},
        },
        "sets": {
            name: _summary(
                [r for r in rows if r["set"] == name],
                list(drafters),
                speed[name],
                {d: near.get((name, d), (0, 0)) for d in drafters},
                resamples,
            )
            for name in names
        },
        "prompts": rows,
    }


def _decode_all(
    target, drafters, prompts, max_new_tokens, batch_size, num_drafts, trees, progress
):  # fmt: skip
    """runs[arm][prompt id], and speed[set][arm] = [tokens, seconds]."""
    from .decode import generate

    arms = {TARGET: None} | dict(drafters)
    runs: dict[str, dict[str, Run]] = {name: {} for name in arms}
    speed: dict[str, dict[str, list[float]]] = {}
    work = batches(prompts, batch_size)
    for name, drafter in arms.items():  # kernels load and allocators warm up outside the clock
        first = [p.ids for p in work[0]]
        generate(target, drafter, first, max_new_tokens=4, tree=trees.get(name))
    for index, batch in enumerate(work):
        for name, drafter in arms.items():
            done = generate(
                target,
                drafter,
                [p.ids for p in batch],
                max_new_tokens=max_new_tokens,
                num_drafts=num_drafts.get(name),
                tree=trees.get(name),
            )
            clock = speed.setdefault(batch[0].set, {}).setdefault(name, [0, 0.0])
            clock[0] += done.stats.tokens
            clock[1] += done.stats.seconds
            for row, prompt in enumerate(batch):
                runs[name][prompt.id] = Run(
                    done.sequences[row], done.finish[row] == "stop", done.stats.accepted[row]
                )
        if progress:
            progress(index + 1, len(work))
    return runs, speed


def _summary(rows, drafters, speed, near, resamples) -> dict[str, Any]:
    rates = {name: tokens / seconds for name, (tokens, seconds) in speed.items()}
    counts = {name: np.array([row["counts"][name] for row in rows], float).T for name in drafters}
    tokens = sum(row["tokens"] for row in rows)
    pairs = [(a, b, tails) for a, b in combinations(drafters, 2) for tails in (True, False)]
    columns = {True: slice(0, 2), False: slice(2, 4)}
    return {
        "prompts": len(rows),
        "tokens": tokens,
        "tail_fraction": 1 - sum(row["kept"] for row in rows) / tokens,
        TARGET: {"tokens_per_second": rates[TARGET]},
        "drafters": {
            name: {
                "accepted_length": accepted_length(*counts[name][:2], resamples=resamples),
                "accepted_length_without_tails": accepted_length(
                    *counts[name][2:], resamples=resamples
                ),
                "identical": sum(row["identical"][name] for row in rows) / len(rows),
                "near_tie_tokens": near[name][0],
                "violation_tokens": near[name][1],
                "tokens_per_second": rates[name],
                "speedup": rates[name] / rates[TARGET],
            }
            for name in drafters
        },
        "differences": [
            {"first": a, "second": b, "tails": tails}
            | difference(counts[a][columns[tails]], counts[b][columns[tails]], resamples=resamples)
            for a, b, tails in pairs
        ],
    }


def environment(target: Target) -> dict[str, Any]:
    """What a report says of the machine: date, device, threads, dtype, versions."""
    import torch
    import transformers

    cuda = target.device.type == "cuda"
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": torch.cuda.get_device_name(target.device) if cuda else _cpu_name(),
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def markdown(report: Mapping[str, Any]) -> str:
    """The report's figures as two Markdown tables: drafters by set, and paired differences."""

    def interval(found: Mapping[str, float]) -> str:
        return f"{found['value']:.2f} ({found['low']:.2f} to {found['high']:.2f})"

    lines = [
        "| set | drafter | accepted length (95%) | without tails (95%) | tokens/s | × target alone "
        "| identical | near ties / violations |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in report["sets"].items():
        rate = found[TARGET]["tokens_per_second"]
        lines.append(f"| {name} ({found['prompts']}) | target alone | 1 | 1 | {rate:.1f} | 1 | | |")
        for drafter, row in found["drafters"].items():
            lines.append(
                f"| {name} | {drafter} | {interval(row['accepted_length'])} "
                f"| {interval(row['accepted_length_without_tails'])} "
                f"| {row['tokens_per_second']:.1f} | {row['speedup']:.2f} "
                f"| {100 * row['identical']:.1f}% "
                f"| {row['near_tie_tokens']} / {row['violation_tokens']} |"
            )
    pairs = [(name, row) for name, found in report["sets"].items() for row in found["differences"]]
    if pairs:
        lines += ["", "| set | difference | tails | accepted length (95%) |", "|---|---|---|---|"]
    for name, row in pairs:
        tails = "with" if row["tails"] else "without"
        lines.append(f"| {name} | {row['first']} − {row['second']} | {tails} | {interval(row)} |")
    return "\n".join(lines)
