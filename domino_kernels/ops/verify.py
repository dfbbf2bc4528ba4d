"""Verification: which drafts of a block the target keeps, and the token that follows them."""

from enum import IntFlag
from typing import NamedTuple

import torch

from domino_kernels import _C, rng
from domino_kernels.ops import checks
from domino_kernels.ops.verify_checks import (
    ORDERS,
    VerifyRule,
    check_edits,
    check_rows,
    check_rule,
    check_sampling,
)
from domino_kernels.torch_library import DTYPES, check_status, define, place, target

_CONTROL_WORDS = 16384  # in front of a workspace: kGreedyWords of csrc/verify/verify_chain.h
_NOISE_KINDS = {"words": 0, "uniform": 1, "exponential": 2}


class VerifyStatus(IntFlag):
    """Bits of `VerifyResult.status`. Only what the walk reached sets a bit.

    The bits of FAILED, and NEEDS_RESIDUAL, end the request's output early: `num_emitted ==
    num_accepted`. With the others the emitted tokens still have the target's law.
    """

    NON_FINITE = 1  # a target row with NaN or +inf
    EMPTY_ROW = 2  # a target row that is all -inf
    BAD_ID = 4  # a draft id outside [0, V) other than the pad -1; the chain ends before it
    ZERO_RESIDUAL = 8  # nothing left of relu(p - q): drawn from p
    BAD_DRAFT_LAW = 16  # a draft row not finite or empty, or q(x) = 0: judged as a one-hot draft
    BAD_PARAMETER = 32  # a temperature that is negative or not finite, an unknown rule
    BAD_ROWS = 64  # cu_rows: more than K + 1 rows, less than none, or rows that do not exist
    NEEDS_RESIDUAL = 128  # draft_logprob: a draft was rejected; residual_sample draws the token
    FAILED = NON_FINITE | EMPTY_ROW | BAD_PARAMETER | BAD_ROWS


class VerifyResult(NamedTuple):
    """What verify_chain writes."""

    tokens: torch.Tensor  # [B, K + 1] int64: the emitted tokens, then -1
    num_accepted: torch.Tensor  # [B] int32: drafts kept
    # [B] int32: num_accepted + 1, or num_accepted where FAILED, NEEDS_RESIDUAL or inactive
    num_emitted: torch.Tensor
    chosen_logprob: torch.Tensor | None  # [B, K + 1] float32: log p of each emitted token, then 0
    status: torch.Tensor  # [B] uint8: bits of VerifyStatus
    top_ids: torch.Tensor | None = None  # [B, K + 1, n] int32: likeliest tokens, -1 where none
    top_logprob: torch.Tensor | None = None  # [B, K + 1, n] float32: their log p, then 0


_NO_STRIDES = 0, 0, 0


