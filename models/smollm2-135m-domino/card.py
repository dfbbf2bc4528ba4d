"""Write the measured parts of this folder's README.md from results/*.json and training.json.

    python models/smollm2-135m-domino/card.py [--check]

A part stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``. --check writes nothing and
fails where the page is not what the files say.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from domino_draft.evaluate import markdown

FOLDER = Path(__file__).resolve().parent
# Fields of training.json's config that describe a place and not the training.
PLACES = {"target", "data", "output", "resume", "save_every", "log_every", "eval_every"}


def _load(path):
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _table(rows, head):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def drafter_part(folder):
    """Shape of the drafter, from config.json and the size of its weights."""
    config = _load(folder / "config.json")
    if config is None:
        return ""
    training, inner = _load(folder / "training.json") or {}, config["dflash_config"]
    size = (folder / "model.safetensors").stat().st_size
    parameters = training.get("parameters")
    rows = [
        ("parameters", f"{parameters / 1e6:.2f}M" if parameters else "not recorded"),
        ("file", f"{size / 1e6:.1f} MB, {config['dtype']}"),
        ("layers, width, MLP", f"{config['num_hidden_layers']}, {config['hidden_size']}, "
         f"{config['intermediate_size']}"),
        ("target layers read", ", ".join(map(str, inner["target_layer_ids"]))),
        ("GRU width, rank", f"{inner.get('gru_hidden_dim', '-')}, {inner.get('emb_dim', '-')}"),
        ("block", f"{config['block_size']} slots, shift_label {inner['shift_label']}"),
        ("mask token id", inner["mask_token_id"]),
    ]  # fmt: skip
    return _table(rows, ("", ""))


def results_part(folder):
    """One section an evaluation report in results/, biggest machine last by file name."""
    parts = []
    for path in sorted((folder / "results").glob("*.json")):
        report = _load(path)
        if not {"run", "sets"} <= report.keys():
            continue
        run = report["run"]
        drafts = ", ".join(f"{name} {count}" for name, count in run["num_drafts"].items())
        # The page compares the first drafter with the others; the report holds every pair.
        first = next(iter(run["num_drafts"]))
        for found in report["sets"].values():
            found["differences"] = [d for d in found["differences"] if d["first"] == first]
        parts.append(
            f"### {run['device']}, {run['dtype']}, batch {run['batch_size']}\n\n"
            f"{run['date']}, torch {run['torch']}, transformers {run['transformers']}, "
            f"{run['threads']} threads; {run['max_new_tokens']} new tokens at most; "
            f"drafts a cycle: {drafts}. Report: `results/{path.name}`. Command:\n\n"
            f"```\n{run.get('command', 'domino_draft.evaluate.evaluate')}\n```\n\n"
            f"{markdown(report)}\n\n{_tails(report)}"
        )
    return "\n\n".join(parts)


def _tails(report):
    shares = ", ".join(
        f"{name} {100 * found['tail_fraction']:.1f}%" for name, found in report["sets"].items()
    )
    return f"Output tokens of the target in repetitive tails: {shares}."


def training_part(folder):
    """Options and outcome of the shipped run, and of the arms that it is compared with."""
    runs = [_load(folder / "training.json")]
    runs += [_load(path) for path in sorted((folder / "results").glob("training-*.json"))]
    runs = [run for run in runs if run]
    if not runs:
        return ""
    config = {k: v for k, v in runs[0]["config"].items() if k not in PLACES}
    rows = [
        (run["arm"], f"{run['parameters'] / 1e6:.2f}M", run["steps"], f"{run['seconds']:.0f}")
        for run in runs
    ]
    arms = _table(rows, ("arm", "parameters", "steps", "seconds"))
    options = ", ".join(f"`{name}={value}`" for name, value in config.items())
    return f"{arms}\n\nOptions of the shipped run: {options}."


def data_part(folder):
    """Counts of prompts and responses, from what the recipe printed."""
    parts = []
    prompts = _load(folder / "results" / "prompts.json")
    if prompts:
        rows = list(prompts["prompts"].items())
        parts.append(_table(rows, ("kind", "prompts")))
        dropped = ", ".join(f"{why}: {count}" for why, count in prompts["dropped"].items())
        parts.append(
            f"{prompts['distinct']} distinct prompts, {prompts['tokens']} tokens. "
            f"Dropped: {dropped}."
        )
    responses = _load(folder / "results" / "responses.json")
    if responses:
        rows = [(name.replace("_", " "), value) for name, value in responses.items()]
        parts.append(_table(rows, ("responses", "")))
    return "\n\n".join(parts)


PARTS = {
    "drafter": drafter_part,
    "results": results_part,
    "training": training_part,
    "data": data_part,
}


def filled(text, folder):
    """`text` with every part replaced by what the files in `folder` say."""
    for name, write in PARTS.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"card: {name}: expected one pair of begin and end marks")
        body = write(folder)
        block = f"{begin}\n{body}\n{end}" if body else f"{begin}\n{end}"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.S)
        text = pattern.sub(lambda _, block=block: block, text)
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    page = FOLDER / "README.md"
    old = page.read_text(encoding="utf-8")
    new = filled(old, FOLDER)
    if args.check:
        sys.exit(0 if new == old else f"{page} is not what its files say: run card.py")
    page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
