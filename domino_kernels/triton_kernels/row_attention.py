"""Decode attention over rows of different lengths.

out[b, t, h] = softmax_j(scale * q[b, h, t] . k[b, j, h/GROUP]) v[b, j, h/GROUP]

over j <= lengths[b] + t.

One program owns one (row, kv head): all GROUP query heads and all TOKENS queries that share its
keys, so keys and values are read once. Bytes: 2 * kv_heads * (lengths + TOKENS) * HEAD_DIM a row;
it runs at the memory bound for long batches. fp32 softmax and accumulation (flash-attention's
running maximum), output in the query's dtype.
"""

import triton
import triton.language as tl


@triton.jit
def row_attention_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr, out_ptr, scale,
    q_stride_b, q_stride_h, q_stride_t,
    k_stride_b, k_stride_n, k_stride_h,
    o_stride_b, o_stride_t, o_stride_h,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    head = kv_head * GROUP + m // TOKENS
    token = m % TOKENS
    m_mask = (m < GROUP * TOKENS)[:, None] & (d < HEAD_DIM)[None, :]

    q_offsets = head * q_stride_h + token * q_stride_t
    q = tl.load(q_ptr + row * q_stride_b + q_offsets[:, None] + d[None, :], mask=m_mask, other=0.0)
    length = tl.load(lengths_ptr + row)
    last = length + token

    k_base = row * k_stride_b + kv_head * k_stride_h
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, length + TOKENS, BLOCK_N):
        j = start + n
        kv_mask = (j < length + TOKENS)[:, None] & (d < HEAD_DIM)[None, :]
        offsets = k_base + j[:, None] * k_stride_n + d[None, :]
        k = tl.load(k_ptr + offsets, mask=kv_mask, other=0.0)
        v = tl.load(v_ptr + offsets, mask=kv_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(j[None, :] <= last[:, None], scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        probs = tl.exp(scores - new_max[:, None])
        decay = tl.exp(running_max - new_max)
        running_sum = running_sum * decay + tl.sum(probs, 1)
        acc = acc * decay[:, None] + tl.dot(probs.to(v.dtype), v, input_precision="ieee")
        running_max = new_max

    o_offsets = token * o_stride_t + head * o_stride_h
    out = acc / running_sum[:, None]
    tl.store(
        out_ptr + row * o_stride_b + o_offsets[:, None] + d[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=m_mask,
    )
