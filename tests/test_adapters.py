"""The adapters against transcriptions of the contracts that they take over, in plain Python.

Each transcription is a loop over one request with explicit coins. Where coins cannot matter the
adapter has to write the same as it does, element by element; where they do, both have to draw from
the rule's law.
"""

import functools
import inspect

import numpy as np
import pytest
import torch
from transformers.generation.utils import _speculative_sampling

from domino_kernels.adapters import flashinfer, sglang, transformers, vllm
from domino_kernels.testing.losslessness import g_test, total_variation
from domino_kernels.testing.rules import block_rule, token_rule

VOCAB, DRAFTS = 4, 2
ALARM = 1e-9


def random_laws(seed, rows, zeros=True):
    generator = np.random.default_rng(seed)
    laws = generator.dirichlet(np.ones(VOCAB), rows)
    if zeros:
        laws[:, generator.integers(VOCAB)] *= generator.random(rows) < 0.5
    return laws / laws.sum(-1, keepdims=True)


def outcome_law(p, q, drafts, rule=token_rule):
    """{emitted tokens: probability} for these drafts."""
    law = {}
    for weight, emitted in rule(p, q, drafts):
        law[emitted] = law.get(emitted, 0.0) + weight
    assert abs(sum(law.values()) - 1) < 1e-12
    return law


def judge(emitted, law):
    """G-test of a list of emitted tuples against {tuple: probability}."""
    keys = sorted(law)
    assert set(emitted) <= set(keys), set(emitted) - set(keys)
    counts = np.array([emitted.count(key) for key in keys])
    return g_test(counts, np.array([law[key] for key in keys]))


# --- transcriptions -------------------------------------------------------------------------------


def flashinfer_contract(q, drafts, p, coins, last):
    """(row of tokens padded with -1, accepted, emitted)."""
    tokens, emitted = [], 0
    for i, x in enumerate(drafts):
        if not coins[i] * q[i][x] < p[i][x]:
            break
        tokens.append(x)
        emitted += 1
    rest = p[emitted] if emitted == len(drafts) else np.maximum(p[emitted] - q[emitted], 0)
    tokens.append(int(np.searchsorted(np.cumsum(rest), last * rest.sum(), side="right")))
    accepted = sum(coins[i] * q[i][x] < p[i][x] for i, x in enumerate(drafts))
    return tokens + [-1] * (len(drafts) + 1 - len(tokens)), accepted, emitted


def sglang_contract(predicts, accept_index, candidates, rows, coins, last, p, q):
    """Writes predicts and accept_index of one request, returns accept_token_num."""
    row, count = rows[0], 0
    accept_index[0] = row
    for i, x in enumerate(candidates[1:]):
        if not coins[i] * q[i][x] < p[i][x]:
            break
        count += 1
        predicts[row] = x
        row = accept_index[count] = rows[count]
    rest = p[count] if count == len(candidates) - 1 else np.maximum(p[count] - q[count], 0)
    predicts[row] = int(np.searchsorted(np.cumsum(rest), last * rest.sum(), side="right"))
    return count


def vllm_contract(target, draft, sampled, cu, temperature, coins, last):
    """[(tokens, count)] of all requests; target logits processed, draft None for one-hot."""
    softmax = lambda z: np.exp(z - z.max()) / np.exp(z - z.max()).sum()  # noqa: E731
    out = []
    for b in range(len(cu) - 1):
        rows, tokens = range(cu[b], cu[b + 1]), []
        for i, row in enumerate(rows):
            x = sampled[row + 1] if row + 1 < cu[b + 1] else None
            best = int(np.argmax(target[row]))
            if temperature[b] == 0:
                tokens.append(best)
                if x != best:
                    break
                continue
            p = softmax(target[row])
            rest = p
            if x is not None:
                q = np.eye(len(p))[x] if draft is None else softmax(draft[b][i])
                if coins[b][i] * q[x] <= p[x]:
                    tokens.append(int(x))
                    continue
                rest = np.maximum(p - q, 0)
            tokens.append(int(np.searchsorted(np.cumsum(rest), last[b] * rest.sum(), side="right")))
            break
        out.append(tokens)
    return out


