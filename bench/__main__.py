"""python -m bench SUITE [--json F] [--op, --case, --model, --batch of it] [--check | --profile]"""

import argparse
import sys

import torch

from bench import registry, report, timing


def gate(case, device):
    """Runs every provider once on fresh operands; {provider: error text, '' where right}."""
    verdict = {}
    for name, fn in case.providers.items():
        if device == "cpu" and name in case.gpu_only:
            continue
        operands = case.make(0, device)
        try:
            case.check(operands, fn(*operands))
            verdict[name] = ""
        except AssertionError as error:
            verdict[name] = str(error) or "wrong result"
    return verdict


def profile(case):
    """One warm call, then one inside the profiler's range: see bench/ncu.sh."""
    for _ in range(2):
        operands = case.make(0, "cuda")
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        with torch.cuda.nvtx.range("profile_target"):
            case.providers["ours"](*operands)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def main():
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("suite", choices=sorted(registry.SUITES))
    parser.add_argument("--json", metavar="F", help="write the run as JSON")
    parser.add_argument("--op", help="this op only")
    parser.add_argument("--case", help="this case only")
    parser.add_argument("--model", help="the shapes of this model only")
    parser.add_argument("--batch", type=int, nargs="*", help="these batch sizes only")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--check", action="store_true", help="the correctness gate alone, no timing")
    only.add_argument("--profile", action="store_true", help="one call of ours a case, for ncu")
    options = parser.parse_args()

    chosen = [
        case
        for case in registry.cases(options.suite)
        if (not options.profile or "ours" in case.providers)
        and (not options.op or case.op == options.op)
        and (not options.case or case.case == options.case)
        and (not options.model or case.params["model"] == options.model)
        and (not options.batch or case.batch in options.batch)
    ]
    if not chosen:
        parser.error("no case is left")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.check:
        sys.exit("bench: no CUDA device; --check runs the correctness gate on the CPU")

    failed = False
    run = timer = None
    if not (options.check or options.profile):
        timer = timing.Timer()
        run = report.header(options.suite, timing.ceilings(timer)) | {"rows": []}
        report.print_header(run)
    with torch.no_grad():
        for case in chosen:
            if options.profile:
                profile(case)
                continue
            verdict = gate(case, device)
            failed |= any(verdict.values())
            for name, error in verdict.items():
                if error or options.check:
                    print(f"{report.label(case, name)}: {error or 'ok'}", flush=True)
            if options.check:
                continue
            right = {name: fn for name, fn in case.providers.items() if not verdict[name]}
            times = timer.measure(right, timing.Rotation(case), case.eager)
            for name in case.providers:
                row = report.row(case, name, times.get(name, {}), name in right)
                run["rows"].append(row)
                report.print_row(row, run["ceilings"])
    if options.json and run:
        report.write(run, options.json)
    sys.exit(failed)


if __name__ == "__main__":
    main()
