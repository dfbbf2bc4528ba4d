"""The timing protocol, the same for ours and for peers.

    us = (t(graph of N calls) - t(graph of one call)) / (N - 1),  N >= 16

Each call in the graph has its own copy of every operand, weights included; copies rotate over at
least 4x the L2 cache. Where a copy is so small that N of them do not fill that, a 4x-L2 buffer is
written before each replay as well, so no call finds its operands in the cache. Events are queued
behind a sleeping kernel: otherwise the pair would time the host's launch. Providers alternate
within each repeat, so that clocks drift over all of them alike. t(graph of one) is reported by
itself as us_single; it holds the launch of a graph, which reads 11-17 us on an empty one.

A provider that a case calls eager is timed as the host launches it, N calls and one call alike,
with nothing queued ahead: its time is the host's wherever that is the slower of the two.
"""

import math
import re
import time
from contextlib import contextmanager

import torch

CALLS = 16
MAX_CALLS = 32
REPEATS = 30
MIN_REPEATS = 7
BUDGET_S = 0.2  # of replays, for a provider of a case
_SLEEP_CYCLES = 2_000_000  # about 1 ms: longer than the launch of any graph here
_FIXED_S = 2.5e-3  # of a pair: two sleeps, two flushes


def l2_bytes():
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size


class Rotation:
    """Copies of a case's operands, and how many calls a graph of them makes."""

    def __init__(self, case):
        # by the bytes that a call reads: an embedding table of which it reads rows does not count
        copies = max(2, math.ceil(4 * l2_bytes() / case.bytes))
        self.calls = min(max(CALLS, copies), MAX_CALLS)
        self.copies = [case.make(seed, "cuda") for seed in range(min(copies, self.calls))]

    def __getitem__(self, i):
        return self.copies[i % len(self.copies)]


def capture(fn, rotation, calls):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            fn(*rotation[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            fn(*rotation[i])
    return graph.replay


def launches(fn, rotation, calls):
    def replay():
        for i in range(calls):
            fn(*rotation[i])

    return replay


def brief(error):
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


class Clock:
    """Wall seconds spent by provider and phase: GPU time is shared, so a run says where it went."""

    def __init__(self):
        self.seconds = {}

    @contextmanager
    def __call__(self, name, phase):
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = self.seconds.setdefault(name, {})
            spent[phase] = spent.get(phase, 0.0) + time.perf_counter() - start


class Timer:
    def __init__(self, budget_s=BUDGET_S):
        self.budget_s = budget_s
        self.flush_buffer = torch.empty(4 * l2_bytes(), dtype=torch.uint8, device="cuda")

    def once(self, replay, hide_launch=True):
        """Milliseconds of one replay, cold cache."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush_buffer.zero_()
        if hide_launch:
            torch.cuda._sleep(_SLEEP_CYCLES)
        else:
            torch.cuda.synchronize()
        start.record()
        replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def measure(self, providers, rotation, eager=(), clock=None):
        """{provider: {"us_p20", "us_p50", "us_p80", "us_single", "repeats"}, or an error's text}.

        Providers are interleaved. One that is slow gets fewer repeats, `budget_s` of replays.
        """
        clock = clock or Clock()
        n = rotation.calls
        runs, repeats, result = {}, {}, {}
        for name, fn in providers.items():
            make = launches if name in eager else capture
            try:
                with clock(name, "capture"):
                    run = make(fn, rotation, n), make(fn, rotation, 1), name not in eager
                    for replay in run[:2]:  # warms clocks and page tables
                        self.once(replay, run[2])
                    cost = sum(self.once(replay, run[2]) for replay in run[:2]) / 1e3 + _FIXED_S
            except Exception as error:  # one peer less, not one run less
                result[name] = brief(error)
                continue
            runs[name] = run
            repeats[name] = max(MIN_REPEATS, min(REPEATS, int(self.budget_s / cost)))
        pairs = {name: [] for name in runs}
        for repeat in range(REPEATS):
            for name, (many, one, hide) in runs.items():
                if repeat < repeats[name]:
                    with clock(name, "timing"):
                        pairs[name].append((self.once(many, hide), self.once(one, hide)))
        return result | {name: summary(p, n) for name, p in pairs.items()}


def stages(fn, rotation, calls=8):
    """{kernel: [launches a call, microseconds a call]}, in order of their first launch.

    Durations as CUPTI reports them, launched by the host: a kernel that may start before the one in
    front of it has ended waits for it inside its own duration, so these add up to more than a call.
    """
    fn(*rotation[0])
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for i in range(calls):
            fn(*rotation[i])
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    events = [e for e in profiler.events() if e.device_type == on_device]
    return by_kernel([(e.name, e.time_range.elapsed_us()) for e in events], calls)


def by_kernel(events, calls):
    found = {}
    for name, us in events:
        # void space::kernel<bf16, 4>(Params) -> kernel
        short = re.sub(r"[<(].*", "", name.removeprefix("void ")).split("::")[-1]
        entry = found.setdefault(short, [0, 0.0])
        entry[0] += 1 / calls
        entry[1] += us / calls
    return found


def summary(pairs, n):
    per_call = torch.tensor([(many - one) * 1e3 / (n - 1) for many, one in pairs])
    p20, p50, p80 = per_call.quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
    single = torch.tensor([one * 1e3 for _, one in pairs]).median().item()
    return {
        "us_p20": p20, "us_p50": p50, "us_p80": p80, "us_single": single, "repeats": len(pairs)
    }  # fmt: skip


def ceilings(timer):
    """What this GPU reaches in this run: copy bandwidth (read + write) and a dense bf16 product."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(a)
    copy = min(timer.once(lambda: target.copy_(source)) for _ in range(10))
    matmul = min(timer.once(lambda: torch.mm(a, a, out=product)) for _ in range(10))
    return {
        "copy_gb_s": 2 * source.numel() / copy / 1e6,
        "bf16_tflop_s": 2 * 8192**3 / matmul / 1e9,
        "l2_bytes": l2_bytes(),
    }