# --- FlashInfer -----------------------------------------------------------------------------------


def certain_laws():
    """p and q with one answer: every draft is certain to pass or to fail, one token is left."""
    one = np.eye(VOCAB)
    p = np.stack([one[1], one[2], one[3]])
    return p, {
        "all pass": (np.stack([one[1], one[2]]), (1, 2)),
        "q spread": (np.stack([[0.25] * 4, [0.25] * 4]), (1, 2)),
        "second fails": (np.stack([one[1], one[0]]), (1, 0)),
        "first fails": (np.stack([one[0], one[2]]), (0, 2)),
    }


@pytest.mark.parametrize("name", certain_laws()[1])
def test_flashinfer_writes_what_the_contract_says(name, device):
    p, cases = certain_laws()
    q, drafts = cases[name]
    expected, accepted, emitted = flashinfer_contract(q, drafts, p, [0.5, 0.5], 0.5)
    tensor = lambda a: torch.tensor(a, dtype=torch.float32, device=device)[None]  # noqa: E731
    ids = torch.tensor([drafts], dtype=torch.int32, device=device)
    counters = [torch.tensor([10], dtype=t, device=device) for t in (torch.int32, torch.int64)]
    out = flashinfer.chain_speculative_sampling(tensor(q), ids, tensor(p), *counters, seed=3)
    assert out[0].dtype == torch.int32 and out[0].tolist() == [expected]
    assert out[1] is counters[0] and out[1].item() == 10 + accepted
    assert out[2] is counters[1] and out[2].item() == 10 + emitted
    fresh = flashinfer.chain_speculative_sampling(tensor(q), ids, tensor(p), seed=3)
    assert [fresh[1].item(), fresh[2].item()] == [accepted, emitted]


def test_flashinfer_law(device):
    runs, p, q = 40_000, random_laws(0, DRAFTS + 1), random_laws(1, DRAFTS, zeros=False)
    drafts = (0, 2)
    law = outcome_law(p, q, drafts)
    wide = lambda a: torch.tensor(a, dtype=torch.float32, device=device).expand(  # noqa: E731
        runs, *a.shape
    )
    ids = torch.tensor(drafts, device=device).expand(runs, -1)
    tokens, accepted, emitted = flashinfer.chain_speculative_sampling(
        wide(q), ids, wide(p), seed=torch.tensor([11]), offset=torch.tensor([5])
    )
    got = [tuple(t for t in row if t >= 0) for row in tokens.tolist()]
    assert [len(t) - 1 for t in got] == emitted.tolist()
    assert judge(got, law).p_value > ALARM
    # drafts that pass their own coin, wherever they stand
    expected = sum(min(1.0, p[i][x] / q[i][x]) for i, x in enumerate(drafts))
    assert abs(accepted.double().mean().item() - expected) < 5 * (2 / runs) ** 0.5
    generator = np.random.default_rng(2)
    coins, last = generator.random((4000, DRAFTS)), generator.random(4000)
    told = [flashinfer_contract(q, drafts, p, *c)[0] for c in zip(coins, last)]
    assert judge([tuple(t for t in row if t >= 0) for row in told], law).p_value > ALARM


def test_flashinfer_seeds(device):
    p, q = random_laws(3, DRAFTS + 1), random_laws(4, DRAFTS)
    wide = lambda a: torch.tensor(a, dtype=torch.float32, device=device).expand(  # noqa: E731
        500, *a.shape
    )
    ids = torch.zeros(500, DRAFTS, dtype=torch.int32, device=device)
    run = lambda **k: flashinfer.chain_speculative_sampling(  # noqa: E731
        wide(q), ids, wide(p), **k
    )[0]
    assert torch.equal(run(seed=1, offset=2), run(seed=1, offset=2))
    assert not torch.equal(run(seed=1, offset=2), run(seed=1, offset=3))
    assert not torch.equal(run(seed=1, offset=2), run(seed=2, offset=2))
    generator = torch.Generator(device).manual_seed(5)
    first, second = run(generator=generator), run(generator=generator)
    assert not torch.equal(first, second)
    assert torch.equal(first, run(generator=torch.Generator(device).manual_seed(5)))
    assert len({tuple(row) for row in run(seed=1).tolist()}) > 3  # requests differ
    # as tensors, unsigned ones among them, and of all 64 bits
    for dtype in (torch.int32, torch.int64, torch.uint64):
        one, two = (torch.tensor([n], dtype=dtype, device=device) for n in (1, 2))
        assert torch.equal(run(seed=one, offset=two), run(seed=1, offset=2))
    assert torch.equal(run(seed=2**64 - 1), run(seed=-1))


