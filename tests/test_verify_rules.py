"""Rules, forms of q, filters and edits of verify_chain against the float64 reference."""

from functools import lru_cache

import numpy as np
import pytest
import torch
from chain_cases import assert_reference, assert_same, make, reference, to

from domino_kernels import VerifyStatus, noise, rng, verify_chain
from domino_kernels.ops.verify import VerifyRule
from domino_kernels.reference.law import FILTER_ORDERS

INF, NAN = float("inf"), float("nan")
SAMPLED = ["token", "onehot", "match", "block", "gumbel"]
Q_FORMS = ["none", "dense", "pool", "scalar"]


def pack(bits):
    """[..., V] bool as [..., ceil(V / 32)] int32, bit t % 32 of word t // 32."""
    bits = torch.nn.functional.pad(bits, (0, -bits.size(-1) % 32))
    place = 1 << torch.arange(32)
    return (bits.unflatten(-1, (-1, 32)) * place).sum(-1).to(torch.int32)


def with_q(arguments, form, pool, generator):
    """Arguments of `make(dense=True)` with q told in another form; drafts lie in the pool."""
    arguments = dict(arguments)
    draft, tokens = arguments["draft_logits"], arguments["draft_tokens"]
    told = torch.rand(len(tokens), generator=generator) + 0.5
    if form == "none":
        return arguments | dict(draft_logits=None)
    if form == "dense":
        return arguments | dict(draft_temperature=told)
    if form == "scalar":
        law = (draft.float() / told[:, None, None]).log_softmax(-1)
        at = tokens.clamp(0, draft.size(-1) - 1)[..., None]
        return arguments | dict(draft_logits=None, draft_logprob=law.gather(-1, at)[..., 0])
    ids = draft.float().topk(pool, -1).indices
    ids = ids.gather(-1, torch.rand(ids.shape, generator=generator).argsort(-1))
    inside = (ids == tokens[..., None]).any(-1)
    valid = (tokens >= 0) & (tokens < draft.size(-1))
    ids[..., 0] = tokens.where(~inside & valid, ids[..., 0])
    logits = draft.gather(-1, ids)
    spare = torch.full_like(ids[..., :2], -1)
    spare[..., 1] = draft.size(-1) + 5  # unused entries, with logits that must not count
    ids = torch.cat([ids, spare], -1).int()
    logits = torch.cat([logits, logits.new_full((*logits.shape[:2], 2), 50.0)], -1)
    return arguments | dict(draft_logits=logits, draft_ids=ids, draft_temperature=told)


