"""Inputs of the verification suite: rows of a stated sharpness, and coins that accept as planned.

peaked: at temperature 0.7 one token has 0.70 of the row, 31 more share 0.285 in falling powers of
0.75 and the rest of the vocabulary, normal logits, has 0.015: entropy about 1.5 nats. flat: normal
logits of deviation 1, about 10.9 nats of a possible 11.9. Values are rounded to bf16.

A request accepts `accepted` drafts: before that slot the draft is the row's likeliest token, and
the block start is one whose coins accept it there (by the filtered law, so that coins between
p and the renormalised p occur as often as they do); at that slot it is a token without mass to
speak of, so it is rejected. A flat row cannot accept a one-hot draft: rows before the stop are
peaked in any case, and `flat` says what the row is like in which the walk ends. The pool is the
row's 32 heads and 32 other tokens, its logits those of the target with noise of deviation 0.5.
"""

import math

import torch

from domino_kernels import rng

TEMPERATURE = 0.7
HEADS = 32
POOL = 64
CANDIDATES = 4096


def head_logits(vocab):
    """Logits of the heads above normal ones, [HEADS]."""
    rest = torch.tensor([0.75**n for n in range(HEADS - 1)], dtype=torch.float64)
    share = torch.cat([torch.tensor([0.70], dtype=torch.float64), 0.285 * rest / rest.sum()])
    tail = vocab * math.exp(0.5 / TEMPERATURE**2)  # expected weight of the normal logits
    return TEMPERATURE * (share / 0.015 * tail).log()


def accept_counts(accepted, batch, drafts):
    """Accepted drafts a request: all, none, or `mean` with that mean where the batch allows it."""
    if accepted != "mean":
        return torch.full((batch,), {"all": drafts, "none": 0}[accepted])
    around = [7, 3, 11, 7, 1, 13, 8, 6]
    return torch.tensor([around[b % 8] for b in range(batch)])


def make_rows(vocab, batch, slots, peaked, generator, dtype):
    """(logits [B, slots, V], ids of the heads [B, slots, HEADS]); peaked: [B, slots] bool."""
    device = generator.device
    shape = batch, slots
    logits = torch.randn(*shape, vocab, generator=generator, device=device, dtype=dtype)
    first = torch.randint(vocab, shape, generator=generator, device=device)
    # distinct ids all over the row: the stride has no factor in common with any vocabulary here
    heads = (first[..., None] + 4813 * torch.arange(HEADS, device=device)) % vocab
    value = head_logits(vocab).to(device, dtype).expand(*shape, HEADS)
    logits.scatter_(-1, heads, value.where(peaked[..., None], logits.gather(-1, heads)))
    return logits, heads


def filtered_share(logits, temperature, k, p):
    """Probability of each row's likeliest token after top-k and top-p; rows are peaked ones."""
    weight = logits.float() / temperature
    total = weight.logsumexp(-1)
    top = (weight.topk(min(512, logits.size(-1)), -1).values - total[..., None]).exp()
    if k:
        top = top[..., :k] / top[..., :k].sum(-1, keepdim=True)
    if p < 1:
        before = top.cumsum(-1) - top
        return top[..., 0] / (top * (before < p)).sum(-1)
    return top[..., 0]


def make_pool(logits, heads, generator):
    """(ids [B, K, POOL], draft logits [B, K, POOL]); ids are distinct, likeliest tokens first."""
    vocab = logits.size(-1)
    spread = 4813 * torch.arange(HEADS, POOL, device=logits.device)
    ids = torch.cat([heads, (heads[..., :1] + spread) % vocab], -1)
    near = logits.gather(-1, ids).float()
    noise = torch.randn(ids.shape, generator=generator, device=logits.device) * 0.5
    return ids.int(), (near + noise).to(logits.dtype)


def find_starts(seed, accept, counts):
    """Block starts [B] whose coins accept slots 0 .. counts - 1 at probability accept [B, K]."""
    slot = torch.arange(accept.size(1), device=accept.device)
    start = torch.arange(100, 100 + CANDIDATES, device=accept.device)
    key = seed[:, None, None], start[:, None], slot
    words = rng.words(*key, rng.VERIFY_COIN, torch.zeros_like(slot))
    coin = (words.double() + 1) * 2.0**-32  # [B, candidates, K]
    wanted, stops = (slot < counts[:, None])[:, None], (slot == counts[:, None])[:, None]
    fits = (coin <= accept[:, None] * (1 - 1e-4)) | ~wanted
    # the rejected draft has next to no mass; a tiny coin could still accept it
    fits = (fits & ((coin > 0.05) | ~stops)).all(-1)
    assert bool(fits.any(-1).all()), "no block start accepts as planned"
    return start[fits.int().argmax(-1)]


def coins(seed, start, drafts):
    slot = torch.arange(drafts, device=seed.device)
    words = rng.words(seed[:, None], start[:, None], slot, rng.VERIFY_COIN, torch.zeros_like(slot))
    return ((words.double() + 1) * 2.0**-32).float()
