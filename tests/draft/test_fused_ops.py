"""The layer steps in Triton against their Torch twins; under the interpreter in fp32."""

import os
import subprocess
import sys

import pytest
import torch
from domino_draft import cache_ops, row_ops


def close(got, expected, tolerance):
    error = (got.double() - expected.double()).abs().max().item()
    scale = max(expected.double().abs().max().item(), 1.0)
    assert error <= tolerance * scale, f"{error} of {scale}"


def twin(function, *args, **kwargs):
    """The Torch algebra, in fp64 where a tensor is a float."""
    wide = [a.cpu().double() if torch.is_tensor(a) and a.is_floating_point() else a for a in args]
    wide = [a.cpu() if torch.is_tensor(a) else a for a in wide]
    kept = row_ops._interpret
    row_ops._interpret = False
    try:
        return function(*wide, **kwargs)
    finally:
        row_ops._interpret = kept


def check_linear(device, dtype, tolerance):
    workspace = row_ops.Workspace(device)
    torch.manual_seed(1)
    for rows, n, k in [(1, 40, 48), (5, 96, 80), (16, 64, 288), (33, 48, 64)]:
        x = torch.randn(rows, 2 * k, device=device, dtype=dtype)[:, :k]
        weight = torch.randn(n, k, device=device, dtype=dtype) / k**0.5
        norm = torch.randn(k, device=device, dtype=dtype), 1e-5
        wide_norm = norm[0].cpu().double(), 1e-5
        bias = torch.randn(n, device=device, dtype=dtype)
        residual = torch.randn(rows, 2 * n, device=device, dtype=dtype)[:, :n]
        cpu = lambda t: t.cpu().double()  # noqa: E731
        got = row_ops.linear(x, weight, workspace, norm=norm, bias=bias)
        close(
            got.cpu(),
            twin(row_ops.linear, x, weight, None, norm=wide_norm, bias=cpu(bias)),
            tolerance,
        )
        got = row_ops.linear(x, weight, workspace, norm=norm, glu=True)
        close(got.cpu(), twin(row_ops.linear, x, weight, None, norm=wide_norm, glu=True), tolerance)
        expected = twin(row_ops.linear, x, weight, None, residual=cpu(residual))
        for splits, stream, m in (
            (1, 0, 16),
            (1, 0, None),
            (3, 0, None),
            (1, 1, None),
            (2, 1, None),
        ):
            plan = row_ops.LinearPlan(32, 32, splits, 4, 3, bool(stream), block_m=m)
            if n % 64 == 0 and (stream or splits == 1):
                got = row_ops.linear(x, weight, workspace, norm=norm, glu=True, plan=plan)
                wide = twin(row_ops.linear, x, weight, None, norm=wide_norm, glu=True)
                close(got.cpu(), wide, tolerance)
            held = residual.clone()
            into = torch.empty(rows, 3 * n, device=device, dtype=dtype)[:, :n]
            first = row_ops.linear(x, weight, workspace, residual=held, out=into, plan=plan)
            second = row_ops.linear(x, weight, workspace, residual=held, out=held, plan=plan)
            close(first.cpu(), expected, tolerance)
            assert torch.equal(first, second)  # whatever the order of arrival
            assert not workspace.counters.any()
            if m is not None:  # tiles of rows: a row is the same by itself
                last = row_ops.linear(x[-1:], weight, workspace, residual=residual[-1:], plan=plan)
                assert torch.equal(last, first[-1:])


def check_head(device, dtype, tolerance):
    """An LM head in turns of a few programs; on a GPU in fp8, too."""
    torch.manual_seed(5)
    for rows, n, k in [(1, 500, 80), (15, 3000, 288), (33, 257, 64), (64, 130, 1056)]:
        x = torch.randn(rows, k, device=device, dtype=dtype)
        weight = torch.randn(n, k, device=device, dtype=dtype) / k**0.5
        got = row_ops._stream_head(x, weight, dtype)
        close(got.cpu(), twin(row_ops.lm_head, x, weight), tolerance)
        if device == "cuda" and n % 16 == 0 and k % 16 == 0:
            quantised = row_ops.Fp8Weight.of(weight)
            q, scale = row_ops.quantise_rows(x)
            got = row_ops._stream_head(q, quantised.values, dtype, (scale, quantised.scale))
            wide = [t.cpu().double() for t in (q, scale, quantised.values, quantised.scale)]
            close(got.cpu(), (wide[0] * wide[1]) @ (wide[2] * wide[3]).t(), tolerance)


