"""Targets and drafters by the names that the command line takes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .drafter import Drafter
    from .target import Target

SMOLLM2 = "smollm2"
SHIPPED = Path("models") / "smollm2-135m-domino"


def load_target(
    name: str | os.PathLike, device: str = "cpu", dtype: str | torch.dtype = "float32"
) -> Target:
    """The target in a local Hugging Face folder, or SmolLM2-135M-Instruct for "smollm2"."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from .smollm2 import prepare
    from .target import Target

    logging.disable_progress_bar()  # the command line shows its own
    folder = prepare() if str(name) == SMOLLM2 else Path(name)
    if not (folder / "config.json").is_file():
        raise ValueError(f"target: got {str(name)!r}, expected {SMOLLM2!r} or a model's folder")
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    return Target(model.to(device), AutoTokenizer.from_pretrained(folder))


def load_drafter(name: str | os.PathLike, target: Target) -> Drafter | None:
    """The drafter in a folder or safetensors file (in the target's dtype, on its device), "ngram",
    or None for "none".

    "shipped" is the SmolLM2 drafter of this repository.
    """
    if str(name) == "none":
        return None
    if str(name) == "ngram":
        from .ngram import NgramDrafter

        return NgramDrafter()
    from .config import DominoConfig
    from .drafter import DominoDrafter

    folder = shipped_drafter() if str(name) == "shipped" else Path(name)
    if not folder.exists():
        raise ValueError(
            f"drafter: got {str(name)!r}, expected a drafter's folder, 'shipped', 'ngram' or 'none'"
        )
    config = DominoConfig.from_pretrained(folder)  # refused before the weights are read
    errors = config.pairing_errors(target.vocab_size, target.hidden_size, target.num_layers)
    if errors:
        raise ValueError(f"drafter: {errors[0]}")
    config.resolve_mask_token(target.tokenizer)
    return DominoDrafter.from_pretrained(folder, target.dtype, target.device)


def shipped_drafter() -> Path:
    """Folder of the drafter that the repository ships, from a checkout.

    Raises:
        ValueError: neither the working directory nor this package stands in a checkout with it.
    """
    places = [Path.cwd(), *Path(__file__).resolve().parents[2:3]]
    for place in places:
        if (place / SHIPPED / "model.safetensors").is_file():
            return place / SHIPPED
    looked = " or ".join(str(place / SHIPPED) for place in dict.fromkeys(places))
    raise ValueError(
        f"drafter: got no model.safetensors in {looked}; run in a checkout, or name a folder"
    )


class TextStream:
    """Text of a growing list of tokens: `push` returns what may be printed already."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0

    def push(self, ids: list[int], last: bool = False) -> str:
        self._ids += ids
        # Cleaned up, a text may shrink as it grows (" ." to "."): what is shown would not fit it.
        text = self._tokenizer.decode(
            self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        if not last and text.endswith("\ufffd"):  # a character whose last bytes are to come
            return ""
        new, self._shown = text[self._shown :], len(text)
        return new
