"""Losses, accuracy by slot and simulated accepted length, summed on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from domino_kernels.ops.train import DualCE

from ..config import DominoConfig
from .objective import DeviceBatch


class Meter:
    """Sums over batches; nothing waits for the device until `read`.

    Simulated accepted length of a block: 1 + the number of leading proposals that equal the labels,
    K = block_size - 1 proposals (all labels given the true prefix, as verification of the target's
    own text would find them). A slot without a label ends the run without counting. Blocks with no
    label are left out.
    """

    def __init__(self, config: DominoConfig, device: torch.device):
        self.slots = config.block_size
        first = 0 if config.shift_label else 1
        self.scored = slice(first, first + config.block_size - 1)
        self.device = device
        self.reset()

    def reset(self) -> None:
        self.by_slot = torch.zeros(3, self.slots, dtype=torch.float64, device=self.device)
        # batches, loss base, loss final, blocks, accepted base, accepted final
        self.totals = torch.zeros(6, dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def add(self, batch: DeviceBatch, out: DualCE) -> None:
        blocks = batch.anchors.numel()
        size = blocks * self.slots

        def spread(values: Tensor) -> Tensor:
            full = torch.zeros(size, dtype=torch.float32, device=self.device)
            return full.index_copy_(0, batch.rows, values.float()).view(blocks, self.slots)

        labelled = spread(torch.ones_like(batch.weights))
        base = spread(out.base_top == batch.labels)
        final = spread(out.final_top == batch.labels)
        self.by_slot += torch.stack([x.sum(0) for x in (labelled, base, final)])
        present = labelled.amax(1)
        runs = [(1 + x[:, self.scored].cumprod(1).sum(1)) * present for x in (base, final)]
        losses = [(batch.weights * x).sum() for x in (out.base_ce, out.final_ce)]
        one = torch.ones((), device=self.device)
        self.totals += torch.stack([one, *losses, present.sum(), *(r.sum() for r in runs)])

    def read(self) -> dict[str, Any]:
        """Means as plain numbers (waits for the device)."""
        batches, loss_base, loss_final, blocks, base, final = self.totals.tolist()
        count, hit_base, hit_final = self.by_slot.tolist()
        batches, blocks = max(batches, 1), max(blocks, 1)

        def rate(hits: list[float]) -> list[float]:
            return [h / max(c, 1) for h, c in zip(hits, count)]

        return {
            "loss_base": loss_base / batches,
            "loss_final": loss_final / batches,
            "accepted_base": base / blocks,
            "accepted_final": final / blocks,
            "accuracy_base": sum(hit_base) / max(sum(count), 1),
            "accuracy_final": sum(hit_final) / max(sum(count), 1),
            "accuracy_base_by_slot": rate(hit_base),
            "accuracy_final_by_slot": rate(hit_final),
        }
