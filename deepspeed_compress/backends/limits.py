"""Checks of settings that only DeepSpeed supports. All problems are reported at once, before anything is attached."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from deepspeed_compress.compression.kernels import FASTEST
from deepspeed_compress.config import SECTION, CompressConfig
from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.session.momentum import find_second_momentum


def _other_ownership(config: CompressConfig) -> str | None:
    return None if config.ownership == "contiguous" else config.ownership


def _phases_of_weights(config: CompressConfig) -> object:
    return next((phase.weights for phase in config.schedule.phases if phase.weights), None)


_LIMITS: tuple[tuple[str, Callable[[CompressConfig], object], str], ...] = (
    ("guard", lambda config: config.guard, "a step is left out where DeepSpeed computes the norm of its gradients"),
    ("auto", lambda config: config.auto, "DeepSpeed's engine is compared with, and other engines are not yet"),
    ("adaptive", lambda config: config.adaptive, "it is judged by losses, which DeepSpeed's engine knows"),
    ("activations", lambda config: config.activations, "it changes layers and stages of DeepSpeed"),
    ("islands", lambda config: config.islands, "DeepSpeed divides the ranks into them"),
    ("checkpointing", lambda config: config.checkpointing, "it writes what DeepSpeed's engine saves"),
    (
        "rollout",
        lambda config: config.rollout,
        "it follows steps of DeepSpeed's engine (use rollout.Publisher)",
    ),
    ("ownership", _other_ownership, "it is the order of parameters in DeepSpeed's optimizer"),
    ("parallelism", lambda config: config.parallelism, "the engine was made without it"),
    ("schedule/phases", _phases_of_weights, "settings of weights hold throughout"),
)
"""Keys, functions that return a value other than None if they are in use, and why they would have no effect."""


def find_common_limits(config: CompressConfig, optimizer: Optimizer, device: torch.device) -> Iterator[str]:
    """Yield what is wrong with `config` without DeepSpeed, for this optimizer and device."""
    for key, used, why in _LIMITS:
        if used(config) is not None:
            yield f"/{SECTION}/{key} works only with DeepSpeed: {why}; remove the key"
    yield from find_second_momentum(optimizer.param_groups, config)
    if device.type not in FASTEST:
        yield f"it is on {device}, for which there are no kernels (allowed: {', '.join(FASTEST)})"


def find_foreign_optimizer(optimizer: Optimizer, parameters: Iterable[Parameter]) -> Iterator[str]:
    """Yield a problem if `optimizer` updates none of `parameters`."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in stepped for parameter in parameters):
        yield "the optimizer updates none of its parameters; pass the optimizer that does"


def refuse(engine: Any, problems: Iterable[str]) -> None:
    """Raise an UnsupportedError that names all `problems`, if there are any."""
    found = list(problems)
    if found:
        text = "\n".join(f"- {problem}" for problem in found)
        raise UnsupportedError(f"this {type(engine).__name__} cannot be compressed:\n{text}")
