"""The loop: it learns, its schedules move, it resumes bit for bit and exports what it trained."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from domino_draft import DominoDrafter
from domino_draft.train import cli, trainer
from domino_draft.train.data import TokenDataset
from domino_draft.train.optimizer import learning_rate
from domino_draft.train.trainer import TrainConfig, Trainer, drafter_config, run
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 32


def target():
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    model = LlamaForCausalLM(shape).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(std=1.0)
        model.lm_head.weight.normal_(std=1.0)
    return model


def forks(count=64, length=40, seed=0):
    """X g(X) X' g(X') ..., X in {A: 0.4, B: 0.3, C: 0.3}, g(A) = a, g(B) = g(C) = b.

    Nothing predicts X better than "A". Without the chosen X the best guess for g(X) is b (0.6), so
    a proposal made slot by slot reads "A b" and fails; one that knows its own choice reads "A a".
    """
    rng = np.random.default_rng(seed)
    choice = rng.choice([3, 4, 5], p=[0.4, 0.3, 0.3], size=(count, length // 2))
    follow = np.where(choice == 3, 6, 7)
    tokens = np.stack([choice, follow], -1).reshape(count, length)
    return TokenDataset.from_sequences((t, np.arange(length) >= 2) for t in tokens)


def config(folder, **overrides):
    options = dict(
        target="unused", data=("unused",), output=str(folder), mask_token_id=2, num_layers=1,
        num_features=2, gru_hidden_dim=16, emb_dim=8, block_size=4, seq_len=40, batch_size=8,
        num_anchors=8, lr=1e-2, max_steps=8, held_out=8, log_every=2, device="cpu",
        dtype="float32", attention="dense", compile=False,
    )  # fmt: skip
    return TrainConfig(**(options | overrides))


def go(folder, **overrides):
    return run(config(folder, **overrides), model=target(), data=forks())


def lines(folder, kind):
    records = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    return [r for r in records if r["kind"] == kind]


@pytest.mark.parametrize("shift", [True, False])
def test_it_learns_and_the_head_beats_the_base(tmp_path, shift):
    summary = go(tmp_path, max_steps=250, shift_label=shift, ema=0.9)
    first, last = lines(tmp_path, "train")[0], summary["held_out"]
    assert first["accepted_final"] < 1.4
    # By arithmetic: base 1.9, final 2.2 to 2.5 with three proposals.
    assert last["accepted_final"] > last["accepted_base"] + 0.25
    assert last["accepted_final"] > first["accepted_final"] + 0.7
    slot = 2 if shift else 3
    assert last["accuracy_final_by_slot"][slot] > last["accuracy_base_by_slot"][slot] + 0.1


def test_a_label_off_by_one_is_not_learnable(tmp_path):
    # A text that never repeats a context: token t + 1 is a function of token t, drawn anew a
    # sequence. Slot 0 with shift must learn x_{a+1}; scored against any other offset it stays at
    # chance.
    walk = np.random.default_rng(0).permutation(np.arange(3, VOCAB))
    after = dict(zip(walk, np.roll(walk, -1)))
    rows = []
    for start in np.random.default_rng(1).choice(walk, 64):
        row = [start]
        for _ in range(39):
            row.append(after[row[-1]])
        rows.append((row, np.arange(40) >= 2))
    data = TokenDataset.from_sequences(rows)
    for shift in (True, False):
        folder = tmp_path / str(shift)
        summary = run(
            config(folder, max_steps=200, shift_label=shift, block_size=3, arm="dflash"),
            model=target(), data=data,
        )  # fmt: skip
        first = 0 if shift else 1
        assert summary["held_out"]["accuracy_base_by_slot"][first] > 0.95
        drafter = DominoDrafter.from_pretrained(folder, dtype=torch.float32)
        model = target()
        embedding, lm_head = model.model.embed_tokens.weight, model.lm_head.weight
        wanted = drafter.config.target_layer_ids
        hits = 0
        for row, _ in rows[:20]:
            ids = torch.tensor(row[:11])[None]
            with torch.no_grad():
                states = model(ids, output_hidden_states=True).hidden_states
                features = torch.cat([states[i + 1] for i in wanted], -1)[:, :10]
                block = torch.cat((embedding[ids[0, 10:11]], embedding[2].expand(2, -1)))[None]
                context = drafter.context_kv(features, torch.arange(10)[None])
                hidden = drafter(block, torch.arange(10, 13)[None], context)
                hits += int((lm_head @ hidden[0, first]).argmax()) == row[11]
        assert hits >= 18, "the drafter that was exported must predict the token after its anchor"


def test_schedules_move_and_are_logged(tmp_path):
    go(tmp_path, max_steps=20, log_every=1, profile=True)
    assert "aten::mm" in (tmp_path / "profile.txt").read_text()
    records = lines(tmp_path, "train")
    lam = [r["lambda_base"] for r in records]
    assert lam == pytest.approx([1 - i / 20 for i in range(20)])
    lr = [r["lr"] for r in records]
    assert max(lr) == pytest.approx(lr[0], rel=0.02) and lr[-1] == pytest.approx(1e-3)
    assert {"accuracy_base_by_slot", "accuracy_final_by_slot", "tokens_per_second"} <= set(
        records[0]
    )
    assert records[0]["loss_final"] != records[0]["loss_base"]
    assert lines(tmp_path, "final")[0]["held_out"]["accepted_base"] >= 1


def test_learning_rate_shape(tmp_path):
    c = config(tmp_path, warmup=0.1, lr=1.0, min_lr_ratio=0.1)
    assert [learning_rate(c, p) for p in (0.0, 0.05, 0.1, 0.55, 1.0)] == pytest.approx(
        [0.0, 0.5, 1.0, 0.55, 0.1]
    )


def test_seconds_drive_the_schedules(tmp_path):
    summary = go(tmp_path, max_steps=None, max_seconds=1.5, log_every=1)
    lam = [r["lambda_base"] for r in lines(tmp_path, "train")]
    assert lam[0] == 1.0 and lam[-1] < 0.2 and summary["steps"] == len(lam)
    assert all(a > b for a, b in itertools.pairwise(lam))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resume_gives_the_same_weights(tmp_path, monkeypatch, dtype):
    options = dict(save_every=3, ema=0.9, dtype=dtype)
    go(tmp_path / "whole", **options)

    step = Trainer.step
    monkeypatch.setattr(
        Trainer, "step", lambda self, b: 1 / 0 if self.steps_done == 5 else step(self, b)
    )
    with pytest.raises(ZeroDivisionError):
        go(tmp_path / "parts", **options)
    monkeypatch.undo()
    assert not (tmp_path / "parts" / "model.safetensors").exists()
    go(tmp_path / "parts", **options, resume=True)
    names = ("whole", "parts")
    states = [torch.load(tmp_path / n / "checkpoint.pt")["optimizer"] for n in names]
    for key in ("masters", "ema"):
        assert all(torch.equal(a, b) for a, b in zip(states[0][key], states[1][key], strict=True))
    files = [(tmp_path / n / "model.safetensors").read_bytes() for n in names]
    assert files[0] == files[1]
    with pytest.raises(ValueError, match=r"resume: lr: got 0\.5, expected 0\.01"):
        go(tmp_path / "parts", **options, resume=True, lr=0.5)
    with pytest.raises(ValueError, match="expected a checkpoint"):
        go(tmp_path / "none", **options, resume=True)
    checkpoint = tmp_path / "parts" / "checkpoint.pt"
    whole = checkpoint.read_bytes()
    for damaged in (b"", b"text", whole[: len(whole) // 2]):
        checkpoint.write_bytes(damaged)
        with pytest.raises(
            ValueError, match=r"resume: got .*checkpoint\.pt.*expected a checkpoint"
        ):
            go(tmp_path / "parts", **options, resume=True)
    torch.save({"other": 1}, checkpoint)
    with pytest.raises(ValueError, match="expected a checkpoint of this trainer"):
        go(tmp_path / "parts", **options, resume=True)
    left = sorted(p.name for p in (tmp_path / "parts").iterdir())
    assert left == [
        "checkpoint.pt", "config.json", "metrics.jsonl", "model.safetensors", "training.json",
    ]  # fmt: skip


@pytest.mark.parametrize("options", [{"save_every": 2}, {"max_steps": None, "max_seconds": 1.0}])
def test_spoilt_weights_do_not_replace_good_ones(tmp_path, monkeypatch, options):
    loss = Trainer.loss
    monkeypatch.setattr(
        Trainer,
        "loss",
        lambda self, *args, **kw: loss(self, *args, **kw) * (1 if self.steps_done < 5 else np.nan),
    )
    with pytest.raises(RuntimeError, match="grad_norm: got nan after"):
        go(tmp_path, log_every=10**6, **options)
    assert not (tmp_path / "model.safetensors").exists()
    if "save_every" in options:
        state = torch.load(tmp_path / "checkpoint.pt")
        assert state["steps_done"] == 4
        assert all(m.isfinite().all() for m in state["optimizer"]["masters"])


def test_the_export_is_what_was_trained(tmp_path):
    go(tmp_path, save_every=8)
    drafter = DominoDrafter.from_pretrained(tmp_path)
    masters = torch.load(tmp_path / "checkpoint.pt")["optimizer"]["masters"]
    for p, m in zip(drafter.parameters(), masters, strict=True):
        assert p.dtype == torch.bfloat16 and torch.equal(p, m.bfloat16())
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["steps"] == 8 and record["config"]["mask_token_id"] == 2


def test_bf16_masters_keep_small_updates(tmp_path):
    made = Trainer(config(tmp_path, dtype="bfloat16", lr=1e-5), model=target(), data=forks())
    before = [m.clone() for m in made.optimizer.masters]
    for step in range(2):
        made.step(made.sampler.batch(step))
    moved = [(m != b).float().mean().item() for m, b in zip(made.optimizer.masters, before)]
    assert np.mean(moved) > 0.5
    for p, m in zip(made.optimizer.params, made.optimizer.masters, strict=True):
        assert p.dtype == torch.bfloat16 and torch.equal(p, m.bfloat16())


def test_arms_start_from_the_same_backbone_and_see_the_same_batches(tmp_path):
    made = {
        arm: Trainer(config(tmp_path, arm=arm), model=target(), data=forks())
        for arm in trainer.ARMS[:2]
    }
    domino, dflash = (made[a].drafter.state_dict() for a in ("domino", "dflash"))
    assert set(domino) - set(dflash) == {
        "prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight",
        "embed_proj.2.weight",
    }  # fmt: skip
    assert all(torch.equal(domino[n], dflash[n]) for n in dflash)
    a, b = (made[x].sampler.batch(3) for x in ("domino", "dflash"))
    assert all(np.array_equal(x, y) for x, y in zip(vars(a).values(), vars(b).values()))


def test_the_matched_arm_has_the_parameters_of_the_domino_arm(tmp_path):
    shape = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, head_dim=64,
    )  # fmt: skip
    counts, layers = {}, {}
    for arm in trainer.ARMS:
        made = drafter_config(
            config(tmp_path, arm=arm, num_layers=4, num_features=5, gru_hidden_dim=256, emb_dim=96,
                   block_size=16), shape,
        )  # fmt: skip
        with torch.device("meta"):
            counts[arm] = sum(p.numel() for p in DominoDrafter(made).parameters())
        layers[arm] = made.num_hidden_layers
        assert made.target_layer_ids == (1, 8, 14, 20, 27)
    assert layers == {"domino": 4, "dflash": 4, "dflash-matched": 5}
    assert counts["dflash-matched"] == pytest.approx(counts["domino"], rel=0.005)
    assert counts["dflash"] < 0.8 * counts["domino"]


def test_parameter_matched_and_plain_arms_train(tmp_path):
    for arm in ("dflash", "dflash-matched"):
        summary = go(tmp_path / arm, arm=arm, gru_hidden_dim=64, emb_dim=64)
        held_out = summary["held_out"]
        assert held_out["loss_base"] == held_out["loss_final"]
        assert DominoDrafter.from_pretrained(tmp_path / arm).head is None


@pytest.mark.parametrize(
    "change, message",
    [
        ({"arm": "eagle"}, "train: arm: got 'eagle'"),
        ({"max_steps": None}, "train: max_steps: got None, expected exactly one"),
        ({"max_seconds": 5.0}, "train: max_steps: got 8, expected exactly one"),
        ({"attention": "full"}, "train: attention: got 'full'"),
        ({"lr": 0.0}, "train: lr: got 0.0"),
        ({"data": ()}, "train: data"),
        ({"mask_token_id": VOCAB}, "mask_token_id: got 32"),
        ({"held_out": 64}, "held_out: got 64"),
        ({"block_size": 1}, "block_size: got 1, expected at least 2"),
        ({"device": "gpu"}, "train: device: got 'gpu'"),
    ],
)
def test_errors_name_the_field(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        go(tmp_path, **change)


def test_a_token_outside_the_vocabulary_is_an_error(tmp_path):
    data = TokenDataset.from_sequences([([1, 2, VOCAB, 3], [True] * 4)] * 9)
    with pytest.raises(ValueError, match="data: got token 32, expected ids below"):
        Trainer(config(tmp_path), model=target(), data=data)
    data = TokenDataset.from_sequences([([1, 2, -1, 3], [True] * 4)] * 9)
    with pytest.raises(ValueError, match="data: got token -1, expected ids below"):
        Trainer(config(tmp_path), model=target(), data=data)
    with pytest.raises(ValueError, match="data: got no sequence"):
        Trainer(config(tmp_path), model=target(), data=TokenDataset.from_sequences([]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_a_missing_gpu_or_target_is_one_line(tmp_path):
    """`--device cuda` is the default: without a GPU it must say so, and not fail in Torch."""
    words = ["--target", str(tmp_path), "--data", "x.npz", "--output", str(tmp_path / "out"),
             "--mask-token-id", "2", "--max-steps", "1"]  # fmt: skip
    result = CliRunner().invoke(cli.main, words)
    assert result.exit_code == 1 and "train: device: got 'cuda', but Torch finds" in result.output
    result = CliRunner().invoke(cli.main, [*words, "--device", "cpu"])
    assert result.exit_code == 1 and "train: target: got" in result.output


def test_command_line(tmp_path, monkeypatch):
    model = target()
    model.save_pretrained(tmp_path / "target")
    forks().save(tmp_path / "data.npz")
    options = dataclasses.asdict(config(tmp_path / "out", target=str(tmp_path / "target")))
    words = ["--data", str(tmp_path / "data.npz")]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if name in ("data", "max_seconds", "intermediate_size"):
            continue
        if isinstance(value, bool):
            words.append(flag if value else "--no-" + flag[2:])
        else:
            words += [flag, *map(str, value if isinstance(value, tuple) else (value,))]
    result = CliRunner().invoke(cli.main, words)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "model.safetensors").is_file()
    again = CliRunner().invoke(cli.main, [*words, "--max-seconds", "3"])
    assert again.exit_code == 1 and "exactly one of max_steps and max_seconds" in again.output
    monkeypatch.setenv("DOMINO_DEBUG", "1")
    assert isinstance(
        CliRunner().invoke(cli.main, [*words, "--max-seconds", "3"]).exception, ValueError
    )
