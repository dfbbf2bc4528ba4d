"""The tensors of a Domino head, checked once."""

from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from domino_kernels.ops import checks
from domino_kernels.torch_library import DTYPES

# field -> name in the public checkpoints, by kind of head
PUBLIC_NAMES = {
    "w_ih": "prefix_gru.weight_ih_l0",
    "w_hh": "prefix_gru.weight_hh_l0",
    "w1": "embed_proj.0.weight",
    "w2": "embed_proj.2.weight",
}
TOKEN_GRU_NAMES = PUBLIC_NAMES | {"w1": "rank_proj.weight", "w2": "low_rank_lm_head.weight"}
MARKOV_NAMES = {"embedding": "markov_head.markov_w1.weight", "w2": "markov_head.markov_w2.weight"}
GATED_MARKOV_NAMES = MARKOV_NAMES | {"w1": "markov_head.gate_proj.weight"}

_ROWS = 16384  # of a weight at a time: what with_table() and with_screen() need besides the result
_UNITS = 16  # units whose three gates stand together in the table: those of a block of the kernel

# csrc/head/chain_screen.h: ids of a tile, its bytes behind the int8 rows, and the magnitudes
# between which rows are quantised
_SCREEN_IDS, _SCREEN_BYTES = 128, 16
_SCREEN_SMALLEST, _SCREEN_LARGEST = 1e-12, 1e17
# of W2 in 4 bits: ids of a tile, and to which parts of a tile's largest magnitude they may reach
_NIBBLE_IDS, _NIBBLE_CLIPS = 16, (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)

LOW_RANK = {"silu": 0, "linear": 1, "gate": 2, "row": 3}  # LowRank of csrc/head/low_rank.h


