"""The parts of bench/ that need no GPU: the gate, the arithmetic, the JSON."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import registry, report, timing
from bench.__main__ import gate, keep

ROOT = Path(__file__).resolve().parent.parent
CASES = [case for suite in registry.SUITES for case in registry.cases(suite)]


def test_cases_are_told_apart():
    keys = [(c.op, c.case, c.batch, json.dumps([c.params, c.shape])) for c in CASES]
    assert len(set(keys)) == len(keys) > 0
    assert all(case.providers and case.bytes > 0 for case in CASES)
    for case in CASES:
        named = {*case.provider_params, *case.eager, *case.gpu_only}
        assert "ours" in case.providers and named <= {*case.providers}


def smallest(op):
    cases = (case for case in CASES if case.op == op)
    return min(cases, key=lambda case: case.bytes)


@pytest.mark.parametrize("op", sorted({case.op for case in CASES}))
def test_gate_passes_the_right_and_stops_the_wrong(op):
    case = keep(smallest(op), None, "cpu")
    operands = case.make(0, "cpu")
    assert gate(case, operands) == {name: "" for name in case.providers}
    wrong = {
        "wrong": lambda *operands: case.providers["ours"](*case.make(1, "cpu")),
        "broken": lambda *operands: 1 / 0,
    }
    verdict = gate(dataclasses.replace(case, providers=wrong), operands)
    assert verdict["wrong"] and verdict["broken"] == "ZeroDivisionError: division by zero"


def test_keep():
    case = dataclasses.replace(CASES[0], providers=dict.fromkeys("abc"), gpu_only=("b",))
    assert [*keep(case, None, "cuda").providers] == ["a", "b", "c"]
    assert [*keep(case, None, "cpu").providers] == ["a", "c"]
    assert [*keep(case, ["c", "b"], "cpu").providers] == ["c"]


def test_time_of_a_call():
    """A graph of 16 calls of 3 us each behind a launch of 12 us."""
    pairs = [((12 + 16 * 3) / 1e3, (12 + 3) / 1e3)] * 30
    summary = timing.summary(pairs, 16)
    assert summary == pytest.approx(
        {"us_p20": 3, "us_p50": 3, "us_p80": 3, "us_single": 15, "repeats": 30}, rel=1e-5
    )


def test_stages_by_kernel():
    events = [
        ("void a::chain<bf16, f(int)>(P)", 3.0),
        ("copy(int)", 1.0),
        ("void a::chain<f>()", 5),
    ]
    assert timing.by_kernel(events, 2) == {"chain": [1.0, 4.0], "copy": [0.5, 0.5]}


def test_json_of_a_run(tmp_path):
    times = {"us_p20": 1.0, "us_p50": 2.0, "us_p80": 3.0, "us_single": 14.0}
    case = dataclasses.replace(CASES[0], provider_params={"peer": {"table": True}})
    assert report.row(case, "peer", times, True)["params"] == case.params | {"table": True}
    row = report.row(case, "ours/mode", times, True)
    assert row["provider"] == "ours"
    wanted = ["op", "case", "params", "shape", "batch", "provider", *times, "bytes", "ok"]
    assert list(row) == wanted
    report.write({"rows": [row]}, tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text()) == {"rows": [row]}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_merge():
    one = {"suite": "head", "gpu": "G", "commit": "c", "torch": "2", "command": "a", "rows": [1]}
    one["ceilings"] = {"copy_gb_s": 4200.0}
    two = one | {"command": "b", "rows": [2], "ceilings": {"copy_gb_s": 4100.0}}
    merged = report.merge([one, two])
    assert merged["rows"] == [1, 2] and merged["command"] == "a + b"
    assert merged["ceilings"] == {"copy_gb_s": 4100.0}
    with pytest.raises(ValueError, match="merge: got runs of gpu"):
        report.merge([one, two | {"gpu": "H"}])


def test_table():
    row = {"op": "o", "case": "c", "ok": True, "params": {"model": "m", "table": True, "M": 4}}
    rows = [row | {"provider": p, "batch": b, "us_p50": us} for p, b, us in
            [("ours", 1, 5.0), ("ours", 8, 7.25), ("peer", 8, 70.0)]]  # fmt: skip
    rows.append(rows[0] | {"ok": False, "batch": 2})
    assert report.table({"rows": rows}).splitlines() == [
        "| o m | 1 | 8 |",
        "|---|---|---|",
        "| c ours table=True | 5.0 | 7.2 |",
        "| c peer table=True |  | 70.0 |",
    ]


# of the tree suite not all cases have a model
@pytest.mark.parametrize("suite", ["head", "tree --model qwen3"])
def test_without_a_gpu_it_says_so(suite):
    code = "import sys, torch; torch.cuda.is_available = lambda: False; import runpy; "
    code += f"sys.argv[1:] = {suite.split()}; runpy.run_module('bench', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "bench: no CUDA device" in done.stderr
