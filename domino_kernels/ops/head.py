"""The drafting head: the serial chain of GRU steps and low-rank logit corrections."""

import torch

from domino_kernels import _C
from domino_kernels.ops import checks
from domino_kernels.ops.head_weights import LOW_RANK, HeadWeights
from domino_kernels.torch_library import DTYPES, check_status, define, pointer, target


def _launch_gru_step(x, state, w_ih, w_hh, out):
    status = _C.gru_step(
        out=out.data_ptr(),
        x=x.data_ptr(),
        state=state.data_ptr(),
        w_ih=w_ih.data_ptr(),
        w_hh=w_hh.data_ptr(),
        batch=x.size(0),
        inputs=x.size(1),
        units=state.size(1),
        out_stride=out.stride(0),
        x_stride=x.stride(0),
        state_stride=state.stride(0),
        dtype=DTYPES[x.dtype],
        **target(x),
    )
    check_status("gru_step", status)


_gru_step = define(
    "gru_step(Tensor x, Tensor state, Tensor w_ih, Tensor w_hh, Tensor(a!) out) -> ()",
    _launch_gru_step,
)


def gru_step(x, state, w_ih, w_hh, *, out=None):
    """One step of a GRU without bias, for a batch of rows: the prefix GRU of the Domino head.

        r = sigmoid(w_ir x + w_hr s)    z = sigmoid(w_iz x + w_hz s)
        n = tanh(w_in x + r * (w_hn s))    s' = (1 - z) * n + z * s

    Equivalent to `torch.nn.GRU(H, G, bias=False)` for one step, with fp32 accumulation and one
    rounding, at the store. A row's result does not depend on the other rows.

    Args:
        x: [B, H] inputs; float32, float16 or bfloat16. Rows may be strided.
        state: [B, G] previous states, dtype of x. Rows may be strided.
        w_ih: [3G, H] contiguous, gates in the order r, z, n (`weight_ih_l0` of torch.nn.GRU).
        w_hh: [3G, G] contiguous (`weight_hh_l0`).
        out: [B, G] receives the new states; rows may be strided. It must not overlap an input.

    Returns:
        out, or a new tensor where out is None.

    Raises:
        TypeError, ValueError: an argument does not fit, or requires grad (the op has no gradient).

    Source: Domino's prefix GRU (public checkpoints' `prefix_gru`).
    """
    batch, inputs = checks.sizes("gru_step", "x", x, "[B, H]")
    units = checks.sizes("gru_step", "state", state, "[B, G]")[1]
    dtype, device = x.dtype, x.device
    checks.dtype("gru_step", "x", x, DTYPES)
    checks.tensor("gru_step", "x", x, (batch, inputs), dtype, device)
    checks.tensor("gru_step", "state", state, (batch, units), dtype, device)
    checks.tensor("gru_step", "w_ih", w_ih, (3 * units, inputs), dtype, device)
    checks.tensor("gru_step", "w_hh", w_hh, (3 * units, units), dtype, device)
    checks.contiguous("gru_step", "w_ih", w_ih)
    checks.contiguous("gru_step", "w_hh", w_hh)
    if out is None:
        out = torch.empty((batch, units), dtype=dtype, device=device)
    else:
        checks.tensor("gru_step", "out", out, (batch, units), dtype, device)
    _gru_step(x, state, w_ih, w_hh, out)
    return out


