"""Every public configuration form, and the errors that name a field."""

import copy
import json
import pkgutil
import subprocess
import sys
from dataclasses import replace

import pytest
from domino_draft import DominoConfig
from domino_draft.config import LAYER_TYPES

QWEN3_8B = {
    "architectures": ["DominoDraftModel"],
    "auto_map": {"AutoModel": "domino.DominoDraftModel"},
    "model_type": "qwen3",
    "block_size": 16,
    "num_target_layers": 36,
    "num_hidden_layers": 5,
    "layer_types": ["full_attention"] * 5,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "sliding_window": None,
    "emb_dim": 256,
    "dflash_config": {
        "target_layer_ids": [1, 9, 17, 25, 33],
        "mask_token_id": 151669,
        "projector_type": "domino",
        "emb_dim": 256,
        "gru_hidden_dim": 1024,
        "pure_draft_prefix_len": 1,
        "shift_label": True,
    },
}


def edited(top=None, inner=None, drop=(), drop_inner=()):
    data = copy.deepcopy(QWEN3_8B) | (top or {})
    data["dflash_config"] = data["dflash_config"] | (inner or {}) if data["dflash_config"] else None
    for name in drop:
        del data[name]
    for name in drop_inner:
        del data["dflash_config"][name]
    return data


BASE = DominoConfig.from_dict(QWEN3_8B)


def test_public_domino_form():
    assert (BASE.projector_type, BASE.shift_label, BASE.max_drafts) == ("domino", True, 16)
    assert BASE.target_layer_ids == (1, 9, 17, 25, 33)
    assert (BASE.emb_dim, BASE.gru_hidden_dim, BASE.mask_token_id) == (256, 1024, 151669)
    assert BASE.head_dim == 128 and BASE.rope_theta == 1e6 and BASE.dtype == "bfloat16"


INNER_PLACES = ["block_size", "num_target_layers"]
OUTER_PLACES = ["target_layer_ids", "mask_token_id", "projector_type", "gru_hidden_dim"]


@pytest.mark.parametrize("name", INNER_PLACES)
def test_top_level_field_may_live_in_dflash_config(name):
    data = edited(inner={name: QWEN3_8B[name]}, drop=[name])
    assert DominoConfig.from_dict(data) == BASE


@pytest.mark.parametrize("name", [*OUTER_PLACES, "emb_dim", "shift_label"])
def test_dflash_field_may_live_at_top_level(name):
    data = edited(top={name: QWEN3_8B["dflash_config"][name]}, drop_inner=[name])
    assert DominoConfig.from_dict(data) == BASE


@pytest.mark.parametrize(
    "data",
    [
        edited(drop=["emb_dim"]),
        edited(inner={"projector_type": "causal_v5"}),
        edited(
            drop=["rope_theta"],
            top={"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        ),
        edited(top={"projector_type": "causal_v5"}),  # an old name beside the new one
        edited(drop_inner=["target_layer_ids"]),  # the default formula gives 1, 9, 17, 25, 33
        edited(drop=["layer_types", "dtype"], top={"torch_dtype": "bfloat16"}),
        {k: v for k, v in QWEN3_8B.items() if k != "dflash_config"}
        | QWEN3_8B["dflash_config"]
        | {"dflash_config": None},
    ],
    ids=[
        "emb_dim-inner",
        "causal_v5",
        "rope_parameters",
        "both-names",
        "default-ids",
        "torch_dtype",
        "null",
    ],
)
def test_equivalent_forms(data):
    assert DominoConfig.from_dict(data) == BASE


def test_speculators_form():
    shape = {k: QWEN3_8B[k] for k in QWEN3_8B if k.endswith(("size", "heads", "dim", "layers"))}
    for name in ("block_size", "emb_dim", "num_target_layers"):
        shape.pop(name, None)
    data = {
        "speculators_model_type": "dflash",
        "transformer_layer_config": shape | {"rms_norm_eps": 1e-6, "rope_theta": 1e6},
        "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
        "mask_token_id": 151669,
        "sample_from_anchor": True,
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 8}]},
        "draft_vocab_size": 151936,
    }
    config = DominoConfig.from_dict(data)
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    assert (config.projector_type, config.shift_label, config.block_size) == ("dflash", True, 8)
    assert config.hidden_size == 4096 and config.num_target_layers is None
    data["sample_from_anchor"] = False
    config = DominoConfig.from_dict(data)
    assert (config.shift_label, config.block_size, config.max_drafts) == (False, 9, 8)
    data["block_size"] = 8
    with pytest.raises(ValueError, match=r"speculative_tokens: got 8, expected at most 7"):
        DominoConfig.from_dict(data)


