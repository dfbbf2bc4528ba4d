"""ChainPlan: the memory that draft_chain's launches share, and how much a call needs."""

import torch

from domino_kernels.ops import checks
from domino_kernels.ops.draft_chain_triton import triton_workspace_bytes
from domino_kernels.ops.head_weights import HeadWeights

POOLS = ("block", "slot")
BACKENDS = ("cuda", "triton")


class ChainPlan:
    """The memory that draft_chain's launches share, for calls of up to `batch` rows.

    Args:
        weights: HeadWeights of the calls; others may take their place, of the same G and R.
        batch, num_drafts, pool_size, pool: the largest that a call will have; pool_size None: the
            default of a call of this batch.
        backend: "cuda", or "triton": the calls' kernels (on a CPU, the twin or the interpreter).

    One call, or one graph replay, may use a plan at a time; what may run at the same time needs a
    plan each. The memory holds the epochs of the exchanges between thread blocks: nobody else may
    write to it.
    """

    def __init__(
        self, weights, batch, *, num_drafts=15, pool_size=None, pool="block", backend="cuda"
    ):
        op = "ChainPlan"
        check_weights(op, weights)
        checks.integer(op, "batch", batch, 0, 2**31 - 1)
        checks.integer(op, "num_drafts", num_drafts, 1, 2**31 - 1)
        if backend not in BACKENDS:
            names = ", ".join(BACKENDS)
            raise ValueError(f"{op}: backend: got {backend!r}, expected one of {names}")
        pool_size = pool_size_of(op, pool_size, batch, weights.vocab_size)
        pools = num_drafts if slot_pools_of(op, pool) else 1
        self.backend = backend
        # asked for once more where a call's sizes are others
        self.made_for = weights, batch, num_drafts, pool_size, pools
        self.size = chain_workspace_bytes(batch, num_drafts, pool_size, pools, weights, backend)
        self.workspace = torch.empty(self.size, dtype=torch.uint8, device=weights.device)
        kept = _kept_bytes(weights)
        self.workspace[:kept].zero_()
        self.scratch = self.workspace[kept:]  # nothing in here outlives a call

    def __repr__(self):
        return f"ChainPlan({self.workspace.nbytes / 2**20:.1f} MiB, {self.workspace.device})"


def check_weights(op, weights):
    if not isinstance(weights, HeadWeights):
        raise TypeError(f"{op}: weights: got {type(weights).__name__}, expected HeadWeights")


def slot_pools_of(op, pool):
    if pool not in POOLS:
        raise ValueError(f"{op}: pool: got {pool!r}, expected one of {', '.join(POOLS)}")
    return pool == "slot"


def pool_size_of(op, size, batch, vocab):
    if size is None:
        size = 2048 if batch <= 8 else 512
    elif not isinstance(size, int) or size < 1:
        raise ValueError(f"{op}: pool_size: got {size!r}, expected at least 1")
    return min(size, vocab)


def chain_workspace_bytes(batch, drafts, pool_size, pools, weights, backend="cuda"):
    """The larger of the two forms' workspaces (csrc/head/draft_chain.h), for any prefix.

    In Python, so that torch.compile can trace it; tests compare it with the kernels' own.
    """
    if backend == "triton":
        return triton_workspace_bytes(batch, drafts, pool_size, weights)
    if weights.device.type == "cpu":
        return 0
    vocab, units, rank = weights.vocab_size, weights.state_size, weights.rank
    rows, tiles = batch * drafts, _up(vocab, 128) // 128
    block = (
        3 * batch * 4,
        rows * 8,
        batch * pools * pool_size * 4,
        rows * rank * 4,
        rows * rank * 2,
    )
    block += (rows * units * 2, rows * tiles * 4, rows * 16 * 8)
    tile, wide, low = _up(batch, 32), _up(units, 32), _up(rank, 32)
    plain = (rows * 8, rows * rank * 4, tile * wide * 4, tile * wide * 4, tile * low * 4)
    largest = max(sum(_up(part, 256) for part in parts) for parts in (block, plain))
    return _kept_bytes(weights) + largest


def _kept_bytes(weights):
    """What stands first in a workspace and is kept from call to call: control and exchange."""
    if weights.device.type == "cpu":
        return 0
    units, rank = weights.state_size, weights.rank
    return 256 + _up(256 * rank + 4 * (128 * units + 16384) + 6144 * units + 8192, 256)


def _up(n, to):
    return (n + to - 1) // to * to
