"""The Triton backend of draft_chain, an op of its own. Calls are checked by ops/draft_chain.py."""

import os

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
    restarts,
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
        table,
        tokens,
        scores,
        restarts,
        workspace,
        shift_label=shift_label,
        prefix=pure_draft_prefix_len,
        exact=exact,
        pool_size=pool_size,
    )


_draft_chain_triton = define(
    "draft_chain_triton(Tensor base_logits, Tensor hidden, Tensor anchor, Tensor w_ih, "
    "Tensor w_hh, Tensor w1, Tensor w2, Tensor embedding, Tensor? table, bool shift_label, "
    "int pure_draft_prefix_len, bool exact, int pool_size, Tensor(a!) workspace, "
    "Tensor(b!) tokens, Tensor(c!) scores, Tensor(d!) restarts) -> ()",
    _launch,
)


def launch_triton(
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
):
    _draft_chain_triton(
        base_logits,
        hidden,
        anchor,
        weights.w_ih,
        weights.w_hh,
        weights.w1,
        weights.w2,
        weights.embedding,
        weights.table,
        shift_label,
        pure_draft_prefix_len,
        exact,
        pool_size,
        workspace,
        *out[:3],
    )


def triton_workspace_bytes(batch, num_drafts, pool_size, weights):
    from domino_kernels.triton_kernels.draft_chain import Workspace

    return Workspace(None, batch, num_drafts, 0, weights, pool_size).bytes
