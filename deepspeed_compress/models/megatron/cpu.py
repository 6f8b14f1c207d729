"""Megatron-core without CUDA: what it asks of CUDA is answered for the CPU. Elsewhere nothing changes."""

import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

__all__ = ["without_cuda"]


@contextmanager
def without_cuda() -> Iterator[None]:
    """Within it Megatron may be imported, made and trained, also where there is no CUDA: its tensors are on the CPU.

    Other code had better run outside: tensors say there that they are CUDA's.
    """
    with ExitStack() as stack:
        for owner, name, stand_in in () if torch.cuda.is_available() else _stand_ins():
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


@functools.cache
def _stand_ins() -> tuple[tuple[Any, str, Any], ...]:
    with warnings.catch_warnings():
        # Of Transformer Engine and Apex, which are not installed.
        warnings.simplefilter("ignore")
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer.moe import moe_utils
    # A name that it lacks without Transformer Engine.
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    makers = ("tensor", "zeros", "empty", "arange", "full")
    return (
        *((torch, name, _there(getattr(torch, name))) for name in makers),
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "synchronize", lambda *args: None),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", torch.get_rng_state),
        (torch.Tensor, "cuda", lambda tensor, *args, **options: tensor),
        (torch.Tensor, "type", _named(torch.Tensor.type)),
        # There is one state of random numbers, which its log wonders at in every layer.
        (logging.getLogger(random.__name__), "disabled", True),
        (random, "_set_cuda_rng_state", lambda state, *args, **options: torch.set_rng_state(state)),
        (random, "_get_cuda_rng_state", lambda *args, **options: torch.get_rng_state()),
    )


def _there(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> Tensor:
        return make(*args, **{**options, "device": "cpu"} if options.get("device") == "cuda" else options)

    return made


def _named(kind: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tensor, *args, **options: (
        kind(tensor, *args, **options) if args or options else kind(tensor).replace("torch.", "torch.cuda.")
    )