def _launch_verify_chain(
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
    vocab,
    num_active,
    residual_slot,
    cu_rows,
    tokens,
    num_accepted,
    num_emitted,
    chosen_logprob,
    status,
    top_ids,
    top_logprob,
    workspace,
):
    ragged = cu_rows is not None
    device, stream = place(target_logits)
    # shapes and strides unpacked, pointers without a function: half the host time of these lines
    batch, drafts = draft_tokens.shape
    *_, target_row_stride, _ = target_strides = target_logits.stride()
    draft_strides = _NO_STRIDES if draft_logits is None else draft_logits.stride()
    ids_strides = _NO_STRIDES if draft_ids is None else draft_ids.stride()
    grammar_strides = _NO_STRIDES if grammar_mask is None else grammar_mask.stride()
    code = _C.verify_chain(
        tokens=tokens.data_ptr(),
        num_accepted=num_accepted.data_ptr(),
        num_emitted=num_emitted.data_ptr(),
        chosen_logprob=0 if chosen_logprob is None else chosen_logprob.data_ptr(),
        status=status.data_ptr(),
        top_ids=0 if top_ids is None else top_ids.data_ptr(),
        top_logprob=0 if top_logprob is None else top_logprob.data_ptr(),
        workspace=workspace.data_ptr(),
        target_logits=target_logits.data_ptr(),
        draft_tokens=draft_tokens.data_ptr(),
        rules=0 if rules is None else rules.data_ptr(),
        temperature=0 if temperature is None else temperature.data_ptr(),
        seed=0 if seed is None else seed.data_ptr(),
        block_start=0 if block_start is None else block_start.data_ptr(),
        draft_logits=0 if draft_logits is None else draft_logits.data_ptr(),
        draft_ids=0 if draft_ids is None else draft_ids.data_ptr(),
        draft_logprob=0 if draft_logprob is None else draft_logprob.data_ptr(),
        draft_temperature=0 if draft_temperature is None else draft_temperature.data_ptr(),
        cu_rows=0 if cu_rows is None else cu_rows.data_ptr(),
        num_active=0 if num_active is None else num_active.data_ptr(),
        residual_slot=0 if residual_slot is None else residual_slot.data_ptr(),
        top_k=0 if top_k is None else top_k.data_ptr(),
        top_p=0 if top_p is None else top_p.data_ptr(),
        min_p=0 if min_p is None else min_p.data_ptr(),
        logit_bias=0 if logit_bias is None else logit_bias.data_ptr(),
        repetition_penalty=0 if repetition_penalty is None else repetition_penalty.data_ptr(),
        presence_penalty=0 if presence_penalty is None else presence_penalty.data_ptr(),
        frequency_penalty=0 if frequency_penalty is None else frequency_penalty.data_ptr(),
        prompt_mask=0 if prompt_mask is None else prompt_mask.data_ptr(),
        output_counts=0 if output_counts is None else output_counts.data_ptr(),
        grammar_mask=0 if grammar_mask is None else grammar_mask.data_ptr(),
        batch=batch,
        drafts=drafts,
        vocab=vocab,
        pool=0 if draft_ids is None else draft_ids.size(2),
        top_logprobs=0 if top_ids is None else top_ids.size(2),
        total_rows=target_logits.size(0) if ragged else 0,
        target_batch_stride=0 if ragged else target_strides[0],
        target_row_stride=target_row_stride,
        draft_tokens_stride=draft_tokens.stride(0),
        draft_batch_stride=draft_strides[0],
        draft_row_stride=draft_strides[1],
        ids_batch_stride=ids_strides[0],
        ids_row_stride=ids_strides[1],
        bias_stride=0 if logit_bias is None else logit_bias.stride(0),
        prompt_stride=0 if prompt_mask is None else prompt_mask.stride(0),
        counts_stride=0 if output_counts is None else output_counts.stride(0),
        grammar_batch_stride=0 if ragged else grammar_strides[0],
        grammar_row_stride=grammar_strides[-2],
        rule=rule,
        filter_order=filter_order,
        target_dtype=DTYPES[target_logits.dtype],
        draft_dtype=_C.F32 if draft_logits is None else DTYPES[draft_logits.dtype],
        device=device,
        stream=stream,
    )
    check_status("verify_chain", code)


_verify_chain = define(
    "verify_chain(Tensor target_logits, Tensor draft_tokens, int rule, Tensor? rules, "
    "Tensor? temperature, Tensor? seed, Tensor? block_start, Tensor? draft_logits, "
    "Tensor? draft_ids, Tensor? draft_logprob, Tensor? draft_temperature, Tensor? top_k, "
    "Tensor? top_p, Tensor? min_p, int filter_order, Tensor? logit_bias, "
    "Tensor? repetition_penalty, Tensor? presence_penalty, Tensor? frequency_penalty, "
    "Tensor? prompt_mask, Tensor? output_counts, Tensor? grammar_mask, int vocab, "
    "Tensor? num_active, Tensor? residual_slot, Tensor? cu_rows, Tensor(a!) tokens, "
    "Tensor(b!) num_accepted, "
    "Tensor(c!) num_emitted, Tensor(d!)? chosen_logprob, Tensor(e!) status, Tensor(f!)? top_ids, "
    "Tensor(g!)? top_logprob, Tensor(h!) workspace) -> ()",
    _launch_verify_chain,
)


