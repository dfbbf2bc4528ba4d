"""dual_ce against float64 autograd, and the Triton row kernel against its torch twin."""

import pytest
import torch

from domino_kernels.ops.train import dual_ce, dual_ce_rows_torch

torch.set_num_threads(1)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def problem(rows=37, hidden=24, rank=5, vocab=203, seed=0):
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(rows, hidden, generator=g, dtype=torch.float64)
    u = torch.randn(rows, rank, generator=g, dtype=torch.float64)
    lm = torch.randn(vocab, hidden, generator=g, dtype=torch.float64) * 0.3
    w2 = torch.randn(vocab, rank, generator=g, dtype=torch.float64) * 0.5
    labels = torch.randint(0, vocab, (rows,), generator=g)
    labels[::7] = -1
    weights = torch.rand(rows, generator=g, dtype=torch.float64)
    return h, u, labels, weights, lm, w2


def autograd_loss(h, u, labels, weights, lm, w2, lam):
    base = h @ lm.t()
    ce = torch.nn.functional.cross_entropy
    keep = labels >= 0
    loss = lam * (weights * ce(base, labels, reduction="none", ignore_index=-1))[keep].sum()
    final = base if u is None else base + u @ w2.t()
    if u is None:
        return (weights * ce(base, labels, reduction="none", ignore_index=-1))[keep].sum()
    return (
        loss
        + (1 - lam) * (weights * ce(final, labels, reduction="none", ignore_index=-1))[keep].sum()
    )


def gradients(fn, h, u, labels, weights, lm, w2, lam, dtype, device="cpu"):
    leaf = [
        None if t is None else t.to(device, dtype).detach().requires_grad_() for t in (h, u, w2)
    ]
    out = fn(leaf[0], leaf[1], labels.to(device), weights.to(device, dtype if dtype.itemsize > 2
             else torch.float32), lm.to(device, dtype), leaf[2], lam)  # fmt: skip
    loss = out if torch.is_tensor(out) else out.loss
    (loss * 1.5).backward()
    return [loss.detach().double().cpu()] + [t.grad.double().cpu() for t in leaf if t is not None]


@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("chunk", [8, 37, 1000])
def test_float64_equals_autograd(lam, chunk):
    args = problem()
    want = gradients(autograd_loss, *args, lam, torch.float64)
    got = gradients(lambda *a: dual_ce(*a, chunk_rows=chunk), *args, lam, torch.float64)
    for g, w in zip(got, want):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-13)


def test_without_a_head_it_is_plain_cross_entropy():
    h, _, labels, weights, lm, _ = problem()
    want = gradients(autograd_loss, h, None, labels, weights, lm, None, 0.3, torch.float64)
    got = gradients(dual_ce, h, None, labels, weights, lm, None, 0.3, torch.float64)
    for g, w in zip(got, want):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_within_three_times_that_of_torch(dtype, device):
    args = tuple(t.to(dtype).double() if t.is_floating_point() else t for t in problem(rows=64))
    exact = gradients(autograd_loss, *args, 0.4, torch.float64)
    torch_ = gradients(autograd_loss, *args, 0.4, dtype, device)
    ours = gradients(lambda *a: dual_ce(*a, chunk_rows=16), *args, 0.4, dtype, device)
    for name, e, t, o in zip(("loss", "hidden", "low_rank", "w2"), exact, torch_, ours):
        scale = e.abs().max().item()
        bound = 3 * (t - e).abs().max().item() + 4 * torch.finfo(dtype).eps * scale
        worst = (o - e).abs().max().item()
        assert worst <= bound, f"{name}: worst error {worst:.3e}, bound {bound:.3e}"


def test_statistics_and_ties_to_the_lowest_id():
    h, u, labels, weights, lm, w2 = problem()
    lm[50] = lm[3] = lm[120] * 0 + lm.sum(0)
    w2[50] = w2[3]
    out = dual_ce(h, u, labels, weights, lm, w2, 0.5)
    base = h @ lm.t()
    final = base + u @ w2.t()
    ce = torch.nn.functional.cross_entropy
    assert torch.equal(out.base_top, base.argmax(-1))
    assert torch.equal(out.final_top, final.argmax(-1))
    assert (out.base_top == 3).any() and not (out.base_top == 50).any()
    want = torch.where(labels < 0, 0.0, ce(base, labels, reduction="none", ignore_index=-1))
    torch.testing.assert_close(out.base_ce, want)
    want = torch.where(labels < 0, 0.0, ce(final, labels, reduction="none", ignore_index=-1))
    torch.testing.assert_close(out.final_ce, want)


@pytest.mark.parametrize("write_grad", [False, True])
@pytest.mark.parametrize("with_delta", [False, True])
@pytest.mark.parametrize("vocab", [63, 64, 200])
def test_triton_rows_equal_torch_rows(vocab, with_delta, write_grad):
    pytest.importorskip("triton")
    from domino_kernels.triton_kernels.dual_ce import dual_ce_rows

    g = torch.Generator().manual_seed(vocab)
    rows, pad = 9, 5
    store = [torch.full((rows, vocab + pad), 7.0, device=DEVICE) for _ in range(4)]
    x = [torch.randn(rows, vocab, generator=g) * 4 for _ in range(2)]
    x[0][2, 17] = x[0][2, 40] = 60.0
    for pair in (store[:2], store[2:]):
        for buf, values in zip(pair, x):
            buf[:, :vocab] = values.to(DEVICE)
    labels = torch.randint(0, vocab, (rows,), generator=g).to(DEVICE)
    labels[4] = -1
    labels[5] = vocab
    weights = torch.rand(rows, generator=g).to(DEVICE)
    labels, weights = (torch.stack((t, t.flip(0)), 1)[:, 0] for t in (labels, weights))
    results = []
    for fn, (base, delta) in ((dual_ce_rows, store[:2]), (dual_ce_rows_torch, store[2:])):
        ce = torch.full((2, rows), 9.0, device=DEVICE)
        top = torch.full((2, rows), 9, dtype=torch.int32, device=DEVICE)
        extra = {"block": 64} if fn is dual_ce_rows else {}
        fn(base[:, :vocab], delta[:, :vocab] if with_delta else None, labels, weights, 0.25, ce,
           top, write_grad=write_grad, **extra)  # fmt: skip
        results.append((ce, top, base, delta))
    (ce, top, base, delta), want = results
    torch.testing.assert_close(ce, want[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(top, want[1]) and top[0, 2] == 17
    torch.testing.assert_close(base, want[2], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(delta, want[3], rtol=1e-4, atol=1e-6)
    assert (base[:, vocab:] == 7).all() and (delta[:, vocab:] == 7).all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"labels": torch.zeros(37, dtype=torch.int32)}, "dual_ce: labels: got torch.int32"),
        ({"low_rank": None}, "dual_ce: w2: got one of"),
        ({"lam": 1.5}, "dual_ce: lam: got 1.5"),
        ({"lm_head": torch.zeros(203, 7)}, "dual_ce: lm_head: got \\(203, 7\\)"),
        ({"w2": torch.zeros(202, 5)}, "dual_ce: w2: got \\(202, 5\\)"),
    ],
)
def test_errors_name_the_argument(change, message):
    names = ("hidden", "low_rank", "labels", "weights", "lm_head", "w2", "lam")
    kwargs = dict(zip(names, (*problem(), 0.5))) | change
    with pytest.raises((TypeError, ValueError), match=message):
        dual_ce(**kwargs)
