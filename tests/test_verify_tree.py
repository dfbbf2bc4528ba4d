"""verify_tree against its float64 reference, and everything that must not change its bits.

That the emitted tokens have the target's law: tests/losslessness.
"""

import pytest
import torch
from tree_cases import (
    RULES,
    SAMPLED,
    assert_reference,
    assert_same,
    expected_of,
    guarded_result,
    make,
    to,
)

import domino_kernels
from domino_kernels import TreeStatus, verify_chain, verify_tree, verify_tree_workspace

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
INF, NAN = float("inf"), float("nan")
FORMS = [
    (rule, kind) for rule in RULES for kind in (("pool", "dense") if rule in SAMPLED else ("",))
]
forms = pytest.mark.parametrize("rule, kind", FORMS, ids=["-".join(f).strip("-") for f in FORMS])


def form(rule, kind, vocab):
    return dict(rule=rule, pool=min(8, vocab) if kind == "pool" else 0)


# batch, nodes, V: one node, one token, tails of vectors and chunks, more than one block of the race
SHAPES = [(8, 1, 9), (12, 5, 1), (16, 9, 30), (8, 40, 257), (6, 20, 1031), (4, 12, 20011)]


@forms
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference(shape, rule, kind, device, generator):
    arguments = make(*shape, generator, **form(rule, kind, shape[2]))
    guards, out = guarded_result(*shape[:2], device)
    assert verify_tree(**to(arguments, device), out=out) is out
    for guard in guards:
        guard.check()
    assert_reference(out, expected_of(arguments))


@forms
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_dtypes(dtype, rule, kind, device, generator):
    arguments = make(8, 14, 300, generator, dtype=dtype, **form(rule, kind, 300))
    result = verify_tree(**to(arguments, device))
    assert_reference(result, expected_of(arguments))
    widened = arguments | dict(target_logits=arguments["target_logits"].float())
    assert_same(verify_tree(**to(widened, device)), result)


@forms
def test_many_siblings_and_nodes(rule, kind, device, generator):
    """More than 32 children of a node; 1024 nodes."""
    keywords = form(rule, kind, 90)
    if kind == "pool":
        keywords["pool"] = 64
    arguments = make(4, 200, 90, generator, wide=True, **keywords)
    children = torch.bincount(arguments["parents"][1].clamp_min(0).long())
    assert children.max() > 40
    assert_reference(verify_tree(**to(arguments, device)), expected_of(arguments))
    arguments = make(2, 1024, 33, generator, **form(rule, kind, 33))
    assert_reference(verify_tree(**to(arguments, device)), expected_of(arguments))


@forms
@pytest.mark.parametrize("order", ["transformers", "vllm", "joint"])
def test_filters(order, rule, kind, device, generator):
    batch, vocab = 24, 60
    arguments = make(batch, 10, vocab, generator, spread=1.5, **form(rule, kind, vocab))
    arguments |= dict(
        top_k=torch.randint(-1, 12, (batch,), generator=generator).int(),
        top_p=torch.rand(batch, generator=generator) * 0.7 + 0.4,
        min_p=(torch.rand(batch, generator=generator) - 0.3) * 0.2,
        filter_order=order,
    )
    result = verify_tree(**to(arguments, device))
    assert_reference(result, expected_of(arguments))
    off = arguments | dict(
        top_k=torch.zeros(batch, dtype=torch.int32),
        top_p=torch.ones(batch),
        min_p=torch.zeros(batch),
    )
    plain = {k: v for k, v in arguments.items() if k not in ("top_k", "top_p", "min_p")}
    assert_same(verify_tree(**to(off, device)), verify_tree(**to(plain, device)))


