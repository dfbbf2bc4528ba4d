"""The drafter against the public reference implementations, with the same weights and inputs.

`specforge` (its Domino and DFlash drafters trained and published the format) and `dflash` (its
authors' DFlash) come from PyPI into a folder of their own, without their dependencies; nothing else
uses them: `make test-reference`. Weights cross over through checkpoints on disk, in both
directions, so names, shapes and configuration are compared too.

What is known to differ, and why it may:

- A feature of the target's LAST layer is the tensor before the final norm here and in serving
  engines, the normed one in the references' own loop (`output_hidden_states[-1]`).
- bf16: the references round the rotary cosines and sines, and every product with them, to bf16;
  here they stay in fp32. The references add the correction to the base logits in bf16;
  `draft_chain` adds in fp32. Drafts can differ where two logits are closer than that rounding.
- SpecForge's training casts the whole module to bf16, rotary frequencies included (0.4% off, more
  than a radian at position 1000); its `from_pretrained`, serving engines and this package keep them
  in fp32, so a drafter that it trained is served with other angles than it was trained with.
- SpecForge drafts block_size - 1 ids also with shift_label, where block_size are possible.
- SpecForge's own loop passes no mask, so its sliding layers see everything there; its training
  masks and `dflash` slide, and those are what is compared. Its training mask does not bound the
  window inside a block, which shows only where a window is shorter than a block. Layers whose
  causality inside a block is not the public default (`is_causal` of `dflash`) are refused here.
"""

import importlib.util
import json
import os

import pytest
import torch
from domino_draft import (
    DominoConfig,
    DominoDrafter,
    RowCache,
    Target,
    block_mask,
    generate,
)
from domino_draft.backbone import dense_mask
from domino_draft.cache import row_mask
from domino_draft.config import default_target_layer_ids
from domino_draft.train.objective import domino_loss
from safetensors.torch import save_file
from torch import nn

from domino_kernels import draft_chain
from domino_kernels.testing import assert_error_rule, max_error

from .conftest import tiny_model
from .test_config import QWEN3_8B
from .test_decode import own_text
from .test_drafter import QWEN3_4B
from .test_train_objective import inputs_of, make_batch

if os.environ.get("DOMINO_REQUIRE_REFERENCE") != "1":
    for package in ("specforge", "dflash"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(
                f"{package} is not installed (make test-reference)", allow_module_level=True
            )

from dflash.model import DFlashDraftModel as AuthorsDFlash
from specforge.algorithms.common import dflash_family_model as training
from specforge.modeling.auto import AutoDraftModel
from specforge.modeling.draft import dflash as reference_dflash
from specforge.modeling.draft.dflash import DFlashDraftModel
from specforge.modeling.draft.domino import DominoDraftModel

CONVENTIONS = pytest.mark.parametrize(
    ("shift", "prefix"),
    [(True, 1), (False, 1), (True, 0), (False, 0), (True, 2), (False, 2)],
    ids=["shift", "no-shift", "shift-0", "no-shift-0", "shift-2", "no-shift-2"],
)
# The proportions of Qwen3-4B: queries wider than the hidden state, five features of 36 layers.
QWEN3 = dict(
    hidden_size=160,
    intermediate_size=608,
    num_hidden_layers=5,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=1187,
    num_target_layers=36,
    target_layer_ids=(1, 9, 17, 25, 33),
    mask_token_id=1185,
    emb_dim=16,
    gru_hidden_dim=64,
    block_size=16,
    rope_theta=1e6,
    max_position_embeddings=40960,
)
SHAPES = pytest.mark.parametrize("shape", [{}, QWEN3], ids=["tiny", "qwen3"])


def lively(config, seed=3):
    """A drafter whose every tensor shows in its output."""
    torch.manual_seed(seed)
    drafter = DominoDrafter(config)
    with torch.no_grad():
        for name, p in drafter.named_parameters():
            if "norm" in name:
                p.copy_(1 + 0.3 * torch.randn_like(p))
            elif p.dim() == 2:
                p.copy_(1.5 * torch.randn_like(p) / p.shape[1] ** 0.5)
    return drafter.eval()


def load_reference(cls, folder, dtype=torch.float32):
    """The reference model of a checkpoint, with nothing missing and nothing left over."""
    model, report = cls.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    assert {p.dtype for p in model.parameters()} == {dtype}
    return model.eval()


class Inputs:
    """Two rows: context features, block embeddings, and a target's embedding table and LM head."""

    def __init__(self, config, dtype=torch.float32, context=23, seed=5):
        g = torch.Generator().manual_seed(seed)
        rows, slots, hidden = 2, config.block_size, config.hidden_size

        def draw(*shape):
            return torch.randn(*shape, generator=g).to(dtype)

        self.features = draw(rows, context, len(config.target_layer_ids) * hidden)
        self.model = nn.Module()  # what the reference asks of a target: model.embed_tokens, lm_head
        self.model.embed_tokens = nn.Embedding.from_pretrained(draw(config.vocab_size, hidden))
        self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False, dtype=dtype)
        self.lm_head.weight.data = 2 * draw(config.vocab_size, hidden) / hidden**0.5
        self.block = torch.full((rows, slots), config.mask_token_id)
        self.block[:, 0] = torch.tensor([7, 11])
        self.ids = torch.randint(0, config.vocab_size, (rows, slots), generator=g)
        self.ids[:, 0] = self.block[:, 0]
        self.context, self.slots = context, slots

    @property
    def embedding(self):
        return self.model.embed_tokens.weight

    def ours(self, drafter):
        at = torch.arange(self.context + self.slots).expand(2, -1)
        kv = drafter.context_kv(self.features, at[:, : self.context])
        return drafter(self.model.embed_tokens(self.block), at[:, self.context :], kv)

    def theirs(self, model):
        return model(
            position_ids=torch.arange(self.context + self.slots).expand(2, -1),
            noise_embedding=self.model.embed_tokens(self.block),
            target_hidden=self.features,
        )