@dataclass(frozen=True, repr=False, eq=False)
class HeadWeights:
    """What the ops of the head need, contiguous, of one dtype, on one device; shared, not copied.

    A head adds `W2 u` to the logits, and u comes from the hidden row and the tokens before. With
    S the GRU state and E[y] the row of the last token:

        low_rank   u                        head
        "silu"     SiLU(W1 [H ; S])         Domino
                   SiLU(W1 S)               token-only GRU head (DeLS-Spec), W1 without H's columns
        "linear"   W1 [H ; S]               the same with its rank_activation "identity"
        "gate"     sigmoid(W1 [H ; E]) * E  DSpark's gated Markov head
        "row"      E                        DSpark's Markov head

    `with_table()` adds the GRU's input product of every id, E W_ih^T: draft_chain then reads a row
    of it a step instead of W_ih. It takes V * 3G elements: 890 MiB for Qwen3-8B, 72 for SmolLM2.

    `with_screen()` adds W2 in int8 and, for one batch row, in 4 bits, with bounds on what that
    loses. An exact draft_chain on sm_90 then reads W2 itself only where an id may win; the ids are
    the same. It takes 1.5 * V * R bytes and 144 for every 128 ids: 55.8 MiB for Qwen3-8B, 7.6 for
    SmolLM2.

    Both are of the weights as they are at that time: who writes to `embedding` or `w_ih`, or to
    `w2`, in place, or puts others in their place (`replace`), has to make them again; for a
    captured graph, `copy_` the new one into the old.

    A scale of the correction (DeLS-Spec mixes the local logits with a weight) belongs into w2.

    Args:
        w_ih: [3G, I] input weight of the prefix GRU, gates in the order r, z, n; None: no GRU.
        w_hh: [3G, G] state weight of the prefix GRU; None: no GRU.
        w1: [R, H + G] first projection; its columns take the hidden row first, then the state.
            H = I, or 0 where the head does not see hidden rows; any H for "gate", where G stands
            for R; None for "row".
        w2: [V, R] second projection, one row a vocabulary id.
        embedding: [V, I] the target's token embedding, which the GRU reads; without a GRU [V, R],
            the head's own table of tokens.
        low_rank: "silu", "linear", "gate" or "row".
        table: [V, G / 16, 3, 16] or None: from `with_table()`.
        screen: [V * R + 16 * ceil(V / 128) + V * ceil(R / 64) * 32 + 16 * ceil(V / 16)] int8 or
            None: from `with_screen()`.

    Raises:
        TypeError, ValueError: a tensor does not fit the others.

    Source: Domino (arXiv 2605.29707), section 3; DSpark (arXiv 2607.05147), equations 4 and 5, and
    its public gated variant; DeLS-Spec (arXiv 2607.07409).
    """

    w_ih: torch.Tensor | None
    w_hh: torch.Tensor | None
    w1: torch.Tensor | None
    w2: torch.Tensor
    embedding: torch.Tensor
    low_rank: str = "silu"
    table: torch.Tensor | None = None
    screen: torch.Tensor | None = None

    def __post_init__(self):
        op = "HeadWeights"
        if self.low_rank not in LOW_RANK:
            raise ValueError(
                f"{op}: low_rank: got {self.low_rank!r}, expected one of {', '.join(LOW_RANK)}"
            )
        vocab, inputs = checks.sizes(op, "embedding", self.embedding, "[V, I]")
        rank = checks.sizes(op, "w2", self.w2, "[V, R]")[1]
        shapes = {"w2": (vocab, rank)}
        if self.low_rank in ("silu", "linear"):
            units = checks.sizes(op, "w_hh", self.w_hh, "[3G, G]")[1]
            shapes |= {"w_ih": (3 * units, inputs), "w_hh": (3 * units, units)}
        else:
            units = inputs = rank
        shapes["embedding"] = (vocab, inputs)
        if self.low_rank != "row":
            width = checks.sizes(op, "w1", self.w1, "[R, H + G]")[1]
            if self.low_rank != "gate" and width != units:
                width = inputs + units
            shapes["w1"] = (rank, max(width, units))
        if self.table is not None and self.low_rank in ("silu", "linear"):
            shapes["table"] = (vocab, _table_groups(op, units), 3, _UNITS)
        for name in ("w_ih", "w_hh", "w1", "table"):
            if name not in shapes and getattr(self, name) is not None:
                raise ValueError(
                    f"{op}: {name}: got a tensor, expected None with low_rank={self.low_rank!r}"
                )
        if not 0 < vocab < 2**31 or 0 in (inputs, units, rank):
            raise ValueError(
                f"{op}: got V={vocab}, I={inputs}, G={units}, R={rank}, expected all at least 1 "
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
        if self.screen is not None:
            size = (sum(_screen_sizes(op, self)),)
            checks.tensor(op, "screen", self.screen, size, torch.int8, device)

    @classmethod
    def from_state_dict(cls, state_dict, embedding=None, *, rank_activation="silu"):
        """From a state_dict with public names, which also say the kind; other entries are ignored.

        Args:
            state_dict: holds one of
                prefix_gru.weight_ih_l0, prefix_gru.weight_hh_l0 and, of Domino, embed_proj.0.weight
                and embed_proj.2.weight, of a token-only GRU head, rank_proj.weight and
                low_rank_lm_head.weight;
                markov_head.markov_w1.weight and markov_head.markov_w2.weight, with
                markov_head.gate_proj.weight (gated Markov) or without (Markov).
            embedding: [V, I] the target's token embedding, in the dtype of the head; for a head
                with a GRU.
            rank_activation: of a token-only GRU head: "silu" or "identity".
        """
        low_rank = "silu"
        if MARKOV_NAMES["w2"] in state_dict:
            gated = GATED_MARKOV_NAMES["w1"] in state_dict
            names, low_rank = (GATED_MARKOV_NAMES, "gate") if gated else (MARKOV_NAMES, "row")
        elif TOKEN_GRU_NAMES["w2"] in state_dict:
            if rank_activation not in ("silu", "identity"):
                raise ValueError(
                    f"HeadWeights: rank_activation: got {rank_activation!r}, expected 'silu' or "
                    f"'identity'"
                )
            names, low_rank = TOKEN_GRU_NAMES, {"identity": "linear"}.get(rank_activation, "silu")
        else:
            names = PUBLIC_NAMES
        missing = [name for name in names.values() if name not in state_dict]
        if missing:
            raise ValueError(
                f"HeadWeights: state_dict: got no {', '.join(missing)}, expected all of "
                f"{', '.join(names.values())}"
            )
        fields = dict.fromkeys(("w_ih", "w_hh", "w1"))
        fields |= {field: state_dict[name] for field, name in names.items()}
        fields.setdefault("embedding", embedding)
        return cls(**fields, low_rank=low_rank)

    def with_table(self):
        """These weights with the input table, one rounding of fp32 sums. Computed here, once."""
        if not self.recurrent:
            raise ValueError(f"HeadWeights: with_table: got low_rank={self.low_rank!r}: no GRU")
        shape = self.vocab_size, _table_groups("HeadWeights", self.gru_size), 3, _UNITS
        table = torch.empty(shape, dtype=self.dtype, device=self.device)
        for rows, out in zip(self.embedding.split(_ROWS), table.split(_ROWS)):
            product = rows @ self.w_ih.T
            out.copy_(product.view(len(rows), 3, -1, _UNITS).transpose(1, 2))
        return replace(self, table=table)

    def with_screen(self):
        """These weights with W2 in int8 and in 4 bits, and what bounds the difference.

        Behind the rows of either stand, for each 128 ids (16 of those in 4 bits), four float32:
        1 / scale; the largest |w - scale q| + 2^-12 |w| and the largest |scale q| of a row
        (2-norms, rounded up; the 2^-12 is for what tensor cores round in W2 u); 0. Both are
        infinite where a weight is not below 1e17. In 4 bits q is 16 n + 8, n from -8 to 7; of 64
        values byte i has n + 8 of the i-th and, in its upper half, n of the one 32 behind.
        """
        sizes = _screen_sizes("HeadWeights", self)
        screen = torch.zeros(sum(sizes), dtype=torch.int8, device=self.device)
        rows, tiles, nibbles, nibble_tiles = screen.split(sizes)
        rows, nibbles = rows.view_as(self.w2), nibbles.view(self.vocab_size, -1)
        tiles, nibble_tiles = (t.view(torch.float32).view(-1, 4) for t in (tiles, nibble_tiles))
        in_int8 = lambda w: w.round().clamp_(-127, 127)  # noqa: E731
        in_4_bits = lambda w: (w / 16).floor().clamp_(-8, 7) * 16 + 8  # noqa: E731
        for first in range(0, self.vocab_size, _ROWS):
            some = slice(first, first + _ROWS)
            of_tiles = slice(first // _SCREEN_IDS, (first + _ROWS) // _SCREEN_IDS)
            rows[some], tiles[of_tiles, :3] = _quantise(
                self.w2[some], _SCREEN_IDS, 127, (1.0,), in_int8
            )
            of_tiles = slice(first // _NIBBLE_IDS, (first + _ROWS) // _NIBBLE_IDS)
            q, nibble_tiles[of_tiles, :3] = _quantise(
                self.w2[some], _NIBBLE_IDS, 128, _NIBBLE_CLIPS, in_4_bits
            )
            n = functional.pad((q.int() - 8) // 16, (0, -self.rank % 64)).to(torch.int8)
            low, high = n.view(len(n), -1, 2, 32).unbind(2)
            nibbles[some] = (low + 8 | high << 4).flatten(1)
        return replace(self, screen=screen)

    @property
    def vocab_size(self):
        return self.w2.size(0)

    @property
    def recurrent(self):
        """Whether the head has a GRU."""
        return self.w_hh is not None

    @property
    def input_size(self):
        """Width of the embedding's rows."""
        return self.embedding.size(1)

    @property
    def hidden_size(self):
        """Width of the hidden rows that the head sees; 0 where it sees none."""
        return 0 if self.w1 is None else self.w1.size(1) - self.state_size

    @property
    def gru_size(self):
        """Units of the GRU; 0 without one."""
        return self.w_hh.size(1) if self.recurrent else 0

    @property
    def state_size(self):
        """Width of what stands for the tokens before: the GRU state, or the last token's row."""
        return self.gru_size or self.rank

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
        mib = lambda *some: sum(t.nbytes for t in some if t is not None) / 2**20  # noqa: E731
        own = mib(self.w_ih, self.w_hh, self.w1, self.w2)
        table = "" if self.table is None else f" + {mib(self.table):.1f} MiB input table"
        screen = (
            "" if self.screen is None else f" + {mib(self.screen):.1f} MiB W2 in int8 and 4 bits"
        )
        shared = mib(self.embedding) if self.recurrent else 0.0
        return (
            f"HeadWeights({self.low_rank}, V={self.vocab_size}, H={self.hidden_size}, "
            f"G={self.gru_size}, R={self.rank}, {str(self.dtype).removeprefix('torch.')}, "
            f"{self.device}, {own + mib(self.embedding) - shared:.1f} MiB{table}{screen} + "
            f"{shared:.1f} MiB embedding of the target)"
        )


def _table_groups(op, units):
    if units % _UNITS:
        raise ValueError(f"{op}: table: got G={units}, expected a multiple of {_UNITS}")
    return units // _UNITS


def _screen_sizes(op, weights):
    """Bytes of the rows in int8 and of their tiles, then of those in 4 bits and of theirs."""
    vocab, rank = weights.w2.shape
    if rank % 16 or rank > 256 or weights.dtype == torch.float32:
        raise ValueError(
            f"{op}: screen: got R={rank}, {weights.dtype}, expected a multiple of 16 up to 256 and "
            f"torch.float16 or torch.bfloat16"
        )
    tiles, nibble_tiles = (-(-vocab // ids) * _SCREEN_BYTES for ids in (_SCREEN_IDS, _NIBBLE_IDS))
    return vocab * rank, tiles, vocab * -(-rank // 64) * 32, nibble_tiles


def _quantise(rows, ids, most, clips, to_int):
    """q [rows, R], float64, and [tiles, 3]: 1 / scale, residue and norm of each tile of `ids`.

    The largest magnitude of a tile, or the part of it in `clips` that leaves the least residue, is
    `most` of q; to_int takes values in units of q.
    """
    w = rows.new_zeros(-(-len(rows) // ids), ids, rows.size(1), dtype=torch.float64)
    w.view(-1, rows.size(1))[: len(rows)] = rows
    real = (torch.arange(w.size(0) * ids, device=rows.device) < len(rows)).view(-1, ids, 1)
    largest = w.abs().amax((1, 2), keepdim=True)  # NaN where a weight is
    fits = largest <= _SCREEN_LARGEST
    best = w.new_full((len(w), 3), torch.inf)
    result = torch.zeros_like(w)
    for clip in clips:
        inverse = most / (clip * largest.clamp_min(_SCREEN_SMALLEST))
        inverse = torch.where(fits, inverse, 1.0).float().double()
        q = torch.where(fits, to_int(w * inverse), to_int(torch.zeros_like(w)))
        scaled = torch.where(real, q / inverse, 0.0)
        residue = (w - scaled).norm(dim=2) + w.norm(dim=2) * 2**-12
        bounds = torch.stack((residue.amax(1), scaled.norm(dim=2).amax(1)), 1) * (1 + 2**-20)
        bounds = torch.where(fits[:, 0], bounds, torch.inf)
        better = (bounds[:, 0] < best[:, 1]) | ~fits[:, 0, 0]
        best = torch.where(better[:, None], torch.cat((inverse[:, 0], bounds), 1), best)
        result = torch.where(better[:, None, None], q, result)
    return result.view(-1, rows.size(1))[: len(rows)], best.float()
