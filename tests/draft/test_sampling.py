"""Top-k, top-p and min-p of single requests: their law, whoever runs beside them."""

import json

import pytest
import torch
from domino_draft import DominoDrafter, Engine, NgramDrafter, Target, TreeOptions, generate
from domino_draft.requests import Law
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from .conftest import tiny_model
from .test_cli import invoke
from .test_law import ALARM, g_test

FILTERS = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 3},
    {"temperature": 0.9, "top_p": 0.6},
    {"temperature": 1.5, "min_p": 0.5},
    {"temperature": 1.1, "top_k": 9, "top_p": 0.8, "min_p": 0.2},
]
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def texts_of(engine, count):
    texts = [[] for _ in range(count)]
    for chunk in engine:
        assert chunk.error is None
        texts[chunk.request] += chunk.tokens
    return texts


def check_neighbours(target, drafter, laws, fused, **warmup):
    """Each request of `laws`, more than rows, has the text that it has alone."""
    settings = dict(max_length=60, fused=fused)
    engine = Engine(target, drafter, max_batch=4, **settings)
    if warmup:
        engine.warmup([4], **warmup)
    for i, law in enumerate(laws):
        engine.add([5, 6 + i], 20 + i, seed=i, stop_token_ids=(), **law)
    together = texts_of(engine, len(laws))
    for i, law in enumerate(laws):
        alone = Engine(target, drafter, max_batch=1, **settings)
        alone.add([5, 6 + i], 20 + i, seed=i, stop_token_ids=(), **law)
        assert texts_of(alone, 1) == [together[i]]


def make(tiny_config, device="cpu"):
    torch.manual_seed(0)
    target = Target(tiny_model("Llama", initializer_range=0.2).to(device))
    return target, DominoDrafter(tiny_config()).eval().to(device)


@pytest.mark.parametrize("fused", [False, True], ids=["stock", "fused"])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_neighbours_change_nothing(tiny_config, device, fused):
    check_neighbours(*make(tiny_config, device), FILTERS, fused)


