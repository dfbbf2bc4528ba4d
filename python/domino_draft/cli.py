"""The command `domino-draft`: decode, compare, train, look into a drafter.

Exit codes: 0 done, 1 a stated error (with DOMINO_DEBUG=1 its traceback), 2 wrong usage.
Torch is imported by the commands, not by this module.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

try:
    import click
except ImportError as error:  # as console script or as module, without the extra
    sys.exit(f"domino-draft: {error}; run in the checkout: pip install '.[train]'")


from .options import (
    DRAFTER,
    DRAFTERS,
    DRAFTS,
    FILTERS,
    MACHINE,
    NUM_DRAFTS,
    SAMPLING,
    TARGET,
    THINKING,
)


class _Commands(click.Group):
    """Turns the errors that the package states into one line and exit code 1."""

    def invoke(self, ctx: click.Context):
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.Abort):
            raise
        except (ValueError, TypeError, RuntimeError, OSError, ImportError) as error:
            # A reader that has gone (`| head`) is nothing to report: click leaves quietly.
            gone = isinstance(error, OSError) and error.errno == errno.EPIPE
            if gone or os.environ.get("DOMINO_DEBUG"):
                raise
            raise click.ClickException(str(error)) from error


def _machine(device: str | None, dtype: str | None, threads: int | None) -> tuple[str, str]:
    import torch

    if threads:
        torch.set_num_threads(threads)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise click.BadParameter(str(error), param_hint="--device") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: got {device!r}, but this Torch finds no CUDA device")
    return device, dtype or ("float32" if kind == "cpu" else "bfloat16")


def _writable(context, parameter, value: str | None) -> str | None:
    """A path in a folder that exists: known before the work and not after it."""
    if value is not None and not Path(value).absolute().parent.is_dir():
        raise click.BadParameter(f"{value!r}: no such folder")
    return value


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="domino-kernels")
def main() -> None:
    """Decode a language model faster with a Domino drafter, and train such drafters."""


def _progress():
    """Bars on stderr, where it is a terminal: stdout is for results."""
    from rich.console import Console
    from rich.progress import Progress

    # What is printed below a bar goes where the bar is: right where both are one terminal.
    return Progress(
        console=Console(stderr=True),
        redirect_stdout=sys.stdout.isatty(),
        disable=not sys.stderr.isatty(),
    )


@main.command()
@click.argument("prompt", required=False)
@click.option("--file", type=click.Path(exists=True, dir_okay=False), help="One prompt a line.")
@TARGET
@DRAFTER
@click.option("--chat/--raw", default=True, show_default=True, help="Use the chat template.")
@THINKING
@click.option(
    "--batch-size", type=click.IntRange(1), default=8, show_default=True,
    help="Lines of --file at once.",
)  # fmt: skip
@SAMPLING
@FILTERS
@DRAFTS
@MACHINE
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def generate(
    prompt, file, target, drafter, chat, thinking, batch_size, max_new_tokens, seed, num_drafts,
    as_json, device, dtype, threads, **law,
):  # fmt: skip
    """Answer PROMPT, the lines of --file, or the standard input; text is streamed.

    A line of --file that cannot be answered (too long, no memory) fails alone; the exit code is 1.
    """
    prompts = _read_prompts(prompt, file)

    from .decode import Stats, follow
    from .engine import Engine
    from .loading import TextStream, load_drafter, load_target
    from .requests import seed_bits

    model = load_target(target, *_machine(device, dtype, threads))
    tool = load_drafter(drafter, model)
    ids = [_encode(model.tokenizer, text, chat, thinking) for text in prompts]
    longest = max(map(len, ids)) + max_new_tokens
    engine = Engine(
        model, tool, max_batch=min(batch_size, len(ids)),
        max_length=min(longest, model.max_length or longest), num_drafts=num_drafts,
    )  # fmt: skip
    rows = [{"prompt": text, "text": "", "tokens": [], "finish": None} for text in prompts]
    numbers = {}

    def fail(i: int, error: Exception) -> None:
        if len(ids) == 1:
            raise error
        rows[i] |= {"finish": "error", "error": str(error)}
        click.echo(f"prompt {i}: {error}", err=True)

    for i, text in enumerate(ids):
        try:
            numbers[engine.add(text, max_new_tokens, seed=seed_bits(seed + i), **law)] = i
        except ValueError as error:
            fail(i, error)
    stats = Stats(accepted=[[] for _ in ids])
    shown = [TextStream(model.tokenizer) for _ in ids]
    several, told = len(ids) > 1, 0
    with _progress() if several else nullcontext() as bar:
        task = bar.add_task("prompts", total=len(numbers)) if several else None
        for chunk in follow(engine, stats, numbers):
            row = rows[chunk.row]
            piece = shown[chunk.row].push(chunk.tokens, last=chunk.finish is not None)
            row["text"] += piece
            row["tokens"] += chunk.tokens
            row["finish"] = chunk.finish
            if chunk.error is not None:
                fail(chunk.row, chunk.error)
            if several:
                bar.advance(task, chunk.finish is not None)
            if not as_json:
                told = _tell(rows, told) if several else click.echo(piece, nl=False)
    if as_json:
        click.echo(json.dumps({"outputs": rows, "stats": _figures(stats)}))
    else:
        _tell(rows, told) if several else click.echo()
        click.echo(_stats_line(stats), err=True)
    if any("error" in row for row in rows):
        raise click.exceptions.Exit(1)


def _tell(rows: list[dict], told: int) -> int:
    """Print the answers of a file that have ended, in its order; how many are printed now."""
    while told < len(rows) and rows[told]["finish"]:
        click.echo(f"--- {told}\n{rows[told]['text']}")
        told += 1
    return told


def _figures(stats) -> dict[str, float]:
    return {
        "tokens": stats.tokens,
        "cycles": stats.cycles,
        "accepted_length": round(stats.accepted_length, 4),
        "seconds": round(stats.seconds, 4),
        "tokens_per_second": round(stats.tokens_per_second, 2),
    }


def _stats_line(stats) -> str:
    return (
        f"{stats.tokens} tokens in {stats.seconds:.2f} s ({stats.tokens_per_second:.1f} tokens/s), "
        f"accepted length {stats.accepted_length:.2f}"
    )


def _read_prompts(prompt: str | None, file: str | None) -> list[str]:
    if prompt is not None and file is not None:
        raise click.UsageError("give PROMPT or --file, not both")
    if file is not None:
        from .files import lines_of

        prompts = [line for line in lines_of(file) if line]
    elif prompt is None or prompt == "-":
        if sys.stdin.isatty():
            raise click.UsageError("no prompt: give PROMPT, --file, or text on the standard input")
        prompts = [sys.stdin.read().rstrip("\n")]
    else:
        prompts = [prompt]
    if not prompts or not all(prompts):
        raise click.UsageError("the prompt is empty")
    return prompts


def _encode(tokenizer, text: str, chat: bool, thinking: bool | None) -> list[int]:
    from .smollm2 import chat_prompt

    return chat_prompt(tokenizer, text, thinking) if chat else tokenizer(text)["input_ids"]


@main.command()
@TARGET
@DRAFTER
@click.option("--system", help="A system turn, in place of the template's own.")
@THINKING
@SAMPLING
@FILTERS
@DRAFTS
@MACHINE
@click.option("--json", "as_json", is_flag=True, help="One JSON object a turn instead of text.")
def chat(target, drafter, system, as_json, device, dtype, threads, **settings):
    """Talk to the target; answers are streamed, with a line of figures after each.

    At a terminal /reset forgets the conversation, /exit or the end of input leaves, and Ctrl-C
    breaks an answer off. From a pipe every line is a turn.
    """
    from .chat import Chat
    from .loading import load_drafter, load_target

    model = load_target(target, *_machine(device, dtype, threads))
    talk = Chat(model, load_drafter(drafter, model), system=system, **settings)
    terminal = sys.stdin.isatty()
    for text in _user_turns(terminal):
        if text == "/exit":
            break
        if text == "/reset":
            talk.reset()
            continue
        try:
            pieces = talk.answer(text)
        except ValueError as error:
            if not terminal:
                raise
            click.echo(f"{error}\n/reset forgets the conversation so far.", err=True)
            continue
        try:
            for piece in pieces:
                if not as_json:
                    click.echo(piece, nl=False)
        except KeyboardInterrupt:
            if not terminal:
                raise
            pieces.close()
        if as_json:
            figures = _figures(talk.stats) | {"context": talk.context}
            said = {"user": text, "assistant": talk.turns[-1]["content"], "stats": figures}
            click.echo(json.dumps(said))
        else:
            click.echo()
            click.echo(f"{_stats_line(talk.stats)}, context {talk.context} tokens", err=True)


def _user_turns(terminal: bool):
    """The user's lines, blank ones left out, until the input ends."""
    if not terminal:
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    try:
        import readline  # noqa: F401  lines can be edited and recalled
    except ImportError:
        pass
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            click.echo()
            return
        if text:
            yield text


