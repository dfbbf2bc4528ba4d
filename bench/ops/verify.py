"""Verification of drafted chains at the vocabularies of the public checkpoints.

What the rows look like and how a request comes to accept a planned number of drafts stands in
verify_inputs.py. The gate: that number, the accepted drafts, and a last token that the filters
leave and that is not the rejected draft. Laws are tested in tests/losslessness, not here.
"""

from functools import lru_cache

import torch

from bench.ops.verify_inputs import (
    TEMPERATURE,
    accept_counts,
    coins,
    filtered_share,
    find_starts,
    make_pool,
    make_rows,
)
from bench.peers import verify as peers
from bench.registry import Case
from domino_kernels import VerifyResult, row_stats, verify_chain, verify_chain_workspace

VOCABULARIES = {"qwen3": 151936, "smollm2": 49152}
BATCHES = (8, 1, 64)
DRAFTS = 15
DTYPE = torch.bfloat16
OWN_COINS = peers.OWN_COINS
FILTERS = {"none": (0, 1.0), "k50p95": (50, 0.95), "p95": (0, 0.95)}


@lru_cache(maxsize=64)
def target_rows(vocab, batch, accepted, data, seed, device):
    """Rows that every form of q and filter of a case reads: (counts [B], logits, heads)."""
    generator = torch.Generator(device).manual_seed(seed)
    slots = torch.arange(DRAFTS + 1, device=device)
    counts = accept_counts(accepted, batch, DRAFTS).to(device)
    peaked = (slots < counts[:, None]) | (data == "peaked")
    return counts, *make_rows(vocab, batch, DRAFTS + 1, peaked, generator, DTYPE)


