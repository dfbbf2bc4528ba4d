"""SGLang's target-only tree kernel rebuilt in structure: probabilities in, a program a request.

Per level one coin walks the siblings' target mass; on a miss they are noted in a scratch [B, N, V]
that the caller has zeroed, and the last token is drawn by two passes over one row: its residual
mass, then an inverse CDF. Child and sibling links come from the tree builder.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def target_only_kernel(
    probs, scratch, tokens, child, sibling, coins, final_coins, out_tokens, accepted,
    vocab, NODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    node = b * 0
    count = 0
    base = b * NODES
    walking = True
    while walking:
        coin = tl.load(coins + base + node)
        mass = 0.0
        c = tl.load(child + base + node).to(tl.int64)
        found = node * 0 - 1
        while c >= 0:
            x = tl.load(tokens + base + c)
            mass += tl.load(probs + (base + node) * vocab + x)
            hit = coin <= mass
            found = tl.where(hit, c, found)
            if not hit:
                p = tl.load(probs + (base + node) * vocab + x)
                tl.store(scratch + (base + node) * vocab + x, p)
            c = tl.where(hit, -1, tl.load(sibling + base + c).to(tl.int64))
        walking = found >= 0
        if walking:
            tl.store(out_tokens + base + count, tl.load(tokens + base + found))
            count += 1
            node = found
    tl.store(accepted + b, count)
    tl.debug_barrier()
    row = (base + node) * vocab
    columns = tl.arange(0, BLOCK)
    total = 0.0
    for start in range(0, vocab, BLOCK):
        at = start + columns
        p = tl.load(probs + row + at, mask=at < vocab, other=0.0)
        q = tl.load(scratch + row + at, mask=at < vocab, other=0.0)
        total += tl.sum(tl.maximum(p - q, 0.0))
    goal = tl.load(final_coins + b) * total
    before = 0.0
    chosen = vocab - 1
    open_ = True
    for start in range(0, vocab, BLOCK):
        if open_:
            at = start + columns
            p = tl.load(probs + row + at, mask=at < vocab, other=0.0)
            q = tl.load(scratch + row + at, mask=at < vocab, other=0.0)
            rest = tl.maximum(p - q, 0.0)
            inside = tl.sum(rest)
            if before + inside >= goal:
                running = before + tl.cumsum(rest)
                chosen = tl.min(tl.where((running >= goal) & (rest > 0), at, vocab - 1))
                open_ = False
            before += inside
    tl.store(out_tokens + base + count, chosen)


def target_only(o):
    """softmax, zeroed scratch, coins, kernel: what a caller has to run for one verification."""
    batch, nodes, vocab = o["target"].shape
    probs = (o["target"].float() / o["temperature"][:, None, None]).softmax(-1)
    scratch = torch.zeros_like(probs)
    coins = torch.rand(batch, nodes, device=probs.device)
    final = torch.rand(batch, device=probs.device)
    tokens = torch.full((batch, nodes), -1, dtype=torch.int64, device=probs.device)
    accepted = torch.empty(batch, dtype=torch.int32, device=probs.device)
    target_only_kernel[(batch,)](
        probs, scratch, o["tokens"], o["child"], o["sibling"], coins, final, tokens, accepted,
        vocab, NODES=nodes, BLOCK=4096, num_warps=32,
    )  # fmt: skip
    return tokens, accepted
