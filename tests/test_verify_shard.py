"""verify_chain over shards of the vocabulary: the bits of the whole."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from chain_cases import assert_same, make, to
from test_verify_rules import pack, with_edits, with_filters, with_q

from domino_kernels import (
    VerifyRule,
    VerifyStatus,
    join_verify_shards,
    verify_chain,
    verify_shard,
    verify_shard_rows,
)
from domino_kernels.reference.law import FILTER_ORDERS

INF, NAN = float("inf"), float("nan")
COLUMNS = "target_logits", "logit_bias", "output_counts"
WORDS = "prompt_mask", "grammar_mask"


def of_shard(arguments, first, last, vocab):
    """A rank's arguments: its columns, as views."""
    shard = dict(arguments, vocab_start=first, vocab_total=vocab)
    shard |= {k: shard[k][..., first:last] for k in COLUMNS if k in shard}
    shard |= {k: shard[k][..., first // 32 : (last + 31) // 32] for k in WORDS if k in shard}
    if "draft_logits" in shard and "draft_ids" not in shard:
        shard["draft_logits"] = shard["draft_logits"][..., first:last]
    return shard


def in_shards(arguments, edges, listed=None):
    """What ranks with these edges of the vocabulary make of a verify_chain call.

    listed: None: all has to be settled.
    """
    drafts = arguments["draft_tokens"]
    shards = [of_shard(arguments, first, last, edges[-1]) for first, last in pairwise(edges)]
    partials = torch.stack([verify_shard_rows(listed=listed or 128, **s) for s in shards])
    mixed = torch.randperm(len(shards))
    found = [verify_shard(partials=partials[mixed], **shard) for shard in shards]
    result, unsettled = join_verify_shards(drafts, found[::-1])
    if listed is not None:
        return result, unsettled
    assert not unsettled.any()
    return result


def only(result, requests):
    return [v if v is None else v[requests] for v in result]


def cut(vocab, shards):
    at = np.random.default_rng(shards).choice(np.arange(1, vocab // 128), shards - 1, replace=False)
    return [0, *(128 * int(c) for c in sorted(at)), vocab]


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
@pytest.mark.parametrize("rule", ["greedy", "token", "onehot", "match", "gumbel", "block"])
@pytest.mark.parametrize("form", ["none", "dense", "pool", "scalar"])
def test_bits_of_the_whole(rule, form, shards, device, generator):
    if (rule == "greedy" and form != "none") or (rule == "block" and form == "scalar"):
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
@pytest.mark.parametrize("rule", ["greedy", "token", "onehot", "match", "gumbel", "block"])
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


FORMS = {"token": ["none", "dense", "pool", "scalar"], "block": ["none", "dense", "pool"]}
RULES_AND_FORMS = [
    (r, f) for r in ["token", "onehot", "match", "gumbel", "block"] for f in FORMS.get(r, ["none"])
]


@pytest.mark.parametrize("shards", [2, 4, 8])
@pytest.mark.parametrize("order", FILTER_ORDERS)
@pytest.mark.parametrize("rule, form", RULES_AND_FORMS)
def test_filters(rule, form, order, shards, device, generator):
    """Long lists: all is settled, but for a row whose mass values and sums round apart."""
    vocab = 1037
    for dtype in (torch.bfloat16, torch.float32):
        arguments = make(48, 3, vocab, generator, dense=True, dtype=dtype, spread=3.0)
        arguments = with_q(arguments | {"rule": rule}, form, 7, generator)
        arguments = with_filters(arguments, generator, vocab) | {"filter_order": order}
        logits = arguments["target_logits"]
        logits[1, 1, 40], logits[2, 0, 900], logits[4, 1] = NAN, INF, -INF
        logits[5, :, :1000] = -INF
        logits[7] = (logits[7] * 2).round() / 2  # ties at the cut
        arguments = {k: v for k, v in to(arguments, device).items() if v is not None}
        expected = verify_chain(**arguments)
        result, unsettled = in_shards(arguments, cut(vocab, shards), 1024 // shards)
        assert unsettled.sum() <= (2 if dtype == torch.bfloat16 else 0), unsettled.sum()
        assert_same(only(result, ~unsettled), only(expected, ~unsettled))


@pytest.mark.parametrize("shards", [2, 8])
@pytest.mark.parametrize("rule", ["token", "onehot", "match", "block"])
def test_filters_and_edits(rule, shards, device, generator):
    batch, drafts, vocab = 48, 3, 1037
    arguments = make(batch, drafts, vocab, generator, dense=True, dtype=torch.bfloat16)
    form = "dense" if shards == 8 else "pool"
    arguments = with_q(arguments | {"rule": rule}, form, 7, generator)
    arguments = with_edits(with_filters(arguments, generator, vocab), generator, vocab)
    arguments = {k: v for k, v in to(arguments, device).items() if v is not None}
    expected = verify_chain(**arguments)
    result, unsettled = in_shards(arguments, cut(vocab, shards), 1024 // shards)
    assert not unsettled.any()  # of an edited row the mass is its sum
    assert_same(result, expected)


@pytest.mark.parametrize("listed", [1, 2, 8, 40])
@pytest.mark.parametrize("rule, form", RULES_AND_FORMS)
def test_what_is_not_listed_is_not_settled(rule, form, listed, device, generator):
    """Flat rows and short lists: never a wrong token, and an unsettled request ends in time."""
    vocab = 700
    for order in FILTER_ORDERS:
        arguments = make(90, 3, vocab, generator, dense=True, spread=1.5)
        arguments = with_q(arguments | {"rule": rule}, form, 7, generator)
        arguments = with_filters(arguments, generator, vocab) | {"filter_order": order}
        arguments["target_logits"][:, :, ::3] = arguments["target_logits"][:, :, ::3].round()
        arguments["top_k"][::2] = arguments["top_k"][::2] % 12
        arguments = {k: v for k, v in to(arguments, device).items() if v is not None}
        expected = verify_chain(**arguments)
        result, unsettled = in_shards(arguments, [0, 128, 384, 512, 700], listed)
        assert_same(only(result, ~unsettled), only(expected, ~unsettled))
        assert unsettled.any() and not unsettled[arguments["temperature"] == 0].any()
        stopped = only(result, unsettled)
        assert torch.equal(stopped[1], stopped[2])
        assert (stopped[1] <= expected.num_accepted[unsettled]).all()
        before = torch.arange(4, device=device) < stopped[1][:, None]
        for mine, whole in ((stopped[0], expected.tokens), (stopped[3], expected.chosen_logprob)):
            assert torch.equal(mine[before], whole[unsettled][before])
        assert (stopped[0][~before] == -1).all()


def test_top_k_up_to_the_lists_is_settled(device, generator):
    """Whatever the row, in every order: at a real vocabulary, by values and by sums."""
    vocab = 151936
    arguments = make(6, 2, vocab, generator, dtype=torch.bfloat16, spread=1.0)
    arguments["target_logits"] += torch.rand(vocab, generator=generator).bfloat16() / 64
    arguments["temperature"][:] = torch.tensor([0.6, 0.7, 0.8, 0.9, 1.0, 0.0])
    arguments |= dict(top_k=torch.tensor([1, 20, 50, 64, 100, 5]).int())
    arguments |= dict(top_p=torch.tensor([0.9, 0.95, 1.0, 0.8, 0.99, 0.5]))
    arguments = {k: v for k, v in to(arguments, device).items() if v is not None}
    for order in FILTER_ORDERS:
        arguments["filter_order"] = order
        for rule in ("token", "match"):
            arguments["rule"] = rule
            result, unsettled = in_shards(arguments, cut(vocab, 8), 128)
            known = ~unsettled
            if order != "joint":  # there top_p is a share of the row
                assert known.all()
            assert known.sum() > 3
            assert_same(only(result, known), only(verify_chain(**arguments), known))


def test_a_filter_that_leaves_one_token(device):
    runs = 40
    arguments = dict(
        target_logits=torch.zeros(runs, 2, 300, device=device),
        draft_tokens=torch.full((runs, 1), 200, device=device),
        rule="token",
        temperature=torch.ones(runs, device=device),
        seed=torch.arange(runs, device=device),
        block_start=torch.zeros(runs, device=device).long(),
        draft_logits=torch.zeros(runs, 1, 2, device=device),
        draft_ids=torch.tensor([200, 5], device=device).int().expand(runs, 1, 2),
        top_k=torch.ones(runs, device=device).int(),
    )
    arguments["target_logits"][:, 1, 7] = 1.0
    for kept, emitted in ((5, 1), (200, 2)):
        arguments["target_logits"][:, 0, kept] += kept
        result = in_shards(arguments, [0, 128, 300])
        assert_same(result, verify_chain(**arguments))
        assert (result.num_emitted == emitted).all()
    arguments["target_logits"][:, 0] = 0.0  # more ties with the first token than are listed
    assert in_shards(arguments, [0, 128, 300], 128)[1].all()


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("form", ["none", "dense", "pool"])
def test_kernel_and_twin_agree_bitwise(form, rule, generator):
    """What the shards tell each other, settled or not."""
    vocab = 3005
    for dtype in (torch.bfloat16, torch.float32):
        arguments = make(20, 3, vocab, generator, dense=True, dtype=dtype, spread=1.5)
        arguments = with_q(arguments | {"rule": rule}, form, 7, generator)
        arguments = with_edits(with_filters(arguments, generator, vocab), generator, vocab)
        if dtype == torch.bfloat16:
            arguments = {k: v for k, v in arguments.items() if k != "grammar_mask"}
        arguments = {k: v for k, v in arguments.items() if v is not None}
        found = []
        for device in ("cpu", "cuda"):
            shards = [
                of_shard(to(arguments, device), first, last, vocab)
                for first, last in pairwise([0, 896, 1024, 3005])
            ]
            rows = torch.stack([verify_shard_rows(listed=40, **shard) for shard in shards])
            found.append((rows, *(t for s in shards for t in verify_shard(partials=rows, **s))))
        for mine, theirs in zip(*found):
            assert torch.equal(mine, theirs.cpu())


@pytest.mark.parametrize("form", ["dense", "pool"])
@pytest.mark.parametrize("shards", [2, 8])
def test_ragged_mixed_and_inactive(shards, form, device, generator):
    """Rows behind cu_rows, a rule for each request, requests behind num_active."""
    batch, drafts, vocab = 25, 3, 1100
    arguments = with_q(make(batch, drafts, vocab, generator, dense=True), form, 7, generator)
    arguments = with_edits(with_filters(arguments, generator, vocab), generator, vocab)
    count = torch.randint(0, drafts + 2, (batch,), generator=generator)
    count[:4], count[19] = torch.tensor([4, 0, 1, 2]), drafts + 1
    rows = torch.arange(drafts + 1) < count[:, None]
    first = torch.nn.functional.pad(count.cumsum(0), (1, 0)).int()
    first[20:] += 1  # request 19 has a row too many
    for name in ("target_logits", "grammar_mask"):
        arguments[name] = arguments[name][rows]
    rules = torch.arange(batch).to(torch.uint8) % len(VerifyRule)
    rules[4::12] = 9  # unknown
    arguments |= dict(cu_rows=first, rule=rules, num_active=torch.tensor([23]).int())
    arguments = {k: v for k, v in to(arguments, device).items() if v is not None}
    expected = verify_chain(**arguments)
    result, unsettled = in_shards(arguments, cut(vocab, shards), 1024 // shards)
    assert not unsettled.any()
    assert_same(result, expected)
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


def test_a_replacement_that_is_the_draft_ends_the_walk(device):
    """p(x) is 1 less its rounding and the coin is 1: x is rejected, nothing else is left, and x
    comes back as a draw from p."""
    runs = 500
    target = torch.full((runs, 3, 300), -INF, device=device)
    target[:, 0, 200] = torch.linspace(-5, 5, runs, device=device)
    target[:, 1:, 7] = 0.0
    arguments = dict(
        target_logits=target,
        draft_tokens=torch.tensor([200, 9], device=device).expand(runs, 2),
        rule="token",
        temperature=torch.ones(runs, device=device),
        seed=torch.full((runs,), 64919565, device=device),  # coin 0: the greatest 128 words
        block_start=torch.zeros(runs, device=device).long(),
    )
    expected = verify_chain(**arguments)
    assert (expected.status == VerifyStatus.ZERO_RESIDUAL).any()
    assert_same(in_shards(arguments, [0, 128, 300]), expected)


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
    rest = {k: arguments[k] for k in ("temperature", "seed", "block_start")}
    rest |= dict(rule="token", top_k=torch.ones(2).int(), vocab_total=300)
    with pytest.raises(ValueError, match="partials: got 2 shards with 0 tokens of a row, expected"):
        verify_shard(logits, drafts, partials, **rest)
    with pytest.raises(ValueError, match="partials: got 2 shards with 513 tokens of a row, expe"):
        verify_shard(logits, drafts, torch.zeros(2, 8, 518).long(), **rest)
    with pytest.raises(ValueError, match="verify_shard_rows: listed: got 1025, expected 1 to 1024"):
        verify_shard_rows(logits, drafts, listed=1025, **rest)
    with pytest.raises(ValueError, match=r"partials: got shape \[2, 8, 6\], expected \[2, 8, 5\]"):
        verify_shard(logits, drafts, torch.zeros(2, 8, 6).long(), vocab_total=300)
    with pytest.raises(ValueError, match="verify_shard: partials: got none, expected those of all"):
        verify_shard(logits, drafts, partials[:0], vocab_total=300)
    with pytest.raises(ValueError, match="join_verify_shards: shards: got none, expected"):
        join_verify_shards(drafts, [])
    with pytest.raises(TypeError, match="join_verify_shards: shards: got Tensor, expected"):
        join_verify_shards(drafts, [partials])
    with pytest.raises(ValueError, match="verify_shard: vocab_start: got 100, expected a multiple"):
        verify_shard(logits, drafts, partials, vocab_start=100, vocab_total=400)
    with pytest.raises(ValueError, match="verify_shard: vocab_start: got 128, expected 0 to 0"):
        verify_shard(logits, drafts, partials, vocab_start=128, vocab_total=300)
    with pytest.raises(ValueError, match=r"verify_shard: partials: got shape \[2, 7, 5\]"):
        verify_shard(logits, drafts, partials[:, :7], vocab_total=300)
    with pytest.raises(ValueError, match="verify_shard_rows: vocab_total: got None, expected 1 to"):
        verify_shard_rows(logits, drafts)
    with pytest.raises(TypeError, match="verify_shard: top_logprobs: got a value, expected"):
        verify_shard(logits, drafts, partials, top_logprobs=2, vocab_total=300)
    with pytest.raises(ValueError, match=r"draft_logits: got shape \[2, 3, 400\], expected"):
        q = torch.zeros(2, 3, 400)
        rest = {k: arguments[k] for k in ("temperature", "seed", "block_start")}
        verify_shard(
            logits, drafts, partials, rule="token", draft_logits=q, vocab_total=300, **rest
        )
    with pytest.raises(ValueError, match="draft_logprob: got a tensor, expected None"):
        q = torch.zeros(2, 3)
        rest = {k: arguments[k] for k in ("temperature", "seed", "block_start")}
        verify_shard(
            logits, drafts, partials, rule="block", draft_logprob=q, vocab_total=300, **rest
        )
