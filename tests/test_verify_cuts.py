"""Cuts of the filters that kernels find by counting bf16 values, against the CPU twin."""

import pytest
import torch
from chain_cases import assert_same, to
from test_verify_rules import with_q

from domino_kernels import verify_chain
from domino_kernels.ops.verify import _CONTROL_WORDS, _empty_result, verify_chain_workspace
from domino_kernels.reference.law import FILTER_ORDERS

pytestmark = pytest.mark.gpu


def rows(kind, shape, generator):
    """bf16 logits; what a histogram of values has to get right in the name."""
    normal = torch.randn(*shape, generator=generator)
    chance = torch.rand(*shape, generator=generator)
    if kind == "peaked":
        normal = torch.where(chance < 20 / shape[-1], normal + 8, normal)
    elif kind == "few values":
        normal = (normal * 2).round() / 2  # -0 and 0 among them
    elif kind == "zeros and masked":
        normal = normal.where(chance > 0.3, 0.0).where(chance < 0.8, -torch.inf)
        normal[..., 0] = 1.0
    elif kind == "equal":
        normal = normal[..., :1].expand(shape)
    elif kind == "near zero":
        normal = normal * 1e-9
    elif kind == "beyond the bins":
        normal = normal * 300
    elif kind == "close together":
        normal[..., 500:700] += 4
    return normal.to(torch.bfloat16)


KINDS = [
    "normal",
    "peaked",
    "few values",
    "zeros and masked",
    "equal",
    "near zero",
    "beyond the bins",
]


RULES = [
    ("token", "none"),
    ("token", "pool"),
    ("token", "scalar"),
    ("match", "none"),
    ("gumbel", "none"),
    ("block", "none"),
]

# [batch, drafts, vocabulary] and tokens of a pool: a few rows, that one launch may take.
FEW = [
    ((1, 15, 40_000), 200),
    ((16, 0, 32_768), 0),
    ((4, 3, 33_000), 5),
    ((1, 2, 151_936), 64),
    ((7, 2, 33_000), 5),
    ((5, 6, 32_776), 64),
]


def assert_same_in(workspace, arguments):
    """The call on a GPU in this workspace, as often as you like, against the CPU twin."""
    expected = verify_chain(**arguments)
    kernel = verify_chain(**to(arguments, "cuda"), workspace=workspace)
    assert_same(kernel, expected)
    # a call leaves the words in front as they were, and counts on nothing behind them
    assert not workspace[:_CONTROL_WORDS].any()
    workspace[_CONTROL_WORDS:].random_()


def assert_replays_same(draw, shape, graph_replay):
    """A captured call whose inputs draw() makes anew for every replay."""
    workspace = verify_chain_workspace(*shape, device="cuda")
    out = _empty_result(*shape[:2], "cuda", logprobs=False)
    static = to(draw(), "cuda")
    replay = graph_replay(lambda: verify_chain(**static, out=out, workspace=workspace))
    for _ in range(20):
        arguments = draw()
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                static[name].copy_(value)
        for tensor in (out.tokens, out.num_accepted, out.num_emitted, out.status):
            tensor.fill_(7)
        replay()
        assert_same(out, verify_chain(**arguments))


