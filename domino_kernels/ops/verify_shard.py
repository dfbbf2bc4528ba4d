"""verify_chain where each rank holds a shard of the vocabulary (tensor parallelism).

    call = dict(rule="token", temperature=..., vocab_start=first, vocab_total=V, ...)
    partials = verify_shard_rows(logits, drafts, **call)                    # on each rank
    shard = verify_shard(logits, drafts, all_gather(partials), **call)      # on each rank
    result, unsettled = join_verify_shards(drafts, all_gather(shard))       # the same on all ranks

The tokens, counts, log-probabilities and status bits are those of verify_chain on the whole rows,
bit by bit, where the edges of the shards are multiples of 128. Two exchanges of a fixed size: from
each shard 40 bytes a row of the target and of dense q, then 24 a row of the target (keys and their
log p; the rest is the same in all shards), with the block rule 16 more (two of the masses).

With filters the first exchange carries the `listed` likeliest tokens of each row too, 8 bytes each
(rows of q have the room and leave it empty). From them every rank finds the cut, without a further
exchange, if it lies among them; where it may not, in flat rows, the request is `unsettled`, and its
rows have to be gathered:

    if unsettled.any():  # the same on all ranks
        again = verify_chain(all_gather(logits[unsettled]), ...)

Whatever has the vocabulary as its last dimension is the shard's columns. Of arrays that every rank
has whole, as engines' samplers have them, these are views: logit_bias[:, first:last],
output_counts[:, first:last], and of masks the words [..., first // 32 : (last + 31) // 32].
"""

from typing import NamedTuple

import torch

from domino_kernels import _C
from domino_kernels.ops import checks
from domino_kernels.ops.row_stats import PARTIAL_WORDS
from domino_kernels.ops.verify import (
    VerifyResult,
    VerifyStatus,
    _check_workspace,
    verify_chain_workspace,
)
from domino_kernels.ops.verify_checks import (
    MAX_VOCAB,
    ORDERS,
    VerifyRule,
    check_edits,
    check_rows,
    check_rule,
    check_sampling,
)
from domino_kernels.torch_library import DTYPES, check_status, define, pointer, target

# ShardVerdict of csrc/verify/verify_shard.h
_ACCEPT, _LAST, _FAIL, _NEEDS_RESIDUAL, _MATCH, _UNSETTLED, _BLOCK = range(7)
_NO_KEY = 2**63 - 1
_MOST_LISTED = 1024  # of a row, over all shards: kListed of csrc/verify/row_places.cuh


class ShardedVerify(NamedTuple):
    """What verify_chain would have written, and where that is not known."""

    result: VerifyResult
    unsettled: torch.Tensor  # [B] bool: stopped before a row that has to be looked at whole


class ShardResult(NamedTuple):
    """What one shard finds of each slot."""

    verdict: torch.Tensor  # [B, K + 1] uint8: accept, the walk ends here with or without a token
    status: torch.Tensor  # [B, K + 1] uint8: bits of VerifyStatus
    logprob: torch.Tensor  # [B, K + 1] float32: log p of the draft
    keys: torch.Tensor  # [2, B, K + 1] int64: of the race for the last token; the least key wins
    key_logprob: torch.Tensor  # [2, B, K + 1] float32: log p of the key's token
    # of drafts by the block rule, otherwise 0
    draft_laws: torch.Tensor  # [3, B, K + 1] float32: p, q and the coin
    row_masses: torch.Tensor  # [3, B, K + 1] int64: what is kept; this shard's of Z and under q


_CALL = (
    "Tensor target_logits, Tensor draft_tokens, int rule, Tensor? rules, Tensor? temperature, "
    "Tensor? seed, Tensor? block_start, Tensor? draft_logits, Tensor? draft_ids, "
    "Tensor? draft_logprob, Tensor? draft_temperature, Tensor? top_k, Tensor? top_p, "
    "Tensor? min_p, int filter_order, Tensor? logit_bias, "
    "Tensor? repetition_penalty, Tensor? presence_penalty, Tensor? frequency_penalty, "
    "Tensor? prompt_mask, Tensor? output_counts, Tensor? grammar_mask, Tensor? num_active, "
    "Tensor? cu_rows, int vocab_start, int vocab_total"
)


