"""Benchmarks: `python -m bench SUITE [--json F]`. Not in the wheel."""
