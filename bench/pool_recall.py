"""python -m bench recall --prompts F [--json F]: does a pool of ids hold the head's winner?

Decodes held-out prompts with a trained drafter and looks at every block that `draft_chain` gets. In
each corrected slot the full vocabulary has one winner, given the winners before it. A pool of the
block's base logits holds that winner or does not:

- slot: the slot's own top M;
- block: the top M of the maximum over the corrected slots, one pool for all of them;
- group: the best 16 of each of M / 16 groups of ids by that maximum: what `draft_chain` scores;
- union: the ids in some slot's top M, one pool for all of them; its size is reported.

*Recall* is the fraction of corrected slots whose winner is in the pool. A chain over the pool that
a full-vocabulary pass certifies restarts behind the first slot that differs. Up to there it follows
the winners, so it restarts once for every winner outside the pool; the *restart rate* is the
fraction of blocks with at least one. The *accepted length* of the pool alone, without a
certificate, is what its ids reach in the target's own continuation of the same anchors: `full` is
the same for the winners. These are counts: the machine's speed is in none of them.
"""

import argparse
import datetime
import json
import shlex
import sys
from unittest import mock

import torch
from torch.nn import functional

import domino_kernels
from bench import report

POOLS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
KINDS = ("slot", "block", "union", "group")
MOMENTS = (
    "base_std",
    "delta_std",
    "winner_base",  # above the mean of the base logits
    "winner_behind",  # the best base logit
    "winner_delta",  # above the mean of the correction
    "winner_lead",  # over the runner-up, corrected
    "base_agrees",  # 1 where the best base logit wins
)