def assert_streams_same(draw):
    """Calls in four streams at once, with the inputs of draw(shape), a workspace each."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    calls = []
    for n in range(len(streams)):
        shape = (1, 15, 40_000) if n % 2 == 0 else (3, 4, 60_000)
        arguments = draw(shape)
        workspace = verify_chain_workspace(*shape, device="cuda")
        calls.append((to(arguments, "cuda"), workspace, verify_chain(**arguments)))
    torch.cuda.synchronize()
    results = []
    for _ in range(60):
        for stream, (arguments, workspace, expected) in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                results.append((verify_chain(**arguments, workspace=workspace), expected))
    torch.cuda.synchronize()
    for result, expected in results:
        assert_same(result, expected)


def arguments_of(kind, batch, drafts, vocab, form, generator, pool=5):
    choose = lambda *values: torch.tensor(values)[  # noqa: E731
        torch.randint(len(values), (batch,), generator=generator)
    ]
    target = rows(kind, (batch, drafts + 1, vocab), generator)
    temperature = choose(0.7, 1.0, 1.5, 0.05, 20.0, 0.0)
    if kind == "beyond the bins":
        temperature = temperature * 100
    draft = (target[:, :drafts].float() + torch.randn(batch, drafts, vocab) * 0.5).bfloat16()
    draft = draft.where(torch.isfinite(draft), -30.0)
    # the likeliest, another likely one, any
    likely = target[:, :drafts].float().topk(min(4, vocab), -1).indices
    kind_of = torch.rand(batch, drafts, generator=generator)
    tokens = torch.randint(vocab, (batch, drafts), generator=generator)
    tokens = likely[..., 0].where(kind_of < 0.8, likely[..., -1].where(kind_of < 0.9, tokens))
    tokens[::7, drafts - 1 :] = -1
    tokens[3::7, drafts - 1 :] = vocab
    target[1::9, drafts // 2, vocab // 2] = torch.nan
    target[2::9, drafts // 2, vocab // 2] = -torch.nan
    target[4::9, -1] = -torch.inf
    arguments = dict(
        target_logits=target,
        draft_tokens=tokens,
        rule="token",
        temperature=temperature,
        seed=torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator),
        block_start=torch.randint(0, 2**40, (batch,), generator=generator),
        draft_logits=draft,
        top_k=choose(0, 1, 2, 5, 50, 400, 513, 3 * vocab // 4, vocab).int(),
        top_p=choose(1.0, 0.95, 0.95, 0.5, 0.999, 1e-6, 0.0),
        min_p=choose(0.0, 0.0, 0.01, 0.3, 1.0),
    )
    arguments = with_q(arguments, form, min(pool, vocab), generator)
    if form == "pool":
        arguments["draft_ids"] = arguments["draft_ids"].contiguous()
    if form == "dense":
        # 0 is no law; at the smallest all weight is on the greatest
        arguments["draft_temperature"] = choose(0.0, 0.5, 0.7, 1.0, 1.3, 30.0, 1e-7)
        draft[5::9, 0, vocab // 3] = torch.nan
        draft[6::9, -1, vocab // 3] = torch.inf
        draft[7::9, drafts // 2] = -torch.inf
    return arguments


@pytest.mark.parametrize(
    "rule, form",
    [("token", f) for f in ("none", "pool", "scalar", "dense")]
    + [("block", "pool"), ("block", "dense")],
)
@pytest.mark.parametrize("kind", KINDS)
def test_cuts_by_value(kind, rule, form):
    generator = torch.Generator().manual_seed(20261130)
    # 1440 rows: five in turn for a block that goes through several
    for shape in [(120, 3, 9), (180, 7, 1000), (30, 1, 5003), (1, 3, 40_000), (2, 9, 20_001)]:
        for order in FILTER_ORDERS:
            for logprobs in (False, True):
                arguments = arguments_of(kind, *shape, form, generator)
                arguments |= {"filter_order": order, "logprobs": logprobs, "rule": rule}
                kernel = verify_chain(**to(arguments, "cuda"))
                try:
                    assert_same(kernel, verify_chain(**arguments))
                except AssertionError as error:
                    raise AssertionError(f"{shape}, {order}, logprobs {logprobs}") from error


@pytest.mark.parametrize("ranks", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_turn(kind, ranks):
    """More rows than the device has room for: long ones, pools of more than 128 ids, requests that
    are ragged or not active, nothing drafted; with a top-k and without."""
    generator = torch.Generator().manual_seed(20261203)
    # one of them of so few requests that none is drawn for before all rows are read
    shapes = [(280, 3, 40, 5), (12, 31, 40, 5), (34, 8, 5001, 200), (280, 1, 6152, 5)]
    for batch, drafts, vocab, pool in shapes:
        arguments = arguments_of(kind, batch, drafts, vocab, "pool", generator, pool)
        arguments["logprobs"] = False  # otherwise a block takes one row
        if not ranks:
            arguments["top_k"] = None
        target = arguments["target_logits"]
        rows = torch.randint(drafts + 2, (batch,), generator=generator)
        ends = rows.cumsum(0).int()
        without_q = {"draft_logits": None, "draft_ids": None, "draft_temperature": None}
        calls = [{}]
        if vocab == 40:
            calls += [
                {"num_active": torch.tensor([batch - 3]).int(), "filter_order": "vllm"},
                {"num_active": torch.tensor([1]).int()},
                {
                    "target_logits": torch.cat([target[b, :count] for b, count in enumerate(rows)]),
                    "cu_rows": torch.cat([torch.zeros(1).int(), ends]),
                },
                {"rule": "match"} | without_q,
                {"filter_order": "joint"} | without_q,
            ]
        if drafts == 1:
            nothing = {"draft_tokens": arguments["draft_tokens"][:, :0]}
            calls = [nothing | {"target_logits": target[:, :1]} | without_q]
        workspace = verify_chain_workspace(batch, drafts, vocab, device="cuda")
        for call in calls:
            try:
                assert_same_in(workspace, arguments | call)
            except AssertionError as error:
                raise AssertionError(f"{(batch, drafts, vocab)}, {list(call)}") from error


def test_rows_in_turn_in_a_graph():
    """Calls one behind the other, each of which finds the workspace as the one in front left it."""
    generator = torch.Generator().manual_seed(20261204)
    arguments = arguments_of("normal", 40, 15, 9001, "pool", generator)
    arguments |= {"top_k": None, "logprobs": False}
    expected = verify_chain(**arguments)
    arguments = to(arguments, "cuda")
    workspace = verify_chain_workspace(40, 15, 9001, device="cuda")
    results = [verify_chain(**arguments, workspace=workspace)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results += [verify_chain(**arguments, workspace=workspace) for _ in range(8)]
    for _ in range(50):
        for result in results[1:]:
            result.tokens.fill_(-7)
        graph.replay()
        for result in results:
            assert_same(result, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["match", "gumbel"])
def test_draws_of_every_row(rule, kind):
    """The drafts are what the rows' races draw, up to a slot of each request's own."""
    generator = torch.Generator().manual_seed(20261202)
    for shape in [(240, 3, 9), (60, 7, 1000), (6, 5, 5003), (1, 3, 40_000), (2, 9, 20_001)]:
        for order in FILTER_ORDERS:
            form = "pool" if rule == "gumbel" else "none"
            arguments = arguments_of(kind, *shape, form, generator)
            arguments |= {"filter_order": order, "rule": rule}
            drafts = arguments["draft_tokens"]
            stops = torch.randint(shape[1] + 1, (shape[0],), generator=generator)
            for i in range(shape[1]):
                drawn = verify_chain(**arguments).tokens[:, i]
                drafts[:, i] = drawn.where((i < stops) & (drawn >= 0), drafts[:, i])
            for logprobs in (False, True):
                arguments["logprobs"] = logprobs
                kernel = verify_chain(**to(arguments, "cuda"))
                try:
                    assert_same(kernel, verify_chain(**arguments))
                except AssertionError as error:
                    raise AssertionError(f"{shape}, {order}, logprobs {logprobs}") from error


@pytest.mark.parametrize(
    "rule, form",
    [
        ("token", "none"),
        ("token", "dense"),
        ("match", "none"),
        ("block", "pool"),
        ("block", "dense"),
    ],
)
def test_cuts_of_real_vocabularies(rule, form):
    """Clusters of 8, 4, 2 and 1 blocks a row, and blocks that take several; a request's rows are
    read from rows out of line."""
    generator = torch.Generator().manual_seed(20261131)
    for batch, drafts, vocab in [
        (1, 15, 151_936),
        (2, 15, 32_001),
        (5, 11, 151_936),
        (9, 15, 8000),
        (36, 15, 8000),
    ]:
        for kind in ("normal", "peaked"):
            arguments = arguments_of(kind, batch, drafts, vocab, form, generator)
            arguments["temperature"] = torch.full((batch,), 0.7)
            arguments["top_p"] = torch.full((batch,), 0.95)
            arguments["min_p"] = None
            arguments["top_k"] = torch.where(torch.arange(batch) % 2 == 0, 0, 50).int()
            arguments["logprobs"] = kind == "peaked"
            arguments["rule"] = rule
            kernel = verify_chain(**to(arguments, "cuda"))
            assert_same(kernel, verify_chain(**arguments))


@pytest.mark.parametrize("batch", [6, 140])
def test_coins_at_the_edge_of_a_dense_law(batch):
    """Draft temperatures at which u q(x) is p(x) up to rounding, and next to them: what is known of
    q's sum while its row is read does not decide. With 280 rows blocks take several each."""
    generator = torch.Generator().manual_seed(20261203)
    vocab = 1500
    arguments = arguments_of("normal", batch, 1, vocab, "dense", generator)
    target, draft = (rows("normal", (batch, n, vocab), generator) for n in (2, 1))
    likely = target[:, 0].float().topk(5, -1).indices
    draft[torch.arange(batch), 0, likely[:, 4]] = 9.0  # q falls as the temperature rises
    arguments |= dict(
        target_logits=target,
        draft_logits=draft,
        draft_tokens=likely[:, 4:],
        temperature=torch.full((batch,), 1.0),
        top_k=torch.where(torch.arange(batch) % 2 == 0, 0, 50).int(),
        top_p=torch.full((batch,), 0.95),
        min_p=None,
    )

    def accepts(told):
        return verify_chain(**arguments | {"draft_temperature": told}).num_accepted == 1

    low, high = torch.full((batch,), 0.4), torch.full((batch,), 20.0)
    assert (~accepts(low) & accepts(high)).sum() >= batch // 3
    while True:
        middle = (low + high) / 2
        if not ((middle > low) & (middle < high)).any():
            break
        yes = accepts(middle)
        low, high = low.where(yes, middle), high.where(~yes, middle)
    for step in (0.0, 2.0**-23, 2.0**-20, 2.0**-17, 2.0**-14):
        for at in (low * (1 - step), high * (1 + step)):
            told = arguments | {"draft_temperature": at}
            assert_same(verify_chain(**to(told, "cuda")), verify_chain(**told))


