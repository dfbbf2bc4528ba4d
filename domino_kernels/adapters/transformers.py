"""transformers.generation.utils._speculative_sampling (5.x)."""

import torch

from domino_kernels import verify_chain
from domino_kernels.adapters.noise import seeds_of_call


def speculative_sampling(
    candidate_input_ids,
    candidate_logits,
    candidate_length,
    new_logits,
    is_done_candidate=False,
    assistant_ensemble_weight=None,
):
    """Assisted generation's accept step; replaces the function of that module.

        import transformers.generation.utils as utils
        utils._speculative_sampling = speculative_sampling

    Args:
        candidate_input_ids: [1, T + candidate_length], the last candidate_length are the drafts.
        candidate_logits: [1, candidate_length, V], processed; the law that was sampled from.
        new_logits: [1, candidate_length + 1, V], processed by the target's own processors.
        is_done_candidate: the drafts end the text (up to 5.17 the function is told): where all are
            accepted nothing follows the last one, which counts as the token behind the matches.
        assistant_ensemble_weight: only None or 1: other weights change the output's law.

    Returns:
        (valid_tokens [1, n_matches + 1], n_matches), the latter a tensor of no dimension. The seed
        comes from Torch's global generator, so `torch.manual_seed` makes a run repeatable.

    Raises:
        ValueError: an ensemble weight below 1, or a row without a law (NaN, all -inf).

    A batch, without the host's wait: `verify_chain` itself.
    """
    if assistant_ensemble_weight not in (None, 1, 1.0):
        raise ValueError(
            "speculative_sampling: assistant_ensemble_weight: got "
            f"{assistant_ensemble_weight}, expected None: other weights are not lossless"
        )
    device = new_logits.device
    drafts = candidate_input_ids[:, candidate_input_ids.size(1) - candidate_length :]
    result = verify_chain(
        new_logits[:, : candidate_length + 1],
        drafts,
        rule="token",
        temperature=torch.ones(1, device=device),
        seed=seeds_of_call(1, device),
        block_start=torch.zeros(1, dtype=torch.int64, device=device),
        draft_logits=candidate_logits[:, :candidate_length].to(device),
    )
    if int(result.num_emitted) == int(result.num_accepted):
        raise ValueError(
            f"speculative_sampling: new_logits: got a row {int(result.num_accepted)} that holds "
            "no law, expected finite logits"
        )
    matches = result.num_accepted[0].long()
    if is_done_candidate:
        matches = matches.clamp(max=candidate_length - 1)
    return result.tokens[:, : int(matches) + 1], matches
