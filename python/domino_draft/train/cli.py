"""The `train` command: one option for every field of `TrainConfig`."""

from __future__ import annotations

import dataclasses
import json
import os
import types
import typing

import click

from .trainer import ARMS, TrainConfig, run

_CHOICES = {"arm": ARMS, "dtype": ("bfloat16", "float32"), "attention": ("flex", "dense")}
_HELP = {
    "target": "folder of the target model",
    "data": "training file (.npz, .safetensors, .jsonl, text); may be given several times",
    "output": "folder for the drafter, metrics.jsonl and checkpoint.pt",
    "arm": "domino; dflash: no head; dflash-matched: no head, its parameters in the backbone",
    "max_seconds": "wall clock of the loop, after warm-up; drives the schedules",
    "max_steps": "number of updates",
    "mask_token_id": "the id that stands for a masked slot",
    "ema": "decay of the exported weight average; 0: none",
    "num_layers": "layers of the drafter",
    "intermediate_size": "MLP width; the target's where not given",
    "num_features": "how many of the target's layers the drafter reads",
    "gru_hidden_dim": "width of the head's GRU",
    "emb_dim": "rank of the head's correction",
    "block_size": "slots of a block",
    "num_anchors": "blocks a sequence, at most",
    "gamma": "slot k of a block weighs exp(-k / gamma)",
    "warmup": "share of the run in which the learning rate rises",
    "held_out": "sequences kept for evaluation",
    "eval_every": "steps between evaluations; 0: at the end only",
    "save_every": "steps between checkpoints; 0: none",
    "resume": "go on from the checkpoint.pt in the output folder",
    "chunk_rows": "rows of the loss that are computed at a time",
    "profile": "write profile.txt: time by kernel over three passes",
    "trim_tails": "cut repetitive tails",
    "compile": "torch.compile of the target's and the drafter's layers",
}


def _option(field: dataclasses.Field, annotation: typing.Any):
    name = "--" + field.name.replace("_", "-")
    required = field.default is dataclasses.MISSING
    kwargs: dict = {"required": True} if required else {"default": field.default}
    kwargs |= {"help": _HELP.get(field.name), "show_default": not required}
    if field.name in _CHOICES:
        return click.option(name, type=click.Choice(_CHOICES[field.name]), **kwargs)
    if annotation is bool:
        return click.option(f"{name}/--no-{name[2:]}", **kwargs)
    origin = typing.get_origin(annotation)
    if annotation == tuple[str, ...]:
        return click.option(name, multiple=True, **kwargs)
    if origin is tuple:
        return click.option(name, nargs=2, type=typing.get_args(annotation)[0], **kwargs)
    if origin is types.UnionType:
        annotation = typing.get_args(annotation)[0]
    return click.option(name, type=annotation, **kwargs)


@click.command(name="train", context_settings={"help_option_names": ["-h", "--help"]})
def main(**options) -> None:
    """Train a drafter for a target model and export it as a Hugging Face folder."""
    try:
        config = TrainConfig(**options)
        summary = run(config)
    except (ValueError, TypeError, RuntimeError, OSError, ImportError) as error:
        if os.environ.get("DOMINO_DEBUG"):
            raise
        raise click.ClickException(str(error)) from error
    click.echo(json.dumps(summary, indent=2))


_HINTS = typing.get_type_hints(TrainConfig)
for _field in dataclasses.fields(TrainConfig):
    main = _option(_field, _HINTS[_field.name])(main)
