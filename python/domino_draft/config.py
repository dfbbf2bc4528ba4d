"""The drafter's configuration: every public `config.json` form in, one public form out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

PROJECTORS = {"domino": "domino", "causal_v5": "domino", "dflash": "dflash"}
LAYER_TYPES = ("full_attention", "sliding_attention")
TAKEN_BACK = 5  # cycles at most that are run and taken back: a new graph is timed by them
DTYPES = ("float32", "float16", "bfloat16")

# Fields of related drafters (DFlash2, DSpark, MiMo, Gemma drafters, variants of the head) that
# change what is computed, each with the value that changes nothing. Reading past one of them would
# give a drafter that runs and is never accepted.
_NEUTRAL = {
    "attention_bias": False, "hidden_act": "silu", "input_embedding_scale": 1.0,
    "output_multiplier": 1.0, "final_logit_softcapping": 0.0, "attention_sink_bias": False,
    "attention_value_scale": 1.0, "conv_kernel_size": 0, "selector_rank": 0, "markov_rank": 0,
    "use_embed_proj": True, "use_hidden_proj": False, "partial_rotary_factor": 1.0,
    "quantization_config": None,
}  # fmt: skip
_RELATED = ("DFlash2", "DSpark", "Eagle", "EAGLE")  # architectures that are none of ours


def _error(field: str, got: Any, expected: str) -> ValueError:
    return ValueError(f"DominoConfig: {field}: got {got!r}, expected {expected}")


def _object(field: str, value: Any) -> Mapping[str, Any]:
    """A JSON object, empty for null."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _error(field, value, "an object")
    return value


def _list(field: str, value: Any, kind: type) -> list:
    """A JSON list of one kind, empty for null."""
    if value is None:
        return []
    if not isinstance(value, list | tuple) or any(type(item) is not kind for item in value):
        raise _error(field, value, f"a list of {kind.__name__}")
    return list(value)


def _number(field: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):
        raise _error(field, value, "a number above 0")
    return float(value)


def _pick(field: str, sources: Sequence[Mapping[str, Any]], default: Any = None) -> Any:
    """The value of `field` in the sources that carry it; values that differ are an error."""
    found = [source[field] for source in sources if source.get(field) is not None]
    if not found:
        return default
    for other in found[1:]:
        if other != found[0]:
            raise _error(field, (found[0], other), "one value in every place it is written")
    return found[0]


def _agree(values: Mapping[str, Any]) -> Any:
    """The value that several fields spell, None where none is set; they must not differ."""
    found = {name: value for name, value in values.items() if value is not None}
    first = next(iter(found), None)
    for name, value in found.items():
        if value != found[first]:
            raise _error(name, value, f"{first} = {found[first]!r}")
    return found.get(first)


def default_target_layer_ids(num_target_layers: int, num_features: int) -> tuple[int, ...]:
    """Evenly spaced target layers: 36 layers and 5 features give 1, 9, 17, 25, 33."""
    if num_features == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_features - 1)
    return tuple(round(1 + i * step) for i in range(num_features))


