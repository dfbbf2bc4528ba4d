"""The objective: what a block sees, which label a slot has, what reaches the head."""

import numpy as np
import pytest
import torch
from domino_draft import DominoDrafter
from domino_draft.train import objective
from domino_draft.train.data import BatchSampler, TokenDataset, block_labels
from domino_draft.train.metrics import Meter
from domino_draft.train.objective import (
    DeviceBatch,
    TargetFeatures,
    attention_mask,
    block_hidden,
    domino_loss,
    labelled_rows,
    lambda_at,
)

from domino_kernels.ops.train import DualCE
from domino_kernels.reference import head as reference

CPU = torch.device("cpu")


def make_drafter(config, seed=0):
    torch.manual_seed(seed)
    drafter = DominoDrafter(config)
    with torch.no_grad():  # large enough that every path shows in fp32
        for p in drafter.parameters():
            if p.dim() == 2:
                p.mul_(8)
    return drafter


def make_batch(config, *, length=24, count=5, sequences=2, seed=0):
    rng = np.random.default_rng(seed)
    data = TokenDataset.from_sequences(
        (rng.integers(0, config.vocab_size, length - i), np.arange(length - i) >= 4)
        for i in range(sequences)
    )
    sampler = BatchSampler(
        data, batch_size=sequences, seq_len=length, num_anchors=count, gamma=7.0, seed=seed,
        block_size=config.block_size, shift_label=config.shift_label, shuffle=False,
    )  # fmt: skip
    return DeviceBatch.of(sampler.batch(0), CPU)


def inputs_of(config, batch, seed=1):
    g = torch.Generator().manual_seed(seed)
    width = len(config.target_layer_ids) * config.hidden_size
    features = torch.randn(*batch.tokens.shape, width, generator=g)
    embedding = torch.randn(config.vocab_size, config.hidden_size, generator=g)
    lm_head = torch.randn(config.vocab_size, config.hidden_size, generator=g)
    return features, embedding, lm_head


@pytest.fixture(params=[(True, 1), (False, 1), (True, 2)], ids=["shift", "no-shift", "prefix-2"])
def config(request, tiny_config):
    shift, prefix = request.param
    return tiny_config(shift_label=shift, pure_draft_prefix_len=prefix)


def leaks(drafter, batch, features, embedding):
    """Gradient of each block's hidden states: (largest at features >= anchor, in another block)."""
    slots = drafter.config.block_size
    features = features.clone().requires_grad_()
    tokens = batch.inputs[:, :, 0]
    blocks = tokens.shape[1]
    table = embedding[tokens].clone().requires_grad_()  # one row a block: its own anchor embedding

    class Lookup:  # the embedding table, with the anchors' rows as separate leaves
        def __getitem__(self, index):
            return embedding[index] if isinstance(index, int) else table

    mask = attention_mask(batch.anchors, slots, features.shape[1], "dense")
    hidden = block_hidden(drafter, features, batch.anchors, tokens, Lookup(), mask)
    hidden = hidden.unflatten(1, (blocks, slots))
    late, foreign, early = 0.0, 0.0, []
    for b in range(len(tokens)):
        for n in range(blocks):
            # A random projection: a plain sum could cancel.
            direction = torch.randn(hidden[b, n].shape, generator=torch.Generator().manual_seed(n))
            gf, gt = torch.autograd.grad(
                (hidden[b, n] * direction).sum(), (features, table), retain_graph=True
            )
            a = int(batch.anchors[b, n])
            late = max(late, gf[b, a:].abs().max().item())
            early.append(gf[b, :a].abs().amax(-1))
            gt[b, n] = 0
            gf[b] = 0
            foreign = max(foreign, gt.abs().max().item(), gf.abs().max().item())
    assert all((e > 0).all() for e in early), "every feature before the anchor must be seen"
    return late, foreign


def test_nothing_at_or_after_the_anchor_and_no_other_block_is_seen(config):
    drafter, batch = make_drafter(config), make_batch(config)
    features, embedding, _ = inputs_of(config, batch)
    assert leaks(drafter, batch, features, embedding) == (0.0, 0.0)


def test_the_leak_test_sees_a_mask_that_is_not_strict(config, monkeypatch):
    strict = objective.block_mask
    monkeypatch.setattr(objective, "block_mask", lambda a, s, n: strict(a + 1, s, n))
    drafter, batch = make_drafter(config), make_batch(config)
    features, embedding, _ = inputs_of(config, batch)
    late, foreign = leaks(drafter, batch, features, embedding)
    assert late > 0 and foreign == 0


def test_the_leak_test_sees_blocks_that_see_each_other(config, monkeypatch):
    strict = objective.block_mask

    def loose(anchors, slots, length):
        own = strict(anchors, slots, length)
        return lambda b, h, q, kv: own(b, h, q, kv) | (kv >= length)

    monkeypatch.setattr(objective, "block_mask", loose)
    drafter, batch = make_drafter(config), make_batch(config)
    features, embedding, _ = inputs_of(config, batch)
    _late, foreign = leaks(drafter, batch, features, embedding)
    assert foreign > 0


