"""torch.library.opcheck on every registered schema: mutation annotations, fakes, tracing."""

from importlib import import_module
from pkgutil import iter_modules

import pytest
import torch

import domino_kernels.ops
from domino_kernels.torch_library import OPS

for module in iter_modules(domino_kernels.ops.__path__, "domino_kernels.ops."):
    import_module(module.name)


def gru_step(dtype):
    rows = torch.randn(3, 2, 8)[:, 0]  # strided
    tensors = rows, torch.randn(3, 4), torch.randn(12, 8), torch.randn(12, 4), torch.zeros(3, 4)
    return tuple(t.to(dtype) for t in tensors)


def draft_chain(dtype, shift_label, hidden=8, units=4, rank=6):
    batch, slots, drafts, vocab = 2, 4, 3, 11
    base, rows = torch.randn(batch, slots, vocab), torch.randn(batch, slots, hidden).to(dtype)
    sizes = [(3 * units, hidden), (3 * units, units), (rank, hidden + units), (vocab, rank)]
    weights = [torch.randn(size).to(dtype) for size in [*sizes, (vocab, hidden)]]
    workspace = torch.zeros(1 << 20, dtype=torch.uint8)
    outputs = torch.zeros(batch, drafts, dtype=torch.int64), torch.zeros(batch, drafts)
    outputs += (torch.zeros(batch, dtype=torch.int32), None, None, None, None)
    anchor = torch.tensor([0, 10])
    optional = (None,) * 8  # table, screen, temperature, seed, block_start, num_active, mask, bias
    settings = (shift_label, 1, True, False, 5, False, vocab)
    return (base, rows, anchor, *weights, 0, *optional, *settings, workspace, *outputs)


def drawn_chain():
    sizes = 16, 16, 16  # a GPU draws in the block form alone, which takes multiples of 16
    *inputs, workspace, tokens, scores, restarts = draft_chain(torch.bfloat16, True, *sizes)[:-4]
    warm, number = torch.tensor([0.0, 0.7]), torch.arange(2)
    inputs[11:14] = warm, number, number
    inputs[14:17] = (
        torch.tensor([1], dtype=torch.int32),
        torch.full((2, 1), -1).int(),
        torch.ones(2, 11),
    )
    inputs[19] = False
    pool = torch.zeros(2, 3, 5, dtype=torch.int32), torch.zeros(2, 3, 5)
    law = torch.zeros(2, 3), *pool, torch.zeros(2, 3, 11)
    return (*inputs, workspace, tokens, scores, restarts, *law)


def markov_chain():
    base, _, anchor, *rest = draft_chain(torch.float32, True)
    head = (None, None, None, torch.randn(11, 6), torch.randn(11, 6), 3)
    return (base, None, anchor, *head, *rest[6:])


def expand(dtype, drawn, pooled, recurrent=True):
    batch, slots, vocab, hidden, units, rank, paths, children = 2, 4, 11, 8, 4, 6, 3, 2
    inputs = hidden if recurrent else rank
    sizes = [
        (3 * units, inputs),
        (3 * units, units),
        (rank, hidden + (units if recurrent else rank)),
    ]
    sizes += [(vocab, rank), (vocab, inputs)]
    weights = [torch.randn(size).to(dtype) for size in sizes]
    integers = torch.zeros(batch, paths, dtype=torch.int64)
    per_row = torch.zeros(batch, dtype=torch.int64)
    each = torch.zeros(batch, paths, children)
    return (
        torch.randn(batch, slots, vocab),
        torch.randn(batch, slots, hidden).to(dtype),
        torch.randn(batch, slots, rank) if drawn else None,
        torch.randn(batch, 5, units).to(dtype) if recurrent else None,
        integers if recurrent else None,
        integers.clone(),
        integers.clone() if drawn else None,
        integers.clone() if drawn else None,
        torch.arange(10, dtype=torch.int32).expand(2, 10).contiguous() if pooled else None,
        torch.ones(batch) if drawn else None,
        *((per_row, per_row.clone()) if drawn else (None, None)),
        *(weights[:2] if recurrent else (None, None)),
        *weights[2:],
        None,
        0 if recurrent else 2,
        1,
        True,
        1,
        False,
        torch.zeros(1 << 16, dtype=torch.uint8),
        torch.zeros(batch, paths, children, dtype=torch.int64),
        each,
        each.clone(),
        torch.zeros(batch, paths, units).to(dtype) if recurrent else None,
        torch.zeros(batch, paths, 10 if pooled else vocab) if drawn else None,
    )


