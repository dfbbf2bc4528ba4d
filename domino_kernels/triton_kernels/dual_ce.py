"""Softmax statistics and logit gradients of two cross-entropies that share a base logit.

For row i with logits b = base[i], f = b + delta[i], label y, weight w and mixing factor lam:

    ce_base = lse(b) - b[y]            grad_b = lam * w * (softmax(b) - onehot(y))
    ce_final = lse(f) - f[y]           grad_f = (1 - lam) * w * (softmax(f) - onehot(y))

With gradients on, base[i] is overwritten by grad_b + grad_f (what the shared hidden state needs)
and delta[i] by grad_f (what the low-rank branch needs). One program owns one row: it reads both
rows from HBM once and a second time mostly from L2 (132 programs x 196 KB at V = 49152 in bf16),
and writes them once. Bound: HBM bandwidth, 8 bytes an element in bf16. All arithmetic is fp32. A
label outside [0, V) means "no label": its row gets a zero loss and zero gradients. Logits are
expected to be finite.
"""

import triton
import triton.language as tl


@triton.jit
def _dual_ce_kernel(
    base_ptr,
    delta_ptr,
    label_ptr,
    weight_ptr,
    ce_base_ptr,
    ce_final_ptr,
    top_base_ptr,
    top_final_ptr,
    lam,
    vocab,
    row_stride,
    HAS_DELTA: tl.constexpr,
    WRITE_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base_row = base_ptr + row * row_stride
    delta_row = delta_ptr + row * row_stride
    label = tl.load(label_ptr + row)
    weight = tl.load(weight_ptr + row).to(tl.float32)
    labelled = (label >= 0) & (label < vocab)
    weight = tl.where(labelled, weight, 0.0)
    safe = tl.where(labelled, label, 0)
    # Read before the second pass overwrites the row.
    label_base = tl.load(base_row + safe).to(tl.float32)
    label_final = label_base
    if HAS_DELTA:
        label_final += tl.load(delta_row + safe).to(tl.float32)

    max_b = -float("inf")
    max_f = -float("inf")
    sum_b = 0.0
    sum_f = 0.0
    for start in range(0, vocab, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < vocab
        b = tl.load(base_row + cols, mask=inside, other=-float("inf")).to(tl.float32)
        new_b = tl.maximum(max_b, tl.max(b, axis=0))
        sum_b = sum_b * tl.exp(max_b - new_b) + tl.sum(tl.exp(b - new_b), axis=0)
        max_b = new_b
        if HAS_DELTA:
            f = b + tl.load(delta_row + cols, mask=inside, other=0.0).to(tl.float32)
            new_f = tl.maximum(max_f, tl.max(f, axis=0))
            sum_f = sum_f * tl.exp(max_f - new_f) + tl.sum(tl.exp(f - new_f), axis=0)
            max_f = new_f
    lse_b = max_b + tl.log(sum_b)
    lse_f = lse_b
    if HAS_DELTA:
        lse_f = max_f + tl.log(sum_f)

    first_b = tl.full([BLOCK], 2147483647, tl.int32)
    first_f = tl.full([BLOCK], 2147483647, tl.int32)
    for start in range(0, vocab, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < vocab
        b = tl.load(base_row + cols, mask=inside, other=-float("inf")).to(tl.float32)
        hit = tl.where(cols == label, 1.0, 0.0)
        first_b = tl.minimum(first_b, tl.where(b == max_b, cols, 2147483647))
        if HAS_DELTA:
            f = b + tl.load(delta_row + cols, mask=inside, other=0.0).to(tl.float32)
            first_f = tl.minimum(first_f, tl.where(f == max_f, cols, 2147483647))
            if WRITE_GRAD:
                grad_f = (1.0 - lam) * weight * (tl.exp(f - lse_f) - hit)
                grad = lam * weight * (tl.exp(b - lse_b) - hit) + grad_f
                tl.store(delta_row + cols, grad_f.to(delta_ptr.dtype.element_ty), mask=inside)
                tl.store(base_row + cols, grad.to(base_ptr.dtype.element_ty), mask=inside)
        else:
            if WRITE_GRAD:
                grad = weight * (tl.exp(b - lse_b) - hit)
                tl.store(base_row + cols, grad.to(base_ptr.dtype.element_ty), mask=inside)

    top_b = tl.min(first_b, axis=0)
    tl.store(ce_base_ptr + row, tl.where(labelled, lse_b - label_base, 0.0))
    tl.store(top_base_ptr + row, top_b)
    if HAS_DELTA:
        tl.store(ce_final_ptr + row, tl.where(labelled, lse_f - label_final, 0.0))
        tl.store(top_final_ptr + row, tl.min(first_f, axis=0))


def dual_ce_rows(base, delta, labels, weights, lam, ce, top, *, write_grad, block=4096):
    """Launch the row kernel on base (and delta) [R, V], in place when `write_grad`.

    ce float32 [2, R] and top int32 [2, R] receive the losses and argmaxes (lowest id on a tie) of
    the base and of the final logits; with delta None only row 0 of each is written and lam is not
    used.
    """
    rows, vocab = base.shape
    if rows == 0:
        return
    labels, weights = labels.contiguous(), weights.contiguous()  # the kernel counts by rows
    _dual_ce_kernel[(rows,)](
        base,
        base if delta is None else delta,
        labels,
        weights,
        ce[0],
        ce[1],
        top[0],
        top[1],
        float(lam),
        vocab,
        base.stride(0),
        HAS_DELTA=delta is not None,
        WRITE_GRAD=write_grad,
        BLOCK=min(block, triton.next_power_of_2(vocab)),
        num_warps=8,
    )