@pytest.mark.parametrize(
    "rule, kind", [("rrsw", "dense"), ("target_only", ""), ("traversal", "dense")]
)
def test_a_tree_that_is_a_chain_has_the_bits_of_verify_chain(rule, kind, device, generator):
    """The same coins and draws: token rule, one-hot rule, block verification."""
    batch, nodes, vocab = 60, 6, 257
    arguments = make(batch, nodes, vocab, generator, rule=rule)
    arguments["parents"] = torch.arange(nodes).int().expand(batch, nodes).contiguous() - 1
    draft = arguments.get("draft_logits", arguments["target_logits"])
    for n in range(1, nodes):  # drafts from the draft's law, which the chain shares
        q = (draft[:, n - 1] / arguments["temperature"].clamp_min(0.4)[:, None]).softmax(-1)
        arguments["tokens"][:, n] = torch.multinomial(q, 1, generator=generator)[:, 0]
    tree = verify_tree(**to(arguments, device))
    chain = dict(
        target_logits=arguments["target_logits"],
        draft_tokens=arguments["tokens"][:, 1:].contiguous(),
        rule={"rrsw": "token", "target_only": "token", "traversal": "block"}[rule],
        **{k: arguments[k] for k in ("temperature", "seed", "block_start")},
    )
    if kind == "dense":
        chain["draft_logits"] = draft[:, :-1]
    expected = verify_chain(**to(chain, device))
    same = (tree.tokens == expected.tokens).all(-1)
    # block verification is written with other products: the last bit of a threshold may differ
    assert same.float().mean() >= (1.0 if rule != "traversal" else 0.98)
    assert torch.equal(tree.num_accepted[same], expected.num_accepted[same])
    assert torch.equal(tree.chosen_logprob[same], expected.chosen_logprob[same])


def test_match_is_seeded_sampling_without_drafts(device, generator):
    arguments = to(make(40, 9, 50, generator, rule="match"), device)
    result = verify_tree(**arguments)
    plain = verify_chain(
        arguments["target_logits"][:, :1],
        arguments["tokens"][:, :0],
        rule="match",
        **{k: arguments[k] for k in ("temperature", "seed", "block_start")},
    )
    assert torch.equal(result.tokens[:, 0], plain.tokens[:, 0])
    assert result.num_accepted.float().mean() > 0.5


@forms
def test_ragged_is_each_request_alone(rule, kind, device, generator):
    batch, nodes, vocab = 6, 9, 130
    arguments = to(make(batch, nodes, vocab, generator, **form(rule, kind, vocab)), device)
    counts = [9, 1, 0, 4, 7, 9]
    keep = torch.tensor([[n < c for n in range(nodes)] for c in counts], device=device)
    cu_nodes = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32, device=device)
    flat = {
        name: value[keep] if value.dim() > 1 else value
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor)
    }
    if kind == "pool":
        flat["draft_pool"] = tuple(v[keep] for v in arguments["draft_pool"])
    result = verify_tree(**flat, rule=rule, cu_nodes=cu_nodes, width=nodes)
    assert result.num_emitted[2] == 0 and result.status[2] == 0 and (result.path[2] == -1).all()
    for b, count in enumerate(counts):
        if count == 0:
            continue

        def part(value, b=b, count=count):
            return value[b : b + 1, :count] if value.dim() > 1 else value[b : b + 1]

        one = {
            name: tuple(map(part, value)) if isinstance(value, tuple) else part(value)
            for name, value in arguments.items()
            if not isinstance(value, str)
        }
        alone = verify_tree(**one, rule=rule)
        for name, a, c in zip(result._fields, result, alone):
            wide = a[b, :count] if a.dim() > 1 else a[b]
            assert torch.equal(wide, c[0]), name
        assert (result.tokens[b, count:] == -1).all()


@forms
def test_batch_order_changes_no_bit(rule, kind, device, generator):
    arguments = to(make(13, 12, 1031, generator, **form(rule, kind, 1031)), device)
    whole = verify_tree(**arguments)
    assert_same(verify_tree(**arguments), whole)
    order = torch.randperm(13, generator=generator).to(device)
    order = torch.cat([order, order[:6]])

    def pick(value):
        if isinstance(value, tuple):
            return tuple(map(pick, value))
        return value[order] if isinstance(value, torch.Tensor) else value

    shuffled = {name: pick(value) for name, value in arguments.items()}
    assert_same(verify_tree(**shuffled), [t[order] for t in whole])