def make_operands(vocab, batch, accepted, data, q, filters, sampled, seed, device):
    generator = torch.Generator(device).manual_seed(seed + 1)
    slots = torch.arange(DRAFTS + 1, device=device)
    counts, target, heads = target_rows(vocab, batch, accepted, data, seed, device)
    k, p = FILTERS[filters]
    drafts = heads[:, :DRAFTS, 0].clone()
    stopped = slots[:DRAFTS] == counts[:, None]
    drafts[stopped] = (drafts[stopped] + 1) % vocab  # a token of the tail
    ids = draft = None
    q_of_draft = torch.ones(batch, DRAFTS, device=device)
    if q == "pool":
        ids, draft = make_pool(target[:, :DRAFTS], heads[:, :DRAFTS], generator)
        # where the walk stops the drafter was sure of its token
        ids[..., 0] = drafts
        draft[..., 0] = draft[..., 0].where(~stopped, draft.max(-1).values + 4)
        law = (draft.float() / TEMPERATURE).softmax(-1)
        q_of_draft = law[..., 0]
    elif q == "dense":
        draft = torch.randn(batch, DRAFTS, vocab, generator=generator, device=device, dtype=DTYPE)
        near = target[:, :DRAFTS].gather(-1, heads[:, :DRAFTS])
        draft.scatter_(-1, heads[:, :DRAFTS], near)
        at = drafts[..., None]
        sure = draft.max(-1, keepdim=True).values + 4
        draft.scatter_(-1, at, sure.where(stopped[..., None], draft.gather(-1, at)))
        at_temperature = draft.float() / 1.0
        q_of_draft = (at_temperature.gather(-1, at)[..., 0] - at_temperature.logsumexp(-1)).exp()
    seeds = torch.arange(batch, device=device)
    start = torch.full((batch,), 100, device=device)
    if sampled:
        share = torch.ones(batch, DRAFTS, device=device)
        if bool(counts.any()):
            share = filtered_share(target[:, :DRAFTS], TEMPERATURE, k, p)
        start = find_starts(seeds, (share / q_of_draft).clamp(max=1), counts)
    wide = batch, DRAFTS + 1
    out = VerifyResult(
        torch.empty(wide, dtype=torch.int64, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
        torch.empty(wide, device=device),
        torch.empty(batch, dtype=torch.uint8, device=device),
    )
    return {
        "target": target,
        "drafts": drafts,
        "temperature": torch.full((batch,), TEMPERATURE, device=device),
        "draft_temperature": torch.full(
            (batch,), 1.0 if q == "dense" else TEMPERATURE, device=device
        ),
        "seed": seeds,
        "start": start,
        "coins": coins(seeds, start, DRAFTS),
        "draft": draft,
        "ids": ids,
        "k": k,
        "p": p,
        "top_k": torch.full((batch,), k, dtype=torch.int32, device=device) if k else None,
        "top_p": torch.full((batch,), p, device=device) if p < 1 else None,
        "counts": counts,
        "greedy": not sampled,
        "out": out,
        "workspace": verify_chain_workspace(
            batch, DRAFTS, vocab, dense=q == "dense", device=device
        ),
    }


def ours(rule):
    def call(o):
        rest = dict(out=o["out"], workspace=o["workspace"])
        kind, _, logprob = rule.partition("-")
        if not logprob:  # what engines and the peers compute
            rest |= dict(out=o["out"]._replace(chosen_logprob=None), logprobs=False)
        if kind == "greedy":
            return verify_chain(o["target"], o["drafts"], **rest)
        for name, key in (("top_k", "top_k"), ("top_p", "top_p"), ("draft_ids", "ids")):
            if o[key] is not None:
                rest[name] = o[key]
        if o["draft"] is not None:
            rest |= dict(draft_logits=o["draft"], draft_temperature=o["draft_temperature"])
        result = verify_chain(
            o["target"],
            o["drafts"],
            rule=kind,
            temperature=o["temperature"],
            seed=o["seed"],
            block_start=o["start"],
            **rest,
        )
        # the coins were chosen for the token rule
        return result if kind == "token" else (*result[:2], OWN_COINS)

    return call


def allowed(logits, k, p):
    """[B, V] bool: what the filters leave; a nucleus a little larger, for rounding at its edge."""
    logits = logits.double() / TEMPERATURE
    if k:
        logits = logits.masked_fill(logits < logits.topk(k, -1).values[..., -1:], -torch.inf)
    ordered, ids = logits.softmax(-1).sort(-1, descending=True)
    inside = ordered.cumsum(-1) - ordered < p + 1e-3
    return torch.zeros_like(inside).scatter_(-1, ids, inside & (ordered > 0))


def check(operands, result):
    """A third element "own coins": the provider accepts as many as its own randomness says."""
    (o,) = operands
    tokens, kept = result[0].long(), result[1].long()
    counts, drafts = o["counts"], o["drafts"]
    own = len(result) == 3 and result[2] == OWN_COINS
    assert own or torch.equal(kept, counts), f"accepted {kept.tolist()}, not {counts.tolist()}"
    slots = torch.arange(DRAFTS, device=kept.device)
    emitted = (tokens[:, :DRAFTS] == drafts) | (slots >= kept[:, None])
    assert bool(emitted.all()), "an accepted draft was not emitted"
    last = tokens.gather(1, kept[:, None])
    stop = o["target"][torch.arange(len(kept), device=kept.device), kept]
    if o["greedy"]:
        assert torch.equal(last[:, 0], stop.float().argmax(-1)), "not the argmax"
        return
    inside = allowed(stop, o["k"], o["p"]).gather(1, last)
    assert bool(inside.all()), "a token that the filters remove"
    rejected = drafts.gather(1, kept.clamp(max=DRAFTS - 1)[:, None])
    assert bool(((last != rejected) | (kept == DRAFTS)[:, None]).all()), "the rejected draft"


def peers_of(batch, sampled, q, filters):
    """The peers of a case. A sort of 64 x 16 rows takes 30 ms: Torch is timed up to batch 8."""
    small, plain = batch <= 8, filters == "none"
    if not sampled:
        found = {"torch": peers.torch_greedy, "torch-graph": peers.torch_greedy}
        if batch == 8:
            found["compile"] = peers.compiled_greedy
        return found | {"vllm-structure": peers.structure_greedy}
    found = {}
    if small or plain:
        found |= {"torch": peers.torch_token, "torch-graph": peers.torch_token}
    if batch == 8 and q == "one-hot" and filters == "k50p95":
        found["compile"] = peers.compiled_token
    have_flashinfer = peers.flashinfer() is not None
    if have_flashinfer:
        found["flashinfer"] = peers.flashinfer_token
    if have_flashinfer and not plain:  # FlashInfer's filters beat the sort by five times
        found["vllm-structure+flashinfer"] = peers.structure_with_flashinfer
    elif small or plain:
        found["vllm-structure"] = peers.structure_token
    return found


def verify_chain_case(
    rule, batch, accepted, *, q="one-hot", filters="none", data="peaked", model="qwen3", peer=True
):
    vocab, sampled = VOCABULARIES[model], not rule.startswith("greedy")
    providers = {"ours": ours(rule)}
    if peer:
        providers |= peers_of(batch, sampled, q, filters)
    params = {"model": model, "accepted": accepted}
    if sampled:
        k, p = FILTERS[filters]
        params |= {"T": TEMPERATURE, "k": k, "p": p, "q_form": q, "data": data}
    rows = (DRAFTS + 1) * vocab + (DRAFTS * vocab if q == "dense" else 0)
    arguments = vocab, batch, accepted, data, q, filters, sampled
    return Case(
        op="verify_chain",
        case=rule,
        params=params,
        shape={"V": vocab, "K": DRAFTS},
        batch=batch,
        make=lambda seed, device: (make_operands(*arguments, seed, device),),
        providers=providers,
        check=check,
        bytes=batch * rows * DTYPE.itemsize,
        eager=tuple(n for n in providers if n == "torch"),
        gpu_only=tuple(n for n in providers if n.startswith(("vllm", "flashinfer", "compile"))),
    )


def torch_row_stats(logits, tokens, temperature):
    scaled = logits.float() / temperature[:, None]
    lse = scaled.logsumexp(-1)
    chosen = scaled.gather(-1, tokens[:, None])[:, 0]
    return lse, logits.argmax(-1), chosen - lse


def check_row_stats(operands, result):
    logits, tokens, temperature = operands
    scaled = logits.double() / temperature[:, None].double()
    lse = scaled.logsumexp(-1)
    logprob = scaled.gather(-1, tokens[:, None])[:, 0] - lse
    assert bool(((result[0].double() - lse).abs() < 1e-5 * (1 + lse.abs())).all()), "lse"
    best = logits.gather(-1, result[1][:, None])[:, 0]
    assert torch.equal(best, logits.amax(-1)), "argmax"
    assert bool(((result[2].double() - logprob).abs() < 1e-4).all()), "log p of the token"


def row_stats_case(batch, model="qwen3"):
    vocab, rows = VOCABULARIES[model], batch * (DRAFTS + 1)

    def make(seed, device):
        generator = torch.Generator(device).manual_seed(seed)
        drawn = dict(generator=generator, device=device)
        return (
            torch.randn(rows, vocab, dtype=DTYPE, **drawn),
            torch.randint(vocab, (rows,), **drawn),
            torch.full((rows,), TEMPERATURE, device=device),
        )

    return Case(
        op="row_stats",
        case="lse",
        params={"model": model, "T": TEMPERATURE},
        shape={"V": vocab, "rows": rows},
        batch=batch,
        make=make,
        providers={"ours": row_stats, "torch": torch_row_stats},
        check=check_row_stats,
        bytes=rows * vocab * DTYPE.itemsize,
    )


def cases():
    """The rows of the README's table come first, so that a run cut short has them."""
    case = verify_chain_case
    for accepted in ("mean", "all", "none"):
        for batch in BATCHES:
            yield case("greedy", batch, accepted, peer=accepted == "mean")
    for batch in BATCHES:
        yield case("greedy-logprob", batch, "mean", peer=False)
    for accepted in ("mean", "all", "none"):
        for data in ("peaked", "flat"):
            for batch in BATCHES:
                for filters in ("k50p95", "p95"):
                    for q in ("one-hot", "pool"):
                        peer = accepted == "mean"
                        yield case(
                            "token", batch, accepted, q=q, filters=filters, data=data, peer=peer
                        )
    for batch in BATCHES:
        yield row_stats_case(batch)
        for accepted in ("mean", "all", "none"):
            for data in ("peaked", "flat"):
                for filters in ("k50p95", "p95"):
                    peer = accepted == "mean" and data == "peaked" and filters == "k50p95"
                    yield case(
                        "token", batch, accepted, q="dense", filters=filters, data=data, peer=peer
                    )
        yield case("token-logprob", batch, "mean", filters="k50p95", peer=False)
        yield case("token", batch, "mean")
        yield case("token", batch, "mean", q="dense")
        for rule, q in (("block", "dense"), ("block", "pool"), ("match", "one-hot")):
            yield case(rule, batch, "mean", q=q, filters="k50p95", peer=False)
        yield case("gumbel", batch, "mean", q="pool", filters="k50p95", peer=False)
    yield case("greedy", 1, "mean", model="smollm2")
    yield case("token", 1, "mean", model="smollm2", filters="p95")
