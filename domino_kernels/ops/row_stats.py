"""Log-sum-exp, argmax, chosen and likeliest tokens of rows of logits, whole or sharded."""

from typing import NamedTuple

import torch

from domino_kernels import _C
from domino_kernels.ops import checks
from domino_kernels.ops.verify import _check_workspace, verify_chain_workspace
from domino_kernels.ops.verify_checks import MAX_VOCAB
from domino_kernels.torch_library import DTYPES, check_status, define, pointer, target

PARTIAL_WORDS = 5


class RowStats(NamedTuple):
    """What row_stats writes. A row that cannot be used (status) has lse NaN and argmax -1."""

    lse: torch.Tensor  # [R] float32: log sum exp(logits / temperature)
    argmax: torch.Tensor  # [R] int64: lowest id of the greatest logit
    logprob: torch.Tensor | None  # [R] float32: log p of the row's token, 0 where it has none
    status: torch.Tensor  # [R] uint8: NON_FINITE, EMPTY_ROW, BAD_ID, BAD_PARAMETER
    partials: torch.Tensor  # [R, 5] int64: what shards exchange, see combine_row_stats
    top_ids: torch.Tensor | None = None  # [R, n] int32: likeliest tokens, then -1
    top_logprob: torch.Tensor | None = None  # [R, n] float32: their log p, then 0


def _launch(
    name,
    function,
    logits,
    tokens,
    temperature,
    vocab,
    vocab_start,
    vocab_total,
    parts,
    lse,
    argmax,
    logprob,
    status,
    partials,
    top_ids,
    top_logprob,
    workspace,
):
    code = function(
        lse=lse.data_ptr(),
        argmax=argmax.data_ptr(),
        logprob=pointer(logprob),
        status=status.data_ptr(),
        partials=partials.data_ptr(),
        top_ids=pointer(top_ids),
        top_logprob=pointer(top_logprob),
        workspace=pointer(workspace),
        logits=pointer(logits),
        tokens=pointer(tokens),
        temperature=pointer(temperature),
        rows=lse.size(0),
        vocab=vocab,
        vocab_start=vocab_start,
        vocab_total=vocab_total,
        row_stride=0 if logits is None else logits.stride(0),
        parts=parts,
        top_logprobs=0 if top_ids is None else top_ids.size(1),
        dtype=_C.F32 if logits is None else DTYPES[logits.dtype],
        **target(partials),
    )
    check_status(name, code)


def _launch_row_stats(logits, tokens, temperature, vocab_start, vocab_total, *out):
    name, function = "row_stats", _C.row_stats
    sizes = logits.size(1), vocab_start, vocab_total, 1
    _launch(name, function, logits, tokens, temperature, *sizes, *out)


def _launch_combine(partials, tokens, temperature, vocab_total, lse, argmax, logprob, status):
    name, function = "combine_row_stats", _C.combine_row_stats
    sizes = 1, 0, vocab_total, partials.size(0)
    out = lse, argmax, logprob, status, partials, None, None, None
    _launch(name, function, None, tokens, temperature, *sizes, *out)


_row_stats = define(
    "row_stats(Tensor logits, Tensor? tokens, Tensor? temperature, int vocab_start, "
    "int vocab_total, Tensor(a!) lse, Tensor(b!) argmax, Tensor(c!)? logprob, Tensor(d!) status, "
    "Tensor(e!) partials, Tensor(f!)? top_ids, Tensor(g!)? top_logprob, Tensor(h!) workspace) "
    "-> ()",
    _launch_row_stats,
)
_combine_row_stats = define(
    "combine_row_stats(Tensor partials, Tensor? tokens, Tensor? temperature, int vocab_total, "
    "Tensor(a!) lse, Tensor(b!) argmax, Tensor(c!)? logprob, Tensor(d!) status) -> ()",
    _launch_combine,
)


def _check_rows(op, rows, tokens, temperature, device):
    if tokens is not None:
        checks.tensor(op, "tokens", tokens, (rows,), torch.int64, device)
    if temperature is not None:
        checks.tensor(op, "temperature", temperature, (rows,), torch.float32, device)


def _empty(rows, tokens, device):
    make = lambda dtype: torch.empty(rows, dtype=dtype, device=device)  # noqa: E731
    logprob = None if tokens is None else make(torch.float32)
    return make(torch.float32), make(torch.int64), logprob, make(torch.uint8)


def _check_out(op, out, rows, tokens, top_logprobs, device):
    if not isinstance(out, RowStats):
        raise TypeError(f"{op}: out: got {type(out).__name__}, expected a RowStats")
    top = (rows, top_logprobs) if top_logprobs else None
    expected = (
        ((rows,), torch.float32),
        ((rows,), torch.int64),
        (None if tokens is None else (rows,), torch.float32),
        ((rows,), torch.uint8),
        ((rows, PARTIAL_WORDS), torch.int64),
        (top, torch.int32),
        (top, torch.float32),
    )
    for name, value, (shape, dtype) in zip(RowStats._fields, out, expected):
        if shape is not None:
            checks.tensor(op, f"out.{name}", value, shape, dtype, device)
            checks.contiguous(op, f"out.{name}", value)
        elif value is not None:
            raise ValueError(f"{op}: out.{name}: got a tensor, expected None")


