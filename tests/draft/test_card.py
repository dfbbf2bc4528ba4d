"""The card of a checkpoint: `domino-draft inspect`."""

import json

import pytest
import torch
from click.testing import CliRunner
from domino_draft import DominoConfig, DominoDrafter
from domino_draft.card import read_card, slots
from domino_draft.cli import main

from .conftest import tiny_model
from .test_config import QWEN3_8B


@pytest.fixture
def folders(tmp_path, tiny_config):
    """(drafter, target that fits) folders."""
    DominoDrafter(tiny_config()).bfloat16().save_pretrained(tmp_path / "drafter")
    tiny_model("Llama").save_pretrained(tmp_path / "target")
    return str(tmp_path / "drafter"), str(tmp_path / "target")


def inspect(*args):
    return CliRunner().invoke(main, ["inspect", *map(str, args)])


def test_json(folders):
    card = json.loads(inspect(folders[0], "--json").stdout)
    drafter = DominoDrafter.from_pretrained(folders[0])
    shapes = {name: list(t.shape) for name, t in drafter.state_dict().items()}
    assert card["tensors"] == shapes
    assert DominoConfig(**card["config"]) == drafter.config
    assert card["files"] == ["model.safetensors"] and card["stored_dtypes"] == ["BF16"]
    total = sum(p.numel() for p in drafter.parameters())
    assert card["parameters"] == total == sum(card["parameters_by_part"].values())
    assert card["bytes"]["stored"] == card["bytes"]["bfloat16"] == 2 * total
    by_part = card["parameters_by_part"]
    assert by_part["feature fusion"] == 32 * 64 + 32
    assert by_part["head: GRU"] == 72 * (32 + 24)
    assert by_part["head: projection W1"] == 8 * 56 and by_part["head: vocabulary W2"] == 61 * 8
    kv = drafter.context_kv(torch.zeros(1, 1, 64).bfloat16(), torch.zeros(1, 1).long())
    per_token = sum(t.numel() * t.element_size() for pair in kv for t in pair)
    assert card["bytes"]["context_per_token_bfloat16"] == per_token
    assert card["fits"]["num_layers"] == 4 and card["fits"]["shape_of"] is None


def test_context_of_sliding_layers(tmp_path, tiny_config):
    kinds = ("sliding_attention", "full_attention")
    drafter = DominoDrafter(tiny_config(layer_types=kinds, sliding_window=9)).bfloat16()
    drafter.save_pretrained(tmp_path)
    found = read_card(tmp_path)["bytes"]
    each = 2 * 2 * 2 * 16  # k and v of two heads in two bytes
    assert found["context_per_token_bfloat16"] == each
    assert found["sliding_context_bfloat16"] == (9 + 5 * 5) * each
    text = " ".join(inspect(tmp_path).stdout.split())
    assert "128 bytes a token in bf16, sliding layers up to 0.00 MB a text." in text


def test_text(folders):
    done = inspect(folders[0])
    text = " ".join(done.stdout.split())
    assert done.exit_code == 0
    for phrase in (
        "Domino: DFlash backbone and correcting head",
        "2 (2 full); hidden 32, MLP 48, 4 heads over 2 of 16, rope 10000",
        "GRU 24, rank 8",
        "outputs of target layers 0, 2",
        "4 slots, up to 4 drafts",
        "slot i predicts anchor + i + 1 (shift_label true)",
        "slots 1 to 3",
        "a causal LM with hidden 32, 4 layers, vocabulary 61",
        "head: vocabulary W2 488",
        "Context costs 256 bytes a token in bf16.",
    ):
        assert phrase in text, phrase
    assert "prefix_gru" not in text
    assert "prefix_gru.weight_hh_l0" in inspect(folders[0], "--tensors").stdout


def test_target(folders, tmp_path):
    drafter, target = folders
    assert json.loads(inspect(drafter, "--json", "--target", target).stdout)["target"]["fits"]
    tiny_model("Qwen2", vocab_size=64, num_hidden_layers=3).save_pretrained(tmp_path / "other")
    done = inspect(drafter, "--target", tmp_path / "other")
    text = " ".join(done.stdout.split())
    assert done.exit_code == 1
    assert "vocab_size: got 64 in the target, expected 61 as in the drafter; load" in text
    assert "num_target_layers: got 3 in the target, expected 4" in text
    assert "hidden_size: got" not in text
    done = inspect(drafter, "--target", tmp_path)
    assert done.exit_code == 1 and "with no config.json" in done.stderr
    nested = {"text_config": json.loads((tmp_path / "target/config.json").read_text())}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert inspect(drafter, "--target", tmp_path).exit_code == 0
    (tmp_path / "config.json").write_text("{}")
    assert "got no vocab_size in" in inspect(drafter, "--target", tmp_path).stderr


def test_reads_no_weights_and_checks_shapes(folders, monkeypatch):
    monkeypatch.setattr("safetensors.safe_open", None)  # what loads tensors
    read_card(folders[0])
    config = json.loads(open(f"{folders[0]}/config.json").read())
    with open(f"{folders[0]}/config.json", "w") as file:
        json.dump(config | {"intermediate_size": 50}, file)
    done = inspect(folders[0])
    assert done.exit_code == 1 and "mlp.down_proj.weight: got shape [32, 48]" in done.stderr


def test_slots(tiny_config):
    shift = [(s["predicts"], s["logits"]) for s in slots(tiny_config())]
    assert shift == [(1, "base")] + [(i, "base + correction") for i in (2, 3, 4)]
    plain = [(s["predicts"], s["logits"]) for s in slots(tiny_config(shift_label=False))]
    assert plain == [(None, None), (1, "base")] + [(i, "base + correction") for i in (2, 3)]
    dflash = slots(tiny_config(projector_type="dflash", shift_label=False))
    assert [s["logits"] for s in dflash] == [None, "base", "base", "base"]
    assert [s["input"] for s in dflash] == ["anchor", "mask", "mask", "mask"]


def test_known_target_and_verifier(tmp_path, tiny_config, monkeypatch):
    monkeypatch.setattr("domino_draft.checkpoint.Checkpoint.check", lambda *_: None)
    monkeypatch.setattr("domino_draft.checkpoint.Checkpoint.tensors", {})
    config = QWEN3_8B | {"speculators_config": {"verifier": {"name_or_path": "Qwen/Qwen3-8B"}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    fits = read_card(tmp_path)["fits"]
    assert fits["shape_of"] == "Qwen3-8B" and fits["trained_for"] == "Qwen/Qwen3-8B"
    assert fits["min_layers"] == 34
