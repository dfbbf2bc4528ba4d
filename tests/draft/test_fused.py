"""The fused layers against the stock modules: same weights, same caches, errors against fp64."""

import copy

import pytest
import torch
from domino_draft import DominoDrafter, RowCache, Target, cache_ops, row_ops
from domino_draft.fused import CannotFuse, FusedDrafter, FusedTarget, join_weights

from .conftest import tiny_model

TAPS = (0, 2)
LENGTHS = [3, 11, 7]
MODELS = {
    "Llama": {},
    "Llama-tied": dict(tie_word_embeddings=True, head_dim=16),
    "Llama-yarn": dict(
        rope_parameters=dict(
            rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64
        )
    ),
    "Qwen2": {},
    "Qwen3": dict(num_key_value_heads=4),
    "Qwen3-sliding": dict(use_sliding_window=True, sliding_window=5, max_window_layers=2),
}


def stock(target, prompts, block):
    """Logits and features of the prompts' columns, then of a ragged block behind them."""
    cache = RowCache(len(LENGTHS), 32, target.device)
    columns = torch.arange(prompts.shape[1], device=target.device)
    out = [*target.forward(prompts, cache, layers=TAPS, keep=columns)]
    cache.advance(torch.tensor(LENGTHS, device=target.device), LENGTHS)
    return [*out, *target.forward(block, cache, layers=TAPS)]


def fused(target, prompts, block):
    whole = FusedTarget(target)
    decoder, workspace = whole.decoder, row_ops.Workspace(target.device)
    cache = RowCache(len(LENGTHS), 32, target.device)
    (kv,) = cache.allocate(len(decoder.layers), decoder.kv_heads, decoder.dim, target.dtype)
    rope = decoder.rope(64)
    out = []
    x, features = decoder.prefill(
        whole.embedding[prompts.flatten()], 0, cache.lengths, kv, rope, workspace, taps=TAPS
    )
    out += [whole.logits(x).view(*prompts.shape, -1), features.view(*prompts.shape, -1)]
    cache.advance(torch.tensor(LENGTHS, device=target.device), LENGTHS)
    drafts = block[:, 1:].contiguous()
    x = cache_ops.embed(block[:, 0].contiguous(), whole.embedding, block.shape[1], drafts=drafts)
    x, features = decoder.run(x, cache.lengths, kv, rope, workspace, taps=TAPS)
    return [*out, whole.logits(x).view(*block.shape, -1), features.view(*block.shape, -1)]


@torch.no_grad()
def check(device, family, dtype):
    model = tiny_model(family.partition("-")[0], **MODELS[family]).to(device)
    generator = torch.Generator().manual_seed(4)
    prompts = torch.randint(0, 61, (3, max(LENGTHS)), generator=generator).to(device)
    block = torch.randint(0, 61, (3, 5), generator=generator).to(device)
    model = model.to(dtype)
    exact = stock(Target(copy.deepcopy(model).double()), prompts, block)
    plain = stock(Target(copy.deepcopy(model)), prompts, block)
    ours = fused(Target(model), prompts, block)
    held = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).to(device)
    for got, same_dtype, wanted, of_prompt in zip(ours, plain, exact, (1, 1, 0, 0)):
        if of_prompt:  # what lies past a row's end is rubbish
            got, same_dtype, wanted = got[held], same_dtype[held], wanted[held]
        error = (got.double() - wanted).abs().max().item()
        allowed = 2 * (same_dtype.double() - wanted).abs().max().item()
        assert error <= allowed + 1e-6 * wanted.abs().max().item(), (error, allowed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", MODELS)
def test_target(family, dtype):
    check("cpu", family, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", MODELS)
def test_target_on_cuda(family, dtype):
    check("cuda", family, dtype)


@torch.no_grad()
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("sliding", [False, True])
def test_drafter(tiny_config, sliding, device):
    """Context of features, then a block over it, against the module in fp64."""
    kinds = ("full_attention", "sliding_attention")
    windows = dict(layer_types=kinds, sliding_window=4) if sliding else {}
    torch.manual_seed(5)
    drafter = DominoDrafter(tiny_config(**windows)).to(device)
    features = torch.randn(2, 9, drafter.fc.in_features, device=device)
    block = torch.randn(2, 4, 32, device=device)
    lengths = torch.tensor([9, 6], device=device)

    whole, workspace = FusedDrafter(drafter), row_ops.Workspace(device)
    decoder = whole.decoder
    cache = torch.zeros(2, 2, 2, 2, 16, 16, device=device)
    rope = decoder.rope(32)
    start = torch.zeros_like(lengths)
    whole.store_context(features.flatten(0, 1), start, [cache], rope, workspace)
    x, _ = decoder.run(block.flatten(0, 1).clone(), lengths, cache, rope, workspace)
    ours = whole.hidden(x).view(2, 4, 32)

    drafter.double()
    for row, length in enumerate(lengths.tolist()):
        held = features[row : row + 1, :length].double()
        at = torch.arange(length, device=device)[None]
        context = drafter.context_kv(held, at)
        behind = torch.arange(length, length + 4, device=device)[None]
        mask = None
        if sliding:
            key, query = torch.arange(length + 4, device=device), behind[0, :, None]
            mask = ((key <= query) & (key > query - 4))[None, None]
        wanted = drafter(block[row : row + 1].double(), behind, context, None, mask)
        torch.testing.assert_close(ours[row : row + 1].double(), wanted, rtol=2e-5, atol=2e-5)


def test_weights_are_shared():
    target = Target(tiny_model("Llama"))
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    whole = FusedTarget(target)
    after = target.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    attention = target.layers[1].self_attn
    first = whole.decoder.layers[1].qkv
    assert attention.q_proj.weight.data_ptr() == first.data_ptr()
    again = join_weights([attention.q_proj, attention.k_proj, attention.v_proj])
    assert again.data_ptr() == first.data_ptr()  # made once
    target.model.double()
    moved = FusedTarget(target).decoder.layers[1].qkv
    assert moved.dtype == torch.float64 and torch.equal(moved, first.double())


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda m: m.layers[0].mlp.down_proj.register_forward_hook(print), "forward hooks"),
        (lambda m: setattr(m.config, "hidden_act", "gelu"), "hidden_act is 'gelu'"),
        (lambda m: m.layers[0].half(), "more than one device or dtype"),
        (lambda m: setattr(m.rotary_emb, "rope_type", "dynamic"), "rope_type is 'dynamic'"),
    ],
)
def test_what_it_does_not_know_is_refused(change, message):
    model = tiny_model("Llama")
    change(model.model)
    with pytest.raises(CannotFuse, match=message):
        FusedTarget(Target(model))