def _fields(
    workspace,
    target_logits,
    draft_tokens,
    rule,
    rules,
    temperature,
    seed,
    block_start,
    draft_logits,
    draft_ids,
    draft_logprob,
    draft_temperature,
    top_k,
    top_p,
    min_p,
    filter_order,
    logit_bias,
    repetition_penalty,
    presence_penalty,
    frequency_penalty,
    prompt_mask,
    output_counts,
    grammar_mask,
    num_active,
    cu_rows,
    vocab_start,
    vocab_total,
):
    """The call as the extension takes it, in the order of its table."""
    ragged = cu_rows is not None
    q_strides = (0, 0, 0) if draft_logits is None else draft_logits.stride()
    ids_strides = (0, 0, 0) if draft_ids is None else draft_ids.stride()
    grammar_strides = (0, 0, 0) if grammar_mask is None else grammar_mask.stride()
    step = lambda tensor: 0 if tensor is None else tensor.stride(0)  # noqa: E731
    return dict(
        vocab_start=vocab_start,
        shard_vocab=target_logits.size(-1),
        workspace=pointer(workspace),
        target_logits=target_logits.data_ptr(),
        draft_tokens=draft_tokens.data_ptr(),
        rules=pointer(rules),
        temperature=pointer(temperature),
        seed=pointer(seed),
        block_start=pointer(block_start),
        draft_logits=pointer(draft_logits),
        draft_ids=pointer(draft_ids),
        draft_logprob=pointer(draft_logprob),
        draft_temperature=pointer(draft_temperature),
        cu_rows=pointer(cu_rows),
        num_active=pointer(num_active),
        residual_slot=0,
        top_k=pointer(top_k),
        top_p=pointer(top_p),
        min_p=pointer(min_p),
        logit_bias=pointer(logit_bias),
        repetition_penalty=pointer(repetition_penalty),
        presence_penalty=pointer(presence_penalty),
        frequency_penalty=pointer(frequency_penalty),
        prompt_mask=pointer(prompt_mask),
        output_counts=pointer(output_counts),
        grammar_mask=pointer(grammar_mask),
        batch=draft_tokens.size(0),
        drafts=draft_tokens.size(1),
        vocab=vocab_total,
        pool=0 if draft_ids is None else draft_ids.size(2),
        top_logprobs=0,
        total_rows=target_logits.size(0) if ragged else 0,
        target_batch_stride=0 if ragged else target_logits.stride(0),
        target_row_stride=target_logits.stride(-2),
        draft_tokens_stride=draft_tokens.stride(0),
        draft_batch_stride=q_strides[0],
        draft_row_stride=q_strides[1],
        ids_batch_stride=ids_strides[0],
        ids_row_stride=ids_strides[1],
        bias_stride=step(logit_bias),
        prompt_stride=step(prompt_mask),
        counts_stride=step(output_counts),
        grammar_batch_stride=0 if ragged else grammar_strides[0],
        grammar_row_stride=grammar_strides[-2],
        rule=rule,
        filter_order=filter_order,
        target_dtype=DTYPES[target_logits.dtype],
        draft_dtype=_C.F32 if draft_logits is None else DTYPES[draft_logits.dtype],
        **target(target_logits),
    )


def _launch_rows(*arguments):
    *call, partials, workspace = arguments
    code = _C.verify_shard_rows(
        verdict=0,
        slot_status=0,
        logprob=0,
        keys=0,
        key_logprob=0,
        draft_laws=0,
        row_masses=0,
        partials=partials.data_ptr(),
        parts=1,
        listed=partials.size(1) - PARTIAL_WORDS,
        **_fields(workspace, *call),
    )
    check_status("verify_shard_rows", code)


def _launch(*arguments):
    *call, partials, verdict, status, logprob, keys, key_logprob, laws, masses = arguments
    code = _C.verify_shard(
        verdict=verdict.data_ptr(),
        slot_status=status.data_ptr(),
        logprob=logprob.data_ptr(),
        keys=keys.data_ptr(),
        key_logprob=key_logprob.data_ptr(),
        draft_laws=laws.data_ptr(),
        row_masses=masses.data_ptr(),
        partials=partials.data_ptr(),
        parts=partials.size(0),
        listed=partials.size(2) - PARTIAL_WORDS,
        **_fields(None, *call),
    )
    check_status("verify_shard", code)


