"""verify_chain(rule="greedy", logprobs=False): its own kernel, one launch, words that reset."""

import pytest
import torch
from chain_cases import to

from domino_kernels import VerifyStatus, verify_chain
from domino_kernels.ops.verify import _CONTROL_WORDS, _empty_result, verify_chain_workspace

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
INF, NAN = float("inf"), float("nan")


def make(batch, drafts, vocab, generator, dtype=torch.bfloat16):
    """Drafts that are the argmax but for one slot in four; some rows that cannot be used."""
    target = torch.randn(batch, drafts + 1, vocab, generator=generator).to(dtype)
    best = target[:, :drafts].float().argmax(-1)
    other = torch.randint(-2, vocab + 2, best.shape, generator=generator)
    keep = torch.rand(best.shape, generator=generator) < 0.75
    target.view(-1, vocab)[3::37, 0] = NAN
    target.view(-1, vocab)[5::41, vocab // 2] = INF
    target.view(-1, vocab)[7::43] = -INF
    return dict(target_logits=target, draft_tokens=best.where(keep, other))


def check(arguments, **more):
    """Against the twin, which finds the same by another way."""
    result = verify_chain(**to(arguments, "cuda"), logprobs=False, **to(more, "cuda"))
    expected = verify_chain(**arguments, logprobs=False, **more)
    for name, a, b in zip(result._fields, result, expected):
        assert (a is b is None) or torch.equal(a.cpu(), b), name
    return result


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    # one word; no draft; tails of groups; rows that are not aligned; more rows than a block has
    # warps; more parts than a block can fill; more requests than a launch takes
    [(3, 2, 1), (5, 0, 9), (40, 5, 1024), (7, 3, 1031), (2, 40, 4099), (1, 15, 151936),
     (1, 3, 32000), (2100, 3, 24), (9, 130, 40)],
    ids=str,
)  # fmt: skip
def test_same_as_the_twin(shape, dtype, generator):
    arguments = make(*shape, generator, dtype)
    result = check(arguments)
    statuses = VerifyStatus.NON_FINITE | VerifyStatus.EMPTY_ROW | VerifyStatus.BAD_ID
    assert shape[0] < 40 or result.status.bitwise_and(int(statuses)).any()
    assert torch.equal(result.tokens, verify_chain(**to(arguments, "cuda")).tokens)


@pytest.mark.gpu
def test_ties_take_the_lowest_id(generator):
    """In another part of the row, another warp, another lane or the same group; -0 equals +0."""
    for vocab in (16, 4096, 151936):
        target = torch.full((6, 2, vocab), -1.0).bfloat16()
        for n, first in enumerate((0, 3, vocab // 3, vocab // 2, vocab - 9, vocab - 2)):
            target[n, :, first] = -0.0
            target[n, :, first + 1 :: max(1, vocab // 7)] = 0.0
        result = check(dict(target_logits=target, draft_tokens=target[:, :1].argmax(-1)))
        assert result.num_accepted.tolist() == [1] * 6


@pytest.mark.gpu
@pytest.mark.parametrize("batch, vocab", [(1, 32000), (3, 32000), (8, 32000), (8, 30011)])
def test_every_group_of_a_row_belongs_to_a_part(batch, vocab):
    """The greatest logit of each row in another group, over all of them."""
    target = torch.full((batch, 16, vocab), -1.0, dtype=torch.bfloat16, device="cuda")
    row = torch.arange(batch * 16, device="cuda")
    for first in range(0, vocab, 8 * len(row)):
        tokens = (first + 8 * row + row % 8).clamp(max=vocab - 1)
        target.view(-1, vocab)[row, tokens] = 1.0
        tokens = tokens.view(batch, 16)
        result = verify_chain(target, tokens[:, :15].contiguous(), logprobs=False)
        assert torch.equal(result.tokens, tokens)
        target.fill_(-1.0)


@pytest.mark.gpu
def test_ragged_inactive_edited_and_strided(generator):
    arguments = make(6, 7, 1000, generator)
    cu_rows = torch.tensor([0, 8, 8, 11, 19, 20, 26], dtype=torch.int32)
    rows = arguments["target_logits"].flatten(0, 1)
    check(arguments | dict(target_logits=rows), cu_rows=cu_rows)
    check(arguments, num_active=torch.tensor([4], dtype=torch.int32))
    check(arguments, logit_bias=torch.randn(6, 1000, generator=generator))
    check(arguments, vocab_valid=997)
    for width, first in ((1003, 1), (1016, 8)):  # rows that are aligned, and not
        wide = torch.full((6, 8, width), NAN).bfloat16()
        wide[..., first : first + 1000] = arguments["target_logits"]
        check(arguments | dict(target_logits=wide[..., first : first + 1000]))
        check(arguments | dict(target_logits=wide[..., first : first + 995]))
    one = arguments["target_logits"][:1].expand(6, 8, 1000)
    check(arguments | dict(target_logits=one))


@pytest.mark.gpu
def test_a_workspace_serves_call_after_call(generator, graph_replay):
    """Of every size that fits; calls of other rules in between may leave anything but the words."""
    workspace = verify_chain_workspace(300, 15, 1031, device="cuda")
    for batch, drafts, vocab in [(300, 15, 1031), (2, 3, 500), (1, 15, 1031), (64, 7, 257)] * 3:
        arguments = make(batch, drafts, vocab, generator)
        check(arguments, workspace=workspace)
        assert not workspace[:_CONTROL_WORDS].any()
        workspace[_CONTROL_WORDS:].random_()
    static = to(make(64, 7, 1031, generator), "cuda")
    out = _empty_result(64, 7, "cuda", logprobs=False)
    replay = graph_replay(
        lambda: verify_chain(**static, logprobs=False, out=out, workspace=workspace)
    )
    for _ in range(20):
        arguments = make(64, 7, 1031, generator)
        for name, value in arguments.items():
            static[name].copy_(value)
        for tensor in (out.tokens, out.num_accepted, out.num_emitted, out.status):
            tensor.fill_(7)
        replay()
        expected = verify_chain(**arguments, logprobs=False)
        assert all(a is b is None or torch.equal(a.cpu(), b) for a, b in zip(out, expected))
