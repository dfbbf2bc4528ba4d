"""The head's benchmark on a CPU: planted inputs and every peer against the reference, the plot."""

import numpy as np
import pytest
import torch

from bench import plot, timing
from bench.ops import head as suite
from bench.ops import head_inputs
from bench.ops.head_inputs import planted_block, teacher_forced
from bench.peers import head as peers
from bench.pool_recall import pool_ranks
from domino_kernels.reference.head import draft_chain as reference_draft_chain
from domino_kernels.testing import to_numpy

SHAPE = {"H": 24, "G": 20, "R": 12, "V": 1500}
POOL = 300
EVERY = peers.DRAFTS - 1
TORCH = {
    "full": peers.full,
    "compiled": peers.compiled,
    "compiled_table": peers.compiled_table,
    "cudnn": peers.cudnn,
}


def reference(block, base=None):
    weights = block.weights
    arrays = [to_numpy(w) for w in (weights.w_ih, weights.w_hh, weights.w1, weights.w2)]
    arrays.append(to_numpy(weights.embedding))
    base = to_numpy(block.base) if base is None else base
    return reference_draft_chain(base, to_numpy(block.hidden), block.anchor.cpu().numpy(), arrays)


def make(seed, **options):
    return planted_block(SHAPE, 3, seed, "cpu", dtype=torch.float32, **options)


def unplanted(seed, V=1500):
    """Random inputs with the planted weights' scales: winners by chance, near ones among them."""
    block = planted_block(SHAPE | {"V": V}, 3, seed, "cpu", dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    return block._replace(
        base=torch.randn(block.base.shape, generator=generator) * 2.5,
        anchor=torch.randint(V, (3,), generator=generator),
    )


@pytest.mark.parametrize("restarts", [0, 1, EVERY])
def test_planted_winners_win(restarts):
    block = make(5, restarts=restarts)
    found = reference(block)
    assert (found.tokens == block.planted.numpy()).all()
    assert found.margin.min() > 0.1 * head_inputs.BASE_STD
    outside = [
        pool_ranks(row[1 : peers.DRAFTS])[:2]
        .gather(2, ids[1:].expand(2, -1)[..., None])
        .ge(POOL)
        .all(0)
        .sum()
        .item()
        for row, ids in zip(block.base, block.planted)
    ]  # both for pools of a slot and for those of a block
    assert outside == {0: [0, 0, 0], 1: [1, 0, 0], EVERY: [EVERY] * 3}[restarts]


def test_the_correction_has_the_scale_of_the_drafter():
    block = make(6)
    chain = torch.cat((block.anchor[:, None], block.planted[:, :-1]), 1)
    delta = teacher_forced(block.hidden, chain, block.weights) @ block.weights.w2.T
    others = torch.ones(SHAPE["V"], dtype=torch.bool)
    others[block.planted.flatten()] = False
    base, delta = block.base[..., others], delta[:, 1:, others]
    assert base.std() == pytest.approx(head_inputs.BASE_STD, rel=0.02)
    assert delta.std() / base.std() == pytest.approx(head_inputs.DELTA_STD, rel=0.2)


@pytest.mark.parametrize("name", TORCH)
def test_exact_peers_against_the_reference(name):
    for block in (make(7), make(8, restarts=EVERY), unplanted(9)):
        prepared = peers.prepare(block.weights)
        tokens = TORCH[name](*block[:4], prepared)
        assert tokens.tolist() == reference(block).tokens.tolist()


@pytest.mark.parametrize("seed", [11, 12])
def test_pool_peer_is_the_chain_over_its_pool(seed):
    """Winners outside the pool occur: the reference gets the pool as base logits of -inf."""
    block = unplanted(seed)
    best = to_numpy(block.base[:, 1 : peers.DRAFTS]).max(1)
    outside = best < np.sort(best, axis=1)[:, -40:][:, :1]
    base = to_numpy(block.base).copy()
    base[:, 1:][np.broadcast_to(outside[:, None], base[:, 1:].shape)] = -np.inf
    tokens = peers.pool(*block[:4], peers.prepare(block.weights), size=40)
    assert tokens.tolist() == reference(block, base).tokens.tolist()
    assert tokens.tolist() != reference(block).tokens.tolist()


def test_pool_peer_agrees_where_the_winners_are_inside():
    block = make(13)
    tokens = peers.pool(*block[:4], peers.prepare(block.weights), size=POOL)
    assert tokens.tolist() == block.planted.tolist()


@pytest.mark.parametrize("batch", [1, 3, 17])
def test_triton_peer_against_the_reference(batch, device):
    """Under the interpreter without a GPU: tails of ids, ranks and rows, and ties."""
    triton_peer = pytest.importorskip("bench.peers.head_triton")
    shape = {"H": 24, "G": 20, "R": 72, "V": 700}
    block = planted_block(shape, batch, 14, device, dtype=torch.float32)
    tie = block.planted[0, 0]
    block.base[0, 0, tie - 300 if tie >= 300 else tie + 300] = block.base[0, 0, tie]
    prepared = peers.prepare(block.weights)
    tokens = triton_peer.full_table(*block[:4], prepared)
    assert tokens.tolist() == reference(block).tokens.tolist()


def test_suite_has_the_rows_that_the_bars_name():
    cases = [case for case in suite.cases() if case.op == "draft_chain"]
    keys = {(c.params["model"], c.case, c.batch, c.params["restarts"]) for c in cases}
    for model in suite.MODELS:
        assert {(model, "exact", 2**i, 0) for i in range(8)} <= keys
    for batch in (1, 8, 64):
        assert {("qwen3-8b", "exact", batch, r) for r in (0, 1, EVERY)} <= keys


def test_plot(tmp_path):
    row = {"op": "draft_chain", "ok": True, "bytes": 4_000_000, "case": "exact"}
    rows = [
        row | {"provider": p, "batch": b, "us_p50": us, "params": {"model": "m", "restarts": r}}
        for p, b, us, r in [
            ("ours", 8, 7.0, 0), ("ours", 1, 5.0, 0), ("graph", 1, 50.0, 0), ("ours", 1, 6.0, 1)
        ]
    ]  # fmt: skip
    rows += [rows[0] | {"ok": False}, rows[0] | {"op": "gru_step"}]
    run = {"rows": rows, "ceilings": {"copy_gb_s": 4000.0}, "gpu": "G", "date": "D", "commit": "C"}
    assert plot.series(run) == {
        "m": {
            "ours, exact": [(1, 5.0), (8, 7.0)],
            "floor": [(1, 1.0), (8, 1.0)],
            "graph": [(1, 50.0)],
        }
    }
    pytest.importorskip("matplotlib")
    plot.draw(run, tmp_path / "plot.svg")
    assert "ours, exact" in (tmp_path / "plot.svg").read_text()


def test_launches_are_calls_over_the_rotation():
    calls = []
    timing.launches(lambda *o: calls.append(o), [(0,), (1,), (2,)], 3)()
    assert calls == [(0,), (1,), (2,)]
