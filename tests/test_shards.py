from itertools import pairwise

import pytest
import torch

import domino_kernels
from domino_kernels.testing import Guarded

VOCAB, RANK = 1500, 48  # five shards of 128 to 604 ids
EDGES = [0, 128, 640, 768, 896, 1500]
SHARDS = list(pairwise(EDGES))


def make(dtype, base_dtype, device, generator, batch=3, slots=4):
    draw = lambda *size: torch.randn(size, generator=generator)  # noqa: E731
    base = draw(batch, slots + 1, VOCAB).round() * 2  # ties
    low_rank, w2 = draw(batch, slots, RANK) * 0.2, draw(VOCAB, RANK)
    w2[::2] = 0.0  # ties stay ties
    base, low_rank, w2 = base.to(base_dtype), low_rank.to(dtype), w2.to(dtype)
    return base.to(device)[:, 1:], low_rank.to(device), w2.to(device)


def options_of(first, last, mask, bias, valid):
    return {
        "mask": mask[:, first // 32 : (last + 31) // 32],
        "bias": bias[:, first:last],
        "vocab_valid": max(0, min(last, valid) - first),
    }


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fp32_base", [False, True])
def test_winners_join_to_the_bits_of_the_whole(dtype, fp32_base, corrected, device, generator):
    base_dtype = torch.float32 if fp32_base else dtype
    base, low_rank, w2 = make(dtype, base_dtype, device, generator)
    low_rank = low_rank if corrected else None
    whole = domino_kernels.vocab_winners(base, low_rank, w2)
    parts = [
        domino_kernels.vocab_winners(base[..., a:b], low_rank, w2[a:b], first_id=a)
        for a, b in SHARDS
    ]
    assert torch.equal(torch.stack(parts).amax(0), whole)
    ids, scores = domino_kernels.join_winners(torch.stack(parts))
    exact = base.double()
    if corrected:
        exact = exact + low_rank.double() @ w2.double().T
    assert torch.equal(ids, exact.argmax(-1))  # torch takes the lowest of equals on CPU and CUDA
    assert torch.allclose(scores.double(), exact.amax(-1), rtol=1e-5, atol=1e-5)


def test_winners_with_mask_bias_and_padding(device, generator):
    base, low_rank, w2 = make(torch.bfloat16, torch.float32, device, generator)
    mask = torch.randint(-(2**31), 2**31, (3, 47), generator=generator).int().to(device)
    bias = torch.randn(3, VOCAB, generator=generator).to(device)
    for valid in (1500, 1000, 700):
        whole = domino_kernels.vocab_winners(
            base, low_rank, w2, mask=mask, bias=bias, vocab_valid=valid
        )
        parts = []
        for a, b in SHARDS:
            option = options_of(a, b, mask, bias, valid)
            parts.append(
                domino_kernels.vocab_winners(
                    base[..., a:b], low_rank, w2[a:b], first_id=a, **option
                )
            )
        assert torch.equal(torch.stack(parts).amax(0), whole)
        exact = base.double() + bias.double()[:, None] + low_rank.double() @ w2.double().T
        allowed = mask.long()[..., None] >> torch.arange(32, device=device) & 1
        exact[~allowed.flatten(1)[:, None, :VOCAB].bool().expand_as(exact)] = -torch.inf
        exact[..., valid:] = -torch.inf
        ids, _ = domino_kernels.join_winners(whole[None])
        assert torch.equal(ids, exact.argmax(-1))


def test_a_row_alone_and_rows_left_alone(device, generator):
    base, low_rank, w2 = make(torch.bfloat16, torch.bfloat16, device, generator, batch=70)
    keys = domino_kernels.vocab_winners(base, low_rank, w2)
    for b in (0, 33, 69):
        alone = domino_kernels.vocab_winners(base[b : b + 1], low_rank[b : b + 1], w2)
        assert torch.equal(alone, keys[b : b + 1])
    out = Guarded((70, 4), torch.int64, device)
    active = torch.tensor([5], dtype=torch.int32, device=device)
    domino_kernels.vocab_winners(base, low_rank, w2, num_active=active, out=out.tensor)
    written = out.check(all_written=False)
    assert torch.equal(written[:5], keys[:5]) and bool((written[5:] == out.poison).all())


def test_special_values(device):
    base = torch.full((1, 4, 256), -torch.inf)
    base[0, 0] = torch.nan
    base[0, 1, 200], base[0, 1, 100] = torch.inf, torch.nan
    base[0, 2, 130] = -1.5
    w2 = torch.zeros(256, 16, dtype=torch.bfloat16, device=device)
    base = base.to(device)
    parts = [
        domino_kernels.vocab_winners(base[..., a : a + 128], None, w2[:128], first_id=a)
        for a in (0, 128)
    ]
    ids, scores = domino_kernels.join_winners(torch.stack(parts))
    assert ids.tolist() == [[0, 200, 130, 0]]
    assert scores[0, 0].isnan() and scores[0, 1:].tolist() == [torch.inf, -1.5, -torch.inf]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("per", ["block", "slot"])
def test_shortlists_join_to_the_whole(per, dtype, device, generator):
    size = 100
    base = (torch.randn(3, 4, VOCAB, generator=generator).round() * 2).to(device, dtype)
    expected = domino_kernels.shortlist(base, size, per=per, return_scores=True)
    ids, scores = [], []
    for a, b in SHARDS:
        part = domino_kernels.shortlist(base[..., a:b], size, per=per, return_scores=True)
        ids.append(part[0] + a)
        scores.append(part[1])
    joined = domino_kernels.join_shortlists(torch.stack(ids), torch.stack(scores), size)
    assert torch.equal(joined[0], expected[0]) and torch.equal(joined[1], expected[1])
    values = base.float().amax(1) if per == "block" else base.float()
    assert torch.equal(expected[1], values.gather(-1, expected[0].long()))


def test_errors():
    base, w2 = torch.zeros(2, 3, 256), torch.zeros(256, 8)
    low_rank = torch.zeros(2, 3, 8)
    cases = [
        ((base, low_rank[:, :2], w2), {}, r"low_rank: got shape \[2, 2, 8\], expected"),
        ((base, low_rank, w2[:9]), {}, r"w2: got shape \[9, 8\], expected \[256, 8\]"),
        ((base, low_rank, w2), {"first_id": 64}, "first_id: got 64, expected a multiple of 128"),
        ((base, low_rank, w2), {"vocab_valid": -1}, r"vocab_valid: got -1, expected 0\.\.256"),
        ((base.half(), low_rank, w2), {}, "base_logits: got torch.float16, expected one of"),
    ]
    for arguments, options, message in cases:
        with pytest.raises((TypeError, ValueError), match="vocab_winners: " + message):
            domino_kernels.vocab_winners(*arguments, **options)
    with pytest.raises(ValueError, match="join_shortlists: ids: got shapes"):
        domino_kernels.join_shortlists(torch.zeros(2, 1, 3), torch.zeros(2, 1, 4), 2)
    with pytest.raises(TypeError, match=r"join_winners: keys: got torch\.float32"):
        domino_kernels.join_winners(torch.zeros(2, 3))
