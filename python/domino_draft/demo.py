"""`domino-draft demo`: SmolLM2 decoded with its drafter, then alone, and the two compared."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

CODE = "Complete the following Python function.\n\n```python\n{}```"
PROMPTS = (
    (
        "code",
        CODE.format(
            "def longest_word(words: list[str]) -> str:\n"
            '    """Return the longest of the given words, the first one if several are as long.\n'
            "    >>> longest_word(['pear', 'banana', 'fig'])\n    'banana'\n    \"\"\"\n"
        ),
    ),
    (
        "math",
        "A baker makes 24 rolls every morning. She sells 3 boxes of 6 rolls and gives the rest to "
        "her neighbors. How many rolls does she give away in a week?",
    ),
    ("chat", "Explain why the sky is blue to a ten-year-old."),
    (
        "code",
        CODE.format(
            "def count_vowels(text: str) -> int:\n"
            '    """Count the vowels in the text, in upper and lower case."""\n'
        ),
    ),
    ("math", "Solve for x: 3x + 7 = 34. Show each step."),
    ("chat", "Give me five tips for learning a new language."),
)
# What pays on two cores: of 3, 5, 7 and 15 drafts a cycle, 5 gave the most tokens/s in fp32 (the
# card's results on a CPU).
CPU_DRAFTS = 5
BUDGET = 480.0  # seconds after which no further prompt is started
SHADES = ("white", "cyan")


@dataclass
class Row:
    """Figures of one prompt."""

    domain: str
    accepted: int
    cycles: int
    tokens: int
    seconds: float
    alone_seconds: float
    near_ties: int | None  # None: identical
    violations: int


def run(
    drafter: str,
    device: str,
    dtype: str,
    *,
    max_new_tokens: int = 160,
    num_drafts: int | None = None,
    console: Console | None = None,
) -> bool:
    """Set up, decode PROMPTS both ways, print the table.

    Returns:
        True if every output is the target's own greedy text, up to near-ties of its logits
        (:func:`domino_draft.greedy_report`), which are printed.
    """
    if drafter == "none":
        raise ValueError("drafter: got 'none', expected one to compare with the target alone")
    console = console or Console()
    started = time.perf_counter()
    with _busy(console, "Importing Torch and Transformers"):
        import torch

        from .loading import load_drafter, load_target
    with _busy(console, "Preparing SmolLM2-135M-Instruct (a download and a conversion, once)"):
        target = load_target("smollm2", device, dtype)
    tool = load_drafter(drafter, target)
    if num_drafts is None and device == "cpu":
        num_drafts = min(CPU_DRAFTS, tool.max_drafts)
    drafts = num_drafts or tool.default_drafts
    console.print(
        f"SmolLM2-135M-Instruct, {dtype}, {device}, {torch.get_num_threads()} threads, "
        f"{drafts} drafts a cycle; set-up took {time.perf_counter() - started:.0f} s."
    )
    if console.is_terminal:
        console.print("Tokens that one cycle emitted share a colour.\n")
    rows = []
    for number, (domain, text) in enumerate(PROMPTS, 1):
        if time.perf_counter() - started > BUDGET:
            console.print(f"{len(PROMPTS) + 1 - number} prompts left out: this machine is slow.")
            break
        title = f"{number}/{len(PROMPTS)} {domain}"
        rows.append(_compare(console, target, tool, title, text, max_new_tokens, drafts))
    console.print(table(rows))
    console.print(f"In all {time.perf_counter() - started:.0f} s.")
    return not any(row.violations for row in rows)


def _busy(console: Console, text: str):
    """A spinner beside `text`; the text alone where the output is a file or a pipe."""
    if console.is_terminal:
        return console.status(text)
    console.print(text)
    return nullcontext()


