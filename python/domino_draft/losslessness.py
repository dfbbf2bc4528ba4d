"""Is this text the target's own greedy decoding? A comparison that holds in fp32 and in bf16.

Two forwards of one model over one prefix differ by rounding: where their shapes differ (a block of
16 tokens against one token), and where they round at other places (the fused layers, once where the
stock modules round several times). So two correct decoders may part where the two best logits
nearly tie, and after that they continue different texts. Comparing texts therefore proves nothing
in bf16. What can be checked is every choice on its own: given the very prefix that the decoder had,
each token must be the target's best one, or as good as the best within the target's own rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .cache import RowCache

if TYPE_CHECKING:
    from .target import Target

_BLOCK = 7  # tokens of the second forward shape; odd, so that it matches no usual kernel tile
_HALF = torch.bfloat16, torch.float16
# cuDNN's attention is planned anew for each length, 0.2 s on an H200: 5 s a text in blocks.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_RIVALS = 16  # best tokens of a position whose rounding counts: the others cannot win


@dataclass(frozen=True)
class GreedyReport:
    """Verdict on one output. exact: tokens that are the argmax; near_ties: the others whose logit
    is within `tolerance` of the best; violations: the rest. Losses are best logit - chosen logit.

    noise: the rounding seen, the largest difference in a logit among a position's 16 best between
    the judging forward and its repetitions, in blocks and in fp32.
    worst_loss: over all tokens. near_tie_positions, violation_positions: indices into the output.
    """

    tokens: int
    exact: int
    tolerance: float
    noise: float
    worst_loss: float
    near_tie_positions: list[int] = field(default_factory=list)
    violation_positions: list[int] = field(default_factory=list)

    @property
    def near_ties(self) -> int:
        return len(self.near_tie_positions)

    @property
    def violations(self) -> int:
        return len(self.violation_positions)

    def __str__(self) -> str:
        return (
            f"{self.exact}/{self.tokens} exact, {self.near_ties} near ties (within "
            f"{self.tolerance:.2g}), {self.violations} violations; worst loss "
            f"{self.worst_loss:.2g}, the target's rounding {self.noise:.2g}"
        )


@torch.no_grad()
def greedy_report(
    target: Target,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    tolerance: float | None = None,
) -> GreedyReport:
    """Judge each token of `output` by the target's logits after all tokens before it.

    The logits come from one forward over everything. They are computed again in a cached pass in
    blocks of 7 and, of a model in half precision, with the same weights in fp32, one layer's at a
    time. The decoder judged takes no part. tolerance None: 1e-4 in fp32; in half precision twice
    the largest difference from the first forward (in the 16 best logits of a position), since each
    of the two logits compared may be off by that much. So a near tie is a choice that rounding as
    large as the target's own can make, and a violation is one that it cannot.

    Raises:
        ValueError: prompt or output is empty.
    """
    if not len(prompt) or not len(output):
        raise ValueError(
            f"greedy_report: prompt, output: got {len(prompt)} and {len(output)} tokens, "
            "expected at least one each"
        )
    ids = torch.tensor([[*prompt, *output]], device=target.device)[:, :-1]
    chosen = torch.tensor(output, device=target.device)[:, None]
    start = len(prompt) - 1  # the logits at this position choose output[0]
    with sdpa_kernel(_ATTENTION):
        whole = _logits(target, ids, start)
        noise = _block_noise(target, ids, start, whole)
        if target.dtype in _HALF:
            # Shapes alone show too little where a sum fits one tile: it is then the same in each.
            with _in_fp32(target):
                noise = max(noise, _difference(_logits(target, ids, start), whole))
    if tolerance is None:
        tolerance = 1e-4 if target.dtype == torch.float32 else 2 * noise
    best, token = whole.max(dim=-1, keepdim=True)
    loss = (best - whole.gather(1, chosen))[:, 0]
    # Ties go to the lowest id, in the kernels as in argmax.
    wrong = (token != chosen)[:, 0].tolist()
    losses = loss.tolist()
    positions = [i for i, w in enumerate(wrong) if w]
    return GreedyReport(
        tokens=len(losses),
        exact=len(losses) - len(positions),
        tolerance=tolerance,
        noise=noise,
        worst_loss=max(losses),
        near_tie_positions=[i for i in positions if losses[i] <= tolerance],
        violation_positions=[i for i in positions if not losses[i] <= tolerance],
    )


def _logits(target: Target, ids: Tensor, start: int) -> Tensor:
    """fp32 [columns from `start`, V] of one forward over ids [1, T]."""
    keep = torch.arange(start, ids.shape[1], device=ids.device)
    logits, _ = target.forward(ids, RowCache(1, ids.shape[1], ids.device), keep=keep)
    return logits[0].float()


def _difference(logits: Tensor, whole: Tensor) -> float:
    best, ids = whole.topk(min(_RIVALS, whole.shape[1]))
    return (logits.gather(1, ids) - best).abs().max().item()


@contextmanager
def _in_fp32(target: Target) -> Iterator[None]:
    """Forwards compute in fp32. A layer's weights are widened while it runs and no longer, so that
    a model that fills the memory can be judged; the tensors themselves stay where they are."""
    parts = {layer: [*layer.parameters()] for layer in target.layers}
    inside = {module for layer in target.layers for module in layer.modules()}
    for module in target.model.modules():
        if module not in inside:
            parts[module] = [*module.parameters(recurse=False)]
    parts = {m: [p for p in own if p.dtype in _HALF] for m, own in parts.items()}
    kept: dict[nn.Module, list[Tensor]] = {}

    def widen(module: nn.Module, args) -> None:
        kept[module] = [parameter.data for parameter in parts[module]]
        for parameter, value in zip(parts[module], kept[module]):
            with torch.inference_mode(parameter.is_inference()):  # of the kind they were
                parameter.data = value.float()

    def restore(module: nn.Module, *_) -> None:
        for parameter, value in zip(parts[module], kept.pop(module)):
            with torch.inference_mode(parameter.is_inference()):
                parameter.data = value

    handles = []
    try:
        for module in (m for m, own in parts.items() if own):
            handles.append(module.register_forward_pre_hook(widen))
            handles.append(module.register_forward_hook(restore))
        yield
    finally:
        for module in reversed([*kept]):  # of a forward that failed
            restore(module)
        for handle in handles:
            handle.remove()


def _block_noise(target: Target, ids: Tensor, start: int, whole: Tensor) -> float:
    """Largest difference from `whole` when the same logits are computed block by block."""
    cache = RowCache(1, ids.shape[1], target.device)
    worst = 0.0
    if start:
        target.forward(ids[:, :start], cache, keep=torch.tensor([start - 1], device=ids.device))
        cache.advance(torch.tensor([start], device=ids.device), [start])
    for at in range(start, ids.shape[1], _BLOCK):
        block = ids[:, at : at + _BLOCK]
        size = block.shape[1]
        logits, _ = target.forward(block, cache)
        cache.advance(torch.tensor([size], device=ids.device), [size])
        same = whole[at - start : at - start + size]
        worst = max(worst, _difference(logits[0].float(), same))
    return worst