def _launch_draft_chain(
    base_logits,
    hidden,
    anchor,
    w_ih,
    w_hh,
    w1,
    w2,
    embedding,
    low_rank,
    shift_label,
    pure_draft_prefix_len,
    workspace,
    tokens,
    scores,
):
    if workspace.data_ptr() % 16:  # here, where a tensor being traced has become a real one
        raise ValueError(
            f"draft_chain: workspace: got address {workspace.data_ptr():#x}, "
            f"expected 16-byte alignment"
        )
    # shapes and strides unpacked: half the host time of size(i) and stride(i) for each
    batch, drafts = tokens.shape
    vocab, rank = w2.shape
    base_batch_stride, base_slot_stride, _ = base_logits.stride()
    hidden_batch_stride, hidden_slot_stride, _ = (0, 0, 0) if hidden is None else hidden.stride()
    inputs = embedding.size(1)
    units = inputs if w_hh is None else w_hh.size(1)
    status = _C.draft_chain(
        tokens=tokens.data_ptr(),
        scores=scores.data_ptr(),
        workspace=workspace.data_ptr(),
        base_logits=base_logits.data_ptr(),
        hidden=pointer(hidden),
        anchor=anchor.data_ptr(),
        w_ih=pointer(w_ih),
        w_hh=pointer(w_hh),
        w1=pointer(w1),
        w2=w2.data_ptr(),
        embedding=embedding.data_ptr(),
        batch=batch,
        drafts=drafts,
        first_slot=0 if shift_label else 1,
        prefix=pure_draft_prefix_len,
        vocab=vocab,
        inputs=inputs,
        hidden_width=0 if hidden is None else hidden.size(2),
        units=units,
        rank=rank,
        kind=low_rank,
        base_batch_stride=base_batch_stride,
        base_slot_stride=base_slot_stride,
        hidden_batch_stride=hidden_batch_stride,
        hidden_slot_stride=hidden_slot_stride,
        table=0,
        num_active=0,
        temperature=0,
        seed=0,
        block_start=0,
        mask=0,
        bias=0,
        mask_stride=0,
        bias_stride=0,
        vocab_valid=vocab,
        pool_size=0,
        pools=1,
        exact=True,
        pool_ids=0,
        restarts=0,
        pool_logits=0,
        log_probs=0,
        dtype=DTYPES[w2.dtype],
        base_dtype=DTYPES[base_logits.dtype],
        **target(tokens),
    )
    check_status("draft_chain", status)


_draft_chain = define(
    "draft_chain(Tensor base_logits, Tensor? hidden, Tensor anchor, Tensor? w_ih, Tensor? w_hh, "
    "Tensor? w1, Tensor w2, Tensor embedding, int low_rank, bool shift_label, "
    "int pure_draft_prefix_len, "
    "Tensor(a!) workspace, Tensor(b!) tokens, Tensor(c!) scores) -> ()",
    _launch_draft_chain,
)


def draft_chain_workspace(batch, num_drafts, weights):
    """Scratch memory for `draft_chain_out`: a uint8 tensor on the device of the weights.

    One tensor serves one call at a time; calls of up to this batch and num_drafts may share it.
    """
    _check_weights("draft_chain_workspace", weights)
    size = _workspace_bytes(batch, num_drafts, weights)
    return torch.empty(size, dtype=torch.uint8, device=weights.device)


def draft_chain(
    base_logits,
    hidden,
    anchor,
    weights,
    *,
    num_drafts=15,
    shift_label=True,
    pure_draft_prefix_len=1,
    return_scores=False,
):
    """The ids that a drafting head drafts behind an anchor, greedily over the full vocabulary.

    y_0 is the anchor, S_j the GRU state after the embeddings of y_0..y_j, H the hidden rows:

        score of y_{j+1} = base[slot] + [j >= pure_draft_prefix_len] * W2 SiLU(W1 [H[slot] ; S_j])

    with slot = j where shift_label (slot i predicts the token after it) and j + 1 where not (slot i
    predicts its own token; slot 0 is unused). The id is the argmax, ties to the lowest. This is
    Domino's correction; HeadWeights says what stands in its place for its cousins.

    Sums are fp32. The state and SiLU(..) are rounded to the dtype of the weights, nothing else
    between the inputs and the argmax. NaN scores never win; where all are NaN, id 0 with score NaN.
    An anchor outside the vocabulary is clamped to it (a check would wait for the device). A row's
    ids do not depend on the other rows.

    Args:
        base_logits: [B, S, V] logits of the block's slots; dtype of the weights or float32. Rows
            may be strided.
        hidden: [B, S, H] the draft backbone's output (what its lm_head reads), dtype of the
            weights. Rows may be strided. None for a head that does not see it.
        anchor: [B] int64, the last committed token of each row.
        weights: HeadWeights.
        num_drafts: K, at most S where shift_label, S - 1 where not.
        shift_label: the label convention that the drafter was trained with.
        pure_draft_prefix_len: how many drafts take the base argmax; from num_drafts on, all do.
        return_scores: also return the score of each id.

    Returns:
        tokens [B, K] int64, or (tokens, scores [B, K] float32).

    Raises:
        TypeError, ValueError: an argument does not fit, or requires grad (the op has no gradient).

    Source: Domino (arXiv 2605.29707), section 3.
    """
    batch = checks.sizes("draft_chain", "base_logits", base_logits, "[B, S, V]")[0]
    if not isinstance(num_drafts, int) or num_drafts < 1:
        raise ValueError(f"draft_chain: num_drafts: got {num_drafts!r}, expected at least 1")
    workspace = draft_chain_workspace(batch, num_drafts, weights)
    tokens = torch.empty((batch, num_drafts), dtype=torch.int64, device=weights.device)
    scores = torch.empty((batch, num_drafts), dtype=torch.float32, device=weights.device)
    draft_chain_out(
        base_logits,
        hidden,
        anchor,
        weights,
        shift_label=shift_label,
        pure_draft_prefix_len=pure_draft_prefix_len,
        out=tokens,
        scores=scores,
        workspace=workspace,
    )
    return (tokens, scores) if return_scores else tokens


