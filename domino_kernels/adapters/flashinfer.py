"""flashinfer.sampling.chain_speculative_sampling (0.5 to 0.6)."""

import torch

from domino_kernels import noise, rng, verify_chain
from domino_kernels.adapters.noise import one_number, seeds_of_call


def chain_speculative_sampling(
    draft_probs,
    draft_token_ids,
    target_probs,
    maybe_output_accepted_token_num=None,
    maybe_output_emitted_draft_token_num=None,
    deterministic=True,
    generator=None,
    seed=None,
    offset=None,
):
    """Keeps drafts with min(1, p / q), replaces the first rejected one from relu(p - q).

    Args:
        draft_probs: [B, K, V], the laws the drafts were sampled from; rows sum to 1. Any float
            dtype.
        draft_token_ids: [B, K] integers; -1 or an id outside the vocabulary ends the chain.
        target_probs: [B, K + 1, V], after all filters.
        maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num: [B] integers, added
            to in place, of any integer dtype (the original loses the update of int64 counters).
        deterministic: accepted and ignored; the result is always deterministic.
        generator, seed, offset: one seed for the call, an int or a tensor; `offset` has to grow
            from call to call where the seed stays. Without a seed one is drawn from `generator`.

    Returns:
        tokens [B, K + 1] int32, padded with -1; accepted [B], how many drafts pass their own coin
        wherever they stand; emitted [B], how many drafts are kept. A request whose row has no law
        (NaN, all zero) ends before that row, without a last token.

    Unlike the original it holds B * (K + 1) * V >= 2^32 elements, ids outside the vocabulary and
    rows of zeros; a request's tokens do not depend on where it stands in a batch of the same seeds.
    """
    batch, drafts, vocab = draft_probs.shape
    device = draft_probs.device
    seeds = seeds_of_call(batch, device, seed, generator)
    start = torch.zeros_like(seeds)
    if offset is not None:
        start += one_number(offset, device)
    ids = draft_token_ids.long().contiguous()
    ones = torch.ones(batch, device=device)
    result = verify_chain(
        target_probs.float().log(),  # a log in half precision moves p by percents
        ids,
        rule="token",
        temperature=ones,
        seed=seeds,
        block_start=start,
        draft_logits=draft_probs.float().log(),
    )
    inside = (ids >= 0) & (ids < vocab)
    at = ids.where(inside, torch.zeros_like(ids))[..., None]
    p = target_probs[:, :drafts].gather(-1, at)[..., 0].float()
    q = draft_probs.gather(-1, at)[..., 0].float()
    coins = [noise(seeds, start, i, rng.VERIFY_COIN, 1, kind="uniform") for i in range(drafts)]
    coins = torch.cat(coins, 1) if drafts else p
    passed = ((coins * q <= p) & (p > 0) & inside).sum(-1)
    accepted = _add(maybe_output_accepted_token_num, passed)
    emitted = _add(maybe_output_emitted_draft_token_num, result.num_accepted)
    return result.tokens.int(), accepted, emitted


def _add(counter, values):
    return values.int() if counter is None else counter.add_(values.to(counter.dtype))
