"""CUDA kernels for the serial parts of block speculative decoding: drafting head and verification.

The public functions come in on first use, and Torch with them: `import domino_kernels` and
`build_info()` work without Torch and touch no CUDA state.
"""

from importlib import import_module

from domino_kernels.build import build_info
from domino_kernels.version import __version__

# public name -> module that holds it; a new op adds one entry
_HOME = {
    "Expansion": "domino_kernels.ops.expand",
    "HeadWeights": "domino_kernels.ops.head_weights",
    "ChainPlan": "domino_kernels.ops.chain_plan",
    "DraftResult": "domino_kernels.ops.draft_chain",
    "draft_chain": "domino_kernels.ops.draft_chain",
    "draft_chain_out": "domino_kernels.ops.draft_chain",
    "draft_tree": "domino_kernels.ops.draft_tree",
    "dual_ce": "domino_kernels.ops.train",
    "expand": "domino_kernels.ops.expand",
    "expand_out": "domino_kernels.ops.expand",
    "expand_workspace": "domino_kernels.ops.expand",
    "gru_step": "domino_kernels.ops.head",
    "project_hidden": "domino_kernels.ops.expand",
    "TreeDraft": "domino_kernels.ops.draft_tree",
    "TreePlan": "domino_kernels.ops.draft_tree",
    "join_shortlists": "domino_kernels.ops.shards",
    "join_winners": "domino_kernels.ops.shards",
    "shortlist": "domino_kernels.ops.shortlist",
    "vocab_winners": "domino_kernels.ops.shards",
    "Tree": "domino_kernels.ops.tree",
    "TreeResult": "domino_kernels.ops.verify_tree",
    "TreeStatus": "domino_kernels.ops.verify_tree",
    "build_tree": "domino_kernels.ops.tree",
    "compact_accepted": "domino_kernels.ops.tree",
    "kv_move": "domino_kernels.ops.tree",
    "verify_tree": "domino_kernels.ops.verify_tree",
    "verify_tree_workspace": "domino_kernels.ops.verify_tree",
    "VerifyResult": "domino_kernels.ops.verify",
    "VerifyRule": "domino_kernels.ops.verify_checks",
    "VerifyStatus": "domino_kernels.ops.verify",
    "noise": "domino_kernels.ops.verify",
    "RowStats": "domino_kernels.ops.row_stats",
    "combine_row_stats": "domino_kernels.ops.row_stats",
    "residual_sample": "domino_kernels.ops.residual",
    "row_stats": "domino_kernels.ops.row_stats",
    "ShardResult": "domino_kernels.ops.verify_shard",
    "ShardedVerify": "domino_kernels.ops.verify_shard",
    "join_verify_shards": "domino_kernels.ops.verify_shard",
    "verify_shard": "domino_kernels.ops.verify_shard",
    "verify_shard_rows": "domino_kernels.ops.verify_shard",
    "verify_chain": "domino_kernels.ops.verify",
    "verify_chain_workspace": "domino_kernels.ops.verify",
}

__all__ = ["__version__", "build_info", *_HOME]


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(__all__)
