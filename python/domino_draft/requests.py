"""What a request may be: prompts, settings and stop tokens, checked before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import index
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .drafter import Drafter
    from .target import Target

# What verification reads on the device; penalties and biases: edits.py.
SAMPLING = {
    "temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32,
    "min_p": torch.float32,
}  # fmt: skip
_MOST = torch.finfo(torch.float32).max


class Law(IntEnum):
    """What the launches of a batch have to look at: the most that one of its rows asks for."""

    GREEDY = 0
    DRAWN = 1  # temperatures and seeds
    FILTERED = 2  # and filters
    EDITED = 3  # and penalties and biases


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen: parameters of `verify_chain`, here with their off values.

    temperature 0: greedily. Filters in the order of Transformers: top_k, top_p, min_p. Before the
    temperature: logit_bias, pairs (token, value to add), then the penalties.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def law(self) -> Law:
        penalised = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        if penalised or self.logit_bias:
            return Law.EDITED
        if not self.temperature:
            return Law.GREEDY
        off = self.top_k == 0 and self.top_p == 1 and self.min_p == 0
        return Law.DRAWN if off else Law.FILTERED


@dataclass(eq=False)
class Request:
    id: int
    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    seed: int
    stops: frozenset[int]
    emitted: int = 0
    done: bool = False

    def __post_init__(self):
        self.tokens = list(self.prompt)  # and what has been emitted


def law_of(samplings: Sequence[Sampling]) -> Law:
    return max((s.law for s in samplings), default=Law.GREEDY)


def no_edits(op: str, samplings: Sequence[Sampling]) -> None:
    if law_of(samplings) is Law.EDITED:
        one = max(samplings, key=lambda s: s.law)
        raise ValueError(f"{op}: penalties, logit_bias: got {one}, expected none with trees")


# Of the values of a row: kind, what they are called, which ones fit, what is expected.
_FITS = {
    "top_k": (index, "integers", lambda k: 0 <= k < 2**31, "0 (off) or more"),
    "top_p": (float, "numbers", lambda p: 0 < p <= 1, "above 0 and up to 1 (off)"),
    "min_p": (float, "numbers", lambda p: 0 <= p <= 1, "0 (off) to 1"),
    "repetition_penalty": (float, "numbers", lambda x: 0 < x <= _MOST, "above 0, 1 (off)"),
    "presence_penalty": (float, "numbers", lambda x: abs(x) <= _MOST, "finite, 0 (off)"),
    "frequency_penalty": (float, "numbers", lambda x: abs(x) <= _MOST, "finite, 0 (off)"),
}


def samplings(
    op: str, target: Target, rows: int, temperature, logit_bias=None, **settings
) -> list[Sampling]:
    """One a row, from lists or from one value for all; `op` names the function in errors."""
    temperature = temperatures(f"{op}: temperature", temperature, rows)
    found = {"temperature": temperature, "logit_bias": _biases(op, target, rows, logit_bias)}
    for name, value in settings.items():
        kind, kinds, fits, expected = _FITS[name]
        found[name] = per_row(f"{op}: {name}", value, rows, kind, kinds)
        if not all(map(fits, found[name])):
            raise ValueError(f"{op}: {name}: got {value}, expected {expected}")
    return [Sampling(**dict(zip(found, values))) for values in zip(*found.values())]


def _biases(op: str, target: Target, rows: int, value) -> list[tuple[tuple[int, float], ...]]:
    """Pairs of each row, from one mapping for all or a list of them, None: none."""
    if value is None:
        return [()] * rows
    where, one = f"{op}: logit_bias", isinstance(value, Mapping)
    given = [value] * rows if one else list(value) if is_list(value) else []
    if len(given) != rows or not all(v is None or isinstance(v, Mapping) for v in given):
        raise TypeError(f"{where}: got {value!r}, expected tokens mapped to numbers, or {rows}")
    found, vocab_size = [], target.vocab_size
    for bias in given:
        pairs = (bias or {}).items()
        for token, added in pairs:
            if not hasattr(token, "__index__") or not 0 <= index(token) < vocab_size:
                raise ValueError(f"{where}: got token {token!r}, expected 0..{vocab_size - 1}")
            if not isinstance(added, int | float) or not (added <= _MOST or added == -math.inf):
                raise ValueError(f"{where}: got {added!r}, expected a number, or -inf: never")
        found.append(tuple((index(token), float(added)) for token, added in pairs))
    return found


def on_device(values, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of these values, whose copy to a GPU waits for nothing that is queued there."""
    held = torch.tensor(values, dtype=dtype)
    return held.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else held


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
    if any(not 0 <= t <= _MOST for t in found):
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
