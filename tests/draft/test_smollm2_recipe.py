"""The prompt recipe of models/smollm2-135m-domino, on made-up sources."""

import ast
import importlib
import json
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

RECIPE = Path(__file__).parents[2] / "models" / "smollm2-135m-domino"


@pytest.fixture(scope="module")
def recipe():
    if not RECIPE.is_dir():
        pytest.skip("the recipe is only in a checkout")
    sys.path.insert(0, str(RECIPE))
    try:
        names = ("card", "chat_prompts", "code_prompts", "math_prompts", "prompts")
        return SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(RECIPE))


def test_held_out_ids_follow_from_the_seed(recipe):
    rows = {"task_id": 0}, {"question": ""}, {"question_id": 0}
    made = recipe.prompts.held_out([rows[0]], [rows[1]] * 1319, [rows[2]])
    committed = json.loads(recipe.prompts.HELDOUT.read_text())
    assert committed["gsm8k_test_rows"] == made["gsm8k_test_rows"]
    assert len(set(committed["gsm8k_test_rows"])) == 400
    assert len(committed["human_eval"]) == 164 and len(committed["mt_bench"]) == 80


def test_composed_functions_parse_and_show_their_own_name(recipe):
    made = recipe.code_prompts.composed(200, random.Random(0))
    assert len(set(made)) == 200
    for text in made:
        function = ast.parse(text).body[-1]
        assert function.name in text.split('"""')[1] or "For [" in text
        assert "{" not in function.name


def test_composed_examples_are_true(recipe):
    made = recipe.code_prompts.composed(15000, random.Random(1))
    sums = [text for text in made if "the sum of the numbers." in text]
    shown = re.findall(r"(\[.*\])\)?(?: ==| ➞|\n   | the result should be) (-?\d+)", "".join(sums))
    assert len(shown) > 3
    assert all(sum(json.loads(value)) == int(total) for value, total in shown)


def test_harvest_drops_self_and_undocumented_functions(recipe):
    source = (
        "class A:\n    def area(self, width: int) -> int:\n"
        '        """Area of a square of the given width."""\n        return width\n'
        "def bare(x):\n    return x\n"
    )
    pairs = recipe.code_prompts.harvest([source, "not python ("], random.Random(0))
    assert pairs == [("def area(width: int) -> int:\n", "Area of a square of the given width.")]
    text = recipe.code_prompts.complete_function(*pairs[0])
    assert ast.get_docstring(ast.parse(text).body[0]) == pairs[0][1]


def test_rewritten_keeps_the_words_and_moves_numbers_and_names(recipe):
    question = "Emma has 16 pens worth $1,200 since 1995. John takes 3.5 of 16. Emma asks 1/2."
    moved = {recipe.math_prompts.rewritten(question, random.Random(i)) for i in range(20)}
    assert len(moved) == 20
    for text in moved:
        skeleton = (
            re.sub(r"\b(Emma|John)\b", "N", question).replace("16", "#").replace("1,200", "#")
        )
        found = re.fullmatch(
            re.escape(skeleton).replace(r"\#", r"([\d,]+)").replace("N", "([A-Z][a-z]+)"), text
        )
        assert found, text
        first, pens, _, second, same_pens, again = found.groups()
        assert pens == same_pens and first == again and first != second
        assert first in recipe.math_prompts.WOMEN and second in recipe.math_prompts.MEN


def test_templates_fill(recipe):
    rng = random.Random(0)
    counts = {"rewritten": 5, "problems": 800, "exercises": 400, "open": 50}
    records = recipe.math_prompts.build(["Ann has 3 cats. Bob has 4 dogs. How many?"], counts, rng)
    records += recipe.chat_prompts.build({"complete": 2000, "open": 100, "bare": 40}, rng)
    assert not [text for _, text in records if re.search(r"[{}]|\(empty\)", text)]
    assert [text for kind, text in records if kind == 0 and not text.strip()] == []
    assert "" in {text for kind, text in records if kind == 1}


def test_overlapping_prompts_are_dropped(recipe, monkeypatch):
    class Words:
        chat_template = "one that apply_chat_template stands for"

        def __init__(self):
            self.ids = {}

        def __call__(self, texts, add_special_tokens):
            ids = [[self.ids.setdefault(w, len(self.ids)) for w in t.split()] for t in texts]
            return {"input_ids": ids}

        def apply_chat_template(self, turns, tokenize, add_generation_prompt):
            return " ".join(["user", turns[0]["content"], "<|im_end|>"])

    words = Words()
    secret = " ".join(f"w{i}" for i in range(20))
    forbidden = set(map(tuple, recipe.prompts.grams(words([secret], False)["input_ids"][0])))
    thirteen, twelve = " ".join(secret.split()[4:17]), " ".join(secret.split()[4:16])
    kept, dropped = recipe.prompts.training_prompts(
        words,
        [(0, 1, f"a {thirteen} b"), (1, 1, f"a {twelve} b"), (0, 2, "x " * 400)],
        forbidden,
    )
    assert [(kind, domain) for kind, domain, _ in kept] == [(1, 1)]
    assert dropped == {("13-gram overlap", 1): 1, ("too long", 2): 1}


def test_the_card_is_what_its_files_say(recipe):
    page = (RECIPE / "README.md").read_text(encoding="utf-8")
    assert recipe.card.filled(page, RECIPE) == page, "run models/smollm2-135m-domino/card.py"


def test_the_card_shows_every_report(recipe, tmp_path):
    ratio = {"value": 2.5, "low": 2.25, "high": 2.75, "cycles": 9}
    row = {"accepted_length": ratio, "accepted_length_without_tails": ratio, "identical": 0.75,
           "near_tie_tokens": 3, "violation_tokens": 0, "tokens_per_second": 40.0,
           "speedup": 1.6}  # fmt: skip
    report = {
        "run": {"date": "2026-01-02", "device": "Some CPU", "threads": 2, "dtype": "float32",
                "torch": "2", "transformers": "5", "batch_size": 1, "max_new_tokens": 64,
                "num_drafts": {"ours": 7}, "command": "the command"},
        "sets": {"humaneval": {"prompts": 4, "tokens": 100, "tail_fraction": 0.171,
                               "target": {"tokens_per_second": 25.0},
                               "drafters": {"ours": row}, "differences": []}},
    }  # fmt: skip
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "cpu.json").write_text(json.dumps(report))
    run = {"arm": "dflash", "parameters": 2_500_000, "steps": 7, "seconds": 3.0, "config": {}}
    (tmp_path / "results" / "training-dflash.json").write_text(json.dumps(run))
    marks = "".join(f"<!-- begin {n} -->old<!-- end {n} -->\n" for n in recipe.card.PARTS)
    page = recipe.card.filled(marks, tmp_path)
    for shown in (
        "### Some CPU, float32, batch 1", "the command", "drafts a cycle: ours 7", "2026-01-02",
        "| humaneval | ours | 2.50 (2.25 to 2.75) |", "humaneval 17.1%",
        "| dflash | 2.50M | 7 | 3 |",
    ):  # fmt: skip
        assert shown in page, shown
    assert "old" not in page and recipe.card.filled(page, tmp_path) == page
    with pytest.raises(ValueError, match="results: expected one pair"):
        recipe.card.filled("<!-- begin drafter --><!-- end drafter -->", tmp_path)
