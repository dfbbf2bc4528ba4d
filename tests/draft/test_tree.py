"""generate(tree=...): the target's own text at temperature 0, its law otherwise, for every rule."""

from itertools import pairwise

import pytest
import torch
from domino_draft import DominoDrafter, Engine, NgramDrafter, Target, TreeOptions, generate
from domino_draft.tree import add_branch

from domino_kernels.testing.losslessness import g_test

from .conftest import tiny_model

PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8], [11, 12]]
RULES = "match", "target_only", "rrsw", "traversal"


@pytest.fixture
def pair(tiny_config):
    torch.manual_seed(1)
    return Target(tiny_model("Llama")), DominoDrafter(tiny_config()).eval()


def shape(rule, **changes):
    return TreeOptions(rule=rule, nodes=9, width=2, children=3, pool=20, **changes)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("shift_label", [True, False])
def test_greedy_text_is_the_targets(family, shift_label, tiny_config):
    target = Target(tiny_model(family))
    torch.manual_seed(1)
    drafter = DominoDrafter(tiny_config(shift_label=shift_label)).eval()
    keywords = dict(max_new_tokens=25, stop_token_ids=())
    expected = generate(target, None, PROMPTS, **keywords).sequences
    for options in (shape(None), shape("greedy", lookup=3), TreeOptions(nodes=30, pool=None)):
        result = generate(target, drafter, PROMPTS, tree=options, **keywords)
        assert result.sequences == expected
        assert result.finish == ["length"] * 4


def test_sliding_window(tiny_config):
    model = tiny_model("Qwen3", use_sliding_window=True, sliding_window=6, max_window_layers=2)
    target = Target(model)
    torch.manual_seed(1)
    drafter = DominoDrafter(tiny_config()).eval()
    keywords = dict(max_new_tokens=25, stop_token_ids=())
    expected = generate(target, None, PROMPTS, **keywords).sequences
    assert generate(target, drafter, PROMPTS, tree=shape(None), **keywords).sequences == expected


def test_a_perfect_drafter_is_accepted_to_the_end(pair):
    """Candidates that are the target's own: the cache after a path is that of plain decoding."""
    target, drafter = pair
    keywords = dict(max_new_tokens=30, stop_token_ids=())
    expected = generate(target, None, PROMPTS, **keywords).sequences

    class Oracle(DominoDrafter):
        pass

    from domino_draft import tree as module

    original = module.TreeLoop._draft

    def draft(loop):
        """The true next tokens as a branch among the tree's own candidates, deep in the indices."""
        loop.lookup = type("Lookup", (), {"propose": propose(loop), "select": lambda *_: None})()
        loop.options = module.replace(loop.options, lookup=3)
        return original(loop)

    def propose(loop):
        def call(self_or_batch, *arguments):
            rows = []
            for b, row in enumerate(loop.rows):
                done = loop.emitted[b]
                ahead = expected[row][done : done + 3]
                rows.append(ahead + [-1] * (3 - len(ahead)))
            return torch.tensor(rows)

        return staticmethod(call)

    module.TreeLoop._draft = draft
    try:
        result = generate(target, drafter, PROMPTS, tree=shape(None), **keywords)
    finally:
        module.TreeLoop._draft = original
    assert result.sequences == expected
    assert result.stats.accepted_length > 3.5


@pytest.mark.parametrize("rule", RULES)
def test_rows_depend_on_themselves_alone(rule, pair):
    """Batch, order and what the other rows do: none of it changes a row's text."""
    target, drafter = pair
    keywords = dict(max_new_tokens=12, stop_token_ids=(), tree=shape(rule))
    temperature, seed = [0.9, 0.0, 1.3, 0.7], [3, 4, 5, 6]
    whole = generate(target, drafter, PROMPTS, temperature=temperature, seed=seed, **keywords)
    for row in range(4):
        alone = generate(
            target,
            drafter,
            PROMPTS[row : row + 1],
            temperature=temperature[row : row + 1],
            seed=seed[row : row + 1],
            **keywords,
        )
        assert alone.sequences[0] == whole.sequences[row]
    plain = generate(target, None, PROMPTS[1:2], max_new_tokens=12, stop_token_ids=())
    assert whole.sequences[1] == plain.sequences[0]  # temperature 0


def test_match_is_the_text_without_drafts(pair):
    """Seeded sampling by position: trees of any shape give the same text."""
    target, drafter = pair
    keywords = dict(max_new_tokens=20, stop_token_ids=(), temperature=0.8, seed=5)
    texts = [
        generate(target, drafter, PROMPTS, tree=options, **keywords).sequences
        for options in (
            shape("match"),
            shape("match", depth=1),
            TreeOptions(rule="match", nodes=40, children=6, lookup=4),
        )
    ]
    assert texts[0] == texts[1] == texts[2]