def corrected(drafter, hidden, base, embeds):
    """Teacher-forced logits [B, S, V]: slot i reads the state after y_i (shift) or y_{i-1}."""
    head, config = drafter.head, drafter.config
    states = head.states(embeds)
    if not config.shift_label:
        states = states.roll(1, dims=1)  # slot 0 is never corrected
    final = base + head(hidden, states)
    return torch.cat((base[:, : head.first_slot], final[:, head.first_slot :]), dim=1)


def theirs_corrected(model, hidden, base, embeds):
    one = (base[:, None], embeds[:, None], hidden[:, None])  # one block a row
    return model.apply_logits_head(
        one[0], prev_token_embeddings=one[1], hidden_states=one[2]
    ).squeeze(1)


def drafted(drafter, hidden, base, inputs):
    config = drafter.config
    return draft_chain(
        base, hidden, inputs.block[:, 0].contiguous(), drafter.head.weights(inputs.embedding),
        num_drafts=config.block_size - 1, shift_label=config.shift_label,
        pure_draft_prefix_len=config.pure_draft_prefix_len,
    )  # fmt: skip


def close(got, want, factor=5e-6):
    """fp32 results of the same formula: apart by rounding, relative to the largest value."""
    torch.testing.assert_close(got, want, rtol=0, atol=factor * want.abs().max().item())


@SHAPES
@CONVENTIONS
@torch.no_grad()
def test_hidden_logits_and_drafts_in_fp32(tiny_config, tmp_path, shape, shift, prefix):
    config = tiny_config(**shape, shift_label=shift, pure_draft_prefix_len=prefix)
    drafter = lively(config)
    drafter.save_pretrained(tmp_path)
    model = load_reference(DominoDraftModel, tmp_path)
    assert (model.shift_label, model.pure_draft_prefix_len) == (shift, prefix)
    assert model.suffix_start == drafter.head.first_slot
    assert tuple(model.target_layer_ids) == config.target_layer_ids
    assert (model.block_size, model.mask_token_id) == (config.block_size, config.mask_token_id)

    inputs = Inputs(config)
    hidden, want = inputs.ours(drafter), inputs.theirs(model)
    close(hidden, want)
    base = inputs.lm_head(hidden)
    close(base, inputs.lm_head(want))
    embeds = inputs.model.embed_tokens(inputs.ids)
    final = corrected(drafter, hidden, base, embeds)
    close(final, theirs_corrected(model, want, inputs.lm_head(want), embeds))
    assert (final - base)[:, drafter.head.first_slot :].abs().mean() > 0.1 * base.std()

    got = drafted(drafter, hidden, base, inputs)
    ids = model._sample_draft_tokens(inputs, want, inputs.block)
    assert got.tolist() == ids.tolist()
    first = 0 if shift else 1
    plain = base[:, first : first + config.block_size - 1].argmax(-1)
    assert got.tolist() != plain.tolist()  # the head had a say


