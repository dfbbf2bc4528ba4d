"""estimate_memory against the tensors that an engine really makes."""

import pytest
import torch
from domino_draft import (
    DominoDrafter,
    Engine,
    NgramDrafter,
    Target,
    TreeOptions,
    estimate_memory,
)

from .conftest import tiny_model

BATCH, LENGTH = 3, 40
SLIDING = ("full_attention", "sliding_attention")


def held(cache):
    return sum(x.nbytes for pair in cache._buffers.values() for x in pair)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["none", "ngram", "shift", "plain", "dflash", "sliding"])
def test_every_figure_is_a_tensors_size(tiny_config, monkeypatch, kind, tied):
    target = Target(tiny_model("Qwen3", tie_word_embeddings=tied).to(torch.bfloat16))
    drafter = {
        "none": lambda: None,
        "ngram": NgramDrafter,
        "shift": lambda: DominoDrafter(tiny_config()),
        "plain": lambda: DominoDrafter(tiny_config(shift_label=False, block_size=6)),
        "dflash": lambda: DominoDrafter(tiny_config(projector_type="dflash")),
        "sliding": lambda: DominoDrafter(tiny_config(layer_types=SLIDING, sliding_window=4)),
    }[kind]()
    settings = {"prefill_tokens": 30} | ({"num_drafts": 3} if drafter is not None else {})
    if isinstance(drafter, DominoDrafter):
        drafter.to(torch.bfloat16)
    found = estimate_memory(target, drafter, BATCH, LENGTH, **settings)

    forwards, heads, forward, lm_head = [], [], target.forward, target.lm_head

    def seen(*args, **kwargs):
        forwards.append(forward(*args, **kwargs))
        return forwards[-1]

    def head(hidden):
        logits = lm_head(hidden)
        heads.append(logits.nbytes)
        return logits

    monkeypatch.setattr(target, "forward", seen)
    monkeypatch.setattr(target, "lm_head", head)
    engine = Engine(target, drafter, max_batch=BATCH, max_length=LENGTH, **settings)
    for _ in range(BATCH):
        engine.add([5] * 30, 10, stop_token_ids=())
    while engine.num_waiting or engine.num_running < BATCH:
        engine.step()
    forwards.clear()
    heads.clear()
    engine.step()
    cycle = forwards[-1][0].nbytes + max(heads, default=0)
    wide = forwards[-1][1]
    per_token = 0 if wide is None else wide.shape[2] * wide.itemsize

    assert found.target_cache == held(engine.cache)
    assert found.logits == cycle
    assert found.features == 2 * 30 * per_token
    model = (*target.model.parameters(), *target.model.buffers())
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model}
    assert found.target_weights == sum(storages.values())
    if isinstance(drafter, DominoDrafter):
        assert found.drafter_cache == held(engine.session.cache)
        assert found.drafter_weights == sum(t.nbytes for t in drafter.state_dict().values())
    else:
        assert found.drafter_cache == found.drafter_weights == 0
    parts = (found.target_weights, found.drafter_weights, found.target_cache, found.drafter_cache)
    assert found.total == sum(parts) + found.logits + found.features and found.fused == 0
    assert "target cache" in str(found) and "MB" in str(found)


def test_more_rows_and_positions_cost_in_proportion(tiny_config):
    target, drafter = Target(tiny_model("Llama")), DominoDrafter(tiny_config())
    one, two = (estimate_memory(target, drafter, batch, 100) for batch in (1, 2))
    assert two.target_cache == 2 * one.target_cache and two.logits == 2 * one.logits
    assert two.target_weights == one.target_weights
    longer = estimate_memory(target, drafter, 1, 200)
    # 2 tensors, 4 layers, 2 heads of 8, fp32
    assert longer.target_cache - one.target_cache == 100 * 2 * 4 * 2 * 8 * 4


@pytest.mark.parametrize("part", [None, 30])
@pytest.mark.parametrize("fp8", [False, True])
def test_what_the_fused_layers_keep(tiny_config, fp8, part):
    target = Target(tiny_model("Llama", vocab_size=64))
    drafter = DominoDrafter(tiny_config(vocab_size=64, mask_token_id=63))
    settings = dict(fused=True, fp8_draft_head=fp8)
    vocab = None if part is None else range(part)
    cycle = Engine(
        target, drafter, max_batch=BATCH, max_length=LENGTH, draft_vocab=vocab, **settings
    )._fused
    kept = [cycle.rope, cycle.draft_rope, cycle.drafter.context_kv, cycle.drafter.k_norms]
    kept += [cycle.workspace.partial, cycle.workspace.counters, cycle._late]
    kept += [cycle.draft_head.values, cycle.draft_head.scale] if fp8 else []
    if part is not None:
        own = cycle.vocabulary
        kept += [own.lm_head, own.weights.w2, own.weights.embedding]
    found = estimate_memory(target, drafter, BATCH, LENGTH, draft_vocab=part, **settings)
    assert found.fused == sum(t.nbytes for t in kept)


def test_trees_have_caches_and_logits_for_their_nodes(tiny_config):
    target, drafter = Target(tiny_model("Llama")), DominoDrafter(tiny_config()).eval()
    tree = TreeOptions(nodes=9, width=2, children=3, pool=20)
    engine = Engine(target, drafter, max_batch=BATCH, max_length=LENGTH, tree=tree)
    found = estimate_memory(target, drafter, BATCH, LENGTH, tree=tree, fused=True)
    assert found.target_cache == held(engine.cache)
    assert found.drafter_cache == held(engine.session.cache)
    slots = engine.num_drafts  # slot i drafts the token behind it
    assert found.logits == BATCH * (9 + slots) * target.vocab_size * 4


def test_bad_settings(tiny_config):
    target, drafter = Target(tiny_model("Llama")), DominoDrafter(tiny_config())
    same = estimate_memory(target, drafter, 2, 50)
    assert estimate_memory(target, drafter, 2, 50, num_drafts="auto") == same
    for tool, settings, message in (
        (None, {"fp8_draft_head": True}, "fp8_draft_head: got True, expected a Domino drafter"),
        (NgramDrafter(), {"draft_vocab": 9}, "draft_vocab: got 9, expected a Domino drafter"),
        (drafter, {"draft_vocab": 62}, r"draft_vocab: got 62, expected 1\.\.61"),
        (drafter, {"prefill_tokens": 0}, "prefill_tokens: got 0"),
        (drafter, {"tree": TreeOptions(), "num_drafts": 2}, "num_drafts: got 2 and a tree"),
    ):
        with pytest.raises(ValueError, match=f"estimate_memory: {message}"):
            estimate_memory(target, tool, 2, 50, **settings)
    with pytest.raises(ValueError, match="estimate_memory: batch: got 0"):
        estimate_memory(target, drafter, 0, 50)
