"""Verification of a tree of drafts: which path the target keeps, and the token that follows it."""

from enum import IntFlag
from typing import NamedTuple

import torch

from domino_kernels import _C
from domino_kernels.ops import checks
from domino_kernels.ops.verify_checks import MAX_VOCAB, ORDERS, check_filters
from domino_kernels.torch_library import DTYPES, check_status, define, target

_MAX_NODES = 1024
_MAX_POOL = 1024
RULES = {"greedy": 0, "match": 1, "target_only": 2, "rrsw": 3, "traversal": 4}
_DRAFTED = "rrsw", "traversal"  # rules that need the drafter's law


class TreeStatus(IntFlag):
    """Bits of `TreeResult.status` and `Tree.status`. Only what the walk may reach sets a bit.

    The bits of FAILED end the request's output early: `num_emitted == num_accepted`. With the
    others the emitted tokens still have the target's law. All but the last are those of
    VerifyStatus.
    """

    NON_FINITE = 1  # a target row with NaN or +inf
    EMPTY_ROW = 2  # a target row that is all -inf
    BAD_ID = 4  # a draft id outside [0, V) other than the pad -1; it is passed over
    ZERO_RESIDUAL = 8  # nothing left of relu(p - q): drawn from p
    BAD_DRAFT_LAW = 16  # no usable q, or less than 2^-40 of it on a child, which is passed over
    BAD_PARAMETER = 32  # a temperature that is negative or not finite
    BAD_ROWS = 64  # cu_nodes: more than `width` nodes, less than none, or nodes that do not exist
    BAD_TREE = 128  # a parent that is no earlier node; the node is never reached
    FAILED = NON_FINITE | EMPTY_ROW | BAD_PARAMETER | BAD_ROWS


class TreeResult(NamedTuple):
    """What verify_tree writes. N is the width: the most nodes of a request."""

    tokens: torch.Tensor  # [B, N] int64: the emitted tokens, then -1
    path: torch.Tensor  # [B, N] int32: the kept nodes, root first, then -1
    num_accepted: torch.Tensor  # [B] int32: drafts kept; the path has one node more
    # [B] int32: num_accepted + 1, or num_accepted where FAILED or inactive
    num_emitted: torch.Tensor
    # [B, N] float32: log p of each emitted token, then 0; None with logprobs=False
    chosen_logprob: torch.Tensor | None
    status: torch.Tensor  # [B] uint8: bits of TreeStatus


_RESULT_DTYPES = (
    torch.int64,
    torch.int32,
    torch.int32,
    torch.int32,
    torch.float32,
    torch.uint8,
)


def _pointer(tensor):
    return 0 if tensor is None else tensor.data_ptr()


def _strides(tensor, ragged):
    """Strides of batch and node in elements; behind cu_nodes there is no batch."""
    if tensor is None:
        return 0, 0
    return (0, tensor.stride(0)) if ragged else tensor.stride()[:2]


def _workspace(given, out_tokens, vocab, **sizes):
    """The caller's, or one of this call: here, where sizes are numbers also under torch.compile."""
    (batch, width), device = out_tokens.shape, out_tokens.device
    if given is None:
        return verify_tree_workspace(batch, width, vocab, **sizes, device=device)
    if device.type == "cuda":
        size = given.numel()
        needed = _C.verify_tree_workspace(batch=batch, width=width, vocab=vocab, **sizes) // 8
        if size < needed:
            raise ValueError(f"verify_tree: workspace: got {size} words, expected {needed} or more")
    return given


