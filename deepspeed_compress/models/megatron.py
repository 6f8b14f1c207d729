"""Sizes of a GPT-2 of transformers as arguments of megatron-core's GPTModel, and Megatron on the CPU.

`gpt_options` makes the arguments with which GPTModel computes the same function. Weights are not converted: Megatron
Bridge does that. `without_cuda` replaces Megatron's CUDA calls on machines without CUDA. Read from version 0.16.1.
"""

import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
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


@contextmanager
def without_cuda() -> Iterator[None]:
    """Allow Megatron models to be imported, built and trained on the CPU inside this context.

    With CUDA, this does nothing. Run other code outside of it, because tensors claim to be CUDA tensors inside.
    """
    with ExitStack() as stack:
        for owner, name, replacement in () if torch.cuda.is_available() else _replacements():
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


@functools.cache
def _replacements() -> tuple[tuple[Any, str, Any], ...]:
    with warnings.catch_warnings():
        # Megatron warns that Transformer Engine and Apex are not installed.
        warnings.simplefilter("ignore")
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer.moe import moe_utils, token_dispatcher
    # Megatron reads this name, which only exists with Transformer Engine.
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    makers = ("tensor", "zeros", "empty", "arange", "full")
    return (
        *((torch, name, _on_cpu(getattr(torch, name))) for name in makers),
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "synchronize", lambda *args: None),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "current_stream", lambda *args: _Stream()),
        (torch.cuda, "stream", nullcontext),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _as_on_host),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", torch.get_rng_state),
        (torch.Tensor, "cuda", lambda tensor, *args, **options: tensor),
        (torch.Tensor, "type", _as_cuda_type(torch.Tensor.type)),
        # The CPU has a single random state; Megatron would log this in every layer.
        (logging.getLogger(random.__name__), "disabled", True),
        (random, "_set_cuda_rng_state", lambda state, *args, **options: torch.set_rng_state(state)),
        (random, "_get_cuda_rng_state", lambda *args, **options: torch.get_rng_state()),
    )


class _Stream:
    """Stand-in for a stream or an event of CUDA. All work is done at once."""

    def wait_stream(self, stream: object) -> None: ...

    def record_event(self) -> "_Stream":
        return self

    def synchronize(self) -> None: ...


def _as_on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> Tensor:
        return make(*args, **{**options, "device": "cpu"} if options.get("device") == "cuda" else options)

    return made


def _as_cuda_type(kind: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tensor, *args, **options: (
        kind(tensor, *args, **options) if args or options else kind(tensor).replace("torch.", "torch.cuda.")
    )
