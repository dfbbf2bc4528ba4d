"""Decoding with a tree of drafts a cycle in place of a chain.

One cycle: the drafter's block gives base logits for every depth; the head expands a tree over them
(`draft_tree`), which the target reads in one forward under the tree's attention mask; `verify_tree`
keeps one path and adds a token. The path's keys and values move to the front of the cache and its
hidden states become the drafter's context. The emitted tokens follow the target's law, as with a
chain.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from domino_kernels import TreePlan, build_tree, compact_accepted, kv_move, verify_tree

from .cache import RowCache
from .drafter import Batch, DominoDrafter
from .ngram import NgramSession
from .requests import SAMPLING, Law, Sampling, law_of, on_device

RULES = "greedy", "match", "target_only", "rrsw", "traversal"
DRAWN = "rrsw", "traversal"


@dataclass(frozen=True)
class TreeOptions:
    """The shape of the trees, and the rule that verifies them.

    rule: None is "greedy" where every temperature is 0, otherwise "target_only". With these and
        "match" the tree is best-first: of all candidates the most probable by the head itself. With
        "rrsw" and "traversal" the children of a node are drawn without replacement by Gumbel-top-k,
        and all of them are verified, as those rules need it.
    nodes: N of a best-first tree, the root included.
    depth: levels; None: as many as the drafter drafts tokens.
    width: paths that are expanded a level (the most probable ones; all where there are fewer),
        children: of each path. A drawn tree has 1 + children * sum(widths(depth)) nodes.
    pool: children come from so many tokens, the block's greatest base logits; None: from the whole
        vocabulary (best-first only).
    lookup: so many tokens more, continued from where the last ones stood before in the text, as a
        branch of a best-first tree; 0: none.
    """

    rule: str | None = None
    nodes: int = 32
    depth: int | None = None
    width: int = 4
    children: int = 4
    pool: int | None = 512
    lookup: int = 0

    def __post_init__(self):
        if self.rule is not None and self.rule not in RULES:
            raise ValueError(f"TreeOptions: rule: got {self.rule!r}, expected one of {RULES}")
        for name, least, most in (
            ("nodes", 2, 1024),
            ("depth", 1, 1024),
            ("width", 1, 1024),
            ("children", 1, 32),
            ("pool", 1, 1024),
            ("lookup", 0, 64),
        ):
            value = getattr(self, name)
            if value is None and name in ("depth", "pool"):
                continue
            if not isinstance(value, int) or not least <= value <= most:
                raise ValueError(f"TreeOptions: {name}: got {value!r}, expected {least} to {most}")
        if self.drawn and (self.lookup or self.pool is None):
            raise ValueError(
                f"TreeOptions: lookup, pool: got {self.lookup}, {self.pool} with rule "
                f"{self.rule!r}, expected no lookup and a pool: its children have to be drawn"
            )

    @property
    def drawn(self) -> bool:
        return self.rule in DRAWN

    def widths(self, depth: int) -> tuple[int, ...]:
        """Paths expanded level by level: `width`, or as many as there are."""
        widths = [1]
        for _ in range(1, depth):
            widths.append(min(self.width, widths[-1] * self.children))
        return tuple(widths)

    def settled(self, drafter, temperatures: Sequence[float]) -> TreeOptions:
        """With rule and depth decided.

        Raises:
            TypeError: a drafter without a Domino head. ValueError: a depth that it cannot draft, a
                rule that does not sample with a temperature, too many nodes.
        """
        if not isinstance(drafter, DominoDrafter) or drafter.head is None:
            raise TypeError(
                f"generate: tree: got {type(drafter).__name__}, expected a drafter with a Domino "
                "head (prompt lookup may be a branch: TreeOptions.lookup)"
            )
        rule = self.rule or ("target_only" if any(temperatures) else "greedy")
        if rule == "greedy" and any(temperatures):
            raise ValueError(
                "generate: tree: got rule 'greedy' and a temperature, expected temperature 0 or "
                "another rule"
            )
        depth = drafter.default_drafts if self.depth is None else self.depth
        if depth > drafter.max_drafts:
            raise ValueError(
                f"generate: tree: got depth {depth}, expected at most {drafter.max_drafts}"
            )
        widths = self.widths(depth)
        if self.children * max(widths) > 1024:
            raise ValueError(
                f"generate: tree: got {self.children * max(widths)} children a level, expected at "
                "most 1024: fewer children or a smaller width"
            )
        if self.drawn and self.children * sum(widths) > 1023:
            raise ValueError(
                f"generate: tree: got {1 + self.children * sum(widths)} nodes, expected at most "
                "1024: fewer children, width or depth"
            )
        nodes = 1 + self.children * sum(widths)
        if not self.drawn:
            nodes = min(self.nodes, nodes + self.lookup)
        return replace(self, rule=rule, depth=depth, nodes=nodes)


def add_branch(tokens, parents, scores, branch):
    """Candidates with a chain hung into them: where a child of that token exists, it is taken.

    tokens, parents, scores: [B, C]; branch: [B, K] tokens, -1: none. All of the branch scores 0,
    the best there is. Returns the three, [B, C + K].
    """
    batch, count = tokens.shape
    more = branch.shape[1]
    tokens = torch.cat([tokens, branch], 1)
    parents = torch.cat([parents, parents.new_full((batch, more), -1)], 1)
    scores = torch.cat([scores, scores.new_full((batch, more), -torch.inf)], 1)
    at = torch.full((batch, 1), -1, dtype=parents.dtype, device=parents.device)
    alive = torch.ones_like(at, dtype=torch.bool)
    index = torch.arange(count + more, dtype=parents.dtype, device=parents.device)
    for k in range(more):
        alive = alive & (branch[:, k : k + 1] >= 0)
        same = (parents == at) & (tokens == branch[:, k : k + 1]) & (index < count)
        found = same.any(1, keepdim=True)
        place = torch.where(found, same.int().argmax(1, keepdim=True), count + k).to(index.dtype)
        # a slot of the branch that is not needed hangs below itself: build_tree leaves it out
        own = torch.where(alive & ~found, at, index[count + k])
        parents[:, count + k] = own[:, 0]
        scores = torch.where(alive & (index == place), 0.0, scores)
        at = torch.where(alive, place, at)
    return tokens, parents, scores


class TreeLoop:
    """A batch of prompts from prefill to the last row's end."""

    def __init__(
        self, target, drafter, prompts, max_new_tokens, sampling: Sequence[Sampling], seeds, stops,
        options, stats,
    ):  # fmt: skip
        self.target, self.drafter, self.options, self.stats = target, drafter, options, stats
        self.limit, self.stops = max_new_tokens, stops
        self.rows = list(range(len(prompts)))  # prompt index of every row still in the batch
        self.emitted = [0] * len(prompts)  # by row in the batch, as are all lists below
        device = target.device
        names = SAMPLING if law_of(sampling) is Law.FILTERED else ("temperature",)
        self.sampling = {
            n: on_device([getattr(s, n) for s in sampling], SAMPLING[n], device) for n in names
        }
        self.seed = torch.tensor(seeds, dtype=torch.int64, device=device)
        room = max(map(len, prompts)) + max_new_tokens + options.nodes + 1
        self.cache = RowCache(len(prompts), room, device)
        self.batch = Batch([list(p) for p in prompts], torch.empty(0, device=device), self.rows)
        self.session = drafter.begin(target, len(prompts), room)
        self.layers = tuple(drafter.feature_layers)
        self.lookup = NgramSession(3, len(prompts)) if options.lookup else None
        self.plan: TreePlan | None = None

    @torch.inference_mode()
    def run(self) -> Iterator[tuple[int, list[int], str | None]]:
        """(row, tokens, finish) as they are decided."""
        start = time.perf_counter()
        yield from self._emit(*self._prefill(), cycle=False)
        self.stats.prefill_seconds = self.stats.seconds = time.perf_counter() - start
        while self.rows:
            chunks = list(self._emit(*self._cycle(), cycle=True))
            self.stats.seconds = time.perf_counter() - start
            yield from chunks

    def _prefill(self):
        prompts, device = self.batch.tokens, self.target.device
        lengths = [len(p) for p in prompts]
        padded = torch.tensor([p + [0] * (max(lengths) - len(p)) for p in prompts], device=device)
        # The head runs at the few columns in which a prompt ends, not over the prompts.
        ends = sorted({n - 1 for n in lengths})
        logits, features = self.target.forward(
            padded, self.cache, layers=self.layers, keep=torch.tensor(ends, device=device)
        )
        column = torch.tensor([ends.index(n - 1) for n in lengths], device=device)
        logits = logits[torch.arange(len(prompts), device=device), column][:, None]
        counts = torch.tensor(lengths, device=device)
        root = torch.zeros(len(prompts), 1, dtype=torch.int64, device=device)
        result = self._verify(logits, root, root.int(), counts - 1)
        self.cache.advance(counts, lengths)
        self.session.commit(features, counts, lengths)
        return self._host(result)

    def _cycle(self):
        tokens, parents, positions, mask, q = self._draft()
        logits, features = self.target.forward(
            tokens.clamp(min=0), self.cache, layers=self.layers, positions=positions, mask=mask
        )
        result = self._verify(logits, tokens, parents, self.cache.lengths, **q)
        lines, counts = self._host(result)
        kv_move(
            self.cache.tensors(), result.path, result.num_accepted, self.cache.lengths, layout="HND"
        )
        path = result.path[:, : max(counts)].contiguous()
        (features,) = compact_accepted(path, result.num_accepted, features)
        kept = result.num_accepted.to(torch.int64) + 1
        self.cache.advance(kept, counts)
        self.session.commit(features, kept, counts)
        return lines, counts

    def _draft(self):
        """Tokens, parents, positions, mask and what the rule needs of the draft's law."""
        options, anchors = self.options, self.batch.anchors
        hidden, base = self.session.block(anchors, options.depth)
        pool = None
        if options.pool is not None and options.pool < base.shape[-1]:
            pool = base.float().amax(1).topk(options.pool).indices.int()
        plan = self._plan(len(anchors), None if pool is None else options.pool)
        sampled = {}
        if options.drawn:
            sampled = dict(
                temperature=self.sampling["temperature"], seed=self.seed,
                block_start=self.cache.lengths,
            )  # fmt: skip
        draft = plan(base, hidden, anchors, pool=pool, **sampled)
        candidates = draft.tokens, draft.parents, draft.log_probs
        if self.lookup is not None:
            branch = self.lookup.propose(self.batch, options.lookup)
            candidates = add_branch(*candidates, branch)
        tree = build_tree(
            anchors,
            *candidates[:2],
            prefix=self.cache.lengths,
            num_nodes=options.nodes,
            scores=None if options.drawn else candidates[2],
            mask="full",
            columns=max(self.cache.host_lengths) + options.nodes,
        )
        q = {}
        if options.drawn:
            shape = len(anchors), options.nodes, draft.scores.shape[-1]
            ids = torch.arange(shape[-1], device=anchors.device, dtype=torch.int32)[None]
            ids = ids if pool is None else pool
            q = dict(draft_pool=(ids[:, None].expand(shape), draft.scores))
        return tree.tokens, tree.parents, tree.positions, tree.mask, q

    def _plan(self, batch: int, pool: int | None) -> TreePlan:
        if self.plan is None or self.plan.batch != batch:
            options, config = self.options, self.session.config
            self.plan = TreePlan(
                batch,
                self.session.head,
                widths=options.widths(options.depth),
                children=options.children,
                pool_size=pool,
                return_scores=options.drawn,
                shift_label=config.shift_label,
                pure_draft_prefix_len=config.pure_draft_prefix_len,
            )
        return self.plan

    def _verify(self, logits: Tensor, tokens: Tensor, parents: Tensor, block_start: Tensor, **q):
        rule = self.options.rule
        if rule in DRAWN and not q:
            rule = "target_only"  # a prompt's end has no drafts
        if rule == "greedy":
            result = verify_tree(logits, tokens, parents)
        else:
            result = verify_tree(
                logits,
                tokens,
                parents,
                rule=rule,
                seed=self.seed,
                block_start=block_start,
                **self.sampling,
                **q,
            )
        self.batch.anchors = result.tokens.gather(1, result.num_accepted[:, None].long())[:, 0]
        return result

    def _host(self, result) -> tuple[list[list[int]], list[int]]:
        """Emitted tokens and their number per row: the one host read of a cycle."""
        accepted, status = result.num_accepted[:, None], result.status[:, None]
        table = torch.cat((accepted, status, result.tokens), dim=1).tolist()
        for row, line in zip(self.rows, table):
            if line[2 + line[0]] < 0:
                raise ValueError(
                    f"generate: target logits of prompt {row}: got NaN or no finite value "
                    f"(verify_tree status {line[1]}), expected a law to choose from"
                )
        return [line[2 : 3 + line[0]] for line in table], [line[0] + 1 for line in table]

    def _emit(self, tokens, counts, *, cycle: bool):
        """Cut at stop tokens and limits, record, and drop the rows that are done."""
        alive = []
        if cycle:
            self.stats.cycles += 1
        for b, row in enumerate(self.rows):
            new = tokens[b][: self.limit - self.emitted[b]]
            finish = "length" if len(new) == self.limit - self.emitted[b] else None
            stop = next((i for i, token in enumerate(new) if token in self.stops), None)
            if stop is not None:
                new, finish = new[: stop + 1], "stop"
            self.batch.tokens[b] += new
            self.emitted[b] += len(new)
            self.stats.tokens += len(new)
            if cycle:
                self.stats.accepted[row].append(counts[b])
            if finish is None:
                alive.append(b)
            yield row, new, finish
        if len(alive) < len(self.rows):
            self._select(alive)

    def _select(self, alive: list[int]) -> None:
        self.rows = [self.rows[b] for b in alive]
        if not alive:
            return
        self.emitted = [self.emitted[b] for b in alive]
        index = torch.tensor(alive, device=self.cache.lengths.device)
        self.seed = self.seed[index]
        self.sampling = {name: values[index] for name, values in self.sampling.items()}
        self.batch.tokens = [self.batch.tokens[b] for b in alive]
        self.batch.anchors = self.batch.anchors[index]
        self.batch.requests = self.rows
        self.cache.select(alive)
        self.session.select(alive)
        if self.lookup is not None:
            self.lookup.select(alive)
