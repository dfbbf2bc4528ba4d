"""The target: any attention-only `transformers` causal LM, seen as logits and hidden states."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from .cache import RowCache, row_mask

_MASKED = ("sdpa", "eager")  # attention implementations of transformers that take a 4-D mask


class Target:
    """Adapter of a causal LM for drafting, verification and training.

    The model is used as it is (no weights or settings change). A feature is the OUTPUT of a
    decoder layer (0-based id, `output_hidden_states[id + 1]`); for the last layer that is the
    tensor before the final norm, as serving engines define it.

    Raises:
        ValueError: the attention implementation takes no 4-D mask, or the model has layers whose
            state cannot be rolled back (linear attention, state space).
    """

    def __init__(self, model: nn.Module, tokenizer=None):
        self.model = model.eval()
        self.tokenizer = tokenizer
        config = model.config.get_text_config()
        self.config = config
        implementation = config._attn_implementation
        if implementation not in _MASKED:
            raise ValueError(
                f"Target: attn_implementation: got {implementation!r}, expected one of {_MASKED}; "
                "load the model with attn_implementation='sdpa'"
            )
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if not kinds <= {"full_attention", "sliding_attention"}:
            raise ValueError(
                f"Target: layer_types: got {sorted(kinds)}, expected attention layers only "
                "(full_attention, sliding_attention): others cannot be rolled back"
            )
        window = getattr(config, "sliding_window", None)
        if getattr(config, "layer_types", None):
            self._window = window if "sliding_attention" in kinds else None
            self._mixed = "sliding_attention" in kinds
        else:
            self._window, self._mixed = window, False
        self.layers = _decoder_layers(model, config.num_hidden_layers)
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in parameters else "cache"

    @property
    def windows(self) -> list[int | None]:
        """Positions that each layer sees, or None for all before it."""
        kinds = getattr(self.config, "layer_types", None)
        if kinds is None:
            return [self._window] * self.num_layers
        return [self._window if kind == "sliding_attention" else None for kind in kinds]

    @property
    def vocab_size(self) -> int:
        return self.embedding.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def max_length(self) -> int | None:
        """Positions the model was made for, or None where its config does not say."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def embedding(self) -> Tensor:
        """Token embedding table [V, H]."""
        return self.model.get_input_embeddings().weight

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The model's own end-of-text ids."""
        settings = getattr(self.model, "generation_config", None)
        ids = getattr(settings, "eos_token_id", None)
        ids = self.config.eos_token_id if ids is None else ids
        return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of the embedding table: [...] -> [..., H]."""
        return embedding(ids, self.embedding)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Base logits [..., V] of hidden states after a final norm."""
        head = self.model.get_output_embeddings()
        return head(hidden.to(head.weight.dtype))

    def forward(
        self,
        input_ids: Tensor,
        cache: RowCache,
        *,
        layers: Sequence[int] = (),
        keep: Tensor | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """One forward of T tokens a row on top of what `cache` holds.

        input_ids int64 [B, T]; row b's tokens stand at cache.lengths[b] + t. For a tree instead:
        positions int64 [B, T] of the tokens, and mask bool [B, T, keys], which of the cache's
        columns each may see (those of its own forward follow at cache.lengths[b]). The cache is
        written but not advanced. Returns logits [B, T, V], or [B, len(keep), V] at the columns in
        `keep`, and the joined outputs of `layers` [B, T, len(layers) * H] (None without layers).
        """
        tokens = input_ids.shape[1]
        if mask is not None:
            attention = self._tree_mask(cache, positions, mask)
        else:
            # Rows of one length need no mask of ours: transformers runs as in its own generate.
            attention = None if cache.uniform else self._mask(cache, tokens)
            positions = cache.positions(tokens)
        if self.max_length is not None:
            # Drafts past the last position are cut from the output; they only must not fault here.
            positions = positions.clamp(max=self.max_length - 1)
        with self._features(layers) as found:
            out = self.model(
                input_ids=input_ids,
                attention_mask=attention,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=0 if keep is None else keep,
                **{self._cache_name: cache},
            )
        return out.logits, _joined(found, layers)

    @torch.no_grad()
    def features(
        self, input_ids: Tensor, layers: Sequence[int], attention_mask: Tensor | None = None
    ) -> Tensor:
        """Joined layer outputs [B, T, len(layers) * H] of whole sequences, without a cache.

        input_ids int64 [B, T]; attention_mask [B, T] marks the tokens of right-padded rows.
        """
        with self._features(layers) as found:
            self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                use_cache=False,
                logits_to_keep=1,
            )
        return _joined(found, layers)

    def _mask(self, cache: RowCache, tokens: int):
        full = self._as_mask(row_mask(cache, tokens, causal=True))
        if self._window is None:
            return full
        sliding = self._as_mask(row_mask(cache, tokens, causal=True, window=self._window))
        if self._mixed:
            return {"full_attention": full, "sliding_attention": sliding}
        return sliding

    def _tree_mask(self, cache: RowCache, positions: Tensor, mask: Tensor):
        full = self._as_mask(mask[:, None])
        if self._window is None:
            return full
        keys = torch.arange(mask.shape[2], device=mask.device).expand(len(mask), -1)
        keys = keys.scatter(1, cache.positions(mask.shape[1]), positions)
        near = keys[:, None] > positions[..., None] - self._window
        sliding = self._as_mask((mask & near)[:, None])
        return {"full_attention": full, "sliding_attention": sliding} if self._mixed else sliding

    def _as_mask(self, mask: Tensor) -> Tensor:
        if self.config._attn_implementation == "sdpa":
            return mask
        lowest = torch.finfo(self.dtype).min  # the eager implementation adds its mask
        return torch.zeros_like(mask, dtype=self.dtype).masked_fill_(~mask, lowest)

    @contextmanager
    def _features(self, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        found: dict[int, Tensor] = {}

        def hook(index: int):
            def store(module, args, output):
                found[index] = output[0] if isinstance(output, tuple) else output

            return store

        handles = [self.layers[i].register_forward_hook(hook(i)) for i in layers]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()


def _joined(found: dict[int, Tensor], layers: Sequence[int]) -> Tensor | None:
    return torch.cat([found[i] for i in layers], dim=-1) if layers else None


def _decoder_layers(model: nn.Module, count: int) -> nn.ModuleList:
    """The decoder's list of layers, whatever the family calls it."""
    decoder = model.get_decoder()
    lists = [m for m in decoder.children() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(lists) != 1:
        raise ValueError(
            f"Target: model: got {type(model).__name__} with {len(lists)} lists of {count} modules "
            "in its decoder, expected one (its layers)"
        )
    return lists[0]