def test_future_tokens_change_no_base_logit(config):
    drafter, batch = make_drafter(config), make_batch(config, count=3)
    features, embedding, _ = inputs_of(config, batch)
    other = DeviceBatch(**(vars(batch) | {"inputs": batch.inputs.clone()}))
    other.inputs[:, :, 1:] = (other.inputs[:, :, 1:] + 1) % config.vocab_size
    rows = []
    for b in (batch, other):
        mask = attention_mask(b.anchors, config.block_size, features.shape[1], "dense")
        hidden = block_hidden(drafter, features, b.anchors, b.inputs[:, :, 0], embedding, mask)
        rows.append(labelled_rows(drafter, hidden, b, embedding))
    assert torch.equal(rows[0][0], rows[1][0])
    # The head does read them: up to y_i with shift, up to y_{i-1} without.
    slot = batch.rows % config.block_size
    changed = (rows[0][1] != rows[1][1]).any(-1)
    first = 1 if config.shift_label else 2
    corrected = slot >= drafter.head.first_slot
    assert torch.equal(changed, corrected & (slot >= first))
    assert (rows[0][1][~corrected] == 0).all()


def test_flex_mask_equals_dense_mask(tiny_config):
    config = tiny_config(block_size=16, num_attention_heads=6, num_key_value_heads=2)
    drafter = make_drafter(config)
    batch = make_batch(config, length=256, count=16, sequences=3)
    anchors = batch.anchors.clone()
    anchors[0, 12:] = 0  # unused blocks
    anchors[1] = torch.arange(112, 128)  # a whole tile before one bound
    anchors[2] = torch.arange(240, 256)
    features, embedding, _ = inputs_of(config, batch)
    out = []
    for kind in ("dense", "flex"):
        mask = attention_mask(anchors, 16, 256, kind)
        with torch.no_grad():
            out.append(
                block_hidden(drafter, features, anchors, batch.inputs[:, :, 0], embedding, mask)
            )
    torch.testing.assert_close(out[1], out[0], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="attention_mask: got 5 anchors"):
        attention_mask(anchors[:, :5], 16, 256, "flex")


def test_flex_tiles_are_the_tiles_of_the_dense_mask():
    g = torch.Generator().manual_seed(0)
    anchors = torch.randint(0, 512, (4, 32), generator=g).sort(1).values
    dense = attention_mask(anchors, 16, 512, "dense")[:, 0]
    flex = attention_mask(anchors, 16, 512, "flex")
    tiles = dense.unflatten(1, (-1, 128)).unflatten(3, (-1, 128))  # [B, tq, 128, tk, 128]
    any_, all_ = tiles.amax((2, 4)), tiles.amin((2, 4))
    listed = torch.zeros_like(any_)
    for number, index, expected in (
        (flex.kv_num_blocks, flex.kv_indices, any_ & ~all_),
        (flex.full_kv_num_blocks, flex.full_kv_indices, all_),
    ):
        for b in range(4):
            for q in range(4):
                chosen = index[b, 0, q, : number[b, 0, q]].long()
                assert sorted(chosen.tolist()) == expected[b, q].nonzero()[:, 0].tolist()
                listed[b, q, chosen] = True
    assert torch.equal(listed, any_)


def rollout(drafter, features, token, anchor, embedding, lm_head):
    """Inference: one backbone forward over the block of `anchor`, then the reference chain."""
    config, head = drafter.config, drafter.head
    masks = embedding[config.mask_token_id].expand(config.block_size - 1, -1)
    embeds = torch.cat((embedding[token][None], masks))[None]
    context = drafter.context_kv(features[:, :anchor], torch.arange(anchor)[None])
    positions = torch.arange(anchor, anchor + config.block_size)[None]
    hidden = drafter(embeds, positions, context)
    gru, w1 = drafter.prefix_gru, drafter.embed_proj[0].weight
    weights = (gru.weight_ih_l0, gru.weight_hh_l0, w1, head.w2, embedding)
    chain = reference.draft_chain(
        hidden @ lm_head.t(), hidden, token[None], weights, num_drafts=config.max_drafts,
        shift_label=config.shift_label, prefix=config.pure_draft_prefix_len,
    )  # fmt: skip
    return torch.from_numpy(chain.tokens[0])


