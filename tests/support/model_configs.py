"""Content of config.json for toy models."""

from collections.abc import Mapping
from typing import Any

_TOKENS = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
DROPPING_GPT2: Mapping[str, Any] = {
    "model_type": "gpt2",
    "n_positions": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    **_TOKENS,
}
"""GPT-2 with the dropout of transformers."""
GPT2: Mapping[str, Any] = {**DROPPING_GPT2, **_NO_DROPOUT}
LLAMA: Mapping[str, Any] = {
    "model_type": "llama",
    "max_position_embeddings": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **_TOKENS,
}
