"""A vocabulary in shards (tensor parallelism): partial winners and how they are joined.

A rank holds rows [first, last) of W2 and the same columns of the base logits. Where the edges of
the shards are multiples of 128, what the ranks find joins to the bits of the unsharded result:

    ids, scores = shortlist(base_shard, M, return_scores=True)      # on each rank
    pool, _ = join_shortlists(ids + first, scores, M)               # of all ranks: [T, B, M] each

    keys = vocab_winners(base_shard, low_rank, w2_shard, first_id=first)
    tokens, scores = join_winners(keys)                             # of all ranks: [T, B, S]

An all-reduce with the maximum does the same as stacking the keys: they are ordered as integers.
"""

import torch

from domino_kernels import _C
from domino_kernels.ops import checks
from domino_kernels.torch_library import DTYPES, check_status, define, target


def _launch_vocab_winners(
    base_logits, low_rank, w2, first_id, vocab_valid, mask, bias, num_active, keys
):
    batch, slots, vocab = base_logits.shape
    base_batch_stride, base_slot_stride, _ = base_logits.stride()
    batch_stride, slot_stride = (0, 0) if low_rank is None else low_rank.stride()[:2]
    status = _C.vocab_winners(
        keys=keys.data_ptr(),
        base_logits=base_logits.data_ptr(),
        low_rank=0 if low_rank is None else low_rank.data_ptr(),
        w2=w2.data_ptr(),
        mask=0 if mask is None else mask.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        num_active=0 if num_active is None else num_active.data_ptr(),
        batch=batch,
        slots=slots,
        vocab=vocab,
        vocab_valid=vocab_valid,
        rank=w2.size(1),
        first_id=first_id,
        base_batch_stride=base_batch_stride,
        base_slot_stride=base_slot_stride,
        low_rank_batch_stride=batch_stride,
        low_rank_slot_stride=slot_stride,
        mask_stride=0 if mask is None else mask.stride(0),
        bias_stride=0 if bias is None else bias.stride(0),
        dtype=DTYPES[w2.dtype],
        base_dtype=DTYPES[base_logits.dtype],
        **target(keys),
    )
    check_status("vocab_winners", status)


_vocab_winners = define(
    "vocab_winners(Tensor base_logits, Tensor? low_rank, Tensor w2, int first_id, "
    "int vocab_valid, Tensor? mask, Tensor? bias, Tensor? num_active, Tensor(a!) keys) -> ()",
    _launch_vocab_winners,
)


