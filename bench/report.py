"""The JSON of a run, and the table that a person reads."""

import datetime
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from domino_kernels import build_info

PROTOCOL = (
    "us = (t(graph of N) - t(graph of 1)) / (N - 1), N >= 16; operands rotated over >= 4x L2 or L2 "
    "flushed before each replay; median of 30 interleaved repeats with p20 and p80; a provider "
    "named eager: calls as the host launches them, in place of graphs"
)


def commit():
    """The commit of this checkout; where there is no git, that of the build."""
    git = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return build_info().commit or "unknown"


def header(suite, ceilings):
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "suite": suite,
        "gpu": properties.name,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "command": "python -m bench " + shlex.join(sys.argv[1:]),
        "protocol": PROTOCOL,
        "torch": torch.__version__,
        "cuda": build_info().cuda_version,
        "ceilings": ceilings,
    }


def row(case, provider, times, ok):
    return {
        "op": case.op,
        "case": case.case,
        "params": case.params | case.provider_params.get(provider, {}),
        "shape": case.shape,
        "batch": case.batch,
        "provider": provider.split("/")[0],
        **{key: round(value, 3) for key, value in times.items()},
        "bytes": case.bytes,
        "ok": ok,
    }


def label(case, provider):
    row = [f"{k}={v}" for k, v in case.params.items()]
    return " ".join([case.op, case.case, *row, f"batch={case.batch}", provider])


def print_header(run):
    gpu, c = run["gpu"], run["ceilings"]
    print(f"{run['suite']} on {gpu}, {run['date']}, commit {run['commit']}, torch {run['torch']}")
    print(f"ceilings: copy {c['copy_gb_s']:.0f} GB/s, bf16 {c['bf16_tflop_s']:.0f} TFLOP/s\n")
    print(
        f"{'op':<16}{'case':<14}{'batch':>6}{'provider':>20}{'us p50':>10}{'p20':>9}{'p80':>9}"
        f"{'single':>9}{'floor':>9}{'% floor':>8}  params shape"
    )


def floor_us(row, ceilings):
    """Time of moving the op's bytes once at the copy bandwidth measured in the same run."""
    return row["bytes"] / ceilings["copy_gb_s"] / 1e3


def print_row(r, ceilings):
    name = f"{r['op']:<16}{r['case']:<14}{r['batch']:>6}{r['provider']:>20}"
    if not r["ok"]:
        print(f"{name}   WRONG: not timed")
        return
    floor = floor_us(r, ceilings)
    notes = " ".join(f"{k}={v}" for part in (r["params"], r["shape"]) for k, v in part.items())
    print(
        f"{name}{r['us_p50']:>10.2f}{r['us_p20']:>9.2f}{r['us_p80']:>9.2f}{r['us_single']:>9.2f}"
        f"{floor:>9.2f}{100 * floor / r['us_p50']:>8.0f}  {notes}",
        flush=True,
    )


def print_stages(stages):
    for kernel, (launches, us) in stages.items():
        print(f"    {kernel:<32}{launches:>6.1f} launches{us:>10.2f} us a call", flush=True)


def merge(runs):
    """One run of the rows of several of the same suite, GPU model and commit, made in parallel."""
    first = runs[0]
    for name in ("suite", "gpu", "commit", "torch"):
        if len({run[name] for run in runs}) > 1:
            raise ValueError(f"bench: merge: got runs of {name} {[run[name] for run in runs]}")
    ceilings = {k: min(run["ceilings"][k] for run in runs) for k in first["ceilings"]}
    rows = [row for run in runs for row in run["rows"]]
    command = " + ".join(run["command"] for run in runs)
    return first | {"command": command, "ceilings": ceilings, "rows": rows}


def table(run):
    """Markdown: the medians of each op, model and case, a row a provider, a column a batch."""
    blocks = {}
    for r in run["rows"]:
        if r["ok"]:
            fixed = {k: v for k, v in r["params"].items() if k not in ("M", "recall")}
            model = fixed.pop("model", "")
            told = [f"{k}={v}" for k, v in fixed.items() if k not in ("num_drafts", "data")]
            name = " ".join([r["case"], r["provider"], *told])
            block = blocks.setdefault((r["op"], model), {})
            block.setdefault(name, {})[r["batch"]] = r["us_p50"]
    lines = []
    for (op, model), rows in blocks.items():
        batches = sorted({batch for row in rows.values() for batch in row})
        lines += ["", " | ".join([f"| {op} {model}", *map(str, batches)]) + " |"]
        lines.append("|---" * (len(batches) + 1) + "|")
        for name, row in rows.items():
            cells = [f"{row[b]:.1f}" if b in row else "" for b in batches]
            lines.append(" | ".join([f"| {name}", *cells]) + " |")
    return "\n".join(lines[1:])


def write(run, path):
    """Writes the run to `path` at once: a broken run leaves the old file alone."""
    temporary = f"{path}.tmp"
    Path(temporary).write_text(json.dumps(run, indent=1) + "\n")
    os.replace(temporary, path)