def grow_tree(root):
    integers, each = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, 2)
    tree = torch.zeros(2, 9, dtype=torch.int64), torch.zeros(2, 9, dtype=torch.int32)
    return (
        each.long(),
        each,
        each.clone(),
        *((None, None) if root else (integers, torch.zeros(2, 3))),
        0 if root else 3,
        1,
        *tree,
        torch.zeros(2, 9),
        torch.zeros(2, 9),
        *(torch.zeros(2, 4, dtype=torch.int64) for _ in range(3)),
        torch.zeros(2, 4),
    )


def draft_chain_triton(dtype, exact):
    arguments = draft_chain(dtype, True)
    memory = arguments[24:28]  # workspace, tokens, scores, restarts
    return (*arguments[:8], None, True, 1, exact, 4, *memory)


def shortlist(dtype, pools, optional):
    base = torch.randn(3, 4, 70).to(dtype)[:2, 1:]  # strided
    mask = torch.full((2, 3), -1, dtype=torch.int32) if optional else None
    bias, active = (torch.zeros(2, 70), torch.ones(1).int()) if optional else (None, None)
    ids = torch.zeros((2, 5) if pools == 1 else (2, 3, 5), dtype=torch.int32)
    scores = torch.zeros(ids.shape) if optional else None
    return base, 66, mask, bias, active, optional, ids, scores


def vocab_winners(dtype, optional):
    base, w2 = torch.randn(2, 3, 70), torch.randn(70, 16).to(dtype)
    mask = torch.full((2, 3), -1, dtype=torch.int32) if optional else None
    bias, active = (torch.zeros(2, 70), torch.ones(1).int()) if optional else (None, None)
    low_rank = None if optional else torch.randn(2, 3, 16).to(dtype)
    keys = torch.zeros(2, 3, dtype=torch.int64)
    return base, low_rank, w2, 128, 66, mask, bias, active, keys


def noise(kind):
    integers = torch.arange(3)
    dtype = torch.int64 if kind == 0 else torch.float32
    return integers, integers, 2, 1, kind, torch.zeros(3, 6, dtype=dtype)


def verify_chain(sampled, q, ragged, *, edited=False, top=0):
    """q: None, "dense", "pool" or "scalar"."""
    target = torch.randn(2, 5, 7)[:, :4]  # strided
    request = torch.ones(2), torch.arange(2), torch.arange(2)
    draft = {
        None: (None, None, None, None),
        "dense": (torch.randn(2, 3, 7).half(), None, None, torch.ones(2)),
        "pool": (torch.randn(2, 3, 2), torch.tensor([0, 3]).expand(2, 3, 2).int(), None, None),
        "scalar": (None, None, torch.zeros(2, 3), None),
    }[q]
    filters = torch.tensor([2, 0]).int(), torch.full((2,), 0.9), torch.full((2,), 0.1)
    integers = dict(dtype=torch.int32)
    edits = [None] * 7
    if edited:
        edits = [torch.randn(2, 7), *torch.ones(3, 2), torch.ones(2, 1, **integers)]
        allowed = torch.full((8, 1) if ragged else (2, 4, 1), 7, **integers)
        edits += [torch.ones(2, 7, **integers), allowed]
    out = [torch.zeros(2, 4, dtype=torch.int64), *torch.zeros(2, 2, dtype=torch.int32)]
    out += [torch.zeros(2, 4), torch.zeros(2, dtype=torch.uint8)]
    out += [torch.zeros(2, 4, top, **integers), torch.zeros(2, 4, top)] if top else [None, None]
    return (
        target.flatten(0, 1) if ragged else target,
        torch.zeros(2, 3, dtype=torch.int64),
        1 if sampled else 0,
        torch.tensor([1, 4], dtype=torch.uint8) if q == "dense" else None,
        *(request if sampled else (None, None, None)),
        *draft,
        *(filters if edited and sampled else (None, None, None)),
        0,
        *edits,
        7,
        torch.tensor([2], dtype=torch.int32) if edited else None,
        None,
        torch.tensor([0, 3, 7], dtype=torch.int32) if ragged else None,
        *out,
        torch.zeros(200, dtype=torch.int64),
    )


