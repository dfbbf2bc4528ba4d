"""A worker like SGLang's: static buffers, batches padded to a captured size, slots of a token pool.

python examples/sglang_style_worker.py
"""

from dataclasses import dataclass, field

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
    tokens: list[int] = field(default_factory=list)  # prompt and output; the last one is the anchor
    index: int = 0  # its row of the table of token slots
    emitted: list[int] = field(default_factory=list)  # tokens of each cycle

    @property
    def output(self):
        return self.tokens[len(self.prompt) :][: self.new_tokens]

    @property
    def done(self):
        return len(self.tokens) - len(self.prompt) >= self.new_tokens


class TokenTable:
    """Which slot of the pools holds a request's token at a position. The engine's memory manager.

    Slot 0 and request 0 belong to the padding of batches.
    """

    def __init__(self, requests, room, device):
        self.slots = torch.zeros(requests + 1, room, dtype=torch.int64, device=device)
        self.free_requests = list(range(requests, 0, -1))
        self.free_slots = list(range(requests * room, 0, -1))
        self.held = [[] for _ in range(requests + 1)]

    def open(self, request, most):
        request.index = self.free_requests.pop()
        self.held[request.index] = [self.free_slots.pop() for _ in range(most)]
        self.slots[request.index, :most] = torch.tensor(self.held[request.index])

    def close(self, request):
        self.free_slots += self.held[request.index]
        self.free_requests.append(request.index)


class Pool:
    """Keys and values by slot, 2 x [layers, slots, heads, D]: one a model."""

    def __init__(self, layers, slots, heads, dim, like):
        self.memory = like.new_zeros(2, layers, slots, heads, dim)


class Rows:
    """T tokens of each of B requests behind the first lengths[b]: a forward's view of a pool.

    A stand-in for the engine's paged attention; it reads the whole table and masks.
    """

    def __init__(self, pool, table, lengths, tokens, *, causal):
        room = torch.arange(table.shape[1], device=table.device)
        self.memory, self.table = pool.memory, table
        self.positions = lengths[:, None] + room[:tokens]
        self.slots = table.gather(1, self.positions)
        last = self.positions if causal else self.positions[:, -1:].expand_as(self.positions)
        self.mask = (room <= last[..., None])[:, None]

    def update(self, k, v, layer):
        """k, v [B, heads, T, D] in; all keys and values [B, heads, room, D] out."""
        for memory, new in zip(self.memory, (k, v)):
            memory[layer][self.slots] = new.transpose(1, 2)
        return (memory[layer][self.table].transpose(1, 2) for memory in self.memory)

    def attend(self, layer, q, k, v):
        q, k, v = (x.unflatten(0, self.slots.shape).transpose(1, 2) for x in (q, k, v))
        k, v = self.update(k, v, layer)
        found = scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=True)
        return found.transpose(1, 2).flatten(0, 1)


