"""The arithmetic of bench/pool_recall.py: pools, misses, what a chain over a pool drafts."""

import numpy as np
import pytest
import torch

import domino_kernels
from bench import pool_recall
from domino_kernels import HeadWeights
from domino_kernels.reference.head import draft_chain as reference_draft_chain
from domino_kernels.reference.head import group_pool
from domino_kernels.testing import to_numpy

OPTIONS = dict(num_drafts=4, shift_label=True, pure_draft_prefix_len=1)


def test_ranks_give_ties_to_the_lowest_id():
    base = torch.tensor([[1.0, 3.0, 3.0, -torch.inf], [2.0, 0.0, 1.0, 4.0]])
    slot, block, union = pool_recall.pool_ranks(base).tolist()
    assert slot == [[2, 0, 1, 3], [1, 3, 2, 0]]
    assert block == [[3, 1, 2, 0]] * 2  # of the maxima 2 3 3 4
    assert union == [[1, 0, 1, 0]] * 2


@pytest.mark.parametrize("size", [5, 16, 40, 64, 300])
def test_group_pool_is_that_of_the_op(size, generator):
    values = torch.randint(40, (300,), generator=generator).float()  # many ties
    inside = pool_recall.group_pool(values, size).nonzero()[:, 0]
    assert inside.tolist() == sorted(group_pool(values.numpy(), size).tolist())


def planted(places, vocab=64, lift=100.0):
    """A block in which slot i's winner is id 10 + i, at rank places[i - 1] of the base logits.

    W1 reads the hidden row alone: slot i has a low-rank unit of its own, which lifts its winner.
    """
    corrected = len(places)
    base = torch.arange(vocab, 0, -1).float().repeat(1, corrected + 1, 1)  # id 0 is the best
    hidden = torch.zeros(1, corrected + 1, corrected)
    w1, w2 = torch.zeros(corrected, corrected + 2), torch.zeros(vocab, corrected)
    for i, place in enumerate(places):
        base[0, i + 1, 10 + i] = vocab - place + 0.5  # behind `place` others
        hidden[0, i + 1, i], w1[i, i], w2[10 + i, i] = 1.0, 30.0, lift
    zeros = torch.zeros
    weights = HeadWeights(zeros(6, corrected), zeros(6, 2), w1, w2, zeros(vocab, corrected))
    return base, hidden, zeros(1, dtype=torch.int64), weights


def test_planted_misses():
    """Winners at ranks 0, 5 and 3 of their slots; M = 1, 4 and 6."""
    recorder = pool_recall.Recorder(pools=(1, 4, 6))
    tokens = recorder(*planted((0, 5, 3)), **OPTIONS)
    assert tokens.tolist() == [[0, 10, 11, 12]]
    (block,) = recorder.blocks
    missed = dict(zip(pool_recall.KINDS, block["missed"]))
    assert missed["slot"] == [[0, 1, 1], [0, 1, 0], [0, 0, 0]]
    # maxima over the slots: 10 leads with 64.5, then 0, 1, 2; 12 has 61.5, then 3, 4; 11 has 59.5
    assert missed["block"] == [[0, 1, 1], [0, 1, 1], [0, 1, 0]]
    assert missed["union"] == missed["slot"]
    assert missed["group"] == missed["block"]  # one group
    # a slot's top M is {10, 0, ..}, {0, ..}, {0, ..}
    assert block["union"] == [2, 1 + 4 + 1, 1 + 5 + 1 + 1]
    drafts = block["drafts"][pool_recall.KINDS.index("slot")]
    assert drafts == [[0, 10, 0, 0], [0, 10, 0, 12], [0, 10, 11, 12]]
    assert block["moments"][pool_recall.MOMENTS.index("base_agrees")] == [1, 0, 0]

    follows = [0, 10, 0, 12, 7]
    block |= {"reach": pool_recall.reach(block["winners"], follows)}
    block["pool_reach"] = [
        [pool_recall.reach(d, follows) for d in kind] for kind in block["drafts"]
    ]
    whole = dict(block, reach=5, missed=[[[0] * 3] * 3] * 4, pool_reach=[[5] * 3] * 4)
    found = pool_recall.summary([block, whole], pools=(1, 4, 6))
    assert found["accepted_length"] == (3 + 5) / 2
    first = found["pools"][0]
    assert (first["pool"], first["M"], first["ids"]) == ("slot", 1, 1)
    assert first["recall"] == pytest.approx(4 / 6, abs=1e-4)
    assert first["recall_by_slot"] == [1, 0.5, 0.5]
    assert (first["restart_rate"], first["restarts_per_block"], first["restarts_max"]) == (
        0.5,
        1,
        2,
    )
    assert first["accepted_length"] == (4 + 5) / 2  # the pool meets the text one draft further on
    assert found["pools"][2]["recall"] == 1