@torch.no_grad()
def test_training_scores_the_slots_of_inference(config):
    """With the drafted ids as the text, every teacher-forced argmax must be the drafted id."""
    drafter = make_drafter(config)
    drafter.head.w2.mul_(16)
    batch = make_batch(config)
    features, embedding, lm_head = inputs_of(config, batch)
    lm_head *= 0.1
    slots, base_differs = config.block_size, 0
    for anchor in range(16):
        token = batch.tokens[0, anchor]
        drafted = rollout(drafter, features[:1], token, anchor, embedding, lm_head)
        text = torch.cat((batch.tokens[0, : anchor + 1], drafted))[None]
        inputs, labels, has = block_labels(
            text.numpy(), np.ones(text.shape, bool), np.array([text.shape[1]]),
            np.array([[anchor]]), np.array([[True]]), slots, config.shift_label,
        )  # fmt: skip
        rows = np.flatnonzero(has)
        made = DeviceBatch(
            text, torch.tensor([[anchor]]), torch.from_numpy(inputs), torch.from_numpy(rows),
            torch.from_numpy(labels.reshape(-1)[rows]), torch.ones(len(rows)),
        )  # fmt: skip
        assert torch.equal(made.labels, drafted)
        known = torch.full((1, text.shape[1], features.shape[-1]), 1e3)  # past the anchor: unseen
        known[:, :anchor] = features[:1, :anchor]
        out = domino_loss(drafter, known, made, embedding, lm_head, 0.5)
        assert torch.equal(out.final_top, drafted), f"anchor {anchor}: slots and labels out of step"
        base_differs += int((out.base_top != drafted).sum())
    assert base_differs > 4, "the head must matter for this to say anything"


def test_head_gets_no_gradient_at_lambda_one_and_some_below(config):
    drafter, batch = make_drafter(config), make_batch(config)
    features, embedding, lm_head = inputs_of(config, batch)
    for lam in (1.0, 0.9, 0.0):
        drafter.zero_grad()
        domino_loss(drafter, features, batch, embedding, lm_head, lam).loss.backward()
        for name, p in drafter.named_parameters():
            in_head = name.startswith(("prefix_gru", "embed_proj"))
            largest = p.grad.abs().max().item()
            assert (largest == 0) == (in_head and lam == 1.0), (name, lam, largest)


def test_loss_is_the_weighted_mixture(config):
    drafter, batch = make_drafter(config), make_batch(config)
    features, embedding, lm_head = inputs_of(config, batch)
    out = domino_loss(drafter, features, batch, embedding, lm_head, 0.25)
    mask = attention_mask(batch.anchors, config.block_size, features.shape[1], "dense")
    hidden = block_hidden(drafter, features, batch.anchors, batch.inputs[:, :, 0], embedding, mask)
    hidden, low = labelled_rows(drafter, hidden, batch, embedding)
    base = hidden @ lm_head.t()
    final = base + low @ drafter.head.w2.t()
    ce = torch.nn.functional.cross_entropy
    want = sum(
        f * (batch.weights * ce(x, batch.labels, reduction="none")).sum()
        for f, x in ((0.25, base), (0.75, final))
    )
    torch.testing.assert_close(out.loss, want, rtol=1e-5, atol=1e-5)
    prefix = batch.rows % config.block_size < drafter.head.first_slot
    assert prefix.any() and torch.equal(out.base_ce[prefix], out.final_ce[prefix])


def test_lambda_falls_linearly():
    assert [lambda_at(p) for p in (0.0, 0.25, 0.5, 1.0, 1.5)] == [1.0, 0.75, 0.5, 0.0, 0.0]
    assert [lambda_at(p, 0.8, 0.5) for p in (0.0, 0.25, 0.5, 0.75)] == [0.8, 0.4, 0.0, 0.0]
    assert lambda_at(0.0, 1.0, 0.0) == 0.0


def test_meter_counts_leading_hits(tiny_config):
    for shift in (True, False):
        config = tiny_config(shift_label=shift)
        first = 0 if shift else 1
        # Two blocks, labels in all scored slots of the first and in the first scored slot of the
        # second.
        rows = torch.tensor([*range(first, 4), 4 + first])
        labels = torch.arange(len(rows))
        base, final = labels.clone(), labels.clone()
        base[1] = 99
        final[0] = 99
        zero = torch.zeros(len(rows))
        batch = DeviceBatch(zero, torch.zeros(1, 2), zero, rows, labels, zero + 1)
        meter = Meter(config, CPU)
        meter.add(batch, DualCE(zero, zero, zero, base, final))
        read = meter.read()
        assert read["accepted_base"] == 2.0 and read["accepted_final"] == 1.5
        assert read["accuracy_base_by_slot"][first : first + 2] == [1.0, 0.0]
        assert read["accuracy_final_by_slot"][first : first + 2] == [0.5, 1.0]


def test_target_features_are_the_layers_outputs():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(shape).eval()
    tokens = torch.randint(0, 61, (2, 10))
    states = model(tokens, output_hidden_states=True).hidden_states
    want = torch.cat([states[1], states[3]], -1).detach()
    features = TargetFeatures(model, (0, 2))
    assert len(features.base.layers) == 3
    assert torch.equal(features(tokens), want)
    padded = torch.cat([tokens[:, :7], torch.zeros_like(tokens[:, :3])], 1)
    torch.testing.assert_close(features(padded)[:, :7], want[:, :7])
