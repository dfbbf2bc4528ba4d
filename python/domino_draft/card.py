"""A drafter's card: what a checkpoint is, what it costs, which targets it fits.

Reads `config.json` and the safetensors headers; no weights are loaded.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint import Checkpoint
from .config import DominoConfig

if TYPE_CHECKING:
    from rich.console import RenderableType

# Public models by (hidden_size, layers, vocabulary): what a drafter's shape usually means.
KNOWN_TARGETS = {
    (576, 30, 49152): "SmolLM2-135M",
    (960, 32, 49152): "SmolLM2-360M",
    (1024, 28, 151936): "Qwen3-0.6B",
    (2048, 28, 151936): "Qwen3-1.7B",
    (2560, 36, 151936): "Qwen3-4B",
    (4096, 36, 151936): "Qwen3-8B",
    (5120, 40, 151936): "Qwen3-14B",
    (5120, 64, 151936): "Qwen3-32B",
    (4096, 32, 128256): "Llama-3.1-8B",
}

_PARTS = (
    ("feature fusion", ("fc.", "hidden_norm.")),
    ("layers", ("layers.", "norm.")),
    ("head: GRU", ("prefix_gru.",)),
    ("head: projection W1", ("embed_proj.0.",)),
    ("head: vocabulary W2", ("embed_proj.2.",)),
)


def read_card(folder: str | os.PathLike, target: str | os.PathLike | None = None) -> dict[str, Any]:
    """The card of the checkpoint in `folder` (or a safetensors file) as plain JSON values.

    target: a model's folder, of which `config.json` is read; the card then says whether it fits.

    Raises:
        ValueError: as `DominoDrafter.from_pretrained`, whose checks these are.
    """
    import torch

    from .drafter import DominoDrafter

    stored = Checkpoint(folder)
    config = DominoConfig.from_dict(stored.config)
    with torch.device("meta"):
        drafter = DominoDrafter(config)
    stored.check(drafter.stored_shapes())
    tensors = stored.tensors.values()
    parts = {
        part: sum(prod(t.shape) for t in tensors if t.name.startswith(prefixes))
        for part, prefixes in _PARTS
    }
    total = sum(parts.values())
    verifier = (stored.config.get("speculators_config") or {}).get("verifier") or {}
    shape = (config.hidden_size, config.num_target_layers, config.vocab_size)
    position = 4 * config.num_key_value_heads * config.head_dim
    lengths = zip(config.context_lengths(config.max_position_embeddings), config.layer_types)
    rings = [length for length, kind in lengths if kind == "sliding_attention"]
    card = {
        "folder": str(folder),
        "files": [file.name for file in stored.files],
        "config": asdict(config),
        "slots": slots(config),
        "max_drafts": config.max_drafts,
        "parameters": total,
        "parameters_by_part": {part: count for part, count in parts.items() if count},
        "stored_dtypes": sorted({t.dtype for t in tensors}),
        "bytes": {
            "stored": sum(t.bytes for t in tensors),
            "bfloat16": 2 * total,
            "context_per_token_bfloat16": position * config.layer_types.count("full_attention"),
            "sliding_context_bfloat16": position * sum(rings),
        },
        "tensors": {t.name: list(t.shape) for t in sorted(tensors, key=lambda t: t.name)},
        "fits": {
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "num_layers": config.num_target_layers,
            "min_layers": max(config.target_layer_ids) + 1,
            "shape_of": KNOWN_TARGETS.get(shape),
            "trained_for": verifier.get("name_or_path"),
        },
    }
    if target is not None:
        errors = config.pairing_errors(*_target_shape(Path(target)))
        card["target"] = {"folder": str(target), "fits": not errors, "errors": errors}
    return card


def slots(config: DominoConfig) -> list[dict[str, Any]]:
    """Per block slot: its input, the position it predicts (anchor + n, None: none), its logits."""
    shift = 1 if config.shift_label else 0
    first = config.pure_draft_prefix_len + (1 - shift)
    return [
        {
            "slot": slot,
            "input": "mask" if slot else "anchor",
            "predicts": slot + shift or None,
            "logits": None
            if not slot + shift
            else "base + correction"
            if config.projector_type == "domino" and slot >= first
            else "base",
        }
        for slot in range(config.block_size)
    ]


def _target_shape(folder: Path) -> tuple[int, int, int]:
    """(vocab_size, hidden_size, num_hidden_layers) by the target's config.json."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"target: got {folder} with no config.json, expected a model's folder")
    data = json.loads(path.read_text(encoding="utf-8"))
    data = data.get("text_config") or data
    names = ("vocab_size", "hidden_size", "num_hidden_layers")
    missing = [name for name in names if not isinstance(data.get(name), int)]
    if missing:
        raise ValueError(f"target: got no {missing[0]} in {path}, expected a causal LM's config")
    return tuple(data[name] for name in names)