def test_flashinfer_with_ids_in_columns(device):
    p, q = (
        torch.tensor(random_laws(seed, rows), dtype=torch.float32, device=device).expand(9, -1, -1)
        for seed, rows in ((3, DRAFTS + 1), (4, DRAFTS))
    )
    ids = torch.arange(9 * DRAFTS, device=device).view(DRAFTS, 9).T % 4
    run = lambda ids: flashinfer.chain_speculative_sampling(q, ids, p, seed=1)[0]  # noqa: E731
    assert torch.equal(run(ids), run(ids.contiguous()))


def test_flashinfer_with_pads_and_rows_of_zeros(device):
    """flashinfer-ai/flashinfer#879: ids [1, 0, 1, -1, -1], the rows behind them empty."""
    p = torch.zeros(1, 6, 4, device=device)
    p[:, :4] = torch.tensor([0.0, 1.0, 0.0, 0.0], device=device)
    p[:, 1] = torch.tensor([1.0, 0.0, 0.0, 0.0], device=device)
    q = p[:, :5].clone()
    ids = torch.tensor([[1, 0, 1, -1, -1]], dtype=torch.int32, device=device)
    tokens, accepted, emitted = flashinfer.chain_speculative_sampling(q, ids, p, seed=0)
    assert tokens.tolist() == [[1, 0, 1, 1, -1, -1]]
    assert accepted.item() == 3 and emitted.item() == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_probabilities_of_any_dtype_mean_what_they_say(dtype, device):
    """As in float32: a log rounded to the dtype moves p by a percent and more."""
    runs, slots = 20_000, DRAFTS + 1
    p, q = (
        torch.tensor(random_laws(seed, rows, zeros=False), device=device).to(dtype)
        for seed, rows in ((13, slots), (14, DRAFTS))
    )
    ids = torch.tensor([1, 3], device=device).expand(runs, -1)
    candidates = torch.tensor([0, 1, 3], device=device).expand(runs, -1)
    rows = torch.arange(runs * slots, device=device).view(runs, slots)
    child = torch.tensor([[1, 2, -1]], device=device).expand(runs, -1)
    uniform = torch.rand(
        runs, slots, generator=torch.Generator(device).manual_seed(3), device=device
    )

    def outputs(convert):
        wide_p, wide_q = (convert(a).expand(runs, *a.shape) for a in (p, q))
        yield from flashinfer.chain_speculative_sampling(wide_q, ids, wide_p, seed=1)
        for function in (
            sglang.chain_speculative_sampling,
            sglang.tree_speculative_sampling_target_only,
        ):
            written = sglang_buffers(runs, slots, device)
            links = child, torch.full_like(child, -1)
            function(*written, candidates, rows, *links, uniform, uniform[:, 0], wide_p, wide_q)
            yield from written

    for own, single in zip(outputs(lambda a: a), outputs(torch.Tensor.float)):
        assert torch.equal(own, single)


# --- SGLang ---------------------------------------------------------------------------------------


def sglang_buffers(batch, slots, device):
    return (
        torch.full((batch * slots,), -7, dtype=torch.int32, device=device),
        torch.full((batch, slots + 1), -9, dtype=torch.int32, device=device),
        torch.full((batch,), -5, dtype=torch.int32, device=device),
    )


