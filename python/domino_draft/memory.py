"""What decoding needs in memory, in bytes, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from .cycle import LATE_PLACES, table_bytes
from .drafter import DominoDrafter
from .edits import edits_bytes
from .engine import PREFILL_TOKENS
from .requests import num_drafts as check_num_drafts
from .row_ops import workspace_bytes

if TYPE_CHECKING:
    from torch import nn

    from .drafter import Drafter
    from .target import Target
    from .tree import TreeOptions


@dataclass(frozen=True)
class Memory:
    """Bytes by what holds them.

    Weights and caches stay as long as the engine; drafter_cache counts of a sliding layer its ring
    (`DominoConfig.context_lengths`). logits (a cycle's, of target and drafter) and features (of the
    target's largest forward: layer outputs for the drafter, apart and joined) are the loop's own
    large tensors of a step. edits: what penalties and biases need, from the first request on that
    has any. fused is what the fused layers keep beside the model's weights, on a
    GPU. What the layers of a forward hold for a moment, and so the pool of captured graphs beyond
    the logits, comes on top and is not counted.
    """

    target_weights: int
    drafter_weights: int
    target_cache: int
    drafter_cache: int
    logits: int
    features: int
    fused: int
    edits: int = 0

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
    num_drafts: int | str | None = None,
    prefill_tokens: int = PREFILL_TOKENS,
    fp8_draft_head: bool = False,
    draft_vocab: int | None = None,
    tree: TreeOptions | None = None,
    fused: bool | None = None,
    edited: bool = False,
) -> Memory:
    """What an `Engine` with max_batch=batch and max_length=length comes to hold.

    draft_vocab: how many ids there are to draft from. fused: the engine runs the fused layers;
    None: where the target is on a GPU. edited: some requests have penalties or a bias. Other
    arguments as in `Engine`.

    Raises:
        ValueError: a setting out of range, a cheaper draft head without a Domino drafter.
    """
    where = "estimate_memory"
    for name, value in (("batch", batch), ("length", length), ("prefill_tokens", prefill_tokens)):
        if value < 1:
            raise ValueError(f"{where}: {name}: got {value}, expected at least 1")
    domino = isinstance(drafter, DominoDrafter)
    for name, given in (("fp8_draft_head", fp8_draft_head), ("draft_vocab", draft_vocab)):
        if given and not domino:
            raise ValueError(f"{where}: {name}: got {given}, expected a Domino drafter with it")
    if draft_vocab is not None and not 1 <= draft_vocab <= target.vocab_size:
        raise ValueError(
            f"{where}: draft_vocab: got {draft_vocab}, expected 1..{target.vocab_size}"
        )
    if draft_vocab is None and domino and drafter.draft_ids is not None:
        draft_vocab = len(drafter.draft_ids)
    if tree is not None:
        if num_drafts is not None:
            raise ValueError(f"{where}: num_drafts: got {num_drafts} and a tree, expected None")
        tree = tree.settled(drafter, ())
        num_drafts = tree.depth
    num_drafts = None if num_drafts == "auto" else num_drafts
    drafts = check_num_drafts(f"{where}: num_drafts", drafter, num_drafts)
    block = drafts + 1 if tree is None else tree.nodes
    room, size = length + block, target.dtype.itemsize
    config = target.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    logit_rows, features = block, 0
    fused = target.device.type == "cuda" if fused is None else fused
    beside = workspace_bytes(target.device) + 4 * room * dim  # and angles of every position
    drafter_weights = drafter_cache = 0
    if domino:
        own = drafter.config
        drafter_weights = _weights(drafter)
        position = 2 * own.num_key_value_heads * own.head_dim * drafter.dtype.itemsize
        drafter_cache = batch * sum(own.context_lengths(room)) * position
        every_slot = drafter.head is not None and not own.shift_label
        logit_rows += own.slots_for(drafts) if every_slot else drafts
        tokens = max(min(prefill_tokens, batch * length), batch * block)
        beside += 4 * (room + own.block_size) * own.head_dim
        places = own.vocab_size
        if draft_vocab is not None:
            places = draft_vocab + batch
            places += -places % 16
            beside += places * target.hidden_size * size
            if drafter.head is not None:
                each = own.emb_dim + target.hidden_size
                beside += places * each * drafter.dtype.itemsize
        if drafter.head is not None and target.device.type == "cuda":
            beside += table_bytes(own, drafter.dtype) * places // own.vocab_size
        rows = 2 * own.num_key_value_heads * own.head_dim
        beside += own.num_hidden_layers * rows * target.hidden_size * drafter.dtype.itemsize
        beside += own.num_hidden_layers * own.head_dim * drafter.dtype.itemsize
        features = 2 * tokens * own.num_features * target.hidden_size * size
        beside += batch * LATE_PLACES * own.num_features * target.hidden_size * size
    if fp8_draft_head:
        beside += places * (target.hidden_size + 4)
    return Memory(
        target_weights=_weights(target.model),
        drafter_weights=drafter_weights,
        target_cache=2 * config.num_hidden_layers * batch * room * heads * dim * size,
        drafter_cache=drafter_cache,
        logits=batch * logit_rows * target.vocab_size * size,
        features=features,
        fused=beside if fused else 0,
        edits=edits_bytes(batch, target.vocab_size) if edited else 0,
    )


def _weights(module: nn.Module) -> int:
    """Bytes of a module's tensors, each counted once however many names it has."""
    tensors = {t.data_ptr(): t.nbytes for t in (*module.parameters(), *module.buffers())}
    return sum(tensors.values())
