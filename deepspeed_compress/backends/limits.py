"""Checks of settings that only DeepSpeed supports. All problems are reported at once, before anything is attached."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Limit:
    """Key that has an effect with some engines only.

    Attributes:
        key: the key.
        used: returns a value other than None if the key is in use.
        why: reason why it would have no effect.
        engines: the engines with which it works.
    """

    key: str
    used: Callable[[CompressConfig], object]
    why: str
    engines: str = "DeepSpeed"


_LIMITS = (
    _Limit(
        "guard", lambda config: config.guard, "a step is left out where DeepSpeed computes the norm of its gradients"
    ),
    _Limit("auto", lambda config: config.auto, "DeepSpeed's engine is compared with, and other engines are not yet"),
    _Limit("adaptive", lambda config: config.adaptive, "it is judged by losses, which DeepSpeed's engine knows"),
    _Limit(
        "activations",
        lambda config: config.activations,
        "ranks of other engines do not share layers",
        engines="DeepSpeed and Megatron-core",
    ),
    _Limit("islands", lambda config: config.islands, "DeepSpeed divides the ranks into them"),
    _Limit("checkpointing", lambda config: config.checkpointing, "it writes what DeepSpeed's engine saves"),
    _Limit(
        "rollout",
        lambda config: config.rollout,
        "it follows steps of DeepSpeed's engine (use rollout.Publisher)",
    ),
    _Limit("ownership", _other_ownership, "it is the order of parameters in DeepSpeed's optimizer"),
    _Limit("parallelism", lambda config: config.parallelism, "the engine was made without it"),
    _Limit("schedule/phases", _phases_of_weights, "settings of weights hold throughout"),
)


def find_common_limits(
    config: CompressConfig, optimizer: Optimizer, device: torch.device, supported: Collection[str] = ()
) -> Iterator[str]:
    """Yield what is wrong with `config` without DeepSpeed, for this optimizer and device.

    Keys that are `supported` are left to the engine's own checks.
    """
    for limit in _LIMITS:
        if limit.key not in supported and limit.used(config) is not None:
            yield f"/{SECTION}/{limit.key} works only with {limit.engines}: {limit.why}; remove the key"
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
