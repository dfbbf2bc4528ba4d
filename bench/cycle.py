"""A whole decoding cycle inside the running loop, against its own linears and against one token a
step. `python -m bench.cycle --model qwen3-8b --json F`.

Weights are random: what is accepted is then forced, each slot with one probability, inside
the running cycle, so that caches, roll-back and verify length really run. 0.878 gives 7.17 tokens
of 16, the mean that a summary of the Domino paper gives for Qwen3-8B. Ratios that rest on it are
modelled; the milliseconds are measured: of a cycle, the wall time of `Engine.step` over 96
cycles, the median of five such passes, one token a step (`ar_step_ms`) and cycles in turn; of
products and stock forwards, the median of replays, event to event.
"""

import argparse
import json
import re
import shlex
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
import triton
import triton.language as tl
from domino_draft import DominoConfig, DominoDrafter, Engine, Target, cache_ops
from domino_draft.cycle import Cycle
from domino_draft.policy import Choice
from domino_draft.requests import Law, Request, Sampling

from bench import report, timing

MODELS = {
    "smollm2-135m": dict(
        family="Llama", hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, head_dim=64, vocab_size=49152,
        tie_word_embeddings=True, drafter=dict(layers=4, taps=(1, 8, 14, 20, 27), rank=96, gru=256),
    ),
    "qwen3-8b": dict(
        family="Qwen3", hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151936,
        tie_word_embeddings=False,
        drafter=dict(layers=5, taps=(1, 9, 17, 25, 33), rank=256, gru=1024),
    ),
}  # fmt: skip