@forms
def test_strides_change_no_bit(rule, kind, device, generator):
    arguments = to(make(5, 8, 517, generator, **form(rule, kind, 517)), device)
    expected = verify_tree(**arguments)
    for shift in (0, 1, 3):
        wide = torch.full((8, 5, 2 * 517 + 5), NAN, device=device)
        target = wide[:, :, shift : shift + 517].transpose(0, 1)
        target.copy_(arguments["target_logits"])
        strided = dict(target_logits=target)
        for name in ("tokens", "parents"):
            strided[name] = torch.cat([arguments[name]] * 2, 1)[:, :8]
        if kind == "pool":
            strided["draft_pool"] = tuple(
                torch.cat([v] * 2, -1)[:, :, : v.size(-1)] for v in arguments["draft_pool"]
            )
        assert_same(verify_tree(**arguments | strided), expected)


@forms
def test_rows_of_leaves_count_only_where_the_walk_ends(rule, kind, device, generator):
    arguments = make(20, 12, 200, generator, **form(rule, kind, 200))
    result = verify_tree(**to(arguments, device))
    ends = result.path.cpu().gather(1, result.num_accepted.cpu()[:, None].long())[:, 0]
    assert len(set(ends.tolist())) > 3
    for b, parents in enumerate(arguments["parents"].tolist()):
        for n in set(range(12)) - set(parents) - {int(ends[b])}:
            arguments["target_logits"][b, n] = NAN
    assert_same(verify_tree(**to(arguments, device)), result)


def test_without_logprobs(device, generator):
    for rule, drawn in (("greedy", False), ("greedy", True), ("target_only", True)):
        arguments = to(make(9, 14, 3000, generator, rule=rule), device)
        if not drawn:
            arguments = {k: arguments[k] for k in ("target_logits", "tokens", "parents")}
        whole = verify_tree(**arguments)
        result = verify_tree(**arguments, logprobs=False)
        assert result.chosen_logprob is None
        assert_same(result._replace(chosen_logprob=whole.chosen_logprob), whole)
    with pytest.raises(ValueError, match=r"out.chosen_logprob: got a tensor, expected None"):
        verify_tree(**arguments, logprobs=False, out=whole)
    with pytest.raises(TypeError, match=r"out.chosen_logprob"):
        verify_tree(**arguments, out=result)


# --- what is not right --------------------------------------------------------------------------


@forms
def test_parents_that_are_none(rule, kind, device, generator):
    """Forward, own, negative and huge parents: a status, and the tree without them."""
    arguments = make(12, 9, 40, generator, **form(rule, kind, 40))
    parents = arguments["parents"]
    good = parents.clone()
    for b, (n, parent) in enumerate(
        [(3, 3), (3, 7), (8, 9), (2, -2), (4, 2**30), (5, -(2**31))] * 2
    ):
        parents[b, n] = parent
        good[b, n] = -1  # a pad
    result = verify_tree(**to(arguments, device))
    assert (result.status == TreeStatus.BAD_TREE).all()
    without = verify_tree(**to(arguments | dict(parents=good), device))
    assert not without.status.any()
    assert_same(result._replace(status=without.status), without)
    assert_reference(result, expected_of(arguments))


@forms
def test_pads_and_bad_ids(rule, kind, device, generator):
    arguments = make(30, 12, 40, generator, **form(rule, kind, 40))
    tokens = arguments["tokens"]
    tokens[::3, 4:] = -1
    tokens[1::3, 2] = 40
    tokens[1::3, 5] = -7
    tokens[2::3, 3] = 2**40
    result = verify_tree(**to(arguments, device))
    assert_reference(result, expected_of(arguments))
    assert (result.num_emitted == result.num_accepted + 1).all()
    assert ((result.tokens >= -1) & (result.tokens < 40)).all()


@forms
def test_rows_that_are_no_law(rule, kind, device, generator):
    """NaN, +inf and all -inf: the path ends before the row, with a status and no made-up token."""
    arguments = make(40, 6, 50, generator, **form(rule, kind, 50))
    target = arguments["target_logits"]
    target[0::4, 0, 3] = NAN
    target[1::4, 1, 49] = INF
    target[2::4, 2] = -INF
    target[3::4, 5] = -INF
    result = verify_tree(**to(arguments, device))
    assert_reference(result, expected_of(arguments))
    failed = (result.status & (TreeStatus.NON_FINITE | TreeStatus.EMPTY_ROW)) != 0
    assert failed[0::4].all() and (result.num_emitted[0::4] == 0).all()
    assert torch.equal(failed, result.num_emitted == result.num_accepted)


