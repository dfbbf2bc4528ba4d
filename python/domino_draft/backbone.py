"""The DFlash backbone: a few Qwen3-style layers that fill a block of masks in one forward.

Formulas and names: arXiv 2605.29707 (Domino, sections on the backbone) and the public checkpoints.
Context rows are fused target hidden states; they enter every layer as keys and values only, and
never pass `input_layernorm`. The block is [anchor, mask, mask, ...]. Positions are absolute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention, silu

from .config import DominoConfig

KV = tuple[Tensor, Tensor]


def block_mask(
    anchors: Tensor,
    num_slots: int,
    context_len: int,
    *,
    valid: Tensor | None = None,
    window: int | None = None,
) -> Callable[[Any, Any, Any, Any], Tensor]:
    """What a block query may see, as a `mask_mod(b, h, q, kv)` for flex_attention.

    anchors int64 [B, N]: absolute position of each block's anchor; queries are the N blocks'
    slots, block by block (N * num_slots rows); keys are `context_len` context positions, then the
    block rows. Context is visible strictly before the anchor (the anchor's own hidden state is not
    known when it is drafted), block rows inside the same block only. valid bool [B, N]: blocks
    that see anything. window: a sliding layer's width W; there the block is causal and context
    starts at anchor + slot - (W - 1). `dense_mask` evaluates the same predicate into a tensor.
    """

    def mask_mod(b, h, q, kv):
        block, slot = q // num_slots, q % num_slots
        anchor = anchors[b, block]
        key = kv - context_len
        in_context = (kv < context_len) & (kv < anchor)
        in_block = (key >= 0) & (key // num_slots == block)
        if window is not None:
            in_context = in_context & (kv > anchor + slot - window)
            in_block = in_block & (key % num_slots <= slot) & (key % num_slots > slot - window)
        seen = in_context | in_block
        return seen if valid is None else seen & valid[b, block]

    return mask_mod


def dense_mask(mask_mod: Callable, batch: int, q_len: int, kv_len: int, device) -> Tensor:
    """bool [batch, 1, q_len, kv_len]: a `mask_mod` evaluated at every pair."""
    b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    q = torch.arange(q_len, device=device).view(1, 1, -1, 1)
    kv = torch.arange(kv_len, device=device).view(1, 1, 1, -1)
    return mask_mod(b, None, q, kv).expand(batch, 1, q_len, kv_len)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (rotate-half) of x [B, heads, T, D] in fp32; cos, sin [B, 1, T, D/2]."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """GQA of block rows over context and block, with per-head q and k norms."""

    def __init__(self, config: DominoConfig):
        super().__init__()
        heads, kv_heads, dim = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim,
        )  # fmt: skip
        self.dim, self.groups = dim, heads // kv_heads
        self.q_proj = nn.Linear(config.hidden_size, heads * dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.dim))

    def kv(self, x: Tensor, rope: KV) -> KV:
        k = rotate(self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2), *rope)
        return k, self._heads(self.v_proj(x)).transpose(1, 2)

    def forward(self, x: Tensor, rope: KV, join: Callable[[Tensor, Tensor], KV], mask) -> Tensor:
        q = rotate(self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2), *rope)
        k, v = join(*self.kv(x, rope))
        if isinstance(mask, BlockMask):
            out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
            return self.o_proj(out.transpose(1, 2).flatten(2))
        # The queries of one group share their keys and there is no order among them, so they are
        # laid out as further rows: K and V are read as they lie, with no copy per query head.
        batch, heads, rows, dim = q.shape
        q = q.reshape(batch, heads // self.groups, self.groups * rows, dim)
        if mask is not None and self.groups > 1:
            mask = mask.unsqueeze(2).expand(-1, -1, self.groups, -1, -1).flatten(2, 3)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(out.reshape(batch, heads, rows, dim).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: DominoConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: DominoConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, rope: KV, join: Callable[[Tensor, Tensor], KV], mask) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, join, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashBackbone(nn.Module):
    """Layers, feature fusion and final norm; the embedding and LM head are the target's."""

    def __init__(self, config: DominoConfig):
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.fc = nn.Linear(config.num_features * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        # A plain attribute: a buffer would be cast with the weights, and angles stay in fp32.
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device="cpu")
        self._inv_freq = (config.rope_theta ** (-half / config.head_dim)).float()

    def rope(self, positions: Tensor) -> KV:
        """cos, sin fp32 [B, 1, T, D/2] of absolute positions [B, T]."""
        if self._inv_freq.device != positions.device:
            self._inv_freq = self._inv_freq.to(positions.device)
        angles = positions[:, None, :, None].float() * self._inv_freq
        return angles.cos(), angles.sin()

    def context_kv(self, features: Tensor, positions: Tensor) -> list[KV]:
        """Keys and values of context rows for every layer.

        features [B, T, num_features * H] in `target_layer_ids` order, positions int64 [B, T];
        returns per layer k (normed, rotated) and v, [B, Hkv, T, D].
        """
        expected = self.fc.in_features
        if features.dim() != 3 or features.shape[-1] != expected:
            raise ValueError(
                f"context_kv: features: got shape {tuple(features.shape)}, expected "
                f"[B, T, {expected}] ({self.config.num_features} layers of the target, joined)"
            )
        rope = self.rope(positions)
        c = self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))
        return [layer.self_attn.kv(c, rope) for layer in self.layers]

    def forward(
        self,
        block_embeds: Tensor,
        positions: Tensor,
        context: Sequence[KV] | Any,
        mask: Tensor | BlockMask | None = None,
        sliding_mask: Tensor | BlockMask | None = None,
    ) -> Tensor:
        """Hidden states of block rows after the final norm, [B, Q, H].

        block_embeds [B, Q, H] and positions int64 [B, Q] hold one or more blocks a row. context:
        the list that `context_kv` returns (keys = context rows, then block rows), or a cache whose
        `update(k, v, layer)` takes the block rows and returns all keys and values. mask: bool
        (True = visible) or additive [B, 1, Q, keys], a flex BlockMask, or None when every query
        sees every key. sliding_mask: the same for `sliding_attention` layers.
        """
        sliding = "sliding_attention" in self.config.layer_types
        if sliding and sliding_mask is None:
            raise ValueError(
                "DFlashBackbone: sliding_mask: got None, expected a mask (layer_types)"
            )
        rope = self.rope(positions)
        x = block_embeds.to(self.fc.weight.dtype)
        for i, layer in enumerate(self.layers):
            kind = self.config.layer_types[i]
            join = _join(context, i)
            x = layer(x, rope, join, mask if kind == "full_attention" else sliding_mask)
        return self.norm(x)


def _join(context: Sequence[KV] | Any, layer: int) -> Callable[[Tensor, Tensor], KV]:
    if hasattr(context, "update"):
        return lambda k, v: context.update(k, v, layer)
    old_k, old_v = context[layer]
    return lambda k, v: (torch.cat((old_k, k), dim=2), torch.cat((old_v, v), dim=2))
