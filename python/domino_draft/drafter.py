"""What a drafter is to the decoding loop, and the Domino drafter: module, checkpoint, session."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from .backbone import DFlashBackbone
from .cache import RowCache, row_mask
from .config import DominoConfig
from .head import DominoHead

if TYPE_CHECKING:
    from .target import Target

W2 = "embed_proj.2.weight"


@dataclass
class Batch:
    """The rows being decoded: what a drafter may look at.

    tokens[b] holds row b's committed tokens, prompt first, the anchor last; anchors int64 [B] is
    that last token on the device; requests[b] names the text in row b, wherever it has moved to.
    """

    tokens: list[list[int]]
    anchors: Tensor
    requests: list[int]


class DraftSession(Protocol):
    """A drafter's state for static rows that texts join and leave, all empty at first."""

    def commit(
        self, features: Tensor | None, counts: Tensor, host_counts: Sequence[int], first: int = 0
    ) -> None:
        """Take the hidden states of tokens that the target has just kept.

        For rows first .. first + len(host_counts) - 1. features [B, T, len(feature_layers) * H]:
        row b's first counts[b] columns continue its context; None when feature_layers is empty.
        counts int64 [B] equals host_counts. A new row gets its prompt in one or more calls, and a
        running row one call a cycle, with the anchor's position as the new context end. A call that
        raises must leave the context as it was.
        """

    def propose(self, batch: Batch, num_drafts: int) -> Tensor:
        """Draft tokens int64 [B, k] for the first rows, those of the batch; k <= num_drafts (0
        too), -1 where a row proposes nothing."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, as rows 0, 1, ...; those behind them are empty again."""


class Drafter(Protocol):
    """What decoding asks of a drafter; `DominoDrafter` and `NgramDrafter` are two."""

    feature_layers: Sequence[int]  # target layers whose outputs `commit` gets, () for none
    default_drafts: int
    max_drafts: int

    def begin(self, target: Target, rows: int, max_length: int) -> DraftSession:
        """A session of so many rows, none of which will ever hold more than max_length tokens."""


class DominoDrafter(DFlashBackbone):
    """Backbone and head of a Domino drafter; `projector_type: dflash` has no head.

    The module is the backbone (call it, or `context_kv`), with `prefix_gru` and `embed_proj`
    beside the layers as public checkpoints have them; `head` gives those two the methods of
    `DominoHead`, or is None. A new drafter is initialised as the reference training does it:
    every Linear N(0, 0.02), norms 1, the GRU uniform.

    Attributes:
        draft_ids: int64, ascending: the ids that it was trained to draft from, None: all. Decoding
            drafts from no others; their rows of W2 are zeros. `save_pretrained` does not keep it.
    """

    draft_ids: Tensor | None

    def __init__(self, config: DominoConfig):
        super().__init__(config)
        self.register_buffer("draft_ids", None, persistent=False)
        self.__dict__["head"] = None  # not a submodule: its tensors are registered flat, below
        if config.projector_type == "domino":
            head = DominoHead(config)
            self.prefix_gru, self.embed_proj = head.prefix_gru, head.embed_proj
            self.__dict__["head"] = head
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the checkpoint's tensors, by public name."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.state_dict().items()}
        if W2 in shapes and self.config.draft_vocab_size is not None:
            shapes[W2] = (self.config.draft_vocab_size, self.config.emb_dim)
        return shapes

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    @property
    def max_drafts(self) -> int:
        return self.config.max_drafts

    @property
    def default_drafts(self) -> int:
        return self.config.block_size - 1

    def begin(self, target: Target, rows: int, max_length: int) -> DominoSession:
        """A session of static rows (see `Drafter`)."""
        self.check_target(target)
        return DominoSession(self, target, rows, max_length)

    def check_target(self, target: Target) -> None:
        """Refuse a target that this drafter was not made for.

        Raises:
            ValueError: naming the field, both values and what to do about it.
        """
        config = self.config
        for field, got, expected in (
            ("vocab_size", target.vocab_size, config.vocab_size),
            ("hidden_size", target.hidden_size, config.hidden_size),
            ("num_target_layers", target.num_layers, config.num_target_layers or target.num_layers),
            ("device", target.device, self.device),
        ):
            if got != expected:
                raise ValueError(
                    f"check_target: {field}: got {got} in the target, expected {expected} as in "
                    "the drafter; load the target that this drafter was trained for (on its "
                    "device), or train a drafter for this target"
                )
        if max(config.target_layer_ids) >= target.num_layers:
            raise ValueError(
                f"check_target: target_layer_ids: got {list(config.target_layer_ids)}, expected "
                f"layers of the target, which has {target.num_layers}; load the matching target"
            )

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> DominoDrafter:
        """The drafter in a checkpoint of any public form: a folder, sharded or not, or a file.

        dtype None keeps the dtype that the config names. See `Checkpoint` for the forms.

        Raises:
            ValueError: a file is missing or broken, a field unknown or contradictory, a tensor
                missing, extra, quantised or of another shape (named).
        """
        from .checkpoint import Checkpoint

        stored = Checkpoint(path)
        config = DominoConfig.from_dict(stored.config)
        with torch.device("meta"):
            drafter = cls(config)
        stored.check(drafter.stored_shapes())
        dtype = dtype or getattr(torch, config.dtype)
        tensors = {n: load().to(device=device, dtype=dtype) for n, load in stored.load()}
        if config.draft_vocab_size is not None:
            ids = stored.draft_ids(config.draft_vocab_size, config.vocab_size).to(device)
            if W2 in tensors:
                whole = tensors[W2].new_zeros(config.vocab_size, config.emb_dim)
                tensors[W2] = whole.index_copy_(0, ids, tensors[W2])
            drafter.draft_ids = ids.sort().values
        drafter.load_state_dict(tensors, assign=True)
        return drafter.eval()

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """Write `model.safetensors` and `config.json`, each complete before it takes its name.

        Other files of an existing folder stay. Over a checkpoint of another config the old config
        goes first and the new one comes last: no tensors stand beside a config that is not theirs.
        """
        from safetensors.torch import save_file

        config = replace(self.config, dtype=str(self.dtype).removeprefix("torch."))
        tensors = {n: t.detach().contiguous().cpu() for n, t in self.state_dict().items()}
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".save-", dir=folder) as name:
            temporary = Path(name)
            save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
            text = json.dumps(config.to_dict(), indent=2) + "\n"
            (temporary / "config.json").write_text(text)
            old = folder / "config.json"
            if old.is_file() and old.read_bytes() != text.encode():
                old.unlink()
            os.replace(temporary / "model.safetensors", folder / "model.safetensors")
            # A leftover index of a sharded checkpoint would shadow the tensors just written.
            (folder / "model.safetensors.index.json").unlink(missing_ok=True)
            os.replace(temporary / "config.json", old)


