"""The Domino session inside the loop: its context and its drafts against a plain recomputation."""

import pytest
import torch
from domino_draft import DominoDrafter, Target, generate

from .conftest import tiny_model
from .test_decode import PROMPTS, Oracle, own_text

NEW = 20


@torch.no_grad()
def redraft(drafter, target, tokens, num_drafts):
    """Drafts after `tokens`: no cache, no batch, the head re-run over the block for every id."""
    config, head = drafter.config, drafter.head
    context = torch.tensor([tokens[:-1]])
    anchor = len(tokens) - 1
    features = target.features(context, config.target_layer_ids)
    kv = drafter.context_kv(features, torch.arange(anchor)[None])
    slots = min(num_drafts + 1, config.block_size)
    block = target.embed(torch.tensor([[tokens[-1]] + [config.mask_token_id] * (slots - 1)]))
    hidden = drafter(block, torch.arange(anchor, anchor + slots)[None], kv)
    base = target.lm_head(hidden)[0]
    ids = [tokens[-1]]
    for j in range(num_drafts):  # y_{j+1} from slot j (shift) or j + 1 (no shift), state S_j
        slot = j if config.shift_label else j + 1
        logits = base[slot]
        if slot >= head.first_slot:
            state = head.states(target.embed(torch.tensor([ids])))[0, -1]
            logits = logits + head(hidden[0, slot], state)
        ids.append(int(logits.argmax()))
    return ids[1:], kv


class Checked(Oracle):
    """Runs a Domino session, checks what it holds and drafts, and drafts the known text instead."""

    def __init__(self, drafter, texts):
        super().__init__(texts, wrong=5, gap=13)
        self.drafter, self.feature_layers, self.checked = drafter, drafter.feature_layers, 0
        self.default_drafts = self.max_drafts = drafter.max_drafts

    def begin(self, target, rows, max_length):
        self.target, self.session = target, self.drafter.begin(target, rows, max_length)
        return super().begin(target, rows, max_length)

    def commit(self, features, counts, host_counts, first=0):
        self.session.commit(features, counts, host_counts, first)

    def propose(self, batch, num_drafts):
        drafts = self.session.propose(batch, num_drafts)
        cache = self.session.cache
        assert cache.lengths.tolist() == cache.host_lengths
        for b, tokens in enumerate(batch.tokens):
            want, kv = redraft(self.drafter, self.target, tokens, num_drafts)
            assert cache.host_lengths[b] == len(tokens) - 1
            for layer, pair in enumerate(kv):
                for held, whole in zip(cache._layers[layer], pair):
                    torch.testing.assert_close(
                        held[b, :, : len(tokens) - 1], whole[0], rtol=1e-3, atol=1e-3
                    )
            assert drafts[b].tolist() == want
            self.checked += 1
        return super().propose(batch, num_drafts)

    def select(self, rows):
        self.session.select(rows)
        super().select(rows)


@pytest.mark.parametrize(
    "overrides",
    [
        {"block_size": 5},
        {"block_size": 6, "shift_label": False},
        {"block_size": 5, "pure_draft_prefix_len": 2},
        {"block_size": 5, "pure_draft_prefix_len": 0, "shift_label": False},
    ],
    ids=["shift", "plain", "prefix2", "plain-prefix0"],
)
def test_context_and_drafts(tiny_config, overrides):
    target = Target(tiny_model("Qwen3"))
    torch.manual_seed(2)
    drafter = DominoDrafter(tiny_config(**overrides))
    with torch.no_grad():
        for p in drafter.parameters():
            if p.dim() > 1:
                p.mul_(6)
    texts = [own_text(target.model, prompt, NEW) for prompt in PROMPTS]
    stop = texts[1][9]  # a row leaves early, the others go on
    checked = Checked(drafter, texts)
    result = generate(target, checked, PROMPTS, max_new_tokens=NEW, stop_token_ids=[stop])
    assert result.stats.accepted_length > 2 and checked.checked == sum(
        map(len, result.stats.accepted)
    )
    for got, text in zip(result.sequences, texts):
        assert got == (text[: text.index(stop) + 1] if stop in text else text)