@pytest.mark.parametrize("rule", SAMPLED)
@pytest.mark.parametrize("kind", ["pool", "dense"])
def test_draft_laws_that_are_none(rule, kind, device, generator):
    """Their children are passed over; the token that follows comes from p."""
    arguments = make(40, 6, 50, generator, **form(rule, kind, 50))
    if kind == "pool":
        ids, logits = arguments["draft_pool"]
        logits[0::4, 0, 2] = NAN
        logits[1::4, 0] = -INF
        ids[2::4, 0] = -1
        ids[3::4, 0, 0] = 50
    else:
        logits = arguments["draft_logits"]
        logits[0::4, 0, 2] = NAN
        logits[1::4, 0] = -INF
        logits[2::4, 0, 7] = INF
    result = verify_tree(**to(arguments, device))
    assert_reference(result, expected_of(arguments))
    sampled = (arguments["temperature"] > 0).to(device)
    bad = (result.status & TreeStatus.BAD_DRAFT_LAW) != 0
    has_child = (arguments["parents"][:, 1:] == 0).any(-1).to(device)
    assert torch.equal(bad[1::4], (sampled & has_child)[1::4])
    assert (result.num_emitted == result.num_accepted + 1).all()


@pytest.mark.parametrize("rule", SAMPLED)
@pytest.mark.parametrize("at", [0, 3, 7])
def test_nan_anywhere_in_a_pool_is_no_law(at, rule, device, generator):
    arguments = make(8, 4, 50, generator, rule=rule, pool=8)
    arguments["parents"][:, 1:] = 0
    arguments["temperature"][:] = 1.0
    arguments["draft_pool"][1][:, 0, at] = NAN
    result = verify_tree(**to(arguments, device))
    assert_reference(result, expected_of(arguments))
    assert (result.status & TreeStatus.BAD_DRAFT_LAW).all()
    assert not result.num_accepted.any()


@pytest.mark.parametrize("rule", ["target_only", *SAMPLED])
def test_repeated_siblings_are_passed_over(rule, device, generator):
    kind = "dense" if rule in SAMPLED else ""
    arguments = make(30, 8, 20, generator, wide=True, **form(rule, kind, 20))
    arguments["parents"][:, 1:] = 0
    arguments["tokens"][:, 3] = arguments["tokens"][:, 1]
    arguments["tokens"][:, 6] = arguments["tokens"][:, 2]
    result = verify_tree(**to(arguments, device))
    assert_reference(result, expected_of(arguments))
    assert not ((result.path == 3) | (result.path == 6)).any()


@pytest.mark.parametrize("rule", SAMPLED)
def test_equal_laws_leave_no_residual(rule, device, generator):
    """p = q: the first child is always kept, up to rounding; nothing invented where it is not."""
    arguments = make(200, 5, 30, generator, rule=rule)
    arguments["draft_logits"] = arguments["target_logits"].clone()
    arguments["parents"] = torch.tensor([[-1, 0, 0, 1, 1]] * 200, dtype=torch.int32)
    sampled = arguments["temperature"] > 0
    q = arguments["target_logits"] / arguments["temperature"].clamp_min(0.4)[:, None, None]
    for n, first in ((0, 1), (1, 3)):  # drawn tokens
        arguments["tokens"][:, first] = torch.multinomial(
            q[:, n].softmax(-1), 1, generator=generator
        )[:, 0]
        arguments["tokens"][:, first + 1] = -1
    result = verify_tree(**to(arguments, device))
    assert (result.num_accepted.cpu()[sampled] == 2).all()
    assert not result.status.any()


@pytest.mark.parametrize("value", [-1.0, NAN, INF])
@pytest.mark.parametrize("name", ["temperature", "draft_temperature"])
def test_parameters_that_are_none(name, value, device, generator):
    arguments = make(8, 5, 20, generator, pool=8)
    arguments["draft_temperature"] = torch.ones(8)
    arguments["temperature"] = torch.ones(8)
    good = verify_tree(**to(arguments, device))
    arguments[name] = arguments[name].clone()
    arguments[name][3] = value
    result = verify_tree(**to(arguments, device))
    assert result.status[3] == TreeStatus.BAD_PARAMETER and result.num_emitted[3] == 0
    others = torch.arange(8) != 3
    assert_same([t.cpu()[others] for t in result], [t.cpu()[others] for t in good])