_verify_shard_rows = define(
    f"verify_shard_rows({_CALL}, Tensor(a!) partials, Tensor(b!) workspace) -> ()", _launch_rows
)
_verify_shard = define(
    f"verify_shard({_CALL}, Tensor partials, Tensor(a!) verdict, Tensor(b!) status, "
    "Tensor(c!) logprob, Tensor(d!) keys, Tensor(e!) key_logprob, Tensor(f!) draft_laws, "
    "Tensor(g!) row_masses) -> ()",
    _launch,
)


def _check_call(
    op,
    target_logits,
    draft_tokens,
    *,
    rule="greedy",
    temperature=None,
    seed=None,
    block_start=None,
    draft_logits=None,
    draft_ids=None,
    draft_logprob=None,
    draft_temperature=None,
    top_k=None,
    top_p=None,
    min_p=None,
    filter_order="transformers",
    logit_bias=None,
    repetition_penalty=None,
    presence_penalty=None,
    frequency_penalty=None,
    prompt_mask=None,
    output_counts=None,
    grammar_mask=None,
    num_active=None,
    cu_rows=None,
    keying=None,
    vocab_start=0,
    vocab_total=None,
    **unknown,
):
    """The call as the ops take it."""
    for name in unknown:
        raise TypeError(f"{op}: {name}: got a value, expected an argument that shards take")
    batch, drafts, vocab = check_rows(op, target_logits, draft_tokens, cu_rows, num_active)
    device = target_logits.device
    checks.integer(op, "vocab_total", vocab_total, 1, MAX_VOCAB)
    checks.integer(op, "vocab_start", vocab_start, 0, vocab_total - vocab)
    if vocab_start % 128:
        raise ValueError(f"{op}: vocab_start: got {vocab_start}, expected a multiple of 128")
    rules, code = check_rule(op, rule, keying, batch, device)
    check_sampling(
        op,
        rules is not None or code,
        (batch, drafts, vocab),
        device,
        temperature,
        seed,
        block_start,
        draft_logits,
        draft_ids,
        draft_logprob,
        draft_temperature,
        top_k,
        top_p,
        min_p,
        filter_order,
    )
    if draft_logprob is not None and code == VerifyRule.BLOCK:
        raise ValueError(f"{op}: draft_logprob: got a tensor, expected None with rule='block'")
    check_edits(
        op,
        target_logits,
        batch,
        logit_bias,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        prompt_mask,
        output_counts,
        grammar_mask,
    )
    return (
        target_logits,
        draft_tokens,
        code,
        rules,
        temperature,
        seed,
        block_start,
        draft_logits,
        draft_ids,
        draft_logprob,
        draft_temperature,
        top_k,
        top_p,
        min_p,
        ORDERS[filter_order],
        logit_bias,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        prompt_mask,
        output_counts,
        grammar_mask,
        num_active,
        cu_rows,
        vocab_start,
        vocab_total,
    )


def _is_dense(call):
    return call.get("draft_logits") is not None and call.get("draft_ids") is None


def _is_filtered(call):
    return any(call.get(name) is not None for name in ("top_k", "top_p", "min_p"))


