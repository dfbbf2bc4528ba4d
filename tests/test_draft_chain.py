import dataclasses

import numpy as np
import pytest
import torch

import domino_kernels
from domino_kernels import ChainPlan, DraftResult, HeadWeights, draft_chain, draft_chain_out
from domino_kernels.reference.head import draft_chain as reference_chain
from domino_kernels.reference.head import first_argmax, replay_chain, round_to
from domino_kernels.testing import Guarded, to_numpy

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# How far a kernel's score may be from the fp64 chain's on inputs of make(), whose scores spread
# over about 20. Half precision: a sum next to a rounding boundary puts an element of the state or
# of u one ulp away, and the recurrence carries it on.
EPSILON = {torch.float32: 5e-5, torch.float16: 0.02, torch.bfloat16: 0.05}
FIELDS = ("w_ih", "w_hh", "w1", "w2", "embedding")


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def make(generator, dtype, device="cpu", *, B=2, S=16, V=1000, H=72, G=40, R=24, base_dtype=None):
    """Random inputs on which the correction and the base logits weigh about the same.

    They are drawn where the generator is: a GPU's spares the host the tables of a large model.
    """
    home = generator.device

    def draw(*size, scale=1.0):
        return (torch.randn(size, generator=generator, device=home) * scale).to(device, dtype)

    weights = HeadWeights(
        w_ih=draw(3 * G, H, scale=2 * H**-0.5),
        w_hh=draw(3 * G, G, scale=2 * G**-0.5),
        w1=draw(R, H + G, scale=2 * (H + G) ** -0.5),
        w2=draw(V, R, scale=3 * R**-0.5),
        embedding=draw(V, H),
    )
    base = torch.randn(B, S, V, generator=generator, device=home) * 2
    base = base.to(device, base_dtype or dtype)
    anchor = torch.randint(V, (B,), generator=generator, device=home).to(device)
    return base, draw(B, S, H), anchor, weights


def arrays(base, hidden, anchor, weights, tokens=None):
    """float64; of the embedding only the rows that a chain of these tokens reads, if given."""
    tensors = [to_numpy(getattr(weights, field)) for field in FIELDS[:-1]]
    table = weights.embedding
    if tokens is None:
        tensors.append(to_numpy(table))
    else:
        seen = torch.cat([anchor[:, None], tokens], 1).clamp(0, len(table) - 1).unique()
        tensors.append(np.zeros(table.shape))  # memory that is not touched costs nothing
        tensors[-1][seen.cpu().numpy()] = to_numpy(table[seen])
    return to_numpy(base), to_numpy(hidden), anchor.cpu().numpy(), tensors


def assert_chain(tokens, scores, inputs, shift_label=True, prefix=1, epsilon=None):
    """The rule: given the ids before it, each id is the fp64 winner or within epsilon of it.

    Returns the number of slots where it is another id than the winner: near-ties, by the rule.
    """
    dtype = inputs[-1].dtype
    epsilon = epsilon or EPSILON[dtype]
    replay = replay_chain(
        tokens.cpu().numpy(),
        *arrays(*inputs, tokens),
        shift_label=shift_label,
        prefix=prefix,
        dtype=name_of(dtype),
    )
    worst = np.unravel_index(np.argmax(replay.regret), replay.regret.shape)
    assert replay.regret[worst] <= epsilon, (
        f"row, draft {worst}: got id {tokens[worst].item()}, the fp64 winner "
        f"{replay.tokens[worst]} leads it by {replay.regret[worst]:.3g} > {epsilon}"
    )
    np.testing.assert_allclose(to_numpy(scores), replay.scores - replay.regret, atol=epsilon)
    near_ties = replay.tokens != tokens.cpu().numpy()
    assert (replay.margin[near_ties] <= epsilon).all()
    return int(near_ties.sum())


