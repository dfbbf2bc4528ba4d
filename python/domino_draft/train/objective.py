"""The Domino objective on one batch: features, blocks, mask, teacher forcing and both losses.

loss = (1 - lam) * CE(final) + lam * CE(base), lam falling linearly from 1 (arXiv 2605.29707). The
block of an anchor a holds [x_a, MASK, ..., MASK] at positions a .. a + S - 1 and sees the target's
features strictly before a (the feature at a does not exist yet when a block is drafted) and its own
slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from domino_kernels.ops.train import DualCE, dual_ce

from ..backbone import block_mask, dense_mask
from ..drafter import DominoDrafter
from .data import Batch

FLEX_BLOCK = 128


@dataclass(frozen=True)
class DeviceBatch:
    """A `data.Batch` as tensors on the device; fields and shapes as there."""

    tokens: Tensor
    anchors: Tensor
    inputs: Tensor
    rows: Tensor
    labels: Tensor
    weights: Tensor

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> DeviceBatch:
        def move(array):
            tensor = torch.from_numpy(array)
            if device.type == "cuda":
                tensor = tensor.pin_memory()
            return tensor.to(device, non_blocking=True)

        return cls(*(move(getattr(batch, name)) for name in cls.__dataclass_fields__))


def lambda_at(progress: float, start: float = 1.0, ratio: float = 1.0) -> float:
    """Weight of the base loss at `progress` in [0, 1] of the run: linear from `start` to 0 at
    `ratio`.
    """
    if ratio <= 0:
        return 0.0
    return min(max(start * (1.0 - progress / ratio), 0.0), 1.0)


class TargetFeatures:
    """Hidden states of chosen target layers for whole right-padded sequences, without gradient.

    Takes the `transformers` causal LM over: layers above the last chosen one are dropped (the LM
    head is never run), so use the model for nothing else. Padding needs no mask: it comes after
    every real token and attention is causal.
    """

    def __init__(self, model: nn.Module, layer_ids: tuple[int, ...]):
        self.base = model.get_decoder() if hasattr(model, "get_decoder") else model.model
        self.base.layers = self.base.layers[: max(layer_ids) + 1]
        self.base.config.num_hidden_layers = len(self.base.layers)
        self._taken: dict[int, Tensor] = {}
        for index in layer_ids:
            self.base.layers[index].register_forward_hook(self._keep(index))
        self.layer_ids = layer_ids
        model.requires_grad_(False).eval()

    def _keep(self, index: int) -> Callable:
        def hook(_module, _inputs, output):
            self._taken[index] = output[0] if isinstance(output, tuple) else output

        return hook

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens int64 [B, L] -> [B, L, num_features * H], joined in `layer_ids` order."""
        self.base(input_ids=tokens, use_cache=False)
        features = torch.cat([self._taken[i] for i in self.layer_ids], dim=-1)
        self._taken.clear()
        return features

    def compile(self) -> None:
        """Compile the layers (one graph, shared by all of them)."""
        for layer in self.base.layers:
            layer.forward = torch.compile(layer.forward, dynamic=False)