@pytest.mark.parametrize("rule, form", RULES)
@pytest.mark.parametrize("kind", [*KINDS, "close together"])
def test_top_k_of_a_few_rows(kind, rule, form):
    """One launch: by a list of the likeliest tokens or, where that is not enough, by value."""
    generator = torch.Generator().manual_seed(20261203)
    workspace = verify_chain_workspace(16, 3, 151_936, device="cuda")
    for shape, pool in FEW:
        if shape[1] == 0 and form != "none":
            continue
        arguments = arguments_of(kind, *shape, form, generator, pool)
        usual = torch.rand(shape[0], generator=generator)
        top_k = arguments["top_k"].where(usual < 0.2, 50).where(usual < 0.9, 128)
        arguments["top_k"] = top_k.where(usual < 0.95, 129).int()
        for order in FILTER_ORDERS:
            arguments |= {"filter_order": order, "logprobs": False, "rule": rule}
            arguments["seed"] = arguments["seed"] + 1
            try:
                assert_same_in(workspace, arguments)
            except AssertionError as error:
                raise AssertionError(f"{shape}, {order}") from error


def test_top_k_of_a_few_rows_in_a_graph(graph_replay):
    """Replays whose requests go by the list, by value and without filters in turn."""
    generator = torch.Generator().manual_seed(20261205)
    batch, drafts, vocab = 4, 3, 32_768

    def draw():
        arguments = arguments_of("normal", batch, drafts, vocab, "none", generator)
        choices = torch.tensor([0, 1, 50, 50, 50, 300])
        top_k = choices[torch.randint(6, (batch,), generator=generator)]
        return arguments | dict(top_k=top_k.int(), logprobs=False)

    assert_replays_same(draw, (batch, drafts, vocab), graph_replay)


