"""draft_chain: the ids that a Domino head drafts behind an anchor, a whole block in one call."""

from typing import NamedTuple

import torch

from domino_kernels import _C
from domino_kernels.ops import checks
from domino_kernels.ops.chain_plan import (
    ChainPlan,
    chain_workspace_bytes,
    check_weights,
    pool_size_of,
    slot_pools_of,
)
from domino_kernels.ops.draft_chain_triton import launch_triton
from domino_kernels.ops.head_weights import LOW_RANK
from domino_kernels.torch_library import DTYPES, check_status, define, place

_MOST_DRAWN = 28  # drafts that the block form takes: kEpochStride of csrc/head/draft_chain.h less 4


class DraftResult(NamedTuple):
    """What a draft returns besides its ids. K = num_drafts, M = pool_size, V the vocabulary.

    tokens [B, K] int64: y_1 .. y_K.
    scores [B, K] float32: the score (corrected logit) of each.
    restarts [B] int32: how often a winner outside the pool made the row start again (exact).
    log_probs [B, K] float32, pool_ids [B, K, M] int32, pool_logits [B, K, M] float32: where drafts
        are drawn (temperature given), otherwise None. The law that draft j was drawn from is
        softmax(pool_logits[b, j] / temperature[b]) on pool_ids[b, j], -1 for unused entries;
        log_probs is that of the drawn id. A row of temperature 0 takes the pool's argmax, and its
        log_probs are those at temperature 1.
    dense_logits [B, K, V] float32: where asked for (return_dense_q), pool_logits by id and -inf
        outside the pool: the same law for a verifier that takes no pools. `verify_chain` takes
        either, as draft_logits with draft_ids=pool_ids, or as draft_logits alone.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    restarts: torch.Tensor
    log_probs: torch.Tensor | None
    pool_ids: torch.Tensor | None
    pool_logits: torch.Tensor | None
    dense_logits: torch.Tensor | None = None

    @classmethod
    def empty(
        cls,
        weights,
        batch,
        *,
        num_drafts=15,
        pool_size=None,
        vocab_valid=None,
        sampled=False,
        dense_q=False,
    ):
        """Memory for `draft_chain_out`; dense_q: with dense_logits (4 B K V bytes), if sampled."""
        valid = weights.vocab_size if vocab_valid is None else vocab_valid
        if not isinstance(valid, int) or not 1 <= valid <= weights.vocab_size:
            raise ValueError(
                f"draft_chain: vocab_valid: got {valid!r}, expected 1..{weights.vocab_size}"
            )
        size = pool_size_of("draft_chain", pool_size, batch, valid)
        new = lambda dtype, *shape: torch.empty(shape, dtype=dtype, device=weights.device)  # noqa: E731
        return cls(
            new(torch.int64, batch, num_drafts),
            new(torch.float32, batch, num_drafts),
            new(torch.int32, batch),
            new(torch.float32, batch, num_drafts) if sampled else None,
            new(torch.int32, batch, num_drafts, size) if sampled else None,
            new(torch.float32, batch, num_drafts, size) if sampled else None,
            new(torch.float32, batch, num_drafts, weights.vocab_size)
            if sampled and dense_q
            else None,
        )


def _launch(
    base_logits,
    hidden,
    anchor,
    w_ih,
    w_hh,
    w1,
    w2,
    embedding,
    low_rank,
    table,
    screen,
    temperature,
    seed,
    block_start,
    num_active,
    mask,
    bias,
    shift_label,
    pure_draft_prefix_len,
    exact,
    portable,
    pool_size,
    slot_pools,
    vocab_valid,
    workspace,
    tokens,
    scores,
    restarts,
    log_probs,
    pool_ids,
    pool_logits,
    dense_logits,
):
    if workspace.data_ptr() % 16:  # here, where a tensor being traced has become a real one
        raise ValueError(
            f"draft_chain: workspace: got address {workspace.data_ptr():#x}, "
            f"expected 16-byte alignment"
        )
    device, stream = place(tokens)
    # shapes and strides unpacked, pointers without a function: half the host time of these lines
    batch, drafts = tokens.shape
    vocab, rank = w2.shape
    base_batch_stride, base_slot_stride, _ = base_logits.stride()
    hidden_batch_stride, hidden_slot_stride, _ = (0, 0, 0) if hidden is None else hidden.stride()
    inputs = embedding.size(1)
    status = _C.draft_chain(
        tokens=tokens.data_ptr(),
        scores=scores.data_ptr(),
        restarts=restarts.data_ptr(),
        log_probs=0 if log_probs is None else log_probs.data_ptr(),
        pool_ids=0 if pool_ids is None else pool_ids.data_ptr(),
        pool_logits=0 if pool_logits is None else pool_logits.data_ptr(),
        dense_logits=0 if dense_logits is None else dense_logits.data_ptr(),
        workspace=workspace.data_ptr(),
        base_logits=base_logits.data_ptr(),
        hidden=0 if hidden is None else hidden.data_ptr(),
        anchor=anchor.data_ptr(),
        w_ih=0 if w_ih is None else w_ih.data_ptr(),
        w_hh=0 if w_hh is None else w_hh.data_ptr(),
        w1=0 if w1 is None else w1.data_ptr(),
        w2=w2.data_ptr(),
        embedding=embedding.data_ptr(),
        table=0 if table is None else table.data_ptr(),
        screen=0 if screen is None else screen.data_ptr(),
        temperature=0 if temperature is None else temperature.data_ptr(),
        seed=0 if seed is None else seed.data_ptr(),
        block_start=0 if block_start is None else block_start.data_ptr(),
        num_active=0 if num_active is None else num_active.data_ptr(),
        mask=0 if mask is None else mask.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        batch=batch,
        drafts=drafts,
        first_slot=0 if shift_label else 1,
        prefix=pure_draft_prefix_len,
        vocab=vocab,
        vocab_valid=vocab_valid,
        inputs=inputs,
        hidden_width=0 if hidden is None else hidden.size(2),
        units=inputs if w_hh is None else w_hh.size(1),
        rank=rank,
        kind=low_rank,
        pool_size=pool_size,
        pools=drafts if slot_pools else 1,
        exact=exact,
        portable=portable,
        base_batch_stride=base_batch_stride,
        base_slot_stride=base_slot_stride,
        hidden_batch_stride=hidden_batch_stride,
        hidden_slot_stride=hidden_slot_stride,
        mask_stride=0 if mask is None else mask.stride(0),
        bias_stride=0 if bias is None else bias.stride(0),
        dtype=DTYPES[w2.dtype],
        base_dtype=DTYPES[base_logits.dtype],
        device=device,
        stream=stream,
    )
    check_status("draft_chain", status)


_draft_chain = define(
    "draft_chain(Tensor base_logits, Tensor? hidden, Tensor anchor, Tensor? w_ih, Tensor? w_hh, "
    "Tensor? w1, Tensor w2, Tensor embedding, int low_rank, Tensor? table, Tensor? screen, "
    "Tensor? temperature, Tensor? seed, Tensor? block_start, Tensor? num_active, Tensor? mask, "
    "Tensor? bias, "
    "bool shift_label, int pure_draft_prefix_len, bool exact, bool portable, int pool_size, "
    "bool slot_pools, int vocab_valid, Tensor(a!) workspace, Tensor(b!) tokens, Tensor(c!) scores, "
    "Tensor(d!) restarts, Tensor(e!)? log_probs, Tensor(f!)? pool_ids, Tensor(g!)? pool_logits, "
    "Tensor(h!)? dense_logits) -> ()",
    _launch,
)


def draft_chain(
    base_logits,
    hidden,
    anchor,
    weights,
    *,
    num_drafts=15,
    shift_label=True,
    pure_draft_prefix_len=1,
    exact=True,
    portable=False,
    pool_size=None,
    pool="block",
    temperature=None,
    seed=None,
    block_start=None,
    num_active=None,
    vocab_valid=None,
    mask=None,
    bias=None,
    plan=None,
    backend="cuda",
    return_scores=False,
    return_details=False,
    return_dense_q=False,
):
    """The ids that the Domino head drafts behind an anchor.

    y_0 is the anchor, S_j the GRU state after the embeddings of y_0..y_j, H the hidden rows:

        score of y_{j+1} = base[slot] + [j >= pure_draft_prefix_len] * W2 SiLU(W1 [H[slot] ; S_j])

    with slot = j where shift_label (slot i predicts the token after it) and j + 1 where not (slot i
    predicts its own token; slot 0 is unused). base is base_logits plus bias, -inf for an id that
    the mask or vocab_valid exclude. This is Domino's correction; HeadWeights says what stands in
    its place for its cousins.

    exact: each id is the argmax of its score over the whole vocabulary given the ids before it,
    ties to the lowest. Not exact: over a pool of M ids with large base logits, which contains the
    argmax of most slots (`python -m bench recall`); what is drafted changes how much a verifier
    accepts, never what it emits. The pool has the best 16 of each of G = ceil(M / 16) groups of
    ids, of the last one what is left to M; id v < vocab_valid is in group v // 16 % G. NaN counts
    as -inf there, and of equal logits the lowest id comes first. With temperature each id is drawn
    from its pool: from softmax(score / temperature) on it, by the noise of (seed, block_start,
    draft j, rng.DRAFT_TOKEN) and the id.

    Sums are fp32. The state and SiLU(..) are rounded to the dtype of the weights, and so is the
    GRU's input product where `weights` has a table; nothing else between the inputs and the argmax.
    NaN scores never win; where all are NaN, the lowest id with score NaN. An anchor outside the
    vocabulary is clamped to it (a check would wait for the device). A row's ids do not depend on
    the other rows; with exact=False their pool_size must be the same for that.

    On a GPU the block is one persistent launch on the pools, certified against the whole vocabulary
    where exact, for float16 and bfloat16 weights, G a multiple of 16 up to 1024, R a multiple of 16
    up to 256 and H a multiple of 8; of heads without a GRU on sm_90 and later, with pools of the
    block of up to 3072 ids (where R is 256; more where it is less), and not portable. Other
    weights take three launches an id, over the whole vocabulary, exact or not, and not with
    temperature.

    Args:
        base_logits: [B, S, V] logits of the block's slots; dtype of the weights or float32. Rows
            may be strided.
        hidden: [B, S, H] the draft backbone's output (what its lm_head reads), dtype of the
            weights. Rows may be strided. None for a head that does not see it.
        anchor: [B] int64, the last committed token of each row.
        weights: HeadWeights.
        num_drafts: K, at most S where shift_label, S - 1 where not.
        shift_label: the label convention that the drafter was trained with.
        pure_draft_prefix_len: how many drafts take the base logits alone; from num_drafts on, all.
        exact: see above. Not with temperature.
        portable: on a GPU, use nothing above sm_80 (slower on sm_90 and later).
        pool_size: M, ids of a pool; None: 2048 for up to 8 rows, 512 for more, V at most.
        pool: "block", one pool a row, by the maxima of its corrected slots (of all where drafts are
            drawn), or "slot", one for each draft.
        temperature: [B] float32 on the device, 0 = greedy in that row; with it seed and
            block_start, [B] int64: the request's seed, and the absolute position of the anchor. On
            a GPU for blocks of at most 28 drafts, of which at least one is corrected.
        num_active: [1] int32 on the device: rows from it on are padding, and left as they are.
        vocab_valid: ids from it on (padding of the vocabulary) are not drafted; None: V.
        mask: [B, ceil(V / 32)] int32, bit v % 32 of word v // 32 set where id v is allowed. Where
            no score of an allowed id is a number, one that is not may be drafted: -inf beats NaN.
        bias: [B, V] float32, added to the base logits of every slot.
        plan: ChainPlan; None: one for this call.
        backend: of that one. "triton", on any GPU that Triton knows: Domino heads, greedy, pools
            of the block (with a group for every 2048 ids at least), without mask, bias, vocab_valid
            and num_active.
        return_scores: also return the score of each id.
        return_details: return a DraftResult; so does a call with temperature.
        return_dense_q: with temperature: also its dense_logits, 4 B K V bytes.

    Returns:
        tokens [B, K] int64, or (tokens, scores [B, K] float32), or a DraftResult.

    Raises:
        TypeError, ValueError: an argument does not fit, or requires grad (the op has no gradient).

    Source: Domino (arXiv 2605.29707), section 3.
    """
    op = "draft_chain"
    batch = checks.sizes(op, "base_logits", base_logits, "[B, S, V]")[0]
    if not isinstance(num_drafts, int) or num_drafts < 1:
        raise ValueError(f"{op}: num_drafts: got {num_drafts!r}, expected at least 1")
    check_weights(op, weights)
    if plan is None:
        plan = ChainPlan(
            weights,
            batch,
            num_drafts=num_drafts,
            pool_size=pool_size,
            pool=pool,
            backend=backend,
        )
    sampled = temperature is not None
    if return_dense_q and not sampled:
        raise ValueError(f"{op}: return_dense_q: got True without temperature")
    out = DraftResult.empty(
        weights,
        batch,
        num_drafts=num_drafts,
        pool_size=pool_size,
        vocab_valid=vocab_valid,
        sampled=sampled,
        dense_q=return_dense_q,
    )
    draft_chain_out(
        base_logits,
        hidden,
        anchor,
        weights,
        out=out,
        plan=plan,
        shift_label=shift_label,
        pure_draft_prefix_len=pure_draft_prefix_len,
        exact=exact,
        portable=portable,
        pool_size=pool_size,
        pool=pool,
        temperature=temperature,
        seed=seed,
        block_start=block_start,
        num_active=num_active,
        vocab_valid=vocab_valid,
        mask=mask,
        bias=bias,
    )
    if return_details or sampled:
        return out
    return (out.tokens, out.scores) if return_scores else out.tokens


def draft_chain_out(
    base_logits,
    hidden,
    anchor,
    weights,
    *,
    out,
    plan,
    shift_label=True,
    pure_draft_prefix_len=1,
    exact=True,
    portable=False,
    pool_size=None,
    pool="block",
    temperature=None,
    seed=None,
    block_start=None,
    num_active=None,
    vocab_valid=None,
    mask=None,
    bias=None,
):
    """`draft_chain` into memory of the caller: no allocation, no synchronisation, for CUDA graphs.

    Every tensor is read when the work runs: a graph's replay sees what they hold then.

    Args: as in `draft_chain`, and
        out: DraftResult of contiguous tensors (`DraftResult.empty`), whose width is num_drafts.
        plan: ChainPlan for at least these sizes.

    Returns:
        out.

    Raises:
        TypeError, ValueError: an argument does not fit, or requires grad (the op has no gradient).
    """
    op = "draft_chain"
    check_weights(op, weights)
    if not isinstance(out, DraftResult):
        raise TypeError(f"{op}: out: got {type(out).__name__}, expected a DraftResult")
    w2, hidden_size = weights.w2, weights.hidden_size
    dtype, device, (vocab, _) = w2.dtype, w2.device, w2.shape
    batch, slots, _ = checks.sizes(op, "base_logits", base_logits, "[B, S, V]")
    drafts = checks.sizes(op, "out.tokens", out.tokens, "[B, K]")[1]
    checks.dtype(op, "base_logits", base_logits, {dtype: None, torch.float32: None})
    checks.tensor(op, "base_logits", base_logits, (batch, slots, vocab), base_logits.dtype, device)
    if hidden_size == 0:
        hidden = None
    else:
        checks.tensor(op, "hidden", hidden, (batch, slots, hidden_size), dtype, device)
    checks.tensor(op, "anchor", anchor, (batch,), torch.int64, device)
    most = slots if shift_label else slots - 1
    if not 1 <= drafts <= most:
        raise ValueError(
            f"{op}: num_drafts: got {drafts}, expected 1..{most} with {slots} slots and "
            f"shift_label={bool(shift_label)}"
        )
    if not isinstance(pure_draft_prefix_len, int) or pure_draft_prefix_len < 0:
        raise ValueError(
            f"{op}: pure_draft_prefix_len: got {pure_draft_prefix_len!r}, expected at least 0"
        )
    vocab_valid = vocab if vocab_valid is None else vocab_valid
    if not isinstance(vocab_valid, int) or not 1 <= vocab_valid <= vocab:
        raise ValueError(f"{op}: vocab_valid: got {vocab_valid!r}, expected 1..{vocab}")
    slot_pools = slot_pools_of(op, pool)
    pool_size = pool_size_of(op, pool_size, batch, vocab_valid)

    wide = batch, drafts
    checks.output(op, "out.tokens", out.tokens, wide, torch.int64, device)
    checks.output(op, "out.scores", out.scores, wide, torch.float32, device)
    checks.output(op, "out.restarts", out.restarts, (batch,), torch.int32, device)
    law = (None, None, None, None)
    if temperature is not None:
        if device.type == "cuda" and dtype == torch.float32:
            raise TypeError(f"{op}: temperature: got float32 weights on a GPU, expected half ones")
        if device.type == "cuda" and not pure_draft_prefix_len < drafts <= _MOST_DRAWN:
            raise ValueError(
                f"{op}: num_drafts: got {drafts} with temperature on a GPU, expected more than "
                f"pure_draft_prefix_len={pure_draft_prefix_len} and at most {_MOST_DRAWN}"
            )
        if exact:
            raise ValueError(f"{op}: exact: got True with temperature, expected exact=False")
        for name, value, kind in (
            ("temperature", temperature, torch.float32),
            ("seed", seed, torch.int64),
            ("block_start", block_start, torch.int64),
        ):
            checks.tensor(op, name, value, (batch,), kind, device)
            checks.contiguous(op, name, value)
        law = out[3:]
        pools = (batch, drafts, pool_size)
        for name, kind, shape, value in zip(
            ("log_probs", "pool_ids", "pool_logits"),
            (torch.float32, torch.int32, torch.float32),
            (wide, pools, pools),
            law,
        ):
            checks.output(op, f"out.{name}", value, shape, kind, device)
        if out.dense_logits is not None:
            dense = (batch, drafts, vocab)
            checks.output(op, "out.dense_logits", out.dense_logits, dense, torch.float32, device)
    if num_active is not None:
        checks.tensor(op, "num_active", num_active, (1,), torch.int32, device)
    if mask is not None:
        checks.tensor(op, "mask", mask, (batch, (vocab + 31) // 32), torch.int32, device)
    if bias is not None:
        checks.tensor(op, "bias", bias, (batch, vocab), torch.float32, device)
    if not isinstance(plan, ChainPlan):
        raise TypeError(f"{op}: plan: got {type(plan).__name__}, expected ChainPlan")
    workspace = plan.workspace
    pools = drafts if slot_pools else 1
    need = plan.size
    if (weights, batch, drafts, pool_size, pools) != plan.made_for:
        made = plan.made_for[0]
        # they say where the words are that were zeroed once
        if (made.state_size, made.rank) != (weights.state_size, weights.rank):
            raise ValueError(
                f"{op}: plan: got one for weights of G={made.state_size}, R={made.rank}, expected "
                f"G={weights.state_size}, R={weights.rank}"
            )
        need = chain_workspace_bytes(batch, drafts, pool_size, pools, weights, plan.backend)
    if workspace.device != device or workspace.numel() < need:
        raise ValueError(
            f"{op}: plan: got {workspace.numel()} bytes on {workspace.device}, expected at least "
            f"{need} on {device}"
        )
    if plan.backend == "triton":
        if not (temperature is num_active is mask is bias is None) or (
            slot_pools or vocab_valid != vocab or weights.low_rank != "silu" or hidden is None
        ):
            raise ValueError(
                f"{op}: backend: got 'triton', which takes a Domino head, greedy, with pools of "
                f"the block, and no num_active, mask, bias or vocab_valid"
            )
        launch_triton(
            base_logits,
            hidden,
            anchor,
            weights,
            shift_label,
            pure_draft_prefix_len,
            exact,
            pool_size,
            workspace,
            out,
        )
        return out
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
        weights.table,
        weights.screen,
        temperature,
        seed,
        block_start,
        num_active,
        mask,
        bias,
        shift_label,
        pure_draft_prefix_len,
        exact,
        portable,
        pool_size,
        slot_pools,
        vocab_valid,
        workspace,
        *out[:3],
        *law,
    )
    return out
