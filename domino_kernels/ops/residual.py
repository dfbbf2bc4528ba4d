"""The token that replaces a rejected draft, from the one row of q that it takes."""

import torch

from domino_kernels.ops import checks
from domino_kernels.ops.verify import (
    _check_result,
    _check_workspace,
    _empty_result,
    _verify_chain,
    verify_chain_workspace,
)
from domino_kernels.ops.verify_checks import ORDERS, VerifyRule, check_draft_law, check_filters
from domino_kernels.torch_library import DTYPES


def residual_sample(
    target_logits,
    rejected,
    slot,
    *,
    temperature,
    seed,
    block_start,
    draft_logits=None,
    draft_ids=None,
    draft_temperature=None,
    top_k=None,
    top_p=None,
    min_p=None,
    filter_order="transformers",
    logit_bias=None,
    grammar_mask=None,
    vocab_valid=None,
    out=None,
    workspace=None,
):
    """Draws from relu(p - q), renormalised, where verify_chain with draft_logprob rejected a draft.

    verify_chain then needs of q one number a draft; the row of q is rebuilt or looked up for the
    rejected slot only. Same noise and same bits as if verify_chain had been given all of q.

    Args:
        target_logits: [B, V], the target's row of the slot: target_logits[b, num_accepted[b]].
        rejected: [B] int64, the draft that was rejected.
        slot: [B] int32, num_accepted where status has NEEDS_RESIDUAL, -1 elsewhere: nothing is
            drawn.
        temperature, seed, block_start, top_k, top_p, min_p, filter_order, logit_bias, vocab_valid:
            as in verify_chain.
        draft_logits: [B, V], the row of q; [B, M] with draft_ids; None: one-hot.
        draft_ids: [B, M] int32.
        draft_temperature: [B] float32; None: the target's temperature.
        grammar_mask: [B, ceil(V / 32)] int32. Penalties: apply them to target_logits, or give them
            as logit_bias.
        out: VerifyResult of one draft, as verify_chain writes it for K = 1; workspace: of
            verify_chain_workspace(B, 1, V, dense=draft_ids is None).

    Returns:
        (tokens [B] int64, -1 where none; logprob [B] float32, log p before the filters; status [B]
        uint8 of VerifyStatus).

    Raises:
        TypeError, ValueError: an argument does not fit.

    Source: Leviathan et al. 2211.17192.
    """
    op = "residual_sample"
    batch, vocab = checks.sizes(op, "target_logits", target_logits, "[B, V]")
    device = target_logits.device
    checks.dtype(op, "target_logits", target_logits, DTYPES)
    checks.tensor(op, "target_logits", target_logits, (batch, vocab), target_logits.dtype, device)
    for name, value, dtype in (
        ("rejected", rejected, torch.int64),
        ("slot", slot, torch.int32),
        ("temperature", temperature, torch.float32),
        ("seed", seed, torch.int64),
        ("block_start", block_start, torch.int64),
    ):
        checks.tensor(op, name, value, (batch,), dtype, device)
    check_filters(op, batch, device, (top_k, top_p, min_p), filter_order)
    wide = vocab if vocab_valid is None else vocab_valid
    if not isinstance(wide, int) or not 1 <= wide <= vocab:
        raise ValueError(f"{op}: vocab_valid: got {wide!r}, expected 1 to V = {vocab}")
    for name, value, layout in (
        ("draft_logits", draft_logits, "[B, V]" if draft_ids is None else "[B, M]"),
        ("draft_ids", draft_ids, "[B, M]"),
    ):
        if value is not None:
            checks.sizes(op, name, value, layout)
    row = lambda value: None if value is None else value[:, None]  # noqa: E731
    shape = batch, 1, vocab
    dense = check_draft_law(op, row(draft_logits), row(draft_ids), None, shape, device)
    if draft_temperature is not None:
        checks.tensor(op, "draft_temperature", draft_temperature, (batch,), torch.float32, device)
    if logit_bias is not None:
        checks.tensor(op, "logit_bias", logit_bias, (batch, vocab), torch.float32, device)
    if grammar_mask is not None:
        words = (batch, (vocab + 31) // 32)
        checks.tensor(op, "grammar_mask", grammar_mask, words, torch.int32, device)
    if out is None:
        out = _empty_result(batch, 1, device)
    else:
        _check_result(op, out, batch, 1, device, True, 0)
    if workspace is None:
        workspace = verify_chain_workspace(batch, 1, wide, dense=dense, device=device)
    else:
        _check_workspace(op, workspace, batch, 1, wide, dense, device)
    _verify_chain(
        target_logits[:, None],
        rejected[:, None],
        VerifyRule.TOKEN,
        None,
        temperature,
        seed,
        block_start,
        row(draft_logits),
        row(draft_ids),
        None,
        draft_temperature,
        top_k,
        top_p,
        min_p,
        ORDERS[filter_order],
        logit_bias,
        None,
        None,
        None,
        None,
        None,
        row(grammar_mask),
        wide,
        None,
        slot,
        None,
        *out,
        workspace,
    )
    return out.tokens[:, 0], out.chosen_logprob[:, 0], out.status
