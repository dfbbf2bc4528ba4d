"""Checkpoints that draft from a part of the vocabulary: the maps d2t and t2d of speculators."""

import json

import pytest
import torch
from domino_draft import DominoDrafter, Engine, Target, TreeOptions, estimate_memory, generate
from domino_draft.card import read_card, render
from rich.console import Console
from safetensors.torch import save_file

from domino_kernels import verify_tree

from .conftest import tiny_model
from .test_sampling import FILTERS, assert_filtered, texts_of

V = 61
KNOWN = torch.tensor([3, 4, 7, 11, 12, 19, 20, 25, 31, 33, 40, 41, 47, 52, 58, 59])
MAPS = {
    "d2t": KNOWN - torch.arange(len(KNOWN)),
    "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, KNOWN, True),
}
W2 = "embed_proj.2.weight"


def write(folder, drafter, maps, **config):
    """The checkpoint, and its drafter with all of the vocabulary."""
    tensors = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    if W2 in tensors:
        tensors[W2] = tensors[W2][KNOWN]
    tensors["lm_head.weight"] = torch.zeros(len(KNOWN), 32)
    save_file(tensors | maps, folder / "model.safetensors")
    data = drafter.config.to_dict() | {"speculators_model_type": "dflash"}
    data |= {"draft_vocab_size": len(KNOWN)} | config
    (folder / "config.json").write_text(json.dumps(data))


@pytest.fixture
def target():
    return Target(tiny_model("Llama"))


def make(tiny_config, kind):
    torch.manual_seed(3)
    kinds = {
        "domino": {},
        "plain": {"shift_label": False, "pure_draft_prefix_len": 0},
        "dflash": {"projector_type": "dflash"},
    }
    drafter = DominoDrafter(tiny_config(**kinds[kind])).eval()
    with torch.no_grad():  # so that drafts change with the context
        for weight in drafter.parameters():
            weight.mul_(8 if weight.dim() > 1 else 1)
    return drafter


@pytest.mark.parametrize("maps", [("d2t", "t2d"), ("d2t",), ("t2d",)], ids="/".join)
@pytest.mark.parametrize("kind", ["domino", "plain", "dflash"])
def test_drafts_are_the_likeliest_of_the_ids_it_knows(tiny_config, target, tmp_path, kind, maps):
    whole = make(tiny_config, kind)
    write(tmp_path, whole, {name: MAPS[name] for name in maps})
    loaded = DominoDrafter.from_pretrained(tmp_path)
    assert torch.equal(loaded.draft_ids, KNOWN)
    for name, tensor in loaded.state_dict().items():
        wanted = whole.state_dict()[name]
        if name == W2:
            assert not tensor.index_fill(0, KNOWN, 0).any()
            tensor, wanted = tensor[KNOWN], wanted[KNOWN]
        assert torch.equal(tensor, wanted)

    features = torch.randn(2, 5, 64)
    counts = torch.tensor([5, 3])
    found = []
    for drafter in (whole, loaded):
        session = drafter.begin(target, 2, 40)
        session.commit(features, counts, [5, 3])
        found.append(session.block(torch.tensor([9, 60]), 3))
    assert torch.equal(found[0][0], found[1][0])
    wanted = torch.full_like(found[0][1], -torch.inf)
    wanted[..., KNOWN] = found[0][1][..., KNOWN]
    assert torch.equal(found[1][1], wanted)


@pytest.mark.parametrize("kind", ["domino", "plain", "dflash"])
def test_texts_are_the_targets_own(tiny_config, target, tmp_path, kind, monkeypatch):
    write(tmp_path, make(tiny_config, kind), MAPS)
    drafter = DominoDrafter.from_pretrained(tmp_path)
    prompts = [[5, 6, 7], [60, 2], [8] * 9]
    wanted = generate(target, None, prompts, max_new_tokens=16).sequences
    assert not {token for text in wanted for token in text} <= set(KNOWN.tolist())
    drafted = []
    for fused in (False, True):
        engine = Engine(target, drafter, max_batch=3, max_length=40, fused=fused)
        seen = []
        verify = "domino_draft.cycle.verify_chain" if fused else "domino_draft.engine.verify_chain"
        module, name = verify.rsplit(".", 1)
        inner = getattr(__import__(module, fromlist=[name]), name)

        def watched(logits, drafts, *args, inner=inner, seen=seen, **options):
            seen += drafts[drafts >= 0].tolist()
            return inner(logits, drafts, *args, **options)

        monkeypatch.setattr(verify, watched)
        for prompt in prompts:
            engine.add(prompt, 16, stop_token_ids=())
        texts = [[] for _ in prompts]
        for chunk in engine:
            texts[chunk.request] += chunk.tokens
        assert texts == wanted
        assert seen and set(seen) <= set(KNOWN.tolist())
        drafted.append(set(seen))
        monkeypatch.undo()
        whole = estimate_memory(target, make(tiny_config, kind), 3, 40, fused=fused)
        found = estimate_memory(target, drafter, 3, 40, fused=fused)
        assert (found.fused > whole.fused) == fused  # rows of the LM head of its own
    assert len(set.union(*drafted)) > 3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["domino", "plain"])
