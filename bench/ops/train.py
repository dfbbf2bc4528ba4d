"""The dual cross-entropy, loss and gradients together, at the shapes of a training step."""

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import domino_kernels
from bench.ops.head import DTYPE, MODELS, drawer
from bench.registry import Case
from domino_kernels.testing import assert_error_rule, to_numpy

# Slots of a (micro-)batch; the small shape is there for the correctness gate on a CPU.
ROWS = {"small": 512, "smollm2-135m": 16384, "qwen3-4b": 4096, "qwen3-8b": 4096}
SHAPES = {"small": {"H": 64, "G": 32, "R": 16, "V": 3000}, **MODELS}
LAM = 0.5


def torch_loss(hidden, low_rank, labels, weights, lm_head, w2):
    base = hidden @ lm_head.t()
    final = base + low_rank @ w2.t()
    wide = torch.promote_types(base.dtype, torch.float32)
    parts = [cross_entropy(x.to(wide), labels, reduction="none") for x in (base, final)]
    return (weights * (LAM * parts[0] + (1 - LAM) * parts[1])).sum()


def gradients(loss, hidden, low_rank, w2):
    return (loss.detach(), *torch.autograd.grad(loss, (hidden, low_rank, w2)))


@torch.enable_grad()  # the suites run without
def ours(hidden, low_rank, labels, weights, lm_head, w2):
    out = domino_kernels.dual_ce(hidden, low_rank, labels, weights, lm_head, w2, LAM)
    return gradients(out.loss, hidden, low_rank, w2)


@torch.enable_grad()
def unchunked(hidden, low_rank, labels, weights, lm_head, w2):
    loss = torch_loss(hidden, low_rank, labels, weights, lm_head, w2)
    return gradients(loss, hidden, low_rank, w2)


@torch.enable_grad()
def checkpointed(hidden, low_rank, labels, weights, lm_head, w2, chunk=2048):
    """Chunks of 128 blocks, recomputed in the backward: what public trainers do."""
    loss = 0.0
    for rows in torch.arange(len(labels)).split(chunk):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        loss = loss + checkpoint(
            torch_loss, hidden[part], low_rank[part], labels[part], weights[part], lm_head, w2,
            use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
    return gradients(loss, hidden, low_rank, w2)


def dual_ce_case(model):
    hidden, _, rank, vocab = SHAPES[model].values()
    rows = ROWS[model]

    def make(seed, device):
        draw = drawer(seed, device)
        labels = torch.arange(rows, device=device) * 7919 % vocab
        weights = torch.full((rows,), 1 / rows, device=device)
        return (
            draw(rows, hidden).requires_grad_(), draw(rows, rank).requires_grad_(), labels, weights,
            draw(vocab, hidden, scale=3 * hidden**-0.5),
            draw(vocab, rank, scale=2 * rank**-0.5).requires_grad_(),
        )  # fmt: skip

    @torch.enable_grad()
    def check(operands, result):
        h, u, labels, weights, lm_head, w2 = operands
        exact_w2 = torch.zeros(w2.shape, dtype=torch.float64, device=w2.device)
        exact = [[], []]
        for rows_ in torch.arange(len(labels), device=labels.device).split(1024):
            leaves = [t.detach().double().requires_grad_() for t in (h[rows_], u[rows_], w2)]
            loss = torch_loss(
                leaves[0], leaves[1], labels[rows_], weights[rows_].double(), lm_head.double(),
                leaves[2],
            )  # fmt: skip
            _, dh, du, dw2 = gradients(loss, *leaves)
            exact[0].append(dh)
            exact[1].append(du)
            exact_w2 += dw2
        exact = (torch.cat(exact[0]), torch.cat(exact[1]), exact_w2)
        baseline = unchunked(*operands)
        for name, got, want, base in zip(("hidden", "low_rank", "w2"), result[1:], exact,
                                         baseline[1:]):  # fmt: skip
            assert_error_rule(got, to_numpy(want), base, factor=3.0, name=name)

    weights = vocab * (hidden + 2 * rank) + 2 * rows * (hidden + rank)
    return Case(
        op="dual_ce",
        case="loss+grad",
        params={"model": model, "lam": LAM},
        shape={"N": rows, "H": hidden, "R": rank, "V": vocab},
        batch=1,
        make=make,
        providers={"ours": ours, "torch": unchunked, "torch-checkpointed": checkpointed},
        check=check,
        bytes=weights * DTYPE.itemsize,
    )


def cases():
    for model in SHAPES:
        yield dual_ce_case(model)
