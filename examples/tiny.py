"""What the examples decode with: a Llama in plain Torch, and a tiny random target with its drafter.

`Llama` leaves attention and cache to its caller, as the models of serving engines do.
"""

import torch
from domino_draft import DominoConfig, DominoDrafter
from torch.nn.functional import linear, rms_norm, silu
from transformers import LlamaConfig, LlamaForCausalLM


class Llama:
    """A Llama-type causal LM over the tensors of a Transformers one.

    Its rows are tokens of any requests. `attend(layer, q, k, v)` stores k and v [N, kv_heads, D]
    and returns what q [N, heads, D] finds in the keys that each row may see, [N, heads, D].
    """

    def __init__(self, model, feature_layers):
        config = model.config
        self.tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self.embedding = self.tensors["model.embed_tokens.weight"]
        self.inv_freq = model.model.rotary_emb.inv_freq
        self.num_layers, self.eps = config.num_hidden_layers, config.rms_norm_eps
        self.kv_heads, self.head_dim = config.num_key_value_heads, config.head_dim
        self.feature_layers = feature_layers

    def forward(self, ids, positions, attend):
        """ids, positions int64 [N] -> hidden [N, H] after the last norm, features [N, n * H].

        A feature is the output of one of `feature_layers`, before any norm.
        """
        angles = positions[:, None, None].float() * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        x = self.embedding[ids]
        outputs = []
        for i in range(self.num_layers):
            h = self._norm(x, f"layers.{i}.input_layernorm")
            q, k, v = (
                self._linear(h, f"layers.{i}.self_attn.{name}_proj").unflatten(
                    1, (-1, self.head_dim)
                )
                for name in "qkv"
            )
            found = attend(i, rotate(q, cos, sin), rotate(k, cos, sin), v)
            x = x + self._linear(found.flatten(1), f"layers.{i}.self_attn.o_proj")
            h = self._norm(x, f"layers.{i}.post_attention_layernorm")
            gate, up = (self._linear(h, f"layers.{i}.mlp.{name}_proj") for name in ("gate", "up"))
            x = x + self._linear(silu(gate) * up, f"layers.{i}.mlp.down_proj")
            outputs.append(x)
        features = torch.cat([outputs[i] for i in self.feature_layers], dim=1)
        return self._norm(x, "norm"), features

    def lm_head(self, hidden):
        return linear(hidden, self.tensors["lm_head.weight"])

    def _linear(self, x, name):
        return linear(x, self.tensors[f"model.{name}.weight"])

    def _norm(self, x, name):
        return rms_norm(x, x.shape[-1:], self.tensors[f"model.{name}.weight"], self.eps)


def rotate(x, cos, sin):
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


@torch.no_grad()
def tiny_pair(*, vocab=61, shift_label=True, device="cpu"):
    """A random target, as a Transformers model, and a drafter that is often right about it.

    The target's layers are damped, so that its next token depends mostly on the last one. The
    drafter's state holds the embedding of the last token (scaled by gain), and its low-rank branch
    passes the state on to the LM head: SiLU(x) - SiLU(-x) = x. Its backbone is random.
    """
    torch.manual_seed(7)
    hidden = 32
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            initializer_range=0.4,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    ).eval()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(0.008)
        layer.mlp.down_proj.weight.mul_(0.008)
    drafter = DominoDrafter(
        DominoConfig(
            hidden_size=hidden,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=vocab,
            num_target_layers=4,
            target_layer_ids=(0, 2),
            mask_token_id=vocab - 1,
            emb_dim=2 * hidden,
            gru_hidden_dim=hidden,
            block_size=6,
            pure_draft_prefix_len=0,
            shift_label=shift_label,
            rope_theta=1e4,
            max_position_embeddings=256,
            dtype="float32",
        )
    ).eval()
    for weight in drafter.parameters():
        if weight.dim() > 1:
            weight.mul_(6)  # at its usual 0.02 the backbone would hardly see its context
    eye, gain = torch.eye(hidden), 0.05
    gru, (first, _, second) = drafter.prefix_gru, drafter.embed_proj
    for weight in (gru.weight_ih_l0, gru.weight_hh_l0):
        weight.zero_()  # gates r and z: 1/2
    gru.weight_ih_l0[2 * hidden :] = 2 * gain * eye
    gru.weight_hh_l0[2 * hidden :] = -2 * eye  # cancels the half of the old state that stays
    first.weight[:, hidden:] = torch.cat((eye, -eye)) / (gain * 0.4)
    head = model.lm_head.weight
    second.weight.copy_(3 * torch.cat((head, -head), dim=1))
    return model.to(device), drafter.to(device)