def test_draft_temperature_zero_is_target_only(device, generator):
    arguments = make(20, 7, 30, generator, pool=8)
    zero = arguments | dict(draft_temperature=torch.zeros(20))
    plain = {k: v for k, v in arguments.items() if k != "draft_pool"} | dict(rule="target_only")
    assert_same(verify_tree(**to(zero, device)), verify_tree(**to(plain, device)))


def test_bad_cu_nodes(device, generator):
    arguments = make(1, 9, 20, generator, rule="greedy")
    flat = {k: arguments[k][0].to(device) for k in ("target_logits", "tokens", "parents")}
    cu_nodes = torch.tensor([0, 4, 2, 9, 12, 12], dtype=torch.int32, device=device)
    result = verify_tree(**flat, cu_nodes=cu_nodes, width=5)
    bad = TreeStatus.BAD_ROWS
    assert result.status.tolist() == [0, bad, bad, bad, 0]
    assert result.num_emitted.tolist()[1:] == [0] * 4


ERRORS = {
    "rule": (dict(rule="medusa"), ValueError, r"verify_tree: rule: got 'medusa', expected one of"),
    "draft": (dict(draft_pool=None), ValueError, r"draft_pool, draft_logits: got both or none"),
    "parents": (dict(parents=torch.zeros(4, 5)), TypeError, r"parents: got torch.float32"),
    "tokens": (dict(tokens=torch.zeros(4, 6).long()), ValueError, r"tokens: got shape \[4, 6\]"),
    "width": (dict(width=5), ValueError, r"width: got 5, expected None without cu_nodes"),
    "order": (dict(filter_order="hf"), ValueError, r"filter_order: got 'hf', expected one of"),
    "seed": (dict(seed=None), TypeError, r"verify_tree: seed: got NoneType, expected a tensor"),
    "grad": (
        dict(target_logits=torch.zeros(4, 5, 20, requires_grad=True)),
        ValueError,
        r"target_logits: got a tensor that requires grad",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name, generator):
    change, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message):
        verify_tree(**make(4, 5, 20, generator, pool=8) | change)


def test_other_rules_take_no_draft_law(generator):
    arguments = make(4, 5, 20, generator, pool=8) | dict(rule="target_only")
    with pytest.raises(ValueError, match=r"draft_pool: got a value, expected None with rule"):
        verify_tree(**arguments)


def test_empty_batch(device):
    result = verify_tree(
        torch.zeros(0, 3, 9, device=device),
        torch.zeros(0, 3, dtype=torch.int64, device=device),
        torch.zeros(0, 3, dtype=torch.int32, device=device),
    )
    assert result.tokens.shape == (0, 3)