CASES = [  # shift_label, prefix, num_drafts, sizes
    (True, 1, 15, dict(B=3)),
    (True, 1, 16, dict(B=8)),
    (True, 0, 15, dict(B=1)),
    (True, 2, 16, dict(B=3)),
    (True, 16, 15, dict(B=3)),  # nothing is corrected
    (True, 0, 1, dict(B=8)),
    (False, 1, 15, dict(B=3)),
    (False, 0, 15, dict(B=8)),
    (False, 2, 7, dict(B=1)),
    (False, 16, 15, dict(B=1)),
    (True, 1, 15, dict(B=3, V=1, H=8, G=8, R=8)),
    (True, 1, 15, dict(B=2, V=257, H=33, G=17, R=5)),  # no row is aligned to a vector
    (True, 1, 4, dict(B=9, S=4, V=300, H=64, G=24, R=40)),
    (False, 1, 3, dict(B=33, S=4, V=500, H=40, G=32, R=72)),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift_label, prefix, drafts, sizes", CASES, ids=str)
def test_against_reference(shift_label, prefix, drafts, sizes, dtype, device, generator):
    inputs = make(generator, dtype, device, **sizes)
    tokens, scores = draft_chain(
        *inputs,
        num_drafts=drafts,
        shift_label=shift_label,
        pure_draft_prefix_len=prefix,
        return_scores=True,
    )
    assert tokens.dtype == torch.int64 and tokens.shape == (sizes["B"], drafts)
    assert scores.dtype == torch.float32
    near_ties = assert_chain(tokens, scores, inputs, shift_label, prefix)
    assert near_ties <= max(1, 0.05 * tokens.numel()), f"{near_ties} of {tokens.numel()} near-ties"


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_float32_base_logits(dtype, device, generator):
    inputs = make(generator, dtype, device, B=3, base_dtype=torch.float32)
    tokens, scores = draft_chain(*inputs, return_scores=True)
    assert_chain(tokens, scores, inputs)


def planted(shift_label, prefix, dtype, device, B=5, S=16):
    """Weights that compute a known chain: y_{j+1} = 16 * step(y_j // 16) + slot.

    The high six bits of an id are permuted by the head and reach it through the state, which
    remembers the last token alone; the low four bits are the slot and reach it through the hidden
    row. A slot too many changes the low bits, a state too old the high ones.
    """
    bits = lambda n, count: (n[..., None] >> torch.arange(count) & 1) * 2.0 - 1  # noqa: E731
    V, G = 1024, 6
    step = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    ids = torch.arange(V)
    embedding = torch.cat([bits(ids // 16, 6), torch.ones(V, 2)], 1)  # H = 8
    w_ih = torch.zeros(3 * G, 8)
    w_ih[G : 2 * G, 6] = -20.0  # z = 0: the state forgets
    w_ih[2 * G :, :6] = 4 * torch.eye(6)  # n = +-1: the bits of the token
    w1 = torch.zeros(20, 8 + G)  # u: for each bit one unit that is on where it is 1, one where 0
    w1[:12, 8:] = 4 * torch.cat([torch.eye(6), -torch.eye(6)])
    w1[12:, :4] = 4 * torch.cat([torch.eye(4), -torch.eye(4)])
    high, low = bits(torch.argsort(step)[ids // 16], 6), bits(ids % 16, 4)
    w2 = torch.cat([high, -high, low, -low], 1).clamp(min=0)
    weights = HeadWeights(
        *(t.to(device, dtype) for t in (w_ih, torch.zeros(3 * G, G), w1, w2, embedding))
    )
    hidden = torch.cat([bits(torch.arange(S), 4), torch.zeros(S, 4)], 1).expand(B, S, 8)
    generator = torch.Generator().manual_seed(4)
    base = torch.rand(B, S, V, generator=generator)  # the planted winner leads by almost 4
    anchor = torch.arange(B) * 200 + 7
    drafts = S if shift_label else S - 1
    expected, last = [], anchor
    for j in range(drafts):
        slot = j if shift_label else j + 1
        last = base[:, slot].argmax(-1) if j < prefix else 16 * step[last // 16] + slot
        expected.append(last)
    inputs = base.to(device), hidden.to(device, dtype), anchor.to(device), weights
    return inputs, torch.stack(expected, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("shift_label", [True, False])
def test_planted_chain(shift_label, prefix, dtype, device):
    inputs, expected = planted(shift_label, prefix, dtype, device)
    options = dict(shift_label=shift_label, pure_draft_prefix_len=prefix)
    tokens = draft_chain(*inputs, num_drafts=expected.shape[1], **options)
    assert tokens.tolist() == expected.tolist()
    # Negative controls: the other convention, a slot too far or a longer prefix is seen at once.
    other = draft_chain(
        *inputs, num_drafts=15, shift_label=not shift_label, pure_draft_prefix_len=prefix
    )
    assert (other.cpu() != expected[:, :15]).float().mean() > 0.9
    base, hidden, *rest = inputs
    late = draft_chain(base, hidden.roll(1, 1), *rest, num_drafts=15, **options)
    assert (late.cpu() != expected[:, :15])[:, prefix:].all()
    options["pure_draft_prefix_len"] = prefix + 1
    longer = draft_chain(*inputs, num_drafts=15, **options)
    assert (longer.cpu() != expected[:, :15])[:, prefix].all()


@pytest.mark.parametrize("shift_label", [True, False])
def test_rule_rejects_the_wrong_chain(shift_label, generator):
    """assert_chain itself must fail on the other convention and on a state one token old."""
    inputs = make(generator, torch.float32)
    tokens, scores = draft_chain(*inputs, shift_label=shift_label, return_scores=True)
    assert_chain(tokens, scores, inputs, shift_label)
    with pytest.raises(AssertionError, match="the fp64 winner"):
        assert_chain(tokens, scores, inputs, not shift_label)
    lagging = torch.cat([inputs[2][:, None], tokens[:, :-1]], 1)
    with pytest.raises(AssertionError, match="the fp64 winner"):
        assert_chain(lagging, scores, inputs, shift_label)


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("shift_label", [True, False])
def test_rollout_is_the_teacher_forced_scan(shift_label, prefix, device, generator):
    """The chain against torch.nn.GRU run over its own ids, as training does it."""
    base, hidden, anchor, weights = inputs = make(generator, torch.float32, device, B=4)
    options = dict(shift_label=shift_label, pure_draft_prefix_len=prefix)
    tokens, scores = draft_chain(*inputs, return_scores=True, **options)
    gru = torch.nn.GRU(72, 40, bias=False, batch_first=True, device=device)
    gru.load_state_dict({"weight_ih_l0": weights.w_ih, "weight_hh_l0": weights.w_hh})
    slots = slice(0, 15) if shift_label else slice(1, 16)
    # cuDNN would run the GRU in TF32
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=False):
        seen = torch.cat([anchor[:, None], tokens[:, :-1]], 1)
        states = gru(weights.embedding[seen])[0]
        mixed = torch.cat([hidden[:, slots], states], -1) @ weights.w1.T
        delta = torch.nn.functional.silu(mixed) @ weights.w2.T
    delta[:, :prefix] = 0
    expected = (base[:, slots] + delta).max(-1)
    torch.testing.assert_close(scores, expected.values, rtol=1e-5, atol=1e-4)
    assert torch.equal(tokens, expected.indices)


def test_reference_chain_is_its_own_replay(generator):
    inputs = arrays(*make(generator, torch.float32))
    chain = reference_chain(*inputs, num_drafts=16)
    replay = replay_chain(chain.tokens, *inputs)
    assert (replay.regret == 0).all() and (replay.margin > 0).all()
    np.testing.assert_array_equal(replay.tokens, chain.tokens)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_rounding_is_torch_rounding(dtype, generator):
    values = torch.randn(4096, generator=generator).double() * 2.0 ** torch.arange(-8, 8).repeat(
        256
    )
    if dtype == torch.float32:
        assert np.array_equal(round_to("float32")(values.numpy()), values.numpy())
        return
    values = values.float()  # an fp32 sum is what a kernel rounds
    expected = to_numpy(values.to(dtype))
    assert np.array_equal(round_to(name_of(dtype))(to_numpy(values)), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batch_invariant_and_repeatable_bitwise(dtype, device, generator):
    base, hidden, anchor, weights = make(generator, dtype, device, B=19)
    whole = draft_chain(base, hidden, anchor, weights, return_scores=True)
    again = draft_chain(base, hidden, anchor, weights, return_scores=True)
    order = torch.randperm(19, generator=generator)
    shuffled = draft_chain(base[order], hidden[order], anchor[order], weights, return_scores=True)
    for kind in range(2):
        assert torch.equal(again[kind], whole[kind])
        assert torch.equal(shuffled[kind], whole[kind][order])
    for rows in (slice(0, 1), slice(7, 8), slice(18, 19), slice(3, 12)):
        alone = draft_chain(base[rows], hidden[rows], anchor[rows], weights, return_scores=True)
        assert torch.equal(alone[0], whole[0][rows]), f"rows {rows} depend on their batch"
        assert torch.equal(alone[1], whole[1][rows]), f"rows {rows} depend on their batch"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writes_its_outputs_and_nothing_else(dtype, device, generator):
    inputs = make(generator, dtype, device, B=3)
    tokens = Guarded((3, 15), torch.int64, device)
    scores = Guarded((3, 15), torch.float32, device)
    restarts = Guarded((3,), torch.int32, device)
    plan = ChainPlan(inputs[-1], 3)
    workspace = Guarded((plan.workspace.numel(),), torch.uint8, device)
    plan.workspace = workspace.tensor
    out = DraftResult(tokens.tensor, scores.tensor, restarts.tensor, None, None, None)
    assert draft_chain_out(*inputs, out=out, plan=plan) is out
    workspace.check(all_written=False)
    assert not restarts.check().any()
    expected = draft_chain(*inputs, return_scores=True)
    assert torch.equal(tokens.check(), expected[0])
    assert torch.equal(scores.check(), expected[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_rows(dtype, device, generator):
    base, hidden, anchor, weights = make(generator, dtype, device, B=3)
    expected = draft_chain(base, hidden, anchor, weights)
    # slots before rows, wider rows, and a block inside a longer one
    wide_base = torch.full((20, 3, 1008), torch.nan, dtype=dtype, device=device)
    wide_hidden = torch.full((3, 20, 80), torch.nan, dtype=dtype, device=device)
    wide_base[2:18, :, :1000] = base.transpose(0, 1)
    wide_hidden[:, 2:18, :72] = hidden
    strided = wide_base[2:18, :, :1000].transpose(0, 1), wide_hidden[:, 2:18, :72]
    assert torch.equal(draft_chain(*strided, anchor, weights), expected)
    shared = draft_chain(base[:1].expand(3, -1, -1), hidden[:1].expand(3, -1, -1), anchor, weights)
    assert torch.equal(shared[:1], expected[:1])


@pytest.mark.parametrize("prefix", [0, 16])
def test_ties_nan_and_infinities(prefix, device, generator):
    """By hand, with W2 = 0 where the correction is on."""
    _, hidden, anchor, weights = make(generator, torch.float32, device, B=1, S=8, V=300)
    weights.w2.zero_()
    nan, inf = torch.nan, torch.inf
    base = torch.full((1, 8, 300), -1.0, device=device)
    base[0, 0, [280, 17, 299]] = 2.0  # a tie: the lowest id
    base[0, 1] = -inf  # all equal
    base[0, 2, [3, 40]] = torch.tensor([nan, 5.0], device=device)  # NaN never wins,
    base[0, 3] = nan  # unless there is nothing else
    base[0, 4] = torch.where(torch.arange(300, device=device) == 250, -inf, nan)  # -inf beats it
    base[0, 5, [9, 200]] = inf
    base[0, 6] = -2.0
    base[0, 6, [8, 5]] = torch.tensor([-0.0, 0.0], device=device)  # equal
    base[0, 7] = -2.0
    base[0, 7, [5, 8]] = torch.tensor([-0.0, 0.0], device=device)
    tokens, scores = draft_chain(
        base,
        hidden,
        anchor,
        weights,
        num_drafts=8,
        pure_draft_prefix_len=min(prefix, 8),
        return_scores=True,
    )
    assert tokens.tolist() == [[17, 0, 40, 0, 250, 9, 5, 5]]
    expected = [[2.0, -inf, 5.0, nan, -inf, inf, 0.0, 0.0]]
    torch.testing.assert_close(scores.cpu(), torch.tensor(expected), equal_nan=True)
    assert first_argmax(to_numpy(base))[0].tolist() == tokens[0].tolist()


def test_nan_stays_in_its_row(device, generator):
    base, hidden, anchor, weights = make(generator, torch.float32, device, B=3)
    expected = draft_chain(base, hidden, anchor, weights)
    hidden[1, 4] = torch.nan
    tokens = draft_chain(base, hidden, anchor, weights)
    assert torch.equal(tokens[::2], expected[::2])
    assert tokens[1, 4] == 0 and torch.equal(tokens[1, :4], expected[1, :4])


def test_anchor_outside_the_vocabulary_is_clamped(device, generator):
    base, hidden, _, weights = make(generator, torch.float32, device, B=2)
    outside = torch.tensor([-1, 2**40], device=device)
    inside = torch.tensor([0, 999], device=device)
    actual = draft_chain(base, hidden, outside, weights)
    assert torch.equal(actual, draft_chain(base, hidden, inside, weights))


def test_empty_batch(device, generator):
    inputs = make(generator, torch.float32, device, B=0)
    tokens, scores = draft_chain(*inputs, return_scores=True)
    assert tokens.shape == scores.shape == (0, 15)


# ---- GPU only ----


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_graph_replay_after_new_inputs(dtype, generator, graph_replay):
    inputs = make(generator, dtype, "cuda", B=3)
    out, plan = DraftResult.empty(inputs[-1], 3), ChainPlan(inputs[-1], 3)
    replay = graph_replay(lambda: draft_chain_out(*inputs, out=out, plan=plan))
    for _ in range(3):
        fresh = make(generator, dtype, "cuda", B=3)
        for old, new in zip(inputs[:3], fresh[:3]):
            old.copy_(new)
        for field in FIELDS:
            getattr(inputs[-1], field).copy_(getattr(fresh[-1], field))
        plan.scratch.fill_(0xFF)
        replay()
        expected = draft_chain(*fresh, return_scores=True)
        assert torch.equal(out.tokens, expected[0]) and torch.equal(out.scores, expected[1])


SMOLLM2 = dict(V=49152, H=576, G=256, R=96)
QWEN3_8B = dict(V=151936, H=4096, G=1024, R=256)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [SMOLLM2, QWEN3_8B], ids=["smollm2", "qwen3-8b"])
@pytest.mark.parametrize("batch, base_dtype", [(1, None), (8, None), (8, torch.float32)], ids=str)
def test_model_shapes(sizes, batch, base_dtype):
    generator = torch.Generator("cuda").manual_seed(20261129)
    inputs = make(generator, torch.bfloat16, "cuda", B=batch, base_dtype=base_dtype, **sizes)
    tokens, scores = draft_chain(*inputs, return_scores=True)
    near_ties = assert_chain(tokens, scores, inputs)
    print(f"{near_ties} near-ties of {tokens.numel()}")
    assert near_ties <= max(2, 0.05 * tokens.numel())
    for _ in range(3):
        again = draft_chain(*inputs, return_scores=True)
        assert torch.equal(again[0], tokens) and torch.equal(again[1], scores)
    one = draft_chain(inputs[0][-1:], inputs[1][-1:], inputs[2][-1:], inputs[3])
    assert torch.equal(one, tokens[-1:])


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 40])
def test_overlapping_launches_never_race(batch, generator, graph_replay):
    """Launches start before the ones in front of them end: 1000 blocks, other work in between."""
    inputs = make(generator, torch.bfloat16, "cuda", B=batch, **SMOLLM2)
    expected = draft_chain(*inputs, return_scores=True)
    out, plan = DraftResult.empty(inputs[-1], batch), ChainPlan(inputs[-1], batch)
    replay = graph_replay(lambda: draft_chain_out(*inputs, out=out, plan=plan))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(1000):
        if i % 3 == 0:  # what a launch must not read still has these bits
            plan.scratch.fill_(0xFF)
        replay()
        wrong += (out.tokens != expected[0]).sum() + (out.scores != expected[1]).sum()
        out.tokens.fill_(-1)
    assert wrong.item() == 0


@pytest.mark.gpu
def test_large_batch(generator):
    inputs = make(generator, torch.bfloat16, "cuda", B=130, V=4000, H=128, G=64, R=64)
    tokens, scores = draft_chain(*inputs, return_scores=True)
    assert_chain(tokens, scores, inputs)
    one = draft_chain(inputs[0][77:78], inputs[1][77:78], inputs[2][77:78], inputs[3])
    assert torch.equal(one, tokens[77:78])


@pytest.mark.gpu
def test_inputs_past_two_billion_elements(generator):
    """int64 addressing: the second row of the base logits starts past 2^31 elements."""
    base, hidden, anchor, weights = make(generator, torch.bfloat16, "cuda")
    far = torch.empty(2**31 + base[0].numel(), dtype=torch.bfloat16, device="cuda")
    view = far.as_strided(base.shape, (2**31, base.stride(1), 1))
    view.copy_(base)
    expected = draft_chain(base, hidden, anchor, weights)
    assert torch.equal(draft_chain(view, hidden, anchor, weights), expected)


# ---- arguments ----

GOOD = dict(B=2, S=4, V=50, H=8, G=8, R=8)
BAD = [
    (dict(base_logits=torch.zeros(2, 50)), ValueError, r"base_logits: got shape \[2, 50\], expec"),
    (dict(base_logits=torch.zeros(2, 4, 49)), ValueError, r"got shape \[2, 4, 49\], expected \[2,"),
    (dict(base_logits=torch.zeros(2, 4, 50).half()), TypeError, "base_logits: got torch.float16"),
    (dict(base_logits=torch.zeros(2, 50, 4).mT), ValueError, "base_logits: got strides"),
    (dict(hidden=torch.zeros(2, 3, 8)), ValueError, r"hidden: got shape \[2, 3, 8\], expected"),
    (dict(hidden=torch.zeros(2, 4, 8).half()), TypeError, "hidden: got torch.float16, expected"),
    (dict(hidden=torch.zeros(2, 4, 8, requires_grad=True)), ValueError, "hidden: got a tensor tha"),
    (dict(hidden=torch.zeros(2, 4, 8, device="meta")), ValueError, "hidden: got a tensor on meta"),
    (dict(anchor=torch.zeros(3).long()), ValueError, r"anchor: got shape \[3\], expected \[2\]"),
    (dict(anchor=torch.zeros(2).int()), TypeError, "anchor: got torch.int32, expected torch.int64"),
    (dict(weights={}), TypeError, "weights: got dict, expected HeadWeights"),
    (dict(num_drafts=0), ValueError, "num_drafts: got 0, expected at least 1"),
    (dict(num_drafts=5), ValueError, "num_drafts: got 5, expected 1..4 with 4 slots"),
    (dict(num_drafts=4, shift_label=False), ValueError, "num_drafts: got 4, expected 1..3 with 4"),
    (dict(pure_draft_prefix_len=-1), ValueError, "pure_draft_prefix_len: got -1, expected at le"),
]


@pytest.mark.parametrize("change, error, message", BAD, ids=[b[2][:40] for b in BAD])
def test_bad_arguments(change, error, message, generator):
    base, hidden, anchor, weights = make(generator, torch.float32, **GOOD)
    arguments = dict(base_logits=base, hidden=hidden, anchor=anchor, weights=weights, num_drafts=3)
    with pytest.raises(error, match=f"draft_chain.*: {message}"):
        draft_chain(**arguments | change)


BAD_MEMORY = [
    (
        dict(tokens=torch.zeros(2, 3)),
        TypeError,
        "out.tokens: got torch.float32, expected torch.int",
    ),
    (
        dict(tokens=torch.zeros(3, 3).long()),
        ValueError,
        r"out.tokens: got shape \[3, 3\], expected",
    ),
    (dict(tokens=torch.zeros(2, 6).long()[:, :3]), ValueError, "out.tokens: got strides"),
    (
        dict(scores=torch.zeros(2, 4)),
        ValueError,
        r"out.scores: got shape \[2, 4\], expected \[2, 3",
    ),
    (
        dict(restarts=torch.zeros(2)),
        TypeError,
        "out.restarts: got torch.float32, expected torch.int",
    ),
    (dict(plan=None), TypeError, "plan: got NoneType, expected ChainPlan"),
]


@pytest.mark.parametrize("change, error, message", BAD_MEMORY, ids=[b[2][:40] for b in BAD_MEMORY])
def test_bad_memory(change, error, message, generator):
    inputs = make(generator, torch.float32, **GOOD)
    memory = dict(plan=ChainPlan(inputs[-1], 2)) | change
    plan = memory.pop("plan")
    out = DraftResult.empty(inputs[-1], 2, num_drafts=3)._replace(**memory)
    with pytest.raises(error, match=f"draft_chain: {message}"):
        draft_chain_out(*inputs, out=out, plan=plan)


@pytest.mark.parametrize("name", ["batch", "num_drafts"])
def test_bad_plan(name, generator):
    weights = make(generator, torch.float32, **GOOD)[-1]
    for value in (-1, "2", 2.0):
        with pytest.raises(ValueError, match=f"ChainPlan: {name}: got {value!r}, expected"):
            ChainPlan(weights, **dict(batch=2, num_drafts=3) | {name: value})


@pytest.mark.parametrize("other", [dict(G=16), dict(R=16)], ids=str)
def test_plan_of_another_head(other, device, generator):
    """Its memory would be read where it was never cleared: words of no draft could pass for new."""
    inputs = make(generator, torch.float32, device, **GOOD)
    weights = make(generator, torch.float32, device, **GOOD | other)[-1]
    plan = ChainPlan(weights, 40)
    with pytest.raises(ValueError, match=r"draft_chain: plan: got one for weights of G=\d+, R=\d+"):
        draft_chain(*inputs, num_drafts=3, plan=plan)
    copy = dataclasses.replace(inputs[-1], w2=inputs[-1].w2.clone())
    draft_chain(*inputs, num_drafts=3, plan=ChainPlan(copy, 40))


@pytest.mark.gpu
def test_small_plan(generator):
    inputs = make(generator, torch.float32, "cuda", **GOOD | dict(B=40))
    out, plan = DraftResult.empty(inputs[-1], 40, num_drafts=3), ChainPlan(inputs[-1], 1)
    with pytest.raises(
        ValueError, match=r"draft_chain: plan: got .* bytes on .* expected at least"
    ):
        draft_chain_out(*inputs, out=out, plan=plan)


# ---- HeadWeights ----


def state_dict():
    return {
        "prefix_gru.weight_ih_l0": torch.zeros(12, 8),
        "prefix_gru.weight_hh_l0": torch.zeros(12, 4),
        "embed_proj.0.weight": torch.zeros(3, 12),
        "embed_proj.2.weight": torch.zeros(50, 3),
    }


def test_head_weights_from_state_dict():
    tensors = state_dict() | {"norm.weight": torch.zeros(8)}
    embedding = torch.nn.Parameter(torch.zeros(50, 8))
    weights = HeadWeights.from_state_dict(tensors, embedding)
    assert weights.embedding.data_ptr() == embedding.data_ptr()
    assert not weights.embedding.requires_grad
    assert (weights.vocab_size, weights.hidden_size, weights.gru_size, weights.rank) == (
        50,
        8,
        4,
        3,
    )
    assert repr(weights) == (
        "HeadWeights(silu, V=50, H=8, G=4, R=3, float32, cpu, 0.0 MiB + 0.0 MiB embedding of the "
        "target)"
    )


BAD_WEIGHTS = [
    ("prefix_gru.weight_ih_l0", torch.zeros(12, 9), ValueError, r"w_ih: got shape \[12, 9\]"),
    ("prefix_gru.weight_hh_l0", torch.zeros(9, 4), ValueError, r"w_hh: got shape \[9, 4\], expect"),
    ("embed_proj.0.weight", torch.zeros(3, 11), ValueError, r"w1: got shape \[3, 11\], expected"),
    ("embed_proj.0.weight", torch.zeros(3, 12).half(), TypeError, "w1: got torch.float16, expect"),
    ("embed_proj.0.weight", torch.zeros(12, 3).T, ValueError, "w1: got strides"),
    (
        "embed_proj.2.weight",
        torch.zeros(49, 3),
        ValueError,
        r"w2: got shape \[49, 3\], expected \[",
    ),
    ("embed_proj.2.weight", torch.zeros(50, 3).int(), TypeError, "w2: got torch.int32, expected o"),
    ("embed_proj.2.weight", torch.zeros(50, 0), ValueError, "got V=50, I=8, G=4, R=0, expected"),
    ("embed_proj.2.weight", None, TypeError, "w2: got NoneType, expected a tensor"),
]


@pytest.mark.parametrize(
    "name, value, error, message", BAD_WEIGHTS, ids=[b[3] for b in BAD_WEIGHTS]
)
def test_bad_weights(name, value, error, message):
    with pytest.raises(error, match=f"HeadWeights: .*{message}"):
        HeadWeights.from_state_dict(state_dict() | {name: value}, torch.zeros(50, 8))


def test_missing_weights():
    tensors = state_dict()
    del tensors["embed_proj.0.weight"]
    with pytest.raises(ValueError, match=r"state_dict: got no embed_proj\.0\.weight, expected all"):
        HeadWeights.from_state_dict(tensors, torch.zeros(50, 8))


def test_public_names():
    assert {"ChainPlan", "draft_chain", "draft_chain_out", "HeadWeights"} <= set(
        domino_kernels.__all__
    )
