"""The float64 law of a row against Transformers' own processors, and what the orders change."""

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from domino_kernels.reference.law import FILTER_ORDERS, PLAIN, Sampling, edit, kept, law

CASES = [
    Sampling(0.7, top_k=50, top_p=0.95),
    Sampling(1.0, top_p=0.9),
    Sampling(0.7, top_k=8),
    Sampling(1.3, min_p=0.05),
    Sampling(0.9, top_k=20, top_p=0.8, min_p=0.1),
    Sampling(1.0, top_k=1),
    Sampling(1.0, top_k=5, top_p=0.01),
]


def rows(count, vocab, seed=0):
    return np.random.default_rng(seed).normal(scale=2.0, size=(count, vocab))


def transformers_law(logits, sampling, ids=None):
    scores = torch.tensor(logits)[None]
    ids = torch.tensor([ids if ids is not None else []], dtype=torch.int64)
    steps = []
    if sampling.repetition != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition))
    steps.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        steps.append(MinPLogitsWarper(sampling.min_p))
    for step in steps:
        scores = step(ids, scores)
    return scores.softmax(-1)[0].numpy()


@pytest.mark.parametrize("sampling", CASES, ids=str)
def test_the_default_order_is_that_of_transformers(sampling):
    for logits in rows(60, 97):
        p, fault = law(logits, sampling)
        expected = transformers_law(logits, sampling)
        assert fault == 0 and ((p > 0) == (expected > 0)).all()
        assert np.abs(p - expected).max() < 1e-12


def test_repetition_is_that_of_transformers():
    ids = [3, 3, 17, 40]
    seen = np.isin(np.arange(97), ids[:2])
    counts = np.bincount(ids[2:], minlength=97)
    sampling = Sampling(0.8, repetition=1.3)
    for logits in rows(20, 97):
        p, _ = law(edit(logits, sampling, seen=seen, counts=counts), sampling)
        assert np.abs(p - transformers_law(logits, sampling, ids)).max() < 1e-12


def test_edits_by_hand():
    sampling = Sampling(repetition=2.0, presence=0.5, frequency=0.25)
    edited = edit(
        [1.0, -1.0, 3.0, 2.0, 0.0],
        sampling,
        bias=np.array([1.0, 0.0, 0.0, 0.0, 7.0]),
        seen=np.array([1, 0, 0, 0, 0], bool),
        counts=np.array([0, 2, 1, 0, 0]),
        allowed=np.array([1, 1, 1, 1, 0], bool),
    )
    # bias, then 2 / 2; -1 * 2 - 0.5 - 2 * 0.25; 3 / 2 - 0.5 - 0.25; as it was; not allowed
    assert edited.tolist() == [1.0, -3.0, 0.75, 2.0, -np.inf]
    assert edit([1.0, 2.0]).tolist() == [1.0, 2.0]


def test_orders_differ_where_they_should():
    """Three tokens of mass .5, .3, .2: what the nucleus of 0.7 is a share of decides."""
    logits = np.log([0.5, 0.3, 0.2])
    inside = lambda **k: kept(logits, Sampling(**k)).astype(int).tolist()  # noqa: E731
    for order in FILTER_ORDERS:
        assert inside(top_p=0.7, order=order) == [1, 1, 0]
        assert inside(top_k=2, order=order) == [1, 1, 0]
        assert inside(min_p=0.5, order=order) == [1, 1, 0]
    # of the two that top-k leaves, the first has 0.625
    assert inside(top_k=2, top_p=0.6) == [1, 0, 0]
    assert inside(top_k=2, top_p=0.6, order="vllm") == [1, 0, 0]
    assert inside(top_k=2, top_p=0.6, order="joint") == [1, 1, 0]
    # min-p leaves two: only vLLM's order has the nucleus of these
    assert inside(min_p=0.5, top_p=0.6) == [1, 1, 0]
    assert inside(min_p=0.5, top_p=0.6, order="vllm") == [1, 0, 0]
    with pytest.raises(ValueError, match="Sampling: order: got 'x', expected one of"):
        Sampling(order="x")


def test_ties():
    """At the k-th value all stay; in the nucleus the lower id comes first."""
    logits = np.array([0.0, 1.0, 0.0, 0.0])
    assert kept(logits, Sampling(top_k=2)).all()
    p = np.exp(logits) / np.exp(logits).sum()
    inside = kept(logits, Sampling(top_p=p[1] + p[0] * 1.5))
    assert inside.tolist() == [True, True, True, False]
    assert kept(logits, Sampling(top_p=0.0)).tolist() == [False, True, False, False]


def test_what_is_no_law():
    assert law([np.nan, 0.0]) == (None, 1)
    assert law([np.inf, 0.0]) == (None, 1)
    assert law([-np.inf, -np.inf]) == (None, 2)
    p, fault = law([-np.inf, 0.0, -200.0], PLAIN)
    assert fault == 0 and p.tolist() == [0.0, 1.0, 0.0]
