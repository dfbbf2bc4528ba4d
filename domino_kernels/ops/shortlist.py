"""The shortlist: the ids that a drafting head scores instead of the whole vocabulary."""

import torch

from domino_kernels import _C
from domino_kernels.ops import checks
from domino_kernels.torch_library import DTYPES, check_status, define, target


def _launch_shortlist(base_logits, vocab_valid, mask, bias, num_active, portable, ids, scores):
    batch, slots, vocab = base_logits.shape
    pools, size = (1, ids.size(1)) if ids.dim() == 2 else ids.shape[1:]
    need = 0  # made here, where sizes are numbers also under torch.compile
    if ids.is_cuda:
        need = _C.shortlist_workspace(batch=batch, pools=pools, vocab=vocab)
    workspace = torch.empty(need, dtype=torch.uint8, device=ids.device)
    base_batch_stride, base_slot_stride, _ = base_logits.stride()
    status = _C.shortlist(
        ids=ids.data_ptr(),
        scores=0 if scores is None else scores.data_ptr(),
        workspace=workspace.data_ptr(),
        base_logits=base_logits.data_ptr(),
        mask=0 if mask is None else mask.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        num_active=0 if num_active is None else num_active.data_ptr(),
        batch=batch,
        slots=slots,
        vocab=vocab,
        vocab_valid=vocab_valid,
        pools=pools,
        size=size,
        base_batch_stride=base_batch_stride,
        base_slot_stride=base_slot_stride,
        mask_stride=0 if mask is None else mask.stride(0),
        bias_stride=0 if bias is None else bias.stride(0),
        dtype=DTYPES[base_logits.dtype],
        portable=portable,
        **target(ids),
    )
    check_status("shortlist", status)


_shortlist = define(
    "shortlist(Tensor base_logits, int vocab_valid, Tensor? mask, Tensor? bias, "
    "Tensor? num_active, bool portable, Tensor(a!) ids, Tensor(b!)? scores) -> ()",
    _launch_shortlist,
)


def shortlist(
    base_logits,
    size,
    *,
    per="block",
    vocab_valid=None,
    mask=None,
    bias=None,
    num_active=None,
    portable=False,
    return_scores=False,
    out=None,
):
    """The `size` ids with the largest base logits of a draft block, exactly.

    Equal logits: the lowest id first. NaN counts as -inf. The ids come in ascending order: what a
    scorer that keeps the first of equal scores needs, and cheaper than an order by logit.

    Args:
        base_logits: [B, S, V] float32, float16 or bfloat16; slots and rows may be strided, so that
            a slice of the slots is taken as it is.
        size: M, how many ids; at most vocab_valid.
        per: "block": the largest of the maxima over the S slots, one list a row; "slot": one list
            for each slot.
        vocab_valid: ids from it on are excluded (the padding of a vocabulary); default V.
        mask: [B, ceil(V / 32)] int32, bit v % 32 of word v // 32 set where id v is allowed (a
            grammar's bit-mask). An id that is not allowed counts as -inf.
        bias: [B, V] float32, added to the logits of every slot.
        num_active: [1] int32 on the device; the rows from it on are left as they are.
        portable: on a GPU, use nothing above sm_80 (slower on sm_90 and later).
        return_scores: also return the logit that each id was chosen by.
        out: [B, M] or [B, S, M] int32, contiguous; receives the ids.

    Returns:
        out, or a new tensor where out is None; or (ids, scores float32 of the same shape).

    Raises:
        TypeError, ValueError: an argument does not fit, or requires grad (the op has no gradient).

    Source: the draft pool of SGLang's Domino head (top-k of the maximum over the block's slots).
    """
    op = "shortlist"
    batch, slots, vocab = checks.sizes(op, "base_logits", base_logits, "[B, S, V]")
    dtype, device = base_logits.dtype, base_logits.device
    checks.dtype(op, "base_logits", base_logits, DTYPES)
    checks.tensor(op, "base_logits", base_logits, (batch, slots, vocab), dtype, device)
    if per not in ("block", "slot"):
        raise ValueError(f'{op}: per: got {per!r}, expected "block" or "slot"')
    if not 0 < vocab < 2**31 or slots == 0:
        raise ValueError(f"{op}: base_logits: got {slots} slots, V={vocab}, expected at least 1")
    vocab_valid = vocab if vocab_valid is None else vocab_valid
    if not isinstance(vocab_valid, int) or not 1 <= vocab_valid <= vocab:
        raise ValueError(f"{op}: vocab_valid: got {vocab_valid!r}, expected 1..{vocab}")
    if not isinstance(size, int) or not 1 <= size <= vocab_valid:
        raise ValueError(f"{op}: size: got {size!r}, expected 1..{vocab_valid}")
    if mask is not None:
        checks.tensor(op, "mask", mask, (batch, (vocab + 31) // 32), torch.int32, device)
    if bias is not None:
        checks.tensor(op, "bias", bias, (batch, vocab), torch.float32, device)
    if num_active is not None:
        checks.tensor(op, "num_active", num_active, (1,), torch.int32, device)
    shape = (batch, size) if per == "block" else (batch, slots, size)
    if out is None:
        out = torch.empty(shape, dtype=torch.int32, device=device)
    else:
        checks.tensor(op, "out", out, shape, torch.int32, device)
        checks.contiguous(op, "out", out)
    scores = torch.empty(shape, dtype=torch.float32, device=device) if return_scores else None
    _shortlist(base_logits, vocab_valid, mask, bias, num_active, portable, out, scores)
    return (out, scores) if return_scores else out