class DominoWorker:
    """prefill(request), then decode(requests) for any set of them, as the scheduler likes.

    graphs: capture the cycle once a padded batch size and replay it (CUDA).
    """

    def __init__(self, target, drafter, *, max_batch, room, graphs=False):
        device, config = target.embedding.device, drafter.config
        self.target, self.drafter, self.graphs = target, drafter, {} if graphs else None
        self.batch_sizes = [*(1 << n for n in range(max_batch.bit_length() - 1)), max_batch]
        self.drafts, self.slots = config.block_size - 1, config.block_size
        self.table = TokenTable(max_batch, room, device)
        size = max_batch * room + 1
        shape = config.num_hidden_layers, size, config.num_key_value_heads, config.head_dim
        self.draft_pool = Pool(*shape, like=drafter.fc.weight)
        shape = target.num_layers, size, target.kv_heads, target.head_dim
        self.target_pool = Pool(*shape, like=target.embedding)
        self.head = drafter.head.weights(target.embedding)
        self.masks = target.embedding[config.mask_token_id].expand(max_batch, self.slots - 1, -1)

        def buffer(*shape, dtype=torch.int64):
            return torch.zeros(*shape, dtype=dtype, device=device)

        # What a cycle reads. The host writes these between replays; the graph sees the new values.
        self.anchor, self.length, self.request, self.seed = buffer(4, max_batch)
        self.temperature = buffer(max_batch, dtype=torch.float32)
        self.cu_rows = buffer(max_batch + 1, dtype=torch.int32)
        # What a cycle writes.
        self.drafted = dk.DraftResult.empty(self.head, max_batch, num_drafts=self.drafts)
        self.tokens = self.drafted.tokens
        self.result = dk.VerifyResult(
            tokens=buffer(max_batch, self.slots),
            num_accepted=buffer(max_batch, dtype=torch.int32),
            num_emitted=buffer(max_batch, dtype=torch.int32),
            chosen_logprob=buffer(max_batch, self.slots, dtype=torch.float32),
            status=buffer(max_batch, dtype=torch.uint8),
        )
        # One workspace an op: cycles follow each other on one stream. Smaller batches share it.
        self.plan = dk.ChainPlan(self.head, max_batch, num_drafts=self.drafts)
        self.verify_workspace = dk.verify_chain_workspace(
            max_batch, self.drafts, target.embedding.size(0), device=device
        )

    @torch.inference_mode()
    def prefill(self, request):
        request.tokens = list(request.prompt)
        self.table.open(request, len(request.prompt) + request.new_tokens + 2 * self.slots)
        self._load([request], 1)
        self.length[:1] = 0
        rows = self._rows(self.target_pool, 1, len(request.prompt), causal=True)
        ids = torch.tensor(request.prompt, device=self.anchor.device)
        hidden, features = self.target.forward(ids, rows.positions.flatten(), rows.attend)
        self._insert(features[None], rows)
        result = dk.verify_chain(
            self.target.lm_head(hidden[-1:])[None],
            self.tokens[:1, :0],  # no drafts: one token of the last row's law
            rule="token",
            temperature=self.temperature[:1],
            seed=self.seed[:1],
            block_start=self.length[:1] + len(request.prompt) - 1,
        )
        self._take([request], result)
        request.emitted.clear()

    @torch.inference_mode()
    def decode(self, requests):
        """One cycle: extends the requests' tokens by what it emits."""
        batch = next(size for size in self.batch_sizes if size >= len(requests))
        self._load(requests, batch)
        if self.graphs is None:
            self._cycle(batch)
        else:
            if batch not in self.graphs:
                self.graphs[batch] = self._capture(batch)
            self.graphs[batch].replay()
        self._take(requests, self.result)

    def _load(self, requests, batch):
        """Host to device: a column of each buffer a request, padding behind them."""
        columns = [(r.tokens[-1], len(r.tokens) - 1, r.index, r.seed) for r in requests]
        columns += [(0, 0, 0, 0)] * (batch - len(requests))
        for buffer, values in zip(
            (self.anchor, self.length, self.request, self.seed), zip(*columns)
        ):
            buffer[:batch] = torch.tensor(values)
        temperatures = [r.temperature for r in requests] + [0.0] * (batch - len(requests))
        self.temperature[:batch] = torch.tensor(temperatures)
        # A padded request owns no row of the logits, so verify_chain emits nothing for it.
        ends = [min(b, len(requests)) * self.slots for b in range(batch + 1)]
        self.cu_rows[: batch + 1] = torch.tensor(ends)

    def _cycle(self, batch):
        """Fixed shapes and addresses, no synchronisation: what a CUDA graph captures."""
        config, anchor, length = self.drafter.config, self.anchor[:batch], self.length[:batch]
        rows = self._rows(self.draft_pool, batch, self.slots, causal=False)
        block = torch.cat((self.target.embedding[anchor][:, None], self.masks[:batch]), dim=1)
        hidden = self.drafter(block, rows.positions, rows, rows.mask)
        drafted = dk.DraftResult(*(t if t is None else t[:batch] for t in self.drafted))
        dk.draft_chain_out(
            self.target.lm_head(hidden),
            hidden,
            anchor,
            self.head,
            shift_label=config.shift_label,
            pure_draft_prefix_len=config.pure_draft_prefix_len,
            out=drafted,
            plan=self.plan,
        )
        ids = torch.cat((anchor[:, None], drafted.tokens), dim=1)
        rows = self._rows(self.target_pool, batch, self.slots, causal=True)
        hidden, features = self.target.forward(ids.flatten(), rows.positions.flatten(), rows.attend)
        dk.verify_chain(
            self.target.lm_head(hidden),  # [batch * slots, V]
            drafted.tokens,
            rule="token",
            temperature=self.temperature[:batch],
            seed=self.seed[:batch],
            block_start=length,
            cu_rows=self.cu_rows[: batch + 1],
            out=dk.VerifyResult(*(buffer[:batch] for buffer in self.result[:5])),
            workspace=self.verify_workspace,
        )
        # Context of all rows; what was rejected is overwritten by the next block.
        self._insert(features.unflatten(0, ids.shape), rows)

    def _capture(self, batch):
        """A cycle writes the same values when it runs twice on the same inputs, so the warm-up may
        run on those of the cycle that is due."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._cycle(batch)  # loads the kernels, which a capture forbids
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.graphs.values())).pool() if self.graphs else None
        with torch.cuda.graph(graph, pool=pool):
            self._cycle(batch)
        return graph

    def _rows(self, pool, batch, tokens, *, causal):
        table = self.table.slots[self.request[:batch]]
        return Rows(pool, table, self.length[:batch], tokens, causal=causal)

    def _insert(self, features, rows):
        """Target features [B, T, n * H] become keys and values of the drafter's context."""
        for layer, kv in enumerate(self.drafter.context_kv(features, rows.positions)):
            for memory, new in zip(self.draft_pool.memory, kv):
                memory[layer][rows.slots] = new.transpose(1, 2)

    def _take(self, requests, result):
        """Device to host: the one synchronisation of a cycle."""
        counts, status = result.num_emitted[:, None], result.status[:, None]
        lines = torch.cat((counts, status, result.tokens), dim=1)[: len(requests)].tolist()
        for request, (count, fault, *tokens) in zip(requests, lines):
            if count == 0:
                raise ValueError(f"decode: unusable logits of a request, status {fault}")
            request.tokens += tokens[:count]
            request.emitted.append(count)
            if request.done:
                self.table.close(request)


def serve(worker, requests):
    """A scheduler in short: requests enter where there is room, and leave when they are done."""
    waiting, running = list(requests), []
    while waiting or running:
        while waiting and len(running) < worker.batch_sizes[-1]:
            worker.prefill(waiting[0])
            running.append(waiting.pop(0))
            running = [request for request in running if not request.done]
        if running:
            worker.decode(running)
        running = [request for request in running if not request.done]


def main():
    model, drafter = tiny_pair()
    target = Llama(model, drafter.feature_layers)
    worker = DominoWorker(target, drafter, max_batch=4, room=64)
    prompts = [[5, 17, 3], [1], [40, 2, 8, 33, 21], [12, 12, 30], [9], [7, 7]]
    requests = [Request(p, 12 + i, 0.4 * (i % 3), seed=i) for i, p in enumerate(prompts)]
    serve(worker, requests)
    for request in requests:
        print(f"temperature {request.temperature}: ids {request.output}")


if __name__ == "__main__":
    main()