# --- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@forms
def test_kernel_and_twin_agree_bitwise(rule, kind, generator):
    for shape in [(9, 7, 30), (5, 64, 20011), (2, 20, 151936)]:
        arguments = make(*shape, generator, dtype=torch.bfloat16, **form(rule, kind, shape[2]))
        assert_same(verify_tree(**to(arguments, "cuda")), verify_tree(**arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("pool", [200, 600, 1024])
@pytest.mark.parametrize("rule", SAMPLED)
def test_a_block_has_room_for_few_large_pools(rule, pool, generator):
    """So that pairs of warps take turns, and of traversal the laws of nodes go to the workspace."""
    arguments = make(3, 60, 3000, generator, dtype=torch.bfloat16, rule=rule, pool=pool)
    assert_same(verify_tree(**to(arguments, "cuda")), verify_tree(**arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("logprobs", [False, True])
def test_roots_alone_see_what_was_just_written(logprobs, generator):
    """With one node the call's only launch reads the request's parameters first thing."""
    arguments = to(make(64, 1, 300, generator, rule="target_only"), "cuda")
    arguments |= dict(rule="match", logprobs=logprobs)
    seeds = torch.arange(50, device="cuda")
    tokens = []
    for n in range(50):
        arguments["seed"].copy_(seeds[n].expand(64))
        arguments["block_start"].add_(1)
        tokens.append(verify_tree(**arguments).tokens)
    arguments["block_start"].sub_(50)
    for n, found in enumerate(tokens):
        arguments["seed"].fill_(n)
        arguments["block_start"].add_(1)
        assert torch.equal(found.cpu(), verify_tree(**to(arguments, "cpu")).tokens)


@pytest.mark.gpu
@forms
def test_graph_replay_is_eager(rule, kind, graph_replay, generator):
    """Replays read what the tensors hold then; a workspace is clean again after each call."""
    arguments = to(make(6, 30, 5000, generator, **form(rule, kind, 5000)), "cuda")
    pool = arguments["draft_pool"][0].size(-1) if kind == "pool" else 0
    workspace = verify_tree_workspace(
        6, 30, 5000, pool=pool, dense=kind == "dense" and rule in SAMPLED, device="cuda"
    )
    out = verify_tree(**arguments)
    replay = graph_replay(lambda: verify_tree(**arguments, out=out, workspace=workspace))
    for seed in range(20):
        for name in ("seed", "block_start"):
            arguments[name].copy_(torch.randint(0, 2**40, (6,), generator=generator))
        arguments["temperature"].copy_(torch.rand(6, generator=generator) * (seed % 3 > 0))
        replay()
        replayed = [t.clone() for t in out]
        assert_same(replayed, verify_tree(**arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("rule", ["greedy", "target_only", "rrsw", "traversal"])
def test_calls_in_a_row_share_a_workspace(rule, batch, graph_replay, generator):
    """A call starts as soon as the one in front has ended, and writes where that one has read."""
    shape, pool = (batch, 20, 20011), 8 * (rule in SAMPLED)
    calls = [
        to(make(*shape, generator, dtype=torch.bfloat16, rule=rule, pool=pool), "cuda")
        for _ in range(8)
    ]
    for call in calls[1:]:
        call["temperature"].clamp_(min=0.4)
    expected = [verify_tree(**call) for call in calls]
    outs = [type(result)(*(t.clone() for t in result)) for result in expected]
    workspace = verify_tree_workspace(*shape, pool=pool, device="cuda")

    def all_calls():
        for call, out in zip(calls, outs):
            verify_tree(**call, out=out, workspace=workspace)

    replay = graph_replay(all_calls)
    for _ in range(10):
        for out in outs:
            for tensor in out:
                tensor.fill_(77)
        replay()
        for out, result in zip(outs, expected):
            assert_same(out, result)


@pytest.mark.gpu
def test_rows_that_are_skipped_change_nothing(generator):
    """Many requests, so that most rows come after the verdict that cuts them off."""
    for rule in ("greedy", "target_only", "rrsw"):
        arguments = to(make(24, 40, 3000, generator, rule=rule, pool=8 * (rule == "rrsw")), "cuda")
        whole = verify_tree(**arguments)
        for b in (0, 17, 23):
            one = {
                name: tuple(v[b : b + 1] for v in value)
                if isinstance(value, tuple)
                else value[b : b + 1]
                for name, value in arguments.items()
                if not isinstance(value, str)
            }
            assert_same(verify_tree(**one, rule=rule), [t[b : b + 1] for t in whole])


@pytest.mark.gpu
def test_more_than_2_to_the_32_elements():
    vocab, nodes, batch = 151936, 64, 448
    if torch.cuda.mem_get_info()[0] < 10e9:
        pytest.skip("needs 10 GB")
    target = torch.zeros(batch, nodes, vocab, dtype=torch.bfloat16, device="cuda")
    assert target.numel() > 2**32
    winner = torch.randint(vocab, (batch, nodes), device="cuda")
    target.scatter_(-1, winner[..., None], 5.0)
    parents = (torch.arange(nodes, dtype=torch.int32, device="cuda") - 1).repeat(batch, 1)
    tokens = torch.cat([winner[:, :1], winner[:, :-1]], 1)
    result = verify_tree(target, tokens, parents)
    assert (result.num_accepted == nodes - 1).all()
    assert torch.equal(result.tokens, winner)


def test_public_names():
    for name in ("verify_tree", "verify_tree_workspace", "TreeResult", "build_tree", "kv_move"):
        assert name in dir(domino_kernels)
