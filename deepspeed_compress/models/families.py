"""Model families that can be split into stages and between ranks: names of their modules and of the split matrices.

To add a family, add a row to FAMILIES. Its decoder layers must take hidden states, `attention_mask`, `position_ids` and
(with a rotary module) `position_embeddings`, and return hidden states, as those of transformers do. Then add it to the
models of tests/models, which compare it with transformers in every layout.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_compress.errors import UnsupportedError

Sizes = tuple[int, ...]


def _nothing(attention: Any, tensor: int) -> None:
    """Change nothing: most attention modules take the number of heads from the shape of their input."""


def _narrow_gpt2(attention: Any, tensor: int) -> None:
    attention.split_size //= tensor


def _narrow_phi3(attention: Any, tensor: int) -> None:
    """Divide the number of query heads in the config. AutoTP itself divides the number of key-value heads."""
    attention.config = copy.copy(attention.config)
    attention.config.num_attention_heads //= tensor


def _no_fusion(config: Any) -> Mapping[str, Sizes]:
    return {}


def _query_key_value(config: Any) -> Sizes:
    """Return the row counts of a weight that holds the queries of all heads, then the keys, then the values."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (config.num_attention_heads * head_dim, *2 * (config.num_key_value_heads * head_dim,))


@dataclass(frozen=True)
class Family:
    """Names of the parts of a model family.

    Attributes:
        backbone: the base model in the causal LM; the following names are relative to it.
        layers: the list of decoder layers.
        norm: the final norm.
        attention: the attention module of a layer.
        columns: linear modules of a layer that are split by output (arXiv:1909.08053, section 3).
        rows: linear modules of a layer that are split by input.
        prologue: modules between the embedding and the first layer, in order.
        positions: the learned position embedding in `prologue`.
        fused: returns the modules in `columns` that hold several matrices one after the other, with their row counts.
        norms: modules that are replicated but process only this rank's heads.
        narrow: reduces the head count of an attention module to that of one rank out of the given number.
    """

    backbone: str
    layers: str
    norm: str
    attention: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    prologue: tuple[str, ...] = ()
    positions: str | None = None
    fused: Callable[[Any], Mapping[str, Sizes]] = _no_fusion
    norms: tuple[str, ...] = ()
    narrow: Callable[[Any, int], None] = _nothing


_GATED_MLP = ("mlp.gate_proj", "mlp.up_proj")
LLAMA = Family(
    backbone="model",
    layers="layers",
    norm="norm",
    attention="self_attn",
    columns=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", *_GATED_MLP),
    rows=("self_attn.o_proj", "mlp.down_proj"),
)
QWEN3 = Family(**vars(LLAMA) | {"norms": ("self_attn.q_norm", "self_attn.k_norm")})
PHI3 = Family(
    **vars(LLAMA)
    | {
        "columns": ("self_attn.qkv_proj", "mlp.gate_up_proj"),
        "fused": lambda config: {
            "self_attn.qkv_proj": _query_key_value(config),
            "mlp.gate_up_proj": 2 * (config.intermediate_size,),
        },
        "narrow": _narrow_phi3,
    }
)
GPT_NEOX = Family(
    backbone="gpt_neox",
    layers="layers",
    norm="final_layer_norm",
    attention="attention",
    # The rows of a head are adjacent in this family, so a split by rows keeps heads whole.
    columns=("attention.query_key_value", "mlp.dense_h_to_4h"),
    rows=("attention.dense", "mlp.dense_4h_to_h"),
    prologue=("emb_dropout",),
)
GPT2 = Family(
    backbone="transformer",
    layers="h",
    norm="ln_f",
    attention="attn",
    columns=("attn.c_attn", "mlp.c_fc"),
    rows=("attn.c_proj", "mlp.c_proj"),
    prologue=("wpe", "drop"),
    positions="wpe",
    fused=lambda config: {"attn.c_attn": 3 * (config.hidden_size,)},
    narrow=_narrow_gpt2,
)

FAMILIES: Mapping[str, Family] = {
    "gemma2": LLAMA,
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
    "llama": LLAMA,
    "mistral": LLAMA,
    "phi3": PHI3,
    "qwen2": LLAMA,
    "qwen3": QWEN3,
}
"""Families by the `model_type` of the model's config."""


def family_of(config: Any) -> Family:
    """Return the family of `config`.

    Raises:
        UnsupportedError: if FAMILIES has no row for this `model_type`.
    """
    found = FAMILIES.get(config.model_type)
    if found is None:
        known = ", ".join(f'"{name}"' for name in FAMILIES)
        raise UnsupportedError(
            f'/deepspeed_compress/parallelism: model_type "{config.model_type}" does not support tensor or pipeline '
            f"parallelism (allowed: {known}). Write 1 for both, or add a row for it to "
            "deepspeed_compress/models/families.py."
        )
    return found
