"""Checkpoints on disk: forms, names, broken files, and the pairing with a target."""

import json
from types import SimpleNamespace

import pytest
import torch
from domino_draft import Checkpoint, DominoDrafter
from domino_draft.loading import load_drafter

from .test_drafter import write


@pytest.fixture
def drafter(tiny_config):
    torch.manual_seed(0)
    return DominoDrafter(tiny_config())


def test_loads_what_was_saved(drafter, tmp_path):
    drafter.save_pretrained(tmp_path)
    for dtype in (None, torch.bfloat16):
        got = DominoDrafter.from_pretrained(tmp_path, dtype)
        assert got.config == drafter.config and not got.training
        assert got.dtype == (dtype or drafter.dtype)
        for name, tensor in drafter.state_dict().items():
            assert torch.equal(got.state_dict()[name], tensor.to(got.dtype)), name
        # The head shares its tensors with the drafter: they must be the loaded ones.
        assert got.head.w2 is got.embed_proj[2].weight


def test_shards(drafter, tmp_path):
    tensors = {n: t.contiguous() for n, t in drafter.state_dict().items()}
    names = sorted(tensors)
    write(tmp_path, drafter, {n: tensors[n] for n in names[::2]})
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    write(tmp_path, drafter, {n: tensors[n] for n in names[1::2]})
    (tmp_path / "model.safetensors").rename(tmp_path / "b.safetensors")
    files = {n: "ab"[i % 2] + ".safetensors" for i, n in enumerate(names)}
    index = tmp_path / "drafter.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    for path in (tmp_path, index):
        assert [file.name for file in Checkpoint(path).files] == ["a.safetensors", "b.safetensors"]
        got = DominoDrafter.from_pretrained(path).state_dict()
        assert all(torch.equal(got[n], t) for n, t in tensors.items())
    with pytest.raises(ValueError, match=rf"{names[1]}: missing in .* \({len(names) // 2} missing"):
        DominoDrafter.from_pretrained(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"with no b\.safetensors, expected every shard"):
        DominoDrafter.from_pretrained(tmp_path)


def test_forms_on_disk(drafter, tmp_path):
    """A folder, its file, a file of another name, config.json itself."""
    drafter.save_pretrained(tmp_path)
    (tmp_path / "notes.bin").write_bytes(b"")
    file = tmp_path / "model.safetensors"
    other = file.rename(tmp_path / "drafter-bf16.safetensors")
    for path in (tmp_path, str(other), tmp_path / "config.json"):
        loaded = DominoDrafter.from_pretrained(path)
        assert torch.equal(loaded.fc.weight, drafter.fc.weight)
    other.with_name("second.safetensors").write_bytes(other.read_bytes())
    with pytest.raises(ValueError, match=r"second\.safetensors, expected one model\.safetensors"):
        DominoDrafter.from_pretrained(tmp_path)
    assert DominoDrafter.from_pretrained(other).config == drafter.config


def test_speculators_tensors(drafter, tmp_path):
    """Their head lies in a container, and copies of the target's tensors lie beside it."""
    tensors = {
        f"logits_correction.{n}" if n.startswith(("prefix_gru.", "embed_proj.")) else n: t
        for n, t in drafter.state_dict().items()
    }
    tensors |= {"embed_tokens.weight": torch.zeros(61, 32), "lm_head.weight": torch.zeros(61, 32)}
    write(tmp_path, drafter, tensors)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight: got a tensor .*2 such"):
        DominoDrafter.from_pretrained(tmp_path)
    write(tmp_path, drafter, tensors | {"t2d": torch.ones(61).bool()})
    config = drafter.config.to_dict() | {"speculators_model_type": "domino"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = DominoDrafter.from_pretrained(tmp_path)
    assert loaded.config == drafter.config
    assert all(torch.equal(t, drafter.state_dict()[n]) for n, t in loaded.state_dict().items())


def broken(folder, name, data):
    (folder / name).write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": None}, r"folder: got .* with no config\.json"),
        ({"config.json": b"{"}, r"config\.json, expected JSON"),
        ({"config.json": b"[]"}, r"config\.json, expected a JSON object"),
        ({"model.safetensors": None}, r"with no model\.safetensors, expected safetensors$"),
        ({"model.safetensors": None, "pytorch_model.bin": b""}, r"convert pytorch_model\.bin"),
        ({"model.safetensors": b"version https://git-lfs.github.com/spec/v1"}, "git lfs pull"),
        ({"model.safetensors": b"abc"}, r"3 bytes are not one"),
        ({"model.safetensors": (4).to_bytes(8, "little") + b"junk"}, "its header is not one"),
        ({"model.safetensors": "cut"}, r"bytes by its header; it has"),
        ({"model.safetensors.index.json": {}}, "index: got .*, expected a weight_map"),
        ({"model.safetensors.index.json": {"weight_map": {"a": "../b"}}}, r"index: got \.\./b"),
    ],
)
def test_broken_files(drafter, tmp_path, files, message):
    drafter.save_pretrained(tmp_path)
    for name, data in files.items():
        if data is None:
            (tmp_path / name).unlink()
        elif data == "cut":
            broken(tmp_path, name, (tmp_path / name).read_bytes()[:-5])
        else:
            broken(tmp_path, name, data)
    with pytest.raises(ValueError, match=message):
        DominoDrafter.from_pretrained(tmp_path)


def test_a_hub_name_is_not_fetched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = r"got owner/name, expected a.* folder .*hf download owner/name --local-dir"
    with pytest.raises(ValueError, match=message):
        DominoDrafter.from_pretrained("owner/name")
    for name in ("config.json", "notes.txt"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=r"file: got .*notes\.txt, expected a \.safetensors"):
        _ = Checkpoint(tmp_path / "notes.txt").files


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("fc.weight"), r"fc\.weight: missing"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(1)}), r"lm_head\.weight: got a tensor"),
        (lambda t: t.update({"norm.weight": torch.ones(31)}), r"norm\.weight: got shape \[31\]"),
        (lambda t: t.update({"logit_head.embed_proj.0.weight": torch.zeros(8, 56)}), "twice"),
    ],
    ids=["missing", "extra", "shape", "twice"],
)
def test_wrong_tensors_are_named(drafter, tmp_path, edit, message):
    tensors = dict(drafter.state_dict())
    edit(tensors)
    write(tmp_path, drafter, tensors)
    with pytest.raises(ValueError, match=message):
        DominoDrafter.from_pretrained(tmp_path)


def test_pairing_is_checked_before_the_weights_are_read(tiny_config, tmp_path):
    """No weights are there: what a pairing error must not need."""

    def refused(message, config=None, **target):
        config = config or tiny_config()
        (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
        fields = dict(vocab_size=61, hidden_size=32, num_layers=4, tokenizer=None)
        with pytest.raises(ValueError, match=message):
            load_drafter(tmp_path, SimpleNamespace(**(fields | target), dtype=None, device=None))

    refused("drafter: vocab_size: got 64 in the target, expected 61 .*; load the", vocab_size=64)
    refused("drafter: hidden_size: got 48 .*or train a drafter for this one", hidden_size=48)
    refused("drafter: num_target_layers: got 6 in the target, expected 4", num_layers=6)
    deep = tiny_config(num_target_layers=None, target_layer_ids=(1, 5))
    refused(r"target_layer_ids: got \[1, 5\], expected layers of the target, which has 4", deep)
    refused(r"mask_token: got '<\|MASK\|>', expected a token", tiny_config(mask_token_id=None))
    refused(r"with no model\.safetensors")