def _workspace_words(batch, drafts, vocab, dense):
    """verify_chain_workspace of csrc/verify/verify_chain.h, in int64 words, for torch.compile."""
    rows, chunks = batch * (drafts + 1 + dense * drafts), (vocab + 1023) // 1024
    words = rows * chunks + batch
    of_row = 12 + dense * 128
    return _CONTROL_WORDS + 2 * (rows * chunks + (words + 3) // 4) + batch * (drafts + 1) * of_row


def verify_chain_workspace(batch, drafts, vocab, *, dense=False, device):
    """Scratch memory that one verify_chain call of this size uses: int64.

    Made with zeros where calls count with them, and left so by each call: nobody else may write it.

    batch, drafts, vocab: B, K and V (vocab_valid where that is given); dense: q is [B, K, V].
    """
    cuda = torch.device(device).type == "cuda"  # the CPU twin needs none
    words = _workspace_words(batch, drafts, vocab, dense) if cuda else 0
    workspace = torch.empty(words, dtype=torch.int64, device=device)
    workspace[:_CONTROL_WORDS].zero_()
    return workspace


def _result_sizes(batch, drafts, logprobs, top_logprobs):
    narrow, wide = (batch,), (batch, drafts + 1)
    top = (batch, drafts + 1, top_logprobs)
    return (
        (wide, torch.int64),
        (narrow, torch.int32),
        (narrow, torch.int32),
        (wide, torch.float32) if logprobs else None,
        (narrow, torch.uint8),
        (top, torch.int32) if top_logprobs else None,
        (top, torch.float32) if top_logprobs else None,
    )


def _empty_result(batch, drafts, device, *, logprobs=True, top_logprobs=0):
    sizes = _result_sizes(batch, drafts, logprobs, top_logprobs)
    return VerifyResult(
        *(size and torch.empty(size[0], dtype=size[1], device=device) for size in sizes)
    )


def _check_result(op, out, batch, drafts, device, logprobs, top_logprobs):
    if not isinstance(out, VerifyResult):
        raise TypeError(f"{op}: out: got {type(out).__name__}, expected a VerifyResult")
    tokens, num_accepted, num_emitted, chosen_logprob, status, top_ids, top_logprob = out
    narrow, wide = (batch,), (batch, drafts + 1)
    checks.output(op, "out.tokens", tokens, wide, torch.int64, device)
    checks.output(op, "out.num_accepted", num_accepted, narrow, torch.int32, device)
    checks.output(op, "out.num_emitted", num_emitted, narrow, torch.int32, device)
    checks.output(op, "out.status", status, narrow, torch.uint8, device)
    if logprobs:
        checks.output(op, "out.chosen_logprob", chosen_logprob, wide, torch.float32, device)
    elif chosen_logprob is not None:
        raise ValueError(f"{op}: out.chosen_logprob: got a tensor, expected None")
    if top_logprobs:
        top = *wide, top_logprobs
        checks.output(op, "out.top_ids", top_ids, top, torch.int32, device)
        checks.output(op, "out.top_logprob", top_logprob, top, torch.float32, device)
    elif not (top_ids is top_logprob is None):
        name = "top_logprob" if top_ids is None else "top_ids"
        raise ValueError(f"{op}: out.{name}: got a tensor, expected None")


def _check_workspace(op, workspace, batch, drafts, vocab, dense, device):
    if not isinstance(workspace, torch.Tensor):
        raise TypeError(f"{op}: workspace: got {type(workspace).__name__}, expected a tensor")
    if device.type != "cuda":  # the CPU twin needs none
        return
    size, needed = workspace.numel(), _workspace_words(batch, drafts, vocab, dense)
    if size < needed:
        raise ValueError(f"{op}: workspace: got {size} words, expected {needed} or more")
    checks.tensor(op, "workspace", workspace, (size,), torch.int64, device)


def verify_chain(
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
    vocab_valid=None,
    num_active=None,
    keying=None,
    logprobs=True,
    top_logprobs=0,
    cu_rows=None,
    out=None,
    workspace=None,
):
    """Keeps the longest valid prefix of each request's drafts and adds one token of the target.

    The emitted tokens have exactly the law of the target decoding alone, whatever the drafts are.
    Row i of a request holds the target's logits after its drafts 0..i-1, so it judges draft i; the
    last row has no draft to judge. p is the law of a row: logits with their edits, over the
    temperature, filtered.

    - "greedy": a draft is kept if it is the row's argmax (ties to the lowest id); the first other
      row emits its argmax. Any request with temperature 0 goes by this rule.
    - "token": a draft x with law q is kept with probability min(1, p(x) / q(x)), never where
      p(x) = 0; its replacement is drawn from relu(p - q), renormalised; after the last draft a
      token is drawn from p. Without q the drafts are one-hot: kept with probability p(x), replaced
      from p without x. That is lossless for any drafts, also argmax ones. q has to be the law that
      the drafts were sampled from.
    - "onehot": "token" with q ignored.
    - "match": y is drawn from p with noise of its position; a draft is kept if it is y, otherwise y
      is emitted. The output is a function of seed and position alone: it is what decoding without
      drafts gives, whatever the drafts are.
    - "gumbel": the same, for drafters that race their q with the same noise (POSITION_DRAW).
    - "block": block verification; keeps at least as many drafts as "token" for the same q, on
      average. One-hot drafts: as "token".

    K = 0 drafts is plain decoding: one token of each request's single row.

    Noise: domino_kernels.rng, coin i (VERIFY_COIN), replacement at slot i (RESIDUAL_DRAW), a token
    drawn from p at row i (BONUS_DRAW), or POSITION_DRAW. A request's output does not depend on the
    batch around it, and CPU and CUDA give the same bits. Weights below 2**-100 count as zero.

    Args:
        target_logits: [B, K + 1, V], or [R, V] with cu_rows; float32, float16 or bfloat16, last
            dimension contiguous, other strides free. 1 <= V <= 2**23. A masked token is -inf.
        draft_tokens: [B, K] int64, K >= 0. -1 ends a request's chain (no draft at that slot); so
            does an id outside the vocabulary, with a status bit.
        rule: a name, or [B] uint8 of VerifyRule: mixed in one call.
        temperature: [B] float32, >= 0; needed by all rules but "greedy", like the next two.
        seed: [B] int64, any value.
        block_start: [B] int64, absolute position of the block's anchor (the token before draft 0).
            It has to grow from call to call of a request.
        draft_logits: [B, K, V], any of the three dtypes, last dimension contiguous; [B, K, M] with
            draft_ids; None: one-hot.
        draft_ids: [B, K, M] int32, distinct: q is the softmax of these tokens' logits alone. Ids
            outside the vocabulary are unused entries.
        draft_logprob: [B, K] float32, log q of each draft and nothing else. A rejected draft is
            not replaced: status NEEDS_RESIDUAL, and residual_sample draws the token from the one
            row of q that it needs. Not with rule "block" (in a tensor of rules: BAD_PARAMETER).
        draft_temperature: [B] float32, q = softmax(draft_logits / draft_temperature); 0: one-hot;
            None: the target's temperature.
        top_k: [B] int32, <= 0: off. Ties with the k-th logit are kept.
        top_p: [B] float32, >= 1: off. A token is kept if less than top_p lies before it, by
            falling logit, ties by id.
        min_p: [B] float32, <= 0: off, above 1 as 1. Kept are tokens of at least min_p times the
            greatest p.
        filter_order: what top_p is a share of: the top-k tokens ("transformers": top-k, top-p,
            min-p), those of top-k and min-p ("vllm": min-p first), or the row ("joint").
        logit_bias: [B, V] float32, added.
        repetition_penalty: [B] float32, divides the positive logits of tokens seen in prompt or
            output, multiplies the negative ones; 1: off.
        presence_penalty, frequency_penalty: [B] float32, taken off the logits of generated tokens,
            once or for each time; 0: off. In all three the drafts before a row count as generated.
        prompt_mask: [B, ceil(V / 32)] int32, bit t % 32 of word t // 32: token t is in the prompt.
        output_counts: [B, V] int32, how often a token was generated.
        grammar_mask: [B, K + 1, ceil(V / 32)] int32, or [R, ...] with cu_rows: bit 1 allows.
        vocab_valid: int, the vocabulary without its padding; ids from there on do not exist.
        num_active: [1] int32: requests from there on are inactive and emit nothing.
        keying: None, or "block" / "position" as the drafter's noise was keyed: an error where the
            rule needs the other one. Not looked at for a tensor of rules.
        logprobs: False: no chosen_logprob; greedy requests then need no sums.
        top_logprobs: n likeliest tokens of each emitted token's row, with their log p.
        cu_rows: [B + 1] int32: request b owns rows cu_rows[b] .. cu_rows[b + 1] - 1 of
            target_logits and has one draft less than rows. No row: an inactive request, which
            emits nothing.
        out: VerifyResult of contiguous tensors to write.
        workspace: int64 tensor from verify_chain_workspace, so that the call allocates nothing.
            One call at a time may use it.

    Returns:
        VerifyResult; `out` where given. Log-probabilities are those of the edited logits at the
        request's temperature (1 for greedy requests), before the filters. Where a row cannot be
        decided (VerifyStatus.FAILED) the request stops before that row: the drafts accepted so far
        are emitted and nothing else, so num_emitted may be 0 and the caller has to look at
        `status`.

    Raises:
        TypeError, ValueError: an argument does not fit, or requires grad (the op has no gradient).

    Every value of a parameter tensor is read on the device: no synchronisation, and a CUDA graph
    replays with what the tensors then hold.

    Source: Leviathan et al. 2211.17192, Chen et al. 2302.01318; Sun et al. 2403.10444 (block);
    Daliri et al. 2408.07978 (gumbel); races instead of inverse CDFs.
    """
    op = "verify_chain"
    batch, drafts, vocab = check_rows(op, target_logits, draft_tokens, cu_rows, num_active)
    device = target_logits.device
    rules, code = check_rule(op, rule, keying, batch, device)
    wide = vocab if vocab_valid is None else vocab_valid
    if not isinstance(wide, int) or not 1 <= wide <= vocab:
        raise ValueError(f"{op}: vocab_valid: got {wide!r}, expected 1 to V = {vocab}")
    dense = check_sampling(
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
    checks.integer(op, "top_logprobs", top_logprobs, 0, 128)

    if out is None:
        out = _empty_result(batch, drafts, device, logprobs=logprobs, top_logprobs=top_logprobs)
    else:
        _check_result(op, out, batch, drafts, device, logprobs, top_logprobs)
    if workspace is None:
        workspace = verify_chain_workspace(batch, drafts, wide, dense=dense, device=device)
    else:
        _check_workspace(op, workspace, batch, drafts, wide, dense, device)
    _verify_chain(
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
        wide,
        num_active,
        None,
        cu_rows,
        *out,
        workspace,
    )
    return out


def _launch_noise(seed, block_start, i, purpose, kind, out):
    code = _C.noise(
        out=out.data_ptr(),
        seed=seed.data_ptr(),
        block_start=block_start.data_ptr(),
        batch=out.size(0),
        count=out.size(1),
        i=i,
        purpose=purpose,
        kind=kind,
        **target(seed),
    )
    check_status("noise", code)


_noise = define(
    "noise(Tensor seed, Tensor block_start, int i, int purpose, int kind, Tensor(a!) out) -> ()",
    _launch_noise,
)


def noise(seed, block_start, i, purpose, count, *, kind="words", out=None):
    """The noise that the kernels use, for drafters that sample and for tests.

    Args:
        seed: [B] int64, block_start: [B] int64, i: int in [0, 2**24), purpose: a constant of
            domino_kernels.rng, count: indices 0 .. count - 1.
        kind: "words" (the 32 bits), "uniform" ((0, 1], for coins) or "exponential" (for races).

    Returns:
        [B, count]: int64 for words, float32 otherwise; `out` where given.

    Raises:
        TypeError, ValueError: an argument does not fit.

    Source: domino_kernels.rng.
    """
    op = "noise"
    (batch,) = checks.sizes(op, "seed", seed, "[B]")
    checks.tensor(op, "seed", seed, (batch,), torch.int64, seed.device)
    checks.tensor(op, "block_start", block_start, (batch,), torch.int64, seed.device)
    if not isinstance(i, int) or not 0 <= i < 1 << 24:
        raise ValueError(f"{op}: i: got {i!r}, expected 0 to 2**24 - 1")
    if not rng.DRAFT_TOKEN <= purpose <= rng.POSITION_DRAW:
        raise ValueError(f"{op}: purpose: got {purpose}, expected a constant of domino_kernels.rng")
    if not isinstance(count, int) or not 0 <= count <= 1 << 34:
        raise ValueError(f"{op}: count: got {count!r}, expected 0 to 2**34")
    if kind not in _NOISE_KINDS:
        raise ValueError(f"{op}: kind: got {kind!r}, expected one of {', '.join(_NOISE_KINDS)}")
    dtype = torch.int64 if kind == "words" else torch.float32
    if out is None:
        out = torch.empty((batch, count), dtype=dtype, device=seed.device)
    else:
        checks.tensor(op, "out", out, (batch, count), dtype, seed.device)
        checks.contiguous(op, "out", out)
    _noise(seed, block_start, i, purpose, _NOISE_KINDS[kind], out)
    return out
