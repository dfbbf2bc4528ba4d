import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from domino_draft import DominoConfig

torch.set_num_threads(1)


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
