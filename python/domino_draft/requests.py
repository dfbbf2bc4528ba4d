"""What a request may be: prompts, settings and stop tokens, checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import index
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .drafter import Drafter
    from .target import Target


class Law(Enum):
    """What the launches of a batch have to look at: the most that one of its rows asks for."""

    GREEDY = 0
    DRAWN = 1  # temperatures and seeds
    FILTERED = 2  # and filters


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen: parameters of `verify_chain`, here with their off values.

    temperature 0: greedily. Filters in the order of Transformers: top_k, top_p, min_p.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def law(self) -> Law:
        if not self.temperature:
            return Law.GREEDY
        off = self.top_k == 0 and self.top_p == 1 and self.min_p == 0
        return Law.DRAWN if off else Law.FILTERED


def law_of(samplings: Sequence[Sampling]) -> Law:
    return max((s.law for s in samplings), key=lambda law: law.value, default=Law.GREEDY)


def samplings(op: str, rows: int, temperature, top_k, top_p, min_p) -> list[Sampling]:
    """One a row, from lists or from one value for all; `op` names the function in errors."""
    found = [temperatures(f"{op}: temperature", temperature, rows)]
    for name, value, kind, kinds, fits, expected in (
        ("top_k", top_k, index, "integers", lambda k: 0 <= k < 2**31, "0 (off) or more"),
        ("top_p", top_p, float, "numbers", lambda p: 0 < p <= 1, "above 0 and up to 1 (off)"),
        ("min_p", min_p, float, "numbers", lambda p: 0 <= p <= 1, "0 (off) to 1"),
    ):
        values = per_row(f"{op}: {name}", value, rows, kind, kinds)
        if not all(map(fits, values)):
            raise ValueError(f"{op}: {name}: got {value}, expected {expected}")
        found.append(values)
    return [Sampling(*values) for values in zip(*found)]


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
