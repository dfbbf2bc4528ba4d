"""Attention over a static key/value store in which every row has a length of its own.

`transformers` lets a model take its attention from a registry. The function registered here keeps
keys and values itself, in one `RowStore` that is passed to the model call as ``row_store=``, and so
replaces the library's cache: rows of one batch stand at different positions, a row is rolled back
by writing its length, and nothing is allocated in a step, so a step can be captured in a CUDA
graph.

On CUDA a Triton kernel reads each row's keys once, up to that row's own length. On the CPU it is
plain SDPA with a mask.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

NAME = "domino_rows"


class RowStore:
    """Keys and values of `batch` rows, `max_length` positions each, for every layer of one model.

    Attributes:
        keys, values: per layer `[batch, max_length, kv_heads, head_dim]`, in the model's dtype.
        lengths: `[batch]` int64 on the device; positions below it are valid. A forward writes its T
            tokens at `lengths[b] .. lengths[b]+T-1` and leaves `lengths` alone: the caller decides
            how many of them count.
        prefill_rows: `[R]` int64, or None. When set, the next forwards are prefills: row i of their
            input starts at position 0 of row `prefill_rows[i]`, and attention is plain causal.
    """

    def __init__(self, config, batch: int, max_length: int, device, dtype):
        head_dim = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        shape = (batch, max_length, config.num_key_value_heads, head_dim)
        layers = range(config.num_hidden_layers)
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in layers]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in layers]
        self.lengths = torch.zeros(batch, device=device, dtype=torch.int64)
        self.rows = torch.arange(batch, device=device)
        self.prefill_rows: torch.Tensor | None = None


def row_attention(module, query, key, value, attention_mask, *, row_store=None, scaling=None, **_):
    """The registered attention function; shapes as in `transformers`: query `[B, heads, T, D]`."""
    if row_store is None:
        raise ValueError(
            f"{NAME}: row_store: got None, expected the RowStore of this batch in the model call"
        )
    if attention_mask is not None:
        raise ValueError(
            f"{NAME}: attention_mask: got a tensor, expected None (lengths live in the RowStore)"
        )
    keys, values = row_store.keys[module.layer_idx], row_store.values[module.layer_idx]
    tokens = query.shape[2]
    if row_store.prefill_rows is not None:
        rows = row_store.prefill_rows
        keys[rows, :tokens] = key.transpose(1, 2)
        values[rows, :tokens] = value.transpose(1, 2)
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None

    steps = torch.arange(tokens, device=query.device)
    positions = row_store.lengths[:, None] + steps
    keys[row_store.rows[:, None], positions] = key.transpose(1, 2)
    values[row_store.rows[:, None], positions] = value.transpose(1, 2)
    if query.is_cuda:
        return _row_attention_triton(query, keys, values, row_store.lengths, scaling), None
    mask = torch.arange(keys.shape[1], device=query.device) <= positions[..., None]
    out = F.scaled_dot_product_attention(
        query,
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=mask[:, None],
        scale=scaling,
        enable_gqa=True,
    )
    return out.transpose(1, 2), None


def _row_attention_triton(query, keys, values, lengths, scaling):
    import triton

    from domino_kernels.triton_kernels.row_attention import row_attention_kernel

    batch, heads, tokens, head_dim = query.shape
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    out = torch.empty(batch, tokens, heads, head_dim, device=query.device, dtype=query.dtype)
    row_attention_kernel[(batch, kv_heads)](
        query, keys, values, lengths, out,
        scaling if scaling is not None else head_dim**-0.5,
        *query.stride()[:3], *keys.stride()[:3], *out.stride()[:3],
        TOKENS=tokens, GROUP=group, HEAD_DIM=head_dim,
        BLOCK_M=max(16, triton.next_power_of_2(group * tokens)),
        BLOCK_N=64, BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        num_warps=4,
    )  # fmt: skip
    return out


def install(model) -> None:
    """Make a causal LM take its attention from here; its calls then need ``row_store=``."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, row_attention)
    model.set_attn_implementation(NAME)
