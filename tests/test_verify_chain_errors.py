"""verify_chain on wrong or degenerate input: an error, or a status and a defined output."""

import pytest
import torch
from chain_cases import guarded_result, to, token_arguments

from domino_kernels import VerifyResult, VerifyRule, VerifyStatus, verify_chain
from domino_kernels.ops.verify import _empty_result

INF, NAN = float("inf"), float("nan")


# One request of V = 4, K = 2, all in slot order: what goes wrong, and what must come out.
# change(arguments) edits a request that accepts drafts 1, 2 and ends with 3.
def set_target(row, values):
    return lambda a: a["target_logits"][0, row].copy_(torch.tensor(values))


def set_draft(row, values):
    return lambda a: a["draft_logits"][0, row].copy_(torch.tensor(values))


def set_id(slot, value):
    return lambda a: a["draft_tokens"][0, slot].fill_(value)


def set_value(name, value):
    return lambda a: a[name].fill_(value)


S = VerifyStatus
NAN_ROW, INF_ROW, EMPTY = [0.0, NAN, 0.0, 0.0], [0.0, INF, 0.0, 0.0], [-INF] * 4
DEGENERATE = {
    # name: (change, greedy too, tokens, status)
    "untouched": (lambda a: None, True, [1, 2, 3], 0),
    "nan row 0": (set_target(0, NAN_ROW), True, [-1, -1, -1], S.NON_FINITE),
    "nan row 1": (set_target(1, NAN_ROW), True, [1, -1, -1], S.NON_FINITE),
    "nan row 2": (set_target(2, [NAN] * 4), True, [1, 2, -1], S.NON_FINITE),
    "+inf row 1": (set_target(1, INF_ROW), True, [1, -1, -1], S.NON_FINITE),
    "empty row 0": (set_target(0, EMPTY), True, [-1, -1, -1], S.EMPTY_ROW),
    "empty row 2": (set_target(2, EMPTY), True, [1, 2, -1], S.EMPTY_ROW),
    "pad 0": (set_id(0, -1), True, [1, -1, -1], 0),
    "pad 1": (set_id(1, -1), True, [1, 2, -1], 0),
    "id == V": (set_id(1, 4), True, [1, 2, -1], S.BAD_ID),
    "id huge": (set_id(0, 2**62), True, [1, -1, -1], S.BAD_ID),
    "id < -1": (set_id(0, -(2**63)), True, [1, -1, -1], S.BAD_ID),
    "nan draft row": (set_draft(0, [NAN] * 4), False, [1, 2, 3], S.BAD_DRAFT_LAW),
    "+inf draft row": (set_draft(1, INF_ROW), False, [1, 2, 3], S.BAD_DRAFT_LAW),
    "empty draft row": (set_draft(1, EMPTY), False, [1, 2, 3], S.BAD_DRAFT_LAW),
    "q(x) = 0": (set_draft(0, [0.0, -INF, 0.0, 0.0]), False, [1, 2, 3], S.BAD_DRAFT_LAW),
    "temperature nan": (set_value("temperature", NAN), False, [-1, -1, -1], S.BAD_PARAMETER),
    "temperature < 0": (set_value("temperature", -1.0), False, [-1, -1, -1], S.BAD_PARAMETER),
    "temperature inf": (set_value("temperature", INF), False, [-1, -1, -1], S.BAD_PARAMETER),
    "T_d nan": (set_value("draft_temperature", NAN), False, [-1, -1, -1], S.BAD_PARAMETER),
    "T_d < 0": (set_value("draft_temperature", -0.5), False, [-1, -1, -1], S.BAD_PARAMETER),
    "T tiny": (set_value("temperature", 1e-45), False, [1, 2, 3], 0),
}


