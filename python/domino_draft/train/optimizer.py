"""The optimizer: fp32 masters, schedule, weight average, initial weights."""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..drafter import DominoDrafter

if TYPE_CHECKING:
    from .trainer import TrainConfig


class MasterAdamW:
    """AdamW on fp32 masters of a module's parameters, with gradient clipping and an optional EMA.

    The module itself keeps its dtype (bf16 on a GPU: exactly the arithmetic of inference).
    """

    def __init__(self, module: nn.Module, config: TrainConfig):
        self.params = list(module.parameters())
        self.same = all(p.dtype == torch.float32 for p in self.params)
        if self.same:
            self.masters = self.params
        else:
            self.masters = [p.detach().float().requires_grad_() for p in self.params]
            for master in self.masters:
                master.grad = torch.zeros_like(master)
        self.clip, self.decay = config.clip, config.ema
        fused = self.params[0].is_cuda
        self.adamw = torch.optim.AdamW(
            self.masters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay,
            fused=fused,
        )  # fmt: skip
        self.ema = [m.detach().clone() for m in self.masters] if self.decay else None
        self.steps = 0

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self, lr: float) -> Tensor:
        """One update; returns the gradient norm before clipping."""
        if not self.same:
            for p in self.params:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
            torch._foreach_copy_([m.grad for m in self.masters], [p.grad for p in self.params])
        norm = nn.utils.clip_grad_norm_(self.masters, self.clip)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        if not self.same:
            torch._foreach_copy_(self.params, self.masters)
        self.steps += 1
        if self.ema is not None:
            # Early on the average follows the weights instead of remembering the initialisation.
            decay = min(self.decay, self.steps / (self.steps + 10))
            torch._foreach_lerp_(self.ema, self.masters, 1.0 - decay)
        return norm

    def state_dict(self) -> dict[str, Any]:
        return {
            "adamw": self.adamw.state_dict(),
            "masters": [m.detach() for m in self.masters],
            "ema": self.ema,
            "steps": self.steps,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adamw.load_state_dict(state["adamw"])
        for mine, saved in zip(self.masters, state["masters"], strict=True):
            mine.copy_(saved)
        if not self.same:
            torch._foreach_copy_(self.params, self.masters)
        if self.ema is not None:
            for mine, saved in zip(self.ema, state["ema"], strict=True):
                mine.copy_(saved)
        self.steps = state["steps"]


@torch.no_grad()
def initialise(drafter: DominoDrafter, seed: int) -> DominoDrafter:
    """Initial weights by (seed, tensor name): arms start from the same backbone, head or no head.

    The distributions are those of `DominoDrafter`: matrices N(0, 0.02), the GRU U(+-1/sqrt(G)),
    norms 1.
    """
    for name, p in drafter.named_parameters():
        generator = torch.Generator().manual_seed((seed << 32) ^ zlib.crc32(name.encode()))
        if name.startswith("prefix_gru."):
            bound = drafter.config.gru_hidden_dim**-0.5
            p.uniform_(-bound, bound, generator=generator)
        elif p.dim() == 2:
            p.normal_(std=0.02, generator=generator)
        else:
            p.fill_(1.0)
    return drafter


def learning_rate(config: TrainConfig, progress: float) -> float:
    """Linear warm-up, then a cosine from lr to lr * min_lr_ratio at progress 1."""
    if progress < config.warmup:
        return config.lr * progress / config.warmup
    share = min((progress - config.warmup) / max(1.0 - config.warmup, 1e-9), 1.0)
    low = config.lr * config.min_lr_ratio
    return low + 0.5 * (config.lr - low) * (1.0 + math.cos(math.pi * share))


class Swapped:
    """Parameters with other values for the length of a `with` block."""

    def __init__(self, params: list[Tensor], values: list[Tensor]):
        self.params, self.values = params, values

    @torch.no_grad()
    def __enter__(self) -> None:
        self.kept = [p.detach().clone() for p in self.params]
        torch._foreach_copy_(self.params, self.values)

    @torch.no_grad()
    def __exit__(self, *_error) -> None:
        torch._foreach_copy_(self.params, self.kept)
