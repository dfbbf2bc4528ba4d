"""The tensors of a Domino head, checked once."""

from dataclasses import dataclass, fields

import torch

from domino_kernels.ops import checks
from domino_kernels.torch_library import DTYPES

# field -> name in the public checkpoints
PUBLIC_NAMES = {
    "w_ih": "prefix_gru.weight_ih_l0",
    "w_hh": "prefix_gru.weight_hh_l0",
    "w1": "embed_proj.0.weight",
    "w2": "embed_proj.2.weight",
}


@dataclass(frozen=True, repr=False, eq=False)
class HeadWeights:
    """What the ops of the head need, contiguous, of one dtype, on one device; shared, not copied.

    Args:
        w_ih: [3G, H] input weight of the prefix GRU, gates in the order r, z, n.
        w_hh: [3G, G] state weight of the prefix GRU.
        w1: [R, H + G] first projection; its columns take the hidden row first, then the state.
        w2: [V, R] second projection, one row a vocabulary id.
        embedding: [V, H] the target's token embedding, which the GRU reads.

    Raises:
        TypeError, ValueError: a tensor does not fit the others.
    """

    w_ih: torch.Tensor
    w_hh: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    embedding: torch.Tensor

    def __post_init__(self):
        op = "HeadWeights"
        vocab, inputs = checks.sizes(op, "embedding", self.embedding, "[V, H]")
        units = checks.sizes(op, "w_hh", self.w_hh, "[3G, G]")[1]
        rank = checks.sizes(op, "w2", self.w2, "[V, R]")[1]
        shapes = {
            "w_ih": (3 * units, inputs),
            "w_hh": (3 * units, units),
            "w1": (rank, inputs + units),
            "w2": (vocab, rank),
            "embedding": (vocab, inputs),
        }
        if not 0 < vocab < 2**31 or 0 in (inputs, units, rank):
            raise ValueError(
                f"{op}: got V={vocab}, H={inputs}, G={units}, R={rank}, expected all at least 1 "
                f"and V below 2^31"
            )
        dtype, device = self.w2.dtype, self.w2.device
        checks.dtype(op, "w2", self.w2, DTYPES)
        for name, shape in shapes.items():
            value = getattr(self, name)
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value = value.detach()  # the ops have no gradient; memory stays shared
                object.__setattr__(self, name, value)
            checks.tensor(op, name, value, shape, dtype, device)
            checks.contiguous(op, name, value)

    @classmethod
    def from_state_dict(cls, state_dict, embedding):
        """From a state_dict with the public names; other entries are ignored.

        Args:
            state_dict: holds prefix_gru.weight_ih_l0, prefix_gru.weight_hh_l0,
                embed_proj.0.weight and embed_proj.2.weight.
            embedding: [V, H] the target's token embedding, in the dtype of the head.
        """
        missing = [name for name in PUBLIC_NAMES.values() if name not in state_dict]
        if missing:
            raise ValueError(
                f"HeadWeights: state_dict: got no {', '.join(missing)}, expected all of "
                f"{', '.join(PUBLIC_NAMES.values())}"
            )
        tensors = {field: state_dict[name] for field, name in PUBLIC_NAMES.items()}
        return cls(**tensors, embedding=embedding)

    @property
    def vocab_size(self):
        return self.w2.size(0)

    @property
    def hidden_size(self):
        return self.w_ih.size(1)

    @property
    def gru_size(self):
        return self.w_hh.size(1)

    @property
    def rank(self):
        return self.w2.size(1)

    @property
    def dtype(self):
        return self.w2.dtype

    @property
    def device(self):
        return self.w2.device

    def __repr__(self):
        sizes = {f.name: getattr(self, f.name).nbytes for f in fields(self)}
        shared = sizes.pop("embedding")
        return (
            f"HeadWeights(V={self.vocab_size}, H={self.hidden_size}, G={self.gru_size}, "
            f"R={self.rank}, {str(self.dtype).removeprefix('torch.')}, {self.device}, "
            f"{sum(sizes.values()) / 2**20:.1f} MiB + {shared / 2**20:.1f} MiB embedding of the "
            f"target)"
        )
