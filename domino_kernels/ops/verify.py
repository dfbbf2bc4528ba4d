"""Verification: which drafts of a block the target keeps, and the token that follows them."""

from enum import IntFlag
from typing import NamedTuple

import torch

from domino_kernels import _C, rng
from domino_kernels.ops import checks
from domino_kernels.torch_library import DTYPES, check_status, define, target

_MAX_VOCAB = 1 << 23
_NOISE_KINDS = {"words": 0, "uniform": 1, "exponential": 2}


class VerifyStatus(IntFlag):
    """Bits of `VerifyResult.status`. Only what the walk reached sets a bit.

    The bits of FAILED end the request's output early: `num_emitted == num_accepted`. With the
    others the emitted tokens still have the target's law.
    """

    NON_FINITE = 1  # a target row with NaN or +inf
    EMPTY_ROW = 2  # a target row that is all -inf
    BAD_ID = 4  # a draft id outside [0, V) other than the pad -1; the chain ends before it
    ZERO_RESIDUAL = 8  # nothing left of relu(p - q): drawn from p
    BAD_DRAFT_LAW = 16  # a draft row not finite or empty, or q(x) = 0: judged as a one-hot draft
    BAD_PARAMETER = 32  # a temperature that is negative or not finite
    BAD_ROWS = 64  # cu_rows: more than K + 1 rows, less than none, or rows that do not exist
    FAILED = NON_FINITE | EMPTY_ROW | BAD_PARAMETER | BAD_ROWS


class VerifyResult(NamedTuple):
    """What verify_chain writes."""

    tokens: torch.Tensor  # [B, K + 1] int64: the emitted tokens, then -1
    num_accepted: torch.Tensor  # [B] int32: drafts kept
    num_emitted: torch.Tensor  # [B] int32: num_accepted + 1, or num_accepted where FAILED
    chosen_logprob: torch.Tensor  # [B, K + 1] float32: log p of each emitted token, then 0
    status: torch.Tensor  # [B] uint8: bits of VerifyStatus


def _pointer(tensor):
    return 0 if tensor is None else tensor.data_ptr()


def _launch_verify_chain(
    target_logits,
    draft_tokens,
    temperature,
    seed,
    block_start,
    draft_logits,
    draft_temperature,
    cu_rows,
    tokens,
    num_accepted,
    num_emitted,
    chosen_logprob,
    status,
    workspace,
):
    ragged, dense = cu_rows is not None, draft_logits is not None
    code = _C.verify_chain(
        tokens=tokens.data_ptr(),
        num_accepted=num_accepted.data_ptr(),
        num_emitted=num_emitted.data_ptr(),
        chosen_logprob=chosen_logprob.data_ptr(),
        status=status.data_ptr(),
        workspace=workspace.data_ptr(),
        target_logits=target_logits.data_ptr(),
        draft_tokens=draft_tokens.data_ptr(),
        temperature=_pointer(temperature),
        seed=_pointer(seed),
        block_start=_pointer(block_start),
        draft_logits=_pointer(draft_logits),
        draft_temperature=_pointer(draft_temperature),
        cu_rows=_pointer(cu_rows),
        batch=draft_tokens.size(0),
        drafts=draft_tokens.size(1),
        vocab=target_logits.size(-1),
        total_rows=target_logits.size(0) if ragged else 0,
        target_batch_stride=0 if ragged else target_logits.stride(0),
        target_row_stride=target_logits.stride(-2),
        draft_tokens_stride=draft_tokens.stride(0),
        draft_batch_stride=draft_logits.stride(0) if dense else 0,
        draft_row_stride=draft_logits.stride(1) if dense else 0,
        target_dtype=DTYPES[target_logits.dtype],
        draft_dtype=DTYPES[draft_logits.dtype] if dense else _C.F32,
        **target(target_logits),
    )
    check_status("verify_chain", code)


_verify_chain = define(
    "verify_chain(Tensor target_logits, Tensor draft_tokens, Tensor? temperature, Tensor? seed, "
    "Tensor? block_start, Tensor? draft_logits, Tensor? draft_temperature, Tensor? cu_rows, "
    "Tensor(a!) tokens, Tensor(b!) num_accepted, Tensor(c!) num_emitted, "
    "Tensor(d!) chosen_logprob, Tensor(e!) status, Tensor(f!) workspace) -> ()",
    _launch_verify_chain,
)


