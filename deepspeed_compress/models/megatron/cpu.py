"""CPU replacements for the CUDA calls of megatron-core, for machines without CUDA."""

import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor


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
