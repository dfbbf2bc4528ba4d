"""Tokens per second of the engine on given prompts, with and without drafting.

All prompts are queued at once and run `batch` at a time, the target alone first, then each drafter,
in one process on the same prompts. Seconds are of the whole run, prompts' forwards included.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .engine import Engine
from .evaluate import TARGET, environment
from .files import lines_of, replacing
from .smollm2 import chat_prompt
from .tree import TreeOptions

if TYPE_CHECKING:
    from .drafter import Drafter
    from .target import Target


def load_prompts(
    path: str | Path, tokenizer, chat: bool, limit: int | None, thinking: bool | None = None
) -> list[list[int]]:
    """Token ids of a JSONL file's first `limit` lines.

    A line has "ids", or "messages" (turns), or "text" or "prompt": with `chat` that is one user
    turn, otherwise the prompt itself. A line of a second turn ("after", no ids) is left out.
    thinking: see `chat_text`.

    Raises:
        ValueError: no prompt is left, or a line is none (the file and the line are named).
    """
    found: list[list[int]] = []
    for number, line in enumerate(lines_of(path), 1):
        if not line.strip() or (limit is not None and len(found) == limit):
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: got no JSON: {error}") from None
        row = row if isinstance(row, dict) else {}
        text = row.get("text", row.get("prompt"))
        if ids := row.get("ids"):
            if not isinstance(ids, list) or any(type(i) is not int for i in ids):
                raise ValueError(f"{path}:{number}: ids: got {ids!r}, expected token ids")
            found.append(ids)
        elif row.get("after"):
            continue
        elif row.get("messages"):
            found.append(chat_prompt(tokenizer, row["messages"], thinking))
        elif isinstance(text, str) and text:
            ids = chat_prompt(tokenizer, text, thinking) if chat else tokenizer(text)["input_ids"]
            found.append(ids)
        else:
            raise ValueError(f"{path}:{number}: got none of ids, messages, text, prompt")
    if not found:
        raise ValueError(f"{path}: got no prompt")
    return found


def make_engines(
    target: Target,
    drafters: Mapping[str, Drafter],
    *,
    max_batch: int,
    max_length: int,
    num_drafts: Mapping[str, int | str | TreeOptions] | None = None,
) -> dict[str, Engine]:
    """An engine for the target alone and one for each drafter: what `measure` runs. num_drafts: a
    number, "auto", or the trees that are drafted (fused layers only)."""
    if TARGET in drafters:
        raise ValueError(f"measure: drafters: got the name {TARGET!r}, expected another one")
    arms: dict[str, Drafter | None] = {TARGET: None} | dict(drafters)
    engines = {}
    for name, arm in arms.items():
        asked = (num_drafts or {}).get(name)
        shape = {"tree": asked} if isinstance(asked, TreeOptions) else {"num_drafts": asked}
        engines[name] = Engine(target, arm, max_batch=max_batch, max_length=max_length, **shape)
    return engines


def measure(
    target: Target,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Sequence[int]],
    *,
    batch_sizes: Sequence[int] = (1,),
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    num_drafts: Mapping[str, int | str | TreeOptions] | None = None,
    repeats: int = 1,
    engines: Mapping[str, Engine] | None = None,
    outputs: dict[tuple[int, str], list[list[int]]] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Run all prompts at every batch size with the target alone and with each drafter.

    Prompt i has the seed `seed` + i. Each run is repeated; seconds are the median. engines: made by
    `make_engines` for these drafters, large enough, to share between calls; None: made here.
    outputs: gets the texts of every (batch size, arm).

    Returns:
        A report that `json` can write: "run" (machine, versions, settings) and "rows", one for each
        batch size and arm: {"batch", "drafter", "tokens", "seconds", "tokens_per_second", "cycles",
        "accepted_length" (tokens emitted by a cycle and request, ratio of sums), "accepted" (how
        often a cycle emitted 1, 2, ... tokens), "speedup" (tokens/s over the target alone at this
        batch size), "identical" (fraction of outputs equal to those of the target alone; None with
        a temperature, where both follow one law with different noise)}.
    """
    asked = num_drafts or {}
    for i, prompt in enumerate(prompts):
        if len(prompt) + max_new_tokens > (target.max_length or sys.maxsize):
            raise ValueError(
                f"measure: prompts[{i}]: got {len(prompt)} tokens and max_new_tokens "
                f"{max_new_tokens}, expected at most {target.max_length} positions in all"
            )
    if engines is None:
        longest = max(map(len, prompts)) + max_new_tokens
        engines = make_engines(
            target, drafters, max_batch=max(batch_sizes), max_length=longest, num_drafts=asked
        )
    rows, done = [], 0
    for batch in batch_sizes:
        texts: dict[str, list[list[int]]] = {}
        runs: dict[str, list[tuple]] = {name: [] for name in engines}
        for engine in engines.values():
            # Kernels load, allocators warm up and graphs are captured, of all sizes that a batch
            # passes as it runs empty, outside the clock: once in the life of a server.
            engine.max_batch = batch
            engine.warmup(range(1, batch + 1), sampled=temperature > 0)
            # A prompt's size is captured when it comes back. Which ones join together depends on
            # when others end, so where graphs are captured these are whole runs.
            new = max_new_tokens if engine.mode == "captured" else min(4, max_new_tokens)
            for _ in range(2):
                _run(engine, prompts, new, temperature, seed)
        for _ in range(repeats):  # arms in turn, so that a slow minute hits all of them
            for name, engine in engines.items():
                runs[name].append(_run(engine, prompts, max_new_tokens, temperature, seed))
                done += 1
                if progress:
                    progress(done, len(batch_sizes) * repeats * len(engines))
        for name, found in runs.items():
            texts[name], cycles, accepted, _ = found[0]
            tokens = sum(map(len, texts[name]))
            seconds = statistics.median(run[3] for run in found)
            if outputs is not None:
                outputs[batch, name] = texts[name]
            emitted = sum(size * count for size, count in accepted.items())
            row = {
                "batch": batch,
                "drafter": name,
                "tokens": tokens,
                "seconds": seconds,
                "tokens_per_second": tokens / seconds,
                "cycles": cycles,
                "accepted_length": emitted / max(sum(accepted.values()), 1),
                "accepted": [accepted[size] for size in range(1, max(accepted, default=0) + 1)],
                "identical": None if temperature else _identical(texts[name], texts[TARGET]),
            }
            alone = next((r for r in rows if r["batch"] == batch), row)
            row["speedup"] = row["tokens_per_second"] / alone["tokens_per_second"]
            rows.append(row)
    settings = {
        "prompts": len(prompts),
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
        "repeats": repeats,
        "num_drafts": {n: _told(asked.get(n, d.default_drafts)) for n, d in drafters.items()},
    }
    return {"run": environment(target) | settings, "rows": rows}


