"""The captured cycle with a tree of drafts in place of a chain: see `cycle.py` and `tree.py`.

The target reads the tree in one forward: node n of a row is written at the cache place behind its
length, stands at the position of its depth, and sees its ancestors. `verify_tree` keeps a path,
whose keys, values and hidden states then move to where a chain would have put them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from domino_kernels import TreePlan, build_tree, compact_accepted, kv_move, shortlist, verify_tree

from . import cache_ops
from .cycle import Cycle
from .requests import Law

if TYPE_CHECKING:
    from .policy import Choice
    from .tree import TreeOptions


class TreeCycle(Cycle):
    """A cycle that drafts trees of `options`, whose depth is decided and which has no lookup."""

    def __init__(
        self, target, session, cache, rows, options: TreeOptions, fp8_draft_head=False,
        draft_vocab: Tensor | None = None,
    ):  # fmt: skip
        super().__init__(
            target, session, cache, rows, options.depth, fp8_draft_head, block=options.nodes,
            draft_vocab=draft_vocab,
        )  # fmt: skip
        self.options = options
        self._plans: dict[int, TreePlan] = {}

    def run(self, rows: int, choice: Choice, law: Law) -> Tensor:
        lengths, anchors = self.cache.all_lengths[:rows], self.anchors[:rows]
        tree, drawn = self._tree(anchors, lengths)
        nodes = cache_ops.Rows(self.options.nodes, None, tree.positions, tree.mask)
        drafts = tree.tokens[:, 1:].contiguous()
        x, features = self._forward(anchors, drafts, lengths, nodes, rows * nodes.tokens)
        logits = self.target.logits(x).view(rows, nodes.tokens, -1)
        result = self._verify_tree(logits, tree, lengths, law, drawn)
        held = [layer[:rows] for pair in self.kv for layer in pair]
        kv_move(held, result.path, result.num_accepted, lengths, layout="HND")
        path = result.path[:, : self.num_drafts + 1].contiguous()
        (features,) = compact_accepted(
            path, result.num_accepted, features.view(rows, nodes.tokens, -1)
        )
        result = result._replace(tokens=result.tokens[:, : self.num_drafts + 1].contiguous())
        return self._commit(result, features.flatten(0, 1), anchors, lengths)

    def _tree(self, anchors: Tensor, lengths: Tensor):
        """The tree, and what its rule needs of the law that it was drawn from."""
        options, rows, root, part = self.options, anchors.shape[0], anchors, self.vocabulary
        hidden = self._block(anchors, lengths, self.num_drafts)
        base = self._draft_logits(hidden)
        if base.dtype != self.head.w2.dtype:
            base = base.float()
        size = base.shape[-1]
        if part is not None:
            root, size = part.place(anchors), part.size
            base[..., size:] = -torch.inf  # places of anchors are no children
        pool = None
        if options.pool is not None and (options.pool < size or part is not None):
            pool = shortlist(base, min(options.pool, size))
        if rows not in self._plans:  # before a capture, by the run that precedes it
            self._plans[rows] = TreePlan(
                rows,
                self.head,
                widths=options.widths(options.depth),
                children=options.children,
                pool_size=None if pool is None else pool.shape[1],
                return_scores=options.drawn,
                shift_label=self.config.shift_label,
                pure_draft_prefix_len=self.config.pure_draft_prefix_len,
            )
        noise = {}
        if options.drawn:
            noise = dict(
                temperature=self.temperature[:rows], seed=self.seed[:rows], block_start=lengths
            )
        draft = self._plans[rows](base, hidden, root, pool=pool, **noise)
        tree = build_tree(
            anchors,
            draft.tokens if part is None else part.tokens(draft.tokens),
            draft.parents,
            prefix=lengths,
            num_nodes=options.nodes,
            scores=None if options.drawn else draft.log_probs,
            mask="packed",
        )
        if not options.drawn:
            return tree, {}
        shape = rows, options.nodes, draft.scores.shape[-1]
        ids = pool
        if ids is None:
            ids = torch.arange(shape[-1], device=self.device, dtype=torch.int32)[None]
        elif part is not None:
            ids = part.tokens(pool).int()
        return tree, {"draft_pool": (ids[:, None].expand(shape), draft.scores)}

    def _verify_tree(self, logits: Tensor, tree, lengths: Tensor, law: Law, drawn: dict):
        rule = self.options.rule or ("greedy" if law is Law.GREEDY else "target_only")
        if rule == "greedy":
            return verify_tree(logits, tree.tokens, tree.parents)
        rows = slice(0, len(lengths))
        return verify_tree(
            logits,
            tree.tokens,
            tree.parents,
            rule=rule,
            seed=self.seed[rows],
            block_start=lengths,
            **{n: values[rows] for n, values in self._settings(law is Law.FILTERED).items()},
            **drawn,
        )