def from_engine(target, drafter, options, temperature, **settings):
    """The same prompts through an engine of three rows whose cycle is the one that is captured."""
    engine = Engine(target, drafter, max_batch=3, max_length=40, tree=options, **settings)
    for row, prompt in enumerate(PROMPTS):
        engine.add(prompt, 25, temperature=temperature, seed=3 + row, stop_token_ids=())
    texts = [[] for _ in PROMPTS]
    for chunk in engine:
        assert chunk.error is None
        texts[chunk.request] += chunk.tokens
    return texts, engine.mode


@pytest.mark.parametrize("rule", [None, *RULES])
@pytest.mark.parametrize("family", ["Llama", "Qwen3-sliding"])
def test_cycles_of_trees_in_fused_layers(rule, family, tiny_config):
    sliding = dict(use_sliding_window=True, sliding_window=6, max_window_layers=2)
    name, _, form = family.partition("-")
    target = Target(tiny_model(name, **(sliding if form else {})))
    torch.manual_seed(1)
    drafter = DominoDrafter(tiny_config()).eval()
    temperature = 0.0 if rule is None else 0.9
    expected = generate(
        target, drafter, PROMPTS, max_new_tokens=25, stop_token_ids=(), tree=shape(rule),
        temperature=temperature, seed=3,
    ).sequences  # fmt: skip
    assert from_engine(target, drafter, shape(rule), temperature, fused=True)[0] == expected


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [9, 40])
@pytest.mark.parametrize("rule", [None, "match"])
def test_captured_cycles_of_trees(rule, nodes, tiny_config):
    """Greedy text is the target's; with "match" it is that of the seed, whatever is drafted."""
    target = Target(tiny_model("Llama").cuda())
    torch.manual_seed(1)
    drafter = DominoDrafter(tiny_config()).eval().cuda()
    temperature = 0.0 if rule is None else 0.9
    options = TreeOptions(rule=rule, nodes=nodes, width=4, children=4, pool=20)
    texts, mode = from_engine(target, drafter, options, temperature)
    assert mode == "captured"
    if rule is None:
        expected = generate(target, None, PROMPTS, max_new_tokens=25, stop_token_ids=()).sequences
    else:
        other = TreeOptions(rule=rule, depth=1, nodes=2)
        expected = from_engine(target, drafter, other, temperature)[0]
    assert texts == expected