def verify_shard_rows(target_logits, draft_tokens, *, listed=128, workspace=None, **call):
    """What the other shards have to know of this shard's rows.

    Args:
        target_logits, draft_tokens, call: the arguments of `verify_shard`.
        listed: with filters, how many of a row's likeliest tokens each shard tells; at most 1024
            over all shards. In the orders "transformers" and "vllm" top_k up to this is settled,
            but for ties with the last of them.
        workspace: int64 tensor from verify_chain_workspace(B, K, V_shard, dense=...), so that the
            call needs none of its own. One call at a time may use it.

    Returns:
        partials, [R, 5] int64, with filters [R, 5 + listed]: stacked over the shards, in any order,
        for `verify_shard`. Of the B (K + 1) rows of the target and, with dense q, the B K of q.

    Raises:
        TypeError, ValueError: an argument does not fit, or requires grad (the op has no gradient).

    Source: docs/numerics.md.
    """
    op = "verify_shard_rows"
    target_logits, draft_tokens, *rest = _check_call(op, target_logits, draft_tokens, **call)
    (batch, drafts), vocab, device = draft_tokens.shape, target_logits.size(-1), draft_tokens.device
    dense = _is_dense(call)
    if workspace is None:
        workspace = verify_chain_workspace(batch, drafts, vocab, dense=dense, device=device)
    else:
        _check_workspace(op, workspace, batch, drafts, vocab, dense, device)
    checks.integer(op, "listed", listed, 1, _MOST_LISTED)
    words = batch * (drafts + 1 + dense * drafts), PARTIAL_WORDS + _is_filtered(call) * listed
    partials = torch.empty(words, dtype=torch.int64, device=device)
    *_, vocab_start, _ = rest
    _verify_shard_rows(target_logits, draft_tokens - vocab_start, *rest, partials, workspace)
    return partials


def verify_shard(target_logits, draft_tokens, partials, **call):
    """What a shard of the vocabulary has to say of the drafts of each request.

    Args:
        target_logits: [B, K + 1, V_shard], this shard's columns, or [R, V_shard] with cu_rows; as
            in verify_chain. Columns of padding are left out.
        draft_tokens: [B, K] int64, ids in the whole vocabulary.
        partials: [T, R, 5] int64, or [T, R, 5 + listed]: what verify_shard_rows gave on all T
            shards, in any order.
        rule: as in verify_chain.
        temperature, seed, block_start, draft_logprob, draft_temperature, top_k, top_p, min_p,
            filter_order, keying, num_active, cu_rows: as in verify_chain.
        draft_logits: [B, K, V_shard], this shard's columns, or [B, K, M] with draft_ids.
        draft_ids: [B, K, M] int32, a pool with ids in the whole vocabulary.
        logit_bias, output_counts: [B, V_shard]; prompt_mask: [B, ceil(V_shard / 32)]; grammar_mask:
            [B, K + 1, ceil(V_shard / 32)] or [R, ...]: this shard's columns of what verify_chain
            takes.
        repetition_penalty, presence_penalty, frequency_penalty: [B] float32, as in verify_chain.
        vocab_start: id of the first column, a multiple of 128; vocab_total: V.

    Returns:
        ShardResult, for `join_verify_shards`.

    Raises:
        TypeError, ValueError: an argument does not fit, or requires grad (the op has no gradient).

    Source: as verify_chain.
    """
    op = "verify_shard"
    checked = _check_call(op, target_logits, draft_tokens, **call)
    (batch, drafts), device = draft_tokens.shape, target_logits.device
    parts, _, words = checks.sizes(op, "partials", partials, "[T, R, 5 + listed]")
    if parts == 0:
        raise ValueError(f"{op}: partials: got none, expected those of all shards")
    listed = words - PARTIAL_WORDS
    if not _is_filtered(call):
        listed = 0
    elif listed < 1 or parts * listed > _MOST_LISTED:
        raise ValueError(
            f"{op}: partials: got {parts} shards with {listed} tokens of a row, expected 1 to "
            f"{_MOST_LISTED} tokens in all"
        )
    words = parts, batch * (drafts + 1 + _is_dense(call) * drafts), PARTIAL_WORDS + listed
    checks.tensor(op, "partials", partials, words, torch.int64, device)
    checks.contiguous(op, "partials", partials)
    slots = batch, drafts + 1
    new = lambda dtype, *lead: torch.empty(*lead, *slots, dtype=dtype, device=device)  # noqa: E731
    out = ShardResult(
        new(torch.uint8),
        new(torch.uint8),
        new(torch.float32),
        new(torch.int64, 2),
        new(torch.float32, 2),
        new(torch.float32, 3),
        new(torch.int64, 3),
    )
    _verify_shard(*checked, partials, *out)
    return out


