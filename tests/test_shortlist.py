import pytest
import torch

import domino_kernels
from domino_kernels.testing import Guarded

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# (batch, slots, vocab, size): one of each, all ids, tails of eights and tiles, several blocks
SHAPES = [(1, 1, 1, 1), (2, 3, 37, 5), (1, 2, 300, 300), (3, 4, 1000, 64), (2, 3, 5003, 700)]
FORMS = [False, True]  # portable


def make_logits(kind, shape, dtype, generator):
    logits = torch.randn(shape, generator=generator) * 2.5
    if kind == "ties":
        logits = logits.round()
    elif kind == "zeros":
        logits = torch.zeros(shape)
        logits[..., ::3] = -0.0
    elif kind == "special":
        for start, value in enumerate((float("nan"), -torch.inf, torch.inf)):
            logits[..., start::7] = value
    return logits.to(dtype)


def expected_ids(logits, size, per, vocab_valid=None, mask=None, bias=None):
    """By a stable sort: the definition."""
    values = logits.cpu().float()
    if bias is not None:
        values = values + bias.cpu()[:, None]
    values = torch.where(values.isnan(), -torch.inf, values) + 0.0
    if mask is not None:
        bits = mask.cpu().long()[..., None] >> torch.arange(32) & 1
        allowed = bits.flatten(1)[:, None, : values.size(-1)].bool()
        values = torch.where(allowed, values, -torch.inf)
    if per == "block":
        values = values.amax(1)
    order = values[..., :vocab_valid].sort(dim=-1, descending=True, stable=True).indices
    return order[..., :size].sort(-1).values.int()


