"""verify_chain where each rank holds a shard of the vocabulary (tensor parallelism).

    rows = row_stats(logits.flatten(0, 1), *shard_rows(drafts, temperature), vocab_start=first,
                     vocab_total=V)                               # on each rank
    shard = verify_shard(logits, drafts, all_gather(rows.partials), ..., vocab_start=first,
                         vocab_total=V)                           # on each rank
    result = join_verify_shards(drafts, all_gather(shard))        # on each rank, the same on all

The tokens, counts, log-probabilities and status bits are those of verify_chain on the whole rows,
bit by bit, where the edges of the shards are multiples of 128. Two exchanges: 40 bytes a row, and
33 bytes a row.
"""

from typing import NamedTuple

import torch

from domino_kernels import _C
from domino_kernels.ops import checks
from domino_kernels.ops.row_stats import PARTIAL_WORDS
from domino_kernels.ops.verify import (
    _MAX_VOCAB,
    _RULES,
    VerifyResult,
    VerifyStatus,
    _check_draft_law,
)
from domino_kernels.torch_library import DTYPES, check_status, define, pointer, target

_ACCEPT, _LAST, _FAIL, _NEEDS_RESIDUAL = range(4)  # ShardVerdict of csrc/verify/verify_shard.h
_NO_KEY = 2**63 - 1


class ShardResult(NamedTuple):
    """What one shard finds of each slot."""

    verdict: torch.Tensor  # [B, K + 1] uint8: accept, the walk ends here with or without a token
    status: torch.Tensor  # [B, K + 1] uint8: bits of VerifyStatus
    logprob: torch.Tensor  # [B, K + 1] float32: log p of the draft
    keys: torch.Tensor  # [2, B, K + 1] int64: of the race for the last token; the least key wins
    key_logprob: torch.Tensor  # [2, B, K + 1] float32: log p of the key's token


def _launch(
    target_logits,
    draft_tokens,
    partials,
    rule,
    temperature,
    seed,
    block_start,
    draft_logits,
    draft_ids,
    draft_logprob,
    draft_temperature,
    vocab_start,
    vocab_total,
    verdict,
    status,
    logprob,
    keys,
    key_logprob,
):
    batch, slots, vocab = target_logits.shape
    q_strides = (0, 0, 0) if draft_logits is None else draft_logits.stride()
    ids_strides = (0, 0, 0) if draft_ids is None else draft_ids.stride()
    code = _C.verify_shard(
        verdict=verdict.data_ptr(),
        status=status.data_ptr(),
        logprob=logprob.data_ptr(),
        keys=keys.data_ptr(),
        key_logprob=key_logprob.data_ptr(),
        partials=partials.data_ptr(),
        target_logits=target_logits.data_ptr(),
        draft_tokens=draft_tokens.data_ptr(),
        temperature=pointer(temperature),
        seed=pointer(seed),
        block_start=pointer(block_start),
        draft_logits=pointer(draft_logits),
        draft_ids=pointer(draft_ids),
        draft_logprob=pointer(draft_logprob),
        draft_temperature=pointer(draft_temperature),
        batch=batch,
        drafts=slots - 1,
        parts=partials.size(0),
        vocab=vocab,
        vocab_start=vocab_start,
        vocab_total=vocab_total,
        pool=0 if draft_ids is None else draft_ids.size(2),
        target_batch_stride=target_logits.stride(0),
        target_row_stride=target_logits.stride(1),
        draft_tokens_stride=draft_tokens.stride(0),
        draft_batch_stride=q_strides[0],
        draft_row_stride=q_strides[1],
        ids_batch_stride=ids_strides[0],
        ids_row_stride=ids_strides[1],
        rule=rule,
        target_dtype=DTYPES[target_logits.dtype],
        draft_dtype=_C.F32 if draft_logits is None else DTYPES[draft_logits.dtype],
        **target(target_logits),
    )
    check_status("verify_shard", code)


_verify_shard = define(
    "verify_shard(Tensor target_logits, Tensor draft_tokens, Tensor partials, int rule, "
    "Tensor? temperature, Tensor? seed, Tensor? block_start, Tensor? draft_logits, "
    "Tensor? draft_ids, Tensor? draft_logprob, Tensor? draft_temperature, int vocab_start, "
    "int vocab_total, Tensor(a!) verdict, Tensor(b!) status, Tensor(c!) logprob, Tensor(d!) keys, "
    "Tensor(e!) key_logprob) -> ()",
    _launch,
)


def shard_rows(draft_tokens, temperature=None):
    """`tokens` and `temperature` of the row_stats call whose partials verify_shard reads.

    draft_tokens: [B, K] int64; temperature: [B] float32, or None for greedy requests.
    """
    tokens = torch.nn.functional.pad(draft_tokens, (0, 1), value=-1)
    if temperature is None:
        return tokens.flatten(), None
    return tokens.flatten(), temperature[:, None].expand(tokens.shape).flatten()