@SHAPES
@torch.no_grad()
def test_plain_dflash_in_fp32(tiny_config, tmp_path, shape):
    config = tiny_config(**shape, projector_type="dflash", shift_label=False)
    drafter = lively(config)
    drafter.save_pretrained(tmp_path)
    inputs = Inputs(config)
    hidden = inputs.ours(drafter)
    for cls in (DFlashDraftModel, AuthorsDFlash):
        close(hidden, inputs.theirs(load_reference(cls, tmp_path)))
    model = load_reference(DFlashDraftModel, tmp_path)
    got = inputs.lm_head(hidden[:, 1:]).argmax(-1)
    assert got.tolist() == model._sample_draft_tokens(inputs, hidden, inputs.block).tolist()


@CONVENTIONS
@torch.no_grad()
def test_bf16_is_as_close_to_fp32(tiny_config, tmp_path, shift, prefix):
    """Both round differently in bf16: each is held against the reference in fp32, whose weights and
    inputs are the same bf16 values.
    """
    config = tiny_config(**QWEN3, shift_label=shift, pure_draft_prefix_len=prefix)
    lively(config).bfloat16().save_pretrained(tmp_path)
    drafter = DominoDrafter.from_pretrained(tmp_path)
    model = load_reference(DominoDraftModel, tmp_path, torch.bfloat16)
    exact = load_reference(DominoDraftModel, tmp_path)
    assert drafter.dtype == torch.bfloat16
    assert model.rotary_emb.inv_freq.dtype == torch.float32
    inputs, wide = Inputs(config, torch.bfloat16), Inputs(config, torch.bfloat16)
    wide.model.float(), wide.lm_head.float()
    wide.features = wide.features.float()
    hidden, want = inputs.ours(drafter), inputs.theirs(model)
    assert_error_rule(hidden, wide.theirs(exact).numpy(), want, name="hidden")

    # The head on one and the same hidden state: its own rounding only.
    def truth(ids):
        embeds = wide.model.embed_tokens(ids)
        return theirs_corrected(exact, want.float(), base.float(), embeds)

    base, embeds = inputs.lm_head(want), inputs.model.embed_tokens(inputs.ids)
    ours = corrected(drafter, want, base, embeds)
    theirs = theirs_corrected(model, want, base, embeds)
    final = truth(inputs.ids).numpy()
    assert_error_rule(ours, final, theirs, name="final")
    tolerance = max_error(ours, final)[0] + max_error(theirs, final)[0]

    got = drafted(drafter, want, base, inputs)
    ids = model._sample_draft_tokens(inputs, want, inputs.block)
    alike = 0
    for row, (a, b) in enumerate(zip(got.tolist(), ids.tolist())):
        at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(a))
        alike += at
        if at < len(a):  # after the same prefix: only a near tie may be decided differently
            block = inputs.block.clone()
            block[row, 1:] = got[row]
            logits = truth(block)[row, at if shift else at + 1]
            gap = (logits[a[at]] - logits[b[at]]).abs().item()
            assert gap <= tolerance, (row, at, gap, tolerance)
    print(f"{alike} of {got.numel()} ids alike before the first difference of their row")
    assert alike >= got.numel() // 4


def partly_wrong(text, done, count):
    """The next `count` tokens of the known text, two in every seven replaced."""
    drafts = text[done : done + count]
    return [(d + 1) % 61 if (done + i) % 7 in (2, 3) else d for i, d in enumerate(drafts)]