@dataclass(frozen=True)
class DominoConfig:
    """Shape and conventions of a drafter (arXiv 2605.29707 and its public checkpoints).

    `target_layer_ids` are 0-based decoder layers whose OUTPUT is a feature. `shift_label`: slot i
    of a block predicts the token at anchor + i + 1 (True) or anchor + i (False).
    `mask_token_id` may be None when the file names only a string (`mask_token`); give a
    tokenizer to `resolve_mask_token` then. The target itself is not needed to build a config.
    `draft_vocab_size`: ids that a checkpoint drafts from, where a map of its own picks them out of
    the target's; None: all. It is how W2 is stored, the module has all of the vocabulary.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int | None = None
    target_layer_ids: tuple[int, ...] = ()
    block_size: int = 16
    mask_token_id: int | None = None
    mask_token: str = "<|MASK|>"
    projector_type: str = "domino"
    emb_dim: int = 256
    gru_hidden_dim: int = 1024
    pure_draft_prefix_len: int = 1
    shift_label: bool = True
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position_embeddings: int = 40960
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    dtype: str = "bfloat16"
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for field in fields(self):
            value = getattr(self, field.name)
            optional = value is None and field.type == "int | None"
            if "int" in field.type.split(" | ") and not optional and type(value) is not int:
                raise _error(field.name, value, "an integer")
        if self.projector_type not in PROJECTORS:
            raise _error("projector_type", self.projector_type, f"one of {sorted(PROJECTORS)}")
        put("projector_type", PROJECTORS[self.projector_type])
        put("dtype", str(self.dtype).removeprefix("torch."))
        if self.dtype not in DTYPES:
            raise _error("dtype", self.dtype, f"one of {DTYPES}")
        for name in (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "vocab_size", "num_target_layers", "emb_dim",
            "gru_hidden_dim", "max_position_embeddings", "draft_vocab_size",
        ):  # fmt: skip
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise _error(name, getattr(self, name), "at least 1")
        if self.block_size < 2:
            raise _error("block_size", self.block_size, "at least 2 (the anchor and one mask)")
        if self.pure_draft_prefix_len < 0:
            raise _error("pure_draft_prefix_len", self.pure_draft_prefix_len, "at least 0")
        if self.num_attention_heads % self.num_key_value_heads:
            raise _error(
                "num_attention_heads",
                self.num_attention_heads,
                f"a multiple of num_key_value_heads = {self.num_key_value_heads}",
            )
        if self.head_dim % 2:
            raise _error("head_dim", self.head_dim, "an even number (rotary halves)")
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise _error(
                "mask_token_id", self.mask_token_id, f"an id below vocab_size = {self.vocab_size}"
            )
        layers = self.num_target_layers
        ids = tuple(self.target_layer_ids)
        if not ids:
            if layers is None:
                raise _error("num_target_layers", None, "a value (or target_layer_ids)")
            ids = default_target_layer_ids(layers, self.num_hidden_layers)
        inside = all(type(i) is int and i >= 0 and (layers is None or i < layers) for i in ids)
        if not inside or len(set(ids)) != len(ids):
            raise _error(
                "target_layer_ids",
                list(ids),
                f"distinct 0-based layers below num_target_layers = {layers}",
            )
        put("target_layer_ids", ids)
        types = tuple(self.layer_types) or ("full_attention",) * self.num_hidden_layers
        if len(types) != self.num_hidden_layers or not set(types) <= set(LAYER_TYPES):
            raise _error(
                "layer_types", list(types), f"{self.num_hidden_layers} entries out of {LAYER_TYPES}"
            )
        put("layer_types", types)
        if "sliding_attention" in types and not (self.sliding_window or 0) >= 1:
            raise _error(
                "sliding_window", self.sliding_window, "a window of at least 1 (layer_types slide)"
            )

    @property
    def max_drafts(self) -> int:
        """Ids that one block can propose: one a slot with shift_label, one a mask without."""
        return self.block_size if self.shift_label else self.block_size - 1

    @property
    def num_features(self) -> int:
        return len(self.target_layer_ids)

    def pairing_errors(self, vocab_size: int, hidden_size: int, num_layers: int) -> list[str]:
        """Why a target of this shape cannot be drafted for, one sentence a field; [] if it can."""
        advice = {
            "vocab_size": "load the target that this drafter was trained for, with its embedding "
            "table as published (resized or padded rows count)",
            "hidden_size": "load the target that this drafter was trained for, or train a drafter "
            "for this one",
            "num_target_layers": "load the target that this drafter was trained for (another depth "
            "is another model)",
        }
        errors = [
            f"{field}: got {got} in the target, expected {expected} as in the drafter; "
            f"{advice[field]}"
            for field, got, expected in (
                ("vocab_size", vocab_size, self.vocab_size),
                ("hidden_size", hidden_size, self.hidden_size),
                ("num_target_layers", num_layers, self.num_target_layers or num_layers),
            )
            if got != expected
        ]
        if max(self.target_layer_ids) >= num_layers:
            errors.append(
                f"target_layer_ids: got {list(self.target_layer_ids)}, expected layers of the "
                f"target, which has {num_layers}; load the target that this drafter was trained for"
            )
        return errors

    def context_lengths(self, max_length: int) -> list[int]:
        """Positions of a row that each layer's cache holds for texts of up to max_length tokens.

        A full layer holds all of them and a block. A sliding one holds its window and, behind it,
        the tokens of TAKEN_BACK cycles: as many as may be written and then be taken back, without
        a place of the window being lost to them.
        """
        whole = max_length + self.block_size
        ring = min(whole, (self.sliding_window or 0) + TAKEN_BACK * (self.block_size + 1))
        return [ring if kind == "sliding_attention" else whole for kind in self.layer_types]

    def slots_for(self, num_drafts: int) -> int:
        """Block slots, anchor included, that are run to propose `num_drafts` ids.

        With shift_label the last slot of a full block is run though its own id is not asked for:
        block_size - 1 drafts use the block as it was trained.
        """
        if not 1 <= num_drafts <= self.max_drafts:
            raise ValueError(
                f"num_drafts: got {num_drafts}, expected 1..{self.max_drafts} "
                f"(block_size {self.block_size}, shift_label {self.shift_label})"
            )
        return min(num_drafts + 1, self.block_size)

    def resolve_mask_token(self, tokenizer) -> DominoConfig:
        """This config with `mask_token_id` looked up in a tokenizer if only its string is known."""
        if self.mask_token_id is not None:
            return self
        token_id = tokenizer.get_vocab().get(self.mask_token) if tokenizer is not None else None
        if token_id is None:
            raise _error(
                "mask_token",
                self.mask_token,
                "a token of the target's tokenizer, or mask_token_id in dflash_config",
            )
        return replace(self, mask_token_id=token_id)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DominoConfig:
        """Read a parsed `config.json`: z-lab, author, SpecForge, or speculators form.

        Where a Domino file does not say how slots and labels align, its own framework's default
        holds: SpecForge shift_label false and pure_draft_prefix_len 0, speculators true and 1.
        """
        data = _object("config", data)
        inner = _object("dflash_config", data.get("dflash_config"))
        head = _object("domino_config", data.get("domino_config"))
        # speculators nests the decoder's shape
        body = _object("transformer_layer_config", data.get("transformer_layer_config"))
        kind = data.get("speculators_model_type")
        shape = [source for source in (data, body) if source]
        draft = [_present_projector(source) for source in (inner, head, data) if source]

        def required(name: str) -> Any:
            value = _pick(name, shape)
            if value is None:
                raise _error(name, None, "a value (the field is missing)")
            return value

        architectures = _list("architectures", data.get("architectures"), str)
        for name in architectures:
            if any(related in name for related in _RELATED):
                raise _error("architectures", architectures, "a DFlash or Domino drafter")
        if kind not in (None, "dflash", "domino"):
            raise _error("speculators_model_type", kind, "'dflash' or 'domino'")
        rope = _pick("rope_parameters", shape) or _pick("rope_scaling", shape)
        rope = _object("rope_parameters", rope)
        if any(isinstance(value, Mapping) for value in rope.values()):
            raise _error("rope_parameters", dict(rope), "one set of values for all layers")
        for name, neutral in _NEUTRAL.items():
            value = _pick(name, [*draft, body, rope])
            if value is not None and value != neutral:
                raise _error(name, value, f"{neutral!r} (another value is another network)")

        projector = _pick("projector_type", draft)
        domino = kind == "domino" or any("Domino" in name for name in architectures)
        if projector is None:
            projector = "domino" if domino or _pick("emb_dim", draft) else "dflash"
        elif not isinstance(projector, str):
            raise _error("projector_type", projector, f"one of {sorted(PROJECTORS)}")
        elif projector == "dflash" and domino:
            raise _error("projector_type", projector, f"'domino' (architectures {architectures})")

        names = ("shift_label", "sample_from_anchor", "query_zero_predicts_next")
        shift = _agree({name: _pick(name, draft) for name in names})
        if shift is None:
            shift = kind is not None and projector == "domino"
        if not isinstance(shift, bool):
            raise _error("shift_label", shift, "true or false")

        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        values: dict[str, Any] = {name: required(name) for name in (*names, "vocab_size")}
        heads = values["num_attention_heads"]
        values["num_key_value_heads"] = _pick("num_key_value_heads", shape, heads)
        width = values["hidden_size"]
        usual = width // heads if type(width) is type(heads) is int and heads > 0 else 0
        values["head_dim"] = _pick("head_dim", shape, usual)
        draft_vocab, vocab = _pick("draft_vocab_size", draft), values["vocab_size"]
        if draft_vocab == vocab:
            draft_vocab = None
        elif draft_vocab is not None and (
            kind is None or type(draft_vocab) is not type(vocab) or draft_vocab > vocab
        ):
            expected = f"vocab_size = {vocab} (maps are read in the form of speculators)"
            raise _error("draft_vocab_size", draft_vocab, expected)

        wide = _pick("target_hidden_size", draft)
        if wide not in (None, values["hidden_size"]):
            raise _error("target_hidden_size", wide, f"hidden_size = {values['hidden_size']}")

        def below(name: str) -> list[int] | None:
            ids = _pick(name, draft)
            return None if ids is None else [i - 1 for i in _list(name, ids, int)]

        # The aux ids count the embedding's output as 0, so the output of layer id is id + 1.
        aux = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
        layer_ids = _agree(
            {"target_layer_ids": _pick("target_layer_ids", draft)} | {n: below(n) for n in aux}
        )

        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default":
            raise _error("rope_parameters.rope_type", rope_type, "'default'")
        theta = _pick("rope_theta", [*shape, rope], 1e6)
        types = _layer_types(shape, values["num_hidden_layers"])
        # Inside a block sliding layers are causal and full ones are not; a file may say otherwise.
        for name, layer_type, value in (
            ("is_causal", "full_attention", False),
            ("is_causal", "sliding_attention", True),
            ("sliding_window_non_causal", "sliding_attention", False),
        ):
            got = _pick(name, [*draft, body])
            if layer_type in types and got not in (None, value):
                raise _error(name, got, f"{value} with {layer_type} layers")
        dtypes = {
            f"{name} of {place}": str(source[name]).removeprefix("torch.")
            for place, source in (("config", data), ("transformer_layer_config", body))
            for name in ("dtype", "torch_dtype")
            if source.get(name) is not None
        }
        return cls(
            **values,
            num_target_layers=_pick("num_target_layers", draft),
            target_layer_ids=tuple(_list("target_layer_ids", layer_ids, int)),
            block_size=_block_size(data, draft, shift),
            mask_token_id=_pick("mask_token_id", draft),
            mask_token=_pick("mask_token", draft, "<|MASK|>"),
            projector_type=projector,
            emb_dim=_agree({n: _pick(n, draft) for n in ("emb_dim", "logits_correction_emb_dim")})
            or 256,
            gru_hidden_dim=_pick("gru_hidden_dim", draft, 1024),
            pure_draft_prefix_len=_pick("pure_draft_prefix_len", draft, 0 if kind is None else 1),
            shift_label=shift,
            rms_norm_eps=_number("rms_norm_eps", _pick("rms_norm_eps", shape, 1e-6)),
            rope_theta=_number("rope_theta", theta),
            max_position_embeddings=_pick("max_position_embeddings", shape, 40960),
            layer_types=types,
            sliding_window=_pick("sliding_window", shape),
            dtype=_agree(dtypes) or "bfloat16",
            draft_vocab_size=draft_vocab,
        )

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike) -> DominoConfig:
        """Read `config.json` in a local folder (or beside a .safetensors file)."""
        from .checkpoint import Checkpoint

        return cls.from_dict(Checkpoint(folder).config)

    def to_dict(self) -> dict[str, Any]:
        """The public `config.json` form (as the Qwen3-4B/8B Domino checkpoints write it)."""
        values = asdict(self)
        del values["draft_vocab_size"]  # written with all of the vocabulary
        inner = {
            "target_layer_ids": list(values.pop("target_layer_ids")),
            "mask_token_id": values.pop("mask_token_id"),
            "projector_type": values.pop("projector_type"),
            "shift_label": values.pop("shift_label"),
        }
        mask_token = values.pop("mask_token")
        if inner["mask_token_id"] is None:
            inner["mask_token"] = mask_token
        head = {n: values.pop(n) for n in ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len")}
        if self.projector_type == "domino":
            inner |= head
        values["layer_types"] = list(values["layer_types"])
        return {
            "architectures": [
                "DominoDraftModel" if self.projector_type == "domino" else "DFlashDraftModel"
            ],
            "model_type": "qwen3",
            "attention_bias": False,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            # Without it Qwen3Config drops the window.
            "use_sliding_window": "sliding_attention" in self.layer_types,
            **values,
            "dflash_config": inner,
        }


def _present_projector(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """`projector_type` by its present name, so that an old and a new one do not conflict."""
    name = source.get("projector_type")
    return {**source, "projector_type": PROJECTORS[name]} if name in tuple(PROJECTORS) else source


def _layer_types(shape: Sequence[Mapping[str, Any]], layers: int) -> tuple[str, ...]:
    """`layer_types`, or what the older switches of Qwen3Config say in its place."""
    types, slides = _pick("layer_types", shape), _pick("use_sliding_window", shape)
    if types is None:
        if type(layers) is not int:
            return ()  # named with the other fields
        first = _pick("max_window_layers", shape, 28) if slides else layers
        return tuple(LAYER_TYPES[i >= first] for i in range(layers))
    types = _list("layer_types", types, str)
    if "sliding_attention" in types and slides is False:
        raise _error("use_sliding_window", slides, "true (layer_types names sliding layers)")
    return tuple(types)


def _block_size(data: Mapping[str, Any], draft: Sequence[Mapping[str, Any]], shift: bool) -> int:
    """`block_size`, or what `speculative_tokens` of the speculators form says about it."""
    block = _pick("block_size", draft)
    outer = _object("speculators_config", data.get("speculators_config"))
    methods = _list("proposal_methods", outer.get("proposal_methods"), dict)
    tokens = _pick("speculative_tokens", [*draft, *methods[:1]])
    if tokens is None:
        return 16 if block is None else block
    if type(tokens) is not int:
        raise _error("speculative_tokens", tokens, "an integer")
    implied = tokens if shift else tokens + 1
    if type(block) is int and implied > block:
        raise _error("speculative_tokens", tokens, f"at most {block if shift else block - 1}")
    return implied if block is None else block
