import numpy as np
import pytest
import torch

import domino_kernels
from domino_kernels import rng
from domino_kernels.testing import Guarded

# Known answers of the Random123 distribution (kat_vectors, philox4x32 10): counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF]
STARTS = [0, 5, 2**32 - 1, 2**32, 2**40 + 7, -1]


@pytest.mark.parametrize("counter, key, output", KNOWN)
def test_known_answers(counter, key, output):
    as_arrays = lambda values: [np.array([v], np.uint64) for v in values]  # noqa: E731
    actual = rng.philox4x32(as_arrays(counter), as_arrays(key))
    assert tuple(int(word[0]) for word in actual) == output
    as_tensors = lambda values: [torch.tensor([v]) for v in values]  # noqa: E731
    actual = rng.philox4x32(as_tensors(counter), as_tensors(key))
    assert tuple(int(word[0]) for word in actual) == output


def test_known_answer_through_the_contract():
    """The third vector, read as seed, block start, slot, purpose and index."""
    (c0, c1, c2, c3), (k0, k1), output = KNOWN[2]
    index = np.arange(4 * c0, 4 * c0 + 4)
    words = rng.words(k0 | k1 << 32, c2 | c3 << 32, c1 & 0xFFFFFF, c1 >> 24, index)
    assert tuple(int(word) for word in words) == output


@pytest.mark.parametrize("purpose", range(rng.DRAFT_TOKEN, rng.POSITION_DRAW + 1))
def test_kernel_words_are_numpy_words(purpose, device):
    """C++ and CUDA against NumPy, every word of the seed, the start and the slot in play."""
    seed, start = np.array([(s, b) for s in SEEDS for b in STARTS]).T.copy()
    for i, count in [(0, 1), (3, 7), (2**24 - 1, 258)]:
        expected = rng.words(seed[:, None], start[:, None], i, purpose, np.arange(count))
        out = Guarded(expected.shape, torch.int64, device)
        actual = domino_kernels.noise(
            torch.tensor(seed, device=device),
            torch.tensor(start, device=device),
            i,
            purpose,
            count,
            out=out.tensor,
        )
        assert actual is out.tensor
        assert (out.check().cpu().numpy() == expected.astype(np.int64)).all()


def test_every_field_changes_the_words():
    """No two (seed, start, i, purpose, index) in a grid share a word: nothing is masked away."""
    seeds, starts = np.array(SEEDS), np.array(STARTS)
    grid = np.ix_(seeds, starts, np.array([0, 1, 2**24 - 1]), np.array([0, 1, 5, 2**34 - 1]))
    words = [rng.words(grid[0], grid[1], grid[2], purpose, grid[3]) for purpose in range(1, 6)]
    words = np.concatenate([w.ravel() for w in words])
    # 2160 words of 32 bits: about 5e-4 collisions expected
    assert len(np.unique(words)) == len(words)


def test_numpy_and_torch_forms_agree():
    index = np.arange(1000)
    expected = rng.words(-7, 2**33, 4, rng.RESIDUAL_DRAW, index)
    actual = rng.words(torch.tensor(-7), 2**33, 4, rng.RESIDUAL_DRAW, torch.tensor(index))
    assert (actual.numpy() == expected.astype(np.int64)).all()


def test_uniforms_and_exponentials_of_the_kernels(device):
    """fp32 values of 2^20 words and of the extreme words, against float64."""
    seed, start = torch.tensor([11], device=device), torch.tensor([3], device=device)
    draw = lambda kind: domino_kernels.noise(  # noqa: E731
        seed, start, 0, rng.DRAFT_TOKEN, 1 << 20, kind=kind
    )[0]
    words = draw("words").cpu().numpy()
    uniform, exponential = draw("uniform").cpu().numpy(), draw("exponential").cpu().numpy()
    assert (uniform == rng.uniform(words).astype(np.float32)).all()
    assert uniform.min() > 0 and uniform.max() <= 1
    expected = rng.exponential(words)
    error = np.abs(exponential - expected) / expected
    assert error.max() < 2.5e-7, f"{error.max():.3e} at word {words[error.argmax()]:#x}"
    # enough words that both branches and small and large exponentials were seen
    assert words.min() < 2**14 and words.max() > 2**32 - 2**14
    # mean and variance 1 within 5 standard errors
    assert abs(exponential.mean() - 1) < 5e-3 and abs(exponential.var() - 1) < 1.4e-2


def test_extreme_words():
    assert rng.uniform(0)[()] == 2.0**-32 and rng.uniform(2**32 - 1)[()] == 1.0
    assert 0 < rng.exponential(0)[()] < 1.2e-10
    assert np.isfinite(rng.exponential(2**32 - 1)[()])


def test_race_draws_the_law():
    """20000 races over one law, one masked token: G-test of the counts."""
    weights = np.array([3.0, 0.0, 1.0, 0.5, 0.01])
    counts = np.zeros(5)
    for seed in range(20000):
        counts[rng.race(weights, seed, 0, 0, rng.DRAFT_TOKEN)] += 1
    assert counts[1] == 0
    keep = weights > 0
    expected = 20000 * weights[keep] / weights.sum()
    statistic = 2 * (counts[keep] * np.log(counts[keep] / expected)).sum()
    assert statistic < 46.0  # chi-square, 3 degrees of freedom: p = 5e-10
    assert rng.race(np.zeros(4), 1, 0, 0, rng.DRAFT_TOKEN) == -1


BAD = [
    (dict(seed=torch.zeros(2)), TypeError, "noise: seed: got torch.float32, expected torch.int64"),
    (dict(block_start=torch.zeros(3).long()), ValueError, r"block_start: got shape \[3\]"),
    (dict(i=-1), ValueError, "noise: i: got -1, expected 0 to"),
    (dict(i=1 << 24), ValueError, "noise: i: got 16777216, expected 0 to"),
    (dict(purpose=0), ValueError, "noise: purpose: got 0, expected a constant"),
    (dict(count=-1), ValueError, "noise: count: got -1, expected 0 to"),
    (dict(kind="normal"), ValueError, "noise: kind: got 'normal', expected one of words"),
    (dict(out=torch.zeros(2, 5)), TypeError, "noise: out: got torch.float32, expected torch.int64"),
]


@pytest.mark.parametrize("change, error, message", BAD, ids=[b[2][:40] for b in BAD])
def test_bad_arguments(change, error, message):
    zeros = torch.zeros(2, dtype=torch.int64)
    good = dict(seed=zeros, block_start=zeros, i=0, purpose=rng.DRAFT_TOKEN, count=5)
    with pytest.raises(error, match=message):
        domino_kernels.noise(**good | change)