def test_top_k_of_a_ragged_batch():
    generator = torch.Generator().manual_seed(20261204)
    batch, drafts, vocab = 4, 3, 40_000
    logits = rows("normal", (11, vocab), generator)
    for bounds in [(0, 3, 3, 7, 11), (0, 4, 9, 11, 10), (2, 4, 7, 8, 12)]:
        first = torch.tensor(bounds[:-1])[:, None]
        own = (first + torch.arange(drafts)).clamp(max=10)
        arguments = dict(
            target_logits=logits,
            draft_tokens=logits.float().argmax(-1)[own],
            cu_rows=torch.tensor(bounds, dtype=torch.int32),
            rule="token",
            temperature=torch.full((batch,), 0.3),
            seed=torch.arange(batch),
            block_start=torch.arange(batch) * 100,
            top_k=torch.full((batch,), 50, dtype=torch.int32),
            logprobs=False,
        )
        for active in (None, 0, 2):
            if active is not None:
                arguments["num_active"] = torch.tensor([active], dtype=torch.int32)
            kernel = verify_chain(**to(arguments, "cuda"))
            assert_same(kernel, verify_chain(**arguments))


def test_races_closer_than_what_is_known_of_a_dense_law():
    """p is q but for what the filter removes: relu(p - q) is 1e-3 of q and less, down to nothing.
    With q known to 2e-5 it stays open which token replaces a removed draft."""
    generator = torch.Generator().manual_seed(20261207)
    batch, drafts, vocab, kept = 140, 2, 2000, 50
    depth = torch.linspace(11, 20, batch)[:, None, None]
    target = torch.randn(batch, drafts + 1, vocab, generator=generator) - depth
    target[..., :kept] += depth
    target = target.to(torch.bfloat16)
    arguments = dict(
        target_logits=target,
        draft_tokens=torch.randint(kept, vocab, (batch, drafts), generator=generator),
        rule="token",
        temperature=torch.ones(batch),
        draft_temperature=torch.ones(batch),
        draft_logits=target[:, :drafts].contiguous(),
        seed=torch.arange(batch),
        block_start=torch.arange(batch) * 7,
        top_k=torch.full((batch,), kept, dtype=torch.int32),
        logprobs=False,
    )
    expected = verify_chain(**arguments)
    assert (expected.num_accepted == 0).all() and (expected.tokens[:, 0] < kept).all()
    assert_same(verify_chain(**to(arguments, "cuda")), expected)


