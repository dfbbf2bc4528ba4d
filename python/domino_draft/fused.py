"""A decoder's layers over a few tokens a row, in five launches a layer instead of dozens.

Targets of the Llama form (Llama, SmolLM2, Qwen2, Qwen3) and the drafter's backbone share it: norms,
q, k, v in one product, rotary, grouped attention over static rows, SwiGLU. It computes what the
stock modules do, rounded once where those round several times. Weights are not copied: the three
of q, k, v and the two of gate, up move into one tensor each, and the modules keep views of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from . import cache_ops, row_ops

if TYPE_CHECKING:
    from .drafter import DominoDrafter
    from .target import Target

_FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ROPES = ("default", "linear", "llama3", "yarn")  # those whose angles do not depend on the text


# Not cuDNN's, which takes tens of milliseconds for every length of a prompt that it has not seen.
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class CannotFuse(ValueError):
    """Why a model keeps its stock forward."""


def join_weights(modules: Sequence[nn.Linear]) -> Tensor:
    """Their weights as one tensor [sum of N, K], of which the modules hold views from now on."""
    weights = [m.weight for m in modules]
    first = weights[0]
    rows = sum(w.shape[0] for w in weights)
    at, storage = first.storage_offset(), first.untyped_storage().data_ptr()
    joined = True
    for w in weights:
        joined &= w.untyped_storage().data_ptr() == storage and w.storage_offset() == at
        at += w.numel()
    if joined:  # by an earlier call
        return torch.as_strided(first.detach(), (rows, first.shape[1]), (first.shape[1], 1))
    with torch.inference_mode(first.is_inference()), torch.no_grad():  # of the kind they were
        whole = torch.cat([w.detach() for w in weights])
        for w, view in zip(weights, whole.split([w.shape[0] for w in weights])):
            w.data = view
    return whole


@dataclass(frozen=True)
class FusedLayer:
    qkv: Tensor
    qkv_bias: Tensor | None
    o: Tensor
    gate_up: Tensor
    down: Tensor
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    causal: bool
    window: int | None
    ring: bool  # its cache holds the last positions only: see RowCache

    @classmethod
    def of(
        cls,
        layer: nn.Module,
        *,
        causal: bool = True,
        window: int | None = None,
        ring: bool = False,
    ) -> FusedLayer:
        """Of a module with the names that Llama and its relatives use."""
        attention, mlp = layer.self_attn, layer.mlp
        heads = [attention.q_proj, attention.k_proj, attention.v_proj]
        biases = [m.bias for m in heads]
        for name, module in (*layer.named_modules(),):
            if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
                raise CannotFuse(f"{name} is a {type(module).__name__}, expected torch.nn.Linear")
        if any(m.bias is not None for m in (attention.o_proj, mlp.gate_proj, mlp.down_proj)):
            raise CannotFuse("there is a bias outside q, k and v")
        if any((b is None) != (biases[0] is None) for b in biases):
            raise CannotFuse("some of q, k, v have a bias and some have none")
        norm = lambda name: getattr(getattr(attention, name, None), "weight", None)  # noqa: E731
        detached = lambda t: None if t is None else t.detach()  # noqa: E731
        return cls(
            qkv=join_weights(heads),
            qkv_bias=None if biases[0] is None else torch.cat([b.detach() for b in biases]),
            o=attention.o_proj.weight.detach(),
            gate_up=join_weights([mlp.gate_proj, mlp.up_proj]),
            down=mlp.down_proj.weight.detach(),
            input_norm=layer.input_layernorm.weight.detach(),
            post_norm=layer.post_attention_layernorm.weight.detach(),
            q_norm=detached(norm("q_norm")),
            k_norm=detached(norm("k_norm")),
            causal=causal,
            window=window,
            ring=ring,
        )


class FusedDecoder:
    """Layers between an embedding and a final norm. `run` takes and gives rows [B * T, H]."""

    def __init__(
        self,
        layers: list[FusedLayer],
        norm: Tensor,
        eps: float,
        heads: int,
        kv_heads: int,
        dim: int,
        inv_freq: Tensor,
        rope_scaling: float = 1.0,
    ):
        self.layers, self.norm, self.eps = layers, norm, eps
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.inv_freq, self.rope_scaling = inv_freq, rope_scaling
        self.scale = dim**-0.5

    def rope(self, positions: int) -> Tensor:
        return cache_ops.rope_table(self.inv_freq, positions, self.rope_scaling)

    def run(
        self,
        x: Tensor,
        lengths: Tensor,
        cache: Tensor | Sequence[Tensor],
        rope: Tensor,
        workspace: row_ops.Workspace,
        *,
        taps: Sequence[int] = (),
        rows: cache_ops.Rows | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Before the final norm, and the outputs of the layers `taps` joined: [B * T, taps * H].

        x may be overwritten. lengths int64 [B]; cache [layers, 2, rows >= B, kv_heads, L, D], or
        such stacks of layers one after the other, is written at lengths[b] + t; rope: `rope` of at
        least the positions that are reached. rows: see `cache_ops.attend`.
        """
        stacks = [cache] if isinstance(cache, Tensor) else cache
        pairs = [pair for stack in stacks for pair in stack]

        def attend(i: int, layer: FusedLayer, qkv: Tensor) -> Tensor:
            return cache_ops.attend(
                qkv, pairs[i][0], pairs[i][1], lengths, rope, workspace,
                heads=self.heads, scale=self.scale, q_norm=layer.q_norm, k_norm=layer.k_norm,
                eps=self.eps, causal=layer.causal, window=layer.window, rows=rows, ring=layer.ring,
            )  # fmt: skip

        return self._layers(x, attend, workspace, taps)

    def prefill(
        self,
        x: Tensor,
        start: int,
        lengths: Tensor,
        cache: Tensor,
        rope: Tensor,
        workspace: row_ops.Workspace,
        *,
        taps: Sequence[int] = (),
        places: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`run` for a piece of prompts: all rows stand at `start`, many tokens.

        Rows that end inside the piece are filled up with any token: nothing before it sees it.
        places int64 [B]: the cache's row of each, -1: none (start 0 only); None: its first ones.
        """
        batch = lengths.shape[0]
        tokens = x.shape[0] // batch
        end = start + tokens

        def attend(i: int, layer: FusedLayer, qkv: Tensor) -> Tensor:
            norms = {"q_norm": layer.q_norm, "k_norm": None}
            if layer.k_norm is not None:
                norms["k_norm"] = layer.k_norm[None]
            cache_ops.rotate_store(
                qkv, cache[i : i + 1], lengths, rope, heads=self.heads, eps=self.eps,
                places=places, **norms,
            )  # fmt: skip
            sizes = self.heads, self.kv_heads, self.kv_heads
            q, k, v = (
                t.transpose(1, 2) for t in qkv.view(batch, tokens, -1, self.dim).split(sizes, dim=2)
            )
            if start:
                k, v = cache[i, :, :, :, :end]
            mask = _causal(tokens, end, layer.window, x.device)
            gqa = not isinstance(mask, Tensor)  # which SDPA's kernels with a mask do not know
            if not gqa:
                k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=gqa
            )
            return y.transpose(1, 2).reshape(x.shape[0], -1)

        with sdpa_kernel(_BACKENDS):
            return self._layers(x, attend, workspace, taps)

    def _layers(
        self, x: Tensor, attend: Callable, workspace: row_ops.Workspace, taps: Sequence[int]
    ):
        rows, hidden = x.shape
        features = x.new_empty(rows, len(taps) * hidden) if taps else None
        # x: the rows before a layer, but for what `delta` still adds to them (into `place`, which
        # may be x itself unless that is a tap's place in `features`).
        delta = place = None

        def product(weight: Tensor, norm: Tensor, **given) -> Tensor:
            """Of the rows after their norm, `delta` included from here on."""
            nonlocal x, delta
            if delta is None:
                return row_ops.linear(x, weight, workspace, norm=(norm, self.eps), **given)
            normed = row_ops.rms_norm(x, norm, self.eps, delta, place)
            x, delta = place, None
            return row_ops.linear(normed, weight, workspace, **given)

        def residual(y: Tensor, weight: Tensor, out: Tensor | None) -> None:
            """Add a product to the rows, into `out`."""
            nonlocal x, delta, place
            if row_ops.linear_plan(rows, *weight.shape, x) is None:
                delta, place = F.linear(y, weight), torch.empty_like(x) if out is None else out
            else:
                x = row_ops.linear(y, weight, workspace, residual=x, out=out)

        private = True
        for i, layer in enumerate(self.layers):
            qkv = product(layer.qkv, layer.input_norm, bias=layer.qkv_bias)
            y = attend(i, layer, qkv)
            residual(y, layer.o, x if private else None)
            y = product(layer.gate_up, layer.post_norm, glu=True)
            private, out = i not in taps, x
            if i in taps:
                at = list(taps).index(i) * hidden
                out = features[:, at : at + hidden]
            residual(y, layer.down, out)
        if delta is not None:
            x = torch.add(x, delta, out=place)
        return x, features


def _causal(tokens: int, end: int, window: int | None, device):
    """The mask of queries end - tokens .. end - 1; None is SDPA's own causal one."""
    if window is None or window >= end:
        return None if tokens == end else causal_lower_right(tokens, end)
    at = torch.arange(end - tokens, end, device=device)[:, None]
    key = torch.arange(end, device=device)
    return (key <= at) & (key > at - window)


def why_not(target: Target) -> str | None:
    """Why a target keeps its stock forward, or None."""
    try:
        FusedTarget(target)
    except CannotFuse as reason:
        return str(reason)
    return None


class FusedTarget:
    """A target's forward for a cycle: ids to logits and features."""

    def __init__(self, target: Target):
        model, config = target.model, target.config
        name = type(model).__name__
        if name not in _FAMILIES:
            raise CannotFuse(f"it is a {name}, expected one of {', '.join(_FAMILIES)}")
        if config.hidden_act != "silu":
            raise CannotFuse(f"hidden_act is {config.hidden_act!r}, expected 'silu'")
        decoder = model.model
        rope_type = getattr(decoder.rotary_emb, "rope_type", "default")
        if rope_type not in _ROPES:
            raise CannotFuse(f"rope_type is {rope_type!r}, expected one of {', '.join(_ROPES)}")
        head = model.get_output_embeddings()
        if type(head) is not nn.Linear or head.bias is not None:
            raise CannotFuse("its output head is not a torch.nn.Linear without bias")
        tensors = [*model.parameters()]
        places = {(t.device, t.dtype) for t in tensors}
        if len(places) != 1:
            raise CannotFuse("its weights have more than one device or dtype")
        if any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
            raise CannotFuse("it has forward hooks")
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if dim % 2 or dim > 256:
            raise CannotFuse(f"head_dim is {dim}, expected an even number up to 256")
        self.decoder = FusedDecoder(
            [FusedLayer.of(m, window=w) for m, w in zip(target.layers, target.windows)],
            decoder.norm.weight.detach(),
            config.rms_norm_eps,
            config.num_attention_heads,
            config.num_key_value_heads,
            dim,
            decoder.rotary_emb.inv_freq,
            getattr(decoder.rotary_emb, "attention_scaling", 1.0),
        )
        self.embedding, self.head = target.embedding.detach(), head.weight.detach()

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, V] of rows before the final norm."""
        return row_ops.lm_head(
            row_ops.rms_norm(hidden, self.decoder.norm, self.decoder.eps), self.head
        )


class FusedDrafter:
    """A DominoDrafter's block and context in the same launches.

    rings: which layers' caches hold the last positions only (`RowCache.rings`); (): none.
    """

    def __init__(self, drafter: DominoDrafter, rings: Sequence[bool] = ()):
        config = drafter.config
        rings = rings or [False] * len(drafter.layers)
        layers = []
        for kind, ring, module in zip(config.layer_types, rings, drafter.layers):
            sliding = kind == "sliding_attention"
            window = config.sliding_window if sliding else None
            layers.append(FusedLayer.of(module, causal=sliding, window=window, ring=ring))
        self.decoder = FusedDecoder(
            layers,
            drafter.norm.weight.detach(),
            config.rms_norm_eps,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            drafter._inv_freq.to(drafter.device),
        )
        self.fc, self.context_norm = drafter.fc.weight.detach(), drafter.hidden_norm.weight.detach()
        self.k_norms = torch.stack([layer.k_norm for layer in layers])
        # A second copy of the k and v weights, so that all layers' context is one product.
        skip = config.num_attention_heads * config.head_dim
        self.context_kv = torch.cat([layer.qkv[skip:] for layer in layers])

    def hidden(self, rows: Tensor) -> Tensor:
        return row_ops.rms_norm(rows, self.decoder.norm, self.decoder.eps)

    def store_context(
        self,
        features: Tensor,
        lengths: Tensor,
        cache: Sequence[Tensor],
        rope: Tensor,
        workspace: row_ops.Workspace,
        rows: cache_ops.Rows | None = None,
        places: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> None:
        """Context keys and values of features [B * T, num_features * H] at lengths[b] + t.

        cache: stacks of layers as `RowCache.allocate` makes them. places, counts: see
        `cache_ops.rotate_store`; a ring takes a prompt only with counts.
        """
        c = row_ops.linear(features.to(self.fc.dtype), self.fc, workspace)
        norm = (self.context_norm, self.decoder.eps)
        kv = row_ops.linear(c, self.context_kv, workspace, norm=norm)
        width, first = kv.shape[1] // len(self.k_norms), 0
        for stack in cache:
            last = first + len(stack)
            ring = self.decoder.layers[first].ring
            cache_ops.rotate_store(
                kv[:, first * width : last * width], stack, lengths, rope,
                k_norm=self.k_norms[first:last], eps=self.decoder.eps, rows=rows, places=places,
                ring=ring, counts=counts if ring else None,
            )  # fmt: skip
            first = last
