"""Sliding drafter layers in rings: what a cache of whole rows drafts, at a fixed size."""

import pytest
import torch
from domino_draft import DominoConfig, DominoDrafter, Engine, Target, estimate_memory
from domino_draft.config import TAKEN_BACK
from domino_draft.policy import Choice
from domino_draft.requests import Law

from .conftest import tiny_model

WINDOW, BLOCK = 5, 4
RING = WINDOW + TAKEN_BACK * (BLOCK + 1)
LENGTH = 6 * RING
FULL, SLIDES = "full_attention", "sliding_attention"
LAYERS = {"mixed": (SLIDES, FULL, SLIDES), "all": (SLIDES,) * 3}


def whole_rows(monkeypatch):
    """Sessions made from here on keep every position of every layer."""

    def lengths(config, max_length):
        return [max_length + config.block_size] * config.num_hidden_layers

    monkeypatch.setattr(DominoConfig, "context_lengths", lengths)


def make(tiny_config, kind, device="cpu", dtype=torch.float32, **overrides):
    target = Target(tiny_model("Llama").to(dtype).to(device))
    torch.manual_seed(12)
    sliding = dict(layer_types=LAYERS[kind], sliding_window=WINDOW, block_size=BLOCK)
    config = tiny_config(num_hidden_layers=3, **sliding, **overrides)
    drafter = DominoDrafter(config).to(dtype).to(device)
    with torch.no_grad():
        for p in drafter.parameters():
            if p.dim() > 1:
                p.mul_(10)
    return target, drafter


def test_lengths(tiny_config):
    def lengths(max_length, **given):
        config = tiny_config(num_hidden_layers=2, block_size=BLOCK, **given)
        return config.context_lengths(max_length)

    slides = dict(layer_types=(SLIDES, FULL), sliding_window=WINDOW)
    assert lengths(1000) == [1004, 1004]
    assert lengths(1000, **slides) == [RING, 1004]
    assert lengths(RING - BLOCK, **slides) == [RING, RING]
    assert lengths(9, **slides) == [13, 13]


