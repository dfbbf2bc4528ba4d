"""The backbone against a row-by-row fp64 reading of the method, and the masks."""

import math

import pytest
import torch
from domino_draft import DFlashBackbone, DominoDrafter, DominoHead, block_mask
from domino_draft.backbone import dense_mask
from torch.nn.attention.flex_attention import create_block_mask


def norm(x, weight, eps=1e-6):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotated(x, position, theta):
    """x [heads, D]; pairs (j, j + D/2) turn by position / theta^(2j/D)."""
    half = x.shape[-1] // 2
    out = x.clone()
    for j in range(half):
        angle = position * theta ** (-2 * j / (2 * half))
        a, b = x[:, j], x[:, j + half]
        out[:, j] = a * math.cos(angle) - b * math.sin(angle)
        out[:, j + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def reference(sd, config, features, block, anchor, window=None):
    """One row, one block: features [T, F], block embeddings [Q, H] at anchor.. -> [Q, H]."""
    sd = {name: t.double() for name, t in sd.items()}
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    c = norm(features.double() @ sd["fc.weight"].T, sd["hidden_norm.weight"])
    x = block.double()
    for i in range(config.num_hidden_layers):
        p = f"layers.{i}."
        n = norm(x, sd[p + "input_layernorm.weight"])
        rows = torch.cat([c, n])  # context rows skip input_layernorm
        where = [*range(len(c)), *range(anchor, anchor + len(n))]
        keys = (rows @ sd[p + "self_attn.k_proj.weight"].T).view(-1, kv_heads, dim)
        keys = norm(keys, sd[p + "self_attn.k_norm.weight"])
        values = (rows @ sd[p + "self_attn.v_proj.weight"].T).view(-1, kv_heads, dim)
        queries = (n @ sd[p + "self_attn.q_proj.weight"].T).view(-1, heads, dim)
        queries = norm(queries, sd[p + "self_attn.q_norm.weight"])
        out = torch.zeros(len(n), heads, dim, dtype=torch.float64)
        sliding = config.layer_types[i] == "sliding_attention"
        for q in range(len(n)):
            query = rotated(queries[q], anchor + q, config.rope_theta)
            seen = [t for t in range(len(rows)) if t < anchor or t >= len(c)]
            if sliding:
                seen = [t for t in seen if anchor + q - window < where[t] <= anchor + q]
            for h in range(heads):
                k = [
                    rotated(keys[t], where[t], config.rope_theta)[h * kv_heads // heads]
                    for t in seen
                ]
                weight = torch.softmax(torch.stack(k) @ query[h] / math.sqrt(dim), 0)
                out[q, h] = weight @ values[seen, h * kv_heads // heads]
        x = x + out.flatten(1) @ sd[p + "self_attn.o_proj.weight"].T
        n = norm(x, sd[p + "post_attention_layernorm.weight"])
        gate = n @ sd[p + "mlp.gate_proj.weight"].T
        up = n @ sd[p + "mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ sd[p + "mlp.down_proj.weight"].T
    return norm(x, sd["norm.weight"])


def lively(config, cls=DFlashBackbone):
    """Weights large enough that every part of the formula shows in the output."""
    torch.manual_seed(3)
    module = cls(config)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(1 + 0.3 * torch.randn_like(p) if "norm" in name else 0.2 * torch.randn_like(p))
    return module.eval()


@pytest.mark.parametrize("sliding", [False, True])
def test_ragged_rows_match_the_reference(tiny_config, sliding):
    window = 3
    kinds = ("full_attention", "sliding_attention" if sliding else "full_attention")
    config = tiny_config(layer_types=kinds, sliding_window=window if sliding else None)
    model = lively(config)
    anchors, slots, context = torch.tensor([[5], [2], [4]]), 4, 5
    features = torch.randn(3, context, 64)
    block = torch.randn(3, slots, 32)
    kv = model.context_kv(features, torch.arange(context).expand(3, -1))
    masks = [
        dense_mask(block_mask(anchors, slots, context, window=w), 3, slots, context + slots, "cpu")
        for w in (None, window)
    ]
    got = model(block, anchors + torch.arange(slots), kv, *masks)
    for row, (anchor,) in enumerate(anchors.tolist()):
        want = reference(
            model.state_dict(), config, features[row, :anchor], block[row], anchor, window
        )
        torch.testing.assert_close(got[row].double(), want, rtol=2e-5, atol=2e-5)


def test_no_mask_is_the_all_visible_mask(tiny_config):
    model = lively(tiny_config())
    kv = model.context_kv(torch.randn(2, 6, 64), torch.arange(6).expand(2, -1))
    block, positions = torch.randn(2, 4, 32), torch.arange(6, 10).expand(2, -1)
    ones = torch.ones(2, 1, 4, 10, dtype=torch.bool)
    torch.testing.assert_close(model(block, positions, kv), model(block, positions, kv, ones))
    additive = torch.zeros(2, 1, 4, 10)
    torch.testing.assert_close(model(block, positions, kv), model(block, positions, kv, additive))


def test_training_layout_equals_one_block_at_a_time(tiny_config):
    """N blocks side by side under `block_mask` = each block alone over its own context."""
    model = lively(tiny_config())
    context, slots = 9, 4
    anchors = torch.tensor([[2, 7, 0], [4, 8, 5]])
    valid = torch.tensor([[True, True, False], [True, True, True]])
    features, block = torch.randn(2, context, 64), torch.randn(2, 3 * slots, 32)
    positions = (anchors[:, :, None] + torch.arange(slots)).flatten(1)
    kv = model.context_kv(features, torch.arange(context).expand(2, -1))
    mod = block_mask(anchors, slots, context, valid=valid)
    q_len, kv_len = 3 * slots, context + 3 * slots
    got = model(block, positions, kv, dense_mask(mod, 2, q_len, kv_len, "cpu"))
    assert torch.isfinite(got).all()  # blocks that see nothing included
    for row in range(2):
        for n in range(3):
            if not valid[row, n]:
                continue
            anchor, part = int(anchors[row, n]), slice(n * slots, (n + 1) * slots)
            alone = [(k[row : row + 1, :, :anchor], v[row : row + 1, :, :anchor]) for k, v in kv]
            want = model(block[row : row + 1, part], positions[row : row + 1, part], alone)
            torch.testing.assert_close(got[row : row + 1, part], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_flex_block_mask_is_the_dense_mask(tiny_config, window):
    anchors = torch.tensor([[2, 7], [4, 8]])
    valid = torch.tensor([[True, True], [False, True]])
    mod = block_mask(anchors, 4, 9, valid=valid, window=window)
    flex = create_block_mask(mod, 2, None, 8, 17, device="cpu", BLOCK_SIZE=8)
    dense = dense_mask(mod, 2, 8, 17, "cpu")
    loops = torch.zeros(2, 1, 8, 17, dtype=torch.bool)
    for b in range(2):
        for q in range(8):
            n, slot = divmod(q, 4)
            anchor, low = int(anchors[b, n]), -(10**9)
            if window:
                low = anchor + slot - window
            for kv in range(17):
                if kv < 9:
                    seen = low < kv < anchor
                else:
                    m, other = divmod(kv - 9, 4)
                    seen = m == n and (not window or slot - window < other <= slot)
                loops[b, 0, q, kv] = seen and bool(valid[b, n])
    assert torch.equal(dense, loops)
    model = lively(tiny_config())
    block, positions = torch.randn(2, 8, 32), torch.arange(8).expand(2, -1)
    with torch.no_grad():  # flex_attention has no backward on the CPU
        kv = model.context_kv(torch.randn(2, 9, 64), torch.arange(9).expand(2, -1))
        got, want = (model(block, positions, kv, mask) for mask in (flex, dense))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_context_enters_only_as_keys_and_values(tiny_config):
    """Doubling input_layernorm must leave context K/V alone."""
    model = lively(tiny_config())
    features, positions = torch.randn(1, 3, 64), torch.arange(3)[None]
    before = model.context_kv(features, positions)
    for layer in model.layers:
        layer.input_layernorm.weight.data.mul_(2)
    after = model.context_kv(features, positions)
    assert all(
        torch.equal(a, b)
        for x, y in zip(before, after, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def test_rope_stays_in_fp32_in_a_half_model(tiny_config):
    model = DFlashBackbone(tiny_config()).to(torch.bfloat16)
    cos, _ = model.rope(torch.tensor([[200]]))
    want = [math.cos(200 * 1e4 ** (-2 * j / 16)) for j in range(8)]
    torch.testing.assert_close(cos.flatten(), torch.tensor(want), rtol=0, atol=1e-5)


def test_feature_width_error(tiny_config):
    with pytest.raises(ValueError, match=r"features: got shape \(1, 3, 32\).*\[B, T, 64\]"):
        DFlashBackbone(tiny_config()).context_kv(torch.zeros(1, 3, 32), torch.zeros(1, 3).long())


@pytest.mark.parametrize(("shift", "prefix", "first"), [(True, 1, 1), (True, 0, 0), (False, 1, 2)])
def test_head_formula(tiny_config, shift, prefix, first):
    config = tiny_config(shift_label=shift, pure_draft_prefix_len=prefix)
    head = lively(config, DominoHead).double()
    assert head.first_slot == first
    embeds, hidden = torch.randn(3, 5, 32).double(), torch.randn(3, 5, 32).double()
    gru, w1 = head.prefix_gru, head.embed_proj[0].weight
    state, states = torch.zeros(3, 24).double(), []
    for t in range(5):
        gi, gh = embeds[:, t] @ gru.weight_ih_l0.T, state @ gru.weight_hh_l0.T
        (ir, iz, i_n), (hr, hz, hn) = gi.chunk(3, -1), gh.chunk(3, -1)
        r, z = torch.sigmoid(ir + hr), torch.sigmoid(iz + hz)
        state = (1 - z) * torch.tanh(i_n + r * hn) + z * state
        states.append(state)
    states = torch.stack(states, 1)
    torch.testing.assert_close(head.states(embeds), states)
    mid = hidden @ w1[:, :32].T + states @ w1[:, 32:].T  # hidden first, then the state
    u = mid * torch.sigmoid(mid)
    torch.testing.assert_close(head.low_rank(hidden, states), u)
    torch.testing.assert_close(head(hidden, states), u @ head.w2.T)


def test_head_shares_the_flat_tensors(tiny_config):
    drafter = DominoDrafter(tiny_config())
    drafter.head.states(torch.randn(1, 2, 32)).sum().backward()
    assert drafter.prefix_gru.weight_ih_l0.grad is not None
    moved = drafter.to(torch.float64)
    assert moved.head.w2.dtype == torch.float64 and moved.head.w2 is moved.embed_proj[2].weight