@pytest.mark.parametrize("name", certain_laws()[1])
def test_sglang_chain_writes_what_the_contract_says(name, device):
    p, cases = certain_laws()
    q, drafts = cases[name]
    slots = len(drafts) + 1
    predicts, accept_index, count = sglang_buffers(2, slots, device)
    rows = torch.tensor([[4, 0, 2], [1, 3, 5]], device=device)  # rows of requests need not be dense
    candidates = torch.tensor([[9, *drafts]] * 2, device=device)
    uniform = torch.rand(2, slots, device=device)
    tensor = lambda a: torch.tensor(  # noqa: E731
        np.stack([a, a]), dtype=torch.float32, device=device
    )
    arguments = (predicts, accept_index, count, candidates, rows, None, None, uniform)
    sglang.chain_speculative_sampling(*arguments, uniform[:, 0], tensor(p), tensor(q))
    told = [-7] * 6, [[-9] * 4, [-9] * 4], [0, 0]
    for b in range(2):
        told[2][b] = sglang_contract(
            told[0], told[1][b], candidates[b].tolist(), rows[b].tolist(), [0.5] * 2, 0.5, p, q
        )
    assert predicts.tolist() == told[0]
    assert accept_index.tolist() == told[1]
    assert count.tolist() == told[2]


def test_sglang_chain_law(device):
    runs, p, q = 40_000, random_laws(5, DRAFTS + 1), random_laws(6, DRAFTS, zeros=False)
    drafts, slots = (1, 3), DRAFTS + 1
    law = outcome_law(p, q, drafts)
    predicts, accept_index, count = sglang_buffers(runs, slots, device)
    rows = torch.arange(runs * slots, device=device).view(runs, slots)
    candidates = torch.tensor([0, *drafts], device=device).expand(runs, -1)
    generator = torch.Generator(device).manual_seed(1)
    uniform = torch.rand(runs, slots, generator=generator, device=device)
    final = torch.rand(runs, generator=generator, device=device)
    wide = lambda a: torch.tensor(a, dtype=torch.float32, device=device).expand(  # noqa: E731
        runs, *a.shape
    )
    arguments = (predicts, accept_index, count, candidates, rows, None, None, uniform, final)
    sglang.chain_speculative_sampling(*arguments, wide(p), wide(q))
    table = predicts.view(runs, slots).tolist()
    got = [tuple(row[: n + 1]) for row, n in zip(table, count.tolist())]
    assert judge(got, law).p_value > ALARM
    told = []
    coins = np.random.default_rng(3).random((4000, DRAFTS + 1))
    for c in coins:
        out = [0] * slots
        n = sglang_contract(out, [0] * slots, (0, *drafts), range(slots), c, c[-1], p, q)
        told.append(tuple(out[: n + 1]))
    assert judge(told, law).p_value > ALARM
    with pytest.raises(ValueError, match=r"threshold_acc: got 0\.5, expected 1"):
        sglang.chain_speculative_sampling(*arguments, wide(p), wide(q), 1.0, 0.5)


# --- vLLM -----------------------------------------------------------------------------------------


def vllm_arguments(target, draft, sampled, cu, temperature, seeds, device):
    """Requests stand at other places of the engine's tables than in the batch."""
    requests = len(cu) - 1
    place = torch.arange(requests, device=device).flip(0) + 1

    def table(values):
        wide = (requests + 2, *values.shape[1:])
        return torch.zeros(wide, dtype=values.dtype, device=device).index_copy_(0, place, values)

    lengths = torch.tensor(cu[1:]) - torch.tensor(cu[:-1])
    pos = torch.cat([100 + torch.arange(int(n)) for n in lengths]).to(device)
    steps = int(lengths.max()) - 1
    return dict(
        target_logits=target,
        draft_logits=None if draft is None else table(draft),
        draft_sampled=sampled,
        cu_num_logits=torch.tensor(cu, dtype=torch.int32, device=device),
        pos=pos,
        idx_mapping=place.int(),
        expanded_idx_mapping=None,
        expanded_local_pos=None,
        temperature=table(temperature),
        seed=table(seeds),
        num_speculative_steps=steps,
    )