class Recorded:
    """Runs the Domino session in the loop, notes what it drafts, and drafts `partly_wrong`."""

    def __init__(self, drafter, prompt, text):
        self.drafter, self.prompt, self.text, self.drafts = drafter, prompt, text, []
        self.feature_layers = drafter.feature_layers
        self.default_drafts = self.max_drafts = drafter.default_drafts

    def begin(self, target, rows, max_length):
        self.session = self.drafter.begin(target, rows, max_length)
        self.commit, self.select = self.session.commit, self.session.select
        return self

    def propose(self, batch, num_drafts):
        self.drafts.append(self.session.propose(batch, num_drafts)[0].tolist())
        done = len(batch.tokens[0]) - len(self.prompt)
        return torch.tensor([partly_wrong(self.text, done, num_drafts)])


class LengthCache(reference_dflash.DynamicCache):
    """`crop(length)` as the reference calls it, under every release of transformers."""

    def crop(self, length):
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
@pytest.mark.parametrize(
    "kind",
    [
        {"block_size": 5},
        {"block_size": 6, "shift_label": False},
        {"block_size": 6, "projector_type": "dflash", "shift_label": False},
    ],
    ids=["shift", "no-shift", "dflash"],
)
@torch.no_grad()
def test_whole_loop_drafts_the_same(tiny_config, tmp_path, monkeypatch, family, kind):
    """Features, positions, caches and roll-back: every cycle of the reference's own loop.

    Both loops then go on with the same partly wrong drafts, so that cycles keep none to all.
    """
    target, prompt, new = tiny_model(family), [40, 2, 8, 33, 21, 9, 7], 40
    text = own_text(target, prompt, new + 2 * kind["block_size"])
    mask = next(i for i in range(61) if i not in text)  # the reference drops it from its output
    config = tiny_config(**kind, mask_token_id=mask)
    drafter = lively(config)
    drafter.save_pretrained(tmp_path)
    cls = DFlashDraftModel if config.projector_type == "dflash" else DominoDraftModel
    model = load_reference(cls, tmp_path)

    ours = Recorded(drafter, prompt, text)
    result = generate(Target(target), ours, [prompt], max_new_tokens=new, stop_token_ids=())
    assert result.sequences[0] == text[:new]
    assert {1, config.block_size} <= set(result.stats.accepted[0])

    drafts, done = [], 1  # the first token comes from the prefill
    sample = model._sample_draft_tokens

    def noted(target, hidden, block):
        nonlocal done
        assert block[0].tolist() == [text[done - 1]] + [mask] * (config.block_size - 1)
        drafts.append(sample(target, hidden, block)[0].tolist())
        out = partly_wrong(text, done, config.block_size - 1)
        done += next((i for i, d in enumerate(out) if d != text[done + i]), len(out)) + 1
        return torch.tensor([out])

    monkeypatch.setattr(model, "_sample_draft_tokens", noted)
    monkeypatch.setattr(reference_dflash, "DynamicCache", LengthCache)
    out = model.spec_generate(target, torch.tensor([prompt]), new, None, 0.0)
    assert out[0, len(prompt) :].tolist() == text[:new]
    assert len(drafts) >= 10 and ours.drafts == drafts


@pytest.mark.parametrize("window", [3, 9])
@torch.no_grad()
def test_sliding_layers(tiny_config, tmp_path, window):
    """The masks of a decoding session against `dflash`, window shorter and longer than a block."""
    config = tiny_config(
        projector_type="dflash", shift_label=False, num_hidden_layers=3, block_size=6,
        layer_types=("sliding_attention", "full_attention", "sliding_attention"),
        sliding_window=window,
    )  # fmt: skip
    drafter = lively(config)
    drafter.save_pretrained(tmp_path)
    model = load_reference(AuthorsDFlash, tmp_path)
    assert [layer.self_attn.sliding_window for layer in model.layers] == [window, None, window]
    inputs = Inputs(config, context=8)
    cache = RowCache(2, inputs.context + inputs.slots, "cpu")
    at = cache.positions(inputs.context)
    for layer, kv in enumerate(drafter.context_kv(inputs.features, at)):
        cache.update(*kv, layer)
    cache.advance(torch.tensor([8, 8]), [8, 8])
    sliding = row_mask(cache, inputs.slots, causal=True, window=window)
    block = inputs.model.embed_tokens(inputs.block)
    got = drafter(block, cache.positions(inputs.slots), cache, None, sliding)
    close(got, inputs.theirs(model))  # each of its layers knows its own mask