def _launch_verify_tree(
    target_logits,
    tokens,
    parents,
    rule,
    temperature,
    seed,
    block_start,
    pool_ids,
    pool_logits,
    draft_logits,
    draft_temperature,
    top_k,
    top_p,
    min_p,
    filter_order,
    cu_nodes,
    out_tokens,
    path,
    num_accepted,
    num_emitted,
    chosen_logprob,
    status,
    workspace,
):
    ragged = cu_nodes is not None
    workspace = _workspace(
        workspace,
        out_tokens,
        target_logits.size(-1),
        pool=0 if pool_ids is None else pool_ids.size(-1),
        dense=draft_logits is not None,
        filtered=not (top_k is top_p is min_p is None),
    )
    draft = draft_logits if pool_logits is None else pool_logits
    target_batch_stride, target_node_stride = _strides(target_logits, ragged)
    ids_batch_stride, ids_node_stride = _strides(pool_ids, ragged)
    pool_batch_stride, pool_node_stride = _strides(pool_logits, ragged)
    draft_batch_stride, draft_node_stride = _strides(draft_logits, ragged)
    code = _C.verify_tree(
        out_tokens=out_tokens.data_ptr(),
        path=path.data_ptr(),
        num_accepted=num_accepted.data_ptr(),
        num_emitted=num_emitted.data_ptr(),
        chosen_logprob=_pointer(chosen_logprob),
        status=status.data_ptr(),
        workspace=workspace.data_ptr(),
        target_logits=target_logits.data_ptr(),
        tokens=tokens.data_ptr(),
        parents=parents.data_ptr(),
        temperature=_pointer(temperature),
        seed=_pointer(seed),
        block_start=_pointer(block_start),
        pool_ids=_pointer(pool_ids),
        pool_logits=_pointer(pool_logits),
        draft_logits=_pointer(draft_logits),
        draft_temperature=_pointer(draft_temperature),
        top_k=_pointer(top_k),
        top_p=_pointer(top_p),
        min_p=_pointer(min_p),
        cu_nodes=_pointer(cu_nodes),
        batch=out_tokens.size(0),
        width=out_tokens.size(1),
        vocab=target_logits.size(-1),
        total_nodes=target_logits.size(0) if ragged else 0,
        pool=0 if pool_ids is None else pool_ids.size(-1),
        target_batch_stride=target_batch_stride,
        target_node_stride=target_node_stride,
        tokens_stride=0 if ragged else tokens.stride(0),
        parents_stride=0 if ragged else parents.stride(0),
        ids_batch_stride=ids_batch_stride,
        ids_node_stride=ids_node_stride,
        pool_batch_stride=pool_batch_stride,
        pool_node_stride=pool_node_stride,
        draft_batch_stride=draft_batch_stride,
        draft_node_stride=draft_node_stride,
        target_dtype=DTYPES[target_logits.dtype],
        draft_dtype=_C.F32 if draft is None else DTYPES[draft.dtype],
        rule=rule,
        filter_order=filter_order,
        **target(target_logits),
    )
    check_status("verify_tree", code)


_verify_tree = define(
    "verify_tree(Tensor target_logits, Tensor tokens, Tensor parents, int rule, "
    "Tensor? temperature, Tensor? seed, Tensor? block_start, Tensor? pool_ids, "
    "Tensor? pool_logits, Tensor? draft_logits, Tensor? draft_temperature, Tensor? top_k, "
    "Tensor? top_p, Tensor? min_p, int filter_order, Tensor? cu_nodes, "
    "Tensor(a!) out_tokens, Tensor(b!) path, Tensor(c!) num_accepted, Tensor(d!) num_emitted, "
    "Tensor(e!)? chosen_logprob, Tensor(f!) status, Tensor(g!)? workspace) -> ()",
    _launch_verify_tree,
)


