"""What a request may be: prompts, settings and stop tokens, checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .drafter import Drafter
    from .target import Target


def is_list(value) -> bool:
    return hasattr(value, "__iter__") and not isinstance(value, str) and getattr(value, "ndim", 1)


def integers(where: str, values) -> list[int]:
    if not is_list(values):
        raise TypeError(f"{where}: got {values!r}, expected a list of integers")
    try:
        return [index(value) for value in values]
    except TypeError:
        raise TypeError(f"{where}: got {values!r}, expected a list of integers") from None


def per_row(where: str, value, rows: int, kind: Callable, kinds: str) -> list:
    """One value a row, from a list or one for all."""
    values = list(value) if is_list(value) else [value] * rows
    if len(values) != rows:
        raise ValueError(f"{where}: got {len(values)} values, expected {rows} (one a row)")
    try:
        return [kind(v) for v in values]
    except (TypeError, ValueError):
        raise TypeError(f"{where}: got {value!r}, expected {kinds}") from None


def prompt_ids(where: str, target: Target, prompt: Sequence[int] | str) -> list[int]:
    """Token ids of one prompt; an error begins with `where`, the op and the argument."""
    if isinstance(prompt, str):
        if target.tokenizer is None:
            raise TypeError(
                f"{where}: got a string, expected token ids (the target has no tokenizer)"
            )
        prompt = target.tokenizer(prompt)["input_ids"]
    ids = integers(where, prompt)
    if not ids:
        raise ValueError(f"{where}: got no tokens, expected at least one")
    vocab_size = target.vocab_size  # asks the model: not for each token of a prompt
    bad = next((t for t in ids if not 0 <= t < vocab_size), None)
    if bad is not None:
        raise ValueError(f"{where}: got token {bad}, expected 0..{vocab_size - 1}")
    return ids


def new_tokens(where: str, count) -> int:
    if not hasattr(count, "__index__"):
        raise TypeError(f"{where}: got {count!r}, expected an integer")
    if count < 1:
        raise ValueError(f"{where}: got {count}, expected at least 1")
    return index(count)


def temperatures(where: str, value, rows: int) -> list[float]:
    found = per_row(where, value, rows, float, "numbers")
    if any(not 0 <= t <= torch.finfo(torch.float32).max for t in found):
        raise ValueError(f"{where}: got {value}, expected >= 0 and finite in float32")
    return found


def seed_bits(seed: int) -> int:
    """The low 64 bits of any integer, as an int64."""
    return (seed + 2**63) % 2**64 - 2**63


def num_drafts(where: str, drafter: Drafter | None, count: int | None) -> int:
    """Drafts a cycle: what was asked for, or the drafter's default; 0 without a drafter."""
    if drafter is None:
        if count:
            raise ValueError(f"{where}: got {count} and no drafter, expected None")
        return 0
    count = drafter.default_drafts if count is None else count
    if not hasattr(count, "__index__"):
        raise TypeError(f"{where}: got {count!r}, expected an integer")
    if not 1 <= count <= drafter.max_drafts:
        raise ValueError(f"{where}: got {count}, expected 1..{drafter.max_drafts}")
    return index(count)