@pytest.mark.parametrize("window", [None, 9])
def test_training_masks(window):
    anchors, valid = torch.tensor([[2, 7, 0], [4, 8, 11]]), torch.tensor([[1, 1, 0], [1, 1, 1]]) > 0
    want = training.create_dflash_sdpa_mask(anchors, valid, 13, 6, "cpu", sliding_window=window)
    mod = block_mask(anchors, 6, 13, valid=valid, window=window)
    assert torch.equal(dense_mask(mod, 2, 18, 31, "cpu"), want)


@CONVENTIONS
@pytest.mark.parametrize("lam", [0.0, 0.35])
def test_training_loss_and_gradients(tiny_config, tmp_path, monkeypatch, shift, prefix, lam):
    """One batch through both objectives: loss, metrics, and the gradient of every tensor."""
    config = tiny_config(shift_label=shift, pure_draft_prefix_len=prefix, block_size=5)
    drafter = lively(config)
    drafter.save_pretrained(tmp_path)
    model = load_reference(DominoDraftModel, tmp_path)
    batch = make_batch(config)
    features, embedding, lm_head = inputs_of(config, batch)
    embed, head = nn.Embedding.from_pretrained(embedding), nn.Linear(*lm_head.shape[::-1], False)
    head.weight = nn.Parameter(lm_head, requires_grad=False)
    wrapper = training.OnlineDominoModel(
        model, head, embed, mask_token_id=config.mask_token_id, block_size=config.block_size,
        attention_backend="sdpa", loss_decay_gamma=7.0, shift_label=shift,
    )  # fmt: skip
    lengths = torch.tensor([24, 23])  # as make_batch lays them out: 4 prompt tokens, no padding
    mask = (torch.arange(24) >= 4) & (torch.arange(24) < lengths[:, None])
    keep = torch.ones_like(batch.anchors, dtype=torch.bool)
    monkeypatch.setattr(
        wrapper, "_sample_anchor_positions", lambda *_: (batch.anchors, keep), raising=True
    )
    want, _, metrics = wrapper(batch.tokens, features, mask.float(), lambda_base=lam)
    want.backward()
    got = domino_loss(drafter, features, batch, embedding, lm_head, lam)
    got.loss.backward()
    torch.testing.assert_close(got.loss, want, rtol=2e-6, atol=0)
    for part, ce in (("final_loss", got.final_ce), ("base_loss", got.base_ce)):
        torch.testing.assert_close((batch.weights * ce).sum(), metrics[part], rtol=2e-6, atol=0)
    theirs = dict(model.named_parameters())
    for name, p in drafter.named_parameters():
        close(p.grad, theirs[name].grad, 1e-4)
        assert p.grad.abs().max() > 0, name


QWEN36_27B = QWEN3_8B | dict(  # the recipe without label shift
    hidden_size=5120, intermediate_size=17408, vocab_size=248320, num_target_layers=64,
    rope_theta=10000000, max_position_embeddings=262144, use_sliding_window=False,
    dflash_config=QWEN3_8B["dflash_config"]
    | dict(target_layer_ids=[1, 16, 31, 46, 61], mask_token_id=248070, shift_label=False),
)  # fmt: skip


@pytest.mark.parametrize("data", [QWEN3_4B, QWEN3_8B, QWEN36_27B], ids=["4B", "8B", "27B"])
def test_public_shapes(data):
    """Configuration, names and shapes of the published sizes, without memory."""
    config = DominoConfig.from_dict(data)
    with torch.device("meta"):
        drafter = DominoDrafter(config)
        model = DominoDraftModel(DominoDraftModel.config_class.from_dict(data))
    shapes = [{n: t.shape for n, t in m.state_dict().items()} for m in (drafter, model)]
    assert shapes[0] == shapes[1] and len(shapes[0]) == 62
    assert model.shift_label == config.shift_label and model.mask_token_id == config.mask_token_id
    assert model.config.rope_parameters["rope_theta"] == config.rope_theta
    assert model.suffix_start == (1 if config.shift_label else 2) == drafter.head.first_slot


