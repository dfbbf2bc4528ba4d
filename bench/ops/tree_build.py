"""What surrounds the verification of a tree: building one, and keeping what was accepted.

The shapes of Qwen3-8B: 449 candidates (one level of 1 path, 7 of 8 paths, 8 children each) of which
64 nodes are kept; hidden rows of 4096 bf16; 36 layers of keys and values with 8 heads of 128.
"""

import torch

from bench.ops.tree import NODES, SPINE
from bench.registry import Case
from domino_kernels import build_tree, compact_accepted, kv_move

WIDTH, LAYERS, HEADS, HEAD_SIZE, SLOTS = 4096, 36, 8, 128, 256
PATHS, CHILDREN, LEVELS = 8, 8, 8
ACCEPTED = 7
FIRST = 100  # slot of the root


def candidate_parents(generator, device):
    """Parents of the candidates of each level among the last one's, -1 for the first level's."""
    parents, last = [torch.full((CHILDREN,), -1, device=device)], torch.arange(CHILDREN)
    for _ in range(LEVELS - 1):
        chosen = last[torch.randperm(len(last), generator=generator)[:PATHS]].sort().values
        first = sum(map(len, parents))
        parents.append(chosen.repeat_interleave(CHILDREN).to(device))
        last = torch.arange(first, first + PATHS * CHILDREN)
    return torch.cat(parents).int()


def build_operands(batch, mask, seed, device):
    generator = torch.Generator().manual_seed(seed)
    parents = candidate_parents(generator, device).repeat(batch, 1)
    count = parents.size(1)
    scores = -torch.rand(batch, count, generator=generator).to(device)
    return {
        "root": torch.zeros(batch, dtype=torch.int64, device=device),
        "tokens": torch.randint(151936, (batch, count), generator=generator).to(device),
        "parents": parents,
        "scores": scores,
        "prefix": torch.full((batch,), 1000, device=device),
        "num_nodes": NODES,
        "mask": mask,
        "columns": 1000 + NODES if mask == "full" else None,
    }


def build_case(batch, mask):
    def make(seed, device):
        arguments = build_operands(batch, mask, seed, device)
        return arguments, build_tree(**arguments)

    def check(operands, tree):
        arguments, _ = operands
        parents, index = tree.parents.cpu(), tree.index.cpu().long()
        assert not tree.status.any() and (index[:, 1:] >= 0).all()
        tokens = arguments["tokens"].cpu().gather(1, index.clamp_min(0))
        assert torch.equal(tree.tokens.cpu()[:, 1:], tokens[:, 1:]), "tokens of other candidates"
        wanted = arguments["parents"].cpu().gather(1, index.clamp_min(0))[:, 1:]
        kept = index.gather(1, parents.clamp_min(0).long())[:, 1:]
        assert torch.equal(kept, wanted.long()), "nodes hang elsewhere than their candidates"

    columns = {"packed": NODES // 8, "bool": NODES, "full": 1000 + NODES}[mask]
    count = CHILDREN + (LEVELS - 1) * PATHS * CHILDREN
    return Case(
        op="build_tree",
        case=mask,
        params={"candidates": count},
        shape={"N": NODES},
        batch=batch,
        make=make,
        providers={"ours": lambda a, out: build_tree(**a, out=out)},
        check=check,
        bytes=batch * (count * 16 + NODES * (28 + columns)),
    )


def path_operands(batch, device):
    path = torch.full((batch, NODES), -1, dtype=torch.int32, device=device)
    path[:, : ACCEPTED + 1] = torch.tensor(SPINE[: ACCEPTED + 1], dtype=torch.int32)
    return path, torch.full((batch,), ACCEPTED, dtype=torch.int32, device=device)


def compact_case(batch):
    def make(seed, device):
        rows = torch.randn(batch, NODES, WIDTH, device=device).bfloat16()
        positions = torch.arange(NODES, device=device).repeat(batch, 1)
        tensors = rows, positions
        return *path_operands(batch, device), tensors, tuple(map(torch.empty_like, tensors))

    def check(operands, out):
        _, _, tensors, _ = operands
        for value, kept in zip(tensors, out):
            assert torch.equal(kept[:, : ACCEPTED + 1], value[:, SPINE[: ACCEPTED + 1]])
            assert not kept[:, ACCEPTED + 1 :].any()

    return Case(
        op="compact_accepted",
        case="hidden",
        params={"accepted": ACCEPTED},
        shape={"N": NODES, "width": WIDTH},
        batch=batch,
        make=make,
        providers={
            "ours": lambda path, kept, rows, out: compact_accepted(path, kept, *rows, out=out)
        },
        check=check,
        bytes=batch * (NODES + ACCEPTED + 1) * (WIDTH * 2 + 8),
    )


def move_case(batch):
    def make(seed, device):
        caches = [
            torch.randn(batch, SLOTS, HEADS, HEAD_SIZE, device=device).bfloat16()
            for _ in range(2 * LAYERS)
        ]
        start = torch.full((batch,), FIRST, device=device)
        slots = [FIRST + n for n in SPINE[: ACCEPTED + 1]]
        wanted = [cache[:, slots].clone() for cache in (caches[0], caches[-1])]
        return caches, *path_operands(batch, device), start, wanted

    def move(caches, path, kept, start, wanted):
        kv_move(caches, path, kept, start)
        return caches

    def check(operands, caches):
        for cache, wanted in zip((caches[0], caches[-1]), operands[-1]):
            assert torch.equal(cache[:, FIRST : FIRST + ACCEPTED + 1], wanted)

    return Case(
        op="kv_move",
        case="contiguous",
        params={"accepted": ACCEPTED},
        shape={"layers": LAYERS, "heads": HEADS, "head_size": HEAD_SIZE},
        batch=batch,
        make=make,
        providers={"ours": move},
        check=check,
        bytes=batch * 2 * LAYERS * 2 * (ACCEPTED - 1) * HEADS * HEAD_SIZE * 2,
    )


def cases():
    for batch in (1, 8):
        for mask in ("packed", "bool", "full"):
            yield build_case(batch, mask)
        yield compact_case(batch)
        yield move_case(batch)
