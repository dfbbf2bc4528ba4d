"""The Triton kernel against SDPA in fp64; under the interpreter in fp32, on a GPU in all dtypes."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F


def reference(query, keys, values, lengths):
    positions = lengths[:, None] + torch.arange(query.shape[2], device=query.device)
    mask = torch.arange(keys.shape[1], device=query.device) <= positions[..., None]
    return F.scaled_dot_product_attention(
        query.double(), keys.double().transpose(1, 2), values.double().transpose(1, 2),
        attn_mask=mask[:, None], enable_gqa=True,
    ).transpose(1, 2)  # fmt: skip


def check(device, dtype, tokens, heads, kv_heads, head_dim, tolerance):
    from domino_draft.row_attention import _row_attention_triton

    torch.manual_seed(tokens)
    lengths = torch.tensor([0, 5, 64, 99], device=device)
    query = torch.randn(4, heads, tokens, head_dim, device=device, dtype=dtype)
    keys, values = torch.randn(2, 4, 128, kv_heads, head_dim, device=device, dtype=dtype)
    expected = reference(query, keys, values, lengths)
    # What lies past a row's length is another cycle's rubbish: it must not be read.
    for row, length in enumerate(lengths.tolist()):
        keys[row, length + tokens :] = float("nan")
        values[row, length + tokens :] = float("nan")
    out = _row_attention_triton(query, keys, values, lengths, None)
    error = (out.double() - expected).abs().max().item()
    assert error <= tolerance, f"{dtype} T={tokens}: {error}"


CASES = [(1, 9, 3, 64), (16, 4, 2, 32), (5, 2, 2, 24)]

if __name__ == "__main__":
    for case in CASES:
        check("cpu", torch.float32, *case, tolerance=2e-6)
    print("interpreted")


def test_interpreted():
    pytest.importorskip("triton")
    # The interpreter is chosen when the kernel module is imported, so it has a process of its own.
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
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "dtype,tolerance",
    [(torch.float32, 2e-6), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)],
    ids=str,
)
def test_cuda(case, dtype, tolerance):
    check("cuda", dtype, *case, tolerance=tolerance)
