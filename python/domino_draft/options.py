"""Options that several commands of `cli.py` have."""

from __future__ import annotations

import click


def group(*members):
    def decorate(function):
        for option in reversed(members):
            function = option(function)
        return function

    return decorate


TARGET = click.option(
    "--target", default="smollm2", show_default=True, help="Model folder, or smollm2."
)
MACHINE = group(
    click.option("--device", default=None, help="cpu, cuda, ...; a GPU if there is one."),
    click.option(
        "--dtype",
        type=click.Choice(["float32", "bfloat16", "float16"]),
        default=None,
        help="float32 on the CPU, bfloat16 elsewhere.",
    ),
    click.option("--threads", type=click.IntRange(1), default=None, help="CPU threads of Torch."),
)
DRAFTER = click.option(
    "--drafter", default="shipped", show_default=True, help="Folder, shipped, ngram, none."
)
THINKING = click.option(
    "--thinking/--no-thinking", default=None,
    help="Told to chat templates that know of it (Qwen3); else their own choice.",
)  # fmt: skip
DRAFTERS = click.option(
    "--drafter", "drafters", multiple=True, metavar="[NAME=]FOLDER[@K|@auto|@treeN]",
    help="Folder, shipped or ngram; its name in the report; its drafts a cycle, or for evaluate "
    "trees of N nodes. Repeatable.",
)  # fmt: skip


class _Bias(click.ParamType):
    name = "token=number"

    def convert(self, value, param, ctx):
        token, _, number = value.partition("=")
        try:
            pair = int(token), float(number)
        except ValueError:
            pair = None
        if pair is None or pair[1] != pair[1]:
            self.fail(f"{value!r} is no TOKEN=NUMBER", param, ctx)
        return pair


SAMPLING = group(
    click.option("-n", "--max-new-tokens", type=click.IntRange(1), default=256, show_default=True),
    click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True),
    click.option("--seed", type=int, default=0, show_default=True),
)
FILTERS = group(
    click.option("--top-k", type=click.IntRange(0), default=0, help="Of the likeliest; 0: all."),
    click.option(
        "--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0,
        help="Of the fewest with this share.",
    ),
    click.option(
        "--min-p", type=click.FloatRange(0, 1), default=0.0,
        help="Of those at least so likely, relative to the likeliest.",
    ),
    click.option(
        "--repetition-penalty", type=click.FloatRange(0, min_open=True), default=1.0,
        help="Divides logits of tokens seen; 1: off.",
    ),
    click.option("--presence-penalty", type=float, default=0.0, help="Of tokens in the answer."),
    click.option("--frequency-penalty", type=float, default=0.0, help="For each time there."),
    click.option(
        "--logit-bias", type=_Bias(), multiple=True, callback=lambda _, __, pairs: dict(pairs),
        metavar="TOKEN=NUMBER", help="Added to the logit of a token id; -inf: never. Repeatable.",
    ),
)  # fmt: skip


class _Drafts(click.ParamType):
    name = "integer|auto"

    def convert(self, value, param, ctx):
        if value == "auto" or isinstance(value, int):
            return value
        if not value.isdecimal() or int(value) < 1:
            self.fail(f"{value!r} is neither a number above 0 nor auto", param, ctx)
        return int(value)


DRAFTS = click.option(
    "--num-drafts", type=_Drafts(), default=None,
    help="Proposals a cycle; auto: as many as pay, on a GPU.",
)  # fmt: skip
NUM_DRAFTS = click.option(
    "--num-drafts", type=click.IntRange(1), default=None, help="Proposals a cycle."
)
