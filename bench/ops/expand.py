"""Draft trees at the shapes of the public checkpoints: 1 + 7 x 8 paths, 8 children each."""

import torch
from torch.nn import functional

from bench.ops.head import DTYPE, MODELS, SLOTS
from bench.ops.head_inputs import planted_block
from bench.peers import expand as peers
from bench.peers.head import prepare
from bench.registry import Case
from domino_kernels import TreePlan

WIDTHS, CHILDREN = (1, 8, 8, 8, 8, 8, 8, 8), 8
BATCHES = (1, 8)
TABLES = (False, True)
POOLS = (None, 2048, 64)  # ids of a pool; None: the whole vocabulary


def assert_tree(operands, result):
    """Each candidate's log-probability, and that no id left out beats one that was taken."""
    base, hidden, anchor, weights, _, pool = operands[:6]
    tokens, parents, log_probs = result[:3]
    low, high = weights.w1.double().tensor_split([weights.hidden_size], 1)
    rounded = lambda t: t.to(DTYPE).double()  # noqa: E731
    row = torch.arange(len(anchor), device=anchor.device)[:, None]
    token, state = anchor[:, None], weights.w_hh.new_zeros(len(anchor), 1, weights.gru_size)
    path, first, state = base.new_zeros(len(anchor), 1).double(), 0, state.double()
    states = [state]
    for depth, width in enumerate(WIDTHS):
        count = width * CHILDREN
        mine = slice(first, first + count)
        node = parents[:, mine].view(-1, width, CHILDREN)[..., 0].long()
        if depth > 0:
            token = tokens.gather(1, node)
            before = node - (first - WIDTHS[depth - 1] * CHILDREN)
            state = states[-1][row, before // CHILDREN]
            path = log_probs.double().gather(1, node)
        x = weights.embedding[token].double().flatten(0, 1)
        cell = torch.gru_cell(x, state.flatten(0, 1), weights.w_ih.double(), weights.w_hh.double())
        states.append(rounded(cell).view(len(anchor), width, -1))
        scores = base[:, depth, None].double()
        if depth > 0:
            z = hidden[:, depth, None].double() @ low.T + states[-1] @ high.T
            scores = scores + rounded(functional.silu(z)) @ weights.w2.double().T
        scores = scores.expand(-1, width, -1)
        children = tokens[:, mine].view(-1, width, CHILDREN).long()
        candidates = scores
        if pool is not None:
            candidates = scores.gather(2, pool[:, None].long().expand(-1, width, -1))
        law = scores - candidates.logsumexp(-1, keepdim=True)
        got = log_probs[:, mine].view(-1, width, CHILDREN).double() - path[..., None]
        best = candidates.topk(CHILDREN).values
        bound = 8 * torch.finfo(DTYPE).eps * best[..., :1].abs().clamp_min(1)
        behind = best - scores.gather(2, children)
        assert (behind <= bound).all(), f"depth {depth}: {behind.max():.3f} behind the best"
        error = (got - law.gather(2, children)).abs()
        assert (error <= bound).all(), f"depth {depth}: log_probs off by {error.max():.3f}"
        first += count


def draft_tree_case(model, batch, pool_size, table):
    shape = MODELS[model]
    hidden, units, rank, vocab = shape.values()

    def make(seed, device):
        block = planted_block(shape, batch, seed, device, slots=SLOTS, dtype=DTYPE)
        weights = block.weights.with_table() if table else block.weights
        plan = TreePlan(batch, weights, widths=WIDTHS, children=CHILDREN, pool_size=pool_size)
        pool = None
        if pool_size is not None:
            pool = block.base[:, 1 : len(WIDTHS)].amax(1).topk(pool_size).indices.int()
        return *block[:3], weights, prepare(weights), pool, plan

    def ours(base, hidden, anchor, weights, prepared, pool, plan):
        return plan(base, hidden, anchor, pool=pool)

    def peer(base, hidden, anchor, weights, prepared, pool, plan):
        run = peers.graph_table if table else peers.graph
        pool = None if pool is None else pool.long()
        return run(base, hidden, anchor, weights, prepared, pool, WIDTHS, CHILDREN)

    levels, candidates = len(WIDTHS), pool_size or vocab
    rows = candidates * (1 if pool_size is None else batch)
    elements = rank * hidden + levels * (3 * units * units + rank * units + rows * rank)
    elements += batch * levels * candidates + batch * sum(WIDTHS) * (3 * units if table else hidden)
    elements += 0 if table else levels * 3 * units * hidden
    return Case(
        op="draft_tree",
        case="vocabulary" if pool_size is None else "pool",
        params={
            "model": model,
            "M": pool_size,
            "widths": list(WIDTHS),
            "children": CHILDREN,
            "table": table,
            "data": "planted",
        },
        shape=shape,
        batch=batch,
        make=make,
        providers={"ours": ours, "graph": peer},
        check=assert_tree,
        bytes=elements * DTYPE.itemsize,
    )


def cases():
    for model in ("qwen3-8b", "smollm2-135m"):
        for batch in BATCHES:
            for pool_size in POOLS:
                for table in TABLES:
                    yield draft_tree_case(model, batch, pool_size, table)