def test_speculators_domino_form():
    """As its converter writes a Domino checkpoint, and as its first Domino branch did."""
    shape = {k: QWEN3_8B[k] for k in QWEN3_8B if k.endswith(("size", "heads", "layers"))}
    shape = {k: v for k, v in shape.items() if k not in ("block_size", "num_target_layers")}
    data = {
        "speculators_model_type": "domino",
        "architectures": ["DominoSpeculator"],
        "transformer_layer_config": shape | {"head_dim": 128, "rope_theta": 1e6},
        "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
        "mask_token_id": 151669,
        "block_size": 16,
        "sample_from_anchor": True,
        "logits_correction_emb_dim": 256,
        "gru_hidden_dim": 1024,
        "pure_draft_prefix_len": 1,
        "draft_vocab_size": 151936,
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 16}]},
    }
    read = replace(DominoConfig.from_dict(data), num_target_layers=36)
    assert read == BASE
    for name in ("sample_from_anchor", "logits_correction_emb_dim", "pure_draft_prefix_len"):
        del data[name]
    branch = {"speculators_model_type": "dflash", "projector_type": "domino", "emb_dim": 256}
    data["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 15
    assert replace(DominoConfig.from_dict(data | branch), num_target_layers=36) == BASE


def test_head_fields_may_live_in_domino_config():
    inner = dict(QWEN3_8B["dflash_config"])
    names = ("pure_draft_prefix_len", "emb_dim", "gru_hidden_dim", "shift_label")
    head = {name: inner.pop(name) for name in names}
    assert (
        DominoConfig.from_dict(QWEN3_8B | {"dflash_config": inner, "domino_config": head}) == BASE
    )


def test_absent_alignment_is_the_default_of_specforge():
    """Not the public checkpoints' values: those files write theirs down."""
    config = DominoConfig.from_dict(edited(drop_inner=["shift_label", "pure_draft_prefix_len"]))
    assert (config.shift_label, config.pure_draft_prefix_len) == (False, 0)


def test_sliding_forms():
    window = {"sliding_window": 2048, "use_sliding_window": True}
    types = ["sliding_attention"] * 5
    config = DominoConfig.from_dict(edited(top=window | {"layer_types": types}))
    assert config.layer_types == tuple(types) and config.sliding_window == 2048
    assert DominoConfig.from_dict(config.to_dict()) == config
    assert config.to_dict()["use_sliding_window"] is True
    old = edited(top=window | {"max_window_layers": 3}, drop=["layer_types"])
    assert DominoConfig.from_dict(old).layer_types == (LAYER_TYPES[0],) * 3 + (LAYER_TYPES[1],) * 2
    assert DominoConfig.from_dict(edited(drop=["layer_types"])) == BASE
    same = {"is_causal": True, "sliding_window_non_causal": False}
    assert DominoConfig.from_dict(edited(top=window | {"layer_types": types} | same)) == config
    assert DominoConfig.from_dict(edited(top={"is_causal": False})) == BASE


def test_plain_dflash_form_has_no_shift():
    data = edited(
        top={"architectures": ["DFlashDraftModel"]},
        drop=["emb_dim"],
        drop_inner=["projector_type", "emb_dim", "gru_hidden_dim", "shift_label"],
    )
    config = DominoConfig.from_dict(data)
    assert (config.projector_type, config.shift_label, config.max_drafts) == ("dflash", False, 15)


def test_mask_token_string_is_looked_up():
    class Tokenizer:
        def get_vocab(self):
            return {"<|MASK|>": 7, "<fill>": 9}

    config = DominoConfig.from_dict(edited(drop_inner=["mask_token_id"]))
    assert config.mask_token_id is None
    assert config.resolve_mask_token(Tokenizer()).mask_token_id == 7
    data = edited(drop_inner=["mask_token_id"], inner={"mask_token": "<fill>"})
    assert DominoConfig.from_dict(data).resolve_mask_token(Tokenizer()).mask_token_id == 9
    assert DominoConfig.from_dict(DominoConfig.from_dict(data).to_dict()).mask_token == "<fill>"
    data["dflash_config"]["mask_token"] = "<none>"
    with pytest.raises(ValueError, match="mask_token: got '<none>'"):
        DominoConfig.from_dict(data).resolve_mask_token(Tokenizer())
    assert BASE.resolve_mask_token(None) is BASE


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (edited(inner={"projector_type": "eagle"}), "projector_type: got 'eagle', expected one of"),
        (edited(inner={"projector_type": "dflash"}), "projector_type: got 'dflash'"),
        (edited(top={"emb_dim": 128}), r"emb_dim: got \(256, 128\), expected one value"),
        (edited(inner={"block_size": 8}), r"block_size: got \(8, 16\)"),
        (edited(inner={"target_layer_ids": [1, 9, 17, 25, 36]}), "target_layer_ids: got .*36"),
        (edited(inner={"target_layer_ids": [1, 1]}), "target_layer_ids: .*distinct"),
        (edited(inner={"mask_token_id": 151936}), "mask_token_id: got 151936, .* below"),
        (edited(inner={"mask_token_id": -1}), "mask_token_id: got -1"),
        (edited(top={"block_size": 1}), "block_size: got 1, expected at least 2"),
        (edited(top={"block_size": 2.5}), "block_size: got 2.5, expected an integer"),
        (edited(top={"num_key_value_heads": 5}), "num_attention_heads: got 32, .*multiple"),
        (edited(drop=["hidden_size"]), "hidden_size: got None"),
        (edited(top={"attention_bias": True}), "attention_bias: got True, expected False"),
        (edited(top={"rope_parameters": {"rope_type": "yarn"}}), "rope_type: got 'yarn'"),
        (edited(top={"layer_types": ["full_attention"]}), "layer_types: .*5 entries"),
        (edited(top={"layer_types": ["sliding_attention"] * 5}), "sliding_window: got None"),
        (edited(top={"draft_vocab_size": 32000}), "draft_vocab_size: got 32000"),
        (edited(top={"sample_from_anchor": False}), "sample_from_anchor: got False"),
        (edited(top={"dtype": "int8"}), "dtype: got 'int8'"),
        (edited(top={"aux_hidden_state_layer_ids": [1, 9]}), "aux_hidden_state_layer_ids: got"),
        (edited(inner={"shift_label": 1}), "shift_label: got 1, expected true or false"),
        (edited(inner={"pure_draft_prefix_len": -1}), "pure_draft_prefix_len: got -1"),
        ([], r"config: got \[\], expected an object"),
        (edited() | {"dflash_config": "domino"}, "dflash_config: got 'domino', expected an object"),
        (edited(top={"domino_config": [1]}), r"domino_config: got \[1\], expected an object"),
        (edited(top={"architectures": "DominoDraftModel"}), "architectures: .*expected a list"),
        (edited(top={"num_attention_heads": 0}), "num_attention_heads: got 0"),
        (edited(top={"hidden_size": "4096"}), "hidden_size: got '4096', expected an integer"),
        (edited(top={"num_hidden_layers": "5"}, drop=["layer_types"]), "hidden_layers: got '5'"),
        (edited(top={"rms_norm_eps": "small"}), "rms_norm_eps: got 'small', expected a number"),
        (edited(top={"rope_theta": 0}), "rope_theta: got 0, expected a number above 0"),
        (edited(top={"torch_dtype": "float16"}), "torch_dtype of config: got 'float16'"),
        (edited(inner={"target_layer_ids": 5}), "target_layer_ids: got 5, expected a list"),
        (edited(inner={"target_layer_ids": ["1"]}), r"target_layer_ids: got \['1'\]"),
        (edited(top={"layer_types": "full_attention"}), "layer_types: .*expected a list"),
        (edited(top={"layer_types": [["full_attention"]] * 5}), "layer_types: .*expected a list"),
        (edited(top={"aux_hidden_state_layer_ids": 2}), "aux_hidden_state_layer_ids: got 2"),
        (edited(top={"aux_hidden_state_layer_ids": ["2"]}), "layer_ids: .*expected a list of int"),
        (edited(inner={"projector_type": ["domino"]}), r"projector_type: got \['domino'\]"),
        (edited(inner={"speculative_tokens": "15"}), "speculative_tokens: got '15'"),
        (edited(top={"speculators_config": [1]}), "speculators_config: got"),
        (edited(top={"speculators_config": {"proposal_methods": [1]}}), "proposal_methods: got"),
        (edited(drop=["rope_theta"], top={"rope_parameters": {
            "full_attention": {"rope_theta": 1e7}}}), "rope_parameters: .*one set of values"),
        (edited(top={"architectures": ["DFlash2DraftModel"]}), "architectures: got .*DFlash2"),
        (edited(top={"speculators_model_type": "eagle3"}), "speculators_model_type: got 'eagle3'"),
        (edited(inner={"markov_rank": 64}), "markov_rank: got 64, expected 0"),
        (edited(inner={"final_logit_softcapping": 30.0}), "final_logit_softcapping: got 30.0"),
        (edited(inner={"input_embedding_scale": 50.6}), "input_embedding_scale: got 50.6"),
        (edited(top={"quantization_config": {"bits": 4}}), "quantization_config: got"),
        (edited(inner={"target_hidden_size": 5120}), "target_hidden_size: got 5120"),
        (edited(top={"rope_parameters": {"partial_rotary_factor": 0.25}}), "partial_rotary_factor"),
        (edited(inner={"query_zero_predicts_next": False}), "query_zero_predicts_next: got False"),
        (edited(top={"is_causal": True}), "is_causal: got True, expected False with full_att"),
        (edited(top={"is_causal": False, "sliding_window": 8, "layer_types":
                     ["sliding_attention"] * 5}), "is_causal: got False, expected True"),
        (edited(top={"sliding_window_non_causal": True, "sliding_window": 8, "layer_types":
                     ["sliding_attention"] * 5}), "non_causal: got True, expected False"),
        (edited(top={"use_sliding_window": False, "sliding_window": 8,
                     "layer_types": ["sliding_attention"] * 5}), "use_sliding_window: got False"),
    ],
)  # fmt: skip
def test_errors_name_the_field(data, message):
    with pytest.raises(ValueError, match=message):
        DominoConfig.from_dict(data)