def verify_shard(
    target_logits,
    draft_tokens,
    partials,
    *,
    rule="greedy",
    temperature=None,
    seed=None,
    block_start=None,
    draft_logits=None,
    draft_ids=None,
    draft_logprob=None,
    draft_temperature=None,
    vocab_start=0,
    vocab_total,
):
    """What a shard of the vocabulary has to say of the drafts of each request.

    Args:
        target_logits: [B, K + 1, V_shard], this shard's columns; as in verify_chain.
        draft_tokens: [B, K] int64, ids in the whole vocabulary; -1: no draft.
        partials: [T, B (K + 1), 5] int64: RowStats.partials of all T shards, in any order, of calls
            with the tokens and temperatures of `shard_rows`.
        rule: "greedy", "token", "onehot", "match" or "gumbel".
        temperature, seed, block_start, draft_logprob, draft_temperature: as in verify_chain.
        draft_logits, draft_ids: [B, K, M], a pool with ids in the whole vocabulary.
        vocab_start: id of the first column, a multiple of 128; vocab_total: V.

    Returns:
        ShardResult, for `join_verify_shards`.

    Raises:
        TypeError, ValueError: an argument does not fit, or requires grad (the op has no gradient).

    Source: as verify_chain.
    """
    op = "verify_shard"
    batch, slots, vocab = checks.sizes(op, "target_logits", target_logits, "[B, K + 1, V]")
    device = target_logits.device
    checks.dtype(op, "target_logits", target_logits, DTYPES)
    shape = batch, slots, vocab
    checks.tensor(op, "target_logits", target_logits, shape, target_logits.dtype, device)
    checks.tensor(op, "draft_tokens", draft_tokens, (batch, slots - 1), torch.int64, device)
    parts = checks.sizes(op, "partials", partials, "[T, R, 5]")[0]
    words = parts, batch * slots, PARTIAL_WORDS
    checks.tensor(op, "partials", partials, words, torch.int64, device)
    checks.contiguous(op, "partials", partials)
    checks.integer(op, "vocab_total", vocab_total, 1, _MAX_VOCAB)
    checks.integer(op, "vocab_start", vocab_start, 0, vocab_total - vocab)
    if vocab_start % 128:
        raise ValueError(f"{op}: vocab_start: got {vocab_start}, expected a multiple of 128")
    if rule not in _RULES or rule == "block":
        raise ValueError(f"{op}: rule: got {rule!r}, expected a rule of verify_chain but 'block'")
    sampling = (
        ("temperature", temperature, torch.float32),
        ("seed", seed, torch.int64),
        ("block_start", block_start, torch.int64),
    )
    for name, value, dtype in sampling:
        if rule != "greedy":
            checks.tensor(op, name, value, (batch,), dtype, device)
        elif value is not None:
            raise ValueError(f"{op}: {name}: got a value, expected None with rule='greedy'")
    if draft_logits is not None and draft_ids is None:
        raise ValueError(f"{op}: draft_logits: got a tensor, expected draft_ids with it")
    whole = batch, slots - 1, vocab_total
    _check_draft_law(op, draft_logits, draft_ids, draft_logprob, whole, device)
    if draft_temperature is not None:
        checks.tensor(op, "draft_temperature", draft_temperature, (batch,), torch.float32, device)
    new = lambda dtype, *lead: torch.empty(*lead, batch, slots, dtype=dtype, device=device)  # noqa: E731
    out = ShardResult(
        new(torch.uint8),
        new(torch.uint8),
        new(torch.float32),
        new(torch.int64, 2),
        new(torch.float32, 2),
    )
    _verify_shard(
        target_logits,
        draft_tokens,
        partials,
        _RULES[rule],
        temperature,
        seed,
        block_start,
        draft_logits,
        draft_ids,
        draft_logprob,
        draft_temperature,
        vocab_start,
        vocab_total,
        *out,
    )
    return out


def join_verify_shards(draft_tokens, shards):
    """The result of verify_chain from what its shards have found.

    Args:
        draft_tokens: [B, K] int64, as given to verify_shard.
        shards: ShardResult of each shard, in any order.

    Returns:
        VerifyResult.
    """
    batch, drafts = draft_tokens.shape
    verdict, status, logprob = shards[0][:3]  # the same in all
    keys = torch.stack([shard.keys for shard in shards])  # [T, 2, B, K + 1]
    key_logprob = torch.stack([shard.key_logprob for shard in shards])
    key, owner = keys.min(0)
    key_logprob = key_logprob.gather(0, owner[None])[0]
    # the second race counts where no shard has found anything in the first
    none = (key[0] == _NO_KEY) & (verdict == _LAST)
    winner = torch.where(none, key[1], key[0]) & 0xFFFFFFFF
    winner_logprob = torch.where(none, key_logprob[1], key_logprob[0])
    status = status | none * int(VerifyStatus.ZERO_RESIDUAL)

    drafted = torch.nn.functional.pad(draft_tokens, (0, 1), value=-1)
    accepts = (verdict == _ACCEPT) | ((verdict == _LAST) & (winner == drafted))
    stop = accepts.int().cumprod(-1).sum(-1, keepdim=True)
    slots = torch.arange(drafts + 1, device=draft_tokens.device)
    has_last = verdict.gather(1, stop) == _LAST
    last = (slots == stop) & has_last
    before = slots < stop
    tokens = torch.where(last, winner, torch.where(before, drafted, -1))
    chosen = torch.where(last, winner_logprob, torch.where(before, logprob, 0.0))
    reached = status * (slots <= stop)
    bits = reached.new_zeros(batch)
    for i in range(drafts + 1):
        bits |= reached[:, i]
    accepted = stop[:, 0].int()
    return VerifyResult(tokens, accepted, accepted + has_last[:, 0].int(), chosen, bits)
