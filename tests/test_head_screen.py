"""HeadWeights.with_screen(): W2 in int8 and 4 bits, and the bounds on what that loses."""

from dataclasses import replace

import pytest
import torch

from domino_kernels import HeadWeights

IDS = {8: 128, 4: 16}  # bits -> ids of a tile


def markov(w2):
    return HeadWeights(None, None, None, w2, torch.zeros_like(w2), low_rank="row")


def unpack(weights, bits=8):
    """int8 [V, R] and float64 [tiles, 3]: 1 / scale, residue, norm."""
    vocab, rank = weights.w2.shape
    pitch = -(-rank // 64) * 32
    rows, tiles, nibbles, nibble_tiles = weights.screen.split(
        (vocab * rank, -(-vocab // 128) * 16, vocab * pitch, -(-vocab // 16) * 16)
    )
    if bits == 4:
        pairs = nibbles.view(vocab, -1, 1, 32)
        low, high = (pairs & 15) - 8, pairs >> 4  # of 64 values the first 32 and the others
        n = torch.cat((low, high), 2).view(vocab, -1)[:, :rank]
        rows, tiles = (n.int() * 16 + 8).to(torch.int8), nibble_tiles
    return rows.view(vocab, rank), tiles.view(torch.float32).view(-1, 4)[:, :3].double()


def column(u):
    """What the kernel makes of u [R]: int8 as float64, 1 / scale, U and E."""
    most, half = u.abs().max(), 0.5 * len(u) ** 0.5
    if not 1e-12 <= most <= 1e17:
        bound = 16e-12 if most < 1e-12 else torch.inf
        return torch.zeros_like(u), 1.0, bound, bound
    inverse = 127 / most
    q, scale = (u * inverse).round(), (1 + 2**-10) / inverse
    return q, inverse, scale * (q.norm() + half), scale * half


def rows_of(kind, count, rank, dtype):
    generator = torch.Generator().manual_seed(len(kind))
    w = torch.randn(count, rank, generator=generator)
    if kind == "half steps":  # as far from int8 as can be
        w = (w * 20).round().clamp(-60, 60) + 0.5
        w[:, 0] = 127
    elif kind == "a spike":
        w[::7, 3] = 300
    elif kind == "wide":
        w *= 10 ** torch.linspace(-6, 4, count)[:, None]
    elif kind == "zeros":
        w[:] = 0
    elif kind == "tiny":
        w *= 1e-7 if dtype == torch.float16 else 1e-20
    return w.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["normal", "half steps", "a spike", "wide", "zeros", "tiny"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rank", [96, 48])
def test_the_bound_holds(rank, bits, kind, dtype):
    vocab = 300
    w2 = rows_of(kind, vocab, rank, dtype)
    q, tiles = unpack(markov(w2).with_screen(), bits)
    assert q.abs().max() <= 127
    tile = torch.arange(vocab) // IDS[bits]
    inverse, residue, norm = tiles[tile].unbind(1)
    w = w2.double()
    lost = w - q / inverse[:, None]
    columns = [rows_of(name, 8, rank, dtype)[7] for name in ("normal", "half steps", "a spike")]
    # along what a row loses, and along a row: where Cauchy and Schwarz leave nothing
    worst = lost[lost.norm(dim=1).argmax()]
    columns += [(worst / worst.norm().clamp_min(1e-30)).to(dtype), w2[17], torch.zeros_like(w2[0])]
    for u in columns:
        u_q, u_inverse, u_norm, u_residue = column(u.double())
        screened = (q.double() @ u_q) / inverse / u_inverse
        bound = residue * u_norm + norm * u_residue
        for scores in (w @ u.double(), (w2.float() @ u.float()).double()):
            assert (scores - screened <= bound + 1e-30).all()


def test_the_bound_is_of_use():
    """A fifth of the deviation of W2 u at most for what W2 loses; along that it is all needed."""
    w2 = torch.randn(1024, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    q, tiles = unpack(markov(w2).with_screen())
    inverse, residue, norm = tiles.repeat_interleave(IDS[8], 0).unbind(1)
    lost = (w2.double() - q / inverse[:, None]).norm(dim=1)
    assert (residue < 0.2 * 256**0.5 / 16).all()
    assert (lost <= residue).all() and (norm >= (q / inverse[:, None]).norm(dim=1)).all()
    assert (lost.view(-1, IDS[8]).amax(1) > 0.95 * tiles[:, 1]).all()


def test_the_bound_of_4_bits_is_of_use():
    w2 = torch.randn(1024, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    q, tiles = unpack(markov(w2).with_screen(), 4)
    inverse, residue, _ = tiles.repeat_interleave(IDS[4], 0).unbind(1)
    lost = (w2.double() - q / inverse[:, None]).norm(dim=1)
    assert (residue < 2.7 * 256**0.5 / 16).all() and (lost <= residue).all()
    assert (lost.view(-1, IDS[4]).amax(1) > 0.95 * tiles[:, 1]).all()


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("bits", [8, 4])
def test_odd_weights_let_all_ids_of_their_tile_pass(bits, odd):
    w2 = torch.randn(300, 32).bfloat16()
    plain = unpack(markov(w2).with_screen(), bits)
    w2[130, 5] = odd
    q, tiles = unpack(markov(w2).with_screen(), bits)
    at = 130 // IDS[bits]
    some = slice(at * IDS[bits], (at + 1) * IDS[bits])
    assert torch.isinf(tiles[at, 1:]).all() and (q[some] == (0 if bits == 8 else 8)).all()
    tiles[at], q[some] = plain[1][at], plain[0][some]
    assert torch.equal(q, plain[0]) and torch.equal(tiles, plain[1])


def test_screen_is_checked_and_named():
    weights = markov(torch.randn(300, 32).bfloat16()).with_screen()
    assert weights.screen.shape == (300 * 32 + 3 * 16 + 300 * 32 + 19 * 16,)
    assert "int8 and 4 bits" in repr(weights) and "int8" not in repr(replace(weights, screen=None))
    with pytest.raises(ValueError, match="screen: got shape"):
        replace(weights, screen=weights.screen[16:])
    with pytest.raises(TypeError, match=r"screen: got torch\.uint8"):
        replace(weights, screen=weights.screen.view(torch.uint8))
    for w2 in (torch.randn(300, 32), torch.randn(300, 24).half(), torch.randn(300, 272).half()):
        with pytest.raises(ValueError, match="expected a multiple of 16 up to 256"):
            markov(w2).with_screen()