def check_large_rows(device):
    """fp16: a channel times its weight in the norm is more than it holds; normed it is not."""
    torch.manual_seed(3)
    x = torch.randn(3, 64, device=device, dtype=torch.float16)
    x[:, 5] = 3e4
    norm = torch.full((64,), 4.0, device=device, dtype=torch.float16)
    weight = torch.randn(48, 64, device=device, dtype=torch.float16) / 8
    got = row_ops.linear(x, weight, row_ops.Workspace(device), norm=(norm, 1e-5))
    wide = norm.cpu().double(), 1e-5
    close(got.cpu(), twin(row_ops.linear, x, weight, None, norm=wide), 4e-3)


def check_rows(device, dtype, tolerance):
    torch.manual_seed(2)
    for rows, k in [(1, 32), (7, 100)]:
        x = torch.randn(rows, k + 4, device=device, dtype=dtype)[:, :k]
        weight = torch.randn(k, device=device, dtype=dtype)
        close(
            row_ops.rms_norm(x, weight, 1e-6).cpu(),
            twin(row_ops.rms_norm, x, weight, 1e-6),
            tolerance,
        )
        delta, total = torch.randn(rows, k, device=device, dtype=dtype), torch.empty_like(x)
        wide = torch.empty(rows, k, dtype=torch.float64)
        expected = twin(row_ops.rms_norm, x, weight, 1e-6, delta, wide)
        close(row_ops.rms_norm(x, weight, 1e-6, delta, total).cpu(), expected, tolerance)
        close(total.cpu(), x.cpu().double() + delta.cpu().double(), tolerance)
        gates = torch.randn(rows, 2 * k, device=device, dtype=dtype)
        close(row_ops.silu_mul(gates).cpu(), twin(row_ops.silu_mul, gates), tolerance)


SHAPES = [  # tokens, heads, kv heads, dim
    (1, 9, 3, 64),
    (16, 4, 2, 32),
    (5, 4, 2, 8),
    (17, 8, 2, 16),
]
FORMS = [dict(), dict(causal=False), dict(window=6), dict(normed=True, causal=False)]


def check_attend(device, dtype, tolerance, forms, tokens, heads, kv_heads, dim):
    torch.manual_seed(tokens)
    lengths = torch.tensor([0, 5, 64, 99, 126], device=device)
    batch, room = 5, 128
    rope = cache_ops.rope_table(1e4 ** (-torch.arange(0, dim, 2, device=device) / dim), 160)
    workspace = row_ops.Workspace(device)
    for form in forms:
        form = dict(form)
        normed = form.pop("normed", False)
        qkv = torch.randn(batch * tokens, (heads + 2 * kv_heads) * dim, device=device, dtype=dtype)
        keys, values = torch.randn(2, batch + 1, kv_heads, room, dim, device=device, dtype=dtype)
        for row, length in enumerate(lengths.tolist()):
            keys[row, :, length:] = values[row, :, length:] = float("nan")  # not to be read
        settings = dict(heads=heads, scale=dim**-0.5, eps=1e-6, **form)
        norms = torch.randn(2, dim, device=device, dtype=dtype)
        given = dict(q_norm=norms[0], k_norm=norms[1]) if normed else {}
        wide = {name: norm.cpu().double() for name, norm in given.items()}
        wide_keys, wide_values = keys.cpu().double(), values.cpu().double()
        expected = twin(
            cache_ops.attend, qkv, wide_keys, wide_values, lengths, rope, None, **settings, **wide
        )
        inside = lengths.cpu()[:, None] + torch.arange(tokens) < room
        if not form.get("causal", True):
            inside &= inside[:, -1:]  # a block that reaches over the end is not seen whole
        # On a GPU each is a compilation: the one with more parts than a small batch is given.
        plans = [cache_ops.AttendPlan(16, 32, 1, 4, 2), cache_ops.AttendPlan(32, 16, 4, 4, 1), None]
        for plan in plans if device == "cpu" else plans[1:]:
            k, v = keys.clone(), values.clone()
            got = cache_ops.attend(
                qkv, k, v, lengths, rope, workspace, plan=plan, **settings, **given
            )
            shape = (batch, tokens, heads * dim)
            close(got.cpu().view(shape)[inside], expected.view(shape)[inside], tolerance)
            assert not workspace.counters.any()
            for row, length in enumerate(lengths.tolist()):
                end = min(length + tokens, room)
                close(k[row, :, :end].cpu(), wide_keys[row, :, :end], tolerance)
                close(v[row, :, :end].cpu(), wide_values[row, :, :end], tolerance)
                assert end == room or k[row, :, end:].isnan().all()
            assert torch.equal(k[batch], keys[batch])