class DominoSession:
    """A DominoDrafter's state: the context keys and values of its rows.

    The block's own rows are written behind the context and never kept.
    """

    def __init__(self, drafter: DominoDrafter, target: Target, rows: int, max_length: int):
        self.drafter, self.target = drafter, target
        config = drafter.config.resolve_mask_token(target.tokenizer)
        self.config = config
        lengths = config.context_lengths(max_length)
        self.cache = RowCache(rows, max_length + config.block_size, target.device, lengths)
        self.mask_embed = target.embedding[config.mask_token_id]
        self.head = drafter.head.weights(target.embedding) if drafter.head else None
        self._others = None  # ids that are not drafted
        if drafter.draft_ids is not None:
            known = torch.zeros(config.vocab_size, dtype=torch.bool, device=target.device)
            known[drafter.draft_ids] = True
            self._others = (~known).nonzero()[:, 0]

    def commit(
        self, features: Tensor, counts: Tensor, host_counts: Sequence[int], first: int = 0
    ) -> None:
        self.cache.focus(first, len(host_counts))
        positions = self.cache.positions(features.shape[1])
        context = self.drafter.context_kv(features, positions)
        self.cache.extend(context, counts, host_counts)

    def propose(self, batch: Batch, num_drafts: int) -> Tensor:
        from domino_kernels import draft_chain

        config = self.config
        hidden, base = self.block(batch.anchors, num_drafts)
        if self.head is None:
            return base.argmax(-1)
        return draft_chain(
            base,
            hidden,
            batch.anchors,
            self.head,
            num_drafts=num_drafts,
            shift_label=config.shift_label,
            pure_draft_prefix_len=config.pure_draft_prefix_len,
        )

    def block(self, anchors: Tensor, num_drafts: int) -> tuple[Tensor, Tensor]:
        """Hidden states [B, S, H] and base logits [B, S, V] of the slots for so many drafts.

        For the first rows, one an anchor. Without a head only of the slots that have a draft.
        """
        self.cache.focus(0, len(anchors))
        config, slots = self.config, self.config.slots_for(num_drafts)
        embedded = self.target.embed(anchors)[:, None]
        block = torch.cat((embedded, self.mask_embed.expand(len(anchors), slots - 1, -1)), dim=1)
        mask = sliding = None
        if not self.cache.uniform:
            mask = row_mask(self.cache, slots, causal=False)
        if config.sliding_window is not None and "sliding_attention" in config.layer_types:
            ring = self.cache.length_of(config.layer_types.index("sliding_attention"))
            sliding = row_mask(
                self.cache, slots, causal=True, window=config.sliding_window, length=ring
            )
        hidden = self.drafter(block, self.cache.positions(slots), self.cache, mask, sliding)
        if config.shift_label:
            hidden = hidden[:, :num_drafts]  # the last slot's own id is not asked for
        if self.head is None:
            first = 0 if config.shift_label else 1
            hidden = hidden[:, first : first + num_drafts]
        base = self.target.lm_head(hidden)
        if self.head is not None and base.dtype != self.head.w2.dtype:
            base = base.float()
        if self._others is not None:
            base = base.index_fill(-1, self._others, -torch.inf)
        return hidden, base

    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(rows)