def render(card: dict[str, Any]) -> RenderableType:
    """The card for a terminal."""
    from rich.console import Group
    from rich.table import Table

    config, bytes_ = card["config"], card["bytes"]
    domino = config["projector_type"] == "domino"
    facts = Table.grid(padding=(0, 2))

    def row(name: str, value: Any) -> None:
        facts.add_row(name, str(value))

    row("drafter", card["folder"])
    row("files", f"{', '.join(card['files'])} ({', '.join(card['stored_dtypes'])})")
    row("kind", "Domino: DFlash backbone and correcting head" if domino else "DFlash: no head")
    kinds = [kind.removesuffix("_attention") for kind in config["layer_types"]]
    window = f", window {config['sliding_window']}" if "sliding" in kinds else ""
    row(
        "layers",
        f"{config['num_hidden_layers']} ({', '.join(_runs(kinds))}{window}); "
        f"hidden {config['hidden_size']}, MLP {config['intermediate_size']}, "
        f"{config['num_attention_heads']} heads over {config['num_key_value_heads']} of "
        f"{config['head_dim']}, rope {config['rope_theta']:g}",
    )
    if domino:
        row("head", f"GRU {config['gru_hidden_dim']}, rank {config['emb_dim']}")
    mask = config["mask_token_id"]
    row("mask token", f"{config['mask_token']!r} by the tokenizer" if mask is None else mask)
    row("features", f"outputs of target layers {', '.join(map(str, config['target_layer_ids']))}")
    label = "anchor + i + 1" if config["shift_label"] else "anchor + i, slot 0 none"
    row("block", f"{config['block_size']} slots, up to {card['max_drafts']} drafts")
    row("labels", f"slot i predicts {label} (shift_label {str(config['shift_label']).lower()})")
    if domino:
        where = [s["slot"] for s in card["slots"] if s["logits"] == "base + correction"]
        row("corrected", f"slots {where[0]} to {where[-1]}" if where else "no slot")
    fits = card["fits"]
    layers = fits["num_layers"] or f"at least {fits['min_layers']}"
    shape_of = f" (the shape of {fits['shape_of']})" if fits["shape_of"] else ""
    row(
        "fits",
        f"a causal LM with hidden {fits['hidden_size']}, {layers} layers, "
        f"vocabulary {fits['vocab_size']}{shape_of}",
    )
    if config["draft_vocab_size"]:
        row("vocabulary", f"drafts from {config['draft_vocab_size']} ids, by a map of its own")
    if fits["trained_for"]:
        row("trained for", fits["trained_for"])
    if "target" in card:
        row("target", card["target"]["folder"])
        for line in card["target"]["errors"] or ["fits"]:
            row("", line)

    sizes = Table(box=None, pad_edge=False, header_style="")
    sizes.add_column("part")
    sizes.add_column("parameters", justify="right")
    sizes.add_column("bf16", justify="right")
    for part, count in card["parameters_by_part"].items():
        sizes.add_row(part, f"{count:,}", _size(2 * count))
    sizes.add_row("all", f"{card['parameters']:,}", _size(bytes_["bfloat16"]))
    note = (
        f"Embedding and LM head are the target's. Context costs "
        f"{bytes_['context_per_token_bfloat16']:,} bytes a token in bf16"
    )
    sliding = bytes_["sliding_context_bfloat16"]
    note += f", sliding layers up to {_size(sliding)} a text." if sliding else "."
    return Group(facts, "", sizes, "", note)


def _runs(kinds: list[str]) -> list[str]:
    """full, full, sliding -> 2 full, 1 sliding."""
    runs: list[list[Any]] = []
    for kind in kinds:
        if runs and runs[-1][1] == kind:
            runs[-1][0] += 1
        else:
            runs.append([1, kind])
    return [f"{count} {kind}" for count, kind in runs]


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"
