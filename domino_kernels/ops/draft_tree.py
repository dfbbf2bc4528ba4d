"""A whole draft tree on the device: levels of `expand`, and what becomes of their children."""

from typing import NamedTuple

import torch

from domino_kernels import _C
from domino_kernels.ops import checks
from domino_kernels.ops.expand import (
    MAX_CHILDREN,
    Expansion,
    expand_out,
    expand_workspace,
    project_hidden,
    run,
)
from domino_kernels.ops.head_weights import HeadWeights
from domino_kernels.torch_library import check_status, define, pointer, target

MAX_LEVEL = 1024  # children of a level


class TreeDraft(NamedTuple):
    """The C candidates of a draft tree, level by level. Node c + 1 is candidate c, node 0 the root.

    tokens: [B, C] int64; -1: not there.
    parents: [B, C] int32, the candidate that each hangs on, -1 the root; always an earlier one.
    log_probs: [B, C] float32, of the path from the root to each; -inf: not there. Never greater
        than the parent's.
    log_remaining: [B, C] float32, as `Expansion` has it.
    scores: [B, C + 1, M] float32, row n the scores of what may follow node n, for nodes that have
        children; None unless asked for.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    log_probs: torch.Tensor
    log_remaining: torch.Tensor
    scores: torch.Tensor | None


def _launch_grow_tree(
    token,
    log_prob,
    remaining,
    node,
    path_log_prob,
    first,
    first_row,
    tokens,
    parents,
    log_probs,
    log_remaining,
    next_token,
    next_node,
    next_parent,
    next_log_prob,
):
    batch, paths, children = token.shape
    status = _C.grow_tree(
        tokens=tokens.data_ptr(),
        parents=parents.data_ptr(),
        log_probs=log_probs.data_ptr(),
        log_remaining=log_remaining.data_ptr(),
        next_token=next_token.data_ptr(),
        next_node=next_node.data_ptr(),
        next_parent=next_parent.data_ptr(),
        next_log_prob=next_log_prob.data_ptr(),
        token=token.data_ptr(),
        log_prob=log_prob.data_ptr(),
        remaining=remaining.data_ptr(),
        node=pointer(node),
        path_log_prob=pointer(path_log_prob),
        batch=batch,
        paths=paths,
        children=children,
        next_paths=next_token.size(1),
        candidates=tokens.size(1),
        first=first,
        first_row=first_row,
        **target(tokens),
    )
    check_status("grow_tree", status)


_grow_tree = define(
    "grow_tree(Tensor token, Tensor log_prob, Tensor remaining, Tensor? node, "
    "Tensor? path_log_prob, int first, int first_row, Tensor(a!) tokens, Tensor(b!) parents, "
    "Tensor(c!) log_probs, Tensor(d!) log_remaining, Tensor(e!) next_token, "
    "Tensor(f!) next_node, Tensor(g!) next_parent, Tensor(h!) next_log_prob) -> ()",
    _launch_grow_tree,
)


class _Level(NamedTuple):
    token: torch.Tensor  # [B, W] of its paths
    node: torch.Tensor
    parent: torch.Tensor
    log_prob: torch.Tensor
    out: Expansion


class TreePlan:
    """Memory and shape of `draft_tree` calls, for CUDA graphs: no call but the first of each number
    of slots allocates, and nothing is freed while the plan lives.

    One call, or replay of a graph that holds it, at a time; a second concurrent user makes a second
    plan. What a call returns is the plan's memory: the next call overwrites it.

    Args:
        batch: B.
        weights: HeadWeights.
        widths: paths that are expanded level by level, the first being 1 (the anchor). A level has
            at most as many as the one before has children.
        children: k, 1..32, of every path. C = k * sum(widths).
        pool_size: M of the pools; None: the whole vocabulary is scored.
        return_scores: keep the scores of every expanded node (needed for `verify_tree` with sampled
            siblings).
        shift_label, pure_draft_prefix_len: as in `draft_chain`.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """

    def __init__(
        self,
        batch,
        weights,
        *,
        widths,
        children,
        pool_size=None,
        return_scores=False,
        shift_label=True,
        pure_draft_prefix_len=1,
    ):
        op = "TreePlan"
        if not isinstance(weights, HeadWeights):
            raise TypeError(f"{op}: weights: got {type(weights).__name__}, expected HeadWeights")
        if not isinstance(children, int) or not 1 <= children <= MAX_CHILDREN:
            raise ValueError(f"{op}: children: got {children!r}, expected 1..{MAX_CHILDREN}")
        if not isinstance(widths, (tuple, list)) or not all(isinstance(w, int) for w in widths):
            raise TypeError(f"{op}: widths: got {widths!r}, expected a tuple of integers")
        widths = tuple(widths)
        most = [1] + [width * children for width in widths]
        if not widths or not all(
            1 <= width <= limit and width * children <= MAX_LEVEL
            for width, limit in zip(widths, most, strict=False)
        ):
            raise ValueError(
                f"{op}: widths: got {widths} with {children} children, expected 1 first, then at "
                f"most as many paths as the level before has children, and at most {MAX_LEVEL} "
                f"children a level"
            )
        self.batch, self.weights, self.widths, self.children = batch, weights, widths, children
        self.pool_size = pool_size
        self.options = dict(shift_label=shift_label, pure_draft_prefix_len=pure_draft_prefix_len)
        new = dict(device=weights.device)
        count, rows = children * sum(widths), sum(widths)
        candidates = weights.vocab_size if pool_size is None else pool_size
        self.workspace = expand_workspace(
            batch, max(widths), children, weights, pool_size=pool_size
        )
        self.states = None
        if weights.recurrent:
            size = (batch, rows, weights.gru_size)
            self.states = torch.empty(size, dtype=weights.dtype, **new)
        self.result = TreeDraft(
            torch.empty((batch, count), dtype=torch.int64, **new),
            torch.empty((batch, count), dtype=torch.int32, **new),
            torch.empty((batch, count), **new),
            torch.empty((batch, count), **new),
            torch.zeros((batch, count + 1, candidates), **new) if return_scores else None,
        )
        self.levels, row = [], 0
        for width in widths:
            each = (batch, width, children)
            out = Expansion(
                torch.empty(each, dtype=torch.int64, **new),
                torch.empty(each, **new),
                torch.empty(each, **new),
                self.states[:, row : row + width] if weights.recurrent else None,
                self.result.scores,
            )
            integers = [torch.zeros((batch, width), dtype=torch.int64, **new) for _ in range(3)]
            self.levels.append(_Level(*integers, torch.zeros((batch, width), **new), out))
            row += width
        empty = torch.empty((batch, 0), dtype=torch.int64, **new)
        self.end = _Level(empty, empty, empty, torch.empty((batch, 0), **new), None)
        self.from_hidden = {}  # by slots: a captured call goes on writing to the one that it got

    def __call__(
        self,
        base_logits,
        hidden,
        anchor,
        *,
        pool=None,
        temperature=None,
        seed=None,
        block_start=None,
    ):
        """The tree that follows `anchor`; arguments as in `draft_tree`. Returns TreeDraft."""
        weights, result = self.weights, self.result
        checks.tensor("draft_tree", "anchor", anchor, (self.batch,), torch.int64, weights.device)
        checks.contiguous("draft_tree", "anchor", anchor)
        logits = checks.sizes("draft_tree", "base_logits", base_logits, "[B, S, V]")
        if logits[0] != self.batch:
            raise ValueError(
                f"draft_tree: base_logits: got {logits[0]} rows, expected {self.batch}, as anchor "
                f"has"
            )
        needed = len(self.widths) + (0 if self.options["shift_label"] else 1)
        if logits[1] < needed:
            raise ValueError(
                f"draft_tree: base_logits: got {logits[1]} slots, expected at least {needed} for "
                f"{len(self.widths)} levels"
            )
        if (pool is None) != (self.pool_size is None):
            got = "None" if pool is None else "a tensor"
            raise ValueError(
                f"draft_tree: pool: got {got}, expected what the plan was made for "
                f"(pool_size={self.pool_size})"
            )
        from_hidden = None
        if weights.hidden_size:
            from_hidden = self.from_hidden.get(logits[1])
            if from_hidden is None:
                size = (self.batch, logits[1], weights.rank)
                from_hidden = self.from_hidden[logits[1]] = torch.empty(size, device=weights.device)
            project_hidden(hidden, weights, out=from_hidden)
        first = row = 0
        for depth, level in enumerate(self.levels):
            root = depth == 0
            # the first call checks the caller's tensors for all; the others are the plan's
            step = expand_out if root else run
            step(
                base_logits,
                None,
                anchor[:, None] if root else level.token,
                weights,
                out=level.out,
                workspace=self.workspace,
                depth=depth,
                states=None if root else self.states,
                parent=None if root else level.parent,
                from_hidden=from_hidden,
                pool=pool,
                temperature=temperature,
                seed=seed,
                block_start=block_start,
                node=level.node,
                scores_by_node=result.scores is not None,
                **self.options,
            )
            after = self.levels[depth + 1] if depth + 1 < len(self.levels) else self.end
            _grow_tree(
                *level.out[:3],
                None if root else level.node,
                None if root else level.log_prob,
                first,
                row,
                *result[:4],
                after.token,
                after.node,
                after.parent,
                after.log_prob,
            )
            first += self.widths[depth] * self.children
            row += self.widths[depth]
        return result


def draft_tree(
    base_logits,
    hidden,
    anchor,
    weights,
    *,
    widths,
    children,
    pool=None,
    temperature=None,
    seed=None,
    block_start=None,
    shift_label=True,
    pure_draft_prefix_len=1,
    return_scores=False,
):
    """A tree of drafts behind an anchor, level by level, without leaving the device.

    Level d expands widths[d] paths by `expand`, at depth d: first the anchor, then each time the
    most probable children of the level before, by the product of the head's probabilities along
    the path. All children are returned as candidates; `build_tree` takes the most probable of them
    (its `scores` are log_probs), which makes a best-first tree for the greedy, match and
    target-only rules of `verify_tree`. With seed the children are drawn without replacement, and
    `build_tree` takes all of them (no `scores`): the tree that the rules for sampled siblings need.
    Their number depends on earlier draws alone.

    Args:
        base_logits: [B, S, V'], S >= the number of levels (one more without shift_label).
        hidden: [B, S, H], as in `draft_chain`; None for a head that does not see it.
        anchor: [B] int64.
        weights: HeadWeights.
        widths, children: see `TreePlan`, which also is what to use in a loop or a CUDA graph.
        pool, temperature, seed, block_start: as in `expand`. Noise: node 0 is the anchor.
        shift_label, pure_draft_prefix_len: as in `draft_chain`.
        return_scores: also return the scores of every expanded node.

    Returns:
        TreeDraft.

    Raises:
        TypeError, ValueError: an argument does not fit, or requires grad (the op has no gradient).

    Source: DominoTree (arXiv 2607.08642) for trees of a Domino head.
    """
    batch = checks.sizes("draft_tree", "anchor", anchor, "[B]")[0]
    plan = TreePlan(
        batch,
        weights,
        widths=widths,
        children=children,
        pool_size=None if pool is None else checks.sizes("draft_tree", "pool", pool, "[B, M]")[1],
        return_scores=return_scores,
        shift_label=shift_label,
        pure_draft_prefix_len=pure_draft_prefix_len,
    )
    return plan(
        base_logits,
        hidden,
        anchor,
        pool=pool,
        temperature=temperature,
        seed=seed,
        block_start=block_start,
    )