def _compare(console, target, tool, title, text, max_new_tokens, num_drafts) -> Row:
    from .decode import Stats, stream
    from .loading import TextStream
    from .losslessness import greedy_report
    from .smollm2 import chat_prompt

    prompt = chat_prompt(target.tokenizer, text)
    answer, decoder = Text(), TextStream(target.tokenizer)
    outputs = {"with the drafter": [], "target alone": []}
    stats = {name: Stats() for name in outputs}
    progress = Progress(
        TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("tokens {task.fields[rate]:.1f}/s"), TimeElapsedColumn(), console=console,
    )  # fmt: skip
    question = Text(text.strip(), style="dim")
    view = Group(question, Panel(answer, title=title, title_align="left"), progress)
    live = console.is_terminal
    if live:
        screen = Live(view, console=console, refresh_per_second=8, vertical_overflow="visible")
    else:  # a file or a pipe: the same text, appended as it comes
        screen = nullcontext()
        console.print(Group(question, f"\n--- {title}"), highlight=False)
    with screen:
        for name, drafter in (("with the drafter", tool), ("target alone", None)):
            task = progress.add_task(name, total=max_new_tokens, rate=0.0)
            chunks = stream(
                target,
                drafter,
                [prompt],
                max_new_tokens=max_new_tokens,
                num_drafts=num_drafts if drafter is not None else None,
                stats=stats[name],
            )
            for index, chunk in enumerate(chunks):
                outputs[name] += chunk.tokens
                if drafter is not None:
                    piece = decoder.push(chunk.tokens, last=chunk.finish is not None)
                    answer.append(piece, style=SHADES[index % 2])
                    if not live:
                        console.out(piece, end="", highlight=False)
                rate = stats[name].tokens_per_second
                progress.update(task, completed=len(outputs[name]), rate=rate)
            progress.update(task, total=len(outputs[name]))
            if not live:
                lead = "\n\n" if drafter is not None else ""
                rate = stats[name].tokens_per_second
                line = f"{lead}{name:16} {len(outputs[name])} tokens, {rate:.1f}/s"
                console.out(line, highlight=False)
    console.print()
    ours, alone = outputs.values()
    found = None if ours == alone else greedy_report(target, prompt, ours)
    drafted = stats["with the drafter"]
    return Row(
        domain=title.split()[-1],
        accepted=sum(drafted.accepted[0]),
        cycles=len(drafted.accepted[0]),
        tokens=len(ours),
        seconds=drafted.seconds,
        # per token, so that outputs which part at a near-tie still compare
        alone_seconds=stats["target alone"].seconds * len(ours) / len(alone),
        near_ties=None if found is None else found.near_ties,
        violations=0 if found is None else found.violations,
    )


def table(rows: list[Row]) -> Table:
    """One line a domain and one for everything: ratios of sums."""
    result = Table(title="SmolLM2-135M-Instruct with its drafter, and alone (tokens/s)")
    for name in ("prompts", "accepted length", "tokens/s", "alone", "speed-up"):
        result.add_column(name, justify="left" if name == "prompts" else "right")
    result.add_column("identical")
    domains = list(dict.fromkeys(row.domain for row in rows))
    for name in (*domains, "all"):
        part = [row for row in rows if name in ("all", row.domain)]
        tokens, cycles = sum(r.tokens for r in part), sum(r.cycles for r in part)
        seconds, alone = sum(r.seconds for r in part), sum(r.alone_seconds for r in part)
        ties = sum(r.near_ties or 0 for r in part)
        violations = sum(r.violations for r in part)
        same = "yes" if all(r.near_ties is None for r in part) else f"up to {ties} near ties"
        if name == "all":
            result.add_section()
        result.add_row(
            f"{name} ({len(part)})",
            f"{sum(r.accepted for r in part) / max(cycles, 1):.2f}",
            f"{tokens / seconds:.1f}",
            f"{tokens / alone:.1f}",
            f"{alone / seconds:.2f}x",
            f"no: {violations} tokens" if violations else same,
        )
    return result