@pytest.mark.parametrize(
    "rule, form",
    [("token", f) for f in ("none", "pool", "scalar", "dense")]
    + [("match", "none"), ("block", "pool"), ("block", "dense")],
)
def test_rows_behind_the_end_of_a_chain(rule, form):
    """Blocks that take rows in turn leave out what lies behind a rejected draft."""
    generator = torch.Generator().manual_seed(20261206)
    batch, drafts, vocab = 130, 15, 1100
    dense = form == "dense"
    workspace = verify_chain_workspace(batch, drafts, vocab, dense=dense, device="cuda")
    for call in range(6):
        arguments = arguments_of("normal", batch, drafts, vocab, form, generator)
        likely = arguments["target_logits"][:, :drafts].float().argmax(-1)
        stops = torch.randint(drafts + 1, (batch, 1), generator=generator)
        accepted = torch.arange(drafts) < stops
        arguments["draft_tokens"] = likely.where(accepted, arguments["draft_tokens"])
        arguments["temperature"] = arguments["temperature"].clamp(max=0.3)
        top_k = torch.full_like(arguments["top_k"], 50)
        arguments["top_k"] = (0 * top_k, top_k, None)[call % 3]
        arguments |= {"logprobs": False, "rule": rule}
        assert_same_in(workspace, arguments)