def vocab_winners(
    base_logits,
    low_rank,
    w2,
    *,
    first_id=0,
    vocab_valid=None,
    mask=None,
    bias=None,
    num_active=None,
    out=None,
):
    """The best id of a vocabulary, or of a shard of one, for each slot of each row, as a key.

        score(v) = base_logits[.., v] + W2[v] u

    with fp32 sums and the bits that `draft_chain` gives the score of an id; ties to the lowest id,
    NaN never wins. The largest of the keys of all shards is the key of the whole: `join_winners`.

    Args:
        base_logits: [B, S, V] this shard's columns; dtype of w2 or float32. Rows may be strided.
        low_rank: [B, S, R] u = SiLU(W1 [H ; S]) of each slot, dtype of w2, rows of which may be
            strided; None: the base logits alone.
        w2: [V, R] contiguous, this shard's rows. On a GPU float16 or bfloat16, R a multiple of 16
            up to 256.
        first_id: the id of the shard's first row, a multiple of 128.
        vocab_valid, mask, bias, num_active: as in `shortlist`, for this shard's ids. vocab_valid
            may be 0: a shard of padding only.
        out: [B, S] int64, contiguous; receives the keys.

    Returns:
        out, or a new tensor where out is None.

    Raises:
        TypeError, ValueError: an argument does not fit, or requires grad (the op has no gradient).
    """
    op = "vocab_winners"
    batch, slots, vocab = checks.sizes(op, "base_logits", base_logits, "[B, S, V]")
    rank = checks.sizes(op, "w2", w2, "[V, R]")[1]
    dtype, device = w2.dtype, w2.device
    on_gpu = device.type == "cuda"
    checks.dtype(op, "w2", w2, (torch.float16, torch.bfloat16) if on_gpu else DTYPES)
    checks.dtype(op, "base_logits", base_logits, {dtype: None, torch.float32: None})
    checks.tensor(op, "w2", w2, (vocab, rank), dtype, device)
    checks.contiguous(op, "w2", w2)
    checks.tensor(op, "base_logits", base_logits, (batch, slots, vocab), base_logits.dtype, device)
    if on_gpu and (rank % 16 or not 0 < rank <= 256):
        raise ValueError(
            f"{op}: w2: got R={rank}, expected a multiple of 16, at most 256, on a GPU"
        )
    if low_rank is not None:
        checks.tensor(op, "low_rank", low_rank, (batch, slots, rank), dtype, device)
        if on_gpu and (low_rank.data_ptr() % 4 or low_rank.stride(0) % 2 or low_rank.stride(1) % 2):
            raise ValueError(f"{op}: low_rank: got rows at odd elements, expected even ones")
    if not isinstance(first_id, int) or not 0 <= first_id < 2**31 - vocab or first_id % 128:
        raise ValueError(
            f"{op}: first_id: got {first_id!r}, expected a multiple of 128, and ids below 2**31"
        )
    vocab_valid = vocab if vocab_valid is None else vocab_valid
    if not isinstance(vocab_valid, int) or not 0 <= vocab_valid <= vocab:
        raise ValueError(f"{op}: vocab_valid: got {vocab_valid!r}, expected 0..{vocab}")
    if mask is not None:
        checks.tensor(op, "mask", mask, (batch, (vocab + 31) // 32), torch.int32, device)
    if bias is not None:
        checks.tensor(op, "bias", bias, (batch, vocab), torch.float32, device)
    if num_active is not None:
        checks.tensor(op, "num_active", num_active, (1,), torch.int32, device)
    if out is None:
        out = torch.empty((batch, slots), dtype=torch.int64, device=device)
    else:
        checks.tensor(op, "out", out, (batch, slots), torch.int64, device)
        checks.contiguous(op, "out", out)
    _vocab_winners(base_logits, low_rank, w2, first_id, vocab_valid, mask, bias, num_active, out)
    return out


def join_winners(keys):
    """(ids int64 [...], scores float32 [...]) of the keys [T, ...] that T shards have found.

    A score of NaN: all scores were. TypeError, ValueError: keys are not int64, or of no shard.
    """
    checks.dtype("join_winners", "keys", keys, (torch.int64,))
    if keys.dim() == 0 or keys.size(0) == 0:
        raise ValueError(f"join_winners: keys: got shape {list(keys.shape)}, expected [T, ...]")
    key = keys.amax(0)
    ids = 0xFFFFFFFF - (key & 0xFFFFFFFF)
    ordered = (key >> 32) + 2**31  # 0 .. 2^32 - 1, as common/argmax_key.h orders floats
    bits = torch.where(ordered >= 2**31, ordered - 2**31, (2**32 - 1) - ordered)
    bits = torch.where(bits >= 2**31, bits - 2**32, bits)
    scores = bits.to(torch.int32).view(torch.float32)
    return ids, torch.where(ordered == 0, torch.nan, scores)


def join_shortlists(ids, scores, size):
    """The shortlist of a vocabulary from those of its shards.

    Args:
        ids: [T, ..., M] ids in the whole vocabulary (`shortlist` plus the shard's first id).
        scores: [T, ..., M] float32, from `shortlist(..., return_scores=True)`.
        size: how many ids to keep, at most T * M. Exact where size <= M.

    Returns:
        (ids int32 [..., size] in ascending order, their scores).

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    for name, value in (("ids", ids), ("scores", scores)):
        if not isinstance(value, torch.Tensor):
            got = type(value).__name__
            raise TypeError(f"join_shortlists: {name}: got {got}, expected a tensor [T, ..., M]")
    if ids.shape != scores.shape or ids.dim() < 2:
        raise ValueError(
            f"join_shortlists: ids: got shapes {list(ids.shape)} and {list(scores.shape)}, "
            f"expected [T, ..., M] twice"
        )
    checks.integer("join_shortlists", "size", size, 1, ids.size(0) * ids.size(-1))
    flat = ids.movedim(0, -2).flatten(-2)
    values = scores.movedim(0, -2).flatten(-2)
    flat, order = flat.sort(dim=-1)
    values = values.gather(-1, order)
    best = values.sort(dim=-1, descending=True, stable=True).indices[..., :size].sort(-1).values
    return flat.gather(-1, best).int(), values.gather(-1, best)
