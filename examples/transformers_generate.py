"""A decoding method for Transformers: model.generate(..., custom_generate=domino, drafter=...).

python examples/transformers_generate.py
"""

import inspect

import torch
from tiny import tiny_pair
from transformers import DynamicCache

import domino_kernels as dk


def domino(
    model,
    input_ids,
    logits_processor,
    stopping_criteria,
    generation_config,
    drafter,
    seed=0,
    emitted=None,
    **model_kwargs,
):
    """One prompt. The law is the model's after all logits processors: temperature, top-k, top-p,
    penalties. The list `emitted` receives the number of tokens that each cycle emitted."""
    mask = model_kwargs.get("attention_mask")
    if len(input_ids) != 1 or (mask is not None and not mask.all()):
        raise ValueError("domino: input_ids: got a batch or padding, expected one prompt")
    config, device = drafter.config, input_ids.device
    slots, drafts = config.block_size, config.block_size - 1
    embedding = model.get_input_embeddings().weight
    head = drafter.head.weights(embedding)
    masks = embedding[config.mask_token_id].expand(1, slots - 1, -1)
    cache = DynamicCache(config=model.config)
    parameters = inspect.signature(model.forward).parameters
    cache_name = "past_key_values" if "past_key_values" in parameters else "cache"
    one = torch.ones(1, device=device)
    seeds = torch.tensor([seed], device=device)
    context = None  # keys and values of the drafter's context, a pair a layer

    def forward(ids):
        keywords = {cache_name: cache, "use_cache": True, "output_hidden_states": True}
        out = model(input_ids=ids, **keywords)
        # Entry i + 1 is the output of layer i. Not so for the last layer, whose entry is normed.
        return out.logits, torch.cat([out.hidden_states[i + 1] for i in drafter.feature_layers], -1)

    def verify(logits, tokens):
        rows = [
            logits_processor(torch.cat((input_ids, tokens[:, :i]), dim=1), logits[:, i].float())
            for i in range(logits.shape[1])
        ]
        if not generation_config.do_sample:
            return dk.verify_chain(torch.stack(rows, dim=1), tokens)
        block_start = torch.tensor([input_ids.shape[1] - 1], device=device)
        sampling = dict(temperature=one, seed=seeds, block_start=block_start)
        return dk.verify_chain(torch.stack(rows, dim=1), tokens, rule="token", **sampling)

    logits, features = forward(input_ids)
    logits, tokens = logits[:, -1:], input_ids[:, :0]
    while True:
        result = verify(logits, tokens)
        count = int(result.num_emitted)  # the one synchronisation of a cycle
        if count == 0:
            raise ValueError(f"domino: unusable logits, status {result.status.tolist()}")
        # The anchor and all but the last emitted token are in the cache, then what was rejected.
        rejected = tokens.shape[1] + 1 - count
        if rejected:
            cache.crop(-rejected)
        if emitted is not None and tokens.shape[1]:
            emitted.append(count)
        start = 0 if context is None else context[0][0].shape[2]
        kept = features[:, : features.shape[1] - rejected]
        positions = torch.arange(start, start + slots + kept.shape[1], device=device)[None]
        new = drafter.context_kv(kept, positions[:, : kept.shape[1]])
        context = context or [(k[:, :, :0], v[:, :, :0]) for k, v in new]
        context = [
            (torch.cat((old_k, k), dim=2), torch.cat((old_v, v), dim=2))
            for (old_k, old_v), (k, v) in zip(context, new)
        ]
        for i in range(count):
            input_ids = torch.cat((input_ids, result.tokens[:, i : i + 1]), dim=1)
            if stopping_criteria(input_ids, None).all():
                return input_ids
        anchor = input_ids[:, -1:]
        block = torch.cat((embedding[anchor], masks), dim=1)
        hidden = drafter(block, positions[:, kept.shape[1] :], context)
        tokens = dk.draft_chain(
            model.get_output_embeddings()(hidden),
            hidden,
            anchor[:, 0],
            head,
            num_drafts=drafts,
            shift_label=config.shift_label,
            pure_draft_prefix_len=config.pure_draft_prefix_len,
        )
        logits, features = forward(torch.cat((anchor, tokens), dim=1))


def main():
    model, drafter = tiny_pair()
    prompt = torch.tensor([[5, 17, 3]])
    keywords = dict(custom_generate=domino, drafter=drafter, max_new_tokens=24)
    mask = torch.ones_like(prompt)
    greedy = model.generate(prompt, attention_mask=mask, do_sample=False, **keywords)
    print("greedy:", greedy[0, 3:].tolist())
    sampling = dict(do_sample=True, temperature=0.8, top_k=20, seed=5)
    drawn = model.generate(prompt, attention_mask=mask, **sampling, **keywords)
    print("sampled:", drawn[0, 3:].tolist())


if __name__ == "__main__":
    main()
