"""Transformers causal LMs as megatron-core's GPTModel, and back. Read from megatron-core 0.16.1.

`gpt_options` makes the arguments with which GPTModel computes the same function. GPT-2 in transformers stores
transposed matrices (`Conv1D`), and the queries of all heads, then the keys, then the values. Megatron stores them head
by head, so tensor parallelism can cut the rows between any two heads. `without_cuda` replaces Megatron's CUDA calls on
machines without CUDA.
"""

import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from transformers import PretrainedConfig

from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.models.export import write_pretrained
from deepspeed_compress.models.sources import build_skeleton, open_source

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


def _identity(value: Tensor, heads: int) -> Tensor:
    return value


def _transpose(value: Tensor, heads: int) -> Tensor:
    return value.t()


def _by_head(value: Tensor, heads: int) -> Tensor:
    """Reorder rows from queries, keys and values of all heads to queries, keys and values of each head in turn."""
    return value.reshape(3, heads, -1, *value.shape[1:]).transpose(0, 1).reshape(value.shape)


def _by_kind(value: Tensor, heads: int) -> Tensor:
    """Return the inverse of `_by_head`."""
    return value.reshape(heads, 3, -1, *value.shape[1:]).transpose(0, 1).reshape(value.shape)


@dataclass(frozen=True)
class Conversion:
    """Conversion of a tensor to Megatron's layout and back. Both functions also take the number of heads."""

    to_megatron: Callable[[Tensor, int], Tensor] = _identity
    to_transformers: Callable[[Tensor, int], Tensor] = _identity


_PLAIN, _MATRIX, _HEADS = Conversion(), Conversion(_transpose, _transpose), Conversion(_by_head, _by_kind)
_HEAD_MATRIX = Conversion(
    lambda value, heads: _by_head(value.t(), heads),
    lambda value, heads: _by_kind(value, heads).t(),
)
_OUTSIDE: Mapping[str, str] = {
    "embedding.word_embeddings.weight": "transformer.wte.weight",
    "embedding.position_embeddings.weight": "transformer.wpe.weight",
    "decoder.final_layernorm.weight": "transformer.ln_f.weight",
    "decoder.final_layernorm.bias": "transformer.ln_f.bias",
}
"""Names of parameters outside of layers: Megatron's name to the name in transformers."""
_IN_LAYER: Mapping[str, tuple[str, Conversion, Conversion]] = {
    "input_layernorm": ("ln_1", _PLAIN, _PLAIN),
    "self_attention.linear_qkv": ("attn.c_attn", _HEAD_MATRIX, _HEADS),
    "self_attention.linear_proj": ("attn.c_proj", _MATRIX, _PLAIN),
    "pre_mlp_layernorm": ("ln_2", _PLAIN, _PLAIN),
    "mlp.linear_fc1": ("mlp.c_fc", _MATRIX, _PLAIN),
    "mlp.linear_fc2": ("mlp.c_proj", _MATRIX, _PLAIN),
}
"""Modules of a layer: Megatron's name to (name in transformers, conversion of the weight, conversion of the bias)."""


@dataclass(frozen=True)
class _Weight:
    """Parameter of this rank, with its `name` in the transformers model."""

    parameter: Parameter
    name: str
    conversion: Conversion
    group: ProcessGroup

    @property
    def split_dim(self) -> int | None:
        """Return the dimension that tensor parallelism splits; None if the parameter is replicated."""
        if not getattr(self.parameter, "tensor_model_parallel", False):
            return None
        return int(self.parameter.partition_dim)  # type: ignore[attr-defined]

    def part_of(self, whole: Tensor) -> Tensor:
        """Return this rank's part of `whole`."""
        if self.split_dim is None:
            return whole
        return whole.tensor_split(self.group.size(), self.split_dim)[self.group.rank()]

    def whole(self) -> Tensor:
        """Return the whole parameter. Collective in the tensor-parallel group."""
        own = self.parameter.detach()
        if self.split_dim is None or self.group.size() == 1:
            return own
        parts = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(parts, own.contiguous(), group=self.group)
        return torch.cat(parts, self.split_dim)


