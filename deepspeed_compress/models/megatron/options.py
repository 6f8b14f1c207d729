"""Arguments with which megatron-core's GPTModel computes the same function as a transformers causal LM."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from transformers import PretrainedConfig

from deepspeed_compress.errors import UnsupportedError

_TANH = partial(F.gelu, approximate="tanh")
_ACTIVATIONS: Mapping[str, Callable[..., Any]] = {
    "gelu_new": _TANH,
    "gelu_pytorch_tanh": _TANH,
    "gelu": F.gelu,
    "relu": F.relu,
}
"""Activations by their names in transformers. Megatron's `openai_gelu` is not used; it is compiled on first use."""
_ALLOWED: Mapping[str, tuple[object, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": tuple(_ACTIVATIONS),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
"""Keys of a config, each with the values that GPTModel supports."""


@dataclass(frozen=True)
class GPTOptions:
    """Keyword arguments of TransformerConfig (`transformer`) and GPTModel (`model`).

    Layout and dtypes are left to the program.
    """

    transformer: Mapping[str, Any]
    model: Mapping[str, Any]


def gpt_options(config: PretrainedConfig) -> GPTOptions:
    """Return the options for a model of `config`.

    Raises:
        UnsupportedError: if megatron-core would compute another function.
    """
    problems = [
        f'/{key} is "{getattr(config, key)}" (allowed: {", ".join(map(str, allowed))})'
        for key, allowed in _ALLOWED.items()
        if getattr(config, key, allowed[0]) not in allowed
    ]
    if not problems and config.embd_pdrop != config.resid_pdrop:
        problems.append(f"/embd_pdrop is {config.embd_pdrop} (allowed: {config.resid_pdrop}, as /resid_pdrop)")
    if problems:
        text = "; ".join(problems)
        raise UnsupportedError(f"config.json: megatron-core's GPTModel does not support {text}. Use another model")
    return GPTOptions(
        {
            "num_layers": config.n_layer,
            "hidden_size": config.n_embd,
            "num_attention_heads": config.n_head,
            "ffn_hidden_size": config.n_inner or 4 * config.n_embd,
            "layernorm_epsilon": config.layer_norm_epsilon,
            "activation_func": _ACTIVATIONS[config.activation_function],
            "hidden_dropout": config.resid_pdrop,
            "attention_dropout": config.attn_pdrop,
        },
        {
            "vocab_size": config.vocab_size,
            "max_sequence_length": config.n_positions,
            "position_embedding_type": "learned_absolute",
            "share_embeddings_and_output_weights": config.tie_word_embeddings,
        },
    )