def test_vllm_writes_what_the_contract_says(device):
    """Greedy and sampled, ragged, one-hot and dense; sampled rows with one answer."""
    generator = torch.Generator().manual_seed(0)
    cu = [0, 3, 4, 8, 10, 13]
    target = torch.randn(13, 7, generator=generator)
    sampled = torch.randint(7, (13,), generator=generator)
    temperature = torch.tensor([0.0, 0.0, 0.6, 0.0, 1.3])
    best = target.argmax(-1)
    for row in (0, 1, 8):  # some greedy drafts are right
        sampled[row + 1] = best[row]
    for row in (4, 5, 10, 11):  # sampled requests: all mass on one token, drafts right
        target[row] = -torch.inf
        target[row, sampled[row + 1]] = 0.0
    for row in (6, 7, 12):  # and one left where they are wrong, or for the bonus
        target[row] = -torch.inf
        target[row, (sampled[row + 1] + 1) % 7 if row == 6 else 3] = 0.0
    draft = torch.randn(5, 3, 7, generator=generator)
    coins, last = np.full((5, 4), 0.5), np.full(5, 0.5)
    for q in (None, draft):
        expected = vllm_contract(
            target.double().numpy(), None if q is None else q.double().numpy(),
            sampled.tolist(), cu, temperature.tolist(), coins, last,
        )  # fmt: skip
        arguments = vllm_arguments(
            target.to(device), None if q is None else q.to(device), sampled.to(device), cu,
            temperature.to(device), torch.arange(5, device=device), device,
        )  # fmt: skip
        tokens, count = vllm.rejection_sample(**arguments)
        assert tokens.shape == (5, 4) and tokens.dtype == torch.int64
        assert count.dtype == torch.int32 and count.tolist() == [len(t) for t in expected]
        assert tokens.tolist() == [t + [-1] * (4 - len(t)) for t in expected]
    assert [len(t) for t in expected] == [3, 1, 3, 2, 3]


def test_vllm_requests_without_rows(device):
    """The padding of a batch that was captured larger stands behind the last row."""
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(5, 7, generator=generator).to(device)
    sampled = torch.randint(7, (5,), generator=generator).to(device)
    draft = torch.randn(4, 2, 7, generator=generator).to(device)

    def run(cu, rows):
        requests = len(cu) - 1
        seeds = torch.arange(requests, device=device)
        tables = cu, torch.ones(requests, device=device), seeds, device
        arguments = vllm_arguments(target[:rows], draft[:requests], sampled[:rows], *tables)
        return vllm.rejection_sample(**arguments | {"num_speculative_steps": 2})

    expected, (tokens, count) = run([0, 3, 5], 5), run([0, 3, 5, 5, 5], 5)
    assert torch.equal(tokens[:2], expected[0]) and torch.equal(count[:2], expected[1])
    assert (tokens[2:] == -1).all() and not count[2:].any()
    tokens, count = run([0, 0, 0], 0)
    assert tokens.tolist() == [[-1] * 3] * 2 and count.tolist() == [0, 0]


@pytest.mark.parametrize("form", ["one-hot", "dense", "block"])
def test_vllm_law(form, device):
    runs, p, q = 40_000, random_laws(7, DRAFTS + 1), random_laws(8, DRAFTS, zeros=False)
    drafts = (0, 1)
    rule = block_rule if form == "block" else token_rule
    told = np.eye(VOCAB)[list(drafts)] if form == "one-hot" else q
    law = outcome_law(p, told, drafts, rule)
    logits = torch.tensor(np.log(p, where=p > 0, out=np.full_like(p, -np.inf))).float()
    draft = torch.tensor(np.log(q)).float()
    arguments = vllm_arguments(
        logits.repeat(runs, 1).to(device),
        None if form == "one-hot" else draft.expand(runs, -1, -1).to(device),
        torch.tensor([0, *drafts]).repeat(runs).to(device),
        list(range(0, 3 * runs + 1, 3)),
        torch.full((runs,), 0.7, device=device),  # applied before: must not be applied again
        torch.arange(runs, device=device),
        device,
    )
    tokens, count = vllm.rejection_sample(**arguments, use_block_verification=form == "block")
    got = [tuple(row[:n]) for row, n in zip(tokens.tolist(), count.tolist())]
    assert judge(got, law).p_value > ALARM


