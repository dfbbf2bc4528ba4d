"""The Domino head: a GRU over the block's tokens and a low-rank correction of the base logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .config import DominoConfig

if TYPE_CHECKING:
    from domino_kernels import HeadWeights


class DominoHead(nn.Module):
    """logits_i = base_i + W2 · SiLU(W1 · [H_i ; S]), S the GRU state before the predicted token.

    With `shift_label` slot i scores the token after y_i, so it uses S_i (state after y_0..y_i);
    without it slot i scores y_i itself and uses S_{i-1} (arXiv 2605.29707). The GRU reads the
    TARGET's token embeddings. Corrected are slots i >= `first_slot`; the others keep their base
    logits.
    """

    def __init__(self, config: DominoConfig):
        super().__init__()
        hidden, state, rank = config.hidden_size, config.gru_hidden_dim, config.emb_dim
        self.first_slot = config.pure_draft_prefix_len + (0 if config.shift_label else 1)
        self.prefix_gru = nn.GRU(hidden, state, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden + state, rank, bias=False),
            nn.SiLU(),
            nn.Linear(rank, config.vocab_size, bias=False),
        )

    def states(self, token_embeds: Tensor) -> Tensor:
        """GRU states after each token: token_embeds [N, T, H] -> [N, T, G], zero state before."""
        return self.prefix_gru(token_embeds.to(self.prefix_gru.weight_hh_l0.dtype))[0]

    def low_rank(self, hidden: Tensor, states: Tensor) -> Tensor:
        """u = SiLU(W1 · [H ; S]): [..., H], [..., G] -> [..., R]; logits = base + u · W2ᵀ."""
        return self.embed_proj[1](self.embed_proj[0](torch.cat((hidden, states), dim=-1)))

    @property
    def w2(self) -> Tensor:
        """The vocabulary side of the correction, [V, R]."""
        return self.embed_proj[2].weight

    def forward(self, hidden: Tensor, states: Tensor) -> Tensor:
        """The correction of the logits, [..., V]."""
        return self.embed_proj[2](self.low_rank(hidden, states))

    def weights(self, embedding: Tensor) -> HeadWeights:
        """The tensors that `domino_kernels.draft_chain` takes; embedding is the target's [V, H]."""
        from domino_kernels import HeadWeights

        return HeadWeights(
            w_ih=self.prefix_gru.weight_ih_l0.detach(),
            w_hh=self.prefix_gru.weight_hh_l0.detach(),
            w1=self.embed_proj[0].weight.detach(),
            w2=self.w2.detach(),
            embedding=embedding.detach().to(self.w2.dtype),
        )
