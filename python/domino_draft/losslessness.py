"""Is this text the target's own greedy decoding? A comparison that holds in fp32 and in bf16.

Two forwards of one model over one prefix differ by rounding when their shapes differ (a block of 16
tokens against one token), so a block decoder and a one-token decoder may part where the two best
logits nearly tie, and after that they continue different texts. Comparing texts therefore proves
nothing in bf16. What can be checked is every choice on its own: given the very prefix that the
decoder had, each token must be the target's best one, or as good as the best within the rounding
that the target itself shows between two forward shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from .cache import RowCache

if TYPE_CHECKING:
    from .target import Target

_BLOCK = 7  # tokens of the second forward shape; odd, so that it matches no usual kernel tile
_RIVALS = 16  # best tokens of a position whose rounding counts: the others cannot win


@dataclass(frozen=True)
class GreedyReport:
    """Verdict on one output. exact: tokens that are the argmax; near_ties: the others whose logit
    is within `tolerance` of the best; violations: the rest. Losses are best logit - chosen logit.

    noise: largest difference between the two forward shapes in a logit among a position's 16 best.
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
            f"{self.worst_loss:.2g}, rounding between forward shapes {self.noise:.2g}"
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

    The logits come from one forward over everything and, a second time, from a cached pass in
    blocks of 7. tolerance None: 1e-4 in fp32; in half precision twice the largest difference seen
    between the two passes (in the 16 best logits of a position), since each of the two logits
    compared may be off by that much. So a near tie is a choice that the target's own rounding can
    make, and a violation is one that it cannot.

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
    whole, _ = target.forward(
        ids,
        RowCache(1, ids.shape[1], target.device),
        keep=torch.arange(start, ids.shape[1], device=target.device),
    )
    whole = whole[0].float()
    noise = _block_noise(target, ids, start, whole)
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


def _block_noise(target: Target, ids, start: int, whole) -> float:
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
        best, ids_of_best = whole[at - start : at - start + size].topk(min(_RIVALS, whole.shape[1]))
        difference = logits[0].float().gather(1, ids_of_best) - best
        worst = max(worst, difference.abs().max().item())
    return worst
