"""What decoding needs in memory, in bytes, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from .drafter import DominoDrafter
from .engine import PREFILL_TOKENS, check_num_drafts

if TYPE_CHECKING:
    from torch import nn

    from .drafter import Drafter
    from .target import Target


@dataclass(frozen=True)
class Memory:
    """Bytes by what holds them.

    Weights and caches stay as long as the engine. logits (a cycle's, of target and drafter) and
    features (of the target's largest forward: layer outputs for the drafter, apart and joined) are
    the loop's own large tensors of a step. What the layers of a forward hold for a moment comes on
    top and is not counted.
    """

    target_weights: int
    drafter_weights: int
    target_cache: int
    drafter_cache: int
    logits: int
    features: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        parts["total"] = self.total
        return ", ".join(f"{n.replace('_', ' ')} {b / 1e6:,.1f} MB" for n, b in parts.items())


def estimate_memory(
    target: Target,
    drafter: Drafter | None,
    batch: int,
    length: int,
    *,
    num_drafts: int | None = None,
    prefill_tokens: int = PREFILL_TOKENS,
) -> Memory:
    """What an `Engine` with max_batch=batch and max_length=length comes to hold."""
    drafts = check_num_drafts(drafter, num_drafts)
    room, size = length + drafts + 1, target.dtype.itemsize
    config = target.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    logit_rows, features = drafts + 1, 0
    drafter_weights = drafter_cache = 0
    if isinstance(drafter, DominoDrafter):
        own = drafter.config
        drafter_weights = _weights(drafter)
        positions = batch * (room + own.block_size) * own.num_key_value_heads * own.head_dim
        drafter_cache = 2 * own.num_hidden_layers * positions * drafter.dtype.itemsize
        every_slot = drafter.head is not None and not own.shift_label
        logit_rows += own.slots_for(drafts) if every_slot else drafts
        tokens = max(min(prefill_tokens, batch * length), batch * (drafts + 1))
        features = 2 * tokens * own.num_features * target.hidden_size * size
    return Memory(
        target_weights=_weights(target.model),
        drafter_weights=drafter_weights,
        target_cache=2 * config.num_hidden_layers * batch * room * heads * dim * size,
        drafter_cache=drafter_cache,
        logits=batch * logit_rows * target.vocab_size * size,
        features=features,
    )


def _weights(module: nn.Module) -> int:
    """Bytes of a module's tensors, each counted once however many names it has."""
    tensors = {t.data_ptr(): t.nbytes for t in (*module.parameters(), *module.buffers())}
    return sum(tensors.values())
