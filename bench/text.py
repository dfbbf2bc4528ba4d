"""The shipped drafter on held-out text, by prompt set: tokens/s against the target alone in the
same engine and process. `python -m bench.text --target FOLDER --prompts eval_prompts.jsonl`

The prompts of a set are the first of the file that `models/smollm2-135m-domino/prompts.py` writes,
so ids are fixed beforehand. Seconds hold the forwards over the prompts and the host's work. Each
set is run whole twice before the clock starts: graphs are captured then, and "auto" has seen it.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from pathlib import Path

import torch
from domino_draft import DominoDrafter, Engine, TreeOptions
from domino_draft.loading import load_target
from domino_draft.losslessness import greedy_report
from domino_draft.throughput import make_engines, markdown, measure

from bench import report

DRAFTER = Path(__file__).parent.parent / "models" / "smollm2-135m-domino"


def first_token_ms(engines, prompts, repeats=6):
    """Milliseconds from `add` to a request's first token, one request at a time, the engines in
    turn, to and fro: of each the median and the quartiles around it."""
    times, order = {name: [] for name in engines}, list(engines)
    for turn in range(2 + repeats):  # the first warms up, the second captures
        order.reverse()  # of three each then follows each other one as often
        for prompt in prompts:
            for name in order:
                engine = engines[name]
                torch.cuda.synchronize()
                start = time.perf_counter()
                request = engine.add(prompt, 2)
                engine.step()  # reads the token
                if turn >= 2:
                    times[name].append((time.perf_counter() - start) * 1e3)
                engine.cancel(request)
    cuts = {name: statistics.quantiles(found) for name, found in times.items()}
    return {name: {"median": m, "quartiles": [low, high]} for name, (low, m, high) in cuts.items()}


def drafts(text):
    if text.startswith("tree"):
        return TreeOptions(nodes=int(text.removeprefix("tree")))
    return text if text == "auto" else int(text)


def main():
    parser = argparse.ArgumentParser(prog="python -m bench.text", description=__doc__)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", default=DRAFTER)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--limit", type=int, default=16, help="prompts a set; a batch's at least")
    parser.add_argument("--batch", type=int, nargs="*", default=[1])
    parser.add_argument(
        "--drafts", nargs="*", default=["15", "auto", "tree32"], help="a number, auto, or treeN"
    )
    parser.add_argument("-n", "--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sets", nargs="*", help="of the file, in this order; default: all")
    parser.add_argument(
        "--judge", type=int, default=2, metavar="N",
        help="texts of each set, batch and arm whose every token is checked (`greedy_report`)",
    )  # fmt: skip
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    sets: dict[str, list] = {}
    for line in Path(options.prompts).read_text().splitlines():
        row = json.loads(line)
        if row.get("ids"):
            sets.setdefault(row["set"], []).append(row["ids"])
    sets = {name: sets[name] for name in options.sets or sets}
    dtype = getattr(torch, options.dtype)
    target = load_target(options.target, device=options.device, dtype=options.dtype)
    drafter = DominoDrafter.from_pretrained(options.drafter, dtype, options.device)
    asked = {f"d{k}": drafts(k) for k in options.drafts}
    run = report.header("text", {}) | {
        "command": "python -m bench.text " + shlex.join(sys.argv[1:]),
        "protocol": " ".join(__doc__.split("\n\n")[1].split()),
        "sets": {},
    }
    longest = max(len(p) for prompts in sets.values() for p in prompts) + options.max_new_tokens
    drafters = dict.fromkeys(asked, drafter)
    engines = make_engines(
        target, drafters, max_batch=max(options.batch), max_length=longest, num_drafts=asked
    )
    begun = time.perf_counter()

    def told(name, what):
        print(f"[{time.perf_counter() - begun:.1f} s] {name}\n{what}", flush=True)
        if options.json:  # as far as it has come
            Path(options.json).write_text(json.dumps(run, indent=1) + "\n")

    def first_tokens():
        room = {"max_batch": 1, "max_length": longest + 2}
        singles = {
            "stock": Engine(target, None, fused=False, **room),
            "target alone": Engine(target, None, **room),
            "drafter": Engine(target, drafter, **room),
        }
        for name, prompts in sets.items():
            run["sets"][name]["first_token_ms"] = first_token_ms(singles, prompts[:8])
            told(name, run["sets"][name]["first_token_ms"])

    outputs = {name: {} for name in sets}
    for batch in options.batch:
        for name, prompts in sets.items():
            one = measure(
                target, drafters, prompts[: max(options.limit, batch)], batch_sizes=[batch],
                max_new_tokens=options.max_new_tokens, num_drafts=asked, engines=engines,
                repeats=options.repeats, outputs=outputs[name],
            )  # fmt: skip
            held = run["sets"].setdefault(name, one | {"rows": []})
            held["rows"] += one["rows"]
            told(name, markdown(one))
        if batch == options.batch[0]:
            first_tokens()
    for name, prompts in sets.items():
        for row in run["sets"][name]["rows"]:
            texts = outputs[name][row["batch"], row["drafter"]]
            verdicts = [
                greedy_report(target, prompt, text)
                for prompt, text in zip(prompts, texts[: options.judge])
            ]
            row["judged"] = len(verdicts)
            row["near_ties"] = sum(v.near_ties for v in verdicts)
            row["violations"] = sum(v.violations for v in verdicts)
            told(f"{name}, batch {row['batch']}, {row['drafter']}", verdicts and str(verdicts[0]))


if __name__ == "__main__":
    main()
