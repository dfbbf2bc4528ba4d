"""python -m bench.plot RUN.json OUT.svg: draft_chain over the batch, log axes. Needs matplotlib."""

import argparse
import json
from pathlib import Path

from bench.report import floor_us


def name_of(row):
    """A peer's name, or ours with its mode."""
    if row["provider"] != "ours":
        return row["provider"]
    backend = "" if row["params"].get("backend", "cuda") == "cuda" else " in Triton"
    table = "" if row["params"].get("table", True) else ", no table"
    return f"ours{backend}, {row['case']}{table}"


def series(run, op="draft_chain"):
    """{model: {provider or mode of ours: [(batch, us)], "floor": [(batch, us)]}} of an op's rows.

    The floor is that of case exact: its bytes over the copy bandwidth of the run. Rows with
    restarts have inputs of their own and are left out.
    """
    found = {}
    for row in run["rows"]:
        if row["op"] != op or not row["ok"] or row["params"].get("restarts"):
            continue
        model = found.setdefault(row["params"]["model"], {})
        name = name_of(row)
        model.setdefault(name, []).append((row["batch"], row["us_p50"]))
        if name == "ours, exact":
            floor = floor_us(row, run["ceilings"])
            model.setdefault("floor", []).append((row["batch"], floor))
    return {m: {name: sorted(points) for name, points in s.items()} for m, s in found.items()}


def draw(run, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = series(run)
    figure, axes = pyplot.subplots(
        1, len(found), figsize=(5 * len(found), 4.5), sharey=True, squeeze=False
    )
    colors = {}
    for axis, (model, lines) in zip(axes[0], found.items()):
        for name, points in lines.items():
            color = colors.setdefault(name, "black" if name == "floor" else f"C{len(colors)}")
            width = 2.5 if name.startswith("ours") else 1.2
            style = "--" if name == "floor" else "-o"
            batches, us = zip(*points)
            axis.plot(batches, us, style, color=color, lw=width, ms=3, label=name)
        axis.set(title=model, xlabel="batch", xscale="log", yscale="log")
        axis.set_xticks(batches, map(str, batches))
        axis.minorticks_off()
        axis.grid(alpha=0.3, which="both")
    axes[0][0].set_ylabel("µs a block of 15 drafts")
    names = {text: line for a in axes[0] for line, text in zip(*a.get_legend_handles_labels())}
    figure.legend(names.values(), names.keys(), loc="outside lower center", ncols=5, fontsize=8)
    figure.suptitle(f"draft_chain, {run['gpu']}, {run['date']}, commit {run['commit']}")
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    draw(json.loads(options.run.read_text()), options.out)


if __name__ == "__main__":
    main()
