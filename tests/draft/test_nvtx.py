"""What a profile shows: a range for each cycle and for each forward over prompts."""

from contextlib import contextmanager

import pytest
import torch
from domino_draft import DominoDrafter, Engine, Target, TreeOptions

from .conftest import tiny_model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def names_of(monkeypatch, tiny_config, device, **options):
    """Names of the ranges that a run opens, one behind the other."""
    names, open_ranges = [], []

    @contextmanager
    def seen(name):
        assert not open_ranges
        names.append(name)
        open_ranges.append(name)
        yield
        open_ranges.pop()

    if device == "cuda":
        monkeypatch.setattr("torch.cuda.nvtx.range", seen)
    else:
        monkeypatch.setattr("domino_draft.cycle._nvtx", lambda device, name: seen(name))
    torch.manual_seed(0)
    drafter = DominoDrafter(tiny_config()).eval().to(device)
    target = Target(tiny_model("Llama").to(device))
    settings = dict(max_batch=2, max_length=40, prefill_tokens=16, fused=True)
    engine = Engine(target, drafter, **settings, **options)
    for prompt in ([5, 6, 7], [8] * 5, [9] * 20):
        engine.add(prompt, 6, stop_token_ids=())
    for _ in engine:
        pass
    assert not open_ranges
    return names


@pytest.mark.parametrize("short", [0, 4096], ids=["eager", "padded"])
@pytest.mark.parametrize("device", DEVICES)
def test_ranges(monkeypatch, tiny_config, device, short):
    monkeypatch.setattr("domino_draft.cycle._SHORT", short)
    names = names_of(monkeypatch, tiny_config, device)
    assert names[0] == f"domino prompts B=2 T={16 if short else 5}"
    pieces = [name for name in names[1:] if "cycle" not in name]
    assert pieces == ["domino prefill B=1 T=16", "domino prefill B=1 T=4"]
    assert {name for name in names if "cycle" in name} <= {
        "domino cycle B=2 K=3", "domino cycle B=1 K=3",
    }  # fmt: skip
    if device == "cpu":  # on a GPU the graph of two rows serves one until a capture would pay
        assert names[-1] == "domino cycle B=1 K=3"


@pytest.mark.parametrize("device", DEVICES)
def test_ranges_of_trees(monkeypatch, tiny_config, device):
    tree = TreeOptions(nodes=9, width=2, children=3, pool=20, depth=2)
    names = names_of(monkeypatch, tiny_config, device, tree=tree)
    assert names[-1] in {
        f"domino cycle B={rows} K=2" for rows in ((1,) if device == "cpu" else (1, 2))
    }