@pytest.mark.parametrize("rule", ["greedy", "token"])
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_input(name, rule, device):
    change, greedy_too, tokens, status = DEGENERATE[name]
    if rule == "greedy" and not greedy_too:
        pytest.skip("an argument of the token rule")
    logits = torch.full((3, 3, 4), -INF)
    logits[:, [0, 1, 2], [1, 2, 3]] = 0.0  # certain, so that no coin decides
    arguments = dict(
        target_logits=logits,
        draft_tokens=torch.tensor([[1, 2]] * 3),
        temperature=torch.ones(3),
        seed=torch.arange(3),
        block_start=torch.arange(3),
        draft_logits=logits[:, :2].clone(),
        draft_temperature=torch.ones(3),
    )
    # the request in question sits between healthy ones
    request = {k: v[:1].clone() for k, v in arguments.items()}
    change(request)
    for k, v in request.items():
        arguments[k][1:2] = v
    if rule == "greedy":
        arguments = {k: arguments[k] for k in ("target_logits", "draft_tokens")}
    guards, out = guarded_result(3, 2, device)
    verify_chain(**to(arguments, device), rule=rule, out=out)
    result = VerifyResult(*(guard.check() for guard in guards))
    emitted = sum(t >= 0 for t in tokens)
    failed = bool(status & S.FAILED)
    assert result.tokens.tolist() == [[1, 2, 3], tokens, [1, 2, 3]]
    assert result.status.tolist() == [0, int(status), 0]
    assert result.num_emitted.tolist() == [3, emitted, 3]
    assert result.num_accepted.tolist() == [2, emitted if failed else emitted - 1, 2]
    assert (result.chosen_logprob == 0).all()  # certain tokens, or nothing


def test_pads_are_never_counted(device):
    """flashinfer#879, vllm#46533: -1 drafts were accepted, and more tokens emitted than exist."""
    target = torch.full((1, 6, 4), -INF, device=device)
    target[0, range(6), [1, 0, 1, 2, 3, 3]] = 0.0
    one = torch.ones(1, device=device)
    for rule in (
        dict(),
        dict(rule="token", temperature=one, seed=one.long(), block_start=one.long()),
    ):
        drafts = torch.tensor([[1, 0, 1, -1, -1]], device=device)
        result = verify_chain(target, drafts, **rule)
        assert result.tokens.tolist() == [[1, 0, 1, 2, -1, -1]]
        assert result.num_accepted.tolist() == [3] and result.num_emitted.tolist() == [4]
        drafts[:] = torch.tensor([[3, -1, -1, -1, -1]])
        assert verify_chain(target, drafts, **rule).tokens.tolist() == [[1, -1, -1, -1, -1, -1]]


def test_rows_behind_the_walk_set_no_status(device):
    """A NaN row that a rejection keeps out of reach is no fault of this call."""
    target = torch.zeros(1, 3, 4, device=device)
    target[0, 0, 2] = 5.0
    target[0, 1:] = NAN
    result = verify_chain(target, torch.tensor([[0, 0]], device=device))
    assert result.tokens.tolist() == [[2, -1, -1]] and result.status.tolist() == [0]


@pytest.mark.parametrize(
    "cu_rows, status",
    [
        ([0, 3, 6], [0, 0]),
        ([0, 3, 7], [0, 64]),  # more rows than drafts + 1
        ([0, 3, 2], [0, 64]),  # falling
        ([-1, 2, 5], [64, 0]),
        ([4, 6, 8], [0, 64]),  # past the last row
        ([2**31 - 2, 2**31 - 1, 2**31 - 1], [64, 0]),
        ([5, 5, 5], [0, 0]),  # inactive
    ],
)
def test_cu_rows_that_make_no_sense(cu_rows, status, device):
    result = verify_chain(
        torch.zeros(7, 5, device=device),
        torch.zeros(2, 2, dtype=torch.int64, device=device),
        cu_rows=torch.tensor(cu_rows, dtype=torch.int32, device=device),
    )
    assert result.status.tolist() == status
    for b in (0, 1):
        if status[b]:
            assert result.num_emitted[b] == 0 and (result.tokens[b] == -1).all()