def test_vllm_vocabularies_of_two_sizes(device):
    """The target's vocabulary is padded beyond the draft's, or the draft's beyond the target's."""
    for v_target, v_draft in ((6, 4), (4, 6)):
        target = torch.full((2, v_target), -torch.inf)
        target[:, 1] = 0.0
        draft = torch.zeros(1, 1, v_draft)
        arguments = vllm_arguments(
            target.to(device), draft.to(device), torch.tensor([0, 1], device=device), [0, 2],
            torch.ones(1, device=device), torch.zeros(1, dtype=torch.int64, device=device), device,
        )  # fmt: skip
        tokens, count = vllm.rejection_sample(**arguments)
        assert tokens.tolist() == [[1, 1]] and count.tolist() == [2]
    with pytest.raises(ValueError, match="synthetic_conditional_rates"):
        vllm.rejection_sample(**arguments, synthetic_conditional_rates=torch.ones(1))


# --- Transformers ---------------------------------------------------------------------------------


def test_transformers_law_and_shapes(device):
    """Against the function itself: both draw from the rule's law."""
    p, q, drafts = random_laws(9, DRAFTS + 1), random_laws(10, DRAFTS, zeros=False), (3, 1)
    law = outcome_law(p, q, drafts)
    logits = torch.tensor(np.log(p, where=p > 0, out=np.full_like(p, -np.inf))).float()[None]
    arguments = (
        torch.tensor([[5, 6, *drafts]], device=device),
        torch.tensor(np.log(q)).float()[None].to(device),
        DRAFTS,
        logits.to(device),
    )
    runs = 3000
    theirs = _speculative_sampling
    if "is_done_candidate" in inspect.signature(theirs).parameters:  # up to 5.17
        theirs = functools.partial(theirs, is_done_candidate=False)
    for function in (transformers.speculative_sampling, theirs):
        torch.manual_seed(0)
        got = []
        for _ in range(runs):
            tokens, matches = function(*arguments)
            assert tokens.shape == (1, int(matches) + 1) and matches.shape == ()
            got.append(tuple(tokens[0].tolist()))
        result = judge(got, law)
        assert result.p_value > ALARM, (function, result)
    torch.manual_seed(1)
    first = transformers.speculative_sampling(*arguments)[0]
    torch.manual_seed(1)
    assert torch.equal(first, transformers.speculative_sampling(*arguments)[0])


def test_transformers_ends_with_the_drafts_that_end_the_text(device):
    drafts, vocab = torch.tensor([[5, 3, 1]], device=device), 6
    logits = torch.full((1, 3, vocab), -torch.inf, device=device)
    logits[0, 0, 3] = logits[0, 1, 1] = logits[0, 2, 4] = 0.0  # accepts both, then says 4
    arguments = drafts, torch.zeros(1, 2, vocab, device=device), 2, logits
    for done, tokens, count in ((False, [3, 1, 4], 2), (True, [3, 1], 1)):
        got, matches = transformers.speculative_sampling(*arguments, done)
        assert got.tolist() == [tokens] and int(matches) == count
    logits[0, 1] = torch.arange(vocab, device=device) == 2  # a rejection: the end is not there
    logits[0, 1].log_()
    got, matches = transformers.speculative_sampling(*arguments, True)
    assert got.tolist() == [[3, 2]] and int(matches) == 1


def test_transformers_refuses_what_is_not_lossless(device):
    logits = torch.zeros(1, 2, 4, device=device)
    arguments = torch.tensor([[1]], device=device), logits[:, :1], 1, logits
    with pytest.raises(ValueError, match=r"assistant_ensemble_weight: got 0\.5, expected None"):
        transformers.speculative_sampling(*arguments, assistant_ensemble_weight=0.5)
    with pytest.raises(ValueError, match="got a row 0 that holds no law"):
        transformers.speculative_sampling(*arguments[:3], logits * torch.nan)


def test_laws_here_differ():
    """The tests above could tell p from q and the token rule from the block rule."""
    p, q = random_laws(11, DRAFTS + 1), random_laws(12, DRAFTS, zeros=False)
    laws = [outcome_law(p, q, (0, 1), rule) for rule in (token_rule, block_rule)]
    keys = sorted(set(laws[0]) | set(laws[1]))
    token, block = (np.array([law.get(k, 0.0) for k in keys]) for law in laws)
    assert total_variation(token, block) > 0.02
