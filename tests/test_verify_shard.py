"""verify_chain over shards of the vocabulary: the bits of the whole."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from chain_cases import assert_same, make, to
from test_verify_rules import with_q

from domino_kernels import (
    VerifyStatus,
    join_verify_shards,
    row_stats,
    shard_rows,
    verify_chain,
    verify_shard,
)

INF, NAN = float("inf"), float("nan")


def in_shards(arguments, edges):
    """What ranks with these edges of the vocabulary make of a verify_chain call."""
    logits, drafts = arguments["target_logits"], arguments["draft_tokens"]
    vocab = logits.size(-1)
    rest = {k: v for k, v in arguments.items() if k not in ("target_logits", "draft_tokens")}
    rows = shard_rows(drafts, arguments.get("temperature"))
    where = [dict(vocab_start=a, vocab_total=vocab) for a in edges[:-1]]
    shards = [logits[..., a:b] for a, b in pairwise(edges)]
    partials = torch.stack(
        [row_stats(s.flatten(0, 1), *rows, **w).partials for s, w in zip(shards, where)]
    )
    found = [
        verify_shard(s, drafts, partials[torch.randperm(len(shards))], **rest, **w)
        for s, w in zip(shards, where)
    ]
    return join_verify_shards(drafts, found[::-1])


def cut(vocab, shards):
    at = np.random.default_rng(shards).choice(np.arange(1, vocab // 128), shards - 1, replace=False)
    return [0, *(128 * int(c) for c in sorted(at)), vocab]


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
@pytest.mark.parametrize("rule", ["greedy", "token", "onehot", "match", "gumbel"])
@pytest.mark.parametrize("form", ["none", "pool", "scalar"])
def test_bits_of_the_whole(rule, form, shards, device, generator):
    if rule == "greedy" and form != "none":
        pytest.skip("no q")
    for shape, dtype in [((60, 4, 1100), torch.bfloat16), ((7, 20, 3005), torch.float32)]:
        arguments = with_q(
            make(*shape, generator, dense=True, dtype=dtype) | {"rule": rule}, form, 7, generator
        )
        if rule == "greedy":
            arguments = {k: arguments[k] for k in ("target_logits", "draft_tokens")}
        logits, drafts = arguments["target_logits"], arguments["draft_tokens"]
        logits[1, 2, 40], logits[2, 0, 900], logits[3, 1] = NAN, INF, -INF
        logits[4, :, :1000] = -INF  # shards with nothing
        logits[5, 0, [17, 1050]] = 90.0  # a tie over shards
        drafts[6, 1:] = -1
        drafts[0, 1] = shape[2] + 3
        arguments = {k: v for k, v in to(arguments, device).items() if v is not None}
        expected = verify_chain(**arguments)
        assert_same(in_shards(arguments, cut(shape[2], shards)), expected)
        seen = int(np.bitwise_or.reduce(expected.status.cpu().numpy()))
        assert seen & VerifyStatus.NON_FINITE and seen & VerifyStatus.EMPTY_ROW


def test_nothing_left_of_the_residual(device):
    """p is all on the draft that its coin rejects, or equal to q: drawn from p."""
    runs, vocab = 400, 300
    target = torch.full((runs, 2, vocab), -INF, device=device)
    target[:, 0, 200] = 0.0
    target[:, 1, 7] = 0.0
    ids = torch.tensor([200, 5], device=device).int().expand(runs, 1, 2)
    arguments = dict(
        target_logits=target,
        draft_tokens=torch.full((runs, 1), 200, device=device),
        rule="token",
        temperature=torch.ones(runs, device=device),
        seed=torch.arange(runs, device=device),
        block_start=torch.zeros(runs, device=device).long(),
        draft_logits=torch.zeros(runs, 1, 2, device=device),
        draft_ids=ids,
    )
    assert_same(in_shards(arguments, [0, 128, 256, 300]), verify_chain(**arguments))
    arguments["target_logits"][:, 0, 5] = 0.0  # p = q on both tokens
    assert_same(in_shards(arguments, [0, 128, 300]), verify_chain(**arguments))


def test_bad_parameters(device, generator):
    arguments = to(make(5, 2, 300, generator), device)
    arguments["temperature"] = torch.tensor([NAN, -1.0, 0.0, 1.0, INF], device=device)
    arguments = {k: v for k, v in arguments.items() if v is not None}
    assert_same(in_shards(arguments, [0, 128, 300]), verify_chain(**arguments))


def test_bad_arguments(generator):
    arguments = make(2, 3, 300, generator)
    logits, drafts = arguments["target_logits"], arguments["draft_tokens"]
    partials = torch.zeros(2, 8, 5).long()
    with pytest.raises(ValueError, match="verify_shard: vocab_start: got 100, expected a multiple"):
        verify_shard(logits, drafts, partials, vocab_start=100, vocab_total=400)
    with pytest.raises(ValueError, match="verify_shard: vocab_start: got 128, expected 0 to 0"):
        verify_shard(logits, drafts, partials, vocab_start=128, vocab_total=300)
    with pytest.raises(ValueError, match=r"verify_shard: partials: got shape \[2, 7, 5\]"):
        verify_shard(logits, drafts, partials[:, :7], vocab_total=300)
    with pytest.raises(ValueError, match="verify_shard: rule: got 'block'"):
        verify_shard(logits, drafts, partials, rule="block", vocab_total=300)
    with pytest.raises(ValueError, match="draft_logits: got a tensor, expected draft_ids with it"):
        q = torch.zeros(2, 3, 300)
        rest = {k: arguments[k] for k in ("temperature", "seed", "block_start")}
        verify_shard(
            logits, drafts, partials, rule="token", draft_logits=q, vocab_total=300, **rest
        )
