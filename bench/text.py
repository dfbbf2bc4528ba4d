"""The shipped drafter on held-out text, by prompt set: tokens/s against the target alone in the
same engine and process. `python -m bench.text --target FOLDER --prompts eval_prompts.jsonl`

The prompts of a set are the first of the file that `models/smollm2-135m-domino/prompts.py` writes,
so ids are fixed beforehand. Seconds hold the forwards over the prompts and the host's work; graphs
are captured before the clock starts.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from pathlib import Path

import torch
from domino_draft import DominoDrafter, Engine
from domino_draft.loading import load_target
from domino_draft.throughput import markdown, measure

from bench import report

DRAFTER = Path(__file__).parent.parent / "models" / "smollm2-135m-domino"


def first_token_ms(target, drafter, prompts, **settings):
    """Median milliseconds from `add` to a request's first token, one request at a time."""
    longest = max(map(len, prompts)) + 1
    engine = Engine(target, drafter, max_batch=1, max_length=longest, **settings)
    times = []
    for prompt in [*prompts[:2], *prompts]:  # the first ones warm up
        torch.cuda.synchronize()
        start = time.perf_counter()
        engine.add(prompt, 1)
        engine.step()  # reads the token
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:])


def main():
    parser = argparse.ArgumentParser(prog="python -m bench.text", description=__doc__)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", default=DRAFTER)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--limit", type=int, default=16, help="prompts a set; a batch's at least")
    parser.add_argument("--batch", type=int, nargs="*", default=[1])
    parser.add_argument("--drafts", nargs="*", default=["15", "7", "auto"])
    parser.add_argument("-n", "--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    sets: dict[str, list] = {}
    for line in Path(options.prompts).read_text().splitlines():
        row = json.loads(line)
        if row.get("ids"):
            sets.setdefault(row["set"], []).append(row["ids"])
    dtype = getattr(torch, options.dtype)
    target = load_target(options.target, device=options.device, dtype=options.dtype)
    drafter = DominoDrafter.from_pretrained(options.drafter, dtype, options.device)
    asked = {f"d{k}": k if k == "auto" else int(k) for k in options.drafts}
    run = report.header("text", {}) | {
        "command": "python -m bench.text " + shlex.join(sys.argv[1:]),
        "protocol": " ".join(__doc__.split("\n\n")[1].split()),
        "sets": {},
    }
    for name, prompts in sets.items():
        found = {}
        for batch in options.batch:
            one = measure(
                target, dict.fromkeys(asked, drafter), prompts[: max(options.limit, batch)],
                batch_sizes=[batch], max_new_tokens=options.max_new_tokens, num_drafts=asked,
            )  # fmt: skip
            found = one | {"rows": found.get("rows", []) + one["rows"]}
        few = prompts[:8]
        found["first_token_ms"] = {
            "stock": first_token_ms(target, None, few, fused=False),
            "target alone": first_token_ms(target, None, few),
            "drafter": first_token_ms(target, drafter, few),
        }
        print(name, "first token, ms:", found["first_token_ms"])
        run["sets"][name] = found
        print(f"{name}\n{markdown(found)}", flush=True)
        if options.json:  # as far as it has come
            Path(options.json).write_text(json.dumps(run, indent=1) + "\n")


if __name__ == "__main__":
    main()
