"""Verification of 64-node trees at the vocabulary of Qwen3.

The tree: 16 levels below the root, of four siblings each but three in the last; the first sibling
carries the next level. So 16 nodes have children, and all 16 levels end at a leaf. Every row has a
planted winner that takes all but about 1e-7 of its
law. Down to level `accepted` it is the first sibling's token, below that none of the siblings', so
any right verifier of any rule keeps exactly that path: one gate serves ours and the peers. Laws are
tested in tests/losslessness, not here.
"""

import torch

from bench.peers import tree as peers
from bench.registry import Case
from domino_kernels import TreeResult, verify_tree, verify_tree_workspace

VOCABULARY = 151936
BATCHES = (1, 8)
NODES, SIBLINGS, DEPTH, POOL = 64, 4, 16, 64
DTYPE = torch.bfloat16


def tree_parents():
    parents, spine = [-1], 0
    while len(parents) < NODES:
        first = len(parents)
        parents += [spine] * min(SIBLINGS, NODES - first)
        spine = first
    return parents


PARENTS = tree_parents()
CHILDREN = [[c for c in range(1, NODES) if PARENTS[c] == n] for n in range(NODES)]
NEXT = [n + 1 if n + 1 < NODES and PARENTS[n + 1] == PARENTS[n] else -1 for n in range(NODES)]
SPINE = [0, *(1 + SIBLINGS * level for level in range(DEPTH))]  # nodes that are first siblings


def make_operands(batch, accepted, drafted, logprobs, seed, device):
    generator = torch.Generator(device).manual_seed(seed)
    drawn = dict(generator=generator, device=device)
    wide = batch, NODES
    tokens = torch.stack(
        [torch.randperm(VOCABULARY - 1, **drawn)[:NODES] + 1 for _ in range(batch)]
    )
    winner = torch.zeros(wide, dtype=torch.int64, device=device)  # token 0 is no draft
    for level in range(accepted):
        winner[:, SPINE[level]] = tokens[:, SPINE[level + 1]]
    target = torch.randn(*wide, VOCABULARY, dtype=DTYPE, **drawn)
    target.scatter_(-1, winner[..., None], 30.0)
    pool = None
    if drafted:
        ids = torch.randint(1, VOCABULARY, (*wide, POOL), **drawn).sort(-1).values
        ids += torch.arange(POOL, device=device)  # distinct
        logits = torch.randn(*wide, POOL, **drawn)
        for n in range(1, NODES):  # children are in the pool of their parent
            ids[:, PARENTS[n], n % SIBLINGS] = tokens[:, n]
        pool = ids.clamp_max_(VOCABULARY - 1).int(), logits
    out = TreeResult(
        torch.empty(wide, dtype=torch.int64, device=device),
        torch.empty(wide, dtype=torch.int32, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
        torch.empty(wide, device=device) if logprobs else None,
        torch.empty(batch, dtype=torch.uint8, device=device),
    )
    pooled = POOL if drafted else 0

    def links(rows):
        return torch.tensor([rows] * batch, dtype=torch.int64, device=device)

    return {
        "accepted": accepted,
        "depth": DEPTH,
        "children": links([c + [-1] * (SIBLINGS - len(c)) for c in CHILDREN]),
        "child": links([c[0] if c else -1 for c in CHILDREN]),
        "sibling": links(NEXT),
        "target": target,
        "tokens": tokens,
        "parents": torch.tensor([PARENTS] * batch, dtype=torch.int32, device=device),
        "temperature": torch.ones(batch, device=device),
        "seed": torch.arange(batch, device=device),
        "start": torch.full((batch,), 100, device=device),
        "pool": pool,
        "winner": winner,
        "out": out,
        "workspace": verify_tree_workspace(batch, NODES, VOCABULARY, pool=pooled, device=device),
    }


def ours(rule):
    def run(o):
        sampled = {}
        if rule != "greedy":
            sampled = dict(temperature=o["temperature"], seed=o["seed"], block_start=o["start"])
        result = verify_tree(
            o["target"],
            o["tokens"],
            o["parents"],
            rule=rule,
            draft_pool=o["pool"] if rule in ("rrsw", "traversal") else None,
            logprobs=o["out"].chosen_logprob is not None,
            out=o["out"],
            workspace=o["workspace"],
            **sampled,
        )
        return result.tokens, result.num_accepted

    return run


def check(operands, result):
    o = operands[0]
    tokens, kept = result[:2]
    accepted = o["accepted"]
    assert kept.tolist() == [accepted] * len(kept), f"accepted {kept.tolist()}, not {accepted}"
    expected = o["winner"][:, SPINE[: accepted + 1]]
    wrong = int((tokens[:, : accepted + 1] != expected).sum())
    assert wrong == 0, f"{wrong} emitted tokens are not the winners"


PEERS = {
    "greedy": {"torch": peers.torch_greedy, "compile": peers.compiled_greedy},
    "target_only": {
        "torch": peers.torch_target_only,
        "compile": peers.compiled_target_only,
        "sglang": peers.sglang_target_only,
    },
    "rrsw": {"torch": peers.torch_rrsw},
    "traversal": {},
}


def verify_tree_case(rule, batch, accepted, logprobs=True):
    drafted = rule in ("rrsw", "traversal")
    providers = {"ours": ours(rule)}
    if accepted == 7 and logprobs:
        providers |= PEERS[rule]
    rows_read = sum(map(bool, CHILDREN)) + (accepted == DEPTH)  # leaves are read where a path ends
    return Case(
        op="verify_tree",
        case=rule,
        params={"model": "qwen3", "accepted": accepted, "T": float(rule != "greedy")}
        | {"logprobs": logprobs}
        | ({"M": POOL, "q_form": "pool"} if drafted else {}),
        shape={"V": VOCABULARY, "N": NODES},
        batch=batch,
        make=lambda seed, device: (
            make_operands(batch, accepted, drafted, logprobs, seed, device),
        ),
        providers=providers,
        check=check,
        bytes=batch * rows_read * VOCABULARY * DTYPE.itemsize,
        gpu_only=tuple(n for n in ("compile", "sglang") if n in providers),
    )


def cases():
    from bench.ops import tree_build  # which takes its tree from here

    yield from tree_build.cases()
    for rule in PEERS:
        for accepted in (DEPTH, 7, 0):
            for batch in BATCHES:
                yield verify_tree_case(rule, batch, accepted)
                if rule == "greedy":
                    yield verify_tree_case(rule, batch, accepted, logprobs=False)