def with_filters(arguments, generator, vocab):
    """Each of the three on for about half of the requests."""
    batch = len(arguments["temperature"])
    some = lambda: torch.rand(batch, generator=generator)  # noqa: E731
    top_k = torch.randint(1, max(2, vocab // 2), (batch,), generator=generator)
    return arguments | dict(
        top_k=torch.where(some() < 0.5, top_k, 0).int(),
        top_p=torch.where(some() < 0.6, some(), 1.0),
        min_p=torch.where(some() < 0.5, some() * 0.2, 0.0),
    )


def with_edits(arguments, generator, vocab):
    tokens = arguments["draft_tokens"]
    batch, drafts = tokens.shape
    chance = lambda *shape: torch.rand(*shape, generator=generator)  # noqa: E731
    allowed = chance(batch, drafts + 1, vocab) < 0.8
    allowed[..., 0] = True
    return arguments | dict(
        logit_bias=torch.where(chance(batch, vocab) < 0.1, chance(batch, vocab) * 4 - 2, 0.0),
        repetition_penalty=torch.where(chance(batch) < 0.7, 0.7 + chance(batch), 1.0),
        presence_penalty=torch.where(chance(batch) < 0.7, chance(batch), 0.0),
        frequency_penalty=torch.where(chance(batch) < 0.7, chance(batch), 0.0),
        prompt_mask=pack(chance(batch, vocab) < 0.2),
        output_counts=(torch.poisson(torch.full((batch, vocab), 0.3), generator=generator)).int(),
        grammar_mask=pack(allowed),
    )


@pytest.mark.parametrize("form", Q_FORMS)
@pytest.mark.parametrize("rule", SAMPLED)
def test_rules_and_forms_of_q(rule, form, device, generator):
    if (rule, form) == ("block", "scalar"):
        pytest.skip("block verification needs rows of q")
    for shape in [(40, 4, 7), (12, 3, 1031)]:
        arguments = make(*shape, generator, dense=True) | {"rule": rule}
        arguments = with_q(arguments, form, 5, generator)
        result = verify_chain(**to(arguments, device))
        assert_reference(result, reference(arguments))
        if form == "scalar" and rule == "token":
            needs = (result.status & VerifyStatus.NEEDS_RESIDUAL) != 0
            assert needs.any() and torch.equal(result.num_emitted < result.num_accepted + 1, needs)


@pytest.mark.parametrize("order", FILTER_ORDERS)
@pytest.mark.parametrize("rule, form", [(r, f) for r in SAMPLED for f in ("none", "dense", "pool")])
def test_filters(rule, form, order, device, generator):
    for shape in [(60, 4, 9), (20, 3, 257), (6, 2, 5003)]:
        arguments = make(*shape, generator, dense=True) | {"rule": rule, "filter_order": order}
        arguments = with_q(arguments, form, 5, generator)
        arguments = with_filters(arguments, generator, shape[2])
        assert_reference(verify_chain(**to(arguments, device)), reference(arguments))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_filters_in_half_precision(dtype, device, generator):
    """Rounded logits tie: at the k-th value, and at the edge of the nucleus."""
    arguments = make(200, 2, 67, generator, dense=True, dtype=dtype, spread=1.0)
    arguments["target_logits"] = (arguments["target_logits"].float() * 4).round().to(dtype) / 4
    arguments = with_filters(arguments, generator, 67)
    assert_reference(verify_chain(**to(arguments, device)), reference(arguments))


@pytest.mark.parametrize("order", FILTER_ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_filters_beyond_their_ranges(dtype, order, device, generator):
    """Whoever sets them: off, the top alone with what ties with it, or the likeliest token."""
    batch, vocab = 96, 40
    arguments = make(batch, 3, vocab, generator, dtype=dtype, spread=1.0)
    # several equal tops in most rows
    arguments["target_logits"] = arguments["target_logits"].float().round().to(dtype)
    arguments["draft_tokens"] = arguments["target_logits"][:, :-1].float().argmax(-1)
    for name, values in (
        ("min_p", [1.0, 1.5, 1e30, INF, -1.0, NAN]),
        ("top_p", [-1.0, 0.0, NAN, 2.0, INF, 1e-30]),
        ("top_k", [-1, -(2**31), 2**31 - 1, vocab, vocab + 1, 0]),
    ):
        dtype_of = torch.int32 if name == "top_k" else torch.float32
        value = torch.tensor(values, dtype=dtype_of).repeat(batch // len(values))
        for rule in ("token", "match"):
            filtered = arguments | {"rule": rule, "filter_order": order, name: value}
            assert_reference(verify_chain(**to(filtered, device)), reference(filtered))


def test_filters_at_the_real_vocabulary(device, generator):
    arguments = make(4, 3, 151936, generator, dense=True, dtype=torch.bfloat16)
    arguments |= dict(top_k=torch.tensor([50, 0, 50, 0]).int(), top_p=torch.full((4,), 0.95))
    for rule, form in (("token", "none"), ("token", "pool"), ("block", "dense")):
        chosen = with_q(arguments | {"rule": rule}, form, 64, generator)
        assert_reference(verify_chain(**to(chosen, device)), reference(chosen))


@pytest.mark.parametrize("rule", ["greedy", *SAMPLED])
@pytest.mark.parametrize("filters", [False, True], ids=["plain", "filters"])
def test_edits(rule, filters, device, generator):
    for vocab in (9, 257):
        arguments = make(60, 4, vocab, generator, dense=True) | {"rule": rule}
        arguments = with_edits(arguments, generator, vocab)
        if rule == "greedy":
            for name in ("temperature", "seed", "block_start", "draft_logits"):
                arguments[name] = None
        else:
            arguments = with_q(arguments, "pool" if filters else "dense", 5, generator)
            if filters:
                arguments = with_filters(arguments, generator, vocab)
        assert_reference(verify_chain(**to(arguments, device)), reference(arguments))


def test_edits_of_a_ragged_batch(device, generator):
    arguments = with_edits(make(6, 3, 21, generator, dense=False), generator, 21)
    rows = [4, 1, 3, 0, 2, 4]
    cu_rows = torch.tensor([0, *np.cumsum(rows)], dtype=torch.int32)
    for name in ("target_logits", "grammar_mask"):
        arguments[name] = torch.cat([arguments[name][b, :n] for b, n in enumerate(rows)])
    arguments["cu_rows"] = cu_rows
    assert_reference(verify_chain(**to(arguments, device)), reference(arguments))


def test_rules_mixed_in_one_call(device, generator):
    """A tensor of rules is each request's rule alone; an unknown number is a bad parameter."""
    arguments = with_q(make(60, 3, 11, generator, dense=True), "dense", 5, generator)
    arguments = with_filters(arguments, generator, 11)
    rules = torch.arange(60).to(torch.uint8) % len(VerifyRule)
    mixed = verify_chain(**to(arguments | {"rule": rules}, device))
    assert_reference(mixed, reference(arguments | {"rule": rules.numpy()}))
    for rule in VerifyRule:
        if rule == VerifyRule.GREEDY:
            continue
        alone = verify_chain(**to(arguments | {"rule": rule.name.lower()}, device))
        for a, b in zip(mixed, alone):
            if a is not None:
                assert torch.equal(a[rules == rule], b[rules == rule])
    unknown = verify_chain(**to(arguments | {"rule": rules + 100}, device))
    assert (unknown.status == VerifyStatus.BAD_PARAMETER).all() and not unknown.num_emitted.any()


def test_pool_is_dense_with_nothing_elsewhere(device, generator):
    for rule in ("token", "block"):
        arguments = make(200, 3, 31, generator, dense=True) | {"rule": rule}
        pool = with_q(arguments, "pool", 6, generator)
        ids, logits = pool["draft_ids"].long(), pool["draft_logits"]
        wide = torch.full((200, 3, 64), -INF).scatter(-1, ids.clamp(0, 63), logits)
        wide = wide.scatter(-1, ids[..., 6:].clamp(0, 63), -INF)[..., :31]
        first = torch.where(ids[..., :6] == 0, logits[..., :6], -INF).max(-1).values
        wide[..., 0] = first  # the unused entries fell on token 0
        dense = pool | dict(draft_ids=None, draft_logits=wide)
        a, b = (verify_chain(**to(v, device)) for v in (pool, dense))
        assert torch.equal(a.tokens, b.tokens) and torch.equal(a.status, b.status)


# --- match and gumbel: a function of seed and position -------------------------------------------


def decode(rule, drafts, length, draft_seed, device, *, coupled=False, batch=64):
    """Texts [batch, length] of a random target over 7 tokens, and the mean of accepted drafts."""
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(8, 8, 7, generator=generator).to(device) * 1.5  # by the last two tokens
    guess = torch.randn(8, 8, 7, generator=torch.Generator().manual_seed(draft_seed)).to(device)
    guess = table + guess
    seed = torch.arange(batch, device=device)
    text = torch.full((batch, 2), 7, device=device)
    count = torch.full((batch,), 2, device=device)
    text = torch.cat([text, text.new_zeros(batch, length + drafts + 1)], 1)
    rows = torch.arange(batch, device=device)
    accepted, blocks = 0, 0
    while int(count.min()) < length + 2:
        start = count - 1
        a, b = text[rows, count - 2], text[rows, count - 1]
        logits, chain = [table[a, b]], []
        for i in range(drafts):
            key = (start + 1 + i, 0, rng.POSITION_DRAW) if coupled else (start, i, rng.DRAFT_TOKEN)
            race = noise(seed, *key, 7, kind="exponential")
            x = (race / guess[a, b].softmax(-1)).argmin(-1)
            chain.append(x)
            a, b = b, x
            logits.append(table[a, b])
        tokens = torch.stack(chain, 1) if drafts else text.new_zeros(batch, 0)
        result = verify_chain(
            torch.stack(logits, 1),
            tokens,
            rule=rule,
            temperature=torch.full((batch,), 0.8, device=device),
            seed=seed,
            block_start=start,
        )
        for j in range(drafts + 1):
            has = (j < result.num_emitted) & (count + j < text.size(1))
            text[rows[has], count[has] + j] = result.tokens[has, j]
        count = torch.minimum(count + result.num_emitted, count.new_tensor(length + 2))
        accepted += result.num_accepted.double().mean().item()
        blocks += 1
    return text[:, 2 : length + 2], accepted / blocks


def test_match_and_gumbel_replay_whatever_is_drafted(device):
    """Block length, drafter and coupling change how many drafts are kept, and no token."""
    plain, _ = decode("match", 0, 12, 1, device)
    rates = {}
    for rule, drafts, draft_seed, coupled in [
        ("match", 1, 1, False),
        ("match", 4, 1, False),
        ("match", 4, 2, False),
        ("gumbel", 4, 1, True),
        ("gumbel", 2, 2, True),
    ]:
        text, rates[rule, drafts, draft_seed] = decode(
            rule, drafts, 12, draft_seed, device, coupled=coupled
        )
        assert torch.equal(text, plain)
    # shared noise keeps more of the same drafter's drafts
    assert rates["gumbel", 4, 1] > rates["match", 4, 1] + 0.2


def test_token_rule_moves_with_the_block(device):
    """The contrast: keyed by block, other block lengths give other texts of the same law."""
    texts = [decode("token", drafts, 12, 1, device)[0] for drafts in (0, 1, 4)]
    assert not torch.equal(texts[0], texts[1]) and not torch.equal(texts[1], texts[2])


def test_keying_is_checked():
    arguments = make(2, 1, 5, torch.Generator().manual_seed(0))
    for rule, own in (("token", "block"), ("block", "block"), ("match", "position")):
        verify_chain(**arguments | {"rule": rule, "keying": own})
        other = "block" if own == "position" else "position"
        with pytest.raises(ValueError, match=f"keying: got '{other}', expected '{own}'"):
            verify_chain(**arguments | {"rule": rule, "keying": other})


# --- what else is returned and told --------------------------------------------------------------


def test_penalties_follow_the_drafts(device):
    """By hand: the second row knows that the first draft was generated."""
    target = torch.tensor([[[2.0, 1.0, 0.0], [2.0, 1.5, 0.0], [2.0, 1.5, 1.2]]], device=device)
    drafts = torch.tensor([[0, 1]], device=device)
    like = lambda v: torch.tensor([v], device=device)  # noqa: E731
    assert verify_chain(target, drafts).tokens.tolist() == [[0, 0, -1]]
    for penalty in (dict(presence_penalty=like(1.0)), dict(frequency_penalty=like(0.6))):
        # row 1: 2 - penalty < 1.5; row 2: the same for tokens 0 and 1, so 2 - penalty or 1.2
        expected = 2 if "presence_penalty" in penalty else 0
        result = verify_chain(target, drafts, **penalty)
        assert result.tokens.tolist() == [[0, 1, expected]]
    seen = pack(torch.tensor([[True, False, False]])).to(device)
    result = verify_chain(target, drafts, repetition_penalty=like(3.0), prompt_mask=seen)
    assert result.tokens.tolist() == [[1, -1, -1]]


def test_top_logprobs(device, generator):
    arguments = to(make(9, 3, 1031, generator, dense=True), device)
    result = verify_chain(**arguments, top_logprobs=5)
    temperature = arguments["temperature"]
    law = (
        arguments["target_logits"] / torch.where(temperature == 0, 1.0, temperature)[:, None, None]
    )
    best = law.log_softmax(-1).topk(5, -1)
    has = result.tokens >= 0
    assert torch.equal(result.top_ids[has].long(), best.indices[has])
    torch.testing.assert_close(result.top_logprob[has], best.values[has], rtol=1e-5, atol=1e-5)
    assert (result.top_ids[~has] == -1).all() and (result.top_logprob[~has] == 0).all()
    without = verify_chain(**arguments, logprobs=False)
    assert without.chosen_logprob is None and without.top_ids is None
    assert torch.equal(without.tokens, result.tokens)


def test_padded_vocabulary_and_inactive_requests(device, generator):
    """Ids from vocab_valid on do not exist, whatever their logits hold."""
    for filters in (False, True):
        arguments = make(12, 3, 30, generator, dense=True)
        if filters:
            arguments = with_filters(arguments, generator, 30)
        short = arguments | dict(
            target_logits=arguments["target_logits"][..., :23],
            draft_logits=arguments["draft_logits"][..., :23],
        )
        padded = arguments | dict(vocab_valid=23)
        padded["target_logits"] = arguments["target_logits"].clone()
        padded["target_logits"][..., 23:] = NAN
        expected = verify_chain(**to(short, device))
        result = verify_chain(**to(padded, device))
        assert torch.equal(result.tokens, expected.tokens)
        assert torch.equal(result.chosen_logprob, expected.chosen_logprob)
        assert torch.equal(result.status, expected.status)
    active = verify_chain(**to(arguments, device))
    some = verify_chain(**to(arguments, device), num_active=torch.tensor([5], device=device).int())
    assert torch.equal(some.tokens[:5], active.tokens[:5])
    assert (some.tokens[5:] == -1).all() and not some.num_emitted[5:].any()
    assert not some.status[5:].any()


@lru_cache
def shared(shape):
    """Rows for all of the next tests: at a real vocabulary their draws take two seconds."""
    generator = torch.Generator().manual_seed(sum(shape))
    return make(*shape, generator, dense=True, dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", SAMPLED)
@pytest.mark.parametrize("form", ["none", "dense", "pool"])
def test_kernel_and_twin_agree_bitwise(rule, form):
    """All filters, orders and edits: tokens, counts, status, log-probabilities."""
    generator = torch.Generator().manual_seed(20261129)
    for shape in [(2000, 3, 9), (300, 7, 257), (40, 15, 5003), (6, 15, 151936)]:
        for order in FILTER_ORDERS:
            arguments = with_q(shared(shape) | {"rule": rule}, form, 5, generator)
            arguments = with_filters(arguments, generator, shape[2]) | {"filter_order": order}
            if order == "vllm" and shape[2] < 10_000:
                arguments = with_edits(arguments, generator, shape[2])
            twin = verify_chain(**arguments, top_logprobs=3)
            kernel = verify_chain(**to(arguments, "cuda"), top_logprobs=3)
            for name, a, b in zip(twin._fields, twin, kernel):
                assert torch.equal(a, b.cpu()), f"{name} at {shape}, {order}"


@pytest.mark.gpu
@pytest.mark.parametrize("order", FILTER_ORDERS)
def test_cuts_do_not_depend_on_the_call_before(order, generator):
    """Fewer tokens above the other filters' bounds than top_k asks for: the list ends there, and
    behind it lies what an earlier row has left in shared memory, of far greater logits."""
    batch, vocab = 264, 60_000
    logits = torch.randn(batch, 1, vocab, generator=generator) * 4
    draw = dict(
        draft_tokens=torch.zeros(batch, 0, dtype=torch.int64),
        rule="token",
        temperature=torch.ones(batch),
        seed=torch.arange(batch),
        block_start=torch.zeros(batch, dtype=torch.int64),
        top_k=torch.full((batch,), 50, dtype=torch.int32),
        filter_order=order,
    )
    strict = draw | dict(min_p=torch.full((batch,), 0.2))
    if order == "joint":
        strict = draw | dict(top_p=torch.full((batch,), 0.5))
    expected = verify_chain(logits - 50, **strict)
    verify_chain((logits + 50).cuda(), **to(draw, "cuda"))
    assert_same(verify_chain((logits - 50).cuda(), **to(strict, "cuda")), expected)
