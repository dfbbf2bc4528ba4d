"""rejection_sample of vLLM's second model runner (vllm/v1/worker/gpu/spec_decode, mid 2026)."""

import torch
from torch.nn import functional

from domino_kernels import verify_chain


def rejection_sample(
    target_logits,
    draft_logits,
    draft_sampled,
    cu_num_logits,
    pos,
    idx_mapping,
    expanded_idx_mapping,
    expanded_local_pos,
    temperature,
    seed,
    num_speculative_steps,
    synthetic_conditional_rates=None,
    use_fp64=False,
    use_block_verification=False,
):
    """Ragged batch, drafts with or without their law, greedy and sampled requests together.

    Args:
        target_logits: [num_logits, V]; temperature, filters and penalties already applied, as the
            engine's sampler leaves them. Greedy requests are those with temperature 0.
        draft_logits: [max_num_reqs, num_speculative_steps, Vd], at the draft's temperature, or
            None for one-hot drafts. Vd may be smaller or larger than V: a token that one of the two
            does not have has no mass there.
        draft_sampled: [num_logits], in each request's rows the last token, then its drafts.
        cu_num_logits: [num_reqs + 1]: request b has rows cu_num_logits[b] .. cu_num_logits[b + 1];
            one without rows, as the padding of a captured batch has none, gets nothing.
        pos: [num_logits], absolute position of each row's token.
        idx_mapping: [num_reqs], place of each request in temperature, seed and draft_logits.
        expanded_idx_mapping, expanded_local_pos: accepted and ignored; they follow from the others.
        temperature, seed: [max_num_reqs].
        num_speculative_steps: K.
        synthetic_conditional_rates: only None: acceptance without a look at the logits.
        use_fp64: accepted and ignored; noise has all 32 bits.
        use_block_verification: the block rule. Its noise is keyed by the block, which it needs:
            keyed by position, coins and drafts are conditioned by what was seen in the last block.

    Returns:
        sampled [num_reqs, K + 1] int64, -1 behind what was emitted; num_sampled [num_reqs] int32,
        which is the number of accepted drafts where the next row holds no law.
    """
    if synthetic_conditional_rates is not None:
        raise ValueError(
            "rejection_sample: synthetic_conditional_rates: got a tensor, expected None"
        )
    if draft_sampled.numel() != target_logits.size(0):
        raise ValueError(
            f"rejection_sample: draft_sampled: got {draft_sampled.numel()} ids, expected "
            f"{target_logits.size(0)}, as target_logits has rows"
        )
    requests, (rows, vocab) = cu_num_logits.numel() - 1, target_logits.shape
    first = cu_num_logits[:-1].long()
    at = first[:, None] + 1 + torch.arange(num_speculative_steps, device=first.device)
    inside = at < cu_num_logits[1:, None]
    # one entry behind the rows, for requests that have none and begin there
    sampled, pos = (functional.pad(values.long(), (0, 1)) for values in (draft_sampled, pos))
    drafts = sampled[at.clamp(max=rows)].masked_fill(~inside, -1)
    place = idx_mapping.long()
    draft_temperature = None
    if draft_logits is not None:
        draft_logits = draft_logits[place]
        missing = vocab - draft_logits.size(-1)
        if missing > 0:
            draft_logits = functional.pad(draft_logits, (0, missing), value=-torch.inf)
        draft_logits = draft_logits[..., :vocab]
        draft_temperature = torch.ones(requests, device=first.device)
    greedy = temperature[place] == 0
    result = verify_chain(
        target_logits,
        drafts,
        rule="block" if use_block_verification else "token",
        temperature=(~greedy).float(),
        seed=seed[place].long(),
        block_start=pos[first],
        draft_logits=draft_logits,
        draft_temperature=draft_temperature,
        cu_rows=cu_num_logits.int(),
    )
    return result.tokens, result.num_emitted