def verify_chain_workspace(batch, drafts, *, dense=False, device):
    """Scratch memory that one verify_chain call of this size uses; `dense`: with draft_logits."""
    words = 0  # the CPU twin needs none
    if torch.device(device).type == "cuda":
        rows = drafts + 1 + (drafts if dense else 0)
        words = batch * (3 * rows + 2)  # kRowStatsBytes, kDrawStateBytes of verify_chain.h
    return torch.empty(words, dtype=torch.int64, device=device)


_RESULT_DTYPES = torch.int64, torch.int32, torch.int32, torch.float32, torch.uint8


def _empty_result(batch, drafts, device):
    shapes = (batch, drafts + 1), batch, batch, (batch, drafts + 1), batch
    pairs = zip(shapes, _RESULT_DTYPES)
    return VerifyResult(*(torch.empty(size, dtype=kind, device=device) for size, kind in pairs))


def _check_result(op, out, batch, drafts, device):
    if not isinstance(out, VerifyResult):
        raise TypeError(f"{op}: out: got {type(out).__name__}, expected a VerifyResult")
    narrow, wide = (batch,), (batch, drafts + 1)
    shapes = wide, narrow, narrow, wide, narrow
    for name, value, shape, dtype in zip(VerifyResult._fields, out, shapes, _RESULT_DTYPES):
        # the passing path in four questions a tensor; what is wrong is found out afterwards
        if not (
            type(value) is torch.Tensor
            and value.shape == shape
            and value.dtype is dtype
            and value.device == device
            and value.is_contiguous()
        ):
            checks.tensor(op, f"out.{name}", value, shape, dtype, device)
            checks.contiguous(op, f"out.{name}", value)


