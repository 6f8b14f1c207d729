"""Toy models of all families, and tokens for them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_compress.models import build_model, read_model_config

VOCABULARY = 97
LENGTH = 12

# 97 and 45 rows cannot be split evenly, and a window of 4 is shorter than the sequences.
_NEOX = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 45,
    "max_position_embeddings": 64,
}
_LLAMA = _NEOX | {"num_key_value_heads": 2, "pad_token_id": None}
_GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "n_inner": 45}
_GPT2_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

MODELS: Mapping[str, Mapping[str, Any]] = {
    "gemma2": _LLAMA | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "gpt2": _GPT2 | _GPT2_DROPOUT,
    "gpt_neox": _NEOX,
    "llama": _LLAMA | {"attention_bias": True, "mlp_bias": True},
    # The embedding of a padding token gets no gradient from its lookup.
    "mistral": _LLAMA | {"sliding_window": 4, "pad_token_id": 60},
    "phi3": _LLAMA,
    "qwen2": _LLAMA | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": _LLAMA | {"head_dim": 16},
}
"""Values of config.json by model_type, without those that all have in common. Dropout is off."""


def write_config(directory: Path, family: str, tied: bool = True, **changes: Any) -> Path:
    """Make `directory`, and write a config.json into it."""
    common = {
        "model_type": family,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": tied,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "config.json"
    file.write_text(json.dumps(common | dict(MODELS[family]) | changes))
    return file


def save_model(directory: Path, family: str, tied: bool = True, **changes: Any) -> Path:
    """Write a pretrained directory with several files of weights.

    No weight is zero or one. New biases are zeros and new norms are ones, which would hide that one is lost, added
    twice, or not loaded.
    """
    file = write_config(directory / "config", family, tied, **changes)
    model: Any = build_model(file, read_model_config(file), seed=5)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    model.save_pretrained(directory, max_shard_size="30KB")
    return directory


def random_tokens(batch: int, length: int = LENGTH, seed: int = 0) -> Tensor:
    """Return tokens of shape (batch, length)."""
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(side: str, batch: int, length: int = LENGTH) -> Tensor:
    """Return an attention mask (batch, length), with two more padding tokens in each row, and none in the first."""
    counts = torch.arange(batch).unsqueeze(1) * 2
    positions = torch.arange(length).unsqueeze(0)
    real = positions >= counts if side == "left" else positions < length - counts
    return real.long()
