"""Drop-ins for the verification functions of other stacks: their signatures, `verify_chain` inside.

    from domino_kernels.adapters.flashinfer import chain_speculative_sampling
    from domino_kernels.adapters.sglang import (
        chain_speculative_sampling,
        tree_speculative_sampling_target_only,
        verify_tree_greedy,
    )
    from domino_kernels.adapters.transformers import speculative_sampling
    from domino_kernels.adapters.vllm import rejection_sample

They keep the shapes, dtypes and side effects of what they replace. The random numbers are ours
(domino_kernels.rng): a call draws from the law that the original draws from, not the same tokens.
Where an original has no right answer (a row of NaN or zeros, a draft outside the vocabulary) the
adapters emit nothing from that row on; what each then writes stands in its docstring.
"""