def verify_tree_workspace(
    batch, width, vocab, *, pool=0, dense=False, filtered=False, device
):  # fmt: skip
    """Scratch memory for verify_tree calls: a tensor of int64 on `device`.

    It serves calls of these sizes, one at a time, whatever it holds before; graphs that may run
    side by side need one each. 20 bytes for every 1024 logits: 1.6 MB for 8 requests of 64 nodes at
    V = 151936.

    Args:
        batch: B. width: N, or with cu_nodes the most nodes of a request. vocab: V.
        pool: M of draft_pool. dense: with draft_logits. filtered: with top_k, top_p or min_p.
        device: of the calls; on the CPU the tensor is empty.

    Raises:
        TypeError: a size is no integer.
    """
    size = 0  # the CPU twin needs none
    if torch.device(device).type == "cuda":
        size = _C.verify_tree_workspace(
            batch=batch, width=width, vocab=vocab, pool=pool, dense=dense, filtered=filtered
        )
    return torch.empty(-(-size // 8), dtype=torch.int64, device=device)


def _result_sizes(batch, width, logprobs):
    wide = (batch, width)
    sizes = wide, wide, batch, batch, wide if logprobs else None, batch
    return zip(TreeResult._fields, sizes, _RESULT_DTYPES)


def _empty_result(batch, width, device, logprobs=True):
    return TreeResult(
        *(
            None if size is None else torch.empty(size, dtype=dtype, device=device)
            for _, size, dtype in _result_sizes(batch, width, logprobs)
        )
    )


def _check_result(op, out, batch, width, device, logprobs):
    if not isinstance(out, TreeResult):
        raise TypeError(f"{op}: out: got {type(out).__name__}, expected a TreeResult")
    for (name, size, dtype), value in zip(_result_sizes(batch, width, logprobs), out):
        if size is None:
            if value is not None:
                raise ValueError(f"{op}: out.{name}: got a tensor, expected None")
            continue
        shape = (size,) if isinstance(size, int) else size
        checks.tensor(op, f"out.{name}", value, shape, dtype, device)
        checks.contiguous(op, f"out.{name}", value)


def verify_tree(
    target_logits,
    tokens,
    parents,
    *,
    rule="greedy",
    temperature=None,
    seed=None,
    block_start=None,
    draft_pool=None,
    draft_logits=None,
    draft_temperature=None,
    top_k=None,
    top_p=None,
    min_p=None,
    filter_order="transformers",
    cu_nodes=None,
    width=None,
    logprobs=True,
    out=None,
    workspace=None,
):
    """Keeps one path from the root of each request's tree and adds one token of the target.

    Node 0 is the root: the last committed token. Node n > 0 is a draft; parents[n] < n is the node
    it follows, and siblings stand in the order of their indices. Row n of a request holds the
    target's logits after the path to node n, so it judges the children of n. The emitted tokens
    have exactly the law of the target decoding alone, provided that the tree came about as its
    rule says:

    - `rule="greedy"`: the path of argmax tokens (ties to the lowest id). Any tree.
    - `rule="match"`: at each node a token is drawn from p = softmax(logits / temperature) with the
      noise of its position; the walk goes on in the child that has it. The output is that of
      seeded sampling without drafts. Any tree.
    - `rule="target_only"`: one coin a node decides among the children by their p. Any tree whose
      siblings are distinct (a repeated one is ignored).
    - `rule="rrsw"`: sampled siblings. The children of a node were drawn from its draft law q
      without replacement (Gumbel-top-k), stand in the order of the draws, and how many there are
      depends on earlier draws only: no drawn child is left out or moved. Top-k or best-first trees
      do not qualify (verified so they are biased): use one of the rules above.
    - `rule="traversal"`: the same trees; leaf first, so a rejected prefix may be taken back. The
      most accepted tokens of all rules here; on a chain it is block verification.

    A request with temperature 0 goes by the greedy rule; one with draft temperature 0 (one-hot
    drafts) by target_only.

    Noise: domino_kernels.rng. The coin of child c is VERIFY_COIN c - 1, of parent n (target_only)
    VERIFY_COIN n; the last token is drawn with RESIDUAL_DRAW n or BONUS_DRAW n at the last node n;
    match uses POSITION_DRAW at position block_start + 1 + depth. A drafter draws the children of n
    with DRAFT_TOKEN n. So a tree that is a chain has the noise of verify_chain, node n for slot n.
    A request's output does not depend on the batch around it; CPU and CUDA give the same bits.

    Args:
        target_logits: [B, N, V], or [R, V] with cu_nodes; float32, float16 or bfloat16, last
            dimension contiguous, other strides free. 1 <= V <= 2**23, 1 <= N <= 1024.
        tokens: [B, N] or [R] int64; the root's is not read. -1 is a pad: never kept.
        parents: [B, N] or [R] int32, counted within the request; the root's is not read. A parent
            of -1 is a pad; one that is not an earlier node sets a status bit. Neither is kept, nor
            is anything below it: there are no cycles to run into.
        temperature: [B] float32, >= 0; None (greedy only): all zero.
        seed: [B] int64, any value. block_start: [B] int64, absolute position of the root's token.
        draft_pool: (ids [B, N, M] or [R, M] int32, logits of the same shape): q of node n's
            children is softmax(logits[n] / draft_temperature) over ids[n]; ids are distinct, one
            outside [0, V) is unused. M <= 1024. Rows of leaves are not read. For rrsw and
            traversal, like draft_logits.
        draft_logits: [B, N, V] or [R, V]: the same for a dense q.
        draft_temperature: [B] float32, >= 0; None: the target's.
        top_k: [B] int32 (<= 0: all), top_p: [B] float32 (>= 1: all), min_p: [B] float32 (<= 0:
            all): filters of p at every node that is visited, with the law renormalised; ties at the
            k-th value stay. Requests with temperature 0 have none.
        filter_order: "transformers" (top-k, top-p, min-p), "vllm" (min-p, top-k, top-p) or "joint"
            (top-p of the whole row).
        cu_nodes: [B + 1] int32: request b owns nodes cu_nodes[b] .. cu_nodes[b + 1] - 1. None at
            all: an inactive request, which emits nothing.
        width: with cu_nodes, the most nodes that a request may have (the N of the results).
        logprobs: False: no chosen_logprob; greedy requests then need no sums.
        out: TreeResult of contiguous tensors to write.
        workspace: from verify_tree_workspace for these sizes, so that the call allocates nothing.
            One call at a time may use it.

    Returns:
        TreeResult; `out` where given. For greedy requests chosen_logprob is the logarithm of
        softmax at temperature 1, for the others that of p before the filters. Where a row that is
        needed cannot be decided (TreeStatus.FAILED) the path ends there and no token is added.

    Raises:
        TypeError, ValueError: an argument does not fit, or requires grad (the op has no gradient).

    Every value of a parameter tensor is read on the device: no synchronisation, and a CUDA graph
    replays with what the tensors then hold.

    Source: rrsw: Jeon et al. 2402.14160, Chen et al. 2402.12374; traversal: Weng et al. 2505.12398;
    target_only: Li et al. 2401.15077 as in SGLang. Two numbers a node stand for its residual row.
    """
    op = "verify_tree"
    ragged = cu_nodes is not None
    if not ragged:
        batch, nodes, vocab = checks.sizes(op, "target_logits", target_logits, "[B, N, V]")
        lead = (batch, nodes)
        if width is not None:
            raise ValueError(f"{op}: width: got {width}, expected None without cu_nodes")
        width = nodes
    else:
        rows, vocab = checks.sizes(op, "target_logits", target_logits, "[R, V]")
        lead = (rows,)
        batch = checks.sizes(op, "cu_nodes", cu_nodes, "[B + 1]")[0] - 1
        if batch < 0:
            raise ValueError(f"{op}: cu_nodes: got shape [0], expected [B + 1]")
        if not isinstance(width, int):
            raise TypeError(f"{op}: width: got {width!r}, expected an integer with cu_nodes")
    device = target_logits.device
    checks.dtype(op, "target_logits", target_logits, DTYPES)
    checks.tensor(op, "target_logits", target_logits, (*lead, vocab), target_logits.dtype, device)
    if not 1 <= vocab <= MAX_VOCAB:
        raise ValueError(f"{op}: target_logits: got V = {vocab}, expected 1 to {MAX_VOCAB}")
    if not 1 <= width <= _MAX_NODES:
        raise ValueError(f"{op}: width: got N = {width}, expected 1 to {_MAX_NODES}")
    checks.tensor(op, "tokens", tokens, lead, torch.int64, device)
    checks.tensor(op, "parents", parents, lead, torch.int32, device)
    if ragged:
        checks.tensor(op, "cu_nodes", cu_nodes, (batch + 1,), torch.int32, device)
    if not isinstance(rule, str) or rule not in RULES:
        raise ValueError(f"{op}: rule: got {rule!r}, expected one of {', '.join(RULES)}")
    if temperature is None and rule != "greedy":
        raise TypeError(f"{op}: temperature: got None, expected a tensor with rule {rule!r}")
    if temperature is not None:
        checks.tensor(op, "temperature", temperature, (batch,), torch.float32, device)
        checks.tensor(op, "seed", seed, (batch,), torch.int64, device)
        checks.tensor(op, "block_start", block_start, (batch,), torch.int64, device)
    filters = top_k, top_p, min_p
    check_filters(op, batch, device, filters, filter_order)
    drafted = rule in _DRAFTED
    pool_ids = pool_logits = None
    if drafted:
        if (draft_pool is None) == (draft_logits is None):
            raise ValueError(
                f"{op}: draft_pool, draft_logits: got both or none, expected one with rule {rule!r}"
            )
        if draft_pool is not None:
            if not isinstance(draft_pool, (tuple, list)) or len(draft_pool) != 2:
                raise TypeError(
                    f"{op}: draft_pool: got {type(draft_pool).__name__}, expected (ids, logits)"
                )
            pool_ids, pool_logits = draft_pool
            pool = checks.sizes(op, "draft_pool ids", pool_ids, "[B, N, M]"[3 * ragged :])[-1]
            if not 1 <= pool <= _MAX_POOL:
                raise ValueError(f"{op}: draft_pool: got M = {pool}, expected 1 to {_MAX_POOL}")
            checks.tensor(op, "draft_pool ids", pool_ids, (*lead, pool), torch.int32, device)
            checks.dtype(op, "draft_pool logits", pool_logits, DTYPES)
            checks.tensor(
                op, "draft_pool logits", pool_logits, (*lead, pool), pool_logits.dtype, device
            )
        else:
            checks.dtype(op, "draft_logits", draft_logits, DTYPES)
            checks.tensor(
                op, "draft_logits", draft_logits, (*lead, vocab), draft_logits.dtype, device
            )
        if draft_temperature is not None:
            checks.tensor(
                op, "draft_temperature", draft_temperature, (batch,), torch.float32, device
            )
    else:
        for name, value in (
            ("draft_pool", draft_pool),
            ("draft_logits", draft_logits),
            ("draft_temperature", draft_temperature),
        ):
            if value is not None:
                raise ValueError(f"{op}: {name}: got a value, expected None with rule {rule!r}")

    if out is None:
        out = _empty_result(batch, width, device, logprobs)
    else:
        _check_result(op, out, batch, width, device, logprobs)
    if workspace is not None and device.type == "cuda":
        checks.tensor(op, "workspace", workspace, (workspace.numel(),), torch.int64, device)
    _verify_tree(
        target_logits,
        tokens,
        parents,
        RULES[rule],
        temperature,
        seed,
        block_start,
        pool_ids,
        pool_logits,
        draft_logits,
        draft_temperature,
        *filters,
        ORDERS[filter_order],
        cu_nodes,
        *out,
        workspace,
    )
    return out
