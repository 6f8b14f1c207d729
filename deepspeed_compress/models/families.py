"""The families of models that are cut into stages and split between ranks: where their parts are, and what is split.

To add a family, add a row to FAMILIES. Its decoder layers must take hidden states, `attention_mask`, `position_ids`
and (with a rotary module) `position_embeddings`, and return hidden states, as those of transformers do. Then add it to
the models of tests/models, which compare it with transformers in every layout.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from deepspeed_compress.errors import UnsupportedError

__all__ = ["FAMILIES", "Family", "family_of"]

Sizes = tuple[int, ...]


def _nothing(attention: Any, tensor: int) -> None:
    """Most attention modules take the number of heads from the shape of their input."""


def _narrow_gpt2(attention: Any, tensor: int) -> None:
    attention.split_size //= tensor


def _narrow_phi3(attention: Any, tensor: int) -> None:
    """Query heads are counted by the config, key-value heads by an attribute that AutoTP divides."""
    attention.config = copy.copy(attention.config)
    attention.config.num_attention_heads //= tensor


def _no_fusion(config: Any) -> Mapping[str, Sizes]:
    return {}


def _query_key_value(config: Any) -> Sizes:
    """Rows of a weight that holds the queries of all heads, then keys, then values."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (config.num_attention_heads * head_dim, *2 * (config.num_key_value_heads * head_dim,))


@dataclass(frozen=True)
class Family:
    """Names of parts: of the model below the causal LM, and of the layers in it, unless said otherwise.

    `backbone`: of the causal LM. `prologue`: modules between the embedding and the first layer, in order;
    `positions`: the learned position embedding among them. `columns`, `rows`: linear modules of a layer, split by
    output and by input (arXiv:1909.08053, section 3). `fused`: of the columns, those that hold several matrices one
    after the other, with their rows. `norms`: modules that are replicated but see only this rank's heads.
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
    """Makes an attention module count the heads of one rank of so many."""


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
    # Rows of a head are together here, so that the heads are split by whole ones.
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

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gemma2": LLAMA,
        "gpt2": GPT2,
        "gpt_neox": GPT_NEOX,
        "llama": LLAMA,
        "mistral": LLAMA,
        "phi3": PHI3,
        "qwen2": LLAMA,
        "qwen3": QWEN3,
    }
)
"""By the `model_type` of the model's config."""


def family_of(config: Any) -> Family:
    """Raises UnsupportedError, which says what is missing, when no row of FAMILIES is for `config`."""
    found = FAMILIES.get(config.model_type)
    if found is None:
        known = ", ".join(f'"{name}"' for name in FAMILIES)
        raise UnsupportedError(
            f'model_type "{config.model_type}" cannot be divided by /deepspeed_compress/parallelism/tensor or '
            "/pipeline: no row of deepspeed_compress.models.families says where its layers are and which matrices can "
            f"be split (there are rows for {known}). Write 1 for both, or add a row."
        )
    return found
