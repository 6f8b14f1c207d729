"""Checks for engines of any kind: the version of torch, equal settings on all ranks, and settings without effect."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from packaging.version import Version
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.optim import Optimizer

from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.compression.kernels import FASTEST
from deepspeed_compress.config import SECTION, CompressConfig, total_steps
from deepspeed_compress.config.gradient_problems import WITH_TRAINER
from deepspeed_compress.config.schedules import OWN_MOMENTUM
from deepspeed_compress.errors import ConfigError, SeamError, UnsupportedError

OLDEST_TORCH = Version("2.7")
"""Oldest version of torch that works."""
_OF_A_RANK: Mapping[str, Any] = {
    **dict.fromkeys(("checkpointing", "communication", "islands", "lint", "rollout"), True),
    "monitor": {"path", "announce"},
}
"""Keys that may differ between ranks, such as paths and rates."""


_LIMITS: Mapping[str, str] = {
    "guard": "DeepSpeed: a step is left out where DeepSpeed computes the norm of its gradients",
    "auto": "DeepSpeed: DeepSpeed's engine is compared with, and other engines are not yet",
    "adaptive": "DeepSpeed: it is judged by losses, which DeepSpeed's engine knows",
    "activations": "DeepSpeed and Megatron-core: ranks of other engines do not share layers",
    "islands": "DeepSpeed: DeepSpeed divides the ranks into them",
    "checkpointing": "DeepSpeed: it writes what DeepSpeed's engine saves",
    "rollout": "DeepSpeed: it follows steps of DeepSpeed's engine (use rollout.Publisher)",
    "ownership": "DeepSpeed: it is the order of parameters in DeepSpeed's optimizer",
    "parallelism": "DeepSpeed: the engine was made without it",
    "schedule/phases": "DeepSpeed: settings of weights hold throughout",
}
"""Keys that have an effect with some engines only: these engines, and why not with others."""


def find_common_limits(
    config: CompressConfig, optimizer: Optimizer, device: torch.device, supported: Collection[str] = ()
) -> Iterator[str]:
    """Yield what is wrong with `config` without DeepSpeed, for this optimizer and device.

    Keys that are `supported` are left to the engine's own checks.
    """
    defaults = CompressConfig()
    used = {key for key in vars(config) if getattr(config, key) != getattr(defaults, key)}
    if any(phase.weights for phase in config.schedule.phases):
        used.add("schedule/phases")
    for key, why in _LIMITS.items():
        if key in used and key not in supported:
            yield f"/{SECTION}/{key} works only with {why}; remove the key"
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


def find_second_momentum(param_groups: Iterable[Mapping[str, Any]], config: CompressConfig) -> Iterator[str]:
    """Yield a problem, with the fix, if an optimizer with these groups would apply momentum a second time."""
    method = config.gradients.method
    if method not in OWN_MOMENTUM:
        return
    # The factor of the first moment, of which some optimizers have none.
    factors = {float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0)) for group in param_groups}
    if found := factors - {0.0}:
        yield (
            f"/{SECTION}/gradients/method {method} applies momentum, and the optimizer {max(found)} on top; allowed: "
            f"none. Write optimizer.params.betas: [0.0, 0.95] for Adam{WITH_TRAINER}; "
            "optimizer.params.momentum: 0.0 for SGD"
        )


def check_reduced_once(again: bool, config: CompressConfig, remedy: str) -> None:
    """Check that gradients that were reduced before in this step, if they are reduced `again`, get no second momentum.

    Raises:
        UnsupportedError: the method applies momentum. The message ends with `remedy`.
    """
    method = config.gradients.method
    if again and method in OWN_MOMENTUM:
        raise UnsupportedError(
            f'/{SECTION}/gradients/method: "{method}" applies momentum to gradients, but these were reduced before in '
            f"this optimizer step; reduce once per step: {remedy}"
        )


def check_torch(found: str) -> None:
    """Raise SeamError if PyTorch version `found` is too old. A preview of a release counts as that release."""
    if Version(found).release < OLDEST_TORCH.release:
        raise SeamError(
            f"PyTorch {found} is installed, but deepspeed_compress needs torch >={OLDEST_TORCH}; install it: "
            f"pip install 'torch>={OLDEST_TORCH}'"
        )


def check_alike(config: CompressConfig, document: Mapping[str, Any], group: ProcessGroup | None = None) -> None:
    """Check that all ranks of `group`, or of the job if None, have the same settings. Collective.

    Messages have no header, so ranks with other settings would misread them.

    Args:
        config: the section of this rank.
        document: the whole configuration of this rank.
        group: the ranks.

    Raises:
        ConfigError: on all ranks, if two of them differ.
    """
    own = config.model_dump(mode="json", exclude=dict(_OF_A_RANK))
    own["schedule"]["total_steps"] = total_steps(document, config.schedule)
    # Figures are computed over all ranks if they are written.
    own["monitor"]["path"] = "a path" if config.monitor.path else None
    first, *others = gather_objects(own, group)
    for rank, other in enumerate(others, 1):
        for path, value, different in _differences(first, other, f"/{SECTION}"):
            raise ConfigError(
                f"{path}: {value!r} on rank 0, but {different!r} on rank {rank} (allowed: the same on all "
                "ranks); give all of them the same configuration"
            )


def _differences(one: Any, other: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the values that differ between `one` and `other`, each with its JSON pointer."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key, value in one.items():
            yield from _differences(value, other[key], f"{path}/{key}")
    elif one != other:
        yield path, one, other