@main.command()
@click.argument("prompts", type=click.Path(exists=True, dir_okay=False))
@TARGET
@DRAFTERS
@click.option("--chat/--raw", default=True, show_default=True, help="Use the chat template.")
@THINKING
@click.option("--limit", type=click.IntRange(1), help="Only this many prompts.")
@click.option(
    "--batch-size", "batch_sizes", type=click.IntRange(1), multiple=True, default=(1,),
    show_default=True, help="Requests at once. Repeatable.",
)  # fmt: skip
@click.option("--repeats", type=click.IntRange(1), default=1, show_default=True, help="Median of.")
@SAMPLING
@NUM_DRAFTS
@MACHINE
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False), callback=_writable,
    help="Write the report here.",
)  # fmt: skip
@click.option(
    "--plot", "plot_file", type=click.Path(dir_okay=False), callback=_writable,
    help="Draw it (.png, .svg).",
)  # fmt: skip
def bench(
    prompts, target, drafters, chat, thinking, limit, num_drafts, json_file, plot_file, device,
    dtype, threads, **settings,
):  # fmt: skip
    """Tokens/s and accepted length on PROMPTS, a JSONL file, with and without drafting.

    A line has "text" (or "prompt"), "messages" or "ids". All are queued at once.
    """
    from . import throughput
    from .loading import load_target

    if plot_file:
        throughput.check_plot(plot_file)
    model = load_target(target, *_machine(device, dtype, threads))
    ids = throughput.load_prompts(prompts, model.tokenizer, chat, limit, thinking)
    tools, asked = _load_drafters(drafters or ("shipped",), model, num_drafts)
    trees = not all(isinstance(drafts, int | str) for drafts in asked.values())
    if trees and model.device.type != "cuda":
        raise click.UsageError("--drafter: got a tree, expected @K: trees need a GPU, or evaluate")
    with _progress() as bar:
        task = bar.add_task("runs", total=None)
        report = throughput.measure(
            model, tools, ids, num_drafts=asked,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            **settings,
        )  # fmt: skip
    report["run"]["command"] = " ".join(["domino-draft", *sys.argv[1:]])
    click.echo(throughput.markdown(report))
    if json_file:
        _write(Path(json_file), json.dumps(report) + "\n")
    if plot_file:
        throughput.plot(report, plot_file)


