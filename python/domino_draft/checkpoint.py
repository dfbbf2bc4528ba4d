"""A drafter's checkpoint on disk: where its files are, what they hold, under which public names.

Shapes and dtypes come from the safetensors headers, so looking into a checkpoint reads no weights
and loads no Torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # safetensors' names of the dtypes that are read

# Head tensors lie flat in public checkpoints; early SpecForge and speculators put them in a module.
_CONTAINERS = ("logit_head.", "logits_correction.", "domino_head.")
_HEAD = ("prefix_gru.", "embed_proj.")
# What speculators stores beside the drafter: copies of the target's own tensors (of a part of the
# vocabulary those rows of its LM head), which decoding takes from the target, and that part's maps.
_TARGET_COPIES = {
    "embed_tokens.weight", "lm_head.weight", "verifier_norm.weight", "verifier_lm_head.weight",
    "t2d", "d2t",
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint: `key` as it is written, `name` as the model calls it."""

    key: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path

    @property
    def bytes(self) -> int:
        return prod(self.shape) * BYTES[self.dtype]


class Checkpoint:
    """A folder (one safetensors file, or shards and their index), or a path to such a file.

    `config.json` lies beside the tensors. Nothing is downloaded.

    Raises:
        ValueError: a file is missing, incomplete or not what its name says; the message says what
            to do about it.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        if self.path.is_file() and self.path.name == "config.json":
            self.path = self.path.parent
        self.folder = self.path if self.path.is_dir() else self.path.parent
        if not self.path.exists():
            raise _error(
                "folder", path, f"an existing folder or .safetensors file{_hub_hint(path)}"
            )
        if not (self.folder / "config.json").is_file():
            raise _error("folder", f"{self.folder} with no config.json", "one beside the tensors")

    @cached_property
    def config(self) -> dict[str, Any]:
        """The parsed `config.json`."""
        return _read_json(self.folder / "config.json")

    @cached_property
    def files(self) -> list[Path]:
        """The safetensors files, every shard once."""
        path = self.path if self.path.is_file() else self._weights()
        if path.name.endswith(".index.json"):
            return self._shards(path)
        if path.suffix != ".safetensors":
            raise _error("file", path, "a .safetensors file or a .safetensors.index.json")
        return [path]

    def _weights(self) -> Path:
        for name in ("model.safetensors.index.json", "model.safetensors"):
            if (self.folder / name).is_file():
                return self.folder / name
        indexes = sorted(self.folder.glob("*.safetensors.index.json"))
        single = sorted(self.folder.glob("*.safetensors"))
        if len(indexes) == 1 or (not indexes and len(single) == 1):
            return (indexes or single)[0]
        if single or indexes:
            names = ", ".join(p.name for p in (indexes or single)[:4])
            raise _error(
                "folder",
                f"{self.folder} with {names}",
                "one model.safetensors or an index of the shards; name the file, or add the "
                "missing model.safetensors.index.json",
            )
        pickles = sorted(p.name for e in ("*.bin", "*.pt", "*.pth") for p in self.folder.glob(e))
        raise _error(
            "folder",
            f"{self.folder} with no model.safetensors",
            "safetensors" + (f"; convert {pickles[0]} to safetensors first" if pickles else ""),
        )

    def _shards(self, index: Path) -> list[Path]:
        names = _read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise _error("index", index, "a weight_map from tensor names to shards")
        files = []
        for name in sorted(set(names.values())):
            if Path(name).name != name:
                raise _error("index", name, f"shards beside {index.name}, by their names")
            if not (index.parent / name).is_file():
                raise _error(
                    "folder",
                    f"{index.parent} with no {name}",
                    f"every shard that {index.name} names",
                )
            files.append(index.parent / name)
        return files

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """What the drafter itself owns, by public name."""
        found: dict[str, StoredTensor] = {}
        copies = _TARGET_COPIES if "speculators_model_type" in self.config else ()
        for file in self.files:
            for key, entry in _header(file).items():
                if key in copies:
                    continue
                if entry["dtype"] not in BYTES:
                    raise _error(
                        key,
                        entry["dtype"],
                        f"one of {list(BYTES)} (a quantised drafter is not read: dequantise it)",
                    )
                name = _public_name(key)
                if name in found:
                    raise _error(key, "this tensor twice", "it once")
                found[name] = StoredTensor(key, name, tuple(entry["shape"]), entry["dtype"], file)
        return found

    def check(self, expected: dict[str, tuple[int, ...]]) -> None:
        """Refuse missing and extra tensors and other shapes; the first of each kind is named."""
        for name, tensor in self.tensors.items():
            if name not in expected:
                extra = len(self.tensors.keys() - expected.keys())
                raise ValueError(
                    f"Checkpoint: {tensor.key}: got a tensor that is not in the model "
                    f"({extra} such in all), expected those that config.json implies"
                )
            if tensor.shape != expected[name]:
                raise ValueError(
                    f"Checkpoint: {tensor.key}: got shape {list(tensor.shape)}, "
                    f"expected {list(expected[name])} as in config.json"
                )
        missing = sorted(expected.keys() - self.tensors.keys())
        if missing:
            raise ValueError(
                f"Checkpoint: {missing[0]}: missing in {self.path}, "
                f"expected {list(expected[missing[0]])} ({len(missing)} missing in all)"
            )

    def draft_ids(self, size: int, vocab_size: int) -> Tensor:
        """The target's id of each of the `size` ids that the drafter knows, int64.

        d2t holds by how much the target's id is above the drafter's, t2d marks the ids that it
        knows, in ascending order.

        Raises:
            ValueError: there is no map, or it is not one of `size` distinct ids.
        """
        import torch
        from safetensors import safe_open

        maps = {}
        for file in self.files:
            for key in _header(file).keys() & {"d2t", "t2d"}:
                with safe_open(file, framework="pt") as store:
                    maps[key] = store.get_tensor(key)
        if not maps:
            raise _error("draft_vocab_size", f"{size} and no d2t or t2d", "a map beside it")
        found = [maps["d2t"] + torch.arange(len(maps["d2t"]))] if "d2t" in maps else []
        found += [maps["t2d"].bool().nonzero()[:, 0]] if "t2d" in maps else []
        ids = found[0]
        inside = len(ids) == size and ids.min() >= 0 and ids.max() < vocab_size
        if not inside or len(ids.unique()) != size:
            raise _error("/".join(maps), f"a map of {len(ids)} ids", f"{size} ids of the target")
        if len(found) == 2 and not torch.equal(ids.sort().values, found[1]):
            raise _error("t2d", "other ids than those of d2t", "the same")
        return ids

    def load(self) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """(public name, reader) of every tensor, file by file."""
        from safetensors import safe_open

        for file in self.files:
            with safe_open(file, framework="pt") as store:
                for tensor in self.tensors.values():
                    if tensor.file == file:
                        yield tensor.name, lambda s=store, k=tensor.key: s.get_tensor(k)


def _error(field: str, got: Any, expected: str) -> ValueError:
    return ValueError(f"Checkpoint: {field}: got {got}, expected {expected}")


def _hub_hint(path: str | os.PathLike) -> str:
    owner, _, name = str(path).partition("/")
    plain = owner and name and "/" not in name and owner not in (".", "..", "~")
    return f"; fetch it first: hf download {path} --local-dir FOLDER" if plain else ""


def _public_name(key: str) -> str:
    for container in _CONTAINERS:
        rest = key.removeprefix(container)
        if rest != key and rest.startswith(_HEAD):
            return rest
    return key


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _error("file", path, f"JSON ({error})") from error
    if not isinstance(data, dict):
        raise _error("file", path, "a JSON object")
    return data


def _header(file: Path) -> dict[str, dict[str, Any]]:
    """The header of a safetensors file: a length, then JSON {name: dtype, shape, data_offsets}."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        start = stream.read(8)
        if start == b"version ":
            raise _error("file", file, "tensors; this is a Git LFS pointer: run git lfs pull")
        length = int.from_bytes(start, "little")
        if len(start) < 8 or 8 + length > size:
            raise _error("file", file, f"a safetensors file; {size} bytes are not one (cut short?)")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            raise _error("file", file, "a safetensors file; its header is not one") from error
    if size != 8 + length + end:
        raise _error(
            "file", file, f"{8 + length + end} bytes by its header; it has {size}: fetch it again"
        )
    return header