def random_trees(batch, tokens):
    """(depths int64 [B, T], packed mask int32 [B, T, words]): each node on an earlier one."""
    depths = torch.zeros(batch, tokens, dtype=torch.int64)
    mask = torch.zeros(batch, tokens, -(-tokens // 32), dtype=torch.int64)
    for row in range(batch):
        for node in range(tokens):
            if node:
                parent = int(torch.randint(0, node, ()))
                mask[row, node] = mask[row, parent]
                depths[row, node] = depths[row, parent] + 1
            mask[row, node, node // 32] |= 1 << (node % 32)
    mask = torch.where(mask >= 1 << 31, mask - (1 << 32), mask)
    return depths, mask.int()


def check_rows_of_their_own(device, dtype, tolerance, tokens, form):
    """Attention, its cache, and the first step, where rows have different tokens or are trees."""
    torch.manual_seed(tokens)
    heads, kv_heads, dim, batch, room = 4, 2, 16, 4, 128
    lengths = torch.tensor([0, 5, 64, 80], device=device)
    rope = cache_ops.rope_table(1e4 ** (-torch.arange(0, dim, 2, device=device) / dim), 160)
    total, starts, window = batch * tokens, None, None
    if form == "ragged":
        starts = torch.tensor([0, 1, 1 + tokens, 3 + tokens, 7 + tokens], dtype=torch.int32)
        total = int(starts[-1])
        rows = cache_ops.Rows(tokens, starts.to(device))
        cpu = cache_ops.Rows(tokens, starts)
    else:
        window = 7 if form == "sliding tree" else None
        depths, mask = random_trees(batch, tokens)
        positions = lengths.cpu()[:, None] + depths
        rows = cache_ops.Rows(tokens, None, positions.to(device), mask.to(device))
        cpu = cache_ops.Rows(tokens, None, positions, mask)
    qkv = torch.randn(total, (heads + 2 * kv_heads) * dim, device=device, dtype=dtype)
    keys, values = torch.randn(2, batch, kv_heads, room, dim, device=device, dtype=dtype)
    settings = dict(heads=heads, scale=dim**-0.5, window=window)
    wide = keys.cpu().double(), values.cpu().double()
    expected = twin(cache_ops.attend, qkv, *wide, lengths, rope, None, rows=cpu, **settings)
    workspace = row_ops.Workspace(device)
    for plan in (cache_ops.AttendPlan(16, 32, 1, 4, 2), cache_ops.AttendPlan(32, 16, 4, 4, 1)):
        k, v = keys.clone(), values.clone()
        got = cache_ops.attend(
            qkv, k, v, lengths, rope, workspace, rows=rows, plan=plan, **settings
        )
        close(got.cpu(), expected, tolerance)
        close(k.cpu(), wide[0], tolerance)
        close(v.cpu(), wide[1], tolerance)
    if form != "ragged":
        return
    cache = torch.zeros(1, 2, batch, kv_heads, room, dim, device=device, dtype=dtype)
    wide = cache.cpu().double()
    context = qkv[:, heads * dim :].contiguous()
    twin(cache_ops.rotate_store, context, wide, lengths, rope, rows=cpu)
    cache_ops.rotate_store(context, cache, lengths, rope, rows=rows)
    close(cache.cpu(), wide, tolerance)
    table = torch.randn(31, 24, device=device)
    anchors = torch.randint(0, 31, (batch,), device=device)
    drafts = torch.randint(-1, 31, (batch, tokens - 1), device=device)
    got = cache_ops.embed(anchors, table, tokens, drafts=drafts, starts=rows.starts, total=total)
    ids = torch.cat([anchors[:, None], drafts.clamp(min=0)], 1).cpu()
    counts = (starts[1:] - starts[:-1]).tolist()
    wanted = torch.cat([row[:n] for row, n in zip(ids, counts)])
    assert torch.equal(got.cpu(), table.cpu()[wanted])


def check_rotate_store(device, dtype, tolerance):
    """As for a prompt (queries, with and without norms), and for the context of two layers."""
    torch.manual_seed(3)
    kv_heads, room, dim, batch, tokens = 3, 24, 16, 3, 5
    lengths = torch.tensor([0, 9, 21], device=device)
    rope = cache_ops.rope_table(1e4 ** (-torch.arange(0, dim, 2, device=device) / dim), 40)
    for layers, heads, normed in [(1, 6, True), (1, 6, False), (2, 0, True)]:
        shape = layers, 2, batch + 1, kv_heads, room, dim
        cache = torch.zeros(shape, device=device, dtype=dtype)
        width = layers * (heads + 2 * kv_heads) * dim
        qkv = torch.randn(batch * tokens, width, device=device, dtype=dtype)
        norms = torch.randn(layers + 1, dim, device=device, dtype=dtype)
        given = dict(q_norm=norms[0], k_norm=norms[1:]) if normed else {}
        wide = {name: norm.cpu().double() for name, norm in given.items()}
        wide_qkv, wide_cache = qkv.cpu().double(), cache.cpu().double()
        settings = dict(heads=heads, eps=1e-6)
        places = torch.tensor([3, -1, 0]) if normed else None
        wide["places"], given["places"] = places, None if places is None else places.to(device)
        twin(cache_ops.rotate_store, wide_qkv, wide_cache, lengths, rope, **settings, **wide)
        cache_ops.rotate_store(qkv, cache, lengths, rope, **settings, **given)
        assert places is None or not (wide_cache[:, :, 1:3].any() or cache[:, :, 1:3].any())
        assert wide_cache.any()
        close(cache.cpu(), wide_cache, tolerance)
        close(qkv.cpu(), wide_qkv, tolerance)


def check_ring(device, dtype, tolerance):
    """A ring as short as its window allows, against a whole cache; what is stored in it."""
    torch.manual_seed(6)
    heads, kv_heads, dim, room, tokens, window = 4, 2, 16, 96, 5, 7
    length = window + tokens - 1
    lengths = torch.tensor([0, 3, 10, 11, 41, 86], device=device)
    batch = len(lengths)
    rope = cache_ops.rope_table(1e4 ** (-torch.arange(0, dim, 2, device=device) / dim), room)
    workspace = row_ops.Workspace(device)
    settings = dict(heads=heads, scale=dim**-0.5, window=window)
    qkv = torch.randn(batch * tokens, (heads + 2 * kv_heads) * dim, device=device, dtype=dtype)
    whole = torch.randn(2, batch, kv_heads, room, dim, device=device, dtype=dtype)
    ring = torch.full((2, batch, kv_heads, length, dim), float("nan"), device=device, dtype=dtype)
    for row, end in enumerate(lengths.tolist()):
        for position in range(max(0, end - window + 1), end):  # no other may be read
            ring[:, row, :, position % length] = whole[:, row, :, position]
    for causal in (True, False):
        form = settings | dict(causal=causal)
        wide, kept = whole.cpu().double(), ring.cpu().double()
        expected = twin(cache_ops.attend, qkv, *wide, lengths, rope, None, **form)
        close(
            twin(cache_ops.attend, qkv, *kept, lengths, rope, None, ring=True, **form),
            expected,
            1e-6,
        )
        plans = [cache_ops.AttendPlan(16, 32, 1, 4, 2), cache_ops.AttendPlan(32, 16, 4, 4, 1), None]
        for plan in plans if device == "cpu" else plans[1:]:
            held = ring.clone()
            got = cache_ops.attend(
                qkv, *held, lengths, rope, workspace, plan=plan, ring=True, **form
            )
            close(got.cpu(), expected, tolerance)
            for cache in (held, kept):
                for row, end in enumerate(lengths.tolist()):
                    for position in range(max(0, end - window + 1), end + tokens):
                        place = cache[:, row, :, position % length].cpu()
                        close(place, wide[:, row, :, position], tolerance)
    with pytest.raises(ValueError, match="attend: ring: got 11 places for a window of 8"):
        cache_ops.attend(
            qkv, *ring, lengths, rope, workspace, ring=True, **settings | dict(window=8)
        )

    # Context of layers 1 and 2 of three; prompts longer than the ring, some of them padded.
    width, tokens = 2 * kv_heads * dim, 14
    norms = torch.randn(2, dim, device=device, dtype=dtype)
    kv = torch.randn(batch * tokens, 3 * width, device=device, dtype=dtype)[:, width:]
    counts = torch.tensor([14, 3, 1, 14, 11, 5], device=device)
    places = torch.tensor([5, 1, 2, 3, -1, 0], device=device)
    for start, place in ((torch.zeros_like(lengths), places), (lengths - lengths // 8, None)):
        begin = torch.full((2, 2, batch, kv_heads, length, dim), 9.0, device=device, dtype=dtype)
        given = dict(eps=1e-6, counts=counts.cpu(), k_norm=norms.cpu().double())
        whole = torch.zeros(2, 2, batch, kv_heads, room, dim, dtype=torch.float64)
        at = None if place is None else place.cpu()
        twin(cache_ops.rotate_store, kv, whole, start, rope, places=at, **given | dict(counts=None))
        expected = begin.cpu().double()
        for row, (first, count) in enumerate(zip(start.tolist(), counts.tolist())):
            to = row if place is None else place[row]
            for position in range(first + max(0, count - length), first + count):
                if to >= 0:
                    expected[:, :, to, :, position % length] = whole[:, :, to, :, position]
        wide = begin.cpu().double()
        twin(cache_ops.rotate_store, kv, wide, start, rope, places=at, ring=True, **given)
        close(wide, expected, 1e-6)
        given = dict(eps=1e-6, counts=counts, k_norm=norms)
        cache_ops.rotate_store(kv, begin, start, rope, places=place, ring=True, **given)
        close(begin.cpu(), expected, tolerance)
    with pytest.raises(ValueError, match="rotate_store: counts: got None, expected some with 14"):
        cache_ops.rotate_store(kv, begin, lengths, rope, ring=True)


def check_allot(device):
    """The same tokens as by sorting; ties, rows without a request, NaN, all and none."""
    torch.manual_seed(4)
    for rows, drafts, total in [(4, 7, 12), (3, 15, 40), (1, 3, 2), (6, 15, 96), (5, 7, 5)]:
        log_probs = -torch.rand(rows, drafts) * 3 * torch.rand(rows, 1)
        log_probs[0] = 0.0
        limits = torch.full((rows,), 9)
        if rows > 3:
            limits[1], log_probs[2, 2] = 0, float("nan")
        wanted = twin(cache_ops.allot, log_probs.float(), limits, total)
        got = cache_ops.allot(log_probs.to(device), limits.to(device), total)
        assert got.tolist() == wanted.tolist()
        counts = (wanted[1:] - wanted[:-1]).tolist()
        assert sum(counts) == total and min(counts) >= 1 and max(counts) <= drafts + 1
        if total == 12:
            assert counts[0] == 8 and counts[1] == 1


def check_ends(device):
    """The first and last step of a cycle: ids and lengths, exactly."""
    check_allot(device)
    from domino_kernels.ops.verify import VerifyResult

    table = torch.randn(11, 24, device=device)
    anchors = torch.tensor([3, 10], device=device)
    drafts = torch.tensor([[4, -1], [0, 9]], device=device)
    got = cache_ops.embed(anchors, table, 3, drafts=drafts)
    assert torch.equal(got, table[torch.tensor([3, 4, 0, 10, 0, 9], device=device)])
    got = cache_ops.embed(anchors, table, 3, mask_id=7)
    assert torch.equal(got, table[torch.tensor([3, 7, 7, 10, 7, 7], device=device)])

    tokens = torch.tensor([[4, 8, -1], [-1, -1, -1], [1, 2, 3]], device=device)
    accepted = torch.tensor([1, 0, 2], dtype=torch.int32, device=device)
    status = torch.tensor([0, 1, 0], dtype=torch.uint8, device=device)
    result = VerifyResult(tokens, accepted, accepted, tokens.float(), status)
    lengths = torch.tensor([7, 5, 20], device=device)
    limits = torch.tensor([30, 30, 21], device=device)
    anchors, line = torch.zeros_like(lengths), torch.zeros(3, 5, dtype=torch.int64, device=device)
    cache_ops.commit(result, anchors, lengths, limits, line)
    assert anchors.tolist() == [8, 0, 3] and lengths.tolist() == [9, 6, 21]
    assert line.tolist() == [[1, 0, 4, 8, -1], [0, 1, -1, -1, -1], [2, 0, 1, 2, 3]]
    for width in (40, 4100):  # one block of a row, and more
        features = torch.randn(3, width, device=device)
        held = torch.zeros(4, 2, width, device=device)
        turns = torch.tensor([0, 1, 2, 1], device=device)  # the third row's places are full
        cache_ops.commit(result, anchors, lengths, limits, line, (features, held, turns))
        wanted = torch.zeros_like(held)
        wanted[0, 0], wanted[1, 1] = features[0], features[1]
        assert torch.equal(held, wanted) and turns.tolist() == [1, 2, 3, 1]


def check_all(device, dtype, tolerance):
    check_linear(device, dtype, tolerance)
    if device == "cpu" or (row_ops._streams(torch.device(device)) and dtype != torch.float32):
        check_head(device, dtype, tolerance)
    check_rows(device, dtype, tolerance)
    for i, shape in enumerate(SHAPES):
        # Every form under the interpreter; on a GPU, where each is a compilation, two a shape, and
        # one shape of each dtype but bfloat16.
        forms = FORMS if device == "cpu" else (FORMS[i % 4], FORMS[(i + 1) % 4])
        if device == "cpu" or dtype == torch.bfloat16 or i == (dtype == torch.float16):
            check_attend(device, dtype, tolerance, forms, *shape)
    for tokens, form in ((40, "tree"), (9, "sliding tree"), (6, "ragged")):
        check_rows_of_their_own(device, dtype, tolerance, tokens, form)
    check_rotate_store(device, dtype, tolerance)
    check_ring(device, dtype, tolerance)


if __name__ == "__main__":
    row_ops._interpret = True
    check_all("cpu", torch.float32, 4e-6)
    check_large_rows("cpu")
    check_ends("cpu")
    print("interpreted")


def test_ends_of_a_cycle():
    check_ends("cpu")


def test_interpreted():
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, __file__],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "interpreted" in run.stdout, run.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype,tolerance",
    [(torch.float32, 4e-6), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)],
    ids=str,
)
def test_cuda(dtype, tolerance):
    check_all("cuda", dtype, tolerance)
    check_large_rows("cuda")
    check_ends("cuda")
