"""The checkpoint: names, shapes, legacy and sharded files, errors, initialisation, pairing."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from domino_draft import DominoConfig, DominoDrafter
from safetensors.torch import save_file

from .test_config import QWEN3_8B

QWEN3_4B = QWEN3_8B | {"hidden_size": 2560, "intermediate_size": 9728}


def table(hidden, inter):
    """Tensor names and shapes of the public 5-layer checkpoints."""
    shapes = {
        "fc.weight": (hidden, 5 * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "prefix_gru.weight_ih_l0": (3072, hidden),
        "prefix_gru.weight_hh_l0": (3072, 1024),
        "embed_proj.0.weight": (256, hidden + 1024),
        "embed_proj.2.weight": (151936, 256),
    }
    for i in range(5):
        shapes |= {
            f"layers.{i}.self_attn.q_proj.weight": (4096, hidden),
            f"layers.{i}.self_attn.k_proj.weight": (1024, hidden),
            f"layers.{i}.self_attn.v_proj.weight": (1024, hidden),
            f"layers.{i}.self_attn.o_proj.weight": (hidden, 4096),
            f"layers.{i}.self_attn.q_norm.weight": (128,),
            f"layers.{i}.self_attn.k_norm.weight": (128,),
            f"layers.{i}.mlp.gate_proj.weight": (inter, hidden),
            f"layers.{i}.mlp.up_proj.weight": (inter, hidden),
            f"layers.{i}.mlp.down_proj.weight": (hidden, inter),
            f"layers.{i}.input_layernorm.weight": (hidden,),
            f"layers.{i}.post_attention_layernorm.weight": (hidden,),
        }
    return shapes


@pytest.mark.parametrize(
    ("data", "millions"), [(QWEN3_4B, (537.4, 50.8)), (QWEN3_8B, (1048.6, 55.9))], ids=["4B", "8B"]
)
def test_public_names_and_shapes(data, millions):
    config = DominoConfig.from_dict(data)
    with torch.device("meta"):
        drafter = DominoDrafter(config)
        plain = DominoDrafter(DominoConfig.from_dict(
            data | {"emb_dim": None, "architectures": ["DFlashDraftModel"], "dflash_config": {
                "target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151669}}))  # fmt: skip
    expected = table(config.hidden_size, config.intermediate_size)
    found = {name: tuple(t.shape) for name, t in drafter.state_dict().items()}
    assert found == expected and len(found) == 62
    backbone = {n: s for n, s in expected.items() if not n.startswith(("prefix_", "embed_"))}
    assert {name: tuple(t.shape) for name, t in plain.state_dict().items()} == backbone
    assert len(backbone) == 58 and plain.head is None
    count = lambda module: sum(p.numel() for p in module.parameters()) / 1e6  # noqa: E731
    assert count(plain) == pytest.approx(millions[0], abs=0.05)
    assert count(drafter) - count(plain) == pytest.approx(millions[1], abs=0.05)


@pytest.fixture
def drafter(tiny_config):
    torch.manual_seed(0)
    return DominoDrafter(tiny_config())


def test_save_and_load(drafter, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "card.md").write_text("kept")
    for _ in range(2):
        drafter.save_pretrained(folder)
    assert sorted(p.name for p in folder.iterdir()) == [
        "card.md",
        "config.json",
        "model.safetensors",
    ]
    loaded = DominoDrafter.from_pretrained(folder)
    assert loaded.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    embeds = torch.randn(2, 3, 32)
    assert torch.equal(loaded.head.states(embeds), drafter.head.states(embeds))
    half = DominoDrafter.from_pretrained(folder, dtype=torch.bfloat16)
    assert {t.dtype for t in half.state_dict().values()} == {torch.bfloat16}
    half.save_pretrained(tmp_path / "half")
    assert DominoDrafter.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


def write(folder, drafter, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(drafter.config.to_dict()))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")


def test_legacy_head_names(drafter, tmp_path):
    head = ("prefix_gru.", "embed_proj.")
    tensors = {
        f"logit_head.{n}" if n.startswith(head) else n: t for n, t in drafter.state_dict().items()
    }
    write(tmp_path / "old", drafter, tensors)
    loaded = DominoDrafter.from_pretrained(tmp_path / "old")
    assert torch.equal(loaded.head.w2, drafter.head.w2)


def test_sharded(drafter, tmp_path):
    tensors = drafter.state_dict()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    (tmp_path / "config.json").write_text(json.dumps(drafter.config.to_dict()))
    for file, part in shards.items():
        save_file({n: tensors[n].contiguous() for n in part}, tmp_path / file)
    index = {"weight_map": {n: file for file, part in shards.items() for n in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = DominoDrafter.from_pretrained(tmp_path)
    assert all(torch.equal(loaded.state_dict()[n], tensors[n]) for n in names)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no b\.safetensors"):
        DominoDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize(("dtype", "name"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_a_tensor_of_another_kind_is_named(drafter, tmp_path, dtype, name):
    """Quantised weights are codes: reading them as numbers would load without a word."""
    tensors = dict(drafter.state_dict())
    tensors["fc.weight"] = tensors["fc.weight"].to(dtype)
    write(tmp_path, drafter, tensors)
    with pytest.raises(ValueError, match=rf"fc\.weight: got {name}, expected one of .*dequant"):
        DominoDrafter.from_pretrained(tmp_path)


def test_a_damaged_file_is_named(drafter, tmp_path):
    drafter.save_pretrained(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    for part in (b"", whole[:100], whole[:-1]):
        (tmp_path / "model.safetensors").write_bytes(part)
        with pytest.raises(
            ValueError, match=r"got .*model\.safetensors.*, expected .*(cut short|fetch it again)"
        ):
            DominoDrafter.from_pretrained(tmp_path)
    for text in ("{", "{}", "[]", '{"weight_map": null}'):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(
            ValueError, match=r"got .*index\.json.*, expected (JSON|a JSON object|a weight_map)"
        ):
            DominoDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_save_cut_short_never_pairs_old_and_new(
    drafter, tiny_config, tmp_path, monkeypatch, step
):
    """Another convention, the same shapes: a mix would load and draft one position off. With the
    same config there is nothing to mix, and the folder loads at any time.
    """
    drafter.save_pretrained(tmp_path)
    other = DominoDrafter(tiny_config(shift_label=False))
    again = DominoDrafter(drafter.config)
    replace, calls = os.replace, []

    def until(source, to):
        if len(calls) == step:
            raise KeyboardInterrupt
        calls.append(to)
        replace(source, to)

    monkeypatch.setattr("os.replace", until)
    if step < 2:
        with pytest.raises(KeyboardInterrupt):
            again.save_pretrained(tmp_path)
        calls.clear()
        loaded = DominoDrafter.from_pretrained(tmp_path)
        assert torch.equal(loaded.fc.weight, (again if step else drafter).fc.weight)
        with pytest.raises(KeyboardInterrupt):
            other.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"no config\.json"):
            DominoDrafter.from_pretrained(tmp_path)
    else:
        other.save_pretrained(tmp_path)
        loaded = DominoDrafter.from_pretrained(tmp_path)
        assert not loaded.config.shift_label
        assert torch.equal(loaded.fc.weight, other.fc.weight)


def test_failed_save_leaves_the_old_checkpoint(drafter, tmp_path, monkeypatch):
    drafter.save_pretrained(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        drafter.save_pretrained(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_initialisation(tiny_config):
    torch.manual_seed(1)
    drafter = DominoDrafter(tiny_config(hidden_size=128, gru_hidden_dim=256, emb_dim=64))
    for name, tensor in drafter.state_dict().items():
        if "norm" in name:
            assert torch.equal(tensor, torch.ones_like(tensor)), name
        elif name.startswith("prefix_gru"):
            bound = 256**-0.5
            assert tensor.abs().max() <= bound and tensor.std() > 0.5 * bound, name
        else:
            assert tensor.std() == pytest.approx(0.02, rel=0.1), name


def target(**overrides):
    fields = {"vocab_size": 61, "hidden_size": 32, "num_layers": 4, "device": torch.device("cpu")}
    return SimpleNamespace(**(fields | overrides))


def test_pairing(drafter, tiny_config):
    drafter.check_target(target())
    for field, value in (
        ("vocab_size", 64),
        ("hidden_size", 48),
        ("num_layers", 6),
        ("device", "cuda:0"),
    ):
        with pytest.raises(ValueError, match=rf"check_target: .*: got {value} in the target.*load"):
            drafter.check_target(target(**{field: value}))
    open_config = tiny_config(num_target_layers=None, target_layer_ids=(1, 5))
    with pytest.raises(ValueError, match=r"target_layer_ids: got \[1, 5\]"):
        DominoDrafter(open_config).check_target(target())