def row_stats(full):
    rows = torch.randn(3, 2, 9)[:, 0]  # strided
    out = [torch.zeros(3), torch.zeros(3).long(), torch.zeros(3), torch.zeros(3).byte()]
    out += [torch.zeros(3, 5).long(), torch.zeros(3, 2).int(), torch.zeros(3, 2)]
    if not full:
        out[2] = out[5] = out[6] = None
    tokens, temperature = torch.arange(3), torch.ones(3)
    inputs = (tokens, temperature) if full else (None, None)
    return (rows, *inputs, 0, 9, *out, torch.zeros(100, dtype=torch.int64))


def combine_row_stats(full):
    out = [torch.zeros(3), torch.zeros(3).long(), torch.zeros(3), torch.zeros(3).byte()]
    if not full:
        out[2] = None
    inputs = (torch.arange(3), torch.ones(3)) if full else (None, None)
    return (torch.zeros(2, 3, 5).long(), *inputs, 9, *out)


def shard_call(q):
    sampled = q is not None
    request = (torch.ones(2), torch.arange(2), torch.arange(2)) if sampled else (None,) * 3
    law = {
        None: (None, None),
        "dense": (torch.randn(2, 2, 9).half(), None),
        "pool": (torch.randn(2, 2, 4), torch.arange(4).int().expand(2, 2, 4)),
    }[q]
    told = torch.ones(2) if sampled else None
    rules = torch.tensor([1, 3], dtype=torch.uint8) if sampled else None
    integers = dict(dtype=torch.int32)
    edits, rows = [None] * 7, [None] * 2
    if sampled:
        edits = [torch.randn(2, 9), *torch.ones(3, 2), torch.ones(2, 1, **integers)]
        edits += [torch.ones(2, 9, **integers), torch.full((5, 1), 7, **integers)]
        rows = [torch.tensor([2], **integers), torch.tensor([0, 3, 5], **integers)]
    logits = torch.randn(5, 9) if sampled else torch.randn(2, 3, 9)
    inputs = logits, torch.zeros(2, 2).long(), int(sampled)
    filters = (torch.tensor([2, 0]).int(), torch.full((2,), 0.9), None) if q else (None,) * 3
    return (*inputs, rules, *request, *law, None, told, *filters, 1, *edits, *rows, 128, 137)


def verify_shard_rows(q):
    shape = 10 if q == "dense" else 6, 8 if q else 5
    return (*shard_call(q), torch.zeros(shape).long(), torch.zeros(100).long())


def verify_shard(q):
    out = [torch.zeros(2, 3).byte(), torch.zeros(2, 3).byte(), torch.zeros(2, 3)]
    out += [torch.zeros(2, 2, 3).long(), torch.zeros(2, 2, 3)]
    out += [torch.zeros(3, 2, 3), torch.zeros(3, 2, 3).long()]
    shape = 3, 10 if q == "dense" else 6, 8 if q else 5
    return (*shard_call(q), torch.zeros(shape).long(), *out)


def verify_tree(rule, sampled, pooled, dense, ragged, logprobs=True):
    batch, nodes, vocab = 2, 4, 7
    lead = (batch * nodes,) if ragged else (batch, nodes)
    target = torch.randn(*lead, vocab)
    request = torch.ones(2), torch.arange(2), torch.arange(2)
    pool = (torch.arange(3).int().expand(*lead, 3), torch.randn(*lead, 3)) if pooled else [None] * 2
    out = [torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int32)]
    out += [*torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 4) if logprobs else None]
    out += [torch.zeros(2, dtype=torch.uint8)]
    return (
        target,
        torch.zeros(lead, dtype=torch.int64),
        torch.zeros(lead, dtype=torch.int32),
        rule,
        *(request if sampled else (None, None, None)),
        *pool,
        torch.randn(*lead, vocab).half() if dense else None,
        torch.ones(2) if pooled else None,
        torch.ones(2, dtype=torch.int32) if pooled else None,
        None,
        None,
        0,
        torch.tensor([0, 3, 7], dtype=torch.int32) if ragged else None,
        *out,
        torch.zeros(1 << 16, dtype=torch.int64),
    )