@pytest.mark.parametrize("layers", [1, 5])
def test_default_layer_ids(layers, tiny_config):
    config = tiny_config(num_hidden_layers=layers, num_target_layers=36, target_layer_ids=())
    assert config.target_layer_ids == {1: (18,), 5: (1, 9, 17, 25, 33)}[layers]


def test_round_trip(tmp_path, tiny_config):
    sliding = tiny_config(
        layer_types=("full_attention", "sliding_attention"),
        sliding_window=8,
        shift_label=False,
        pure_draft_prefix_len=2,
        rope_theta=1e7,
    )
    for config in (BASE, sliding, tiny_config(projector_type="dflash", shift_label=True)):
        (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
        read = DominoConfig.from_pretrained(tmp_path)
        # A plain DFlash file says nothing about a head, whose sizes fall back to the defaults.
        expected = {"domino": config, "dflash": read}[config.projector_type]
        assert read == expected and read.shift_label == config.shift_label
    assert "auto_map" not in BASE.to_dict()
    assert BASE.to_dict()["architectures"] == ["DominoDraftModel"]


def test_slots_for(tiny_config):
    shifted, plain = tiny_config(), tiny_config(shift_label=False)
    assert [shifted.slots_for(k) for k in (1, 3, 4)] == [2, 4, 4]
    assert [plain.slots_for(k) for k in (1, 3)] == [2, 4]
    with pytest.raises(ValueError, match=r"num_drafts: got 4, expected 1..3"):
        plain.slots_for(4)


def test_import_is_lazy():
    code = (
        "import sys, domino_draft; "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_exported_name_resolves():
    import domino_draft

    modules = {module.name for module in pkgutil.iter_modules(domino_draft.__path__)}
    assert not modules & set(domino_draft._EXPORTS)  # a module would take the name's place
    for name in domino_draft._EXPORTS:
        assert getattr(domino_draft, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = domino_draft.nothing
