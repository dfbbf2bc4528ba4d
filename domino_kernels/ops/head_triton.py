"""draft_chain's Triton backend behind the same public function: `draft_chain(backend="triton")`."""

import os

import torch

from domino_kernels.ops.head_weights import HeadWeights
from domino_kernels.torch_library import define


def _launch(
    base_logits,
    hidden,
    anchor,
    w_ih,
    w_hh,
    w1,
    w2,
    embedding,
    table,
    shift_label,
    pure_draft_prefix_len,
    exact,
    pool_size,
    workspace,
    tokens,
    scores,
):
    from domino_kernels.triton_kernels.draft_chain import draft_chain

    if not tokens.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "draft_chain: backend: got 'triton' with tensors on cpu, expected a GPU "
            "(or the interpreter: TRITON_INTERPRET=1 before triton is imported)"
        )
    draft_chain(
        base_logits,
        hidden,
        anchor,
        HeadWeights(w_ih, w_hh, w1, w2, embedding),
        tokens,
        scores,
        workspace,
        shift_label=shift_label,
        prefix=pure_draft_prefix_len,
        exact=exact,
        pool_size=pool_size,
        table=table,
    )


draft_chain_triton = define(
    "draft_chain_triton(Tensor base_logits, Tensor hidden, Tensor anchor, Tensor w_ih, "
    "Tensor w_hh, Tensor w1, Tensor w2, Tensor embedding, Tensor? table, bool shift_label, "
    "int pure_draft_prefix_len, bool exact, int pool_size, Tensor(a!) workspace, "
    "Tensor(b!) tokens, Tensor(c!) scores) -> ()",
    _launch,
)


def workspace_bytes(batch, num_drafts, weights, pure_draft_prefix_len, pool_size):
    from domino_kernels.triton_kernels.draft_chain import Workspace

    prefix = min(pure_draft_prefix_len, num_drafts)
    return Workspace(None, batch, num_drafts, prefix, weights, pool_size).bytes


def run(
    base_logits,
    hidden,
    anchor,
    weights,
    *,
    num_drafts,
    shift_label,
    pure_draft_prefix_len,
    exact,
    pool_size,
    table=None,
    out=None,
    scores=None,
    workspace=None,
):
    """(tokens, scores) of checked arguments: see `domino_kernels.draft_chain`."""
    size = len(anchor), num_drafts
    if out is None:
        out = torch.empty(size, dtype=torch.int64, device=anchor.device)
    if scores is None:
        scores = torch.empty(size, dtype=torch.float32, device=anchor.device)
    if workspace is None:
        needed = workspace_bytes(*size, weights, pure_draft_prefix_len, pool_size)
        workspace = torch.empty(needed, dtype=torch.uint8, device=anchor.device)
    draft_chain_triton(
        base_logits,
        hidden,
        anchor,
        weights.w_ih,
        weights.w_hh,
        weights.w1,
        weights.w2,
        weights.embedding,
        table,
        shift_label,
        pure_draft_prefix_len,
        exact,
        pool_size,
        workspace,
        out,
        scores,
    )
    return out, scores