def attention_mask(
    anchors: Tensor, num_slots: int, context_len: int, kind: str
) -> Tensor | BlockMask:
    """The mask of all blocks of a batch: `kind` "dense" (bool [B, 1, N*S, L + N*S]) or "flex".

    An unused block (anchor 0) sees itself only, so that no softmax is empty; its slots have no
    label.
    """
    mask_mod = block_mask(anchors, num_slots, context_len)
    batch, blocks = anchors.shape
    q_len = blocks * num_slots
    if kind == "dense":
        return dense_mask(mask_mod, batch, q_len, context_len + q_len, anchors.device)
    if q_len % FLEX_BLOCK or context_len % FLEX_BLOCK or FLEX_BLOCK % num_slots:
        raise ValueError(
            f"attention_mask: got {blocks} anchors x {num_slots} slots over {context_len} tokens, "
            f"expected multiples of {FLEX_BLOCK} for flex attention; use attention='dense' for "
            "other sizes"
        )
    # Which key tiles a query tile needs follows from its anchors: context tiles that start before
    # its last anchor (whole ones up to its first anchor), and the tile of its own blocks. Spelling
    # that out costs a few small tensors; evaluating the mask at every pair costs 100 times more.
    tiles_q, tiles_c = q_len // FLEX_BLOCK, context_len // FLEX_BLOCK
    tile_anchors = anchors.view(batch, tiles_q, FLEX_BLOCK // num_slots)
    first, last = tile_anchors.amin(-1), tile_anchors.amax(-1)
    full = (first // FLEX_BLOCK).clamp(max=tiles_c)
    some = ((last + FLEX_BLOCK - 1) // FLEX_BLOCK).clamp(max=tiles_c)
    tile = torch.arange(tiles_c + tiles_q, device=anchors.device)
    own = tiles_c + torch.arange(tiles_q, device=anchors.device)[None, :, None]
    partial = ((tile >= full[..., None]) & (tile < some[..., None])) | (tile == own)
    # Needed tiles first: a stable sort of "not needed" keeps both groups in order.
    order = torch.argsort((~partial).to(torch.int8), dim=-1, stable=True).to(torch.int32)
    whole = tile.to(torch.int32).expand_as(order).contiguous()
    return BlockMask.from_kv_blocks(
        partial.sum(-1, dtype=torch.int32)[:, None],
        order[:, None],
        full.to(torch.int32)[:, None],
        whole[:, None],
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(q_len, context_len + q_len),
    )


def block_hidden(
    drafter: DominoDrafter,
    features: Tensor,
    anchors: Tensor,
    anchor_tokens: Tensor,
    embedding: Tensor,
    mask: Tensor | BlockMask,
) -> Tensor:
    """Backbone output of every block: [B, N * S, H].

    features [B, L, F * H]; anchors, anchor_tokens int64 [B, N]; embedding [V, H] of the target.
    """
    slots = drafter.config.block_size
    batch, blocks = anchors.shape
    length = features.shape[1]
    device = features.device
    context = drafter.context_kv(
        features, torch.arange(length, device=device).expand(batch, length)
    )
    embeds = embedding[drafter.config.mask_token_id].expand(batch, blocks, slots - 1, -1)
    embeds = torch.cat((embedding[anchor_tokens][:, :, None], embeds), dim=2).flatten(1, 2)
    if torch.is_grad_enabled():
        # Nobody reads this gradient; with it the first layer looks like the others to the
        # compiler, so one graph serves all.
        embeds.requires_grad_()
    positions = (anchors[:, :, None] + torch.arange(slots, device=device)).flatten(1, 2)
    return drafter(embeds, positions, context, mask)


def labelled_rows(
    drafter: DominoDrafter, hidden: Tensor, batch: DeviceBatch, embedding: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Backbone hidden [R, H] and low-rank vector [R, rank] (None without a head) of the labelled
    slots.

    The GRU reads the true tokens of the block (teacher forcing). Slots before the head's first slot
    get a zero vector: their final logits are their base logits.
    """
    config, head = drafter.config, drafter.head
    hidden = hidden.reshape(-1, hidden.shape[-1]).index_select(0, batch.rows)
    if head is None:
        return hidden, None
    blocks = batch.inputs.reshape(-1, config.block_size)
    states = head.states(embedding[blocks])
    # Slot i uses the state after y_i (shift) or after y_{i-1} (no shift; slot 0 is never labelled).
    index = batch.rows if config.shift_label else batch.rows - 1
    states = states.reshape(-1, states.shape[-1]).index_select(0, index)
    low_rank = head.low_rank(hidden, states)
    corrected = (batch.rows % config.block_size >= head.first_slot)[:, None]
    return hidden, torch.where(corrected, low_rank, torch.zeros_like(low_rank))


def domino_loss(
    drafter: DominoDrafter,
    features: Tensor,
    batch: DeviceBatch,
    embedding: Tensor,
    lm_head: Tensor,
    lam: float,
    *,
    attention: str = "dense",
    chunk_rows: int = 8192,
    backward: bool = True,
) -> DualCE:
    """The objective and its row statistics (order of `batch.rows`) for one batch.

    backward=False: no gradient will be asked for (the layers still run as compiled for training).
    """
    slots = drafter.config.block_size
    mask = attention_mask(batch.anchors, slots, features.shape[1], attention)
    hidden = block_hidden(drafter, features, batch.anchors, batch.inputs[:, :, 0], embedding, mask)
    hidden, low_rank = labelled_rows(drafter, hidden, batch, embedding)
    w2 = None if drafter.head is None else drafter.head.w2
    if not backward:
        hidden = hidden.detach()
        low_rank, w2 = (None if t is None else t.detach() for t in (low_rank, w2))
    return dual_ce(
        hidden, low_rank, batch.labels, batch.weights, lm_head, w2, lam, chunk_rows=chunk_rows
    )