def random_pair(name, **overrides):
    """(target, drafter) of a model's shape with random bf16 weights, made on the GPU."""
    shape = dict(MODELS[name]) | overrides
    family, draft = shape.pop("family"), shape.pop("drafter")
    config = getattr(transformers, f"{family}Config")(
        **shape, max_position_embeddings=8192, rope_theta=1e6,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    domino = DominoConfig(
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        num_hidden_layers=draft["layers"],
        num_attention_heads=shape["num_attention_heads"],
        num_key_value_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        vocab_size=shape["vocab_size"],
        num_target_layers=shape["num_hidden_layers"],
        target_layer_ids=draft["taps"],
        mask_token_id=16,
        emb_dim=draft["rank"],
        gru_hidden_dim=draft["gru"],
        block_size=16,
        max_position_embeddings=8192,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config).bfloat16()
        drafter = DominoDrafter(domino).bfloat16()
    torch.manual_seed(0)
    for module in (model.to_empty(device="cuda"), drafter.to_empty(device="cuda")):
        for parameter in module.parameters():
            parameter.data.normal_(std=0.02) if parameter.ndim > 1 else parameter.data.fill_(1)
    # Buffers have no values either: the angles' frequencies are made again.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config, device="cuda")
    if shape["tie_word_embeddings"]:
        model.tie_weights()
    return Target(model), drafter.eval()


SETTLE = 160  # cycles before a case is timed
STEPS, PASSES = 96, 5
_TURNS = 512  # cycles after which the table of what is kept repeats


@triton.jit
def force_kernel(
    kept_ptr, turn_ptr, drafts_ptr, tokens_ptr, accepted_ptr, starts_ptr,
    ROWS: tl.constexpr, DRAFTS: tl.constexpr, TURNS: tl.constexpr, PARTIAL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's verdict becomes: as many drafts as the table says, then the target's first token."""
    row = tl.program_id(0)
    turn = tl.load(turn_ptr + row)
    tl.store(turn_ptr + row, turn + 1)
    kept = tl.load(kept_ptr + turn % TURNS * ROWS + row)
    if PARTIAL:
        kept = tl.minimum(kept, tl.load(starts_ptr + row + 1) - tl.load(starts_ptr + row) - 1)
    tl.store(accepted_ptr + row, kept)
    at = tl.arange(0, BLOCK)
    tokens = tokens_ptr + row * (DRAFTS + 1)
    draft = tl.load(drafts_ptr + row * DRAFTS + at, mask=at < kept, other=0)
    tl.store(tokens + at, tl.where(at < kept, draft, tl.load(tokens)), mask=at < DRAFTS + 1)


class ForcedCycle(Cycle):
    """A cycle that keeps as many drafts as a table says, in place of those that are right."""

    accept = 1.0

    def _verify(self, logits, proposed, lengths, starts, law):
        result = super()._verify(logits, proposed, lengths, starts, law)
        rows, drafts = proposed.shape
        if drafts:
            self.tables = getattr(self, "tables", {})
            if (rows, drafts) not in self.tables:
                # P(at least k kept) = accept^k, by quantiles: any 64 cycles have the mean of all.
                generator = torch.Generator().manual_seed(1)
                order = torch.rand(_TURNS // 64, 64, rows, generator=generator).argsort(1)
                u = (order.flatten(0, 1) + 0.5) / 64
                kept = (1 - u).log() / torch.tensor(max(self.accept, 1e-30)).log()
                kept = kept.int().clamp(max=drafts).to(self.device)
                turn = torch.zeros(rows, dtype=torch.int32, device=self.device)
                self.tables[rows, drafts] = kept, turn
            kept, turn = self.tables[rows, drafts]
            force_kernel[(rows,)](
                kept, turn, proposed, result.tokens, result.num_accepted,
                kept if starts is None else starts, PARTIAL=starts is not None,
                ROWS=rows, DRAFTS=drafts, TURNS=_TURNS, BLOCK=triton.next_power_of_2(drafts + 1),
                num_warps=1,
            )  # fmt: skip
        return result


def make_engine(target, drafter, batch, context, room, drafts=None, accept=1.0, fp8=False):
    engine = Engine(
        target, drafter, max_batch=batch, max_length=context + room, num_drafts=drafts,
        fp8_draft_head=fp8,
    )  # fmt: skip
    assert engine.mode == "captured", engine.mode
    engine._fused.__class__ = ForcedCycle
    engine._fused.accept = accept
    # Rows as a prompt would leave them, without its forward: what is measured comes after it.
    engine._running = [
        Request(i, [1] * context, 1 << 30, Sampling(), i, frozenset()) for i in range(batch)
    ]
    engine._keep(range(batch))
    engine.cache.all_lengths.fill_(context)
    engine._fused.kv.normal_()
    if drafter is not None:
        for stack in engine._fused.draft_kv:
            stack.normal_()
    anchors = torch.arange(100, 100 + batch, device="cuda")
    engine._fused.put(0, anchors, [Sampling()] * batch, [0] * batch)
    return engine


def gpu_ms(fn, runs=5, inner=5):
    """Median milliseconds of one fn, `inner` queued behind a sleeping kernel, event to event."""
    times = []
    for _ in range(runs):
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(inner):
            fn()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / inner)
    return statistics.median(times)


def loop_ms(engines, context):
    """Of a cycle as a user runs it (`Engine.step`), for each engine, in turn: wall, and the tokens
    of a cycle and row."""
    walls, tokens = [[] for _ in engines], [0] * len(engines)
    for engine in engines:  # captures; what is drafted settles
        for _ in range(SETTLE):
            engine.step()
    for _ in range(PASSES):
        for i, engine in enumerate(engines):
            engine.cache.all_lengths.fill_(context)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(STEPS):
                tokens[i] += sum(chunk.accepted for chunk in engine.step())
            walls[i].append(time.perf_counter() - start)
    rows = engines[0].num_running
    assert all(e.num_running == e.max_batch for e in engines), "a row ended while it was measured"
    ms = [statistics.median(wall) / STEPS * 1e3 for wall in walls]
    return list(zip(ms, [n / STEPS / PASSES / rows for n in tokens]))


def host_ms(engine, runs=20):
    """Host time of a cycle that is no graph launch: all of `step` less the launch and the wait."""
    fused, inside = engine._fused, [0.0]
    graphs = dict(fused._graphs)

    class Timed:
        def __init__(self, graph):
            self.graph = graph

        def replay(self):
            start = time.perf_counter()
            self.graph.replay()
            inside[0] += time.perf_counter() - start

    from domino_draft import cycle

    wait = cycle.Pending.lines

    def lines(pending):
        start = time.perf_counter()
        pending._event.synchronize()
        inside[0] += time.perf_counter() - start
        return wait(pending)

    fused._graphs = {key: (Timed(graph), line) for key, (graph, line) in graphs.items()}
    cycle.Pending.lines = lines
    start = time.perf_counter()
    for _ in range(runs):
        engine.step()
    total = time.perf_counter() - start
    cycle.Pending.lines, fused._graphs = wait, graphs
    return (total - inside[0]) / runs * 1e3


def captured(fn, calls=1):
    """The replay of a graph of so many calls of fn."""
    fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            fn()
    return graph.replay


def linears_ms(cycle, rows, drafts):
    """The products of a cycle alone, captured, by the library: (target and head, draft side)."""
    target = cycle.target

    def products(decoder, x, y, z):
        for layer in decoder.layers:
            F.linear(x, layer.qkv)
            F.linear(y, layer.o)
            F.linear(x, layer.gate_up)
            F.linear(z, layer.down)

    def inputs(decoder, m):
        layer = decoder.layers[0]
        sizes = layer.qkv.shape[1], layer.o.shape[1], layer.down.shape[1]
        return [torch.randn(m, n, device="cuda", dtype=layer.qkv.dtype) for n in sizes]

    m = rows * (drafts + 1)
    given = inputs(target.decoder, m)

    def verify():
        products(target.decoder, *given)
        F.linear(given[0], target.head)

    found = [gpu_ms(captured(verify)), 0.0]
    if drafts:
        slots = rows * cycle.config.slots_for(drafts)
        drafter = cycle.drafter
        block = inputs(drafter.decoder, slots)
        features = torch.randn(m, drafter.fc.shape[1], device="cuda", dtype=drafter.fc.dtype)
        skip = drafter.decoder.heads * drafter.decoder.dim

        def draft():
            products(drafter.decoder, *block)
            F.linear(block[0], target.head)
            c = F.linear(features, drafter.fc)
            for layer in drafter.decoder.layers:
                F.linear(c, layer.qkv[skip:])

        found[1] = gpu_ms(captured(draft))
    return found


def stages_ms(cycle, rows, drafts, calls=4):
    """Of each stage of a cycle, captured alone: (graph of so many calls - graph of one) / the
    difference. They follow each other without the other stages' traffic: a small one may find
    more in the cache than it does in a cycle."""
    lengths, anchors = cycle.cache.all_lengths[:rows], cycle.anchors[:rows]
    choice = Choice.whole(drafts)
    shape = cache_ops.Rows(choice.tokens), rows * choice.tokens
    hidden = cycle._block(anchors, lengths, drafts)
    base = cycle._draft_logits(hidden)
    proposed, _ = cycle._chain(hidden, base, anchors, choice)
    x, features = cycle._forward(anchors, proposed, lengths, *shape)
    logits = cycle.target.logits(x)
    result = cycle._verify(logits, proposed, lengths, None, Law.GREEDY)
    stages = {
        "draft layers": lambda: cycle._block(anchors, lengths, drafts),
        "draft LM head": lambda: cycle._draft_logits(hidden),
        "draft_chain": lambda: cycle._chain(hidden, base, anchors, choice),
        "target layers": lambda: cycle._forward(anchors, proposed, lengths, *shape),
        "target LM head": lambda: cycle.target.logits(x),
        "verify_chain": lambda: Cycle._verify(cycle, logits, proposed, lengths, None, Law.GREEDY),
        "commit": lambda: cycle._commit(result, features, anchors, lengths),
    }
    found = {}
    for name, stage in stages.items():
        one, many = gpu_ms(captured(stage)), gpu_ms(captured(stage, calls))
        found[name] = round((many - one) / (calls - 1), 4)
    return found


def stock_ms(target, rows, tokens, context):
    """The stock Transformers forward over a StaticCache, captured."""
    cache = transformers.StaticCache(config=target.config, max_cache_len=context + 64)
    ids = torch.randint(0, 1000, (rows, tokens), device="cuda")
    positions = torch.arange(context, context + tokens, device="cuda")[None].expand(rows, -1)

    @torch.inference_mode()
    def forward():
        for layer in cache.layers:
            if getattr(layer, "cumulative_length", None) is not None:
                layer.cumulative_length.fill_(context)
        target.model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward()
        forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    return gpu_ms(graph.replay)


def main():
    parser = argparse.ArgumentParser(prog="python -m bench.cycle", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="qwen3-8b")
    parser.add_argument(
        "--case", nargs="*", default=["1:15", "8:15", "32:7", "64:3", "1:auto@0"],
        metavar="B:K@A", help="batch, drafts a cycle (a number or auto), and the probability that "
        "a slot is accepted (0.878)",
    )  # fmt: skip
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--fp8", action="store_true", help="draft with an fp8 copy of the LM head")
    parser.add_argument("--stock", action="store_true", help="also the captured stock forward")
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    run = report.header("cycle", timing.ceilings(timing.Timer())) | {
        "command": "python -m bench.cycle " + shlex.join(sys.argv[1:]),
        "protocol": " ".join(__doc__.split("\n\n")[1].split()),
        "rows": [],
    }
    begun = time.perf_counter()
    target, drafter = random_pair(options.model)

    def row(op, batch, provider, ms, **params):
        params |= {"model": options.model, "context": options.context}
        run["rows"].append(
            {"op": op, "case": "loop", "params": params, "shape": {}, "batch": batch,
             "provider": provider, "us_p50": round(ms * 1e3, 2), "ok": True}
        )  # fmt: skip
        took = time.perf_counter() - begun
        print(f"{took:5.1f} s  B={batch:3} {op:8} {provider:8} {ms:8.3f} ms  {params}", flush=True)
        if options.json:  # as far as it has come
            Path(options.json).write_text(json.dumps(run, indent=1) + "\n")
        return ms

    cases = [
        re.fullmatch(r"(\d+):(\d+|auto)(?:@([\d.]+))?", case).groups() for case in options.case
    ]
    cases = [(int(b), k if k == "auto" else int(k), float(a or 0.878)) for b, k, a in cases]
    for batch in dict.fromkeys(b for b, _, _ in cases):
        given = [(drafts, accept) for b, drafts, accept in cases if b == batch]
        # One for all: rows that lie further apart may be slower to read.
        most = max(1 if not a else 16 if k == "auto" else k + 1 for k, a in given)
        room = (STEPS + SETTLE + 40) * most
        if options.stock:
            row("ar_step", batch, "stock", stock_ms(target, batch, 1, options.context))
        alone = make_engine(target, None, batch, options.context, room)
        row("ar_step", batch, "ours", loop_ms([alone], options.context)[0][0])
        row("ar_step", batch, "linears", linears_ms(alone._fused, batch, 0)[0])
        for drafts, accept in given:
            engine = make_engine(
                target, drafter, batch, options.context, room, drafts, accept, options.fp8
            )
            (ar, _), (ms, length) = loop_ms([alone, engine], options.context)
            if drafts != "auto":  # its expectation, which the table meets within 2%
                length = sum(accept**k for k in range(drafts + 1))
            row("cycle", batch, "ours", ms, drafts=drafts, accepted=length, accept=accept,
                ar_step_ms=ar, modelled_ratio=length * ar / ms, host_ms=host_ms(engine),
                fp8_draft_head=options.fp8)  # fmt: skip
            if drafts != "auto":
                parts = linears_ms(engine._fused, batch, drafts)
                row("cycle", batch, "linears", sum(parts), drafts=drafts, verify_ms=parts[0])
                engine.cache.all_lengths.fill_(options.context)
                stages = stages_ms(engine._fused, batch, drafts)
                row("cycle", batch, "stages", sum(stages.values()), drafts=drafts, stages=stages)
            del engine
            torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
