"""`domino-draft bench`: its figures against the decoding itself, its files, its errors."""

import json
import sys

import pytest
from domino_draft import DominoDrafter, NgramDrafter, Target, TreeOptions, generate, throughput
from domino_draft.smollm2 import chat_prompt

from .conftest import tiny_model
from .test_cli import invoke

PROMPTS = [[5, 17, 3, 5, 17], [1], [40, 2, 8, 33, 21, 9, 60, 7], [12, 12, 30, 4, 4]]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_figures(temperature):
    target, seen = Target(tiny_model("Llama")), []
    report = throughput.measure(
        target, {"lookup": NgramDrafter()}, PROMPTS, batch_sizes=(1, 3), max_new_tokens=12,
        temperature=temperature, seed=6, num_drafts={"lookup": 5}, repeats=2,
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert seen == [(i + 1, 8) for i in range(8)]
    rows = report["rows"]
    assert [(row["batch"], row["drafter"]) for row in rows] == [
        (1, "target"), (1, "lookup"), (3, "target"), (3, "lookup"),
    ]  # fmt: skip
    done = generate(
        target, NgramDrafter(), PROMPTS, max_new_tokens=12, num_drafts=5,
        temperature=temperature, seed=6,
    )  # fmt: skip
    lengths = [n for row in done.stats.accepted for n in row]
    for row in rows:
        assert row["tokens"] == 48 and row["seconds"] > 0
        assert row["tokens_per_second"] == pytest.approx(48 / row["seconds"])
        base = next(r for r in rows if r["batch"] == row["batch"])
        assert row["speedup"] == row["tokens_per_second"] / base["tokens_per_second"]
        assert row["identical"] == (None if temperature else 1.0)
        if row["drafter"] == "lookup":
            assert row["accepted_length"] == pytest.approx(done.stats.accepted_length)
            assert row["accepted"] == [lengths.count(n) for n in range(1, max(lengths) + 1)]
        else:
            assert row["accepted"] == [44] and row["accepted_length"] == 1
    assert rows[0]["cycles"] == 44 and rows[2]["cycles"] < 44
    assert report["run"]["num_drafts"] == {"lookup": 5} and report["run"]["repeats"] == 2
    with pytest.raises(ValueError, match="got the name 'target'"):
        throughput.measure(target, {"target": NgramDrafter()}, PROMPTS)


def test_prompts_of_every_form(tmp_path, tokenizer):
    file = tmp_path / "prompts.jsonl"
    turns = [{"role": "user", "content": "Hi"}]
    lines = [{"ids": [3, 4]}, {"text": "Hi"}, {"prompt": "Hi"}, {"messages": turns}]
    lines.insert(1, {"text": "second turn", "after": "x", "ids": None})
    file.write_text("\n\n".join(map(json.dumps, lines)))
    chat, raw = chat_prompt(tokenizer, "Hi"), tokenizer("Hi")["input_ids"]
    assert throughput.load_prompts(file, tokenizer, True, None) == [[3, 4], chat, chat, chat]
    assert throughput.load_prompts(file, tokenizer, False, 3) == [[3, 4], raw, raw]
    for text, message in (
        ('{"ids": [1]}\n{', r"prompts.jsonl:2: got no JSON"),
        ('{"text": ""}', r"prompts.jsonl:1: got none of ids"),
        ("[1, 2]", r"prompts.jsonl:1: got none of ids"),
        ("\n", "got no prompt"),
        ('{"ids": [1, "2"]}', r"prompts.jsonl:1: ids: got \[1, '2'\], expected token ids"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            throughput.load_prompts(file, tokenizer, True, None)


def test_command(folders, tmp_path):
    pytest.importorskip("matplotlib")
    target, drafter = folders
    (tmp_path / "p.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n{"text": "three"}\n')
    done = invoke(
        "bench", tmp_path / "p.jsonl", "--target", target, "--drafter", f"ours={drafter}",
        "--drafter", "ngram@3", "--drafter", f"auto={drafter}@auto", "--limit", 2,
        "--batch-size", 1, "--batch-size", 2, "-n", 5, "--device", "cpu",
        "--json", tmp_path / "out.json", "--plot", tmp_path / "out.svg",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["run"]["prompts"] == 2 and len(report["rows"]) == 8
    assert report["run"]["num_drafts"] == {"ours": 3, "ngram@3": 3, "auto": "auto"}
    table = done.stdout.splitlines()
    assert len(table) == 10 and table[2].startswith("| 1 | target alone | 10 |")
    assert "| 2 | ngram@3 | 10 |" in table[8] and table[8].endswith("| 100.0% |")
    drawn = (tmp_path / "out.svg").read_text()
    assert drawn.startswith("<?xml") and drawn.count("line2d") > 8


def test_a_line_separator_in_a_prompt_is_text(tokenizer, tmp_path):
    from domino_draft import evaluate

    text = "a\u2028b"
    row = {"set": "s", "id": "a", "text": text, "ids": [3]}
    (tmp_path / "p.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n")
    assert throughput.load_prompts(tmp_path / "p.jsonl", tokenizer, True, None) == [[3]]
    assert [row.text for row in evaluate.load_prompts(tmp_path / "p.jsonl")] == [text]


def test_a_plot_that_breaks_off_leaves_the_old_one(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure

    def half(self, path):
        path.write_text("half")
        raise OSError("no space left")

    monkeypatch.setattr(figure, "savefig", half)
    (tmp_path / "a.svg").write_text("old")
    row = {"batch": 1, "drafter": throughput.TARGET, "tokens_per_second": 1.0, "accepted": []}
    report = {"run": {"device": "cpu", "dtype": "float32", "prompts": 1}, "rows": [row]}
    with pytest.raises(OSError, match="no space"):
        throughput.plot(report, tmp_path / "a.svg")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.svg", "old")]


def test_a_prompt_that_does_not_fit_is_named(tiny_config):
    target = Target(tiny_model("Llama"))
    with pytest.raises(ValueError, match=r"measure: prompts\[1\]: got 250 tokens .*at most 256"):
        throughput.measure(target, {}, [[5], [5] * 250], max_new_tokens=7)
    report = throughput.measure(target, {}, [[5], [5] * 249], max_new_tokens=7)
    assert report["rows"][0]["tokens"] == 14


def test_trees_need_the_fused_layers(folders, tmp_path):
    target, drafter = folders
    (tmp_path / "p.jsonl").write_text('{"text": "one"}\n')
    done = invoke(
        "bench", tmp_path / "p.jsonl", "--target", target, "--drafter", f"{drafter}@tree8",
        "--device", "cpu",
    )  # fmt: skip
    assert done.exit_code == 2 and "got a tree, expected @K: trees need a GPU" in done.stderr


@pytest.mark.gpu
def test_figures_of_trees(tiny_config):
    target = Target(tiny_model("Llama").cuda())
    drafter = DominoDrafter(tiny_config()).cuda().eval()
    tree = TreeOptions(nodes=9, width=2, children=3, pool=20)
    report = throughput.measure(
        target, {"tree": drafter}, PROMPTS, batch_sizes=(2,), max_new_tokens=12,
        num_drafts={"tree": tree},
    )  # fmt: skip
    alone, drafted = report["rows"]
    assert alone["tokens"] == drafted["tokens"] == 48 and drafted["identical"] == 1.0
    assert report["run"]["num_drafts"]["tree"]["nodes"] == 9


def test_a_plot_that_cannot_be_drawn_is_refused_first(folders, tmp_path, monkeypatch):
    (tmp_path / "p.jsonl").write_text('{"text": "one"}\n')
    command = ["bench", tmp_path / "p.jsonl", "--target", tmp_path / "not-looked-at", "--plot"]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        patch.setitem(sys.modules, "matplotlib.figure", None)
        done = invoke(*command, tmp_path / "x.png")
    assert done.exit_code == 1 and "pip install matplotlib" in done.stderr
    pytest.importorskip("matplotlib")
    done = invoke(*command, tmp_path / "x.docx")
    assert done.exit_code == 1 and "got a file ending 'docx'" in done.stderr
    assert invoke("bench", tmp_path / "none.jsonl").exit_code == 2
