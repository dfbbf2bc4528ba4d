"""A proposer like vLLM's: rows of prompts, prompt chunks and blocks to verify in one flat batch.

python examples/vllm_style_proposer.py
"""

from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from tiny import Llama, tiny_pair
from torch.nn.functional import scaled_dot_product_attention

import domino_kernels as dk


@dataclass
class Request:
    prompt: list[int]
    new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    num_drafts: int | None = None  # None: as many as the drafter has
    tokens: list[int] = field(default_factory=list)  # prompt and output
    computed: int = 0  # how many of them the cache holds
    drafts: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)  # tokens of each cycle

    @property
    def output(self):
        return self.tokens[len(self.prompt) :][: self.new_tokens]


class PagedCache:
    """Keys and values by slot, 2 x [layers, slots, heads, D]; slot = page id * page + offset."""

    def __init__(self, layers, pages, page, heads, dim, like):
        self.memory = like.new_zeros(2, layers, pages * page, heads, dim)
        self.page = page

    def slots(self, block_tables, positions):
        """block_tables [B, pages a request], positions [B, T] -> slots [B, T]."""
        return block_tables.gather(1, positions // self.page) * self.page + positions % self.page


class DominoProposer:
    """Holds the drafter and its own paged cache, whose pages are those of the target's requests."""

    def __init__(self, target, drafter, pages, page):
        config = drafter.config
        self.target, self.drafter = target, drafter
        self.num_drafts, self.slots = config.block_size - 1, config.block_size
        shape = config.num_hidden_layers, pages, page, config.num_key_value_heads, config.head_dim
        self.cache = PagedCache(*shape, like=drafter.fc.weight)
        self.head = drafter.head.weights(target.embedding)
        self.mask = target.embedding[config.mask_token_id]

    def insert(self, features, positions, slot_mapping):
        """features [N, n * H] of target rows become context. Rows of rejected drafts may be among
        them: the block that propose writes next covers their places."""
        kv = self.drafter.context_kv(features[None], positions[None])
        for layer, pair in enumerate(kv):
            for memory, new in zip(self.cache.memory, pair):
                memory[layer][slot_mapping] = new[0].transpose(0, 1)

    def propose(self, anchors, lengths, block_tables):
        """anchors, lengths (= the anchor's position) int64 [B], block_tables [B, pages a request]
        -> drafts int64 [B, K]. A row whose anchor is not known yet drafts nonsense."""
        config = self.drafter.config
        anchors = anchors.clamp(min=0)
        positions = lengths[:, None] + torch.arange(self.slots, device=anchors.device)
        room = torch.arange(block_tables.shape[1] * self.cache.page, device=anchors.device)
        every = self.cache.slots(block_tables, room.expand(len(anchors), -1))
        context = Context(self.cache, self.cache.slots(block_tables, positions), every)
        mask = (room <= positions[:, -1:])[:, None, None].expand(-1, 1, self.slots, -1)
        masks = self.mask.expand(len(anchors), self.slots - 1, -1)
        block = torch.cat((self.target.embedding[anchors][:, None], masks), dim=1)
        hidden = self.drafter(block, positions, context, mask)
        return dk.draft_chain(
            self.target.lm_head(hidden),
            hidden,
            anchors,
            self.head,
            num_drafts=self.num_drafts,
            shift_label=config.shift_label,
            pure_draft_prefix_len=config.pure_draft_prefix_len,
        )


class Context:
    """The cache as the drafter's layers see it: they write to `slots` and read `every`."""

    def __init__(self, cache, slots, every):
        self.cache, self.slots, self.every = cache, slots, every

    def update(self, k, v, layer):
        for memory, new in zip(self.cache.memory, (k, v)):
            memory[layer][self.slots] = new.transpose(1, 2)
        return (memory[layer][self.every].transpose(1, 2) for memory in self.cache.memory)


class Runner:
    """The engine: pages, one flattened forward a step, verification, the next drafts.

    chunk: most prompt tokens that a request runs in one step.
    """

    def __init__(self, target, drafter, *, pages=64, page=8, chunk=4):
        self.target, self.chunk, self.page = target, chunk, page
        self.proposer = DominoProposer(target, drafter, pages, page)
        shape = target.num_layers, pages, page, target.kv_heads, target.head_dim
        self.cache = PagedCache(*shape, like=target.embedding)
        self.free = list(range(pages))

    def add(self, request):
        request.tokens = list(request.prompt)

    @torch.inference_mode()
    def step(self, requests):
        """Runs what each request has not computed yet, up to a chunk, and its drafts behind it."""
        device = self.target.embedding.device
        runs, logit_rows, cu_rows = [], [], [0]
        for request in requests:
            known = request.tokens[request.computed :][: self.chunk]
            start = sum(map(len, runs))
            runs.append(known + request.drafts)
            if request.computed + len(known) == len(request.tokens):  # the end is reached
                logit_rows += range(start + len(known) - 1, start + len(runs[-1]))
            cu_rows.append(len(logit_rows))  # no row: nothing to verify, nothing is emitted
        query_start = [0, *accumulate(map(len, runs))]
        tables = self._block_tables(requests)

        def tensor(values, dtype=torch.int64):
            return torch.tensor(values, dtype=dtype, device=device)

        ids = tensor([token for run in runs for token in run])
        first = [request.computed for request in requests]
        positions = tensor([n + i for n, run in zip(first, runs) for i in range(len(run))])
        owner = tensor([b for b, run in enumerate(runs) for _ in run])
        slot_mapping = self.cache.slots(tables[owner], positions[:, None])[:, 0]
        attend = self._attention(query_start, first, tables, slot_mapping)
        hidden, features = self.target.forward(ids, positions, attend)
        self.proposer.insert(features, positions, slot_mapping)

        width = self.proposer.num_drafts
        block_start = tensor([len(request.tokens) - 1 for request in requests])
        result = dk.verify_chain(
            self.target.lm_head(hidden[tensor(logit_rows)]),  # [R, V]
            tensor([r.drafts + [-1] * (width - len(r.drafts)) for r in requests]),
            rule="token",  # a request with temperature 0 goes by the greedy rule
            temperature=tensor([r.temperature for r in requests], torch.float32),
            seed=tensor([r.seed for r in requests]),
            block_start=block_start,
            cu_rows=tensor(cu_rows, torch.int32),
        )
        counts = result.num_emitted.long()
        anchors = result.tokens.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
        drafts = self.proposer.propose(anchors, block_start + counts, tables)
        columns = counts[:, None], result.status[:, None].long(), result.tokens, drafts
        lines = torch.cat(columns, dim=1).tolist()  # the one synchronisation of a step
        for b, (request, (count, fault, *line)) in enumerate(zip(requests, lines)):
            rows = cu_rows[b + 1] - cu_rows[b]
            if rows == 0:
                request.computed += len(runs[b])
                continue
            if count == 0:
                raise ValueError(f"step: unusable logits of request {b}, status {fault}")
            if request.drafts:
                request.emitted.append(count)
            request.computed = len(request.tokens) + count - 1  # all but the new anchor
            request.tokens += line[:count]
            request.drafts = line[width + 1 :][: request.num_drafts]

    def _block_tables(self, requests):
        """Pages for everything that this step writes: known tokens and one block behind them."""
        for request in requests:
            room = len(request.tokens) + 2 * self.proposer.slots
            while len(request.pages) * self.page < room:
                request.pages.append(self.free.pop())
        width = max(len(request.pages) for request in requests)
        rows = [r.pages + [0] * (width - len(r.pages)) for r in requests]
        return torch.tensor(rows, device=self.target.embedding.device)

    def _attention(self, query_start, first, tables, slot_mapping):
        """Causal attention of the flattened rows; an engine has one kernel for it."""
        device = tables.device

        def attend(layer, q, k, v):
            for memory, new in zip(self.cache.memory, (k, v)):
                memory[layer][slot_mapping] = new
            found = torch.empty_like(q)
            for b, (start, end) in enumerate(pairwise(query_start)):
                at = torch.arange(first[b], first[b] + end - start, device=device)
                room = torch.arange(first[b] + end - start, device=device)
                slots = self.cache.slots(tables[b : b + 1], room[None])[0]
                keys, values = (memory[layer][slots] for memory in self.cache.memory)
                rows = (x.transpose(0, 1)[None] for x in (q[start:end], keys, values))
                mask = room <= at[:, None]
                part = scaled_dot_product_attention(*rows, attn_mask=mask, enable_gqa=True)
                found[start:end] = part[0].transpose(0, 1)
            return found

        return attend

    def serve(self, requests, most=3):
        """Requests enter one a step, at most `most` at a time, and leave when they are done."""
        waiting, running = list(requests), []
        while waiting or running:
            if waiting and len(running) < most:
                self.add(waiting[0])
                running.append(waiting.pop(0))
            self.step(running)
            for request in running:
                if len(request.output) == request.new_tokens:
                    self.free += request.pages
                    request.pages = []
            running = [request for request in running if request.pages]


def main():
    model, drafter = tiny_pair()
    runner = Runner(Llama(model, drafter.feature_layers), drafter)
    prompts = [[5, 17, 3], [1], [40, 2, 8, 33, 21, 9, 11], [12, 12, 30], [9], [7, 7]]
    requests = [Request(p, 12 + i, 0.4 * (i % 3), seed=i) for i, p in enumerate(prompts)]
    runner.serve(requests)
    for request in requests:
        print(f"temperature {request.temperature}: ids {request.output}")


if __name__ == "__main__":
    main()
