"""The verification functions of SGLang: outputs through accept_index over flat rows."""

import torch

from domino_kernels import verify_chain
from domino_kernels.adapters.noise import seeds_of_uniforms


def chain_speculative_sampling(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    uniform_samples,
    uniform_samples_for_final_sampling,
    target_probs,
    draft_probs,
    threshold_single=1.0,
    threshold_acc=1.0,
    deterministic=True,
):
    """chain_speculative_sampling_triton: rejection sampling of a chain, results written in place.

    Args:
        predicts: [B * N] integers; predicts[row] becomes the token emitted after that flat row.
        accept_index: [B, >= N] integers; becomes the flat rows of the kept path, root first. What
            follows it is left as it is.
        accept_token_num: [B] integers; becomes the number of kept drafts.
        candidates: [B, N], the last verified token, then the drafts. -1 ends a chain.
        retrive_index: [B, N], the flat row of each candidate.
        retrive_next_token, retrive_next_sibling: accepted and ignored: a chain.
        uniform_samples: [B, N], uniform_samples_for_final_sampling: [B], float32: their bits seed
            the op's own noise.
        target_probs: [B, N, V], draft_probs: [B, >= N - 1, V]: row i judges candidate i + 1.
        threshold_single, threshold_acc: only 1: other thresholds change the output's law.
        deterministic: accepted and ignored.

    A request whose next row has no law keeps its drafts; predicts is not written for that row.
    """
    for name, value in (("threshold_single", threshold_single), ("threshold_acc", threshold_acc)):
        if value != 1:
            raise ValueError(
                f"chain_speculative_sampling: {name}: got {value}, expected 1: others are not "
                "lossless"
            )
    batch, slots = candidates.shape
    seeds = seeds_of_uniforms(uniform_samples_for_final_sampling, uniform_samples)
    result = verify_chain(
        target_probs.log(),
        candidates[:, 1:].long(),
        rule="token",
        temperature=torch.ones(batch, device=candidates.device),
        seed=seeds,
        block_start=torch.zeros_like(seeds),
        draft_logits=draft_probs[:, : slots - 1].log(),
    )
    slot = torch.arange(slots, device=candidates.device)
    kept = slot <= result.num_accepted[:, None]
    rows = retrive_index.long()
    # a row that emits nothing writes back what it holds
    emitted = slot < result.num_emitted[:, None]
    old = predicts[rows]
    predicts[rows] = result.tokens.to(predicts.dtype).where(emitted, old)
    head = accept_index[:, :slots]
    head.copy_(rows.to(accept_index.dtype).where(kept, head))
    accept_token_num.copy_(result.num_accepted)
