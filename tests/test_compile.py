"""The public functions under torch.compile: one graph, no break, the same bits as eager.

And where else Torch has to see an op that an eager call takes past its dispatcher.
"""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import domino_kernels
from domino_kernels import _C, HeadWeights
from domino_kernels.ops.chain_plan import chain_workspace_bytes
from domino_kernels.ops.verify import _workspace_words


def weights(device="cpu", units=4, rank=6):
    sizes = (3 * units, 8), (3 * units, units), (rank, 8 + units), (11, rank), (11, 8)
    return HeadWeights(*(torch.randn(size).to(device) for size in sizes))


def gru_step(device):
    tensors = torch.randn(2, 8), torch.randn(2, 4), torch.randn(12, 8), torch.randn(12, 4)
    return domino_kernels.gru_step, tensors


def draft_chain(device):
    head = weights(device)
    call = lambda *inputs: domino_kernels.draft_chain(*inputs, head, num_drafts=3)  # noqa: E731
    return call, (torch.randn(2, 4, 11), torch.randn(2, 4, 8), torch.tensor([1, 2]))


def verify_chain(device):
    def call(logits, drafts, temperature, number):
        greedy = domino_kernels.verify_chain(logits, drafts).tokens
        drawn = domino_kernels.verify_chain(
            logits, drafts, rule="token", temperature=temperature, seed=number, block_start=number
        )
        return torch.cat([greedy, drawn.tokens])

    drafts = torch.randint(11, (2, 3))
    return call, (torch.randn(2, 4, 11), drafts, torch.ones(2), torch.tensor([5, 6]))


def verify_tree(device):
    def call(logits, tokens, parents, temperature, number):
        greedy = domino_kernels.verify_tree(logits, tokens, parents).tokens
        sampling = dict(temperature=temperature, seed=number, block_start=number)
        drawn = domino_kernels.verify_tree(
            logits, tokens, parents, rule="target_only", top_p=temperature, **sampling
        )
        return torch.cat([greedy, drawn.tokens])

    parents = torch.tensor([[-1, 0, 0, 1]] * 2, dtype=torch.int32)
    tokens = torch.randint(11, (2, 4))
    return call, (torch.randn(2, 4, 11), tokens, parents, torch.ones(2), torch.tensor([5, 6]))


def draft_tree(device):
    head = weights(device)

    def call(base, hidden, anchor):
        pool = domino_kernels.shortlist(base, 7)
        shape = dict(widths=(1, 2), children=2)
        tree = domino_kernels.draft_tree(base, hidden, anchor, head, pool=pool, **shape)
        built = domino_kernels.build_tree(
            anchor, tree.tokens, tree.parents, prefix=anchor, num_nodes=4, scores=tree.log_probs
        )
        return built.tokens

    return call, (torch.randn(2, 4, 11), torch.randn(2, 4, 8), torch.tensor([1, 2]))


def row_stats(device):
    return lambda logits: domino_kernels.row_stats(logits)[0], (torch.randn(3, 11),)


CASES = [gru_step, draft_chain, verify_chain, verify_tree, draft_tree, row_stats]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_compiles_without_a_break(case, backend, device):
    torch.manual_seed(7)
    call, inputs = case(device)
    inputs = [tensor.to(device) for tensor in inputs]
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    with torch.no_grad():
        assert torch.equal(compiled(*inputs), call(*inputs))


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **kwargs or {})


@torch.no_grad()
def test_torch_sees_the_op_where_it_looks():
    call, inputs = verify_chain("cpu")
    expected, name = call(*inputs), "domino_kernels::verify_chain"
    with torch.profiler.profile() as profile:
        assert torch.equal(call(*inputs), expected)
    assert sum(event.name == name for event in profile.events()) == 2
    with Seen() as seen:
        assert torch.equal(call(*inputs), expected)
    assert seen.names.count("domino_kernels.verify_chain.default") == 2
    traced = make_fx(call)(*inputs)
    assert "domino_kernels.verify_chain.default" in traced.code
    assert torch.equal(traced(*inputs), expected)
    assert call(*(tensor.to("meta") for tensor in inputs)).shape == expected.shape
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert call(*inputs).shape == expected.shape


def test_an_op_maps_over_nothing():
    """vmap has no rule for an op that writes its arguments: an error, not wrong addresses."""
    call, inputs = gru_step("cpu")
    with torch.no_grad(), pytest.raises(RuntimeError):
        torch.vmap(call, (0, 0, None, None))(*(t[None] for t in inputs[:2]), *inputs[2:])


def test_workspace_size_is_that_of_draft_chain():
    for batch, drafts, units, rank in [(1, 1, 1, 1), (3, 15, 256, 96), (64, 16, 1024, 256)]:
        head = weights("meta", units, rank)
        for prefix, pool_size, pools in [(0, 1, 1), (2, 11, 1), (0, 9, drafts)]:
            sizes = dict(
                batch=batch, drafts=drafts, prefix=prefix, vocab=11, units=units, rank=rank
            )
            needed = _C.draft_chain_workspace(**sizes, pool_size=pool_size, pools=pools)
            size = chain_workspace_bytes(batch, drafts, pool_size, pools, head)
            assert size >= needed if prefix else size == needed


@pytest.mark.parametrize("dense", [False, True])
def test_workspace_size_is_that_of_verify_chain(dense):
    for batch, drafts, vocab in [(0, 3, 7), (1, 0, 1), (3, 15, 1024), (64, 16, 151936)]:
        sizes = dict(batch=batch, drafts=drafts, vocab=vocab, dense=dense)
        assert _workspace_words(*sizes.values()) * 8 == _C.verify_chain_workspace(**sizes)