@pytest.mark.parametrize(
    ("rule", "pool"), [(None, 6), (None, 40), (None, None), ("rrsw", 6), ("traversal", 40)]
)
def test_trees_draft_from_the_ids_it_knows(
    tiny_config, tmp_path, device, kind, rule, pool, monkeypatch
):
    """Cycles of trees in fused layers."""
    target = Target(tiny_model("Llama").to(device))
    write(tmp_path, make(tiny_config, kind), MAPS)
    drafter = DominoDrafter.from_pretrained(tmp_path, device=device)
    tree = TreeOptions(rule=rule, nodes=9, width=2, children=3, pool=pool)
    prompts = [[5, 6, 7], [60, 2], [8] * 9]
    hot = {} if rule is None else {"temperature": 0.9}
    engine = Engine(target, drafter, max_batch=3, max_length=40, tree=tree, fused=True)
    seen = []

    def watched(logits, tokens, *args, **options):
        seen.append(tokens[:, 1:])
        return verify_tree(logits, tokens, *args, **options)

    monkeypatch.setattr("domino_draft.tree_cycle.verify_tree", watched)
    for i, prompt in enumerate(prompts):
        engine.add(prompt, 16, seed=i, stop_token_ids=(), **hot)
    texts = [[] for _ in prompts]
    for chunk in engine:
        texts[chunk.request] += chunk.tokens
    drafted = set(torch.cat([t.flatten() for t in seen]).tolist()) - {-1}
    assert len(drafted) > 3 and drafted <= set(KNOWN.tolist())
    if rule is None:
        assert texts == generate(target, None, prompts, max_new_tokens=16).sequences
    found = estimate_memory(target, drafter, 3, 40, tree=tree, fused=True)
    whole = estimate_memory(target, make(tiny_config, kind), 3, 40, tree=tree, fused=True)
    assert found.fused > whole.fused


@pytest.mark.parametrize("rule", ["rrsw", "traversal"])
def test_drawn_trees_of_a_part_keep_the_law(tiny_config, target, tmp_path, rule):
    write(tmp_path, make(tiny_config, "domino"), MAPS)
    drafter = DominoDrafter.from_pretrained(tmp_path)
    tree = TreeOptions(rule=rule, nodes=9, width=2, children=3, pool=12)
    engine = Engine(target, drafter, max_batch=64, max_length=40, tree=tree, fused=True)
    for seed in range(2000):
        engine.add([5, 6], 2, seed=seed, stop_token_ids=(), **FILTERS[-1])
    assert_filtered(target, torch.tensor(texts_of(engine, 2000)), FILTERS[-1])


def test_the_card_says_so(tiny_config, tmp_path):
    write(tmp_path, make(tiny_config, "domino"), MAPS)
    card = read_card(tmp_path)
    assert card["config"]["draft_vocab_size"] == 16 and card["fits"]["vocab_size"] == V
    assert card["parameters_by_part"]["head: vocabulary W2"] == 16 * 8
    console = Console(width=100, record=True, file=open("/dev/null", "w"))
    console.print(render(card))
    assert "drafts from 16 ids" in console.export_text()


def test_a_copy_has_all_of_the_vocabulary(tiny_config, tmp_path):
    write(tmp_path, make(tiny_config, "domino"), MAPS)
    loaded = DominoDrafter.from_pretrained(tmp_path)
    loaded.save_pretrained(tmp_path / "copy")
    copy = DominoDrafter.from_pretrained(tmp_path / "copy")
    assert copy.draft_ids is None and copy.config.draft_vocab_size is None
    assert torch.equal(copy.state_dict()[W2], loaded.state_dict()[W2])


@pytest.mark.parametrize(
    ("maps", "message"),
    [
        ({}, r"draft_vocab_size: got 16 and no d2t or t2d"),
        ({"d2t": MAPS["d2t"][:-1]}, r"d2t: got a map of 15 ids, expected 16 ids of the target"),
        ({"d2t": MAPS["d2t"] + 5}, r"d2t: got a map of 16 ids, expected 16 ids"),
        ({"d2t": MAPS["d2t"] * 0 - torch.arange(16)}, r"d2t: got a map of 16 ids"),
        ({"d2t": MAPS["d2t"], "t2d": ~MAPS["t2d"]}, r"t2d: got other ids than those of d2t"),
    ],
)
def test_broken_maps(tiny_config, tmp_path, maps, message):
    write(tmp_path, make(tiny_config, "domino"), maps)
    with pytest.raises(ValueError, match=message):
        DominoDrafter.from_pretrained(tmp_path)


def test_other_forms_have_no_maps(tiny_config, tmp_path):
    write(tmp_path, make(tiny_config, "domino"), MAPS, speculators_model_type=None)
    with pytest.raises(ValueError, match=r"draft_vocab_size: got 16, expected vocab_size = 61"):
        DominoDrafter.from_pretrained(tmp_path)
    write(tmp_path, make(tiny_config, "domino"), MAPS, draft_vocab_size=62)
    with pytest.raises(ValueError, match="draft_vocab_size: got 62"):
        DominoDrafter.from_pretrained(tmp_path)