@pytest.mark.parametrize("form", ["none", "pool", "dense"])
def test_rows_left_unread_once_their_chain_has_ended(form):
    """Rows of several chunks a warp, of slots that are read while one in front is rejected."""
    generator = torch.Generator().manual_seed(20261207)
    batch, drafts, vocab = 24, 15, 50_000
    workspace = verify_chain_workspace(batch, drafts, vocab, dense=form == "dense", device="cuda")
    for stop in (0, 4, 9):
        arguments = arguments_of("normal", batch, drafts, vocab, form, generator)
        likely = arguments["target_logits"][:, :drafts].float().argmax(-1)
        accepted = torch.arange(drafts) < stop
        arguments["draft_tokens"] = likely.where(accepted, arguments["draft_tokens"])
        arguments |= {"top_k": None, "logprobs": False}
        assert_same_in(workspace, arguments)


def test_weights_apart_among_values_near_zero():
    """Temperatures at which the bins around 0 hold most of a row, or all of it."""
    generator = torch.Generator().manual_seed(20261201)
    for shape in [(60, 3, 40), (20, 7, 1000), (1, 3, 9000)]:
        for order in FILTER_ORDERS:
            arguments = arguments_of("near zero", *shape, "none", generator)
            temperature = 10.0 ** -torch.randint(6, 13, (shape[0],), generator=generator)
            arguments |= {"filter_order": order, "temperature": temperature}
            kernel = verify_chain(**to(arguments, "cuda"))
            assert_same(kernel, verify_chain(**arguments))


def test_min_p_that_cuts_below_the_bins_around_zero():
    """-2^-23 is kept, and the next bf16 below it is not: with 0 stay the values in between."""
    runs, vocab = 256, 300
    values = torch.tensor([0.0, -(2.0**-24), -(2.0**-23), -(2.0**-23) * (1 + 2.0**-7)])
    row = values[torch.arange(vocab) % 4].bfloat16()
    arguments = dict(
        target_logits=row.expand(runs, 2, vocab),
        draft_tokens=(torch.arange(runs)[:, None] % vocab),
        rule="token",
        temperature=torch.full((runs,), 2e-7),
        seed=torch.arange(runs),
        block_start=torch.zeros(runs, dtype=torch.int64),
        min_p=torch.full((runs,), 0.5498),
        logprobs=False,
    )
    expected = verify_chain(**arguments)
    assert set((expected.tokens[:, 0] % 4).tolist()) == {0, 1, 2}
    assert_same(verify_chain(**to(arguments, "cuda")), expected)


@pytest.mark.parametrize("batch", [1, 8, 140])
def test_min_p_of_a_law_that_is_all_on_its_top(batch):
    """At a temperature of 1e-6 no exponent but the top's is finite: what equals the top stays."""
    generator = torch.Generator().manual_seed(20261203)
    rows = torch.randn(batch, 3, 40_000, generator=generator).mul(3).bfloat16()
    arguments = dict(
        target_logits=rows,
        draft_tokens=rows[:, :2].float().argmax(-1),
        rule="token",
        temperature=torch.full((batch,), 1e-6),
        seed=torch.arange(batch),
        block_start=torch.zeros(batch, dtype=torch.int64),
        min_p=torch.full((batch,), 0.1),
        logprobs=False,
    )
    expected = verify_chain(**arguments)
    assert (expected.tokens[:, 0] >= 0).all() and (expected.status == 0).all()
    assert_same(verify_chain(**to(arguments, "cuda")), expected)


def test_clusters_of_blocks_without_tokens():
    """Rows shorter than a cluster has chunks for: most of its blocks are done at once."""
    generator = torch.Generator().manual_seed(20261202)
    for vocab in (1, 7, 1023, 1025, 5000):
        for _ in range(50):
            arguments = arguments_of("normal", 1, 3, vocab, "none", generator)
            kernel = verify_chain(**to(arguments, "cuda"))
            assert_same(kernel, verify_chain(**arguments))
