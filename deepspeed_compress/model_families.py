"""Causal language models: names of parameters, the reader of config.json, the table of families. Loads no torch.

`planner` reads the shapes of a family, and `models` divides it by its `Modules`. To let it divide another family, add
them to FAMILIES. Its decoder layers must take hidden states, `attention_mask`, `position_ids` and (with a rotary
module) `position_embeddings`, and return hidden states, as those of transformers do. Then add it to the models of
tests/models, which compare it with transformers in every layout.
"""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepspeed_compress.errors import ConfigError, UnsupportedError
from deepspeed_compress.safe_files import check_regular

HF_NAME = "hf_name"
"""Attribute of a parameter whose name differs in the module that DeepSpeed got: a pipeline numbers its layers."""

HF_TRANSPOSED = "hf_transposed"
"""Attribute of a weight whose transpose is the weight in the transformers model."""


def user_name(parameter: Any, name: str) -> str:
    """Return the name that overrides match: the name in transformers if it is recorded, else `name`."""
    found: str = getattr(parameter, HF_NAME, name)
    return found


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of a Hugging Face model's config.json. `path` is the file or its directory.

    Raises:
        ConfigError: It cannot be read, or is not a JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        check_regular(str(file))
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON: {error}"
        raise ConfigError(f"--model {file}: {reason}. Write the config.json of a model, or its directory.") from None
    if not isinstance(config, dict):
        raise ConfigError(f"--model {file}: {type(config).__name__} (allowed: an object). Write a model's config.json.")
    return config


Sizes = tuple[int, ...]


def _narrow_gpt2(attention: Any, tensor: int) -> None:
    attention.split_size //= tensor


def _narrow_phi3(attention: Any, tensor: int) -> None:
    """Divide the number of query heads in the config. AutoTP itself divides the number of key-value heads."""
    attention.config = copy.copy(attention.config)
    attention.config.num_attention_heads //= tensor


def _query_key_value(config: Any) -> Sizes:
    """Return the row counts of a weight that holds the queries of all heads, then the keys, then the values."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (config.num_attention_heads * head_dim, *2 * (config.num_key_value_heads * head_dim,))


@dataclass(frozen=True)
class Modules:
    """Names of the modules of a family, as `models` divides them into stages and between ranks.

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
        narrow: reduces the head count of an attention module to that of one rank out of the given number. Most modules
            take it from the shape of their input.
    """

    backbone: str
    layers: str
    norm: str
    attention: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    prologue: tuple[str, ...] = ()
    positions: str | None = None
    fused: Callable[[Any], Mapping[str, Sizes]] = lambda config: {}
    norms: tuple[str, ...] = ()
    narrow: Callable[[Any, int], None] = lambda attention, tensor: None


_GATED_MLP = ("mlp.gate_proj", "mlp.up_proj")
LLAMA = Modules(
    backbone="model",
    layers="layers",
    norm="norm",
    attention="self_attn",
    columns=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", *_GATED_MLP),
    rows=("self_attn.o_proj", "mlp.down_proj"),
)
QWEN3 = replace(LLAMA, norms=("self_attn.q_norm", "self_attn.k_norm"))
PHI3 = replace(
    LLAMA,
    columns=("self_attn.qkv_proj", "mlp.gate_up_proj"),
    fused=lambda config: {
        "self_attn.qkv_proj": _query_key_value(config),
        "mlp.gate_up_proj": 2 * (config.intermediate_size,),
    },
    narrow=_narrow_phi3,
)
GPT_NEOX = Modules(
    backbone="gpt_neox",
    layers="layers",
    norm="final_layer_norm",
    attention="attention",
    # The rows of a head are adjacent in this family, so a split by rows keeps heads whole.
    columns=("attention.query_key_value", "mlp.dense_h_to_4h"),
    rows=("attention.dense", "mlp.dense_4h_to_h"),
    prologue=("emb_dropout",),
)
GPT2 = Modules(
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


@dataclass(frozen=True, slots=True)
class Family:
    """Facts about a `model_type`, with the defaults of transformers for keys that a config.json leaves out.

    Attributes:
        modules: Names of its modules, or None if `models` cannot divide it.
        gated: Whether the MLP has a gate.
        positions: Number of learned positions; 0 for other kinds of positions.
        tied: Whether embedding and head share their weights.
        dropout: Dropout rate of the residual connections.
    """

    modules: Modules | None = None
    gated: bool = True
    positions: int = 0
    tied: bool = False
    dropout: float = 0.0


FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(GPT2, gated=False, positions=1024, tied=True, dropout=0.1),
    "gpt_neo": Family(gated=False, positions=2048, tied=True),
    "opt": Family(gated=False, positions=2048, tied=True, dropout=0.1),
    "gpt_neox": Family(GPT_NEOX, gated=False),
    "phi": Family(gated=False),
    "bloom": Family(gated=False, tied=True),
    **dict.fromkeys(("llama", "mistral", "qwen2"), Family(LLAMA)),
    "qwen3": Family(QWEN3),
    "phi3": Family(PHI3),
    **dict.fromkeys(("mixtral", "qwen3_moe", "olmo", "olmo2", "granite"), Family()),
    "gemma2": Family(LLAMA, tied=True),
    **dict.fromkeys(("gemma", "gemma3_text"), Family(tied=True)),
}
"""Families by the `model_type` of the model's config."""


def modules_of(config: Any) -> Modules:
    """Return the modules of the family of `config`.

    Raises:
        UnsupportedError: if `models` cannot divide this `model_type`.
    """
    family = FAMILIES.get(config.model_type)
    if family is None or family.modules is None:
        known = ", ".join(f'"{name}"' for name, family in sorted(FAMILIES.items()) if family.modules is not None)
        raise UnsupportedError(
            f'/deepspeed_compress/parallelism: model_type "{config.model_type}" does not support tensor or pipeline '
            f"parallelism (allowed: {known}). Write 1 for both, or add its modules to "
            "deepspeed_compress/model_families.py."
        )
    return family.modules