@main.command()
@click.option(
    "--prompts", required=True, type=click.Path(exists=True, dir_okay=False),
    help="JSONL with set, id, text, ids (see models/smollm2-135m-domino/prompts.py).",
)  # fmt: skip
@TARGET
@DRAFTERS
@click.option("--set", "sets", multiple=True, help="Only this set; may be given several times.")
@click.option("--limit", type=click.IntRange(1), help="Prompts a set.")
@click.option("--batch-size", type=click.IntRange(1), default=1, show_default=True)
@click.option("-n", "--max-new-tokens", type=click.IntRange(1), default=256, show_default=True)
@NUM_DRAFTS
@MACHINE
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False), callback=_writable,
    help="Write the report here.",
)  # fmt: skip
def evaluate(
    prompts, target, drafters, sets, limit, batch_size, max_new_tokens, num_drafts, json_file,
    **machine,
):  # fmt: skip
    """Accepted length, speed and token identity of drafters on prompt sets, as a table."""
    from . import evaluate as evaluation
    from .loading import load_target

    rows = evaluation.load_prompts(prompts, sets, limit)
    model = load_target(target, *_machine(**machine))
    tools, asked = _load_drafters(drafters or ("shipped", "ngram"), model, num_drafts)
    with _progress() as bar:
        task = bar.add_task("batches", total=None)
        report = evaluation.evaluate(
            model, tools, rows, max_new_tokens=max_new_tokens, batch_size=batch_size,
            num_drafts={name: k for name, k in asked.items() if isinstance(k, int | str)},
            trees={name: tree for name, tree in asked.items() if not isinstance(tree, int | str)},
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip
    report["run"]["command"] = " ".join(["domino-draft", *sys.argv[1:]])
    click.echo(evaluation.markdown(report))
    if json_file:
        _write(Path(json_file), json.dumps(report) + "\n")


def _load_drafters(entries, model, num_drafts: int | None) -> tuple[dict, dict]:
    """Drafters by their names in a report, and the drafts or trees they have been asked for."""
    from .loading import load_drafter

    tools, asked, loaded = {}, {}, {}
    for entry in entries:
        name, folder, drafts = _drafter_entry(entry)
        if name in tools:
            raise click.UsageError(f"two drafters are called {name!r}: use NAME=FOLDER")
        if folder == "none":
            raise click.UsageError("--drafter none: the target alone is always measured")
        if folder not in loaded:
            loaded[folder] = load_drafter(folder, model)
        tools[name] = loaded[folder]
        if drafts or num_drafts:
            asked[name] = drafts or min(num_drafts, tools[name].max_drafts)
    return tools, asked


def _drafter_entry(entry: str):
    """[NAME=]FOLDER[@K] as (name, folder, K); K may be "auto" (what pays) or a tree."""
    name, _, place = entry.rpartition("=")
    folder, _, drafts = place.rpartition("@")
    if folder and drafts == "auto":
        return name or Path(place).name, folder, drafts
    if folder and drafts.startswith("tree") and drafts[4:].isdecimal():
        from .tree import TreeOptions

        try:
            return name or Path(place).name, folder, TreeOptions(nodes=int(drafts[4:]))
        except ValueError as error:
            raise click.UsageError(f"--drafter {entry}: {error}") from None
    if not (folder and drafts.isdecimal()):
        folder, drafts = place, ""
    if drafts and int(drafts) < 1:
        raise click.UsageError(f"--drafter {entry}: got {drafts} drafts, expected at least 1")
    return name or Path(place).name, folder, int(drafts) if drafts else None


def _write(path: Path, text: str) -> None:
    from .files import replacing

    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


class _Train(click.Command):
    """Its options are those of `train/cli.py`, which loads Torch."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        if not ctx.resilient_parsing:  # else a shell that completes one of them
            return super().get_params(ctx)
        from .train.cli import main as command

        return command.get_params(ctx)


@main.command(
    cls=_Train,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True,
                      "help_option_names": []},
    add_help_option=False,
)  # fmt: skip
@click.pass_context
def train(ctx: click.Context) -> None:
    """Train a drafter and export it as a Hugging Face folder (options: train --help)."""
    from .train.cli import main as command

    command.main(args=ctx.args, prog_name="domino-draft train", standalone_mode=False)


@main.command()
@click.option(
    "--prompts", required=True, type=click.Path(exists=True, dir_okay=False),
    help="train_prompts.npz of models/smollm2-135m-domino/prompts.py.",
)  # fmt: skip
@click.option(
    "--output", required=True, type=click.Path(dir_okay=False), callback=_writable,
    help="An .npz file.",
)  # fmt: skip
@TARGET
@click.option("--slots", type=click.IntRange(1), default=1024, show_default=True, help="Batch.")
@click.option("--max-length", type=click.IntRange(2), default=512, show_default=True)
@click.option("-n", "--max-new-tokens", type=click.IntRange(1), default=320, show_default=True)
@click.option("--sampled-fraction", type=click.FloatRange(0, 1), default=0.3, show_default=True)
@click.option("--temperature", type=click.FloatRange(0), default=0.7, show_default=True)
@click.option("--max-seconds", type=float, default=float("inf"), help="Stop after this long.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--shard", type=(click.IntRange(0), click.IntRange(1)), default=(0, 1),
    help="Index and count of this process.",
)  # fmt: skip
@MACHINE
def regenerate(prompts, output, target, device, dtype, threads, **options):
    """Let the target answer training prompts (.npz); writes responses, prints counts as JSON."""
    from .smollm2 import prepare
    from .train import regenerate as work

    device, dtype = _machine(device, dtype, threads)
    folder = str(prepare()) if target == "smollm2" else target
    found = work.run(folder, prompts, output, device=device, dtype=dtype, **options)
    click.echo(json.dumps(found))


@main.command()
@click.option("--drafter", default="shipped", show_default=True, help="Folder, shipped or ngram.")
@click.option("-n", "--max-new-tokens", type=click.IntRange(1), default=160, show_default=True)
@NUM_DRAFTS
@MACHINE
def demo(drafter, max_new_tokens, num_drafts, device, dtype, threads):
    """Set up SmolLM2, decode prompts with its drafter and alone, and compare."""
    from .demo import run

    threads = threads or os.cpu_count()
    device, dtype = _machine(device, dtype, threads)
    same = run(drafter, device, dtype, max_new_tokens=max_new_tokens, num_drafts=num_drafts)
    if not same:
        raise click.ClickException("an output is not the target's own")


@main.command()
@click.argument("folder")
@click.option("--target", help="Does it fit the model in this folder? Exit code 1 if not.")
@click.option("--tensors", is_flag=True, help="List the tensors too.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def inspect(folder: str, target: str | None, tensors: bool, as_json: bool) -> None:
    """A drafter's card: shapes, block, labels, parameters, memory, fitting targets.

    FOLDER is a checkpoint's folder, a safetensors file, or shipped. Reads no weights.
    """
    from rich.console import Console

    from .card import read_card, render
    from .loading import shipped_drafter

    card = read_card(shipped_drafter() if folder == "shipped" else folder, target)
    if as_json:
        click.echo(json.dumps(card))
    else:
        console = Console(highlight=False, soft_wrap=True)
        console.print(render(card))
        if tensors:
            for name, shape in card["tensors"].items():
                click.echo(f"{name:48} {'x'.join(map(str, shape))}")
    if target is not None and not card["target"]["fits"]:
        raise click.exceptions.Exit(1)


if __name__ == "__main__":
    main()
