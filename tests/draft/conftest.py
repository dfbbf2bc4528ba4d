import pytest
import torch
import transformers
from domino_draft import DominoConfig, DominoDrafter

from .tokens import chat_tokenizer

torch.set_num_threads(1)

FAMILIES = ("Llama", "Qwen2", "Qwen3")


@pytest.fixture
def tiny_config():
    """Keyword overrides -> a small drafter configuration whose head_dim is not hidden / heads."""

    def make(**overrides):
        values = dict(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=61,
            num_target_layers=4,
            target_layer_ids=(0, 2),
            mask_token_id=60,
            emb_dim=8,
            gru_hidden_dim=24,
            block_size=4,
            rope_theta=1e4,
            max_position_embeddings=256,
            dtype="float32",
        )
        return DominoConfig(**(values | overrides))

    return make


def tiny_model(family, **overrides):
    """A random causal LM of a family whose greedy text does not settle on one token."""
    values = dict(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**(values | overrides))
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@pytest.fixture(scope="session")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture
def folders(tmp_path, tokenizer, tiny_config):
    """(target, drafter) folders of random tiny models."""
    size = len(tokenizer)
    model = tiny_model("Llama", vocab_size=size)
    model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    torch.manual_seed(0)
    DominoDrafter(tiny_config(vocab_size=size)).save_pretrained(tmp_path / "drafter")
    return str(tmp_path / "target"), str(tmp_path / "drafter")
