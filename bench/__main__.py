"""python -m bench SUITE [--json F] [--op, --case, --model, --batch of it] [--check | --profile]

python -m bench recall: see bench/pool_recall.py.
python -m bench merge OUT.json RUN.json...: runs of one suite on GPUs of one kind, in one file.
python -m bench table RUN.json: medians in Markdown.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import torch

from bench import registry, report, timing


def gate(case, operands, clock=None):
    """Runs every provider once on these operands; {provider: error text, '' where right}."""
    clock = clock or timing.Clock()
    verdict = {}
    for name, fn in case.providers.items():
        try:
            with clock(name, "gate"):
                case.check(operands, fn(*operands))
            verdict[name] = ""
        except AssertionError as error:
            verdict[name] = str(error) or "wrong result"
        except Exception as error:  # a peer that cannot run is reported; the others go on
            verdict[name] = timing.brief(error)
    return verdict


def keep(case, names, device):
    """The case with the providers of these names that the device can run; None keeps all names."""
    providers = {
        name: fn
        for name, fn in case.providers.items()
        if (not names or name in names) and (device == "cuda" or name not in case.gpu_only)
    }
    return dataclasses.replace(case, providers=providers)


def profile(case):
    """One warm call of ours inside the profiler's range: see bench/ncu.sh."""
    operands = case.make(0, "cuda")
    case.providers["ours"](*operands)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    with torch.cuda.nvtx.range("profile_target"):
        case.providers["ours"](*operands)
        torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def main():
    if sys.argv[1:2] == ["recall"]:
        from bench import pool_recall

        return pool_recall.main(sys.argv[2:])
    if sys.argv[1:2] == ["merge"]:
        out, *runs = sys.argv[2:]
        return report.write(report.merge([json.loads(Path(run).read_text()) for run in runs]), out)
    if sys.argv[1:2] == ["table"]:
        return print(report.table(json.loads(Path(sys.argv[2]).read_text())))
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("suite", choices=sorted(registry.SUITES))
    parser.add_argument("--json", metavar="F", help="write the run as JSON")
    parser.add_argument("--op", help="this op only")
    parser.add_argument("--case", nargs="*", help="these cases only")
    parser.add_argument("--model", nargs="*", help="the shapes of these models only")
    parser.add_argument("--provider", nargs="*", help="these providers only")
    parser.add_argument("--batch", type=int, nargs="*", help="these batch sizes only")
    parser.add_argument(
        "--budget", type=float, default=timing.BUDGET_S, help="seconds of replays a provider"
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--check", action="store_true", help="the correctness gate alone, no timing")
    only.add_argument("--stages", action="store_true", help="ours by kernel, under a profiler")
    only.add_argument("--profile", action="store_true", help="one call of ours a case, for ncu")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = [
        case
        for every in registry.cases(options.suite)
        if (case := keep(every, options.provider, device)).providers
        and (not options.profile or "ours" in case.providers)
        and (not options.op or case.op == options.op)
        and (not options.case or case.case in options.case)
        and (not options.model or case.params.get("model") in options.model)
        and (not options.batch or case.batch in options.batch)
    ]
    if not chosen:
        parser.error("no case is left")
    if device == "cpu" and not options.check:
        sys.exit("bench: no CUDA device; --check runs the correctness gate on the CPU")

    failed = False
    clock = timing.Clock()
    run = timer = None
    if not (options.check or options.profile or options.stages):
        timer = timing.Timer(options.budget)
        run = report.header(options.suite, timing.ceilings(timer)) | {"rows": []}
        report.print_header(run)
    with torch.no_grad():
        for case in chosen:
            if options.profile:
                profile(case)
                continue
            if options.stages:
                rotation = timing.Rotation(case)
                for name, fn in case.providers.items():
                    if name.split("/")[0] == "ours":
                        print(report.label(case, name))
                        report.print_stages(timing.stages(fn, rotation))
                continue
            with clock("operands", "make"):
                rotation = timing.Rotation(case) if run else [case.make(0, device)]
            verdict = gate(case, rotation[0], clock)
            failed |= any(verdict.values())
            for name, error in verdict.items():
                if error or options.check:
                    print(f"{report.label(case, name)}: {error or 'ok'}", flush=True)
            if options.check:
                continue
            right = {name: fn for name, fn in case.providers.items() if not verdict[name]}
            times = timer.measure(right, rotation, case.eager, clock)
            del rotation  # before the next case makes its own
            for name in case.providers:
                if isinstance(times.get(name), str):
                    print(f"{report.label(case, name)}: {times[name]}", flush=True)
                    del right[name], times[name]
                    failed = True
                row = report.row(case, name, times.get(name, {}), name in right)
                run["rows"].append(row)
                report.print_row(row, run["ceilings"])
            if options.json:  # after each case: a run cut short leaves what it had
                report.write(run, options.json)
    for name, spent in clock.seconds.items():
        print(name, *(f"{phase} {seconds:.1f} s" for phase, seconds in spent.items()))
    sys.exit(failed)


if __name__ == "__main__":
    main()