def _told(drafts: int | str | TreeOptions):
    return asdict(drafts) if isinstance(drafts, TreeOptions) else drafts


def _identical(texts: list, wanted: list) -> float:
    return sum(a == b for a, b in zip(texts, wanted)) / len(wanted)


def _run(engine: Engine, prompts, max_new_tokens, temperature, seed):
    """(texts, cycles, how often a cycle emitted n tokens, seconds) of all prompts."""
    start = time.perf_counter()
    numbers = {}  # which prompt a request is: an engine counts on from run to run
    for i, prompt in enumerate(prompts):
        number = engine.add(prompt, max_new_tokens, temperature=temperature, seed=seed + i)
        numbers[number] = i
    texts: list[list[int]] = [[] for _ in prompts]
    accepted: Counter[int] = Counter()
    cycles = 0
    while engine.num_waiting or engine.num_running:
        chunks = engine.step()
        cycles += chunks[0].accepted is not None
        for chunk in chunks:
            if chunk.error is not None:
                raise chunk.error
            texts[numbers[chunk.request]] += chunk.tokens
            if chunk.accepted is not None:
                accepted[chunk.accepted] += 1
    return texts, cycles, accepted, time.perf_counter() - start


def markdown(report: Mapping[str, Any]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| batch | drafter | tokens | seconds | tokens/s | × target alone | accepted length "
        "| identical |",
        "|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in report["rows"]:
        alone = row["drafter"] == TARGET
        same = "" if alone or row["identical"] is None else f"{row['identical']:.1%}"
        lines.append(
            f"| {row['batch']} | {'target alone' if alone else row['drafter']} | {row['tokens']} "
            f"| {row['seconds']:.2f} | {row['tokens_per_second']:.1f} | {row['speedup']:.2f} "
            f"| {row['accepted_length']:.2f} | {same} |"
        )
    return "\n".join(lines)


def check_plot(path: str | Path) -> None:
    """Refuse, before anything is measured, a plot that cannot be drawn.

    Raises:
        ImportError: there is no matplotlib. ValueError: it does not write files of this ending.
    """
    kind = Path(path).suffix.lstrip(".")
    kinds = _figure().canvas.get_supported_filetypes()
    if kind not in kinds:
        raise ValueError(f"plot: got a file ending {kind!r}, expected one of {sorted(kinds)}")


def _figure(**options):
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "plot: needs matplotlib: pip install matplotlib, or this package's extra [plot]"
        ) from None
    return Figure(**options)


def plot(report: Mapping[str, Any], path: str | Path) -> None:
    """Tokens per second by batch size, and how many tokens a cycle emitted at the first of them."""
    figure = _figure(figsize=(9, 3.6), layout="constrained")
    speed, lengths = figure.subplots(1, 2)
    rows = report["rows"]
    sizes = list(dict.fromkeys(row["batch"] for row in rows))
    names = list(dict.fromkeys(row["drafter"] for row in rows))
    for number, name in enumerate(names):
        mine = [row for row in rows if row["drafter"] == name]
        label = "target alone" if name == TARGET else name
        places = [sizes.index(row["batch"]) for row in mine]
        values = [row["tokens_per_second"] for row in mine]
        speed.plot(places, values, marker="o", label=label, color=f"C{number}")
        if name != TARGET:
            counts = mine[0]["accepted"]
            shares = [count / max(sum(counts), 1) for count in counts]
            mean = f"{label}, mean {mine[0]['accepted_length']:.2f}"
            lengths.step(
                range(1, len(counts) + 1), shares, where="mid", label=mean, color=f"C{number}"
            )
    run = report["run"]
    speed.set_xticks(range(len(sizes)), map(str, sizes))
    speed.set_ylim(bottom=0)
    speed.set(xlabel="batch", ylabel="tokens/s", title=f"{run['device']}, {run['dtype']}")
    lengths.set(xlabel="tokens emitted by a cycle", ylabel="share of cycles")
    lengths.set_title(f"batch {sizes[0]}, {run['prompts']} prompts")
    for axes in (speed, lengths):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize="small")
    with replacing(path) as temporary:
        figure.savefig(temporary)
