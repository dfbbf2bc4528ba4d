"""What the calls of verify_chain, whole or in shards, have to look like."""

from enum import IntEnum

import torch

from domino_kernels.ops import checks
from domino_kernels.torch_library import DTYPES

MAX_VOCAB = 1 << 23
_FILTER_DTYPES = {"top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
ORDERS = {"transformers": 0, "vllm": 1, "joint": 2}
_SAMPLING = ("temperature", "seed", "block_start", "draft_logits", "draft_ids", "draft_logprob")
_SAMPLING += ("draft_temperature", "top_k", "top_p", "min_p")  # not with rule="greedy"


class VerifyRule(IntEnum):
    """Rules of verify_chain, for a tensor of rules; by name they are these in lower case."""

    GREEDY = 0
    TOKEN = 1
    ONEHOT = 2
    MATCH = 3
    BLOCK = 4
    GUMBEL = 5


RULES = {rule.name.lower(): int(rule) for rule in VerifyRule}
_POSITION_RULES = VerifyRule.MATCH, VerifyRule.GUMBEL


def check_rows(op, target_logits, draft_tokens, cu_rows, num_active):
    """The rows that requests are judged by; returns B, K and V."""
    batch, drafts = checks.sizes(op, "draft_tokens", draft_tokens, "[B, K]")
    if cu_rows is None:
        vocab = checks.sizes(op, "target_logits", target_logits, "[B, K + 1, V]")[2]
        shape = (batch, drafts + 1, vocab)
    else:
        rows, vocab = checks.sizes(op, "target_logits", target_logits, "[R, V]")
        shape = (rows, vocab)
    device = target_logits.device
    checks.dtype(op, "target_logits", target_logits, DTYPES)
    checks.tensor(op, "target_logits", target_logits, shape, target_logits.dtype, device)
    if not 1 <= vocab <= MAX_VOCAB:
        raise ValueError(f"{op}: target_logits: got V = {vocab}, expected 1 to {MAX_VOCAB}")
    checks.tensor(op, "draft_tokens", draft_tokens, (batch, drafts), torch.int64, device)
    if cu_rows is not None:
        checks.tensor(op, "cu_rows", cu_rows, (batch + 1,), torch.int32, device)
    if num_active is not None:
        checks.tensor(op, "num_active", num_active, (1,), torch.int32, device)
    return batch, drafts, vocab


def check_filters(op, batch, device, filters, filter_order):
    """filters: top_k, top_p, min_p."""
    for (name, dtype), value in zip(_FILTER_DTYPES.items(), filters):
        if value is not None:
            checks.tensor(op, name, value, (batch,), dtype, device)
    if filter_order not in ORDERS:
        orders = ", ".join(ORDERS)
        raise ValueError(f"{op}: filter_order: got {filter_order!r}, expected one of {orders}")


def check_draft_law(op, draft_logits, draft_ids, draft_logprob, shape, device):
    """Dense logits, a pool, or scalars; returns whether q is dense."""
    batch, drafts, vocab = shape
    if draft_logprob is not None:
        if draft_logits is not None:
            raise ValueError(f"{op}: draft_logprob: got a tensor, expected None with draft_logits")
        checks.tensor(op, "draft_logprob", draft_logprob, shape[:2], torch.float32, device)
        checks.contiguous(op, "draft_logprob", draft_logprob)
    if draft_ids is not None:
        if draft_logits is None:
            raise ValueError(f"{op}: draft_ids: got a tensor, expected draft_logits with it")
        vocab = checks.sizes(op, "draft_ids", draft_ids, "[B, K, M]")[2]
        checks.tensor(op, "draft_ids", draft_ids, (batch, drafts, vocab), torch.int32, device)
    if draft_logits is not None:
        layout = "[B, K, V]" if draft_ids is None else "[B, K, M]"
        checks.sizes(op, "draft_logits", draft_logits, layout)
        checks.dtype(op, "draft_logits", draft_logits, DTYPES)
        wide = batch, drafts, vocab
        checks.tensor(op, "draft_logits", draft_logits, wide, draft_logits.dtype, device)
    return draft_logits is not None and draft_ids is None


def check_rule(op, rule, keying, batch, device):
    """A tensor of rules, or None and the code of the one that is named."""
    if keying is not None and keying not in ("block", "position"):
        raise ValueError(f"{op}: keying: got {keying!r}, expected None, 'block' or 'position'")
    if isinstance(rule, torch.Tensor):
        checks.tensor(op, "rule", rule, (batch,), torch.uint8, device)
        checks.contiguous(op, "rule", rule)
        return rule, 0
    if not isinstance(rule, str) or rule not in RULES:
        raise ValueError(f"{op}: rule: got {rule!r}, expected one of {', '.join(RULES)}")
    code = RULES[rule]
    own = "position" if code in _POSITION_RULES else "block"
    if keying is not None and code and keying != own:
        raise ValueError(f"{op}: keying: got {keying!r}, expected {own!r} with rule={rule!r}")
    return None, code


def check_sampling(
    op,
    sampled,
    sizes,
    device,
    temperature,
    seed,
    block_start,
    draft_logits,
    draft_ids,
    draft_logprob,
    draft_temperature,
    top_k,
    top_p,
    min_p,
    filter_order,
):
    """What only sampled requests have; sizes: B, K, V. Returns whether q is dense."""
    batch, _, _ = sizes
    filters = (top_k, top_p, min_p) if sampled else (None, None, None)
    check_filters(op, batch, device, filters, filter_order)
    if sampled:
        checks.tensor(op, "temperature", temperature, (batch,), torch.float32, device)
        checks.tensor(op, "seed", seed, (batch,), torch.int64, device)
        checks.tensor(op, "block_start", block_start, (batch,), torch.int64, device)
        dense = check_draft_law(op, draft_logits, draft_ids, draft_logprob, sizes, device)
        if draft_temperature is not None:
            if draft_logits is None:
                raise ValueError(f"{op}: draft_temperature: got a tensor, expected draft_logits")
            shape = (batch,)
            checks.tensor(op, "draft_temperature", draft_temperature, shape, torch.float32, device)
        return dense
    unused = temperature, seed, block_start, draft_logits, draft_ids, draft_logprob
    unused += draft_temperature, top_k, top_p, min_p
    if any(value is not None for value in unused):
        name = next(name for name, value in zip(_SAMPLING, unused) if value is not None)
        raise ValueError(f"{op}: {name}: got a value, expected None with rule='greedy'")
    return False


def check_edits(
    op,
    target_logits,
    batch,
    logit_bias,
    repetition_penalty,
    presence_penalty,
    frequency_penalty,
    prompt_mask,
    output_counts,
    grammar_mask,
):
    device, vocab = target_logits.device, target_logits.size(-1)
    if not (repetition_penalty is presence_penalty is frequency_penalty is None):
        for name, value in (
            ("repetition_penalty", repetition_penalty),
            ("presence_penalty", presence_penalty),
            ("frequency_penalty", frequency_penalty),
        ):
            if value is not None:
                checks.tensor(op, name, value, (batch,), torch.float32, device)
    if logit_bias is not None:
        checks.tensor(op, "logit_bias", logit_bias, (batch, vocab), torch.float32, device)
    if output_counts is not None:
        checks.tensor(op, "output_counts", output_counts, (batch, vocab), torch.int32, device)
    words = (vocab + 31) // 32
    if prompt_mask is not None:
        checks.tensor(op, "prompt_mask", prompt_mask, (batch, words), torch.int32, device)
    if grammar_mask is not None:
        shape = (*target_logits.shape[:-1], words)
        checks.tensor(op, "grammar_mask", grammar_mask, shape, torch.int32, device)
