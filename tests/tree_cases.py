"""Trees, arguments and comparisons that the tests of verify_tree share."""

import numpy as np
import torch

from domino_kernels import TreeResult
from domino_kernels.ops.verify_tree import _empty_result
from domino_kernels.reference import tree as reference
from domino_kernels.reference.law import Sampling
from domino_kernels.testing import Guarded, to_numpy

RULES = reference.RULES
SAMPLED = "rrsw", "traversal"


def random_parents(nodes, generator, *, wide=False):
    """A tree in topological order; `wide`: most nodes hang on the root."""
    draw = torch.rand(nodes, generator=generator, device="cpu").numpy()
    parents = [-1] + [int(draw[n] ** (4 if wide else 1) * n) for n in range(1, nodes)]
    return np.array(parents, np.int32)


def sample_children(q, count, generator):
    """`count` tokens of the law q [V] without replacement, in order; -1 where q has no more."""
    support = int((q > 0).sum())
    drawn = torch.full((count,), -1, dtype=torch.int64)
    if support and count:
        noise = torch.empty_like(q).exponential_(generator=generator)
        take = min(count, support)
        drawn[:take] = (q / noise).topk(take).indices
    return drawn


def make(
    batch, nodes, vocab, generator, *, rule="rrsw", pool=0, dense=False, dtype=torch.float32,
    spread=2.0, wide=False,
):  # fmt: skip
    """Arguments of a call on the CPU; every fourth request is greedy (temperature 0)."""
    drawn = dict(generator=generator)
    target = (torch.randn(batch, nodes, vocab, **drawn) * spread).to(dtype)
    noise = torch.randn(batch, nodes, vocab, **drawn) * (spread / 4)
    draft = (target.float() + noise).to(dtype)
    temperature = torch.rand(batch, **drawn) + 0.4
    temperature[::4] = 0
    parents = np.stack([random_parents(nodes, generator, wide=wide) for _ in range(batch)])
    tokens = torch.full((batch, nodes), -1, dtype=torch.int64)
    ids = logits = None
    if pool:
        ids = draft.float().topk(min(pool, vocab), dim=-1).indices.to(torch.int32)
        ids = ids.gather(-1, torch.rand(ids.shape, **drawn).argsort(-1))  # in any order
        logits = draft.gather(-1, ids.long())
        logits[:, ::2, -1] = -float("inf")  # a token of the pool without mass
    for b in range(batch):
        kids = reference.children(parents[b])
        t = float(temperature[b]) or 1.0
        for n in range(nodes):
            if not kids[n]:
                continue
            if rule in SAMPLED and temperature[b] > 0:
                q = torch.zeros(vocab)
                if pool:
                    q[ids[b, n].long()] = (logits[b, n].float() / t).softmax(-1)
                else:
                    q = (draft[b, n].float() / t).softmax(-1)
                chosen = sample_children(q, len(kids[n]), generator)
            else:
                best = target[b, n].float().topk(min(len(kids[n]), vocab)).indices
                chosen = torch.full((len(kids[n]),), -1)
                chosen[: len(best)] = best
            for c, x in zip(kids[n], chosen):
                tokens[b, c] = x
    arguments = dict(
        target_logits=target,
        tokens=tokens,
        parents=torch.from_numpy(parents),
        rule=rule,
        temperature=temperature,
        seed=torch.randint(-(2**63), 2**63 - 1, (batch,), **drawn),
        block_start=torch.randint(0, 2**40, (batch,), **drawn),
    )
    if rule in SAMPLED:
        arguments |= dict(draft_pool=(ids, logits)) if pool else dict(draft_logits=draft)
    return arguments


def to(arguments, device):
    def move(value):
        if isinstance(value, tuple):
            return tuple(v.to(device) for v in value)
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return {name: move(value) for name, value in arguments.items()}


def expected_of(arguments):
    def move(value):
        if isinstance(value, tuple):
            return tuple(move(v) for v in value)
        if not isinstance(value, torch.Tensor):
            return value
        return value.double().numpy() if value.is_floating_point() else value.numpy()

    keywords = {k: move(v) for k, v in arguments.items() if k != "width"}
    filters = {k: keywords.pop(k) for k in ("top_k", "top_p", "min_p") if k in keywords}
    order = keywords.pop("filter_order", "transformers")
    temperature = keywords.pop("temperature", None)
    if temperature is not None:
        keywords["sampling"] = [
            Sampling(
                temperature=float(t), order=order, **{k: v[b].item() for k, v in filters.items()}
            )
            for b, t in enumerate(temperature)
        ]
    return reference.verify_tree(**keywords)


def guarded_result(batch, nodes, device):
    guards = [Guarded(t.shape, t.dtype, device) for t in _empty_result(batch, nodes, "cpu")]
    return guards, TreeResult(*(guard.tensor for guard in guards))


def assert_same(actual, expected):
    for name, a, b in zip(TreeResult._fields, actual, expected):
        assert torch.equal(a.cpu(), b.cpu()), f"{name}: {a} is not {b}"


def assert_reference(result, expected):
    for name, value, wanted in zip(TreeResult._fields, result, expected):
        if name == "chosen_logprob":
            error = np.abs(to_numpy(value) - wanted) / (1 + np.abs(wanted))
            assert error.max(initial=0) < 5e-7, error.max()
        else:
            value = value.cpu().numpy()
            rows = np.unique(np.argwhere(value != wanted)[:, 0])
            assert (value == wanted).all(), f"{name}, requests {rows}: {value[rows]} {wanted[rows]}"
