"""row_stats against float64, and bit-equal however the vocabulary is cut."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from domino_kernels import VerifyStatus, combine_row_stats, row_stats, verify_chain_workspace
from domino_kernels.testing import to_numpy

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
INF, NAN = float("inf"), float("nan")


def make(rows, vocab, generator, dtype=torch.float32, spread=3.0):
    logits = (torch.randn(rows, vocab, generator=generator) * spread).to(dtype)
    tokens = torch.randint(0, vocab, (rows,), generator=generator)
    temperature = torch.rand(rows, generator=generator) * 1.5 + 0.1
    return logits, tokens, temperature


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 1), (9, 7), (40, 257), (6, 20011), (3, 151936)], ids=str)
def test_reference(shape, dtype, device, generator):
    logits, tokens, temperature = make(*shape, generator, dtype)
    n = min(5, shape[1])
    arguments = [t.to(device) for t in (logits, tokens, temperature)]
    out = row_stats(*arguments, top_logprobs=n)
    scaled = to_numpy(logits) / temperature.double().numpy()[:, None]
    top = scaled.max(-1, keepdims=True)
    lse = (top + np.log(np.exp(scaled - top).sum(-1, keepdims=True)))[:, 0]
    floor = 4e-7 * (1 + np.abs(lse))
    assert (np.abs(to_numpy(out.lse) - lse) < floor).all()
    assert (out.argmax.cpu() == logits.float().argmax(-1)).all()
    chosen = np.take_along_axis(scaled, tokens.numpy()[:, None], -1)[:, 0] - lse
    assert (np.abs(to_numpy(out.logprob) - chosen) < floor + 4e-7 * np.abs(chosen)).all()
    order = np.argsort(-to_numpy(logits), axis=-1, kind="stable")[:, :n]
    assert (out.top_ids.cpu().numpy() == order).all()
    likeliest = np.take_along_axis(scaled, order, -1) - lse[:, None]
    assert (np.abs(to_numpy(out.top_logprob) - likeliest) < floor[:, None] * 2).all()
    assert not out.status.any()


@pytest.mark.parametrize("temperature", [1.0, 0.05, 1e-7], ids=str)
@pytest.mark.parametrize("shards", [2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shards_give_the_bits_of_the_whole(dtype, shards, temperature, device, generator):
    vocab = 128 * 79 + 5
    logits, tokens, _ = (t.to(device) for t in make(24, vocab, generator, dtype, spread=8.0))
    logits[3], logits[4, 9], logits[5, 10000], logits[6, 77] = -INF, NAN, INF, -INF
    logits[7, :5000] = -INF  # a shard with nothing
    logits[8, [100, 9000]] = 60.0  # a tie across shards
    warm = torch.full((24,), temperature, device=device)
    whole = row_stats(logits, tokens, warm)
    cuts = sorted(np.random.default_rng(shards).choice(np.arange(1, 79), shards - 1, replace=False))
    edges = [0, *(128 * int(c) for c in cuts), vocab]
    parts = [
        row_stats(logits[:, a:b], tokens, warm, vocab_start=a, vocab_total=vocab).partials
        for a, b in pairwise(edges)
    ]
    joined = combine_row_stats(torch.stack(parts[::-1]), tokens, warm, vocab_total=vocab)
    for name in ("lse", "argmax", "logprob", "status"):
        a, b = getattr(joined, name), getattr(whole, name)
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), name
    expected = torch.zeros(24, dtype=torch.uint8, device=device)
    expected[3], expected[4], expected[5] = VerifyStatus.EMPTY_ROW, *[VerifyStatus.NON_FINITE] * 2
    assert torch.equal(whole.status, expected)
    assert whole.argmax[8] == 100


def test_tokens_that_do_not_exist(device):
    logits = torch.zeros(4, 9, device=device)
    tokens = torch.tensor([-1, 9, -7, 8], device=device)
    out = row_stats(logits, tokens)
    assert out.status.tolist() == [0, 4, 4, 0]
    assert out.logprob[:3].tolist() == [0.0] * 3
    assert out.logprob[3].item() == pytest.approx(-np.log(9), abs=1e-6)


def test_temperature_that_is_none(device):
    bad = torch.tensor([NAN, -1.0, INF, 0.0, 1.0], device=device)
    out = row_stats(torch.zeros(5, 130, device=device), None, bad)
    assert out.status.tolist() == [32, 32, 32, 0, 0]
    assert out.lse[3] == out.lse[4] and out.lse[:3].isnan().all()


def test_nothing_comes_of_a_row_without_a_temperature(device, generator):
    """Not what the workspace holds of the call before either."""
    rows, vocab = 3, 3000
    logits = torch.randn(rows, vocab, generator=generator).to(device)
    ones = torch.ones(rows, device=device)
    workspace = verify_chain_workspace(rows, 0, vocab, device=device)
    row_stats(logits, None, ones, top_logprobs=4, workspace=workspace)
    bad = torch.tensor([NAN, -1.0, INF], device=device)
    out = row_stats(logits - 50, None, bad, top_logprobs=4, workspace=workspace)
    assert (out.top_ids == -1).all() and not out.top_logprob.any()
    tops = out.partials.view(torch.float32)[:, 0]
    assert tops.isnan().all() and not out.partials[:, 1:4].any()


def test_likeliest_of_a_masked_row(device):
    logits = torch.full((2, 3000), -INF, device=device)
    logits[0, 2999], logits[0, 5] = 1.0, 1.0
    logits[1] = 0.0  # ties: the lowest ids, also where more tie than are listed
    out = row_stats(logits, top_logprobs=4)
    assert out.top_ids.tolist() == [[5, 2999, -1, -1], [0, 1, 2, 3]]
    assert out.top_logprob[0, 2:].tolist() == [0.0, 0.0]


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"row_stats: logits: got shape \[5\], expected \[R, V\]"):
        row_stats(torch.zeros(5))
    with pytest.raises(TypeError, match=r"row_stats: tokens: got torch\.float32"):
        row_stats(torch.zeros(2, 5), torch.zeros(2))
    with pytest.raises(ValueError, match="row_stats: vocab_start: got 100 and 5 of 105 tokens"):
        row_stats(torch.zeros(2, 5), vocab_start=100)
    with pytest.raises(ValueError, match="row_stats: top_logprobs: got 129, expected 0 to 128"):
        row_stats(torch.zeros(2, 5), top_logprobs=129)
    with pytest.raises(ValueError, match=r"combine_row_stats: partials: got shape \[2, 4\]"):
        combine_row_stats(torch.zeros(2, 4).long(), vocab_total=5)
    with pytest.raises(ValueError, match="combine_row_stats: partials: got none, expected those"):
        combine_row_stats(torch.zeros(0, 4, 5).long(), vocab_total=5)
    with pytest.raises(ValueError, match=r"row_stats: out.argmax: got shape \[1\], expected \[2\]"):
        short = row_stats(torch.zeros(2, 5))._replace(argmax=torch.zeros(1, dtype=torch.int64))
        row_stats(torch.zeros(2, 5), out=short)
    with pytest.raises(TypeError, match="row_stats: out: got str, expected a RowStats"):
        row_stats(torch.zeros(2, 5), out="x")
    with pytest.raises(ValueError, match="combine_row_stats: vocab_total: got -3"):
        combine_row_stats(torch.zeros(1, 4, 5).long(), vocab_total=-3)