NONE = dict(
    temperature=None, seed=None, block_start=None, draft_logits=None, draft_temperature=None
)
BAD = [
    (dict(target_logits=torch.zeros(2, 5)), ValueError, r"target_logits: got shape \[2, 5\]"),
    (
        dict(target_logits=torch.zeros(2, 3, 5)),
        ValueError,
        r"got shape \[2, 3, 5\], expected \[2, 4",
    ),
    (dict(target_logits=torch.zeros(2, 4, 5).long()), TypeError, "target_logits: got torch.int64"),
    (
        dict(target_logits=torch.zeros(2, 5, 4).mT),
        ValueError,
        r"target_logits: got strides \(20",
    ),
    (
        dict(target_logits=torch.zeros(2, 4, 0)),
        ValueError,
        "target_logits: got V = 0, expected 1",
    ),
    (dict(target_logits=torch.zeros(2, 4, 5).requires_grad_()), ValueError, "that requires grad"),
    (dict(draft_tokens=torch.zeros(2, 3).int()), TypeError, "draft_tokens: got torch.int32"),
    (
        dict(draft_tokens=torch.zeros(6).long()),
        ValueError,
        r"draft_tokens: got shape \[6\], exp",
    ),
    (dict(draft_tokens=torch.zeros(3, 2).long().T), ValueError, "draft_tokens: got strides"),
    (dict(draft_tokens=torch.zeros(2, 3, device="meta").long()), ValueError, "a tensor on meta"),
    (dict(temperature=None), TypeError, "temperature: got NoneType, expected a tensor"),
    (dict(temperature=0.7), TypeError, "temperature: got float, expected a tensor"),
    (
        dict(temperature=torch.ones(2).double()),
        TypeError,
        "temperature: got torch.float64",
    ),
    (dict(seed=None), TypeError, "seed: got NoneType, expected a tensor"),
    (dict(seed=torch.zeros(3).long()), ValueError, r"seed: got shape \[3\], expected \[2\]"),
    (dict(block_start=torch.zeros(2).int()), TypeError, "block_start: got torch.int32, expected"),
    (
        dict(draft_logits=torch.zeros(2, 3, 6)),
        ValueError,
        r"draft_logits: got shape \[2, 3, 6\]",
    ),
    (
        dict(draft_logits=torch.zeros(2, 3, 5).int()),
        TypeError,
        "draft_logits: got torch.int32",
    ),
    (dict(draft_logits=torch.zeros(2, 5, 3).mT), ValueError, "draft_logits: got strides"),
    (dict(draft_logits=None), ValueError, "draft_temperature: got a tensor, expected draft"),
    (dict(draft_temperature=torch.ones(1)), ValueError, r"draft_temperature: got shape \[1\]"),
    (
        dict(cu_rows=torch.zeros(3).int()),
        ValueError,
        r"target_logits: got shape \[2, 4, 5\]",
    ),
    (
        dict(cu_rows=torch.zeros(2).int(), target_logits=torch.zeros(8, 5)),
        ValueError,
        r"cu_rows: got shape \[2\], expected \[3\]",
    ),
    (
        dict(rule="typical"),
        ValueError,
        "rule: got 'typical', expected one of greedy, token, onehot",
    ),
    (dict(rule="greedy"), ValueError, "temperature: got a value, expected None with rule='greedy'"),
    (NONE | dict(rule="greedy", seed=torch.zeros(2)), ValueError, "seed: got a value, expected No"),
    (dict(out=torch.zeros(2)), TypeError, "out: got Tensor, expected a VerifyResult"),
    (
        dict(out=_empty_result(2, 2, "cpu")),
        ValueError,
        r"out.tokens: got shape \[2, 3\], expected \[2, 4\]",
    ),
]


@pytest.mark.parametrize("change, error, message", BAD, ids=[b[2][:40] for b in BAD])
def test_bad_arguments(change, error, message):
    with pytest.raises(error, match=f"verify_chain: .*{message}"):
        verify_chain(**token_arguments() | change)


def test_block_rule_without_rows_of_q(device):
    """A tensor of rules cannot be refused ahead: block with draft_logprob has a status."""
    arguments = dict(
        target_logits=torch.zeros(3, 2, 5),
        draft_tokens=torch.zeros(3, 1, dtype=torch.int64),
        rule=torch.tensor([VerifyRule.BLOCK, VerifyRule.MATCH, VerifyRule.BLOCK]).byte(),
        temperature=torch.tensor([1.0, 1.0, 0.0]),  # the last one is greedy
        seed=torch.arange(3),
        block_start=torch.arange(3),
        draft_logprob=torch.zeros(3, 1),
    )
    result = verify_chain(**to(arguments, device))
    assert result.status.tolist() == [S.BAD_PARAMETER, 0, 0]
    assert result.num_emitted.tolist()[::2] == [0, 2]
    assert result.tokens[0].tolist() == [-1, -1] and result.tokens[2].tolist() == [0, 0]


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(rule=["token"]), r"rule: got \['token'\]"),
        (dict(vocab_valid=2.5), "vocab_valid: got 2.5, expected 1 to V = 5"),
        (dict(top_logprobs="2"), "top_logprobs: got '2', expected 0 to 128"),
        (dict(keying="both"), "keying: got 'both'"),
        (dict(workspace="x"), "workspace: got str"),
    ],
    ids=lambda value: "",
)
def test_values_of_another_type(change, message):
    with pytest.raises((TypeError, ValueError), match="^verify_chain: " + message):
        verify_chain(torch.zeros(1, 1, 5), torch.zeros(1, 0, dtype=torch.int64), **change)