@pytest.mark.parametrize("shard", [None, "20KB"], ids=["one-file", "sharded"])
def test_reference_checkpoints_are_read(tiny_config, tmp_path, shard):
    """What the reference itself writes, by the transformers release that is installed."""
    config = tiny_config(
        shift_label=False, rope_theta=1e7, layer_types=("full_attention", "sliding_attention"),
        sliding_window=9,
    )  # fmt: skip
    lively(config).save_pretrained(tmp_path / "ours")
    model = load_reference(DominoDraftModel, tmp_path / "ours")
    assert model.layer_types == config.layer_types and model.sliding_window == 9
    assert model.config.rope_parameters["rope_theta"] == 1e7
    model.save_pretrained(tmp_path / "theirs", **({"max_shard_size": shard} if shard else {}))
    files = sorted(p.name for p in (tmp_path / "theirs").glob("*.safetensors*"))
    assert len(files) > 2 if shard else files == ["model.safetensors"]
    back = DominoDrafter.from_pretrained(tmp_path / "theirs")
    assert back.config == config
    for name, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name


def test_early_checkpoints_are_read_alike(tiny_config, tmp_path):
    """Head tensors under `logit_head.`: both implementations read them."""
    config = tiny_config()
    drafter = lively(config)
    drafter.save_pretrained(tmp_path)
    early = {
        f"logit_head.{n}" if n.startswith(("prefix_gru.", "embed_proj.")) else n: t
        for n, t in drafter.state_dict().items()
    }
    save_file(early, tmp_path / "model.safetensors", metadata={"format": "pt"})
    back = DominoDrafter.from_pretrained(tmp_path)
    model = DominoDraftModel(DominoDraftModel.config_class.from_pretrained(tmp_path))
    model.load_state_dict(dict(early))
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    "drop", [["shift_label"], ["pure_draft_prefix_len"], ["shift_label", "pure_draft_prefix_len"],
             ["target_layer_ids"]],
)  # fmt: skip
def test_absent_fields_mean_the_same(tiny_config, drop):
    data = tiny_config(num_target_layers=9, target_layer_ids=(1, 6)).to_dict()
    for name in drop:
        del data["dflash_config"][name]
    model = DominoDraftModel(DominoDraftModel.config_class.from_dict(json.loads(json.dumps(data))))
    config = DominoConfig.from_dict(data)
    assert config.shift_label == model.shift_label
    assert config.pure_draft_prefix_len == model.pure_draft_prefix_len
    assert config.target_layer_ids == tuple(model.target_layer_ids)


def test_rotary_frequencies_after_a_cast(tiny_config):
    config = tiny_config(head_dim=128, rope_theta=1e6)
    theirs = DominoDraftModel.config_class.from_dict(config.to_dict())
    model = AutoDraftModel.from_config(theirs, torch_dtype=torch.bfloat16)
    exact = DominoDrafter(config).bfloat16()._inv_freq
    assert exact.dtype == torch.float32 and model.rotary_emb.inv_freq.dtype == torch.bfloat16
    close(DominoDraftModel(theirs).rotary_emb.inv_freq, exact, 1e-7)
    assert (1000 * (model.rotary_emb.inv_freq.float() - exact)).abs().max() > 1


def test_default_target_layers():
    for layers in range(5, 97):
        for count in range(1, 9):
            want = tuple(reference_dflash.build_target_layer_ids(layers, count))
            assert default_target_layer_ids(layers, count) == want


@torch.no_grad()
def test_features(tmp_path):
    """`Target.features` are the reference's, except that the last layer's is not normed here."""
    model = tiny_model("Qwen3")
    ids = torch.tensor([[3, 14, 15, 9, 26]])
    states = model(ids, output_hidden_states=True).hidden_states
    want = reference_dflash.extract_context_feature(states, [0, 2])
    assert torch.equal(Target(model).features(ids, (0, 2)), want)
    last = Target(model).features(ids, (3,))
    normed = reference_dflash.extract_context_feature(states, [3])
    assert not torch.allclose(last, normed, atol=1e-2)
    close(model.model.norm(last), normed)
