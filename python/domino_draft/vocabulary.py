"""Drafting from a part of the vocabulary: fewer rows of the LM head, of W2 and of the table.

The target still chooses among all tokens, so the output stays what it is; a token outside the part
is never drafted, and so never accepted. Which ids to keep is a matter of the text: frequent ones
(FR-Spec, arXiv 2502.14856; VocabTrim, arXiv 2506.22694).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from domino_kernels import HeadWeights


def draft_ids(where: str, ids: Sequence[int] | Tensor, vocab_size: int) -> Tensor:
    """Ascending int64 on the CPU; an error begins with `where`, the op and the argument."""
    given = torch.as_tensor(ids)
    if given.numel() and (given.dtype == torch.bool or given.is_floating_point()):
        # A mask would be read as the ids 0 and 1.
        raise TypeError(f"{where}: got {given.dtype}, expected integers")
    kept = given.to(torch.int64).flatten().cpu().unique()
    if not len(kept) or kept[0] < 0 or kept[-1] >= vocab_size:
        raise ValueError(
            f"{where}: got {len(kept)} ids"
            + (f" from {kept[0]} to {kept[-1]}" if len(kept) else "")
            + f", expected at least one, all of 0..{vocab_size - 1}"
        )
    return kept


class DraftVocabulary:
    """The rows of `ids` of the LM head and of a Domino head, in the order of the ids.

    An anchor may be any token, and the head's GRU reads it: behind the kept rows, where nothing is
    drafted from, each row of the batch has a place for its anchor.

    Args:
        ids: from `draft_ids`.
        lm_head: [V, H]. weights: of the Domino head over all of the vocabulary, or None.
        rows: of the batch at most.
    """

    def __init__(self, ids: Tensor, lm_head: Tensor, weights: HeadWeights | None, rows: int):
        self.ids = ids.to(lm_head.device)
        self.size = len(ids)
        places = self.size + rows
        places += -places % 16  # as fp8 products want it
        self.lm_head = self._kept(lm_head, places)
        self.weights = self._embedding = None
        if weights is not None:
            self._embedding = weights.embedding
            table = None if weights.table is None else self._kept(weights.table, places)
            self.weights = replace(
                weights,
                w2=self._kept(weights.w2, places),
                embedding=self._kept(weights.embedding, places),
                table=table,
                screen=None,
            )
            if weights.screen is not None:
                self.weights = self.weights.with_screen()

    def _kept(self, rows: Tensor, places: int) -> Tensor:
        out = rows.new_zeros(places, *rows.shape[1:])
        torch.index_select(rows, 0, self.ids, out=out[: self.size])
        return out

    def place(self, anchors: Tensor) -> Tensor:
        """Ids of the anchors [B] in this vocabulary, whose rows are written."""
        if self.weights is None:
            return anchors
        last = self.size + len(anchors)
        rows = self._embedding[anchors]
        self.weights.embedding[self.size : last] = rows
        if self.weights.table is not None:
            gates = F.linear(rows, self.weights.w_ih).view(len(anchors), 3, -1, 16)
            self.weights.table[self.size : last] = gates.transpose(1, 2)
        return torch.arange(self.size, last, device=anchors.device)

    def columns(self, values: Tensor) -> Tensor:
        """Of values [B, V], those of this vocabulary's places."""
        return self._kept(values.t(), len(self.lm_head)).t().contiguous()

    def tokens(self, ids: Tensor) -> Tensor:
        """The target's ids of ids in this vocabulary; -1 stays -1."""
        return torch.where(ids < 0, -1, self.ids[ids])
