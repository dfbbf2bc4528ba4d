"""Peers of `verify_chain`: what serving engines do for the same law.

Each is a function of a case's operands (bench/ops/verify.py) that returns (tokens [B, K + 1],
accepted [B]), without synchronisation. Coins come from the operands, so that all providers accept
the same drafts; FlashInfer draws its own.
"""

from functools import cache

import torch

from bench.peers import verify_triton

OWN_COINS = "own coins"


def target_law(o, *, softmax=True):
    """Temperature, top-k and top-p as they are written in Torch: a mask from topk, a full sort."""
    logits = o["target"].float() / o["temperature"][:, None, None]
    if o["k"]:
        least = logits.topk(o["k"], -1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if o["p"] < 1:
        ordered, ids = logits.sort(-1, descending=True)
        p = ordered.softmax(-1)
        ordered = ordered.masked_fill(p.cumsum(-1) - p >= o["p"], -torch.inf)
        logits = torch.empty_like(logits).scatter_(-1, ids, ordered)
    return logits.softmax(-1) if softmax else logits


def draft_law(o, like):
    """[B, K, V] float32: what an engine without one-hot or sparse drafts has to build."""
    batch, drafts = o["drafts"].shape
    if o["draft"] is not None and o["ids"] is None:
        return (o["draft"].float() / o["draft_temperature"][:, None, None]).softmax(-1)
    out = torch.zeros(batch, drafts, like.size(-1), device=like.device)
    if o["ids"] is None:
        return out.scatter_(-1, o["drafts"][..., None], 1.0)
    pool = (o["draft"].float() / o["draft_temperature"][:, None, None]).softmax(-1)
    return out.scatter_(-1, o["ids"].long(), pool)


def torch_greedy(o):
    best = o["target"].argmax(-1)
    return best, (best[:, :-1] == o["drafts"]).cumprod(-1).sum(-1)


def torch_token(o):
    p = target_law(o)
    q = draft_law(o, p)
    x = o["drafts"][..., None]
    p_x, q_x = p[:, :-1].gather(-1, x)[..., 0], q.gather(-1, x)[..., 0]
    kept = (o["coins"] * q_x <= p_x).cumprod(-1).sum(-1)
    at = kept[:, None, None].expand(-1, 1, p.size(-1))
    last = p.gather(1, at)[:, 0]
    inside = (kept < o["drafts"].size(1))[:, None]
    q_last = q.gather(1, at.clamp(max=o["drafts"].size(1) - 1))[:, 0] * inside
    rest = (last - q_last).relu()
    drawn = (rest / torch.empty_like(rest).exponential_()).argmax(-1)
    tokens = torch.nn.functional.pad(o["drafts"], (0, 1))
    return tokens.scatter(1, kept[:, None], drawn[:, None]), kept


@cache
def compiled(fn):
    return torch.compile(fn, dynamic=False)


def compiled_greedy(o):
    return compiled(torch_greedy)(o)


def compiled_token(o):
    return compiled(torch_token)(o)


def structure_greedy(o):
    return verify_triton.rejection_sample(o["target"], o["drafts"], None, greedy=True)


def structure_token(o):
    """Temperature and filters on an fp32 copy, the pool as a dense row, then the four launches."""
    target = target_law(o, softmax=False)
    draft = o["draft"]
    if o["ids"] is not None:
        shape = (*o["drafts"].shape, target.size(-1))
        draft = torch.full(shape, -torch.inf, device=target.device)
        pool = o["draft"].float() / o["draft_temperature"][:, None, None]
        draft.scatter_(-1, o["ids"].long(), pool)
    elif draft is not None:
        draft = draft.float() / o["draft_temperature"][:, None, None]
    return verify_triton.rejection_sample(target, o["drafts"], o["coins"], draft)


@cache
def flashinfer():
    """FlashInfer's sampling functions, or None where the package is not installed."""
    try:
        from flashinfer import sampling
    except ImportError:
        return None
    return sampling


def flashinfer_token(o):
    """softmax, top-k and top-p renormalisation of every row, q as float32, then the chain op."""
    sampling = flashinfer()
    batch, slots, vocab = o["target"].shape
    temperature = o["temperature"].repeat_interleave(slots, output_size=batch * slots)
    p = sampling.softmax(o["target"].float().view(-1, vocab), temperature)
    if o["k"]:
        p = sampling.top_k_renorm_probs(p, o["k"])
    if o["p"] < 1:
        p = sampling.top_p_renorm_probs(p, o["p"])
    p = p.view(batch, slots, vocab)
    drafts = o["drafts"].int()
    tokens, _, kept = sampling.chain_speculative_sampling(
        draft_law(o, p), drafts, p, seed=5, offset=0
    )
    return tokens, kept, OWN_COINS


def structure_with_flashinfer(o):
    """The four launches behind FlashInfer's filters in place of the sort."""
    sampling = flashinfer()
    batch, slots, vocab = o["target"].shape
    temperature = o["temperature"].repeat_interleave(slots, output_size=batch * slots)
    p = sampling.softmax(o["target"].float().view(-1, vocab), temperature)
    if o["k"]:
        p = sampling.top_k_renorm_probs(p, o["k"])
    if o["p"] < 1:
        p = sampling.top_p_renorm_probs(p, o["p"])
    target = p.log_().view(batch, slots, vocab)
    draft = None
    if o["draft"] is not None:
        draft = draft_law(o, target).log_()
    return verify_triton.rejection_sample(target, o["drafts"], o["coins"], draft)