def draft_chain_out(
    base_logits,
    hidden,
    anchor,
    weights,
    *,
    out,
    scores,
    workspace,
    shift_label=True,
    pure_draft_prefix_len=1,
):
    """`draft_chain` into memory of the caller: no allocation, no synchronisation, for CUDA graphs.

    Args:
        out: [B, K] int64 contiguous, receives the ids; K is num_drafts.
        scores: [B, K] float32 contiguous, receives their scores.
        workspace: from `draft_chain_workspace`, for at least this batch and K. Calls that may run
            at the same time, graph replays among them, need one each.
    """
    op = "draft_chain"
    _check_weights(op, weights)
    dtype, device = weights.dtype, weights.device
    batch, slots, _ = checks.sizes(op, "base_logits", base_logits, "[B, S, V]")
    drafts = checks.sizes(op, "out", out, "[B, K]")[1]
    checks.dtype(op, "base_logits", base_logits, {dtype: None, torch.float32: None})
    logits = (batch, slots, weights.vocab_size)
    checks.tensor(op, "base_logits", base_logits, logits, base_logits.dtype, device)
    if weights.hidden_size == 0:
        hidden = None
    else:
        checks.tensor(op, "hidden", hidden, (batch, slots, weights.hidden_size), dtype, device)
    checks.tensor(op, "anchor", anchor, (batch,), torch.int64, device)
    checks.tensor(op, "out", out, (batch, drafts), torch.int64, device)
    checks.tensor(op, "scores", scores, (batch, drafts), torch.float32, device)
    checks.contiguous(op, "out", out)
    checks.contiguous(op, "scores", scores)
    most = slots if shift_label else slots - 1
    if not 1 <= drafts <= most:
        raise ValueError(
            f"{op}: num_drafts: got {drafts}, expected 1..{most} with {slots} slots and "
            f"shift_label={bool(shift_label)}"
        )
    if pure_draft_prefix_len < 0:
        raise ValueError(
            f"{op}: pure_draft_prefix_len: got {pure_draft_prefix_len}, expected at least 0"
        )
    _check_workspace(op, workspace, batch, drafts, weights)
    _draft_chain(
        base_logits,
        hidden,
        anchor,
        weights.w_ih,
        weights.w_hh,
        weights.w1,
        weights.w2,
        weights.embedding,
        LOW_RANK[weights.low_rank],
        shift_label,
        pure_draft_prefix_len,
        workspace,
        out,
        scores,
    )
    return out


def _check_weights(op, weights):
    if not isinstance(weights, HeadWeights):
        raise TypeError(f"{op}: weights: got {type(weights).__name__}, expected HeadWeights")


def _workspace_bytes(batch, drafts, weights):
    if weights.device.type == "cpu":
        return 0
    # DraftChainWorkspace of csrc/head/draft_chain.h, in Python so that torch.compile can trace it
    up = lambda n, to: (n + to - 1) // to * to  # noqa: E731
    tile, units, rank = up(batch, 32), up(weights.state_size, 32), up(weights.rank, 32)
    parts = batch * drafts * 8, batch * drafts * weights.rank * 4
    parts += (tile * units * 4, tile * units * 4, tile * rank * 4)
    return sum(up(part, 256) for part in parts)


def _check_workspace(op, workspace, batch, drafts, weights):
    size = checks.sizes(op, "workspace", workspace, "[bytes]")
    checks.tensor(op, "workspace", workspace, size, torch.uint8, weights.device)
    need = _workspace_bytes(batch, drafts, weights)
    if size[0] < need:
        raise ValueError(f"{op}: workspace: got {size[0]} bytes, expected at least {need}")