def _block_stop(chained, laws, masses):
    """[B] drafts kept of chains by the block rule: block_walk.h, in its order of roundings.

    chained: [B, K + 1] bool: the slot is a draft of such a chain. masses: of all shards.
    """
    p, q, coin = laws.unbind()
    mass, rest, covered = masses.unbind()
    alive = chained.int().cumprod(-1) > 0  # this slot and all before are drafts of the chain
    steps = [torch.ones_like(p[:, 0])]
    for ratio in (p / q).unbind(-1)[:-1]:
        step = steps[-1] * ratio
        steps.append(torch.where(step < 1.0, step, 1.0))
    reach = torch.stack(steps, -1)
    share = (mass - covered).float() / mass.float()
    outside = torch.where(covered < mass, reach * share * 2.0**40, 0.0)
    z = (rest + outside.long()).float() * 2.0**-40
    below = z + (1.0 - reach)
    threshold = torch.where(below > 0, z / below, 1.0).where(alive, reach)
    keeps = alive[:, :-1] & (coin[:, :-1] <= threshold[:, 1:])
    slots = torch.arange(1, p.size(1), device=p.device)
    return torch.nn.functional.pad(keeps * slots, (1, 0)).amax(-1)


def join_verify_shards(draft_tokens, shards):
    """The result of verify_chain from what its shards have found.

    Args:
        draft_tokens: [B, K] int64, as given to verify_shard.
        shards: ShardResult of each shard, in any order.

    Returns:
        ShardedVerify. Without filters all requests are settled. An unsettled one stops before the
        row in question, with num_emitted = num_accepted: gather its rows, and verify_chain on them
        gives all of its result.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    op = "join_verify_shards"
    batch, drafts = checks.sizes(op, "draft_tokens", draft_tokens, "[B, K]")
    if not shards:
        raise ValueError(f"{op}: shards: got none, expected the ShardResult of each shard")
    for shard in shards:
        if not isinstance(shard, ShardResult):
            got = type(shard).__name__
            raise TypeError(f"{op}: shards: got {got}, expected the ShardResult of each shard")
    verdict, status, logprob, _, _, laws, masses = shards[0]  # the same in all, but for masses[1:]
    keys = torch.stack([shard.keys for shard in shards])  # [T, 2, B, K + 1]
    key_logprob = torch.stack([shard.key_logprob for shard in shards])
    key, owner = keys.min(0)
    key_logprob = key_logprob.gather(0, owner[None])[0]
    ends_with_token = (verdict == _LAST) | (verdict == _BLOCK)
    # the second race counts where no shard has found anything in the first
    none = (key[0] == _NO_KEY) & ends_with_token
    winner = torch.where(none, key[1], key[0]) & 0xFFFFFFFF
    winner_logprob = torch.where(none, key_logprob[1], key_logprob[0])

    drafted = torch.nn.functional.pad(draft_tokens, (0, 1), value=-1)
    accepts = (verdict == _ACCEPT) | ((verdict == _MATCH) & (winner == drafted))
    stop = accepts.int().cumprod(-1).sum(-1, keepdim=True)
    chained = verdict == _BLOCK
    masses = torch.cat([masses[:1], sum(shard.row_masses[1:] for shard in shards)])
    stop = torch.where(chained[:, :1], _block_stop(chained, laws, masses)[:, None], stop)
    # a draft whose row's cut is not known leaves all of its chain open
    ends = chained.int().cumprod(-1).sum(-1, keepdim=True)
    blind = ((verdict == _UNSETTLED) & (laws[1] > 0)).gather(1, ends)
    stop = torch.where(blind, 0, stop)
    slots = torch.arange(drafts + 1, device=draft_tokens.device)
    ending = torch.where(blind, _UNSETTLED, verdict.gather(1, stop))
    has_last = (ending == _LAST) | (ending == _MATCH) | (ending == _BLOCK)
    last = (slots == stop) & has_last
    before = slots < stop
    tokens = torch.where(last, winner, torch.where(before, drafted, -1))
    chosen = torch.where(last, winner_logprob, torch.where(before, logprob, 0.0))
    status = status | (none & last) * int(VerifyStatus.ZERO_RESIDUAL)
    reached = status * (slots <= stop)
    bits = reached.new_zeros(batch)
    for i in range(drafts + 1):
        bits |= reached[:, i]
    accepted = stop[:, 0].int()
    result = VerifyResult(tokens, accepted, accepted + has_last[:, 0].int(), chosen, bits)
    return ShardedVerify(result, ending[:, 0] == _UNSETTLED)
