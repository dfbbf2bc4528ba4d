"""The drafter as one module and one flat checkpoint with the public tensor names."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .backbone import DFlashBackbone
from .config import DominoConfig
from .head import DominoHead

if TYPE_CHECKING:
    from .target import Target


class DominoDrafter(DFlashBackbone):
    """Backbone and head of a Domino drafter; `projector_type: dflash` has no head.

    The module is the backbone (call it, or `context_kv`), with `prefix_gru` and `embed_proj`
    beside the layers as public checkpoints have them; `head` gives those two the methods of
    `DominoHead`, or is None. A new drafter is initialised as the reference training does it:
    every Linear N(0, 0.02), norms 1, the GRU uniform.
    """

    def __init__(self, config: DominoConfig):
        super().__init__(config)
        self.__dict__["head"] = None  # not a submodule: its tensors are registered flat, below
        if config.projector_type == "domino":
            head = DominoHead(config)
            self.prefix_gru, self.embed_proj = head.prefix_gru, head.embed_proj
            self.__dict__["head"] = head
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

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
        ):
            if got != expected:
                raise ValueError(
                    f"check_target: {field}: got {got} in the target, expected {expected} as in "
                    "the drafter's config.json; load the target that this drafter was trained for, "
                    "or train a drafter for this target"
                )
        if max(config.target_layer_ids) >= target.num_layers:
            raise ValueError(
                f"check_target: target_layer_ids: got {list(config.target_layer_ids)}, expected "
                f"layers of the target, which has {target.num_layers}; load the matching target"
            )

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> DominoDrafter:
        """Load `config.json` and (sharded) safetensors from a local folder.

        dtype None keeps the dtype that the config names. Legacy `logit_head.` names are read.

        Raises:
            ValueError: a tensor is missing, extra or of another shape (named).
        """
        config = DominoConfig.from_pretrained(folder)
        with torch.device("meta"):
            drafter = cls(config)
        dtype = dtype or getattr(torch, config.dtype)
        expected = {name: tuple(t.shape) for name, t in drafter.state_dict().items()}
        tensors: dict[str, Tensor] = {}
        for key, load in _stored_tensors(Path(folder)):
            name = key.removeprefix("logit_head.")
            if name not in expected:
                raise ValueError(f"from_pretrained: {key}: got a tensor that is not in the model")
            if name in tensors:
                raise ValueError(f"from_pretrained: {key}: got this tensor twice, expected once")
            tensor = load()
            if tuple(tensor.shape) != expected[name]:
                raise ValueError(
                    f"from_pretrained: {key}: got shape {list(tensor.shape)}, "
                    f"expected {list(expected[name])}"
                )
            tensors[name] = tensor.to(device=device, dtype=dtype)
        missing = sorted(expected.keys() - tensors.keys())
        if missing:
            raise ValueError(
                f"from_pretrained: {missing[0]}: missing in {folder}, "
                f"expected {list(expected[missing[0]])} ({len(missing)} missing in all)"
            )
        drafter.load_state_dict(tensors, assign=True)
        return drafter.eval()

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """Write `model.safetensors` and `config.json`, each complete before it takes its name.

        Other files of an existing folder stay.
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
            os.replace(temporary / "model.safetensors", folder / "model.safetensors")
            os.replace(temporary / "config.json", folder / "config.json")
        # A leftover index of a sharded checkpoint would shadow the tensors just written.
        (folder / "model.safetensors.index.json").unlink(missing_ok=True)


def _stored_tensors(folder: Path) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """(name, loader) of every tensor in the folder's safetensors, sharded or not."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    for name in files:
        if not (folder / name).is_file():
            raise ValueError(f"from_pretrained: folder: got {folder}, no {name} in it")
        with safe_open(folder / name, framework="pt") as store:
            for key in store.keys():
                yield key, lambda store=store, key=key: store.get_tensor(key)