def assert_filtered(target, found, law):
    """The second tokens of texts [n, 2] of prompt [5, 6], given the first: by the law that
    Transformers' warpers leave."""
    first = found[:, 0].mode().values
    found = found[found[:, 0] == first, 1]
    device = target.device
    ids = torch.tensor([[5, 6, first]], device=device)
    logits = target.model(ids).logits[:, -1].double() / law["temperature"]
    for name, warper in (
        ("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper),
    ):  # fmt: skip
        if name in law:
            logits = warper(law[name])(ids, logits)
    wanted = logits.softmax(-1)[0].cpu()
    counts = torch.bincount(found, minlength=61)
    assert not counts[wanted == 0].any() and (wanted > 0).sum() < 61
    assert (wanted * len(found) > 8).sum() > 1  # cells that the test does not pool
    assert g_test(counts.double(), wanted, torch.arange(61)) > ALARM


@pytest.mark.parametrize("law", FILTERS[2:], ids=lambda law: "-".join(law))
@pytest.mark.parametrize("fused", [False, True], ids=["stock", "fused"])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_tokens_follow_the_filtered_law(tiny_config, device, fused, law):
    """Of the second token, given the first: one-hot drafts judged by the law that Transformers'
    warpers leave."""
    target, drafter = make(tiny_config, device)
    engine = Engine(target, drafter, max_batch=64, max_length=40, fused=fused)
    for seed in range(2000):
        engine.add([5, 6], 2, seed=seed, stop_token_ids=(), **law)
    assert_filtered(target, torch.tensor(texts_of(engine, 2000)), law)


@pytest.mark.parametrize("rule", ["match", "target_only", "rrsw", "traversal"])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_trees_follow_the_filtered_law(tiny_config, device, rule):
    target, drafter = make(tiny_config, device)
    tree = TreeOptions(nodes=9, width=2, children=3, pool=20, rule=rule)
    engine = Engine(target, drafter, max_batch=64, max_length=40, tree=tree, fused=True)
    for seed in range(2000):
        engine.add([5, 6], 2, seed=seed, stop_token_ids=(), **FILTERS[-1])
    assert_filtered(target, torch.tensor(texts_of(engine, 2000)), FILTERS[-1])


@pytest.mark.parametrize("rule", ["match", "target_only", "rrsw", "traversal"])
def test_trees_filter_each_row(tiny_config, rule):
    """By the stock forward and in fused layers alike; top_k = 1 is greedy."""
    target, drafter = make(tiny_config)
    tree = TreeOptions(nodes=9, width=2, children=3, pool=20, rule=rule)
    rows = dict(temperature=[0.9, 2.0, 1.3], top_k=[0, 1, 3], min_p=[0.3, 0, 0])
    prompts = [[5, 6], [5, 7], [5, 8]]
    lengths = dict(max_new_tokens=20, stop_token_ids=())
    found = generate(target, drafter, prompts, seed=3, tree=tree, **rows, **lengths).sequences
    engine = Engine(target, drafter, max_batch=3, max_length=40, tree=tree, fused=True)
    for i, prompt in enumerate(prompts):
        own = {name: values[i] for name, values in rows.items()}
        engine.add(prompt, 20, seed=3 + i, stop_token_ids=(), **own)
    assert texts_of(engine, 3) == found
    assert [found[1]] == generate(target, None, [prompts[1]], **lengths).sequences


def test_what_a_batch_has_to_look_at(tiny_config):
    """Greedy rows alone go without temperatures, drawn ones without filters that are off."""
    target, drafter = make(tiny_config)
    engine = Engine(target, drafter, max_batch=3, max_length=60, fused=True)
    seen = []
    queue = engine._fused.queue
    engine._fused.queue = lambda *a: (seen.append(a[-1]), queue(*a))[1]
    for new, law in ((30, {"top_k": 4}), (20, FILTERS[1]), (9, FILTERS[2])):
        engine.add([5], new, stop_token_ids=(), **law)  # a filter does nothing to a greedy one
    texts_of(engine, 3)
    assert [law for i, law in enumerate(seen) if law not in seen[:i]] == [
        Law.FILTERED, Law.DRAWN, Law.GREEDY,
    ]  # fmt: skip


def test_generate_takes_one_a_row(tiny_config):
    target, drafter = make(tiny_config)
    rows = dict(temperature=[0, 1.3, 1.1], top_k=[0, 3, 9], top_p=[1, 1, 0.8], min_p=[0, 0, 0.05])
    prompts = [[5, 6], [5, 7], [5, 8]]
    found = generate(target, drafter, prompts, max_new_tokens=12, seed=[3, 4, 5], **rows)
    for i, prompt in enumerate(prompts):
        own = {name: values[i] for name, values in rows.items()}
        alone = generate(target, drafter, [prompt], max_new_tokens=12, seed=[3 + i], **own)
        assert alone.sequences[0] == found.sequences[i]
    few = generate(target, NgramDrafter(), prompts, max_new_tokens=12, temperature=2.0, top_k=1)
    assert few.sequences == generate(target, None, prompts, max_new_tokens=12).sequences


def test_bad_filters(tiny_config):
    target, _ = make(tiny_config)
    engine = Engine(target, None, max_batch=1, max_length=40)
    for law, error, message in (
        ({"top_k": -1}, ValueError, "add: top_k: got -1, expected 0"),
        ({"top_k": 2.5}, TypeError, "add: top_k: got 2.5, expected integers"),
        ({"top_p": 0}, ValueError, "add: top_p: got 0, expected above 0"),
        ({"top_p": float("nan")}, ValueError, "add: top_p: got nan"),
        ({"min_p": 1.5}, ValueError, "add: min_p: got 1.5, expected 0"),
    ):
        with pytest.raises(error, match=message):
            engine.add([5], 4, **law)
    assert engine.num_waiting == 0
    with pytest.raises(ValueError, match="generate: top_p: got 3 values, expected 1"):
        generate(target, None, [[5]], max_new_tokens=4, top_p=[1, 1, 1])


def test_command(folders):
    common = ["--target", folders[0], "--drafter", folders[1], "--device", "cpu", "-n", 8, "--json"]
    plain = json.loads(invoke("generate", "Hi", *common).stdout)["outputs"][0]["tokens"]
    hot = [*common, "--temperature", 5]
    drawn = json.loads(invoke("generate", "Hi", *hot).stdout)["outputs"][0]["tokens"]
    assert drawn != plain
    for option in (["--top-k", 1], ["--top-p", 1e-6], ["--min-p", 1]):
        found = json.loads(invoke("generate", "Hi", *hot, *option).stdout)["outputs"][0]["tokens"]
        assert found == plain
        said = json.loads(invoke("chat", *hot, *option, input="Hi\n").stdout)
        assert said["stats"]["tokens"] == 8
    assert invoke("generate", "Hi", *hot, "--top-p", 0).exit_code == 2