def test_engine_refuses(pair):
    target, drafter = pair
    settings = dict(max_batch=1, max_length=20, fused=True)
    with pytest.raises(ValueError, match="got one with num_drafts 2 and lookup 0"):
        Engine(target, drafter, num_drafts=2, tree=shape(None), **settings)
    with pytest.raises(ValueError, match="expected the fused layers"):
        Engine(target, drafter, tree=shape(None), **(settings | {"fused": False}))
    engine = Engine(target, drafter, tree=shape("greedy"), **settings)
    with pytest.raises(ValueError, match="expected 0 with trees of rule 'greedy'"):
        engine.add([1], 4, temperature=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_law(rule, pair):
    """Pairs of tokens of 20,000 runs against the target's own law; three blocks at most."""
    target, drafter = pair
    prompt, runs = [5, 9, 2], 20_000
    with torch.no_grad():
        first = target.model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
        rows = torch.tensor([[*prompt, x] for x in range(61)])
        second = target.model(rows).logits[:, -1].double().softmax(-1)
    law = (first[:, None] * second).flatten().numpy()
    counts = torch.zeros(61 * 61, dtype=torch.int64)
    for start in range(0, runs, 1000):
        result = generate(
            target,
            drafter,
            [prompt] * 1000,
            max_new_tokens=3,
            temperature=1.0,
            seed=start,
            stop_token_ids=(),
            tree=shape(rule),
        )
        pairs = torch.tensor([s[:2] for s in result.sequences])
        counts += torch.bincount(pairs[:, 0] * 61 + pairs[:, 1], minlength=61 * 61)
    assert g_test(counts.numpy(), law / law.sum()).p_value > 1e-9


def test_stop_tokens_and_limits(pair):
    target, drafter = pair
    expected = generate(target, None, PROMPTS, max_new_tokens=25, stop_token_ids=())
    stop = expected.sequences[0][7]
    keywords = dict(max_new_tokens=25, stop_token_ids=(stop,))
    plain = generate(target, None, PROMPTS, **keywords)
    tree = generate(target, drafter, PROMPTS, tree=shape(None), **keywords)
    assert tree.sequences == plain.sequences and tree.finish == plain.finish
    one = generate(target, drafter, PROMPTS, tree=shape(None), max_new_tokens=1)
    assert [len(s) for s in one.sequences] == [1] * 4


def test_add_branch():
    tokens = torch.tensor([[4, 5, 6, 7], [4, 5, 6, 7]])
    parents = torch.tensor([[-1, -1, 0, 1], [-1, -1, 0, 1]], dtype=torch.int32)
    scores = torch.tensor([[-1.0, -2, -3, -4]] * 2)
    branch = torch.tensor([[5, 7, 9], [8, 4, -1]])
    tokens, parents, scores = add_branch(tokens, parents, scores, branch)
    # row 0: 5 and 7 are there (candidates 1 and 3), 9 hangs on 3; row 1: two on the root
    assert parents[0].tolist() == [-1, -1, 0, 1, 4, 5, 3]
    assert scores[0].tolist() == [-1.0, 0.0, -3.0, 0.0, -torch.inf, -torch.inf, 0.0]
    assert parents[1].tolist() == [-1, -1, 0, 1, -1, 4, 6]
    assert scores[1].tolist() == [-1.0, -2.0, -3.0, -4.0, 0.0, 0.0, -torch.inf]
    assert tokens[0, 4:].tolist() == [5, 7, 9]


BAD = {
    "rule": (dict(rule="medusa"), ValueError, r"TreeOptions: rule: got 'medusa'"),
    "nodes": (dict(nodes=1), ValueError, r"TreeOptions: nodes: got 1, expected 2 to 1024"),
    "lookup": (dict(rule="rrsw", lookup=3), ValueError, r"TreeOptions: lookup, pool"),
    "pool": (dict(rule="traversal", pool=None), ValueError, r"TreeOptions: lookup, pool"),
}


@pytest.mark.parametrize("name", BAD)
def test_options(name):
    keywords, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        TreeOptions(**keywords)


@pytest.mark.parametrize("width, children", [(4, 1), (8, 2), (3, 4)])
def test_levels_have_no_more_paths_than_children_before(width, children, pair):
    options = TreeOptions(nodes=30, width=width, children=children, pool=20)
    widths = options.widths(4)
    assert widths[0] == 1
    assert all(b == min(width, a * children) for a, b in pairwise(widths))
    keywords = dict(max_new_tokens=8, stop_token_ids=())
    expected = generate(pair[0], None, PROMPTS, **keywords).sequences
    assert generate(*pair, PROMPTS, tree=options, **keywords).sequences == expected


def test_errors(pair):
    target, drafter = pair
    keywords = dict(max_new_tokens=3)
    with pytest.raises(
        TypeError, match=r"tree: got NgramDrafter, expected a drafter with a Domino"
    ):
        generate(target, NgramDrafter(), PROMPTS, tree=shape(None), **keywords)
    with pytest.raises(ValueError, match=r"tree: got rule 'greedy' and a temperature"):
        generate(target, drafter, PROMPTS, tree=shape("greedy"), temperature=1.0, **keywords)
    with pytest.raises(ValueError, match=r"tree: got depth 9, expected at most"):
        generate(target, drafter, PROMPTS, tree=shape(None, depth=9), **keywords)
    with pytest.raises(ValueError, match=r"tree: got 2048 children a level, expected at most"):
        generate(target, drafter, PROMPTS, tree=TreeOptions(width=64, children=32), **keywords)
    with pytest.raises(ValueError, match=r"num_drafts: got 3 and a tree"):
        generate(target, drafter, PROMPTS, tree=shape(None), num_drafts=3, **keywords)


def test_command_line_and_evaluate(folders, tmp_path):
    """evaluate with a chain and a tree of one drafter, side by side."""
    import json

    from click.testing import CliRunner
    from domino_draft.cli import main

    prompts = tmp_path / "prompts.jsonl"
    lines = [{"set": "a", "id": str(i), "text": "", "ids": [3 + i, 4, 5]} for i in range(2)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    target, drafter = folders
    report = tmp_path / "report.json"
    arguments = ["evaluate", "--prompts", str(prompts), "--target", target, "--device", "cpu"]
    arguments += ["--drafter", f"chain={drafter}@2", "--drafter", f"tree={drafter}@tree9"]
    result = CliRunner().invoke(main, [*arguments, "-n", "12", "--json", str(report)])
    assert result.exit_code == 0, result.output
    found = json.loads(report.read_text())
    assert found["run"]["trees"]["tree"]["nodes"] == 9 and found["run"]["num_drafts"] == {
        "chain": 2
    }
    assert found["sets"]["a"]["drafters"]["tree"]["identical"] == 1.0
    assert all(p["counts"]["tree"][0] > 0 for p in found["prompts"])
    bad = CliRunner().invoke(main, [*arguments, "--drafter", f"{drafter}@tree1"])
    assert bad.exit_code == 2 and "nodes: got 1" in bad.output
