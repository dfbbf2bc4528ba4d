"""Trees: the drafting head for many paths at once, with their children and the law of each."""

from typing import NamedTuple

import torch

from domino_kernels import _C
from domino_kernels.ops import checks
from domino_kernels.ops.head_weights import LOW_RANK, HeadWeights
from domino_kernels.torch_library import DTYPES, check_status, define, pointer, target

MAX_CHILDREN = 32


class Expansion(NamedTuple):
    """What `expand` returns for W paths of each of B requests, with k children a path.

    tokens: [B, W, k] int64, the children, -1 where there is none.
    log_probs: [B, W, k] float32, of each under the path's law (before any draw); -inf for none.
    log_remaining: [B, W, k] float32, log R: R is the mass of the path's law that the children in
        front of this one leave; 0 for the first, -inf for none.
    states: [B, W, G], the GRU state of each path, with which its children are expanded; None for a
        head without a GRU.
    scores: [B, W, M] float32, the corrected logits of the candidates (pool or vocabulary), -inf
        where one takes no part; None unless asked for. softmax(scores / temperature) is the law.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    log_remaining: torch.Tensor
    states: torch.Tensor | None
    scores: torch.Tensor | None


def _launch_project_hidden(hidden, w1, out):
    batch_stride, slot_stride, _ = hidden.stride()
    batch, slots, width = hidden.shape
    status = _C.project_hidden(
        out=out.data_ptr(),
        hidden=hidden.data_ptr(),
        w1=w1.data_ptr(),
        batch=batch,
        slots=slots,
        rank=w1.size(0),
        width=width,
        w1_stride=w1.size(1),
        hidden_batch_stride=batch_stride,
        hidden_slot_stride=slot_stride,
        dtype=DTYPES[w1.dtype],
        **target(out),
    )
    check_status("project_hidden", status)


_project_hidden = define(
    "project_hidden(Tensor hidden, Tensor w1, Tensor(a!) out) -> ()", _launch_project_hidden
)


def project_hidden(hidden, weights, *, out=None):
    """W1h H of all rows of a block: the part of the correction that needs no token.

    `expand` takes it as from_hidden, so that the levels of a tree do not compute it again. fp32
    sums, not rounded; a row's bits are those that `expand` itself would get.

    Args:
        hidden: [B, S, H] what the draft backbone's lm_head reads, dtype of the weights. Rows may be
            strided.
        weights: HeadWeights that see hidden rows.
        out: [B, S, R] float32 contiguous, receives the result.

    Returns:
        out, or a new tensor where out is None.

    Raises:
        TypeError, ValueError: an argument does not fit, or requires grad (the op has no gradient).
    """
    op = "project_hidden"
    if not isinstance(weights, HeadWeights):
        raise TypeError(f"{op}: weights: got {type(weights).__name__}, expected HeadWeights")
    if weights.hidden_size == 0:
        raise ValueError(f"{op}: weights: got a head that does not see hidden rows")
    batch, slots, _ = checks.sizes(op, "hidden", hidden, "[B, S, H]")
    shape = (batch, slots, weights.hidden_size)
    checks.tensor(op, "hidden", hidden, shape, weights.dtype, weights.device)
    shape = (batch, slots, weights.rank)
    if out is None:
        out = torch.empty(shape, dtype=torch.float32, device=weights.device)
    else:
        checks.tensor(op, "out", out, shape, torch.float32, weights.device)
        checks.contiguous(op, "out", out)
    _project_hidden(hidden, weights.w1, out)
    return out


def _strides(tensor):
    return (0, 0) if tensor is None else tensor.stride()[:2]


def _launch_expand(
    base_logits,
    hidden,
    from_hidden,
    parent_states,
    parent,
    token,
    path_depth,
    node,
    pool,
    temperature,
    seed,
    block_start,
    w_ih,
    w_hh,
    w1,
    w2,
    embedding,
    table,
    low_rank,
    depth,
    shift_label,
    pure_draft_prefix_len,
    scores_by_node,
    workspace,
    tokens,
    log_probs,
    log_remaining,
    states,
    scores,
):
    if workspace.data_ptr() % 16:  # here, where a tensor being traced has become a real one
        raise ValueError(
            f"expand: workspace: got address {workspace.data_ptr():#x}, expected 16-byte alignment"
        )
    batch, paths, children = tokens.shape
    _, slots, vocab = base_logits.shape
    rank, inputs = w2.size(1), embedding.size(1)
    units = inputs if w_hh is None else w_hh.size(1)
    base_batch_stride, base_slot_stride = _strides(base_logits)
    hidden_batch_stride, hidden_slot_stride = _strides(
        hidden if from_hidden is None else from_hidden
    )
    parent_batch_stride, parent_stride = _strides(parent_states)
    states_batch_stride, states_stride = _strides(states)
    status = _C.expand(
        states=pointer(states),
        tokens=tokens.data_ptr(),
        log_probs=log_probs.data_ptr(),
        log_remaining=log_remaining.data_ptr(),
        scores=pointer(scores),
        workspace=workspace.data_ptr(),
        base_logits=base_logits.data_ptr(),
        hidden=pointer(hidden),
        from_hidden=pointer(from_hidden),
        parent_states=pointer(parent_states),
        parent=pointer(parent),
        token=token.data_ptr(),
        path_depth=pointer(path_depth),
        node=pointer(node),
        pool=pointer(pool),
        temperature=pointer(temperature),
        seed=pointer(seed),
        block_start=pointer(block_start),
        w_ih=pointer(w_ih),
        w_hh=pointer(w_hh),
        w1=pointer(w1),
        w2=w2.data_ptr(),
        embedding=embedding.data_ptr(),
        table=pointer(table),
        batch=batch,
        paths=paths,
        children=children,
        candidates=vocab if pool is None else pool.size(1),
        slots=slots,
        nodes=0 if parent_states is None else parent_states.size(1),
        score_nodes=scores.size(1) if scores_by_node else 0,
        first_slot=0 if shift_label else 1,
        depth=depth,
        prefix=pure_draft_prefix_len,
        vocab=vocab,
        inputs=inputs,
        hidden_width=0 if w1 is None else w1.size(1) - units,
        units=units,
        rank=rank,
        base_batch_stride=base_batch_stride,
        base_slot_stride=base_slot_stride,
        hidden_batch_stride=hidden_batch_stride,
        hidden_slot_stride=hidden_slot_stride,
        parent_batch_stride=parent_batch_stride,
        parent_stride=parent_stride,
        states_batch_stride=states_batch_stride,
        states_stride=states_stride,
        dtype=DTYPES[w2.dtype],
        base_dtype=DTYPES[base_logits.dtype],
        kind=low_rank,
        drawn=0 if seed is None else 1,
        **target(tokens),
    )
    check_status("expand", status)


_expand = define(
    "expand(Tensor base_logits, Tensor? hidden, Tensor? from_hidden, Tensor? parent_states, "
    "Tensor? parent, Tensor token, Tensor? path_depth, Tensor? node, Tensor? pool, "
    "Tensor? temperature, Tensor? seed, Tensor? block_start, Tensor? w_ih, Tensor? w_hh, "
    "Tensor? w1, Tensor w2, Tensor embedding, Tensor? table, int low_rank, int depth, "
    "bool shift_label, "
    "int pure_draft_prefix_len, bool scores_by_node, Tensor(a!) workspace, Tensor(b!) tokens, "
    "Tensor(c!) log_probs, "
    "Tensor(d!) log_remaining, Tensor(e!)? states, Tensor(f!)? scores) -> ()",
    _launch_expand,
)


def expand(
    base_logits,
    hidden,
    token,
    weights,
    *,
    children,
    depth=0,
    states=None,
    parent=None,
    from_hidden=None,
    pool=None,
    temperature=None,
    seed=None,
    block_start=None,
    node=None,
    shift_label=True,
    pure_draft_prefix_len=1,
    return_scores=False,
):
    """Children of W paths of each request: one level of a draft tree in one call.

    A path is a node of the tree, of depth d (the anchor has depth 0), and the tokens that lead to
    it. `draft_chain` is the case of one path and one child: S = GRU(E[token], parent's state) is
    the state of the node, and the scores of what may follow are

        base[slot] + [d >= pure_draft_prefix_len] * W2 SiLU(W1 [H[slot] ; S])

    with slot = d where shift_label and d + 1 where not (low_rank of HeadWeights for other heads).
    Scores that are not finite take no part. The path's law is softmax(scores / temperature) over
    the candidates, which are the pool's ids or, without a pool, the whole vocabulary: log_probs and
    log_remaining are normalised over the candidates.

    Without seed the children are the k greatest scores, in falling order, ties to the lowest id:
    for trees that are verified by the greedy, match or target-only rules. With seed they are k
    draws without replacement, in draw order (Gumbel-top-k): each wins the race
    score / temperature + G over what is left, and log R says what was left. That is what
    sampled-sibling and traversal verification need, and they must see all of them, in this order.
    The noise is that of `rng.DRAFT_TOKEN` at i = node and index = id, so a draw does not depend on
    the pool, the batch or the other paths. An id whose weight is below 2^-100 of the greatest has
    no mass and is not drawn; temperature 0 draws the greatest score alone. Log R is the log of a
    sum of what is left, never of 1 minus what is gone.

    Sums are fp32; the state and u are rounded to the dtype of the weights, the GRU's input product
    where `weights` has a table. A path's results do not
    depend on the other paths, bit for bit.

    Args:
        base_logits: [B, S, V'] logits of the block's slots, V' <= V of the weights (ids from V' on
            are never children); dtype of the weights or float32. Rows may be strided.
        hidden: [B, S, H] what the draft backbone's lm_head reads, dtype of the weights; None with
            from_hidden, or for a head that does not see it. Rows may be strided.
        token: [B, W] int64, the last token of each path. -1: no path, no children. Others outside
            [0, V') are clamped to it.
        weights: HeadWeights.
        children: k, 1..32.
        depth: of the paths' nodes: an int, or [B, W] int64 on the device.
        states: [B, N, G] states of N nodes, of which each path starts from its parent's; None for
            paths that are the anchor itself. Rows may be strided.
        parent: [B, W] int64, the row of `states` of each path's parent; None: path w has row w.
        from_hidden: [B, S, R] float32 from `project_hidden`: what `hidden` would be projected to in
            every call. Rows may be strided.
        pool: [B, M] int32 ids of the candidates, distinct, -1 for none (`shortlist` makes them).
        temperature: [B] float32, >= 0; None: 1. For top-k children it scales the law alone, and 0
            stands for 1.
        seed, block_start: [B] int64 each, as in `verify_chain`; with them children are drawn.
        node: [B, W] int64, index of each path's node in its tree, below 2^24; with seed.
        shift_label, pure_draft_prefix_len: as in `draft_chain`.
        return_scores: also return the scores of all candidates.

    Returns:
        Expansion.

    Raises:
        TypeError, ValueError: an argument does not fit, or requires grad (the op has no gradient).

    Source: Domino (arXiv 2605.29707), section 3; stochastic beam search (arXiv 1903.06059) for
    Gumbel-top-k.
    """
    batch, paths = checks.sizes("expand", "token", token, "[B, W]")
    _check(weights, children)
    candidates = checks.sizes("expand", "base_logits", base_logits, "[B, S, V]")[2]
    if pool is not None:
        candidates = checks.sizes("expand", "pool", pool, "[B, M]")[1]
    new = dict(device=weights.device)
    out = Expansion(
        torch.empty((batch, paths, children), dtype=torch.int64, **new),
        torch.empty((batch, paths, children), **new),
        torch.empty((batch, paths, children), **new),
        torch.empty((batch, paths, weights.gru_size), dtype=weights.dtype, **new)
        if weights.recurrent
        else None,
        torch.empty((batch, paths, candidates), **new) if return_scores else None,
    )
    size = _workspace_bytes(batch, paths, children, candidates, pool is not None, weights)
    return expand_out(
        base_logits,
        hidden,
        token,
        weights,
        out=out,
        workspace=torch.empty(size, dtype=torch.uint8, **new),
        depth=depth,
        states=states,
        parent=parent,
        from_hidden=from_hidden,
        pool=pool,
        temperature=temperature,
        seed=seed,
        block_start=block_start,
        node=node,
        shift_label=shift_label,
        pure_draft_prefix_len=pure_draft_prefix_len,
    )


def expand_workspace(batch, paths, children, weights, *, pool_size=None):
    """Scratch memory for `expand_out`: a uint8 tensor on the device of the weights.

    One tensor serves one call at a time, whatever it holds before.

    Args:
        batch, paths: the most requests, and paths of a request, of a call.
        children: the most children of a path, 1 to 32.
        weights: HeadWeights of the calls.
        pool_size: the most ids of a pool; None: calls over the whole vocabulary.

    Raises:
        TypeError, ValueError: weights or children do not fit.
    """
    _check(weights, children)
    candidates = weights.vocab_size if pool_size is None else pool_size
    size = _workspace_bytes(batch, paths, children, candidates, pool_size is not None, weights)
    return torch.empty(size, dtype=torch.uint8, device=weights.device)


def expand_out(
    base_logits,
    hidden,
    token,
    weights,
    *,
    out,
    workspace,
    depth=0,
    states=None,
    parent=None,
    from_hidden=None,
    pool=None,
    temperature=None,
    seed=None,
    block_start=None,
    node=None,
    shift_label=True,
    pure_draft_prefix_len=1,
    scores_by_node=False,
):
    """`expand` into memory of the caller: no allocation, no synchronisation, for CUDA graphs.

    Args: as in `expand`, and
        out: Expansion of tensors to write: tokens, log_probs and log_remaining contiguous; states
            with rows that may be strided, so that they may be rows of `states` that no path of this
            call starts from; scores contiguous, or None.
        scores_by_node: out.scores is [B, N, M] and a path's scores go to row node[b, w], as
            `verify_tree` wants the draft's law.
        workspace: from `expand_workspace`, at least for this call. Calls that may run at the same
            time, graph replays among them, need one each.

    Returns:
        out.

    Raises:
        TypeError, ValueError: an argument does not fit, or requires grad (the op has no gradient).
    """
    op = "expand"
    batch, paths = checks.sizes(op, "token", token, "[B, W]")
    if not isinstance(out, Expansion):
        raise TypeError(f"{op}: out: got {type(out).__name__}, expected an Expansion")
    children = checks.sizes(op, "out.tokens", out.tokens, "[B, W, k]")[2]
    _check(weights, children)
    dtype, device = weights.dtype, weights.device
    _, slots, vocab = checks.sizes(op, "base_logits", base_logits, "[B, S, V]")
    if not 1 <= vocab <= weights.vocab_size:
        raise ValueError(
            f"{op}: base_logits: got {vocab} ids, expected 1..{weights.vocab_size}, as the weights "
            f"have"
        )
    if slots == 0:
        raise ValueError(f"{op}: base_logits: got 0 slots, expected at least 1")
    checks.dtype(op, "base_logits", base_logits, {dtype: None, torch.float32: None})
    checks.tensor(op, "base_logits", base_logits, (batch, slots, vocab), base_logits.dtype, device)
    checks.tensor(op, "token", token, (batch, paths), torch.int64, device)
    checks.contiguous(op, "token", token)
    if weights.hidden_size == 0:
        hidden = from_hidden = None
    elif from_hidden is not None:
        hidden = None
        rows = (batch, slots, weights.rank)
        checks.tensor(op, "from_hidden", from_hidden, rows, torch.float32, device)
    else:
        checks.tensor(op, "hidden", hidden, (batch, slots, weights.hidden_size), dtype, device)
    if not weights.recurrent:
        states = parent = None
    elif states is not None:
        nodes = checks.sizes(op, "states", states, "[B, N, G]")[1]
        checks.tensor(op, "states", states, (batch, nodes, weights.gru_size), dtype, device)
        if parent is None and nodes < paths:
            raise ValueError(
                f"{op}: states: got {nodes} rows, expected one for each of {paths} paths"
            )
        if nodes == 0 and paths > 0:
            raise ValueError(f"{op}: states: got 0 rows, expected at least 1")
    path_depth = None
    if not isinstance(depth, int):
        path_depth, depth = depth, 0
    elif depth < 0:
        raise ValueError(f"{op}: depth: got {depth}, expected at least 0")
    drawn = seed is not None
    scores_by_node = bool(scores_by_node) and out.scores is not None
    numbered = drawn or scores_by_node
    for name, value in (("parent", parent), ("depth", path_depth)):
        if value is not None:
            checks.tensor(op, name, value, (batch, paths), torch.int64, device)
            checks.contiguous(op, name, value)
    if numbered:
        if node is None:
            why = "seed" if drawn else "scores_by_node"
            raise ValueError(f"{op}: node: got None, expected a tensor with {why}")
        checks.tensor(op, "node", node, (batch, paths), torch.int64, device)
        checks.contiguous(op, "node", node)
    if drawn:
        if block_start is None:
            raise ValueError(f"{op}: block_start: got None, expected a tensor with seed")
        for name, value in (("seed", seed), ("block_start", block_start)):
            checks.tensor(op, name, value, (batch,), torch.int64, device)
            checks.contiguous(op, name, value)
    if temperature is not None:
        checks.tensor(op, "temperature", temperature, (batch,), torch.float32, device)
        checks.contiguous(op, "temperature", temperature)
    candidates = vocab
    if pool is not None:
        candidates = checks.sizes(op, "pool", pool, "[B, M]")[1]
        checks.tensor(op, "pool", pool, (batch, candidates), torch.int32, device)
        checks.contiguous(op, "pool", pool)
        if candidates < 1:
            raise ValueError(f"{op}: pool: got no ids, expected at least one a row")
    _check_out(op, out, batch, paths, children, candidates, weights, scores_by_node)
    if not isinstance(pure_draft_prefix_len, int) or pure_draft_prefix_len < 0:
        raise ValueError(
            f"{op}: pure_draft_prefix_len: got {pure_draft_prefix_len!r}, expected at least 0"
        )
    need = _workspace_bytes(batch, paths, children, candidates, pool is not None, weights)
    size = checks.sizes(op, "workspace", workspace, "[bytes]")
    checks.tensor(op, "workspace", workspace, size, torch.uint8, device)
    if size[0] < need:
        raise ValueError(f"{op}: workspace: got {size[0]} bytes, expected at least {need}")
    return run(
        base_logits,
        hidden,
        token,
        weights,
        out=out,
        workspace=workspace,
        depth=depth,
        path_depth=path_depth,
        states=states,
        parent=parent,
        from_hidden=from_hidden,
        pool=pool,
        temperature=temperature,
        seed=seed,
        block_start=block_start if drawn else None,
        node=node if numbered else None,
        shift_label=shift_label,
        pure_draft_prefix_len=pure_draft_prefix_len,
        scores_by_node=scores_by_node,
    )


def run(
    base_logits,
    hidden,
    token,
    weights,
    *,
    out,
    workspace,
    depth,
    states,
    parent,
    from_hidden,
    pool,
    temperature,
    seed,
    block_start,
    node,
    shift_label,
    pure_draft_prefix_len,
    scores_by_node,
    path_depth=None,
):
    """`expand_out` of checked arguments."""
    _expand(
        base_logits,
        hidden,
        from_hidden,
        states,
        parent,
        token,
        path_depth,
        node,
        pool,
        temperature,
        seed,
        block_start,
        weights.w_ih,
        weights.w_hh,
        weights.w1,
        weights.w2,
        weights.embedding,
        weights.table,
        LOW_RANK[weights.low_rank],
        depth,
        shift_label,
        pure_draft_prefix_len,
        scores_by_node,
        workspace,
        out.tokens,
        out.log_probs,
        out.log_remaining,
        out.states if weights.recurrent else None,
        out.scores,
    )
    return out


def _check(weights, children):
    if not isinstance(weights, HeadWeights):
        raise TypeError(f"expand: weights: got {type(weights).__name__}, expected HeadWeights")
    if not isinstance(children, int) or not 1 <= children <= MAX_CHILDREN:
        raise ValueError(f"expand: children: got {children!r}, expected 1..{MAX_CHILDREN}")


def _check_out(op, out, batch, paths, children, candidates, weights, scores_by_node):
    device, each = weights.device, (batch, paths, children)
    checks.tensor(op, "out.tokens", out.tokens, each, torch.int64, device)
    checks.tensor(op, "out.log_probs", out.log_probs, each, torch.float32, device)
    checks.tensor(op, "out.log_remaining", out.log_remaining, each, torch.float32, device)
    for name in ("tokens", "log_probs", "log_remaining"):
        checks.contiguous(op, f"out.{name}", getattr(out, name))
    if weights.recurrent:
        rows = (batch, paths, weights.gru_size)
        checks.tensor(op, "out.states", out.states, rows, weights.dtype, device)
    if out.scores is not None:
        rows = checks.sizes(op, "out.scores", out.scores, "[B, W, M]")[1]
        rows = (batch, max(rows, 1) if scores_by_node else paths, candidates)
        checks.tensor(op, "out.scores", out.scores, rows, torch.float32, device)
        checks.contiguous(op, "out.scores", out.scores)


def _workspace_bytes(batch, paths, children, candidates, pooled, weights):
    if weights.device.type == "cpu":
        return 0
    # ExpandWorkspace of csrc/head/expand.cuh, in Python so that torch.compile can trace it
    up = lambda n, to: (n + to - 1) // to * to  # noqa: E731
    tiles = batch * ((paths + 7) // 8) if pooled else (batch * paths + 7) // 8
    columns = up(tiles, 4) * 8
    part_size = 128 * ((candidates + 264 * 128 - 1) // (264 * 128))
    rows = columns * ((candidates + part_size - 1) // part_size)
    parts = batch * paths * weights.rank * 4, columns * up(weights.rank, 32) * 4, rows * 16
    parts += rows * children * 8, rows * children * 4, columns // 8 * 4
    return sum(up(part, 256) for part in parts)
