"""What a benchmark is: cases, each with operands to make, providers to time and a gate to pass."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module

SUITES = {
    "expand": "bench.ops.expand",
    "head": "bench.ops.head",
    "verify": "bench.ops.verify",
    "tree": "bench.ops.tree",
    "train": "bench.ops.train",
}


@dataclass(frozen=True)
class Case:
    """One op at one shape.

    make(seed, device) -> the operands of one copy, as a tuple: inputs, weights, outputs, workspace.
    providers: name -> fn(*operands), graph-safe; "ours" and the peers get the same operands. What
        follows a slash tells modes of one provider apart; its provider_params say what they are.
    check(operands, results): raises AssertionError where the result of a provider is wrong. It runs
    once a provider before any timing: no figure without a right answer.
    bytes: what the op has to move at least, each operand once.
    params, provider_params: what a row says of its case, and of its provider besides.
    eager: providers that are timed as the host launches them; the others are captured in graphs.
    gpu_only: providers that cannot run without a GPU; the gate leaves them out on a CPU.
    """

    op: str
    case: str
    shape: dict[str, int]
    batch: int
    make: Callable
    providers: dict[str, Callable]
    check: Callable
    bytes: int
    params: dict = field(default_factory=dict)
    provider_params: dict[str, dict] = field(default_factory=dict)
    eager: tuple[str, ...] = ()
    gpu_only: tuple[str, ...] = ()


def cases(suite: str) -> Iterator[Case]:
    yield from import_module(SUITES[suite]).cases()