def test_reach_ends_with_the_text():
    assert pool_recall.reach([1, 2, 3], [1, 2, 9, 9]) == 3
    assert pool_recall.reach([1, 2, 3], [1, 2]) == 2
    assert pool_recall.reach([1, 2, 3], [1, 2, 3, 4]) == 4
    assert pool_recall.reach([1], []) == 0


def test_a_chain_over_a_pool_follows_its_own_ids(generator):
    """Behind a miss it goes on from its own id, as the reference over the same pool does."""
    draw = lambda *size, scale=1.0: torch.randn(size, generator=generator) * scale  # noqa: E731
    weights = HeadWeights(
        draw(18, 8), draw(18, 6), draw(5, 14), draw(90, 5, scale=3.0), draw(90, 8)
    )
    different = 0
    for _ in range(20):
        base, hidden = draw(1, 5, 90), draw(1, 5, 8)
        anchor = torch.randint(90, (1,), generator=generator)
        recorder = pool_recall.Recorder(pools=(4, 30, 90))
        recorder(base, hidden, anchor, weights, **OPTIONS)
        (block,) = recorder.blocks
        order = np.argsort(-to_numpy(base[0, 1:4]), axis=-1, kind="stable")
        for m, size in enumerate(recorder.pools.tolist()):
            inside = np.full((1, 5, 90), -np.inf)
            inside[0, 0] = to_numpy(base[0, 0])
            for slot in range(3):
                ids = order[slot, :size]
                inside[0, slot + 1, ids] = to_numpy(base[0, slot + 1, ids])
            expected = reference_draft_chain(
                inside, to_numpy(hidden), anchor.numpy(),
                [to_numpy(w) for w in (weights.w_ih, weights.w_hh, weights.w1, weights.w2,
                                       weights.embedding)],
                num_drafts=4,
            )  # fmt: skip
            assert block["drafts"][0][m] == expected.tokens[0].tolist()
            different += expected.tokens[0].tolist() != block["winners"]
        assert block["missed"][0][-1] == [0, 0, 0]
    assert 10 < different < 40


def test_blocks_of_a_decoded_prompt(tiny_target_and_drafter):
    target, drafter = tiny_target_and_drafter
    before = domino_kernels.draft_chain
    vocab = target.vocab_size
    with torch.inference_mode():
        blocks = pool_recall.record(target, drafter, [5, 9, 31], 12, pools=(2, vocab))
    assert domino_kernels.draft_chain is before
    assert sum(b["reach"] for b in blocks[:-1]) < 12 <= sum(b["reach"] for b in blocks)
    for block in blocks:
        assert [kind[1] for kind in block["pool_reach"]] == [block["reach"]] * 4
    assert any(1 in block["missed"][0][0] for block in blocks)
    found = pool_recall.summary(blocks, pools=(2, vocab))
    text = pool_recall.table({"sets": {"all": found}})
    assert f"| {vocab} | slot | 100.00% | 0.0% | 0.000 | {found['accepted_length']:.3f} |" in text


@pytest.fixture
def tiny_target_and_drafter():
    from domino_draft import DominoConfig, DominoDrafter, Target
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_attention_heads=4)
    sizes |= dict(num_key_value_heads=2, max_position_embeddings=256)
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, num_hidden_layers=4, initializer_range=0.4, eos_token_id=None)
    )
    config = DominoConfig(
        **sizes, num_hidden_layers=1, head_dim=16, num_target_layers=4, target_layer_ids=(0, 2),
        mask_token_id=60, emb_dim=8, gru_hidden_dim=24, block_size=5, dtype="float32",
    )  # fmt: skip
    drafter = DominoDrafter(config).eval()
    torch.nn.init.normal_(
        drafter.head.w2, std=100
    )  # a correction that moves winners out of small pools
    return Target(model.eval()), drafter