def build_tree(mask_kind):
    batch, count, nodes = 2, 5, 4
    masks = {
        0: None,
        1: torch.zeros(batch, nodes, nodes, dtype=torch.bool),
        2: torch.zeros(batch, nodes, 1, dtype=torch.int32),
        3: torch.zeros(batch, nodes, 9, dtype=torch.bool),
    }
    wide = [torch.zeros(batch, nodes, dtype=torch.int32) for _ in range(3)]
    return (
        torch.arange(batch),
        torch.arange(batch * count).view(batch, count),
        torch.tensor([[-1, 0, 0, 1, -1]] * batch, dtype=torch.int32),
        torch.randn(batch, count) if mask_kind else None,
        torch.arange(batch),
        mask_kind,
        torch.zeros(batch, nodes, dtype=torch.int64),
        *wide,
        torch.zeros(batch, nodes, dtype=torch.int64),
        masks[mask_kind],
        torch.zeros(batch, dtype=torch.uint8),
    )


def accepted_path():
    return torch.tensor([[0, 2, 3], [0, -1, -1]], dtype=torch.int32), torch.tensor([2, 0]).int()


def compact_accepted():
    tensors = [torch.randn(2, 4, 3), torch.arange(8).view(2, 4)]
    out = [torch.zeros(2, 3, 3), torch.zeros(2, 3, dtype=torch.int64)]
    return *accepted_path(), tensors, out


def kv_move(paged):
    caches = [torch.randn(4, 8, 2, 3) for _ in range(2)]
    if not paged:
        caches = [cache[:2] for cache in caches]
    table = torch.tensor([[0, 1], [3, 2]], dtype=torch.int32) if paged else None
    return caches, *accepted_path(), torch.tensor([1, 0]), table, True


# op -> argument tuples of its OpOverload; an op with several forms lists one of each
SAMPLES = {
    "gru_step": [gru_step(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)],
    "draft_chain": [
        draft_chain(torch.float32, True),
        draft_chain(torch.bfloat16, False),
        markov_chain(),
        drawn_chain(),
    ],
    "draft_chain_triton": [draft_chain_triton(torch.float32, exact) for exact in (True, False)],
    "expand": [
        expand(torch.float32, False, False),
        expand(torch.bfloat16, True, True),
        expand(torch.float16, True, False, recurrent=False),
    ],
    "grow_tree": [grow_tree(True), grow_tree(False)],
    "project_hidden": [(torch.randn(2, 3, 8), torch.randn(5, 12), torch.zeros(2, 3, 5))],
    "shortlist": [shortlist(torch.bfloat16, 1, False), shortlist(torch.float32, 3, True)],
    "vocab_winners": [vocab_winners(torch.bfloat16, i) for i in (False, True)],
    "row_stats": [row_stats(False), row_stats(True)],
    "combine_row_stats": [combine_row_stats(False), combine_row_stats(True)],
    "verify_shard_rows": [verify_shard_rows(q) for q in (None, "dense", "pool")],
    "verify_shard": [verify_shard(q) for q in (None, "dense", "pool")],
    "noise": [noise(kind) for kind in range(3)],
    "verify_chain": [
        verify_chain(False, None, False),
        verify_chain(True, None, True),
        verify_chain(True, "dense", False),
        verify_chain(True, "pool", False, edited=True, top=2),
        verify_chain(True, "scalar", True, edited=True),
    ],
    "verify_tree": [
        verify_tree(0, False, False, False, False, logprobs=False),
        verify_tree(3, True, True, False, True),
        verify_tree(4, True, False, True, False),
    ],
    "build_tree": [build_tree(kind) for kind in range(4)],
    "compact_accepted": [compact_accepted()],
    "kv_move": [kv_move(False), kv_move(True)],
}
CASES = [(name, i) for name, samples in SAMPLES.items() for i in range(len(samples))]


def test_every_op_has_samples():
    assert set(SAMPLES) == set(OPS), "tests/test_schema.py: SAMPLES lists other ops than OPS"


@pytest.mark.parametrize("name, i", CASES, ids=[f"{name}-{i}" for name, i in CASES])
def test_opcheck(name, i, device):
    if name.endswith("_triton"):
        pytest.importorskip("triton")
    move = lambda a: a.to(device) if isinstance(a, torch.Tensor) else a  # noqa: E731
    sample = [[*map(move, a)] if isinstance(a, list) else move(a) for a in SAMPLES[name][i]]
    results = torch.library.opcheck(OPS[name], tuple(sample))
    assert set(results.values()) == {"SUCCESS"}, results