def ranks(scores):
    """Place of each id in its row, best first, ties to the lowest id: [..., V] -> [..., V]."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(scores.size(-1)).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def pool_ranks(base):
    """Base logits [C, V] of the corrected slots -> [kind, C, V]: in the pool iff the rank < M.

    Not for the last kind, whose pools of different M do not hold each other.
    """
    slot = ranks(base)
    shared = ranks(base.amax(0)), slot.amin(0)
    return torch.stack((slot, *(s.expand_as(slot) for s in shared)))


def group_pool(values, size):
    """values [V] -> [V] bool: the pool of `size` ids that draft_chain takes (chain_pool.h)."""
    groups = -(-size // 16)
    ids = values.argsort(descending=True, stable=True)
    of_id = ids // 16 % groups
    by_group = of_id.argsort(stable=True)  # in each group the best first
    ids, of_id = ids[by_group], of_id[by_group]
    place = torch.arange(len(ids)) - torch.searchsorted(of_id, of_id)
    return torch.zeros_like(ids, dtype=torch.bool).scatter_(
        0, ids, (place < 16) & (16 * of_id + place < size)
    )


def corrections(hidden, anchor, tokens, weights):
    """What the head adds to the base logits of each slot, after these ids: [K, V]."""
    state, states = hidden.new_zeros(1, weights.gru_size), []
    for token in torch.cat((anchor, tokens[0, :-1])):
        embedding = weights.embedding[token][None]
        state = torch.gru_cell(embedding, state, weights.w_ih, weights.w_hh)
        states.append(state)
    low_rank = functional.silu(
        torch.cat((hidden[0, : len(states)], torch.cat(states)), -1) @ weights.w1.T
    )
    return low_rank @ weights.w2.T


def moments(base, delta, winners):
    """MOMENTS of one block's corrected slots, base and delta [C, V]: what bench/ops imitates.

    In units of the base logits' deviation over the vocabulary, except `base_std` itself.
    """
    std = base.std(-1)
    at = winners[:, None]
    in_base, in_delta = base.gather(1, at)[:, 0], delta.gather(1, at)[:, 0]
    top = (base + delta).topk(2).values
    return (
        std,
        delta.std(-1) / std,
        (in_base - base.mean(-1)) / std,
        (base.amax(-1) - in_base) / std,
        (in_delta - delta.mean(-1)) / std,
        (top[:, 0] - top[:, 1]) / std,
        (base.argmax(-1) == winners).float(),
    )


class Recorder:
    """Stands in for `draft_chain` in a decoding loop of one row; keeps what each block shows."""

    def __init__(self, pools=POOLS):
        self.pools = torch.tensor(pools)
        self.draft_chain = domino_kernels.draft_chain
        self.blocks = []

    def __call__(self, base, hidden, anchor, weights, **options):
        tokens = self.draft_chain(base, hidden, anchor, weights, **options)
        first = options["pure_draft_prefix_len"]
        if not options["shift_label"] or len(anchor) > 1:
            raise ValueError("pool_recall: expected shifted labels and one row")
        in_slots = base[0, first : tokens.size(1)]
        winners = tokens[0, first:]
        places, maxima = pool_ranks(in_slots), in_slots.amax(0)
        in_groups = torch.stack([group_pool(maxima, size) for size in self.pools.tolist()])
        at = places.gather(2, winners.expand(len(places), -1)[..., None])[..., 0]
        missed = at[:, None] >= self.pools[:, None]
        missed = torch.cat((missed, ~in_groups[None, :, winners]))  # [kind, M, C]
        drafts = tokens[0].expand(*missed.shape[:2], -1).clone()
        # where nothing is missed, the pool's ids are the winners
        for kind, m in missed.any(-1).nonzero().tolist():
            within = base.clone()
            inside = places[kind] < self.pools[m] if kind < len(places) else in_groups[m]
            within[0, first : tokens.size(1)].masked_fill_(~inside, -torch.inf)
            drafts[kind, m] = self.draft_chain(within, hidden, anchor, weights, **options)[0]
        delta = corrections(hidden, anchor, tokens, weights)[first:]
        found = {
            "winners": tokens[0],
            "missed": missed.int(),
            "drafts": drafts,
            "union": (places[KINDS.index("union"), 0] < self.pools[:, None]).sum(-1),
            "moments": torch.stack(moments(in_slots, delta, winners)),
        }
        # As lists: small tensors among these large temporaries would pin the heap, 10 MB a block.
        self.blocks.append({name: value.tolist() for name, value in found.items()})
        return tokens


def reach(drafts, continuation):
    """Tokens that a cycle emits: the matching drafts and one more, up to the end of the text."""
    same = 0
    while same < min(len(drafts), len(continuation)) and drafts[same] == continuation[same]:
        same += 1
    return min(same + 1, len(continuation))


def record(target, drafter, prompt, new_tokens, pools=POOLS):
    """The blocks of one prompt whose anchors are among the first `new_tokens`, with their reach."""
    from domino_draft import generate

    recorder = Recorder(pools)
    longer = new_tokens + drafter.max_drafts + 1  # the last blocks need the text that follows them
    with mock.patch.object(domino_kernels, "draft_chain", recorder):
        done = generate(target, drafter, [prompt], max_new_tokens=longer)
    text, position, kept = done.sequences[0], 0, []
    for block, emitted in zip(recorder.blocks, done.stats.accepted[0], strict=True):
        if position >= new_tokens:
            break
        follows = text[position + 1 :]
        block["reach"] = reach(block["winners"], follows)
        if block["reach"] != min(emitted, len(follows)):
            raise AssertionError(f"block at {position}: {block['reach']} is not {emitted}")
        drafts = block.pop("drafts")
        block["pool_reach"] = [[reach(ids, follows) for ids in kind] for kind in drafts]
        kept.append(block)
        position += emitted
    return kept


def summary(blocks, pools=POOLS):
    """Counts of blocks as `record` returns them: means over blocks, and one row a kind and M."""
    each = lambda name: torch.tensor([b[name] for b in blocks], dtype=torch.float64)  # noqa: E731
    missed, union = each("missed"), each("union").mean(0)  # [N, kind, M, C], [M]
    reached = each("pool_reach").mean(0)
    restarts = missed.sum(-1)
    rows = []
    for k, kind in enumerate(KINDS):
        for m, size in enumerate(pools):
            by_slot = 1 - missed[:, k, m].mean(0)
            rows.append(
                {
                    "pool": kind,
                    "M": size,
                    "ids": union[m].item() if kind == "union" else size,
                    "recall": by_slot.mean().item(),
                    "recall_by_slot": by_slot.tolist(),
                    "restart_rate": (restarts[:, k, m] > 0).double().mean().item(),
                    "restarts_per_block": restarts[:, k, m].mean().item(),
                    "restarts_max": int(restarts[:, k, m].max()),
                    "accepted_length": reached[k, m].item(),
                }
            )
    full = sum(b["reach"] for b in blocks) / len(blocks)
    return {"blocks": len(blocks), "accepted_length": full, "pools": rounded(rows)}


def scale(blocks):
    """Quantiles over corrected slots of the moments of their logits."""
    result = {}
    cuts = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    for i, name in enumerate(MOMENTS):
        values = torch.tensor([b["moments"][i] for b in blocks], dtype=torch.float64).flatten()
        quantiles = zip(("p10", "p50", "p90"), values.quantile(cuts).tolist())
        result[name] = {"mean": values.mean().item(), **dict(quantiles)}
    return rounded(result)


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return round(value, 5) if isinstance(value, float) else value


def table(found, of="all"):
    lines = ["| M | pool | recall | restart rate | restarts a block | accepted length |"]
    lines.append("|---|---|---|---|---|---|")
    for row in found["sets"][of]["pools"]:
        ids = f" ({row['ids']:.0f} ids)" if row["pool"] == "union" else ""
        lines.append(
            f"| {row['M']} | {row['pool']}{ids} | {100 * row['recall']:.2f}% "
            f"| {100 * row['restart_rate']:.1f}% | {row['restarts_per_block']:.3f} "
            f"| {row['accepted_length']:.3f} |"
        )
    return "\n".join(lines)


def main(arguments):
    from domino_draft.evaluate import complete_turns, load_prompts
    from domino_draft.loading import load_drafter, load_target

    parser = argparse.ArgumentParser(prog="python -m bench recall", description=__doc__)
    parser.add_argument("--target", default="smollm2", help="a model's folder, or smollm2")
    parser.add_argument("--drafter", default="shipped", help="a drafter's folder, or shipped")
    parser.add_argument("--prompts", required=True, help="JSONL of domino_draft.evaluate")
    parser.add_argument("--sets", nargs="*", default=(), help="these sets only")
    parser.add_argument("--limit", type=int, default=10, help="prompts a set, evenly spread")
    parser.add_argument("-n", "--tokens", type=int, default=96, help="anchors a prompt, at most")
    parser.add_argument("--json", metavar="F", help="write the counts as JSON")
    options = parser.parse_args(arguments)

    target = load_target(options.target)
    drafter = load_drafter(options.drafter, target)
    prompts = load_prompts(options.prompts, options.sets, options.limit)
    blocks = {}
    with torch.inference_mode():
        prompts = complete_turns(target, prompts, max_new_tokens=options.tokens, batch_size=1)
        for done, prompt in enumerate(prompts):
            print(f"\r{done}/{len(prompts)}", end="", file=sys.stderr, flush=True)
            found = record(target, drafter, prompt.ids, options.tokens)
            blocks.setdefault(prompt.set, []).extend(found)
    print("\r", end="", file=sys.stderr)
    every = [block for part in blocks.values() for block in part]
    run = {
        "command": "python -m bench recall " + shlex.join(arguments),
        "date": datetime.date.today().isoformat(),
        "commit": report.commit(),
        "torch": torch.__version__,
        "data": {
            "target": options.target,
            "drafter": options.drafter,
            "dtype": "float32",
            "prompts": [prompt.id for prompt in prompts],
            "tokens_a_prompt": options.tokens,
            "drafts_a_block": drafter.default_drafts,
        },
        "scale": scale(every),
        "sets": {name: summary(part) for name, part in {"all": every, **blocks}.items()},
    }
    print(f"{len(every)} blocks, accepted length {run['sets']['all']['accepted_length']:.3f}\n")
    print(table(run))
    print(json.dumps(run["scale"], indent=1))
    if options.json:
        report.write(run, options.json)
