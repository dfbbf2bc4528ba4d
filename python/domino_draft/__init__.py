"""domino_draft: train a Domino drafter and decode with it, for any `transformers` causal LM.

Importing this package loads neither Torch nor `transformers`; every name below is resolved on
first use.
"""

from importlib import import_module

# No name here may be a submodule's: importing that module would put it in the name's place.
_EXPORTS = {
    "DominoConfig": "config",
    "DFlashBackbone": "backbone",
    "block_mask": "backbone",
    "Checkpoint": "checkpoint",
    "DominoHead": "head",
    "DominoDrafter": "drafter",
    "RowCache": "cache",
    "Target": "target",
    "Batch": "drafter",
    "Drafter": "drafter",
    "DraftSession": "drafter",
    "Engine": "engine",
    "Chunk": "engine",
    "GenerateResult": "decode",
    "Stats": "decode",
    "generate": "decode",
    "TreeOptions": "tree",
    "stream": "decode",
    "Memory": "memory",
    "estimate_memory": "memory",
    "NgramDrafter": "ngram",
    "GreedyReport": "losslessness",
    "greedy_report": "losslessness",
}


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(set(globals()) | set(_EXPORTS))
