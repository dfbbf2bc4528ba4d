"""The adapter and its cache: cached, ragged, rolled-back forwards equal whole, uncached ones."""

import pytest
import torch
from domino_draft import RowCache, Target
from torch.utils._python_dispatch import TorchDispatchMode

from .conftest import FAMILIES, tiny_model

LAYERS = (0, 2, 3)  # the last layer's output included: before the final norm

MODELS = {
    **{family: (family, {}) for family in FAMILIES},
    "Qwen3-sliding": (
        "Qwen3",
        dict(use_sliding_window=True, sliding_window=5, max_window_layers=2),
    ),
    "Mistral-sliding": ("Mistral", dict(sliding_window=5)),
    "Llama-eager": ("Llama", dict(attn_implementation="eager")),
}


@pytest.fixture(params=MODELS)
def target(request):
    family, overrides = MODELS[request.param]
    return Target(tiny_model(family, **overrides))


@torch.no_grad()
def whole(target, ids):
    """Logits and features of one row without a cache, from transformers alone."""
    seen = []
    hook = target.model.get_decoder().norm.register_forward_pre_hook(lambda m, a: seen.append(a[0]))
    out = target.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    hook.remove()
    states = [*out.hidden_states[:-1], seen[0]]  # the tuple's last entry is post-norm
    return out.logits[0], torch.cat([states[i + 1][0] for i in LAYERS], -1)


@torch.no_grad()
def test_ragged_cached_forwards_equal_whole_ones(target):
    torch.manual_seed(0)
    rows = [torch.randint(0, 61, (n,)).tolist() for n in (9, 4, 14)]
    cache = RowCache(3, 64, "cpu")
    padded = torch.tensor([row + [0] * (14 - len(row)) for row in rows])
    ends = torch.tensor([3, 8, 13])
    logits, features = target.forward(padded, cache, layers=LAYERS, keep=ends)
    assert logits.shape == (3, 3, 61)
    for b, row in enumerate(rows):
        want, states = whole(target, row)
        column = ends.tolist().index(len(row) - 1)
        torch.testing.assert_close(logits[b, column], want[-1], rtol=1e-3, atol=5e-4)
        torch.testing.assert_close(features[b, : len(row)], states, rtol=1e-3, atol=5e-4)
    lengths = [len(row) for row in rows]
    cache.advance(torch.tensor(lengths), lengths)

    # Blocks of 1, 5 and 3 tokens of which a row keeps 1..all: what is dropped must not be seen.
    for size, kept in ((1, (1, 1, 1)), (5, (1, 5, 2)), (3, (3, 1, 2)), (4, (1, 1, 4))):
        block = torch.randint(0, 61, (len(rows), size))
        logits, features = target.forward(block, cache, layers=LAYERS)
        for b, row in enumerate(rows):
            want, states = whole(target, row + block[b].tolist())
            torch.testing.assert_close(logits[b], want[-size:], rtol=1e-3, atol=5e-4)
            torch.testing.assert_close(features[b], states[-size:], rtol=1e-3, atol=5e-4)
            rows[b] = row + block[b, : kept[b]].tolist()
        cache.advance(torch.tensor(kept), kept)

    cache.select([2, 0])  # rows leave and change places
    rows = [rows[2], rows[0]]
    block = torch.randint(0, 61, (2, 2))
    logits, _ = target.forward(block, cache)
    for b, row in enumerate(rows):
        want, _ = whole(target, row + block[b].tolist())
        torch.testing.assert_close(logits[b], want[-2:], rtol=1e-3, atol=5e-4)


def test_rows_change_places_without_memory_of_their_own():
    """The caches of a long row are gigabytes, and the GPU may be full when another one leaves."""
    cache = RowCache(4, 64, "cpu")
    (stack,) = cache.allocate(3, 2, 8, torch.float32)
    stack.normal_()
    before = stack.clone()

    class Made(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            out = op(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else [out]:
                if t.untyped_storage().data_ptr() != stack.untyped_storage().data_ptr():
                    self.most = max(self.most, t.untyped_storage().nbytes())
            return out

    with Made() as made:
        cache.select([0, 3, 2], 40)
    assert 0 < made.most <= 64
    before[:, :, 1, :, :40] = before[:, :, 3, :, :40]
    assert torch.equal(stack, before)


@torch.no_grad()
def test_single_row(target):
    """One row takes the path on which transformers builds the mask itself."""
    ids, cache = torch.randint(0, 61, (12,)).tolist(), RowCache(1, 32, "cpu")
    for size, kept in ((6, 6), (4, 2), (1, 1), (3, 3)):
        start = cache.host_lengths[0]
        logits, features = target.forward(
            torch.tensor([ids[start : start + size]]), cache, layers=LAYERS
        )
        want, states = whole(target, ids[: start + size])
        torch.testing.assert_close(logits[0], want[start:], rtol=1e-3, atol=5e-4)
        torch.testing.assert_close(features[0], states[start:], rtol=1e-3, atol=5e-4)
        cache.advance(torch.tensor([kept]), [kept])


def test_features_of_padded_sequences(target):
    rows = [[3, 1, 4, 1, 5], [9, 2, 6]]
    padded = torch.tensor([rows[0], rows[1] + [0, 0]])
    mask = torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])
    features = target.features(padded, LAYERS, mask)
    for b, row in enumerate(rows):
        _, states = whole(target, row)
        torch.testing.assert_close(features[b, : len(row)], states, rtol=1e-3, atol=5e-4)


def test_accessors(target):
    ids, hidden = torch.tensor([3, 5]), torch.randn(2, 32)
    assert torch.equal(target.embed(ids), target.model.get_input_embeddings()(ids))
    assert torch.equal(target.lm_head(hidden), target.model.lm_head(hidden))
    assert (target.vocab_size, target.hidden_size, target.num_layers) == (61, 32, 4)
    assert target.max_length == 256 and target.stop_token_ids == ()
    target.model.generation_config.eos_token_id = [2, 5]
    assert target.stop_token_ids == (2, 5)


def test_hooks_do_not_stay(target):
    with pytest.raises(ValueError, match="RowCache: tokens: got 3"):
        target.forward(torch.zeros(1, 3, dtype=torch.int64), RowCache(1, 2, "cpu"), layers=LAYERS)
    assert all(not layer._forward_hooks for layer in target.layers)


def test_refused_models():
    with pytest.raises(ValueError, match="attn_implementation: got 'flex_attention'"):
        Target(tiny_model("Llama", attn_implementation="flex_attention"))
    model = tiny_model("Llama")
    model.config.layer_types = ["linear_attention"] * 4
    with pytest.raises(ValueError, match=r"layer_types: got \['linear_attention'\]"):
        Target(model)