@torch.no_grad()
def load_weights(chunks: Sequence[Any], path: Path, config: PretrainedConfig, seed: int = 0) -> None:
    """Load the weights of this rank's model chunks.

    Args:
        chunks: chunks of GPTModel, bare or wrapped, made with `gpt_options(config)`. Create an optimizer that keeps
            fp32 master weights afterwards.
        path: a directory written by transformers' `save_pretrained`, or a config file.
        config: config of the model.
        seed: seed of new weights if `path` has none; they equal those of a single process.

    Raises:
        ConfigError: if a file or a tensor is missing or does not match the config.
        UnsupportedError: if the model is not a GPTModel of this config.
    """
    gpt_options(config)
    source = open_source(path, build_skeleton(config), seed)
    for weight in _weights(chunks, config):
        part = weight.part_of(weight.conversion.to_megatron(source(weight.name), config.n_head))
        if part.shape != weight.parameter.shape:
            raise UnsupportedError(
                f"{weight.name} has shape {tuple(part.shape)}, but GPTModel expects {tuple(weight.parameter.shape)}; "
                "make it with gpt_options, and with sizes that the tensor-parallel size divides"
            )
        weight.parameter.copy_(part)


def save_pretrained(chunks: Sequence[Any], config: PretrainedConfig, directory: Path) -> None:
    """Write the weights of GPTModel and `config` as transformers' save_pretrained does. Collective.

    The weights are those that the model computes with, in their dtype. If they are gathered late or compressed, call
    `start_param_sync(force_sync=True)` on each chunk and `compression.synchronise()` first.
    """
    from megatron.core import parallel_state

    first = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    leads = [False] * dist.get_world_size()
    dist.all_gather_object(leads, first and parallel_state.get_tensor_model_parallel_rank() == 0)
    leaders = [rank for rank, lead in enumerate(leads) if lead]
    like = next(_unwrap(chunks[0]).parameters())
    write_pretrained(_whole_weights(chunks, config), leaders, config, directory, like)


@torch.no_grad()
def _whole_weights(chunks: Sequence[Any], config: PretrainedConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) of this stage's weights. Collective in the tensor-parallel group."""
    for weight in _weights(chunks, config):
        yield weight.name, weight.conversion.to_transformers(weight.whole(), config.n_head)


def _weights(chunks: Sequence[Any], config: PretrainedConfig) -> Iterator[_Weight]:
    for model in map(_unwrap, chunks):
        numbers = {str(index): layer.layer_number - 1 for index, layer in enumerate(model.decoder.layers)}
        for name, parameter in model.named_parameters():
            yield _Weight(parameter, *_find(name, numbers, config), model.pg_collection.tp)


def _find(name: str, numbers: Mapping[str, int], config: PretrainedConfig) -> tuple[str, Conversion]:
    """Return the name in transformers of Megatron's parameter `name`, and its conversion.

    `numbers` maps the index of a layer in this chunk to its index in the whole model.
    """
    if name in _OUTSIDE:
        return _OUTSIDE[name], _PLAIN
    if name == "output_layer.weight":
        # The last stage has its own copy of a tied embedding.
        return ("transformer.wte.weight" if config.tie_word_embeddings else "lm_head.weight"), _PLAIN
    index, _, rest = name.removeprefix("decoder.layers.").partition(".")
    module, _, kind = rest.rpartition(".")
    if index not in numbers or module not in _IN_LAYER or kind not in ("weight", "bias"):
        known = ", ".join((*_OUTSIDE, *(f"decoder.layers.N.{one}" for one in _IN_LAYER)))
        raise UnsupportedError(
            f"{name}: GPT-2 has no such parameter (allowed: {known}); build GPTModel with get_gpt_layer_local_spec"
        )
    module_name, weight, bias = _IN_LAYER[module]
    return f"transformer.h.{numbers[index]}.{module_name}.{kind}", weight if kind == "weight" else bias


def _unwrap(chunk: Any) -> Any:
    """Return the GPTModel inside the wrappers of `chunk`."""
    while not hasattr(chunk, "decoder"):
        chunk = chunk.module
    return chunk


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
        (torch.cuda, "current_stream", lambda *args: _STREAM),
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


_STREAM = _Stream()


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
