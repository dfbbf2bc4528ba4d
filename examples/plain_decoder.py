"""A decoder in plain PyTorch around draft_chain and verify_chain: ragged batch, greedy or sampled.

python examples/plain_decoder.py
"""

import torch
from tiny import Llama, tiny_pair
from torch.nn.functional import scaled_dot_product_attention

import domino_kernels as dk


class Cache:
    """Keys and values [B, heads, room, D] a layer. Row b keeps its first lengths[b] tokens; the
    next forward overwrites what lies behind them, so that a rejected draft costs nothing."""

    def __init__(self, batch, room, device):
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.slots = torch.arange(room, device=device)
        self.layers = {}

    def positions(self, tokens):
        return self.lengths[:, None] + self.slots[:tokens]

    def update(self, k, v, layer):
        """Stores k, v [B, heads, T, D] behind each row's tokens; returns all keys and values."""
        batch, heads, tokens, dim = k.shape
        if layer not in self.layers:
            self.layers[layer] = k.new_zeros(2, batch, heads, len(self.slots), dim)
        rows = torch.arange(batch, device=k.device)[:, None]
        for memory, new in zip(self.layers[layer], (k, v)):
            memory[rows, :, self.positions(tokens)] = new.transpose(1, 2)
        return self.layers[layer]

    def mask(self, tokens, *, causal):
        last = self.positions(tokens)
        last = last if causal else last[:, -1:].expand_as(last)
        return (self.slots <= last[..., None])[:, None]


def run_target(target, ids, cache):
    """ids [B, T] -> logits [B, T, V] and features [B, T, n * H]; the cache does not advance."""
    mask = cache.mask(ids.shape[1], causal=True)

    def attend(layer, q, k, v):
        q, k, v = (x.unflatten(0, ids.shape).transpose(1, 2) for x in (q, k, v))
        k, v = cache.update(k, v, layer)
        found = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return found.transpose(1, 2).flatten(0, 1)

    positions = cache.positions(ids.shape[1])
    hidden, features = target.forward(ids.flatten(), positions.flatten(), attend)
    return target.lm_head(hidden).unflatten(0, ids.shape), features.unflatten(0, ids.shape)


@torch.inference_mode()
def decode(target, drafter, prompts, new_tokens, *, temperature=0.0, seed=0):
    """new_tokens ids for every prompt, and the number of tokens that each cycle emitted."""
    config, device = drafter.config, target.embedding.device
    batch, slots, drafts = len(prompts), config.block_size, config.block_size - 1
    head = drafter.head.weights(target.embedding)
    masks = target.embedding[config.mask_token_id].expand(batch, slots - 1, -1)
    room = max(map(len, prompts)) + new_tokens + 2 * slots
    cache, context = Cache(batch, room, device), Cache(batch, room, device)
    temperatures = torch.full((batch,), temperature, device=device)
    seeds = seed + torch.arange(batch, device=device)

    def verify(logits, tokens, block_start):
        if temperature == 0:
            return dk.verify_chain(logits, tokens)
        sampling = dict(temperature=temperatures, seed=seeds, block_start=block_start)
        return dk.verify_chain(logits, tokens, rule="token", **sampling)

    def commit(features, kept):
        """Of the tokens that just ran, row b keeps kept[b]; their features are draft context."""
        positions = context.positions(features.shape[1])
        for layer, (k, v) in enumerate(drafter.context_kv(features, positions)):
            context.update(k, v, layer)
        for rows in (cache, context):
            rows.lengths = rows.lengths + kept

    # Prefill: no drafts, so verify_chain picks one token after each prompt's last.
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    width = max(map(len, prompts))
    ids = torch.tensor([p + [0] * (width - len(p)) for p in prompts], device=device)
    logits, features = run_target(target, ids, cache)
    logits = logits[torch.arange(batch, device=device), lengths - 1][:, None]
    result, kept = verify(logits, ids[:, :0], lengths - 1), lengths
    output, emitted = [[] for _ in prompts], []
    while True:
        alive = [len(row) < new_tokens for row in output]
        counts, rows = result.num_emitted.tolist(), result.tokens.tolist()
        if 0 in counts:
            raise ValueError(f"decode: unusable logits, status {result.status.tolist()}")
        output = [old + new[:n] for old, new, n in zip(output, rows, counts)]
        emitted.append([n for n, running in zip(counts, alive) if running])
        commit(features, kept * torch.tensor(alive, device=device))
        if all(len(row) >= new_tokens for row in output):
            return [row[:new_tokens] for row in output], emitted[1:]
        # Draft: one block [anchor, mask, mask, ...] through the backbone, then the head.
        anchor = result.tokens.gather(1, result.num_emitted[:, None].long() - 1)
        block = torch.cat((target.embedding[anchor], masks), dim=1)
        mask = context.mask(slots, causal=False)
        hidden = drafter(block, context.positions(slots), context, mask)
        tokens = dk.draft_chain(
            target.lm_head(hidden),
            hidden,
            anchor[:, 0],
            head,
            num_drafts=drafts,
            shift_label=config.shift_label,
            pure_draft_prefix_len=config.pure_draft_prefix_len,
        )
        # Verify: anchor and drafts in one forward of the target; the anchor stands at lengths[b].
        logits, features = run_target(target, torch.cat((anchor, tokens), dim=1), cache)
        result = verify(logits, tokens, cache.lengths)
        kept = result.num_emitted.long()


def main():
    model, drafter = tiny_pair()
    target = Llama(model, drafter.feature_layers)
    for temperature in (0.0, 0.8):
        prompts = [[5, 17, 3], [40, 2, 8, 33, 21]]
        output, emitted = decode(target, drafter, prompts, 24, temperature=temperature)
        print(f"temperature {temperature}: {len(emitted)} cycles, ids {output}")


if __name__ == "__main__":
    main()
