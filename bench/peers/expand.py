"""A peer of `draft_tree` in Torch, without synchronisation: it can be captured in a graph."""

import torch
from torch.nn.functional import linear, silu

from bench.peers.head import aten_cell, table_cell


def tree(cell):
    """Level by level: GRU cell, low-rank input, scores, log-softmax, top-k, the best paths."""

    def peer(base, hidden, anchor, weights, prepared, pool, widths, children):
        batch, units = len(anchor), weights.gru_size
        from_hidden = linear(hidden, weights.w1[:, : weights.hidden_size])
        from_state = weights.w1[:, weights.hidden_size :]
        in_pool = None if pool is None else weights.w2[pool]
        token, state = anchor[:, None], hidden.new_zeros(batch, 1, units)
        node = token.new_full((batch, 1), -1)
        path = base.new_zeros((batch, 1), dtype=torch.float32)
        tokens, parents, log_probs, first = [], [], [], 0
        for depth, width in enumerate(widths):
            flat = cell(token.flatten(), state.flatten(0, 1), weights, prepared)
            state = flat.view(batch, width, units)
            low_rank = silu(from_hidden[:, depth, None] + linear(state, from_state))
            logits = base[:, depth, None]
            if pool is not None:
                logits = logits.gather(2, pool[:, None])
            if depth > 0 and pool is None:
                logits = logits + linear(low_rank, weights.w2)
            elif depth > 0:
                logits = logits + low_rank @ in_pool.transpose(1, 2)
            law = logits.expand(-1, width, -1).float().log_softmax(-1)
            log_prob, at = law.topk(children)
            child = at if pool is None else pool.gather(1, at.flatten(1)).view_as(at)
            total = (path[..., None] + log_prob).flatten(1)
            tokens.append(child.flatten(1))
            parents.append(node[..., None].expand(-1, -1, children).flatten(1))
            log_probs.append(total)
            if depth + 1 < len(widths):
                path, best = total.topk(widths[depth + 1])
                token, node = child.flatten(1).gather(1, best), first + best
                row = (best // children)[..., None].expand(-1, -1, units)
                state = state.gather(1, row)
            first += width * children
        return torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(log_probs, 1)

    return peer


graph = tree(aten_cell)
graph_table = tree(table_cell)