def random_mask(batch, vocab, generator):
    words = torch.randint(-(2**31), 2**31, (batch, (vocab + 31) // 32), generator=generator)
    return words.int()


@pytest.mark.parametrize("portable", FORMS, ids=["", "portable"])
@pytest.mark.parametrize("per", ["block", "slot"])
@pytest.mark.parametrize("kind", ["random", "ties", "zeros", "special"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact(shape, dtype, kind, per, portable, device, generator):
    batch, slots, vocab, size = shape
    logits = make_logits(kind, (batch, slots, vocab), dtype, generator)
    out = Guarded((batch, size) if per == "block" else (batch, slots, size), torch.int32, device)
    result = domino_kernels.shortlist(
        logits.to(device), size, per=per, portable=portable, out=out.tensor
    )
    assert result is out.tensor
    assert torch.equal(out.check().cpu(), expected_ids(logits, size, per))


@pytest.mark.parametrize("portable", FORMS, ids=["", "portable"])
@pytest.mark.parametrize("per", ["block", "slot"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mask_bias_and_padded_vocabulary(dtype, per, portable, device, generator):
    batch, slots, vocab, size = 3, 4, 1003, 90
    logits = make_logits("ties", (batch, slots, vocab), dtype, generator)
    mask = random_mask(batch, vocab, generator)
    bias = torch.randn(batch, vocab, generator=generator)
    options = [dict(mask=mask), dict(bias=bias), dict(vocab_valid=500), dict(vocab_valid=size)]
    options.append(dict(mask=mask, bias=bias, vocab_valid=997))
    for option in options:
        on_device = {k: v.to(device) if hasattr(v, "to") else v for k, v in option.items()}
        actual = domino_kernels.shortlist(
            logits.to(device), size, per=per, portable=portable, **on_device
        )
        assert torch.equal(actual.cpu(), expected_ids(logits, size, per, **option)), list(option)


def test_fewer_allowed_than_wanted(device):
    """Ids that are not allowed count as -inf and come last, the lowest first."""
    logits = torch.arange(64.0).expand(1, 2, 64).contiguous().to(device)
    mask = torch.tensor([[0, 1 << 31 - 2 | 1]], dtype=torch.int32, device=device)  # 32 and 61
    ids = domino_kernels.shortlist(logits, 4, mask=mask)
    assert ids.tolist() == [[0, 1, 32, 61]]


@pytest.mark.parametrize("portable", FORMS, ids=["", "portable"])
def test_strided_and_unaligned(portable, device, generator):
    wide = make_logits("random", (3, 6, 1005), torch.bfloat16, generator)
    view = wide[:, 1:5, 1:1002]  # rows start at odd addresses
    whole = wide.to(device)[:, 1:5, 1:1002]
    for per in ("block", "slot"):
        actual = domino_kernels.shortlist(whole, 33, per=per, portable=portable)
        assert torch.equal(actual.cpu(), expected_ids(view, 33, per))


@pytest.mark.parametrize("portable", FORMS, ids=["", "portable"])
def test_num_active_rows_only(portable, device, generator):
    logits = make_logits("random", (4, 2, 300), torch.bfloat16, generator).to(device)
    for active in (0, 1, 3, 4, 9):
        out = torch.full((4, 8), -5, dtype=torch.int32, device=device)
        count = torch.tensor([active], dtype=torch.int32, device=device)
        domino_kernels.shortlist(logits, 8, num_active=count, portable=portable, out=out)
        expected = expected_ids(logits, 8, "block")
        expected[active:] = -5
        assert torch.equal(out.cpu(), expected), active


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_vocabulary_on_every_cluster_size(dtype):
    generator = torch.Generator("cuda").manual_seed(3)
    for batch in (1, 3, 9, 20, 70, 140):
        logits = torch.randn(batch, 3, 40001, generator=generator, device="cuda").to(dtype)
        values = logits.float().amax(1)
        ids = domino_kernels.shortlist(logits, 1000)
        assert torch.equal(ids, domino_kernels.shortlist(logits, 1000, portable=True))
        last = values.topk(1000).values[:, -1:]
        above = (values > last).sum(1)
        taken = values.gather(1, ids.long())
        assert (taken >= last).all() and ((taken > last).sum(1) == above).all()
        assert (ids.diff(dim=1) > 0).all()


@pytest.mark.gpu
def test_graph_replays_with_other_inputs(graph_replay):
    logits = torch.randn(2, 4, 3000, device="cuda").bfloat16()
    out = torch.empty(2, 100, dtype=torch.int32, device="cuda")
    active = torch.tensor([2], dtype=torch.int32, device="cuda")
    replay = graph_replay(lambda: domino_kernels.shortlist(logits, 100, num_active=active, out=out))
    for rows in (2, 1):
        logits.copy_(torch.randn(2, 4, 3000))
        active.fill_(rows)
        out.fill_(-1)
        replay()
        expected = expected_ids(logits, 100, "block")
        expected[rows:] = -1
        assert torch.equal(out.cpu(), expected)


def test_errors():
    logits = torch.zeros(2, 3, 40)
    mask = torch.zeros(2, 2, dtype=torch.int32)
    cases = [
        ((logits[0], 4), {}, r"base_logits: got shape \[3, 40\], expected \[B, S, V\]"),
        ((logits, 41), {}, r"size: got 41, expected 1\.\.40"),
        ((logits, 0), {}, r"size: got 0, expected 1\.\.40"),
        ((logits, 11), {"vocab_valid": 10}, r"size: got 11, expected 1\.\.10"),
        ((logits, 4), {"vocab_valid": 41}, r"vocab_valid: got 41, expected 1\.\.40"),
        ((logits, 4), {"per": "row"}, 'per: got \'row\', expected "block" or "slot"'),
        ((logits, 4), {"mask": mask[:1]}, r"mask: got shape \[1, 2\], expected \[2, 2\]"),
        ((logits, 4), {"mask": mask.long()}, "mask: got torch.int64, expected torch.int32"),
        ((logits, 4), {"bias": logits[0]}, r"bias: got shape \[3, 40\], expected \[2, 40\]"),
        ((logits, 4), {"num_active": mask}, r"num_active: got shape \[2, 2\], expected \[1\]"),
        ((logits.double(), 4), {}, "base_logits: got torch.float64, expected one of"),
    ]
    for arguments, options, message in cases:
        with pytest.raises((TypeError, ValueError), match="shortlist: " + message):
            domino_kernels.shortlist(*arguments, **options)