@torch.no_grad()
@pytest.mark.parametrize("kind", LAYERS)
def test_session(tiny_config, monkeypatch, kind):
    """Ragged rows that join, grow, move and leave; prompts longer than the ring; any lengths."""
    target, drafter = make(tiny_config, kind, dtype=torch.float64, projector_type="dflash")
    short = drafter.begin(target, 4, LENGTH)
    whole_rows(monkeypatch)
    sessions = short, drafter.begin(target, 4, LENGTH)
    generator = torch.Generator().manual_seed(3)

    def draw(low, high, *size):
        return torch.randint(low, high, size, generator=generator)

    def commit(counts, first=0, columns=None):
        features = torch.randn(
            len(counts), columns or max(counts), drafter.fc.in_features, generator=generator,
            dtype=torch.float64,
        )  # fmt: skip
        for session in sessions:
            session.commit(features, torch.tensor(counts), counts, first)

    def check(rows):
        anchors, drafts = draw(0, 61, rows), int(draw(1, BLOCK + 1, 1))
        (hidden, base), (wanted, wanted_base) = (s.block(anchors, drafts) for s in sessions)
        torch.testing.assert_close(hidden, wanted, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(base, wanted_base, rtol=1e-9, atol=1e-9)

    commit([2 * RING + 3, 1, RING - 2])  # padded to the longest
    commit([RING], first=3)
    commit([7], first=3, columns=9)  # a prompt's last piece
    check(4)
    for cycle in range(2 * RING):
        # The rows that the last block was written behind keep a few of its tokens.
        commit(draw(1, BLOCK + 2, short.cache.lengths.numel()).tolist())
        rows = short.cache.lengths.numel()
        check(rows)
        if cycle % 9 == 8:  # some leave, others take their places, one joins
            kept = torch.randperm(rows, generator=generator)[: int(draw(1, rows + 1, 1))].tolist()
            for session in sessions:
                session.select(kept)
            if len(kept) < 4:
                commit([int(draw(1, 2 * RING, 1))], first=len(kept))
            check(min(len(kept) + 1, 4))
    assert max(short.cache.host_lengths) > 4 * RING
    held = {kind: RING if kind == SLIDES else LENGTH + BLOCK for kind in LAYERS["mixed"]}
    lengths = [x.shape[2] for x in short.cache.tensors()[::2]]
    assert lengths == [held[kind] for kind in LAYERS[kind]]


def decode(target, drafter, requests, monkeypatch, **settings):
    """An engine that has served the requests, its chunks, and all drafts of it where they can be
    seen: not where they stay in a captured graph."""
    engine = Engine(target, drafter, max_batch=3, max_length=LENGTH, prefill_tokens=90, **settings)
    waiting, chunks, drafts, steps = list(requests), [], [], 0
    of, name = (engine.session, "propose") if engine._fused is None else (engine._fused, "_chain")
    propose = getattr(of, name)

    def seen(*args):
        found = propose(*args)
        drafts.append((found[0] if isinstance(found, tuple) else found).tolist())
        return found

    if engine.mode != "captured":
        monkeypatch.setattr(of, name, seen)
    while waiting or engine.num_waiting or engine.num_running:
        for request in waiting[: 2 if steps % 4 == 0 else 0]:  # short ones share a forward
            engine.add(*request, stop_token_ids=())
            waiting.remove(request)
        chunks += [(c.request, c.tokens, c.accepted) for c in engine.step()]
        steps += 1
    return engine, chunks, drafts


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("fused", [False, True], ids=["stock", "fused"])
@pytest.mark.parametrize("kind", LAYERS)
def test_engine(tiny_config, monkeypatch, kind, fused, device):
    """The same tokens and the same drafts, over prompts and texts of many windows."""
    target, drafter = make(tiny_config, kind, device)
    generator = torch.Generator().manual_seed(8)
    sizes = [(3, 60), (45, 40), (120, 40), (1, 100), (40, 9), (70, 30), (30, 50), (33, 1)]
    requests = [
        (torch.randint(0, 61, (size,), generator=generator).tolist(), new) for size, new in sizes
    ]
    settings = dict(fused=fused)
    engine, *got = decode(target, drafter, requests, monkeypatch, **settings)
    found = estimate_memory(target, drafter, 3, LENGTH, **settings)
    held = sum(x.nbytes for pair in engine.session.cache._buffers.values() for x in pair)
    assert found.drafter_cache == held
    whole_rows(monkeypatch)
    engine, *wanted = decode(target, drafter, requests, monkeypatch, **settings)
    assert held < 0.8 * sum(x.nbytes for p in engine.session.cache._buffers.values() for x in p)
    assert got == wanted


@torch.inference_mode()
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", LAYERS)
def test_taken_back_at_every_length(tiny_config, monkeypatch, kind, device):
    """What a new graph is timed by, full acceptance included, leaves no trace in the next cycle."""
    target, drafter = make(tiny_config, kind, device)
    prompt = [(7 * i) % 61 for i in range(WINDOW + 2)]
    choice = Choice.whole(BLOCK)
    lines = []
    for rows in ("rings", "whole"):
        engine = Engine(
            target, drafter, max_batch=1, max_length=LENGTH, num_drafts=BLOCK, fused=True
        )
        engine.add(prompt, LENGTH - len(prompt), stop_token_ids=())
        engine.step()
        cycle, lengths = engine._fused, engine.cache.all_lengths
        seen = []
        for length in range(len(prompt), len(prompt) + 2 * RING):
            assert lengths.item() == length
            anchor = cycle.anchors.clone()
            for again in range(TAKEN_BACK if rows == "rings" else 0):
                lengths.fill_(length + again * (BLOCK + 1))
                cycle.run(1, choice, Law.GREEDY)
            lengths.fill_(length)
            cycle.anchors.copy_(anchor)
            hidden = cycle._block(cycle.anchors, lengths, BLOCK)
            seen.append(hidden.clone())
            line = cycle.run(1, choice, Law.GREEDY)
            lengths.fill_(length + 1)  # keep one token a cycle: every length is met
            cycle.anchors.copy_(line[:, 2])
        lines.append(torch.cat(seen))
        whole_rows(monkeypatch)
    torch.testing.assert_close(*lines, rtol=1e-4, atol=1e-4)