def verify_chain(
    target_logits,
    draft_tokens,
    *,
    rule="greedy",
    temperature=None,
    seed=None,
    block_start=None,
    draft_logits=None,
    draft_temperature=None,
    cu_rows=None,
    out=None,
    workspace=None,
):
    """Keeps the longest valid prefix of each request's drafts and adds one token of the target.

    The emitted tokens have exactly the law of the target decoding alone, whatever the drafts are.
    Row i of a request holds the target's logits after its drafts 0..i-1, so it judges draft i; the
    last row has no draft to judge.

    - `rule="greedy"`: a draft is kept if it is the row's argmax (ties to the lowest id); the first
      other row emits its argmax.
    - `rule="token"`: p = softmax(logits / temperature). A draft x with law q is kept with
      probability min(1, p(x) / q(x)), never where p(x) = 0; its replacement is drawn from
      relu(p - q), renormalised; after the last draft a token is drawn from p. Without
      `draft_logits` the drafts are one-hot: kept with probability p(x), replaced from p without x.
      That is lossless for any drafts, also argmax ones. `draft_logits` have to be the law that the
      drafts were sampled from. A request with temperature 0 goes by the greedy rule.

    K = 0 drafts is plain decoding: one token of each request's single row.

    Noise: domino_kernels.rng, coin i (VERIFY_COIN), replacement at slot i (RESIDUAL_DRAW), a token
    drawn from p at row i (BONUS_DRAW). A request's output does not depend on the batch around it,
    and CPU and CUDA give the same bits. Weights below 2**-100 of the row's largest count as zero.

    Args:
        target_logits: [B, K + 1, V], or [R, V] with cu_rows; float32, float16 or bfloat16, last
            dimension contiguous, other strides free. 1 <= V <= 2**23. A masked token is -inf.
        draft_tokens: [B, K] int64, K >= 0. -1 ends a request's chain (no draft at that slot); so
            does an id outside the vocabulary, with a status bit.
        temperature: [B] float32, >= 0; rule "token" only, like the next four.
        seed: [B] int64, any value.
        block_start: [B] int64, absolute position of the block's anchor (the token before draft 0).
            It has to grow from call to call of a request.
        draft_logits: [B, K, V], any of the three dtypes, last dimension contiguous; None: one-hot.
        draft_temperature: [B] float32, q = softmax(draft_logits / draft_temperature); 0: one-hot;
            None: the target's temperature.
        cu_rows: [B + 1] int32: request b owns rows cu_rows[b] .. cu_rows[b + 1] - 1 of
            target_logits and has one draft less than rows. No row: an inactive request, which
            emits nothing.
        out: VerifyResult of contiguous tensors to write.
        workspace: int64 tensor from verify_chain_workspace, so that the call allocates nothing.
            One call at a time may use it.

    Returns:
        VerifyResult; `out` where given. For greedy requests chosen_logprob is the logarithm of
        softmax at temperature 1. Where a row cannot be decided (VerifyStatus.FAILED) the request
        stops before that row: the drafts accepted so far are emitted and nothing else, so
        num_emitted may be 0 and the caller has to look at `status`.

    Raises:
        TypeError, ValueError: an argument does not fit, or requires grad (the op has no gradient).

    Every value of a parameter tensor is read on the device: no synchronisation, and a CUDA graph
    replays with what the tensors then hold.

    Source: Leviathan et al. 2211.17192, Chen et al. 2302.01318; races instead of inverse CDFs.
    """
    op = "verify_chain"
    batch, drafts = checks.sizes(op, "draft_tokens", draft_tokens, "[B, K]")
    if cu_rows is None:
        vocab = checks.sizes(op, "target_logits", target_logits, "[B, K + 1, V]")[2]
        shape = (batch, drafts + 1, vocab)
    else:
        rows, vocab = checks.sizes(op, "target_logits", target_logits, "[R, V]")
        shape = (rows, vocab)
    device = target_logits.device
    checks.dtype(op, "target_logits", target_logits, DTYPES)
    checks.tensor(op, "target_logits", target_logits, shape, target_logits.dtype, device)
    if not 1 <= vocab <= _MAX_VOCAB:
        raise ValueError(f"{op}: target_logits: got V = {vocab}, expected 1 to {_MAX_VOCAB}")
    checks.tensor(op, "draft_tokens", draft_tokens, (batch, drafts), torch.int64, device)
    if cu_rows is not None:
        checks.tensor(op, "cu_rows", cu_rows, (batch + 1,), torch.int32, device)

    if rule == "token":
        checks.tensor(op, "temperature", temperature, (batch,), torch.float32, device)
        checks.tensor(op, "seed", seed, (batch,), torch.int64, device)
        checks.tensor(op, "block_start", block_start, (batch,), torch.int64, device)
        if draft_logits is not None:
            checks.sizes(op, "draft_logits", draft_logits, "[B, K, V]")
            checks.dtype(op, "draft_logits", draft_logits, DTYPES)
            shape = (batch, drafts, vocab)
            checks.tensor(op, "draft_logits", draft_logits, shape, draft_logits.dtype, device)
        if draft_temperature is not None:
            if draft_logits is None:
                raise ValueError(f"{op}: draft_temperature: got a tensor, expected draft_logits")
            shape = (batch,)
            checks.tensor(op, "draft_temperature", draft_temperature, shape, torch.float32, device)
    elif rule == "greedy":
        for name, value in (
            ("temperature", temperature),
            ("seed", seed),
            ("block_start", block_start),
            ("draft_logits", draft_logits),
            ("draft_temperature", draft_temperature),
        ):
            if value is not None:
                raise ValueError(f"{op}: {name}: got a value, expected None with rule='greedy'")
    else:
        raise ValueError(f"{op}: rule: got {rule!r}, expected 'greedy' or 'token'")

    if out is None:
        out = _empty_result(batch, drafts, device)
    else:
        _check_result(op, out, batch, drafts, device)
    dense = draft_logits is not None
    if workspace is None:
        workspace = verify_chain_workspace(batch, drafts, dense=dense, device=device)
    elif device.type == "cuda":
        needed = batch * (3 * (drafts + 1 + (drafts if dense else 0)) + 2)
        size = workspace.numel()
        if size < needed:
            raise ValueError(f"{op}: workspace: got {size} words, expected {needed} or more")
        checks.tensor(op, "workspace", workspace, (size,), torch.int64, device)
    _verify_chain(
        target_logits,
        draft_tokens,
        temperature,
        seed,
        block_start,
        draft_logits,
        draft_temperature,
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
    if not 0 <= i < 1 << 24:
        raise ValueError(f"{op}: i: got {i}, expected 0 to 2**24 - 1")
    if not rng.DRAFT_TOKEN <= purpose <= rng.POSITION_DRAW:
        raise ValueError(f"{op}: purpose: got {purpose}, expected a constant of domino_kernels.rng")
    if not 0 <= count <= 1 << 34:
        raise ValueError(f"{op}: count: got {count}, expected 0 to 2**34")
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
