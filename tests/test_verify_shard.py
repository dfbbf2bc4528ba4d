"""verify_chain over shards of the vocabulary: the bits of the whole."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from chain_cases import assert_same, make, to
from test_verify_rules import pack, with_edits, with_q

from domino_kernels import (
    VerifyRule,
    VerifyStatus,
    join_verify_shards,
    verify_chain,
    verify_shard,
    verify_shard_rows,
)

INF, NAN = float("inf"), float("nan")
COLUMNS = "target_logits", "logit_bias", "output_counts"
WORDS = "prompt_mask", "grammar_mask"


def in_shards(arguments, edges):
    """What ranks with these edges of the vocabulary make of a verify_chain call."""
    drafts = arguments["draft_tokens"]
    shards = []
    for first, last in pairwise(edges):
        shard = dict(arguments, vocab_start=first, vocab_total=edges[-1])
        shard |= {k: shard[k][..., first:last] for k in COLUMNS if k in shard}
        shard |= {k: shard[k][..., first // 32 : (last + 31) // 32] for k in WORDS if k in shard}
        if "draft_logits" in shard and "draft_ids" not in shard:
            shard["draft_logits"] = shard["draft_logits"][..., first:last]
        shards.append(shard)
    partials = torch.stack([verify_shard_rows(**shard) for shard in shards])
    mixed = torch.randperm(len(shards))
    found = [verify_shard(partials=partials[mixed], **shard) for shard in shards]
    return join_verify_shards(drafts, found[::-1])


def cut(vocab, shards):
    at = np.random.default_rng(shards).choice(np.arange(1, vocab // 128), shards - 1, replace=False)
    return [0, *(128 * int(c) for c in sorted(at)), vocab]


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
@pytest.mark.parametrize("rule", ["greedy", "token", "onehot", "match", "gumbel"])
@pytest.mark.parametrize("form", ["none", "dense", "pool", "scalar"])
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
        if form == "dense":
            q = arguments["draft_logits"]
            q[1, 0, 5], q[2, 1], q[4, 1, 128:] = NAN, -INF, -INF
            q[5, 2].scatter_(-1, drafts[5, 2:3], -INF)  # a draft that q does not have
        arguments = {k: v for k, v in to(arguments, device).items() if v is not None}
        expected = verify_chain(**arguments)
        assert_same(in_shards(arguments, cut(shape[2], shards)), expected)
        seen = int(np.bitwise_or.reduce(expected.status.cpu().numpy()))
        assert seen & VerifyStatus.NON_FINITE and seen & VerifyStatus.EMPTY_ROW


@pytest.mark.parametrize("shards", [2, 4, 8])
@pytest.mark.parametrize("rule", ["greedy", "token", "onehot", "match", "gumbel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_edits(rule, dtype, shards, device, generator):
    """Bias, penalties that follow the drafts, masks: each rank with its part of them."""
    batch, drafts, vocab = 24, 4, 1037
    arguments = make(batch, drafts, vocab, generator, dense=True, dtype=dtype) | {"rule": rule}
    form = "dense" if shards == 4 else "pool"
    arguments = with_edits(with_q(arguments, form, 7, generator), generator, vocab)
    arguments["draft_tokens"][7, 1:] = arguments["draft_tokens"][7, :1]  # counts of the prefix
    allowed = torch.rand(batch, drafts + 1, vocab, generator=generator) < 0.8
    allowed[5], allowed[8, 1, 300:] = False, False
    arguments["grammar_mask"] = pack(allowed)
    arguments["target_logits"][9, 1, 40] = NAN
    arguments["target_logits"][10, 0, 40], allowed[10, 0, 40] = NAN, False
    if rule == "greedy":
        for name in ("temperature", "seed", "block_start", "draft_logits", "draft_ids"):
            arguments[name] = None
        arguments["draft_temperature"] = None
    arguments = {k: v for k, v in to(arguments, device).items() if v is not None}
    expected = verify_chain(**arguments)
    assert_same(in_shards(arguments, cut(vocab, shards)), expected)
    assert int(expected.status[5]) == VerifyStatus.EMPTY_ROW
    for name in ("logit_bias", "grammar_mask", "prompt_mask", "output_counts", "presence_penalty"):
        less = {k: v for k, v in arguments.items() if k != name}  # the edit moves something
        assert not torch.equal(verify_chain(**less).chosen_logprob, expected.chosen_logprob), name


@pytest.mark.parametrize("form", ["dense", "pool"])
@pytest.mark.parametrize("shards", [2, 8])
def test_ragged_mixed_and_inactive(shards, form, device, generator):
    """Rows behind cu_rows, a rule for each request, requests behind num_active."""
    batch, drafts, vocab = 25, 3, 1100
    arguments = with_q(make(batch, drafts, vocab, generator, dense=True), form, 7, generator)
    arguments = with_edits(arguments, generator, vocab)
    count = torch.randint(0, drafts + 2, (batch,), generator=generator)
    count[:4], count[19] = torch.tensor([4, 0, 1, 2]), drafts + 1
    rows = torch.arange(drafts + 1) < count[:, None]
    first = torch.nn.functional.pad(count.cumsum(0), (1, 0)).int()
    first[20:] += 1  # request 19 has a row too many
    for name in ("target_logits", "grammar_mask"):
        arguments[name] = arguments[name][rows]
    rules = torch.arange(batch).to(torch.uint8) % len(VerifyRule)
    rules[rules == VerifyRule.BLOCK] = 9  # unknown
    arguments |= dict(cu_rows=first, rule=rules, num_active=torch.tensor([23]).int())
    arguments = {k: v for k, v in to(arguments, device).items() if v is not None}
    expected = verify_chain(**arguments)
    assert_same(in_shards(arguments, cut(vocab, shards)), expected)
    seen = int(np.bitwise_or.reduce(expected.status.cpu().numpy()))
    assert seen & VerifyStatus.BAD_ROWS and seen & VerifyStatus.BAD_PARAMETER
    assert not expected.num_emitted[23:].any()


def test_a_token_of_the_draft_behind_the_last_row(device, generator):
    """The bonus token of a short request may be what stands in draft_tokens behind its rows."""
    arguments = make(64, 2, 256, generator, spread=6.0) | {"rule": "match"}
    arguments["cu_rows"] = torch.arange(65).int()
    arguments["target_logits"] = arguments["target_logits"][:, 0].contiguous()
    del arguments["draft_logits"]
    arguments = to(arguments, device)
    expected = verify_chain(**arguments)
    assert (expected.tokens[:, 0] == arguments["draft_tokens"][:, 0]).any()
    assert_same(in_shards(arguments, [0, 128, 256]), expected)


def test_block_requests_have_a_status(device, generator):
    """A tensor of rules cannot be refused ahead."""
    arguments = with_q(make(6, 2, 300, generator, dense=True), "pool", 7, generator)
    arguments["temperature"][:] = 1.0
    arguments["rule"] = torch.tensor([4, 1, 4, 1, 4, 1]).byte()
    arguments = to(arguments, device)
    result = in_shards(arguments, [0, 128, 300])
    expected = verify_chain(**arguments)
    assert result.status[::2].eq(VerifyStatus.BAD_PARAMETER).all()
    assert not result.num_emitted[::2].any()
    assert torch.equal(result.tokens[1::2], expected.tokens[1::2])


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
    words = torch.zeros(2, 9).int()
    with pytest.raises(ValueError, match=r"prompt_mask: got shape \[2, 9\], expected \[2, 10\]"):
        verify_shard_rows(logits, drafts, prompt_mask=words, vocab_total=300)
    with pytest.raises(ValueError, match=r"verify_shard_rows: cu_rows: got shape \[3\], expected"):
        verify_shard_rows(logits[0], drafts[:1], cu_rows=torch.zeros(3).int(), vocab_total=300)
    with pytest.raises(TypeError, match="top_k"):
        verify_shard(logits, drafts, partials, top_k=torch.ones(2).int(), vocab_total=300)
    with pytest.raises(ValueError, match="verify_shard: vocab_start: got 100, expected a multiple"):
        verify_shard(logits, drafts, partials, vocab_start=100, vocab_total=400)
    with pytest.raises(ValueError, match="verify_shard: vocab_start: got 128, expected 0 to 0"):
        verify_shard(logits, drafts, partials, vocab_start=128, vocab_total=300)
    with pytest.raises(ValueError, match=r"verify_shard: partials: got shape \[2, 7, 5\]"):
        verify_shard(logits, drafts, partials[:, :7], vocab_total=300)
    with pytest.raises(ValueError, match="verify_shard: rule: got 'block'"):
        verify_shard(logits, drafts, partials, rule="block", vocab_total=300)
    with pytest.raises(ValueError, match=r"draft_logits: got shape \[2, 3, 400\], expected"):
        q = torch.zeros(2, 3, 400)
        rest = {k: arguments[k] for k in ("temperature", "seed", "block_start")}
        verify_shard(
            logits, drafts, partials, rule="token", draft_logits=q, vocab_total=300, **rest
        )