def row_stats(
    logits,
    tokens=None,
    temperature=None,
    *,
    top_logprobs=0,
    vocab_start=0,
    vocab_total=None,
    out=None,
    workspace=None,
):
    """Statistics of the laws softmax(logits / temperature), each row read once.

    Of a shard of the vocabulary this gives the shard's own statistics, and partials that
    combine_row_stats joins to the bits of the whole row, if every shard begins at a multiple of
    128 tokens.

    Args:
        logits: [R, V] float32, float16 or bfloat16, last dimension contiguous; 1 <= V <= 2**23.
        tokens: [R] int64, ids in the whole vocabulary; -1: none.
        temperature: [R] float32, > 0; 0 counts as 1; None: 1.
        top_logprobs: n likeliest tokens of each row, at most 128.
        vocab_start: id of the first token of this shard; vocab_total: size of the whole vocabulary,
            None: V + vocab_start.
        out: RowStats to write; workspace: from verify_chain_workspace(R, 0, V).

    Returns:
        RowStats; `out` where given. logprob is that within the shard, 0 where the token is in
        another one.

    Raises:
        TypeError, ValueError: an argument does not fit.

    Source: docs/numerics.md.
    """
    op = "row_stats"
    rows, vocab = checks.sizes(op, "logits", logits, "[R, V]")
    device = logits.device
    checks.dtype(op, "logits", logits, DTYPES)
    checks.tensor(op, "logits", logits, (rows, vocab), logits.dtype, device)
    if not 1 <= vocab <= MAX_VOCAB:
        raise ValueError(f"{op}: logits: got V = {vocab}, expected 1 to {MAX_VOCAB}")
    _check_rows(op, rows, tokens, temperature, device)
    checks.integer(op, "top_logprobs", top_logprobs, 0, 128)
    checks.integer(op, "vocab_start", vocab_start, 0, MAX_VOCAB)
    if vocab_total is not None:
        checks.integer(op, "vocab_total", vocab_total, 1, MAX_VOCAB)
    total = vocab_start + vocab if vocab_total is None else vocab_total
    if vocab_start % 128 or not 0 <= vocab_start <= vocab_start + vocab <= total <= MAX_VOCAB:
        raise ValueError(
            f"{op}: vocab_start: got {vocab_start} and {vocab} of {total} tokens, expected a "
            f"multiple of 128 and a part of the vocabulary"
        )
    if out is None:
        words = rows, PARTIAL_WORDS
        partials = torch.empty(words, dtype=torch.int64, device=device)
        top = [None, None]
        if top_logprobs:
            shape = rows, top_logprobs
            top = [torch.empty(shape, dtype=d, device=device) for d in (torch.int32, torch.float32)]
        out = RowStats(*_empty(rows, tokens, device), partials, *top)
    else:
        _check_out(op, out, rows, tokens, top_logprobs, device)
    if workspace is None:
        workspace = verify_chain_workspace(rows, 0, vocab, device=device)
    else:
        _check_workspace(op, workspace, rows, 0, vocab, False, device)
    _row_stats(logits, tokens, temperature, vocab_start, total, *out, workspace)
    if vocab_start and top_logprobs:
        out.top_ids.add_(vocab_start * (out.top_ids >= 0))
    return out


def combine_row_stats(partials, tokens=None, temperature=None, *, vocab_total):
    """The statistics of whole rows from those of their shards.

    Args:
        partials: [N, R, 5] int64, RowStats.partials of N shards, in any order, each called with the
            same tokens and temperature: what an all-gather gives.
        tokens, temperature: as in row_stats. vocab_total: size of the whole vocabulary.

    Returns:
        RowStats without partials and likeliest tokens.

    Raises:
        TypeError, ValueError: an argument does not fit.

    Source: docs/numerics.md.
    """
    op = "combine_row_stats"
    parts, rows, _ = checks.sizes(op, "partials", partials, "[N, R, 5]")
    if parts == 0:
        raise ValueError(f"{op}: partials: got none, expected those of all shards")
    device, shape = partials.device, (parts, rows, PARTIAL_WORDS)
    checks.tensor(op, "partials", partials, shape, torch.int64, device)
    checks.contiguous(op, "partials", partials)
    checks.integer(op, "vocab_total", vocab_total, 1, MAX_VOCAB)
    _check_rows(op, rows, tokens, temperature, device)
    out = _empty(rows, tokens, device)
    _combine_row_stats(partials, tokens, temperature, vocab_total, *out)
    return RowStats(*out, None)
